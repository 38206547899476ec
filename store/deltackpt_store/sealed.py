"""Small files that prove themselves: magic, version byte, msgpack, and BLAKE3-256 of all before."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from deltackpt_store.manifest_io import digest_of

_DIGEST = 32
_T = TypeVar("_T")


def seal(magic: bytes, value: object) -> bytes:
    """The content of a file that holds `value`. `magic` ends with the version byte."""
    body = magic + msgspec.msgpack.encode(value)
    return body + digest_of(body)


def unseal(data: bytes, magic: bytes, kind: type[_T]) -> _T:
    """The value in a file of this magic and version. ValueError, with the reason, when damaged."""
    if not _holds(data) or not data.startswith(magic):
        raise ValueError("its digest does not match its content")
    try:
        return msgspec.msgpack.decode(data[len(magic) : -_DIGEST], type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def is_newer(data: bytes, magic: bytes) -> bool:
    """Whether it is an intact file of another version than `magic`."""
    return (
        data.startswith(magic[:-1])
        and data[:-_DIGEST][len(magic) - 1 : len(magic)] != magic[-1:]
        and _holds(data)
    )


def _holds(data: bytes) -> bool:
    return digest_of(data[:-_DIGEST]) == data[-_DIGEST:]

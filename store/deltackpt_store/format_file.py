"""The FORMAT file: what a directory must hold to be a store, and what it takes to use it.

Two lines of ASCII: a JSON object, and the BLAKE3-256 (hex) of the first line including its
newline. Later formats keep this rule, so that an older package can tell "newer" from "damaged".
"""

from __future__ import annotations

import re
import secrets
from typing import Literal

import msgspec
from blake3 import blake3

from deltackpt_store.errors import CorruptionError, UnsupportedFormatError

FORMAT_NAME = "FORMAT"
FORMAT_VERSION = 1
MAX_FORMAT_BYTES = 64 * 1024
DIGEST = "blake3-256"
KNOWN_FEATURES: frozenset[str] = frozenset()

REMAKE = "run `deltackpt repair` on the store: it makes FORMAT anew"

Purpose = Literal["read", "write", "gc"]
_UUID = re.compile(r"[0-9a-f]{32}\Z")


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """Content of FORMAT. `read`, `write` and `gc` name features without which that is refused."""

    deltackpt: int = FORMAT_VERSION
    store: str = ""
    digest: str = DIGEST
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    gc: tuple[str, ...] = ()

    @property
    def uuid(self) -> bytes:
        """The store's 16 random bytes, repeated in the header of its packs."""
        return bytes.fromhex(self.store)

    def require(self, purpose: Purpose, path: str) -> None:
        """UnsupportedFormatError when this package lacks a feature needed for `purpose`."""
        needed: dict[Purpose, tuple[str, ...]] = {
            "read": self.read,
            "write": (*self.read, *self.write),
            "gc": (*self.read, *self.write, *self.gc),
        }
        missing = sorted(set(needed[purpose]) - KNOWN_FEATURES)
        if missing:
            raise UnsupportedFormatError(
                f"store {path} needs {', '.join(missing)} to {purpose}",
                hint="upgrade deltackpt",
                path=path,
            )


def new_format() -> Format:
    """The description of a new store of the present format, with a fresh uuid."""
    return Format(store=secrets.token_hex(16))


def encode_format(value: Format) -> bytes:
    line = msgspec.json.encode(value) + b"\n"
    return line + blake3(line).hexdigest().encode() + b"\n"


def decode_format(data: bytes, path: str) -> Format:
    """Parse FORMAT at `path`; damaged and newer are told apart."""
    line, newline, check = data.partition(b"\n")
    if blake3(line + newline).hexdigest().encode() + b"\n" != check:
        raise CorruptionError(
            f"{path} is damaged: its digest does not match its content",
            kind="damaged-format",
            hint=REMAKE,
            path=path,
        )
    try:
        version = msgspec.json.decode(line, type=_Version).deltackpt
        if version != FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"store format {version} at {path}, this package knows {FORMAT_VERSION}",
                hint="upgrade deltackpt",
                path=path,
                version=version,
            )
        value = msgspec.json.decode(line, type=Format)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if isinstance(error, UnsupportedFormatError):
            raise
        raise CorruptionError(
            f"{path} is damaged: {error}", kind="damaged-format", path=path
        ) from error
    if value.digest != DIGEST:
        raise UnsupportedFormatError(
            f"store {path} uses the digest {value.digest!r}", hint="upgrade deltackpt", path=path
        )
    if not _UUID.match(value.store):
        raise CorruptionError(f"{path} has no uuid", kind="damaged-format", path=path)
    value.require("read", path)
    return value


class _Version(msgspec.Struct):
    deltackpt: int

"""Generation records: what a garbage collection is about to delete.

``gc/<20 digits>`` is ``DCKPTGN`` + version byte + msgpack map + BLAKE3-256 of all before, created
if absent, durable. Only the newest counts: what it condemns is treated as absent by every writer
that has read it. A later collection names again what still lies there and is not needed; a record
that condemns nothing ends a collection that has pardoned something.

``gc/<20 digits>.copy`` holds the same bytes, for the case that the record is damaged or lost:
nothing else tells which commits were collected. It is made when a collection ends, and not vital.
"""

from __future__ import annotations

import contextlib

import msgspec

from deltackpt_store.errors import (
    CorruptionError,
    DeltackptError,
    StorageError,
    UnsupportedFormatError,
)
from deltackpt_store.fileio import FileIO, publish_bytes, read_file
from deltackpt_store.names import check_number, is_name, is_pack_name, number_name, parse_number
from deltackpt_store.oserror import DAMAGE, storage_error
from deltackpt_store.reserve import with_reserve
from deltackpt_store.sealed import is_newer, seal, unseal

_MAGIC = b"DCKPTGN\x01"
_MAX_BYTES = 256 * 1024 * 1024
_COPY = ".copy"


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One record. `number` counts from 1; 0 stands for a store that was never collected.

    `boundary` is, per run, the largest commit number whose record has been or may be removed: no
    commit of that number or a smaller one counts as made any more.
    `bases` names, per run, a commit of which compaction has stored every chunk without references:
    a writer of the run may code against these from then on. Nothing depends on it.
    """

    number: int = 0
    packs: frozenset[str] = frozenset()
    manifests: frozenset[bytes] = frozenset()
    boundary: dict[str, int] = {}
    bases: dict[str, int] = {}


def newest_number(io: FileIO, root: str) -> int:
    """Number of the newest generation, 0 before the first. OSError when ``gc`` cannot be read."""
    return max((number for name in io.list(f"{root}/gc")
                if (number := parse_number(name.removesuffix(_COPY))) is not None),
               default=0)  # fmt: skip


def read_generation(io: FileIO, root: str, number: int) -> Generation:
    """The record of that number, from its copy when it is damaged, lost or unreadable
    (CorruptionError, UnsupportedFormatError, StorageError)."""
    if not number:
        return Generation()
    path = f"{root}/gc/{number_name(number)}"
    try:
        return _decode(_read(io, path), number, path)
    except (CorruptionError, StorageError):
        with contextlib.suppress(CorruptionError, UnsupportedFormatError, StorageError):
            return _decode(_read(io, path + _COPY), number, path)
        raise


def damaged_generations(io: FileIO, root: str) -> list[tuple[str, DeltackptError]]:
    """What is damaged of the newest record and its copy: paths in the store. OSError."""
    found: list[tuple[str, DeltackptError]] = []
    number = newest_number(io, root)
    for name in (number_name(number), number_name(number) + _COPY) if number else ():
        try:
            _sound(io, root, f"gc/{name}")
        except CorruptionError as error:
            found.append((f"gc/{name}", error))
        except UnsupportedFormatError:
            continue
        except StorageError as error:
            if error.errno in DAMAGE:  # else it is not there, or the system refuses it
                found.append((f"gc/{name}", error))
    return found


def twin_of(io: FileIO, root: str, path: str) -> tuple[str, bytes] | None:
    """Of a record its copy, and the other way round: path in the store, content; None when it is
    not there or damaged."""
    twin = path.removesuffix(_COPY) if path.endswith(_COPY) else path + _COPY
    with contextlib.suppress(CorruptionError, UnsupportedFormatError, StorageError):
        return twin, _sound(io, root, twin)
    return None


def _sound(io: FileIO, root: str, path: str) -> bytes:
    """The content of a record, or of a copy, that can be decoded."""
    data = _read(io, f"{root}/{path}")
    number = parse_number(path.removeprefix("gc/").removesuffix(_COPY)) or 0
    _decode(data, number, f"{root}/{path}")
    return data


def _read(io: FileIO, path: str) -> bytes:
    try:
        return read_file(io, path, _MAX_BYTES)
    except OSError as error:
        raise storage_error(error, "read the generation", path) from error


def _decode(data: bytes, number: int, path: str) -> Generation:
    if is_newer(data, _MAGIC):
        raise UnsupportedFormatError(
            f"generation {path} has a format version that this package does not know",
            hint="upgrade deltackpt", path=path,
        )  # fmt: skip
    try:
        generation = unseal(data, _MAGIC, Generation)
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    names = [*map(is_pack_name, generation.packs), *map(is_name, generation.boundary)]
    names += map(is_name, generation.bases)
    if generation.number != number or not all(names):
        raise _damaged(path, "it holds impossible names")
    return generation


def publish_generation(io: FileIO, root: str, generation: Generation) -> None:
    """Create the record, durably. OSError; FileExistsError when another collection was faster;
    ConflictError (kind ``no-number``) when no larger number is left.

    On a full disk the reserve is given up for it.
    """
    check_number(generation.number, "gc")
    path = f"{root}/gc/{number_name(generation.number)}"
    with_reserve(io, root, lambda: publish_bytes(io, path, seal(_MAGIC, generation)))


def tidy_generations(io: FileIO, root: str, newest: int) -> None:
    """Copy the newest record and remove the earlier ones, which no longer count. Best effort; to be
    called when no collection is under way."""
    path = f"{root}/gc/{number_name(newest)}"
    with contextlib.suppress(CorruptionError, UnsupportedFormatError, OSError):
        if newest and not io.exists(path + _COPY):
            data = _read(io, path)
            _decode(data, newest, path)
            publish_bytes(io, path + _COPY, data)
    with contextlib.suppress(OSError):
        for name in io.list(f"{root}/gc"):
            number = parse_number(name.removesuffix(_COPY))
            if number is not None and number < newest:
                with contextlib.suppress(OSError):
                    io.unlink(f"{root}/gc/{name}")


def _damaged(path: str, what: str) -> CorruptionError:
    return CorruptionError(
        f"generation {path} is damaged: {what}",
        kind="damaged-generation",
        hint="run `deltackpt gc`, which starts a new one",
        path=path,
    )

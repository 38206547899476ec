"""Small record files of a store: listing and reading them with typed errors."""

from __future__ import annotations

from typing import NamedTuple

from deltackpt_store.errors import CorruptionError, DeltackptError, NotFoundError
from deltackpt_store.fileio import FileIO, read_buffer
from deltackpt_store.manifest import Commit
from deltackpt_store.names import RETIRED_SUFFIX, number_name
from deltackpt_store.oserror import DAMAGE, hint_for, storage_error


class Damaged(NamedTuple):
    """A commit or pin that could not be read: its path relative to the store, and why."""

    path: str
    error: DeltackptError


class RecordFiles:
    """Access to the files of the store at `path` (absolute), through `io`. Any thread."""

    def __init__(self, path: str, io: FileIO) -> None:
        self.path = path
        self.io = io

    def _list(self, relative: str) -> list[str] | None:
        """Names in a directory of the store, None when it does not exist."""
        path = f"{self.path}/{relative}"
        try:
            return self.io.list(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(error, "list", path) from error

    def _read(self, relative: str, limit: int, what: str) -> bytes:
        return bytes(self._read_buffer(relative, limit, what))

    def _read_buffer(self, relative: str, limit: int, what: str) -> memoryview:
        path = f"{self.path}/{relative}"
        try:
            return read_buffer(self.io, path, limit)
        except FileNotFoundError as error:
            hint = hint_for(error, path)
            raise NotFoundError(f"{what} {relative} is not there", hint=hint, path=path) from error
        except OSError as error:
            if error.errno in DAMAGE:
                raise CorruptionError(
                    f"{what} {relative} cannot be read: {error.strerror or error}",
                    kind=f"damaged-{what}",
                    path=relative,
                ) from error
            raise storage_error(error, f"read the {what}", path) from error


def unfindable(what: str, path: str, hint: str) -> CorruptionError:
    """The error for a file that is listed, also afterwards, and cannot be found: a link that leads
    nowhere, a stale directory of a network file system."""
    return CorruptionError(
        f"{what} {path} is listed and cannot be found",
        kind=f"damaged-{what}", path=path, hint=hint,
    )  # fmt: skip


def is_listed(io: FileIO, root: str, run: str, number: int) -> bool:
    """Whether the commit's record is there and has no mark of retirement. StorageError."""
    path = f"{root}/runs/{run}/{number_name(number)}"
    try:
        return not io.exists(path + RETIRED_SUFFIX) and io.exists(path)
    except OSError as error:
        raise storage_error(error, "look for the commit", path) from error


def retired(commit: Commit, hint: str) -> NotFoundError:
    """The error (kind ``retired``) for a commit that was found, and is no longer listed."""
    return NotFoundError(
        f"step {commit.step} of run {commit.run!r} was removed by retention",
        kind="retired", hint=hint, run=commit.run, step=commit.step,
    )  # fmt: skip


def some_of(names: list[str]) -> str:
    """A few of the names, for an error that tells what exists."""
    shown = ", ".join(names[:8])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 8 else shown

"""Exit codes: one per class of outcome, so that a script need not read messages."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the exit code says. Numbers are a promise; new ones may be added."""

    OK = 0
    FINDING = 1  # the command worked and found a difference
    USAGE = 2  # wrong option or value, or a run, step or pin that does not exist
    PARTIAL = 3  # done, but not for everything: what is missing is listed
    NOT_A_STORE = 10
    BUSY = 11  # somebody else holds or made it
    CORRUPT = 12
    UNSUPPORTED = 13  # the store needs another version of this program
    STORAGE = 14  # the file system refused: full, no permission, I/O error
    FAILED = 70  # too little memory, or an error of this program; nothing was found out
    INTERRUPTED = 130  # Ctrl-C
    BROKEN_PIPE = 141  # the reader of our output went away
    TERMINATED = 143  # SIGTERM


def exit_code(error: Exception) -> Exit | None:
    """The exit code for `error`, or None when it is not one of the project's own errors, nor a lack
    of memory.

    Imports the store's error classes only when called, which costs nothing: whoever raised one
    has imported them.
    """
    if isinstance(error, MemoryError):
        return Exit.FAILED
    from deltackpt_store import errors

    if isinstance(error, errors.NotFoundError):
        return Exit.NOT_A_STORE if error.kind == "not-a-store" else Exit.USAGE
    for kind, code in (
        (errors.CorruptionError, Exit.CORRUPT),
        (errors.UnsupportedFormatError, Exit.UNSUPPORTED),
        (errors.ConflictError, Exit.BUSY),
        (errors.StorageError, Exit.STORAGE),
        (errors.InvalidInputError, Exit.USAGE),
        (errors.DeltackptError, Exit.FAILED),
    ):
        if isinstance(error, kind):
            return code
    return None

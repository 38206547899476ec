"""The errors of the project, by what a caller would do about them. See `deltackpt_store`."""

from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    StateError,
    StorageError,
    UnsupportedFormatError,
    WriterError,
)

__all__ = [
    "ConflictError",
    "CorruptionError",
    "DeltackptError",
    "InvalidInputError",
    "MismatchError",
    "NotFoundError",
    "StateError",
    "StorageError",
    "UnsupportedFormatError",
    "WriterError",
]

"""The errors of the project: by what the one who catches them would do. See `deltackpt_store`."""

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

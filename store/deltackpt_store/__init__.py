"""deltackpt_store: the content-addressed checkpoint store (bytes only, no torch)."""

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
from deltackpt_store.fileio import FileIO
from deltackpt_store.history import Commits
from deltackpt_store.manifest import (
    Commit,
    ExtentSpec,
    Layout,
    Manifest,
    Snapshot,
    TensorView,
)
from deltackpt_store.pins import Pin
from deltackpt_store.reader import ChunkReader
from deltackpt_store.records import Damaged
from deltackpt_store.store import Store

__all__ = [
    "ChunkReader",
    "Commit",
    "Commits",
    "ConflictError",
    "CorruptionError",
    "Damaged",
    "DeltackptError",
    "ExtentSpec",
    "FileIO",
    "InvalidInputError",
    "Layout",
    "Manifest",
    "MismatchError",
    "NotFoundError",
    "Pin",
    "Snapshot",
    "StateError",
    "StorageError",
    "Store",
    "TensorView",
    "UnsupportedFormatError",
    "WriterError",
]

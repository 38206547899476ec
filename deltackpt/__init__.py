"""Checkpoints for PyTorch that copy and store only what changed, and prove every byte on restore.

The hook for a training loop is :class:`Checkpointer`; :func:`load` and :func:`steps` read a store
without live objects. Errors are those of :mod:`deltackpt.errors`.
"""

from . import errors
from ._version import __version__
from .checkpointer import Checkpointer
from .compaction import Compact
from .events import (
    Committed,
    Compacted,
    CompactionFailed,
    Event,
    Failed,
    Observer,
    Preempted,
    Skipped,
    Staged,
    StoreCompacted,
)
from .load import load, steps
from .policy import Every, Keep
from .repairing import repair
from .report import Save, SaveReport
from .restore import Restored, restore_into

__all__ = [
    "Checkpointer",
    "Committed",
    "Compact",
    "Compacted",
    "CompactionFailed",
    "Event",
    "Every",
    "Failed",
    "Keep",
    "Observer",
    "Preempted",
    "Restored",
    "Save",
    "SaveReport",
    "Skipped",
    "Staged",
    "StoreCompacted",
    "__version__",
    "errors",
    "load",
    "repair",
    "restore_into",
    "steps",
]

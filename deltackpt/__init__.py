"""Checkpoints for PyTorch that copy and store only what changed, and prove every byte on restore.

The hook for a training loop is :class:`Checkpointer`; :func:`load` and :func:`steps` read a store
without live objects. Errors are those of :mod:`deltackpt.errors`.
"""

from deltackpt_store import errors

from ._version import __version__
from .checkpointer import Checkpointer
from .events import Committed, Compacted, Event, Failed, Observer, Preempted, Skipped, Staged
from .load import load, steps
from .policy import Every, Keep
from .repairing import repair
from .report import Save, SaveReport
from .restore import Restored, restore_into

__all__ = [
    "Checkpointer",
    "Committed",
    "Compacted",
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
    "__version__",
    "errors",
    "load",
    "repair",
    "restore_into",
    "steps",
]

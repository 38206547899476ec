"""Command line of deltackpt, and the same from Python: look into a store, compare steps, report.

    import deltackpt_tools as tools

    tools.diff("runs/store", "@100", "@200", values=True).to_dataframe()

Every function takes the path of a store (or an open `Store`) and returns frozen values with
`to_dict()`, and `to_dataframe()` where pandas is installed. Nothing here knows torch. A name is
imported when it is first used, so that the command line starts quickly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltackpt_tools.advice import Advice, advise
    from deltackpt_tools.blaming import Blame, blame
    from deltackpt_tools.changes import Diff, ModuleChange, TensorChange, ValueChange, ValueStats
    from deltackpt_tools.diffing import diff
    from deltackpt_tools.logbook import Log, LoggedStep, log
    from deltackpt_tools.overview import Step, Usages, du, show
    from deltackpt_tools.pieces import ChunkDetails, TensorDetails, show_chunk, show_tensor
    from deltackpt_tools.reporting import Report, report
    from deltackpt_tools.watching import RunState, StoreState, look, watch

_HOME = {
    "advise": "advice", "Advice": "advice", "blame": "blaming", "Blame": "blaming",
    "diff": "diffing", "Diff": "changes", "ModuleChange": "changes", "TensorChange": "changes",
    "ValueChange": "changes", "ValueStats": "changes", "log": "logbook", "Log": "logbook",
    "LoggedStep": "logbook", "show": "overview", "Step": "overview", "du": "overview",
    "Usages": "overview", "show_tensor": "pieces", "TensorDetails": "pieces",
    "show_chunk": "pieces", "ChunkDetails": "pieces", "report": "reporting",
    "Report": "reporting", "watch": "watching", "look": "watching", "StoreState": "watching",
    "RunState": "watching",
}  # fmt: skip

__all__ = [
    "Advice",
    "Blame",
    "ChunkDetails",
    "Diff",
    "Log",
    "LoggedStep",
    "ModuleChange",
    "Report",
    "RunState",
    "Step",
    "StoreState",
    "TensorChange",
    "TensorDetails",
    "Usages",
    "ValueChange",
    "ValueStats",
    "advise",
    "blame",
    "diff",
    "du",
    "log",
    "look",
    "report",
    "show",
    "show_chunk",
    "show_tensor",
    "watch",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

"""What the training thread hands to the staging thread, and what becomes known of it on the way."""

from __future__ import annotations

import dataclasses
from typing import Any

from deltackpt_store.client import WriterClient
from deltackpt_store.manifest import Commit

from .capture import Capture
from .report import SaveProgress
from .sources import Sign
from .stage import Staging
from .witness import Witness


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the training thread hands over besides the captured state."""

    step: int
    metrics: dict[str, float]
    environment: bytes
    overwrite: bool
    overlap: bool
    """Whether training goes on while live tensors are read."""
    skipped: int
    """Saves that were dropped since the last accepted one."""


@dataclasses.dataclass(slots=True, eq=False)
class Task:
    """Something the staging thread does with a capture, until the task ends.

    It is a save, or (`restored`) the preparation of the change table after a restore.
    """

    progress: SaveProgress
    deadline: float
    """In seconds of the pipeline's clock."""
    capture: Capture
    request: Request | None = None
    restored: Commit | None = None
    versions: dict[int, Sign] = dataclasses.field(default_factory=dict[int, Sign])
    marks: Any = None
    witness: Witness | None = None
    taken: bool = False
    """The staging thread has begun."""
    client: WriterClient | None = None
    save: int = 0
    """The writer's number for it."""
    names_parent: bool = False
    staging: Staging | None = None
    committed: bool = False
    """It is durable, and about to be reported so."""
    given_up: bool = False
    """Its time is over, and its writer is being ended: what fails by that is not its error."""

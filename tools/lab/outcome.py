"""What a trial has found: figures, and violations of what is promised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """`figures` count what was done; any of `violations` makes the lab fail."""

    trial: str
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    violations: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    def count(self, name: str, more: int = 1) -> None:
        self.figures[name] = self.figures.get(name, 0) + more

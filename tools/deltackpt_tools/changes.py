"""What differs between two steps, as typed values. Sizes are bytes; nothing here reads a store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from deltackpt_tools.arguments import check_depth
from deltackpt_tools.frames import Record, frame
from deltackpt_tools.module_paths import Depth, folding, natural

Change = Literal["added", "removed", "renamed", "reshaped", "changed", "unproven"]
"""``reshaped``: dtype, shape or another attribute differs. ``unproven``: the two steps cut their
bytes into chunks of different size, so that only reading them tells (`values`)."""

_ORDER = {"removed": 0, "added": 1, "reshaped": 2, "renamed": 3, "changed": 4, "unproven": 4}


@dataclass(frozen=True, slots=True)
class ValueStats(Record):
    """How the elements of one tensor differ. Only chunks that differ were read.

    Differences are of elements that are finite on both sides. `rms` is over all elements of the
    tensor; `relative_update` is the norm of the difference over the norm of the old elements, both
    over the chunks that differ (all of them, in ordinary training); None when that is 0.
    `new_nan` and `new_inf` count elements that were not NaN (infinite) before and are now.
    The last fields are None for a dtype that is compared by its bits only.
    """

    elements: int
    changed_elements: int
    max_difference: float | None
    rms: float | None
    relative_update: float | None
    new_nan: int | None
    new_inf: int | None

    @property
    def share(self) -> float:
        return self.changed_elements / self.elements if self.elements else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**Record.to_dict(self), "share": self.share}


@dataclass(frozen=True, slots=True)
class TensorChange(Record):
    """One tensor that differs. `bytes` and `chunks` are the new tensor's (the old one's when it was
    removed); a chunk counts for every tensor that looks at it. `old_*` is None when it was added,
    `new` attributes are None when it was removed."""

    path: str
    change: Change
    old_path: str | None
    old_dtype: str | None
    dtype: str | None
    old_shape: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    attributes: tuple[str, ...]
    """Names of what else differs: stride, requires_grad, ..."""
    bytes: int
    changed_bytes: int
    chunks: int
    changed_chunks: int
    old_value: str | None = None
    """Of a tensor of one element that lies in the manifest, as text; None for all others."""
    new_value: str | None = None
    values: ValueStats | None = None
    parameter_name: str | None = None
    """The parameter that this is optimizer state of, where the save recorded it."""

    @property
    def share(self) -> float:
        """Share of the bytes that lie in chunks that differ."""
        return self.changed_bytes / self.bytes if self.bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**Record.to_dict(self), "share": self.share}


@dataclass(frozen=True, slots=True)
class ValueChange(Record):
    """A plain value that differs, each side as a line of Python: the whole, or where that reads
    alike the first part that differs, after its place. None on the side that lacks it."""

    path: str
    old: str | None
    new: str | None


@dataclass(frozen=True, slots=True)
class ModuleChange(Record):
    """All tensors below one prefix, those that do not differ included."""

    module: str
    tensors: int
    differing: int
    bytes: int
    changed_bytes: int
    new_nan: int | None
    update: float | None
    """Largest `relative_update` of a tensor."""
    parameter_name: str | None = None
    """The parameter that all that differs is optimizer state of; None where it is not of one."""

    @property
    def share(self) -> float:
        return self.changed_bytes / self.bytes if self.bytes else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**Record.to_dict(self), "share": self.share}


@dataclass(frozen=True, slots=True)
class Side(Record):
    """One of the two steps."""

    store: str
    run: str
    step: int
    number: int
    root: str


@dataclass(frozen=True, slots=True)
class Diff:
    """Two steps compared. `identical` means bit-identical within the paths asked for; with no
    globs, devices apart, that is equality of the Merkle roots."""

    old: Side
    new: Side
    tensors: tuple[TensorChange, ...]
    """Those that differ; what matters most first."""
    values: tuple[ValueChange, ...]
    structure_changed: bool
    """Containers or their order differ although no leaf needs to."""
    compared: tuple[tuple[str, int], ...]
    """(path, bytes) of every tensor that was considered."""
    bytes: int
    changed_bytes: int
    chunks: int
    changed_chunks: int
    with_values: bool

    @property
    def identical(self) -> bool:
        return not (self.tensors or self.values or self.structure_changed)

    def modules(self, depth: Depth) -> tuple[ModuleChange, ...]:
        """The tensors folded to modules of `depth` parts, or with "auto" to a readable number of
        modules; those that changed most first."""
        check_depth(depth)
        return tuple(_fold(self, depth))

    def to_dict(self) -> dict[str, Any]:
        """As the JSON document has it, but for `format` and `modules`."""
        return {
            "old": self.old.to_dict(),
            "new": self.new.to_dict(),
            "identical": self.identical,
            "structure_changed": self.structure_changed,
            "with_values": self.with_values,
            "compared": len(self.compared),
            "bytes": self.bytes,
            "changed_bytes": self.changed_bytes,
            "chunks": self.chunks,
            "changed_chunks": self.changed_chunks,
            "tensors": [change.to_dict() for change in self.tensors],
            "values": [change.to_dict() for change in self.values],
        }

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per tensor that differs (needs pandas)."""
        return frame([change.to_dict() for change in self.tensors])


def by_importance(change: TensorChange) -> tuple[Any, ...]:
    """Sort key: new NaNs, then what changed its form, then by share and bytes that differ."""
    stats = change.values
    broken = 0 if stats is None else -((stats.new_nan or 0) + (stats.new_inf or 0))
    update = 0.0 if stats is None else -(stats.relative_update or 0.0)
    share = -change.share
    form = _ORDER[change.change]
    return (min(broken, 0), form, update, share, -change.changed_bytes, natural(change.path))


def _fold(diff: Diff, depth: Depth) -> Iterator[ModuleChange]:
    found: dict[str, ModuleChange] = {}
    fold = folding(depth, [path for path, _ in diff.compared])

    def module(path: str) -> ModuleChange:
        name = fold(path)
        return found.get(name) or ModuleChange(name, 0, 0, 0, 0, None, None)

    for path, size in diff.compared:
        one = module(path)
        found[one.module] = replace(one, tensors=one.tensors + 1, bytes=one.bytes + size)
    for change in diff.tensors:
        one = module(change.path)
        nan, update = one.new_nan, one.update
        of_one = not one.differing or one.parameter_name == change.parameter_name
        if change.values is not None:
            if change.values.new_nan is not None:
                nan = (nan or 0) + change.values.new_nan
            if change.values.relative_update is not None:
                update = max(update or 0.0, change.values.relative_update)
        found[one.module] = replace(
            one,
            differing=one.differing + 1,
            changed_bytes=one.changed_bytes + change.changed_bytes,
            new_nan=nan,
            update=update,
            parameter_name=change.parameter_name if of_one else None,
        )
    yield from sorted(
        found.values(),
        key=lambda m: (-(m.new_nan or 0), -m.share, -m.changed_bytes, natural(m.module)),
    )

"""Which leaves of a step are exported, and under which names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltackpt_store.errors import InvalidInputError, NotFoundError
from deltackpt_store.manifest import Snapshot, TensorView

from deltackpt_tools.nearness import matches, near, require_matches

_ENDS = ("/", ".")  # of the parts of a path
INTERNAL = "#"  # top-level keys that begin so belong to the library (random-number state, ...)


@dataclass(frozen=True, slots=True)
class Selection:
    """Leaves of a step below `prefix` that match the globs. `values` are slots of plain values."""

    prefix: str
    tensors: list[TensorView]
    values: list[int]
    internal: list[str]
    """Top-level keys that were wanted and are the library's own."""

    @property
    def slots(self) -> frozenset[int]:
        return frozenset([*(view.slot for view in self.tensors), *self.values])


def select(snapshot: Snapshot, prefix: str, globs: Sequence[str]) -> Selection:
    """Choose by path; NotFoundError (naming what is near) when nothing lies below `prefix`, or a
    glob matches nothing of that, or only what is the library's own.

    A prefix ends where a part of a path does: ``model`` stands for ``model/``.
    """
    layout = snapshot.layout
    prefix = _whole_parts(prefix, layout.paths)
    below = [path for path in layout.paths if path.startswith(prefix)]
    require_matches(globs, below, f"this step below {prefix!r}" if prefix else "this step")
    wanted: set[int] = set()
    internal: dict[str, None] = {}
    for slot, path in enumerate(layout.paths):
        if path.startswith(prefix) and matches(path, globs):
            if path.startswith(INTERNAL):
                internal.setdefault(path.partition("/")[0])
            else:
                wanted.add(slot)
    if not wanted:
        raise NotFoundError(
            f"only {', '.join(internal)} would be exported, which the library keeps for itself",
            kind="nothing-selected",
            hint=near("", [path for path in layout.paths if not path.startswith(INTERNAL)]),
            prefix=prefix,
        )
    return Selection(
        prefix,
        [view for view in layout.tensors if view.slot in wanted],
        [slot for slot in layout.objects if slot in wanted],
        list(internal),
    )


def _whole_parts(prefix: str, paths: Sequence[str]) -> str:
    """`prefix` with the ``/`` or ``.`` that ends its last part."""
    ends = [prefix] if not prefix or prefix[-1] in _ENDS else [prefix + end for end in _ENDS]
    found = [end for end in ends if any(path.startswith(end) for path in paths)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidInputError(
            f"the prefix {prefix!r} may mean {' or '.join(map(repr, found))}",
            kind="ambiguous-prefix",
            hint="write the one that is meant",
            prefix=prefix,
        )
    if not prefix:
        raise NotFoundError("this step holds no tensor and no value", kind="nothing-selected")
    alone = prefix in paths
    raise NotFoundError(
        f"nothing in this step lies below {prefix!r}" + (", which is one leaf" if alone else ""),
        kind="nothing-selected",
        hint=f"export it by --only {prefix!r}" if alone else near(prefix, paths),
        prefix=prefix,
    )


def flat_names(snapshot: Snapshot, selection: Selection) -> dict[int, str]:
    """Slot -> name of each selected tensor: its path without the prefix, escapes undone.

    InvalidInputError when two tensors would get one name, or one an impossible name.
    """
    names: dict[int, str] = {}
    taken: dict[str, str] = {}
    for view in selection.tensors:
        path = snapshot.layout.paths[view.slot]
        name = "/".join(key_of(part) for part in path.removeprefix(selection.prefix).split("/"))
        if name in taken:
            raise InvalidInputError(
                f"{taken[name]!r} and {path!r} would both be called {name!r}",
                kind="name-collision",
                hint="export them one at a time with --only, or use --format torch",
                name=name,
            )
        if not name or name == "__metadata__":
            raise InvalidInputError(
                f"the tensor {path!r} would be called {name!r}, which the format does not allow",
                kind="bad-name",
                hint="use a shorter --prefix",
                path=path,
            )
        taken[name] = path
        names[view.slot] = name
    return names


def key_of(part: str) -> str:
    """One step of a path as the key it stands for: quotes of number-like keys and ``~`` undone."""
    if len(part) > 1 and part[0] == part[-1] == '"':
        part = part[1:-1]
    return part.replace("~1", "/").replace("~0", "~")

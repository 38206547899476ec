"""``deltackpt_tools.diff``: what differs between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from deltackpt_store.errors import NotFoundError
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store

from deltackpt_tools.arguments import check_globs
from deltackpt_tools.changes import Diff, Side, TensorChange, by_importance
from deltackpt_tools.compare import compare
from deltackpt_tools.module_paths import natural
from deltackpt_tools.named import StepLike, StoreLike, as_commit, as_store, parent_of
from deltackpt_tools.nearness import matches, require_matches
from deltackpt_tools.parameters import ParameterNames
from deltackpt_tools.stores import label


def diff(
    store: StoreLike,
    old: StepLike = "latest",
    new: StepLike | None = None,
    *,
    other: StoreLike | None = None,
    only: str | Iterable[str] = (),
    values: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
) -> Diff:
    """Compare two steps, from manifests alone unless `values`.

    `new` is looked up in `other` when that is given, else in `store`; with `new` None the step
    `old` is compared with the one it continues, or with the newest of `other`. `only`: a glob of
    paths, or several (``*`` crosses ``/``).
    With `values` the chunks that differ are read (a bounded number at a time) and every changed
    tensor gets `ValueStats`; `progress(done, total)` then counts bytes.

    Raises NotFoundError (also for a glob that matches nothing in either step), CorruptionError (of
    a manifest; with `values` of a chunk) and InvalidInputError for an ambiguous name.
    """
    only = check_globs(only)
    before = as_store(store)
    after = before if other is None else as_store(other)
    if new is None and other is None:
        second = as_commit(before, old)
        first = parent_of(before, second)
    else:
        first = as_commit(before, old)
        second = _second(after, "latest" if new is None else new, first)
    a, b = before.snapshot(first), after.snapshot(second)
    if only:
        paths = dict.fromkeys([*a.layout.paths, *b.layout.paths])
        require_matches(only, paths, f"{label(first)} and {label(second)}")
    found = compare(a, b, (lambda path: matches(path, only)) if only else None)
    if values and found.pairs:
        from deltackpt_tools.changed_values import ValueReader, add_values, bytes_to_read

        total, done = bytes_to_read(found), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, total)

        reader = ValueReader(a, before.reader(a.packs), b, after.reader(b.packs))
        found = add_values(found, reader, advance)
    names = ParameterNames(a), ParameterNames(b)
    return Diff(
        old=_side(before, first),
        new=_side(after, second),
        tensors=tuple(_named(c, names) for c in sorted(found.tensors, key=by_importance)),
        values=tuple(sorted(found.values, key=lambda change: natural(change.path))),
        structure_changed=not only and a.layout.structure != b.layout.structure,
        compared=tuple(found.compared),
        bytes=found.bytes,
        changed_bytes=found.changed_bytes,
        chunks=found.chunks,
        changed_chunks=found.changed_chunks,
        with_values=values,
    )


def _second(store: Store, name: StepLike, first: Commit) -> Commit:
    """The commit called `name`; a bare number that is none is most likely a step of that run."""
    try:
        return as_commit(store, name)
    except NotFoundError as error:
        if not (isinstance(name, str) and name.isdecimal()):
            raise
        raise NotFoundError(
            error.message, kind=error.kind, hint=f"did you mean {first.run}@{name}?", name=name
        ) from error


def _named(change: TensorChange, names: tuple[ParameterNames, ParameterNames]) -> TensorChange:
    old, new = names
    name = new.of(change.path) if change.change != "removed" else old.of(change.path)
    return change if name is None else replace(change, parameter_name=name)


def _side(store: Store, commit: Commit) -> Side:
    return Side(store.path, commit.run, commit.step, commit.number, commit.root.hex())

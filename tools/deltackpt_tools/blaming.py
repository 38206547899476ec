"""``deltackpt_tools.blame``: when each part of a tensor last changed, when a NaN came into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from deltackpt_store.errors import NotFoundError
from deltackpt_store.manifest import Commit, Snapshot, TensorView
from deltackpt_store.store import Store
from numpy.typing import NDArray

from deltackpt_tools.arguments import check_text
from deltackpt_tools.chunk_rows import ChunkRows
from deltackpt_tools.frames import Record, frame
from deltackpt_tools.module_paths import natural
from deltackpt_tools.named import StepLike, StoreLike, ancestry, as_commit, as_store
from deltackpt_tools.nearness import matches, near
from deltackpt_tools.numeric import count_nonfinite, may_be_nonfinite
from deltackpt_tools.parameters import ParameterNames
from deltackpt_tools.tensor_bytes import TensorBytes, span, tensor_nbytes, without_repeats

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Part(Record):
    """Bytes `start`..`stop` of what the tensor looks at, last changed by this step. Chunks are the
    finest that can be told apart."""

    start: int
    stop: int
    run: str
    step: int
    number: int


@dataclass(frozen=True, slots=True)
class NotFinite(Record):
    """The first step in which a tensor holds NaN or infinite elements, and how many."""

    run: str
    step: int
    number: int
    nan: int
    inf: int


@dataclass(frozen=True, slots=True)
class TensorBlame(Record):
    path: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    parts: tuple[Part, ...]
    """In the order of the bytes; neighbours changed by one step are one part."""
    not_finite: NotFinite | None
    parameter_name: str | None = None
    """The parameter that this is optimizer state of, where the save recorded it."""

    @property
    def newest(self) -> Part | None:
        """The part that changed last (None for a tensor without elements)."""
        return max(self.parts, key=lambda part: (part.step, part.number), default=None)

    def by_step(self) -> dict[tuple[str, int, int], int]:
        """(run, step, number) -> bytes that it changed last, newest first."""
        sums: dict[tuple[str, int, int], int] = {}
        for part in self.parts:
            key = part.run, part.step, part.number
            sums[key] = sums.get(key, 0) + part.stop - part.start
        return dict(sorted(sums.items(), key=lambda item: (item[0][1], item[0][2]), reverse=True))


@dataclass(frozen=True, slots=True)
class Blame(Record):
    """`searched` is the number of steps that were looked at; the oldest is `since`: what it holds
    may be older where retention has removed what came before."""

    store: str
    run: str
    step: int
    number: int
    searched: int
    since: int
    tensors: tuple[TensorBlame, ...]

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row per part of a tensor."""
        return frame([{"path": t.path, **part.to_dict()} for t in self.tensors for part in t.parts])


def blame(
    store: StoreLike,
    tensor: str,
    step: StepLike = "latest",
    *,
    nan: bool = False,
    progress: Progress | None = None,
) -> Blame:
    """Walk back from `step` and tell for every chunk of `tensor` which step changed it last.

    `tensor` is a path or a glob. Reads manifests only, and no more than needed; with `nan` also
    every chunk of the tensors that any step changed, to find the first with NaN or infinite
    elements. `progress(done, total)` counts steps. Raises NotFoundError when nothing matches.
    """
    check_text("tensor", tensor)
    where = as_store(store)
    commit = as_commit(where, step)
    line = ancestry(where, commit)
    snapshot = where.snapshot(commit)
    views = _matching(snapshot, tensor)
    if not views:
        raise NotFoundError(
            f"{commit.run}@{commit.step} has no tensor {tensor!r}",
            kind="unknown-tensor",
            hint=near(
                tensor,
                list(_by_path(snapshot)),
                [snapshot.layout.paths[slot] for slot in snapshot.objects],
            ),
            path=tensor,
        )
    walk = _Walk(where, line, snapshot, views, progress)
    searched, since = walk.back()
    origins: dict[str, NotFinite] = {}
    if nan:  # looks at every step
        origins = _first_not_finite(where, line, tensor, progress)
        searched, since = len(line), line[0]
    names = ParameterNames(snapshot)
    tensors = [
        TensorBlame(
            path, view.dtype, view.shape, tensor_nbytes(view),
            tuple(walk.parts(path)), origins.get(path), names.of(path),
        )
        for path, view in sorted(views.items(), key=lambda item: natural(item[0]))
    ]  # fmt: skip
    return Blame(
        where.path, commit.run, commit.step, commit.number, searched, since.step, tuple(tensors)
    )


def _matching(snapshot: Snapshot, pattern: str) -> dict[str, TensorView]:
    paths = snapshot.layout.paths
    exact = {paths[v.slot]: v for v in snapshot.layout.tensors if paths[v.slot] == pattern}
    if exact:
        return exact
    globs: Sequence[str] = [pattern]
    return {paths[v.slot]: v for v in snapshot.layout.tensors if matches(paths[v.slot], globs)}


class _Walk:
    """Newest step first: whatever differs from the step before was changed by the newer one."""

    def __init__(
        self,
        store: Store,
        line: list[Commit],
        newest: Snapshot,
        views: dict[str, TensorView],
        progress: Progress | None,
    ) -> None:
        self._store, self._line, self._newest, self._progress = store, line, newest, progress
        self._views = views
        self._owner = {
            path: np.full(_pieces(newest, view), -1, np.int64) for path, view in views.items()
        }

    def back(self) -> tuple[int, Commit]:
        """Walk until everything has an owner; (steps looked at, the oldest of them)."""
        newer, views = self._newest, self._views
        last = len(self._line) - 1
        open_ = {path for path, owner in self._owner.items() if len(owner)}
        for index in range(last, -1, -1):
            if self._progress is not None:
                self._progress(last - index + 1, last + 1)
            if not open_:
                return last - index, self._line[index]
            if index == 0:
                break
            if self._line[index - 1].root == self._line[index].root:
                continue
            older = self._store.snapshot(self._line[index - 1])
            older_views = _by_path(older)
            for path in sorted(open_):
                differs = self._differs(older, older_views.get(path), newer, views.get(path), path)
                owner = self._owner[path]
                owner[(owner < 0) & differs] = index
                if (owner >= 0).all():
                    open_.discard(path)
            newer, views = older, older_views
        for path in open_:
            owner = self._owner[path]
            owner[owner < 0] = 0
        return last + 1, self._line[0]

    def _differs(
        self,
        old: Snapshot,
        old_view: TensorView | None,
        new: Snapshot,
        new_view: TensorView | None,
        path: str,
    ) -> NDArray[np.bool_]:
        count = len(self._owner[path])
        every = np.ones(count, np.bool_)
        if old_view is None or new_view is None:
            return every
        shape = ("dtype", "shape", "stride", "offset")
        if any(getattr(old_view, name) != getattr(new_view, name) for name in shape):
            return every
        a, b = old.layout.extents[old_view.extent], new.layout.extents[new_view.extent]
        if (a.chunk_bytes, a.inline) != (b.chunk_bytes, b.inline):
            return every
        start, stop = span(new_view)
        if b.inline:
            same = (
                old.inline[old_view.extent][start:stop] == new.inline[new_view.extent][start:stop]
            )
            return ~every if same else every
        before, after = old.chunks[old_view.extent], new.chunks[new_view.extent]
        if before is after:
            return ~every
        first, end = start // b.chunk_bytes, -(-stop // b.chunk_bytes)
        return (before[first:end] != after[first:end]).any(axis=1)

    def parts(self, path: str) -> list[Part]:
        owner, view = self._owner[path], self._views[path]
        if not len(owner):
            return []
        spec = self._newest.layout.extents[view.extent]
        start, stop = span(view)
        size = max(stop - start, 1) if spec.inline else spec.chunk_bytes
        lead = 0 if spec.inline else start % size
        edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
        found: list[Part] = []
        for first, end in pairwise(edges):
            by = self._line[int(owner[first])]
            found.append(
                Part(
                    max(first * size - lead, 0), min(end * size - lead, stop - start),
                    by.run, by.step, by.number,
                )
            )  # fmt: skip
        return found


def _by_path(snapshot: Snapshot) -> dict[str, TensorView]:
    return {snapshot.layout.paths[view.slot]: view for view in snapshot.layout.tensors}


def _pieces(snapshot: Snapshot, view: TensorView) -> int:
    """Into how many chunks the bytes that the tensor looks at fall (1 when inline)."""
    spec = snapshot.layout.extents[view.extent]
    start, stop = span(view)
    if start == stop:
        return 0
    if spec.inline:
        return 1
    return -(-stop // spec.chunk_bytes) - start // spec.chunk_bytes


def _first_not_finite(
    store: Store, line: list[Commit], pattern: str, progress: Progress | None
) -> dict[str, NotFinite]:
    """Walk forward and read what each step changed, until every tensor has been found."""
    store.index()  # all packs at once: learning of them step by step sorts the index each time
    found: dict[str, NotFinite] = {}
    older: Snapshot | None = None
    for index, commit in enumerate(line):
        if progress is not None:
            progress(index + 1, len(line))
        if older is not None and commit.root == line[index - 1].root:
            continue
        newer = store.snapshot(commit)
        views = {p: v for p, v in _matching(newer, pattern).items() if p not in found}
        for path, (nan, inf) in _Scan(store, older, newer).count(views).items():
            if nan or inf:
                found[path] = NotFinite(commit.run, commit.step, commit.number, nan, inf)
        older = newer
    return found


class _Scan:
    """Counts elements that are not finite in what changed between two steps."""

    def __init__(self, store: Store, old: Snapshot | None, new: Snapshot) -> None:
        self._old, self._new = old, new
        self._views = {} if old is None else _by_path(old)
        reader = store.reader(new.packs)
        self._rows = ChunkRows(new, reader)
        self._whole = TensorBytes(new, reader)

    def count(self, views: dict[str, TensorView]) -> dict[str, tuple[int, int]]:
        """(NaN, infinite) elements of each tensor in what changed."""
        sums = {path: (0, 0) for path, v in views.items() if may_be_nonfinite(v.dtype)}
        together: list[tuple[str, TensorView, NDArray[np.int64]]] = []
        for path in sums:
            view = views[path]
            rows = self._changed(path, view)
            if rows is not None and self._rows.whole_elements(view):
                together.append((path, view, rows))
            elif rows is None or len(rows):
                (once,), repeats = without_repeats(view)
                for piece in self._whole.tensor(once):
                    self._add(sums, path, view, piece, repeats)
        for number, piece in self._rows.many([(view, rows) for _, view, rows in together]):
            path, view, _ = together[number]
            self._add(sums, path, view, piece)
        return sums

    @staticmethod
    def _add(
        sums: dict[str, tuple[int, int]],
        path: str,
        view: TensorView,
        piece: memoryview,
        repeats: int = 1,
    ) -> None:
        nan, inf = count_nonfinite(piece, view.dtype)
        sums[path] = sums[path][0] + nan * repeats, sums[path][1] + inf * repeats

    def _changed(self, path: str, view: TensorView) -> NDArray[np.int64] | None:
        """Chunks that differ from the step before; None: read the whole tensor."""
        spec = self._new.layout.extents[view.extent]
        start, stop = span(view)
        if spec.inline:
            return None
        every = np.arange(start // spec.chunk_bytes, -(-stop // spec.chunk_bytes))
        old = self._views.get(path)
        if (
            self._old is None
            or old is None
            or (old.offset, old.stride) != (view.offset, view.stride)
        ):
            return every
        before = self._old.chunks.get(old.extent)
        after = self._new.chunks[view.extent]
        if before is after:
            return every[:0]
        cut = self._old.layout.extents[old.extent].chunk_bytes
        if before is None or cut != spec.chunk_bytes or len(before) != len(after):
            return every
        return every[(before[every] != after[every]).any(axis=1)]

"""One committed step as a restore sees it: what is wanted of it, and its verified bytes.

Nothing here touches a live object. All file access goes through the store, which checks every
chunk against its id; what does not check out is reported as `CorruptionError` that names the step
and every tensor it hits.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from deltackpt_store.errors import CorruptionError, DeltackptError, InvalidInputError, told
from deltackpt_store.fetch import Request
from deltackpt_store.manifest import Commit, TensorView
from deltackpt_store.oserror import DAMAGE
from deltackpt_store.reader import ChunkReader
from deltackpt_store.store import Store

from . import values
from .building import build
from .views import rebuild

RESERVED = "#"
"""First character of the top-level entries that the library itself adds to a state."""

_BATCH = 1 << 16  # chunks asked of the reader at a time: bounds the memory of a plan
_SHOWN = 12


class Step:
    """What one commit holds, and which of it is wanted. Reads the manifest, once; no chunk.

    `selected` are the wanted slots of the user's state; the library's own entries are not among
    them. Raises `CorruptionError` (and what `Store.snapshot` raises) when the manifest does not
    hold, `InvalidInputError` when a pattern of `only` matches nothing.
    """

    def __init__(self, store: Store, commit: Commit, only: str | Iterable[str] | None) -> None:
        self.commit = commit
        self.snapshot = store.snapshot(commit)
        self.layout = self.snapshot.layout
        self.paths = self.layout.paths
        self.views: dict[int, TensorView] = {view.slot: view for view in self.layout.tensors}
        self.slots: dict[str, int] = {path: slot for slot, path in enumerate(self.paths)}
        self.partial = only is not None
        self.selected = frozenset(select(self.paths, only))
        self._reader: ChunkReader = store.reader(self.snapshot.packs)

    @property
    def name(self) -> str:
        return f"{self.commit.run}@{self.commit.step}"

    # values --------------------------------------------------------------------------------

    def value(self, slot: int) -> object:
        """The plain value in `slot`, a fresh object at every call."""
        return values.decode(self.snapshot.objects[slot], self.paths[slot])

    def build(
        self, tensor: Callable[[int, TensorView], Any], keep: Collection[int] | None = None
    ) -> Any:
        """The nested state of the `keep` slots (default: all), tensors as `tensor` gives them."""
        views = self.views

        def leaf(slot: int) -> Any:
            view = views.get(slot)
            return self.value(slot) if view is None else tensor(slot, view)

        return build(self.layout.structure, leaf, keep=keep)

    def outline(
        self, leaf: Callable[[int], Any], parts: Callable[[tuple[int, ...]], Any]
    ) -> dict[Any, Any]:
        """The selected containers, `leaf` and `parts` in place of values (see `building.build`).

        List and tuple items that are not selected are None; nothing else is.
        """
        return _own(build(self.layout.structure, leaf, keep=self.selected, parts=parts))

    def build_own(self, tensor: Callable[[int, TensorView], Any]) -> dict[Any, Any]:
        """The nested selected state, without the library's own entries."""
        return _own(self.build(tensor, self.selected))

    def reserved(self, name: str) -> list[int]:
        """Slots of the library's own entry `name` ("#rng", "#params")."""
        return [s for s, path in enumerate(self.paths) if path == name or _below(path, name)]

    def reserved_value(self, name: str, memory: Mapping[int, torch.Tensor]) -> Any:
        """The library's own entry `name`, None when the step has none."""
        slots = frozenset(self.reserved(name))
        if not slots:
            return None
        tree = self.build(lambda slot, view: rebuild(view, memory[view.extent]), slots)
        return cast("dict[str, Any]", tree)[name]

    # bytes ---------------------------------------------------------------------------------

    def extents_of(self, slots: Iterable[int]) -> list[int]:
        """Numbers of the extents that the tensors among `slots` look at, ascending."""
        return sorted({self.views[slot].extent for slot in slots if slot in self.views})

    def nbytes(self, extents: Iterable[int]) -> int:
        return sum(self.layout.extents[extent].nbytes for extent in extents)

    def read_all(self, wanted: Iterable[int], threads: int | None) -> dict[int, torch.Tensor]:
        """The verified bytes of the extents, each in fresh host memory of its own (flat uint8).

        The caller owns the result; tensors made of it may be handed on.
        """
        memory: dict[int, torch.Tensor] = {}
        for extent in wanted:
            memory[extent] = torch.empty(
                self.layout.extents[extent].nbytes, dtype=torch.uint8, device="cpu"
            )
        self.fill(memory, threads)
        return memory

    def fill(self, memory: Mapping[int, torch.Tensor], threads: int | None) -> None:
        """Read whole extents into the given host memory (flat uint8 of exactly their length)."""
        requests: list[Request] = []
        for extent, data in memory.items():
            if not data.numel():
                continue
            buffer = memory_of(data)
            if self.layout.extents[extent].inline:
                buffer[:] = self.snapshot.inline[extent]
                continue
            requests += self.requests(extent, buffer)
            if len(requests) >= _BATCH:
                self.read(requests, threads)
                requests = []
        self.read(requests, threads)

    def requests(
        self, extent: int, buffer: memoryview, first: int = 0, last: int | None = None
    ) -> Iterator[Request]:
        """Requests for the chunks ``first ... last`` of an extent, into `buffer` from its start."""
        spec = self.layout.extents[extent]
        ids = self.snapshot.chunks[extent][first:last].tobytes()
        position = 0
        for index in range(len(ids) // 32):
            length = spec.chunk_length(first + index)
            yield ids[32 * index : 32 * index + 32], buffer[position : position + length]
            position += length

    def read(self, requests: list[Request], threads: int | None) -> None:
        """Fill the requests; `CorruptionError` names the tensors that cannot be had."""
        if not requests:
            return
        try:
            self._reader.read(requests, threads)
        except CorruptionError as error:
            raise self._damage(error) from error

    def _damage(self, error: CorruptionError) -> CorruptionError:
        """`error` of the reader, as damage of this step and its tensors."""
        lost = frozenset(cast("Iterable[bytes]", error.context.get("ids", ())))
        hit = {
            extent
            for extent, ids in self.snapshot.chunks.items()
            if lost and not lost.isdisjoint(_rows(ids.tobytes()))
        }
        tensors = [self.paths[view.slot] for view in self.layout.tensors if view.extent in hit]
        context = {**error.context, "tensors": tuple(tensors)}
        context.update(run=self.commit.run, step=self.commit.step, number=self.commit.number)
        return CorruptionError(
            f"step {self.name} is damaged in {shown(tensors)}: {error.message}",
            kind=error.kind,
            hint="restore another step, or verify the store to see all that is hit",
            **context,
        )


def _own(state: dict[Any, Any]) -> dict[Any, Any]:
    reserved = [key for key in state if isinstance(key, str) and key.startswith(RESERVED)]
    for key in reserved:  # one that is empty is kept by any selection
        del state[key]
    return state


def _rows(ids: bytes) -> Iterator[bytes]:
    return (ids[at : at + 32] for at in range(0, len(ids), 32))


def shown(names: Collection[str], limit: int = _SHOWN) -> str:
    """The first few names for an error message, and how many there are in all."""
    listed = ", ".join(list(names)[:limit])
    return f"{listed}, ... ({len(names)} in all)" if len(names) > limit else listed


# choosing ---------------------------------------------------------------------------------------


def _below(path: str, prefix: str) -> bool:
    return path.startswith(prefix + "/")


def patterns(only: str | Iterable[str]) -> list[str]:
    """`only` as a list of globs; `InvalidInputError` for anything else or an empty one."""
    try:
        globs: list[object] = [only] if isinstance(only, str) else list(only)
    except TypeError:
        globs = []
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise InvalidInputError(
            f"only must be a glob or a list of globs over paths, not {told(only)}",
            option="only",
            hint='for example only="model/*"',
        )
    return cast("list[str]", globs)


def matcher(only: str | Iterable[str] | None) -> Callable[[str], bool]:
    """Whether a path is meant by `only`: it or something above it matches one of the globs."""
    if only is None:
        return lambda path: True
    compiled = re.compile("|".join(_expression(glob) for glob in patterns(only)))
    return lambda path: compiled.match(path) is not None


def _expression(glob: str) -> str:
    """Every path is a glob of itself, also one with ``[`` in it."""
    itself = rf"(?s:{re.escape(glob)}(?:/.*)?)\Z"
    return f"(?:{itself}|{fnmatch.translate(glob)}|{fnmatch.translate(glob + '/*')})"


def select(paths: Collection[str], only: str | Iterable[str] | None) -> Iterator[int]:
    """Slots of the user's own leaves that `only` means.

    `InvalidInputError` (kind "no-match") names a glob that matches no path.
    """
    own = [(slot, path) for slot, path in enumerate(paths) if not path.startswith(RESERVED)]
    if only is None:
        return iter([slot for slot, _ in own])
    chosen: set[int] = set()
    for glob in patterns(only):
        wanted = matcher(glob)
        found = [slot for slot, path in own if wanted(path)]
        if not found and not glob.startswith(RESERVED):
            tops = list(dict.fromkeys(path.partition("/")[0] for _, path in own))
            raise InvalidInputError(
                f"only={glob!r} matches nothing in the checkpoint",
                kind="no-match",
                hint=f"its entries are {shown(tops)}; `*` crosses '/'",
                option="only",
            )
        chosen.update(found)
    return iter(sorted(chosen))


# memory -----------------------------------------------------------------------------------------


def memory_of(data: torch.Tensor) -> memoryview:
    """Writable view of the bytes of a flat uint8 host tensor, valid as long as its storage."""
    return memoryview(cast("Any", data.numpy()))


def is_damage(error: DeltackptError) -> bool:
    """Whether `error` says that this step is bad, so that another one may well be good."""
    if isinstance(error, CorruptionError):
        return True
    return isinstance(error, OSError) and error.context.get("errno") in DAMAGE

"""One instant of a training state, normalised: layout, encoded values, and where the bytes are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deltackpt_store.errors import InvalidInputError
from deltackpt_store.manifest import Layout, TensorView
from torch import Tensor

from . import extents, params, rng
from .buffers import BufferPool, Lease
from .devices import refuse_graph_capture
from .nodes import ChangedError, Leaves
from .options import entries_of
from .params import PARAMS_KEY
from .probing import Probe, probe
from .report import DeviceFigures
from .small import SmallBytes
from .sources import Signs, Source
from .tensors import check_mode
from .tree import Tree, Walker
from .values import encode

LivePredicate = Callable[[str, Tensor], bool]


def everything(path: str, tensor: Tensor) -> bool:
    """A `LivePredicate`: nothing is copied."""
    return True


@dataclass(frozen=True, slots=True)
class _Compiled:
    """What one capture lends the next: everything about the state but values and addresses.

    `owned`: per optimizer, the tensor leaf behind each parameter index (-1: none). `constant`:
    object slots whose documents follow from the layout ("#params"). `unsaved`: the optimizers of
    whose trained parameters nothing is in the state: path -> how many, of how many.
    """

    tree: Tree
    plan: extents.Plan
    layout: Layout
    chunk_bytes: int
    live: LivePredicate | None
    owned: list[list[int]]
    names: dict[str, list[str | None]]
    unsaved: dict[str, tuple[int, int]]
    constant: dict[int, bytes]
    state_bytes: int


@dataclass(slots=True)
class Capture:
    """What one save is made of. Owned by the save; not thread-safe except :meth:`release`.

    `layout` is the very object of the previous capture when nothing but values changed, so
    ``capture.layout is previous.layout`` tells the writer to keep its copy.
    `objects`: every object slot -> value document, frozen at the call.
    `inline`: every extent of at most 512 bytes -> its bytes, frozen at the call (the first access
    waits for those that come from a device).
    `sources`: every other extent -> :class:`Source`.
    `state_bytes`: sum of all extents' lengths.
    `figures`: device -> what copying at the call cost there.
    `signs`: signs of life of what ought to be still, for the next capture to compare.
    """

    layout: Layout
    objects: dict[int, bytes]
    _inline: dict[int, bytes]
    _small: list[SmallBytes]
    sources: dict[int, Source]
    state_bytes: int
    _compiled: _Compiled
    _pool: BufferPool
    _leases: list[Lease] = field(default_factory=lambda: list[Lease]())
    figures: dict[str, DeviceFigures] = field(default_factory=dict[str, DeviceFigures])
    signs: dict[str, Signs] = field(default_factory=lambda: dict[str, Signs]())

    @property
    def inline(self) -> dict[int, bytes]:
        while self._small:
            self._inline.update(self._small[-1].resolve())
            self._small.pop()
        return self._inline

    @property
    def optimizers(self) -> list[tuple[str, list[TensorView | None]]]:
        """Path of each optimizer, and the view of each parameter (None: not in the state)."""
        views = self.layout.tensors
        return [
            (path, [None if index < 0 else views[index] for index in indices])
            for path, indices in zip(
                self._compiled.tree.optimizer_paths, self._compiled.owned, strict=True
            )
        ]

    @property
    def unsaved(self) -> dict[str, tuple[int, int]]:
        """Optimizers with trained parameters that are not saved: how many, of how many."""
        return self._compiled.unsaved

    def release(self) -> None:
        """Give private copies back to the pool and drop all tensors: call once all is staged.

        May be called from any thread, more than once. After it no `Source.data` may be read. The
        layout stays usable, also as `previous`.
        """
        leases, self._leases = self._leases, []
        self.sources = {}
        for lease in leases:
            lease.end(self._pool)


def capture(
    state: Mapping[Any, Any],
    *,
    chunk_bytes: int,
    rng: bool = True,
    live: LivePredicate | None = None,
    previous: Capture | None = None,
    pool: BufferPool | None = None,
    copied: Collection[str] = (),
    by_hand: bool = False,
) -> Capture:
    """Walk `state` once, in the calling (training) thread, and freeze what must be frozen.

    Live (read later, until the next optimizer step) are only: parameters and optimizer state
    tensors, and only when an optimizer is in the state. A parameter counts
    when a captured optimizer owns it, or when it is frozen (requires_grad False) beside owned ones
    in one module and shows no sign of having changed since `previous`; all else (buffers, EMA
    copies, loose tensors, tensors named by `copied`) is copied before this returns.
    `live(path, tensor)` replaces that rule when given; it is asked when the layout is planned, and
    when another one was given for `previous`.
    `by_hand`: a frozen parameter may have changed since `previous` without such a sign, and is to
    be what it is now until the next optimizer step, as a trained one.
    `previous` lends its layout when the tree has not changed. Nothing of `state` is stepped,
    mutated or kept beyond what `Source` says. On CUDA, copies are ordered on the current stream.
    Raises `InvalidInputError` (kind "unsupported-value", context "path") before anything else
    happens when a value cannot be represented, and `StateError` (kind "capturing") while the
    current stream records a CUDA graph.
    """
    refuse_graph_capture()
    whole = _whole(state, rng)
    found: _Found | None = None
    if previous is not None:
        compiled = previous._compiled  # pyright: ignore[reportPrivateUsage]
        if compiled.chunk_bytes == chunk_bytes:
            found = _find_again(compiled, whole, live)
    if found is None:
        found = _find(whole, chunk_bytes, live)
    check_mode()
    compiled, leaves, measured = found
    tree = compiled.tree
    documents: dict[int, bytes] = {
        slot: encode(value, tree.paths[slot])
        for slot, value in zip(tree.object_slots, leaves.objects, strict=True)
        if slot not in compiled.constant
    }
    documents.update(compiled.constant)
    pool = pool if pool is not None else BufferPool()
    taken = compiled.plan.take(
        leaves.tensors, measured, pool=pool, copied=copied,
        before=None if live is not None or previous is None else previous.signs, by_hand=by_hand,
    )  # fmt: skip
    return Capture(
        compiled.layout,
        documents,
        taken.inline,
        taken.small,
        taken.sources,
        compiled.state_bytes,
        compiled,
        pool,
        taken.leases,
        taken.figures,
        taken.signs,
    )


def _whole(state: Mapping[Any, Any], with_rng: bool) -> dict[Any, Any]:
    """`state` with the library's own entries, but "#params", which comes last."""
    whole = entries_of(state, "state")
    refuse_reserved(whole)
    if with_rng:
        whole[rng.RNG_KEY] = rng.collect()
    return whole


def refuse_reserved(state: Mapping[Any, Any]) -> None:
    """`InvalidInputError` for a top-level name that is kept for the library's own entries."""
    for key in state:
        if isinstance(key, str) and key.startswith("#"):
            raise InvalidInputError(
                f"the key {key!r} cannot be used: top-level names with '#' are the library's own",
                kind="reserved-key",
                hint="rename it",
                path=key,
            )


_Found = tuple[_Compiled, Leaves, Probe]


class _Names:
    """The "#params" entry: asked for its state last, when all optimizers have been met."""

    def __init__(self, leaves: Leaves, names: Callable[[], dict[str, list[str | None]]]) -> None:
        self.leaves = leaves
        self._names = names

    def state_dict(self) -> dict[str, list[str | None]]:
        return self._names()


def _owned(leaves: Leaves) -> list[list[int]]:
    """Per optimizer, the index of the tensor leaf of each parameter; -1 for none."""
    if not leaves.optimizers:
        return []
    count = len(leaves.tensors)
    index = dict(zip(map(id, reversed(leaves.tensors)), range(count - 1, -1, -1), strict=True))
    return [
        [index.get(id(p), -1) for p in params.parameters_of(optimizer)]
        for optimizer in leaves.optimizers
    ]


def _unsaved(
    tree: Tree, leaves: Leaves, owned: list[list[int]], names: Mapping[str, list[str | None]]
) -> dict[str, tuple[int, int]]:
    out: dict[str, tuple[int, int]] = {}
    memory: set[int] | None = None
    for path, optimizer, indices in zip(
        tree.optimizer_paths, leaves.optimizers, owned, strict=True
    ):
        if -1 in indices and None in names[path]:
            if memory is None:
                memory = {t.untyped_storage().data_ptr() for t in leaves.tensors}
            count = params.unsaved(optimizer, names[path], indices, memory)
            if count:
                out[path] = count, len(indices)
    return out


def _find_again(
    compiled: _Compiled, whole: dict[Any, Any], live: LivePredicate | None
) -> _Found | None:
    """The leaves of a state of the known form, or None when anything about it has changed."""
    leaves, tree = Leaves(), compiled.tree

    def names() -> dict[str, list[str | None]]:
        if _owned(leaves) != compiled.owned:
            raise ChangedError
        if any(-1 in indices for indices in compiled.owned):
            loose = params.loose_tensors(tree.tensor_paths, tree.origins, leaves)
            return params.optimizer_names(tree.module_paths, tree.optimizer_paths, leaves, loose)
        return compiled.names

    whole[PARAMS_KEY] = _Names(leaves, names)
    if not tree.collect(whole, leaves):
        return None
    try:
        measured = probe(tree.tensor_paths, leaves.tensors, compiled.plan.facts)
    except InvalidInputError:
        return None
    if measured is None or not compiled.plan.fits(measured):
        return None
    compiled.plan.check_memory(tree.tensor_paths, leaves.tensors, measured)
    if compiled.live != live:
        plan = compiled.plan.live_where(measured, *_live(tree, leaves, live))
        compiled = replace(compiled, plan=plan, live=live)
    return compiled, leaves, measured


def _find(whole: dict[Any, Any], chunk_bytes: int, live: LivePredicate | None) -> _Found:
    """Walk, refuse what cannot be saved, and make a new plan."""
    walker = Walker()
    leaves = walker.leaves
    known: dict[str, list[str | None]] = {}

    def names() -> dict[str, list[str | None]]:
        paths = [walker.paths[slot] for slot in walker.tensor_slots]
        loose = params.loose_tensors(paths, walker.origins, leaves)
        known.update(
            params.optimizer_names(walker.module_paths, walker.optimizer_paths, leaves, loose)
        )
        return known

    whole[PARAMS_KEY] = _Names(leaves, names)
    tree = walker.tree(whole)
    paths = tree.tensor_paths
    measured = probe(paths, leaves.tensors)
    assert measured is not None  # nothing was expected
    alive, still = _live(tree, leaves, live)
    plan = extents.plan(
        paths, tree.tensor_slots, measured, live=alive, still=still, chunk_bytes=chunk_bytes
    )
    layout = Layout(tree.structure, tree.paths, plan.views, plan.specs, tree.object_slots)
    constant = {
        slot: encode(value)
        for slot, value in zip(tree.object_slots, leaves.objects, strict=True)
        if tree.paths[slot].startswith(f"{PARAMS_KEY}/")
    }
    size = sum(spec.nbytes for spec in plan.specs)
    owned = _owned(leaves)
    compiled = _Compiled(
        tree, plan, layout, chunk_bytes, live, owned, known, _unsaved(tree, leaves, owned, known),
        constant, size,
    )  # fmt: skip
    return compiled, leaves, measured


def _live(tree: Tree, leaves: Leaves, live: LivePredicate | None) -> tuple[list[bool], list[bool]]:
    """The rule of :func:`capture`: what only an optimizer's step changes, and what nothing does;
    or what `live` says in place of the former."""
    owned = {id(p) for optimizer in leaves.optimizers for p in params.parameters_of(optimizer)}
    origins = tree.origins
    stepped = [
        origin.kind == "parameter" and id(t) in owned
        for origin, t in zip(origins, leaves.tensors, strict=True)
    ]
    trained = {origin.owner for origin, own in zip(origins, stepped, strict=True) if own}
    still = [
        origin.kind == "parameter" and not own and origin.owner in trained and not t.requires_grad
        for origin, own, t in zip(origins, stepped, leaves.tensors, strict=True)
    ]
    if live is not None:
        return [
            live(path, t) for path, t in zip(tree.tensor_paths, leaves.tensors, strict=True)
        ], still
    alive = [
        own or rests or origin.kind == "moment"
        for origin, own, rests in zip(origins, stepped, still, strict=True)
    ]
    return alive, still

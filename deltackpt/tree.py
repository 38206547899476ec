"""The state tree: containers as structure nodes, tensors and plain values as numbered leaves.

`Walker` walks a state once and compiles what it saw; `Tree.collect` walks the next state along
the same lines, several times faster, and notices any difference in keys, types or lengths.
`building.build` is the way back.

A structure document is one msgpack node. An integer is a leaf slot; lists are

=========== =====================================================================================
d           ``[key, node]...`` (``od`` OrderedDict, optionally followed by the value node of its
            `_metadata`; ``ctr`` Counter; ``dd`` with the factory's name before the pairs)
l t         ``[nodes]`` (``dq`` deque with maxlen before the nodes)
nt          module, qualified name, [fields], [nodes]
coo         [shape], coalesced, slot of indices, slot of values, parameter, requires_grad
csr csc     [shape], slot of compressed indices, slot of plain indices, slot of values, parameter,
bsr bsc     requires_grad
np          slot of the bytes (a uint8 tensor), dtype description, [shape]
=========== =====================================================================================

Lists, tuples and deques of nothing but scalars, sets, small arrays and scalars are object leaves.
Keys are value nodes (see deltackpt_store.values).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from deltackpt_store.errors import CorruptionError, InvalidInputError
from deltackpt_store.layout_check import (
    MAX_LEAVES,
    MAX_STRUCTURE_BYTES,
    MAX_STRUCTURE_DEPTH,
    check_structure,
    nesting,
)
from deltackpt_store.values import (
    MAX_DEPTH,
    check_namedtuple,
    dtype_description,
    encode_key,
    encode_node,
    is_namedtuple,
    keeper_hint,
    refuse,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from .building import SPARSE_TAGS
from .copying import sparse_parts
from .nodes import (
    LOADER_HINT,
    MAPPINGS,
    OBJECT,
    SEQUENCES,
    TENSOR,
    ArrayNode,
    ChangedError,
    Kid,
    Leaves,
    MappingNode,
    Origin,
    SequenceNode,
    SparseNode,
    StatefulNode,
    array_bytes,
    ask,
    collect_items,
    extra_of,
    has_method,
    is_object,
    kind_of,
    sparse_facts,
    sparse_problem,
)
from .paths import segments
from .tensors import PLAIN, refuse_unsupported

_log = logging.getLogger("deltackpt.tree")

_LOOSE = Origin()
_INSIDE = "inside of another object's state_dict(), which would get back a dict in its place"
_INSIDE_HINT = (
    "let that state_dict() return the state_dict() of this one, and load_state_dict() hand it on"
    " (of an optimizer: register_state_dict_post_hook and register_load_state_dict_pre_hook)"
)


@dataclass(frozen=True, slots=True)
class Tree:
    """The compiled form of a state; holds no value of it.

    `tensor_slots` and `object_slots` number the leaves of :class:`Leaves`; `tensor_paths` and
    `origins` have one entry per tensor. `module_paths`, `optimizer_paths`: paths of the objects in
    `Leaves`.
    """

    structure: bytes
    paths: tuple[str, ...]
    tensor_slots: tuple[int, ...]
    tensor_paths: tuple[str, ...]
    object_slots: tuple[int, ...]
    origins: tuple[Origin, ...]
    module_paths: tuple[str, ...]
    optimizer_paths: tuple[str, ...]
    root: Kid

    def collect(self, state: Mapping[Any, Any], out: Leaves) -> bool:
        """Append the leaves of `state` to `out`; False when its form differs (`out` is then void).

        Calls each `state_dict` at most once.
        """
        try:
            collect_items((self.root,), (state,), out)
        except (ChangedError, InvalidInputError):
            return False
        return True


class Walker:
    """One walk that compiles as it goes. Slots are given in walking order.

    `leaves`, `module_paths` and `optimizer_paths` may be looked at during the walk.
    """

    def __init__(self) -> None:
        self.leaves = Leaves()
        self.paths: list[str] = []
        self.tensor_slots: list[int] = []
        self.object_slots: list[int] = []
        self.origins: list[Origin] = []
        self.module_paths: list[str] = []
        self.optimizer_paths: list[str] = []
        self._inside: dict[int, str] = {}
        self._named: dict[tuple[str, ...], _Keys] = {}
        self._alike: dict[tuple[Any, ...], MappingNode] = {}
        self._containers = 0
        self._deepest = 0  # of the containers
        self._deepest_part = 0  # of keys and such: lists in lists

    def tree(self, state: dict[Any, Any]) -> Tree:
        """Walk `state`: its compiled form; `leaves` has its leaves, nothing copied yet.

        A walker walks once. Raises `InvalidInputError` (kind "unsupported-value", context "path")
        for what has no portable form, for containers that contain themselves and for more than 64
        levels.
        """
        node, kid = self.walk(state, "", 0)
        structure = msgspec.msgpack.encode(node)
        self._check_size(len(structure))
        self._check_depth(structure)
        return Tree(
            structure, tuple(self.paths), tuple(self.tensor_slots),
            tuple([self.paths[slot] for slot in self.tensor_slots]), tuple(self.object_slots),
            tuple(self.origins), tuple(self.module_paths),
            tuple(self.optimizer_paths), kid,
        )  # fmt: skip

    def _check_size(self, structure_bytes: int) -> None:
        """What no reader would take is refused here, where its place can be named."""
        reason = None
        if len(self.paths) > MAX_LEAVES:
            reason = f"{len(self.paths)} or more tensors and plain values (limit {MAX_LEAVES})"
        elif structure_bytes > MAX_STRUCTURE_BYTES:
            reason = (
                f"names and containers of {structure_bytes} bytes in all"
                f" (limit {MAX_STRUCTURE_BYTES})"
            )
        if reason is not None:
            size = Counter[str]()
            for path in self.paths:
                size[path.rpartition("/")[0]] += len(path)
            place = max(size, key=lambda at: size[at], default="")
            raise InvalidInputError(
                f"cannot save a state with {reason}; most of it is at {place!r}",
                kind="unsupported-value",
                hint="hold many small values in one list, NumPy array or tensor",
                path=place,
            )

    def _check_depth(self, structure: bytes) -> None:
        if 3 * (self._deepest + 2) + self._deepest_part < MAX_STRUCTURE_DEPTH:
            return
        try:
            check_structure(structure, "of the state")
        except CorruptionError as error:
            raise InvalidInputError(
                "cannot save the state: its containers, together with their keys, nest too deeply",
                kind="unsupported-value",
                hint="flatten it, or use plain names as keys",
                path=max(self.paths, key=lambda path: path.count("/"), default=""),
            ) from error

    def walk(
        self, value: Any, path: str, depth: int, origin: Origin | None = None
    ) -> tuple[Any, Kid]:
        kind = kind_of(value)
        if issubclass(kind, Tensor):
            return self._tensor(value, path, origin or _LOOSE)
        if is_object(value):
            self.object_slots.append(len(self.paths))
            self.paths.append(path)
            self.leaves.objects.append(value)
            return self.object_slots[-1], OBJECT
        if kind is np.ndarray:
            return self._array(value, path)
        if kind in MAPPINGS or kind in SEQUENCES or is_namedtuple(kind):
            return self._guarded(value, path, depth, origin, self._container)
        if has_method(value, "state_dict"):
            if origin is not None and id(value) not in self._inside:
                raise refuse(path, f"is a {kind.__qualname__} {_INSIDE}", _INSIDE_HINT)
            return self._guarded(value, path, depth, origin, self._stateful)
        if isinstance(value, torch.Generator):
            raise refuse(path, "is a torch.Generator", keeper_hint("generator.get_state()"))
        if isinstance(value, DataLoader):
            raise refuse(path, "is a DataLoader, which has no state_dict()", LOADER_HINT)
        if isinstance(value, Sampler):
            raise refuse(path, f"is a {kind.__name__}, which has no state_dict()", LOADER_HINT)
        encode_node(value, path)  # raises, saying what is wrong with it
        raise refuse(path, f"is of type {kind.__qualname__}", "save plain values from it")

    def _guarded(
        self,
        value: Any,
        path: str,
        depth: int,
        origin: Origin | None,
        walk: Callable[[Any, str, int, Origin | None], tuple[Any, Kid]],
    ) -> tuple[Any, Kid]:
        if depth > MAX_DEPTH:
            raise refuse(path, f"nests deeper than {MAX_DEPTH} levels", "flatten it")
        if id(value) in self._inside:
            outer = self._inside[id(value)]
            raise refuse(path, f"is the value at {outer!r}, which contains it", "break the cycle")
        self._inside[id(value)] = path
        self._deepest = max(self._deepest, depth)
        try:
            return walk(value, path, depth, origin)
        finally:
            del self._inside[id(value)]

    def _container(
        self, value: Any, path: str, depth: int, origin: Origin | None
    ) -> tuple[Any, Kid]:
        self._containers += 1  # each takes four bytes and more
        self._check_size(4 * self._containers)  # at once: met again and again, a few are many
        kind = kind_of(value)
        if kind in MAPPINGS:
            return self._mapping(value, path, depth, origin)
        fields: Sequence[str] = ()
        if is_namedtuple(kind):
            check_namedtuple(kind, path)
            fields = value._fields
        compiled = SequenceNode(value)
        nodes: list[Any] = []
        for i, item in enumerate(value):
            name = segments([fields[i]])[0] if fields else str(i)
            node, kid = self.walk(item, f"{path}/{name}", depth + 1, origin)
            nodes.append(node)
            compiled.kids.append(kid)
        if fields:
            return _packed(["nt", kind.__module__, kind.__qualname__, fields, nodes]), compiled
        if kind is deque:
            return _packed(["dq", value.maxlen, nodes]), compiled
        return _packed([SEQUENCES[kind], nodes]), compiled

    def _mapping(self, value: Any, path: str, depth: int, origin: Origin | None) -> tuple[Any, Kid]:
        kind, extra = kind_of(value), extra_of(value)
        keys, items = list(value), list(value.values())
        names, nodes = self._keys_of(keys, path)
        places = names if depth == 0 else [f"{path}/{name}" for name in names]
        pairs: list[Any] = []
        kids: list[Kid] = []
        for key, item, key_node, place in zip(keys, items, nodes, places, strict=True):
            node, kid = self.walk(item, place, depth + 1, _inherit(origin, key, item))
            pairs.append((key_node, node))
            kids.append(kid)
        compiled = self._compiled(kind, keys, nodes, extra, kids)
        if kind is defaultdict:
            factory = encode_node(defaultdict[Any, Any](value.default_factory), path)[1]
            return _packed(["dd", factory, pairs]), compiled
        tagged = [MAPPINGS[kind], pairs]
        if kind is OrderedDict and extra is not None:
            try:
                tagged.append(self._part(encode_node(extra, path)))
            except InvalidInputError as error:
                _log.warning("the metadata of the state_dict at %r is not saved: %s", path, error)
        return _packed(tagged), compiled

    def _keys_of(self, keys: list[Any], path: str) -> _Keys:
        """The names and nodes of a mapping's keys, found once for all mappings of the same ones."""
        plain = set(map(type, keys)) == {str}  # then equal keys are the same
        found = self._named.get(tuple(keys)) if plain else None
        if found is None:
            found = _Keys(_names(keys, path), [self._part(encode_key(key, path)) for key in keys])
            if plain:
                self._named[tuple(keys)] = found
        return found

    def _compiled(
        self, kind: type, keys: list[Any], nodes: list[Any], extra: Any, kids: list[Kid]
    ) -> MappingNode:
        """The compiled form, which a mapping shares with those that look the same."""
        if extra is not None or {*map(type, keys), *map(type, kids)} != {str}:
            return MappingNode(kind, keys, nodes, extra, kids)
        look = (kind, *keys, *kids)
        found = self._alike.get(look)
        if found is None:
            found = self._alike[look] = MappingNode(kind, keys, nodes, extra, kids)
        return found

    def _part(self, node: Any) -> Any:
        """`node`, which is part of a container's and no value, noting how deep its lists nest."""
        if kind_of(node) is list:
            self._deepest_part = max(self._deepest_part, nesting(node))
        return node

    def _stateful(
        self, value: Any, path: str, depth: int, origin: Origin | None
    ) -> tuple[Any, Kid]:
        inside = Origin("object")
        if isinstance(value, nn.Module):
            inside = Origin("module", len(self.leaves.modules))
            self.leaves.modules.append(value)
            self.module_paths.append(path)
        elif isinstance(value, torch.optim.Optimizer):
            inside = Origin("optimizer", len(self.leaves.optimizers))
            self.leaves.optimizers.append(value)
            self.optimizer_paths.append(path)
        compiled = StatefulNode(kind_of(value), path)
        node, compiled.kid = self.walk(ask(value, path), path, depth + 1, inside)
        return node, compiled

    def _tensor(self, tensor: Tensor, path: str, origin: Origin) -> tuple[Any, Kid]:
        if type(tensor) in PLAIN and tensor.layout in SPARSE_TAGS:
            return self._sparse(tensor, path)
        refuse_unsupported(path, tensor)
        return self._slot(tensor, path, origin), TENSOR

    def _slot(self, tensor: Tensor, path: str, origin: Origin) -> int:
        self.tensor_slots.append(len(self.paths))
        self.paths.append(path)
        self.leaves.tensors.append(tensor)
        self.origins.append(origin)
        return self.tensor_slots[-1]

    def _sparse(self, tensor: Tensor, path: str) -> tuple[Any, Kid]:
        slots: list[int] = []
        parts = sparse_parts(tensor)
        for name, part in parts.items():
            refuse_unsupported(f"{path}/{name}", part)
            slots.append(self._slot(part, f"{path}/{name}", _LOOSE))
        problem = sparse_problem(tensor, parts)
        if problem is not None:
            raise refuse(
                path,
                f"is a sparse tensor with wrong indices: {problem}",
                "make it with check_invariants=True, or coalesce() or sort it first",
            )
        layout, shape, coalesced, kind, requires_grad = sparse_facts(tensor)
        head = [SPARSE_TAGS[layout], list(shape)] + ([] if coalesced is None else [coalesced])
        return [*head, *slots, kind is nn.Parameter, requires_grad], SparseNode(tensor)

    def _array(self, array: np.ndarray[Any, Any], path: str) -> tuple[Any, Kid]:
        try:
            described = dtype_description(array.dtype)
        except InvalidInputError as error:
            raise refuse(path, error.message, error.hint or "") from None
        slot = self._slot(array_bytes(array), path, _LOOSE)
        return ["np", slot, self._part(described), list(array.shape)], ArrayNode(array)


class _Keys(NamedTuple):
    """Of the keys of a mapping: the segments of paths, and the nodes."""

    names: list[str]
    nodes: list[Any]


def _packed(node: list[Any]) -> msgspec.Raw:
    """A container's node as the bytes that it is of the document: no object of it stays."""
    return msgspec.Raw(msgspec.msgpack.encode(node))


def _names(keys: list[Any], path: str) -> list[str]:
    try:
        return segments(keys)
    except Exception as error:  # from the repr of a key
        reason = f"has a key that cannot be shown ({type(error).__name__})"
        raise refuse(path, reason, "use plain names as keys") from error


def _inherit(origin: Origin | None, key: Any, item: Any) -> Origin | None:
    """What kind of tensor the entry `key` is, inside the state_dict of a module or optimizer."""
    if origin is None or origin.kind in ("parameter", "moment", "object"):
        return origin
    if origin.kind == "module" and type(item) is nn.Parameter:
        return Origin("parameter", origin.owner, str(key))
    if origin.kind == "optimizer" and key == "state":
        return Origin("moment", origin.owner)
    return Origin("object")

"""Compiled containers of a state tree: they walk the next state along known lines.

Each node appends the leaves of a value of the same form, and raises `ChangedError` at the first
difference in keys, key types, lengths or kinds of leaf.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
import torch
from deltackpt_store.errors import DeltackptError, StateError
from deltackpt_store.values import encode_node, is_scalar, is_value
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .building import SPARSE_TAGS, sparse_tensor
from .copying import sparse_parts
from .tensors import PLAIN

ARRAY_BYTES = 64 << 10
"""NumPy arrays above this many bytes are cut into chunks like tensors; smaller ones are objects."""

MAPPINGS: dict[type, str] = {dict: "d", OrderedDict: "od", Counter: "ctr", defaultdict: "dd"}
SEQUENCES: dict[type, str] = {list: "l", tuple: "t", deque: "dq"}
LOADER_HINT = (
    "use torchdata's StatefulDataLoader, or wrap it in an object of your own whose state_dict()"
    " and load_state_dict() know the epoch and the batches taken, as the guide shows"
)
_value = functools.lru_cache(1024)(is_value)
_scalar = functools.lru_cache(1024)(is_scalar)
TENSOR, OBJECT = "tensor", "object"
_SIMPLE_KEYS = frozenset((str, int, bool, type(None)))


class ChangedError(Exception):
    """The state is not of the compiled form any more."""


class Origin(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor leaf was found: a module's parameter ("parameter"), an optimizer's state
    ("moment"), elsewhere in an object's state_dict ("object"), or outside of them ("").

    `owner` is the index into `Leaves.modules` or `Leaves.optimizers`; `name` a parameter's key.
    """

    kind: str = ""
    owner: int = -1
    name: str = ""


@dataclass(slots=True)
class Leaves:
    """The values of one walk, in slot order among tensors and among objects. Nothing is copied.

    `modules` and `optimizers`: those met, with their paths only in :class:`Tree`.
    """

    tensors: list[Tensor] = field(default_factory=lambda: list[Tensor]())
    objects: list[Any] = field(default_factory=lambda: list[Any]())
    modules: list[nn.Module] = field(default_factory=lambda: list[nn.Module]())
    optimizers: list[Any] = field(default_factory=lambda: list[Any]())


class _Node:
    """A compiled container: appends the leaves of a value of the same form."""

    def collect(self, value: Any, out: Leaves) -> None:
        """Append the leaves of `value` to `out`; every kind of container has its own way."""
        raise NotImplementedError


Kid = str | _Node  # TENSOR, OBJECT or a container


def is_object(value: Any) -> bool:
    kind = kind_of(value)
    if kind is np.ndarray:
        return value.nbytes <= ARRAY_BYTES or value.dtype.hasobject
    if _value(kind):
        return True
    return kind in SEQUENCES and all(_scalar(k) for k in set(map(type, value)))


def collect_items(kids: Sequence[Kid], items: Sequence[Any], out: Leaves) -> None:
    for kid, item in zip(kids, items, strict=True):
        if kid is TENSOR:
            if type(item) not in PLAIN:
                raise ChangedError
            out.tensors.append(item)
        elif kid is OBJECT:
            if not is_object(item):
                raise ChangedError
            out.objects.append(item)
        else:
            cast("_Node", kid).collect(item, out)


class MappingNode(_Node):
    """Shared by all mappings of the same keys, whose kids are leaves of the same kinds."""

    __slots__ = ("extra", "keys", "kids", "kind", "nodes", "tensors", "types")

    def __init__(
        self, kind: type, keys: list[Any], nodes: list[Any], extra: Any, kids: Sequence[Kid]
    ) -> None:
        self.kind = kind
        self.keys = keys
        self.types = list(map(type, keys))
        self.nodes = None if set(self.types) <= _SIMPLE_KEYS else msgspec.msgpack.encode(nodes)
        self.extra = extra
        self.kids = kids
        self.tensors = all(kid is TENSOR for kid in kids)

    def collect(self, value: Any, out: Leaves) -> None:
        if (
            type(value) is not self.kind
            or list(value) != self.keys
            or list(map(type, value)) != self.types
            or extra_of(value) != self.extra
        ):
            raise ChangedError
        if self.nodes is not None:
            nodes = [encode_node(key) for key in value]
            if msgspec.msgpack.encode(nodes) != self.nodes:  # in bytes True is not 1
                raise ChangedError
        items = list(value.values())
        if self.tensors and set(map(type, items)) <= PLAIN:
            out.tensors += items
        else:
            collect_items(self.kids, items, out)


class SequenceNode(_Node):
    __slots__ = ("kids", "kind", "maxlen")

    def __init__(self, value: Any) -> None:
        self.kind = kind_of(value)
        self.maxlen: int | None = getattr(value, "maxlen", None)
        self.kids: list[Kid] = []

    def collect(self, value: Any, out: Leaves) -> None:
        if (
            type(value) is not self.kind
            or len(value) != len(self.kids)
            or getattr(value, "maxlen", None) != self.maxlen
            or is_object(value)
        ):
            raise ChangedError
        collect_items(self.kids, value, out)


class StatefulNode(_Node):
    __slots__ = ("kid", "kind", "path")

    def __init__(self, kind: type, path: str) -> None:
        self.kind = kind
        self.path = path
        self.kid: Kid = OBJECT

    def collect(self, value: Any, out: Leaves) -> None:
        if type(value) is not self.kind:
            raise ChangedError
        if isinstance(value, nn.Module):
            out.modules.append(value)
        elif isinstance(value, torch.optim.Optimizer):
            out.optimizers.append(value)
        collect_items((self.kid,), (ask(value, self.path),), out)


class SparseNode(_Node):
    __slots__ = ("facts",)

    def __init__(self, tensor: Tensor) -> None:
        self.facts = sparse_facts(tensor)

    def collect(self, value: Any, out: Leaves) -> None:
        if type(value) not in PLAIN or sparse_facts(value) != self.facts:
            raise ChangedError
        parts = sparse_parts(value)
        if sparse_problem(value, parts) is not None:
            raise ChangedError
        out.tensors += parts.values()


class ArrayNode(_Node):
    __slots__ = ("dtype", "shape")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.dtype = array.dtype
        self.shape = array.shape

    def collect(self, value: Any, out: Leaves) -> None:
        if type(value) is not np.ndarray or (value.dtype, value.shape) != (self.dtype, self.shape):
            raise ChangedError
        out.tensors.append(array_bytes(value))


def kind_of(value: Any) -> type[Any]:
    """``type(value)``, without what a type checker may have inferred about it."""
    return cast(Any, type)(value)


def has_method(value: Any, name: str) -> bool:
    """Whether `value`, which is no class, has a method of this name.

    Some classes raise for what they do not have (a dict whose items are its attributes: KeyError).
    Where a class has it and an object of it raises, calling it will tell.
    """
    if isinstance(value, type):
        return False
    try:
        return callable(getattr(value, name, None))
    except Exception:
        return hasattr(kind_of(value), name)


def ask(value: Any, path: str) -> Any:
    """:func:`state_of`; `StateError` (kind "state-failed") when the object raises."""
    try:
        return state_of(value)
    except (ChangedError, DeltackptError):
        raise
    except Exception as error:
        raise StateError(
            f"the object at {path!r} gives no state_dict: {type(error).__name__}: {error}",
            kind="state-failed",
            hint=_way_out(value),
            path=path,
        ) from error


def _way_out(value: Any) -> str:
    """What helps where an object gives no state."""
    if isinstance(value, DataLoader):
        return LOADER_HINT
    if isinstance(value, torch.optim.Optimizer):
        groups: list[Any] = vars(value).get("param_groups", [])
        known = {id(p) for group in groups for p in group["params"]}
        held: Any = vars(value).get("state", {})
        left = [
            tuple(key.shape) for key in held if isinstance(key, Tensor) and id(key) not in known
        ]
        if left:
            return (
                f"its state has entries of {len(left)} parameters that none of its groups has"
                f" (one of shape {list(left[0])}): after taking a parameter out of a group, delete"
                " optimizer.state[parameter]"
            )
    return "mend the object, or leave it out of the state"


def state_of(value: Any) -> Any:
    """``value.state_dict()``; a module's with its Parameter objects in place of plain tensors."""
    if not isinstance(value, nn.Module):
        return value.state_dict()
    if type(value).state_dict is nn.Module.state_dict and "state_dict" not in vars(value):
        return value.state_dict(keep_vars=True)
    entries: Any = value.state_dict()
    if type(entries) not in (dict, OrderedDict):
        return entries
    parameters = dict(value.named_parameters(remove_duplicate=False))
    for key, item in list(entries.items()):
        parameter = parameters.get(key)
        if parameter is not None and type(item) is Tensor and _same_memory(item, parameter):
            entries[key] = parameter
    return entries


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (
        a.layout == b.layout == torch.strided
        and (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() == b.storage_offset()
    )


def sparse_facts(tensor: Tensor) -> tuple[Any, ...]:
    coalesced = tensor.is_coalesced() if tensor.layout == torch.sparse_coo else None
    wants_grad = tensor.requires_grad and tensor.is_leaf
    return tensor.layout, tuple(tensor.shape), coalesced, type(tensor), wants_grad


def sparse_problem(tensor: Tensor, parts: dict[str, Tensor]) -> str | None:
    """What is wrong with the indices of a sparse tensor, which PyTorch does not check when it is
    made; None when no load will refuse it."""
    layout, shape, coalesced, *_ = sparse_facts(tensor)
    try:
        sparse_tensor(SPARSE_TAGS[layout], shape, coalesced, list(parts.values()))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def array_bytes(array: np.ndarray[Any, Any]) -> Tensor:
    """The array's bytes in C order (a copy unless it is contiguous and writable)."""
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = np.array(array, order="C")
    return cast(Any, torch).from_numpy(array.reshape(-1).view(np.uint8))


def extra_of(value: Any) -> Any:
    """What a mapping holds besides its items."""
    kind = kind_of(value)
    if kind is OrderedDict:
        return getattr(value, "_metadata", None)
    return value.default_factory if kind is defaultdict else None

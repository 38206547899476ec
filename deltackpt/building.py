"""From a structure document back to the nested state (see `tree` for the nodes)."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container
from typing import Any, cast

import msgspec
import torch
from deltackpt_store.errors import CorruptionError, DeltackptError
from deltackpt_store.values import MAX_DEPTH, decode_node, dtype_from_description, make_defaultdict
from deltackpt_store.values_decode import make_namedtuple
from torch import Tensor, nn

SPARSE_TAGS: dict[torch.layout, str] = {
    torch.sparse_coo: "coo",
    torch.sparse_csr: "csr",
    torch.sparse_csc: "csc",
    torch.sparse_bsr: "bsr",
    torch.sparse_bsc: "bsc",
}
_LAYOUTS = {tag: layout for layout, tag in SPARSE_TAGS.items()}
_ABSENT = object()


def build(
    structure: bytes,
    leaf: Callable[[int], Any],
    *,
    keep: Container[int] | None = None,
    parts: Callable[[tuple[int, ...]], Any] | None = None,
) -> Any:
    """The nested state that `structure` describes, each leaf being ``leaf(slot)``.

    `leaf` gets a slot (index into `Layout.paths`) and returns a tensor (for slots of
    `Layout.tensors`, e.g. ``views.rebuild``) or a decoded value. It is called once per slot.
    With `keep`, slots outside of it are left out: dict entries without any kept leaf vanish, and
    list, tuple and namedtuple items that are not kept become None. A sparse tensor is kept when
    all of its parts are; a container that holds no leaves, when something beside it is (and always
    at the top).
    Sparse tensors and large NumPy arrays are put together here from the tensors of their parts;
    with `parts`, whatever it returns for their slots stands in their place instead.
    Raises `CorruptionError` (kind "structure") for a malformed document.
    """
    try:
        root = msgspec.msgpack.decode(structure)
        built = _Builder(leaf, keep, parts).top(root)
    except DeltackptError:
        raise
    except (msgspec.DecodeError, RecursionError, _MalformedError) as error:
        raise CorruptionError(f"malformed state structure: {error}", kind="structure") from None
    return built


class _MalformedError(Exception):
    """What is wrong with a structure document."""


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise _MalformedError(f"a list was expected, not {value!r:.80}")
    return cast("list[Any]", value)


def _parts(node: list[Any], count: int) -> list[Any]:
    if len(node) != count + 1:
        raise _MalformedError(f"{len(node) - 1} parts in a node {node[0]!r}")
    return node[1:]


class _Hollow:
    """A container in which there is no leaf, however deep."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _state_of(items: list[Any], depth: int) -> Any:
    """`_ABSENT` or `_Hollow` when that is what a container of `items` is, else None."""
    if all(type(item) is _Hollow for item in items):
        return _Hollow
    if depth and all(item is _ABSENT or type(item) is _Hollow for item in items):
        return _ABSENT
    return None


class _Builder:
    def __init__(
        self,
        leaf: Callable[[int], Any],
        keep: Container[int] | None,
        parts: Callable[[tuple[int, ...]], Any] | None,
    ) -> None:
        self._leaf = leaf
        self._keep = keep
        self._parts = parts

    def top(self, node: Any) -> Any:
        if type(node) is not list or not node or node[0] != "d":
            raise _MalformedError("its top is no dict")
        built = self.node(node, 0)
        return {} if built is _ABSENT else built.value if type(built) is _Hollow else built

    def node(self, node: Any, depth: int) -> Any:
        """The value of `node`; `_ABSENT` when it holds leaves and none is kept, `_Hollow` around a
        container without any."""
        if type(node) is int:
            return self._slot(node) if self._kept(node) else _ABSENT
        parts = _list(node)
        if not parts or type(parts[0]) is not str:
            raise _MalformedError("a node without a tag")
        if depth > 2 * MAX_DEPTH:
            raise _MalformedError("it nests too deep")
        tag: str = parts[0]
        if tag in ("d", "od", "ctr", "dd"):
            return self._mapping(tag, parts, depth)
        if tag in ("l", "t", "dq", "nt"):
            return self._sequence(tag, parts, depth)
        if tag in _LAYOUTS:
            return self._sparse(tag, parts)
        if tag == "np":
            return self._array(parts)
        raise _MalformedError(f"unknown node {tag!r:.80}")

    def _kept(self, slot: Any) -> bool:
        if type(slot) is not int or slot < 0:
            raise _MalformedError(f"slot {slot!r:.80}")
        return self._keep is None or slot in self._keep

    def _slot(self, slot: int) -> Any:
        try:
            return self._leaf(slot)
        except (IndexError, KeyError) as error:
            if isinstance(error, DeltackptError):
                raise
            raise _MalformedError(f"there is no slot {slot}") from error

    def _tensor(self, slot: int) -> Tensor:
        value = self._slot(slot)
        if not isinstance(value, Tensor):
            raise _MalformedError(f"slot {slot} is no tensor")
        return value

    def _mapping(self, tag: str, parts: list[Any], depth: int) -> Any:
        if tag == "dd":
            factory, pairs = _parts(parts, 2)
            out: Any = make_defaultdict(factory)
        else:
            if tag != "od":
                _parts(parts, 1)
            pairs = parts[1] if len(parts) > 1 else None
            out = cast(Any, {"d": dict, "od": OrderedDict, "ctr": Counter}[tag])()
        listed = _list(pairs)
        items: list[Any] = []
        for pair in listed:
            if len(_list(pair)) != 2:
                raise _MalformedError("an entry that is no pair")
            item = self.node(pair[1], depth + 1)
            items.append(item)
            if item is not _ABSENT:
                out[self._key(pair[0])] = item.value if type(item) is _Hollow else item
        if len(out) != sum(item is not _ABSENT for item in items):
            raise _MalformedError("a key occurs twice")
        if tag == "od" and len(parts) > 2:
            out._metadata = decode_node(parts[2])
        state = _state_of(items, depth)
        return state if state is _ABSENT else state(out) if state else out

    def _key(self, node: Any) -> Any:
        key = node if type(node) in (str, int) else decode_node(node)
        try:
            hash(key)
        except TypeError:
            raise _MalformedError(f"the key {key!r:.80} is not hashable") from None
        return key

    def _sequence(self, tag: str, parts: list[Any], depth: int) -> Any:
        count = {"l": 1, "t": 1, "dq": 2, "nt": 4}[tag]
        nodes = _list(_parts(parts, count)[-1])
        items = [self.node(node, depth + 1) for node in nodes]
        state = _state_of(items, depth)
        if state is _ABSENT:
            return _ABSENT
        items = [None if i is _ABSENT else i.value if type(i) is _Hollow else i for i in items]
        built = self._sequence_of(tag, parts, items)
        return state(built) if state else built

    def _sequence_of(self, tag: str, parts: list[Any], items: list[Any]) -> Any:
        if tag == "l":
            return items
        if tag == "t":
            return tuple(items)
        try:
            if tag == "dq":
                return deque(items, parts[1])
            return make_namedtuple(parts[1], parts[2], parts[3], items)
        except DeltackptError:
            raise
        except Exception as error:
            raise _MalformedError(f"bad node {tag!r}: {error}") from None

    def _sparse(self, tag: str, parts: list[Any]) -> Any:
        shape, *rest = _parts(parts, 6)
        *slots, parameter, requires_grad = rest[1:] if tag == "coo" else rest
        if not all(self._kept(slot) for slot in slots):
            return _ABSENT
        if self._parts is not None:
            return self._parts(tuple(slots))
        tensors = [self._tensor(slot) for slot in slots]
        try:
            out = sparse_tensor(tag, tuple(_list(shape)), rest[0], tensors)
            if parameter:
                return nn.Parameter(out, requires_grad=bool(requires_grad))
            return out.requires_grad_() if requires_grad else out
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise _MalformedError(f"bad sparse tensor: {error}") from None

    def _array(self, parts: list[Any]) -> Any:
        slot, description, shape = _parts(parts, 3)
        if not self._kept(slot):
            return _ABSENT
        if self._parts is not None:
            return self._parts((slot,))
        data = self._tensor(slot)
        dtype = dtype_from_description(description)
        try:
            return data.cpu().numpy().view(dtype).reshape(_list(shape))
        except (RuntimeError, TypeError, ValueError) as error:
            raise _MalformedError(f"bad array: {error}") from None


def sparse_tensor(tag: str, shape: tuple[int, ...], flag: Any, tensors: list[Tensor]) -> Tensor:
    """Put a sparse tensor together (no copy); RuntimeError when its indices are wrong."""
    make = cast(Any, torch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "support is in beta state"
        if tag == "coo":
            indices, values = tensors
            return make.sparse_coo_tensor(
                indices, values, shape, device=values.device, check_invariants=True,
                is_coalesced=bool(flag),
            )  # fmt: skip
        compressed, plain, values = tensors
        return make.sparse_compressed_tensor(
            compressed, plain, values, shape, layout=_LAYOUTS[tag], device=values.device,
            check_invariants=True,
        )  # fmt: skip

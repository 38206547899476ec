"""Tensors of a step as `torch.save` writes them: storages, and pickled views of them.

Each extent becomes one storage, so tensors that shared memory share it again after `torch.load`.
Dtypes that have a storage class of their own use it (readable by every torch); the others, and
extents that are looked at as several dtypes, use an untyped storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deltackpt_store.manifest import Snapshot, TensorView, element_bytes

from deltackpt_tools.pickle_out import PickleOut
from deltackpt_tools.pickle_values import torch_dtype
from deltackpt_tools.selection import Selection
from deltackpt_tools.tensor_bytes import TensorBytes, span, tensor_nbytes

_STORAGES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage", "int64": "LongStorage", "int32": "IntStorage",
    "int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage", "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage", "complex128": "ComplexDoubleStorage",
}  # fmt: skip
_ALIGN = 16  # bytes; the widest element


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    extent: int
    start: int
    stop: int
    kind: str | None
    """Storage class, None for an untyped one."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Storages:
    """Which storages a file gets. `lone` are tensors whose place in their extent torch cannot
    express (an offset that is no multiple of the element): they get a storage of their own."""

    def __init__(self, snapshot: Snapshot, selection: Selection) -> None:
        self._snapshot = snapshot
        by_extent: dict[int, list[TensorView]] = {}
        self.lone: list[TensorView] = []
        for view in selection.tensors:
            if view.offset % element_bytes(view.dtype):
                self.lone.append(view)
            else:
                by_extent.setdefault(view.extent, []).append(view)
        self._groups = [views for views in by_extent.values() if len(views) > 1]
        self._of_slot: dict[int, _Storage] = {}
        self._order: list[_Storage] = []
        for extent, views in sorted(by_extent.items()):
            storage = self._shared(extent, views)
            self._order.append(storage)
            self._of_slot.update((view.slot, storage) for view in views)

    def _shared(self, extent: int, views: list[TensorView]) -> _Storage:
        start = min(view.offset for view in views) // _ALIGN * _ALIGN
        stop = max(start, *(span(view)[1] for view in views))
        dtypes = {view.dtype for view in views}
        kind = _STORAGES.get(dtypes.pop()) if len(dtypes) == 1 else None
        if kind is not None and (stop - start) % element_bytes(views[0].dtype):
            kind = None
        return _Storage(str(len(self._order)), extent, start, stop, kind)

    def records(self, source: TensorBytes) -> Iterator[tuple[str, int, Iterator[memoryview]]]:
        """(record name, bytes, pieces) of every storage, in order."""
        for storage in self._order:
            pieces = source.extent(storage.extent, storage.start, storage.stop)
            yield f"data/{storage.key}", storage.nbytes, pieces
        for view in self.lone:
            yield f"data/lone{view.slot}", tensor_nbytes(view), source.tensor(view)

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self._order) + sum(map(tensor_nbytes, self.lone))

    def tied(self, paths: Sequence[str]) -> list[list[str]]:
        """Paths of the tensors that share a storage, group by group."""
        return [sorted(paths[view.slot] for view in views) for views in self._groups]

    def emit(self, out: PickleOut, view: TensorView) -> None:
        """Push the tensor `view` as ``torch._utils._rebuild_*`` calls."""
        if view.parameter:
            self.parameter(out, lambda: self._tensor(out, view, False), view.requires_grad)
        else:
            self._tensor(out, view, view.requires_grad)

    @staticmethod
    def parameter(out: PickleOut, tensor: Callable[[], object], requires_grad: bool) -> None:
        """Push the tensor that `tensor` pushes, as an nn.Parameter."""
        out.call(
            "torch._utils", "_rebuild_parameter",
            lambda: (tensor(), out.boolean(requires_grad),
                     out.dict_of(lambda: None, ordered=True)), count=3,
        )  # fmt: skip

    def _tensor(self, out: PickleOut, view: TensorView, requires_grad: bool) -> None:
        storage = self._of_slot.get(view.slot)
        width = element_bytes(view.dtype)
        if storage is None:
            storage = _Storage(f"lone{view.slot}", view.extent, 0, tensor_nbytes(view), None)
            offset, stride, conj, neg = 0, _row_major(view.shape), False, False
        else:
            offset, stride = (view.offset - storage.start) // width, view.stride
            conj, neg = view.conj, view.neg

        def flags() -> None:
            for name, on in (("conj", conj), ("neg", neg)):
                if on:
                    out.text(name)
                    out.boolean(True)

        def arguments() -> None:
            self._persistent(out, storage, width)
            out.integer(offset)
            out.integers(view.shape)
            out.integers(stride)
            out.boolean(requires_grad)
            out.dict_of(lambda: None, ordered=True)
            if storage.kind is None:
                torch_dtype(out, view.dtype)
            if conj or neg:
                out.dict_of(flags)

        function = "_rebuild_tensor_v3" if storage.kind is None else "_rebuild_tensor_v2"
        count = 6 + (storage.kind is None) + (conj or neg)
        out.call("torch._utils", function, arguments, count=count)

    @staticmethod
    def _persistent(out: PickleOut, storage: _Storage, width: int) -> None:
        def emit() -> None:
            out.text("storage")
            if storage.kind is None:
                out.name("torch.storage", "UntypedStorage", safe=True)
            else:
                out.name("torch", storage.kind, safe=True)
            out.text(storage.key)
            out.text("cpu")
            out.integer(storage.nbytes if storage.kind is None else storage.nbytes // width)

        out.persistent(emit, count=5)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))

"""Tensor bytes out of a store in bounded pieces, without torch.

An extent may be larger than memory, and a tensor may look at its extent in any stride. Contiguous
tensors are passed through window by window. Others are gathered from a scratch copy of the part of
the extent they look at: in memory when small, else in an unlinked temporary file that is mapped, so
that the system can drop its pages.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from math import prod
from typing import Any

import msgspec
import numpy as np
from deltackpt_store.errors import InvalidInputError, StorageError
from deltackpt_store.manifest import Snapshot, TensorView, element_bytes
from deltackpt_store.reader import ChunkReader
from numpy.typing import NDArray

from deltackpt_tools.damage import naming_tensors

WINDOW = 32 * 1024 * 1024  # bytes read from the store at once
BLOCK = 8 * 1024 * 1024  # bytes gathered at once
SCRATCH = 64 * 1024 * 1024  # larger pieces that must be gathered go to a temporary file


class TensorBytes:
    """Reads the extents and tensors of one snapshot. Not thread-safe.

    Every yielded buffer is valid until the next one is asked for. All bytes have been checked
    against their chunk ids; CorruptionError naming the tensors otherwise. `scratch_folder` (None:
    that of temporary files) must have room for the largest tensor that is not contiguous.
    """

    def __init__(
        self, snapshot: Snapshot, reader: ChunkReader, scratch_folder: str | None = None
    ) -> None:
        self._snapshot = snapshot
        self._reader = reader
        self._folder = scratch_folder
        self._window = bytearray()

    def extent(self, index: int, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
        """Bytes `start`..`stop` of an extent, in order."""
        spec = self._snapshot.layout.extents[index]
        stop = spec.nbytes if stop is None else stop
        if start >= stop:
            return
        if spec.inline:
            yield memoryview(self._snapshot.inline[index])[start:stop]
            return
        ids = self._snapshot.chunks[index]
        size = spec.chunk_bytes
        at_once = max(1, WINDOW // size)
        if len(self._window) < min(at_once * size, spec.nbytes):
            self._window = bytearray(min(at_once * size, spec.nbytes))
        window = memoryview(self._window)
        end = -(-stop // size)
        for first in range(start // size, end, at_once):
            last = min(first + at_once, end)
            base = first * size
            wanted = [
                (ids[chunk].tobytes(), window[chunk * size - base :][: spec.chunk_length(chunk)])
                for chunk in range(first, last)
            ]
            with naming_tensors(self._snapshot):
                self._reader.read(wanted)
            yield window[max(start, base) - base : min(stop, last * size) - base]

    def tensor(self, view: TensorView) -> Iterator[memoryview]:
        """The tensor's elements as they count (conj and neg bits applied), row-major.

        InvalidInputError when they are too many for any file.
        """
        width, nbytes = element_bytes(view.dtype), tensor_nbytes(view)
        if nbytes == 0:
            return
        if nbytes >= 1 << 63:
            path = self._snapshot.layout.paths[view.slot]
            raise InvalidInputError(
                f"tensor {path!r} repeats its elements to {nbytes} bytes: nothing can hold them",
                kind="too-large", hint="leave it out by --only or --prefix", path=path,
            )  # fmt: skip
        if is_contiguous(view) and not (view.conj or view.neg):
            yield from self.extent(view.extent, view.offset, view.offset + nbytes)
            return
        start, stop = span(view)
        with _scratch(stop - start, self._folder) as memory:
            position = 0
            for piece in self.extent(view.extent, start, stop):
                memory[position : position + len(piece)] = piece
                position += len(piece)
            array: NDArray[Any] = np.ndarray(
                view.shape,
                _element(width),
                buffer=memory,
                strides=tuple(step * width for step in view.stride),
            )
            for block in _blocks(array):
                yield _resolved(block, view, width).data
            del array


class _scratch:  # noqa: N801 - used as a function, in a with statement
    """`size` zeroed bytes, in memory or in an unlinked file in `folder` (None: where temporary
    files go)."""

    def __init__(self, size: int, folder: str | None) -> None:
        self._map: mmap.mmap | None = None
        if size <= SCRATCH:
            self._memory = memoryview(bytearray(size))
            return
        with tempfile.TemporaryFile(dir=folder or _temporary_directory()) as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._memory = memoryview(self._map)

    def __enter__(self) -> memoryview:
        return self._memory

    def __exit__(self, *_: object) -> None:
        # The mapping goes with its last view: a consumer may still hold the array of the last
        # block, and closing a mapping under it is an error.
        self._memory = memoryview(b"")
        self._map = None


def _temporary_directory() -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise StorageError(
            f"there is no folder for temporary files: {error.strerror or error}",
            hint="set TMPDIR to a folder that can be written to",
            errno=error.errno,
        ) from error


def _element(width: int) -> np.dtype[Any]:
    """A NumPy type of that many bytes, copied as bits: of all widths, powers of two copy fast."""
    return np.dtype(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}")


def tensor_nbytes(view: TensorView) -> int:
    """Bytes of the tensor's elements, each counted once for every index."""
    return prod(view.shape) * element_bytes(view.dtype)


def span(view: TensorView) -> tuple[int, int]:
    """First and end byte of the extent that the tensor looks at (gaps of strides included)."""
    if 0 in view.shape:
        return view.offset, view.offset
    last = sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))
    return view.offset, view.offset + (last + 1) * element_bytes(view.dtype)


def is_contiguous(view: TensorView) -> bool:
    """Whether the elements lie row-major without gaps (strides of single-element axes are free)."""
    expected = 1
    for size, step in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def without_repeats(*views: TensorView) -> tuple[list[TensorView], int]:
    """`views`, of one shape, without the axes along which all of them repeat their elements (those
    of `expand`), and how many times each element that is left counts."""
    steps = list(zip(*(view.stride for view in views), strict=True))
    sizes = views[0].shape
    repeats = [n if n > 1 and not any(s) else 1 for n, s in zip(sizes, steps, strict=True)]
    shape = tuple(n // r for n, r in zip(sizes, repeats, strict=True))
    return [msgspec.structs.replace(view, shape=shape) for view in views], prod(repeats)


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    """`array` as flat contiguous private copies of at most BLOCK bytes (one element at least)."""
    if array.nbytes <= BLOCK or array.ndim == 0:
        copy = np.array(array, order="C", copy=True)
        yield copy.reshape(-1).view(np.uint8)
        return
    rows = max(1, BLOCK // (array.nbytes // array.shape[0] or 1))
    for first in range(0, array.shape[0], rows):
        part = array[first : first + rows]
        yield from _blocks(part[0] if len(part) == 1 else part)


def _resolved(flat: NDArray[np.uint8], view: TensorView, width: int) -> NDArray[np.uint8]:
    """Apply the conj and neg bits: both are changes of sign bits only (little-endian)."""
    if view.conj:
        half = width // 2
        flat.reshape(-1, width)[:, 2 * half - 1] ^= 0x80
    if view.neg:
        part = width // 2 if view.dtype.startswith("complex") else width
        flat.reshape(-1, part)[:, part - 1] ^= 0x80
    return flat

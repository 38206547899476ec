"""The safetensors file format, written without torch, NumPy or the safetensors package.

A file is an 8-byte little-endian length, a JSON header of that length (padded with blanks to a
multiple of 8), then the tensors' bytes, row-major, back to back in the order of their offsets,
without holes or overlaps. https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# torch dtype name -> (name in the file, bytes per element)
DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1),
    "bool": ("BOOL", 1), "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1), "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1), "float4_e2m1fn_x2": ("F4", 1),
}  # fmt: skip
PAIRED = frozenset(("float4_e2m1fn_x2",))
"""Two elements of the format in one of torch's: its last dimension is twice as long there."""

MAX_HEADER = 100_000_000  # readers refuse longer headers


class Entry(NamedTuple):
    """One tensor to be written: its bytes are row-major and `nbytes` long; `shape` is torch's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def problem(dtype: str, shape: Sequence[int]) -> str | None:
    """Why the format cannot hold a tensor; None when it can."""
    if dtype not in DTYPES:
        return f"the format has no dtype {dtype}"
    if dtype in PAIRED and not shape:
        return f"the format has no {dtype} without a dimension: it counts halves"
    return None


def ordered(entries: Sequence[Entry]) -> list[Entry]:
    """The order of the data: widest elements first, so that every tensor stays aligned, then by
    name."""
    return sorted(entries, key=lambda entry: (-DTYPES[entry.dtype][1], entry.name))


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and JSON header for `entries`, whose bytes must follow in exactly this order.

    ValueError when it would be longer than readers accept.
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        fields[entry.name] = {
            "dtype": DTYPES[entry.dtype][0],
            "shape": _shape(entry),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(f"the header of {len(text)} bytes is over the limit of {MAX_HEADER}")
    return struct.pack("<Q", len(text)) + text


def _shape(entry: Entry) -> list[int]:
    if entry.dtype in PAIRED:
        return [*entry.shape[:-1], 2 * entry.shape[-1]]
    return list(entry.shape)

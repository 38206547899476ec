"""States for the golden store: every dtype, layout and kind of value, all from fixed seeds; and a
description of any state by plain values and bytes, which knows nothing of the product."""

from __future__ import annotations

import datetime
import enum
import pathlib
import struct
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import torch
from torch import nn

Point = namedtuple("Point", "x y")


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = "eval"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32", "complex64",
    "complex128", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip


def rows(seed: int, *shape: int) -> torch.Tensor:
    data = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return torch.from_numpy(data)


def of_dtype(name: str, count: int) -> torch.Tensor:
    """`count` elements, 0 for just more than travel inline. All bit patterns are equally likely,
    NaNs of every kind included; bools are 0 and 1."""
    dtype = getattr(torch, name)
    size = torch.empty(0, dtype=torch.uint8).view(dtype).element_size()
    count = count or 520 // size  # too large to travel inline
    raw = np.random.default_rng(DTYPES.index(name)).integers(0, 256, count * size, np.uint8)
    if name == "bool":
        raw &= 1
    return torch.from_numpy(raw).view(dtype)


def layouts() -> dict[str, Any]:
    big, tied = rows(1, 24, 36), rows(2, 20, 20)
    wide = torch.complex(rows(3, 12, 12), rows(4, 12, 12))
    return {
        "transposed": big.t(), "whole": big, "first": big[:10], "overlapping": big[5:20],
        "strided": rows(5, 16, 33)[:, ::3],
        "channels_last": rows(6, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last),
        "expanded": rows(7, 1, 256).expand(20, 256), "scalar": torch.tensor(2.5),
        "step": torch.tensor(7), "tied": [tied, tied, nn.Parameter(tied)],
        "frozen": nn.Parameter(rows(8, 9), requires_grad=False),
        "leaf": rows(9, 5).requires_grad_(),
        "empty": [torch.zeros(0), torch.zeros(0, 3, dtype=torch.int16), torch.zeros(2, 0)],
        "conj": wide.conj(), "neg": torch.complex(rows(10, 4, 9), rows(11, 4, 9)).conj().imag,
    }  # fmt: skip


def sparse() -> dict[str, Any]:
    dense = rows(12, 12, 18) * (rows(13, 12, 18) > 1)
    uncoalesced = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2], [1, 1, 5]]), torch.tensor([1.0, 2.0, -0.0]), (4, 6),
        check_invariants=True,
    )  # fmt: skip
    return {
        "coo": dense.to_sparse(), "uncoalesced": uncoalesced, "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(), "bsr": dense.to_sparse_bsr((3, 3)),
        "bsc": dense.to_sparse_bsc((3, 3)),
    }  # fmt: skip


def plain_values() -> dict[str, Any]:
    """Object leaves with every tag of a value document, and structure with every tag of a node."""
    east = datetime.timezone(datetime.timedelta(hours=5, minutes=30))
    named = datetime.timezone(datetime.timedelta(seconds=-7), "odd")
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
    noted: OrderedDict[str, Any] = OrderedDict(w=rows(14, 3))
    noted._metadata = OrderedDict(  # as modules do it
        a={"version": 1, "counts": Counter(x=2)}, b=defaultdict(list, k=[1]), c=deque([1], 3)
    )
    shared = defaultdict(int, hits=3, t=rows(15, 2))  # any value
    return {
        "scalars": [None, True, False, 0, -1, 1 << 63, -(1 << 63), 0.1, -0.0, nan, float("-inf")],
        "text": "ä/~ \U0001f600", "surrogate": "a\ud800", "bytes": b"\0\xff",
        "bytearray": bytearray(b"ab"),
        "big": [1 << 64, -(1 << 70), 10**40], "complex": complex(-0.0, nan),
        "list": [], "tuple": (1, "a"), "deque": deque([1, 2], 5), "set": {3, 1, "x"},
        "frozen": frozenset({(1, 2), "y"}), "counter": Counter(b=2, a=-1), "default": shared,
        "nested": [1, (2, {"deep": [rows(16, 2), deque([rows(17, 2)], 4)]})],
        "point": Point(1, rows(18, 3)), "plain_point": Point(1, 2.5), "noted": noted,
        "keys": {0: "int", "0": "str", -1: 1, None: 2, True: 3, 2.5: 4, (1, frozenset({2})): 5,
                 b"k": 6, "a/b~c": 7, "": 8, "nan": 9, Mode.EVAL: 10, Point(1, 2): 11},
        "numpy": np.arange(6, dtype=">f4").reshape(2, 3), "half": np.float16(1.5),
        "struct": np.zeros(2, [("a", "<i2"), ("b", "<f8", (2,))]), "date64": np.datetime64(5, "ms"),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int8).reshape(2, 3)),
        "npdtype": np.dtype("<U5"), "large": np.arange(8448, dtype="<i8") % 128,
        "enum": [Mode.TRAIN, Mode.EVAL], "flags": [Access.READ | Access.WRITE, Access(0)],
        "path": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:\\d"),
                 pathlib.Path("/e")],
        "date": datetime.date(2024, 2, 29), "delta": datetime.timedelta(-1, 5, 7),
        "time": [datetime.time(1, 2, 3, 4, east), datetime.time(5, fold=1)],
        "datetime": [datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=berlin),
                     datetime.datetime(1999, 12, 31, tzinfo=named), datetime.datetime(1, 1, 1)],
        "torch": [torch.bfloat16, torch.strided, torch.channels_last, torch.device("cuda:3"),
                  torch.Size([2, 0])],
    }  # fmt: skip


class Training:
    """A model, an optimizer and a scheduler, stepped with fixed gradients."""

    def __init__(self, *, tie: bool = True) -> None:
        self.model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        if tie:
            self.model[2].weight = self.model[0].weight
        with torch.no_grad():
            for i, parameter in enumerate(self.model.parameters()):
                parameter.copy_(rows(100 + i, *parameter.shape))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.objects = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
        }  # fmt: skip

    def step(self, number: int) -> None:
        for i, parameter in enumerate(self.model.parameters()):
            parameter.grad = rows(1000 * number + i, *parameter.shape)
        self.model[1].running_mean += number
        self.optimizer.step()
        self.scheduler.step()


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in C order, conj and neg applied, as raw bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return plain.view(widths[plain.itemsize]).numpy().tobytes()


# description ------------------------------------------------------------------------------------


class Describer:
    """Describes states as JSON; the bytes of tensors and arrays go to `values`, each once."""

    def __init__(self, values: bytes = b"") -> None:
        self.values = bytearray(values)
        self._memory: dict[int, int] = {}

    def state(self, value: Any) -> Any:
        """One state. Tensors get a number that only those with common memory share."""
        self._memory = {}
        return self.any(value)

    def raw(self, data: bytes) -> list[list[int]]:
        """Where the data lies in `values`: ranges, each once, equal neighbours as one with a count
        of repetitions."""
        ranges: list[list[int]] = []
        for i in range(0, len(data), 1024):
            piece = data[i : i + 1024]
            at = self.values.find(piece)
            if at < 0:
                at = len(self.values)
                self.values += piece
            last = ranges[-1] if ranges else [0, 0, 0]
            if last[:2] == [at, len(piece)]:
                last[2] += 1
            elif last[0] + last[1] == at and last[2] == 1:
                last[1] += len(piece)
            else:
                ranges.append([at, len(piece), 1])
        return ranges

    def any(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, nn.Module):
            return self.any(value.state_dict(keep_vars=True))
        if hasattr(value, "state_dict"):
            return self.any(value.state_dict())
        name = type(value).__name__
        if isinstance(value, dict):
            extra = [str(value.default_factory)] if isinstance(value, defaultdict) else []
            if getattr(value, "_metadata", None) is not None:
                extra = [self.any(value._metadata)]
            return [name, [[self.any(k), self.any(v)] for k, v in value.items()], *extra]
        if isinstance(value, (set, frozenset)):
            return [name, sorted((self.any(item) for item in value), key=repr)]
        if isinstance(value, (list, tuple, deque)):
            extra = [value.maxlen] if isinstance(value, deque) else []
            return [name, [self.any(item) for item in value], *extra]
        if isinstance(value, (np.ndarray, np.generic)):
            shape = list(value.shape)
            return [name, str(value.dtype.descr), shape, self.raw(value.tobytes())]
        if isinstance(value, float):
            return ["float", struct.pack("<d", value).hex()]
        if isinstance(value, complex):
            return ["complex", struct.pack("<dd", value.real, value.imag).hex()]
        if isinstance(value, (datetime.datetime, datetime.time)):
            zone = value.tzinfo
            return [name, value.isoformat(), value.fold, None if zone is None else str(zone)]
        return [name, ascii(value)]

    def tensor(self, value: torch.Tensor) -> Any:
        facts: list[Any] = [str(value.dtype), list(value.shape)]
        facts += [isinstance(value, nn.Parameter), value.requires_grad]
        value = value.detach()
        if value.layout != torch.strided:
            names = {
                torch.sparse_coo: ("_indices", "_values"),
                torch.sparse_csr: ("crow_indices", "col_indices", "values"),
                torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
            }.get(value.layout, ("ccol_indices", "row_indices", "values"))
            coalesced = value.is_coalesced() if value.layout == torch.sparse_coo else None
            parts = [self.tensor(getattr(value, name)()) for name in names]
            return ["sparse", str(value.layout), *facts, coalesced, parts]
        where = value.untyped_storage().data_ptr() if value.numel() else -len(self._memory)
        number = self._memory.setdefault(where, len(self._memory))
        facts += [value.is_conj(), value.is_neg(), number]
        return ["tensor", *facts, self.raw(bits(value))]

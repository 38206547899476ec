"""Plain values in exported torch files: exact, and never a way to run code."""

from __future__ import annotations

import collections
import datetime
import io
import json
import pathlib
import pickle
import pickletools
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from deltackpt_store.errors import CorruptionError
from deltackpt_store.values import encode
from deltackpt_tools.output import plain
from deltackpt_tools.pickle_out import PickleOut
from deltackpt_tools.pickle_values import ValueEmitter
from deltackpt_tools.value_text import as_json, render
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._weights_only_unpickler import load

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**300), 2**300)
    | st.floats(allow_nan=True, allow_infinity=True) | st.text() | st.binary()
    | st.characters(categories=["Cs"]) | st.complex_numbers() | st.dates() | st.datetimes()
    | st.timedeltas() | st.times() | st.just(pathlib.PurePosixPath("a/b"))
)  # fmt: skip
KEYS = (
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict)
        | st.dictionaries(KEYS, inner, max_size=4).map(lambda d: collections.defaultdict(list, d))
        | st.lists(inner, max_size=4).map(lambda items: collections.deque(items, 7))
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=12,
)

# Everything a file may name. All of it builds plain values.
ALLOWED = {
    "builtins": {"set", "frozenset", "complex", "bytearray",
                 "list", "dict", "int", "float", "str", "tuple", "bool"},
    "collections": {"OrderedDict", "Counter", "defaultdict", "deque"},
    "_codecs": {"encode"}, "operator": {"getitem"}, "numpy": {"ndarray", "dtype"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "datetime": {"datetime", "date", "time", "timedelta", "timezone"},
    "zoneinfo": {"ZoneInfo"}, "torch.serialization": {"_get_layout"},
}  # fmt: skip


def exported(document: bytes) -> bytes:
    out = PickleOut()
    ValueEmitter(out).document(document, "v")
    return out.finish()


def same(left: Any, right: Any) -> bool:
    """Equal, of one type all the way down, floats by their bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (list, tuple, collections.deque)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_values_come_out_exactly_as_they_went_in(value: Any) -> None:
    pickled = exported(encode(value))
    assert same(pickle.loads(pickled), value)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_torch_reads_the_values_it_can_with_weights_only(value: Any) -> None:
    out = PickleOut()
    ValueEmitter(out).document(encode(value), "v")
    pickled = out.finish()
    if not out.unsafe:
        buffer = io.BytesIO(pickled)
        assert same(load(buffer, encoding="utf-8"), value)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("digits", [600, 5000])
def test_integers_of_more_digits_than_python_writes_are_shown(digits: int, sign: int) -> None:
    """Prevents: `show --json` that ends with an error of the program."""
    value = sign * 10**digits
    document = encode([{"a": value}])
    assert ("0x" in render(document)) is (digits > 600)
    (shown,) = json.loads(json.dumps(as_json(document)))
    found = shown["a"]
    equal = (int(found, 16) if isinstance(found, str) else found) == value  # not for pytest to show
    assert equal


TAGS = [
    "l", "t", "d", "od", "dd", "ctr", "dq", "set", "fset", "int", "str", "cplx", "ba", "np", "nps",
    "npd", "nt", "enum", "path", "dt", "date", "time", "td", "torch.dtype", "torch.device",
    "torch.size", "torch.layout", "torch.memory_format", "x.y",
]  # fmt: skip
INTEGERS = st.integers(-(2**63), 2**63 - 1)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(st.sampled_from(TAGS), st.lists(inner, max_size=4)).map(
            lambda node: [node[0], *node[1]]
        )
    ),
    max_leaves=15,
)


@given(DOCUMENTS)
@settings(max_examples=500, deadline=None)
def test_crafted_documents_are_refused_or_harmless(node: Any) -> None:
    """A store from somebody else must neither crash the tools nor choose what a pickle calls."""
    document = msgspec.msgpack.encode(node)
    assert isinstance(render(document), str)
    json.dumps(plain(as_json(document)), allow_nan=False)
    try:
        pickled = exported(document)
    except CorruptionError:
        return
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "GLOBAL":
            module, name = str(argument).split(" ")
            assert module == "torch" or name in ALLOWED[module]
        assert operation.name not in ("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL")


@pytest.mark.parametrize("tag", ["nt", "enum"])
def test_a_namedtuple_called_os_system_is_a_tuple(tag: str) -> None:
    """With pickle, this document would run a command on the machine of whoever loads the file."""
    payload = [["command"], ["touch /tmp/owned"]] if tag == "nt" else ["system"]
    pickled = exported(msgspec.msgpack.encode([tag, "os", "system", *payload]))
    assert not [op for op, _, _ in pickletools.genops(pickled) if op.name == "GLOBAL"]


@given(st.integers(0, 3), st.sampled_from(["<f4", ">i2", "|b1", "<c16", "<M8[ns]", "<U3"]))
@settings(max_examples=60, deadline=None)
def test_arrays_come_out_exactly(dimensions: int, dtype: str) -> None:
    raw = np.zeros((2,) * dimensions, dtype)
    loaded = pickle.loads(exported(encode(raw)))
    assert type(loaded) is np.ndarray
    assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (raw.dtype, raw.shape, raw.tobytes())
    scalar = pickle.loads(exported(encode(raw.reshape(-1)[0])))
    assert type(scalar) is type(raw.reshape(-1)[0])
    assert scalar.tobytes() == raw.reshape(-1)[0].tobytes()


def test_zones_and_folds_come_out() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=1, minutes=30), "HALF")
    for value in (
        datetime.datetime(2026, 1, 2, 3, tzinfo=zone, fold=1),
        datetime.time(3, 4, tzinfo=datetime.UTC),
        datetime.datetime(2026, 1, 2, fold=1),
    ):
        loaded = pickle.loads(exported(encode(value)))
        assert (loaded, loaded.fold, loaded.tzname()) == (value, value.fold, value.tzname())

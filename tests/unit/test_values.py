"""Python state comes back with other types, or runs code on restore: both would go unnoticed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import enum
import functools
import io
import pathlib
import pickle
import random
import struct
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from deltackpt_store.errors import CorruptionError, InvalidInputError, UnsupportedFormatError
from deltackpt_store.values import MAX_DEPTH, Placeholder, register
from deltackpt_store.values_decode import DECODERS

from deltackpt.values import decode, dtype_from_name, dtype_name, encode


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Outer:
    class Shade(enum.IntEnum):
        DARK = 3


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_00AB_CDEF))[0]
SIGNALLING = struct.unpack("<d", struct.pack("<Q", 0xFFF0_0000_0000_0001))[0]

VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63, 2**64 - 1, -(2**63), 1.5, float("inf"), "text", "", "\0\n",
    "\ud800 alone", b"", b"\x00\xff", bytearray(b"ab"), 1 - 2j,
    2**64, -(2**63) - 1, 2**4000, -(2**4000),  # beyond msgpack
    [], (), {}, set(), frozenset(), [1, [2, (3,)]], (1, "a", None), {1, "a", (2, 3)},
    frozenset((1, 2)), collections.OrderedDict(b=1, a=2), collections.Counter("abca"),
    collections.deque([1, 2], 7), collections.deque([1]),
    collections.defaultdict(list, {"a": [1]}), collections.defaultdict(None, {1: 2}),
    Colour.RED, Outer.Shade.DARK, Access.READ | Access.WRITE, Access(0), Point(1, [Point(2, None)]),
    pathlib.Path("/a/b"), pathlib.Path("x"), pathlib.PurePosixPath("/p"),
    pathlib.PureWindowsPath("c:\\x"),
    datetime.date(2020, 2, 29), datetime.timedelta(-5, 3, 1), datetime.time(1, 2, 3, 4),
    datetime.datetime(2024, 1, 1, 12, fold=1),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(-datetime.timedelta(hours=3.5), "X")),
    datetime.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("é"), np.str_(""), np.bytes_(b"x"),
    np.str_("x\0"), np.str_("\0\0"), np.str_("\U0001f600\0"), np.bytes_(b"a\0"), np.bytes_(b"\0"),
    np.datetime64("2020-01-01T00:00", "ns"), np.complex64(1j), np.dtype("<f4"),
    torch.bfloat16, torch.float8_e4m3fn, torch.device("cuda:1"), torch.device("cpu"),
    torch.Size([2, 3]), torch.Size([]), torch.strided, torch.channels_last,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_with_their_exact_type(value: Any) -> None:
    # case 34, case 36
    back = decode(encode(value))
    assert type(back) is type(value)
    assert back == value
    # also inside containers: True is not 1, (1,) is not [1]; a set is in no order
    shown = sorted if isinstance(value, (set, frozenset)) else list
    assert shown(repr(back)) == shown(repr(value))


@pytest.mark.parametrize("value", [NAN, SIGNALLING, -0.0, 5e-324], ids=["nan", "snan", "-0", "sub"])
def test_floats_keep_all_bits(value: float) -> None:
    # case 23, case 34
    assert struct.pack("<d", decode(encode(value))) == struct.pack("<d", value)
    back = decode(encode([value, complex(value, value)]))
    assert struct.pack("<d", back[0]) == struct.pack("<d", value)
    assert struct.pack("<2d", back[1].real, back[1].imag) == struct.pack("<2d", value, value)


def test_dict_keys_keep_their_type() -> None:
    # case 29
    value = {0: "a", "0": "b", (1, 2): "c", True: "d", None: "e", 1.5: "f", b"0": "g"}
    back = decode(encode(value))
    assert list(back.items()) == list(value.items())
    assert list(map(type, back)) == list(map(type, value))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<u4").reshape(2, 3),
        np.arange(6, dtype=">i2").reshape(3, 2).T,
        np.array(3.5),
        np.zeros((0, 3), "<f8"),
        np.array(["ab", "c"]),
        np.array([b"ab", b""]),
        np.array([(1, (2, 3))], dtype=[("a", "<f4"), ("b", ">i2", (2,))]),
        np.zeros(2, [("outer", [("inner", "<f4", (2, 2)), (("title", "name"), "<i2")])]),
        np.frombuffer(bytes(range(32)), np.dtype([("a", "i1"), ("b", "<f8")], align=True)),
        np.array([1, 2], "<M8[ns]"),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
    ],
    ids=lambda a: str(a.dtype),
)
def test_arrays(array: np.ndarray[Any, Any]) -> None:
    back = decode(encode(array))
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable
    assert back.flags.owndata


def test_random_generator_states() -> None:
    # case 34
    generator = np.random.Generator(np.random.SFC64(5))
    for state in (
        random.getstate(),
        np.random.get_state(),
        np.random.get_state(legacy=False),
        generator.bit_generator.state,
        np.random.default_rng(1).bit_generator.state,
    ):
        back = decode(encode(state))
        assert repr(back) == repr(state)
    legacy = decode(encode(np.random.get_state()))
    assert type(legacy) is tuple
    assert legacy[1].dtype == np.uint32
    generator.bit_generator.state = decode(encode(generator.bit_generator.state))


REFUSED: list[tuple[Any, str]] = [
    (lambda: 1, "lambda"),
    (print, "function"),
    ([].append, "function"),
    (functools.partial(print), "partial"),
    (Settings(), "asdict"),
    (Settings, "class"),
    (random.Random(), "getstate"),
    (np.random.default_rng(), "bit_generator.state"),
    (np.random.RandomState(1), "state"),
    (iter([1]), "position"),
    ((i for i in ()), "position"),
    (object(), "state_dict"),
    (np.array([object()]), "Python objects"),
    (np.rec.array([(1,)]), "asarray"),
    (np.ma.array([1]), "getmaskarray"),
    (collections.defaultdict(lambda: 1), "factory"),
    (type("D", (dict,), {})(a=1), "subclass of dict"),
    (type("T", (tuple,), {})((1,)), "subclass of tuple"),
    (type("I", (int,), {})(1), "subclass of int"),
    (enum.Enum("Local", "A", qualname="f.<locals>.Local").A, "module"),
    (datetime.datetime(2024, 1, 1, tzinfo=type("Z", (datetime.tzinfo,), {})()), "zoneinfo"),
]


@pytest.mark.parametrize(("value", "word"), REFUSED, ids=lambda v: v if type(v) is str else "")
def test_what_has_no_portable_form_is_refused_with_its_path(value: Any, word: str) -> None:
    # case 32, case 36
    with pytest.raises(InvalidInputError, match="scheduler/lr_lambdas/0") as caught:
        encode({"lr_lambdas": [value]}, "scheduler")
    assert caught.value.kind == "unsupported-value"
    assert caught.value.context["path"] == "scheduler/lr_lambdas/0"
    assert word in str(caught.value)
    assert caught.value.hint
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_cycles_and_depth() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(InvalidInputError, match="contains itself"):
        encode(cycle)
    shared = [1, 2]
    assert decode(encode([shared, shared])) == [[1, 2], [1, 2]]
    deep: Any = 0
    for _ in range(MAX_DEPTH):
        deep = [deep, "x"]
    assert decode(encode(deep)) == deep


def test_sets_encode_alike_in_every_process() -> None:
    """Two bit-identical states must have one identity, whatever the hash seed was."""
    one, other = {f"key{i}" for i in range(50)}, {f"key{i}" for i in reversed(range(50))}
    assert encode(one) == encode(other)


def test_encoding_freezes_the_value() -> None:
    value = {"a": [1], "b": np.zeros(2), "c": bytearray(b"x")}
    document = encode(value)
    value["a"].append(2)
    value["b"][:] = 7
    value["c"][:] = b"y"
    back = decode(document)
    assert back["a"] == [1]
    assert back["b"].tolist() == [0, 0]
    assert back["c"] == b"x"


def test_too_large_documents_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="tensor or a NumPy array"):
        encode(bytes(65 << 20), "blob")


def pack(node: Any) -> bytes:
    return msgspec.msgpack.encode(node)


NODES: list[Any] = [
    [], [1], {"a": 1}, ["l"], ["l", 5], ["d", [[1]]], ["d", [[["l", []], 1]]],
    ["d", [[1, 1], [1, 2]]], ["set", [1, 1]], ["int", 5], ["cplx", b"1"], ["str", b"\xff"],
    ["np", "<f4", [2], b"1234"], ["np", "<f4", [-1], b""], ["np", "O", [1], b"8" * 8],
    ["np", "<f4", [2**62, 0], b""], ["np", "|V" + "9" * 30, [1], b""],
    ["np", [["a", "O"]], [1], b"8" * 8], ["nps", "<f4", b""], ["path", "x", True, "a"],
    ["dt", "yesterday", 0, None], ["dt", "2024-01-01", 0, "../../etc/passwd"], ["td", "x"],
    ["nt", "os", "x", ["a"], []], ["dd", "eval", []], ["dq", -1, []],
    ["torch.dtype", "load"], ["torch.dtype", "nope"], ["torch.size", 3],
    msgspec.msgpack.Ext(5, b"x"),
]  # fmt: skip
DAMAGED = [
    b"", b"\xc1", b"\x91", b"\x91" * 70000 + b"\xc0", b"\xdd\xff\xff\xff\xff", *map(pack, NODES),
]  # fmt: skip


@pytest.mark.parametrize("document", DAMAGED, ids=lambda d: repr(d[:40]))
def test_damaged_documents_are_refused(document: bytes) -> None:
    """A damaged or hostile manifest must give an error, not a crash or another value."""
    with pytest.raises(CorruptionError):
        decode(document, "a/b")


def test_mutated_documents_never_crash() -> None:
    rng = random.Random(4)
    documents = [encode(v) for v in VALUES if not isinstance(v, tuple)]
    for _ in range(4000):
        data = bytearray(rng.choice(documents))
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(CorruptionError, UnsupportedFormatError, InvalidInputError):
            decode(bytes(data))


def test_nesting_in_a_document_is_bounded() -> None:
    node: Any = 1
    for _ in range(MAX_DEPTH + 2):
        node = ["l", [node, ["l", []]]]
    with pytest.raises(CorruptionError, match="deeper"):
        decode(pack(node))


def test_no_code_named_by_a_document_runs() -> None:
    """Loading a checkpoint from a stranger must not import or call anything."""
    for node in (
        ["enum", "os", "system", "x"],
        ["enum", "antigravity", "x", "y"],
        ["enum", "builtins", "object", "__class__"],
        ["enum", "enum", "Enum", "x"],
    ):
        with pytest.raises((InvalidInputError, CorruptionError)):
            decode(pack(node), "state/mode")
    with pytest.warns(UserWarning, match="restored as a tuple"):
        assert decode(pack(["nt", "subprocess", "Popen", ["a"], ["ls"]])) == ("ls",)
    with pytest.warns(UserWarning, match="restored as a tuple"):
        assert decode(pack(["nt", "not.there", "P", ["a"], [1]])) == (1,)


class Mask(enum.IntFlag):
    A = 1
    B = 2


def test_flags_with_bits_that_have_no_name_are_refused() -> None:
    """Bits without a name were dropped: 8 came back as 0, and 9 could not be restored at all."""
    for value in (Mask.A, Mask.A | Mask.B, Mask(0)):
        assert decode(encode(value)) == value
    for value in (Mask(8), Mask(9)):
        with pytest.raises(InvalidInputError, match="names only part") as caught:
            encode(value, "meta/mask")
        assert caught.value.context["path"] == "meta/mask"


def test_an_enum_that_is_not_loaded_names_its_path() -> None:
    with pytest.raises(InvalidInputError, match="import the module") as caught:
        decode(pack(["enum", "not.there", "Mode", "A"]), "meta/mode")
    assert caught.value.context["path"] == "meta/mode"
    with pytest.raises(CorruptionError, match="no member"):
        decode(pack(["enum", __name__, "Colour", "GREEN"]))


def test_a_namedtuple_with_other_fields_becomes_a_tuple_with_a_warning() -> None:
    document = encode(Point(1, 2)).replace(b"\xa1y", b"\xa1z")
    with pytest.warns(UserWarning, match="Point"):
        assert type(decode(document)) is tuple


def test_unknown_tags() -> None:
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        decode(pack(["zz", 1]), "a")
    assert str(decode(pack(["other.thing", 1]))) == "other.thing(1)"


def test_without_torch_its_values_are_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    document = encode({"dtype": torch.bfloat16, "size": torch.Size([2, 3])})
    for tag in ("torch.dtype", "torch.size"):
        monkeypatch.delitem(DECODERS, tag)
    back = decode(document)
    assert str(back["dtype"]) == "torch.dtype(bfloat16)"
    assert back["size"] == Placeholder("torch.size", ([2, 3],))


def test_registered_types(monkeypatch: pytest.MonkeyPatch) -> None:
    class Length:
        def __init__(self, metres: float) -> None:
            self.metres = metres

    monkeypatch.setitem(DECODERS, "test.length", None)  # taken out again after the test
    register("test.length", Length, lambda v: [v.metres], lambda p: Length(p[0]))
    assert decode(encode([Length(2.5)]))[0].metres == 2.5


def test_every_dtype_of_this_torch_has_a_name() -> None:
    # case 13
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    assert len(dtypes) > 30
    for dtype in dtypes:
        assert dtype_from_name(dtype_name(dtype)) is dtype
    with pytest.raises(UnsupportedFormatError, match="float3"):
        dtype_from_name("float3")
    with pytest.raises(UnsupportedFormatError):
        dtype_from_name("load")


Nested = collections.namedtuple("Nested", "inner")


class Longer(Point):
    """Inherits its fields."""


def test_a_namedtuple_that_inherits_its_fields() -> None:
    # case 36: it came back as a plain tuple
    back = decode(encode(Longer(1, 2)))
    assert type(back) is Longer
    assert back == Longer(1, 2)


def out_of_order() -> np.dtype[Any]:
    return np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [4, 0]})


def overlapping() -> np.dtype[Any]:
    return np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]})


def deep_namedtuple() -> Any:
    value: Any = None
    for _ in range(500):
        value = Nested(value)
    return value


CHANGED: dict[str, tuple[Callable[[], Any], str]] = {
    "local-namedtuple": (lambda: collections.namedtuple("Local", "a")(1), "tuple"),
    "unnamed-enum": (lambda: enum.Enum("Unnamed", "A").A, "value.name"),
    "numpy-subclass": (lambda: type("Own", (np.float64,), {})(1.5), "item"),
    "record": (lambda: np.rec.array([(1,)], dtype=[("a", "<i4")])[0], "item"),
    "record-dtype": (lambda: np.dtype((np.record, [("a", "<i4")])), "uint8"),
    "out-of-order": (lambda: np.zeros(2, out_of_order()), "uint8"),
    "overlapping": (lambda: np.zeros(2, overlapping())[0], "uint8"),
    "file": (lambda: io.BytesIO(b"x"), "getvalue"),
    "memoryview": (lambda: memoryview(b"x"), "bytes"),
    "seeds": (lambda: np.random.SeedSequence(1), "value.state"),
    "legacy-generator": (lambda: np.random.RandomState(1), "get_state"),
    "bit-generator": (lambda: np.random.PCG64(1), "value.state"),
    "deep-in-a-set": (lambda: {deep_namedtuple()}, "flatten"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_would_come_back_as_something_else_is_refused(name: str) -> None:
    # case 36
    make, word = CHANGED[name]
    with pytest.raises(InvalidInputError, match="progress/0") as caught:
        encode([make()], "progress")
    assert caught.value.kind == "unsupported-value"
    assert word in str(caught.value.hint)


@pytest.mark.parametrize(
    ("document", "word"),
    [(["dt", "2024-01-01T00:00:00", 0, "Nowhere/Land"], "Nowhere/Land"),
     (["np", "<f11", [0], b""], "<f11"), (["npd", "<q9"], "<q9")],
    ids=["zone", "array", "dtype"],
)  # fmt: skip
def test_what_this_machine_lacks_is_no_damage(document: Any, word: str) -> None:
    """A step without a fault would be passed over for an older one."""
    with pytest.raises(UnsupportedFormatError, match=word) as caught:
        decode(msgspec.msgpack.encode(document), "x/t")
    assert caught.value.context["path"] == "x/t"
    assert caught.value.hint


def test_errors_stay_readable_when_a_path_is_endless() -> None:
    with pytest.raises(InvalidInputError) as caught:
        encode(object(), "k" * 100_000)
    assert len(str(caught.value)) < 2000
    assert caught.value.context["path"] == "k" * 100_000

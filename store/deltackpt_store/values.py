"""Plain Python values as bytes, without pickle: the *value documents* of a manifest.

A document is msgpack. nil, booleans, integers of 64 bits, floats (all bits kept), strings and
bytes stand for themselves; everything else is a list ``[tag, payload...]``:

====== ============================================= ======================================
tag    payload                                       Python
====== ============================================= ======================================
l t    [items]                                       list, tuple
d od   [[key, value]...]                             dict, OrderedDict (order kept)
dd     factory name or nil, [[key, value]...]        defaultdict with a builtin factory
ctr    [[key, value]...]                             Counter
dq     maxlen or nil, [items]                        deque
set    [items], sorted by encoding                   set (``fset``: frozenset)
int    two's complement, little endian               int beyond 64 bits
str    UTF-8 with surrogates passed through          str that is not valid Unicode
cplx   16 bytes, two little-endian doubles           complex
ba     bytes                                         bytearray
np     dtype description, [shape], bytes             numpy.ndarray (C order)
nps    dtype description, bytes                      numpy scalar
npd    dtype description                             numpy.dtype
nt     module, qualified name, [fields], [items]     namedtuple
enum   module, qualified name, member name           Enum member ("A|B" for flags)
path   "posix" or "windows", pure, text              pathlib path
dt     ISO text, fold, zone                          datetime (``time`` alike)
date   ISO text                                      date
td     days, seconds, microseconds                   timedelta
====== ============================================= ======================================

A *zone* is nil, a string (key of `zoneinfo`), or ``[[days, seconds, microseconds], name]``.
Further tags ("torch.dtype", ...) are added with :func:`register`; where nobody registered one,
it decodes to a :class:`Placeholder`. Types match exactly: a subclass is refused, never flattened.
Decoding lives in `values_decode`.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import io
import pathlib
import struct
import types
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from deltackpt_store.errors import CorruptionError, InvalidInputError
from deltackpt_store.values_decode import (
    DECODERS,
    FACTORIES,
    MAX_DEPTH,
    MAX_DOCUMENT_BYTES,
    MalformedError,
    Placeholder,
    decode,
    decode_node,
    find_class,
    find_member,
    read_dtype,
)

__all__ = [
    "MAX_DEPTH", "MAX_DOCUMENT_BYTES", "Placeholder", "check_namedtuple", "decode", "decode_node",
    "dtype_description", "dtype_from_description", "encode", "encode_key", "encode_node",
    "is_namedtuple", "is_scalar", "is_value", "make_defaultdict", "refuse", "register",
]  # fmt: skip

_NATIVE: frozenset[type] = frozenset((type(None), bool, int, float, str, bytes))
_SAFE: frozenset[type] = frozenset((type(None), bool, float, bytes))
_pack = msgspec.msgpack.encode
_SHOWN_PATH = 1000
_Encoder = Callable[[Any, int], Any]


class _RefusedError(Exception):
    """Why a value cannot be encoded; collects the path while it unwinds."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.parts: list[str] = []


def encode(value: object, path: str = "") -> bytes:
    """Encode `value` as one value document (a private copy: later changes do not reach it).

    Raises `InvalidInputError` (kind "unsupported-value", context "path") for a value that has no
    portable form, contains itself, nests deeper than `MAX_DEPTH` or exceeds `MAX_DOCUMENT_BYTES`.
    """
    try:
        document = _pack(value if type(value) in _NATIVE else encode_node(value, path))
    except (OverflowError, UnicodeEncodeError):  # a native type beyond msgpack: int, surrogates
        document = _pack(encode_node(value, path))
    if len(document) > MAX_DOCUMENT_BYTES:
        raise refuse(
            path,
            f"takes {len(document)} bytes as a plain value (limit {MAX_DOCUMENT_BYTES})",
            "hold large data in a tensor or a NumPy array",
        )
    return document


def encode_node(value: object, path: str = "") -> Any:
    """`value` as the msgpack-ready node that :func:`encode` packs, to be part of a larger one."""
    try:
        return _encode(value, 0)
    except _RefusedError as refusal:
        where = "/".join([*([path] if path else []), *reversed(refusal.parts)])
        raise refuse(where, refusal.reason, refusal.hint) from None


def encode_key(key: object, path: str) -> Any:
    """:func:`encode_node` for a key of the container at `path`."""
    try:
        return _encode_key(key, 0)
    except _RefusedError as refusal:
        raise refuse(path, refusal.reason, refusal.hint) from None


def refuse(path: str, reason: str, hint: str) -> InvalidInputError:
    """The error for a value at `path` that cannot be saved; `reason` continues "value at ..."."""
    shown = path if len(path) <= _SHOWN_PATH else f"{path[:_SHOWN_PATH]}..."
    return InvalidInputError(
        f"cannot save the value at {shown!r}: it {reason}",
        kind="unsupported-value",
        hint=hint,
        path=path,
    )


def register(
    tag: str, kind: type, encode: Callable[[Any], list[Any]], decode: Callable[[list[Any]], object]
) -> None:
    """Teach both directions values of exactly the type `kind`.

    `encode` returns the payload (native values only); `decode` gets it back, unchecked, and may
    raise anything for a payload that it does not like. Call at import time.
    """

    def encoder(value: Any, depth: int) -> list[Any]:
        return [tag, *encode(value)]

    _ENCODERS[kind] = encoder
    _SCALARS.add(kind)
    DECODERS[tag] = lambda payload, depth: decode(payload)


def is_value(kind: type) -> bool:
    """Whether values of this type are encoded whole: scalars, arrays, sets."""
    return is_scalar(kind) or kind in (np.ndarray, bytearray, set, frozenset)


def is_scalar(kind: type) -> bool:
    """Whether values of this type are small and hold no other values."""
    return kind in _SCALARS or (
        issubclass(kind, (enum.Enum, np.generic, np.dtype, pathlib.PurePath))
        and not issubclass(kind, tuple)
    )


def is_namedtuple(kind: type) -> bool:
    """Whether `kind` is a class made by collections.namedtuple or typing.NamedTuple."""
    fields: object = getattr(cast(Any, kind), "_fields", None)
    return issubclass(kind, tuple) and isinstance(fields, tuple)


def dtype_description(dtype: np.dtype[Any]) -> object:
    """`dtype` as strings and lists. Raises `InvalidInputError` for object and extension dtypes."""
    try:
        return _describe(dtype)
    except _RefusedError as refusal:
        raise refuse("", refusal.reason, refusal.hint) from None


def dtype_from_description(description: object) -> np.dtype[Any]:
    """Inverse of :func:`dtype_description`; `CorruptionError` when it is malformed."""
    try:
        return read_dtype(description)
    except MalformedError as error:
        raise CorruptionError(f"malformed value: {error}", kind="value") from None


def _encode(value: Any, depth: int) -> Any:
    kind = cast(Any, type(value))
    encoder = _ENCODERS.get(kind)
    if depth > MAX_DEPTH:
        raise _RefusedError(
            f"nests deeper than {MAX_DEPTH} levels or contains itself", "flatten it"
        )
    if encoder is not None:
        return encoder(value, depth)
    if isinstance(value, enum.Enum):
        return _encode_enum(value)
    if isinstance(value, np.generic) and kind is cast(Any, value).dtype.type is not np.record:
        scalar = cast(Any, value)
        raw = scalar.tobytes()[: scalar.dtype.itemsize]  # an empty np.str_ pretends to 4 bytes
        return ["nps", _describe(scalar.dtype), raw]
    if is_namedtuple(kind):
        return _encode_namedtuple(value, depth)
    if isinstance(value, pathlib.PurePath):
        return _encode_path(value)
    if isinstance(value, np.dtype):
        return ["npd", _describe(cast(Any, value))]
    raise _RefusedError(*_explain(value))


def keeper_hint(state: str) -> str:
    """The way out for what changes and has no ``state_dict``: `state` is the code that asks it."""
    return (
        f"put an object in its place whose state_dict() returns {{'state': {state}}} and whose"
        " load_state_dict() sets that again; a state that is taken only once does not follow it"
    )


def _explain(value: Any) -> tuple[str, str]:
    """Reason and way out for a value that has no document form."""
    kind = cast(Any, type(value))
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, types.MethodType):
        return "is a method", "call it, or save the object that it belongs to instead"
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        what = "a lambda" if getattr(value, "__name__", "") == "<lambda>" else "a function"
        return f"is {what}", "code is not saved: leave it out of the state and make it anew"
    if isinstance(value, functools.partial):
        return "is a partial function", "code is not saved: save its arguments instead"
    if isinstance(value, type):
        return f"is the class {value.__qualname__}", "code is not saved: save its name instead"
    if dataclasses.is_dataclass(value):
        return (
            f"is a dataclass ({name})",
            "give it state_dict() and load_state_dict(), or save dataclasses.asdict(value) of one"
            " that does not change",
        )
    if isinstance(value, np.ma.MaskedArray):
        return "is a masked array", "save value.data and numpy.ma.getmaskarray(value) instead"
    if isinstance(value, np.ndarray):
        return f"is a subclass of numpy.ndarray ({name})", "save numpy.asarray(value) instead"
    if isinstance(value, np.record):
        return "is a numpy.record", "save value.item(), or its plain array"
    if isinstance(value, np.generic):
        return f"is a subclass of a NumPy scalar ({name})", "save value.item()"
    if isinstance(value, np.random.RandomState):
        return f"is a random generator ({name})", keeper_hint("value.get_state(legacy=False)")
    if isinstance(value, np.random.SeedSequence):
        return f"is a seed ({name})", "save value.state instead"
    if isinstance(value, np.random.BitGenerator):
        return f"is a random generator ({name})", keeper_hint("value.state")
    if name.startswith("numpy.random."):
        return f"is a random generator ({name})", keeper_hint("value.bit_generator.state")
    if name == "random.Random":
        return "is a random generator (random.Random)", keeper_hint("value.getstate()")
    if isinstance(value, (io.BytesIO, io.StringIO)):
        return f"is a file in memory ({name})", "save value.getvalue() instead"
    if isinstance(value, memoryview):
        return "is a memoryview", "save bytes(value) instead"
    if isinstance(value, (types.GeneratorType, types.ModuleType)) or hasattr(kind, "__next__"):
        return f"is {name}, which has no value", "save the position you need to recreate it"
    for base in (dict, list, tuple, set, frozenset, str, bytes, int, float, complex):
        if issubclass(kind, base):
            return f"is a subclass of {base.__name__} ({name})", f"save {base.__name__}(value)"
    return (
        f"is of type {name}, which has no portable form",
        "save plain values and tensors from it, or, where it lies in the state itself and not in"
        " what an object's state_dict() returns, give it state_dict() and load_state_dict()",
    )


def _encode_int(value: int, depth: int) -> object:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return ["int", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _encode_str(value: str, depth: int) -> object:
    try:
        value.encode()
    except UnicodeEncodeError:
        return ["str", value.encode("utf-8", "surrogatepass")]
    return value


def _encode_items(items: Sequence[Any], depth: int) -> list[Any]:
    kinds = set(map(type, items))
    if kinds <= _SAFE or (kinds == {int} and min(items) >= -(1 << 63) and max(items) < 1 << 64):
        return list(items)
    out: list[Any] = []
    for index, item in enumerate(items):
        try:
            out.append(_encode(item, depth + 1))
        except _RefusedError as refusal:
            refusal.parts.append(str(index))
            raise
    return out


def _encode_key(key: Any, depth: int) -> Any:
    try:
        return _encode(key, depth)
    except _RefusedError as refusal:
        hint = "use plain values as keys, such as names; of an optimizer, save its state_dict()"
        raise _RefusedError(f"has a key that {refusal.reason}", hint) from None


def _encode_pairs(value: dict[Any, Any], depth: int) -> list[list[Any]]:
    out: list[list[Any]] = []
    for key, item in value.items():
        node = _encode_key(key, depth + 1)
        try:
            out.append([node, _encode(item, depth + 1)])
        except _RefusedError as refusal:
            refusal.parts.append(str(key) if type(key) in _NATIVE else repr(key))
            raise
    return out


def _encode_defaultdict(value: defaultdict[Any, Any], depth: int) -> list[Any]:
    return ["dd", _factory_name(value), _encode_pairs(value, depth)]


def _factory_name(value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if FACTORIES.get(name) is not factory:
        raise _RefusedError("is a defaultdict whose factory is code", "save dict(value) instead")
    return name


def make_defaultdict(name: object) -> defaultdict[Any, Any]:
    """An empty defaultdict with the named builtin factory (None: without)."""
    if name is None:
        return defaultdict(None)
    if not isinstance(name, str) or name not in FACTORIES:
        raise CorruptionError(f"malformed value: default factory {name!r}", kind="value")
    return defaultdict(FACTORIES[name])


def _encode_set(tag: str, value: Iterable[Any], depth: int) -> list[Any]:
    return [tag, sorted((_encode(item, depth + 1) for item in value), key=_pack)]


def _encode_enum(value: enum.Enum) -> list[Any]:
    kind = type(value)
    _check_found(kind, "an enum", "value.name")
    name = value.name or ""
    try:
        found = find_member(kind, name)
    except (MalformedError, KeyError):
        found = None
    if found is not value and found != value:
        raise _RefusedError(
            f"is the value {value.value!r} of {kind.__qualname__}, which names only part of it",
            "save value.value",
        )
    return ["enum", kind.__module__, kind.__qualname__, name]


def check_namedtuple(kind: type, path: str) -> None:
    """`InvalidInputError` for the namedtuple class of a value at `path` that no load could find."""
    try:
        _check_found(kind, "a namedtuple", "tuple(value)")
    except _RefusedError as refusal:
        raise refuse(path, refusal.reason, refusal.hint) from None


def _check_found(kind: Any, what: str, instead: str) -> None:
    """Refuse a class that no load could find by its name."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if find_class(kind.__module__, kind.__qualname__) is not kind:
        raise _RefusedError(
            f"is of {what} class that cannot be found by its name {name}",
            f"define the class at the top of a module under that name, or save {instead}",
        )


def _encode_namedtuple(value: Any, depth: int) -> list[Any]:
    kind = cast(Any, type(value))
    _check_found(kind, "a namedtuple", "tuple(value)")
    names: tuple[str, ...] = kind._fields
    return ["nt", kind.__module__, kind.__qualname__, list(names), _encode_items(value, depth)]


def _encode_path(value: pathlib.PurePath) -> list[Any]:
    kind = type(value)
    known = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath)
    if kind not in known:
        raise _RefusedError(f"is of the path class {kind.__qualname__}", "save str(value) instead")
    flavour = "windows" if isinstance(value, pathlib.PureWindowsPath) else "posix"
    return ["path", flavour, not isinstance(value, pathlib.Path), _encode_str(str(value), 0)]


def _describe(dtype: np.dtype[Any]) -> object:
    if dtype.hasobject:
        raise _RefusedError(
            f"holds Python objects (NumPy dtype {dtype})", "use a numeric dtype, or a list"
        )
    try:
        description: object = np.lib.format.dtype_to_descr(dtype) if dtype.names else dtype.str
        known = read_dtype(msgspec.msgpack.decode(_pack(description)))
    except (MalformedError, TypeError, ValueError):  # ValueError: fields overlap or change order
        description = known = None
    if known is None or known != dtype or known.type is not dtype.type:
        raise _RefusedError(
            f"has the NumPy dtype {dtype}, which has no portable name", "view as uint8"
        )
    return description


def _encode_array(value: Any, depth: int) -> list[Any]:
    array: np.ndarray[Any, Any] = value
    return ["np", _describe(array.dtype), list(array.shape), array.tobytes()]


def _encode_zone(zone: datetime.tzinfo | None) -> Any:
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        offset = zone.utcoffset(None)
        name, plain = zone.tzname(None), datetime.timezone(offset).tzname(None)
        return [[offset.days, offset.seconds, offset.microseconds], None if name == plain else name]
    if isinstance(zone, zoneinfo.ZoneInfo) and zone.key:
        return zone.key
    raise _RefusedError(
        f"has the time zone class {type(zone).__qualname__}",
        "use zoneinfo.ZoneInfo or datetime.timezone",
    )


def _encode_datetime(value: datetime.datetime, depth: int) -> list[Any]:
    zone = _encode_zone(value.tzinfo)
    return ["dt", value.replace(tzinfo=None, fold=0).isoformat(), value.fold, zone]


def _encode_time(value: datetime.time, depth: int) -> list[Any]:
    zone = _encode_zone(value.tzinfo)
    return ["time", value.replace(tzinfo=None, fold=0).isoformat(), value.fold, zone]


_ENCODERS: dict[type, _Encoder] = {
    type(None): lambda value, depth: None,
    bool: lambda value, depth: value,
    int: _encode_int,
    float: lambda value, depth: value,
    str: _encode_str,
    bytes: lambda value, depth: value,
    complex: lambda value, depth: ["cplx", struct.pack("<dd", value.real, value.imag)],
    bytearray: lambda value, depth: ["ba", bytes(value)],
    list: lambda value, depth: ["l", _encode_items(value, depth)],
    tuple: lambda value, depth: ["t", _encode_items(value, depth)],
    dict: lambda value, depth: ["d", _encode_pairs(value, depth)],
    OrderedDict: lambda value, depth: ["od", _encode_pairs(value, depth)],
    Counter: lambda value, depth: ["ctr", _encode_pairs(value, depth)],
    defaultdict: _encode_defaultdict,
    deque: lambda value, depth: ["dq", value.maxlen, _encode_items(value, depth)],
    set: lambda value, depth: _encode_set("set", value, depth),
    frozenset: lambda value, depth: _encode_set("fset", value, depth),
    np.ndarray: _encode_array,
    datetime.datetime: _encode_datetime,
    datetime.time: _encode_time,
    datetime.date: lambda value, depth: ["date", value.isoformat()],
    datetime.timedelta: lambda value, depth: ["td", value.days, value.seconds, value.microseconds],
}
_SCALARS: set[type] = {
    *_NATIVE, complex, datetime.datetime, datetime.time, datetime.date, datetime.timedelta,
}  # fmt: skip

"""Value documents back to Python values. The format is described in `values`.

A document is untrusted: nothing is imported, no code is run that it names, and every length is
checked against the bytes that are really there before memory is allocated.
"""

from __future__ import annotations

import datetime
import enum
import os
import pathlib
import re
import struct
import sys
import warnings
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from deltackpt_store.errors import CorruptionError, InvalidInputError, UnsupportedFormatError

MAX_DEPTH = 64
MAX_DOCUMENT_BYTES = 64 << 20

FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, str, tuple, bool)
}
_DTYPE = re.compile(r"[<>|=][A-Za-z][0-9]{0,3}(\[[0-9]*[A-Za-z]+\])?\Z")
_NATIVE: frozenset[type] = frozenset((type(None), bool, int, float, str, bytes))
_Decoder = Callable[[list[Any], int], object]


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A value whose type this process does not know (for instance torch.dtype without torch)."""

    tag: str
    payload: tuple[object, ...]

    def __str__(self) -> str:
        return f"{self.tag}({', '.join(map(str, self.payload))})"


class MalformedError(Exception):
    """What is wrong with a document."""


class _UnknownTagError(Exception):
    """A tag that no version up to this one wrote."""


class NotHereError(Exception):
    """What this machine lacks that the one which wrote the document had."""


class _ClassNotLoadedError(Exception):
    """An enum class that this process has not imported."""


def decode(document: bytes | bytearray | memoryview, path: str = "") -> Any:
    """The value that `document` holds; `path` names it in errors.

    A namedtuple whose class is not loaded (or has other fields now) comes back as a plain tuple
    with a `UserWarning`. Raises `CorruptionError` (kind "value") for malformed bytes,
    `UnsupportedFormatError` for a tag of a newer version, and `InvalidInputError` (kind
    "class-not-loaded") for an enum whose class is not loaded.
    """
    try:
        if len(document) > MAX_DOCUMENT_BYTES:
            raise MalformedError(f"{len(document)} bytes exceed the limit of {MAX_DOCUMENT_BYTES}")
        node = msgspec.msgpack.decode(document)
    except (MalformedError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptionError(
            f"malformed value at {path!r}: {error}", kind="value", path=path
        ) from None
    return node if type(node) in _NATIVE else decode_node(node, path)


def decode_node(node: Any, path: str = "") -> Any:
    """The value of a node that is part of a larger msgpack document; errors as :func:`decode`."""
    try:
        return _decode(node, 0)
    except (MalformedError, RecursionError) as error:
        raise CorruptionError(
            f"malformed value at {path!r}: {error}", kind="value", path=path
        ) from None
    except _UnknownTagError as error:
        raise UnsupportedFormatError(
            f"value at {path!r} has the unknown type tag {error}",
            hint="upgrade deltackpt",
            path=path,
        ) from None
    except NotHereError as error:
        raise UnsupportedFormatError(
            f"value at {path!r} needs {error}, which this machine does not have",
            hint="restore where it is known (time zones: install tzdata), or without this value",
            path=path,
        ) from None
    except _ClassNotLoadedError as error:
        raise InvalidInputError(
            f"value at {path!r} is a member of the enum {error}, which is not loaded here",
            kind="class-not-loaded",
            hint="import the module that defines it before restoring",
            path=path,
        ) from None


def _decode(node: Any, depth: int) -> Any:
    if type(node) in _NATIVE:
        return node
    parts = _list(node)
    if depth > MAX_DEPTH:
        raise MalformedError(f"nests deeper than {MAX_DEPTH} levels")
    tag, payload = parts[0] if parts else None, parts[1:]
    if not isinstance(tag, str):
        raise MalformedError("a list without a tag")
    decoder = DECODERS.get(tag)
    if decoder is None:
        if "." in tag:
            return Placeholder(tag, tuple(payload))
        raise _UnknownTagError(repr(tag))
    try:
        return decoder(payload, depth)
    except (MalformedError, NotHereError, _UnknownTagError, _ClassNotLoadedError):
        raise
    except Exception as error:
        raise MalformedError(f"bad payload of {tag!r}: {type(error).__name__}: {error}") from None


def _list(value: Any) -> list[Any]:
    if type(value) is list:
        return cast(list[Any], value)
    raise MalformedError(f"a list was expected, not {type(value).__name__}")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise MalformedError(f"a string was expected, not {type(value).__name__}")
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise MalformedError(f"bytes were expected, not {type(value).__name__}")
    return value


def _items(value: Any, depth: int) -> list[Any]:
    items = _list(value)
    if set(map(type, items)) <= _NATIVE:
        return items
    return [_decode(item, depth + 1) for item in items]


def _pairs(value: Any, depth: int) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for pair in _list(value):
        key, item = _list(pair)
        out[_decode(key, depth + 1)] = _decode(item, depth + 1)
    if len(out) != len(value):
        raise MalformedError("a key occurs twice")
    return out


def _counter(payload: list[Any], depth: int) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    for key, count in _pairs(payload[0], depth).items():
        counter[key] = count
    return counter


def _defaultdict(payload: list[Any], depth: int) -> defaultdict[Any, Any]:
    name, pairs = payload
    return defaultdict(None if name is None else FACTORIES[name], _pairs(pairs, depth))


def _set(payload: list[Any], depth: int) -> set[Any]:
    items = _items(payload[0], depth)
    out = set(items)
    if len(out) != len(items):
        raise MalformedError("an element occurs twice")
    return out


def read_dtype(description: Any) -> np.dtype[Any]:
    """A NumPy dtype from its description; :class:`MalformedError` when it is not one."""
    try:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_fields(description))
    except Exception as error:
        if isinstance(description, str) and _DTYPE.match(description):
            raise NotHereError(f"the NumPy dtype {description!r}") from None
        raise MalformedError(f"NumPy dtype {description!r}: {error}") from None
    if dtype.hasobject:
        raise MalformedError("a NumPy dtype of Python objects")
    return dtype


def _fields(description: Any) -> Any:
    if isinstance(description, str):
        return description
    fields: list[Any] = []
    for name, kind, *shape in _list(description):
        label = tuple(_list(name)) if isinstance(name, list) else name
        fields.append((label, _fields(kind), *(tuple(_list(s)) for s in shape)))
    return fields


def _array(payload: list[Any], depth: int) -> np.ndarray[Any, Any]:
    description, dimensions, data = payload
    dtype, shape = read_dtype(description), tuple(_list(dimensions))
    count = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise MalformedError(f"array dimension {size!r}")
        count *= size
    if count * dtype.itemsize != len(_bytes(data)):
        raise MalformedError(f"{len(data)} bytes for an array {shape} of {dtype}")
    out = np.ndarray(shape, dtype, data).copy()
    if dtype.names and data:  # the copy left out what lies between the fields
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    return out


def _numpy_scalar(payload: list[Any], depth: int) -> Any:
    description, data = payload
    scalar = _array([description, [], data], depth)[()]
    if isinstance(scalar, np.bytes_):  # an array cuts off the zeros at the end of its strings
        return np.bytes_(data)
    if isinstance(scalar, np.str_):
        order = "be" if read_dtype(description).str.startswith(">") else "le"
        return np.str_(data.decode(f"utf-32-{order}", "surrogatepass"))
    return scalar


def _attributes(scope: object) -> dict[str, Any]:
    return cast("dict[str, Any]", getattr(scope, "__dict__", {}))


def find_class(module: Any, qualname: Any) -> type[Any] | None:
    """A class that is loaded already, found without running any code; None when there is none."""
    scope: Any = sys.modules.get(_text(module))
    for name in _text(qualname).split("."):
        scope = _attributes(scope).get(name)
    return cast("type[Any]", scope) if isinstance(scope, type) else None


def make_namedtuple(module: Any, qualname: Any, names: Any, items: list[Any]) -> tuple[Any, ...]:
    """The namedtuple when its class is loaded and has these fields, else a tuple and a warning."""
    kind = find_class(module, qualname)
    fields = tuple(_list(names))
    if len(fields) != len(items):
        raise MalformedError(f"{len(items)} items for a namedtuple of {len(fields)} fields")
    bases = () if kind is None else cast(Any, type).mro(kind)
    owner = next((base for base in bases if "_fields" in _attributes(base)), None)
    if (
        owner is not None
        and _attributes(owner)["_fields"] == fields
        and issubclass(cast(Any, kind), tuple)
    ):
        return cast(Any, tuple).__new__(kind, items)
    warnings.warn(
        f"the namedtuple {module}.{qualname} is not loaded with these fields: restored as a tuple",
        stacklevel=2,
    )
    return tuple(items)


def _namedtuple(payload: list[Any], depth: int) -> tuple[Any, ...]:
    module, qualname, names, items = payload
    return make_namedtuple(module, qualname, names, _items(items, depth))


def _enum(payload: list[Any], depth: int) -> enum.Enum:
    module, qualname, name = payload
    kind = find_class(module, qualname)
    if kind is None or not issubclass(kind, enum.Enum):
        raise _ClassNotLoadedError(f"{module}.{qualname}")
    return find_member(kind, _text(name))


def find_member(kind: type[enum.Enum], name: str) -> enum.Enum:
    """The member of that name; of flags also a union of members, as ``A|B``."""
    members = kind.__members__
    if name in members:
        return members[name]
    if issubclass(kind, enum.Flag):
        value: Any = kind(0)
        for part in filter(None, name.split("|")):
            value |= members[part]
        return value
    raise MalformedError(f"{kind.__module__}.{kind.__qualname__} has no member {name!r}")


def _path(payload: list[Any], depth: int) -> pathlib.PurePath:
    flavour, pure, text = payload
    here = "windows" if os.name == "nt" else "posix"
    if not pure and flavour == here:
        return pathlib.Path(_decode(text, depth + 1))
    kinds = {"posix": pathlib.PurePosixPath, "windows": pathlib.PureWindowsPath}
    return kinds[flavour](_decode(text, depth + 1))


def _zone(node: Any) -> datetime.tzinfo | None:
    if node is None:
        return None
    if isinstance(node, str):
        try:
            return zoneinfo.ZoneInfo(node)
        except zoneinfo.ZoneInfoNotFoundError:
            raise NotHereError(f"the time zone {node!r}") from None
    offset, name = _list(node)
    delta = datetime.timedelta(*offset)
    return datetime.timezone(delta) if name is None else datetime.timezone(delta, name)


def _datetime(payload: list[Any], depth: int) -> datetime.datetime:
    text, fold, zone = payload
    return datetime.datetime.fromisoformat(text).replace(fold=fold, tzinfo=_zone(zone))


def _time(payload: list[Any], depth: int) -> datetime.time:
    text, fold, zone = payload
    return datetime.time.fromisoformat(text).replace(fold=fold, tzinfo=_zone(zone))


DECODERS: dict[str, _Decoder] = {
    "l": lambda p, depth: _items(p[0], depth),
    "t": lambda p, depth: tuple(_items(p[0], depth)),
    "d": lambda p, depth: _pairs(p[0], depth),
    "od": lambda p, depth: OrderedDict(_pairs(p[0], depth)),
    "dd": _defaultdict,
    "ctr": _counter,
    "dq": lambda p, depth: deque(_items(p[1], depth), p[0]),
    "set": _set,
    "fset": lambda p, depth: frozenset(_set(p, depth)),
    "int": lambda p, depth: int.from_bytes(_bytes(p[0]), "little", signed=True),
    "str": lambda p, depth: _bytes(p[0]).decode("utf-8", "surrogatepass"),
    "cplx": lambda p, depth: complex(*struct.unpack("<dd", _bytes(p[0]))),
    "ba": lambda p, depth: bytearray(_bytes(p[0])),
    "np": _array,
    "nps": _numpy_scalar,
    "npd": lambda p, depth: read_dtype(p[0]),
    "nt": _namedtuple,
    "enum": _enum,
    "path": _path,
    "dt": _datetime,
    "date": lambda p, depth: datetime.date.fromisoformat(_text(p[0])),
    "time": _time,
    "td": lambda p, depth: datetime.timedelta(*p),
}

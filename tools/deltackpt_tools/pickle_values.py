"""Plain values of a step as pickle opcodes, for `torch.load`.

A store is untrusted and a pickle is a program, so nothing here writes a name that a store chose:
every callable comes from a fixed list in this module. Values of the user's own classes therefore
become the nearest plain value (a namedtuple a tuple, an enum member its name), which is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import msgspec
from deltackpt_store.errors import CorruptionError
from deltackpt_store.values import FACTORIES, MAX_DEPTH, decode

from deltackpt_tools.pickle_out import PickleOut
from deltackpt_tools.value_text import parse

_DTYPE = re.compile(r"(bool|[a-z]+[0-9]+[a-z0-9_]*)\Z")
_WORD = re.compile(r"[a-z][a-z0-9_]*\Z")
_DEVICE = re.compile(r"[a-z]+(:[0-9]+)?\Z")
_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")


class ValueEmitter:
    """Pushes value documents onto `out`. `changed` collects (path, what became of it)."""

    def __init__(self, out: PickleOut) -> None:
        self.out = out
        self.changed: list[tuple[str, str]] = []
        self._path = ""

    def document(self, document: bytes, path: str) -> None:
        """One leaf; CorruptionError naming `path` when it is malformed."""
        self._path = path
        try:
            self.node(parse(document), 0)
        except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            if isinstance(error, CorruptionError):
                raise
            raise CorruptionError(
                f"malformed value at {path!r}: {error}", kind="value", path=path
            ) from error

    def node(self, node: Any, depth: int) -> None:
        out = self.out
        if node is None:
            out.none()
        elif isinstance(node, bool):
            out.boolean(node)
        elif isinstance(node, int):
            out.integer(node)
        elif isinstance(node, float):
            out.real(node)
        elif isinstance(node, str):
            out.text(node)
        elif isinstance(node, bytes):
            out.binary(node)
        elif depth > MAX_DEPTH:
            raise ValueError("nests too deeply")
        else:
            tag, *payload = cast("list[Any]", node)
            _EMITTERS[tag](self, tag, payload, depth + 1)

    # containers ----------------------------------------------------------------------------

    def items(self, items: list[Any], depth: int) -> None:
        for item in items:
            self.node(item, depth)

    def pairs(self, pairs: list[list[Any]], depth: int) -> None:
        for key, value in pairs:
            self.node(key, depth)
            self.node(value, depth)

    def list_(self, tag: str, payload: list[Any], depth: int) -> None:
        self.out.list_of(lambda: self.items(payload[0], depth))

    def tuple_(self, tag: str, payload: list[Any], depth: int) -> None:
        self.out.tuple_of(lambda: self.items(payload[0], depth), count=len(payload[0]))

    def dict_(self, tag: str, payload: list[Any], depth: int) -> None:
        self.out.dict_of(lambda: self.pairs(payload[0], depth), ordered=tag == "od")

    def counter(self, tag: str, payload: list[Any], depth: int) -> None:
        self.out.call("collections", "Counter", lambda: self.dict_("d", payload, depth), count=1)

    def defaultdict(self, tag: str, payload: list[Any], depth: int) -> None:
        factory, pairs = payload
        self.default_dict(factory, lambda: self.dict_("d", [pairs], depth))

    def default_dict(self, factory: Any, items: Callable[[], object]) -> None:
        """A defaultdict with the named builtin factory and the dict that `items` pushes."""
        if factory is not None and factory not in FACTORIES:
            raise ValueError(f"default factory {factory!r}")

        def arguments() -> None:
            if factory is None:
                self.out.none()
            else:
                self.out.name("builtins", factory)
            items()

        self.out.call("collections", "defaultdict", arguments, count=2)

    def deque(self, tag: str, payload: list[Any], depth: int) -> None:
        length, items = payload
        self.out.call(
            "collections", "deque",
            lambda: (self.list_("l", [items], depth), self.node(length, depth)), count=2,
        )  # fmt: skip

    def set_(self, tag: str, payload: list[Any], depth: int) -> None:
        kind = "set" if tag == "set" else "frozenset"
        self.out.call("builtins", kind, lambda: self.list_("l", payload, depth), count=1)

    # scalars -------------------------------------------------------------------------------

    def integer(self, tag: str, payload: list[Any], depth: int) -> None:
        self.out.integer(int.from_bytes(payload[0], "little", signed=True))

    def string(self, tag: str, payload: list[Any], depth: int) -> None:
        self.out.text(payload[0].decode("utf-8", "surrogatepass"))

    def complex_(self, tag: str, payload: list[Any], depth: int) -> None:
        value = cast("complex", decode(_document(tag, payload)))
        self.out.call(
            "builtins", "complex",
            lambda: (self.out.real(value.real), self.out.real(value.imag)), count=2,
        )  # fmt: skip

    def bytearray_(self, tag: str, payload: list[Any], depth: int) -> None:
        self.out.call("builtins", "bytearray", lambda: self.out.binary(payload[0]), count=1)

    def path(self, tag: str, payload: list[Any], depth: int) -> None:
        flavour, pure, text = payload
        if flavour == "posix":
            name = "PurePosixPath" if pure else "PosixPath"
        else:
            name = "PureWindowsPath" if pure else "WindowsPath"
        self.out.call("pathlib", name, lambda: self.node(text, depth), count=1)

    def moment(self, tag: str, payload: list[Any], depth: int) -> None:
        """A datetime, date, time or timedelta, by the arguments that the class itself pickles."""
        value: Any = decode(_document(tag, payload))
        arguments = value.__reduce_ex__(4)[1]
        zone = payload[2] if tag in ("dt", "time") else None

        def emit() -> None:
            for argument in arguments[: 1 if zone is not None else None]:
                self.node(argument, depth)
            if zone is not None:
                self._zone(zone, depth)

        self.out.call("datetime", type(value).__name__, emit, count=len(arguments))

    def _zone(self, zone: Any, depth: int) -> None:
        if isinstance(zone, str):
            self.out.call("zoneinfo", "ZoneInfo", lambda: self.out.text(zone), count=1)
            return
        offset, name = zone

        def emit() -> None:
            self.out.call("datetime", "timedelta", lambda: self.items(offset, depth), count=3)
            if name is not None:
                self.out.text(name)

        self.out.call("datetime", "timezone", emit, count=1 if name is None else 2)

    # numpy ---------------------------------------------------------------------------------

    def dtype(self, tag: str, payload: list[Any], depth: int) -> None:
        self.out.call("numpy", "dtype", lambda: self._description(payload[0]), count=1)

    def _description(self, description: Any) -> None:
        """What `numpy.dtype` takes: a string, or a list of (name, description[, shape])."""
        if isinstance(description, str):
            self.out.text(description)
            return

        def field(parts: list[Any]) -> None:
            name, inner, *shape = parts
            if isinstance(name, list):
                names = cast("list[str]", name)
                self.out.tuple_of(lambda: [self.out.text(n) for n in names], count=len(names))
            else:
                self.out.text(name)
            self._description(inner)
            if shape:
                self.out.integers(shape[0])

        def emit() -> None:
            for parts in cast("list[list[Any]]", description):
                self.out.tuple_of(lambda parts=parts: field(parts), count=len(parts))

        self.out.list_of(emit)

    def array(self, tag: str, payload: list[Any], depth: int) -> None:
        decode(_document(tag, payload))  # proves that shape, type and bytes fit together
        description, shape, data = payload

        def emit() -> None:
            self.out.integers(shape)
            self.dtype("npd", [description], depth)
            self.bytearray_("ba", [data], depth)

        self.out.call("numpy", "ndarray", emit, count=3)

    def scalar(self, tag: str, payload: list[Any], depth: int) -> None:
        description, data = payload
        self.out.call(
            "operator", "getitem",
            lambda: (self.array("np", [description, [], data], depth), self.out.integers(())),
            count=2,
        )  # fmt: skip

    # the user's classes and torch's -----------------------------------------------------------

    def namedtuple(self, tag: str, payload: list[Any], depth: int) -> None:
        module, qualname, _, items = payload
        self.changed.append((self._path, f"the namedtuple {module}.{qualname} became a tuple"))
        self.tuple_("t", [items], depth)

    def enum(self, tag: str, payload: list[Any], depth: int) -> None:
        module, qualname, name = payload
        self.changed.append((self._path, f"the enum member {module}.{qualname} became its name"))
        self.out.text(name)

    def torch_dtype(self, tag: str, payload: list[Any], depth: int) -> None:
        torch_dtype(self.out, payload[0])

    def torch_layout(self, tag: str, payload: list[Any], depth: int) -> None:
        torch_layout(self.out, payload[0])

    def torch_memory_format(self, tag: str, payload: list[Any], depth: int) -> None:
        if payload[0] not in _MEMORY_FORMATS:
            raise ValueError(f"memory format {payload[0]!r}")
        self.out.name("torch", payload[0])

    def torch_device(self, tag: str, payload: list[Any], depth: int) -> None:
        if not _DEVICE.match(payload[0]):
            raise ValueError(f"device {payload[0]!r}")
        self.out.call("torch", "device", lambda: self.out.text(payload[0]), count=1)

    def torch_size(self, tag: str, payload: list[Any], depth: int) -> None:
        self.out.call("torch", "Size", lambda: self.out.integers(payload[0]), count=1)


def torch_dtype(out: PickleOut, name: str) -> None:
    """``torch.<name>``, for names that have the form of a dtype."""
    if not _DTYPE.match(name):
        raise ValueError(f"dtype {name!r}")
    out.name("torch", name, safe=True)


def torch_layout(out: PickleOut, name: str) -> None:
    """``torch.<name>``, spelt as torch.save does."""
    if not _WORD.match(name):
        raise ValueError(f"layout {name!r}")
    out.call("torch.serialization", "_get_layout", lambda: out.text(f"torch.{name}"), count=1)


def _document(tag: str, payload: list[Any]) -> bytes:
    return msgspec.msgpack.encode([tag, *payload])


_Emitter = Callable[[ValueEmitter, str, list[Any], int], None]

_EMITTERS: dict[str, _Emitter] = {
    "l": ValueEmitter.list_, "t": ValueEmitter.tuple_,
    "d": ValueEmitter.dict_, "od": ValueEmitter.dict_,
    "dd": ValueEmitter.defaultdict, "ctr": ValueEmitter.counter, "dq": ValueEmitter.deque,
    "set": ValueEmitter.set_, "fset": ValueEmitter.set_,
    "int": ValueEmitter.integer, "str": ValueEmitter.string, "cplx": ValueEmitter.complex_,
    "ba": ValueEmitter.bytearray_, "path": ValueEmitter.path,
    "dt": ValueEmitter.moment, "date": ValueEmitter.moment, "time": ValueEmitter.moment,
    "td": ValueEmitter.moment,
    "np": ValueEmitter.array, "nps": ValueEmitter.scalar, "npd": ValueEmitter.dtype,
    "nt": ValueEmitter.namedtuple, "enum": ValueEmitter.enum,
    "torch.dtype": ValueEmitter.torch_dtype, "torch.layout": ValueEmitter.torch_layout,
    "torch.memory_format": ValueEmitter.torch_memory_format,
    "torch.device": ValueEmitter.torch_device, "torch.size": ValueEmitter.torch_size,
}  # fmt: skip

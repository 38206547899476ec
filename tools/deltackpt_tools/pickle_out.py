"""Writes a pickle, protocol 2, without having the classes it names.

`torch.load` files contain one. The standard pickler imports every class it refers to, which would
make the exporter need torch (and run code of whatever module a value came from); this one emits the
few opcodes by hand. It keeps to those that ``torch.load(weights_only=True)`` reads. Nothing is ever
read with pickle.

Source of the opcodes: `pickletools` in the Python standard library.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable

# Callables that torch.load(weights_only=True) allows; anything else needs weights_only=False.
SAFE_GLOBALS = frozenset(
    {"collections.OrderedDict", "collections.Counter", "torch.nn.parameter.Parameter",
     "torch.serialization._get_layout", "torch.Size", "torch.device", "_codecs.encode",
     "builtins.bytearray", "builtins.set",
     "builtins.complex", "torch._utils._rebuild_parameter", "torch._utils._rebuild_tensor_v2",
     "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_sparse_tensor"}
)  # fmt: skip


class PickleOut:
    """Values are pushed in the order in which an unpickler's stack wants them.

    `unsafe` collects the names of callables that ``weights_only=True`` does not allow by itself.
    """

    def __init__(self) -> None:
        self._out = bytearray(pickle.PROTO + b"\x02")
        self.unsafe: set[str] = set()

    def finish(self) -> bytes:
        return bytes(self._out + pickle.STOP)

    # scalars -------------------------------------------------------------------------------

    def none(self) -> None:
        self._out += pickle.NONE

    def boolean(self, value: bool) -> None:
        self._out += pickle.NEWTRUE if value else pickle.NEWFALSE

    def integer(self, value: int) -> None:
        if 0 <= value < 256:
            self._out += pickle.BININT1 + bytes([value])
        elif -(2**31) <= value < 2**31:
            self._out += pickle.BININT + struct.pack("<i", value)
        else:
            data = pickle.encode_long(value)
            if len(data) < 256:
                self._out += pickle.LONG1 + bytes([len(data)]) + data
            else:
                self._out += pickle.LONG4 + struct.pack("<i", len(data)) + data
                self.unsafe.add(f"an integer of {len(data)} bytes")

    def real(self, bits: float) -> None:
        self._out += pickle.BINFLOAT + struct.pack(">d", bits)

    def text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self._out += pickle.BINUNICODE + struct.pack("<I", len(data)) + data

    def binary(self, value: bytes) -> None:
        # Protocol 2 has no bytes; this is how the standard pickler spells them there.
        self.call("_codecs", "encode", lambda: (self.text(value.decode("latin1")),
                                                self.text("latin1")), count=2)  # fmt: skip

    # containers ----------------------------------------------------------------------------

    def tuple_of(self, emit: Callable[[], object], *, count: int) -> None:
        """The tuple of the `count` values that `emit` pushes."""
        if count == 0:
            self._out += pickle.EMPTY_TUPLE
            return
        short = {1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}.get(count)
        if short is None:
            self._out += pickle.MARK
        emit()
        self._out += short or pickle.TUPLE

    def integers(self, values: Iterable[int]) -> None:
        """A tuple of integers."""
        numbers = tuple(values)
        self.tuple_of(lambda: [self.integer(n) for n in numbers], count=len(numbers))

    def list_of(self, emit: Callable[[], object]) -> None:
        """The list of what `emit` pushes."""
        self._out += pickle.EMPTY_LIST + pickle.MARK
        emit()
        self._out += pickle.APPENDS

    def dict_of(self, emit: Callable[[], object], *, ordered: bool = False) -> None:
        """The dict of what `emit` pushes: key, value, key, value, ..."""
        if ordered:
            self.call("collections", "OrderedDict", lambda: None, count=0)
        else:
            self._out += pickle.EMPTY_DICT
        self._out += pickle.MARK
        emit()
        self._out += pickle.SETITEMS

    # calls ---------------------------------------------------------------------------------

    def name(self, module: str, qualname: str, *, safe: bool | None = None) -> None:
        """The object `module`.`qualname`; a nested one is fetched with getattr."""
        first, *rest = qualname.split(".")
        if safe is None:
            safe = f"{module}.{qualname}" in SAFE_GLOBALS
        if not safe:
            self.unsafe.add(f"{module}.{qualname}")
        for _ in rest:
            self._global("builtins", "getattr")
        self._global(module, first)
        for attribute in rest:
            self.text(attribute)
            self._out += pickle.TUPLE2 + pickle.REDUCE

    def _global(self, module: str, name: str) -> None:
        if "\n" in module or "\n" in name:
            raise ValueError(f"{module}.{name} is not a name")
        self._out += pickle.GLOBAL + module.encode() + b"\n" + name.encode() + b"\n"

    def call(self, module: str, qualname: str, emit: Callable[[], object], *, count: int) -> None:
        """``module.qualname(*values)`` of the `count` values that `emit` pushes."""
        self.name(module, qualname)
        self.tuple_of(emit, count=count)
        self._out += pickle.REDUCE

    def attributes(self, emit: Callable[[], object]) -> None:
        """Set attributes of the object pushed last, from the dict that `emit` pushes."""
        emit()
        self._out += pickle.BUILD

    def persistent(self, emit: Callable[[], object], *, count: int) -> None:
        """What the reader keeps under the id that is the tuple of the pushed values."""
        self.tuple_of(emit, count=count)
        self._out += pickle.BINPERSID

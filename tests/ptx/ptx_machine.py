"""Runs PTX on the CPU: all threads of a batch of programs at once, as numpy lanes.

Threads that branch apart are run lowest position first until they meet again. What a device would
punish is a :class:`ptx_memory.DeviceError`: accesses out of bounds or misaligned, barriers that not
all threads reach, shared memory raced for, asynchronous copies read before their wait, registers
read before they are written. ptxas's scheduling is not modelled, nor races in global memory.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from ptx_memory import DeviceError, GlobalMemory, Lanes, SharedMemory, Words
from ptx_parse import Program, Statement

_TYPE = re.compile(r"\.([subf])(8|16|32|64)\b")
_MEMORY = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]")


def _number(text: str) -> int:
    return int(text.rstrip("U"), 0)


@dataclass(slots=True)
class _Pending:
    """Bytes that cp.async will have written to shared memory once their group is waited for."""

    lanes: Lanes
    group: Any
    target: Words
    words: list[Words]
    size: int


class Machine:
    """One launch of one kernel over a batch of its programs."""

    def __init__(
        self, code: Program, memory: GlobalMemory, shared_bytes: int, programs: Any, args: list[int]
    ) -> None:
        self.code, self.memory = code, memory
        threads, count = code.threads, len(programs)
        self.lanes = count * threads
        self.shared = SharedMemory(count, shared_bytes, threads)
        self.special = {
            "%tid.x": np.tile(np.arange(threads, dtype=np.uint64), count),
            "%ctaid.x": np.repeat(np.asarray(programs, np.uint64), threads),
        }
        self.parameters = dict(zip(code.parameters, args, strict=False))
        self.registers: dict[str, Any] = {}
        self.pending: list[_Pending] = []
        self.committed = np.zeros(self.lanes, np.int64)
        self.executed = 0

    # running ---------------------------------------------------------------------------------

    def run(self) -> None:
        end = len(self.code.statements)
        stops = set(self.code.labels.values())
        position = np.zeros(self.lanes, np.int64)
        while True:
            at = int(position.min())
            if at >= end:
                return
            active = position == at
            while at < end:
                statement = self.code.statements[at]
                self.executed += 1
                at += 1
                if statement.op.startswith(("bra", "ret")):
                    taken = active & self._guard(statement)
                    position[active] = at
                    goal = end if statement.op == "ret" else self.code.labels[statement.args[0]]
                    position[taken] = goal
                    break
                try:
                    self._execute(statement, active & self._guard(statement), position < end)
                except DeviceError as fault:
                    where = (
                        f"{self.code.name}, line {statement.line}: {statement.op} {statement.args}"
                    )
                    raise DeviceError(f"{fault} ({where})") from None
                if at in stops:
                    position[active] = at
                    break
            else:
                position[active] = end

    def _guard(self, statement: Statement) -> Any:
        if statement.guard is None:
            return np.ones(self.lanes, np.bool_)
        value = self._read(statement.guard) != 0
        return ~value if statement.negated else value

    # operands --------------------------------------------------------------------------------

    def _read(self, name: str) -> Words:
        if name in self.special:
            return self.special[name]
        if name.startswith("%"):
            if name not in self.registers:
                raise DeviceError(f"register {name} is read before it is written")
            return self.registers[name]
        value = 0 if name == "global_smem" else _number(name)
        return np.full(self.lanes, value & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def _typed(self, name: str, kind: str, bits: int) -> Any:
        """The value as numpy numbers of the instruction's type."""
        value = self._read(name).astype(f"u{bits // 8}")
        return value.view(f"i{bits // 8}") if kind == "s" else value

    def _write(self, name: str, value: Any, lanes: Lanes) -> None:
        if name == "_":
            return
        if value.dtype == np.bool_:
            value = value.astype(np.uint64)
        else:
            value = value.view(f"u{value.dtype.itemsize}").astype(np.uint64)
        if not lanes.all():
            value = np.where(lanes, value, self.registers.get(name, np.uint64(0x5A5A)))
        self.registers[name] = value

    def _address(self, text: str) -> Words:
        found = _MEMORY.fullmatch(text)
        assert found, text
        return self._read(found[1]) + np.uint64(_number(found[2] or "0") & 0xFFFFFFFFFFFFFFFF)

    # instructions ----------------------------------------------------------------------------

    def _execute(self, statement: Statement, lanes: Lanes, alive: Lanes) -> None:
        op, args = statement.op, statement.args
        head = op.split(".")[0]
        if op == "bar.sync":
            self._barrier(lanes, alive)
        elif head == "cp":
            self._copy(op, args, lanes)
        elif head in ("ld", "st"):
            self._access(op, args, lanes)
        elif head == "shfl":
            self._shuffle(op, args, lanes, alive)
        elif head == "redux":
            self._reduce(op, args, lanes, alive)
        elif head == "mov" and any(arg.startswith("{") for arg in args):
            self._pack(args, lanes)
        else:
            self._write(args[0], self._compute(op, args), lanes)

    def _compute(self, op: str, args: tuple[str, ...]) -> Any:
        head, found = op.split(".")[0], _TYPE.findall(op)
        if op.endswith(".pred"):
            a = self._read(args[1]) != 0
            if head == "not":
                return ~a
            return _BITWISE[head](a, self._read(args[2]) != 0)
        kind, bits = found[0][0], int(found[0][1])
        if head == "cvt":
            value = self._typed(args[1], found[1][0], int(found[1][1]))
            return value.astype(f"{'i' if found[1][0] == 's' else 'u'}{bits // 8}")
        if head == "setp":
            a, b = (self._typed(arg, kind, bits) for arg in args[1:3])
            return _COMPARE[op.split(".")[1]](a, b)
        if head == "selp":
            chosen = self._read(args[3]) != 0
            return np.where(chosen, *(self._typed(arg, kind, bits) for arg in args[1:3]))
        if head in ("mul", "mad"):
            return self._multiply(op, head, args, kind, bits)
        if head in ("shl", "shr"):
            return self._shift(head, args, kind, bits)
        if head == "bfe":
            return self._extract(args, kind, bits)
        if head == "prmt":
            return self._permute(args)
        values = [self._typed(arg, kind, bits) for arg in args[1:]]
        if head in _ARITHMETIC:
            return _ARITHMETIC[head](*values)
        if head in _BITWISE:
            return _BITWISE[head](*values)
        raise NotImplementedError(op)  # the kernels under test do not use it

    def _multiply(self, op: str, head: str, args: tuple[str, ...], kind: str, bits: int) -> Any:
        mode = op.split(".")[1]
        a, b = (self._typed(arg, kind, bits) for arg in args[1:3])
        if mode == "wide":
            wide = f"{'i' if kind == 's' else 'u'}{bits // 4}"
            product = a.astype(wide) * b.astype(wide)
            width = bits * 2
        elif mode == "lo":
            product, width = a * b, bits
        else:
            assert (mode, kind, bits) == ("hi", "u", 64), op
            product, width = _high_half(a, b), bits
        return product + self._typed(args[3], kind, width) if head == "mad" else product

    def _shift(self, head: str, args: tuple[str, ...], kind: str, bits: int) -> Any:
        value, amount = self._typed(args[1], kind, bits), self._typed(args[2], "u", 32)
        inside = np.minimum(amount, bits - 1).astype(value.dtype)
        if head == "shl":
            return np.where(amount < bits, value << inside, value.dtype.type(0))
        if kind == "s":
            return value >> inside
        return np.where(amount < bits, value >> inside, value.dtype.type(0))

    def _extract(self, args: tuple[str, ...], kind: str, bits: int) -> Any:
        start, count = _number(args[2]), _number(args[3])
        assert 0 < count <= bits - start, args
        value = self._typed(args[1], "u", bits) << np.uint64(bits - start - count).astype(
            f"u{bits // 8}"
        )
        value = value.view(f"{'i' if kind == 's' else 'u'}{bits // 8}")
        return value >> value.dtype.type(bits - count)

    def _permute(self, args: tuple[str, ...]) -> Any:
        both = self._typed(args[1], "u", 32).astype(np.uint64)
        both = both | self._typed(args[2], "u", 32).astype(np.uint64) << np.uint64(32)
        selector = self._typed(args[3], "u", 32)
        result = np.zeros(self.lanes, np.uint32)
        for byte in range(4):
            nibble = selector >> np.uint32(4 * byte) & np.uint32(15)
            assert (nibble < 8).all(), "prmt with sign replication"
            chosen = both >> (nibble * np.uint32(8)).astype(np.uint64) & np.uint64(255)
            result |= chosen.astype(np.uint32) << np.uint32(8 * byte)
        return result

    def _pack(self, args: tuple[str, ...], lanes: Lanes) -> None:
        if args[0].startswith("{"):
            value = self._read(args[1])
            for position, name in enumerate(_names(args[0])):
                part = value >> np.uint64(32 * position) & np.uint64(0xFFFFFFFF)
                self._write(name, part, lanes)
        else:
            low, high = (self._read(name) for name in _names(args[1]))
            self._write(args[0], low | high << np.uint64(32), lanes)

    def _access(self, op: str, args: tuple[str, ...], lanes: Lanes) -> None:
        vector = re.search(r"\.v([24])", op)
        count = int(vector[1]) if vector else 1
        size = int(_TYPE.findall(op)[0][1]) // 8
        if op.startswith("ld.param"):
            parameter = self.parameters[args[1].strip("[] ")]
            self._write(args[0], np.full(self.lanes, parameter & _ones(size), np.uint64), lanes)
            return
        memory: Any = self.memory if ".global" in op else self.shared
        if op.startswith("ld"):
            words = memory.load(self._address(args[1]), size, count, lanes)
            for name, word in zip(_names(args[0]), words, strict=True):
                self._write(name, word, lanes)
        else:
            words = [self._read(name) & np.uint64(_ones(size)) for name in _names(args[1])]
            memory.store(self._address(args[0]), size, words, lanes)

    # threads together ------------------------------------------------------------------------

    def _barrier(self, lanes: Lanes, alive: Lanes) -> None:
        threads = self.code.threads
        here, living = (mask.reshape(-1, threads) for mask in (lanes, alive))
        arrived = np.flatnonzero(here.any(axis=1))
        if (here[arrived] != living[arrived]).any():
            raise DeviceError("a barrier that some threads of the program do not reach")
        self.shared.barrier(arrived)

    def _warps(self, lanes: Lanes, alive: Lanes) -> None:
        here, living = lanes.reshape(-1, 32), alive.reshape(-1, 32)
        partial = here.any(axis=1) & (here != living).any(axis=1)
        if partial.any():
            raise DeviceError("an exchange between lanes of which some are elsewhere")

    def _shuffle(self, op: str, args: tuple[str, ...], lanes: Lanes, alive: Lanes) -> None:
        self._warps(lanes, alive)
        value = self._read(args[1]).reshape(-1, 32)
        lane = np.arange(32)
        amount = self._read(args[2]).astype(np.int64).reshape(-1, 32)
        mode, clamp = op.split(".")[2], int(self._read(args[3])[0]) & 31
        if mode == "bfly":
            source, inside = lane ^ amount, (lane ^ amount) <= clamp
        elif mode == "idx":
            source, inside = amount & 31, (amount & 31) <= clamp
        else:
            assert mode == "up", op
            source, inside = lane - amount, lane - amount >= clamp
        source = np.where(inside, source, lane)
        self._write(args[0], np.take_along_axis(value, source, axis=1).reshape(-1), lanes)

    def _reduce(self, op: str, args: tuple[str, ...], lanes: Lanes, alive: Lanes) -> None:
        self._warps(lanes, alive)
        value = self._typed(args[1], "s", 32).reshape(-1, 32)
        joined = value.max(axis=1) if ".max" in op else value.sum(axis=1, dtype=np.int32)
        assert ".max" in op or ".add" in op, op
        self._write(args[0], np.repeat(joined, 32), lanes)

    def _copy(self, op: str, args: tuple[str, ...], lanes: Lanes) -> None:
        if op == "cp.async.commit_group":
            self.committed[lanes] += 1
        elif op == "cp.async.wait_group":
            self._complete(lanes, self.committed - _number(args[0]))
        else:
            size = _number(args[2])
            wanted = self._read(args[3]) if len(args) > 3 else np.full(self.lanes, size, np.uint64)
            if not np.isin(wanted[lanes], (0, size)).all():
                raise DeviceError("cp.async of part of a word")
            target = self._address(args[0])
            words = self.memory.load(self._address(args[1]), size, 1, lanes & (wanted != 0))
            poison = np.full(self.lanes, 0xDBDBDBDBDBDBDBDB & _ones(size), np.uint64)
            self.shared.store(target, size, [poison], lanes)
            group = self.committed.copy()
            self.pending.append(_Pending(lanes.copy(), group, target, words, size))

    def _complete(self, lanes: Lanes, before: Any) -> None:
        for copy in self.pending:
            done = copy.lanes & lanes & (copy.group < before)
            if done.any():
                self.shared.store(copy.target, copy.size, copy.words, done, check=False)
                copy.lanes &= ~done
        self.pending = [copy for copy in self.pending if copy.lanes.any()]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.strip("{} ").split(",")]


def _ones(size: int) -> int:
    return (1 << 8 * size) - 1


def _high_half(a: Any, b: Any) -> Any:
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    low_a, high_a, low_b, high_b = a & mask, a >> half, b & mask, b >> half
    middle = high_a * low_b + (low_a * low_b >> half)
    other = low_a * high_b + (middle & mask)
    return high_a * high_b + (middle >> half) + (other >> half)


_BITWISE: dict[str, Callable[..., Any]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "neg": lambda a: -a,
    "min": np.minimum, "max": np.maximum, "mov": lambda a: a,
}  # fmt: skip
_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip

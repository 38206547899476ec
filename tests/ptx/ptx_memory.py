"""Memory of the PTX machine: a global arena and shared memory, both with every access checked."""

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
_POISON = 0xDB


class DeviceError(AssertionError):
    """The compiled code did something that would fail, or be undefined, on a device."""


class GlobalMemory:
    """One block of host memory standing for a device's. Addresses are the host's real ones.

    A kernel may read where ``readable`` and write where ``writable`` (a flag per byte).
    """

    def __init__(self, nbytes: int) -> None:
        self.raw = np.full(nbytes + 4096, _POISON, np.uint8)
        skip = -self.raw.ctypes.data % 4096
        self.bytes = self.raw[skip : skip + nbytes]
        self.base = self.bytes.ctypes.data
        self.used = 0
        self.readable = np.zeros(nbytes, np.bool_)
        self.writable = np.zeros(nbytes, np.bool_)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A new piece at a multiple of 256, with a gap that nobody may touch after it."""
        start = self.used
        self.used = start + (nbytes + 511) // 256 * 256
        assert self.used <= len(self.bytes), "the arena is too small for this test"
        return self.bytes[start : start + nbytes]

    def _index(self, address: Words, size: int, lanes: Lanes, allowed: Lanes, what: str) -> Words:
        at = address[lanes]
        if (at % size).any():
            raise DeviceError(f"{what} of {size} bytes at a misaligned address")
        index = at - self.base
        if (index >= len(self.bytes)).any():
            raise DeviceError(f"{what} outside device memory")
        if not (allowed[index].all() and allowed[index + size - 1].all()):
            raise DeviceError(f"{what} of {size} bytes outside what the kernel was given")
        return index

    def load(self, address: Words, size: int, count: int, lanes: Lanes) -> list[Words]:
        """`count` words of `size` bytes each (one access of all of them), zero-extended."""
        index = self._index(address, size * count, lanes, self.readable, "load")
        memory = self.bytes.view(f"u{size}")
        words = []
        for position in range(count):
            word = np.zeros(len(lanes), np.uint64)
            word[lanes] = memory[index // size + position]
            words.append(word)
        return words

    def store(self, address: Words, size: int, words: list[Words], lanes: Lanes) -> None:
        index = self._index(address, size * len(words), lanes, self.writable, "store")
        memory = self.bytes.view(f"u{size}")
        for position, word in enumerate(words):
            target = index // size + position
            memory[target] = word[lanes].astype(memory.dtype)
            if (memory[target] != word[lanes].astype(memory.dtype)).any():
                raise DeviceError("lanes store different values to one address")


class SharedMemory:
    """Shared memory of a batch of programs, watching for races between warps.

    Between two barriers no warp may touch bytes that another wrote, nor write what another read.
    """

    def __init__(self, programs: int, nbytes: int, threads: int) -> None:
        self.size = max(nbytes, 16)
        self.bytes = np.full(programs * self.size, _POISON, np.uint8)
        self.program = np.repeat(np.arange(programs), threads)
        self.warp = np.tile(np.arange(threads) // 32, programs).astype(np.int16)
        self.epoch = np.zeros(programs, np.int32)
        self._written = np.full((2, programs * self.size), -1, np.int32)  # epoch, warp
        self._read = np.full((2, programs * self.size), -1, np.int32)

    def _places(self, address: Words, size: int, lanes: Lanes) -> npt.NDArray[np.int64]:
        at = address[lanes].astype(np.int64)
        if (at % size).any():
            raise DeviceError(f"shared access of {size} bytes at a misaligned address")
        if ((at < 0) | (at + size > self.size)).any():
            raise DeviceError("access outside shared memory")
        start = self.program[lanes] * self.size + at
        return start[:, None] + np.arange(size)

    def _check(self, places: npt.NDArray[np.int64], lanes: Lanes, *, write: bool) -> None:
        epoch = self.epoch[self.program[lanes]][:, None]
        warp = self.warp[lanes].astype(np.int32)[:, None]
        for past in (self._written, self._read) if write else (self._written,):
            if ((past[0][places] == epoch) & (past[1][places] != warp)).any():
                raise DeviceError("warps race for shared memory: a barrier is missing")
        past = self._written if write else self._read
        shared = ~write & (past[0][places] == epoch) & (past[1][places] != warp)
        past[0][places] = np.broadcast_to(epoch, places.shape)
        past[1][places] = np.where(shared, -2, warp)  # -2: read by several warps

    def load(self, address: Words, size: int, count: int, lanes: Lanes) -> list[Words]:
        places = self._places(address, size * count, lanes)
        self._check(places, lanes, write=False)
        found = self.bytes[places].reshape(-1, count, size)
        words = []
        for position in range(count):
            word = np.zeros(len(lanes), np.uint64)
            part = np.ascontiguousarray(found[:, position])
            word[lanes] = part.view(f"u{size}").reshape(-1)
            words.append(word)
        return words

    def store(
        self, address: Words, size: int, words: list[Words], lanes: Lanes, *, check: bool = True
    ) -> None:
        places = self._places(address, size * len(words), lanes)
        if check:
            self._check(places, lanes, write=True)
        for position, word in enumerate(words):
            part = word[lanes].astype(f"u{size}").view(np.uint8).reshape(-1, size)
            self.bytes[places[:, position * size : (position + 1) * size]] = part

    def barrier(self, programs: npt.NDArray[np.int64]) -> None:
        self.epoch[programs] += 1

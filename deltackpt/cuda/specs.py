"""How each kernel is compiled and launched: one description for launching, tests and tools.

No torch, no triton here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SCRATCH_BYTES: Final = 64 * 1024 * 1024
"""Default size of the scratch: sums of two waves, and the flags."""
SUM_BYTES: Final = 64
"""Scratch bytes per KiB of chunk."""
FINISH_CHUNKS: Final = 16
"""Chunks that one program of a sweep finishes side by side."""
SHORT_CHUNKS: Final = 128
COMPACT_TILE: Final = 4096
GATHER_BYTES: Final = 16 * 1024
"""Bytes that one program of a gather copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """One kernel. ``arguments`` are (name, Triton type) of what a launch passes, in order;
    ``constants`` are compiled in; ``registers`` is the cap asked of NVIDIA's assembler, which
    keeps eight programs of four warps on a multiprocessor (the kernel needs no more: no spills).
    """

    module: str
    name: str
    arguments: tuple[tuple[str, str], ...]
    constants: Mapping[str, int]
    warps: int
    registers: int | None = None


def sum_blocks_per_program(wave: int) -> int:
    """KiB that one program sums: twice as much on GPUs whose warps have 64 lanes."""
    return 16 if wave == 32 else 32


def kernel_specs(wave: int = 32) -> dict[str, KernelSpec]:
    """All kernels by name; ``wave`` is the warp size of the device (32 or 64 lanes)."""
    table, keys = ("table", "*i64"), ("keys", "*u64")
    digests, flags = ("digests", "*u64"), ("flags", "*u8")
    numbers = ("done_first", "done_end", "done_programs", "done_sums", "next_first", "next_sums",
               "tiles_log2")  # fmt: skip
    specs = (
        KernelSpec(
            module="kernels",
            name="sweep",
            arguments=(table, keys, ("sums", "*u64"), digests, flags,
                       *((name, "i32") for name in numbers)),
            constants={"BLOCKS": sum_blocks_per_program(wave), "STRIPES": 2,
                       "CHUNKS": FINISH_CHUNKS, "STAGES": 8},
            warps=4,
            registers=64,
        ),
        KernelSpec(
            module="kernels_short",
            name="short_chunks",
            arguments=(table, keys, digests, flags, ("chunks", "i32")),
            constants={"CHUNKS": SHORT_CHUNKS},
            warps=4,
        ),
        KernelSpec(
            module="kernels_move",
            name="compact",
            arguments=(flags, digests, ("changed", "*i32"), ("changed_digests", "*u64"),
                       ("chunks", "i32")),
            constants={"TILE": COMPACT_TILE, "LOOK": 4 * COMPACT_TILE},
            warps=8,
        ),
        KernelSpec(
            module="kernels_move",
            name="gather",
            arguments=(table, ("plan", "*i64"), ("target", "i64"), ("first", "i32"),
                       ("tiles_log2", "i32")),
            constants={"WORDS": GATHER_BYTES // 8},
            warps=4,
        ),
    )  # fmt: skip
    return {spec.name: spec for spec in specs}

"""A device made of the PTX machine: runs what Triton compiled for a GPU, on the CPU.

Kernels may read only the tensors they are given and the words in which bytes of the chunks of
their table lie, and write only those tensors (for a gather: only where its plan says).
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from ptx_machine import Machine
from ptx_memory import GlobalMemory
from ptx_parse import Program, parse

from deltackpt.cuda.runtime import Argument, find_kernel
from deltackpt.cuda.specs import KernelSpec, kernel_specs

BATCH = 64


@functools.cache
def compiled(kernel: str, capability: int) -> Any:
    """What `triton.compile` makes of a kernel for a GPU that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    return triton.compile(
        source_of(kernel_specs()[kernel], ASTSource),
        target=GPUTarget("cuda", capability, 32),
        options=options_of(kernel_specs()[kernel]),
    )


def source_of(spec: KernelSpec, make: Callable[..., Any]) -> Any:
    """The signature a launch would give: pointers aligned to 16 bytes, constants compiled in."""
    signature = {**dict(spec.arguments), **dict.fromkeys(spec.constants, "constexpr")}
    attributes = {(index,): [["tt.divisibility", 16]]
                  for index, (_, kind) in enumerate(spec.arguments) if kind[0] == "*"}  # fmt: skip
    return make(fn=find_kernel(spec), signature=signature, constexprs=dict(spec.constants),
                attrs=attributes)  # fmt: skip


def options_of(spec: KernelSpec) -> dict[str, int]:
    options = {"num_warps": spec.warps}
    return options if spec.registers is None else {**options, "maxnreg": spec.registers}


@functools.cache
def program_of(kernel: str, capability: int) -> Program:
    return parse(compiled(kernel, capability).asm["ptx"])


class PtxRuntime:
    """A `deltackpt.cuda.runtime.Runtime`; everything happens at once."""

    def __init__(
        self,
        capability: int,
        arena_bytes: int = 16 << 20,
        edit: Callable[[str], str] | None = None,
    ) -> None:
        """`edit` changes the PTX of every kernel before it runs, to see that harm is noticed."""
        self.device = torch.device("cpu")
        self.wave = 32
        self.capability = capability
        self.memory = GlobalMemory(arena_bytes)
        self.executed = 0
        self._edit = edit
        self._order = np.random.default_rng(0)

    def stream(self) -> None:
        return None

    mark = stream

    def record(self, stream: None) -> None:
        return None

    def wait(self, stream: None, event: None) -> None:
        pass

    def synchronize(self, event: None) -> None:
        pass

    def empty(self, stream: None, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(self.memory.allocate(nbytes))

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, stream: None, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def lock(self, view: memoryview) -> str | None:
        return None

    def unlock(self, view: memoryview) -> None:
        pass

    def launch(self, stream: None, kernel: str, programs: int, *args: Argument) -> None:
        code = program_of(kernel, self.capability)
        if self._edit is not None:
            code = parse(self._edit(compiled(kernel, self.capability).asm["ptx"]))
        shared = compiled(kernel, self.capability).metadata.shared
        self._permit(kernel, programs, args)
        values = [arg if isinstance(arg, int) else arg.data_ptr() for arg in args]
        order = self._order.permutation(programs)
        for start in range(0, programs, BATCH):
            machine = Machine(code, self.memory, shared, order[start : start + BATCH], values)
            machine.run()
            self.executed += machine.executed

    def _permit(self, kernel: str, programs: int, args: tuple[Argument, ...]) -> None:
        memory, names = self.memory, [name for name, _ in kernel_specs()[kernel].arguments]
        given = dict(zip(names, args, strict=True))
        memory.readable[:] = False
        memory.writable[:] = False
        for name, arg in given.items():
            if isinstance(arg, torch.Tensor):
                start = arg.data_ptr() - memory.base
                span = slice(start, start + arg.nbytes)
                memory.readable[span] = True
                memory.writable[span] = name not in ("table", "keys", "plan")
        if "table" in given:
            rows = given["table"].numpy().reshape(-1, 2)
            for address, extent in rows:
                start = int(address) - memory.base
                end = start + (int(extent) & 0xFFFFFFFF)
                memory.readable[start // 8 * 8 : -(-end // 8) * 8] = True
            if kernel == "gather":
                first, entries = given["first"], programs >> given["tiles_log2"]
                plan = given["plan"].numpy().reshape(-1, 2)[first : first + entries]
                for row, offset in plan:
                    start = given["target"] + int(offset) - memory.base
                    memory.writable[start : start + (int(rows[row, 1]) & 0xFFFFFFFF)] = True

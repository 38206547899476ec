"""What the compiler makes of the kernels, read from the machine code, with limits.

Prevents a silent loss of speed: results stay right when a lost alignment hint halves the loads'
width or a register too many spills to memory, so only the machine code shows it. No GPU and no
driver is needed.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ptx"))

import sass
from ptx_runtime import options_of, source_of

from deltackpt.cuda.specs import kernel_specs

CAPABILITIES = [80, 90, 100]
KERNELS = sorted(kernel_specs())
REGISTERS_OF_EIGHT_PROGRAMS = 65536 // (8 * 128)

gpus = pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda value: f"sm_{value}")


@gpus
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_spills(kernel: str, capability: int) -> None:
    code = sass.machine_code(kernel, capability)
    assert code.stack == 0
    assert code.count("STL") == code.count("LDL") == 0


@gpus
def test_eight_programs_of_a_sweep_fit_on_a_multiprocessor(capability: int) -> None:
    assert sass.machine_code("sweep", capability).registers <= REGISTERS_OF_EIGHT_PROGRAMS
    shared = sass.compiled("sweep", capability).metadata.shared
    assert 8 * (shared + 1024) <= 100 * 1024  # of 164 KiB or more; the rest is left to the cache


@gpus
def test_whole_tiles_are_read_at_full_width_and_all_at_once(capability: int) -> None:
    _, block, _ = sass.whole_tiles(capability)
    wide = [position for position, (_, op) in enumerate(block.ops) if op == "LDG.E.128"]
    assert len(wide) == 16  # 8 of data, 8 of keys
    assert block.count("LDG") == 16
    barrier = next(position for position, (_, op) in enumerate(block.ops) if op[:4] == "BAR.")
    assert sum(position < barrier for position in wide) == 8, "reads in flight before the first use"
    assert block.count("BAR") == 1
    assert block.count("STS") == block.count("LDS") == 0, "no detour through shared memory"


@gpus
def test_instructions_per_byte(capability: int) -> None:
    """Limits: what was counted, plus a tenth. Memory allows 6 on an H200."""
    _, _, whole = sass.whole_tiles(capability)
    aligned, skewed = sass.partial_tiles(capability)
    assert whole.instructions <= 1.8
    assert aligned.instructions <= 1.85
    assert skewed.instructions <= 3.75


def test_an_h200_is_bound_by_memory() -> None:
    """The slowest unit could take twice what memory delivers, thrice for whole tiles."""
    _, _, whole = sass.whole_tiles(90)
    aligned, skewed = sass.partial_tiles(90)
    assert whole.bound >= 3 * sass.MEMORY
    assert aligned.bound >= 3 * sass.MEMORY
    assert skewed.bound >= 1.25 * sass.MEMORY


@gpus
def test_chunks_are_gathered_at_full_width(capability: int) -> None:
    code = sass.machine_code("gather", capability)
    assert code.count("LDG.E.128") == 8
    assert code.count("STG.E.128") == 16  # aligned and any address
    assert code.count("BAR") == code.count("STS") == 0


@gpus
def test_finishing_reads_ahead(capability: int) -> None:
    """The chain of scrambles must not wait for memory at every block."""
    code = sass.machine_code("sweep", capability)
    assert code.count("LDGSTS") == 8  # seven blocks ahead, and the one in the loop


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_amd_gpu_is_compiled_for(kernel: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = kernel_specs(wave=64)[kernel]
    options = options_of(spec)
    options.pop("maxnreg", None)  # an option of NVIDIA's assembler
    made: Any = triton.compile(
        source_of(spec, ASTSource), target=GPUTarget("hip", "gfx942", 64), options=options
    )
    text = made.asm["amdgcn"]
    assert re.findall(r"\.vgpr_spill_count:\s+(\d+)", text) == ["0"]
    assert re.findall(r"\.private_segment_fixed_size:\s+(\d+)", text) == ["0"]
    if kernel == "sweep":
        assert len(re.findall("global_load_dwordx4", text)) >= 16

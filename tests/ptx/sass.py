"""Reading machine code: what ptxas made of a kernel, counted along the path that matters.

``python tests/ptx/sass.py`` prints the table of docs/gpu.md.
"""

import functools
import heapq
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ptx_runtime import compiled

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_ALU = {"LOP3", "IADD3", "VIADD", "SHF", "ISETP", "SEL", "LEA", "PRMT", "PLOP3", "MOV", "SGXT",
        "IABS", "VIMNMX", "IMNMX", "P2R", "R2P"}  # fmt: skip

# One H200 (the figures of docs/gpu.md): multiprocessors, clock, memory bandwidth; a clock issues
# 128 lanes, of which 64 may be integer logic and 64 multiply-adds.
SMS, CLOCK, MEMORY = 132, 1.755e9, 4.8e12


@dataclass(slots=True)
class Block:
    """Instructions without a branch between them; ``goes`` are the blocks that may follow."""

    ops: list[tuple[bool, str]]  # (predicated, op)
    goes: list[int]

    def count(self, op: str) -> int:
        return sum(name.startswith(op) for _, name in self.ops)


@dataclass(slots=True)
class Machinery:
    """One kernel's machine code."""

    registers: int
    stack: int
    blocks: list[Block]

    def count(self, op: str) -> int:
        return sum(block.count(op) for block in self.blocks)

    def path_through(self, middle: int) -> list[str]:
        """Ops of the shortest way from the entry through a block to an exit after a store."""
        before = self._shortest(0, lambda at: at == middle)
        after = self._shortest(middle, lambda at: self.blocks[at].count("STG") > 0)
        return [op for at in before + after[1:] for _, op in self.blocks[at].ops]

    def loops(self) -> list[list[str]]:
        """Ops of every loop, from the block that is jumped back to up to the jump."""
        found = []
        for end, block in enumerate(self.blocks):
            for start in block.goes:
                ops = [op for at in range(start, end + 1) for _, op in self.blocks[at].ops]
                if start <= end and len(ops) > 2:  # the code ends in an endless jump to itself
                    found.append(ops)
        return found

    def _shortest(self, start: int, wanted: object) -> list[int]:
        assert callable(wanted)
        queue: list[tuple[int, list[int]]] = [(0, [start])]
        seen: set[int] = set()
        while queue:
            cost, path = heapq.heappop(queue)
            if wanted(path[-1]):
                return path
            if path[-1] in seen:
                continue
            seen.add(path[-1])
            for following in self.blocks[path[-1]].goes:
                more = len(self.blocks[following].ops)
                heapq.heappush(queue, (cost + more, [*path, following]))
        raise AssertionError("no such path")


@functools.cache
def machine_code(kernel: str, capability: int) -> Machinery:
    """Disassemble what `triton.compile` made, with the tools that come with triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(kernel, capability).asm["cubin"])
        file.flush()

        def run(*command: str) -> str:
            return subprocess.run(
                [str(tools / command[0]), *command[1:], file.name],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip

        usage = run("cuobjdump", "-res-usage")
        text = run("nvdisasm", "-c")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Machinery(int(found[1]), int(found[2]), _blocks(text))


def _blocks(text: str) -> list[Block]:
    blocks = [Block([], [])]
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    open_end = True
    for line in text[text.index(".text.") :].splitlines():
        label = re.match(r"(\.L_x_\d+):", line)
        found = _INSTRUCTION.search(line)
        if label or (found and not open_end):
            blocks.append(Block([], []))
            if open_end:
                blocks[-2].goes.append(len(blocks) - 1)
            open_end = True
        if label:
            labels[label[1]] = len(blocks) - 1
        if not found:
            continue
        guard, op, rest = found.groups()
        blocks[-1].ops.append((guard is not None, op))
        if op.startswith(("BRA", "EXIT")):
            target = re.search(r"\.L_x_\d+", rest)
            if target:
                jumps.append((len(blocks) - 1, target[0]))
            conditional = guard is not None or "P" in rest.split("`")[0]  # as in BRA.U !UP0, `(.L)
            blocks.append(Block([], []))
            if conditional:
                blocks[-2].goes.append(len(blocks) - 1)
    for at, name in jumps:
        blocks[at].goes.append(labels[name])
    return blocks


@dataclass(frozen=True, slots=True)
class Rate:
    """Instructions per byte of one thread's share, and the bytes a second at which units fill."""

    instructions: float
    issue: float
    alu: float
    imad: float

    @property
    def bound(self) -> float:
        return min(self.issue, self.alu, self.imad)


def rate(ops: list[str], thread_bytes: int) -> Rate:
    """What `ops`, executed once per `thread_bytes` bytes, allow on one H200."""
    heads = Counter(op.split(".")[0] for op in ops if not op.startswith("NOP"))
    alu = sum(count for head, count in heads.items() if head in _ALU)
    imad = heads["IMAD"] + sum(op.startswith("IMAD.WIDE") for op in ops)  # wide: maybe half rate
    clocks = SMS * CLOCK * thread_bytes
    total = sum(heads.values())
    return Rate(total / thread_bytes, 128 * clocks / total, 64 * clocks / max(alu, 1),
                64 * clocks / max(imad, 1))  # fmt: skip


def whole_tiles(capability: int) -> tuple[Machinery, Block, Rate]:
    """The path of a sweep that most bytes take: aligned whole blocks, 128 bytes a thread."""
    code = machine_code("sweep", capability)
    plain = [sum(op == "LDG.E.128" and not guarded for guarded, op in block.ops)
             for block in code.blocks]  # fmt: skip
    middle = max(range(len(plain)), key=plain.__getitem__)
    return code, code.blocks[middle], rate(code.path_through(middle), 128)


def partial_tiles(capability: int) -> tuple[Rate, Rate]:
    """The loops over tiles that end early: aligned, and at any address."""
    loops = machine_code("sweep", capability).loops()
    aligned = [ops for ops in loops if ops.count("LDG.E.128") == 8]
    skewed = [ops for ops in loops if ops.count("LDG.E.64") >= 8]
    assert len(aligned) == len(skewed) == 1, [Counter(ops) for ops in loops]
    return rate(aligned[0], 64), rate(skewed[0], 32)


def main() -> None:
    head = "GPU | registers | whole tiles | partial tiles | any address | TB/s: issue | ALU | IMAD"
    print(f"| {head} |\n|{' --- |' * 8}")
    for capability in (80, 90, 100):
        code, _, whole = whole_tiles(capability)
        aligned, skewed = partial_tiles(capability)
        cells = [f"sm_{capability}", str(code.registers)]
        cells += [f"{part.instructions:.2f}" for part in (whole, aligned, skewed)]
        cells += [f"{value / 1e12:.1f}" for value in (whole.issue, whole.alu, whole.imad)]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()

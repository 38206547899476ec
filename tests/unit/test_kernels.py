"""Compiled and NumPy loops give the same bytes: what one has coded the other restores."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltackpt_store.coding import adam, cast, elements, kernels, symbols
from deltackpt_store.coding.arithmetic import exact
from deltackpt_store.coding.by_exponent import decode_by_exponent, encode_by_exponent
from deltackpt_store.coding.kernels import Stream
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
LENGTHS = st.one_of(st.integers(0, 80), st.integers(2000, 2100), st.integers(4090, 9000))


def either_way(work: Callable[[], Any]) -> list[Any]:
    """What `work` gives with the compiled loops, if they are there, and what with NumPy."""
    native = kernels.native
    results = [work()]
    kernels.native = None
    try:
        results.append(work())
    finally:
        kernels.native = native
    return results


def streams_of(planes: Sequence[np.ndarray]) -> list[Stream]:
    """Planes as they are; of a stride of 0 one byte."""
    return [Stream(len(p), p.data if p.strides[0] else p[:1].tobytes()) for p in planes]


def random_bytes(seed: int, size: int, spread: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (np.abs(rng.standard_normal(size)) * spread).astype(np.uint8)


def test_built_where_there_is_a_compiler() -> None:
    compiler = os.environ.get("CC", "cc").split()[0]
    assert kernels.native is not None or shutil.which(compiler) is None, (
        "the inner loops are not compiled, or from another kernels.c: run make venv again"
    )


@given(st.sampled_from(elements.WIDTHS), LENGTHS, st.integers(0, 9), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_planes(width: int, count: int, seed: int, near: bool, odd: bool) -> None:
    rng = np.random.default_rng(seed)
    reference = rng.integers(0, 256, count * width + odd, np.uint8)[odd:].view(f"<u{width}")
    step = rng.integers(-3, 4, count) if near else rng.integers(-(2**30), 2**30, count)
    values = (reference.astype(np.int64) + step).astype(reference.dtype)
    for base in (None, reference):
        native, plain = either_way(lambda base=base: elements.split(values, base))
        assert [p.tobytes() for p in native] == [p.tobytes() for p in plain]
        if base is None:
            assert native[0].tobytes() == values.tobytes()[::width]

        planes = streams_of(native)

        def joined(base: Any = base, planes: Any = planes) -> bytes:
            out = np.empty(count * width + 1, np.uint8)[1:].view(values.dtype)
            elements.join(planes, out, base)
            return out.tobytes()

        assert either_way(joined) == [values.tobytes()] * 2


@pytest.mark.parametrize("constant", range(1, 16))
def test_constant_planes(constant: int) -> None:
    planes = [random_bytes(k, 5000, 90) for k in range(4)]
    for k in range(4):
        if constant >> k & 1:
            planes[k] = np.broadcast_to(planes[k][:1], 5000)

    def joined() -> bytes:
        out = np.empty(5000, "<u4")
        elements.join(streams_of(planes), out)
        return out.tobytes()

    assert either_way(joined) == [np.stack(planes, axis=1).tobytes()] * 2


@given(st.integers(1024, 9000), st.integers(0, 9), st.sampled_from((0, 1, 2, 3, 5, 8, 20, 80)))
@settings(max_examples=80)
def test_symbols(size: int, seed: int, spread: int) -> None:
    stream = random_bytes(seed, size, spread)
    suits, plainly = either_way(lambda: symbols.suits(stream))
    assert suits == plainly
    for per_byte, listed in [
        *((suits,) if suits else ()),
        (symbols.CRUMBS, b"\2\0\1"),
        (symbols.NIBBLES, bytes(range(15))),
    ]:
        packed, plain = either_way(lambda p=per_byte, v=listed: symbols.pack_symbols(stream, p, v))
        assert packed.codes.tobytes() == plain.codes.tobytes()
        assert packed.others.tobytes() == plain.others.tobytes()

        def unpacked(p: int = per_byte, v: bytes = listed, packed: Any = packed) -> bytes:
            assert symbols.count_others(packed.codes, p, size) == len(packed.others)
            out = np.empty(size, np.uint8)
            elements.join([Stream(size, packed.codes.data, p, v, packed.others.data)], out)
            return out.tobytes()

        assert either_way(unpacked) == [stream.tobytes()] * 2


@pytest.mark.parametrize("per_byte", [symbols.CRUMBS, symbols.NIBBLES])
@pytest.mark.parametrize("code", [0x00, 0xFF])
def test_one_code_and_one_other_for_all(per_byte: int, code: int) -> None:
    listed = bytes(range(1, 1 + symbols.listed_count(per_byte)))

    def unpacked() -> bytes:
        out = np.empty(5001, np.uint8)
        elements.join([Stream(5001, bytes((code,)), per_byte, listed, b"\x77")], out)
        return out.tobytes()

    assert either_way(unpacked) == [bytes((0x77 if code else listed[0],)) * 5001] * 2
    packed = bytes((code,)) * -(-5001 // per_byte)  # the last byte has codes that do not count
    others = either_way(lambda: symbols.count_others(packed, per_byte, 5001))
    assert others == [5001 if code else 0] * 2


@given(st.sampled_from((2, 4, 8)), LENGTHS.filter(bool), st.integers(0, 9), st.integers(0, 40))
@settings(max_examples=60)
def test_sorting_by_exponent(width: int, count: int, seed: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    floats = (rng.standard_normal(count) * 2.0 ** rng.integers(-spread - 1, 1, count)).astype("<f4")
    reference = np.resize(floats.view(np.uint8), count * width + 1)[1:].tobytes()
    raw = bytearray(reference)
    raw[::width] = rng.integers(0, 256, count, np.uint8).tobytes()

    def coded() -> Any:
        made = encode_by_exponent(memoryview(raw), memoryview(reference), width, "zstd")
        return made and (made.params, b"".join(made.payload), made.stored)

    native, plain = either_way(coded)
    assert native == plain
    if native is None:
        return

    def decoded() -> bytes:
        out = bytearray(len(raw))
        decode_by_exponent(
            native[0], memoryview(native[1]), memoryview(out), [memoryview(reference)]
        )
        return bytes(out)

    assert either_way(decoded) == [raw] * 2


def test_a_reference_that_changes_meanwhile_leads_nowhere_else() -> None:
    """Counts that do not belong to the reference: wrong values, and no memory but that given."""
    if kernels.native is None:
        pytest.skip("NumPy checks its indices")
    base = np.full(1000, 0x3F800000, "<u4")
    room = np.full(1200, 7, "<u4")
    class_of = np.arange(256, dtype=np.uint8)
    starts = [999] * 257  # the class begins at the last place
    kernels.native.unsort(base, base, 23, class_of, starts, room[100:1100])
    sorted_ = kernels.native.sort(base, base, 23, class_of, starts)
    assert len(sorted_) == 1000
    assert (room[:100] == 7).all()
    assert (room[1100:] == 7).all()


def test_rounding() -> None:
    """Every exponent, ties, infinities, denormal numbers; NaNs go the long way."""
    tops = np.arange(0, 1 << 16, dtype=np.uint32) << 16
    lows = np.array((0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF), np.uint32)
    words = (tops[:, None] | lows).reshape(-1)
    numbers = words[~np.isnan(words.view(np.float32))]
    for values in (words, numbers):
        native, plain = either_way(lambda values=values: cast.round_to(1, values, cast.RULES[1][0]))
        assert native[0].tobytes() == plain[0].tobytes()
        assert native[1] == plain[1] == (len(values) == len(words))


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_optimizer_steps(seed: int, weight: bool, largest: bool) -> None:
    """Bit for bit, with any bits for numbers, as replaying a step is only right if it is."""
    rng = np.random.default_rng(seed)
    count = 5001

    def numbers() -> np.ndarray:
        if seed % 2:  # any bits: NaNs, infinities, denormal numbers
            return rng.integers(0, 1 << 32, count, np.uint64).astype(np.uint32).view(np.float32)
        return (rng.standard_normal(count) * 10.0 ** rng.integers(-20, 3)).astype(np.float32)

    before, after, second, w, x = (numbers() for _ in range(5))
    betas = adam.Betas(0.9, 0.999, 1e-8)
    step = adam.Step(0.9999, 1e-3 / (1 - 0.9**3), (1 - 0.999**3) ** 0.5)

    def advanced() -> list[bytes]:
        v, wc, xc = second.copy(), w.copy(), x.copy()
        with exact():
            heavy, most = (wc if weight else None), (xc if largest else None)
            adam.advance(betas, step, before, after, v, weight=heavy, largest=most)
        return [v.tobytes(), wc.tobytes(), xc.tobytes()]

    native, plain = either_way(advanced)
    assert native == plain


def test_a_library_of_another_source_is_not_used(tmp_path: Path) -> None:
    """An old library beside new sources would write what nothing can read."""
    folder = Path(kernels.__file__).parent
    if not (folder / kernels.LIBRARY).exists():
        assert kernels.load(folder) is None
        return
    for name in (kernels.LIBRARY, "kernels.c"):
        shutil.copy(folder / name, tmp_path / name)
    assert kernels.load(tmp_path) is not None
    with open(tmp_path / "kernels.c", "a") as file:
        file.write("/* changed */\n")
    assert kernels.load(tmp_path) is None
    (tmp_path / "kernels.c").unlink()
    assert kernels.load(tmp_path) is None


def test_other_users_of_ctypes_find_it_as_it_was() -> None:
    """Prevents: a library that asks Python for the characters of bytes getting an address."""
    look = (
        "import ctypes, deltackpt\n"
        "for name in ('PyBytes_AsString', 'PyMemoryView_FromMemory'):\n"
        "    found = getattr(ctypes.pythonapi, name)\n"
        "    assert (found.restype, found.argtypes) == (ctypes.c_int, None), name\n"
    )
    subprocess.run([sys.executable, "-c", look], check=True)


@pytest.mark.parametrize("compiler", ["cc", "gcc", "clang"])
def test_every_compiler_makes_all_the_loops(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.syspath_prepend(str(ROOT))
    build = importlib.import_module("hatch_build")
    source = Path(shutil.copy(Path(kernels.__file__).with_name("kernels.c"), tmp_path))
    assert build.compile_kernels(source, source.with_name(kernels.LIBRARY)) is None
    native = kernels.load(tmp_path)
    assert native is not None, "a function is missing"
    stream = random_bytes(1, 5000, 4)
    per_byte, listed = native.suit(stream)
    codes, others = native.pack(stream, per_byte, listed)
    packed = Stream(len(stream), codes, per_byte, listed[: symbols.listed_count(per_byte)], others)
    out = np.empty(len(stream), np.uint8)
    native.join([packed], None, out)
    assert out.tobytes() == stream.tobytes()


def test_a_broken_library_is_not_used(tmp_path: Path) -> None:
    shutil.copy(Path(kernels.__file__).with_name("kernels.c"), tmp_path)
    (tmp_path / kernels.LIBRARY).write_bytes(b"\x7fELF no library")
    assert kernels.load(tmp_path) is None


def test_a_build_without_a_compiler_is_pure_python(tmp_path: Path) -> None:
    """And says so; asked to have the loops it fails instead."""
    source = tmp_path / "sources"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "tests", "docs", kernels.LIBRARY)
    )
    for wish, fails in (("", False), ("on", True)):
        target = tmp_path / f"wheel{wish}"
        done = subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(target), "."],
            cwd=source, capture_output=True, text=True, check=False,
            env={**os.environ, "CC": "no-such-compiler", "DELTACKPT_KERNELS": wish},
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert "no-such-compiler" in said
        if fails:
            assert done.returncode
            continue
        assert not done.returncode, said
        (wheel,) = target.glob("*.whl")
        assert wheel.name.endswith("-py3-none-any.whl")

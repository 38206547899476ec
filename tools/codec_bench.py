"""Codec laboratory: what each codec makes of real training states, beside the entropy bound.

    python tools/codec_bench.py --json .bench/codecs.json       # every run, distances 1, 10, 100
    python tools/codec_bench.py mixed fp32 --chunks 24        # two runs, a smaller sample
    python tools/codec_bench.py mixed --side-by-side          # whole saves, beside moonclip
    python tools/codec_bench.py mixed --every-step            # saves of every step, predicted

Ratios are bytes of the state by bytes stored (records' 64 bytes and reference ids counted, with
unchanged chunks at nothing); speeds are gigabytes of state per second of CPU time of one thread.
Single codecs are measured on a sample of each tensor class, `auto` on all chunks, through the same
policy as in the writer. The bound is the order-0 entropy of the byte planes of the difference (or
of the bytes themselves, if that is less). States are trained on the first call (minutes) and kept.
"""

# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import codec_states
import numpy as np
from deltackpt_store import codecs, coding_policy
from deltackpt_store.coding.by_exponent import encode_by_exponent
from deltackpt_store.coding.elements import (
    difference,
    element_width,
    elements_of,
    reference_elements,
    split,
)
from deltackpt_store.coding.planes import Coded, encode_delta, encode_planes
from deltackpt_store.coding.sparse import encode_sparse
from deltackpt_store.intake import STREAM_CHUNKS
from deltackpt_store.pack import RECORD_BYTES

CHUNK = 512 * 1024
CACHE = Path(__file__).parents[1] / ".bench" / "codec"

Encode = Callable[[memoryview, memoryview, int], Coded | None]

SINGLE: dict[str, tuple[int, Encode]] = {
    "planes lz4": (codecs.PLANES, lambda a, b, w: encode_planes(a, w, "lz4")),
    "planes zstd": (codecs.PLANES, lambda a, b, w: encode_planes(a, w, "zstd")),
    "delta lz4": (codecs.DELTA, lambda a, b, w: encode_delta(a, b, w, "lz4")),
    "delta zstd": (codecs.DELTA, lambda a, b, w: encode_delta(a, b, w, "zstd")),
    "sparse zstd": (codecs.SPARSE, lambda a, b, w: encode_sparse(a, b, w, "zstd")),
    "sorted zstd": (codecs.SORTED, lambda a, b, w: encode_by_exponent(a, b, w, "zstd")),
}


class Pair(NamedTuple):
    """One chunk that changed, and the same chunk of the base."""

    kind: str
    stream: str
    dtype: str
    now: memoryview
    base: memoryview


def chunk_pairs(
    state: codec_states.State, base: codec_states.State
) -> tuple[list[Pair], dict[str, int]]:
    """All changed chunks, and the bytes of each tensor class."""
    pairs: list[Pair] = []
    size: dict[str, int] = {}
    for name, array in state.items():
        kind, dtype, _ = name.split("|")
        now, then = memoryview(array), memoryview(base[name])
        size[kind] = size.get(kind, 0) + len(now)
        for start in range(0, len(now), CHUNK):
            a, b = now[start : start + CHUNK], then[start : start + CHUNK]
            if a != b:
                stream = f"{start // CHUNK // STREAM_CHUNKS}:{name}/{kind}"
                pairs.append(Pair(kind, stream, dtype, a, b))
    return pairs, size


def entropy_bound(pair: Pair) -> float:
    """Bytes by the order-0 entropy of the planes, with or without the reference."""
    width = element_width(pair.dtype)
    values = elements_of(pair.now, width)
    coded = difference(values, reference_elements(pair.base, len(values), width))
    return min(sum(map(_entropy, split(v))) for v in (values, coded)) + len(pair.now) % width


def _entropy(plane: np.ndarray[Any, Any]) -> float:
    counts = np.bincount(plane, minlength=256)
    counts = counts[counts > 0] / max(1, len(plane))
    return float(-(counts * np.log2(counts)).sum()) * len(plane) / 8


def measure_single(pairs: list[Pair]) -> dict[str, Any]:
    """Ratio and speeds of each codec over the chunks given."""
    raw = sum(len(pair.now) for pair in pairs)
    row: dict[str, Any] = {"bound": raw / max(1.0, sum(map(entropy_bound, pairs)))}
    for name, (codec, encode) in SINGLE.items():
        stored, spent, decoding = 0, 0.0, 0.0
        for pair in pairs:
            began = time.thread_time()
            coded = encode(pair.now, pair.base, element_width(pair.dtype))
            spent += time.thread_time() - began
            refs = [] if codec == codecs.PLANES else [pair.base]
            if coded is None or coded.stored + 64 * len(refs) > len(pair.now):
                stored += len(pair.now) + RECORD_BYTES
                continue
            stored += coded.stored + 64 * len(refs) + RECORD_BYTES
            payload = memoryview(b"".join(bytes(part) for part in coded.payload))
            out = memoryview(bytearray(len(pair.now)))
            began = time.thread_time()
            codecs.decode(codec, coded.params, payload, out, refs)
            decoding += time.thread_time() - began
            assert out == pair.now
        row[name] = {
            "ratio": raw / stored, "encode": raw / spent / 1e9,
            "decode": raw / decoding / 1e9 if decoding else None,
        }  # fmt: skip
    return row


def measure_auto(pairs: list[Pair], mode: str) -> tuple[dict[str, int], float]:
    """Stored bytes by tensor class, and CPU seconds, of the writer's policy in its second save.

    The first save (of the base) and the save measured are planned one after the other, as in a
    run that saves the two steps.
    """
    policy = coding_policy.CodingPolicy(mode)
    for pair in pairs:
        plan = policy.plan(pair.stream, len(pair.base), pair.dtype, reference=False)
        outcome = coding_policy.encode(plan, pair.base, None, b"")
        policy.learn(pair.stream, pair.dtype, plan, outcome, len(pair.base), outcome.best.stored)
    policy.next_save()
    stored: dict[str, int] = {}
    spent = 0.0
    for pair in pairs:
        began = time.thread_time()
        use = policy.wants_reference(pair.stream)
        plan = policy.plan(pair.stream, len(pair.now), pair.dtype, reference=use)
        outcome = coding_policy.encode(plan, pair.now, pair.base if use else None, bytes(32))
        spent += time.thread_time() - began
        policy.learn(pair.stream, pair.dtype, plan, outcome, len(pair.now), outcome.best.stored)
        best = outcome.best
        size = best.stored + len(best.params) + 64 * len(best.refs) + RECORD_BYTES
        stored[pair.kind] = stored.get(pair.kind, 0) + size
    return stored, spent


def measure(name: str, sample: int) -> dict[str, Any]:
    """All figures of one run, by distance."""
    states = codec_states.load(name, CACHE)
    result: dict[str, Any] = {"what": codec_states.RUNS[name].what, "distances": {}}
    for distance in codec_states.DISTANCES:
        pairs, size = chunk_pairs(states[distance], states[0])
        total, changed = sum(size.values()), sum(len(pair.now) for pair in pairs)
        classes: dict[str, Any] = {}
        best = 0.0
        for kind in size:
            mine = [pair for pair in pairs if pair.kind == kind]
            taken = mine[:: max(1, -(-len(mine) // sample))]
            row: dict[str, Any] = {"bytes": size[kind]}
            row["changed"] = sum(len(p.now) for p in mine) / size[kind]
            if taken:
                row |= measure_single(taken)
                top = max(row[codec]["ratio"] for codec in SINGLE)
                best += sum(len(p.now) for p in mine) / top
            classes[kind] = row
        whole: dict[str, Any] = {"changed": changed / total, "best single": total / max(best, 1)}
        for mode in ("auto", "fast", "small"):
            stored, spent = measure_auto(pairs, mode)
            kept = sum(stored.values())
            derived = kept - stored.get("bf16", 0)
            whole[mode] = {
                "ratio": total / max(kept, 1),
                "encode": changed / max(spent, 1e-9) / 1e9,
            }
            if "bf16" in size:
                whole[mode]["bf16 derived"] = total / max(derived, 1)
                whole[mode]["bf16 alone"] = size["bf16"] / max(stored.get("bf16", 0), 1)
            for kind in stored:
                classes[kind][mode] = size[kind] / stored[kind]
        result["distances"][distance] = {"whole": whole, "classes": classes}
        _print(name, distance, whole, classes)
    return result


def _print(name: str, distance: int, whole: dict[str, Any], classes: dict[str, Any]) -> None:
    auto, fast, small = whole["auto"], whole["fast"], whole["small"]
    derived = f", bf16 derived {auto['bf16 derived']:.2f}" if "bf16 derived" in auto else ""
    print(
        f"\n{name}, {distance} steps: auto {auto['ratio']:.3f}x at {auto['encode']:.2f} GB/s"
        f"{derived};"
        f" fast {fast['ratio']:.3f}x at {fast['encode']:.2f} GB/s;"
        f" small {small['ratio']:.3f}x at {small['encode']:.2f} GB/s; best single codec by class"
        f" {whole['best single']:.3f}x; {whole['changed']:.1%} of bytes in changed chunks"
    )
    print(f"| class | changed | bound | {' | '.join(SINGLE)} | auto |")
    print("| --- |" + " ---: |" * (len(SINGLE) + 3))
    for kind, row in classes.items():
        if "bound" not in row:
            print(f"| {kind} | 0 % |" + " |" * (len(SINGLE) + 2))
            continue
        cells = [
            f"{row[c]['ratio']:.3g} ({row[c]['encode']:.2g}/{row[c]['decode'] or 0:.2g})"
            for c in SINGLE
        ]
        print(
            f"| {kind} | {row['changed']:.0%} | {row['bound']:.3g} | {' | '.join(cells)} |"
            f" {row['auto']:.4g} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help=f"of {', '.join(codec_states.RUNS)}; all if none")
    parser.add_argument("--chunks", type=int, default=32, help="sample per tensor class")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument(
        "--side-by-side", action="store_true", help="whole saves beside moonclip instead"
    )
    parser.add_argument(
        "--every-step", action="store_true", help="saves of ten steps in a row instead"
    )
    args = parser.parse_args()
    unknown = set(args.runs) - set(codec_states.RUNS)
    if unknown:
        parser.error(f"unknown run: {', '.join(sorted(unknown))}")
    runs = args.runs or list(codec_states.RUNS)
    if args.side_by_side:
        import codec_rivals

        figures = {name: codec_rivals.compare(name, CACHE) for name in runs}
    elif args.every_step:
        import codec_steps

        figures = {name: codec_steps.every_step(name, CACHE) for name in runs}
    else:
        figures = {name: measure(name, args.chunks) for name in runs}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
        print(f"\nwritten to {args.json}", file=sys.stderr)


if __name__ == "__main__":
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # as the writer process is started
        memory = {"MALLOC_MMAP_THRESHOLD_": str(64 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **memory})
    main()

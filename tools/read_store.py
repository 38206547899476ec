"""Reads one step of a store; written from docs/format.md (its sections in parentheses) alone.

python tools/read_store.py STORE RUN[@STEP]                   list the leaves
python tools/read_store.py STORE RUN[@STEP] PATH > FILE       bytes of a tensor, in C order
"""

from __future__ import annotations

import json
import mmap
import re
import struct
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

from blake3 import blake3

sys.path.insert(0, str(Path(__file__).parent))
from read_codecs import check, decode, integers, take

MSGPACK = "N0--F0T0b1b2b4------f4f8u1u2u4u8i1i2i4i8----------s1s2s4l2l4m2m4"  # tags from 0xC0 on
CONSTANTS = {"N": None, "F": False, "T": True}
DEFAULTS: list[Any] = [False, False, False, False, "cpu", None, None]  # elements 6 to 12


def unpack(file: BytesIO, depth: int = 0) -> Any:  # one MessagePack value
    tag = take(file, 1)[0]
    if tag < 0x80 or tag >= 0xE0:
        return tag if tag < 0x80 else tag - 256
    kind = "mlss"[tag - 0x80 >> 4] if tag < 0xC0 else MSGPACK[2 * (tag - 0xC0)]
    check(kind != "-" and depth < 256, "an unknown type, or nested too deeply")
    size = 0 if tag < 0xC0 else int(MSGPACK[2 * (tag - 0xC0) + 1])
    if kind == "f":
        return struct.unpack(">f" if size == 4 else ">d", take(file, size))[0]
    number = int.from_bytes(take(file, size), "big", signed=kind == "i")
    count = number if size else tag & (15 if tag < 0xA0 else 31)
    if kind in "bs":
        return take(file, count) if kind == "b" else take(file, count).decode()
    if kind == "m":
        return {unpack(file, depth + 1): unpack(file, depth + 1) for _ in range(count)}
    if kind == "l":
        return [unpack(file, depth + 1) for _ in range(count)]
    return CONSTANTS.get(kind, number)


class Step:
    def __init__(self, store: str, run: str, step: int | None = None) -> None:
        self.store = Path(store)
        line, digest = (self.store / "FORMAT").read_bytes().splitlines()  # (3)
        check(blake3(line + b"\n").hexdigest().encode() == digest, "FORMAT is damaged")
        described = json.loads(line)
        check(described["deltackpt"] == 1 and not described["read"], "a newer format")
        commit = self.find(run, step)
        manifest = self.manifest(commit["manifest"])  # (5)
        base = self.manifest(manifest["base"]) if manifest.get("base") else manifest
        merged = [base.get(f, {}) | manifest.get(f, {}) for f in ("objects", "inline", "chunks")]
        self.layout, (self.objects, self.inline, self.chunks) = base["layout"], merged
        for extent, (positions, ids) in manifest.get("patches", {}).items():
            new = bytearray(self.chunks[extent])
            for i, position in enumerate(integers(positions, 4)):
                new[32 * position : 32 * position + 32] = ids[32 * i : 32 * i + 32]
            self.chunks[extent] = bytes(new)
        self.views = {v[0]: [*v, *DEFAULTS[len(v) - 6 :]][:13] for v in self.layout["tensors"]}
        check(self.root() == manifest["root"] == commit["root"], "the root does not hold")
        self.records: dict[bytes, tuple[mmap.mmap, int]] = {}
        for path in self.store.glob("packs/??/*.pack"):  # (4.3, 4.4)
            with path.open("rb") as file:
                pack = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            at, entries, _, size = struct.unpack("<8xQIIQ32x", pack[-64:])
            check(pack[12:28].hex() == described["store"] and size == len(pack), f"bad {path}")
            check(blake3(pack[:64] + pack[at:-32]).digest() == pack[-32:], f"bad footer: {path}")
            for i in range(at, at + 56 * entries, 56):
                self.records[pack[i : i + 32]] = pack, integers(pack[i + 32 : i + 40], 8)[0]

    def find(self, run: str, step: int | None) -> dict[str, Any]:  # (9)
        found: dict[int, Any] = {}
        for path in (self.store / "runs" / run).iterdir():
            data = path.read_bytes() if re.fullmatch("[0-9]{20}", path.name) else b""
            if data[:8] == b"DCKPTCM\1" and not path.with_name(f"{path.name}.retired").exists():
                check(blake3(data[:-32]).digest() == data[-32:], f"{path} is damaged")
                found[int(path.name)] = unpack(BytesIO(data[8:-32]))
        lineage: Any = [[max(found), max(found)], *found[max(found)].get("ancestors", ())]
        order = sorted(found, key=lambda n: (any(a <= n <= b for a, b in lineage), n))
        return next(found[n] for n in reversed(order) if step in (None, found[n]["step"]))

    def manifest(self, digest: bytes) -> dict[str, Any]:
        data = (self.store / "manifests" / digest.hex()).read_bytes()
        check(data[:8] == b"DCKPTMF\1" and blake3(data).digest() == digest, "bad manifest")
        return unpack(BytesIO(data[8:]))

    def root(self) -> bytes:  # (8)
        structure, paths, extents = (self.layout[f] for f in ("structure", "paths", "extents"))
        head = struct.pack(f"<Q{len(structure)}sQ", len(structure), structure, len(paths))
        hasher, seen = blake3(b"deltackpt root 1\n" + head), dict[int, int]()
        for slot, path in enumerate(paths):
            view, number = self.views.get(slot), 0
            leaf = b"object 1\n" + self.objects.get(slot, b"")
            if view:
                extent, dtype, shape, stride, offset, *flags, _, whole, shard = view[1:]
                number, (nbytes, chunk, *_) = seen.setdefault(extent, len(seen)), extents[extent]
                a, b, c, d = ("-" if numbers is None else ",".join(map(str, numbers))
                              for numbers in (shape, stride, whole, shard))  # fmt: skip
                line = f"tensor 1\n{dtype} shape={a} stride={b} offset={offset} "
                line += f"flags={sum(flag << i for i, flag in enumerate(flags))} "
                line += f"global={c} shard={d} bytes={nbytes} chunk={chunk}\n"
                leaf = line.encode() + (self.inline if nbytes <= 512 else self.chunks)[extent]
            name, digest = path.encode(), blake3(b"deltackpt " + leaf).digest()
            hasher.update(struct.pack(f"<I{len(name)}s?I", len(name), name, view, number) + digest)
        return hasher.digest()

    def chunk(self, chunk_id: bytes, depth: int = 0) -> bytes:  # (4.2)
        check(chunk_id in self.records and depth <= 8, f"chunk {chunk_id.hex()} is missing")
        pack, at = self.records[chunk_id]
        crc, codec, _, refs, params, skip, raw, stored = struct.unpack_from("<4xI4B3I", pack, at)
        end, start = at + 64 + 32 * refs, at + skip
        check(zlib.crc32(pack[at + 8 : end + params]) == crc, "a record is damaged")
        needed = [self.chunk(pack[i : i + 32], depth + 1) for i in range(at + 64, end, 32)]
        data = decode(codec, pack[end : end + params], pack[start : start + stored], raw, needed)
        check(blake3(data).digest() == chunk_id, f"chunk {chunk_id.hex()} is damaged")
        return data

    def tensor(self, path: str) -> bytes:  # (5.1) elements as stored: conj and neg not applied
        _, extent, dtype, shape, stride, offset = self.views[self.layout["paths"].index(path)][:6]
        ids, data, places = self.chunks.get(extent, b""), self.inline.get(extent, b""), [offset]
        data += b"".join(self.chunk(ids[i : i + 32]) for i in range(0, len(ids), 32))
        size = 1 if dtype == "bool" else -(-int(re.findall("[0-9]+", dtype)[0]) // 8)
        for count, step in zip(shape, stride, strict=True):
            places = [place + i * step * size for place in places for i in range(count)]
        return b"".join(data[place : place + size] for place in places)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    run, _, number = sys.argv[2].partition("@")
    step = Step(sys.argv[1], run, int(number) if number else None)
    for path in sys.argv[3:]:
        sys.stdout.buffer.write(step.tensor(path))
    for slot, path in enumerate(step.layout["paths"] if not sys.argv[3:] else ()):
        view = step.views.get(slot)
        print(path, *(view[2:4] if view else [unpack(BytesIO(step.objects[slot]))]), sep="\t")

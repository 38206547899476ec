"""How a chunk is decoded; written from section 4.6 of docs/format.md alone, for read_store.py."""

from __future__ import annotations

import bisect
import itertools
import struct
from io import BytesIO
from typing import Any

import lz4.block
import numpy as np
import zstandard


def check(holds: object, what: str) -> None:
    if not holds:
        raise ValueError(f"the store is not as it should be: {what}")


def take(file: BytesIO, count: int) -> bytes:
    check(len(data := file.read(count)) == count, "something is cut off")
    return data


def integers(data: bytes | bytearray, w: int) -> list[int]:
    return [int.from_bytes(data[i - w : i], "little") for i in range(w, len(data) + 1, w)]


def leb128(table: BytesIO) -> int:
    byte = take(table, 1)[0]
    return byte if byte < 0x80 else byte & 0x7F | leb128(table) << 7


def stream(table: BytesIO, data: BytesIO, count: int) -> bytes:
    method = take(table, 1)[0]
    if method in (4, 5):
        bits = 4 if method == 4 else 2
        listed = take(data, (1 << bits) - 1)
        packed = stream(table, data, -(-count * bits // 8))
        codes = [packed[i * bits // 8] >> i * bits % 8 & len(listed) for i in range(count)]
        others = iter(stream(table, data, codes.count(len(listed))))
        return bytes(listed[code] if code < len(listed) else next(others) for code in codes)
    stored = take(data, (count, 1)[method] if method < 2 else leb128(table))
    if method == 2:
        return lz4.block.decompress(stored, uncompressed_size=count)
    if method == 3:
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=count)
    return stored * count if method == 1 else stored


def planes(table: BytesIO, data: BytesIO, count: int, width: int) -> list[int]:
    streams = [stream(table, data, count) for _ in range(width)]
    return integers(bytes(b for element in zip(*streams, strict=True) for b in element), width)


def rounded(table: BytesIO, raw: int, refs: list[bytes]) -> bytes:
    kind, pattern, keep = struct.unpack("<BHH", take(table, 5))
    words = np.frombuffer(b"".join(refs), "<u4", raw // 2, leb128(table))
    with np.errstate(over="ignore", invalid="ignore"):
        half = words.view("<f4").astype("<f2").view("<u2")
    nan, cut = (words & 0x7FFFFFFF) > 0x7F800000, words >> 16 & 0x8000 | words >> 13 & 0x3FF
    if kind == 1:
        half, cut = words + 0x7FFF + (words >> 16 & 1) >> 16, words >> 16
    return np.where(nan, pattern | cut & keep, half).astype("<u2").tobytes()


def replayed(role: int, data: BytesIO, refs: list[bytes]) -> bytes:
    f, anchors = np.float32, (1, 2, 2, 3)[role]
    state: list[Any] = [np.frombuffer(ref, "<f4", len(ref) // 4) for ref in refs]
    w, x, v, m = state[0], state[max(0, anchors - 2)], state[anchors - 1], state[anchors:]
    beta1, beta2, eps = struct.unpack("<3d", take(data, 24))
    with np.errstate(all="ignore"):
        for old, new in itertools.pairwise(m):
            decay, size, root = struct.unpack("<3d", take(data, 24))
            g = old + (new - old) / f(1 - beta1)
            v = settled(v * f(beta2) + g * g * f(1 - beta2))
            x = settled(np.where(x >= v, x, v))
            d = np.sqrt(x if role == 3 else v) / f(root) + f(eps)
            w = settled(w * f(decay) + new * f(-size) / d)
    return (v, w, x, w)[role].tobytes()


def settled(values: Any) -> Any:
    return np.where(np.isnan(values), np.uint32(0x7FC00000), values.view("<u4")).view("<f4")


def by_class(table: BytesIO, data: BytesIO, values: list[int], width: int) -> bytes:
    bounds = take(table, take(table, 1)[0])
    classes = [bisect.bisect(bounds, v >> {2: 7, 4: 23, 8: 52}[width] & 255) for v in values]
    for number in range(len(bounds) + 1):
        places = [place for place, found in enumerate(classes) if found == number]
        if places:
            for place, code in zip(places, planes(table, data, len(places), width), strict=True):
                values[place] = (values[place] + (code >> 1 ^ -(code & 1))) % (1 << 8 * width)
    return b"".join(v.to_bytes(width, "little") for v in values)


def decode(codec: int, params: bytes, payload: bytes, raw: int, refs: list[bytes]) -> bytes:
    check(codec < 7, f"codec {codec} is unknown")
    table, data = BytesIO(params), BytesIO(payload)
    if codec in (0, 4):
        return rounded(table, raw, refs) if codec else payload
    width, reference = take(table, 1)[0], refs[0] if refs else b""
    if codec == 5:
        width, reference = 4, replayed(width, data, refs)
    count, place = raw // width, -1
    values = (integers(reference, width) + [0] * count)[:count]
    if codec == 6:
        return by_class(table, data, values, width) + take(data, raw % width)
    changed, gap_width = (leb128(table), take(table, 1)[0]) if codec == 3 else (count, 0)
    gaps = planes(table, data, changed, gap_width) if codec == 3 else [0] * count
    for gap, code in zip(gaps, planes(table, data, changed, width), strict=True):
        place += gap + 1
        step = code if codec == 1 else code >> 1 ^ -(code & 1)
        values[place] = (values[place] + step) % (1 << 8 * width)
    return b"".join(v.to_bytes(width, "little") for v in values) + take(data, raw % width)

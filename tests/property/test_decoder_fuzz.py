"""Hostile bytes for every decoder: a typed error or a valid value, in bounded memory, no code run.

Each decoder gets arbitrary bytes, valid ones that were mutated, the same with their checksums made
right again (as somebody who writes into a store can), and documents that declare sizes and depths
that they do not have. What may be allocated is at most `PER_BYTE` times the input and `SLACK`.
"""

from __future__ import annotations

import ast
import pickle
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lz4.block
import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from coded import Blob
from coded import encode as encode_chunk
from deltackpt_store import (
    codecs,
    leases,
    lmdb_env,
    manifest_io,
    pack,
    process_note,
    protocol,
    runlock,
    values,
    values_decode,
)  # fmt: skip
from deltackpt_store.check_log import CheckLog
from deltackpt_store.errors import DeltackptError, InvalidInputError
from deltackpt_store.fileio import FileIO
from deltackpt_store.format_file import decode_format, encode_format, new_format
from deltackpt_store.generation import Generation, read_generation
from deltackpt_store.layout_check import check_structure
from deltackpt_store.location import check_location
from deltackpt_store.names import number_name
from deltackpt_store.pack_scan import scan_records
from deltackpt_store.pack_writer import PackWriter
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saver import LAYOUT, Saver

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None,
    derandomize=True,
)  # fmt: skip
PER_BYTE = 400
"""The worst that is known is a map of small integers: an object of 30 bytes and a place in a table
for each byte."""
SLACK = 4 << 20
UUID = bytes(range(16))
WRITER = "00112233445566aa"
PACK = f"{WRITER}-00000001"


class OneFile(FileIO):
    """A store in which every file has the same bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self, path: str) -> int:
        return 1

    def close(self, handle: int) -> None:
        pass

    def size(self, handle: int) -> int:
        return len(self._data)

    def read_into(self, handle: int, buffers: Sequence[Any], offset: int) -> int:
        total = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            piece = self._data[offset + total : offset + total + len(view)]
            view[: len(piece)] = piece
            total += len(piece)
        return total

    def list(self, path: str) -> list[str]:
        return []

    def exists(self, path: str) -> bool:
        return True


class Decoder(NamedTuple):
    """`decode` is given bytes; `seeds` are valid ones; `seal` makes checksums right again."""

    decode: Callable[[bytes], object]
    seeds: list[bytes]
    seal: Callable[[bytes], bytes] = bytes
    magic: bytes = b""


def trailing(data: bytes) -> bytes:
    """The BLAKE3 of all before at the end."""
    return data[:-32] + blake3(data[:-32]).digest()


class Sink(FileIO):
    """Keeps what is written instead of writing it."""

    def __init__(self) -> None:
        self.data = bytearray()

    def mkdir(self, path: str) -> None:
        pass

    def exists(self, path: str) -> bool:
        return True

    def create(self, path: str, mode: int = 0o666) -> int:
        self.data = bytearray()
        return 1

    def write(self, handle: int, buffers: Sequence[Any], offset: int) -> int:
        joined = b"".join(bytes(b) for b in buffers)
        self.data[offset : offset + len(joined)] = joined
        return len(joined)

    def sync(self, handle: int) -> None:
        pass

    def close(self, handle: int) -> None:
        pass

    def link(self, source: str, target: str) -> None:
        pass

    def unlink(self, path: str) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


NOISE = np.random.default_rng(3).integers(0, 256, 4096, np.uint8).tobytes()
SMOOTH = np.arange(1024, dtype=np.float32).tobytes()
NEAR = (np.frombuffer(SMOOTH, np.uint32) + (np.arange(1024) % 9 == 0)).astype(np.uint32).tobytes()
BLOBS = [
    Blob(codecs.RAW, NOISE), Blob(codecs.PLANES, SMOOTH, 4), Blob(codecs.PLANES, SMOOTH, 4, "lz4"),
    Blob(codecs.DELTA, NEAR, 4, "zstd", SMOOTH), Blob(codecs.SPARSE, NEAR, 4, "zstd", SMOOTH),
    Blob(codecs.SORTED, NEAR, 4, "zstd", SMOOTH),
]  # fmt: skip


def a_pack() -> bytes:
    sink = Sink()
    writer = PackWriter(sink, "/x", UUID, WRITER, 1)
    for blob in BLOBS:
        writer.append(blake3(blob.raw).digest(), len(blob.raw), encode_chunk(blob))
    writer.finish()
    return bytes(sink.data)


def seal_pack(data: bytes) -> bytes:
    """Header checksum and footer digest made right, lengths taken from what the trailer says."""
    if len(data) < pack.HEADER_BYTES:
        return data
    if len(data) < pack.HEADER_BYTES + pack.TRAILER_BYTES:
        return data[:60] + struct.pack("<I", zlib.crc32(data[:60])) + data[64:]
    header = data[:60] + struct.pack("<I", zlib.crc32(data[:60]))
    magic, offset, records, refs, _ = pack.TRAILER.unpack(data[-64:-32])
    front = pack.TRAILER.pack(magic, offset, records, refs, len(data))
    digest = blake3(header)
    digest.update(data[min(offset, len(data)) : -64])
    digest.update(front)
    return header + data[64:-64] + front + digest.digest()


def seal_record(data: bytes) -> bytes:
    if len(data) < pack.RECORD_BYTES:
        return data
    end = pack.RECORD_BYTES + data[10] * pack.ID_BYTES + data[11]
    return data[:4] + struct.pack("<I", zlib.crc32(data[8:end])) + data[8:]


def seal_format(data: bytes) -> bytes:
    line = data.partition(b"\n")[0] + b"\n"
    return line + blake3(line).hexdigest().encode() + b"\n"


def record(data: bytes) -> object:
    head = pack.decode_record(data)
    pack.check_payload(head, data[head.skip :][: head.stored])
    return head


def value(data: bytes) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return values_decode.decode(data)


def send(to: socket.socket, data: bytes) -> None:
    to.sendall(struct.pack("<I", len(data)) + data)
    to.shutdown(socket.SHUT_WR)


def frame(receive: Callable[[protocol.Channel], object]) -> Callable[[bytes], object]:
    def decode(data: bytes) -> object:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            sender = threading.Thread(target=send, args=(theirs, data))
            sender.start()
            try:
                return receive(protocol.Channel(ours))
            finally:
                sender.join()

    return decode


def footer(data: bytes) -> object:
    return pack.read_footer(OneFile(data), f"/s/packs/00/{PACK}.pack", store_uuid=UUID)


def manifest(data: bytes) -> object:
    decoded = manifest_io.decode(data)
    if decoded.base is None:
        return manifest_io.resolve(decoded)
    return decoded


def run_lock(data: bytes) -> object:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        note = runlock._note(file.fileno())
        return process_note.read_note(note), process_note.is_own(note)


def index_seal(data: bytes) -> object:
    with tempfile.TemporaryDirectory() as where:
        Path(where, lmdb_env._SEAL).write_bytes(data)
        environment = lmdb_env.Environment.__new__(lmdb_env.Environment)
        environment.directory, environment.identity = where, "x"
        return environment._sealed()


def store_over(data: bytes) -> Store:
    return Store("/s", OneFile(data), new_format())


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    path = tmp_path_factory.mktemp("fuzz") / "store"
    saver = Saver(str(path), FileIO())
    first, second = saver.save(0), saver.save(1)
    saver.store.pin("good", first)
    saver.writer.close()
    read = Path.read_bytes
    claims = leases.Claims(frozenset([PACK]), frozenset([b"m" * 32]))
    ack = b"DCKPTAK\x01" + msgspec.msgpack.encode(claims) + bytes(32)
    generation = Generation(number=7, packs=frozenset([PACK]), boundary={"main": 3})
    condemned = b"DCKPTGN\x01" + msgspec.msgpack.encode(generation) + bytes(32)
    log = CheckLog(FileIO(), str(path), saver.store.uuid)
    log.checked({PACK: 5}, 1.0, ())
    log.keep()
    whole = a_pack()
    begin = protocol.encode(protocol.Begin(1, 2, layout=msgspec.msgpack.encode(LAYOUT)))
    ready = [
        protocol.encode(protocol.Notice(30, "y")), protocol.encode(protocol.Released([1, 2])),
        protocol.encode(protocol.Failed(3, {"type": "x", "context": {"a": [1, {"b": 2}]}})),
    ]  # fmt: skip
    documents = [values.encode(v) for v in (
        {"a": [1, 2.5, None, (True, b"x")], 3: {"b"}}, np.arange(4.0), np.float32(2),
        Path("/x"), 1 << 90, complex(1, 2), frozenset([1]),
    )]  # fmt: skip
    return {
        "manifest": Decoder(
            manifest,
            [read(path / "manifests" / c.manifest.hex()) for c in (first, second)],
            magic=b"DCKPTMF\x01",
        ),
        "commit": Decoder(
            manifest_io.decode_commit,
            [read(path / "runs/main" / number_name(c.number)) for c in (first, second)],
            trailing, b"DCKPTCM\x01",
        ),
        "pin": Decoder(lambda d: store_over(d).read_pin("x"), [read(path / "pins/good")],
                       trailing, b"DCKPTPN\x01"),
        "generation": Decoder(lambda d: read_generation(OneFile(d), "/s", 7), [condemned],
                              trailing, b"DCKPTGN\x01"),
        "ack": Decoder(lambda d: leases.read_ack(OneFile(d), "/s", 7, WRITER), [ack],
                       trailing, b"DCKPTAK\x01"),
        "lease": Decoder(lambda d: leases.holder(OneFile(d), "/s", WRITER),
                         [b'{"pid": 1, "host": "x"}']),
        "run lock": Decoder(run_lock, [b'{"pid": 1, "host": "x"}',
                                       b'{"pid": 2, "host": "x", "trainer": 1}']),
        "seal of the index": Decoder(index_seal, [b"{}"]),
        "check log": Decoder(lambda d: CheckLog(OneFile(d), "/s", UUID),
                             [read(path / "cache/verified")], trailing, b"DCKPTCK\x01"),
        "format": Decoder(lambda d: decode_format(d, "F"), [encode_format(new_format())],
                          seal_format),
        "pack header": Decoder(lambda d: pack.decode_header(d, "P"), [whole[:64]], seal_pack),
        "pack": Decoder(footer, [whole], seal_pack),
        "record": Decoder(record, [whole[64:64 + 4096 + 64], whole[64 + 4096 + 64:][:2000]],
                          seal_record),
        "salvage": Decoder(lambda d: list(scan_records(OneFile(d), f"/s/packs/00/{PACK}.pack")),
                           [whole]),
        "value": Decoder(value, documents),
        "structure": Decoder(lambda d: check_structure(d, "S"), [LAYOUT.structure]),
        "message to the writer": Decoder(frame(lambda c: c.receive_as_writer()), [begin[4:]]),
        "message to the trainer": Decoder(
            frame(lambda c: c.receive_as_trainer()), [r[4:] for r in ready]
        ),
    }  # fmt: skip


NAMES = [
    "manifest", "commit", "pin", "generation", "ack", "lease", "run lock", "seal of the index",
    "check log", "format",
    "pack header", "pack", "record", "salvage", "value", "structure", "message to the writer",
    "message to the trainer",
]  # fmt: skip


def attempt(decode: Callable[[bytes], object], data: bytes, room: int = 0) -> bool:
    """Decode; whether it was valid. Anything but a typed error, or too much memory, fails."""
    tracemalloc.start()
    try:
        decode(data)
        valid = True
    except DeltackptError:
        valid = False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= PER_BYTE * len(data) + SLACK + room, f"{peak} bytes for {len(data)}"
    return valid


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "huge", "copy", "drop"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif kind == "huge":
            big = draw(st.sampled_from([b"\xff" * 4, b"\xff" * 8, b"\xdd\xff\xff\xff\xff",
                                        b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
                                        b"\x7f" + b"\xff" * 7, bytes(8)]))  # fmt: skip
            data[at : at + len(big)] = big
        elif kind == "copy":
            data[at:at] = data[: draw(st.integers(0, 64))]
        else:
            del data[at : at + draw(st.integers(1, 8))]
    return bytes(data)


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=6)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=5)
    | st.dictionaries(st.text(max_size=8) | st.integers(-9, 99), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


# case 112
@pytest.mark.parametrize("name", NAMES)
def test_arbitrary_and_mutated_bytes(decoders: dict[str, Decoder], name: str) -> None:
    """A store that somebody else wrote must not crash a training, nor fill its memory."""
    decoder = decoders[name]
    sound = [decoder.seal(seed) for seed in decoder.seeds]
    assert all(attempt(decoder.decode, seed) for seed in sound), "the seeds are valid"

    @SETTINGS
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(["bytes", "document", "mutated", "sealed"]))
        if kind == "bytes":
            attempt(decoder.decode, data.draw(st.binary(max_size=300)))
        elif kind == "document":
            body = msgspec.msgpack.encode(data.draw(DOCUMENTS))
            attempt(decoder.decode, decoder.seal(decoder.magic + body + bytes(32)))
            attempt(decoder.decode, decoder.magic + body)
        else:
            changed = data.draw(mutated(sound))
            attempt(decoder.decode, decoder.seal(changed) if kind == "sealed" else changed)

    fuzz()


HOSTILE = {
    "array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "4 GiB of bytes": b"\xc6\xff\xff\xff\xff",
    "4 GiB of text": b"\xdb\xff\xff\xff\xff",
    "lists 100,000 deep": b"\x91" * 100_000,
    "maps 100,000 deep": b"\x81\x01" * 100_000,
    "tagged lists 100,000 deep": b"\x92\xa1l" * 100_000,
    "JSON lists 60,000 deep": b"[" * 60_000,
    "JSON of a FORMAT, deep": b'{"deltackpt":1,"store":"' + b"0" * 32 + b'","x":' + b"[" * 60_000,
    "JSON of a lease, deep": b'{"pid":' + b"[" * 900,
    "JSON of a lease, infinite": b'{"pid": 1e999, "host": "x"}',
    "many empty arrays": b"\xdd\x00\x01\x86\xa0" + b"\x90" * 100_000,
    "many equal keys": b"\xdf\x00\x01\x86\xa0" + b"\x00\x00" * 100_000,
}


@pytest.mark.parametrize("name", NAMES)
def test_declared_sizes_and_depth(decoders: dict[str, Decoder], name: str) -> None:
    for body in HOSTILE.values():
        check_hostile(decoders[name], body)


def check_hostile(decoder: Decoder, body: bytes) -> None:
    attempt(decoder.decode, body)
    attempt(decoder.decode, decoder.seal(decoder.magic + body + bytes(32)))
    for field in (b"\x81\xa4root", b"\x81\xa5packs", b"\x81\xa6layout", b"\x81\xa7context",
                  b"\x81\xa4type\xa6failed", b"\x81\xa5error", b"\x92\xa1l", b"\x91"):  # fmt: skip
        attempt(decoder.decode, decoder.seal(decoder.magic + field + body + bytes(32)))


# codecs ------------------------------------------------------------------------------------------


class Payload(NamedTuple):
    codec: int
    params: bytes
    payload: bytes
    references: list[bytes]


def payloads() -> list[Payload]:
    found: list[Payload] = []
    for blob in BLOBS:
        made = encode_chunk(blob)
        joined = b"".join(bytes(b) for b in made.payload)
        found.append(Payload(made.codec, made.params, joined, [SMOOTH] if made.refs else []))
    return found


def decode_into(one: Payload, size: int) -> None:
    out = memoryview(bytearray(size))
    codecs.decode(
        one.codec, one.params, memoryview(one.payload), out, [memoryview(r) for r in one.references]
    )


@pytest.mark.parametrize("codec", [c.id for c in codecs.registered()])
def test_every_codec_with_arbitrary_payloads(codec: int) -> None:
    seeds = [p for p in payloads() if p.codec == codec]
    for seed in seeds:
        decode_into(seed, 4096)
    params = [b"", *(p.params for p in payloads())]
    bodies = [b"", *(p.payload for p in payloads())]

    @SETTINGS
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(["arbitrary", "mutated", "payload"]))
        param = data.draw(st.binary(max_size=40) if kind == "arbitrary" else mutated(params))
        body = data.draw(mutated(bodies))
        if kind == "payload" and seeds:
            seed = data.draw(st.sampled_from(seeds))
            param, body = seed.params, data.draw(mutated([seed.payload]))
        size = data.draw(st.sampled_from([1, 7, 4096, 65536]))
        references = data.draw(st.lists(st.sampled_from([SMOOTH, NOISE, b"r", b""]), max_size=3))
        one = Payload(codec, param[:255], body, references)
        attempt(lambda _: decode_into(one, size), body + param, room=64 * size)

    fuzz()


BOMBS = {
    "zstd": zstandard.compress(bytes(1 << 28), 1),
    "lz4": lz4.block.compress(bytes(1 << 27), store_size=False),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_are_not_inflated(kind: str, tmp_path: Path) -> None:
    """What a payload inflates to is bounded by the chunk's length, whatever it declares."""
    code = """
import resource, sys
from deltackpt_store import codecs
from deltackpt_store.errors import DeltackptError
method, path = int(sys.argv[1]), sys.argv[2]
data = open(path, "rb").read()
codecs.decode(codecs.RAW, b"", memoryview(b"x"), memoryview(bytearray(1)))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2)
size = len(data)
leb = bytearray()
while size >= 128:
    leb.append(size & 127 | 128); size >>= 7
leb.append(size)
for codec in (codecs.PLANES, codecs.DELTA, codecs.SPARSE):
    try:
        codecs.decode(codec, bytes([1, method]) + bytes(leb), memoryview(data),
                      memoryview(bytearray(4096)), [memoryview(bytes(4096))])
        sys.exit("it was believed")
    except DeltackptError:
        pass
"""
    path = tmp_path / "bomb"
    path.write_bytes(BOMBS[kind])
    method = {"lz4": "2", "zstd": "3"}[kind]
    done = subprocess.run(
        [sys.executable, "-c", code, method, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# names, permissions, code ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc", "..", ".", ".x", "-x", "", "a\0b", "a\nb",
                                  "x" * 101, "ü", "a b", "~", "con\\x"])  # fmt: skip
def test_no_name_leads_out_of_the_store(tmp_path: Path, name: str) -> None:
    store = Store.create(tmp_path / "store")
    saver = Saver(store.path, FileIO())
    commit = saver.save(0)
    before = sorted(tmp_path.rglob("*"))
    for call in (
        lambda: store.pin(name, commit), lambda: store.unpin(name), lambda: store.read_pin(name),
        lambda: store.numbers(name), lambda: store.head(name), lambda: store.commits(name),
        lambda: saver.writer.commit(run=name, step=1, parent=None, manifest=commit.manifest,
                                    base=None, root=commit.root, packs=[]),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError):
            call()
    saver.writer.close()
    assert [p for p in sorted(tmp_path.rglob("*")) if "leases" not in str(p)] == [
        p for p in before if "leases" not in str(p)
    ]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_files_follow_the_umask(tmp_path: Path, umask: int) -> None:
    code = """
import os, sys
os.umask(int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
from saver import Saver
from deltackpt_store.fileio import FileIO
saver = Saver(sys.argv[1], FileIO())
saver.store.pin("good", saver.save(0))
saver.writer.close()
"""
    support = Path(__file__).parents[1] / "support"
    path = tmp_path / "store"
    subprocess.run([sys.executable, "-c", code, path, str(umask), str(support)], check=True)
    for entry in [path, *path.rglob("*")]:
        wanted = (0o777 if entry.is_dir() else 0o666) & ~umask
        assert entry.stat().st_mode & 0o777 == wanted, entry


def test_mode_is_given_to_directories(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", mode=0o2770)
    for entry in [Path(store.path), *(p for p in Path(store.path).iterdir() if p.is_dir())]:
        assert entry.stat().st_mode & 0o7777 == 0o2770, entry


ROOT = Path(__file__).parents[2]
FORBIDDEN = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
RUNS_CODE = {"eval", "exec", "torch.load", "np.load", "numpy.load"}
WRITES_OPCODES = {"pickle_out.py"}
"""Writes pickles for `torch.load` with the opcodes' names, and reads none."""


def test_nothing_imports_pickle_or_runs_code() -> None:
    for folder in ("store/deltackpt_store", "deltackpt", "tools/deltackpt_tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                elif isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    assert called not in RUNS_CODE, (path, called)
                bad = FORBIDDEN.intersection(name.split(".")[0] for name in names)
                assert not bad or path.name in WRITES_OPCODES, (path, bad)


class _Bomb:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (_went_off, ())


_went: list[int] = []


def _went_off() -> None:
    _went.append(1)


# case 162
def test_planted_pickles_do_not_run(decoders: dict[str, Decoder], tmp_path: Path) -> None:
    """Whatever a file of a store holds, reading it runs nothing."""
    bomb = pickle.dumps(_Bomb())
    pickle.loads(bomb)
    assert _went == [1], "the bomb works"
    for decoder in decoders.values():
        for body in (bomb, msgspec.msgpack.encode(bomb), msgspec.msgpack.encode(["pickle", bomb]),
                     msgspec.msgpack.encode(["np", "|O", [1], bomb]),
                     msgspec.msgpack.encode(["a", "|O8", [1], bomb])):  # fmt: skip
            attempt(decoder.decode, body)
            attempt(decoder.decode, decoder.seal(decoder.magic + body + bytes(32)))
    store = Store.create(tmp_path / "store")
    with StoreWriter(store, codec="none") as writer:
        writer.put(bomb)
        writer.flush()
    for name in ("cache/location", "cache/verified", "gc/lock", "pins/x", "runs/x"):
        Path(store.path, name).parent.mkdir(parents=True, exist_ok=True)
        Path(store.path, name).write_bytes(bomb)
    fresh = Store.open(store.path)
    fresh.pins()
    fresh.runs()
    check_location(FileIO(), store.path)
    CheckLog(FileIO(), store.path, store.uuid)
    assert _went == [1]

"""The store writer: nothing lost, nothing twice, nothing acknowledged too early."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from deltackpt_store import pack as pk
from deltackpt_store import store_writer
from deltackpt_store.codecs import CAST, PLANES, RAW, Encoded
from deltackpt_store.coding.cast import RULES, cast_params
from deltackpt_store.errors import ConflictError, CorruptionError, InvalidInputError, StateError
from deltackpt_store.fileio import Buffer
from deltackpt_store.manifest import Commit
from deltackpt_store.manifest_io import decode_commit, digest_of
from deltackpt_store.recipes import Same
from deltackpt_store.store import Store
from deltackpt_store.store_writer import Chunk, StoreWriter
from store_writing import (
    Recording,
    base_manifest,
    blob,
    files,
    read,
    recorded_store,
    recorder,
    reopen,
    save,
    temporaries,
)

store = pytest.fixture(recorded_store)


# chunks -------------------------------------------------------------------------------------


def test_what_a_chunk_follows_from_may_lie_in_another_unfinished_pack(store: Store) -> None:
    words = np.random.default_rng(3).standard_normal(20_000, np.float32).view(np.uint32)
    full, half = (words & 0xFFFF0000).tobytes(), (words >> 16).astype(np.uint16).tobytes()
    with StoreWriter(store, pack_bytes=1) as writer:
        source = writer.put(full, dtype="uint8")
        encoded = Encoded(CAST, cast_params(1, RULES[1][0], 0), (source.id,), [])
        recipe = Same(blake3(half).digest(), encoded)
        put = writer.put_many([Chunk(half, "bfloat16", recipes=(recipe,))])[0]
        assert put.codec == CAST
        assert put.pack != source.pack
        assert put.packs == tuple(sorted((source.pack, put.pack)))
        writer.flush()
    assert read(store, put, len(half)) == half


SIZES = [513, 1000, 4096, 65535, 65536, 65537, 262144, 300_001, 1, 2, 3]


def test_every_size_and_kind_comes_back(store: Store) -> None:
    blobs = [blob(n) for n in SIZES] + [bytes(n) for n in SIZES] + [b"abcd" * 50_000]
    with StoreWriter(store) as writer:
        puts = [writer.put(raw, dtype="float32") for raw in blobs]
        writer.flush()
    for raw, put in zip(blobs, puts, strict=True):
        assert put.id == blake3(raw).digest()
        assert read(store, put, len(raw)) == raw
        assert put.written <= len(raw) + pk.RECORD_BYTES
    assert puts[-1].codec == PLANES
    assert temporaries(store) == []


@pytest.mark.parametrize("size", [0, pk.MAX_CHUNK_BYTES + 1])
def test_impossible_sizes_are_refused_and_hurt_nothing(store: Store, size: int) -> None:
    """A chunk size that no codec or record takes must fail by name, not corrupt a pack."""
    # case 26
    with StoreWriter(store) as writer:
        good = writer.put(b"good")
        with pytest.raises(InvalidInputError, match="1 to 67108864 bytes"):
            writer.put(bytes(size))
        writer.flush()
    assert read(store, good, 4) == b"good"


@pytest.mark.parametrize("option", [{"codec": "best"}, {"pack_bytes": 0}])
def test_bad_options_are_refused_when_configured(store: Store, option: dict[str, object]) -> None:
    """Not at the first save, hours into a run."""  # case 26
    with pytest.raises(InvalidInputError):
        StoreWriter(store, **option)  # pyright: ignore[reportArgumentType]


def test_other_buffers_and_layouts(store: Store) -> None:
    import array

    numbers = array.array("d", [1.5, -0.0, float("nan")] * 100)
    with StoreWriter(store) as writer:
        put = writer.put(memoryview(numbers), dtype="float64")
        assert writer.put(bytearray(numbers.tobytes())).id == put.id
        with pytest.raises((TypeError, BufferError, ValueError)):
            writer.put(memoryview(blob(100))[::2])
        writer.flush()
    assert read(store, put, 2400) == numbers.tobytes()


def test_large_raw_chunks_are_not_copied(store: Store) -> None:
    """The caller's memory goes to the kernel as it is: a copy would halve the speed."""
    seen: list[int] = []
    raw = bytearray(blob(1 << 20))

    class Looking(Recording):
        def write(self, handle: int, buffers: Sequence[Buffer], offset: int) -> int:
            seen.extend(id(b.obj) for b in buffers if isinstance(b, memoryview))
            return super().write(handle, buffers, offset)

    looking = Store.open(store.path, io=Looking())
    with StoreWriter(looking) as writer:
        writer.put(raw)
        writer.flush()
    assert id(raw) in seen


def test_raw_is_the_codec_when_told(store: Store) -> None:
    with StoreWriter(store, codec="none") as writer:
        assert writer.put(bytes(100_000)).codec == RAW
    assert store_writer.PACK_BYTES == 64 * 1024 * 1024


# order of durability ------------------------------------------------------------------------


def kinds(store: Store, calls: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Calls with paths reduced to what they are: pack, manifest, commit, or a directory."""
    for what, path in calls:
        rest = os.path.relpath(path, store.path).split(os.sep)
        if rest[0] == "packs":
            yield what, {1: "packs", 2: "packs/xx", 3: "pack"}[len(rest)]
        elif rest[0] == "manifests":
            yield what, {1: "manifests", 2: "manifest"}[len(rest)]
        elif rest[0] == "runs":
            yield what, {1: "runs", 2: "runs/run", 3: "commit"}[len(rest)]
        else:
            yield what, rest[0]


def test_order_of_one_save(store: Store) -> None:
    """Any other order loses an acknowledged step at a power failure."""
    with StoreWriter(store) as writer:
        save(writer, 1, [blob(1000)])
        recorder(store).calls.clear()
        save(writer, 2, [blob(1000), blob(200_000)])
    calls = [c for c in kinds(store, recorder(store).calls) if c[0] not in ("write", "mkdir")]
    published = ["create", "sync", "close", "link", "unlink"]
    assert calls == [
        *((what, "pack") for what in published), ("sync_directory", "packs/xx"),
        *((what, "manifest") for what in published), ("sync_directory", "manifests"),
        *((what, "commit") for what in published), ("sync_directory", "runs/run"),
    ]  # fmt: skip


def test_new_directories_are_made_durable_in_their_parents(store: Store) -> None:
    """A pack in a directory that is gone after power loss is gone."""
    with StoreWriter(store) as writer:
        save(writer, 1, [blob(1000)])
    calls = list(kinds(store, recorder(store).calls))
    for directory, parent in (("packs/xx", "packs"), ("runs/run", "runs")):
        made = calls.index(("mkdir", directory))
        assert ("sync_directory", parent) in calls[made : made + 2]


def test_many_packs_share_one_directory_sync(store: Store) -> None:
    with StoreWriter(store, pack_bytes=100_000) as writer:
        recorder(store).calls.clear()
        for _ in range(10):
            writer.put(blob(60_000))
        names = writer.flush()
    assert len(names) == 5
    calls = list(kinds(store, recorder(store).calls))
    counts = Counter(c for c in calls if c != ("sync_directory", "packs"))
    assert counts["sync", "pack"] == 5
    assert counts["sync_directory", "packs/xx"] == 1
    # No name before all bytes are durable, and the names last.
    first_link = calls.index(("link", "pack"))
    assert Counter(calls[:first_link])["sync", "pack"] == 5
    assert calls[-1] == ("sync_directory", "packs/xx")


def test_names_of_packs_relied_upon_are_made_durable(store: Store) -> None:
    """Another writer may have died between naming its pack and syncing the directory."""
    raw = blob(1000)
    with StoreWriter(store) as writer:
        put = writer.put(raw)
        writer.flush()
    with StoreWriter(store, index=reopen(store).index()) as writer:
        recorder(store).calls.clear()
        for _ in range(3):
            assert writer.put(raw).written == 0
            writer.flush()
    directory = os.path.dirname(pk.pack_path(store.path, put.pack))
    folders = [store.path, f"{store.path}/packs", f"{store.path}/runs", directory]
    assert recorder(store).calls == [("sync_directory", folder) for folder in folders]


def test_a_manifest_or_commit_of_unflushed_packs_is_refused(store: Store) -> None:
    """A commit may refer only to what is durable."""
    with StoreWriter(store) as writer:
        put = writer.put(b"abc")
        manifest = base_manifest([put], [3])
        with pytest.raises(StateError, match="not durable"):
            writer.write_manifest(manifest)
        with pytest.raises(StateError, match="not durable"):
            writer.commit(run="main", step=1, parent=None, manifest=bytes(32), base=None,
                          root=bytes(32), packs=[put.pack])  # fmt: skip
        writer.flush()
        writer.write_manifest(manifest)


def test_large_blobs_leave_memory_while_the_pack_grows(store: Store) -> None:
    """Memory must not grow with the save."""
    with StoreWriter(store, pack_bytes=1 << 30) as writer:
        for _ in range(24):
            writer.put(blob(1 << 20))
        writer._output._thread.drain()  # pyright: ignore[reportPrivateUsage]
        assert sum(c[0] == "write" for c in recorder(store).calls) >= 2
        writer.abort()
    assert temporaries(store) == []


# manifests and commits ----------------------------------------------------------------------


def test_a_save_can_be_read_back(store: Store) -> None:
    blobs = [blob(1000), blob(70_000)]
    with StoreWriter(store) as writer:
        first = save(writer, 10, blobs)
        second = save(writer, 20, blobs[::-1], first)
    fresh = reopen(store)
    assert [(c.number, c.step) for c in fresh.commits("main")] == [(1, 10), (2, 20)]
    assert fresh.commits("main") == [first, second]
    assert second.parent == ("main", 1, first.digest)
    data = (Path(store.path) / "runs" / "main" / f"{1:020d}").read_bytes()
    assert first.digest == data[-32:] == blake3(data[:-32]).digest()
    assert first.writer == second.writer != ""


def test_an_equal_manifest_is_written_once_and_made_durable(store: Store) -> None:
    """Whoever wrote it may have died before its name was durable."""
    with StoreWriter(store) as writer:
        save(writer, 1, [b"abc"])
        put = writer.put(b"abc")
        recorder(store).calls.clear()
        digest = writer.write_manifest(base_manifest([put], [3]))
        calls = [c for c in recorder(store).calls if c[0] == "sync_directory"]
        assert calls == [("sync_directory", os.path.join(store.path, "manifests"))]
        assert temporaries(store) == []
        path = Path(store.path) / "manifests" / digest.hex()
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CorruptionError, match="exists and is damaged"):
            writer.write_manifest(base_manifest([put], [3]))


def commit(writer: StoreWriter, step: int, number: int | None = None) -> Commit:
    return writer.commit(run="main", step=step, parent=None, manifest=bytes(32), base=None,
                         root=bytes(32), packs=[], number=number)  # fmt: skip


def test_two_writers_never_win_one_number(store: Store) -> None:
    """Two histories under one number would make 'latest' a matter of luck."""
    with StoreWriter(store) as one, StoreWriter(reopen(store)) as two:
        won = commit(one, 1, number=1)
        with pytest.raises(ConflictError) as caught:
            commit(two, 1, number=1)
        assert caught.value.context["number"] == 1
        assert commit(two, 2).number == 2
        assert commit(one, 3).number == 3
    assert temporaries(store) == []
    assert reopen(store).commits("main")[0] == won


def test_numbers_of_retired_commits_are_not_used_again(store: Store) -> None:
    """A number that returns after deletion lets a stalled writer commit into the past."""
    with StoreWriter(store) as writer:
        commit(writer, 1)
        commit(writer, 2)
        run = Path(store.path) / "runs" / "main"
        (run / f"{2:020d}.retired").touch()
        (run / f"{2:020d}").unlink()
        with pytest.raises(ConflictError):
            commit(writer, 3, number=2)
        assert commit(writer, 3).number == 3


def test_a_creation_whose_answer_was_lost_counts(store: Store) -> None:
    """Over NFS a repeated link says 'exists' for the writer's own success."""

    class Lossy(Recording):
        def link(self, source: str, target: str) -> None:
            super().link(source, target)
            raise FileExistsError(errno.EEXIST, "File exists", target)

    lossy = Store.open(store.path, io=Lossy())
    with StoreWriter(lossy) as writer:
        made = commit(writer, 1, number=1)
    assert reopen(store).commits("main") == [made]


@pytest.mark.parametrize("run", ["", "../x", ".hidden", "a/b", "-x", "x" * 101])
def test_run_names_cannot_lead_elsewhere(store: Store, run: str) -> None:
    with StoreWriter(store) as writer, pytest.raises(InvalidInputError):
        writer.commit(run=run, step=1, parent=None, manifest=bytes(32), base=None,
                      root=bytes(32), packs=[])  # fmt: skip


def test_commits_record_what_they_are_told(store: Store) -> None:
    with StoreWriter(store) as writer:
        made = writer.commit(
            run="main", step=5, parent=None, manifest=b"m" * 32, base=b"b" * 32, root=b"r" * 32,
            packs=["b", "a", "a"], versions={"x": "1"}, metrics={"loss": 0.5},
            stats={"written": 3.0},
        )  # fmt: skip
    data = (Path(store.path) / "runs" / "main" / f"{1:020d}").read_bytes()
    got = decode_commit(data)
    assert got == made
    assert got.closure == blake3(b"a\nb").digest() == digest_of(b"a\nb")
    assert (got.step, got.manifest, got.base, got.root, got.generation) == (
        5, b"m" * 32, b"b" * 32, b"r" * 32, 0
    )  # fmt: skip
    assert (got.versions, got.metrics, got.stats) == ({"x": "1"}, {"loss": 0.5}, {"written": 3.0})
    assert len(got.nonce) == 16
    assert msgspec.structs.replace(got, digest=b"") != got


# processes ----------------------------------------------------------------------------------


def test_a_closed_or_forked_writer_says_so(store: Store) -> None:
    """A forked child that writes into its parent's pack would tear it."""  # case 64
    code = """
        import os, sys
        from deltackpt_store.errors import StateError
        from deltackpt_store.store import Store
        from deltackpt_store.store_writer import StoreWriter
        store = Store.open(sys.argv[1])
        writer = StoreWriter(store, pack_bytes=1000)
        writer.put(os.urandom(5000))
        pid = os.fork()
        if pid == 0:
            for use in (lambda: writer.put(b"x"), writer.flush, writer.abort):
                try:
                    use()
                except StateError as error:
                    assert error.kind == "forked"
                else:
                    os._exit(3)
            writer.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        writer.put(b"parent goes on")
        assert len(writer.flush()) == 2
        writer.close()
        try:
            writer.put(b"x")
        except StateError as error:
            assert error.kind == "closed"
        else:
            raise SystemExit("closed writer took a chunk")
    """
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), store.path],
        check=True, timeout=60,
    )  # fmt: skip
    assert temporaries(store) == []


def test_a_process_that_ends_without_close_does_not_hang(store: Store) -> None:
    """A forgotten writer must not keep an interpreter from exiting; atexit may still save."""
    code = """
        import atexit, os, sys
        from deltackpt_store.store import Store
        from deltackpt_store.store_writer import StoreWriter
        writer = StoreWriter(Store.open(sys.argv[1]), pack_bytes=1000)
        late = StoreWriter(Store.open(sys.argv[1]), pack_bytes=1000)
        writer.put(os.urandom(5000))
        def save():
            late.put(b"late" * 1000)
            late.flush()
        atexit.register(save)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), store.path], check=True, timeout=60
    )
    out = bytearray(4000)
    reopen(store).get_into(blake3(b"late" * 1000).digest(), out)
    assert out == b"late" * 1000


def test_twenty_thousand_small_chunks_make_few_files_and_calls(store: Store) -> None:
    """One file or system call per small tensor would make every save slow."""
    raw = blob(1 << 20)
    with StoreWriter(store) as writer:
        recorder(store).calls.clear()
        for n in range(20_000):
            writer.put(memoryview(raw)[n * 40 : n * 40 + 1024 + n % 3072])
        writer.flush()
    assert len(files(store, "packs")) == 1
    assert len(recorder(store).calls) < 100

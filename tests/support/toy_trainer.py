"""A trainer without torch for tests of the writer, also run as a script that tests kill.

Its state at a step is a function of the step alone, so whatever survives can be checked bit for
bit: chunk `c` of array `i` has version ``step // (i + c + 1)`` and holds BLAKE3's endless output
for (i, c, version).
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from typing import Any

import msgspec
import xxhash
from blake3 import blake3
from deltackpt_store import child
from deltackpt_store.client import WriterClient
from deltackpt_store.manifest import Commit, ExtentSpec, Layout, TensorView
from deltackpt_store.protocol import Committed, WriterOptions
from deltackpt_store.store import Store

CHUNK = 16 * 1024
SIZES = (5 * CHUNK + 100, 3 * CHUNK, 40 * CHUNK + 7, 700)
INLINE = 24
RECORD = struct.Struct("<IIII16s")
SEED = 0xDECAF


def content(array: int, chunk: int, version: int, length: int) -> bytes:
    return blake3(b"%d %d %d" % (array, chunk, version)).digest(length=length)


def state_at(step: int) -> list[bytes]:
    """The bytes of every array, then the inline extent."""
    arrays: list[bytes] = []
    for i, size in enumerate(SIZES):
        pieces = [
            content(i, c, step // (i + c + 1), min(CHUNK, size - c * CHUNK))
            for c in range(-(-size // CHUNK))
        ]
        arrays.append(b"".join(pieces))
    return [*arrays, inline_at(step)]


def inline_at(step: int) -> bytes:
    return content(99, 0, step, INLINE)


def object_at(step: int) -> bytes:
    return msgspec.msgpack.encode(step)


def layout_of(names: list[str] | None = None, sizes: tuple[int, ...] = SIZES) -> Layout:
    """Arrays of bytes called `names`, one inline tensor ``small``, one object ``step``."""
    names = names or [f"array{i}" for i in range(len(sizes))]
    names, sizes = [*names, "small"], (*sizes, INLINE)
    structure = ["d", [[name, slot] for slot, name in enumerate([*names, "step"])]]
    return Layout(
        structure=msgspec.msgpack.encode(structure),
        paths=(*names, "step"),
        tensors=tuple(
            TensorView(slot=i, extent=i, dtype="uint8", shape=(n,), stride=(1,), offset=0)
            for i, n in enumerate(sizes)
        ),
        extents=tuple(ExtentSpec(n, CHUNK, "uint8") for n in sizes),
        objects=(len(names),),
    )


class ToyTrainer:
    """Stages what changed against the last save that did not fail, as the real one does."""

    def __init__(self, client: WriterClient, layout: Layout | None = None) -> None:
        self.client = client
        self.layout = layout or layout_of()
        self.encoded = msgspec.msgpack.encode(self.layout)
        self.table: dict[tuple[int, int], bytes] = {}
        self.relative: int | None = None
        self.staged = 0

    def begin(self, step: int, **options: Any) -> int:
        options.setdefault("relative", self.relative)
        return self.client.begin(step=step, layout=self.encoded, **options)

    def stage(self, save: int, arrays: list[bytes], *, only: set[tuple[int, int]] | None = None,
              torn: tuple[int, int] | None = None) -> dict[tuple[int, int], bytes]:  # fmt: skip
        """Stage the changed chunks (or `only` those) and return the new change table."""
        client, table = self.client, dict(self.table)
        slot, offset, records = None, 0, b""
        for i, spec in enumerate(self.layout.extents):
            for c in range(spec.chunk_count):
                data = arrays[i][c * CHUNK : c * CHUNK + spec.chunk_length(c)]
                digest = xxhash.xxh3_128_digest(data, SEED)
                if only is not None and (i, c) not in only:
                    continue
                if only is None and table.get((i, c)) == digest:
                    continue
                table[i, c] = digest
                if slot is not None and offset + len(data) > client.slot_bytes:
                    client.slot(save, slot, records)
                    slot = None
                if slot is None:
                    slot, offset, records = client.acquire_slot(60), 0, b""
                view = client.view(slot)
                view[offset : offset + len(data)] = data
                if torn == (i, c):
                    view[offset] ^= 1
                records += RECORD.pack(i, c, offset, len(data), digest)
                offset += len(data)
                self.staged += 1
        if slot is not None:
            client.slot(save, slot, records)
        return table

    def finish(self, save: int, step: int, **counters: float) -> None:
        inline = {i: inline_at(step) for i, spec in enumerate(self.layout.extents) if spec.inline}
        objects = {slot: object_at(step) for slot in self.layout.objects}
        self.client.finish(
            save, objects=objects, inline=inline, counters={"stall_seconds": 0.5, **counters}
        )

    def save(self, step: int, arrays: list[bytes] | None = None, **options: Any) -> int:
        """Hand a whole save over; the next one is relative to it."""
        save = self.begin(step, **options)
        table = self.stage(save, state_at(step) if arrays is None else arrays)
        self.finish(save, step)
        self.table, self.relative = table, save
        return save

    def save_now(self, step: int, arrays: list[bytes] | None = None, **options: Any) -> Committed:
        return self.client.result(self.save(step, arrays, **options), 120)

    def forget(self) -> None:
        """Compare with nothing: stage everything the next time."""
        self.table, self.relative = {}, None


def read_arrays(store: Store, commit: Commit) -> list[bytes]:
    """Every extent of a commit, chunk by chunk through the store's checked reader."""
    snapshot = store.snapshot(commit)
    arrays: list[bytes] = []
    for i, spec in enumerate(snapshot.layout.extents):
        if spec.inline:
            arrays.append(snapshot.inline[i])
            continue
        data = bytearray(spec.nbytes)
        view = memoryview(data)
        requests = [
            (
                ids.tobytes(),
                view[c * spec.chunk_bytes : c * spec.chunk_bytes + spec.chunk_length(c)],
            )
            for c, ids in enumerate(snapshot.chunks[i])
        ]
        store.reader(snapshot.packs).read(requests, 1)
        arrays.append(bytes(data))
    return arrays


def check_run(path: str, run: str = "main") -> list[int]:
    """Every listed step holds exactly the state of that step; returns the steps."""
    store = Store.open(path)
    lineage = store.lineage(run)
    assert not lineage.damaged
    for commit in lineage:
        snapshot = store.snapshot(commit)
        assert list(snapshot.objects.values()) == [object_at(commit.step)]
        assert read_arrays(store, commit) == state_at(commit.step)
    return [commit.step for commit in lineage]


def _child(client: WriterClient, how: str) -> int:
    """A child that does nothing but live: forked, or holding every descriptor of this process."""
    if how == "fork":
        child = os.fork()
        if not child:
            os.close(1)
            signal.pause()
        return child
    channel = vars(vars(client)["_connection"])["_channel"].fileno()
    code = "import signal; signal.pause()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=(channel,), stdout=subprocess.DEVNULL
    )
    return process.pid


def main() -> None:
    """Save ``first``, ``first + 1``, ... until killed, telling each acknowledged step on stdout."""
    config = json.loads(sys.argv[1])
    child.WRITER = config.get("writer", child.WRITER)
    client = WriterClient(
        config["store"], "main", seed=SEED, ring_bytes=config["ring_bytes"], slot_bytes=4 * CHUNK,
        mode=config.get("mode", "process"), options=WriterOptions(lock_timeout=60.0),
        on_result=lambda save, outcome: print(
            outcome.step if isinstance(outcome, Committed) else f"failed {outcome}", flush=True
        ),
    )  # fmt: skip
    client.ready(60)
    print("ready", client.writer_pid, flush=True)
    if config.get("child"):
        print(_child(client, config["child"]), flush=True)
    trainer = ToyTrainer(client)
    store = Store.open(config["store"])
    step = store.head("main").step + 1 if store.numbers("main") else config["first"]
    while step < config["last"]:
        client.wait_room(60)
        if step == config.get("die_before_finish"):
            save = trainer.begin(step)
            trainer.stage(save, state_at(step))
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.save(step)
        if step == config.get("die_after_finish"):
            client._connection._outbox.put(None)
            client._connection._sender.join()
            os.kill(os.getpid(), signal.SIGKILL)
        step += 1
    if config.get("close", True):
        client.close(60)


if __name__ == "__main__":
    main()

"""Store and StoreWriter against plain dicts: whatever is done, in whatever order, every step that
was acknowledged is there with its bits, and no other step ever shows up."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from damaging import DETECTED, damage, files
from deltackpt_store import Commit, DeltackptError, Store
from deltackpt_store.compact import compact
from deltackpt_store.errors import NotFoundError
from deltackpt_store.gc import collect
from deltackpt_store.index import ChunkIndex, MemoryIndex
from deltackpt_store.lmdb_index import open_index
from deltackpt_store.manifest import ExtentSpec, Layout, Snapshot, TensorView
from deltackpt_store.manifest_io import to_base, to_delta
from deltackpt_store.retention import retire
from deltackpt_store.store_writer import StoreWriter
from deltackpt_store.testing.failing import FailingIO
from deltackpt_store.verify import verify
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from profiles import budget

CHUNK = 1024
SIZES = {"w": 6 * CHUNK + 100, "small": 300, "e": 2 * CHUNK}
RUNS = st.sampled_from(["main", "fork", "other"])
WRITING = ("create", "write", "sync", "close", "link", "unlink", "sync_directory", "mkdir")
SEEDS = st.integers(0, 2**32)

Content = dict[str, bytes]


def layout_of(content: Content) -> Layout:
    names = [name for name in content if name != "note"]
    sizes = [len(content[name]) for name in names]
    slots = {name: slot for slot, name in enumerate([*names, "tied", "note"])}
    views = [TensorView(i, i, "uint8", (n,), (1,), 0) for i, n in enumerate(sizes)]
    views.append(TensorView(slots["tied"], 0, "uint8", (CHUNK,), (1,), 3))
    return Layout(
        msgspec.msgpack.encode(["d", [[name, slot] for name, slot in slots.items()]]),
        tuple(slots), tuple(views), tuple(ExtentSpec(n, CHUNK, "uint8") for n in sizes),
        (slots["note"],),
    )  # fmt: skip


def fresh(seed: int) -> Content:
    rng = random.Random(seed)
    content = {name: rng.randbytes(size) for name, size in SIZES.items()}
    return {**content, "note": msgspec.msgpack.encode(seed)}


def changed(content: Content, seed: int) -> Content:
    """A few bytes, a chunk copied to another place, the note, sometimes the layout."""
    rng = random.Random(seed)
    new = dict(content)
    for name in rng.sample([n for n in new if n != "note"], rng.randrange(3)):
        data = bytearray(new[name])
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        new[name] = bytes(data)
    if rng.random() < 0.2:
        w = new["w"]
        new["w"] = w[CHUNK : 2 * CHUNK] + w[CHUNK:]
    if rng.random() < 0.15:
        note = new.pop("note")
        if new.pop("extra", None) is None:
            new["extra"] = rng.randbytes(1500)
        new["note"] = note
    if rng.random() < 0.7:
        new["note"] = msgspec.msgpack.encode(rng.randrange(2**40))
    return new


def restore(store: Store, commit: Commit) -> Content:
    snapshot = store.snapshot(commit)
    paths, extents = snapshot.layout.paths, dict[int, bytes | bytearray](snapshot.inline)
    requests: list[tuple[bytes, memoryview]] = []
    for extent, ids in snapshot.chunks.items():
        spec = snapshot.layout.extents[extent]
        data = extents[extent] = bytearray(spec.nbytes)
        for i, row in enumerate(ids):
            piece = memoryview(data)[i * spec.chunk_bytes :][: spec.chunk_length(i)]
            requests.append((row.tobytes(), piece))
    store.reader(snapshot.packs).read(requests, threads=1)
    views = {paths[view.slot]: view for view in snapshot.layout.tensors}
    out = {name: bytes(extents[view.extent]) for name, view in views.items() if name != "tied"}
    return {**out, "note": snapshot.objects[paths.index("note")]}


@dataclass
class Saved:
    """What the model knows of one commit."""

    run: str
    number: int
    step: int
    content: Content
    ancestors: tuple[int, ...] = ()
    """Numbers of the same run that it continues, oldest first."""


@dataclass
class Model:
    saved: dict[tuple[str, int], Saved] = field(default_factory=dict[tuple[str, int], Saved])
    retired: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    pins: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])

    def live(self, run: str) -> list[Saved]:
        return [s for key, s in sorted(self.saved.items())
                if s.run == run and key not in self.retired]  # fmt: skip

    def steps(self, run: str) -> list[int]:
        """Steps of the lineage of the head; one saved twice counts where it was saved last."""
        head = self.live(run)[-1]
        numbers = [n for n in head.ancestors if (run, n) not in self.retired] + [head.number]
        steps = [self.saved[run, n].step for n in numbers]
        return [step for i, step in enumerate(steps) if step not in steps[i + 1 :]]

    def next_number(self, run: str) -> int:
        return max((n for r, n in self.saved if r == run), default=0) + 1


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.path = self.top / "store"
        self.model = Model()
        self.io = FailingIO(number=errno.EIO, calls=WRITING)
        self.writer: StoreWriter | None = None
        self.index: ChunkIndex | None = None
        self.content = fresh(0)

    def teardown(self) -> None:
        try:
            store = Store.open(self.path)
            for saved in self.model.saved.values():
                if (saved.run, saved.number) not in self.model.retired:
                    commit = store.read_commit(saved.run, saved.number)
                    assert restore(store, commit) == saved.content
            report = verify(store, level="restore", threads=1)
            assert not report.findings
            self.close()
        finally:
            shutil.rmtree(self.top)

    # the writer ---------------------------------------------------------------------------

    @initialize(lmdb=st.booleans(), heeding=st.booleans())
    def start(self, lmdb: bool, heeding: bool) -> None:
        self.open(lmdb, heeding)

    def open(self, lmdb: bool, heeding: bool) -> None:
        """`heeding`: the writer shows itself to collectors, and looks out for them."""
        self.heeding = heeding
        self.store = Store.create(self.path, io=self.io)
        if lmdb:
            self.index = open_index(self.store, directory=str(self.top / "index"))
        else:
            self.index = self.store.index()
        self.writer = StoreWriter(self.store, index=self.index, pack_bytes=5000)
        if heeding:
            self.writer.heed()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.index is not None and not isinstance(self.index, MemoryIndex):
            self.index.close()
        self.writer = self.index = None

    @rule(lmdb=st.booleans(), cache=st.sampled_from(["keep", "delete", "damage"]), seed=SEEDS,
          heeding=st.booleans())  # fmt: skip
    def restart(self, lmdb: bool, cache: str, seed: int, heeding: bool) -> None:
        self.close()
        rng = random.Random(seed)
        if cache == "delete":
            shutil.rmtree(self.top / "index", ignore_errors=True)
        elif cache == "damage" and (self.top / "index").exists():
            victim = rng.choice(sorted((self.top / "index").iterdir()))
            victim.write_bytes(damage(victim.read_bytes() or b"\0", rng))
        self.open(lmdb, heeding)

    # saving -------------------------------------------------------------------------------

    def save(self, run: str, step: int, parent: Saved | None, content: Content) -> Commit:
        assert self.writer is not None
        if self.heeding:
            self.writer.heed()
        layout = layout_of(content)
        parts = [content[path] for path in layout.paths[: len(layout.extents)]]
        head = base = None
        if parent is not None:
            head = self.store.read_commit(parent.run, parent.number)
            base = self.store.snapshot(head.base or head.manifest)
        inline: dict[int, bytes] = {}
        chunks: dict[int, np.ndarray[Any, Any]] = {}
        packs, refs = set[str](), set[bytes]()
        for extent, data in enumerate(parts):
            if layout.extents[extent].inline:
                inline[extent] = data
                continue
            rows: list[bytes] = []
            before = base.chunks.get(extent) if base is not None else None
            for i in range(0, len(data), CHUNK):
                row = i // CHUNK
                near = before[row].tobytes() if before is not None and row < len(before) else None
                put = self.writer.put(data[i : i + CHUNK], reference=near, stream=f"{run}/{extent}")
                packs.add(put.pack)
                refs.update(put.refs)
                rows.append(put.id)
            chunks[extent] = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 32)
        self.writer.flush()
        found = Store.open(self.path).index() if refs else MemoryIndex()
        for ref in refs:
            location = found.get(ref)
            assert location is not None
            packs.add(location.pack)
        snapshot = Snapshot(layout, {layout.paths.index("note"): content["note"]}, inline, chunks)
        manifest = None
        if base is not None and head is not None:
            manifest = to_delta(head.base or head.manifest, base, snapshot, packs)
        if manifest is None:
            base, manifest = None, to_base(snapshot, packs)
        digest = self.writer.write_manifest(manifest)
        known = set() if base is None or head is None else {*base.packs}
        return self.writer.commit(
            run=run, step=step, parent=head, manifest=digest,
            base=manifest.base, root=manifest.root, packs={*manifest.packs, *known},
        )  # fmt: skip

    def attempt(self, run: str, gap: int, parent: Saved | None, seed: int) -> tuple[Saved, Any]:
        """What the next save will be if it succeeds, and a function that does it."""
        content = changed(parent.content if parent is not None else fresh(seed), seed)
        own = parent is not None and parent.run == run
        step = (parent.step if parent is not None else 0) + gap
        ancestors = (*parent.ancestors, parent.number) if parent is not None and own else ()
        saved = Saved(run, self.model.next_number(run), step, content, ancestors)
        return saved, lambda: self.save(run, step, parent, content)

    def parent_for(self, run: str, back: int) -> Saved | None:
        """The head, or a commit further `back`; a new run may start from one of another run."""
        candidates = self.model.live(run)
        if not candidates:
            candidates = [s for r in ("main", "fork", "other") for s in self.model.live(r)]
            return candidates[-1 - back % len(candidates)] if candidates and back else None
        return candidates[-1 - min(back, len(candidates) - 1)]

    @rule(run=RUNS, gap=st.integers(1, 5), back=st.sampled_from([0, 0, 0, 1, 3]), seed=SEEDS)
    def save_step(self, run: str, gap: int, back: int, seed: int) -> None:
        saved, do = self.attempt(run, gap, self.parent_for(run, back), seed)
        commit = do()
        assert (commit.number, commit.step) == (saved.number, saved.step)
        self.model.saved[run, saved.number] = saved

    @rule(run=RUNS, gap=st.integers(1, 5), back=st.sampled_from([0, 0, 1]), seed=SEEDS,
          call=st.integers(1, 60), full=st.booleans())  # fmt: skip
    def save_on_a_bad_disk(
        self, run: str, gap: int, back: int, seed: int, call: int, full: bool
    ) -> None:
        """Acknowledged or not: it is there whole, or not at all; the writer works afterwards."""
        assert self.writer is not None
        saved, do = self.attempt(run, gap, self.parent_for(run, back), seed)
        self.io.number = errno.ENOSPC if full else errno.EIO
        self.io.persistent, self.io.fail_at = full, self.io.count + call
        try:
            do()
        except DeltackptError:
            acknowledged = False
        else:
            acknowledged = True
        finally:
            self.io.fail_at = None
        self.writer.abort()
        store = Store.open(self.path)
        try:
            there = saved.number in store.numbers(run)
        except NotFoundError:
            there = False
        assert there or not acknowledged
        if there:
            self.model.saved[run, saved.number] = saved
            assert restore(store, store.read_commit(run, saved.number)) == saved.content

    # names --------------------------------------------------------------------------------

    @precondition(lambda self: any(self.model.live(r) for r in ("main", "fork", "other")))
    @rule(run=RUNS, back=st.integers(0, 9), name=st.sampled_from(["best", "keep"]))
    def pin_or_unpin(self, run: str, back: int, name: str) -> None:
        if name in self.model.pins:
            self.store.unpin(name)
            del self.model.pins[name]
            return
        live = self.model.live(run)
        if live:
            saved = live[-1 - min(back, len(live) - 1)]
            self.store.pin(name, self.store.read_commit(run, saved.number))
            self.model.pins[name] = run, saved.number

    @rule(run=RUNS, back=st.integers(1, 5))
    def retire(self, run: str, back: int) -> None:
        """What retention does, pins or not; the head always stays."""
        live = self.model.live(run)
        if len(live) > 1:
            saved = live[-1 - min(back, len(live) - 1)]
            retire(self.store, [self.store.read_commit(run, saved.number)])
            self.model.retired.add((run, saved.number))

    @rule(dry=st.booleans())
    def collect(self, dry: bool) -> None:
        """Beside the writer, which goes on with what is left."""
        asked = 0

        def heed(writers: list[str]) -> bool:
            nonlocal asked
            assert self.writer is not None
            self.writer.heed()
            asked += 1
            return asked < 20

        before = files(self.path)
        collect(Store.open(self.path), dry_run=dry, wait=heed)
        assert asked < 20
        if dry:
            assert files(self.path) == before
            return
        pinned = set(self.model.pins.values())
        for run, number in self.model.retired - pinned:
            record = self.path / "runs" / run / f"{number:020d}"
            assert not record.exists()

    @rule(dry=st.booleans(), share=st.sampled_from([0.0, 0.5, 1.0]))
    def compact(self, dry: bool, share: float) -> None:
        """Beside the writer. Steps stay what they are, which every rule checks at its end."""
        asked = 0

        def heed(writers: list[str]) -> bool:
            nonlocal asked
            assert self.writer is not None
            self.writer.heed()
            asked += 1
            return asked < 40

        before = files(self.path)
        compact(Store.open(self.path), dry_run=dry, min_live_share=share, wait=heed)
        assert asked < 40
        assert not dry or files(self.path) == before

    # damage -------------------------------------------------------------------------------

    @precondition(lambda self: bool(self.model.saved))
    @rule(seed=SEEDS)
    def damage_a_file(self, seed: int) -> None:
        """Every step restores exactly or fails by a typed error; then the file is put back."""
        rng = random.Random(seed)
        victim = rng.choice(files(self.path))
        content = victim.read_bytes()
        if rng.random() < 0.2 or not content:
            victim.unlink()
        else:
            victim.write_bytes(damage(content, rng))
        try:
            for run, number in self.model.saved.keys() - self.model.retired:
                saved = self.model.saved[run, number]
                with contextlib.suppress(*DETECTED):
                    store = Store.open(self.path)
                    assert restore(store, store.read_commit(run, number)) == saved.content
        finally:
            victim.write_bytes(content)

    # what must hold -----------------------------------------------------------------------

    @invariant()
    def same_history(self) -> None:
        if self.writer is None:
            return
        store = Store.open(self.path)
        runs = {run for run, _ in self.model.saved}
        assert runs <= set(store.runs())
        for run in runs:
            commits = store.commits(run)
            assert not commits.damaged
            live = self.model.live(run)
            assert [(c.number, c.step) for c in commits] == [(s.number, s.step) for s in live]
            assert store.steps(run) == self.model.steps(run)
            assert store.head(run).number == live[-1].number
            saved = live[len(self.model.saved) % len(live)]
            assert restore(store, commits[live.index(saved)]) == saved.content
        pins = {name: (pin.run, pin.number) for name, pin in store.pins().items()}
        assert pins == self.model.pins
        for name, key in pins.items():
            assert restore(store, store.pinned(name)) == self.model.saved[key].content
        with contextlib.suppress(FileNotFoundError):
            leftovers = [p for p in self.path.rglob(".tmp-*") if p.parent.name != "gc"]
            assert self.io.failed or not leftovers


StoreMachine.TestCase.settings = budget(30, 30)
TestStoreMachine = StoreMachine.TestCase

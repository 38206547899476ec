"""What is tried in the guest of `nfs`: ``python -m lab.nfs_guest``.

1. The primitives that the store is built on, between two clients: who wins a name, who holds a
   lock, and what one client sees of what the other has just done.
2. Two writers, a reader, collections; a second writer of the same run; the server restarts.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from deltackpt_store.errors import ConflictError, DeltackptError
from deltackpt_store.fileio import FileIO
from deltackpt_store.gc import collect
from deltackpt_store.store import Store

from lab.guest import PREFIX
from lab.nfs import SERVE
from lab.workload import Trainer, wrong_with_step
from lab.writing import tell

ROUNDS = 40
STALLED_SECONDS = 120.0
A, B = "/mnt/a", "/mnt/b"


def violation(text: str) -> None:
    tell(violations=[text])


# primitives ----------------------------------------------------------------------------------


def primitives() -> None:
    """Exclusive names and locks must be exclusive; what is seen of another client is counted."""
    io = FileIO()
    os.mkdir(f"{A}/try")
    for name, attempt in (("create", _create), ("link", _link), ("mkdir", _mkdir)):
        lost = sum(_winners(attempt, number, name) != 1 for number in range(ROUNDS))
        tell(figures={f"{name} by both clients: rounds without one winner": f"{lost}/{ROUNDS}"})
        if lost and name != "mkdir":
            violation(f"{name} is not exclusive between clients: {lost} of {ROUNDS}")
    tell(figures={"flock by both clients: rounds held twice": f"{_locked_twice(io)}/{ROUNDS}"})
    for name, sight in (
        ("a new name, looked for before (exists)", _sees_new),
        ("a new name, opened before", _opens_new),
        ("a removed name, seen before (exists)", _sees_removed),
        ("a new name in a listing", _lists_new),
        ("a removed name in a listing", _lists_removed),
    ):
        stale = sum(not sight(io, number) for number in range(ROUNDS // 2))
        tell(figures={f"stale: {name}": f"{stale}/{ROUNDS // 2}"})
        if stale:
            violation(f"a client is told old news of {name}: {stale} of {ROUNDS // 2}")


def _create(path: str) -> None:
    FileIO().close(FileIO().create(path))


def _link(path: str) -> None:
    mine = f"{os.path.dirname(path)}/{threading.get_ident()}-{time.monotonic_ns()}"
    _create(mine)
    FileIO().link(mine, path)


def _mkdir(path: str) -> None:
    os.mkdir(path)


def _winners(attempt: Callable[[str], None], number: int, name: str) -> int:
    """How many of two clients that do the same at once are told that they did it."""
    start, won = threading.Barrier(2), list[str]()

    def run(client: str) -> None:
        start.wait()
        with contextlib.suppress(FileExistsError):
            attempt(f"{client}/try/{name}-{number}")
            won.append(client)

    threads = [threading.Thread(target=run, args=(client,)) for client in (A, B)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(won)


def _locked_twice(io: FileIO) -> int:
    twice = 0
    for number in range(ROUNDS):
        held = io.lock(f"{A}/try/lock-{number}", create=True)
        with contextlib.suppress(BlockingIOError):
            io.close(io.lock(f"{B}/try/lock-{number}"))
            twice += 1
        io.close(held)
        try:
            io.close(io.lock(f"{B}/try/lock-{number}"))
        except BlockingIOError:
            violation("a lock was not free after its holder let go")
    if twice:
        violation(f"locks do not hold between clients: {twice} of {ROUNDS}")
    return twice


def _sees_new(io: FileIO, number: int) -> bool:
    name = f"try/seen-{number}"
    io.exists(f"{B}/{name}")
    _create(f"{A}/{name}")
    return io.exists(f"{B}/{name}")


def _opens_new(io: FileIO, number: int) -> bool:
    name = f"try/opened-{number}"
    with contextlib.suppress(FileNotFoundError):
        io.close(io.open(f"{B}/{name}"))
    _create(f"{A}/{name}")
    try:
        io.close(io.open(f"{B}/{name}"))
    except FileNotFoundError:
        return False
    return True


def _sees_removed(io: FileIO, number: int) -> bool:
    name = f"try/removed-{number}"
    _create(f"{A}/{name}")
    io.exists(f"{B}/{name}")
    io.unlink(f"{A}/{name}")
    return not io.exists(f"{B}/{name}")


def _lists_new(io: FileIO, number: int) -> bool:
    io.list(f"{B}/try")
    _create(f"{A}/try/listed-{number}")
    return f"listed-{number}" in io.list(f"{B}/try")


def _lists_removed(io: FileIO, number: int) -> bool:
    io.list(f"{B}/try")
    io.unlink(f"{A}/try/listed-{number}")
    return f"listed-{number}" not in io.list(f"{B}/try")


# runs ----------------------------------------------------------------------------------------


class Writer:
    """A saving process on one client; what it says is passed on to the host."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.newest = 0
        self.told = time.monotonic()
        config = {
            "store": f"/mnt/{run}/store", "run": run, "steps": 10**6, "keep": True,
            "one_by_one": True, "mode": "process",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lab.writing", json.dumps(config)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith(PREFIX):
                continue
            message: dict[str, Any] = json.loads(line[len(PREFIX) :])
            tell(run=self.run, **message)
            if "ack" in message:
                self.newest, self.told = message["ack"], time.monotonic()
            if "failed" in message:
                violation(f"a save of run {self.run} failed: {message['failed']}")

    def wait_for(self, step: int) -> bool:
        """Whether `step` is acknowledged before nothing has been said for too long."""
        began = time.monotonic()
        while self.newest < step:
            if time.monotonic() - max(began, self.told) > STALLED_SECONDS:
                violation(f"run {self.run} got stuck after step {self.newest}")
                return False
            time.sleep(0.05)
        return True


class Reader(threading.Thread):
    """Client b reads the newest step of run a, again and again; must see what is acknowledged."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(daemon=True)
        self.writer = writer
        self.stop = threading.Event()
        self.reads = 0
        self.late = 0
        self.refused: list[str] = []

    def run(self) -> None:
        while not self.stop.is_set():
            acknowledged = self.writer.newest
            try:
                store = Store.open(f"{B}/store")
                head = store.head(self.writer.run)
            except DeltackptError as error:
                self.refused.append(str(error))
                continue
            self.late += head.step < acknowledged
            wrong = wrong_with_step(store, head)
            if wrong and self.writer.newest < head.step + 3:  # else it may be collected already
                violation(f"client b read run a: {wrong}")
            self.reads += 1


class Collector(threading.Thread):
    """Collects garbage from client b, and reports how long a collection takes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.seconds: list[float] = []
        self.packs = 0
        self.busy = 0

    def run(self) -> None:
        while not self.stop.wait(0.5):
            began = time.monotonic()
            try:
                self.packs += len(collect(Store.open(f"{B}/store"), timeout=100).packs)
                self.seconds.append(time.monotonic() - began)
            except ConflictError:
                self.busy += 1
            except DeltackptError as error:
                violation(f"a collection from client b failed: {error}")


def runs() -> None:
    writers = [Writer("a"), Writer("b")]
    first = writers[0]
    if not all(writer.wait_for(5) for writer in writers):
        return
    reader, collector = Reader(first), Collector()
    reader.start()
    collector.start()
    _refuse_second_writer()
    if not all(writer.wait_for(writer.newest + 25) for writer in writers):
        return
    _restart_server()
    before = time.monotonic()
    if not all(writer.wait_for(writer.newest + 2) for writer in writers):
        return
    tell(figures={"seconds until both saved again after a restart": round(
        time.monotonic() - before, 1)})  # fmt: skip
    _take_over(writers)
    for thread in (reader, collector):
        thread.stop.set()
        thread.join(150)
    if not collector.packs or not reader.reads:
        violation(f"{collector.packs} packs collected, {reader.reads} steps read: no trial")
    tell(figures={
        "steps read by client b": reader.reads, "reads refused": len(reader.refused),
        "... the first": "".join(reader.refused[:1]), "reads behind the writer": reader.late,
        "collections": len(collector.seconds), "packs collected": collector.packs,
        "collections given up": collector.busy,
        "seconds a collection takes, median": round(statistics.median(
            collector.seconds or [0.0]), 2),
    })  # fmt: skip
    for writer in writers:
        writer.wait_for(writer.newest + 3)


def _refuse_second_writer() -> None:
    """The run that client a writes must be refused to client b."""
    trainer = Trainer(f"{B}/store", "a", lock_timeout=2.0)
    try:
        trainer.next_step()
        violation("two clients write one run at once")
    except ConflictError:
        tell(figures={"a second writer of a run, on the other client": "refused"})
    finally:
        trainer.client.close(60)


def _take_over(writers: list[Writer]) -> None:
    """The writer of run b is killed; client a takes the run over at once and goes on."""
    old = writers.pop()
    old.process.kill()
    old.process.wait()
    trainer = Trainer(f"{A}/store", "b", lock_timeout=60.0)
    began = time.monotonic()
    step = trainer.next_step()
    if step <= old.newest:
        violation(f"client a continues run b at {step}, but {old.newest} is acknowledged")
    trainer.client.result(trainer.save(step), 300)
    tell(run="b", ack=step)
    tell(figures={"seconds to take over the run of a killed writer": round(
        time.monotonic() - began, 1)})  # fmt: skip
    trainer.client.close(60)


def _restart_server() -> None:
    subprocess.run(["rpc.nfsd", "0"], check=True)
    time.sleep(3)
    subprocess.run(["sh", "-c", SERVE], check=True)


def main() -> None:
    primitives()
    runs()
    tell(done=True)
    time.sleep(3600)  # until the kernel is killed


if __name__ == "__main__":
    main()

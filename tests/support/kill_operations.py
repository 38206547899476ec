"""SIGKILL at the n-th file call of what works on a store, for every n.

    python kill_operations.py DIRECTORY CALLS

Each operation runs in forked children over copies of one store. After each kill, with no repair:
what was acknowledged is there, all that is listed is whole, the next save and the next collection
work and leave nothing behind. A repair works on damaged stores: what could be read before can be,
no damaged file is gone, and the next repair finishes. CALLS is "changes" (calls that change files
or names; at the others a kill leaves no other files) or "all". Prints one JSON object: kills by
operation.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable

from authors import Author, Session, check_clean, check_everything, everything_in
from deltackpt_store.compact import compact
from deltackpt_store.errors import NotFoundError
from deltackpt_store.fileio import FileIO, make_directories
from deltackpt_store.gc import collect
from deltackpt_store.io_thread import IoThread
from deltackpt_store.location import check_location
from deltackpt_store.retention import Keep, apply, retire
from deltackpt_store.store import Store
from deltackpt_store.testing import CALLS, CHANGES, killed_at
from deltackpt_store.testing.killing import Operation, Tell
from hurt_store import HurtChunks, HurtRecords, HurtStore, copy_files


def prepare(path: str) -> set[bytes]:
    """A store with garbage, retired steps, a pin and a second run; commits that must stay."""
    store = Store.create(path, io=Unsynced())
    author = Author(store, "main")
    commits = [author.save(step, ["kept", f"{step}", f"{step // 2}"]) for step in range(6)]
    author.prepare(["never committed"])
    author.close()
    coded = Author(store, "coded", codec="small")
    for step in range(3):
        coded.save(step, ["red"] if step == 0 else [f"red~{step}", f"{step}"])
    coded.close()
    retire(store, store.commits("coded")[:1])
    other = Author(store, "other")
    mine = other.save(1, ["kept", "mine"])
    other.close()
    store.pin("good", commits[1])
    retire(store, commits[:3])
    newest = store.commits("coded")
    return {commit.digest for commit in (commits[1], *commits[3:], mine, *newest)}


class Unsynced(FileIO):
    """Real files, for a store that no power cut will meet."""

    def sync(self, handle: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


# operations -------------------------------------------------------------------------------------


def create(path: str) -> Operation:
    def operation(io: FileIO, tell: Tell) -> None:
        shutil.rmtree(path)
        make_directories(io, path)
        check_location(io, path)  # left out where the file layer is a replaced one
        Store.create(path, io=io)

    return operation


def save(path: str) -> Operation:
    def operation(io: FileIO, tell: Tell) -> None:
        author = Author(Store.open(path, io=io), "second other")
        author.run = "other"
        for step in (2, 3):
            tell(author.save(step, ["kept", f"fresh {step}"]).digest)
        author.close()

    return operation


def session(path: str) -> Operation:
    """A training with retention."""

    def operation(io: FileIO, tell: Tell) -> None:
        run = Session(Store.open(path, io=io), "main", io, keep=Keep(last=2))
        for step in (10, 11):
            report = run.save(step, ["kept", f"{step}"], relative=step - 10 or None)
            assert report is not None
            tell(report.digest)
        run.close()

    return operation


def retention(path: str) -> Operation:
    def operation(io: FileIO, tell: Tell) -> None:
        apply(Store.open(path, io=io), "main", Keep(last=1))

    return operation


def collection(path: str) -> Operation:
    def operation(io: FileIO, tell: Tell) -> None:
        collect(Store.open(path, io=io))

    return operation


def compaction(path: str) -> Operation:
    """Packs with little in them are rewritten, a coded run gets a base of its own."""

    def operation(io: FileIO, tell: Tell) -> None:
        compact(Store.open(path, io=io), min_live_share=0.9)

    return operation


OPERATIONS: dict[str, Callable[[str], Operation]] = {
    "create": create, "save": save, "session": session, "retention": retention,
    "collection": collection, "compaction": compaction,
}  # fmt: skip
LETS_GO = {"session": 2, "retention": 1}
"""Operations that may take older steps off the list of main, and how many they leave."""


# checking ---------------------------------------------------------------------------------------


def check(path: str, name: str, must: set[bytes], told: list[bytes], where: str) -> None:
    try:
        store = Store.open(path, io=Unsynced())
    except NotFoundError:
        assert name == "create", where
        Store.create(path, io=Unsynced())
        return
    if name == "create":
        return
    found = everything_in(store, where)
    if name in LETS_GO:
        newest = [commit.digest for commit in store.commits("main")[-LETS_GO[name] :]]
        assert len(newest) == LETS_GO[name], where
        must = {digest for digest in must if digest in newest}
        told = told[-LETS_GO[name] :]
    assert must | set(told) <= found, f"{where}: {len((must | set(told)) - found)} steps are gone"
    check_goes_on(store, where)


def check_goes_on(store: Store, where: str) -> None:
    run = Session(store, "main", Unsynced(), name="next")
    report = run.save(1000, ["kept", "garbage", "next"])
    assert report is not None, where
    run.close()
    collect(store)
    check_everything(store, [report], where)
    check_clean(Store.open(store.path, io=Unsynced()), where)


# campaigns --------------------------------------------------------------------------------------

Check = Callable[[list[bytes], str], None]
"""What must hold after a death: called with what was told, and words for when it was."""


def campaign(
    directory: str, name: str, operation: Operation, check: Check, calls: tuple[str, ...]
) -> int:
    """Kill the operation at each of its `calls` until it comes to its end; the kills. Each time
    `directory` is what `directory`-original is."""
    for kills in range(10_000):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(f"{directory}-original", directory)
        death = killed_at(operation, kills + 1, calls=calls)
        check(death.told, f"{name}, killed at call {kills + 1}")
        if not death.killed:
            return kills
    raise AssertionError(f"{name} takes more calls than were looked at")


def operate(directory: str, calls: tuple[str, ...]) -> dict[str, int]:
    path = f"{directory}/store"
    must = prepare(f"{path}-original")
    kills: dict[str, int] = {}
    for name, make in OPERATIONS.items():

        def check_it(told: list[bytes], where: str, name: str = name) -> None:
            check(path, name, must, told, where)

        kills[name] = campaign(path, name, make(path), check_it, calls)
    return kills


def repairs(directory: str, calls: tuple[str, ...]) -> dict[str, int]:
    kinds: dict[str, type[HurtStore]] = {"repair": HurtChunks, "repair of records": HurtRecords}
    kills: dict[str, int] = {}
    for name, kind in kinds.items():
        root = f"{directory}/{kind.__name__}"
        hurt = kind(root)
        copy_files(hurt.disk, Unsynced(), root, f"{root}-original")

        def check(_: list[bytes], where: str, hurt: HurtStore = hurt) -> None:
            hurt.check(Unsynced(), where)
            hurt.check_goes_on(Unsynced(), where)

        def operation(io: FileIO, _: Tell, hurt: HurtStore = hurt) -> None:
            hurt.repair(io)

        kills[name] = campaign(root, name, operation, check, calls)
    return kills


def main() -> int:
    directory, calls = sys.argv[1], {"changes": CHANGES, "all": CALLS}[sys.argv[2]]
    logging.disable(logging.CRITICAL)
    IoThread._start = lambda self: False  # forks without threads
    print(json.dumps({**operate(directory, calls), **repairs(directory, calls)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Stores with damage of every kind, each beside a copy of a part, for tests of repair."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from authors import Author, chunk_of, words_in
from blake3 import blake3
from deltackpt_store.errors import CorruptionError, NotFoundError
from deltackpt_store.fileio import FileIO, make_directories, publish_bytes, read_file
from deltackpt_store.manifest import Commit
from deltackpt_store.names import number_name, relative_pack_path
from deltackpt_store.quarantine import QUARANTINE
from deltackpt_store.repair import RepairReport, repair
from deltackpt_store.store import Store
from deltackpt_store.testing import SimulatedDisk
from deltackpt_store.verify import verify

Change = Callable[[bytearray], None]
_SOMETHING = "something"
"""Lies in a directory that has taken a file's place."""


class HurtStore:
    """A store at `root`/store on a simulated disk, and its copy at `root`/copy.

    Subclasses save and damage; `commits` is all that was saved, `lost` what no repair brings back.
    """

    lost: frozenset[tuple[str, int]] = frozenset()

    def __init__(self, root: str = "/disk") -> None:
        self.path, self._copy = f"{root}/store", f"{root}/copy"
        self.disk = SimulatedDisk()
        make_directories(self.disk, root)
        self.disk.sync_directory(os.path.dirname(root))
        store = Store.create(self.path, io=self.disk)
        self._format = store.format
        self.commits = self._save(store)
        copy_files(self.disk, self.disk, self.path, self._copy)
        self._damage(store)
        self._before = {path.removeprefix(f"{self.path}/"): self.disk.content(path)
                        for path in self.disk.files(self.path) if "/gc/" not in path}  # fmt: skip
        self._readable = set(self._whole(self.disk))

    def _save(self, store: Store) -> list[Commit]:
        """What is saved; subclasses say."""
        raise NotImplementedError

    def _damage(self, store: Store) -> None:
        """What is damaged; subclasses say."""
        raise NotImplementedError

    def repair(self, io: FileIO) -> RepairReport:
        """Repair the store from its copy, by the file layer `io`."""
        copy = Store.open(self._copy, io=io)
        return repair(Store(self.path, io, self._format), sources=[copy], threads=1)

    # checking ------------------------------------------------------------------------------

    def check(self, io: FileIO, where: object, *, power_cut: bool = False) -> None:
        """Nothing is worse than before: what could be read can be, and every damaged file still
        lies where it was or in the quarantine.

        Not so what lies in a directory that is moved there while there is a power cut: it cannot
        have both names, and the simulated disk may lose both.
        """
        gone = self._readable.difference(self._whole(io))
        assert not gone, f"{where}: {gone} could be read before"
        for place, content in self._before.items():
            if power_cut and place.endswith(f"/{_SOMETHING}"):
                continue
            assert content in self._copies(io, place), f"{where}: {place} is gone"

    def check_goes_on(self, io: FileIO, where: object, *, power_cut: bool = False) -> None:
        """The next repair finishes, and the one after it finds nothing to do."""
        report = self.repair(io)
        assert not [one for one in report.left if one.kind != "chunk"], (where, report.left)
        assert {(one.run, one.number) for one in report.lost} == self.lost, where
        self.check(io, where, power_cut=power_cut)
        whole = {(commit.run, commit.number) for commit in self.commits} - self.lost
        assert set(self._whole(io)) == whole, where
        found = verify(Store.open(self.path, io=io), level="chunks", threads=1).findings
        assert {(hit.run, hit.number) for one in found for hit in one.hits} == self.lost, where
        again = self.repair(io)
        assert (again.packs, again.mended, again.quarantined) == ((), (), ()), where

    def _whole(self, io: FileIO) -> Iterable[tuple[str, int]]:
        """Run and number of the commits that are as they were saved and can be read."""
        store = Store(self.path, io, self._format)
        for commit in self.commits:
            try:
                if store.read_commit(commit.run, commit.number).digest == commit.digest:
                    words_in(store, commit)
                    yield commit.run, commit.number
            except (CorruptionError, NotFoundError):
                continue

    def _copies(self, io: FileIO, place: str) -> Iterable[bytes]:
        """What lies at `place`, and what was set aside from there."""
        for number in range(5):
            name = f"{QUARANTINE}/{place}" + (f"~{number}" if number > 1 else "")
            try:
                yield read_file(io, f"{self.path}/{name if number else place}", 1 << 20)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                continue

    # damaging ------------------------------------------------------------------------------

    def _rewrite(self, place: str, change: Change) -> None:
        path = f"{self.path}/{place}"
        content = bytearray(self.disk.content(path))
        change(content)
        self._remove(place)
        publish_bytes(self.disk, path, content)

    def _remove(self, place: str) -> None:
        self.disk.unlink(f"{self.path}/{place}")
        self.disk.sync_directory(os.path.dirname(f"{self.path}/{place}"))

    def _replace_by_directory(self, place: str) -> None:
        self._remove(place)
        make_directories(self.disk, f"{self.path}/{place}")
        publish_bytes(self.disk, f"{self.path}/{place}/{_SOMETHING}", b"somebody's own")


class HurtChunks(HurtStore):
    """Packs are damaged, and with them chunks; and some records.

    Run main: steps 1 ("lost", "a"), 2 ("a", "copied"), 3 ("a", "b"), 4 ("c", "twice"), and run b:
    1 ("twice"). The record of "lost" is damaged and nothing has it; that of "copied" is in the
    copy; one record of "twice" is in another pack; the footer of step 3's pack is cut off; the
    manifest of step 4 and the commit of step 2 are damaged and in the copy.
    """

    lost = frozenset({("main", 1)})

    def _save(self, store: Store) -> list[Commit]:
        main, b = Author(store, "main"), Author(store, "b")
        words = [["lost", "a"], ["a", "copied"], ["a", "b"], ["c", "twice"]]
        commits = [main.save(step, said) for step, said in enumerate(words, 1)]
        commits.append(b.save(1, ["twice"]))
        main.close()
        b.close()
        return commits

    def _damage(self, store: Store) -> None:
        index = Store.open(store.path, io=self.disk).index()
        places = {word: index.get(blake3(chunk_of(word)).digest())
                  for word in ("lost", "copied", "twice", "b")}  # fmt: skip
        for word, place in places.items():
            assert place is not None
            if word == "lost":
                gone = f"{self._copy}/{relative_pack_path(place.pack)}"
                self.disk.unlink(gone)
                self.disk.sync_directory(os.path.dirname(gone))
            change = cut_short(30) if word == "b" else flipped(place.payload + 9)
            self._rewrite(relative_pack_path(place.pack), change)
        self._rewrite(f"manifests/{self.commits[3].manifest.hex()}", flipped(50))
        self._rewrite(f"runs/main/{number_name(2)}", flipped(50))


class HurtRecords(HurtStore):
    """All chunks are whole, and hardly anything tells what they are.

    Run main: steps 1 to 6. FORMAT and the pin of step 2 are damaged; a directory lies in the place
    of commit 2 and of the manifest of step 4; commit 3 and its manifest are lost.
    """

    def _save(self, store: Store) -> list[Commit]:
        author = Author(store, "main")
        commits = [author.save(step, ["same", f"{step}"]) for step in range(1, 7)]
        author.close()
        store.pin("good", commits[1])
        return commits

    def _damage(self, store: Store) -> None:
        self._rewrite("FORMAT", flipped(3))
        self._rewrite("pins/good", flipped(20))
        self._replace_by_directory(f"runs/main/{number_name(2)}")
        self._replace_by_directory(f"manifests/{self.commits[3].manifest.hex()}")
        self._remove(f"runs/main/{number_name(3)}")
        self._remove(f"manifests/{self.commits[2].manifest.hex()}")


def flipped(at: int) -> Change:
    """One bit of the byte at `at` changes."""

    def change(content: bytearray) -> None:
        content[at] ^= 1

    return change


def cut_short(by: int) -> Change:
    """So many bytes are missing at the end."""

    def change(content: bytearray) -> None:
        del content[-by:]

    return change


def copy_files(source: SimulatedDisk, target: FileIO, path: str, new: str) -> None:
    """Copy the directory at `path`, with what is in it, durably to `new` on the disk `target`."""
    make_directories(target, new)
    for name in source.list(path):
        try:
            content = source.content(f"{path}/{name}")
        except KeyError:  # a directory
            copy_files(source, target, f"{path}/{name}", f"{new}/{name}")
        else:
            publish_bytes(target, f"{new}/{name}", content)

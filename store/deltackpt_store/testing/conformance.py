"""What a storage back end must do to hold a store: a class of tests for any file layer.

Subclass it where pytest collects, and give it the fixture `layer`::

    class TestMyLayer(FileLayerContract):
        @pytest.fixture
        def layer(self, tmp_path):
            return MyLayer(), str(tmp_path)

`layer` is the layer and the path of an empty directory in it. A layer that can tell what a power
cut would leave overrides `after_power_cut`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence

from deltackpt_store.fileio import TEMPORARY_PREFIX, FileIO, make_directories, publish_bytes
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter

Layer = tuple[FileIO, str]
_RACERS = 8
_ROUNDS = 12


class FileLayerContract:
    """All tests take `layer`; none depends on another."""

    def after_power_cut(self, io: FileIO) -> Iterable[FileIO]:
        """Layers that hold what a power cut at this moment might leave; none when it cannot say."""
        return ()

    # creating and writing ------------------------------------------------------------------

    def test_creation_is_exclusive(self, layer: Layer) -> None:
        io, root = layer
        _make(io, f"{root}/a", b"first")
        with _fails(FileExistsError):
            io.create(f"{root}/a")
        assert _read(io, f"{root}/a") == b"first"
        with _fails(FileNotFoundError):
            io.create(f"{root}/missing/a")

    def test_one_of_many_creates(self, layer: Layer) -> None:
        io, root = layer

        def create(number: int, path: str) -> None:
            io.close(io.create(path))

        _one_wins(create, root)

    def test_bytes_come_back_from_where_they_were_written(self, layer: Layer) -> None:
        io, root = layer
        pieces = [bytes([n % 251]) * (n % 7) for n in range(3000)]  # more than a system call takes
        whole = b"".join(pieces)
        handle = io.create(f"{root}/a")
        assert io.write(handle, pieces, 0) == len(whole)
        assert io.write(handle, [memoryview(b"later"), bytearray(b"!"), b""], len(whole) + 10) == 6
        assert io.write(handle, [], 5) == 0
        io.write(handle, [b"XY"], 3)
        io.sync(handle)
        io.close(handle)
        expected = bytearray(whole + bytes(10) + b"later!")
        expected[3:5] = b"XY"
        assert _read(io, f"{root}/a") == expected

    def test_reading_ends_where_the_file_does(self, layer: Layer) -> None:
        io, root = layer
        _make(io, f"{root}/a", b"0123456789")
        handle = io.open(f"{root}/a")
        try:
            assert io.size(handle) == 10
            first, second = bytearray(4), bytearray(8)
            assert io.read_into(handle, [first, bytearray(), second], 3) == 7
            assert bytes(first) == b"3456"
            assert bytes(second) == b"789" + bytes(5)
            assert io.read_into(handle, [bytearray(4)], 10) == 0
            assert io.read_into(handle, [bytearray(4)], 99) == 0
        finally:
            io.close(handle)
        for path in (f"{root}/b", f"{root}/a/b"):
            with _fails(OSError):
                io.open(path)

    # names ---------------------------------------------------------------------------------

    def test_a_link_is_a_second_name_and_replaces_nothing(self, layer: Layer) -> None:
        io, root = layer
        _make(io, f"{root}/a", b"one")
        _make(io, f"{root}/b", b"two")
        with _fails(FileExistsError):
            io.link(f"{root}/a", f"{root}/b")
        assert _read(io, f"{root}/b") == b"two"
        io.link(f"{root}/a", f"{root}/c")
        io.unlink(f"{root}/a")
        assert _read(io, f"{root}/c") == b"one"
        assert sorted(io.list(root)) == ["b", "c"]
        with _fails(FileNotFoundError):
            io.link(f"{root}/missing", f"{root}/d")

    def test_one_of_many_links(self, layer: Layer) -> None:
        io, root = layer
        for number in range(_RACERS):
            _make(io, f"{root}/source {number}", b"%d" % number)

        def link(number: int, path: str) -> None:
            io.link(f"{root}/source {number}", path)

        for winner, path in _one_wins(link, root):
            assert _read(io, path) == b"%d" % winner

    def test_replacing_puts_one_file_in_the_place_of_another(self, layer: Layer) -> None:
        io, root = layer
        _make(io, f"{root}/a", b"new")
        _make(io, f"{root}/b", b"old")
        reading = io.open(f"{root}/b")
        io.replace(f"{root}/a", f"{root}/b")
        assert io.list(root) == ["b"]
        assert _read(io, f"{root}/b") == b"new"
        data = bytearray(3)
        io.read_into(reading, [data], 0)
        io.close(reading)
        assert bytes(data) == b"old", "who had it open goes on reading what it was"

    def test_what_is_open_can_be_read_after_its_name_is_gone(self, layer: Layer) -> None:
        io, root = layer
        _make(io, f"{root}/a", b"still there")
        handle = io.open(f"{root}/a")
        io.unlink(f"{root}/a")
        data = bytearray(11)
        assert io.read_into(handle, [data], 0) == 11
        io.close(handle)
        assert bytes(data) == b"still there"
        assert not io.exists(f"{root}/a")
        with _fails(FileNotFoundError):
            io.unlink(f"{root}/a")

    # directories ---------------------------------------------------------------------------

    def test_a_listing_is_complete_or_an_error(self, layer: Layer) -> None:
        io, root = layer
        io.mkdir(f"{root}/many")
        names = {f"{n:03d}-{'x' * (n % 60)}" for n in range(300)}
        for name in names:
            io.close(io.create(f"{root}/many/{name}"))
        found = io.list(f"{root}/many")
        assert len(found) == len(names)
        assert set(found) == names
        with _fails(FileNotFoundError):
            io.list(f"{root}/missing")
        _make(io, f"{root}/file", b"")
        with _fails(NotADirectoryError):
            io.list(f"{root}/file")

    def test_directories_are_made_and_removed_one_by_one(self, layer: Layer) -> None:
        io, root = layer
        io.mkdir(f"{root}/a")
        with _fails(FileExistsError):
            io.mkdir(f"{root}/a")
        with _fails(FileNotFoundError):
            io.mkdir(f"{root}/b/c")
        _make(io, f"{root}/a/file", b"")
        with _fails(OSError):
            io.rmdir(f"{root}/a")
        with _fails(OSError):
            io.unlink(f"{root}/a")
        io.unlink(f"{root}/a/file")
        io.rmdir(f"{root}/a")
        assert not io.exists(f"{root}/a")
        make_directories(io, f"{root}/x/y/z")
        make_directories(io, f"{root}/x/y/z")
        assert io.exists(f"{root}/x/y/z")

    def test_one_of_many_makes_a_directory(self, layer: Layer) -> None:
        io, root = layer
        _one_wins(lambda number, path: io.mkdir(path), root)

    def test_syncing_a_directory_that_is_not_there_is_an_error(self, layer: Layer) -> None:
        io, root = layer
        io.sync_directory(root)
        with _fails(FileNotFoundError):
            io.sync_directory(f"{root}/missing")

    # locks ---------------------------------------------------------------------------------

    def test_a_lock_has_one_holder_and_ends_with_its_handle(self, layer: Layer) -> None:
        io, root = layer
        with _fails(FileNotFoundError):
            io.lock(f"{root}/lock")
        first = io.lock(f"{root}/lock", create=True)
        for create in (False, True):
            with _fails(BlockingIOError):
                io.lock(f"{root}/lock", create=create)
        io.write(first, [b"mine"], 0)
        io.close(first)
        second = io.lock(f"{root}/lock")
        assert _read(io, f"{root}/lock") == b"mine"
        io.unlink(f"{root}/lock")
        third = io.lock(f"{root}/lock", create=True)  # another file, which nobody has locked
        io.close(second)
        with _fails(BlockingIOError):
            io.lock(f"{root}/lock")
        io.close(third)

    # what is built on these ----------------------------------------------------------------

    def test_publishing_is_whole_and_overwrites_nothing(self, layer: Layer) -> None:
        io, root = layer
        publish_bytes(io, f"{root}/a", [b"one ", memoryview(b"two")])
        with _fails(FileExistsError):
            publish_bytes(io, f"{root}/a", b"other")
        assert _read(io, f"{root}/a") == b"one two"
        assert not [name for name in io.list(root) if name.startswith(TEMPORARY_PREFIX)]

    def test_what_was_published_survives_a_power_cut(self, layer: Layer) -> None:
        io, root = layer
        make_directories(io, f"{root}/deep/er")
        publish_bytes(io, f"{root}/deep/er/a", b"durable")
        for left in self.after_power_cut(io):
            assert _read(left, f"{root}/deep/er/a") == b"durable"

    def test_a_store_lives_on_it(self, layer: Layer) -> None:
        io, root = layer
        store = Store.create(f"{root}/store", io=io)
        raw = [os.urandom(10_000), bytes(70_000), b"x"]
        with StoreWriter(store) as writer:
            puts = [writer.put(data) for data in raw]
            writer.flush()
        for left in (io, *self.after_power_cut(io)):
            again = Store.open(f"{root}/store", io=left)
            for put, data in zip(puts, raw, strict=True):
                buffer = bytearray(len(data))
                again.get_into(put.id, buffer)
                assert buffer == data
        assert io.free_bytes(root) >= 0


def _make(io: FileIO, path: str, content: bytes) -> None:
    handle = io.create(path)
    io.write(handle, [content], 0)
    io.close(handle)


def _read(io: FileIO, path: str) -> bytes:
    handle = io.open(path)
    try:
        data = bytearray(io.size(handle))
        assert io.read_into(handle, [data], 0) == len(data)
        return bytes(data)
    finally:
        io.close(handle)


def _one_wins(act: Callable[[int, str], None], root: str) -> Sequence[tuple[int, str]]:
    """`act(number, path)` by several threads at once, on a new path each round; who succeeded."""
    won: list[tuple[int, str]] = []
    for turn in range(_ROUNDS):
        path = f"{root}/contested {turn}"
        winners: list[int] = []
        start = threading.Barrier(_RACERS)

        def race(
            number: int,
            path: str = path,
            winners: list[int] = winners,
            start: threading.Barrier = start,
        ) -> None:
            start.wait()
            with contextlib.suppress(FileExistsError):
                act(number, path)
                winners.append(number)

        threads = [threading.Thread(target=race, args=(number,)) for number in range(_RACERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1, f"{len(winners)} of {_RACERS} made {path}"
        won.append((winners[0], path))
    return won


@contextlib.contextmanager
def _fails(kind: type[OSError]) -> Generator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__} was raised")

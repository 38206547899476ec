"""Prevents: a file layer that lacks what the store relies on, and is trusted all the same.

The real layer, on the disk and on memory, and those that the other tests are built on.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from deltackpt_store.fileio import FileIO, make_directories
from deltackpt_store.testing import FailingIO, ShortIO, SimulatedDisk, SlowIO
from deltackpt_store.testing.conformance import FileLayerContract, Layer


class TestRealFiles(FileLayerContract):
    @pytest.fixture
    def layer(self, tmp_path: Path) -> Layer:
        return FileIO(), str(tmp_path)


class TestShortWrites(FileLayerContract):
    @pytest.fixture
    def layer(self, tmp_path: Path) -> Layer:
        return ShortIO(1000), str(tmp_path)


class TestFailingLayerThatDoesNotFail(FileLayerContract):
    @pytest.fixture
    def layer(self, tmp_path: Path) -> Layer:
        return FailingIO(number=errno.EIO), str(tmp_path)


class TestSlowLayer(FileLayerContract):
    @pytest.fixture
    def layer(self, tmp_path: Path) -> Layer:
        return SlowIO(), str(tmp_path)


class TestSimulatedDisk(FileLayerContract):
    @pytest.fixture
    def layer(self) -> Layer:
        disk = SimulatedDisk()
        make_directories(disk, "/some/where")
        return disk, "/some/where"

    def after_power_cut(self, io: FileIO) -> Iterable[FileIO]:
        assert isinstance(io, SimulatedDisk)
        return (state.disk() for state in io.crash_states(start=io.operations))


class TestTheContract:
    """It sees a layer that breaks it."""

    def test_a_link_that_replaces_is_seen(self, tmp_path: Path) -> None:
        class Renaming(FileIO):
            def link(self, source: str, target: str) -> None:
                os.replace(source, target)

        with pytest.raises(AssertionError):
            FileLayerContract().test_a_link_is_a_second_name_and_replaces_nothing(
                (Renaming(), str(tmp_path))
            )

    def test_a_lost_directory_sync_is_seen(self) -> None:
        class Forgetful(SimulatedDisk):
            def sync_directory(self, path: str) -> None:
                pass

        disk = Forgetful()
        disk.mkdir("/where")
        contract = TestSimulatedDisk()
        with pytest.raises(OSError, match="No such file"):
            contract.test_what_was_published_survives_a_power_cut((disk, "/where"))

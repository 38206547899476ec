"""The handle of one save and the figures of what it did.

:class:`Save` is what the training loop gets back at once; :class:`SaveReport` is what it asks the
handle for when it wants to know. :class:`SaveProgress` is their shared, locked inside, moved along
by the pipeline: accepted -> unlocked (live tensors may change again) -> staged (every byte is in
the staging ring) -> done (durable, failed or dropped).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from deltackpt_store.errors import DeltackptError, StateError

from .calls import refuse_waiting
from .policy import check_seconds
from .waiting import Condition


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What one save asked of one device; docs/gpu.md has the formulas."""

    launches: int = 0
    """Kernels launched."""
    transfers: int = 0
    """Copies between device and host, in either direction."""
    transferred_bytes: int = 0
    """Bytes of those copies."""
    device_bytes: int = 0
    """Device memory of the save beyond the state, copies made at the call included."""
    pinned_bytes: int = 0
    """Page-locked host memory, the ring's slots and copies that landed at the call included."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What one durable save did. Times in seconds, sizes in bytes."""

    step: int
    run: str
    commit: int
    """Number of the commit within the run."""
    root: str
    """Merkle root of the step, in hex: equal roots mean bit-identical states."""
    stall_seconds: float
    """How long the training thread was blocked: inside `save` and waiting at the lock.

    On a GPU, waiting counts from when the device had done what was queued before `save`."""
    staged_seconds: float
    """From the call of `save` until every byte was safe from mutation."""
    durable_seconds: float
    """From the call of `save` until the step survives power loss."""
    state_bytes: int
    """Size of all tensors and large arrays, tied and viewed memory counted once. Plain values are
    not counted."""
    changed_bytes: int
    """Bytes of chunks that differ from the step this save was compared with."""
    staged_bytes: int
    """Bytes copied into the staging ring."""
    written_bytes: int
    """Encoded bytes of new chunks; the commit record and the manifest come on top: a few KiB, and
    what `small_changed_bytes` counts."""
    small_changed_bytes: int
    """Bytes of small tensors and plain values that differ from the save before this one."""
    chunks: int
    changed_chunks: int
    dedup_hits: int
    """Staged chunks that the store already held."""
    codecs: dict[str, int]
    """Stored chunks by codec name."""
    codec_bytes: dict[str, tuple[int, int]]
    """By codec name, bytes of the chunks stored with it, and what was written for them."""
    skipped: int
    """Saves dropped because others were in flight, since the save before this one."""
    ring_bytes: int
    """Memory of the staging ring in use so far by this run's saves."""
    devices: dict[str, DeviceFigures] = dataclasses.field(default_factory=dict[str, DeviceFigures])
    """For a state on GPUs: what each was asked to do, by name (``cuda:0``)."""

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values, for logs and JSON."""
        return dataclasses.asdict(self)


class SaveProgress:
    """Where one accepted save is. All methods may be called from any thread.

    `deliver` is called (without the lock) when a caller of :meth:`Save.result` is handed this
    save's error, so that it is not reported a second time.
    """

    def __init__(
        self, run: str, step: int, deliver: Callable[[SaveProgress], None], started: float
    ) -> None:
        self.run = run
        self.step = step
        self.started = started
        """``time.perf_counter()`` at the call of `save`."""
        self.staged_seconds = 0.0
        self.owner: object = None
        """Whose threads move it along, see :func:`refuse_waiting`."""
        self.error: DeltackptError | None = None
        self.dropped: str | None = None
        self.report: SaveReport | None = None
        self._deliver = deliver
        self._saving_seconds = 0.0
        self._waiting_since: float | None = None
        self._reached_at = 0.0
        self._unlocked_at: float | None = None
        self._changed = Condition()
        self._lock = self._changed.lock
        self._is_unlocked = self._is_staged = self._is_done = False
        self._pid = os.getpid()

    # the training thread -------------------------------------------------------------------

    def captured(self) -> None:
        """The call of `save` is about to return: its time is part of the stall."""
        self._saving_seconds = time.perf_counter() - self.started

    def waiting(self) -> None:
        """Training waits at the lock, from now until the save is unlocked."""
        with self._lock:
            if self._waiting_since is None:
                self._waiting_since = time.perf_counter()

    @property
    def stall(self) -> float:
        """Seconds that training has been blocked so far."""
        with self._lock:
            if self._waiting_since is None:
                return self._saving_seconds
            since = max(self._waiting_since, self._reached_at)
            until = self._unlocked_at or time.perf_counter()
            return self._saving_seconds + max(0.0, until - since)

    # the pipeline --------------------------------------------------------------------------

    def mark_reached(self) -> None:
        """A device has now finished what training had queued on it before the call of `save`.

        Waiting for that is training's own time: it does not count as stall.
        """
        self._reached_at = time.perf_counter()

    def mark_unlocked(self) -> None:
        """No live tensor of this save will be read any more."""
        if self._unlocked_at is None:
            self._unlocked_at = time.perf_counter()
        with self._lock:
            self._is_unlocked = True
            self._changed.notify_all()

    def mark_staged(self) -> None:
        """Every byte is in the ring; the time since the call of `save` is recorded."""
        self.staged_seconds = time.perf_counter() - self.started
        with self._lock:
            self._is_staged = True
            self.mark_unlocked()

    def fail(self, error: DeltackptError) -> bool:
        """End as failed; False when the save had ended before (the first end counts)."""
        with self._lock:
            if self._is_done:
                return False
            self.error = error
            self._finish()
            return True

    def drop(self, why: str) -> None:
        """End as never made, by policy `why`."""
        with self._lock:
            self.dropped = why
            self._finish()

    def commit(self, report: SaveReport) -> None:
        """End as durable, unless the save had been given up before."""
        with self._lock:
            if not self._is_done:
                self.report = report
                self._finish()

    def _finish(self) -> None:
        self._is_staged = self._is_done = True
        self.mark_unlocked()

    # waiting -------------------------------------------------------------------------------

    @property
    def is_unlocked(self) -> bool:
        return self._is_unlocked

    @property
    def is_staged(self) -> bool:
        return self._is_staged

    @property
    def is_done(self) -> bool:
        return self._is_done

    def wait_unlocked(self, timeout: float | None) -> bool:
        return self._changed.wait_for(lambda: self._is_unlocked, timeout)

    def wait_staged(self, timeout: float | None) -> bool:
        return self._changed.wait_for(lambda: self._is_staged, timeout)

    def wait_done(self, timeout: float | None) -> bool:
        return self._changed.wait_for(lambda: self._is_done, timeout)

    def raise_error(self) -> None:
        """Raise what ended this save, if it did not end durable; marks the error as delivered."""
        if self.dropped is not None:
            raise StateError(
                f"step {self.step} was not saved: other saves were in flight and "
                f'on_busy="{self.dropped}"',
                kind="skipped",
                hint="check Save.skipped first",
                step=self.step,
            )
        if self.error is not None:
            if os.getpid() == self._pid:
                self._deliver(self)
            raise self.error

    def check_process(self) -> None:
        """In a forked child, `StateError` (kind "forked") unless the save ended before the fork.

        Takes no lock: one may be held for ever there, by a thread that only the parent has.
        """
        if os.getpid() != self._pid and not self.is_done:
            raise StateError(
                f"step {self.step} is being saved by process {self._pid}, and this is its forked "
                f"child {os.getpid()}, which never learns how that ends",
                kind="forked",
                hint="ask in the process that saves",
                step=self.step,
            )


class Save:
    """Handle of one save; returned before anything is durable. Safe to use from any thread.

    Not keeping it is fine: a failure is raised by the checkpointer's next `save`, `step`, `wait`
    or `close` unless :meth:`result` or :meth:`staged` of this handle has raised it before.
    """

    __slots__ = ("_progress",)

    def __init__(self, progress: SaveProgress) -> None:
        self._progress = progress

    @property
    def step(self) -> int:
        return self._progress.step

    @property
    def run(self) -> str:
        return self._progress.run

    @property
    def skipped(self) -> str | None:
        """The `on_busy` policy that dropped this save, or None."""
        return self._progress.dropped

    def done(self) -> bool:
        """Whether the save has ended: durable, failed or skipped. Never blocks.

        In a forked child, `StateError` (kind "forked") when it was in flight at the fork.
        """
        self._progress.check_process()
        return self._progress.is_done

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the saved tensors may be modified by any means.

        Raises this save's error when it failed, and `StateError` (kind "pending") when `timeout`
        seconds went by, or (kind "forked") as :meth:`done`.
        """
        self._wait(self._progress.wait_staged, timeout, "staged")
        if self._progress.is_done:
            self._progress.raise_error()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the step is durable and return its figures.

        Raises this save's error when it failed, `StateError` (kind "skipped") when it was dropped
        by `on_busy`, and `StateError` (kind "pending") when `timeout` seconds went by; the save
        itself goes on in that case. In a forked child as :meth:`done`.
        """
        self._wait(self._progress.wait_done, timeout, "durable")
        self._progress.raise_error()
        report = self._progress.report
        assert report is not None
        return report

    def _wait(self, wait: Callable[[float | None], bool], timeout: float | None, what: str) -> None:
        limit = check_seconds("timeout", timeout)
        self._progress.check_process()
        if self._progress.is_done:
            return
        if not wait(0):
            refuse_waiting(self._progress.owner)
        if not wait(limit):
            raise StateError(
                f"step {self.step} is not {what} after {limit:g} s",
                kind="pending",
                hint="the save goes on; ask again",
                step=self.step,
            )

    def __repr__(self) -> str:
        progress = self._progress
        if progress.dropped is not None:
            status = f"skipped by {progress.dropped}"
        elif progress.error is not None:
            status = f"failed: {progress.error.message}"
        elif progress.report is not None:
            status = f"durable as commit {progress.report.commit}"
        else:
            status = "staged" if progress.is_staged else "in flight"
        return f"<Save of {self.run}@{self.step}: {status}>"

"""The way of a save from the training thread to the disk: one staging thread, one finishing thread.

::

    training thread   submit(capture) ----------------------------- lock() waits for "unlocked"
    staging thread         begin . detect . copy to the ring . finish
    writer                              hash . encode . write . sync . commit . retention
    finishing thread                                                report . observers

At most :data:`MAX_IN_FLIGHT` saves are accepted and not yet ended. Each must be durable
`durable_timeout` seconds after it was accepted, or it fails and its writer is ended. The clock for
that leaves out when the process was stopped (SIGSTOP, a suspended job).

Lock order: that of `_condition` is taken before anything inside the writer client.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec
from deltackpt_store.client import Outcome, WriterClient
from deltackpt_store.errors import DeltackptError, StateError
from deltackpt_store.leases import Hold
from deltackpt_store.manifest import Commit, Layout
from deltackpt_store.protocol import AdamTensors, Committed
from deltackpt_store.store import Store

from . import events, lifecycle
from .adam import AdamStates
from .baseline import Baseline, Baselines, proven_table
from .calls import in_background
from .capture import Capture
from .cuda.split import SplitStager
from .failures import Failures
from .options import Options
from .outcome import given_up, report_of, soon, timed_out, typed_error
from .report import SaveProgress, SaveReport
from .restless import Restless, is_torn
from .save_task import Request, Task
from .stage import Job, Stager, versions_of, with_copies
from .steporder import StepOrder
from .waiting import Condition
from .witness import Notary
from .writerlink import WriterLink

_log = logging.getLogger("deltackpt")

MAX_IN_FLIGHT = 2
_LOST = ("store-vanished", "collected")
"""Kinds of errors after which nothing that was stored before is sure to be there."""
_EXIT_SECONDS = 60.0
_TICK_SECONDS = 1.0
_STOPPED_SECONDS = 2.0
"""A sleep this much longer than asked for means that the whole process was stopped."""


class SavePipeline:
    """Owns the threads, the writer, the change tables and the saves in flight.

    Nothing here may be used in a forked child.
    """

    def __init__(
        self,
        store: Store,
        options: Options,
        observers: events.Observers,
        order: StepOrder,
        stager: Stager | None = None,
    ) -> None:
        seed = secrets.randbits(64)
        self._store, self._options, self._observers = store, options, observers
        self._order = order
        self._stager = stager or SplitStager(seed=seed, threads=options.threads)
        self._notary = Notary(seed)
        self._link = WriterLink(
            store.path, options, seed, max_in_flight=MAX_IN_FLIGHT, on_result=self._on_result,
            on_retired=self._on_retired,
        )  # fmt: skip
        self._condition = Condition()
        self._tasks: list[Task] = []  # accepted and not ended, in order
        self._baselines = Baselines()
        self._layout: tuple[Layout, bytes] | None = None
        self._adam: AdamStates | None = None
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = False
        self._expecting = False  # a writer is to be started ahead
        self._stopped = 0.0  # seconds
        self._threads: list[threading.Thread] = []
        self.last: SaveReport | None = None
        """The newest durable save."""
        self._held: Hold | None = None
        self.restless = Restless()
        self.failures = Failures(self._condition.lock)

    # training thread -------------------------------------------------------------------------

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Steps accepted and neither durable nor failed, oldest first."""
        return tuple(
            task.progress.step
            for task in tuple(self._tasks)
            if task.request is not None and not task.progress.is_done
        )

    @property
    def busy(self) -> bool:
        """Whether :meth:`submit` has to wait."""
        return len(self.in_flight) >= MAX_IN_FLIGHT

    def wait_room(self) -> None:
        """Wait until another save may be submitted.

        Raises `StorageError` (kind "timeout") naming the stuck step after `durable_timeout`.
        """
        if not self._until(
            self._deadline(), lambda left: self._condition.wait_for(lambda: not self.busy, left)
        ):
            raise timed_out("durable", self.in_flight[0], self._options.durable_timeout)

    def expect(self) -> None:
        """Training has begun: have a writer process at hand. Never blocks; for any thread."""
        with self._condition.lock:
            if self._stopping:
                return
            self._expecting = True
            with contextlib.suppress(StateError):  # the save will try again, and report it
                self._start_threads()
            self._condition.notify_all()

    def submit(self, request: Request, capture: Capture, started: float) -> SaveProgress:
        """Accept a save; returns at once. The caller has seen to it that there is room."""
        progress = SaveProgress(self._options.run, request.step, self.failures.told, started)
        progress.owner = self
        task = Task(progress, self._deadline(), capture, request)
        task.versions = versions_of(capture.sources)
        task.marks = self._stager.mark(capture.sources)
        if request.overlap:
            task.witness = self._notary.note(capture.layout, capture.sources)
        self.failures.accepted(progress)
        progress.captured()
        self._accept(task)
        return progress

    def restored(self, commit: Commit, capture: Capture | None) -> None:
        """The live objects now hold `commit`: later saves continue it. Nothing is in flight.

        With a `capture` of the restored objects, all of it live, the change table is made ready in
        the background, so that the next save stages only what training changed.
        """
        with self._condition.lock:
            self.failures.restored()
            self._baselines.restored(commit)
            self._order.restored(commit)
        if capture is not None:
            progress = SaveProgress(
                commit.run, commit.step, self.failures.told, time.perf_counter()
            )
            task = Task(progress, self._deadline(), capture, restored=commit)
            task.marks = self._stager.mark(capture.sources)
            self._accept(task)

    def hold(self, held: Hold | None) -> None:
        """Keep the hold on what training continues, until a save is durable, or the end."""
        with self._condition.lock:
            before, self._held = self._held, held
        if before is not None:
            before.release()

    def lock(self) -> None:
        """Wait until no live tensor is being read; the time counts as stall of the saves.

        A save that cannot let go before its deadline is given up instead. For any thread.
        """
        for task in tuple(self._tasks):
            progress = task.progress
            if progress.is_unlocked:
                continue
            progress.waiting()
            if not self._until(task.deadline, progress.wait_unlocked):
                self._give_up(task)

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is in flight; False after `timeout` seconds. For any thread."""
        self._actions.put(_nothing)
        with self._condition.lock:
            self._condition.notify_all()  # a signal handler may have raised before `_accept` did
        return self._condition.wait_for(lambda: not self._tasks, timeout)

    def close(self, timeout: float) -> None:
        """End the threads and the writer once all is done; gives up waiting after `timeout`."""
        deadline = time.monotonic() + timeout
        self.abandon()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def abandon(self) -> None:
        """Let the pipeline end by itself once all is done. Never blocks; for any thread."""
        with self._condition.lock:
            self._stopping = True
            self._condition.notify_all()
        if not self._threads:
            self.hold(None)

    def finish_at_exit(self) -> None:
        """At interpreter exit: a bounded time for what is in flight. Raises nothing."""
        self.close(min(_EXIT_SECONDS, self._options.durable_timeout))
        for step in self.in_flight:
            _log.warning("step %d was not durable when the interpreter ended", step)

    def _accept(self, task: Task) -> None:
        with self._condition.lock:
            if self._stopping:  # nobody would take it any more
                raise StateError(
                    "saving has ended, because the interpreter is ending",
                    kind="closed",
                    hint="save before that; what atexit is to call must be registered after "
                    "deltackpt is imported",
                )
            self._start_threads()
            self._tasks.append(task)
            self._condition.notify_all()
        self._actions.put(_nothing)  # the finishing thread learns of the new deadline

    def _start_threads(self) -> None:
        """Start both or none, also when a signal handler raises here. Within `_condition`."""
        if self._threads:
            return
        threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"deltackpt-{name}", daemon=True)
            for name, loop in (("finish", self._finish_loop), ("stage", self._stage_loop))
        ]
        lifecycle.register(self)
        try:
            for thread in threads:
                thread.start()
            self._threads = threads
        except BaseException as error:
            if not self._threads:
                lifecycle.unregister(self)
            if not isinstance(error, RuntimeError):
                raise
            raise StateError(  # the system gives no more threads: try again next time
                f"no thread can be started for saving: {error}",
                kind="no-thread",
                hint="raise the limit on threads, processes or memory (ulimit -u, -v)",
            ) from error

    def _run(self, loop: Callable[[], None]) -> None:
        """Do a thread's work, once it is known that both could be started."""
        with self._condition.lock:
            if threading.current_thread() not in self._threads:
                return
        loop()

    def _now(self) -> float:
        return time.monotonic() - self._stopped

    def _deadline(self) -> float:
        return self._now() + self._options.durable_timeout

    def _until(self, deadline: float, wait: Callable[[float], bool]) -> bool:
        """`wait`, which is told for how many seconds, until it says True; False at the deadline.

        The finishing thread gets the time to notice that the process was stopped.
        """
        while True:
            left = deadline - self._now()
            if wait(max(_TICK_SECONDS, left)):
                return True
            if left <= 0 and deadline <= self._now():
                return False

    # staging thread --------------------------------------------------------------------------

    def _stage_loop(self) -> None:
        in_background(self)
        with contextlib.ExitStack() as ends:  # each in turn, whatever the others raise
            ends.callback(self._actions.put, None)
            ends.callback(self._stager.close)
            ends.callback(self._link.close, self._options.durable_timeout)
            going_on = True
            while going_on:
                try:
                    going_on = self._stage_next()
                except Exception:  # as for lack of memory; what waits for this thread must not hang
                    _log.exception("a save could not be staged")
            self.wait_idle()

    def _stage_next(self) -> bool:
        """Wait for a task and do it; False when no more will come."""
        task = self._next_task()
        if task is None:
            return False
        if task.restored is not None:
            self._prepare_baseline(task, task.restored)
        else:
            self._stage(task)
        return True

    def _next_task(self) -> Task | None:
        def first() -> Task | None:
            return next((task for task in self._tasks if not task.taken), None)

        while True:
            self._condition.wait_for(
                lambda: self._stopping or self._expecting or first() is not None
            )
            with self._condition.lock:
                self._expecting = False
                task = first()
                if task is not None:
                    task.taken = True
                if task is not None or self._stopping:
                    return task
            self._link.prepare()

    def _prepare_baseline(self, task: Task, commit: Commit) -> None:
        capture = task.capture
        try:
            chunks = self._stager.hash_all(capture.layout, capture.sources, task.marks)
            table = proven_table(self._store, commit, chunks)
            with self._condition.lock:
                self._baselines.proven(table, commit)
        except Exception as error:  # only the next save's speed depends on this
            _log.debug("no change table from step %d: %s", commit.step, error)
        finally:
            capture.release()
            self._end(task)

    def _stage(self, task: Task) -> None:
        assert task.request is not None
        try:
            if not task.progress.is_done:
                self._hand_over(task, task.request)
        except BaseException as error:
            self._fail(task, typed_error(error))
            if task.client is not None:
                with contextlib.suppress(DeltackptError):
                    task.client.abort(task.save)
        finally:
            task.capture.release()
            task.versions.clear()

    def _hand_over(self, task: Task, request: Request) -> None:
        progress, capture = task.progress, task.capture
        client = self._link.get(capture.state_bytes)
        if not client.wait_room(max(0.0, task.deadline - self._now())):
            raise timed_out("staged", request.step, self._options.durable_timeout)
        baseline = self._begin(task, request, client)
        staging = self._stager.stage(
            Job(
                save=task.save, layout=capture.layout, sources=capture.sources,
                table=baseline.table, versions=task.versions,
                deadline=task.deadline + self._stopped, unlock=progress.mark_unlocked,
                cancelled=lambda: progress.is_done, marks=task.marks, witness=task.witness,
                reached=progress.mark_reached,
            ),
            client,
        )  # fmt: skip
        staging = with_copies(staging, capture.figures)
        with self._condition.lock:
            if progress.error is not None:
                raise progress.error
            task.staging = staging
            self._baselines.staged(staging.table, client, task.save)
        progress.mark_staged()
        self._observers(
            events.Staged(
                progress.run, progress.step, progress.staged_seconds, staging.staged_bytes
            )
        )
        client.finish(
            task.save, objects=capture.objects, inline=capture.inline,
            environment=request.environment, metrics=request.metrics,
            counters={
                "stall_seconds": progress.stall,
                "staged_seconds": progress.staged_seconds,
                "skipped": float(request.skipped),
            },
        )  # fmt: skip

    def _begin(self, task: Task, request: Request, client: WriterClient) -> Baseline:
        """Open the save at the writer; returns what it is relative to."""
        if self._layout is None or self._layout[0] is not task.capture.layout:
            self._layout = (task.capture.layout, msgspec.msgpack.encode(task.capture.layout))
        adam = self._adam_tensors(task.capture)
        with self._condition.lock:  # held, so that no outcome comes before the save is known
            baseline = self._baselines.best_for(client)
            named = any(t.names_parent for t in self._tasks)
            parent = None if named else self._baselines.parent
            task.save = client.begin(
                step=request.step, layout=self._layout[1], overwrite=request.overwrite,
                relative=baseline.save if baseline.commit is None else None,
                relative_commit=baseline.commit, parent=parent, adam=adam,
            )  # fmt: skip
            task.client, task.names_parent = client, parent is not None
            return baseline

    def _adam_tensors(self, capture: Capture) -> list[AdamTensors]:
        """What the writer needs to know to predict optimizer states, if it is to."""
        if not self._options.shadow:
            return []
        if self._adam is None or self._adam.layout is not capture.layout:
            self._adam = AdamStates(capture)
        return self._adam.tensors(capture)

    # finishing thread ------------------------------------------------------------------------

    def _on_result(self, client: WriterClient, save: int, outcome: Outcome) -> None:
        self._actions.put(partial(self._settle, client, save, outcome))

    def _finish_loop(self) -> None:
        in_background(self)
        while True:
            try:
                action = self._next_action()
                if action is None:
                    break
                action()
            except Exception:
                _log.exception("the end of a save could not be handled")
        self.hold(None)
        lifecycle.unregister(self)

    def _next_action(self) -> Callable[[], None] | None:
        """What there is to do next, for which this waits; None at the end."""
        deadlines = [task.deadline for task in tuple(self._tasks)]
        timeout = None
        if deadlines:
            timeout = max(0.0, min(_TICK_SECONDS, min(deadlines) - self._now()))
        begun = time.monotonic()
        try:
            action = self._actions.get(timeout=timeout)
        except queue.Empty:
            action = self._give_up_overdue
        if timeout is not None:
            late = time.monotonic() - begun - timeout
            self._stopped += late if late > _STOPPED_SECONDS else 0.0
        return action

    def _give_up_overdue(self) -> None:
        for task in tuple(self._tasks):
            if task.deadline <= self._now():
                self._give_up(task)

    def _settle(self, client: WriterClient, save: int, outcome: Outcome) -> None:
        with self._condition.lock:
            task = next((t for t in self._tasks if t.client is client and t.save == save), None)
        if isinstance(outcome, DeltackptError):
            if task is not None and not task.given_up:
                self._fail(task, outcome)
        elif task is not None:
            self._commit(task, client, outcome)
        else:
            _log.warning(
                "step %d, whose save had been given up, is durable all the same, and on the list"
                " of run %r", outcome.step, outcome.run,
            )  # fmt: skip

    def _commit(self, task: Task, client: WriterClient, outcome: Committed) -> None:
        """End a save as durable, once."""
        staging, request = task.staging, task.request
        assert staging is not None
        assert request is not None
        report = report_of(task.progress, staging, client, outcome, skipped=request.skipped)
        with self._condition.lock:
            if task.committed or task.progress.is_done:
                return
            task.committed = True
            commit = (outcome.run, outcome.number)
            self._baselines.committed(staging.table, client, task.save, commit)
            self._order.committed(outcome.step)
            self.last = report
        self._order.left_unseen(outcome.step, outcome.number)
        self.hold(None)
        task.progress.commit(report)
        self._observers(events.Committed(outcome.run, outcome.step, report))
        self._end(task)

    def _on_retired(self, step: int, removed: list[int]) -> None:
        """Called on a client's receiving thread, after the result of the save of `step`."""
        event = events.Compacted(self._options.run, step, tuple(removed))
        self._actions.put(lambda: self._observers(event))

    # any thread ------------------------------------------------------------------------------

    def _give_up(self, task: Task) -> None:
        """End an overdue task, and the writer that does not get on with it."""
        progress, client = task.progress, task.client
        if task.request is None or progress.is_done:
            pass
        elif client is not None and progress.is_staged:
            self._take_last_word(task, client)
        else:
            try:
                error = timed_out("staged", progress.step, self._options.durable_timeout)
                self._fail(task, error)
            finally:  # an observer may exit in the main thread, in which lock() gives a save up
                if client is not None:
                    self._link.end_stuck(client, task.save)
        self._end(task)

    def _take_last_word(self, task: Task, client: WriterClient) -> None:
        """End the writer of an overdue save, which is durable if it has just said so."""
        task.given_up = True
        outcome = self._link.end_stuck(client, task.save)
        if outcome is not None:
            self._commit(task, client, outcome)
            return
        step, seconds = task.progress.step, self._options.durable_timeout
        listed = soon(_TICK_SECONDS, lambda: self._is_listed(step, client.writer_id))
        self._fail(task, given_up(step, seconds, listed), given_up=True)

    def _is_listed(self, step: int, writer: str) -> bool:
        """Whether a commit of `step` by that writer can be seen. For any thread; reads the disk."""
        run = self._options.run
        newest = self._store.numbers(run)[-MAX_IN_FLIGHT:]
        commits = [self._store.read_commit(run, number) for number in newest]
        return any((commit.step, commit.writer) == (step, writer) for commit in commits)

    def _fail(self, task: Task, error: DeltackptError, *, given_up: bool = False) -> None:
        """End a save as failed, once; one that is `given_up` with nothing but that."""
        with self._condition.lock:
            if task.committed or task.given_up != given_up or not task.progress.fail(error):
                return
            self.failures.failed(task.progress, error)
            self._baselines.failed(lost=error.kind in _LOST)
        try:
            error.context.setdefault("step", task.progress.step)
            error.context.setdefault("run", task.progress.run)
            if is_torn(error):
                self.restless.met(task.progress.step, error)
            else:
                _log.error("the save of step %d failed: %s", task.progress.step, error)
            self._observers(events.Failed(task.progress.run, task.progress.step, error))
        finally:
            self._end(task)

    def _end(self, task: Task) -> None:
        task.progress.mark_unlocked()
        with self._condition.lock:
            if task in self._tasks:
                self._tasks.remove(task)
            self._condition.notify_all()


def _nothing() -> None:
    """Wakes the finishing thread."""

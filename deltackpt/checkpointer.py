"""The hook in the training loop: save often, go on at once, resume exactly."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, cast

from deltackpt_store.errors import (
    ConflictError,
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    NotFoundError,
    StateError,
)
from deltackpt_store.manifest import Commit
from deltackpt_store.names import check_step
from deltackpt_store.presence import check_there
from deltackpt_store.store import Store

from .best_metric import BestMetric
from .buffers import BufferPool
from .calls import Calls, refuse_waiting
from .capture import Capture, capture, everything
from .compaction import Compact, Compactions, check_compact
from .events import Observer, Observers, Preempted, Skipped
from .guard import Guard, has_optimizer
from .keys import KeyMap
from .lifecycle import SaveSignals, check_signals
from .options import (
    CHUNK_BYTES,
    check_flags,
    check_metrics,
    check_options,
    entries_of,
    note_metrics,
)
from .pipeline import MAX_IN_FLIGHT, SavePipeline
from .policy import Codec, Due, DueFunction, Every, Keep, OnBusy, OnError, check_seconds
from .remarks import environment, warn_of_missing_parameters
from .report import Save, SaveProgress, SaveReport
from .restore import Restored, restore_and_hold
from .save_task import Request
from .state_check import check_state
from .steporder import StepOrder

_log = logging.getLogger("deltackpt")


class Checkpointer:
    """Saves the state of a training run into a store, and puts it back.

    ::

        state = {"model": model, "optimizer": optimizer}
        ckpt = deltackpt.Checkpointer("runs/store", state, every=50)
        with ckpt:
            last = ckpt.restore()
            for step in range(last.step + 1 if last else 0, steps):
                ...
                optimizer.step()
                ckpt.step(step)

    **What `save` promises.** It returns as soon as the state is captured. The saved values are
    those of the moment of the call. What an optimizer owns is read during the next forward and
    backward pass and is locked until then: the optimizer's `step` waits for that automatically (a
    global pre-hook); all other code that modifies parameters in place must call :meth:`lock` first.
    If a tensor was modified nevertheless, the save fails with `CorruptionError` (kind "torn")
    naming it, as far as PyTorch's version counters and the bytes show the change; nothing mixed is
    committed then. The next :meth:`step` makes up for it: it saves, whether due or not, and so does
    :meth:`close` with `final`. From then on such tensors are copied before `save` returns, as is
    everything that the optimizer does not own, except frozen parameters that show no sign of having
    changed.
    Until an optimizer step or a :meth:`lock` has been seen, and with ``overlap=False``, `save`
    returns only once nothing needs to be locked any more.

    **What is durable.** A step exists, and survives a loss of power, once the `result` of its
    handle, :meth:`wait` or :meth:`close` has returned, or observers get `Committed`. With a
    writer process, a trainer that is killed loses no save that is staged and handed over.

    **Objects of your own** are asked for their `state_dict` inside of `save`. A data loader's must
    say what the loop has taken from it, not what its workers have prefetched. Save after complete
    steps, not between taking a batch and using it: then a resumed run sees each sample once.

    **Errors.** The error of a save that fails in the background is raised once: by the next
    :meth:`save`, :meth:`step`, :meth:`wait` or :meth:`close`, or by the `result` of its own handle.
    That of a torn save is not raised by `step` and `save`, which make up for it. Earlier steps stay
    restorable and the failed step can be saved again. With ``on_error="warn"``, :meth:`step` logs
    failures and never raises them.

    **Threads.** One thread at a time calls `save`, `step`, `restore` and `close`: the training
    thread, or another one while that waits. A save while another thread is inside of the step of an
    optimizer of the state is refused: `StateError`, kind "mid-step". What other threads write to
    copied tensors during a call of `save` (as far as PyTorch counts it) is copied again, until all
    copies are those of one moment; when that does not come to an end, `save` raises the error of a
    torn save, and the next `step` saves. `lock` and the handles may be used from any thread,
    `preempted` and `should_save` also from signal handlers.
    In a forked child every call raises `StateError` (kind "forked").
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        state: Mapping[Any, Any],
        *,
        run: str = "main",
        every: int | Every | DueFunction | None = None,
        keep: Keep | None = None,
        writer: Literal["process", "thread"] = "process",
        ring_bytes: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        codec: Codec = "auto",
        shadow: bool = False,
        overlap: bool = True,
        on_busy: OnBusy = "wait",
        on_error: OnError = "raise",
        durable_timeout: float | None = 600.0,
        lock_timeout: float | None = 60.0,
        rng: bool = True,
        save_on: Sequence[int] = (),
        observers: Sequence[Observer] = (),
        threads: int | None = None,
        final: bool = True,
        mode: int | None = None,
        compact: Literal["auto"] | Compact | None = None,
    ) -> None:
        """Open the store (made when there is none) and check everything that can be checked.

        `state` maps names to objects with `state_dict` (and `load_state_dict`), tensors, and nested
        dicts, lists and tuples of tensors and plain values; it is read anew at every save.
        `run`: the lineage to continue. `every`: when `step` saves, see :class:`Every`; None: never.
        `keep`: retention after each durable step. `writer`: a process of its own, or a thread.
        `ring_bytes`: bound of the staging memory; by default the smaller of the state's size and
        half of the free memory. `chunk_bytes`: unit of detection and storage.
        `codec`: "auto", "fast", "small" or "none". `shadow`: let the writer keep up to twice the
        state in memory, to code against it without reading, and to predict what Adam and AdamW make
        of their state in one step: saves of every step then take a quarter to a third of the bytes.
        `overlap`: stage while training goes on. `on_busy`: what a save does while two are in
        flight: "wait"; "skip" it; or "coalesce": take no save now, but one at the first later call
        of `step` or `save` that finds room, of the state and under the step of *that* call.
        `durable_timeout`: seconds a save may take from call to durable; no call blocks longer.
        `lock_timeout`: seconds to wait for an earlier writer of this run that is still finishing,
        or for another trainer of it. None is no limit, for both.
        `rng`: include the random number generators. `save_on`: signals after which the next `step`
        saves. `threads`: hashing and copying threads, by default the smaller of 4 and the cores.
        `final`: save the newest step passed to `step` at close, with its metrics, when it was not
        saved.
        `mode`: permission bits of a new store. `compact`: compact the store now and then, in a
        process of low priority that ends with this object; "auto" or :class:`Compact`. Its failures
        are logged and told to observers, and touch neither training nor saved steps.

        Raises `InvalidInputError` naming the option, or the path of a value in `state` that can
        never be saved, and what opening a store raises.
        """
        options = check_options(
            run=run, every=every, keep=keep, writer=writer, ring_bytes=ring_bytes,
            chunk_bytes=chunk_bytes, codec=codec, shadow=shadow, overlap=overlap, on_busy=on_busy,
            on_error=on_error, durable_timeout=durable_timeout, lock_timeout=lock_timeout,
            rng=rng, threads=threads, final=final,
        )  # fmt: skip
        compacting = check_compact(compact)
        save_on = check_signals(save_on)
        _refuse_empty(state)
        check_state(state)
        self._options, self._state = options, state
        self._observers = Observers(observers)
        self._store = Store.create(store, mode=mode)
        self._store.check_spelling(options.run)
        self._order = StepOrder(self._store, options.run)
        self._best = BestMetric(self._store, options.run, options.keep)
        self._pipeline = SavePipeline(self._store, options, self._observers, self._order)
        self._signals = SaveSignals(save_on)
        self._due = Due(options.every)
        self._compactions = (
            None
            if compacting is None
            else Compactions(self._store.path, options.run, compacting, self._observers)
        )
        if self._compactions is not None:
            weakref.finalize(self, self._compactions.end).atexit = False
        self._pool = BufferPool()
        self._calls = Calls()
        self._previous: Capture | None = None
        self._environment = environment()
        self._guard = Guard(self._pipeline)
        self._skipped = 0
        self._by_hand = False  # lock() was called since the last save
        self._deferred = False
        self._newest_step: int | None = None
        self._newest_metrics: dict[str, Any] = {}
        self._saved_step: int | None = None
        self._warned = False
        self._released = False
        self._finalizer = weakref.finalize(self, self._guard.let_go)
        self._finalizer.atexit = False

    # saving ----------------------------------------------------------------------------------

    def save(
        self, step: int, metrics: Mapping[str, float] | None = None, *, overwrite: bool = False
    ) -> Save:
        """Save the state as `step`; returns once it is captured (see the class).

        `step` must be larger than that of the run's newest step (the one restored, if `restore`
        was called); with `overwrite` it may be any, and the older step of that number stays until
        this one is durable. Later steps than the one continued leave the list of the run, with a
        warning that names them. `metrics` are stored with the step.
        Raises an earlier save's failure first; `ConflictError` for a step that exists already;
        `InvalidInputError` naming the path of a value that cannot be saved; `StorageError` (kind
        "timeout") when on_busy="wait" waited `durable_timeout` seconds.
        """
        check_flags(overwrite=overwrite)
        refuse_waiting(self._pipeline)
        with self._calls.exclusive():
            self._raise_failure(torn=False)
            return self._save(step, metrics, overwrite=overwrite)

    def step(self, step: int, metrics: Mapping[str, float] | None = None) -> Save | None:
        """Tell that training step `step` is complete; saves when due. Call it once per step.

        Due are: what `every` says, a signal of `save_on` that has arrived, a save that
        on_busy="coalesce" put off, and one in place of a save that failed as torn. Returns the
        handle of a save, or None. Raises as :meth:`save`; with on_error="warn", failures of saves
        are logged instead.
        """
        refuse_waiting(self._pipeline)
        with self._calls.exclusive():
            number = check_step(step)
            if self._options.on_error == "raise":
                self._raise_failure(torn=False)
                return self._step(number, metrics)
            try:
                failure = self._pipeline.failures.take(torn=False)
                if failure is not None:
                    _log.warning("training goes on although a save failed: %s", failure)
                return self._step(number, metrics)
            except DeltackptError as error:
                if isinstance(error, StateError) and error.kind != "state-failed":
                    raise
                _log.warning("training goes on although step %d was not saved: %s", number, error)
                return None

    def should_save(self, step: int | None = None) -> bool:
        """Whether a save is wanted now: a signal arrived, one was put off or torn, `step` is due.

        May be polled anywhere, for example within a long evaluation, to call :meth:`save` there.
        Signals are a courtesy of the scheduler; what bounds the work you can lose is how often you
        save.
        """
        self._calls.check_open()
        if self._signals.pending or self._deferred or self._pipeline.failures.torn:
            return True
        return step is not None and self._due.is_due(check_step(step))

    @property
    def preempted(self) -> bool:
        """Whether a signal of `save_on` has ever arrived: leave the loop after the next `step`."""
        self._calls.check_process()
        return self._signals.received is not None

    @property
    def last(self) -> SaveReport | None:
        """The report of the newest save of this object that is durable."""
        self._calls.check_process()
        return self._pipeline.last

    def lock(self) -> None:
        """Wait until saved tensors may be modified; call it before modifying them by hand.

        Not needed around `step` of a `torch.optim.Optimizer`, which calls it by itself. Never
        raises for a failed save; blocks at most `durable_timeout` seconds.
        """
        self._calls.check_open()
        refuse_waiting(self._pipeline)
        self._by_hand = True
        self._guard.lock()

    def _step(self, step: int, metrics: Mapping[str, float] | None) -> Save | None:
        before = self._newest_step, self._newest_metrics
        self._newest_step, self._newest_metrics = step, {}
        self._newest_metrics = metrics = note_metrics(metrics)
        must = self._signals.pending
        if must or self._deferred or self._pipeline.failures.torn or self._due.is_due(step):
            try:
                return self._save(step, metrics, must=must)
            except ConflictError as error:
                if error.kind == "step-exists":  # refused for good: not for close to try again
                    self._newest_step, self._newest_metrics = before
                raise
        self._due.seen(step, started=False)
        return None

    def _save(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        *,
        overwrite: bool = False,
        must: bool = False,
    ) -> Save:
        started = time.perf_counter()
        step, checked = check_step(step), check_metrics(metrics)
        state = entries_of(self._state, "state")
        _refuse_empty(state)
        self._guard.refuse_half_a_step(state)
        if step == self._newest_step and checked:
            self._newest_metrics = dict(checked)
        if not overwrite:
            self._order.check(step, self._pipeline.in_flight)
        self._order.leave(step)
        self._best.saving(step, checked)
        self._due.seen(step, started=True)
        if self._pipeline.busy:
            if self._options.on_busy != "wait" and not must:
                return self._drop(step, started)
            self._pipeline.wait_room()
        overlap = self._may_overlap(state)
        previous = self._previous
        by_hand, self._by_hand = self._by_hand, False
        try:
            captured = capture(
                state,
                chunk_bytes=self._options.chunk_bytes,
                rng=self._options.rng,
                live=None if overlap else everything,
                previous=previous,
                pool=self._pool,
                copied=self._pipeline.restless.paths if overlap else (),
                by_hand=by_hand,
            )
        except CorruptionError:  # another thread went on writing to a tensor
            self._deferred = True
            raise
        try:
            self._guard.refuse_half_a_step(state)
        except StateError:  # which has begun since
            captured.release()
            self._deferred = True
            raise
        if captured.signs and not self._pipeline.failures.comparable:
            overlap = False  # nothing could prove that what ought to be still has been so
        if not self._warned and (previous is None or previous.layout is not captured.layout):
            self._warned = warn_of_missing_parameters(captured)
        self._previous = captured
        request = Request(
            step=step, metrics=checked, environment=self._environment, overwrite=overwrite,
            overlap=overlap, skipped=self._skipped,
        )  # fmt: skip
        progress = self._pipeline.submit(request, captured, started)
        if self._compactions is not None:
            self._compactions.start()
        self._skipped, self._deferred = 0, False
        newest, saved = self._newest_step, self._saved_step
        self._saved_step = step
        if newest is not None and step > newest:  # a `save` after the loop
            self._newest_step, self._newest_metrics = step, dict(checked)
        elif newest is not None and step < newest == saved:  # back, from a step that was saved
            self._newest_step = None
        if not overlap:
            self._pipeline.lock()
        number = self._signals.take()
        if number is not None:
            _log.warning("signal %d: step %d is being saved; training may end now", number, step)
            self._observers(Preempted(self._options.run, step, number))
        return Save(progress)

    def _may_overlap(self, state: Mapping[Any, Any]) -> bool:
        """Whether training may go on while a save that begins now reads live tensors."""
        return (
            self._options.overlap
            and self._guard.seen
            and not self._guard.replayed
            and not self._pipeline.failures.torn
            and self._pipeline.restless.overlap
            and has_optimizer(state)
        )

    def _drop(self, step: int, started: float) -> Save:
        """A save that on_busy skips; with "coalesce" a later call does it instead."""
        policy = self._options.on_busy
        progress = SaveProgress(self._options.run, step, _no_delivery, started)
        self._skipped += 1
        if policy == "coalesce":
            self._deferred = True
        progress.drop(policy)
        _log.info("step %d is not saved: %d saves are in flight", step, MAX_IN_FLIGHT)
        self._observers(Skipped(self._options.run, step, policy))
        return Save(progress)

    # restoring -------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        run: str | None = None,
        strict: bool = True,
        only: str | Iterable[str] | None = None,
        key_map: KeyMap | None = None,
        low_memory: bool = False,
    ) -> Restored | None:
        """Put a committed step into the live objects; None when the run has no step yet.

        Without `step`, the newest that verifies; `run` names another run to start from (or a step
        of it, as ``RUN@STEP``), which must be in the store once anything is. What each
        object gets, and what the other options mean, is told by `deltackpt.restore_into`. Waits
        first until no save is in flight. Afterwards saves continue the restored step: the next one
        must be of a later step, and writes only what has changed since. Until that one is durable,
        retention and collection leave the restored step alone. With `only`, which takes
        parts of a step, saves go on as before.

        Raises what `restore_into` raises; `StorageError` (kind "store-vanished") when the store is
        not there any more; `NotFoundError` for a step whose save has failed has that failure as
        its cause.
        """
        refuse_waiting(self._pipeline)
        own = self._options.run
        with self._calls.exclusive():
            self._wait_idle(None)
            self._check_there()
            try:
                restored, held = restore_and_hold(
                    self._store, self._state, run=own if run is None else run, step=step,
                    strict=strict, only=only, key_map=key_map, low_memory=low_memory,
                    rng=self._options.rng, threads=None, expected=run not in (None, own),
                )  # fmt: skip
            except NotFoundError as error:
                failure = self._pipeline.failures.take()
                if failure is None:
                    raise
                raise error from failure
            if restored is None:
                return None
            if only is None:
                self._pipeline.hold(held)
                self._continue_from(restored.commit)
            elif held is not None:
                held.release()
            self._observers(restored)
            return restored

    def steps(self) -> list[int]:
        """The steps of this run that can be restored, oldest first; empty for a new run.

        Raises `StorageError` (kind "store-vanished") when the store is not there any more.
        """
        self._calls.check_open()
        self._check_there()
        try:
            return self._store.steps(self._options.run)
        except NotFoundError:
            return []

    def _check_there(self) -> None:
        """A store that is gone must not look like a new one, nor another one like this."""
        check_there(self._store.io, self._store.path, self._store.uuid)

    def _continue_from(self, commit: Commit) -> None:
        """The live objects hold `commit` now: steps, intervals and change tables start there."""
        captured: Capture | None = None
        try:
            captured = capture(
                self._state,
                chunk_bytes=self._options.chunk_bytes,
                rng=self._options.rng,
                live=everything,
            )
        except DeltackptError as error:  # the next save will say so
            _log.debug("the restored state cannot be saved: %s", error)
        self._previous = captured
        self._pipeline.restored(commit, captured)
        self._newest_step = self._saved_step = None
        self._deferred = False
        self._due.seen(commit.step, started=True)

    # waiting and closing ---------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is durable; raises the first failure that nobody was told yet.

        Raises `StateError` (kind "pending") after `timeout` seconds; saves go on in that case.
        """
        self._calls.check_open()
        refuse_waiting(self._pipeline)
        self._wait_idle(check_seconds("timeout", timeout))
        self._raise_failure()

    def close(self) -> None:
        """Save what is left to save, wait until all is durable, end the writer. Idempotent.

        With `final`, the newest step passed to :meth:`step` is saved once when it was not saved:
        it is the state *now* that is saved, under that step and with the metrics it was passed
        with, so close right after the loop. Raises the first
        failure that nobody was told yet, after everything has been released. When it was
        interrupted (Ctrl-C), call it again: it ends what is left, and raises what has failed.
        """
        self._calls.check_process()
        failure: DeltackptError | None = None
        if not self._released:
            refuse_waiting(self._pipeline)
            if self._calls.closed:  # and interrupted then
                self._release()
            else:
                failure = self._finish()
        failure = failure or self._pipeline.failures.take()
        if failure is not None:
            raise failure

    def _finish(self) -> DeltackptError | None:
        """Save what is left to save, wait, release everything; what the last save failed with."""
        with self._calls.exclusive():
            try:
                self._save_final()
                self._wait_idle(None)
                self._save_torn()
            except DeltackptError as error:
                return error
            finally:
                self._release()
        return None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled or copied, as for a worker that is spawned."""
        raise StateError(
            "a Checkpointer cannot be copied nor pickled: it is tied to this process",
            kind="not-copied",
            hint="keep it out of what is sent to workers (a dataset that refers to the trainer) or"
            " copied; open the store again there",
        )

    def __enter__(self) -> Self:
        self._calls.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """As :meth:`close`. When an exception leaves the block, nothing new is saved, what is in
        flight is waited for, and failures of saves are logged, so that they do not hide it."""
        if error is None:
            self.close()
            return
        if self._calls.closed or self._calls.forked:
            return
        try:
            self._wait_idle(None)
        finally:
            self._release()
        failure = self._pipeline.failures.take()
        if failure is not None:
            _log.error("a save failed, too, before the exception: %s", failure)

    def _save_final(self) -> None:
        newest = self._newest_step
        if not self._options.final or newest is None or newest == self._saved_step:
            return
        failure = self._pipeline.failures.take(torn=False)
        if failure is not None:
            _log.warning("saving the last step although an earlier save failed: %s", failure)
        try:
            self._save(newest, self._newest_metrics, must=True)
        except DeltackptError as error:
            raise (failure or error) from error
        if failure is not None:
            self._wait_idle(None)
            raise failure

    def _save_torn(self) -> None:
        """Repeat a last save that was torn, where the loop passes its step numbers."""
        if self._options.final and self._newest_step is not None and self._pipeline.failures.torn:
            self._save(self._newest_step, self._newest_metrics, must=True)
            self._wait_idle(None)

    def _release(self) -> None:
        self._calls.closed = True
        self._pipeline.abandon()  # first: whatever interrupts the rest, its threads will end
        self._guard.remove()
        self._signals.uninstall()
        self._finalizer.detach()
        if self._compactions is not None:
            self._compactions.close()
        self._pipeline.close(self._options.durable_timeout)
        self._previous = None
        self._pool.clear()
        self._released = True

    def _wait_idle(self, timeout: float | None) -> None:
        if not self._pipeline.wait_idle(timeout):
            steps = ", ".join(map(str, self._pipeline.in_flight))
            raise StateError(
                f"not durable after {timeout:g} s: step {steps}",
                kind="pending",
                hint="the saves go on; wait again",
            )

    def _raise_failure(self, *, torn: bool = True) -> None:
        failure = self._pipeline.failures.take(torn=torn)
        if failure is not None:
            raise failure


def _refuse_empty(state: Any) -> None:
    """A step of nothing would be the newest one that restores."""
    if not isinstance(state, Mapping) or len(cast("Mapping[Any, Any]", state)) == 0:
        raise InvalidInputError(
            "state must be a mapping that is not empty, such as {'model': model}",
            option="state",
        )


def _no_delivery(progress: SaveProgress) -> None:
    """A dropped save has no error to deliver."""

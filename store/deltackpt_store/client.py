"""The trainer's end of the writer: leases of staging slots, saves in flight, their outcomes.

A :class:`WriterClient` owns one writer (process or thread), its ring and its channel. When the
writer dies, every save in flight fails at once with `WriterError` and the client is of no more
use: make a new one. Nothing here imports torch.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from deltackpt_store import protocol
from deltackpt_store.connection import Connection
from deltackpt_store.errors import (
    DeltackptError,
    InvalidInputError,
    StateError,
    StorageError,
    WriterError,
    from_wire,
)
from deltackpt_store.fileio import FileIO
from deltackpt_store.manifest import Commit
from deltackpt_store.protocol import AdamTensors, Committed, Ready, WriterOptions
from deltackpt_store.ring import DEFAULT_SLOT_BYTES, Ring, SlotPool
from deltackpt_store.standby import Standby

_log = logging.getLogger("deltackpt.writer")

Outcome = Committed | DeltackptError
KEPT_OUTCOMES = 64


class WriterClient:
    """Starts a writer and talks to it. All methods may be called from any thread.

    Buffers: what `begin`, `slot` and `finish` are given is copied before they return; a slot's
    bytes belong to the writer from `slot` on, until the ring hands the slot out again.

    In a forked child every method raises `StateError`; the child holds no end of the channel.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        run: str,
        *,
        seed: int,
        ring_bytes: int,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        mode: Literal["process", "thread"] = "process",
        options: WriterOptions | None = None,
        max_in_flight: int = 2,
        on_result: Callable[[int, Outcome], None] | None = None,
        on_retired: Callable[[int, list[int]], None] | None = None,
        io: FileIO | None = None,
        standby: Standby | None = None,
    ) -> None:
        """Start the writer and return at once; :meth:`ready` says whether it could open `store`.

        `seed` is the seed of the change hashes. `ring_bytes` bounds the staging memory (at least
        one slot). `on_result(save, outcome)` is called in the receiver thread for every save that
        ends, `on_retired(step, removed)` when retention has taken steps off the list after
        the commit of `step`; they must not block. `io` replaces the file layer, in thread mode
        only. `standby` is a process started ahead, which is taken into service (in process mode
        only); the caller ends it when this raises.
        Raises `InvalidInputError`, `StorageError` (no shared memory) and `WriterError` (the
        process cannot be started).
        """
        if mode not in ("process", "thread"):
            raise InvalidInputError(f"writer must be 'process' or 'thread', got {mode!r}")
        if io is not None and mode != "thread":
            raise InvalidInputError("a file layer can be replaced in thread mode only", option="io")
        if standby is not None and mode != "process":
            raise InvalidInputError("a thread is not started ahead", option="standby")
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._max_in_flight = max_in_flight
        self._on_result = on_result
        self._on_retired = on_retired
        self._ready: Ready | None = None
        self._error: DeltackptError | None = None
        self._closed = False
        self._gone = False  # the writer has ended
        self._asked = False
        self._next_save = 1
        self._layout: bytes | None = None
        self._unfinished: set[int] = set()
        self._pending: dict[int, None] = {}
        self._outcomes: dict[int, Outcome] = {}
        memory = -1 if standby is None else standby.take_memory()
        self._ring = Ring.create(ring_bytes, slot_bytes, memory=memory)
        self._pool = SlotPool(self._ring.slots)
        options = options if options is not None else WriterOptions()
        try:
            hello = protocol.Hello(
                protocol.PROTOCOL, os.fsencode(os.path.abspath(store)), run, seed,
                self._ring.slots, self._ring.slot_bytes, options,
            )  # fmt: skip
            protocol.encode(hello)  # refuses what cannot travel before anything is started
            self._connection = Connection(
                self._ring, mode=mode, nice=options.nice, io=io, standby=standby,
                on_message=self._handle, on_end=self._end,
            )  # fmt: skip
            self._connection.start()
        except BaseException:
            self._ring.close()
            raise
        self._connection.post(hello)

    # the writer --------------------------------------------------------------------------------

    def ready(self, timeout: float | None = None) -> Ready:
        """Wait until the writer has opened the store and holds the run.

        Raises what the writer raised: `NotFoundError`, `UnsupportedFormatError`, `StorageError`
        (read-only), `ConflictError` (another writer holds the run), ...; `WriterError` when it
        died; `StorageError` of kind "timeout" after `timeout` seconds.
        """
        self._check_process()
        with self._condition:
            if not self._condition.wait_for(
                lambda: self._ready is not None or self._error is not None or self._closed, timeout
            ):
                raise _timeout("the writer did not open the store", timeout)
            self._raise_if_unusable()
            assert self._ready is not None
            return self._ready

    @property
    def alive(self) -> bool:
        """Whether saves can still be handed over."""
        return os.getpid() == self._pid and self._error is None and not self._closed

    @property
    def store_uuid(self) -> str:
        """The uuid (hex) of the store that the writer has opened; "" while it has not."""
        return "" if self._ready is None else self._ready.store_uuid

    @property
    def writer_id(self) -> str:
        """What commits of this writer call it; "" while it has not opened the store."""
        return "" if self._ready is None else self._ready.writer

    @property
    def error(self) -> DeltackptError | None:
        """Why the writer cannot be used any more; None while it can, and after a clean close."""
        return self._error

    @property
    def writer_pid(self) -> int:
        """Process id of the writer (that of the trainer in thread mode)."""
        return self._connection.writer_pid

    # slots -------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return self._ring.slots

    @property
    def slot_bytes(self) -> int:
        return self._ring.slot_bytes

    @property
    def slots_used(self) -> int:
        """Largest number of slots this client ever used: the ring's memory in slots."""
        return self._pool.high_water

    def acquire_slot(self, timeout: float | None = None) -> int:
        """Lease the lowest free slot, waiting for the writer to release one if there is none.

        The lease ends with :meth:`slot` or :meth:`release_slot`. Raises `WriterError` (or what
        the writer refused the store with) when no slot will come, `StateError` after close,
        `StorageError` of kind "timeout" after `timeout` seconds.
        """
        self._check_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while True:
                self._raise_if_unusable()
                slot = self._pool.acquire()
                if slot is not None:
                    return slot
                if not self._asked:
                    self._asked = True
                    self._connection.post(protocol.NeedSlots())
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise _timeout("no staging slot became free", timeout)
                self._condition.wait(left)

    def view(self, slot: int) -> memoryview:
        """The writable bytes of a leased slot."""
        self._check_process()
        return self._ring.view(slot)

    def put(self, slot: int, at: int, data: memoryview) -> None:
        """Copy `data` to byte `at` of a leased slot: cheaper than by its view, see `Ring.put`."""
        self._check_process()
        self._ring.put(slot, at, data)

    def release_slot(self, slot: int) -> None:
        """Give a leased slot back unused."""
        self._check_process()
        with self._condition:
            self._pool.give_back(slot)
            self._condition.notify_all()

    # saves -------------------------------------------------------------------------------------

    def begin(
        self,
        *,
        step: int,
        layout: bytes,
        relative: int | None = None,
        relative_commit: tuple[str, int] | None = None,
        parent: Commit | None = None,
        overwrite: bool = False,
        adam: Sequence[AdamTensors] = (),
    ) -> int:
        """Start a save and return its id (increasing, never reused by this client).

        `layout` is the msgpack of a `Layout`; it travels only when it differs from the last one.
        `adam` tells the writer of optimizer states, which it may then predict (`shadow`).
        `relative` is the id of a save of this client, `relative_commit` a (run, number); without
        both, every chunk must be staged. Raises `StateError` of kind "busy" when `max_in_flight`
        saves are in flight (see :meth:`wait_room`), `WriterError` when the writer died.
        """
        self._check_process()
        if relative is not None and relative_commit is not None:
            raise InvalidInputError("a save is relative to a save or to a commit, not to both")
        with self._condition:
            self._raise_if_unusable()
            if len(self._pending) >= self._max_in_flight:
                raise StateError(
                    f"{len(self._pending)} saves are in flight already", kind="busy",
                    hint="wait for one of them",
                )  # fmt: skip
            save = self._next_save
            self._connection.post(
                protocol.Begin(
                    save, step, relative, relative_commit,
                    None if layout == self._layout else layout, parent, overwrite, [*adam],
                )
            )  # fmt: skip
            self._next_save += 1
            self._layout = layout
            self._pending[save] = None
            self._unfinished.add(save)
            return save

    def slot(self, save: int, slot: int, records: bytes) -> None:
        """Hand a filled slot to the writer, with the packed `protocol.RECORD` array of its chunks.

        The slot's bytes must not be written any more. When the save has failed meanwhile the slot
        is handed over all the same (the writer gives it back) and nothing is raised here.
        """
        self._check_process()
        with self._condition:
            self._raise_if_unusable()
            self._check_unfinished(save)
            self._pool.send(slot)
            self._connection.post(protocol.Slot(save, slot, records))
            if self._asked:  # somebody waits, and this slot may be the one to come back
                self._connection.post(protocol.NeedSlots())

    def finish(
        self,
        save: int,
        *,
        objects: dict[int, bytes],
        inline: dict[int, bytes],
        environment: bytes = b"\x80",
        metrics: dict[str, float] | None = None,
        counters: dict[str, float] | None = None,
    ) -> None:
        """Everything is handed over: the writer commits the save, whatever becomes of the trainer.

        `objects` and `inline` hold every object slot and every inline extent of the layout.
        `counters` (seconds, bytes) are recorded in the commit beside the writer's own figures.
        """
        self._check_process()
        with self._condition:
            self._raise_if_unusable()
            self._check_unfinished(save)
            self._connection.post(
                protocol.Finish(save, objects, inline, environment, metrics or {}, counters or {})
            )
            self._unfinished.discard(save)

    def abort(self, save: int) -> None:
        """Give a begun save up; its outcome is a `StateError` of kind "aborted".

        No-op for a save that is finished or has failed, and after the writer's death.
        """
        self._check_process()
        with self._condition:
            if save not in self._unfinished:
                return
            self._unfinished.discard(save)
            if self._error is None and not self._closed:
                self._connection.post(protocol.Abort(save))

    @property
    def pending(self) -> int:
        """Saves begun whose outcome is not known yet."""
        return len(self._pending)

    def wait_room(self, timeout: float | None = None) -> bool:
        """Wait until another save may begin; False after `timeout` seconds without room.

        Raises as :meth:`begin` when the writer is of no more use.
        """
        self._check_process()
        with self._condition:
            room = self._condition.wait_for(
                lambda: (
                    len(self._pending) < self._max_in_flight
                    or self._error is not None
                    or self._closed
                ),
                timeout,
            )
            self._raise_if_unusable()
            return room

    def done(self, save: int) -> bool:
        """Whether the outcome of `save` is known."""
        return save not in self._pending

    def result(self, save: int, timeout: float | None = None) -> Committed:
        """Wait until `save` is durable and return its commit, or raise what it failed with.

        Raises `WriterError` when the writer died first, `StorageError` of kind "timeout" after
        `timeout` seconds (the save goes on), `StateError` for a save this client does not know;
        the outcomes of the last 64 saves are kept.
        """
        self._check_process()
        with self._condition:
            if not self._condition.wait_for(lambda: save not in self._pending, timeout):
                raise _timeout(f"save {save} is not durable yet", timeout)
            outcome = self._outcomes.get(save)
        if outcome is None:
            raise StateError(f"save {save} is not known to this writer client", save=save)
        if isinstance(outcome, DeltackptError):
            raise copy.copy(outcome)
        return outcome

    # the end -----------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Give unfinished saves up, wait until finished ones are durable, end the writer.

        Idempotent; a no-op in a forked child. Blocked callers get `StateError`. Failures of saves
        are not raised here but by :meth:`result`, which works after close. Raises `WriterError`
        of kind "timeout" when the writer was not done after `timeout` seconds: a writer process
        then goes on by itself.
        """
        if os.getpid() != self._pid:
            return
        with self._condition:
            if not self._closed:
                self._closed = True
                for save in sorted(self._unfinished):
                    self._connection.post(protocol.Abort(save))
                self._unfinished.clear()
                self._connection.post_last(protocol.Close())
                if self._gone:
                    self._ring.close()
            self._condition.notify_all()
        if not self._connection.join(timeout):
            raise WriterError(
                f"the writer was not done within {timeout} s ({len(self._pending)} saves in"
                " flight); it goes on by itself",
                kind="timeout",
            )

    def __enter__(self) -> WriterClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # internals ---------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"this writer belongs to process {self._pid}, not to its forked child"
                f" {os.getpid()}",
                kind="forked", hint="open a checkpointer of its own in the child",
            )  # fmt: skip

    def _raise_if_unusable(self) -> None:
        if self._error is not None:
            raise copy.copy(self._error)
        if self._closed:
            raise StateError("the writer client is closed", kind="closed")

    def _check_unfinished(self, save: int) -> None:
        if save not in self._unfinished:
            raise StateError(f"save {save} is not open for staging", save=save)

    def _handle(self, message: protocol.ToTrainer) -> None:
        match message:
            case protocol.Released(slots):
                with self._condition:
                    for slot in slots:
                        self._pool.release(slot)
                    self._asked = False
                    self._condition.notify_all()
            case protocol.Committed():
                self._settle(message.save, message)
            case protocol.Failed(save, error):
                self._settle(save, from_wire(error))
            case protocol.Retired(step, removed):
                self._tell_retired(step, removed)
            case protocol.Ready():
                with self._condition:
                    self._ready = message
                    self._condition.notify_all()
            case protocol.Refused(error):
                with self._condition:
                    self._error = from_wire(error)
                    self._condition.notify_all()
            case protocol.Notice(level, text):
                _log.log(level, "%s", text)

    def _settle(self, save: int, outcome: Outcome) -> None:
        with self._condition:
            if save not in self._pending:
                return
            self._keep(save, outcome)
            self._condition.notify_all()
        self._tell(save, outcome)

    def _keep(self, save: int, outcome: Outcome) -> None:
        del self._pending[save]
        self._outcomes[save] = outcome
        while len(self._outcomes) > KEPT_OUTCOMES:
            del self._outcomes[next(iter(self._outcomes))]

    def _end(self, broken: WriterError | None) -> None:
        with self._condition:
            if self._error is None and (broken or self._pending or not self._closed):
                self._error = broken or WriterError(
                    f"the writer (process {self.writer_pid}) {self._connection.obituary}",
                    hint="the next save starts a new one; steps already committed are safe",
                    pid=self.writer_pid,
                )
            lost = list(self._pending)
            for save in lost:
                assert self._error is not None
                self._keep(save, copy.copy(self._error))
            self._unfinished.clear()
            self._gone = True
            if self._closed:
                self._ring.close()
            self._condition.notify_all()
        for save in lost:
            self._tell(save, self._outcomes[save])

    def _tell(self, save: int, outcome: Outcome) -> None:
        if self._on_result is None:
            return
        try:
            self._on_result(save, outcome)
        except Exception:
            _log.exception("on_result raised for save %d", save)

    def _tell_retired(self, step: int, removed: list[int]) -> None:
        if self._on_retired is None:
            return
        try:
            self._on_retired(step, removed)
        except Exception:
            _log.exception("on_retired raised for step %d", step)


def _timeout(what: str, seconds: float | None) -> StorageError:
    return StorageError(
        f"{what} within {seconds} s", kind="timeout",
        hint="the storage may be slow or stuck; raise the timeout or look at the file system",
    )  # fmt: skip

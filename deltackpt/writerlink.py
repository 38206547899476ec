"""Keeping a writer at hand: started ahead, replaced when it died or the state grew."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Generator

import torch
from deltackpt_store.client import Outcome, WriterClient
from deltackpt_store.errors import DeltackptError
from deltackpt_store.protocol import Committed, WriterOptions
from deltackpt_store.retention import keep_of
from deltackpt_store.standby import Standby

from ._version import __version__
from .host_memory import available_bytes
from .options import SLOT_BYTES, Options

_log = logging.getLogger("deltackpt")

_MIN_RING_BYTES = 32 * 1024 * 1024
_BURY_SECONDS = 5.0
_LAST_SECONDS = 1.0


class WriterLink:
    """The writer client in use. All but `end_stuck` belong to the staging thread.

    `on_result(client, save, outcome)`, and `on_retired(step, removed)` when retention after the
    save of `step` took steps off the run's list, are called on a client's receiving thread.
    """

    def __init__(
        self,
        path: str,
        options: Options,
        seed: int,
        *,
        max_in_flight: int,
        on_result: Callable[[WriterClient, int, Outcome], None],
        on_retired: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        self._path, self._options, self._seed = path, options, seed
        self._max_in_flight = max_in_flight
        self._on_result, self._on_retired = on_result, on_retired
        self._client: WriterClient | None = None
        self._standby: Standby | None = None
        self._ring_bytes = 0
        self._uuid = ""  # of the store, once a writer has opened it

    def prepare(self) -> None:
        """A save is to be expected: start a writer process ahead, which opens nothing yet."""
        if self._options.writer != "process" or self._client or self._standby:
            return
        try:
            self._standby = Standby()
        except (DeltackptError, OSError) as error:  # the save will try again, and report it
            _log.debug("no writer was started ahead: %s", error)

    def get(self, state_bytes: int) -> WriterClient:
        """The living client, or a new one; also a new one when the ring became far too small.

        Returns without waiting for the new writer: what it cannot do fails its first save.
        """
        wanted = self._wanted_ring(state_bytes)
        client = self._client
        if client is not None:
            self._uuid = client.store_uuid or self._uuid
        if client is not None and client.alive:
            if client.pending or wanted <= 1.25 * self._ring_bytes:
                return client
            self._end(self._options.durable_timeout)
        else:
            self._end(_BURY_SECONDS)
        options = self._options

        def receive(save: int, outcome: Outcome) -> None:
            self._on_result(new, save, outcome)

        with self._started_ahead() as standby:
            new = WriterClient(
                self._path, options.run,
                seed=self._seed, ring_bytes=wanted, slot_bytes=options.slot_bytes(wanted),
                mode=options.writer, max_in_flight=self._max_in_flight, on_result=receive,
                on_retired=self._on_retired, standby=standby,
                options=WriterOptions(
                    codec=options.codec, shadow=options.shadow, lock_timeout=options.lock_timeout,
                    versions={"deltackpt": __version__, "torch": str(torch.__version__)},
                    keep=None if options.keep is None else keep_of(options.keep),
                    expect=self._uuid,
                ),
            )  # fmt: skip
        self._client, self._ring_bytes = new, wanted
        return new

    def close(self, timeout: float) -> None:
        """End the client; what its writer still has to do after `timeout` is its own affair."""
        with self._started_ahead():
            self._end(timeout)

    @contextlib.contextmanager
    def _started_ahead(self) -> Generator[Standby | None]:
        """The process started ahead, if it is still there; what is not taken of it is ended."""
        standby, self._standby = self._standby, None
        try:
            yield standby if standby is not None and standby.alive else None
        finally:
            if standby is not None:
                standby.end()

    def _end(self, timeout: float) -> None:
        client, self._client = self._client, None
        if client is not None:
            try:
                client.close(timeout)
            except DeltackptError as error:
                _log.warning("%s", error)

    def end_stuck(self, client: WriterClient, save: int) -> Committed | None:
        """End a writer that storage keeps waiting; what it said at the last moment of `save`.

        A writer process is killed: what it had not committed is absent. A writer thread cannot be
        ended; it is left behind. For any thread; blocks for a moment at most.
        """
        seconds = 0.0
        if self._options.writer == "process":
            seconds = _LAST_SECONDS
            with contextlib.suppress(OSError):
                os.kill(client.writer_pid, signal.SIGKILL)
        with contextlib.suppress(DeltackptError):
            client.close(0.0)
        with contextlib.suppress(DeltackptError):
            return client.result(save, seconds)
        return None

    def _wanted_ring(self, state_bytes: int) -> int:
        """The smaller of half of the free memory and room for the whole state, as it is packed.

        A slot wastes up to a chunk, and a chunk up to a page; only what is used takes memory. A
        state that just did not fit would keep training waiting for the disk.
        """
        options = self._options
        if options.ring_bytes is not None:
            return options.ring_bytes
        slot = max(SLOT_BYTES, options.chunk_bytes)
        wanted = state_bytes + state_bytes // 12 + slot * (options.threads + 1)
        if self._client is not None and wanted <= 1.25 * self._ring_bytes:
            return self._ring_bytes
        free = available_bytes()
        return max(_MIN_RING_BYTES, wanted if free is None else min(wanted, free // 2))

"""How a save ends: with figures, or with a typed error."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

from deltackpt_store.client import WriterClient
from deltackpt_store.errors import DeltackptError, StorageError, from_wire, to_wire
from deltackpt_store.oserror import storage_error
from deltackpt_store.protocol import Committed

from .report import SaveProgress, SaveReport
from .stage import Staging

_SLOW = "the storage hangs or is too slow: check it, save less often or raise durable_timeout"


def timed_out(what: str, step: int, seconds: float) -> StorageError:
    """The error of a save that storage did not take in `durable_timeout` seconds."""
    return StorageError(
        f"step {step} was not {what} within {seconds:g} s",
        kind="timeout",
        hint=_SLOW,
        step=step,
        seconds=seconds,
    )


def given_up(step: int, seconds: float, listed: bool | None) -> StorageError:
    """As `timed_out`, of a save whose writer had all of it: `listed` says whether its commit is
    there to be seen (and may not be synced); None when nobody could tell."""
    error = timed_out("durable", step, seconds)
    told = {
        True: f"{error.message}, and is on the list of the run all the same",
        False: error.message,
        None: f"{error.message}, and whether it is on the list of the run could not be read",
    }[listed]
    hint = _SLOW if listed is False else f"{_SLOW}; that step is durable once a later one is"
    if listed is None:
        hint = f"{_SLOW}; steps() tells, when the storage is back"
    return StorageError(told, kind="timeout", hint=hint, listed=listed, **error.context)


def soon(seconds: float, ask: Callable[[], bool]) -> bool | None:
    """What `ask`, which may hang, says within `seconds`; None when it says nothing, or raises."""
    answers: queue.SimpleQueue[bool | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(ask())
        except Exception:
            answers.put(None)

    try:
        threading.Thread(target=work, name="deltackpt-look", daemon=True).start()
        return answers.get(timeout=seconds)
    except (RuntimeError, queue.Empty):  # the system allows no more threads
        return None


def report_of(
    progress: SaveProgress,
    staging: Staging,
    client: WriterClient,
    outcome: Committed,
    *,
    skipped: int,
) -> SaveReport:
    """The figures of a save that has just become durable."""
    stats = outcome.stats
    return SaveReport(
        step=outcome.step, run=outcome.run, commit=outcome.number, root=outcome.root.hex(),
        stall_seconds=progress.stall, staged_seconds=progress.staged_seconds,
        durable_seconds=time.perf_counter() - progress.started,
        state_bytes=int(stats["state_bytes"]), changed_bytes=staging.changed_bytes,
        staged_bytes=staging.staged_bytes, written_bytes=int(stats["written_bytes"]),
        small_changed_bytes=int(stats["small_changed_bytes"]),
        chunks=staging.chunks, changed_chunks=staging.changed_chunks,
        dedup_hits=int(stats["dedup_chunks"]), codecs=_codec_mix(stats),
        codec_bytes=_codec_bytes(stats),
        skipped=skipped, ring_bytes=client.slots_used * client.slot_bytes,
        devices=staging.devices,
    )  # fmt: skip


def _codec_mix(stats: Mapping[str, float]) -> dict[str, int]:
    """Stored chunks by codec, from the writer's figures (``codec.<name>.chunks``)."""
    prefix, suffix = "codec.", ".chunks"
    return {
        name[len(prefix) : -len(suffix)]: int(count)
        for name, count in stats.items()
        if name.startswith(prefix) and name.endswith(suffix)
    }


def _codec_bytes(stats: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Raw and written bytes by codec."""
    return {
        name: (int(stats[f"codec.{name}.raw_bytes"]), int(stats[f"codec.{name}.written_bytes"]))
        for name in _codec_mix(stats)
    }


def typed_error(error: BaseException) -> DeltackptError:
    """`error`, met while staging, as one of the project's; the original is its cause."""
    if isinstance(error, DeltackptError):
        return error
    if isinstance(error, OSError):
        return storage_error(error, "stage a save for", "the writer")
    typed = from_wire(to_wire(error))
    typed.__cause__ = error
    return typed

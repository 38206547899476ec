"""Compaction: a new base for runs, old bases let go, packs with little in them rewritten.

An ordinary writer beside others: it holds a lease, heeds collections, claims what it has written,
takes no lock of any run and makes no commit. One compaction::

    hold        the newest step of each run: it is to be the new base
    plan        from one marking: `compact_plan`
    write       the planned chunks into new packs, durably: `compact_write`
    announce    the new bases in a generation that condemns nothing more; writers of those runs
                code against them from then on
    once more   steps that were saved in between against an old base are coded against the new one
    collect     garbage, with the packs to get rid of: `gc`

Manifests and commits stay as they are: a step is the same chunks by the same ids. So readers need
not know, and nothing written here is more than a further copy until a collection has proved that
it can take another one's place. Killed anywhere, a compaction leaves copies that nothing names:
the next one uses them, or a collection deletes them.
"""

from __future__ import annotations

import time

from deltackpt_store.compact_report import CompactReport
from deltackpt_store.compact_run import Compaction, Settings
from deltackpt_store.compact_write import WORTH, Progress
from deltackpt_store.errors import DeltackptError, InvalidInputError
from deltackpt_store.linked import refuse_linked
from deltackpt_store.oserror import storage_error
from deltackpt_store.settling import ACK_SECONDS, Wait
from deltackpt_store.store import Store
from deltackpt_store.store_locks import compaction_lock
from deltackpt_store.throttle import ThrottledIO, TokenBucket

MIN_LIVE_SHARE = 0.5


def compact(
    store: Store,
    *,
    run: str | None = None,
    when_ratio: float | None = None,
    every: int | None = None,
    min_live_share: float = MIN_LIVE_SHARE,
    max_rate: float | TokenBucket | None = None,
    codec: str = "auto",
    dry_run: bool = False,
    timeout: float = ACK_SECONDS,
    progress: Progress | None = None,
    wait: Wait | None = None,
) -> CompactReport:
    """Compact `store`, or only what `run` needs.

    A run gets a new base when its newest step has chunks that cannot be read without others;
    with `when_ratio` only if the coded chunks of that step take more than so many times what they
    are coded against; with `every` only if at least so many commits follow the last base. Packs of
    which less than `min_live_share` (0 to 1) is needed are emptied, and many small ones merged.
    `max_rate` bounds reads and writes together, in bytes per second. `codec`: "auto" or "small".
    `dry_run` only reads. `timeout` (seconds) bounds the wait for live writers, and for another
    collection; `wait` replaces it, for tests. `progress` is called with (bytes done, in all).

    Raises ConflictError when another compaction runs (kind ``compaction-running``), or when the
    collection at its end finds another one (``gc-running``) or a writer that does not answer
    (``gc-busy``): what was written then waits for the next compaction. NotFoundError for an unknown
    run, InvalidInputError, CorruptionError when anything needed cannot be read, StorageError; kind
    ``no-space`` when there is no room for what is to be written. Nothing is ever lost.
    """
    _check_options(when_ratio, every, min_live_share, codec)
    store.format.require("write", store.path)
    store.format.require("gc", store.path)
    if run is not None:
        store.numbers(run)
    io = store.io
    if max_rate is not None:
        bucket = max_rate if isinstance(max_rate, TokenBucket) else TokenBucket(max_rate)
        io = ThrottledIO(io, bucket)
    settings = Settings(run, when_ratio, every, min_live_share, codec, progress)
    work = Compaction(Store(store.path, io, store.format), settings)
    began = time.monotonic()
    try:
        if dry_run:
            report = work.plan_only()
        else:
            refuse_linked(io, store.path, "compact")
            with compaction_lock(io, store.path):
                report = work.run(timeout, wait)
    except OSError as error:
        if isinstance(error, DeltackptError):
            raise
        raise storage_error(error, "compact", store.path) from error
    report.seconds = time.monotonic() - began
    return report


def _check_options(
    when_ratio: float | None, every: int | None, min_live_share: float, codec: str
) -> None:
    if when_ratio is not None and not 0 <= when_ratio < float("inf"):
        raise InvalidInputError(
            f"when_ratio must be a number of 0 or more, not {when_ratio!r}", option="when_ratio"
        )
    if every is not None and every < 1:
        raise InvalidInputError(f"every must be at least 1, not {every!r}", option="every")
    if not 0 <= min_live_share <= 1:
        raise InvalidInputError(
            f"min_live_share must be from 0 to 1, not {min_live_share!r}", option="min_live_share"
        )
    if codec not in WORTH:
        raise InvalidInputError(
            f"there is no codec {codec!r} for compaction",
            option="codec", hint=f"use one of {', '.join(WORTH)}",
        )  # fmt: skip

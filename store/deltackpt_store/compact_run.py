"""One compaction, step by step; see `compact`."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Generator, Mapping
from typing import NamedTuple

import msgspec

from deltackpt_store.catalogue import Bools
from deltackpt_store.compact_plan import Plan, Survey, leaving, make_plan
from deltackpt_store.compact_report import CompactReport, NewBase
from deltackpt_store.compact_write import Progress, Rewriter
from deltackpt_store.errors import ConflictError, NotFoundError, StorageError
from deltackpt_store.gc import GcReport, collect
from deltackpt_store.generation import (
    Generation,
    newest_number,
    publish_generation,
    read_generation,
)
from deltackpt_store.leases import Hold, hold
from deltackpt_store.lost_commits import lost_commits, refuse_lost
from deltackpt_store.manifest import Commit
from deltackpt_store.mark import Marking, mark
from deltackpt_store.roots import Roots, read_roots
from deltackpt_store.settling import Wait, patience, settle
from deltackpt_store.step_groups import StepGroups, step_groups
from deltackpt_store.store import Store
from deltackpt_store.store_locks import collection_lock
from deltackpt_store.store_writer import StoreWriter

_log = logging.getLogger("deltackpt.store.compact")

_ANNOUNCE_SECONDS = 10.0
_HOLD_TRIES = 10

StepKey = tuple[str, int]


class Settings(NamedTuple):
    """As of `compact`."""

    only: str | None
    when_ratio: float | None
    every: int | None
    min_live_share: float
    codec: str
    progress: Progress | None


class Compaction:
    """One compaction, or the plan of one. Used once, by one thread."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._io = store.io
        self._root = store.path
        self._settings = settings
        self._report = CompactReport()
        self._roots = Roots()
        self._holds: list[Hold] = []

    # the whole -----------------------------------------------------------------------------

    def plan_only(self) -> CompactReport:
        """What would be done, as far as one marking shows. Only reads."""
        report = self._report
        report.dry_run = True
        survey, plan, _ = self._plan(self._heads(keep=False))
        self._count(plan)
        report.removed = sorted(leaving(survey, plan))
        return report

    def run(self, timeout: float, wait: Wait | None) -> CompactReport:
        """Compact. The caller holds the lock of compaction."""
        with StoreWriter(self._store, codec="none") as writer:
            mine = f"{writer.writer}-"
            writer.claim = lambda packs: {name for name in packs if name.startswith(mine)}
            try:
                writer.heed()  # takes the lease: what is written from here on stays
                self._work(writer, timeout, wait)
            finally:
                for held in self._holds:
                    held.release()
        return self._report

    def _work(self, writer: StoreWriter, timeout: float, wait: Wait | None) -> None:
        report = self._report
        survey, plan, bases = self._plan(self._heads(keep=True))
        before = self._packs_by_step(survey)
        self._count(plan)
        self._write(writer, survey, plan)
        del survey
        fresh = {base.run: base.number for base in report.bases}
        if fresh and self._announce(writer, fresh, min(timeout, _ANNOUNCE_SECONDS), wait):
            self._follow_up(writer, [bases[run].commit for run in fresh])
        report.removed = self._collect(writer, plan.victims, timeout, wait).packs
        if report.nothing:
            report.packs_after, report.bytes_after = report.packs_before, report.bytes_before
        else:
            self._look_again(before)

    # planning ------------------------------------------------------------------------------

    def _heads(self, *, keep: bool) -> list[Commit]:
        """The newest listed commit of each run in question, held from here on if `keep`."""
        only = self._settings.only
        heads: list[Commit] = []
        for run in self._store.runs() if only is None else [only]:
            for _ in range(_HOLD_TRIES):
                with contextlib.suppress(NotFoundError):  # just retired: there is a newer one
                    head = self._store.head(run)
                    held = hold(self._io, self._root, head) if keep else None
                    if held is not None:
                        self._holds.append(held)
                    heads.append(head)
                    break
        return heads

    def _survey(self) -> Survey:
        self._store = Store(self._root, self._io, self._store.format)  # remembers nothing
        self._roots = read_roots(self._store)
        last = self._generation()
        refuse_lost(
            lost_commits(
                self._store, self._roots.commits.values(), last.boundary,
                retired=self._roots.retired,
            ),
            self._root,
        )  # fmt: skip
        marking = mark(self._store, self._roots, condemned=last.packs, ids=True)
        return Survey(marking, self._steps(marking))

    def _steps(self, marking: Marking) -> Generator[StepGroups]:
        """All listed steps."""
        yield from step_groups(self._store, marking.catalogue, self._roots.commits.values())

    def _plan(self, heads: list[Commit]) -> tuple[Survey, Plan, dict[str, StepGroups]]:
        """A plan with new bases for those of `heads` that are due, and these."""
        survey = self._survey()
        report, catalogue = self._report, survey.catalogue
        report.packs_before, report.bytes_before = len(catalogue.names), sum(catalogue.sizes)
        heads = [head for head in heads if (head.run, head.number) in self._roots.commits]
        bases: dict[str, StepGroups] = {}
        for step in step_groups(self._store, catalogue, heads):
            if self._is_due(survey, step):
                bases[step.commit.run] = step
            else:
                report.not_due.append(step.commit.run)
        plan = make_plan(
            survey, self._steps(survey.marking), bases,
            min_live_share=self._settings.min_live_share, only=self._groups_in_question(survey),
        )  # fmt: skip
        for run, step in bases.items():
            if not survey.self_contained(step)[step.groups].all():
                packs, size = survey.reads(step.groups)
                commit = step.commit
                report.bases.append(NewBase(run, commit.step, commit.number, packs, size))
        return survey, plan, bases

    def _is_due(self, survey: Survey, step: StepGroups) -> bool:
        ratio, every = self._settings.when_ratio, self._settings.every
        if ratio is not None and survey.delta_share(step) <= ratio:
            return False
        return every is None or self._commits_since_base(survey, step) >= every

    def _commits_since_base(self, survey: Survey, step: StepGroups) -> int:
        """Commits of the run after the last one that can be read without older chunks."""
        run, number = step.commit.run, step.commit.number
        last = self._generation().bases.get(run, 0)
        later = [c for c in self._roots.commits.values() if c.run == run and c.number > last]
        for one in step_groups(self._store, survey.catalogue, later):
            if survey.self_contained(one)[one.groups].all():
                last = max(last, one.commit.number)
        return number - last

    def _groups_in_question(self, survey: Survey) -> Bools | None:
        only = self._settings.only
        if only is None:
            return None
        commits = [c for c in self._roots.commits.values() if c.run == only]
        mine = survey.of_steps(step_groups(self._store, survey.catalogue, commits))
        return survey.with_needed(mine)

    def _count(self, plan: Plan) -> None:
        self._report.chunks_own += len(plan.own)
        self._report.chunks_recoded += len(plan.recode)
        self._report.chunks_copied += len(plan.copy)

    def _generation(self) -> Generation:
        try:
            number = newest_number(self._io, self._root)
        except FileNotFoundError:
            return Generation()  # never collected, and copied without gc/
        return read_generation(self._io, self._root, number)

    # writing -------------------------------------------------------------------------------

    def _write(self, writer: StoreWriter, survey: Survey, plan: Plan) -> None:
        if plan.nothing:
            return

        def between() -> None:
            writer.heed()

        rewriter = Rewriter(
            self._store, writer, survey.catalogue, plan, codec=self._settings.codec,
            progress=self._settings.progress, between=between,
        )  # fmt: skip
        self._check_space(rewriter.estimate())
        rewriter.work()
        self._report.read_bytes += rewriter.raw_bytes
        self._report.written_bytes += rewriter.written_bytes

    def _check_space(self, wanted: int) -> None:
        free = self._io.free_bytes(self._root)
        if wanted > free:
            raise StorageError(
                f"compaction would write about {wanted} bytes, and {free} are free",
                kind="no-space", errno=errno.ENOSPC, path=self._root,
                hint="collect garbage first (deltackpt gc), or compact one run at a time",
            )  # fmt: skip

    def _follow_up(self, writer: StoreWriter, commits: list[Commit]) -> None:
        """Code against the new bases what was saved against old ones in the meantime."""
        survey = self._survey()
        there = [c for c in commits if (c.run, c.number) in self._roots.commits]
        bases = {
            step.commit.run: step for step in step_groups(self._store, survey.catalogue, there)
        }
        plan = make_plan(survey, self._steps(survey.marking), bases, min_live_share=None)
        self._count(plan)
        self._write(writer, survey, plan)

    # generations ---------------------------------------------------------------------------

    def _announce(
        self, writer: StoreWriter, bases: Mapping[str, int], timeout: float, wait: Wait | None
    ) -> bool:
        """Tell writers of the new bases; whether there are any writers."""
        wait = self._heeding(writer, wait or patience(timeout))
        with self._alone(wait):
            last = self._generation()
            generation = msgspec.structs.replace(
                last, number=last.number + 1, bases={**last.bases, **bases}
            )
            try:
                publish_generation(self._io, self._root, generation)
            except FileExistsError as error:
                raise ConflictError(
                    "a garbage collection has taken over",
                    kind="gc-running", hint="run one at a time, on one machine",
                ) from error  # fmt: skip
            try:
                _, writers = settle(self._io, self._root, generation.number, wait)
            except ConflictError as error:  # it will see the announcement later
                _log.info("%s", error)
                return True
        return writers > 1

    def _collect(
        self, writer: StoreWriter, victims: frozenset[str], timeout: float, wait: Wait | None
    ) -> GcReport:
        outer = self._heeding(writer, wait or patience(timeout))
        while True:
            try:
                return collect(
                    self._store, avoid=victims,
                    wait=self._heeding(writer, wait or patience(timeout)),
                )  # fmt: skip
            except ConflictError as error:
                if error.kind != "gc-running" or not outer([]):
                    raise

    def _heeding(self, writer: StoreWriter, wait: Wait) -> Wait:
        """Waiting for others, this writer answers too; then it is not waited for."""
        answered = False

        def waiting(missing: list[str]) -> bool:
            nonlocal answered
            writer.heed()
            first, answered = not answered, True
            return (first and missing == [writer.writer]) or wait(missing)

        return waiting

    @contextlib.contextmanager
    def _alone(self, wait: Wait) -> Generator[None]:
        """Hold the lock of collection, waiting for it."""
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(collection_lock(self._io, self._root))
                    break
                except ConflictError:
                    if not wait([]):
                        raise
            yield

    # what came of it -----------------------------------------------------------------------

    def _packs_by_step(self, survey: Survey) -> dict[StepKey, int]:
        return {
            (step.commit.run, step.commit.number): survey.reads(step.groups)[0]
            for step in self._steps(survey.marking)
        }

    def _look_again(self, before: Mapping[StepKey, int]) -> None:
        report = self._report
        survey = self._survey()
        catalogue = survey.catalogue
        report.packs_after, report.bytes_after = len(catalogue.names), sum(catalogue.sizes)
        bases = {(base.run, base.number): base for base in report.bases}
        for step in self._steps(survey.marking):
            key = (step.commit.run, step.commit.number)
            packs, size = survey.reads(step.groups)
            report.lighter_steps += packs < before.get(key, 0)
            if key in bases:
                bases[key].packs_after, bases[key].bytes_after = packs, size

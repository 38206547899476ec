"""Runs, their commits and lineages: which steps a store holds, and what a name means.

Everything is read from the directory each time (files are write-once, so two readers agree), in
the order of commit numbers; never of names, times or step numbers. Nothing here writes. A damaged
record hides only itself: it is logged and listed in ``damaged``.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from deltackpt_store.errors import (
    CorruptionError,
    DeltackptError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from deltackpt_store.manifest import Commit
from deltackpt_store.manifest_io import MAX_COMMIT_BYTES, decode_commit
from deltackpt_store.names import (
    LATEST,
    check_name,
    is_name,
    listed_numbers,
    number_name,
    parse_number,
    parse_step_name,
)
from deltackpt_store.oserror import storage_error
from deltackpt_store.pins import PinFiles
from deltackpt_store.records import Damaged, some_of, unfindable

_log = logging.getLogger("deltackpt.store")

_WAY_OUT = (
    "run `deltackpt verify`; restore another step, copy the file back from a copy of the store, or"
    " run `deltackpt repair`"
)


class Commits(list[Commit]):
    """Commits of one run in numeric order; `damaged` holds those that could not be read."""

    def __init__(self, commits: Iterable[Commit] = ()) -> None:
        super().__init__(commits)
        self.damaged: list[Damaged] = []


def ancestors_after(parent: Commit | None, run: str) -> tuple[tuple[int, int], ...]:
    """The `ancestors` of a commit of `run` that continues `parent` (see `Commit`)."""
    if parent is None or parent.run != run:
        return ()
    ranges = list(parent.ancestors)
    if ranges and ranges[-1][1] == parent.number - 1:
        ranges[-1] = (ranges[-1][0], parent.number)
    else:
        ranges.append((parent.number, parent.number))
    return tuple(ranges)


class History(PinFiles):
    """The runs and pins of the store at `path` (absolute). Safe to use from any thread."""

    # runs and commits ----------------------------------------------------------------------

    def runs(self) -> list[str]:
        """Names of all runs, sorted.

        CorruptionError when the store has content and no ``runs``: made anew, that folder would
        call all of it garbage. Where nothing was saved a copy may have left the empty one out.
        """
        names = self._list("runs")
        if names is None and (self._list("packs") or self._list("manifests")):
            raise CorruptionError(
                f"store {self.path} has lost its directory runs",
                kind="damaged-store",
                hint="run `deltackpt repair --from` a copy of the store",
                path=self.path,
            )
        return sorted(filter(is_name, names or ()))

    def check_spelling(self, run: str) -> None:
        """InvalidInputError where the file system takes the folder of another run for that of
        `run`: "main" and "Main" are one name to some."""
        names = self._list("runs") or []
        alike = [name for name in names if name.lower() == run.lower()]
        if run in names or not alike:
            return
        path = f"{self.path}/runs/{run}"
        try:
            one = self.io.exists(path)
        except OSError as error:
            raise storage_error(error, "look for the run", path) from error
        if one:
            raise InvalidInputError(
                f"run {run!r} is run {alike[0]!r} to the file system at {self.path}, which ignores"
                " upper and lower case",
                kind="bad-name",
                hint=f"write {alike[0]!r} to continue that run, or choose another name",
                option="run",
                run=run,
            )

    def numbers(self, run: str) -> list[int]:
        """Numbers of the commits of `run` that are not retired, ascending."""
        return listed_numbers(self.files(run))

    def files(self, run: str) -> list[str]:
        """Names of what lies in the folder of `run`: commits, and markers of the retired ones."""
        check_name(run, "run")
        names = self._list(f"runs/{run}")
        if names is None:
            known = self.runs()
            raise NotFoundError(
                f"store {self.path} has no run {run!r}",
                kind="unknown-run",
                hint=f"it has {some_of(known)}" if known else "it holds no run yet",
                path=self.path,
                run=run,
            )
        return names

    def read_commit(self, run: str, number: int) -> Commit:
        """One commit, checked; NotFoundError, CorruptionError or StorageError when it is not."""
        relative = f"runs/{run}/{number_name(number)}"
        data = self._read(relative, MAX_COMMIT_BYTES, "commit")
        commit = decode_commit(data, name=relative)
        if commit.run != run or commit.number != number:
            belongs = f"runs/{commit.run}/{number_name(commit.number)}"
            raise CorruptionError(
                f"commit {relative} is not where it belongs, at {belongs}: it was renamed or"
                " copied, or upper and lower case are one there",
                kind="misplaced-commit",
                hint="give the folder or file its name again, or move the copy out of the store; a"
                " new run needs another name",
                path=relative,
            )
        return commit

    def commits(self, run: str) -> Commits:
        """All commits of `run` that can be read, in numeric order, abandoned branches included."""
        found = Commits()
        for number in self.numbers(run):
            self._collect(run, number, found)
        return found

    def head(self, run: str) -> Commit:
        """The newest commit of `run` that can be read; a damaged newer one is logged."""
        found = Commits()
        for number in reversed(self.numbers(run)):
            self._collect(run, number, found)
            if found:
                return found[0]
        raise self._nothing(run, found)

    def lineage(self, run: str) -> Commits:
        """The head of `run` and the commits of the run that it continues, oldest first.

        Commits that were abandoned by going back to an earlier step are left out.
        """
        found = Commits()
        for _ in self._newest_first(run, found):
            pass
        found.reverse()
        return found

    def _newest_first(self, run: str, found: Commits) -> Iterator[Commit]:
        """Read the lineage from the head on, one by one, into `found`."""
        numbers = self.numbers(run)
        head: Commit | None = None
        while numbers and head is None:
            head = self._collect(run, numbers.pop(), found)
        if head is None:
            raise self._nothing(run, found)
        yield head
        expected: dict[int, bytes] = {}  # digests by which successors name their parents
        todo = within(numbers, head)
        commit: Commit | None = head
        while True:
            if commit and commit.parent and commit.parent[0] == run:
                parent = commit.parent[1]
                expected[parent] = commit.parent[2]
                # A record that does not list its ancestors names one of them at least.
                if not head.ancestors and not todo and parent < commit.number:
                    todo = _only(numbers, parent)
            if not todo:
                return
            number = todo.pop()
            commit = self._collect(run, number, found, expected.get(number))
            if commit is not None:
                yield commit

    def find(self, run: str, step: int | None = None) -> Commit:
        """The commit of `step` (None: the head). The lineage comes first, then abandoned steps.

        NotFoundError tells the nearest steps that exist; CorruptionError (kind ``damaged-commit``)
        names a damaged commit that may be the step.
        """
        if step is None:
            return self.head(run)
        for commit in self._newest_first(run, Commits()):
            if commit.step == step:
                return commit
        everything = self.commits(run)
        for commit in reversed(everything):
            if commit.step == step:
                return commit
        raise self._no_step(run, step, everything)

    def _no_step(self, run: str, step: int, everything: Commits) -> DeltackptError:
        nearest = _nearest([c.step for c in everything], step)
        suspects = [d for d in everything.damaged if _may_be(d, step, everything)]
        if suspects:
            return CorruptionError(
                f"step {step} of run {run!r} in {self.path} cannot be found, and may be the"
                f" damaged commit {suspects[-1].path}: {suspects[-1].error.message}",
                kind="damaged-commit",
                hint=f"{_WAY_OUT}; the nearest steps are {nearest}",
                path=suspects[-1].path,
                run=run,
                step=step,
            )
        damaged = some_of([d.path for d in everything.damaged])
        return NotFoundError(
            f"run {run!r} in {self.path} has no step {step}",
            kind="unknown-step",
            hint=f"the nearest are {nearest}" + (f"; damaged: {damaged}" if damaged else ""),
            path=self.path,
            run=run,
            step=step,
        )

    def steps(self, run: str) -> list[int]:
        """Steps of the lineage, oldest commit first; the last one is the head's.

        A step saved again (overwritten) counts where it was saved last.
        """
        steps = dict.fromkeys(commit.step for commit in reversed(self.lineage(run)))
        return list(reversed(steps))

    # names ---------------------------------------------------------------------------------

    def resolve_name(self, text: str) -> Commit:
        """The commit called ``RUN@STEP``, ``@STEP``, ``RUN@latest``, ``latest``, RUN or PIN.

        Without a run, the store must hold one run only (``@STEP``: one that has the step), not
        counting those without a step; InvalidInputError lists the choices otherwise.
        """
        name = parse_step_name(text)
        if name.run is not None:
            return self.find(name.run, name.step)
        if name.bare is not None:
            return self._resolve_bare(name.bare)
        runs = self._choices()
        if len(runs) == 1:
            return self.find(runs[0], name.step)
        if name.step is not None:
            having: list[Commit] = []
            damage: CorruptionError | None = None
            for run in runs:
                try:
                    having.append(self.find(run, name.step))
                except NotFoundError:
                    continue
                except CorruptionError as error:
                    damage = damage or error
            if len(having) == 1:
                return having[0]
            if not having and damage is not None:
                raise damage
            if not having:
                raise NotFoundError(
                    f"no run in {self.path} has step {name.step}",
                    kind="unknown-step",
                    hint=f"its runs are {some_of(runs)}",
                    path=self.path,
                    step=name.step,
                )
            runs = [commit.run for commit in having]
        raise InvalidInputError(
            f"{text!r} may mean any of the runs {some_of(runs)}",
            kind="ambiguous",
            hint=f"write {runs[0]}@{'latest' if name.step is None else name.step}",
            path=self.path,
        )

    def only_run(self) -> str:
        """The run of a store that holds no other with a step.

        NotFoundError when it holds none, InvalidInputError that lists them when it holds several.
        """
        runs = self._choices()
        if len(runs) > 1:
            raise InvalidInputError(
                f"{self.path} holds the runs {some_of(runs)}: one must be named",
                kind="ambiguous",
                hint=f"write {runs[0]}, for example",
                path=self.path,
            )
        return runs[0]

    def _choices(self) -> list[str]:
        """The runs, one at least, that may be meant where none is named."""
        runs = self.runs()
        if not runs:
            raise NotFoundError(f"store {self.path} holds no run yet", path=self.path)
        return [run for run in runs if len(runs) == 1 or self._may_have_a_step(run)] or runs

    def _may_have_a_step(self, run: str) -> bool:
        try:
            return bool(self.numbers(run))
        except StorageError:  # a folder that cannot be listed, or no folder
            return True

    def _resolve_bare(self, name: str) -> Commit:
        runs = self.runs()
        pinned = self._list("pins") or []
        if name in runs and name in pinned:
            raise InvalidInputError(
                f"{name!r} is both a run and a pin in {self.path}",
                kind="ambiguous",
                hint=f"write {name}@latest for the run, or its pinned step as RUN@STEP",
                path=self.path,
            )
        if name in runs:
            return self.head(name)
        if name in pinned:
            return self.pinned(name)
        raise NotFoundError(
            f"store {self.path} has no run or pin {name!r}",
            kind="unknown-name",
            hint=_did_you_mean(name, runs, some_of(sorted({*runs, *pinned}))),
            path=self.path,
            name=name,
        )

    def pinned(self, name: str) -> Commit:
        """The commit that the pin `name` stands for.

        NotFoundError when there is no such pin; CorruptionError (kind ``lost-commit``) when its
        commit is gone.
        """
        pin = self.read_pin(name)
        try:
            commit = self.read_commit(pin.run, pin.number)
        except NotFoundError:
            self.read_pin(name)  # NotFoundError: it was removed before its commit went
            path = f"runs/{pin.run}/{number_name(pin.number)}"
            raise CorruptionError(
                f"the commit that is pinned as {name!r}, {path}, is gone",
                kind="lost-commit",
                hint="run `deltackpt repair --from` a copy of the store; if there is none,"
                f" `deltackpt unpin` {name} gives it up",
                path=path,
                run=pin.run,
                step=pin.step,
            ) from None
        if commit.digest != pin.digest:
            raise CorruptionError(
                f"commit {pin.number} of run {pin.run!r} is not the one pinned as {name!r}",
                kind="damaged-commit",
                path=f"runs/{pin.run}/{number_name(pin.number)}",
            )
        return commit

    # shared --------------------------------------------------------------------------------

    def _collect(
        self, run: str, number: int, found: Commits, digest: bytes | None = None
    ) -> Commit | None:
        """Append commit `number` to `found`, or to its damaged ones; gone ones are passed over."""
        path = f"runs/{run}/{number_name(number)}"
        try:
            commit = self.read_commit(run, number)
            if digest is not None and commit.digest != digest:
                raise CorruptionError(
                    f"commit {number} of run {run!r} is not the one that its successor continues",
                    kind="damaged-commit",
                    path=path,
                )
        except NotFoundError:
            if number_name(number) not in (self._list(f"runs/{run}") or []):
                return None
            error = unfindable("commit", path, _WAY_OUT)
        except (CorruptionError, UnsupportedFormatError) as bad:
            error = bad
        else:
            found.append(commit)
            return commit
        _log.warning("%s", error)
        found.damaged.append(Damaged(path, error))
        return None

    def _nothing(self, run: str, found: Commits) -> DeltackptError:
        if found.damaged:
            first = found.damaged[0]
            return CorruptionError(
                f"no commit of run {run!r} in {self.path} can be read, the newest because"
                f" {first.error.message}",
                kind="damaged-commit",
                hint=f"{_WAY_OUT}; until then another run name can be saved to",
                path=first.path,
                run=run,
            )
        return NotFoundError(
            f"run {run!r} in {self.path} has no step yet", kind="no-step", path=self.path, run=run
        )


def _did_you_mean(name: str, runs: list[str], known: str) -> str:
    if not runs:
        return "it holds no run yet"
    if not name.isdecimal():
        return f"it has {known}; a step is named @STEP, the newest {LATEST}"
    step = f"@{name}" if len(runs) == 1 else f"@{name} or {runs[0]}@{name}"
    return f"did you mean step {name}, {step}? it has {known}"


def within(numbers: list[int], commit: Commit) -> list[int]:
    """Those of the ascending `numbers` that the commit's ancestors cover."""
    chosen: list[int] = []
    for first, last in commit.ancestors:
        chosen += numbers[bisect_left(numbers, first) : bisect_right(numbers, last)]
    return chosen


def _only(numbers: list[int], number: int) -> list[int]:
    """`number` if it is one of the ascending `numbers`."""
    place = bisect_left(numbers, number)
    return numbers[place : place + 1] if numbers[place : place + 1] == [number] else []


def _may_be(damaged: Damaged, step: int, commits: Commits) -> bool:
    """Whether the damaged commit can be that step, as far as its neighbours show.

    Steps grow from a commit to the one that continues it.
    """
    number = parse_number(damaged.path.rsplit("/", 1)[-1])
    if number is None:
        return False
    before = [c for c in commits if c.number < number]
    later = next((c for c in commits if within([number], c)), None)
    if later is not None:
        before = [c for c in before if within([c.number], later)]
    return (before[-1].step if before else -1) < step and (later is None or step < later.step)


def _nearest(steps: list[int], step: int) -> str:
    ordered = sorted(set(steps))
    place = bisect_left(ordered, step)
    near = ordered[max(0, place - 3) : place + 3]
    return ", ".join(map(str, near)) or "none"

"""Trying orders of actors: all with few preemptions, or random ones.

A bounded number of preemptions, in the manner of CHESS (Musuvathi et al., OSDI 2008): most bugs of
concurrency need one or two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from interleaving import Choose, GivenUp, Run
from touching import Touched

_NOBODY: frozenset[int] = frozenset()


def shared_paths(runs: Sequence[Run], touched: Touched) -> frozenset[str]:
    """Paths at which operations of different actors do not commute, in any of the runs.

    Preempting before an operation on any other path shows nothing that preempting elsewhere does
    not.
    """
    ops = {op for run in runs for op in run.trace}
    for op in ops:
        touched.add(op)
    return frozenset(path for op in ops if touched.rivals(op) for path in op.paths)


class Seen:
    """States from which everything has been tried: who was running (None: anybody may go on at no
    cost), and how many preemptions were left."""

    def __init__(self) -> None:
        self._states: dict[int, list[tuple[int | None, int]]] = {}

    def covers(self, key: int, running: int | None, left: int) -> bool:
        """Whether all that is possible now has been, in a run that was there before."""
        return any(
            had - (before not in (None, running)) >= left
            for before, had in self._states.get(key, ())
        )

    def add(self, key: int, running: int | None, left: int) -> None:
        self._states.setdefault(key, []).append((running, left))


def explore(start: Callable[[Choose], Run], preemptions: int, touched: Touched) -> Iterator[Run]:
    """Every schedule with at most so many preemptions; `start(choose)` makes and runs one.

    Which actor goes on when one has ended or waits is free: all choices are tried. Two things that
    would show nothing new are left out. A run that comes to a state from which as much has been
    tried before is given up (`cut`). And an actor is preempted only in favour of one that does
    anything, in any run, that does not commute with what was to be done next (`touched`): being
    preempted afterwards is the same.
    """
    stack: list[tuple[int, ...]] = [()]
    seen = Seen()
    while stack:
        prefix = stack.pop()
        spent = 0

        def choose(
            run: Run, enabled: tuple[int, ...], running: int | None,
            prefix: tuple[int, ...] = prefix,
        ) -> int:  # fmt: skip
            nonlocal spent
            at = len(run.decisions)
            if at < len(prefix):
                assert prefix[at] in enabled, "the actors do not behave the same way twice"
                spent += running in enabled and prefix[at] != running
                return prefix[at]
            who = running if running in enabled else None
            moved = not run.decisions or run.decisions[-1].at < len(run.trace)
            if moved and seen.covers(run.key(), who, preemptions - spent):
                raise GivenUp
            seen.add(run.key(), who, preemptions - spent)
            return enabled[0] if who is None else who

        run = start(choose)
        yield run
        for op in run.trace:
            touched.add(op)
        chosen = tuple(decision.chosen for decision in run.decisions)
        spent = sum(decision.preempts(decision.chosen) for decision in run.decisions)
        for at in range(len(prefix), len(run.decisions)):
            decision, next_ones = run.decisions[at], run.trace[run.decisions[at].at :][:1]
            for other in decision.enabled:
                preempts = decision.preempts(other)
                matters = not preempts or any(other in touched.rivals(op) for op in next_ones)
                if other != decision.chosen and matters and spent + preempts <= preemptions:
                    stack.append((*chosen[:at], other))


def now_and_then(chance: float, seed: int) -> Choose:
    """Preempts at random."""
    mixture = random.Random(seed)

    def choose(run: Run, enabled: tuple[int, ...], running: int | None) -> int:
        if running in enabled and mixture.random() > chance:
            return running
        return mixture.choice(enabled)

    return choose

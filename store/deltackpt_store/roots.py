"""What must stay: the commits, pins and holds of a store, and the manifests they name.

Read strictly, for deciding what may be deleted: anything that cannot be listed or read raises, and
an error never means "nothing there".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from deltackpt_store.errors import NotFoundError
from deltackpt_store.leases import held_commits
from deltackpt_store.manifest import Commit
from deltackpt_store.names import RETIRED_SUFFIX, number_name, parse_number
from deltackpt_store.oserror import storage_error
from deltackpt_store.records import unfindable
from deltackpt_store.store import Store

_REPAIR = "run `deltackpt verify`, and `deltackpt repair` before garbage is collected"


class Retired(NamedTuple):
    """A commit that retention took off the list. Its record may be gone already."""

    run: str
    number: int


@dataclass(slots=True)
class Roots:
    """What must stay. `retired` are the commits that may go, newest last within a run."""

    commits: dict[tuple[str, int], Commit] = field(default_factory=dict[tuple[str, int], Commit])
    retired: list[Retired] = field(default_factory=list[Retired])
    runs: list[str] = field(default_factory=list[str])
    newest: dict[str, int] = field(default_factory=dict[str, int])
    """Largest commit number that shows in each run, retired or not."""

    @property
    def manifests(self) -> set[bytes]:
        """Digests of all manifests that the commits name, bases included."""
        return {d for c in self.commits.values() for d in (c.manifest, c.base) if d is not None}


def read_roots(store: Store) -> Roots:
    """Read all that must stay: first the runs, then pins and holds.

    The order matters: a process that pins or holds a commit checks afterwards whether it was
    retired, so a commit that is retired here and was pinned or held in time is found among those.
    StorageError, CorruptionError, UnsupportedFormatError when anything cannot be read.
    """
    roots = Roots(runs=[])
    for run in store.runs():
        _read_run(store, run, roots)
    for name, pin in store.all_pins().items():
        if (pin.run, pin.number) not in roots.commits:
            with contextlib.suppress(NotFoundError):  # the pin was removed in the meantime
                roots.commits[pin.run, pin.number] = store.pinned(name)
    for run, number in held_commits(store.io, store.path):
        if (run, number) not in roots.commits:
            try:
                roots.commits[run, number] = store.read_commit(run, number)
            except NotFoundError:
                continue  # collected before it was held, which the holder has noticed
    roots.retired = [r for r in roots.retired if (r.run, r.number) not in roots.commits]
    return roots


def _read_run(store: Store, run: str, roots: Roots) -> None:
    directory = f"{store.path}/runs/{run}"
    names = set(_list(store, directory))  # also a file in its place ends it: see `verify`
    roots.runs.append(run)
    for name in sorted(names):
        number = parse_number(name.removesuffix(RETIRED_SUFFIX))
        if number is None:
            continue
        roots.newest[run] = max(number, roots.newest.get(run, 0))
        if name.endswith(RETIRED_SUFFIX):
            roots.retired.append(Retired(run, number))
        elif name + RETIRED_SUFFIX not in names:
            commit = _strict(store, run, number, lambda d=directory, n=name: n in _list(store, d))
            if commit is not None:
                roots.commits[run, number] = commit


def _strict(store: Store, run: str, number: int, listed: Callable[[], bool]) -> Commit | None:
    """The commit; None when its own writer has withdrawn it in the meantime."""
    try:
        return store.read_commit(run, number)
    except NotFoundError:
        if not listed():
            return None
        raise unfindable("commit", f"runs/{run}/{number_name(number)}", _REPAIR) from None


def _list(store: Store, path: str) -> list[str]:
    try:
        return store.io.list(path)
    except OSError as error:
        raise storage_error(error, "list", path) from error

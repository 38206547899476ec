"""Commits that are gone though nothing took them away.

A commit names the one that it continues, and all of its run that it continues (`ancestors`). One
that is named so and is not there was collected, or is *lost*. Collection publishes, before it
removes a record, a generation whose boundary reaches it; so what lies above the boundary, and has
no mark of retirement either, is lost. Of the newest commits of a run, and of those below a
boundary, nothing here can tell: a copy of the store does (`repair`).
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from deltackpt_store.errors import CorruptionError, StorageError
from deltackpt_store.generation import newest_number, read_generation
from deltackpt_store.manifest import Commit
from deltackpt_store.names import RETIRED_SUFFIX, number_name, parse_number
from deltackpt_store.oserror import storage_error
from deltackpt_store.store import Store

_MOST = 1000
"""Told of each run: a damaged range may name any number of commits."""
_TRIES = 10

LOST = "it is gone: later commits continue it, and nothing retired it"
"""Why such a commit is a finding."""

Boundary = Mapping[str, int]


class LostCommit(NamedTuple):
    """A commit that others continue and that is gone."""

    run: str
    number: int

    @property
    def path(self) -> str:
        """Its path in the store."""
        return f"runs/{self.run}/{number_name(self.number)}"


def read_boundary(store: Store) -> Boundary:
    """Per run, the largest number whose record may have been collected, as of now.

    Empty when the generation record and its copy are both damaged.
    StorageError, UnsupportedFormatError.
    """
    for attempt in range(_TRIES):
        try:
            return read_generation(
                store.io, store.path, newest_number(store.io, store.path)
            ).boundary
        except CorruptionError:
            return {}
        except StorageError as error:  # a newer collection has just removed it
            if error.errno != errno.ENOENT or attempt == _TRIES - 1:
                raise
        except FileNotFoundError:
            return {}  # never collected
        except OSError as error:
            raise storage_error(error, "look for a collection in", store.path) from error
    raise AssertionError


def numbers_there(store: Store, run: str) -> set[int]:
    """Numbers of the commits of `run` of which a record or a mark of retirement lies there."""
    try:
        names = store.io.list(f"{store.path}/runs/{run}")
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise storage_error(error, "list", f"{store.path}/runs/{run}") from error
    numbers = (parse_number(name.removesuffix(RETIRED_SUFFIX)) for name in names)
    return {number for number in numbers if number is not None}


def lost_commits(
    store: Store,
    commits: Iterable[Commit],
    boundary: Boundary,
    *,
    retired: Iterable[tuple[str, int]] = (),
) -> list[LostCommit]:
    """Commits that `commits` continue and that are lost, in order.

    `boundary` was read before; it is read again when anything is missing, after another look at
    what is there: in this order a collection beside this is never taken for a loss. `retired` are
    known to be retired. StorageError, UnsupportedFormatError.
    """
    there: dict[str, set[int]] = {}
    named: dict[str, set[tuple[int, int]]] = {}
    for commit in commits:
        there.setdefault(commit.run, set()).add(commit.number)
        named.setdefault(commit.run, set()).update(commit.ancestors)
        if commit.parent is not None:
            run, number, _ = commit.parent
            named.setdefault(run, set()).add((number, number))
    for run, number in retired:
        there.setdefault(run, set()).add(number)
    found: list[LostCommit] = []
    for run in sorted(named):
        gaps = _gaps(named[run], there.get(run, set()), boundary.get(run, 0))
        missing = list(islice(gaps, _MOST))
        if missing:
            now = numbers_there(store, run)
            found += [LostCommit(run, number) for number in missing if number not in now]
    if found:
        boundary = read_boundary(store)
        found = [one for one in found if one.number > boundary.get(one.run, 0)]
    return found


def refuse_lost(lost: list[LostCommit], path: str) -> None:
    """CorruptionError (kind ``lost-commit``) when any commit is lost: what it needs would go."""
    if not lost:
        return
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    raise CorruptionError(
        f"commit {lost[0].path}{more} is lost: later commits continue it, and nothing retired it",
        kind="lost-commit",
        hint="run `deltackpt repair --from` a copy of the store; if there is none, `deltackpt gc"
        " --accept-lost` gives lost steps up and deletes what only they need",
        path=path,
        run=lost[0].run,
        number=lost[0].number,
    )


def _gaps(ranges: Iterable[tuple[int, int]], there: set[int], above: int) -> Iterator[int]:
    """Numbers larger than `above` in any of the inclusive ranges that are not `there`."""
    done = above
    for first, last in sorted(ranges):
        for number in range(max(first, done + 1), last + 1):
            if number not in there:
                yield number
        done = max(done, last)

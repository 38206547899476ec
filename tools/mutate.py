"""Remove one guard of the store's promises at a time, and see that a test notices.

    make mutate                              every guard of tests/mutation/guards.toml
    make mutate ARGS="--only lease --jobs 1" guards whose name, file or invariant holds a word
    make mutate ARGS="--resume"              leaves out what was killed before and has not changed

Works on copies of the sources in a temporary directory: nothing here is changed. First the tests
named are run as they are (all must pass), then once per guard with that guard removed, on the same
copy. A guard is *killed* when a test fails (or hangs: the time limit says so), *survives* when all
pass, and is *broken* when its text is not there exactly once or the tests could not even be
collected. Ends with 0 only if every guard was killed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
GUARDS = ROOT / "tests" / "mutation" / "guards.toml"
RESULTS = ROOT / ".mutate" / "killed.json"
INVARIANTS = tuple(f"I{number}" for number in range(1, 13))
_COPIED = ("deltackpt", "store", "tools", "tests", "examples", "docs", "pyproject.toml", "Makefile",
           "README.md", "CHANGELOG.md", "LICENSE")  # fmt: skip
_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard: `find`, which is exactly once in `file` (or in what is called `within` there),
    becomes `replace`; one of `tests` must fail."""

    name: str
    invariants: tuple[str, ...]
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    within: str = ""
    seconds: float = _SECONDS
    """A test that takes longer counts as failing."""

    def removed_from(self, source: str) -> str:
        """`source` without the guard; ValueError when it is not there exactly once."""
        start, end = _span(source, self.within) if self.within else (0, len(source))
        part = source[start:end]
        if part.count(self.find) != 1:
            where = f"{self.within} of {self.file}" if self.within else self.file
            raise ValueError(
                f"{where} holds the text of the guard {self.name!r} {part.count(self.find)} times,"
                f" not once: bring {GUARDS.relative_to(ROOT)} up to date"
            )
        mutated = source[:start] + part.replace(self.find, self.replace) + source[end:]
        ast.parse(mutated)
        return mutated

    def fingerprint(self, root: Path) -> str:
        """Changes when the guard, its file or its tests do."""
        digest = hashlib.sha256(repr(self).encode())
        for path in sorted({self.file, *(test.partition("::")[0] for test in self.tests)}):
            digest.update((root / path).read_bytes())
        return digest.hexdigest()


def _span(source: str, name: str) -> tuple[int, int]:
    """Where the only function or class called `name` begins and ends in `source`."""
    found = [
        (node.lineno, node.end_lineno or 0)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} functions or classes are called {name!r}, not one")
    lines = source.splitlines(keepends=True)
    first, last = found[0]
    return sum(map(len, lines[: first - 1])), sum(map(len, lines[:last]))


def read_guards(path: Path = GUARDS) -> list[Guard]:
    """All guards, in the order of the file. Replaced text always consists of whole lines."""
    with open(path, "rb") as file:
        entries = tomllib.load(file)["guard"]
    return [
        Guard(
            entry["name"],
            tuple(entry["invariants"]),
            entry["file"],
            entry["find"],
            entry["replace"],
            tuple(entry["tests"]),
            entry.get("within", ""),
            entry.get("seconds", _SECONDS),
        )
        for entry in entries
    ]


class Workplace:
    """A copy of the sources in which one guard at a time is removed."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
                shutil.copytree(source, directory / name, ignore=ignored)
            elif source.exists():
                shutil.copy2(source, directory / name)
        self._time = int(time.time())

    def run(self, tests: Iterable[str], seconds: float = _SECONDS) -> tuple[int | None, str]:
        """Exit code of pytest (None: it took too long) and the end of what it printed."""
        paths = [self.root, self.root / "store", self.root / "tools"]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1", "TMPDIR": str(self.root),
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                   "--no-header", f"--basetemp={self.root / 'tmp'}", *tests]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=self.root, env=environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return None, ""
        return process.returncode, output[-4000:]

    def try_without(self, guard: Guard) -> tuple[str, str]:
        """("killed" | "survived" | "broken", what was printed)."""
        path = self.root / guard.file
        source = path.read_text()
        try:
            self._write(path, guard.removed_from(source))
        except (ValueError, SyntaxError) as error:
            return "broken", str(error)
        try:
            code, output = self.run(guard.tests, guard.seconds)
        finally:
            self._write(path, source)
        if code is None or code == 1:
            return "killed", output
        return ("survived" if code == 0 else "broken"), output

    def _write(self, path: Path, text: str) -> None:
        """Each content has a time of its own, by which Python knows what it has compiled."""
        path.write_text(text)
        self._time += 2
        os.utime(path, (self._time, self._time))


class Session:
    """Guards worked off by several workplaces."""

    def __init__(self, guards: list[Guard], jobs: int, resume: bool) -> None:
        self._known: dict[str, str] = {}
        if RESULTS.exists():
            self._known = json.loads(RESULTS.read_text())
        known = self._known if resume else {}
        self._guards = [g for g in guards if known.get(g.name) != g.fingerprint(ROOT)]
        self.left_out = len(guards) - len(self._guards)
        self._jobs = jobs
        self._lock = threading.Lock()
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.failing: list[str] = []

    def work(self, *, baseline: bool = True) -> None:
        with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
            places = [Workplace(_made(Path(directory, str(n)))) for n in range(self._jobs)]
            if baseline:
                self._in_parallel(places, self._files(), self._baseline)
            if not self.failing:
                self._in_parallel(places, self._guards, self._try)

    def _files(self) -> list[list[str]]:
        """The tests named, by file: one run of pytest each."""
        files: dict[str, set[str]] = {}
        for test in sorted({test for guard in self._guards for test in guard.tests}):
            files.setdefault(test.partition("::")[0], set()).add(test)
        return [[name] if name in tests else sorted(tests) for name, tests in files.items()]

    def _baseline(self, place: Workplace, tests: list[str]) -> None:
        code, output = place.run(tests)
        if code != 0:
            with self._lock:
                self.failing += tests
            print(f"FAILS UNCHANGED {' '.join(tests)}\n{output}", flush=True)

    def _try(self, place: Workplace, guard: Guard) -> None:
        began = time.monotonic()
        outcome, output = place.try_without(guard)
        with self._lock:
            self.outcomes[guard.name] = outcome, output
            if outcome == "killed":
                self._known[guard.name] = guard.fingerprint(ROOT)
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(self._known, indent=1))
            number, seconds = len(self.outcomes), time.monotonic() - began
            print(f"[{number}/{len(self._guards)}] {outcome:8} {guard.name} ({seconds:.0f} s)",
                  flush=True)  # fmt: skip
            if outcome != "killed":
                print(output, flush=True)

    def _in_parallel(
        self, places: list[Workplace], items: Iterable[T], do: Callable[[Workplace, T], None]
    ) -> None:
        todo: queue.SimpleQueue[T] = queue.SimpleQueue()
        for item in items:
            todo.put(item)

        def loop(place: Workplace) -> None:
            while True:
                try:
                    item = todo.get_nowait()
                except queue.Empty:
                    return
                do(place, item)

        threads = [threading.Thread(target=loop, args=(place,)) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-baseline", action="store_true",
                        help="do not run the tests without a change first")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="only tell which guards there are")
    options = parser.parse_args()
    guards = [
        guard for guard in read_guards()
        if all(word in (guard.name, guard.file, *guard.invariants) or word in guard.name
               for word in options.only)
    ]  # fmt: skip
    if options.list:
        for guard in guards:
            print(f"{'+'.join(guard.invariants):8} {guard.name}  ({guard.file})")
        return 0
    session = Session(guards, max(1, options.jobs), options.resume)
    began = time.monotonic()
    session.work(baseline=not options.no_baseline)
    bad = {name: how for name, (how, _) in session.outcomes.items() if how != "killed"}
    killed = len(session.outcomes) - len(bad) + session.left_out
    print(f"guards removed: {len(guards)}, noticed: {killed} ({session.left_out} of them before), "
          f"minutes: {(time.monotonic() - began) / 60:.1f}")  # fmt: skip
    for name, how in bad.items():
        print(f"{how.upper()}: {name}")
    return 0 if killed == len(guards) and guards else 1


if __name__ == "__main__":
    sys.exit(main())

"""A process that works on a store beside a test, and is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

WORK = """
import sys
from deltackpt_store.compact import compact
from deltackpt_store.errors import ConflictError
from deltackpt_store.gc import collect
from deltackpt_store.store import Store
act = {"collect": collect, "compact": compact}[sys.argv[2]]
print("ready", flush=True)
sys.stdin.readline()
while True:
    try:
        act(Store.open(sys.argv[1]), timeout=30)
    except ConflictError:
        pass
"""


@contextmanager
def beside(path: str, what: str) -> Iterator[None]:
    """Meanwhile a process collects or compacts ("collect", "compact") the store at `path` again and
    again; at the end it is killed, wherever it is. AssertionError when it has ended by itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORK, path, what],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        yield
        assert process.poll() is None, f"{what} ended by itself"
    finally:
        process.kill()
        process.communicate()

"""Starting this package once more, in a process of its own: the command, and its environment.

What runs is `writer`, by its file name: it needs no import path, and the user's main module is
never imported again.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import sys

_FOLDER, _NAME = os.path.split(__file__)
WRITER = os.path.join(_FOLDER, "writer" + os.path.splitext(_NAME)[1])  # whether compiled or not
_FROM_ARCHIVE = """
import sys, zipimport
file = sys.argv.pop(1)
code = zipimport.zipimporter(file.rpartition("/")[0]).get_code("writer")
exec(code, {"__name__": "__main__", "__file__": file})
"""
_DEPENDENCIES = ("blake3", "lmdb", "lz4", "msgspec", "numpy", "xxhash", "zstandard")


def has_interpreter() -> bool:
    """Whether this process runs in an interpreter that can be started again.

    Of a program that was frozen into an executable, another process would be that program again.
    """
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def command(*options: str) -> list[str]:
    """The command line that runs `writer` with these options; OSError without an interpreter."""
    if not has_interpreter():
        raise OSError(errno.ENOEXEC, "there is no Python interpreter to start a process with")
    directories = os.pathsep.join(_dependency_directories())
    start = [WRITER] if os.path.isfile(WRITER) else ["-c", _FROM_ARCHIVE, WRITER]
    return [*_interpreter(), *start, *options, "--path", directories]


def _interpreter() -> list[str]:
    """The trainer's interpreter, with what it has been told to leave out of account."""
    command = [sys.executable, "-P"]
    if sys.flags.ignore_environment:
        command.append("-E")
    if sys.flags.no_user_site:
        command.append("-s")
    return command


def environment() -> dict[str, str]:
    """The trainer's environment, without what would make an interpreter misbehave."""
    environment = dict(os.environ)
    for name in ("PYTHONINSPECT", "PYTHONWARNINGS", "PYTHONSTARTUP", "PYTHONBREAKPOINT"):
        environment.pop(name, None)
    inherited = environment.pop("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in map(_absolute, filter(None, inherited)) if path]
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)  # the writer runs in another directory
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = "1"
    # Buffers of a chunk's size come and go: memory given back to the system and faulted in anew
    # each time costs encoding a third of its speed.
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(64 << 20))
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(128 << 20))
    return environment


def _absolute(path: str) -> str:
    """`path` from the root; "" for one relative to a working directory that has been deleted."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        return ""


def _dependency_directories() -> list[str]:
    """Import directories of what the writer needs, for where only ``sys.path`` leads to them.

    The writer looks there last.
    """
    directories: list[str] = []
    for name in _DEPENDENCIES:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is None or spec.origin is None:
            continue
        directory = os.path.dirname(_absolute(spec.origin))
        if spec.submodule_search_locations is not None:
            directory = os.path.dirname(directory)
        if directory and directory not in directories:
            directories.append(directory)
    return directories

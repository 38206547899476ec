"""The writer process: ``python .../deltackpt_store/writer.py --control-fd N --ring-fd M ...``.

Started by the trainer (see `launch`), it outlives it: signals meant for the job are ignored, and
it ends by itself when its control channel does, after committing what was completely handed over.
``python -m deltackpt_store.writer`` does the same where the package can be imported. Run as a
file it needs no PYTHONPATH: it is the very package of the trainer, and no module that lies beside
the package (in a project directory, or a backport in site-packages) shadows the standard library.
Nothing heavy is imported before the signals are dealt with.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

IGNORED_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if hasattr(signal, name)
)
"""Signals that schedulers and terminals send to whole jobs. They are blocked when the process is
started and ignored from its first line on."""


def main(arguments: list[str]) -> int:
    """Run the writer with the given command line; returns the exit code.

    ``--control-fd`` and ``--ring-fd`` are inherited descriptors, ``--parent`` the trainer's
    process id, ``--nice`` an increment, ``--path`` more import directories for dependencies.
    With ``--compact`` (settings) and ``--store`` (a path) it compacts instead: see `compact_job`;
    with ``--read`` and ``--memory`` (descriptors) it helps with reading: see `read_helper`.
    """
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    # A trainer may ignore it, and that is inherited: the number of an ended helper would be free at
    # once for another process, and who kills the helper would kill that one.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    nice = int(options.get("--nice", "0"))
    if nice:
        os.nice(nice)
    sys.path += [path for path in options.get("--path", "").split(os.pathsep) if path]
    if "deltackpt_store" not in sys.modules:
        _adopt_package()
    if "--compact" in options:
        from deltackpt_store.compact_job import run_job

        run_job(options["--store"], options["--compact"], int(options["--parent"]))
        return 0
    if "--read" in options:
        from deltackpt_store.read_helper import serve

        serve(int(options["--read"]), int(options["--memory"]))
        return 0
    from deltackpt_store.serve import serve_process

    gc.freeze()  # nothing that the imports made is ever garbage: do not look at it again
    serve_process(
        control_fd=int(options["--control-fd"]),
        ring_fd=int(options["--ring-fd"]),
        parent=int(options["--parent"]),
    )
    return 0


def _adopt_package() -> None:
    """Make ``deltackpt_store`` the package this file lies in, wherever the import path leads.

    The package may be compiled files without sources, or lie in an archive.
    """
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    directory = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("deltackpt_store", [os.path.dirname(directory)])
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {directory}")
    package = module_from_spec(spec)
    sys.modules["deltackpt_store"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

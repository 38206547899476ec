"""The writer process: ``python -m deltackpt_store.writer --control-fd N --ring-fd M ...``.

Started by the trainer (see `launch`), it outlives it: signals meant for the job are ignored, and
it ends by itself when its control channel does, after committing what was completely handed over.
Only this module is imported before the signals are dealt with; everything heavy comes after.
"""

from __future__ import annotations

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
    """Run the writer with the given command line; returns the exit code."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    added = options.get("--path", "").split(os.pathsep)
    # Behind the standard library and site-packages: what lies beside the package shadows nothing.
    sys.path[:] = [path for path in sys.path if path not in added] + added
    nice = int(options.get("--nice", "0"))
    if nice:
        os.nice(nice)
    from deltackpt_store.serve import serve_process

    serve_process(
        control_fd=int(options["--control-fd"]),
        ring_fd=int(options["--ring-fd"]),
        parent=int(options["--parent"]),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

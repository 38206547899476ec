"""Reusable machinery for testing a store, and what is built on it, against faults.

`SimulatedDisk`   an in-memory file layer that enumerates what a power cut could leave behind
`FailingIO`       a file layer whose n-th call fails
`SlowIO`          a file layer that waits before chosen calls
"""

from deltackpt_store.testing.failing import CALLS, FailingIO, ShortIO, SlowIO
from deltackpt_store.testing.simulated_disk import CrashState, SimulatedDisk

__all__ = ["CALLS", "CrashState", "FailingIO", "ShortIO", "SimulatedDisk", "SlowIO"]

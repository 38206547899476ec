"""Reusable machinery for testing a store, and what is built on it, against faults.

`SimulatedDisk`        an in-memory file layer that enumerates what a power cut could leave behind
`check_crash_states`   recovers from each of these, once per distinct content
`FailingIO`            a file layer whose n-th call fails
`ShortIO`              a file layer whose writes take only part of what they are given
`SlowIO`               a file layer that waits before chosen calls
"""

from deltackpt_store.testing.failing import CALLS, FailingIO, ShortIO, SlowIO
from deltackpt_store.testing.simulated_disk import (
    CrashState,
    CrashStates,
    SimulatedDisk,
    check_crash_states,
)

__all__ = [
    "CALLS",
    "CrashState",
    "CrashStates",
    "FailingIO",
    "ShortIO",
    "SimulatedDisk",
    "SlowIO",
    "check_crash_states",
]

"""Reusable machinery for testing a store, and what is built on it, against faults.

`SimulatedDisk`        an in-memory file layer that enumerates what a power cut could leave behind
`check_crash_states`   recovers from each of these, once per distinct content
`FailingIO`            a file layer whose n-th call fails
`ShortIO`              a file layer whose writes take only part of what they are given
`SlowIO`               a file layer that waits before chosen calls
`killed_at`            runs an operation in a child that is killed at its n-th file call
`check_mutants`        damages files, and demands the right content or an error
`FileLayerContract`    what a file layer must do to hold a store, as a class of tests for pytest
"""

from deltackpt_store.testing.conformance import FileLayerContract
from deltackpt_store.testing.corruption import Mutant, Verdict, check_mutants, damaged, mutants
from deltackpt_store.testing.failing import CALLS, CHANGES, FailingIO, ShortIO, SlowIO
from deltackpt_store.testing.killing import Death, KillingIO, killed_at
from deltackpt_store.testing.simulated_disk import (
    CrashState,
    CrashStates,
    SimulatedDisk,
    check_crash_states,
)

__all__ = [
    "CALLS",
    "CHANGES",
    "CrashState",
    "CrashStates",
    "Death",
    "FailingIO",
    "FileLayerContract",
    "KillingIO",
    "Mutant",
    "ShortIO",
    "SimulatedDisk",
    "SlowIO",
    "Verdict",
    "check_crash_states",
    "check_mutants",
    "damaged",
    "killed_at",
    "mutants",
]

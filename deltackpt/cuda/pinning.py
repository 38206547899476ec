"""Page-locking ring slots, so that a device copies into them without a detour.

A slot is locked when it is first used (the ring is sparse and grows with need), and stays locked
until the ring is replaced or the stager closed. Where memory cannot be locked, copies go through
page-locked memory of torch's and one host copy, and a warning says why.
"""

from __future__ import annotations

import logging

import torch
from deltackpt_store.copies import copy_bytes

from ..detect import memory
from ..stage import Ring
from .hasher import Counters
from .runtime import Runtime

_log = logging.getLogger("deltackpt.cuda")


class PinnedSlots:
    """The slots of one ring as copy targets. Used by the staging thread."""

    def __init__(self, runtime: Runtime, counters: Counters) -> None:
        self._runtime, self._counters = runtime, counters
        self._ring: Ring | None = None
        self._locked: dict[int, tuple[memoryview, torch.Tensor]] = {}
        self._detours: dict[int, torch.Tensor] = {}
        self._spare: list[torch.Tensor] = []
        self._can_lock = True

    def use(self, ring: Ring) -> None:
        """Say which ring comes next; lets go of another one's slots."""
        if ring is not self._ring:
            self.forget()
            self._ring = ring

    def target(self, slot: int) -> torch.Tensor:
        """Page-locked memory that will be, or will be brought by :meth:`land` to, a leased slot."""
        assert self._ring is not None
        held = self._locked.get(slot)
        if held is not None:
            return held[1]
        view = self._ring.view(slot)
        if self._can_lock:
            reason = self._runtime.lock(view)
            if reason is None:
                memory = torch.frombuffer(view, dtype=torch.uint8)
                self._locked[slot] = (view, memory)
                self._counters.pinned_bytes += len(view)
                return memory
            self._can_lock = False
            _log.warning(
                "staging memory cannot be page-locked (%s): each save makes one more host copy",
                reason,
            )
        if slot in self._detours:  # of a save that failed
            return self._detours[slot]
        if self._spare:
            detour = self._spare.pop()
        else:
            detour = self._runtime.pinned(len(view))
            self._counters.pinned_bytes += len(view)
        self._detours[slot] = detour
        return detour

    def land(self, slot: int, used: int) -> None:
        """The copy of `used` bytes to :meth:`target` is complete: see that the slot has them."""
        detour = self._detours.pop(slot, None)
        if detour is not None:
            assert self._ring is not None
            copy_bytes(self._ring.view(slot)[:used], memory(detour[:used]))
            self._spare.append(detour)

    def forget(self) -> None:
        """Unlock everything. No copy into any slot may be running."""
        for view, _ in self._locked.values():
            self._runtime.unlock(view)
            self._counters.pinned_bytes -= len(view)
        for detour in (*self._detours.values(), *self._spare):
            self._counters.pinned_bytes -= detour.numel()
        self._locked.clear()
        self._detours.clear()
        self._spare.clear()
        self._ring = None

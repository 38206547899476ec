"""How much of what lies in the manifest itself, small tensors and plain values, a save changed."""

from __future__ import annotations

from collections.abc import Mapping

from deltackpt_store.manifest import Layout

_NOTHING: dict[int, int] = {}


class SmallParts:
    """Compares the small parts of each save with those of the save before, by hashes of them.

    Used by one thread. In a state of another layout everything counts as changed.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._parts: tuple[dict[int, int], ...] = (_NOTHING, _NOTHING)

    def next(
        self, layout: Layout, objects: Mapping[int, bytes], inline: Mapping[int, bytes]
    ) -> int:
        """Bytes that differ from the last call's; everything in the first one."""
        same = self._layout is not None and (layout is self._layout or layout == self._layout)
        before = self._parts if same else (_NOTHING, _NOTHING)
        parts = tuple({i: hash(data) for i, data in kind.items()} for kind in (objects, inline))
        self._layout, self._parts = layout, parts
        return sum(
            len(data)
            for kind, new, old in zip((objects, inline), parts, before, strict=True)
            for i, data in kind.items()
            if old.get(i) != new[i]
        )

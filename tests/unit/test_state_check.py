"""A state that no save could take is refused where it is written down, not at the first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import InvalidInputError
from torch import nn
from torch.utils.data import DataLoader

import deltackpt
from deltackpt.capture import capture


class _Counting:
    """Has a state, and counts how often it is asked for it."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _cycle() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


@pytest.mark.parametrize(
    ("state", "path", "advice"),
    [
        ({"loader": DataLoader([1, 2])}, "loader", "StatefulDataLoader"),
        ({"data": {"train": [DataLoader([1])]}}, "data/train/0", "StatefulDataLoader"),
        ({"sampler": object()}, "sampler", "state_dict"),
        ({"n": 1, "seen": {object()}}, "seen", ""),
        ({"log": open}, "log", ""),
        ({"generator": torch.Generator()}, "generator", "get_state"),
        ({"ring": _cycle()}, "ring/0", "cycle"),
        ({"#rng": 1}, "#rng", "rename"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_the_constructor(
    tmp_path: Path, state: dict[str, Any], path: str, advice: str
) -> None:
    """Prevents: a training that ends at its first due save, hours after the mistake."""
    state = {"model": nn.Linear(2, 2), **state}
    with pytest.raises(InvalidInputError) as caught:
        deltackpt.Checkpointer(tmp_path / "store", state, writer="thread")
    assert repr(path) in caught.value.message
    assert advice in str(caught.value.hint)
    assert not (tmp_path / "store").exists()
    with pytest.raises(InvalidInputError) as again:
        capture(state, chunk_bytes=4096)
    assert again.value.message == caught.value.message


def test_objects_are_not_asked_for_their_state(tmp_path: Path) -> None:
    counting = _Counting()
    state = {"own": counting, "x": [torch.zeros(3)], "n": 1, "names": ("a", None)}
    with deltackpt.Checkpointer(tmp_path / "store", state, writer="thread") as ckpt:
        assert counting.asked == 0
        ckpt.save(0)
    assert counting.asked == 1

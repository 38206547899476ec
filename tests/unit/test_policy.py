"""When a step is due, and options that are refused where they are written down."""

from __future__ import annotations

import dataclasses
import inspect
import time
from pathlib import Path
from typing import Any

import deltackpt_store
import numpy as np
import pytest
import torch
from deltackpt_store.errors import InvalidInputError
from deltackpt_store.names import check_step

import deltackpt
from deltackpt.checkpointer import Checkpointer
from deltackpt.compaction import Compact
from deltackpt.options import check_metrics, check_options
from deltackpt.policy import Due, Every, Keep, check_every

GOOD: dict[str, Any] = {
    "run": "main", "every": None, "keep": None, "writer": "process", "ring_bytes": None,
    "chunk_bytes": 1 << 18, "codec": "auto", "shadow": False, "overlap": True, "on_busy": "wait",
    "on_error": "raise", "durable_timeout": 600.0, "lock_timeout": 60.0, "rng": True,
    "threads": None, "final": True,
}  # fmt: skip


def due_steps(every: Any, steps: Any, *, first: int | None = None) -> list[int]:
    due = Due(check_every(every))
    if first is not None:
        due.seen(first, started=True)
    found: list[int] = []
    for step in steps:
        if due.is_due(step):
            found.append(step)
        due.seen(step, started=bool(found) and found[-1] == step)
    return found


def test_every_int_means_multiples() -> None:
    assert due_steps(3, range(10)) == [0, 3, 6, 9]
    assert due_steps(Every(steps=1), range(4)) == [0, 1, 2, 3]
    assert due_steps(None, range(10)) == []


def test_a_multiple_that_is_stepped_over_counts() -> None:
    assert due_steps(50, range(8, 200, 40)) == [88, 128, 168]  # 50, 100 and 150 were passed
    assert due_steps(50, [48, 51, 52, 99, 200]) == [51, 200]


def test_the_grid_does_not_move_on_resume() -> None:
    # case 161
    assert due_steps(5, range(8, 21), first=7) == [10, 15, 20]
    assert due_steps(5, range(6, 12), first=5) == [10]


def test_every_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    due = Due(Every(seconds=30))
    assert not due.is_due(1)
    now[0] = 129.9
    assert not due.is_due(2)
    now[0] = 130.0
    assert due.is_due(3)
    due.seen(3, started=True)
    assert not due.is_due(4)
    both = Due(Every(seconds=30, steps=10))
    assert both.is_due(10)
    now[0] = 160.0
    assert both.is_due(11)


def test_every_callable_gets_the_step() -> None:
    assert due_steps(lambda step: step in (2, 5), range(8)) == [2, 5]


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "10", int, Due])
def test_bad_every_is_refused(every: Any) -> None:
    with pytest.raises(InvalidInputError, match="every"):
        check_every(every)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"steps": 0}, {"steps": -5}, {"steps": 2.0}, {"steps": True}, {"seconds": 0},
     {"seconds": -1.0}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"seconds": "1"}],
)  # fmt: skip
def test_bad_every_values_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"[Ee]very"):
        Every(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"last": 0}, {"last": -1}, {"last": 1.0}, {"last": True}, {"every": 0}, {"within": 0},
     {"within": -5.0}, {"best": ""}, {"best": ("loss",)}, {"best": ("loss", "smallest")},
     {"best": ("", "min")}, {"best": 3}, {"last": 1 << 63}, {"every": 10**30},
     {"within": 10**30}],
)  # fmt: skip
def test_retention_that_keeps_nothing_is_refused(arguments: dict[str, Any]) -> None:
    """Prevents: an edge value that deletes every step."""
    # case 100
    with pytest.raises(InvalidInputError, match=f"keep.{next(iter(arguments))}"):
        Keep(**arguments)


@pytest.mark.parametrize("option", ["interval", "every", "max_rate", "when_ratio"])
def test_numbers_that_cannot_be_handed_on_are_refused(option: str) -> None:
    """Prevents: an option that is first noticed when a process is to be told of it."""
    # case 26
    with pytest.raises(InvalidInputError, match=option):
        Compact(**{option: 1 << 63})


@pytest.mark.parametrize("policy", [Every, Keep])
def test_help_shows_the_parameters(policy: type) -> None:
    names = [field.name for field in dataclasses.fields(policy)]
    assert list(inspect.signature(policy).parameters) == names


def test_good_retention() -> None:
    keep = Keep(last=1, every=1000, best=("loss", "max"), within=3600.0)
    assert (keep.last, keep.every, keep.best, keep.within) == (1, 1000, ("loss", "max"), 3600.0)
    assert Keep() == Keep(last=None)
    with pytest.raises(AttributeError):
        keep.last = 0  # that it is frozen is the point


@pytest.mark.parametrize(
    ("option", "value"),
    [("chunk_bytes", value) for value in (0, 1, 1023, 1025, 4 << 30, -1024, 1024.0, True, None)]
    + [("ring_bytes", value) for value in (0, 1, -1, 4096, "1G", 1.5)]
    + [("writer", "thread pool"), ("codec", "zip"), ("on_busy", "drop"), ("on_error", "ignore")]
    + [("shadow", 1), ("overlap", "yes"), ("rng", 1), ("final", None)]
    + [("threads", 0), ("threads", 2.0)]
    + [("durable_timeout", 0), ("durable_timeout", -1), ("durable_timeout", float("nan"))]
    + [("lock_timeout", -1), ("lock_timeout", "long"), ("keep", 5), ("keep", {"last": 5})],
)
def test_bad_options_are_refused_by_name(option: str, value: Any) -> None:
    """Prevents: a wrong size that is first noticed at the first save, hours later."""
    # case 26
    with pytest.raises(InvalidInputError, match=option) as caught:
        check_options(**{**GOOD, option: value})
    assert caught.value.context["option"] == option


@pytest.mark.parametrize("run", ["", ".hidden", "-dash", "a/b", "ü", "x" * 101, None, 3])
def test_bad_run_names_are_refused(run: Any) -> None:
    with pytest.raises(InvalidInputError):
        check_options(**{**GOOD, "run": run})


@pytest.mark.parametrize("chunk_bytes", [1024, 65536, 1 << 18, 16 << 20])
@pytest.mark.parametrize("ring", [1, 3, 64])
def test_a_slot_always_holds_a_chunk(chunk_bytes: int, ring: int) -> None:
    options = check_options(
        **{**GOOD, "chunk_bytes": chunk_bytes, "ring_bytes": ring * chunk_bytes}
    )
    slot = options.slot_bytes(ring * chunk_bytes)
    assert slot >= chunk_bytes
    assert slot % 4096 == 0


NO_STEPS = [
    -1, 1 << 63, 1.0, True, "1", None, np.bool_(True), np.float32(1),
    np.array([1, 2]), np.array(1.0), torch.tensor(True), torch.tensor(1.0),
    torch.tensor([1, 2]), torch.tensor([]),
    torch.empty(1, device="meta", dtype=torch.int64),
]  # fmt: skip


@pytest.mark.parametrize("step", NO_STEPS, ids=repr)
def test_bad_steps_are_refused(step: Any) -> None:
    # case 99
    with pytest.raises(InvalidInputError, match="step"):
        check_step(step)


@pytest.mark.parametrize(
    "step", [7, np.int64(7), np.uint8(7), np.array(7), torch.tensor(7), torch.tensor([7])], ids=repr
)
def test_a_step_is_named_the_same_way_everywhere(tmp_path: Path, step: Any) -> None:
    """Prevents: a number that `save` took and `restore` refuses, on the day of the crash."""
    # case 91
    with Checkpointer(tmp_path, {"x": torch.ones(3)}, writer="thread") as ckpt:
        assert ckpt.should_save(step) is False
        assert ckpt.save(step).result().step == 7
        restored = ckpt.restore(step)
        assert restored is not None
        assert (type(restored.step), restored.step) == (int, 7)
    assert torch.equal(deltackpt.load(tmp_path, step=step)["x"], torch.ones(3))


def test_steps_and_metrics_are_plain_numbers() -> None:
    assert check_step((1 << 63) - 1) == (1 << 63) - 1
    for large in (1 << 63, 10**5000):  # whose digits Python does not even print
        with pytest.raises(InvalidInputError, match="63 bits"):
            check_step(large)
    metrics = check_metrics({"loss": torch.tensor(0.5), "n": np.float32(2), "i": 3})
    assert metrics == {"loss": 0.5, "n": 2.0, "i": 3.0}
    assert all(type(value) is float for value in metrics.values())
    assert check_metrics(None) == {}
    for bad in ({"loss": "low"}, {1: 1.0}, [("loss", 1.0)], {"x": torch.zeros(2)},
                {"z": torch.tensor(1j)}, {"m": torch.zeros(1, device="meta")},
                {"a\ud800": 1.0}):  # fmt: skip
        with pytest.raises(InvalidInputError, match="metrics"):
            check_metrics(bad)


class Mute:
    def __repr__(self) -> str:
        raise ValueError("says nothing")


@pytest.mark.parametrize("value", [10**5000, Mute(), ["x" * 10**6]], ids=["huge", "mute", "long"])
def test_values_that_cannot_be_shown_are_refused_like_others(tmp_path: Path, value: Any) -> None:
    """Prevents: the traceback of a message, or one of a million characters."""
    store = deltackpt_store.Store.create(tmp_path / "store")
    names = ("every", "keep", "threads", "chunk_bytes", "ring_bytes", "save_on", "compact", "run")
    for name in names:
        with pytest.raises(InvalidInputError) as caught:
            deltackpt.Checkpointer(tmp_path, {"a": 1}, **{name: value})
        assert len(str(caught.value)) < 1000
    for arguments in ({"key_map": value}, {"run": value}, {"strict": value}, {"step": value}):
        with pytest.raises(InvalidInputError):
            deltackpt.restore_into(store, {"a": 1}, **arguments)

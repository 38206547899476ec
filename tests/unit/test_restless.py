"""Prevents: later values in committed steps, and trainings that lose all their saves to them."""

# case 48, case 49, case 52, case 76

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import CorruptionError
from saving import Gate, Opener, Recorder, Training, assert_same, saved, steps
from torch import nn

import deltackpt.extents as extents_module
import deltackpt.stage as stage_module
from deltackpt import events
from deltackpt.restless import LIMIT

WIDE = 160  # 100 KiB matrices: noted word by word; narrower ones are noted whole


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate before the first hash of every save that training does not wait for."""
    gate, real = Gate(), stage_module.HostStager.stage

    def stage(self: Any, job: stage_module.Job, ring: stage_module.Ring) -> stage_module.Staging:
        if job.witness is not None:
            gate.pass_through()
        return real(self, job, ring)

    monkeypatch.setattr(stage_module.HostStager, "stage", stage)
    return gate


class Frozen(Training):
    """A training whose first layer no optimizer knows."""

    def __init__(self, width: int = 64) -> None:
        super().__init__(width)
        self.model[0].requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.objects = {"model": self.model, "optimizer": self.optimizer}

    @property
    def weight(self) -> nn.Parameter:
        return self.model[0].weight


def run(
    ckpt: Any, training: Training, gate: Gate, change: Callable[[], object], count: int = 6
) -> dict[int, dict[str, Any]]:
    """Steps, each saved, with `change` between `save` and the reading of live tensors.

    Returns what was there at each call that saved.
    """
    copies: dict[int, dict[str, Any]] = {}
    for step in range(count):
        training.step()
        gate.close()
        copies[step] = training.copy()
        ckpt.step(step)
        change()
        gate.open()
    training.step()
    return copies


def check(path: Path, copies: dict[int, dict[str, Any]], lost: set[int]) -> None:
    """All steps but the `lost` ones exist, and hold what was there when they were saved."""
    assert steps(path) == [step for step in copies if step not in lost]
    for step in steps(path):
        assert_same(saved(path, step), copies[step])


# writes that no version counter sees -------------------------------------------------------------


@pytest.mark.parametrize("width", [64, WIDE])
@pytest.mark.parametrize("write", ["clamp", "numpy"])
def test_hidden_writes_to_trained_parameters_cost_one_save(
    path: Path, opened: Opener, gate: Gate, caplog: pytest.LogCaptureFixture, width: int, write: str
) -> None:
    training = Training(width)
    weight: Any = training.model[0].weight

    def change() -> None:
        if write == "clamp":
            weight.data.clamp_(-0.01, 0.01)
        else:
            weight.detach().numpy()[:] *= 0.5

    ckpt = opened(training.objects, every=1)
    copies = run(ckpt, training, gate, change)
    ckpt.wait()
    check(path, copies, {0})
    told = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "model/0.weight" in told[0]
    assert "lock()" in told[0]
    ckpt.close()


@pytest.mark.parametrize("write", ["data", "counted", "replaced"])
def test_momentum_encoders_are_those_of_the_call(
    path: Path, opened: Opener, gate: Gate, write: str
) -> None:
    training = Frozen(WIDE)
    weight, target = training.weight, training.model[3].weight

    def change() -> None:
        with torch.no_grad():
            if write == "data":
                weight.data.mul_(0.9).add_(target.data, alpha=0.1)
            elif write == "counted":
                weight.mul_(0.9).add_(target, alpha=0.1)
            else:
                weight.data = weight.data * 0.9 + target.data * 0.1

    ckpt = opened(training.objects, every=1)
    copies = run(ckpt, training, gate, change)
    ckpt.wait()
    check(path, copies, {1} if write == "data" else set())
    ckpt.close()


def test_what_is_frozen_is_not_copied_as_long_as_it_rests(opened: Opener) -> None:
    training = Frozen(WIDE)
    live: list[bool] = []
    ckpt = opened(training.objects)
    for step in range(4):
        training.step()
        if step == 2:
            with torch.no_grad():
                training.weight.add_(1)
        ckpt.save(step)
        captured = ckpt._previous
        assert captured is not None
        ckpt.wait()
        live.append("model/0.weight" not in copied_paths(ckpt))
    assert live == [True, True, False, True]  # waited for, at rest, touched, at rest again


def copied_paths(ckpt: Any) -> set[str]:
    """Paths of the extents that the last staging of host memory found in private copies."""
    plan = ckpt._pipeline._stager._host._plan
    return {plan.keys[extent][0] for extent in plan._extents[1]}


def test_a_frozen_parameter_that_changed_is_never_taken_for_the_one_of_the_call(
    path: Path, opened: Opener, gate: Gate
) -> None:
    """Also where a single element changes, which no sample of words would find."""
    training = Frozen(WIDE)
    ckpt = opened(training.objects)
    for step in range(2):
        training.step()
        ckpt.save(step).result(60)
    training.step()
    gate.close()
    save = ckpt.save(2)
    training.weight.data[7, 7] += 1
    gate.open()
    with pytest.raises(CorruptionError, match=r"model/0\.weight"):
        save.result(60)
    copied = training.copy()
    ckpt.save(2).result(60)
    assert_same(saved(path, 2), copied)


def test_a_frozen_parameter_that_changed_after_lock_is_saved(path: Path, opened: Opener) -> None:
    """As when adapters are merged into it. Every such save was torn, or all later ones copied."""
    training = Frozen(WIDE)
    ckpt = opened(training.objects)
    copies: dict[int, dict[str, Any]] = {}
    for step in range(4):
        training.step()
        if step in (1, 3):
            ckpt.lock()
            training.weight.data[7, 7] += 1
        copies[step] = training.copy()
        ckpt.save(step).result(60)
        if step:
            assert "model/0.weight" not in copied_paths(ckpt)
    check(path, copies, set())


def test_what_is_done_to_it_after_such_a_save_is_found_as_in_trained_ones(
    path: Path, opened: Opener, gate: Gate
) -> None:
    training = Frozen(WIDE)
    ckpt = opened(training.objects)
    training.step()
    ckpt.save(0).result(60)
    training.step()
    ckpt.lock()
    gate.close()
    save = ckpt.save(1)
    training.weight.data.mul_(0.9)
    gate.open()
    with pytest.raises(CorruptionError, match=r"model/0\.weight"):
        save.result(60)


# trainings that write between save and step in every iteration ----------------------------------


class Looked(Training):
    """A training with an embedding whose forward renormalises rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64, max_norm=0.5)
        self.optimizer.add_param_group({"params": [self.embedding.weight]})
        self.objects["embedding"] = self.embedding

    def look(self) -> None:
        with torch.no_grad():
            self.embedding.weight.mul_(2)
            self.embedding(torch.arange(50))


def sharpness_aware(training: Training) -> Callable[[], None]:
    """The first half of a SAM step: climb, which is not an optimizer's step."""

    def change() -> None:
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.add_(0.01)

    return change


def reloading(training: Training) -> Callable[[], None]:
    best = copy.deepcopy(training.model.state_dict())
    return lambda: training.model.load_state_dict(best)


def averaging(training: Training) -> Callable[[], None]:
    first, second = training.model[0].weight, training.model[3].weight

    def change() -> None:
        with torch.no_grad():
            first.lerp_(second, 0.1)

    return change


def looking(training: Training) -> Callable[[], None]:
    assert isinstance(training, Looked)
    return training.look


@pytest.mark.parametrize("kind", [sharpness_aware, reloading, averaging, looking])
def test_writes_in_every_iteration_cost_one_save(
    path: Path, opened: Opener, gate: Gate, kind: Any
) -> None:
    training = Looked() if kind is looking else Training()
    recorder = Recorder()
    ckpt = opened(training.objects, every=1, observers=[recorder])
    copies = run(ckpt, training, gate, kind(training))
    ckpt.wait()
    check(path, copies, {0})
    assert [event.step for event in recorder.of(events.Failed)] == [0]
    ckpt.close()


def test_a_save_that_is_not_due_makes_up_for_a_torn_one(
    path: Path, opened: Opener, gate: Gate
) -> None:
    training = Training()
    ckpt = opened(training.objects, every=10)
    gate.close()
    training.step()
    torn = ckpt.step(0)
    assert torn is not None
    sharpness_aware(training)()
    gate.open()
    with pytest.raises(CorruptionError):
        torn.result(60)
    training.step()
    copied = training.copy()
    assert ckpt.should_save()
    assert ckpt.step(1) is not None
    training.step()
    assert not ckpt.should_save()
    assert ckpt.step(2) is None
    ckpt.wait()
    assert steps(path) == [1]
    assert_same(saved(path, 1), copied)


def test_closing_makes_up_for_a_last_save_that_was_torn(
    path: Path, opened: Opener, gate: Gate
) -> None:
    training = Training()
    ckpt = opened(training.objects, every=1, final=True)
    training.step()
    gate.close()
    ckpt.step(0)
    sharpness_aware(training)()
    gate.open()
    copied = training.copy()
    ckpt.close()
    assert steps(path) == [0]
    assert_same(saved(path, 0), copied)


def test_a_torn_save_by_hand_is_an_error_for_whoever_waits(
    path: Path, opened: Opener, gate: Gate
) -> None:
    training = Training()
    ckpt = opened(training.objects)
    training.step()
    gate.close()
    ckpt.save(0)
    sharpness_aware(training)()
    gate.open()
    with pytest.raises(CorruptionError, match=r"model/0\.weight and 2 more"):
        ckpt.wait()
    ckpt.save(0)
    ckpt.wait()
    assert steps(path) == [0]


def test_after_a_few_torn_saves_nothing_overlaps_any_more(
    path: Path, opened: Opener, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(64, layers=LIMIT + 2)
    layers = iter([module for module in training.model if isinstance(module, nn.Linear)])

    def change() -> None:  # always another one
        next(layers).weight.data.add_(1)

    ckpt = opened(training.objects, every=1)
    lost: list[int] = []
    for step in range(2 * LIMIT + 4):
        training.step()
        gate.close()
        save = ckpt.step(step)
        assert save is not None
        if step % 2 == 0:
            change()
        gate.open()
        try:
            save.result(60)
        except CorruptionError:
            lost.append(step)
    assert lost == [0, 2, 4]
    assert "everything is read" in caplog.text
    ckpt.close()


# other threads -----------------------------------------------------------------------------------


class Elsewhere:
    """Writes to two tensors of a state while a save copies one of them, as a thread might."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = {"a": torch.zeros(200, 20)[:, ::2], "b": torch.zeros(70_000)}
        self.left = 0  # writes to come
        real = extents_module.Plan._fill

        def fill(plan: Any, *of_extent: Any) -> None:
            real(plan, *of_extent)
            if self.left:
                self.left -= 1
                for tensor in self.state.values():
                    tensor += 1

        monkeypatch.setattr(extents_module.Plan, "_fill", fill)


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_what_another_thread_writes_is_copied_again(
    opened: Opener, path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """One tensor was stored as it was before the write, the other as it was after it."""
    elsewhere = Elsewhere(monkeypatch)
    ckpt = opened(Training().objects | elsewhere.state)
    ckpt.lock()  # so that saves may overlap, and copy
    elsewhere.left = writes
    ckpt.save(0).result()
    found = saved(path, 0)
    assert {float(value) for name in "ab" for value in found[name].unique()} == {float(writes)}


def test_a_thread_that_writes_on_and_on_tears_the_save(
    opened: Opener, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Elsewhere(monkeypatch)
    ckpt = opened(Training().objects | elsewhere.state, every=100)
    ckpt.lock()
    elsewhere.left = 1000
    for attempt in (lambda: ckpt.save(1), lambda: ckpt.step(2)):
        with pytest.raises(CorruptionError, match="modified while") as caught:
            attempt()
        assert (caught.value.kind, caught.value.context["tensor"]) == ("torn", "a")
        assert "other threads" in str(caught.value.hint)
        assert ckpt.should_save()
    elsewhere.left = 0
    handle = ckpt.step(3)
    assert handle is not None
    handle.result()
    assert steps(path) == [3]
    assert all(
        bool((saved(path, 3)[name] == tensor).all()) for name, tensor in elsewhere.state.items()
    )

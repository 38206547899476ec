"""One generator of four left out, and a resumed run draws other numbers from then on."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from captured import rebuild, roundtrip, take
from deltackpt_store.errors import MismatchError

from deltackpt import rng


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw() -> list[Any]:
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(),
        torch.rand(3).tolist(), torch.randn(5).tolist(), torch.randperm(7).tolist(),
    ]  # fmt: skip


def test_all_generators_continue_where_they_were() -> None:
    # case 34, case 153
    draw()
    np.random.randn()  # leaves a cached gaussian
    random.gauss(0, 1)
    states = rebuild(take({}, rng=True))["#rng"]
    expected = [draw() for _ in range(3)]
    rng.check(states)
    draw()
    rng.restore(states)
    assert [draw() for _ in range(3)] == expected
    assert type(states["python"]) is tuple
    assert states["numpy"]["state"]["key"].dtype == np.uint32
    assert states["torch"].dtype == torch.uint8


def test_saving_draws_nothing() -> None:
    # case 39
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    taken = take({"w": torch.zeros(300)}, rng=True)
    take({"w": torch.zeros(300)}, rng=True, previous=taken)
    rng.check(rng.collect())
    assert draw() == expected


def test_states_are_those_of_the_call() -> None:
    taken = take({}, rng=True)
    expected = draw()
    rng.restore(rebuild(taken)["#rng"])
    assert draw() == expected


def test_generators_of_the_program_are_plain_state() -> None:
    # case 34
    own, numpy_own = torch.Generator().manual_seed(5), np.random.default_rng(6)
    state = {"torch": own.get_state(), "numpy": numpy_own.bit_generator.state,
             "legacy": np.random.get_state(), "python": random.Random(3).getstate()}  # fmt: skip
    back = roundtrip(state)
    expected = torch.rand(3, generator=own).tolist(), numpy_own.random(3).tolist()
    own.set_state(back["torch"])
    numpy_own.bit_generator.state = back["numpy"]
    assert (torch.rand(3, generator=own).tolist(), numpy_own.random(3).tolist()) == expected
    np.random.set_state(back["legacy"])
    twin = random.Random()
    twin.setstate(back["python"])
    assert twin.random() == random.Random(3).random()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("python", (3, (1, 2), None)), ("numpy", {"bit_generator": "PCG64", "state": {}}),
        ("numpy", {}), ("torch", torch.zeros(3, dtype=torch.uint8)), ("torch", None),
        ("cuda", [torch.zeros(16)]), ("other", 1),
    ],
)  # fmt: skip
def test_states_that_do_not_fit_change_nothing(name: str, value: Any) -> None:
    # case 152
    states = {**rng.collect(), name: value}
    draw()
    before = rng.collect()
    with pytest.raises(MismatchError, match=name):
        rng.restore(states)
    after = rng.collect()
    assert after["python"] == before["python"]
    assert repr(after["numpy"]) == repr(before["numpy"])
    assert torch.equal(after["torch"], before["torch"])


def test_devices_that_are_missing_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    # case 144
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    fill = torch.cuda.get_rng_state(0) if count else torch.zeros(16, dtype=torch.uint8)
    rng.restore({"cuda": [fill] * (count + 1)})
    assert "CUDA" in caplog.text


def test_no_cuda_context_is_made() -> None:
    """A process that trains on the CPU must not take device memory by saving."""
    code = (
        "import torch; from deltackpt import rng; s = rng.collect(); rng.restore(s);"
        "assert not torch.cuda.is_initialized(); assert 'cuda' not in s"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

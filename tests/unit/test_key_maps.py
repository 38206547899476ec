"""Key maps: both spellings of a key, entries that mean nothing, and the error that leads there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deltackpt_store.errors import InvalidInputError, MismatchError
from restoring import Keeper
from torch import nn

from deltackpt.keys import KeyMap, renaming_hint
from deltackpt.paths import key_of, segment
from deltackpt.restore import restore_into


def _module(name: str, fill: float = 0.0) -> nn.ModuleDict:
    module = nn.ModuleDict({name: nn.Linear(3, 3), "head": nn.Linear(3, 2)})
    for parameter in module.parameters():
        nn.init.constant_(parameter, fill)
    return module


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    keeper = Keeper(tmp_path / "store")
    model, teacher = _module("old", 1.0), _module("old", 2.0)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    keeper.save({"model": model, "teacher": teacher, "optimizer": optimizer}, 1)
    return keeper


def _restore(keeper: Keeper, key_map: KeyMap | None, **options: Any) -> tuple[Any, Any]:
    model, teacher = _module("new"), _module("new")
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "teacher": teacher, "optimizer": optimizer}
    restore_into(keeper.path, state, key_map=key_map, **options)
    assert torch.equal(teacher["new"].weight, torch.full((3, 3), 2.0))
    assert optimizer.state[model["new"].weight]["step"] == 1
    return model, teacher


@pytest.mark.parametrize(
    "key_map",
    [
        {"old.": "new."},
        {"old.weight": "new.weight", "old.bias": "new.bias"},
        {"model/old.": "model/new.", "teacher/old.": "teacher/new."},
        {"model/old.": "new.", "old.": "new."},
        {"old.": "elsewhere.", "model/old.": "new.", "teacher/old.": "new."},
    ],
)
def test_keys_may_be_written_as_errors_print_them(keeper: Keeper, key_map: dict[str, str]) -> None:
    """Prevents: a key map, copied from an error's list, that renames nothing."""
    _restore(keeper, key_map)


@pytest.mark.parametrize("wrong", ["model/odl.", "odl.", "optimizer/state", "pupil/old."])
@pytest.mark.parametrize("strict", [True, False])
def test_an_entry_that_matches_nothing_is_an_error(
    keeper: Keeper, wrong: str, strict: bool
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        _restore(keeper, {"old.": "new.", wrong: "new."}, strict=strict)
    assert f"{wrong!r} is the beginning of no key" in caught.value.message
    assert "'old.'" not in caught.value.message
    assert "model/old.weight" in str(caught.value.hint)


def test_an_entry_for_what_is_left_out_is_none(keeper: Keeper) -> None:
    model = _module("new")
    key_map = {"model/old.": "new.", "teacher/old.": "new.", "head.": "head."}
    restore_into(keeper.path, {"model": model}, key_map={"old.": "new."}, only="model/old.*")
    with pytest.raises(InvalidInputError, match=r"'teacher/old\.' is the beginning"):
        restore_into(keeper.path, {"model": model}, key_map=key_map, only="model/*")
    del key_map["teacher/old."]  # of a module that is not in the state
    restore_into(keeper.path, {"model": model}, key_map=key_map, only="model/old.*")


def test_a_map_without_a_module_to_rename_in_is_an_error(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "store")
    keeper.save({"n": 1}, 1)
    with pytest.raises(InvalidInputError, match=r"'old\.'") as caught:
        restore_into(keeper.path, {"n": 0}, key_map={"old.": "new."})
    assert "name them there as the checkpoint does" in str(caught.value.hint)


def test_renamed_keys_are_answered_with_a_key_map_that_works(keeper: Keeper) -> None:
    """Prevents: a user who renamed a layer and cannot find out how to get its weights back."""
    with pytest.raises(MismatchError) as caught:
        _restore(keeper, None)
    assert "key_map={'old.': 'new.'}" in str(caught.value.hint)
    _restore(keeper, {"old.": "new."})


@pytest.mark.parametrize("key", ["0", "a.b", "a/b", "~x", "", "None", "x~1y"])
def test_a_key_is_read_back_from_its_segment(key: str) -> None:
    assert key_of(segment(key)) == key


@pytest.mark.parametrize(
    ("saved", "present", "key_map"),
    [
        (["a.w", "b.w"], ["net.a.w", "net.b.w", "head.w"], {"": "net."}),
        (["n", "module.a.w", "module.b.w"], ["a.w", "b.w"], {"module.": ""}),
        (["a.x.w", "b.x.w", "b.y.w"], ["c.x.w", "c.y.w"], {"b.": "c."}),
        (["a.w"], ["a.weight"], {"a.w": "a.weight"}),
    ],
)
def test_the_advice_is_the_prefix_that_most_keys_share(
    saved: list[str], present: list[str], key_map: dict[str, str]
) -> None:
    assert str(renaming_hint(saved, present, whole=True)).endswith(f"key_map={key_map}")


def test_no_advice_renames_keys_that_fit(tmp_path: Path) -> None:
    """`{"": "net."}` would take the partner away that `head` has."""
    keeper = Keeper(tmp_path / "store")
    keeper.save({"m": nn.ModuleDict({"a": nn.Linear(1, 1), "head": nn.Linear(1, 1)})}, 1)
    net = nn.ModuleDict({"a": nn.Linear(1, 1)})
    state = {"m": nn.ModuleDict({"net": net, "head": nn.Linear(1, 1)})}
    with pytest.raises(MismatchError) as caught:
        restore_into(keeper.path, state)
    assert "key_map={'a.': 'net.a.'}" in str(caught.value.hint)
    restore_into(keeper.path, state, key_map={"a.": "net.a."})


def test_a_key_map_that_raises_is_named_with_the_key(keeper: Keeper) -> None:
    """Prevents: a KeyError of some dict, far from the function that raised it."""
    with pytest.raises(InvalidInputError, match=r"key_map raised KeyError for 'head\.") as caught:
        _restore(keeper, {"old.weight": "new.weight", "old.bias": "new.bias"}.__getitem__)
    assert caught.value.kind == "key-map"
    assert caught.value.context["key"] == "head.weight"
    assert caught.value.hint
    assert isinstance(caught.value.__cause__, KeyError)

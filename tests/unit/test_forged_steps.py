"""Prevents: a store of unknown origin, every digest of which is right, ends a program with Python's
own errors, because what its steps hold makes no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from deltackpt_store.errors import CorruptionError, DeltackptError, MismatchError
from deltackpt_store.manifest import ExtentSpec, Layout, Manifest, Snapshot, TensorView
from deltackpt_store.manifest_io import digest_of, encode
from deltackpt_store.merkle import root
from deltackpt_store.store import Store
from deltackpt_store.store_writer import StoreWriter

import deltackpt

NBYTES = 64
HUGE = (1 << 64) - 1


def view(**fields: Any) -> TensorView:
    usual: dict[str, Any] = {"dtype": "float32", "shape": (4,), "stride": (1,), "offset": 0}
    return TensorView(slot=0, extent=0, **{**usual, **fields})


def forge(
    path: Path, structure: Any, views: list[TensorView], values: list[Any], last: str = "last"
) -> str:
    """A store with one step: tensors first, each in an inline extent of its own, then values.

    `last` is the path of the last leaf.
    """
    store = Store.create(path)
    views = [msgspec.structs.replace(v, slot=i, extent=i) for i, v in enumerate(views)]
    slots = range(len(views), len(views) + len(values))
    layout = Layout(
        msgspec.msgpack.encode(structure), (*map(str, range(slots.stop - 1)), last), tuple(views),
        tuple(ExtentSpec(NBYTES, 1024, v.dtype) for v in views), tuple(slots),
    )  # fmt: skip
    objects = dict(zip(slots, map(msgspec.msgpack.encode, values), strict=True))
    inline = dict.fromkeys(range(len(views)), bytes(NBYTES))
    snapshot = Snapshot(layout, objects, inline, {})
    manifest = Manifest(
        root=root(snapshot), packs=(), layout=layout, environment=b"\x80", objects=objects,
        inline=inline,
    )  # fmt: skip
    data = encode(manifest)
    digest = digest_of(data)
    Path(store.path, "manifests", digest.hex()).write_bytes(data)
    with StoreWriter(store) as writer:
        writer.commit(
            run="main", step=0, parent=None, manifest=digest, base=None, root=manifest.root,
            packs=(),
        )  # fmt: skip
    return store.path


def below(*nodes: Any) -> Any:
    """The structure ``{"m": {"0": nodes[0], ...}}``."""
    return ["d", [["m", ["d", [[str(i), node] for i, node in enumerate(nodes)]]]]]


INDICES = view(dtype="int64", shape=(1, 2), stride=(2, 1))
WHOLE = view(dtype="int32", shape=(2,))
FORGED: dict[str, tuple[Any, list[TensorView]]] = {
    "grad of whole numbers": (below(0), [view(dtype="int32", requires_grad=True)]),
    "parameter of whole numbers": (
        below(0), [view(dtype="int32", parameter=True, requires_grad=True)]
    ),
    "stride beyond 63 bits": (below(0), [view(shape=(1, 4), stride=(HUGE, 1))]),
    "shape beyond 63 bits": (below(0), [view(shape=(HUGE, 0), stride=(1, 1))]),
    "array of bfloat16": (below(["np", 0, "<f4", [4]]), [view(dtype="bfloat16")]),
    "array with grad": (below(["np", 0, "<f4", [4]]), [view(requires_grad=True)]),
    "conjugate array": (
        below(["np", 0, "<f4", [4]]), [view(dtype="complex64", conj=True)]
    ),
    "negative array": (
        below(["np", 0, "<f4", [4]]), [view(dtype="uint8", shape=(16,), neg=True)]
    ),
    "sparse whole numbers with grad": (
        below(["coo", [4], False, 0, 1, False, True]), [INDICES, WHOLE]
    ),
    "sparse parameter of whole numbers": (
        below(["coo", [4], False, 0, 1, True, True]), [INDICES, WHOLE]
    ),
    "top is a list": (["l", [0]], [view()]),
    "top is a leaf": (0, [view()]),
}  # fmt: skip


class Taker:
    """Takes any state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("name", FORGED)
def test_a_step_that_makes_no_sense_is_damaged(tmp_path: Path, name: str) -> None:
    structure, views = FORGED[name]
    path = forge(tmp_path / "store", structure, views, [])
    with pytest.raises(CorruptionError):
        deltackpt.load(path, step=0)
    with pytest.raises(CorruptionError):
        deltackpt.restore_into(path, {"m": Taker()}, step=0)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=1.0, momentum=0.9)


def state_of(parameters: int, *, state: Any = None) -> Any:
    """An optimizer's: tensor 0, then the slots of lr, momentum, dampening, nesterov, params."""
    entry = ["d", [["momentum_buffer", 0]]] if state is None else state
    names = ["lr", "momentum", "dampening", "nesterov", "params"]
    group = ["d", [[name, 1 + i] for i, name in enumerate(names[:4])] + [["params", parameters]]]
    return ["d", [["m", ["d", [["state", ["d", [[0, entry]]]], ["param_groups", ["l", [group]]]]]]]]


@pytest.mark.parametrize(
    ("moment", "parameters", "error"),
    [
        (view(), ["l", [0]], None),
        (view(shape=(HUGE, 0), stride=(1, 1)), ["l", [0]], CorruptionError),
        (view(shape=(1 << 62, 1 << 62, 0), stride=(1, 1, 1)), ["l", [0]], CorruptionError),
        (view(dtype="int32", requires_grad=True), ["l", [0]], DeltackptError),
        (view(), 5, MismatchError),
        (view(), ["l", [["l", [0]]]], MismatchError),
    ],
)
def test_an_optimizers_state_that_is_none_is_told(
    tmp_path: Path, moment: TensorView, parameters: Any, error: type[DeltackptError] | None
) -> None:
    values = [1.0, 0.9, 0.0, False, parameters]
    path = forge(tmp_path / "store", state_of(5), [moment], values)
    if error is None:
        assert deltackpt.restore_into(path, {"m": optimizer()}, step=0)
        return
    with pytest.raises(error):
        deltackpt.restore_into(path, {"m": optimizer()}, step=0)


@pytest.mark.parametrize("groups", [5, ["l", [5]], ["d", []]])
def test_parameter_groups_that_are_none_are_told(tmp_path: Path, groups: Any) -> None:
    state = ["d", [["m", ["d", [["state", ["d", [[0, 0]]]], ["param_groups", 1]]]]]]
    path = forge(tmp_path / "store", state, [view()], [groups])
    with pytest.raises(MismatchError, match="not an optimizer"):
        deltackpt.restore_into(path, {"m": optimizer()}, step=0)


@pytest.mark.parametrize("names", [5, ["l", [3]], ["d", [["m", 5]]], ["d", [["m", ["l", [5]]]]]])
def test_names_of_parameters_that_are_none_are_damage(tmp_path: Path, names: Any) -> None:
    empty = ["d", [["state", ["d", []]], ["param_groups", ["l", []]]]]
    path = forge(tmp_path / "store", ["d", [["m", empty], ["#params", 0]]], [], [names], "#params")
    with pytest.raises(CorruptionError, match="names"):
        deltackpt.restore_into(path, {"m": optimizer()}, step=0)


@pytest.mark.parametrize("states", [5, ["l", [1]]])
def test_random_states_without_generators_are_told(tmp_path: Path, states: Any) -> None:
    state = ["d", [["m", ["d", [["w", 0]]]], ["#rng", 1]]]
    path = forge(tmp_path / "store", state, [view()], [states], "#rng")
    target = {"m": {"w": torch.ones(4)}}
    with pytest.raises(MismatchError, match="random generator"):
        deltackpt.restore_into(path, target, step=0)
    assert torch.equal(target["m"]["w"], torch.ones(4))
    assert deltackpt.restore_into(path, target, step=0, rng=False)

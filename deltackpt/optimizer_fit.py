"""Whether a saved optimizer state is one of the live optimizer: its class, and its moments.

A state_dict does not name the class it is of. The hyperparameters of its groups and the keys of its
state do, where they are not such as come and go: flags that torch adds with its versions, and what
schedulers and users put into groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from deltackpt_store.manifest import TensorView
from torch.optim import Optimizer

from .nodes import kind_of
from .targets import Mismatch, is_a, spelled
from .values import dtype_name

LIKE_PARAMETER = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg",
     "acc_delta", "sum", "exp_inf", "ax", "prev")
)  # fmt: skip
"""State of torch's own optimizers that has the shape of its parameter."""

_TELLING = frozenset(
    ("betas", "amsgrad", "momentum", "dampening", "nesterov", "alpha", "centered", "lr_decay",
     "initial_accumulator_value", "rho", "momentum_decay", "etas", "step_sizes", "lambd", "t0",
     "max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size",
     "line_search_fn", "beta2_decay", "d")
)  # fmt: skip
"""Hyperparameters by which torch's own optimizers can be distinguished."""
_PASSING = frozenset(
    ("params", "param_names", "lr", "eps", "weight_decay", "maximize", "foreach", "capturable",
     "differentiable", "fused", "decoupled_weight_decay")
)  # fmt: skip
"""Group entries that say nothing, or that only some versions of torch write."""
_ADAM = frozenset(("step", "exp_avg", "exp_avg_sq"))
_STATE: dict[str, frozenset[str]] = {
    "SGD": frozenset(("momentum_buffer",)),
    "Adam": _ADAM | {"max_exp_avg_sq"},
    "AdamW": _ADAM | {"max_exp_avg_sq"},
    "NAdam": _ADAM | {"mu_product"},
    "RAdam": _ADAM,
    "SparseAdam": _ADAM,
    "Adamax": frozenset(("step", "exp_avg", "exp_inf")),
    "RMSprop": frozenset(("step", "square_avg", "momentum_buffer", "grad_avg")),
    "Adagrad": frozenset(("step", "sum")),
    "Adadelta": frozenset(("step", "square_avg", "acc_delta")),
    "Rprop": frozenset(("step", "prev", "step_size")),
    "ASGD": frozenset(("step", "eta", "mu", "ax")),
}
"""What torch's own optimizers keep of a parameter; users add to it."""
_ANY_STATE = frozenset(key for keys in _STATE.values() for key in keys)


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether the optimizer's class is one of PyTorch's own."""
    return kind_of(optimizer).__module__.startswith("torch.")


def other_class(path: str, saved: Mapping[str, Any], optimizer: Optimizer) -> Mismatch | None:
    """How the groups and the state of a state_dict show that it is of another class; or None."""
    kind = kind_of(optimizer).__name__
    groups = cast("list[dict[str, Any]]", saved["param_groups"])
    there = {key for group in groups for key in group}
    here = {key for group in optimizer.param_groups for key in group}
    missing = set(optimizer.defaults) - _PASSING - there
    if is_torchs(optimizer):
        missing &= _TELLING
    elif kind_of(optimizer).__setstate__ is not Optimizer.__setstate__:
        missing = set[str]()  # it may know what to do without them
    unexpected = (there & _TELLING) - here
    if groups and (missing or unexpected):
        return Mismatch(
            path,
            f"an optimizer with {_listed(there - _PASSING)}",
            f"{kind} with {_listed(here - _PASSING)}",
        )
    decays = _decoupled(groups), _decoupled(optimizer.param_groups)
    if None not in decays and decays[0] != decays[1]:
        name = "decoupled_weight_decay"
        return Mismatch(path, f"an optimizer with {name}={decays[0]}", f"{kind} with {decays[1]}")
    known = _STATE.get(kind) if is_torchs(optimizer) else None
    kept = {str(key) for entry in _entries(saved) for key in entry}
    if known is not None and not kept & _ANY_STATE <= known:
        return Mismatch(path, f"an optimizer that keeps {_listed(kept)}", f"{kind}")
    return None


def moment(
    path: str,
    key: str,
    value: torch.Tensor,
    parameter: torch.Tensor,
    live: Any,
    saved: TensorView | None,
    *,
    own: bool,
) -> Mismatch | None:
    """Why a saved moment is not one of the live parameter; None when it is, or is no moment.

    `saved` is the parameter as the checkpoint has it, `live` the present moment, `own`: the class
    is PyTorch's own. A moment may have another dtype than its parameter, if it was saved so.
    """
    like = own and key in LIKE_PARAMETER
    if not like and (saved is None or value.dim() == 0 or tuple(value.shape) != saved.shape):
        return None
    there = spelled(dtype_name(value.dtype), value.shape)
    if value.shape != parameter.shape:
        return Mismatch(path, there, f"a parameter of shape {list(parameter.shape)}")
    if value.dtype == parameter.dtype:
        return None
    if saved is not None:
        cast_since = saved.dtype != dtype_name(parameter.dtype)
    else:
        cast_since = isinstance(live, torch.Tensor) and live.dtype != value.dtype
    here = parameter if saved is not None or not isinstance(live, torch.Tensor) else live
    if not cast_since:
        return None
    what = "a parameter" if here is parameter else "one"
    return Mismatch(path, there, f"{what} of dtype {dtype_name(here.dtype)}")


def _entries(saved: Mapping[str, Any]) -> Iterable[Mapping[Any, Any]]:
    state: Any = saved["state"]
    return [entry for entry in state.values() if is_a(entry, dict)] if is_a(state, dict) else []


def _decoupled(groups: list[dict[str, Any]]) -> bool | None:
    """The one value of the flag that makes AdamW of Adam; None where it is not recorded."""
    values = {group.get("decoupled_weight_decay") for group in groups}
    return bool(values.pop()) if len(values) == 1 and None not in values else None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing of its own"

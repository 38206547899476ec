"""Which parameter an optimizer's index means: names instead of positions.

An optimizer's state_dict numbers its parameters by position, so a checkpoint taken with another
registration order would put moments on the wrong parameters without a word. The names of the
parameters behind the numbers are recorded under "#params", and matched on restore.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from deltackpt_store.errors import MismatchError
from torch import Tensor, nn

from .nodes import Leaves, Origin
from .tensors import PLAIN

PARAMS_KEY = "#params"
_WRAPPED = "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"


def loose_tensors(
    paths: Iterable[str], origins: Iterable[Origin], leaves: Leaves
) -> Iterator[tuple[str, Tensor]]:
    """Path and tensor of the tensor leaves that are in no object's state_dict."""
    found = zip(paths, origins, leaves.tensors, strict=True)
    return ((path, tensor) for path, origin, tensor in found if not origin.kind)


def optimizer_names(
    module_paths: Sequence[str],
    optimizer_paths: Sequence[str],
    leaves: Leaves,
    loose: Iterable[tuple[str, Tensor]],
) -> dict[str, list[str | None]]:
    """The "#params" entry of live objects: optimizer path -> name of each parameter index.

    A name is ``<path of the module>/<name of the parameter, without wrappers>``, or the path of a
    tensor outside of objects (see `loose_tensors`), found by identity; None for a parameter that is
    not in the state.
    """
    if not leaves.optimizers:
        return {}
    known: dict[int, str] = {}
    for path, module in zip(module_paths, leaves.modules, strict=True):
        for name, key in _parameter_names(module).items():
            known.setdefault(key, f"{path}/{name}")
    for path, tensor in loose:
        known.setdefault(id(tensor), path)
    return {
        path: [known.get(id(p)) for p in parameters_of(optimizer)]
        for path, optimizer in zip(optimizer_paths, leaves.optimizers, strict=True)
    }


def parameters_of(optimizer: Any) -> list[Any]:
    """The optimizer's parameters in the order of their state_dict indices."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def unsaved(
    optimizer: Any, names: Sequence[str | None], indices: Sequence[int], memory: Collection[int]
) -> int:
    """How many trained parameters of an optimizer are neither in the state nor share memory with
    what is.

    `names` and `indices`: of each parameter, its name and the tensor leaf that it is (-1: none).
    `memory`: addresses of the storages of all leaves.
    """
    found = zip(parameters_of(optimizer), names, indices, strict=True)
    return sum(
        name is None
        and index < 0
        and type(p) in PLAIN
        and p.requires_grad
        and p.numel() > 0
        and p.untyped_storage().data_ptr() not in memory
        for p, name, index in found
    )


def _modules_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every submodule under every name it has."""
    return list(cast(Any, module).named_modules(remove_duplicate=False))


def _parameter_names(module: nn.Module) -> dict[str, int]:
    """Name without wrappers -> id of the parameter (alive as long as the module holds it)."""
    renamed = canonical_prefixes(module)
    out: dict[str, int] = {}
    for name, child in _modules_of(module):
        prefix = renamed[name]
        for key, parameter in child._parameters.items():  # pyright: ignore[reportPrivateUsage]
            if parameter is not None:
                out[f"{prefix}.{key}" if prefix else key] = id(parameter)
    return out


def canonical_prefixes(module: nn.Module) -> dict[str, str]:
    """Name of each submodule ("" is the module itself) -> its name without wrappers."""
    out: dict[str, str] = {}
    transparent: dict[str, str | None] = {}
    for name, child in _modules_of(module):
        parent, _, last = name.rpartition(".")
        if not name or transparent[parent] == last:
            out[name] = out[parent] if name else ""
        else:
            out[name] = f"{out[parent]}.{last}" if out[parent] else last
        transparent[name] = _wrapped_child(child)
    return out


def _wrapped_child(module: nn.Module) -> str | None:
    """Name of the submodule that `module` merely wraps (DDP, torch.compile, FSDP, ...)."""
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    children = module._modules  # pyright: ignore[reportPrivateUsage]
    return next((name for name in _WRAPPED if name in children), None)


def align(
    state_dict: Mapping[str, Any],
    recorded: Sequence[str | None],
    present: Sequence[str | None],
    groups: Sequence[int],
    *,
    path: str = "optimizer",
) -> dict[str, Any]:
    """A state_dict whose parameter order fits the present optimizer, matched by name.

    `recorded` names the checkpoint's parameter indices, `present` those of the live optimizer
    (`optimizer_names`), `groups` is the number of parameters in each of the live optimizer's
    groups. Returns a shallow copy of `state_dict` in which only the order of "params" (and
    "param_names") inside the groups has changed: `Optimizer.load_state_dict` pairs them up
    position by position. Parameters without a name are matched among themselves in order, and
    only when both sides have equally many.
    Raises `MismatchError` (nothing changed) naming the parameters that are missing, unexpected or
    in another group.
    """
    saved = cast("list[dict[str, Any]]", list(state_dict["param_groups"]))
    counts = [len(group["params"]) for group in saved]
    if sum(counts) != len(recorded) or sum(groups) != len(present):
        raise _mismatch(path, ["its parameter groups do not fit the recorded names"])
    old, new = _labels(recorded), _labels(present)
    problems = [f"missing: {name}" for name in new if name not in old]
    problems += [f"unexpected: {name}" for name in old if name not in new]
    if len(counts) != len(groups):
        problems.append(f"{len(counts)} parameter groups in the checkpoint, {len(groups)} here")
    if not problems:
        there, here = _group_of(old, counts), _group_of(new, groups)
        problems = [
            f"in group {there[name]} of the checkpoint, but in group {here[name]} here: {name}"
            for name in new
            if there[name] != here[name]
        ]
    if problems:
        raise _mismatch(path, problems)
    position = {name: i for i, name in enumerate(old)}
    out: list[dict[str, Any]] = []
    start = 0
    for group in saved:
        size = len(group["params"])
        order = [position[name] - start for name in new[start : start + size]]
        changed = dict(group)
        for key in ("params", "param_names"):
            if group.get(key) is not None:
                changed[key] = [group[key][i] for i in order]
        out.append(changed)
        start += size
    return {**state_dict, "param_groups": out}


def _labels(names: Sequence[str | None]) -> list[str]:
    """`names` with numbers in place of missing ones, and repeated ones made distinct."""
    seen: dict[str, int] = {}
    out: list[str] = []
    for name in names:
        label = "(a parameter that is not in the state)" if name is None else name
        seen[label] = seen.get(label, 0) + 1
        repeated = name is None or seen[label] > 1
        out.append(f"{label} #{seen[label]}" if repeated else label)
    return out


def _group_of(names: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    numbers = [group for group, count in enumerate(counts) for _ in range(count)]
    return dict(zip(names, numbers, strict=True))


def _mismatch(path: str, problems: list[str]) -> MismatchError:
    shown = "; ".join(problems[:20]) + ("; ..." if len(problems) > 20 else "")
    return MismatchError(
        f"the parameters of {path!r} are not those of the checkpoint: {shown}",
        hint="build the optimizer over the same named parameters, in the same groups, and have "
        "their model in the state",
        key=path,
    )

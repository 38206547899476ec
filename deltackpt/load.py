"""Reading a step without live objects."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from deltackpt_store.errors import DeltackptError, InvalidInputError, NotFoundError
from deltackpt_store.manifest import TensorView
from deltackpt_store.store import Store

from .choosing import Skipped, held_candidates, named_step, nothing_verifies
from .host_memory import available_bytes
from .options import check_threads
from .reading import Step, is_damage, patterns
from .tensors import check_mode
from .views import dress, rebuild

_log = logging.getLogger("deltackpt.restore")
_WAY_OUT = "leave it out to load into host memory"


def load(
    store: Store | str | os.PathLike[str],
    run: str = "main",
    step: int | None = None,
    *,
    only: str | Iterable[str] | None = None,
    device: torch.device | str | int | None = None,
    threads: int | None = None,
) -> dict[Any, Any]:
    """The state of a step as new nested containers, every byte verified.

    Containers, key types and plain values come back exactly as saved; objects come back as what
    their ``state_dict`` was. Tensors have the saved dtype, order of dimensions and bits, and share
    memory exactly where the saved ones did; gaps between elements that nothing saved looked at are
    not there (a diagonal is contiguous). They are in host memory, whatever device they were saved
    from; `device`, one that has memory, moves them. The caller owns all of it: nothing refers to
    the store any more.

    Without `step`, the newest step that verifies (newer, damaged ones are logged); `run` may name
    one as ``RUN@STEP``, as on the command line. `only`: globs over paths; dict entries that none
    matches are left out, such items of lists and tuples are None. `threads` read in parallel
    (default: as many as processors, at most 8, and helper processes where much is to be decoded).

    Any thread or process may call it, also while a training saves into the store: the step
    is held meanwhile, so that retention and collection leave it alone, where the store can be
    written to.

    Raises `NotFoundError` for an unknown store, run or step, `CorruptionError` naming the tensors
    for a `step` that is damaged (or when none verifies), `UnsupportedFormatError`, `StorageError`
    when the store cannot be read, and `InvalidInputError` for an unusable option, when `only`
    matches nothing, or when the step needs more memory than there is.
    """
    check_mode()
    store = store if isinstance(store, Store) else Store.open(store)
    run, step = named_step(store, run, step)
    only = None if only is None else patterns(only)
    where = _device(device)
    check_threads(threads)
    skipped: list[Skipped] = []
    for held in held_candidates(store, run, step, skipped):
        commit = held.commit
        try:
            with torch.inference_mode(False):  # what is made in that mode could not be trained
                return _build(Step(store, commit, only), where, threads)
        except DeltackptError as error:
            if step is not None or not is_damage(error):
                raise
            skipped.append(Skipped(commit.run, commit.number, commit.step, str(error)))
            _log.warning("step %s@%d is passed over: %s", commit.run, commit.step, error)
    if skipped:
        raise nothing_verifies(run, skipped)
    store.head(run)  # says what is missing
    raise NotFoundError(f"run {run!r} in {store.path} has no step", kind="no-step", run=run)


def steps(store: Store | str | os.PathLike[str], run: str = "main") -> list[int]:
    """The steps of `run` that can be named, oldest first: those that its newest one continues.

    Only commit records are read; for any thread or process. Raises `NotFoundError` for an unknown
    store, and for a run that is unknown or has no step yet, `CorruptionError` when no commit of the
    run can be read, `UnsupportedFormatError`, `StorageError`.
    """
    return (store if isinstance(store, Store) else Store.open(store)).steps(run)


def _build(step: Step, device: torch.device | None, threads: int | None) -> dict[Any, Any]:
    extents = step.extents_of(step.selected)
    needed, available = step.nbytes(extents), available_bytes()
    if available is not None and needed > available:
        raise InvalidInputError(
            f"step {step.name} has {needed} bytes, and {available} bytes of memory are free",
            kind="memory",
            hint="load parts of it with only=, or restore into live objects",
            run=step.commit.run,
            step=step.commit.step,
        )
    memory = step.read_all(extents, threads)
    if device is not None and device.type != "cpu":
        memory = _moved(memory, device)

    def tensor(slot: int, view: TensorView) -> torch.Tensor:
        return dress(view, rebuild(view, memory[view.extent]))

    return step.build_own(tensor)


def _moved(memory: Mapping[int, torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    try:
        return {extent: data.to(device) for extent, data in memory.items()}
    except RuntimeError as error:
        raise InvalidInputError(
            f"what was read cannot be moved to {device}: {str(error).splitlines()[0]}",
            kind="memory" if isinstance(error, torch.OutOfMemoryError) else "invalid-input",
            option="device",
            hint=_WAY_OUT,
        ) from error


def _device(device: torch.device | str | int | None) -> torch.device | None:
    if device is None:
        return None
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except TypeError as error:
        raise InvalidInputError(
            f"device must be a torch.device, a string such as 'cuda:0' or a number, got {device!r}",
            option="device",
            hint=_WAY_OUT,
        ) from error
    except Exception as error:  # each backend has its own, ModuleNotFoundError among them
        reason = str(error).splitlines() or [type(error).__name__]
        raise InvalidInputError(
            f"device {device!r} cannot be used: {reason[0]}", option="device", hint=_WAY_OUT
        ) from error
    if where.type == "meta":
        raise InvalidInputError(
            f"device {device!r} has no memory: every tensor would come back without its values",
            option="device",
            hint=f"{_WAY_OUT}; `deltackpt show` tells shapes and dtypes without reading any",
        )
    return where

"""The options of a checkpointer, checked when it is made: each error names its option."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import torch
from deltackpt_store.cores import usable_cores
from deltackpt_store.errors import InvalidInputError, StateError, told
from deltackpt_store.names import check_name

from .policy import DueFunction, Every, Keep, OnBusy, OnError, check_every, check_seconds, is_count

CHUNK_BYTES = 512 * 1024
MIN_CHUNK_BYTES = 1024
MAX_CHUNK_BYTES = 16 * 1024 * 1024
SLOT_BYTES = 8 * 1024 * 1024
CODECS = ("auto", "fast", "small", "none")

_PAGE = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options but store and state; `Checkpointer` documents each."""

    run: str = "main"
    every: Every | DueFunction | None = None
    keep: Keep | None = None
    writer: Literal["process", "thread"] = "process"
    ring_bytes: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    codec: str = "auto"
    shadow: bool = False
    overlap: bool = True
    on_busy: OnBusy = "wait"
    on_error: OnError = "raise"
    durable_timeout: float = 600.0
    lock_timeout: float = 60.0
    rng: bool = True
    threads: int = 2
    final: bool = True

    def slot_bytes(self, ring_bytes: int) -> int:
        """Size of a slot in a ring of `ring_bytes`: at least a chunk, a quarter of a small ring."""
        quarter = ring_bytes // 4 // _PAGE * _PAGE
        chunk = -(-self.chunk_bytes // _PAGE) * _PAGE
        return max(chunk, min(SLOT_BYTES, quarter))


def check_options(
    *,
    run: Any, every: Any, keep: Any, writer: Any, ring_bytes: Any, chunk_bytes: Any, codec: Any,
    shadow: Any, overlap: Any, on_busy: Any, on_error: Any, durable_timeout: Any,
    lock_timeout: Any, rng: Any, threads: Any, final: Any,
) -> Options:  # fmt: skip
    """Make :class:`Options` of what a user wrote; `InvalidInputError` names the option."""
    if keep is not None and not isinstance(keep, Keep):
        raise InvalidInputError(
            f"keep must be Keep(...) or None, got {told(keep)}",
            option="keep",
            hint="for example keep=Keep(last=5)",
        )
    _choice("writer", writer, ("process", "thread"))
    _choice("codec", codec, CODECS)
    _choice("on_busy", on_busy, ("wait", "skip", "coalesce"))
    _choice("on_error", on_error, ("raise", "warn"))
    check_flags(shadow=shadow, overlap=overlap, rng=rng, final=final)
    _check_chunk_bytes(chunk_bytes)
    if ring_bytes is not None:
        _whole("ring_bytes", ring_bytes, chunk_bytes, 1 << 50)
    limits: dict[str, float] = {}
    for name, value in (("durable_timeout", durable_timeout), ("lock_timeout", lock_timeout)):
        limits[name] = check_seconds(name, value, zero=name == "lock_timeout")
    if threads is None:
        threads = min(4, usable_cores())
    check_threads(threads)
    return Options(
        run=check_name(run, "run"), every=check_every(every), keep=keep, writer=writer,
        ring_bytes=ring_bytes, chunk_bytes=chunk_bytes, codec=codec, shadow=shadow,
        overlap=overlap, on_busy=on_busy, on_error=on_error,
        durable_timeout=limits["durable_timeout"], lock_timeout=limits["lock_timeout"],
        rng=rng, threads=threads, final=final,
    )  # fmt: skip


def check_flags(**flags: Any) -> None:
    """`InvalidInputError` naming the first option that is neither True nor False."""
    for name, value in flags.items():
        _choice(name, value, (True, False))


def check_mapping(state: Any) -> None:
    """`InvalidInputError` unless `state` has names for what it holds."""
    if not isinstance(state, Mapping):
        raise InvalidInputError(
            f"state must be a mapping such as {{'model': model}}, not a {type(state).__name__}",
            option="state",
        )


def entries_of(mapping: Mapping[Any, Any], option: str) -> dict[Any, Any]:
    """The entries of a mapping that was given as `option`; `StateError` (kind "state-failed") when
    it is of a class that raises."""
    try:
        return dict(mapping)
    except Exception as error:
        raise StateError(
            f"the mapping given as {option} cannot be read: {type(error).__name__}: {error}",
            kind="state-failed",
            hint="mend it, or give a dict",
            option=option,
        ) from error


def check_threads(threads: Any) -> None:
    """`InvalidInputError` unless `threads` is a number of threads or None."""
    if threads is not None:
        _whole("threads", threads, 1, 256)


def check_metrics(metrics: Any) -> dict[str, float]:
    """Metrics as plain floats by name; a value that is no number is refused by its name."""
    return {name: _number(name, value) for name, value in _named(metrics)}


def note_metrics(metrics: Any) -> dict[str, Any]:
    """Metrics to be saved later, perhaps; `check_metrics` makes floats of them.

    Checked as there, but for single elements on a device: they are copied, without waiting for it.
    """
    return {
        name: value.detach().clone() if _on_device(value) else _number(name, value)
        for name, value in _named(metrics)
    }


def _on_device(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type not in ("cpu", "meta")
        and value.numel() == 1
    )


def _named(metrics: Any) -> Iterator[tuple[str, Any]]:
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise InvalidInputError(f"metrics must be a mapping, got {told(metrics)}", option="metrics")
    for name, value in entries_of(cast("Mapping[Any, Any]", metrics), "metrics").items():
        if not isinstance(name, str):
            raise InvalidInputError(f"metrics: the name {name!r} is no str", option="metrics")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"metrics: the name {name!r} is not valid Unicode", option="metrics",
                hint="give it another name",
            ) from error  # fmt: skip
        yield name, value


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except OverflowError as error:
        raise InvalidInputError(
            f"metrics: {name!r} is larger than a float can be (about 1.8e308)",
            option="metrics",
            hint="pass it scaled, or its logarithm",
        ) from error
    except Exception as error:  # `__float__` may be anybody's
        raise InvalidInputError(
            f"metrics: {name!r} is no number: {type(value).__name__}",
            option="metrics",
            hint="pass tensor.item() of tensors with one element",
        ) from error


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(value is one or (isinstance(one, str) and value == one) for one in allowed):
        choices = ", ".join(repr(one) for one in allowed)
        raise InvalidInputError(f"{name} must be one of {choices}, got {told(value)}", option=name)


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if not is_count(value) or not least <= value <= most:
        raise InvalidInputError(
            f"{name} must be a whole number from {least} to {most}, got {told(value)}", option=name
        )


def _check_chunk_bytes(value: Any) -> None:
    right = is_count(value) and MIN_CHUNK_BYTES <= value <= MAX_CHUNK_BYTES
    if not right or value % MIN_CHUNK_BYTES:
        raise InvalidInputError(
            f"chunk_bytes must be a multiple of {MIN_CHUNK_BYTES} from {MIN_CHUNK_BYTES} to "
            f"{MAX_CHUNK_BYTES}, got {told(value)}",
            hint="the default of 512 KiB suits most states; 64 KiB suits sparse embeddings",
            option="chunk_bytes",
        )

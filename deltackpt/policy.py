"""When to save, what to keep, and what to do when a save comes while others are in flight.

Plain values and the bookkeeping of "is this step due": nothing here touches tensors, threads or
files. Every value is checked when it is made, so that a wrong option is an error where it is
written down and not at the first save.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar, cast

from deltackpt_store.errors import DeltackptError, InvalidInputError, told

OnBusy = Literal["wait", "skip", "coalesce"]
OnError = Literal["raise", "warn"]
Codec = Literal["auto", "fast", "small", "none"]
DueFunction = Callable[[int], bool]
T = TypeVar("T")

_LARGEST = (1 << 63) - 1


def is_count(value: Any) -> bool:
    """Whether `value` is an integer of 64 bits, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def is_number(value: Any) -> bool:
    """True for a finite float, or a whole number as of :func:`is_count`."""
    return is_count(value) or (isinstance(value, float) and value - value == 0)


NO_LIMIT = 1e8
"""Seconds (three years) that stand for no limit: what the system's own waits can still count."""


def check_seconds(option: str, value: Any, *, zero: bool = True) -> float:
    """A limit of time in seconds; None and infinity are no limit, given back as `NO_LIMIT`.

    `InvalidInputError` naming the option for a negative value, NaN, and what is no number; also for
    0, unless `zero`.
    """
    if value is None:
        return NO_LIMIT
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not value >= 0 or (value == 0 and not zero):
        least = "of at least 0" if zero else "larger than 0"
        raise InvalidInputError(
            f"{option} must be a number of seconds {least}, or None for no limit, got"
            f" {told(value)}",
            option=option,
        )
    return float(min(value, NO_LIMIT))


def _positive(option: str, value: Any, *, whole: bool) -> None:
    if value is None:
        return
    right = (is_count(value) if whole else is_number(value)) and value > 0
    if not right:
        kind = "a whole number of at least 1" if whole else "a positive number of seconds"
        raise InvalidInputError(
            f"{option} must be {kind} or None, got {told(value)}", option=option
        )


def by_name(cls: type[T], values: tuple[object, ...], example: str) -> T:
    """A new object whose rules are all given by name; `InvalidInputError` when one is not."""
    if values:
        shown = ", ".join(map(repr, values))
        raise InvalidInputError(
            f"{cls.__name__}({shown}) does not say which rule that is",
            hint=f"name it, for example {example}",
            option=cls.__name__.lower(),
        )
    return object.__new__(cls)


def shown_as_made(cls: type[T]) -> type[T]:
    """`cls` with the parameters of its ``__init__`` in ``help()``, which shows ``__new__``'s."""
    made = inspect.signature(cls.__init__)
    cls.__signature__ = made.replace(parameters=list(made.parameters.values())[1:])  # pyright: ignore[reportAttributeAccessIssue]
    return cls


@shown_as_made
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """Save every so many steps, every so many seconds, or whichever of both comes first.

    `steps=n`: at the multiples of n, also when the loop steps over one (a call at 51 after one at
    48 is due for ``steps=50``). `seconds`: when the last save was started at least that long ago,
    measured by a monotonic clock from the opening of the checkpointer. `InvalidInputError` names
    the value that cannot be used.
    """

    steps: int | None = None
    seconds: float | None = None

    def __new__(cls, *values: object, **_: object) -> Self:
        return by_name(cls, values, "Every(steps=50) or Every(seconds=300)")

    def __post_init__(self) -> None:
        _positive("every.steps", self.steps, whole=True)
        _positive("every.seconds", self.seconds, whole=False)
        if self.steps is None and self.seconds is None:
            raise InvalidInputError(
                "Every needs steps= or seconds=",
                option="every",
                hint="for example Every(steps=50), or Every(seconds=300)",
            )


@shown_as_made
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which durable steps of a run retention keeps; a step stays when any rule keeps it.

    `last`: the newest so many. `every`: steps that are multiples of it. `best`: the name of a
    metric, or (name, "min" | "max"), whose best step stays ("min" when not said); a step without it
    is never the best, and a warning tells when no step has it. `within`: steps of the last so many
    seconds of training, and of pauses between sessions (by the wall clock: one that was set ahead
    meanwhile looks like a long pause). ``Keep()`` without a rule keeps everything.
    The newest step is never removed, whatever the rules say, and neither is a pinned one.
    `InvalidInputError` names the rule that cannot be used.
    """

    last: int | None = None
    every: int | None = None
    best: str | tuple[str, Literal["min", "max"]] | None = None
    within: float | None = None

    def __new__(cls, *values: object, **_: object) -> Self:
        return by_name(cls, values, 'Keep(last=3) or Keep(last=3, best="loss")')

    def __post_init__(self) -> None:
        _positive("keep.last", self.last, whole=True)
        _positive("keep.every", self.every, whole=True)
        _positive("keep.within", self.within, whole=False)
        best: Any = self.best
        if best is None or (isinstance(best, str) and best):
            return
        parts: tuple[Any, ...] = cast("tuple[Any, ...]", best) if isinstance(best, tuple) else ()
        named = len(parts) == 2 and isinstance(parts[0], str) and bool(parts[0])
        if not (named and parts[1] in ("min", "max")):
            raise InvalidInputError(
                f'keep.best must be a metric name or (name, "min" | "max"), got {told(self.best)}',
                option="keep.best",
                hint='for example best="loss", or best=("accuracy", "max")',
            )


def check_every(value: Any) -> Every | DueFunction | None:
    """Normalise the option `every`: an int becomes :class:`Every`; `InvalidInputError` if unusable.

    A callable is taken as ``due(step) -> bool``.
    """
    if value is None or isinstance(value, Every):
        return value
    if is_count(value):
        if value < 1:
            raise InvalidInputError(
                f"every must be at least 1 step, got {value}",
                option="every",
                hint="leave every=None and call save() yourself to save by hand",
            )
        return Every(steps=value)
    if callable(value) and not inspect.isclass(value):
        return cast(DueFunction, value)
    raise InvalidInputError(
        f"every must be an int, Every(...), a callable or None, got {told(value)}",
        option="every",
        hint="for example every=50, every=Every(seconds=300), or a function of the step",
    )


def _ask(due: DueFunction, step: int) -> bool:
    try:
        return bool(due(step))
    except DeltackptError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"the function given as every= raised {type(error).__name__} for step {step}: {error}",
            option="every",
            hint="mend it, or give every= a number of steps; save() does not ask it",
            step=step,
        ) from error


class Due:
    """Answers "is this step due?" for one checkpointer. Used by the training thread alone."""

    def __init__(self, every: Every | DueFunction | None) -> None:
        self._every = every
        self._previous: int | None = None
        self._started = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether the policy wants `step` saved. Changes nothing. `InvalidInputError` when a
        function of the user's raises."""
        every = self._every
        if every is None:
            return False
        if not isinstance(every, Every):
            return _ask(every, step)
        if every.steps is not None:
            previous = self._previous
            if previous is None or previous >= step:
                if step % every.steps == 0:
                    return True
            elif step // every.steps > previous // every.steps:
                return True
        return every.seconds is not None and time.monotonic() - self._started >= every.seconds

    def seen(self, step: int, *, started: bool) -> None:
        """`step` went by (passed to `step()`, saved or restored); `started`: a save of it began."""
        self._previous = step
        if started:
            self._started = time.monotonic()

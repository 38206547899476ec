"""Names that users type and that become file names: runs, pins, commit numbers, packs, steps.

Only these few forms ever become part of a path; tensor keys never do. A name that was read from a
store (and is therefore untrusted) passes the same checks before it is joined to a path.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from deltackpt_store.errors import ConflictError, InvalidInputError, told

NUMBER_DIGITS = 20
MAX_NUMBER = 10**18
"""Commits and generations have smaller numbers: a file of a larger one is something else."""
RETIRED_SUFFIX = ".retired"
LATEST = "latest"
"""In place of a step: the newest one."""

OF_THE_SYSTEM = frozenset(("lost+found", ".ds_store", ".snapshot", "desktop.ini", "thumbs.db"))
"""Names, in lower case, of what is in a folder without anybody having put it there."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\Z")
_NUMBER = re.compile(r"[0-9]{20}\Z")
_PACK = re.compile(r"[0-9a-f]{16}-[0-9]{8}\Z")
_FOLDER = re.compile(r"[0-9a-f]{2}\Z")
_STEP = re.compile(r"[0-9]{1,19}\Z")
_HEX = re.compile(r"[0-9a-f]{64}\Z")


def is_name(name: str) -> bool:
    """Whether `name` may be a run or pin name: not that of a file which some systems put into any
    folder that they come across."""
    return _NAME.match(name) is not None and name.lower() not in OF_THE_SYSTEM


def check_name(name: str, what: str) -> str:
    """Return `name` when it may be a run or pin name (`what` says which in the error)."""
    if not isinstance(name, str) or not is_name(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInputError(
            f"{told(name)} cannot be the name of a {what}",
            kind="bad-name",
            hint=f"{_without_step(name)}use 1 to 100 of A-Z a-z 0-9 . _ - and do not start with"
            " '.' or '-'",
            name=name if isinstance(name, str) else told(name),  # pyright: ignore[reportUnnecessaryIsInstance]
        )
    return name


def _without_step(name: object) -> str:
    """Advice for whoever named a step where a name is asked for."""
    if not isinstance(name, str) or "@" not in name:
        return ""
    run = name.partition("@")[0]
    wanted = f"its run alone, {run}" if run else "a run"
    return f"no step is asked for here: name {wanted}; "


def check_step(step: Any) -> int:
    """`step` as an int when a commit may have it: a whole number of 0 or more, of 63 bits.

    What stands for one whole number (of NumPy, a tensor with one element) is taken;
    InvalidInputError for everything else, bools and floats included.
    """
    number = None
    if not (isinstance(step, (bool, float)) or str(getattr(step, "dtype", "")).endswith("bool")):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            number = int(operator.index(step))
    if number is not None and number.bit_length() > 63:
        raise InvalidInputError(
            f"step must fit into 63 bits, got a number of {number.bit_length()}", option="step"
        )
    if number is None or number < 0:
        raise InvalidInputError(
            f"step must be a whole number of 0 or more, got {told(step)}",
            hint=_as_number(step),
            option="step",
        )
    return number


def _as_number(step: object) -> str | None:
    """Advice for whoever gives a step as it is written on the command line."""
    if not isinstance(step, str):
        return None
    if step == LATEST:
        return "leave step out for the newest one"
    run, _, digits = step.rpartition("@")
    if not _STEP.match(digits):
        return None
    return f"pass {int(digits)}" + (f" and the run, {run!r}" if run else "")


def is_pack_name(name: str) -> bool:
    """Whether `name` has the form ``<16 hex of the writer>-<8 digits>`` of every pack."""
    return _PACK.match(name) is not None


def is_pack_folder(name: str) -> bool:
    """Whether `name` may be a folder of packs: two hexadecimal digits."""
    return _FOLDER.match(name) is not None


def relative_pack_path(name: str) -> str:
    """Path of a pack relative to the store, for a name that passed :func:`is_pack_name`."""
    return f"packs/{name[:2]}/{name}.pack"


def is_digest_name(name: str) -> bool:
    """Whether `name` is 64 lower-case hexadecimal digits, as manifests are called."""
    return _HEX.match(name) is not None


def number_name(number: int) -> str:
    """File name of the commit `number`."""
    return f"{number:0{NUMBER_DIGITS}d}"


def parse_number(name: str) -> int | None:
    """The commit number that a file name stands for, None when it is something else."""
    number = int(name) if _NUMBER.match(name) else MAX_NUMBER
    return number if number < MAX_NUMBER else None


def check_number(number: int, folder: str) -> None:
    """ConflictError when a file in `folder` of the store cannot have the number `number`."""
    if number >= MAX_NUMBER:
        raise ConflictError(
            f"no number is left in {folder}: the largest one there is {number - 1}",
            kind="no-number",
            hint=f"{folder}/{number_name(number - 1)} was not written by deltackpt: move it away",
            path=folder,
        )


def listed_numbers(names: Collection[str]) -> list[int]:
    """The numbers of the commits among the files of a run that are not retired, ascending.

    Retired ones may be many: they cost a look into a set.
    """
    there = set(names)
    size = NUMBER_DIGITS
    listed = [name for name in names if len(name) == size and name + RETIRED_SUFFIX not in there]
    return sorted(number for number in map(parse_number, listed) if number is not None)


def highest_number(names: Iterable[str]) -> int:
    """The largest number of a commit among the files of a run, also of a retired one; or 0."""
    numbers = (parse_number(name.removesuffix(RETIRED_SUFFIX)) for name in names)
    return max((number for number in numbers if number is not None), default=0)


class StepName(NamedTuple):
    """What a step was called: ``run@step``, ``@step``, ``run@latest``, ``latest`` or a bare name.

    `step` None means the newest step of `run`; `bare` is a run or pin name without ``@``.
    """

    run: str | None
    step: int | None
    bare: str | None


def parse_step_name(text: str) -> StepName:
    """Split a step name; InvalidInputError says which forms exist."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - a user's
        raise InvalidInputError(
            f"a step is named by a str, got {told(text)}",
            kind="bad-step-name",
            hint=f"write '@{told(text)}', or 'RUN@{told(text)}'"
            if type(text) is int
            else "write '@STEP'",
        )
    if text == LATEST:
        return StepName(None, None, None)
    run, at, step = text.rpartition("@")
    if not at and is_name(text):
        return StepName(None, None, text)
    if at and (not run or is_name(run)):
        if step == LATEST:
            return StepName(run or None, None, None)
        if _STEP.match(step):
            return StepName(run or None, int(step), None)
    raise InvalidInputError(
        f"{told(text)} does not name a step",
        kind="bad-step-name",
        hint="write RUN@STEP, @STEP, RUN@latest, latest, a run or a pin",
        name=text,
    )

"""The option ``--depth`` of commands that fold tensors to modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])


if TYPE_CHECKING:  # older versions of click do not know the argument
    _ParamType = click.ParamType[int | str]
else:
    _ParamType = click.ParamType


class _Depth(_ParamType):
    """A positive number, or "auto"."""

    name = "depth"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        text = str(value)
        if text == "auto":
            return text
        if not text.isdecimal() or len(text) > 9 or not int(text):
            self.fail(f"{text!r} is neither a positive number nor 'auto'", param, ctx)
        return int(text)


def depth_option(does: str) -> Callable[[_F], _F]:
    """Adds ``--depth`` (parameter `depth`: None, a number or "auto")."""
    return click.option(
        "--depth",
        type=_Depth(),
        metavar="N|auto",
        help=f"{does}: the first N parts of their paths (parts end at '/' and '.'), or with 'auto' "
        "as deep as makes a readable number of rows, each branch by itself.",
    )

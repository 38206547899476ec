"""``deltackpt blame``: when each part of a tensor last changed."""

from __future__ import annotations

from collections import Counter

import click

from deltackpt_tools.blaming import Blame, TensorBlame, blame
from deltackpt_tools.exits import Exit
from deltackpt_tools.output import (
    counted,
    document,
    json_option,
    percent,
    safe,
    size,
    store_argument,
    table,
    write_json,
)
from deltackpt_tools.parameters import labelled
from deltackpt_tools.progress import Progress

_PARTS_SHOWN = 40


def _head(result: Blame) -> str:
    return (
        f"{result.run}@{result.step}: {counted(len(result.tensors), 'tensor')}, "
        f"{counted(result.searched, 'step')} searched, back to step {result.since}"
    )


def _label(tensor: TensorBlame) -> str:
    return safe(labelled(tensor.path, tensor.parameter_name))


def _one(tensor: TensorBlame) -> list[str]:
    lines = [f"{_label(tensor)}  {tensor.dtype} {list(tensor.shape)}  {size(tensor.bytes)}"]
    if not tensor.parts:
        return [*lines, "  no elements"]
    total = sum(part.stop - part.start for part in tensor.parts)
    rows = [["last changed by", "bytes", "share"]]
    for (run, step, _), changed in tensor.by_step().items():
        rows.append([f"{run}@{step}", size(changed), percent(changed / total)])
    lines += [f"  {line}" for line in table(rows, right=frozenset({1, 2}))]
    if len(tensor.parts) > 1:
        rows = [["from byte", "to byte", "last changed by"]]
        for part in tensor.parts[:_PARTS_SHOWN]:
            rows.append([str(part.start), str(part.stop), f"{part.run}@{part.step}"])
        lines += ["", *(f"  {line}" for line in table(rows, right=frozenset({0, 1})))]
        if len(tensor.parts) > _PARTS_SHOWN:
            lines.append(f"  ... {len(tensor.parts) - _PARTS_SHOWN} more parts (--json has all)")
    return lines


def _many(result: Blame) -> list[str]:
    rows = [["tensor", "last changed by", "share", "bytes"]]
    for tensor in result.tensors:
        newest, total = tensor.newest, sum(part.stop - part.start for part in tensor.parts)
        if newest is None:
            rows.append([_label(tensor), "-", "-", size(tensor.bytes)])
            continue
        changed = tensor.by_step()[newest.run, newest.step, newest.number]
        rows.append(
            [
                _label(tensor),
                f"{newest.run}@{newest.step}",
                percent(changed / total),
                size(tensor.bytes),
            ]
        )
    return table(rows, right=frozenset({2, 3}))


def _not_finite(result: Blame) -> list[str]:
    found = [(t.path, t.not_finite) for t in result.tensors if t.not_finite is not None]
    if not found:
        return ["", "no NaN, no infinite element in any step"]
    found.sort(key=lambda item: (item[1].step, item[1].number))
    first = found[0][1]
    same = Counter((f.run, f.step) for _, f in found)[first.run, first.step]
    rows = [["tensor", "first in", "NaN", "Inf"]]
    rows += [[safe(p), f"{f.run}@{f.step}", str(f.nan), str(f.inf)] for p, f in found]
    title = (
        f"NaN or Inf appeared first in {first.run}@{first.step}, in {counted(same, 'tensor')}; "
        f"{counted(len(found), 'tensor')} in all"
    )
    return ["", title, *(f"  {line}" for line in table(rows, right=frozenset({2, 3})))]


def _lines(result: Blame, nan: bool) -> list[str]:
    lines = [_head(result)]
    if not (nan and len(result.tensors) > 1):
        lines += ["", *(_one(result.tensors[0]) if len(result.tensors) == 1 else _many(result))]
    return lines + (_not_finite(result) if nan else [])


@click.command("blame")
@store_argument
@click.argument("tensor")
@click.argument("step", default="latest")
@click.option(
    "--nan",
    is_flag=True,
    help="Find the first step in which the tensors hold NaN or infinite elements "
    "(reads every chunk that any step changed).",
)
@json_option
@click.pass_context
def command(
    context: click.Context, store_path: str, tensor: str, step: str, nan: bool, as_json: bool
) -> None:
    """Show when each part of TENSOR last changed, looking back from STEP.

    TENSOR is a path as 'show' lists it, or a glob ('*' crosses '/'): then one line for each tensor
    that matches. STEP is RUN@STEP, @STEP, RUN, a pin or 'latest' (the default). Reads manifests
    only, unless --nan. To find where a NaN came from: 'deltackpt blame STORE "*" --nan'. Exit code
    1 when --nan found one.
    """
    with Progress("steps", unit="") as progress:
        result = blame(store_path, tensor, step, nan=nan, progress=progress.update)
    if as_json:
        write_json(document("blame", **result.to_dict()))
    else:
        click.echo("\n".join(_lines(result, nan)))
    bad = any(found.not_finite is not None for found in result.tensors)
    context.exit(Exit.FINDING if bad else Exit.OK)

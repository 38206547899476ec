"""``deltackpt export``: one step as a file that other programs read."""

from __future__ import annotations

import os
from typing import Any

import click
from deltackpt_store.errors import InvalidInputError
from deltackpt_store.manifest import Commit

from deltackpt_tools.exits import Exit
from deltackpt_tools.export_safetensors import Exported, export_safetensors
from deltackpt_tools.export_torch import export_torch
from deltackpt_tools.output import (
    PATH,
    counted,
    document,
    json_option,
    safe,
    size,
    store_argument,
    write_json,
)
from deltackpt_tools.publish import check_target, published
from deltackpt_tools.selection import select
from deltackpt_tools.stores import label, open_store
from deltackpt_tools.tensor_bytes import TensorBytes

_ENDINGS = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


def _lines(commit: Commit, target: str, result: Exported) -> list[str]:
    lines = [f"{label(commit)} -> {target}"]
    content = f"{counted(result.tensors, 'tensor')}, {size(result.nbytes)}"
    values = f", {counted(result.values, 'value')}" if result.values else ""
    lines.append(f"  {content}{values}")
    for group in result.tied:
        lines.append(f"  shared bytes: {safe(', '.join(group))}")
    if result.needs_trust:
        lines.append(
            "  torch.load needs weights_only=False, or these allowed with add_safe_globals: "
            + safe(", ".join(result.needs_trust))
        )
    for title, items in (
        ("left out", result.left_out),
        ("changed", result.changed),
        ("not exported", result.refused),
    ):
        if items:
            lines.append(f"  {title}:")
            lines += [f"    {safe(path)}: {why}" for path, why in items]
    return lines


def _document(path: str, commit: Commit, target: str, kind: str, result: Exported) -> Any:
    return document(
        "export",
        store=path,
        run=commit.run,
        step=commit.step,
        number=commit.number,
        root=commit.root,
        output=target,
        output_format=kind,
        tensors=result.tensors,
        values=result.values,
        bytes=result.nbytes,
        tied=result.tied,
        weights_only=not result.needs_trust if kind == "torch" else None,
        needs_trust=result.needs_trust,
        left_out=[{"path": path, "reason": why} for path, why in result.left_out],
        changed=[{"path": path, "change": what} for path, what in result.changed],
        refused=[{"path": path, "reason": why} for path, why in result.refused],
    )


def _kind(output: str) -> str:
    """The format that the ending of `output` stands for."""
    ending = os.path.splitext(output)[1]
    if ending not in _ENDINGS:
        raise InvalidInputError(
            f"the name {output} does not tell the format to write",
            kind="unknown-format",
            option="--format",
            hint="give --format safetensors or --format torch, or a name that ends in "
            + ", ".join(_ENDINGS),
        )
    return _ENDINGS[ending]


@click.command("export")
@store_argument
@click.argument("step")
@click.argument("output", type=PATH)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "torch"]),
    help="Needed unless OUTPUT ends in .safetensors, or in .pt, .pth or .bin (torch).",
)
@click.option(
    "--prefix",
    default="",
    metavar="PATH",
    help="Only what lies below PATH, which names then go without ('model', 'model/encoder.').",
)
@click.option(
    "--only",
    "globs",
    multiple=True,
    metavar="GLOB",
    help="Only what matches (may be repeated; '*' crosses '/'; matches the full path).",
)
@click.option("--force", is_flag=True, help="Replace OUTPUT when it exists.")
@json_option
@click.pass_context
def command(
    context: click.Context,
    store_path: str,
    step: str,
    output: str,
    kind: str | None,
    prefix: str,
    globs: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Write one step as a safetensors file, or as one that torch.load reads.

    A safetensors file holds tensors only, by their paths; plain values are left out and listed. A
    torch file holds the whole state with its structure, tied tensors tied. Every chunk is checked
    before it is written, and OUTPUT appears only when it is complete. Exit code 3 when the format
    cannot hold one of the tensors (the others are written), or holds a value in another form.
    """
    if kind is None:
        kind = _kind(output)
    check_target(output, force=force)
    store = open_store(store_path)
    commit = store.resolve_name(step)
    snapshot = store.snapshot(commit)
    selection = select(snapshot, prefix, globs)
    folder = os.path.dirname(os.path.abspath(output))
    source = TensorBytes(snapshot, store.reader(snapshot.packs), folder)
    with published(output, force=force) as file:
        if kind == "torch":
            result = export_torch(file, snapshot, selection, source)
        else:
            result = export_safetensors(file, commit, snapshot, selection, source)
    if as_json:
        write_json(_document(store.path, commit, output, kind, result))
    else:
        click.echo("\n".join(_lines(commit, output, result)))
    context.exit(Exit.PARTIAL if result.refused or result.changed else Exit.OK)

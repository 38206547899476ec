"""``deltackpt show``: what one step consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from deltackpt_store.manifest import Commit
from deltackpt_store.store import Store

from deltackpt_tools.describe import Description, describe
from deltackpt_tools.exits import Exit
from deltackpt_tools.output import (
    counted,
    document,
    json_option,
    metrics_text,
    moment,
    plain,
    safe,
    size,
    store_argument,
    table,
    write_json,
)
from deltackpt_tools.stores import label, open_store, short

if TYPE_CHECKING:
    from deltackpt_tools.pieces import ChunkDetails, TensorDetails


def _head(description: Description) -> list[str]:
    commit, snapshot, stored = description.commit, description.snapshot, description.stored
    against = "a base: names every chunk itself"
    if commit.base is not None:
        against = f"a delta against {short(commit.base)}"
    rows = [
        ["saved", f"{moment(commit.created)} as commit {commit.number}, writer {commit.writer}"],
        ["root", commit.root.hex()],
        ["manifest", f"{short(commit.manifest)}, {against}"],
        ["parent", _parent(commit)],
        [
            "state",
            f"{size(description.state_bytes)}: {counted(len(snapshot.layout.tensors), 'tensor')}, "
            f"{counted(len(snapshot.layout.objects), 'value')}, "
            f"{counted(sum(e.chunk_count for e in snapshot.layout.extents), 'chunk')}",
        ],
        [
            "stored",
            f"{size(stored.stored_bytes)} in {counted(len(snapshot.packs), 'pack')} for "
            f"{size(stored.raw_bytes)} of distinct chunks"
            + "".join(f", {name} {n}" for name, n in sorted(stored.codecs.items())),
        ],
    ]
    if len(stored.codecs) > 1:
        parts = [
            f"{name} {size(raw)} in {size(stored.stored_by_codec[name])}"
            for name, raw in stored.raw_by_codec.most_common()
        ]
        rows.append(["by codec", ", ".join(parts)])
    if commit.metrics:
        rows.append(["metrics", metrics_text(commit.metrics)])
    return [label(commit), *(f"  {line}" for line in table(rows))]


def _parent(commit: Commit) -> str:
    if commit.parent is None:
        return "none"
    run, number, digest = commit.parent
    return f"commit {number} of {run}, {short(digest)}"


def _section(title: str, rows: list[list[str]], right: frozenset[int] = frozenset()) -> list[str]:
    if not rows:
        return []
    return ["", title, *(f"  {line}" for line in table(rows, right=right))]


def _lines(description: Description) -> list[str]:
    environment = [[safe(k), safe(str(plain(v)))] for k, v in description.environment.items()]
    tensors = [
        [
            safe(row.path),
            row.view.dtype,
            str(list(row.view.shape)),
            size(row.nbytes),
            "-" if row.inline else str(row.stored.chunks),
            safe(", ".join(row.notes())),
        ]
        for row in description.tensors
    ]
    if tensors:
        tensors.insert(0, ["path", "dtype", "shape", "bytes", "chunks", ""])
    return [
        *_head(description),
        *_section("environment", environment),
        *_section("tensors", tensors, right=frozenset({3, 4})),
        *_section("values", [[safe(row.path), safe(row.text())] for row in description.values]),
        *_section(
            "damaged packs", [[name, safe(why)] for name, why in description.damaged_packs.items()]
        ),
    ]


def _document(path: str, description: Description) -> dict[str, Any]:
    commit, snapshot = description.commit, description.snapshot
    parent = None
    if commit.parent is not None:
        run, number, digest = commit.parent
        parent = {"run": run, "number": number, "digest": digest.hex()}
    return document(
        "show",
        store=path,
        run=commit.run,
        step=commit.step,
        number=commit.number,
        created=commit.created,
        digest=commit.digest,
        root=commit.root,
        manifest=commit.manifest,
        base=commit.base,
        parent=parent,
        writer=commit.writer,
        versions=commit.versions,
        metrics=commit.metrics,
        stats=commit.stats,
        environment=description.environment,
        packs=list(snapshot.packs),
        state_bytes=description.state_bytes,
        stored=description.stored.as_json(),
        tensors=[row.as_json() for row in description.tensors],
        values=[row.as_json() for row in description.values],
        damaged_packs=description.damaged_packs,
    )


def _tensor_lines(details: TensorDetails) -> list[str]:
    tensor = details.tensor
    rows = [
        ["of", f"{details.run}@{details.step}"],
        ["dtype", f"{tensor['dtype']} {tensor['shape']}, {size(tensor['bytes'])}"],
        ["looks at", f"extent {tensor['extent']} from byte {tensor['offset']}, "
                     f"strides {tensor['stride']}"],
        ["device", safe(tensor["device"])],
        ["digest", details.digest],
    ]  # fmt: skip
    if details.notes:
        rows.append(["notes", safe(", ".join(details.notes))])
    lines = [safe(tensor["path"]), *(f"  {line}" for line in table(rows))]
    chunks = [["chunk", "id", "bytes", "stored", "codec", "pack", "at byte", "coded against"]]
    for chunk in details.chunks:
        head = [str(chunk.index), chunk.id[:16], size(chunk.bytes)]
        if chunk.place is None:
            chunks.append([*head, "missing"])
            continue
        place = chunk.place
        chunks.append(
            [*head, size(place.stored_bytes), place.codec, place.pack, str(place.offset),
             ", ".join(ref[:16] for ref in place.references)]
        )  # fmt: skip
    if len(chunks) == 1:
        return [*lines, "", "its bytes lie in the manifest"]
    return [*lines, "", *(f"  {line}" for line in table(chunks, right=frozenset({0, 2, 3, 6})))]


def _chunk_lines(details: ChunkDetails) -> list[str]:
    places = [["pack", "at byte", "stored", "codec", "coded against"]]
    for place in details.places:
        places.append(
            [place.pack, str(place.offset), size(place.stored_bytes), place.codec,
             ", ".join(ref[:16] for ref in place.references) or "-"]
        )  # fmt: skip
    lines = [
        f"chunk {details.id}",
        f"  {size(details.bytes)}, in {counted(len(details.places), 'place')}, "
        f"{counted(details.referenced_by, 'chunk')} coded against it",
        "",
        *(f"  {line}" for line in table(places, right=frozenset({1, 2}))),
        "",
    ]
    if not details.uses:
        return [*lines, "no step needs it"]
    uses: dict[tuple[str, int], list[str]] = {}
    for use in details.uses:
        uses.setdefault((use.tensor, use.index), []).append(f"{use.run}@{use.step}")
    rows = [["part of", "chunk", "in steps"]]
    for (tensor, index), steps in uses.items():
        shown = ", ".join(steps[:6]) + (f", ... ({len(steps)} in all)" if len(steps) > 6 else "")
        rows.append([safe(tensor), str(index), shown])
    return lines + table(rows, right=frozenset({1}))


@click.command("show")
@store_argument
@click.argument("step", required=False)
@click.option(
    "--only",
    "globs",
    multiple=True,
    metavar="GLOB",
    help="Only tensors and values whose path matches (may be repeated; '*' crosses '/').",
)
@click.option("--tensor", metavar="PATH", help="One tensor of the step, chunk by chunk.")
@click.option(
    "--chunk",
    metavar="ID",
    help="One chunk (the beginning of its id), of any step: where it is stored and what needs it.",
)
@json_option
@click.pass_context
def command(
    context: click.Context,
    store_path: str,
    step: str | None,
    globs: tuple[str, ...],
    tensor: str | None,
    chunk: str | None,
    as_json: bool,
) -> None:
    """Show what one step consists of: tensors, values, environment, how it is stored.

    STEP is RUN@STEP, @STEP, RUN, a pin, or 'latest' (the default). Reads the manifest and the
    tables of the packs, not the data: 'verify' checks that. With --tensor or --chunk, one of them
    is shown closely instead. Exit code 3 when a pack is damaged or a chunk is missing.
    """
    closely = [
        name for name, value in (("--tensor", tensor), ("--chunk", chunk)) if value is not None
    ]
    if len(closely) > 1:
        raise click.UsageError("--tensor and --chunk cannot be combined")
    if closely and globs:
        raise click.UsageError(f"{closely[0]} and --only cannot be combined")
    if chunk is not None and step is not None:
        raise click.UsageError(f"--chunk looks at all steps: leave {step!r} out")
    step = "latest" if step is None else step
    store = open_store(store_path)
    if chunk is not None:
        _show_chunk(store, chunk, as_json)
        return
    if tensor is not None:
        from deltackpt_tools.pieces import show_tensor

        details = show_tensor(store, tensor, step)
        if as_json:
            write_json(document("show-tensor", **details.to_dict()))
        else:
            click.echo("\n".join(_tensor_lines(details)))
        missing = any(one.place is None for one in details.chunks)
        context.exit(Exit.PARTIAL if missing else Exit.OK)
    description = describe(store, store.resolve_name(step), globs)
    if as_json:
        write_json(_document(store.path, description))
    else:
        click.echo("\n".join(_lines(description)))
    partial = description.damaged_packs or description.stored.missing
    context.exit(Exit.PARTIAL if partial else Exit.OK)


def _show_chunk(store: Store, chunk: str, as_json: bool) -> None:
    from deltackpt_tools.pieces import show_chunk
    from deltackpt_tools.progress import Progress

    with Progress("steps", unit="") as progress:
        details = show_chunk(store, chunk, progress.update)
    if as_json:
        write_json(document("show-chunk", **details.to_dict()))
    else:
        click.echo("\n".join(_chunk_lines(details)))

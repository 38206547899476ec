"""``deltackpt probe``: what the file system at a place can do for a store."""

from __future__ import annotations

import os
from typing import Any

import click
from deltackpt_store.errors import InvalidInputError, NotFoundError
from deltackpt_store.fileio import FileIO
from deltackpt_store.location import Primitive, probe
from deltackpt_store.oserror import storage_error
from deltackpt_store.store import absolute_path

from deltackpt_tools.exits import Exit
from deltackpt_tools.output import PATH, document, json_option, safe, table, write_json


def _lines(path: str, place: str, found: list[Primitive]) -> list[str]:
    rows: list[list[str]] = []
    for one in found:
        told = "" if one.detail == "works" else f" ({safe(one.detail)})"
        lost = "no store is made here" if one.vital else one.without
        rows.append([one.name, "yes" + told] if one.works else [one.name, "no" + told, lost])
    missing = [one for one in found if not one.works]
    if not missing:
        verdict = "everything works"
    elif any(one.vital for one in missing):
        verdict = "no store can be kept here"
    else:
        verdict = "a store can be kept here, with what is said above"
    where = f"tried in {safe(place)}"
    if not os.path.isdir(path):
        where += f": {safe(path)} does not exist yet, and would be made there"
    return [where, *table(rows), verdict]


def _document(place: str, found: list[Primitive]) -> dict[str, Any]:
    return document(
        "probe",
        store=place,
        ok=all(one.works for one in found),
        usable=all(one.works or not one.vital for one in found),
        primitives=[one._asdict() for one in found],
    )


def _place(path: str) -> str:
    """The directory to try in: the cache of a store, else the directory itself, or the one that a
    store would be made in. Nothing is tried farther up, which may be another file system."""
    path = absolute_path(path)
    if os.path.exists(f"{path}/FORMAT"):
        return f"{path}/cache"
    if os.path.isdir(path):
        return path
    if os.path.lexists(path):
        raise InvalidInputError(
            f"{path} is no directory", kind="bad-path", hint="name a directory", path=path
        )
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise NotFoundError(
            f"the directory {path} does not exist, nor does the one above it",
            kind="no-such-folder",
            hint="name one that exists, or make it first: what lies farther up may be another "
            "file system",
            path=path,
        )
    return parent


@click.command("probe")
@click.argument("path", metavar="PATH", type=PATH)
@json_option
@click.pass_context
def command(context: click.Context, path: str, as_json: bool) -> None:
    """Try what the file system at PATH can do for a store: names, syncs, locks, memory maps.

    PATH is a store, or a directory where one is to be; when it does not exist yet, the one above it
    is tried. Makes a few small files there and removes them. A store
    tries the same by itself when it is first written to at a place. Exit code 0: everything works;
    3: a store can be kept, with less; 14: none can.
    """
    place = _place(path)
    try:
        found = probe(FileIO(), place, other_process=True)
    except OSError as error:
        raise storage_error(error, "try anything in", place) from error
    if as_json:
        write_json(_document(place, found))
    else:
        click.echo("\n".join(_lines(path, place, found)))
    missing = [one for one in found if not one.works]
    vital = any(one.vital for one in missing)
    context.exit(Exit.STORAGE if vital else Exit.PARTIAL if missing else Exit.OK)

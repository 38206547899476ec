"""``deltackpt unpin``: forget a pin."""

from __future__ import annotations

import click

from deltackpt_tools.output import document, json_option, store_argument, write_json
from deltackpt_tools.stores import open_store


@click.command("unpin")
@store_argument
@click.argument("name", metavar="NAME")
@json_option
def command(store_path: str, name: str, as_json: bool) -> None:
    """Forget the pin NAME. The step itself stays until 'retain' and 'gc' take it."""
    store = open_store(store_path)
    store.unpin(name)
    if as_json:
        write_json(document("unpin", store=store.path, name=name))
    else:
        click.echo(f"{name} is no longer pinned")

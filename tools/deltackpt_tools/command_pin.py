"""``deltackpt pin``: give a step a name, under which it stays."""

from __future__ import annotations

import click
from deltackpt_store.errors import InvalidInputError

from deltackpt_tools.output import document, json_option, store_argument, write_json
from deltackpt_tools.stores import label, open_store


@click.command("pin")
@store_argument
@click.argument("name", metavar="NAME")
@click.argument("step", metavar="STEP")
@json_option
def command(store_path: str, name: str, step: str, as_json: bool) -> None:
    """Give STEP the name NAME; retention and 'gc' leave it alone from then on.

    The name can be used wherever a step is named, and cannot be that of a run. Pinning the same
    step again changes nothing; a name that means another step is refused with exit code 11.
    """
    store = open_store(store_path)
    if "@" in name:
        raise InvalidInputError(
            f"{name!r} cannot be the name of a pin",
            kind="bad-name",
            hint="the name comes first, then the step: deltackpt pin STORE NAME STEP",
            name=name,
        )
    commit = store.resolve_name(step)
    store.pin(name, commit)
    if as_json:
        write_json(
            document(
                "pin",
                store=store.path,
                name=name,
                run=commit.run,
                step=commit.step,
                number=commit.number,
                digest=commit.digest,
            )
        )
    else:
        click.echo(f"{name} is {label(commit)}")

"""The ``deltackpt`` command: finds the subcommand, and turns errors into exit codes.

Start-up matters more here than anywhere else (shell completion, scripts that call it per step), so
this module imports click and nothing heavier; a subcommand's module is imported when it is called.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
import traceback
from contextlib import suppress
from typing import Any

import click

from deltackpt_tools.exits import Exit, exit_code

# name -> (module that holds the click command of the same name, one line for --help)
COMMANDS: dict[str, tuple[str, str]] = {
    "log": ("deltackpt_tools.command_log", "List the saved steps of each run."),
    "show": ("deltackpt_tools.command_show", "Show what one step consists of."),
    "diff": ("deltackpt_tools.command_diff", "Show what differs between two steps."),
    "blame": ("deltackpt_tools.command_blame", "Show when each part of a tensor last changed."),
    "verify": ("deltackpt_tools.command_verify", "Check stored bytes; list all damage."),
    "repair": ("deltackpt_tools.command_repair", "Undo damage from other copies."),
    "probe": ("deltackpt_tools.command_probe", "Try what the file system at a place can do."),
    "du": ("deltackpt_tools.command_du", "Show where the bytes are, by run and step."),
    "advise": ("deltackpt_tools.command_advise", "Advise how often to save."),
    "watch": ("deltackpt_tools.command_watch", "Watch the saves of a running training."),
    "report": ("deltackpt_tools.command_report", "Write one page that shows everything."),
    "export": ("deltackpt_tools.command_export", "Write one step as safetensors or torch file."),
    "pin": ("deltackpt_tools.command_pin", "Give a step a name, under which it stays."),
    "unpin": ("deltackpt_tools.command_unpin", "Forget a pin."),
    "retain": ("deltackpt_tools.command_retain", "Take steps off the list of a run by rules."),
    "delete": ("deltackpt_tools.command_delete", "Take all steps of a run off its list."),
    "compact": ("deltackpt_tools.command_compact", "Give runs a new base; rewrite thin packs."),
    "gc": ("deltackpt_tools.command_gc", "Delete what no step, pin or reader needs."),
}


_EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)$", re.DOTALL)


class LazyGroup(click.Group):
    """Knows its subcommands by name, and imports one only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            if f"--{args[0]}" in ("--help", "--version"):
                raise click.UsageError(f"No such command {args[0]!r}. It is --{args[0]}.", ctx)
            found = difflib.get_close_matches(args[0], COMMANDS)
            choice = f"Did you mean {' or '.join(found)}?" if found else "--help lists them all."
            raise click.UsageError(f"No such command {args[0]!r}. {choice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; leave with the exit code that its error stands for."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            more = _about_arguments(error)
            if not more:
                raise
            raise click.UsageError(error.format_message() + more, error.ctx) from error
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt as interrupt:
            with suppress(OSError):
                report_error(interrupt, Exit.INTERRUPTED)
            ctx.exit(Exit.INTERRUPTED)
        except BrokenPipeError:
            # The interpreter flushes stdout at exit and would complain about it again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(Exit.BROKEN_PIPE)
        except Exception as error:
            if isinstance(error, MemoryError):
                error.__traceback__ = error.__context__ = None  # release what filled the memory
            code = exit_code(error)
            if code is None:
                code = Exit.STORAGE if isinstance(error, OSError) else Exit.FAILED
                if code == Exit.FAILED:  # a mistake in this program
                    with suppress(OSError):
                        traceback.print_exc()
            elif code == Exit.CORRUPT:
                from deltackpt_tools.stores import gone_meanwhile

                error = gone_meanwhile(error) or error
                code = exit_code(error) or code
            with suppress(OSError):  # nobody reads it, or the disk is full: the exit code remains
                report_error(error, code)
            ctx.exit(code)


def _told(error: OSError) -> tuple[str, str | None]:
    """Words for what the operating system said, and the way out. Files of a store come as errors
    of its own: what has no name here is an output stream."""
    from deltackpt_store.oserror import hint_for

    where = os.fsdecode(error.filename) if error.filename else "the output"
    return f"{where}: {error.strerror or error}", hint_for(error)


_STEPS = frozenset(("step", "step_name", "old", "new"))
_PATTERNS = frozenset(("globs", "pattern", "tensor"))


def _about_arguments(error: click.UsageError) -> str:
    """What to add to click's words about arguments too many, or an option that must be given."""
    if isinstance(error, click.MissingParameter) and isinstance(error.param, click.Option):
        return f" {error.param.help}"
    found = _EXTRA.match(error.message)
    if found is None:
        return ""
    extra = found[1].split()
    takes = {param.name for param in error.ctx.command.params} if error.ctx else set[str]()
    if extra[0].isdecimal() and takes & _STEPS:
        return f". A step is named @{extra[0]} or RUN@{extra[0]}."
    if takes & _PATTERNS:
        return ". Quote patterns, as in --only 'model/*', or the shell puts file names there."
    return "" if takes & _STEPS else ". The command takes no step."


def report_error(error: Exception | KeyboardInterrupt, code: Exit) -> None:
    """One line (and the way out) on stderr; with --json also a document on stdout.

    OSError when either cannot be written to; the other one was, then.
    """
    from deltackpt_store.errors import MENDING

    from deltackpt_tools.output import error_document, safe, write_json

    message = str(getattr(error, "message", None) or error or type(error).__name__)
    if isinstance(error, KeyboardInterrupt):
        message = "interrupted"
    hint = getattr(error, "hint", None)
    if isinstance(error, OSError) and exit_code(error) is None:
        message, hint = _told(error)
    elif isinstance(error, MemoryError):
        message, hint = "too little memory", "raise the limit on it (ulimit -v, or that of the job)"
    if code == Exit.CORRUPT and "deltackpt repair" not in (hint or ""):
        hint = f"{hint}; {MENDING}" if hint else MENDING
    try:
        if click.get_current_context().meta.get("deltackpt.json"):
            write_json(error_document(error, message, hint, int(code)))
    finally:
        click.echo(f"deltackpt: {safe(message)}", err=True)
        if hint:
            click.echo(f"  {safe(hint)}", err=True)


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from importlib import metadata

    try:
        number = metadata.version("deltackpt")
    except metadata.PackageNotFoundError:
        number = "(version unknown: not installed as a distribution)"
    click.echo(f"deltackpt {number}")
    context.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=(
        "A step is named RUN@STEP, @STEP (when only one run has it), RUN (its newest step), "
        "'latest' or the name of a pin. Exit codes: 0 ok, 1 finding, 2 usage, 3 partial, "
        "10 not a store, 11 busy, 12 corrupt, 13 unsupported format, 14 storage, 70 failed, "
        "130 interrupted."
    ),
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Look into a deltackpt store, check it, bring a step out of it, and keep it small.

    Only repair, pin, unpin, retain, delete, compact and gc change the store; no command needs
    torch.
    """


def open_closed_streams() -> None:
    """Put the null device in place of standard streams that the caller has closed (``2>&-``).

    Python then has None for them, and the next file opened would get their number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        handle = os.open(os.devnull, os.O_RDWR)
        try:
            os.fstat(number)  # something else has the number by now: leave it alone
        except OSError:
            os.dup2(handle, number)
        if handle == number:
            os.set_inheritable(number, True)
        mode = "w" if number else "r"
        stream = open(handle, mode, encoding="utf-8", errors="replace")  # noqa: SIM115 - to stay
        setattr(sys, name, stream)


def escape_what_cannot_be_printed() -> None:
    """Have characters that the encoding of an output lacks printed as escapes (``\\u6f22``)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Entry point of the installed command. Never returns."""
    open_closed_streams()
    escape_what_cannot_be_printed()
    try:
        cli.main(prog_name="deltackpt")
    except OSError as error:  # of what is printed before a subcommand runs: help, version
        with suppress(OSError):
            click.echo(f"deltackpt: {_told(error)[0]}", err=True)
        sys.exit(Exit.STORAGE)
    except MemoryError:  # not even enough to report it
        with suppress(OSError):
            os.write(2, b"deltackpt: too little memory\n")
        sys.exit(Exit.FAILED)

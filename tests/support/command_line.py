"""The command `deltackpt`, run in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result
from deltackpt_tools.cli import cli


def run(*arguments: object) -> Result:
    """What ``deltackpt ARGUMENTS`` prints, and its exit code."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])

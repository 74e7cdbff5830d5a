"""Figures of command lines that are refused before their verb begins: also a run that did not end well."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from engine.cli.exit_codes import ExitCode
from engine.cli.log_lines import JSON, log
from engine.cli.run_record import RunRecord
from engine.clock import SystemRuntime
from index.text import printable


def figures_verb(words: str, values: Mapping[str, Any]) -> str:
    """What the figures call a verb: an upload that nobody can see yet is no backup that an alert may rely on."""
    return f"{words} --no-commit" if values.get("no_commit") else words


def readable_values(command: click.Command, parent: click.Context | None, args: Sequence[str]) -> Mapping[str, Any]:
    """Of a command line that was refused the values that can be read: flags, environment and settings file."""
    ctx = click.Context(command, parent=parent, info_name=command.name, resilient_parsing=True)
    ctx.ignore_unknown_options = ctx.allow_extra_args = True
    with ctx.scope(cleanup=False):
        click.Command.parse_args(command, ctx, list(args))
    return ctx.params


def write_refused(words: str, values: Mapping[str, Any], error: BaseException) -> None:
    """Write the figures of a refused command line, where it or the settings say where; a dry run has none."""
    path = values.get("metrics_file")
    if path is None or values.get("dry_run"):
        return

    def warn(text: str) -> None:
        if values.get("log_format") == JSON:
            log("warning", words, text)
        else:
            click.echo(f"warning: {printable(text)}", err=True)

    RunRecord(SystemRuntime()).write(
        Path(path),
        verb=figures_verb(words, values),
        job=str(values.get("job") or ""),
        code=ExitCode.USAGE,
        error=error,
        warn=warn,
    )

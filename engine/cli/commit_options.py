"""Options that choose one commit of a scope, one by one; `config.parse_commit` reads the same from one word."""

import click

from engine.cli.config import CommitChoice, check_new_name
from engine.cli.options import MOMENT, VERSION, Decorated
from engine.errors import UsageError
from engine.text import Moment


def commit_options(function: Decorated) -> Decorated:
    """Which commit; `choose_commit` takes what they say."""
    at = "The newest then: 2026-05-01T12:30:00Z, 36h for 36 hours ago, or 'yesterday 18:00' (UTC)."
    for add in (
        click.option("--name", metavar="NAME", help="The commit of this name."),
        click.option("--at", type=MOMENT, metavar="TIME", help=at),
        click.option(
            "--version", type=VERSION, metavar="V[_UID]", help="The newest of this version, or of V and unique id."
        ),
        click.option("--number", type=click.IntRange(min=1), metavar="N", help="The commit of this number."),
    ):
        function = add(function)
    return function


def choose_commit(
    *, number: int | None, version: CommitChoice | None, at: Moment | None, name: str | None
) -> CommitChoice:
    """What `commit_options` say.

    Raises:
        UsageError: More than one of them is given, or the name reads like something else.
    """
    if sum(given is not None for given in (number, version, at, name)) > 1:
        raise UsageError(
            "more than one of --number, --version, --at and --name",
            operation="restore",
            hint="each chooses a commit alone",
        )
    if name is not None:
        check_new_name(name)
    return version or CommitChoice(number=number, at=at, name=name)

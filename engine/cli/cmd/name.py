"""The verbs `name` and `unname`."""

from typing import ClassVar

import click
import msgspec

from engine.cli import options as cli
from engine.cli.config import CommitChoice, check_new_name
from engine.cli.session import Session, check_fits, verb
from index.display import iso_time, printable
from index.snapshot.keys import encode_component
from index.snapshot.model import NameRecord, Scope


class NameView(msgspec.Struct, frozen=True, kw_only=True):
    """`name`."""

    json_omitted: ClassVar = ("record",)
    json_properties: ClassVar = {
        "number": "record.source.number",
        **{name: f"record.{name}" for name in ("name", "version", "committed_at_ms")},
    }

    scope: Scope
    record: NameRecord


@verb("name", "Keep a commit under a name.", prints=(NameView,))
@click.argument("commit", type=cli.COMMIT)
@click.argument("name")
@cli.scope_options(task=True)
def name(session: Session, *, commit: CommitChoice, name: str, scope: Scope) -> None:
    """Keep a commit under a name until the name is released, whatever retention says.

    Example: tidemark name -r file:///backups --job flights latest before-upgrade
    """
    check_fits("NAME", encode_component, check_new_name(name))
    with session.open() as repository:
        record = repository.name(session.find(scope, commit), name)
    line = f"{printable(name)} is commit {record.source.number} of {printable(str(scope))}, version {record.version}"
    session.show(NameView(scope=scope, record=record), [f"{line}, {iso_time(record.committed_at_ms)}"])


class ReleasedView(msgspec.Struct, frozen=True, kw_only=True):
    """`unname`."""

    name: str
    scope: Scope


@verb("unname", "Release a name.", prints=(ReleasedView,))
@click.argument("name")
@cli.scope_options(task=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask; without a terminal nobody is asked.")
def unname(session: Session, *, name: str, scope: Scope, yes: bool) -> None:
    """Release a name; the next collection takes what only it kept.

    Example: tidemark unname -r file:///backups --job flights before-upgrade
    """
    check_fits("NAME", encode_component, name)
    shown = f"{printable(name)} of {printable(str(scope))}"
    if not yes and not session.confirm(f"release {shown}, so that a collection may take what only it keeps?"):
        return
    with session.open() as repository, session.explaining(scope):
        repository.release_name(scope, name)
    session.show(ReleasedView(name=name, scope=scope), [f"{shown} is released"])

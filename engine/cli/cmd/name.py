"""The verbs `name` and `unname`."""

import click
import msgspec

from engine.cli.config import CommitChoice, check_new_name
from engine.cli.options import COMMIT, scope_options
from engine.cli.session import Session, check_component, verb
from index.snapshot.model import Scope


class NameView(msgspec.Struct, frozen=True, kw_only=True):
    """`name`."""

    name: str
    scope: Scope
    number: int
    version: int
    committed_at_ms: int


@verb("name", "Keep a commit under a name.", prints=(NameView,))
@click.argument("commit", type=COMMIT)
@click.argument("name")
@scope_options(task=True)
def name(session: Session, *, commit: CommitChoice, name: str, scope: Scope) -> None:
    """Keep a commit under a name until the name is released, whatever retention says.

    Example: tidemark name -r file:///backups --job flights latest before-upgrade
    """
    check_component("NAME", check_new_name(name))
    with session.open() as repository:
        found = session.find(repository, scope, commit)
        record = repository.name(found, name)
    view = NameView(
        name=record.name,
        scope=scope,
        number=record.source.number,
        version=record.version,
        committed_at_ms=record.committed_at_ms,
    )
    line = f"{printable(name)} is commit {view.number} of {printable(str(scope))}, version {view.version}"
    session.show(view, [f"{line}, {iso_time(view.committed_at_ms)}"])


class ReleasedView(msgspec.Struct, frozen=True, kw_only=True):
    """`unname`."""

    name: str
    scope: Scope


@verb("unname", "Release a name.", prints=(ReleasedView,))
@click.argument("name")
@scope_options(task=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask; without a terminal nobody is asked.")
def unname(session: Session, *, name: str, scope: Scope, yes: bool) -> None:
    """Release a name; the next collection takes what only it kept.

    Example: tidemark unname -r file:///backups --job flights before-upgrade
    """
    check_component("NAME", name)
    shown = f"{printable(name)} of {printable(str(scope))}"
    if not yes and not session.confirm(f"release {shown}, so that a collection may take what only it keeps?"):
        return
    with session.open() as repository, session.explaining(repository, scope):
        repository.release_name(scope, name)
    session.show(ReleasedView(name=name, scope=scope), [f"{shown} is released"])

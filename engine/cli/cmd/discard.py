"""The verb `discard`: one damaged object less."""

import click

from engine.cli.session import Session, verb
from engine.errors import UsageError
from engine.inspect.discard import Discarded
from index.display import printable


@verb("discard", "Remove one damaged record, boundary, name or pin.", prints=(Discarded,))
@click.argument("key")
@click.option("-n", "--dry-run", is_flag=True, help="Remove nothing; say what it means.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask; without a terminal it is needed.")
def discard(session: Session, *, key: str, dry_run: bool, yes: bool) -> None:
    """Remove one object that cannot be read, so that collections go on in its job.

    KEY is a commit record, a boundary, a name or a pin, as `tidemark verify` names it. What can be read stays, as do
    blobs and indexes. Put an older version of the object back instead where there is one.

    Example: tidemark discard -r file:///backups pins/a54cd5a54de1e4d0b1f7 --dry-run
    """
    with session.open() as repository:
        done = repository.discard(key, dry_run=True)
        lines = [printable(f"to discard: {done.key}: {done.meaning}")]
        message = f"this is for ever, and was not confirmed: {done.meaning}"
        refused = UsageError(message, operation="discard", subject=key, hint="say --yes to do it")
        if not dry_run:
            if not yes and not session.confirm("discard it for ever?", lines=lines, refused=refused):
                return
            done = repository.discard(key)
    session.show(done, [printable(f"{'would discard' if dry_run else 'discarded'} {done.key}: {done.meaning}")])

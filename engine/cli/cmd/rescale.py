"""The verb `rescale`: another number of tasks for a job of `StatefulJob` (design 0010, T1 to T7)."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from engine.cli import options as cli
from engine.cli.output import committed_line, format_took, lines_if
from engine.cli.session import Session, choose_scope, verb
from engine.errors import UsageError
from engine.repository.rescale import KeyColumns, RescaledJob, RescaleOptions
from index.display import count, human_bytes


@verb("rescale", "Give a job of StatefulJob another number of tasks.", RescaledJob)
@click.argument("job")
@cli.option("--tasks M", "Number of tasks to have.", cli.POSITIVE, required=True)
@cli.option(
    "--key [STORE=]MODULE:FUNCTION",
    "Function that returns, of a RocksDB key of STORE or of every store, the values of the job's key columns. "
    "MODULE is looked for here, too. Repeatable.",
    to="keys",
    multiple=True,
)
@cli.option("--unchecked", "Merge stores without hashing their keys.")
@cli.option("--scratch DIR", "Where stores are worked on.  [default: a temporary directory]", cli.DIRECTORY_THERE)
@cli.option("-n --dry-run", "Read and hash everything; upload and commit nothing.")
def rescale(
    session: Session, *, job: str, tasks: int, keys: Sequence[str], unchecked: bool, scratch: Path | None, dry_run: bool
) -> None:
    """Give JOB another number of tasks, by a commit of its newest state; version and offsets stay.

    Every key is hashed, and has to be in its task, or nothing is committed. If M divides the number of now, files are
    taken over as they are, and only small ones are uploaded. Else rows are written again. Stop the job first: a run at
    the same time is refused, or refuses this. Then start it with tasks=M.

    Example: tidemark rescale words -r file:///backups --tasks 2 --key wordkeys:of
    """
    options = RescaleOptions(
        tasks=tasks, key_columns=_load_all(keys), unchecked=unchecked, scratch=scratch, dry_run=dry_run
    )
    scope = choose_scope(job, commit_per_task=False, task=None)
    with session.open() as repository, session.explaining(scope), session.progress("rescale") as progress:
        found = repository.rescale(scope, options, progress=progress)
    session.show(found, _lines(job, found))


def _load_all(keys: Sequence[str]) -> KeyColumns | dict[str, KeyColumns] | None:
    parts = [text.rpartition("=") for text in keys]
    stores = [store for store, _, _ in parts]
    if twice := next((store for store in stores if stores.count(store) > 1), None):
        raise UsageError(f"is given twice for the store {twice}", operation="rescale", subject="--key")
    found = {store: _load(name) for store, _, name in parts}
    if "" in found and len(keys) > 1:
        hint = "name the store of each: --key STORE=MODULE:FUNCTION"
        raise UsageError("is given for every store and once more", operation="rescale", subject="--key", hint=hint)
    return found.get("") or found or None


def _load(text: str) -> KeyColumns:
    """Import a function; modules of the working directory come last."""
    module, _, name = text.partition(":")
    # It stays: the function may import more when it is called.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the caller's, and may raise anything
        hint = "give MODULE:FUNCTION, of a module that Python finds or that is in this directory"
        raise UsageError(
            f"cannot be imported: {type(error).__name__}: {error}",
            operation="rescale",
            subject=f"--key {text}",
            hint=hint,
        ) from error
    found: KeyColumns = function
    return found


def _lines(job: str, found: RescaledJob) -> list[str]:
    would = "would be " if found.dry_run else ""
    checked = "each in its task" if found.tasks_before > 1 else "which in one task shows nothing of the key function"
    checked = checked if found.checked else "of which no key was hashed"
    stores = f"stores {found.stores_before} → {found.stores}"
    linked = f"{count(found.files_linked, 'SST')} {would}taken over as they are, {human_bytes(found.bytes_linked)}"
    lines = lines_if(
        (True, f"{job}: tasks {found.tasks_before} → {found.tasks}, {stores}"),
        (True, f"{count(found.rows, 'row')}, {checked}"),
        (found.files_linked, linked),
        (found.bytes_rewritten, f"rows of {human_bytes(found.bytes_rewritten)} {would}written again"),
    )
    if found.commit is None:
        return [*lines, "nothing was written"]
    uploaded = f"uploaded {human_bytes(found.bytes_uploaded)} in {format_took(found.seconds)}"
    return [*lines, uploaded, committed_line(found.commit)]

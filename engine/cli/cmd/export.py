"""The verb `export`."""

from pathlib import Path
from typing import ClassVar

import click
import msgspec

from engine.cli import options as cli
from engine.cli.config import CommitChoice
from engine.cli.output import extend
from engine.cli.session import Session, verb
from engine.errors import TargetError
from engine.repository.samza_export import SamzaExport, export_to_samza
from index.display import printable
from index.snapshot.model import Scope


class ExportView(SamzaExport, frozen=True, kw_only=True):
    """`export`."""

    json_omitted: ClassVar = ("index_json", "commit")
    json_properties: ClassVar = {"job": "commit.scope.job", "number": "commit.pointer.number"}

    output: Path


class ExportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which store of which commit, and where to."""

    scope: Scope
    task: str
    store: str
    commit: CommitChoice
    output: Path
    unpack: bool
    samza_job_id: str


@verb("export", "Write a snapshot's index in Samza's form.", prints=(ExportView,))
@click.argument("commit", type=cli.COMMIT)
@click.argument("output", type=cli.FILE)
@cli.scope_options()
@cli.store_options(default=True)
@click.option("--unpack", is_flag=True, help="Upload packed and inline files singly first, as job JOB.samza.")
@click.option("--samza-job-id", metavar="ID", default="1", help="Samza's job id.")
def export(session: Session, options: ExportOptions) -> None:
    """Write the index of one store of a commit as Samza's blob-store backend would, to a new file OUTPUT.

    Its blob ids are keys of the repository. A name keeps what it refers to: `tidemark unname` gives it up.

    Example: tidemark export -r file:///backups --job flights latest index.json --unpack
    """
    if options.output.exists():
        raise TargetError("is there already", operation="export", subject=str(options.output), hint="name a new file")
    with session.open() as repository:
        found = session.find(options.scope, options.commit)
        task, store, job_id = options.task, options.store, options.samza_job_id
        work = export_to_samza(
            repository.asynchronous, found, task=task, store=store, job_id=job_id, unpack=options.unpack
        )
        made = repository.loop.run(work)
    options.output.write_bytes(made.index_json)
    line = (
        f"{made.files_count} files of commit {made.commit.pointer.number} of {printable(str(made.commit.scope))} "
        f"as Samza's checkpoint {made.checkpoint_id}; kept by the name {printable(made.name)}"
    )
    session.show(extend(ExportView, made, output=options.output), [line])

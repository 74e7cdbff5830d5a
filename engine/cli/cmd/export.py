"""The verb `export`."""

from pathlib import Path
from typing import ClassVar

import click

from engine.cli.choices import StoreOptions
from engine.cli.config import CommitChoice
from engine.cli.options import COMMIT, Verb, common_options, scope_options, store_options
from engine.cli.output import extend
from engine.cli.session import Session, with_session
from engine.errors import TargetError
from engine.repository.samza_export import SamzaExport, export_to_samza
from engine.repository.sync import SyncRepository
from index.plan.commits import Commit
from index.text import printable


class ExportView(SamzaExport, frozen=True, kw_only=True):
    """`export`."""

    json_omitted: ClassVar = ("index_json", "commit")
    json_properties: ClassVar = {"job": "commit.scope.job", "number": "commit.pointer.number"}

    output: Path


class ExportOptions(StoreOptions, frozen=True, kw_only=True):
    """Which store of which commit, and where to."""

    commit: CommitChoice
    output: Path
    unpack: bool
    samza_job_id: str


@click.command(
    "export",
    cls=Verb,
    short_help="Write a snapshot's index in Samza's form.",
    prints=(ExportView,),
    example="tidemark export -r file:///backups --job flights latest index.json --unpack",
)
@click.argument("commit", type=COMMIT)
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@scope_options()
@store_options(default=True)
@click.option("--unpack", is_flag=True, help="Upload packed and inline files singly first, as job JOB.samza.")
@click.option("--samza-job-id", metavar="ID", default="1", show_default=True, help="Samza's job id.")
@common_options
@with_session
def export(session: Session, options: ExportOptions) -> None:
    """Write the index of one store of a commit as Samza's blob-store backend would, to a new file OUTPUT.

    Its blob ids are keys of the repository. A name keeps what it refers to: `tidemark unname` gives it up.
    """
    if options.output.exists():
        raise TargetError("is there already", operation="export", subject=str(options.output), hint="name a new file")
    with session.open() as repository:
        found = session.find(repository, options.scope, options.commit)
        made = _export(repository, found, options)
    options.output.write_bytes(made.index_json)
    line = (
        f"{made.files_count} files of commit {made.commit.pointer.number} of {printable(str(made.commit.scope))} "
        f"as Samza's checkpoint {made.checkpoint_id}; kept by the name {printable(made.name)}"
    )
    session.show(extend(ExportView, made, output=options.output), [line])


def _export(repository: SyncRepository, commit: Commit, options: ExportOptions) -> SamzaExport:
    work = export_to_samza(
        repository.asynchronous,
        commit,
        task=options.task,
        store=options.store,
        job_id=options.samza_job_id,
        unpack=options.unpack,
    )
    return repository.loop.run(work)

"""The verb `export`."""

from pathlib import Path

import click
import msgspec

from engine.cli.config import CommitChoice
from engine.cli.options import COMMIT, Verb, common_options, scope_options, store_options
from engine.cli.session import Session, choose_scope, with_session
from engine.errors import TargetError
from engine.repository.samza_export import SamzaExport, export_to_samza
from engine.repository.sync import SyncRepository
from index.plan.commits import Commit
from index.text import printable


class ExportView(msgspec.Struct, frozen=True, kw_only=True):
    """`export`."""

    output: str
    checkpoint_id: str
    files_count: int
    unpacked: bool
    # The commit that holds the blobs, and the name that keeps it from being collected.
    job: str
    number: int
    name: str


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
def export(
    session: Session,
    *,
    commit: CommitChoice,
    output: Path,
    job: str,
    commit_per_task: bool,
    task: str,
    store: str,
    unpack: bool,
    samza_job_id: str,
) -> None:
    """Write the index of one store of a commit as Samza's blob-store backend would, to a new file OUTPUT.

    Its blob ids are keys of the repository. A name keeps what it refers to: `tidemark unname` gives it up.
    """
    scope = choose_scope(job, commit_per_task=commit_per_task, task=task)
    if output.exists():
        raise TargetError("is there already", operation="export", subject=str(output), hint="name a new file")
    with session.open() as repository:
        found = session.find(repository, scope, commit)
        made = _export(repository, found, task=task, store=store, job_id=samza_job_id, unpack=unpack)
    output.write_bytes(made.index_json)
    view = ExportView(
        output=str(output),
        checkpoint_id=made.checkpoint_id,
        files_count=made.files_count,
        unpacked=made.unpacked,
        job=made.commit.scope.job,
        number=made.commit.pointer.number,
        name=made.name,
    )
    line = (
        f"{made.files_count} files of commit {made.commit.pointer.number} of {printable(str(made.commit.scope))} "
        f"as Samza's checkpoint {made.checkpoint_id}; kept by the name {printable(made.name)}"
    )
    session.show(view, [line])


def _export(
    repository: SyncRepository, commit: Commit, *, task: str, store: str, job_id: str, unpack: bool
) -> SamzaExport:
    work = export_to_samza(repository.asynchronous, commit, task=task, store=store, job_id=job_id, unpack=unpack)
    return repository.loop.run(work)

"""The verb `backup`."""

from pathlib import Path
from typing import ClassVar, Final

import click
import msgspec

from engine.backup.backup import BackupOptions, BackupResult, BackupStats
from engine.cli import options as cli
from engine.cli.cmd.commit import ResultFile, commit_until_known, write_result
from engine.cli.output import committed_line
from engine.cli.session import Session, check_fits, verb
from engine.errors import DamagedError, UsageError
from engine.text import table
from index.display import count, human_bytes, human_duration, printable
from index.plan.backup import BackupPlan
from index.plan.commits import Commit
from index.snapshot.dir_diff import DiffStats
from index.snapshot.keys import encode_component
from index.snapshot.model import Scope

_CHANGES: Final = ("added", "retained", "removed")


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """`backup --dry-run`."""

    json_omitted: ClassVar = ("plan",)
    json_properties: ClassVar = {
        **{name: f"plan.changes.{name}" for did in _CHANGES for name in (f"files_{did}", f"bytes_{did}")},
        **{f"{what}_{did}": f"plan.{what}_{did}" for did in ("repacked", "healed") for what in ("files", "bytes")},
        "bytes_inline": "plan.inline_bytes",
        # Packs included; the index comes on top.
        "uploads_count": "plan.uploads_count",
        "upload_bytes": "plan.upload_bytes",
    }

    dry_run: bool = True
    plan: BackupPlan
    files_inline: int
    files_empty: int
    packs_count: int
    packs_bytes: int
    # Paths of all that would be read: added, or packed again.
    files: tuple[str, ...]


class BackupView(msgspec.Struct, frozen=True, kw_only=True):
    """`backup`. Without a commit the result is in `result_file`."""

    json_omitted: ClassVar = ("made",)
    json_properties: ClassVar = {
        **{name: f"made.reference.{name}" for name in ("task", "store", "version", "unique_id")},
        "stats": "made.stats",
    }

    scope: Scope
    made: BackupResult
    commit: Commit | None
    # False: some TTLs are left to remove; the next commit or collection does it.
    settled: bool
    result_file: Path | None


class BackupArguments(msgspec.Struct, frozen=True, kw_only=True):
    """What to back up, as what, and whether to commit it."""

    scope: Scope
    task: str
    store: str
    directory: Path
    how: BackupOptions
    offsets: str | None
    dry_run: bool
    no_commit: bool
    result: Path | None


@verb("backup", "Upload what changed in a directory, and commit it.", prints=(BackupView, PlanView))
@click.argument("directory", type=cli.DIRECTORY_THERE, metavar="DIR")
@cli.scope_options()
@cli.store_options(default=True)
@click.option(
    "--version", type=click.IntRange(min=0), metavar="N", help="Version of this state.  [default: the last plus one]"
)
@click.option("--unique-id", metavar="UID", help="Id of this attempt at it.  [default: random]")
@click.option("--offsets", default=None, metavar="TEXT", help="Your position in the input, kept with the commit.")
@cli.check_retained_option
@cli.shrink_max_option
@click.option("-n", "--dry-run", is_flag=True, help="Upload nothing; say what would be.")
@click.option("--no-commit", is_flag=True, help="Upload only; `tidemark commit` makes it visible.")
@click.option("--result", type=cli.FILE, metavar="FILE", help="With --no-commit: where the result goes.")
@cli.figures_option
@cli.trust_stat_option
@cli.transfer_options
def backup(session: Session, options: BackupArguments) -> None:
    """Upload what changed in DIR since the newest commit, and commit it.

    DIR is a RocksDB checkpoint, or any directory that nobody writes to meanwhile.

    Example: tidemark backup /state/checkpoint -r file:///backups --job flights
    """
    check_fits("--task", encode_component, options.task)
    check_fits("--store", encode_component, options.store)
    if not options.dry_run and options.no_commit != (options.result is not None):
        hint = "without a result file nothing could ever commit the upload"
        raise UsageError("--no-commit and --result go together", operation="backup", hint=hint)
    if not options.dry_run and options.no_commit and options.offsets is not None:
        raise UsageError("offsets belong to the commit", operation="backup", hint="give them to `tidemark commit`")
    source, task, store = (options.scope, options.directory), options.task, options.store
    with session.open() as repository:
        if options.dry_run:
            how = BackupOptions(check_retained=options.how.check_retained, shrink_max=options.how.shrink_max)
            plan = repository.plan_backup(*source, task=task, store=store, options=how)
            session.show(_view_plan(plan), _plan_lines(plan))
            return

        def back_up() -> BackupResult:
            with session.progress("backup") as progress:
                return repository.backup(*source, task=task, store=store, options=options.how, progress=progress)

        def commit() -> Commit:
            with session.record.timed("commit"):
                return commit_until_known(
                    repository, options.scope, [made], version=options.how.version, offsets=options.offsets or ""
                )

        made, committed = back_up(), None
        if options.result is not None:
            write_result(options.result, ResultFile(repository_id=repository.record.id, result=made))
        else:
            try:
                committed = commit()
            except DamagedError as error:
                # Now it is known what is missing: what is still here is uploaded again (design 0006, M1).
                session.warn(f"backing up again: {error}")
                made = back_up()
                committed = commit()
    session.record.note(made)
    settled = committed is not None and committed.settled
    view = BackupView(scope=made.scope, made=made, commit=committed, settled=settled, result_file=options.result)
    session.show(view, _backup_lines(made, committed, options.result))


def _backup_lines(made: BackupResult, commit: Commit | None, result_file: Path | None) -> list[str]:
    stats = made.stats
    lines = [
        *_changes_table(*_changes(stats)),
        f"uploaded {human_bytes(stats.bytes_uploaded)} in {count(stats.blobs, 'blob')} ({count(stats.packs, 'pack')})",
        f"index {human_bytes(stats.index_bytes)} with {count(stats.files_inline, 'file')} inside",
    ]
    if (dead := stats.files_repacked - stats.files_healed) > 0:
        again = f"{count(dead, 'file')} ({human_bytes(stats.bytes_repacked - stats.bytes_healed)})"
        lines.append(f"packed again {again} of packs that were mostly dead")
    if stats.files_healed:
        healed = f"{count(stats.files_healed, 'file')} ({human_bytes(stats.bytes_healed)})"
        lines.append(f"uploaded again {healed}, of which bytes were missing: older commits still miss them")
    lines.append(f"took {human_duration(int(stats.seconds * 1000))} and {count(stats.requests, 'request')}")
    if commit is not None:
        return [*lines, committed_line(commit)]
    version = f"{made.reference.version}_{printable(made.reference.unique_id)}"
    return [*lines, f"NOT committed: `tidemark commit {printable(str(result_file))}` makes version {version} visible"]


def _view_plan(plan: BackupPlan) -> PlanView:
    return PlanView(
        plan=plan,
        files_inline=len(plan.inline),
        files_empty=len(plan.empty),
        packs_count=len(plan.packs),
        packs_bytes=sum(pack.size_bytes for pack in plan.packs),
        files=tuple(sorted("/".join(item.path) for item in plan.files)),
    )


def _plan_lines(plan: BackupPlan) -> list[str]:
    packed = sum(len(pack.files) for pack in plan.packs)
    rows = [
        ("in blobs of their own", len(plan.blobs), sum(item.file.size_bytes for item in plan.blobs)),
        (f"in {count(len(plan.packs), 'pack')}", packed, sum(pack.size_bytes for pack in plan.packs)),
        ("in the index", len(plan.inline), plan.inline_bytes),
        ("empty", len(plan.empty), 0),
    ]
    lines = _changes_table(
        *_changes(plan.changes),
        *([("stored again", plan.files_repacked, plan.bytes_repacked)] if plan.files_repacked else []),
        *([("  for what is missing", plan.files_healed, plan.bytes_healed)] if plan.files_healed else []),
    )
    if stored := [(f"  {what}", files, bytes_) for what, files, bytes_ in rows if files]:
        total = ("would store", sum(files for _, files, _ in stored), sum(bytes_ for *_, bytes_ in stored))
        lines += _changes_table(total, *stored)
    blobs = f"{human_bytes(plan.upload_bytes)} in {count(plan.uploads_count, 'blob')}"
    return [*lines, f"would upload {blobs}, and an index; nothing was sent"]


def _changes(stats: BackupStats | DiffStats) -> list[tuple[str, int, int]]:
    return [(did, getattr(stats, f"files_{did}"), getattr(stats, f"bytes_{did}")) for did in _CHANGES]


def _changes_table(*rows: tuple[str, int, int]) -> list[str]:
    cells = [(what, f"{files:,}", human_bytes(bytes_)) for what, files, bytes_ in rows]
    return table(("", "files", "size"), cells, right=("files", "size"))

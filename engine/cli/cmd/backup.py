"""The verb `backup`."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

import click
import msgspec

from engine.backup.backup import BackupOptions, BackupResult, BackupStats
from engine.backup.live import LiveRocksDb
from engine.cli import options as cli
from engine.cli.cmd.commit import ResultFile, write_result
from engine.cli.output import committed_line, format_took, lines_if, tabulate
from engine.cli.session import Session, check_fits, refuse_given, verb
from engine.errors import DamagedError, NotFoundError, TargetError, UsageError
from engine.local.scan import refusing
from engine.rocksdb.merge import CURRENT
from engine.text import table
from index.display import count, human_bytes, human_duration
from index.plan.backup import BackupPlan
from index.plan.commits import Commit
from index.snapshot.dir_diff import DiffStats
from index.snapshot.keys import encode_component
from index.snapshot.model import Scope

_CHANGES: Final = ("added", "retained", "removed")
_OF_MADE: Final = {
    **{name: f"made.reference.{name}" for name in ("task", "store", "version", "unique_id")},
    "stats": "made.stats",
}


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
    json_properties: ClassVar = _OF_MADE

    scope: Scope
    made: BackupResult
    commit: Commit | None
    # False: some TTLs are left to remove; the next commit or collection does it.
    settled: bool
    result_file: Path | None


class TaskView(msgspec.Struct, frozen=True, kw_only=True):
    """A task of `backup --tasks`."""

    json_omitted: ClassVar = ("made",)
    json_properties: ClassVar = _OF_MADE

    made: BackupResult


class TasksView(msgspec.Struct, frozen=True, kw_only=True):
    """`backup --tasks`: all tasks, and their commit."""

    scope: Scope
    tasks: tuple[TaskView, ...]
    commit: Commit
    settled: bool


class TasksPlanView(msgspec.Struct, frozen=True, kw_only=True):
    """`backup --tasks --dry-run`: the plans by task."""

    dry_run: bool = True
    tasks: dict[str, PlanView]


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
    live: bool
    tasks: bool
    every: int | None = None
    scratch: Path | None = None


@verb("backup", "Upload what changed in a directory, and commit it.", BackupView, PlanView, TasksView, TasksPlanView)
@click.argument("directory", type=cli.DIRECTORY_THERE, metavar="DIR")
@cli.scope_options()
@cli.store_options(default=True)
@cli.option("--live", "DIR is a RocksDB that a process may hold: back up a copy taken meanwhile.")
@cli.option("--tasks", "Each RocksDB DIR/TASK is the store of this task; all are one commit.")
@cli.option("--every TIME", "With --live: again after TIME, until interrupted.", cli.DURATION)
@cli.option("--scratch DIR", "With --live: where copies are.  [default: beside the RocksDB]", cli.DIRECTORY_THERE)
@cli.option("--version N", "Version of this state.  [default: the last plus one]", cli.NEW_VERSION)
@cli.option("--unique-id UID", "Id of this attempt at it.  [default: random]")
@cli.option("--offsets TEXT", "Your position in the input, kept with the commit.")
@cli.check_retained_option
@cli.shrink_max_option
@cli.option("-n --dry-run", "Upload nothing; say what would be.")
@cli.option("--no-commit", "Upload only; `tidemark commit` makes it visible.")
@cli.option("--result FILE", "With --no-commit: where the result goes.", cli.FILE)
@cli.figures_option
@cli.trust_stat_option
@cli.transfer_options
def backup(session: Session, options: BackupArguments) -> None:
    """Upload what changed in DIR since the newest commit, and commit it.

    DIR is a RocksDB checkpoint, or any directory that nobody writes to meanwhile. With --live it is a RocksDB that
    another process may hold and write to. SSTs of it are linked, not copied, if --scratch is on its file system.

    Example: tidemark backup /state/checkpoint -r file:///backups --job flights
    """
    _check(session, options)
    if not options.live and not options.tasks:
        _warn_of_another_verb(session, options.directory)
    with session.open(), contextlib.ExitStack() as open_for_all:
        run = _Backup(session, options, open_for_all)
        if options.every is None:
            session.show(*(run.plan() if options.dry_run else run.back_up()))
        else:
            run.go_on(options.every)


def _warn_of_another_verb(session: Session, directory: Path) -> None:
    """Name the verb or the option that a directory of this kind is for; as plain files it can be backed up, too."""
    if all((directory / name).exists() for name in ("metadata", "offsets", "commits")):
        instead = f"`tidemark spark backup {directory}` takes one batch"
        session.warn(f"{directory} is a checkpoint of Structured Streaming: {instead}")
    elif not (directory / CURRENT).exists() and len(_tasks_in(directory)) > 1:
        session.warn(f"{directory} holds several RocksDBs: with --tasks each is the store of a task")
    elif not (directory / CURRENT).exists() and not any(directory.iterdir()):
        session.warn(f"{directory} is empty: is it the right directory, and mounted?")


def _tasks_in(directory: Path) -> list[Path]:
    with refusing(directory):
        return [path for path in sorted(directory.iterdir()) if (path / CURRENT).is_file()]


def _check(session: Session, options: BackupArguments) -> None:
    check_fits("--task", encode_component, options.task)
    check_fits("--store", encode_component, options.store)
    if not options.dry_run and options.no_commit != (options.result is not None):
        raise session.refusal(
            "--no-commit and --result go together", "without a result file nothing could commit the upload"
        )
    if options.result is not None and not options.result.absolute().parent.is_dir():
        parent = str(options.result.parent)
        raise TargetError("there is no such directory", operation="backup", subject=parent, hint="make it")
    if not options.dry_run and options.no_commit and options.offsets is not None:
        raise session.refusal("offsets belong to the commit", "give them to `tidemark commit`")
    if not options.live and (options.every is not None or options.scratch is not None):
        raise session.refusal("--every and --scratch go with --live", "add it, if DIR is a RocksDB")
    if options.tasks and (options.no_commit or options.scope.task is not None):
        raise session.refusal("--tasks makes one commit of all tasks", "leave --no-commit and --commit-per-task out")
    if options.tasks:
        refuse_given("task", "does not go with --tasks", "each directory is named like its task: leave one of them out")
    once = options.dry_run or options.no_commit or options.how.version is not None or options.how.unique_id is not None
    if options.every is not None and once:
        hint = "leave --dry-run, --no-commit, --version and --unique-id out"
        raise session.refusal("--every makes a commit of its own each time", hint)


class _Backup(msgspec.Struct):
    """A run of the verb, over one source or one for each task."""

    session: Session
    options: BackupArguments
    open_for_all: contextlib.ExitStack
    live: dict[Path, LiveRocksDb] = {}

    def find(self) -> Mapping[str, Path | LiveRocksDb]:
        """Look for what there is by now, by task."""
        options = self.options
        if not options.tasks:
            return {options.task: self._open(options.directory)}
        found = _tasks_in(options.directory)
        if not found:
            hint = "each task is a directory below it that is a RocksDB"
            raise NotFoundError("has no task", operation="backup", subject=str(options.directory), hint=hint)
        return {check_fits("--tasks", encode_component, path.name): self._open(path) for path in found}

    def _open(self, path: Path) -> Path | LiveRocksDb:
        if not self.options.live:
            return path
        if path not in self.live:
            self.live[path] = self.open_for_all.enter_context(LiveRocksDb(path, scratch=self.options.scratch))
        return self.live[path]

    def plan(self) -> tuple[PlanView | TasksPlanView, list[str]]:
        session, options = self.session, self.options
        how = BackupOptions(check_retained=options.how.check_retained, shrink_max=options.how.shrink_max)
        views, lines = {}, []
        for task, source in self.find().items():
            plan = session.repository.plan_backup(options.scope, source, task=task, store=options.store, options=how)
            views[task] = PlanView(
                plan=plan,
                files_inline=len(plan.inline),
                files_empty=len(plan.empty),
                packs_count=len(plan.packs),
                packs_bytes=sum(pack.size_bytes for pack in plan.packs),
                files=tuple(sorted("/".join(item.path) for item in plan.files)),
            )
            lines += [f"task {task}"] * options.tasks + _plan_lines(plan)
        return TasksPlanView(tasks=views) if options.tasks else views[options.task], lines

    def go_on(self, every_ms: int) -> None:
        """Back up what is new again and again, until interrupted."""
        session = self.session

        def step() -> tuple[int, BackupView | TasksView, list[str]] | None:
            view, lines = self.back_up()
            if view.commit is None:
                return None
            session.say(lines[-1])
            return view.commit.pointer.number, view, lines

        session.say(f"backing up {self.options.directory} every {human_duration(every_ms)}; end it with Ctrl-C")
        last = session.repeat(step, every_ms, staying=lambda of: f"stays at commit {of[0]}", final=(UsageError,))
        if last is not None:
            session.show(*last[1:])

    def back_up(self) -> tuple[BackupView | TasksView, list[str]]:
        """Back up what there is, and commit it; with `every`, if there is something new."""
        session, options = self.session, self.options
        made, committed = self._upload(), None
        how = {"version": options.how.version, "offsets": options.offsets or ""}
        if options.result is not None:
            write_result(options.result, ResultFile(repository_id=session.repository.record.id, result=made[0]))
        elif options.every is None or any(
            one.stats.files_added or one.stats.files_removed or one.stats.files_repacked for one in made
        ):
            try:
                committed = session.commit(options.scope, made, **how)
            except DamagedError as error:
                # Now it is known what is missing: what is still here is uploaded again (design 0006, M1).
                session.warn(f"backing up again: {error}")
                made = self._upload()
                committed = session.commit(options.scope, made, **how)
        else:
            session.record.commit_skipped = True
        for one in made:
            session.record.note(one)
        settled = committed is not None and committed.settled
        if options.tasks and committed is not None:
            tasks = tuple(TaskView(made=one) for one in made)
            columns = {"task": "reference.task", ">added": "stats.files_added", ">uploaded": "stats.bytes_uploaded"}
            lines = [*tabulate(made, columns), committed_line(committed)]
            return TasksView(scope=options.scope, tasks=tasks, commit=committed, settled=settled), lines
        scope, file = options.scope, options.result
        view = BackupView(scope=scope, made=made[0], commit=committed, settled=settled, result_file=file)
        return view, _backup_lines(made[0], committed, file)

    def _upload(self) -> tuple[BackupResult, ...]:
        session, options = self.session, self.options
        with session.progress("backup") as progress:
            made = session.repository.backup_many(
                options.scope, self.find(), store=options.store, options=options.how, progress=progress
            )
        if bytes_copied := sum(source.taken.bytes_copied for source in self.live.values() if source.taken is not None):
            advice = "give a --scratch on the file system of DIR, and run as its owner"
            session.warn(f"{human_bytes(bytes_copied)} had to be copied, not linked: {advice}")
        return made


def _backup_lines(made: BackupResult, commit: Commit | None, result_file: Path | None) -> list[str]:
    stats = made.stats
    lines = [
        *_changes_table(*_changes(stats)),
        f"uploaded {human_bytes(stats.bytes_uploaded)} in {count(stats.blobs, 'blob')} ({count(stats.packs, 'pack')})",
        f"index {human_bytes(stats.index_bytes)} with {count(stats.files_inline, 'file')} inside",
    ]
    dead = stats.files_repacked - stats.files_healed
    again = f"{count(dead, 'file')} ({human_bytes(stats.bytes_repacked - stats.bytes_healed)})"
    resumed = f"{count(stats.blobs_resumed, 'blob')} ({human_bytes(stats.bytes_resumed)})"
    healed = f"{count(stats.files_healed, 'file')} ({human_bytes(stats.bytes_healed)})"
    lines += lines_if(
        (dead > 0, f"packed again {again} of packs that were mostly dead"),
        (stats.blobs_resumed, f"used {resumed} of a backup that was broken off"),
        (stats.files_healed, f"uploaded again {healed}, of which bytes were missing: older commits still miss them"),
        (True, f"took {format_took(stats.seconds)} and {count(stats.requests, 'request')}"),
    )
    if commit is not None:
        return [*lines, committed_line(commit)]
    version = f"{made.reference.version}_{made.reference.unique_id}"
    return [*lines, f"NOT committed: `tidemark commit {result_file}` makes version {version} visible"]


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

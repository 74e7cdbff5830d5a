"""The verbs that make records and names, or give them up, and `rescale` (design 0010, T1 to T7)."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import click
import msgspec
from click.core import ParameterSource

from engine.cli import options as cli
from engine.cli.config import CommitChoice, check_new_name
from engine.cli.output import committed_line, format_took, lines_if
from engine.cli.run import ExitCode
from engine.cli.session import Session, check_fits, choose_scope, refuse_given, verb
from engine.commit.forget import ForgetReport
from engine.errors import UsageError
from engine.repository.repository import Repository
from engine.repository.rescale import KeyColumns, RescaledJob, RescaleOptions
from engine.text import Prose
from index.display import count, human_bytes, human_duration, iso_time
from index.plan.commits import Commit
from index.snapshot.keys import encode_component
from index.snapshot.model import NameRecord, RepositoryRecord, Scope


class InitView(msgspec.Struct, frozen=True, kw_only=True):
    """`init`."""

    json_omitted: ClassVar = ("record",)
    json_properties: ClassVar = {
        "repository_id": "record.id",
        **{name: f"record.{name}" for name in ("ttl_ms", "margin_ms", "collection_period_ms")},
    }

    record: RepositoryRecord


@verb("init", None, InitView)
@click.argument("url", required=False, metavar="[URL]")
@cli.option("--ttl", "Life of an upload that is not committed.", cli.DURATION, default="24h")
@cli.option("--margin", "How much of it a commit must have left.", cli.DURATION, default="1h")
@cli.option("--collection-period", "How often collect will run.", cli.DURATION, default="24h")
def init(session: Session, *, ttl: int, margin: int, collection_period: int) -> None:
    """Make the blob store at URL, or at --repository, a repository.

    The TTL must be longer than the longest backup with its commit takes. The three times are in the repository and
    hold for everybody who uses it.

    Example: tidemark init file:///backups --ttl 2d
    """
    ctx = click.get_current_context()
    if ctx.params["url"] and ctx.get_parameter_source("repository") is ParameterSource.COMMANDLINE:
        raise session.refusal("URL and --repository", "give one of them")
    given = {"ttl_ms": ttl, "margin_ms": margin, "collection_period_ms": collection_period}
    with session.begin(Repository.init, **given) as repository:
        record = repository.record
    times = f"TTL {human_duration(record.ttl_ms)}, margin {human_duration(record.margin_ms)}"
    period = f"collect every {human_duration(record.collection_period_ms)}"
    session.show(InitView(record=record), [Prose(f"repository {record.id}: {times}, {period}")])


class NameView(msgspec.Struct, frozen=True, kw_only=True):
    """`name`."""

    json_omitted: ClassVar = ("record",)
    json_properties: ClassVar = {
        "number": "record.source.number",
        **{name: f"record.{name}" for name in ("name", "version", "committed_at_ms")},
    }

    scope: Scope
    record: NameRecord


@verb("name", "Keep a commit under a name.", NameView)
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
    line = f"{name} is commit {record.source.number} of {scope}, version {record.version}"
    session.show(NameView(scope=scope, record=record), [f"{line}, {iso_time(record.committed_at_ms)}"])


class ReleasedView(msgspec.Struct, frozen=True, kw_only=True):
    """`unname`."""

    name: str
    scope: Scope


@verb("unname", "Release a name.", ReleasedView)
@click.argument("name")
@cli.scope_options(task=True)
@cli.option("-y --yes", "Do not ask; without a terminal nobody is asked.")
def unname(session: Session, *, name: str, scope: Scope, yes: bool) -> None:
    """Release a name; the next collection takes what only it kept.

    Example: tidemark unname -r file:///backups --job flights before-upgrade
    """
    check_fits("NAME", encode_component, name)
    shown = f"{name} of {scope}"
    if not yes and not session.confirm(f"release {shown}, so that a collection may take what only it keeps?"):
        return
    with session.open() as repository, session.explaining(scope):
        repository.release_name(scope, name)
    session.show(ReleasedView(name=name, scope=scope), [f"{shown} is released"])


class CommittedView(msgspec.Struct, frozen=True, kw_only=True):
    """`rewind` and `fork`."""

    commit: Commit
    source_number: int


@verb("rewind", "Make an older commit the newest again.", CommittedView)
@click.argument("commit", type=cli.COMMIT)
@cli.scope_options(task=True)
def rewind(session: Session, *, commit: CommitChoice, scope: Scope) -> None:
    """Make an older commit the newest again, as a new commit.

    COMMIT is a number, v8, 8_<uid>, @TIME or a name. No bytes are copied and nothing is lost: the commits in between
    stay until retention takes them.

    Example: tidemark rewind -r file:///backups --job flights v7
    """
    with session.open() as repository:
        target = session.find(scope, commit)
        made = repository.rewind(target)
    _show_made(session, made, target)


@verb("fork", "Begin a new job with the stores of a commit.", CommittedView)
@click.argument("commit", type=cli.COMMIT)
@click.argument("new_job")
@cli.scope_options(task=True)
@cli.option("--new-task TASK", "With --commit-per-task: the task to begin.  [default: the same]")
def fork(session: Session, *, commit: CommitChoice, new_job: str, scope: Scope, new_task: str | None) -> None:
    """Begin a new job with the stores of a commit. No bytes are copied.

    COMMIT is latest, a number, v8, 8_<uid>, @TIME or a name; NEW_JOB must have no commits yet.

    Example: tidemark fork -r file:///backups --job flights v7 flights-replay
    """
    if scope.task is None:
        refuse_given("new_task", "goes with --commit-per-task", "leave it out: a commit of the job has all its tasks")
    new_scope = choose_scope(new_job, commit_per_task=scope.task is not None, task=new_task or scope.task)
    with session.open() as repository:
        source = session.find(scope, commit)
        made = repository.fork(source, new_scope)
    _show_made(session, made, source, f" of {scope}")


def _show_made(session: Session, made: Commit, source: Commit, of: str = "") -> None:
    number = source.pointer.number
    line = f"{committed_line(made)}; the same as commit {number}{of}"
    session.show(CommittedView(commit=made, source_number=number), [line])


class ForgetView(msgspec.Struct, frozen=True, kw_only=True):
    """`forget`."""

    dry_run: bool
    scopes: tuple[ForgetReport, ...]


@verb("forget", "Give up a job: close all its commits for ever.", ForgetView)
@click.argument("job")
@cli.setting("--commit-per-task", "Each task commits by itself; --task says which.")
@cli.option("--task TASK", "With --commit-per-task: which task.  [default: all of them]")
@cli.option("--with-names", "Release the names of its commits too.")
@cli.option("-n --dry-run", "Write nothing; say what would be forgotten.")
@cli.option("-y --yes", "Do not ask; without a terminal it is needed.")
def forget(session: Session, *, scope: Scope, task: str | None, with_names: bool, dry_run: bool, yes: bool) -> ExitCode:
    """Give up a job: close all its commits for ever.

    Nothing is deleted by this: the next `tidemark collect` takes what only JOB needed. What names hold stays until they
    are released. A writer that is still at work is refused, and begins again if it goes on; stop it first. Ends with 8
    if the job is forgotten and its names could not be released, for want of the permission.

    Example: tidemark forget flights -r file:///backups --yes
    """
    with session.open() as repository:
        scopes = _choose_scopes(session, scope, task)
        planned = [repository.forget(s, with_names=with_names, dry_run=True) for s in scopes]
        texts = [_what(report) for report in planned]
        message = f"this is for ever, and was not confirmed: {'; '.join(texts)}"
        refused = session.refusal(message, "say --yes to do it, or -n to see it in full", scope.job)
        lines = [f"to forget: {text}" for text in texts]
        if not (dry_run or yes or session.confirm("forget this for ever?", lines=lines, refused=refused)):
            return ExitCode.OK
        done = planned if dry_run else [repository.forget(s, with_names=with_names) for s in scopes]
    session.show(
        ForgetView(dry_run=dry_run, scopes=tuple(done)), [line for report in done for line in _forgotten_lines(report)]
    )
    return ExitCode.DENIED if any(report.denied for report in done) else ExitCode.OK


def _choose_scopes(session: Session, scope: Scope, task: str | None) -> Sequence[Scope]:
    """Return the scopes to forget, each of which has, or had, commits: of a job by tasks all if no task is named."""
    if task is not None and scope.task is None:
        hint = "to leave out one store of a job, use `tidemark commit --drop-store TASK/STORE`"
        raise session.refusal("--task goes with --commit-per-task", hint)
    every_task = scope.task is not None and task is None
    there = session.repository.scopes()
    chosen = [s for s in there if s == scope or (every_task and s.job == scope.job and s.task is not None)]
    if not chosen:
        session.refuse_empty(scope, "never had a commit")
    return chosen


def _what(report: ForgetReport) -> str:
    what = f"{report.scope}, which has no commits any more"
    if (newest := report.newest) is not None:
        what = f"{report.scope}, {count(report.records_count, 'record')}, newest commit {newest.pointer.number}"
        what += f" of version {newest.record.version}"
    return f"{what}, and {count(len(report.released), 'name')}" if report.released else what


def _forgotten_lines(report: ForgetReport) -> list[str]:
    would, scope, newest = report.dry_run, report.scope, report.newest
    was = f"the newest was {newest.pointer.number}, version {newest.record.version}; " if newest else ""
    closed = f"{count(report.records_count, 'record')} {'would be ' if would else ''}closed"
    release = "release with --with-names or `tidemark unname`"
    if report.denied:
        release = f"they could not be released: {report.denied}; a writer does it with `tidemark unname`"
    return lines_if(
        (not report.closed, f"{scope} was forgotten before"),
        (report.closed, f"{scope} {'would be' if would else 'is'} forgotten: {was}{closed}"),
        (report.names, f"NOT forgotten, because names hold it: {', '.join(report.names)}; {release}"),
        (report.released, f"{'would release' if would else 'released'}: {', '.join(report.released)}"),
        (not would, "`tidemark collect` takes what nothing else needs, once it is a TTL old"),
    )


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

    Every key is hashed, and has to be in its task, or nothing is committed. If M divides the present number, files are
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
    session.show(found, _rescaled_lines(job, found))


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
        found: KeyColumns = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the caller's, and may raise anything
        hint = "give MODULE:FUNCTION, of a module that Python finds or that is in this directory"
        message = f"cannot be imported: {type(error).__name__}: {error}"
        raise UsageError(message, operation="rescale", subject=f"--key {text}", hint=hint) from error
    return found


def _rescaled_lines(job: str, found: RescaledJob) -> list[str]:
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

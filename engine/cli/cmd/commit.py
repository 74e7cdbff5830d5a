"""The verb `commit`, and a backup that is not committed yet, as a file.

Such a file goes from the machine that backed up to the one that commits, and comes from outside. Nothing in it is
believed that the store knows better: a writer of one could otherwise make a commit out of what is not there, or stretch
the lease of uploads that are about to expire.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import click
import msgspec

from blobstore.concurrency import map_bounded
from blobstore.local.files import write_whole
from engine.backup.backup import BackupResult
from engine.cli import options as cli
from engine.cli.config import CommitChoice
from engine.cli.output import committed_line
from engine.cli.session import Session, choose_scope, verb
from engine.commit.record import ANY
from engine.errors import DamagedError, LeaseExpiredError, StaleResultError, UsageError
from engine.records.indexes import is_missing, settle_record
from engine.repository.repository import Repository, SyncRepository
from index.errors import FormatError
from index.plan.commits import Commit
from index.snapshot.contents import blob_keys, files_of, new_blob_keys
from index.snapshot.invariants import check_commit, check_index_reference
from index.snapshot.keys import INDEXES, parse_upload_key
from index.snapshot.model import NEVER_MS, BlobKey, CommitPointer, CommitRecord, Scope, SnapshotIndex, WriteId

RESULT_BYTES_MAX: Final = 64 * 1024 * 1024
IN_FLIGHT_MAX: Final = 16


class ResultFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file, as JSON."""

    tidemark: Literal["backup result"] = "backup result"
    schema: Literal[2] = 2
    repository_id: str
    result: BackupResult


def write_result(path: Path, file: ResultFile) -> None:
    """Write a result, replacing an older one at once."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(file), indent=1))


def read_result(path: Path, *, repository_id: str) -> BackupResult:
    """Read a result and check what can be checked without the store; `UsageError` if it is none for this repository."""
    try:
        with path.open("rb") as source:
            data = source.read(RESULT_BYTES_MAX + 1)
        if len(data) > RESULT_BYTES_MAX:
            raise _refused(path, "is larger than 64 MiB")
        file = msgspec.json.decode(data, type=ResultFile)
        if file.repository_id != repository_id:
            raise _refused(path, "was made for another repository")
        _check_form(file.result)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(path, f"not a backup result: {error}") from None
    except FormatError as error:
        raise _refused(path, str(error)) from None
    return file.result


def _check_form(result: BackupResult) -> None:
    """Check what a commit record demands, and that the new keys are uploads of one session of this scope."""
    reference = msgspec.structs.replace(result.reference, number=1)
    check_commit(
        CommitRecord(scope=result.scope, number=1, write_id=WriteId("0"), stores=(reference,), valid_until_ms=NEVER_MS)
    )
    session = parse_upload_key(reference.index.key).session
    for key in result.new_keys:
        parsed = parse_upload_key(key)
        if parsed.scope != result.scope or parsed.session != session:
            raise FormatError("is not an upload of this backup", subject=key)
    if result.base is not None:
        check_index_reference(result.base, "M17", "base")
    if not 0 <= result.oldest_birth_ms <= NEVER_MS:
        raise FormatError("not a time", subject="oldest_birth_ms")


async def check_uploaded(repository: Repository, path: Path, result: BackupResult) -> BackupResult:
    """Compare a result with what is in the store: one GET for the index (more for deltas), a HEAD for each upload.

    The result has the birth of its oldest upload as the store has it: a later one would stretch the lease of what is
    about to expire (design 0002, C5).

    Raises:
        UsageError: It says something else than the store.
        LeaseExpiredError, StaleResultError: An upload has expired, or its base is gone.
        DamagedError: The index is missing or altered.
    """

    async def birth_ms(key: BlobKey) -> int:
        info = await repository.store.stat(key)
        if info is None:
            raise LeaseExpiredError(f"upload {key} is gone", operation="commit", subject=str(path))
        return info.created_at_ms

    # First: what a collection took after the TTL is not damage, also where it is the index.
    created_ms = await map_bounded(birth_ms, result.new_keys, in_flight_max=IN_FLIGHT_MAX)
    index = await repository.read_index(result.reference.index)
    if not _same_snapshot(result, index):
        raise _refused(path, "does not say what the index in the repository says")
    if not await _fits_its_base(repository, path, result, index):
        raise _refused(path, "was not made on the base that it names")
    if not _needs_nothing_missing(result, index):
        raise _refused(path, "needs what it says to be missing")
    if set(result.new_keys) != {*new_blob_keys(index), result.reference.index.key}:
        raise _refused(path, "does not name exactly the new uploads of its index")
    return msgspec.structs.replace(result, oldest_birth_ms=min(created_ms))


def _needs_nothing_missing(result: BackupResult, index: SnapshotIndex) -> bool:
    """Return whether the commit may leave alone what the base had and is said to be missing (design 0006, M1).

    Where an index is, it says nothing of the blobs that came with it: none of them may be needed.
    """
    if any(key.startswith(INDEXES) for key in result.missing_keys):
        return blob_keys(index) == new_blob_keys(index)
    return blob_keys(index).isdisjoint(result.missing_keys)


async def _fits_its_base(repository: Repository, path: Path, result: BackupResult, index: SnapshotIndex) -> bool:
    """Return whether all that the index retains is in the base, whose commit protects it (T2): one GET or more."""
    retained = blob_keys(index) - new_blob_keys(index)
    if not retained or result.base is None or result.base.key in result.missing_keys:
        return not retained
    try:
        return retained <= blob_keys(await repository.read_index(result.base))
    except DamagedError as error:
        if not is_missing(error):
            raise
        raise StaleResultError("its base is gone", operation="commit", subject=str(path)) from error


def _same_snapshot(result: BackupResult, index: SnapshotIndex) -> bool:
    reference, metadata = result.reference, index.metadata
    sizes = [file.metadata.size_bytes for _, file in files_of(index.dir)]
    return (
        (metadata.job, metadata.task, metadata.store) == (result.scope.job, reference.task, reference.store)
        and (metadata.version, metadata.unique_id) == (reference.version, reference.unique_id)
        and (len(sizes), sum(sizes)) == (reference.files_count, reference.size_bytes)
    )


def _refused(path: Path, message: str) -> UsageError:
    hint = "give files that `tidemark backup --no-commit --result FILE` wrote for this repository"
    return UsageError(message, operation="commit", subject=str(path), hint=hint)


class CommitResultView(msgspec.Struct, frozen=True, kw_only=True):
    """`commit`."""

    commit: Commit
    settled: bool
    # True: an earlier run of the same command had made this commit already.
    already: bool


_DROPPED: Final = "A store that the job no longer has; may be repeated."


@verb("commit", "Make several backups visible as one commit.", CommitResultView)
@click.argument("results", type=cli.FILE_THERE, nargs=-1, metavar="[RESULT]...")
@cli.scope_options()
@cli.option("--drop-store TASK/STORE", _DROPPED, cli.STORE, to="dropped", multiple=True)
@cli.option("--version N", "Version of the commit.  [default: the last plus one]", cli.NEW_VERSION)
@cli.option("--offsets TEXT", "Your position in the input, kept with the commit.")
@cli.figures_option
def commit(
    session: Session,
    *,
    results: tuple[Path, ...],
    job: str,
    commit_per_task: bool,
    dropped: tuple[tuple[str, str], ...],
    version: int | None,
    offsets: str | None,
) -> None:
    """Make several backups visible as one commit, all or none.

    RESULT are files that `tidemark backup --no-commit --result FILE` wrote, at most one per store. Stores of the job
    that have none keep what they had, but for those that are dropped: collect takes them with the last commit that has
    them. Running it again with the same words changes nothing. Without files, the offsets stay as they are.

    Example: tidemark commit task-*.json -r file:///backups -j flights --offsets 42
    """
    if not results and not dropped:
        raise session.refusal("there is nothing to commit", "give RESULT files, or --drop-store")
    with session.open() as repository:
        made = [read_result(path, repository_id=repository.record.id) for path in results]
        parent: CommitPointer | Literal["any"] = ANY
        if made:
            scope = _scope_of(results, made, job, commit_per_task=commit_per_task)
            newest = repository.latest(scope)
        else:
            scope = choose_scope(job, commit_per_task=commit_per_task, task=dropped[0][0])
            newest = session.find(scope, CommitChoice())
            parent = newest.pointer
            offsets = newest.record.offsets if offsets is None else offsets
        dropped = _still_to_drop(repository, scope, dropped, newest)
        already = not dropped and newest is not None and _is_made(newest, made, version, offsets or "")
        if newest is None or not already:
            checked = [
                repository.loop.run(check_uploaded(repository.asynchronous, path, result))
                for path, result in zip(results, made, strict=True)
            ]
            how = {"version": version, "offsets": offsets or "", "parent": parent, "dropped": dropped}
            done = session.commit(scope, checked, **how)
        else:
            # The attempt before may have ended between the commit and the removal of the TTLs (design 0002, T1).
            repository.loop.run(settle_record(repository.asynchronous.store, newest.record))
            done = msgspec.structs.replace(newest, settled=True)
    session.record.commit_skipped = already
    view = CommitResultView(commit=done, settled=done.settled, already=already)
    session.show(view, [f"{committed_line(done)}{' (it was committed already)' if already else ''}"])


def _scope_of(paths: Sequence[Path], results: Sequence[BackupResult], job: str, *, commit_per_task: bool) -> Scope:
    """Return the scope that all results belong to; with `commit_per_task` each task has its own."""
    scope = results[0].scope
    for path, result in zip(paths, results, strict=True):
        if result.scope != scope or result.scope.job != job or (result.scope.task is not None) != commit_per_task:
            by_itself = ", which commits by itself" if result.scope.task is not None else ""
            hint = "give results of this job only; with --commit-per-task of one task only"
            raise UsageError(f"belongs to {result.scope}{by_itself}", operation="commit", subject=str(path), hint=hint)
    return scope


def _still_to_drop(
    repository: SyncRepository, scope: Scope, dropped: tuple[tuple[str, str], ...], newest: Commit | None
) -> tuple[tuple[str, str], ...]:
    """Return what is to be dropped, less what an earlier run of the command has dropped: what only older commits had.

    One that no commit has that is still there may be misspelled: it stays, and is refused.
    """
    absent = {store for store in dropped if newest is None or newest.store(*store) is None}
    if not absent:
        return dropped
    had = {(s.task, s.store) for commit in repository.commits(scope) for s in commit.record.stores}
    return tuple(store for store in dropped if store not in absent & had)


def _is_made(newest: Commit, results: Sequence[BackupResult], version: int | None, offsets: str) -> bool:
    """Return whether the newest commit is exactly what is to be committed: then an earlier attempt went through."""
    held = [(newest.store(made.task, made.store), made) for made in (result.reference for result in results)]
    is_same = newest.record.offsets == offsets and version in {None, newest.record.version}
    return is_same and all(there is not None and there.index == made.index for there, made in held)

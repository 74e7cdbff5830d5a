"""Collect what a checkpoint leaves behind: two looks, a batch apart, and then a quarantine (design 0014)."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from blobstore.base import BlobStore
from blobstore.checkpoint_files import FileStatus
from blobstore.concurrency import run_all, run_blocking
from blobstore.errors import BlobNotFoundError, CheckpointFileExistsError
from blobstore.local.files import write_whole
from blobstore.opening import StoreSettings
from engine.errors import ConflictError, DamagedError, NotFoundError, TooMuchToDeleteError, UsageError
from engine.local.scan import find_overlap
from engine.runtime import NO_PROGRESS, Progress
from engine.state.checkpoint_dir import CheckpointDir, opened_checkpoint
from engine.state.query import ENTRY_BYTES_MAX, StreamingCheckpoint
from engine.state.zips import ZIP_BYTES_MAX, read_state_zip
from index.display import count, human_bytes
from index.errors import UNDECODABLE, FormatError
from index.spark.checkpoint import COMMITS, OFFSETS, QUERY_ID, STATE
from index.spark.names import parse_state_name
from index.spark.query_logs import decode_commit
from index.spark.requests import log_times
from index.spark.waste import Collectable, Look, confirm_collectable, find_collectable, is_collectable

# Of a checkpoint, and of its quarantine.
_QUERY: Final = "/".join(QUERY_ID)
DAY_MS: Final = 24 * 3_600_000
TAKEN_SHARE_MAX: Final = 0.2
_AT_ONCE: Final = 16
_MOVES_AT_ONCE: Final = 4
_PLAN_BYTES_MAX: Final = 256 * 1024 * 1024


class CollectChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What is taken, and when."""

    older_than_ms: int = DAY_MS
    # The query does not run: no batch has to be committed between the two looks.
    is_stopped: bool = False
    taken_share_max: float = TAKEN_SHARE_MAX
    store_settings: StoreSettings | None = None


class CheckpointLook(msgspec.Struct, frozen=True, kw_only=True):
    """A look at a checkpoint, as a plan file keeps it for the next one."""

    location: str
    query_id: str
    # Of every commit that was there, and every batch that was planned: what its file held.
    commits: dict[int, bytes]
    planned: tuple[int, ...]
    state_bytes: int
    collectable: tuple[Collectable, ...]

    @property
    def newest_batch(self) -> int:
        return max(self.commits, default=-1)


class CheckpointCollected(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run."""

    location: str
    query_id: str
    # The newest committed batch of this look, and of the one before; None: this was the first.
    batch: int
    batch_before: int | None
    # What this look has found, and what of it both looks have and was moved to the quarantine.
    found: tuple[Collectable, ...]
    taken: tuple[Collectable, ...]
    state_bytes: int
    # Why nothing was taken, if so.
    waits_for: str = ""


async def look_at_checkpoint(root: CheckpointDir, *, older_than_ms: int, is_stopped: bool) -> CheckpointLook:
    """Look once (design 0014, X2 to X6).

    Raises:
        NotFoundError: There is no checkpoint.
        BatchLogError, DamagedError: A commit cannot be read.
        StoreError: As the store says.
    """
    checkpoint = StreamingCheckpoint(root)
    query_id = await checkpoint.query_id()

    commits: dict[int, bytes] = {}
    purged = [-1]

    async def read(batch: int) -> None:
        try:
            commits[batch] = await root.read(f"{COMMITS}/{batch}")
        except BlobNotFoundError:
            purged.append(batch)

    await run_all(read, await checkpoint.committed_batches(), in_flight_max=_AT_ONCE)
    last_purged = max(purged)
    files = await root.walk()
    named, unread = await _read_snapshots(root)
    look = Look(
        ids={batch: decode_commit(data, subject=f"{COMMITS}/{batch}").unique_ids for batch, data in commits.items()},
        files=files,
        named=named,
        unread=unread,
    )
    return CheckpointLook(
        # Absolute: a plan is of one place, wherever it is used from.
        location=root.location if root.local_root is None else str(root.local_root.absolute()),
        query_id=query_id,
        # Spark purges the oldest: those before one that is gone will go, too, and are not looked for again.
        commits={batch: data for batch, data in sorted(commits.items()) if batch > last_purged},
        planned=tuple(sorted(log_times(files, OFFSETS))),
        state_bytes=sum(file.size_bytes for file in files if file.path.startswith(f"{STATE}/")),
        collectable=find_collectable(look, older_than_ms=older_than_ms, is_stopped=is_stopped),
    )


async def _read_snapshots(root: CheckpointDir) -> tuple[Mapping[str, frozenset[str]], frozenset[str]]:
    """List all state once more; return the SSTs and logs that snapshots name, and the stores where one is unread."""
    named: dict[str, set[str]] = {}
    unread: set[str] = set()

    async def read(path: str) -> None:
        directory = path.rpartition("/")[0]
        try:
            data = await root.read(path, size_bytes_max=ZIP_BYTES_MAX)
            zipped = await run_blocking(read_state_zip, data, subject=path)
        except (BlobNotFoundError, DamagedError, FormatError):
            unread.add(directory)
            return
        named.setdefault(directory, set()).update(file.path for file in zipped.metadata.files)

    paths = [file.path for file in await root.walk(STATE)]
    snapshots = [path for path in paths if path.endswith(".zip") and parse_state_name(path.rpartition("/")[2])]
    await run_all(read, snapshots, in_flight_max=_AT_ONCE)
    return {directory: frozenset(of) for directory, of in named.items()}, frozenset(unread)


async def collect_checkpoint(
    location: str | Path | BlobStore,
    quarantine: str | Path | BlobStore,
    before: CheckpointLook | None,
    choice: CollectChoice | None = None,
    *,
    dry_run: bool = False,
    progress: Progress = NO_PROGRESS,
) -> tuple[CheckpointCollected, CheckpointLook]:
    """Look at a checkpoint, and move what it and the look before agree on to the quarantine (design 0014).

    Args:
        location: The checkpoint; its query may run.
        quarantine: A place outside of it, which gets the files under their paths.
        before: What an earlier call has returned; None: nothing is moved.
        choice: What is taken.
        dry_run: Move nothing; `taken` says what would be.

    Returns:
        What was done, and the look for the next call.

    Raises:
        UsageError: The two looks are of two checkpoints, or the quarantine is not apart from it, or has other files.
        ConflictError: The query was taken back between the looks (X7), or another file has a path in the quarantine.
        TooMuchToDeleteError: More than the share of the bytes of state would be taken: nothing was moved.
        NotFoundError: No batch is committed yet, or as `look_at_checkpoint`.
        BatchLogError, DamagedError, StoreError: As `look_at_checkpoint`.
    """
    choice = choice or CollectChoice()
    settings = choice.store_settings
    async with opened_checkpoint(location, settings) as root:
        here = await look_at_checkpoint(root, older_than_ms=choice.older_than_ms, is_stopped=choice.is_stopped)
        if not here.commits:
            hint = "run this again when the query has committed a batch"
            raise NotFoundError("has no committed batch", operation="spark collect", subject=root.location, hint=hint)
        taken: tuple[Collectable, ...] = ()
        waits_for = "a second look" if before is None else ""
        if before is not None:
            _check_same(before, here)
            waits_for = _waits_for(before, here, is_stopped=choice.is_stopped)
            taken = () if waits_for else confirm_collectable(before.collectable, here.collectable)
            check_share(taken, here.state_bytes, choice.taken_share_max, subject=root.location)
        if taken and not dry_run:
            async with opened_checkpoint(quarantine, settings) as aside:
                await _claim(root, aside)
                await _move(root, aside, taken, progress)
            moved = frozenset(taken)
            left = tuple(each for each in here.collectable if each not in moved)
            here = msgspec.structs.replace(here, collectable=left)
    collected = CheckpointCollected(
        location=root.location,
        query_id=here.query_id,
        batch=here.newest_batch,
        batch_before=None if before is None else before.newest_batch,
        found=here.collectable,
        taken=taken,
        state_bytes=here.state_bytes,
        waits_for=waits_for,
    )
    return collected, here


def _check_same(before: CheckpointLook, here: CheckpointLook) -> None:
    """Refuse another checkpoint, or one whose query was taken back."""
    if (before.query_id, before.location) != (here.query_id, here.location):
        message = f"the first look is of query {before.query_id} at {before.location}"
        raise UsageError(message, operation="spark collect", subject=here.location, hint="begin with another plan file")
    both = before.commits.keys() & here.commits.keys()
    oldest = min(here.commits, default=0)
    gone = [batch for batch in before.commits if batch > oldest and batch not in here.commits]
    if not both and oldest > before.newest_batch:
        message = f"batch {before.newest_batch} of the first look is purged, and nothing shows what came after it"
        hint = "remove the plan file, and let the second look follow the first sooner, or the query keep more batches"
        raise ConflictError(message, operation="spark collect", subject=here.location, hint=hint)
    if gone or any(before.commits[batch] != here.commits[batch] for batch in both) or not both:
        hint = "remove the plan file, and begin with a first look"
        raise ConflictError(
            "the query was taken back since the first look", operation="spark collect", subject=here.location, hint=hint
        )


def _waits_for(before: CheckpointLook, here: CheckpointLook, *, is_stopped: bool) -> str:
    if is_stopped:
        is_still = (before.commits.keys(), before.planned) == (here.commits.keys(), here.planned)
        return "" if is_still else "the query to stop: it has gone on since the first look"
    return "" if here.newest_batch > before.newest_batch else "another batch to be committed"


def check_share(taken: Sequence[Collectable], state_bytes: int, share_max: float, *, subject: str) -> None:
    """Raise `TooMuchToDeleteError` if more than a share of the bytes of state would be taken (X9)."""
    taken_bytes = sum(each.size_bytes for each in taken)
    if taken_bytes > share_max * state_bytes:
        share = f"{taken_bytes / state_bytes:.0%}" if state_bytes else "all"
        message = f"would take {count(len(taken), 'file')} of {human_bytes(taken_bytes)}, {share} of the state"
        raise TooMuchToDeleteError(message, operation="spark collect", subject=subject)


async def _claim(root: CheckpointDir, aside: CheckpointDir) -> None:
    """Make a place the quarantine of a query, by its id; refuse one with other files, or of another query."""
    _check_apart(root, aside)
    if others := [status.name for status in await aside.list() if status.name not in {STATE, _QUERY}]:
        message, hint = f"has {others[0]}, and no undo would take it", "name a place that is empty"
        raise UsageError(message, operation="spark collect", subject=aside.location, hint=hint)
    if not await _put(aside, _QUERY, await root.read(_QUERY, size_bytes_max=ENTRY_BYTES_MAX)):
        raise _of_another(aside)


def _of_another(aside: CheckpointDir) -> UsageError:
    message, hint = "is the quarantine of another query", "name another place"
    return UsageError(message, operation="spark collect", subject=aside.location, hint=hint)


def _check_apart(root: CheckpointDir, aside: CheckpointDir) -> None:
    if find_overlap(root.place(), aside.place()):
        hint = "name a place beside the checkpoint"
        message = "is in the checkpoint, or the checkpoint in it"
        raise UsageError(message, operation="spark collect", subject=aside.location, hint=hint)


async def _move(source: CheckpointDir, target: CheckpointDir, taken: Sequence[Collectable], progress: Progress) -> None:
    progress.total(files=len(taken), bytes_=sum(each.size_bytes for each in taken))

    async def move(each: Collectable) -> None:
        if not await _move_file(source, target, each.path, each.size_bytes):
            message = f"has another file at {each.path}; nothing was replaced"
            hint = "name another quarantine, or delete this one"
            raise ConflictError(message, operation="spark collect", subject=target.location, hint=hint)
        progress.add(files=1, bytes_=each.size_bytes)

    await run_all(move, taken, in_flight_max=_MOVES_AT_ONCE)
    if source.local_root is not None:
        await run_blocking(_remove_empty, source.local_root, taken)


async def _move_file(source: CheckpointDir, target: CheckpointDir, path: str, size_bytes: int) -> bool:
    """Move a file; return False if another one is there, and both stay. One that is gone needs no move."""
    try:
        data = await source.read(path, size_bytes_max=max(1, size_bytes))
    except BlobNotFoundError:
        return True
    if is_there := await _put(target, path, data):
        await source.delete([path])
    return is_there


async def _put(target: CheckpointDir, path: str, data: bytes) -> bool:
    """Publish a file; return False if another one is there, and stays."""
    while True:
        try:
            await target.publish(path, data, overwrite=False)
        except CheckpointFileExistsError:
            with suppress(BlobNotFoundError):  # it has gone meanwhile
                try:
                    return await target.read(path, size_bytes_max=max(1, len(data))) == data
                except DamagedError:  # it is larger
                    return False
        else:
            return True


def _remove_empty(root: Path, taken: Sequence[Collectable]) -> None:
    """Remove the directories of operators and partitions that have no file any more: a reader would look into them."""
    for each in taken:
        if each.reason.startswith("dead"):
            for directory in (root / each.path).parents:
                if directory == root / STATE:
                    break
                try:
                    directory.rmdir()
                except OSError:  # it has files, or is gone
                    break


async def undo_collection(
    location: str | Path | BlobStore, quarantine: str | Path | BlobStore, settings: StoreSettings | None = None
) -> tuple[str, ...]:
    """Move all of a quarantine back to its checkpoint; return the paths. What is there again is not replaced (X8).

    Raises:
        UsageError: The quarantine is of another query, has what no collection takes, or is not apart from the
            checkpoint: nothing was moved.
        ConflictError: Another file has the path of one: that stays in the quarantine, and all others are back.
        NotFoundError, StoreError: There is no checkpoint or no quarantine, or the blob store did not answer.
    """
    back: list[str] = []
    kept: list[str] = []
    async with opened_checkpoint(location, settings) as root, opened_checkpoint(quarantine, settings) as aside:
        query_id = await StreamingCheckpoint(root).query_id()
        _check_apart(root, aside)
        files = [file for file in await aside.walk() if file.path != _QUERY]
        if foreign := [file.path for file in files if not is_collectable(file)]:
            message, hint = f"is not a quarantine: no collection takes {foreign[0]}", "name the one of this checkpoint"
            raise UsageError(message, operation="spark collect", subject=aside.location, hint=hint)
        try:
            if await StreamingCheckpoint(aside).query_id() != query_id:
                raise _of_another(aside)
        except NotFoundError:
            message, hint = "there is no quarantine here", "say where it is with --quarantine"
            raise NotFoundError(message, operation="spark collect", subject=aside.location, hint=hint) from None

        async def move(file: FileStatus) -> None:
            (back if await _move_file(aside, root, file.path, file.size_bytes) else kept).append(file.path)

        await run_all(move, files, in_flight_max=_MOVES_AT_ONCE)
        if kept:
            message = f"has another file at {min(kept)}; {count(len(back), 'file')} moved back"
            hint = f"{aside.location} keeps {count(len(kept), 'file')}"
            raise ConflictError(message, operation="spark collect", subject=root.location, hint=hint)
        await aside.delete([_QUERY])
    return tuple(sorted(back))


def read_look(path: Path) -> CheckpointLook | None:
    """Read a plan file; None if there is none. UsageError: it is not one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(error.strerror or str(error), operation="spark collect", subject=str(path)) from error
    try:
        return msgspec.json.decode(data[:_PLAN_BYTES_MAX], type=CheckpointLook)
    except UNDECODABLE as error:
        hint = "name a file that `spark collect` has written, or one that is not there"
        raise UsageError("is not a plan", operation="spark collect", subject=str(path), hint=hint) from error


def write_look(path: Path, look: CheckpointLook) -> None:
    """Write a plan file for the next look. OSError: it cannot be written."""
    write_whole(path, msgspec.json.encode(look))

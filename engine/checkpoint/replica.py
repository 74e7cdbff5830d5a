"""What a replica of a query's checkpoint is, and how far it is behind (design 0011, Q5)."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from blobstore.errors import BlobNotFoundError
from blobstore.opening import StoreSettings
from engine.checkpoint.convert import Provider
from engine.checkpoint.restore import make_target
from engine.errors import NotFoundError, PromotedError, TargetError
from engine.runtime import Runtime
from engine.state.checkpoint_dir import CheckpointDir, opened_checkpoint, store_url
from engine.state.query import COMMITS, ENTRY_BYTES_MAX, OFFSETS, StreamingCheckpoint
from index.display import DisplayMixin, count, format_seconds
from index.spark.checkpoint import QUERY_ID
from index.spark.query_logs import parse_batch_name
from index.spark.replica import Replica, decode_fence, decode_replica

METADATA: Final = QUERY_ID[0]


class QueryFollowStatus(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """Which batch a replica is at, and how far that is behind its source."""

    json_properties: ClassVar = {"lag_batches": "lag_batches"}

    source: str
    location: str
    partitions: int | None
    provider: Provider | None
    # None: the replica is not complete yet.
    batch: int | None
    newest_batch: int
    # Since the oldest batch that the replica lacks was committed, by the source's clock and this machine's.
    lag_s: float

    @property
    def lag_batches(self) -> int:
        return self.newest_batch - (-1 if self.batch is None else self.batch)

    @property
    def lag(self) -> str:
        """Format the lag for people."""
        behind = f", {format_seconds(self.lag_s)}" if self.lag_batches else ""
        return f"{count(self.lag_batches, 'batch', 'batches')}{behind}"


async def read_entry(root: CheckpointDir, path: str) -> bytes | None:
    """Read an entry of a log; None if there is none. Costs a GET."""
    with contextlib.suppress(BlobNotFoundError):
        return await root.read(path, size_bytes_max=ENTRY_BYTES_MAX)
    return None


async def planned_batch(root: CheckpointDir, batch: int) -> int | None:
    """Return the batch after one if it is planned; an entry that closes the log is none (Q7)."""
    data = await read_entry(root, f"{OFFSETS}/{batch + 1}")
    return None if data is None or decode_fence(data) is not None else batch + 1


async def newest_committed(root: CheckpointDir) -> int:
    """Return the newest committed batch; an entry that closes the log is none (Q8). NotFoundError: there is none."""
    for batch in reversed(await StreamingCheckpoint(root).committed_batches()):
        data = await read_entry(root, f"{COMMITS}/{batch}")
        if data is not None and decode_fence(data) is None:
            return batch
    hint = "name the checkpoint of a query that has run; if it is lost, cut over with --source-lost"
    raise NotFoundError("no batch is committed", operation="read", subject=f"{root.location}/{COMMITS}", hint=hint)


async def batch_of(target: CheckpointDir) -> int | None:
    """Return the batch of a replica; None if it is not complete yet."""
    with contextlib.suppress(NotFoundError):
        return await newest_committed(target)
    return None


def taken_back(target: CheckpointDir, message: str) -> TargetError:
    """Return the error that the source went another way than its replica."""
    hint = "the query was taken back, and went another way: follow it into a new place"
    return TargetError(message, operation="follow", subject=target.location, hint=hint)


async def newest_of_both(source: CheckpointDir, target: CheckpointDir) -> tuple[int | None, int]:
    """Return the batch of a replica, and the newest one of its source. TargetError: the replica is ahead."""
    # In this order: another follower may bring what the query commits between the two.
    here, newest = await batch_of(target), await newest_committed(source)
    if here is not None and newest < here:
        raise taken_back(target, f"is at batch {here}, and the query at batch {newest}")
    return here, newest


async def check_not_moved(source: CheckpointDir, batch: int, replica_id: str) -> None:
    """Refuse a source that was closed for another replica, after its newest batch or a planned one (Q7).

    It costs a GET, or two.
    """
    for path in (f"{OFFSETS}/{batch + 1}", f"{OFFSETS}/{batch + 2}"):
        if (data := await read_entry(source, path)) is None:
            return
        check_fence(source, path, data, replica_id)


def check_fence(source: CheckpointDir, path: str, data: bytes, replica_id: str) -> bool:
    """Return whether an entry closes a log for this replica. TargetError: it does for another one."""
    moved_to = decode_fence(data)
    if moved_to is not None and moved_to.replica_id != replica_id:
        message, hint = f"has moved to {moved_to.location}", "go on there, or delete that entry and the copy there"
        raise TargetError(message, operation="follow", subject=f"{source.location}/{path}", hint=hint)
    return moved_to is not None


async def look_at_lag(
    source: CheckpointDir, target: CheckpointDir, replica: Replica, runtime: Runtime
) -> QueryFollowStatus:
    """Return which batch a replica is at, and how far that is behind; a few requests.

    TargetError: the source was taken back, or has moved to another replica.
    """
    batch, newest = await newest_of_both(source, target)
    await check_not_moved(source, newest, replica.id)
    statuses = await source.list(COMMITS)
    here = -1 if batch is None else batch
    missing = [
        status.modified_at_ms
        for status in statuses
        if (number := parse_batch_name(status.name)) is not None and here < number <= newest
    ]
    lag_ms = max(0, runtime.local_now_ms() - min(missing)) if missing else 0
    return QueryFollowStatus(
        source=source.location,
        location=target.location,
        partitions=replica.partitions,
        provider=replica.provider,
        batch=batch,
        newest_batch=newest,
        lag_s=lag_ms / 1000,
    )


async def read_status(
    source: str | Path, target: str | Path, settings: StoreSettings | None = None
) -> QueryFollowStatus:
    """Return which batch a replica is at, and how far that is behind; nothing is changed.

    NotFoundError: there is no replica, or no checkpoint. PromotedError: it was cut over. TargetError: it is a replica
    of another checkpoint, or the query was taken back, or goes on at another replica.
    """
    async with opened_checkpoint(source, settings) as root, opened_place(target, settings) as there:
        return await look_at_lag(root, there, await own_replica(root, there), Runtime())


@contextlib.asynccontextmanager
async def opened_place(target: str | Path, settings: StoreSettings | None = None) -> AsyncIterator[CheckpointDir]:
    """Open the place of a replica by its whole path, which files there name, for a block."""
    place = make_target(target, Runtime(), move_aside=False, settings=settings)
    async with contextlib.aclosing(place), opened_checkpoint(place.root, settings) as there:
        yield there


async def own_replica(root: CheckpointDir, target: CheckpointDir) -> Replica:
    """Read what a place is a replica of, which has to be this source.

    NotFoundError: there is no replica. PromotedError: it was cut over. TargetError: it is one of another source.
    """
    try:
        data = await target.read(METADATA, size_bytes_max=ENTRY_BYTES_MAX)
    except BlobNotFoundError as error:
        hint = "follow a query there first: `tidemark spark follow CHECKPOINT TARGET`"
        raise NotFoundError("there is no replica", operation="read", subject=target.location, hint=hint) from error
    found = decode_replica(data, subject=f"{target.location}/{METADATA}")
    if found is None:
        hint = "the query goes on there; follow it into a new place"
        raise PromotedError("is a checkpoint of its own", operation="read", subject=target.location, hint=hint)
    if found.replica_of != name_of(root):
        message = f"is a replica of {found.replica_of}, not of {name_of(root)}"
        raise TargetError(message, operation="read", subject=target.location, hint="name that checkpoint")
    return found


def name_of(root: CheckpointDir) -> str:
    """Return the name of a source that does not depend on who gives it."""
    return store_url(root.location) if root.local_root is None else str(root.local_root.resolve())

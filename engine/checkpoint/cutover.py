"""Let a query go on at its replica: close the checkpoint that it had, follow what is left (design 0011, Q7 to Q10)."""

import asyncio
import contextlib
from pathlib import Path
from typing import Final

import msgspec

from blobstore.errors import BlobNotFoundError, CheckpointFileExistsError
from blobstore.opening import StoreSettings
from engine.checkpoint.backup import opened_checkpoint
from engine.checkpoint.replica import FollowChoice, QueryFollower, newest_committed, opened_follower, read_replica
from engine.errors import PromotedError, TargetError, UsageError
from engine.runtime import NO_PROGRESS, Progress, Runtime
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.key_rules import Partitioner, partitions_of
from engine.state.query import COMMITS, ENTRY_BYTES_MAX, OFFSETS, StreamingCheckpoint
from index.display import DisplayMixin
from index.spark.checkpoint import QUERY_ID
from index.spark.query_logs import decode_query_id
from index.spark.replica import Replica, decode_fence, encode_fence

_OPERATION: Final = "cut over"
_LOOK_S: Final = 0.05
# Batches that may be planned while an end of the log is looked for: each attempt loses to one of them.
_CLAIMS_MAX: Final = 100


class CutoverChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How a query is cut over."""

    # The source cannot be reached any more: go on with what the replica has.
    source_lost: bool = False
    # How long a batch that is planned may take until it is committed; then it is repeated at the replica.
    wait_s: float = 10.0
    store_settings: StoreSettings | None = None


class CutoverPlan(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What a cut-over would do, or has done."""

    dry_run: bool = True
    query_id: str
    source: str
    location: str
    # The query goes on after this batch.
    batch: int
    # What it repeats first; None: nothing is planned.
    planned_batch: int | None
    # Whether the source is closed for its query.
    closed: bool
    # Batches that the replica lacks, or lacked.
    batches: int


class Cutover(CutoverPlan, frozen=True, kw_only=True):
    """What was done."""

    # From the moment when the source was closed; all of it, with what the replica lacked before.
    pause_s: float
    seconds: float


async def plan_cutover(target: str | Path, choice: CutoverChoice | None = None) -> CutoverPlan:
    """Find out what `cut_over` would do, as far as it is known now. Nothing is written. Raises likewise."""
    choice = choice or CutoverChoice()
    async with opened_checkpoint(target, choice.store_settings) as there:
        replica = await _replica(there)
        batch = newest = await newest_committed(there)
        planned, where = None, replica.replica_of
        if not choice.source_lost:
            async with opened_checkpoint(where, choice.store_settings) as root:
                newest = await newest_committed(root)
                planned = max(await StreamingCheckpoint(root).offsets.batches(), default=newest)
        return CutoverPlan(
            query_id=decode_query_id(replica.metadata.encode()),
            source=where,
            location=there.location,
            batch=newest,
            planned_batch=planned if planned is not None and planned > newest else None,
            closed=not choice.source_lost,
            batches=newest - batch,
        )


async def cut_over(
    target: str | Path,
    choice: CutoverChoice | None = None,
    *,
    partitioner: Partitioner = partitions_of,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> Cutover:
    """Make a replica the checkpoint with which its query goes on, and close the one that it had.

    A query that still runs there ends with an error of Spark's when it plans its next batch; better stop it before. It
    can be called again after any error.

    Raises:
        NotFoundError: There is no replica, or it is not complete.
        PromotedError: It was cut over already.
        TargetError: The source was cut over to another place.
        TargetBusyError: A follower on this machine works on the replica, or a query writes there.
        As `QueryFollower.step`. After any error Spark still refuses to start a query on the replica.
    """
    choice, runtime = choice or CutoverChoice(), runtime or Runtime()
    began_s = runtime.monotonic_s()
    async with opened_checkpoint(target, choice.store_settings) as there:
        replica = await _replica(there)
        await newest_committed(there)
    follow = FollowChoice(store_settings=choice.store_settings)
    source = replica.replica_of
    async with opened_follower(
        source, target, follow, partitioner=partitioner, progress=progress, runtime=runtime
    ) as follower:
        batches = 0
        if not choice.source_lost:
            batches += await _catch_up(follower)
        closed_s = runtime.monotonic_s()
        fence = _Fence(follower.source, follower.target.location, runtime)
        if not choice.source_lost:
            await fence.close(choice.wait_s)
            batches += await _catch_up(follower)
        planned = await follower.settle(is_lost=choice.source_lost)
        if not choice.source_lost:
            await fence.check()
        await follower.check_replica()
        batch = await newest_committed(follower.target)
        await follower.target.publish(QUERY_ID[0], replica.metadata.encode(), overwrite=True)
        now_s = runtime.monotonic_s()
        return Cutover(
            dry_run=False,
            query_id=decode_query_id(replica.metadata.encode()),
            source=source,
            location=follower.target.location,
            batch=batch,
            planned_batch=planned,
            closed=not choice.source_lost,
            batches=batches,
            pause_s=now_s - closed_s,
            seconds=now_s - began_s,
        )


async def _replica(target: CheckpointDir) -> Replica:
    found = await read_replica(target)
    if found is None:
        message, hint = "is a checkpoint of its own", "start the query there"
        raise PromotedError(message, operation=_OPERATION, subject=target.location, hint=hint)
    return found


async def _catch_up(follower: QueryFollower) -> int:
    """Follow until nothing is new; return the number of batches."""
    before = await follower.batch()
    while (await follower.batch()) != await follower.newest_batch():
        await follower.step(snapshots=False)
    now = await follower.batch()
    return (-1 if now is None else now) - (-1 if before is None else before)


class _Fence:
    """Closes the logs of a checkpoint for its query (Q7, Q8)."""

    def __init__(self, source: CheckpointDir, location: str, runtime: Runtime) -> None:
        self._source = source
        self._line = encode_fence(location)
        self._runtime = runtime
        self._path = ""

    async def close(self, wait_s: float) -> None:
        """Close the offset log after the last batch that is planned, then see what becomes of that batch.

        TargetError: it was closed for a move to another place.
        """
        offsets = StreamingCheckpoint(self._source).offsets
        for _ in range(_CLAIMS_MAX):
            batches = await offsets.batches()
            last = batches[-1] if batches else -1
            if last >= 0 and await self._is_closed(f"{OFFSETS}/{last}"):
                last -= 1
                break
            if await self._create(f"{OFFSETS}/{last + 1}"):
                break
        else:
            message, hint = "plans batches faster than its log can be closed", "stop the query, then try again"
            raise UsageError(message, operation=_OPERATION, subject=self._source.location, hint=hint)
        self._path = f"{OFFSETS}/{last + 1}"
        path = f"{COMMITS}/{last}"
        if last >= 0 and not await self._appears(path, wait_s):
            # Of this and the query's own commit one is there afterwards.
            await self._create(path)

    async def check(self) -> None:
        """Refuse to go on if somebody has opened the log again."""
        if not await self._is_closed(self._path):
            message, hint = f"{self._path} was removed or replaced", "see who writes there, then cut over again"
            raise TargetError(message, operation=_OPERATION, subject=self._source.location, hint=hint)

    async def _create(self, path: str) -> bool:
        """Create an entry that closes a log; return whether it is there, and not another."""
        with contextlib.suppress(CheckpointFileExistsError):
            await self._source.publish(path, self._line, overwrite=False)
        return await self._is_closed(path)

    async def _appears(self, path: str, wait_s: float) -> bool:
        """Return whether a file is there, or comes within a time."""
        until_s = self._runtime.monotonic_s() + wait_s
        while True:
            with contextlib.suppress(BlobNotFoundError):
                await self._source.read(path, size_bytes_max=ENTRY_BYTES_MAX)
                return True
            if self._runtime.monotonic_s() >= until_s:
                return False
            await asyncio.sleep(_LOOK_S)

    async def _is_closed(self, path: str) -> bool:
        try:
            data = await self._source.read(path, size_bytes_max=ENTRY_BYTES_MAX)
        except BlobNotFoundError:
            return False
        moved_to = decode_fence(data)
        if moved_to is not None and data != self._line:
            message, hint = f"has moved to {moved_to}", "go on there, or delete that entry and the copy there"
            raise TargetError(message, operation=_OPERATION, subject=f"{self._source.location}/{path}", hint=hint)
        return moved_to is not None

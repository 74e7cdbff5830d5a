"""Let a query go on at its replica: close the checkpoint that it had, follow what is left (design 0011, Q7 to Q10)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from blobstore.errors import AccessDeniedError, CheckpointFileExistsError
from blobstore.opening import StoreSettings
from engine.checkpoint.follower import FollowChoice, QueryFollower, opened_follower
from engine.checkpoint.replica import (
    batch_of,
    check_fence,
    check_not_moved,
    newest_committed,
    newest_of_both,
    opened_place,
    own_replica,
    planned_batch,
    read_entry,
)
from engine.errors import NotFoundError, TargetBusyError, TargetError, UsageError
from engine.runtime import NO_PROGRESS, Progress, Runtime
from engine.state.checkpoint_dir import CheckpointDir, opened_checkpoint
from engine.state.key_rules import Partitioner, partitions_of
from engine.state.query import COMMITS, OFFSETS, StreamingCheckpoint
from index.display import DisplayMixin
from index.spark.checkpoint import QUERY_ID
from index.spark.query_logs import decode_query_id
from index.spark.replica import Fence, Replica, encode_fence

_OPERATION: Final = "cut over"
# What is known of a log.
_CLOSED: Final = "closed"
_PERHAPS_CLOSED: Final = "perhaps closed"
_LOOK_S: Final = 0.05
# Batches that may be planned while an end of the log is looked for: each attempt loses to one of them.
_CLAIMS_MAX: Final = 100
# Before the source is closed: where each batch is copied whole, a query that runs is never caught up with.
_STEPS_BEFORE: Final = 8
# How long a source that is said to be lost has to answer.
_LOST_LOOK_S: Final = 5.0
# How often another follower may be faster.
_BUSY_MAX: Final = 20


class CutoverChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How a query is cut over."""

    # The source cannot be reached any more: go on with what the replica has, unless it shows that another one has it.
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


async def plan_cutover(source: str | Path, target: str | Path, choice: CutoverChoice | None = None) -> CutoverPlan:
    """Find out what `cut_over` would do, as far as it is known now. Nothing is written. Raises likewise."""
    choice = choice or CutoverChoice()
    settings = choice.store_settings
    async with opened_checkpoint(source, settings) as root, opened_place(target, settings) as there:
        replica = await own_replica(root, there)
        batch = newest = await _batch_of(there)
        planned = await planned_batch(there, batch)
        if choice.source_lost:
            await _check_lost(root, replica)
        else:
            await _Fence(root, replica, there.location, Runtime()).find_last()
            _, newest = await newest_of_both(root, there)
            planned = await planned_batch(root, newest)
        return CutoverPlan(
            query_id=decode_query_id(replica.metadata.encode()),
            source=root.location,
            location=there.location,
            batch=newest,
            planned_batch=planned,
            closed=not choice.source_lost,
            batches=newest - batch,
        )


async def cut_over(
    source: str | Path,
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
        TargetError: It is a replica of another source, or the source has moved to another one; a lost source has, too,
            if it can be read after all.
        TargetBusyError: A follower on this machine works on the replica, or a query writes there.
        UsageError: The log of the source cannot be closed, as it does not have every batch.
        As `QueryFollower.step`. After any error Spark still refuses to start a query on the replica; if the source is
        closed by then, a note says how to open it again.
    """
    choice, runtime = choice or CutoverChoice(), runtime or Runtime()
    began_s = runtime.monotonic_s()
    settings = choice.store_settings
    async with opened_checkpoint(source, settings) as root, opened_place(target, settings) as there:
        replica = await own_replica(root, there)
        before = await _batch_of(there)
        if choice.source_lost:
            await _check_lost(root, replica)
    follow = FollowChoice(store_settings=settings)
    opening = opened_follower(source, target, follow, partitioner=partitioner, progress=progress, runtime=runtime)
    async with opening as follower:
        if choice.source_lost:
            closed_s = runtime.monotonic_s()
            planned = await follower.settle(is_lost=True)
        else:
            await _catch_up(follower, steps_max=_STEPS_BEFORE)
            if await follower.make_snapshots():
                await _catch_up(follower, steps_max=_STEPS_BEFORE)
            fence = _Fence(follower.source, replica, follower.target.location, runtime)
            closed_s = runtime.monotonic_s()
            async with fence.closed(choice.wait_s):
                await _catch_up(follower)
                planned = await follower.settle(is_lost=False)
        await follower.check_replica()
        batch = await newest_committed(follower.target)
        await follower.target.publish(QUERY_ID[0], replica.metadata.encode(), overwrite=True)
        now_s = runtime.monotonic_s()
        return Cutover(
            dry_run=False,
            query_id=decode_query_id(replica.metadata.encode()),
            source=follower.source.location,
            location=follower.target.location,
            batch=batch,
            planned_batch=planned,
            closed=not choice.source_lost,
            batches=batch - before,
            pause_s=now_s - closed_s,
            seconds=now_s - began_s,
        )


async def _batch_of(target: CheckpointDir) -> int:
    batch = await batch_of(target)
    if batch is None:
        message, hint = "the replica has no batch yet", "follow the query until it has one: `tidemark spark follow`"
        raise NotFoundError(message, operation=_OPERATION, subject=target.location, hint=hint)
    return batch


async def _check_lost(source: CheckpointDir, replica: Replica) -> None:
    """Refuse, with a `TargetError`, a source that can be read after all, and was closed for another replica (Q10)."""

    async def look() -> None:
        await check_not_moved(source, await newest_committed(source), replica.id)

    looking = asyncio.ensure_future(look())
    try:
        # It is not awaited any longer than that: a thread that waits for a file system cannot be cancelled.
        await asyncio.wait({looking}, timeout=_LOST_LOOK_S)
    finally:
        looking.cancel()
    if looking.done() and isinstance(error := looking.exception(), TargetError):
        raise error


async def _catch_up(follower: QueryFollower, *, steps_max: int | None = None) -> None:
    """Take steps until nothing is new, at least one: it finds out whether this still is the history of the source."""
    steps = busy = 0
    while True:
        try:
            step = await follower.step(snapshots=False)
        except TargetBusyError:
            # Another follower was faster with this batch.
            busy += 1
            if busy > _BUSY_MAX:
                raise
            continue
        steps += 1
        if step.batch == await follower.newest_batch() or steps == steps_max:
            return


class _Fence:
    """Closes the logs of a checkpoint for its query (Q7, Q8)."""

    def __init__(self, source: CheckpointDir, replica: Replica, location: str, runtime: Runtime) -> None:
        self._source = source
        self._id = replica.id
        self._line = encode_fence(Fence(replica.id, location))
        self._runtime = runtime
        # Batches that are planned end with this one.
        self._last = -1
        # Of the log; empty if it is open, as far as is known.
        self._state = ""

    @contextlib.asynccontextmanager
    async def closed(self, wait_s: float) -> AsyncIterator[None]:
        """Close the logs for a block; they stay closed after it, and it ends with an error if somebody opened them.

        UsageError: they cannot be closed. TargetError: they are, for another replica.
        """
        try:
            await self._close()
            await self._settle_last(wait_s)
            yield
            await self._check()
        except BaseException as error:
            path = f"{self._source.location}/{OFFSETS}/{self._last + 1}"
            if self._state == _CLOSED:
                error.add_note(f"the source is closed: cut over again, or delete {path} to let the query go on there")
            elif self._state == _PERHAPS_CLOSED:
                error.add_note(f"the source may be closed, if {path} names a replica: cut over again, then it is")
            raise

    async def find_last(self) -> tuple[int, bool]:
        """Return the last batch that is planned, and whether the log is closed after it. Raises as `closed`."""
        batches = await StreamingCheckpoint(self._source).offsets.batches()
        last = batches[-1] if batches else -1
        is_closed = last >= 0 and await self._is_closed(f"{OFFSETS}/{last}")
        if any(after != before + 1 for before, after in pairwise(batches)):
            message = "has no entry for some batches, and cannot be closed"
            hint = "run the query without async progress"
            raise UsageError(message, operation=_OPERATION, subject=f"{self._source.location}/{OFFSETS}", hint=hint)
        return last - is_closed, is_closed

    async def _close(self) -> None:
        """Close the offset log after the last batch that is planned."""
        for _ in range(_CLAIMS_MAX):
            self._last, is_closed = await self.find_last()
            try:
                # Cut off here, nobody knows whether it is closed.
                self._state = _CLOSED if is_closed else _PERHAPS_CLOSED
                is_closed = is_closed or await self._create(f"{OFFSETS}/{self._last + 1}")
            except (AccessDeniedError, TargetError):
                self._state = ""  # it may not be closed, or is for another replica
                raise
            self._state = _CLOSED if is_closed else ""
            if is_closed:
                return
        message, hint = "plans batches faster than its log can be closed", "stop the query, then try again"
        raise TargetBusyError(message, operation=_OPERATION, subject=self._source.location, hint=hint)

    async def _settle_last(self, wait_s: float) -> None:
        """See what becomes of the last batch that is planned."""
        path, until_s = f"{COMMITS}/{self._last}", self._runtime.monotonic_s() + wait_s
        while self._last >= 0 and await read_entry(self._source, path) is None:
            if self._runtime.monotonic_s() >= until_s:
                # Of this and the query's own commit one is there afterwards.
                await self._create(path)
                return
            await asyncio.sleep(_LOOK_S)

    async def _check(self) -> None:
        """Refuse to go on if somebody has opened the log, or gone on beyond it."""
        last, is_closed = await self.find_last()
        if not is_closed or last != self._last or await newest_committed(self._source) > last:
            message, hint = "was opened again, or its query has gone on", "stop the query, then cut over again"
            raise TargetError(message, operation=_OPERATION, subject=self._source.location, hint=hint)

    async def _create(self, path: str) -> bool:
        """Create an entry that closes a log; return whether it is there, and not another."""
        with contextlib.suppress(CheckpointFileExistsError):
            await self._source.publish(path, self._line, overwrite=False)
        return await self._is_closed(path)

    async def _is_closed(self, path: str) -> bool:
        data = await read_entry(self._source, path)
        return data is not None and check_fence(self._source, path, data, self._id)

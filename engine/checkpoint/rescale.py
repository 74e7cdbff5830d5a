"""Make another checkpoint of one batch of a query, with another number of partitions (design 0010, section 3).

The source is only read. Every key is hashed, and must be in the partition where its operator's rule has it. The files
of several partitions become one store by reference (section 2), those of one become several row by row, in the order of
their keys. Until all of it is there, nothing is at the target.
"""

import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from blobstore.opening import StoreSettings, local_path_of
from engine.checkpoint.backup import opened_checkpoint, refuse_damaged_logs
from engine.checkpoint.convert import Gathering, bring_query
from engine.checkpoint.errors import error_context
from engine.checkpoint.groups import (
    GroupRescaled,
    GroupToRescale,
    RescaleFigures,
    add_up,
    check_partitions,
    ids_of,
    plan_groups,
    rewritten,
)
from engine.checkpoint.processes import Processes
from engine.checkpoint.rescale_stores import Here, look_here, of_checkpoint, rescale_here
from engine.checkpoint.restore import make_target
from engine.checkpoint.targets import CheckpointTarget, check_apart
from engine.errors import UsageError
from engine.runtime import NO_PROGRESS, Progress, Runtime, Stopwatch
from engine.settings import STORES_AT_ONCE
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.key_rules import Partitioner, partitions_of
from engine.state.query import QueryAt, StreamingCheckpoint
from index.display import DisplayMixin


class RescaleChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What to rescale, and to how many partitions."""

    partitions: int
    # The newest committed one if not given.
    batch: int | None = None
    # Number of groups of stores worked on at once on this machine.
    groups_at_once: int = STORES_AT_ONCE
    store_settings: StoreSettings | None = None


class RescalePlan(DisplayMixin, RescaleFigures, frozen=True, kw_only=True):
    """What a rescale would make, or has made."""

    dry_run: bool = True
    query_id: str
    batch: int
    source: str
    location: str


class RescaledCheckpoint(RescalePlan, frozen=True, kw_only=True):
    """What was made, and what it cost."""

    files: int
    size_bytes: int
    bytes_fetched: int
    # What was replayed.
    changelogs: int = msgspec.field(name="changelogs_replayed")
    records: int = msgspec.field(name="records_replayed")
    seconds: float
    # Paths that could not be removed.
    leftovers: tuple[str, ...] = ()


# A backend: makes the stores of all groups below a directory, here or on executors.
RescaleGroups = Callable[[Path, tuple[GroupToRescale, ...]], Awaitable[Sequence[GroupRescaled]]]


async def rescale_checkpoint(
    source: str | Path,
    target: str | Path,
    choice: RescaleChoice,
    *,
    partitioner: Partitioner = partitions_of,
    processes: Processes | None = None,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> RescaledCheckpoint:
    """Make a checkpoint at a new place of one batch of another one; the query goes on there after the batch.

    Stop the query first: from then on, only one of the two places may go on. On one file system both may have SSTs in
    common, as hard links: neither Spark nor RocksDB ever writes to one again. `partitioner` hashes keys:
    `engine.arrow.key_hashes` has a faster one than the default. Without `processes` all of it is done in this one.

    Raises:
        NotFoundError: There is no checkpoint, or the batch is not committed.
        UsageError: The number of partitions is not one, or the state is HDFS-backed.
        TargetError: The target has content, or is the source's place, above it or below it.
        MisplacedKeyError: A key is in another partition than the rule of its operator says.
        PartitionKeyError: The rule of an operator is not known, or a key does not fit its schema.
        StoreMergeError: Stores cannot be merged by reference.
        DamagedError, FormatError: A file of the source is not whole, or not there.
        StoreError: As the stores say. After any error the target is as it was.
    """
    runtime = runtime or Runtime()
    how = Here(
        partitioner=partitioner,
        groups_at_once=choice.groups_at_once,
        processes=processes,
        progress=progress,
        runtime=runtime,
    )
    place = make_target(target, runtime, move_aside=False, settings=choice.store_settings)
    async with opened_checkpoint(source, choice.store_settings) as root:

        async def rescale_groups(directory: Path, work: tuple[GroupToRescale, ...]) -> Sequence[GroupRescaled]:
            return await rescale_here(of_checkpoint(root), work, directory, how)

        return await run_rescale(root, place, choice, rescale_groups, runtime)


async def run_rescale(
    root: CheckpointDir,
    target: CheckpointTarget,
    choice: RescaleChoice,
    rescale_groups: RescaleGroups,
    runtime: Runtime,
    *,
    metadata: bytes | None = None,
) -> RescaledCheckpoint:
    """Carry out all steps of `rescale_checkpoint` with a backend for the stores; `metadata` as of `bring_query`."""
    watch = Stopwatch(runtime)
    try:
        query_id, at, work = await _prepare(root, target, choice, runtime)
        await target.open(query_id, at.batch)
        rewrite = rewritten(at, ids_of(work), choice.partitions)
        to = Gathering(target.directory, target.root)
        files, size_bytes = await bring_query(root, to, at, rewrite, metadata=metadata)
        groups = await rescale_groups(target.directory, work)
        made = [store for group in groups for store in group.stores]
        if missing := {of for item in work for of, _ in item.targets} - {store.id for store in made}:
            names = ", ".join(map(str, sorted(missing)))
            raise UsageError(f"stores were not made: {names}", operation="rescale", subject=target.location)
        await target.publish({store.id: store.published for store in made})
        leftovers = await target.close()
    finally:
        await target.close()
    figures = add_up(at, choice.partitions, groups, len(made))
    return RescaledCheckpoint(
        **msgspec.structs.asdict(figures),
        dry_run=False,
        query_id=query_id,
        batch=at.batch,
        source=root.location,
        location=target.location,
        files=files + sum(store.files for store in made),
        size_bytes=size_bytes + sum(store.size_bytes for store in made),
        bytes_fetched=sum(store.bytes_fetched for store in made),
        changelogs=sum(store.changelogs for store in made),
        records=sum(store.records for store in made),
        seconds=watch.total_s(),
        leftovers=leftovers,
    )


async def plan_rescale(
    source: str | Path,
    target: str | Path,
    choice: RescaleChoice,
    *,
    partitioner: Partitioner = partitions_of,
    processes: Processes | None = None,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> RescalePlan:
    """Find out what `rescale_checkpoint` would make, or refuse; nothing is written but temporary files.

    All state is loaded and every key hashed, as by the rescale itself. Raises likewise.
    """
    runtime = runtime or Runtime()
    how = Here(
        partitioner=partitioner,
        groups_at_once=choice.groups_at_once,
        processes=processes,
        progress=progress,
        runtime=runtime,
    )
    place = make_target(target, runtime, move_aside=False, settings=choice.store_settings)
    async with opened_checkpoint(source, choice.store_settings) as root:
        try:
            query_id, at, work = await _prepare(root, place, choice, runtime)
            beside = _nearest_dir(target)
            with tempfile.TemporaryDirectory(
                prefix=".tidemark-rescale-", dir=beside, ignore_cleanup_errors=True
            ) as scratch:
                groups = await look_here(of_checkpoint(root), work, Path(scratch), how)
        finally:
            await place.close()
    figures = add_up(at, choice.partitions, groups, sum(len(item.targets) for item in work))
    return RescalePlan(
        **msgspec.structs.asdict(figures),
        query_id=query_id,
        batch=at.batch,
        source=root.location,
        location=place.location,
    )


def _nearest_dir(target: str | Path) -> Path | None:
    """Return the directory that a target would be made in, where SSTs are most likely links; None: it is elsewhere."""
    path = local_path_of(target)
    found = None if path is None else next((parent for parent in path.resolve().parents if parent.is_dir()), None)
    return found if found is not None and os.access(found, os.W_OK) else None


async def _prepare(
    root: CheckpointDir, target: CheckpointTarget, choice: RescaleChoice, runtime: Runtime
) -> tuple[str, QueryAt, tuple[GroupToRescale, ...]]:
    """Refuse what cannot be done; return the query's id, its batch, and what is to be done. Nothing is written."""
    check_partitions(choice.partitions)
    await check_apart(target, root, what="source")
    checkpoint = StreamingCheckpoint(root)
    with error_context(root.location, None):
        query_id = await checkpoint.query_id()
        at = await checkpoint.at(choice.batch)
    await refuse_damaged_logs(root)
    await target.check(query_id, at.batch)
    return query_id, at, await plan_groups(root, at, choice.partitions, runtime)

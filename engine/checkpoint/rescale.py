"""Make another checkpoint of one batch of a query, with another number of partitions (design 0010, section 3).

The source is only read. Every key is hashed, and must be in the partition where its operator's rule has it. The files
of several partitions become one store by reference (section 2), those of one become several row by row, in the order of
their keys. Until all of it is there, nothing is at the target.
"""

import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from blobstore.opening import StoreSettings, local_path_of
from engine.checkpoint.convert import choose_batch, make_checkpoint
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
from engine.checkpoint.rescale_stores import Here, look_here, of_checkpoint, rescale_here
from engine.checkpoint.restore import make_target
from engine.checkpoint.store import StoreRestored
from engine.checkpoint.targets import CheckpointTarget
from engine.errors import UsageError
from engine.local.scratch import scratch_dir
from engine.runtime import Runtime, Stopwatch
from engine.state.checkpoint_dir import CheckpointDir, opened_checkpoint
from engine.state.query import QueryAt
from index.display import DisplayMixin


class RescaleChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What to rescale, and to how many partitions."""

    partitions: int
    # The newest committed one if not given.
    batch: int | None = None
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
    source: str | Path, target: str | Path, choice: RescaleChoice, how: Here | None = None
) -> RescaledCheckpoint:
    """Make a checkpoint at a new place of one batch of another one; the query goes on there after the batch.

    Stop the query first: from then on, only one of the two places may go on. On one file system both may have SSTs in
    common, as hard links: neither Spark nor RocksDB ever writes to one again. `engine.arrow.key_hashes` has a faster
    partitioner than the default.

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
    how = how or Here()
    place = make_target(target, how.runtime, move_aside=False, settings=choice.store_settings)
    async with opened_checkpoint(source, choice.store_settings) as root:
        open_store = of_checkpoint(root)
        return await run_rescale(
            root, place, choice, lambda below, work: rescale_here(open_store, work, below, how), how.runtime
        )


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
    groups: Sequence[GroupRescaled] = ()
    async with contextlib.aclosing(target):
        query_id, at, work = await _prepare(root, target, choice, runtime)

        async def make(directory: Path) -> Sequence[StoreRestored]:
            nonlocal groups
            groups = await rescale_groups(directory, work)
            stores = [store for group in groups for store in group.stores]
            if missing := {of for item in work for of, _ in item.targets} - {store.id for store in stores}:
                names = ", ".join(map(str, sorted(missing)))
                raise UsageError(f"stores were not made: {names}", operation="rescale", subject=target.location)
            return stores

        rewrite = rewritten(at, ids_of(work), {}, partitions=choice.partitions)
        made = await make_checkpoint(root, target, query_id, at, rewrite, make, metadata=metadata)
    plan = _plan(root, target, query_id, at, add_up(at, choice.partitions, groups, work))
    return RescaledCheckpoint(**msgspec.structs.asdict(plan) | made | {"dry_run": False}, seconds=watch.total_s())


async def plan_rescale(
    source: str | Path, target: str | Path, choice: RescaleChoice, how: Here | None = None
) -> RescalePlan:
    """Find out what `rescale_checkpoint` would make, or refuse; nothing is written but temporary files.

    All state is loaded and every key hashed, as by the rescale itself. Raises likewise.
    """
    how = how or Here()
    place = make_target(target, how.runtime, move_aside=False, settings=choice.store_settings)
    async with opened_checkpoint(source, choice.store_settings) as root, contextlib.aclosing(place):
        query_id, at, work = await _prepare(root, place, choice, how.runtime)
        async with scratch_dir(_nearest_dir(target), ".tidemark-rescale-", may_stay=True) as scratch:
            groups = await look_here(of_checkpoint(root), work, scratch, how)
        return _plan(root, place, query_id, at, add_up(at, choice.partitions, groups, work))


def _plan(
    root: CheckpointDir, target: CheckpointTarget, query_id: str, at: QueryAt, figures: RescaleFigures
) -> RescalePlan:
    return RescalePlan(
        **msgspec.structs.asdict(figures),
        query_id=query_id,
        batch=at.batch,
        source=root.location,
        location=target.location,
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
    query_id, at = await choose_batch(root, target, choice.batch)
    return query_id, at, await plan_groups(root, at, choice.partitions, runtime)

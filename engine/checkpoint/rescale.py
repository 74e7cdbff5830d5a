"""Make another checkpoint of one batch of a query, with another number of partitions (design 0010, section 3).

The source is only read. The files of several partitions become one store by reference (section 2), those of one become
several row by row, in the order of their keys. Until all of it is there, nothing is at the target.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from blobstore.concurrency import map_bounded, run_blocking
from blobstore.opening import StoreSettings
from engine.checkpoint.backup import opened_checkpoint, refuse_damaged_logs
from engine.checkpoint.convert import bring_query, check_read, name_stores
from engine.checkpoint.errors import error_context
from engine.checkpoint.file_check import check_sst
from engine.checkpoint.restore import make_target
from engine.checkpoint.store import StoreRestored, read_row_schema, write_snapshot
from engine.checkpoint.targets import CheckpointTarget, check_apart, dirs_below
from engine.errors import DamagedError, UsageError
from engine.restore.staging import Staging, target_errors
from engine.rocksdb.merge import merge_stores, read_parent
from engine.rocksdb.store import SstWriter, StoreReader, StoreWriter
from engine.runtime import Runtime
from engine.settings import STORES_AT_ONCE
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import StateFileManager
from engine.state.load import LoadMetrics, StateLoader
from engine.state.local_files import WorkingDir
from engine.state.query import COMMITS, OFFSETS, PARTITIONS_KEY, QueryAt, StateOperator, StoreAt, StreamingCheckpoint
from engine.state.settings import StateStoreSettings
from index.snapshot.model import UniqueId
from index.spark.checkpoint import STATE, StoreId
from index.spark.metadata import NOT_COUNTED, StateMetadata
from index.spark.names import SSTS, StateVersion
from index.spark.query_logs import decode_commit, decode_offsets, encode_commit, encode_offsets
from index.spark.rescale import PartitionGroup, group_partitions, merge_state_metadata, repartition_operator

# Spark's hash of the key columns of a row, by its key as it is stored, with the prefix of its column family.
HashKey = Callable[[StoreId, bytes], int]

_CHUNK_ROWS: Final = 1000
_CHUNK_BYTES: Final = 4 * 1024 * 1024
_FAMILY_BYTES: Final = 2


class RescaleChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What to rescale, and to how many partitions."""

    partitions: int
    # The newest committed one if not given.
    batch: int | None = None
    # Number of groups of stores worked on at once on this machine.
    groups_at_once: int = STORES_AT_ONCE
    store_settings: StoreSettings | None = None


class GroupToRescale(msgspec.Struct, frozen=True, kw_only=True):
    """Stores of one name whose rows become those of others, and of no others."""

    # At least one; all of one operator and one name.
    sources: tuple[StoreAt, ...]
    # How many partitions the operator had.
    partitions_before: int
    targets: tuple[tuple[StoreId, StateVersion], ...]
    partitions: int

    @property
    def settings(self) -> StateStoreSettings:
        return self.sources[0].settings


class _Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A source, as a rocksdb_checkpoint that nobody writes to."""

    store: StoreAt
    directory: Path
    metadata: StateMetadata
    internal_prefixes: frozenset[bytes]
    metrics: LoadMetrics


async def rescale_checkpoint(
    source: str | Path,
    target: str | Path,
    choice: RescaleChoice,
    hash_key: HashKey | None = None,
    *,
    runtime: Runtime | None = None,
) -> tuple[StoreRestored, ...]:
    """Make a checkpoint at a new place of one batch of another one; the query goes on there after the batch.

    Stop the query first: from then on, only one of the two places may go on. Without `hash_key` only what needs no
    hash can be done: to merge.

    Raises:
        NotFoundError: There is no checkpoint, or the batch is not committed.
        UsageError: The number of partitions is not one, or rows have to be hashed and nothing was given to do it.
        TargetError: The target has content, or is the source's place, above it or below it.
        StoreMergeError: Stores cannot be merged by reference.
        DamagedError, FormatError: A file of the source is not whole, or not there; or a row is in another partition
            than its hash says.
        StoreError: As the stores say. After any error the target is as it was.
    """
    runtime = runtime or Runtime()
    place = make_target(target, runtime, move_aside=False, settings=choice.store_settings)
    async with opened_checkpoint(source, choice.store_settings) as root:
        try:
            at = await _check(root, place, choice)
            after = _operators_after(at, choice.partitions)
            work = tuple(_groups(at, after, runtime))
            if hash_key is None and not all(len(item.targets) == 1 for item in work):
                _no_hash(work[0].sources[0].id, b"")
            await place.open(await StreamingCheckpoint(root).query_id(), at.batch)
            await bring_query(root, place, at, _rewritten(at, after, work, choice.partitions))

            async def one(item: GroupToRescale) -> list[StoreRestored]:
                return await rescale_group(root, item, place.directory, hash_key or _no_hash, runtime=runtime)

            made = await map_bounded(one, work, in_flight_max=choice.groups_at_once)
            await place.publish([path for group in made for store in group for path in store.published])
        finally:
            await place.close()
    return tuple(store for group in made for store in group)


async def _check(root: CheckpointDir, target: CheckpointTarget, choice: RescaleChoice) -> QueryAt:
    if choice.partitions < 1:
        raise UsageError(f"{choice.partitions} is not a number of partitions", operation="rescale")
    await check_apart(target, root, what="source")
    checkpoint = StreamingCheckpoint(root)
    with error_context(root.location, None):
        query_id = await checkpoint.query_id()
        at = await checkpoint.at(choice.batch)
    if any(store.at.is_hdfs for store in at.stores):
        hint = "convert it first: `tidemark spark convert --to rocksdb`"
        raise UsageError("its state is HDFS-backed", operation="rescale", subject=root.location, hint=hint)
    await refuse_damaged_logs(root)
    await target.check(query_id, at.batch)
    return at


def _operators_after(at: QueryAt, partitions: int) -> tuple[StateOperator, ...]:
    """Return the operators with their new number of partitions; those that Spark plans with one keep it."""
    return tuple(
        operator if operator.is_single else msgspec.structs.replace(operator, partitions_count=partitions)
        for operator in at.operators
    )


def _groups(at: QueryAt, after: Sequence[StateOperator], runtime: Runtime) -> list[GroupToRescale]:
    stores = {store.id: store for store in at.stores}

    def named(of: StoreId) -> tuple[StoreId, StateVersion]:
        unique_id = None if at.commit.unique_ids is None else runtime.unique_id()
        return of, StateVersion(at.batch + 1, unique_id)

    def group(old: StateOperator, new: StateOperator, store: str, of: PartitionGroup) -> GroupToRescale:
        return GroupToRescale(
            sources=tuple(stores[StoreId(old.id, partition, store)] for partition in of.sources),
            partitions_before=old.partitions_count,
            targets=tuple(named(StoreId(old.id, partition, store)) for partition in of.targets),
            partitions=new.partitions_count,
        )

    return [
        group(old, new, store, of)
        for old, new in zip(at.operators, after, strict=True)
        for store in old.stores
        for of in group_partitions(old.partitions_count, new.partitions_count)
    ]


def _rewritten(
    at: QueryAt, after: Sequence[StateOperator], work: Sequence[GroupToRescale], partitions: int
) -> Callable[[str, bytes], bytes]:
    """Return what makes of the content of a file of the query that of the new checkpoint (P4, P5)."""
    ids: dict[StoreId, UniqueId | None] = {of: named.unique_id for item in work for of, named in item.targets}
    rescaled = msgspec.structs.replace(at, operators=tuple(after))
    counts = {f"{STATE}/{operator.id}": operator.partitions_count for operator in after}

    def rewrite(path: str, before: bytes) -> bytes:
        if path.startswith(f"{COMMITS}/"):
            return encode_commit(name_stores(decode_commit(before, subject=path), rescaled, ids))
        if path.startswith(f"{OFFSETS}/"):
            offsets = decode_offsets(before, subject=path)
            conf = offsets.conf | {PARTITIONS_KEY: str(partitions)}
            return encode_offsets(msgspec.structs.replace(offsets, conf=conf))
        operator, metadata, _ = path.partition("/_metadata/")
        if metadata and operator in counts:
            return repartition_operator(before, counts[operator], subject=path)
        return before

    return rewrite


async def rescale_group(
    root: CheckpointDir, work: GroupToRescale, target: Path, hash_key: HashKey, *, runtime: Runtime
) -> list[StoreRestored]:
    """Build the directories of all targets of a group below `target`, each whole or not at all. Raises as above."""
    async with contextlib.AsyncExitStack() as stack:
        stagings: list[Staging] = []
        for of, _ in work.targets:
            staging = Staging(target / of.path, runtime.session(), replace=False)
            stack.push_async_callback(run_blocking, staging.close)
            await run_blocking(staging.open)
            stagings.append(staging)
        # All on the file system of the target, so that files can be linked.
        beside = stagings[0].directory
        loaded = []
        for store in work.sources:
            place = await run_blocking(WorkingDir.open, beside.with_name(f"source-{store.id.partition}"))
            stack.push_async_callback(run_blocking, place.close)
            loaded.append(await _load(root.child(store.id.path), store, place, runtime))
        if len(work.targets) == 1:
            made = [(beside.with_name("merged"), _merged_metadata(loaded))]
            await run_blocking(merge_stores, [each.directory for each in loaded], made[0][0])
        else:
            made = await run_blocking(_split, loaded, work, beside.with_name("split"), hash_key)
        results: list[StoreRestored] = []
        for staging, (of, named), (directory, metadata) in zip(stagings, work.targets, made, strict=True):
            schema = await read_row_schema(root.child(of.path)) if of.partition == 0 else None
            manager = StateFileManager(root.child(of.path), work.settings)
            captured = await run_blocking(manager.capture, directory, named, metadata)
            now_ms = runtime.local_now_ms()
            summed_at_ms = now_ms if work.settings.file_checksums and named.unique_id is not None else None
            with target_errors(staging.directory):
                sizes = await run_blocking(
                    write_snapshot, staging.directory, captured, schema, now_ms * 1_000_000, summed_at_ms
                )
            await run_blocking(_check_ssts, staging.directory / SSTS)
            # What the sources took is of the first target.
            costs = [] if results else [each.metrics for each in loaded]
            results.append(
                StoreRestored(
                    id=of,
                    files=len(sizes),
                    size_bytes=sum(sizes),
                    bytes_fetched=sum(cost.bytes_fetched for cost in costs),
                    requests=0,
                    changelogs=sum(cost.changelogs for cost in costs),
                    records=sum(cost.records for cost in costs),
                )
            )
        for staging in stagings:
            await run_blocking(staging.publish, dirs_below(staging.directory), {})
    return results


async def _load(files: CheckpointDir, store: StoreAt, place: WorkingDir, runtime: Runtime) -> _Loaded:
    """Load a source with its changelogs, and make a rocksdb_checkpoint of it that can be merged by reference."""
    settings = msgspec.structs.replace(store.settings, snapshot_repair=False)
    loaded, metrics = await StateLoader(StateFileManager(files, settings), place, runtime).load(
        store.at, {}, read_only=True
    )

    def capture() -> Path:
        directory = place.new_captured()
        loaded.write_operands()
        loaded.db.checkpoint(directory)
        if read_parent(directory).range_deletions:  # (R1)
            loaded.db.compact()
            directory = place.new_captured()
            loaded.db.checkpoint(directory)
        return directory

    try:
        directory = await run_blocking(capture)
    finally:
        await run_blocking(loaded.db.close)
    await run_blocking(check_read, files, metrics)
    return _Loaded(
        store=store,
        directory=directory,
        metadata=loaded.metadata,
        internal_prefixes=frozenset(family.prefix for family in loaded.families if family.is_internal),
        metrics=metrics,
    )


def _merged_metadata(loaded: Sequence[_Loaded]) -> StateMetadata:
    subject = f"operator {loaded[0].store.id.operator}, store {loaded[0].store.id.store}"
    return merge_state_metadata([each.metadata for each in loaded], subject=subject)


def _split(
    loaded: Sequence[_Loaded], work: GroupToRescale, scratch: Path, hash_key: HashKey
) -> list[tuple[Path, StateMetadata]]:
    """Write the rows of each source to a file for each target, and make stores of them (P2). Blocks."""
    scratch.mkdir()
    rocksdb = msgspec.structs.replace(work.settings.rocksdb, merge_delimiter=work.settings.merge_delimiter)
    targets = [of.partition for of, _ in work.targets]
    files: dict[int, list[Path]] = {target: [] for target in targets}
    # Rows by target, and those of internal families.
    rows, internal = dict.fromkeys(targets, 0), dict.fromkeys(targets, 0)
    for source in loaded:
        here = source.store.id.partition
        writers = {target: SstWriter(scratch / f"{here}-{target}.sst", rocksdb) for target in targets}
        with StoreReader.open(source.directory, rocksdb) as reader:
            for chunk in reader.chunks(rows_max=_CHUNK_ROWS, bytes_max=_CHUNK_BYTES):
                for key, value in chunk:
                    hashed = hash_key(source.store.id, key)
                    if hashed % work.partitions_before != here:
                        raise _misplaced(source.store.id, key, hashed % work.partitions_before)
                    target = hashed % work.partitions
                    writers[target].put(key, value)
                    if key[:_FAMILY_BYTES] in source.internal_prefixes:
                        internal[target] += 1
        for target, writer in writers.items():
            writer.finish()
            rows[target] += writer.rows
            if writer.rows:
                files[target].append(writer.path)
    merged = _merged_metadata(loaded)
    made = []
    for target in targets:
        with StoreWriter.open(scratch / f"store-{target}", rocksdb, compactions_wait=True) as store:
            store.ingest(files[target])
            store.checkpoint(scratch / f"captured-{target}")
        metadata = msgspec.structs.replace(
            merged,
            num_keys=NOT_COUNTED if merged.num_keys == NOT_COUNTED else rows[target] - internal[target],
            num_internal_keys=NOT_COUNTED if merged.num_internal_keys == NOT_COUNTED else internal[target],
        )
        made.append((scratch / f"captured-{target}", metadata))
    return made


def _no_hash(of: StoreId, _: bytes) -> int:
    hint = "give a function that hashes keys, or a number of partitions that divides the one before"
    raise UsageError("its rows have to be hashed to be split", operation="rescale", subject=of.path, hint=hint)


def _check_ssts(directory: Path) -> None:
    """Walk what was made: of what no changelog has touched, nothing but its blocks says whether it is whole. Blocks."""
    for path in sorted(directory.glob("*.sst")):
        check_sst(path)


def _misplaced(of: StoreId, key: bytes, where: int) -> DamagedError:
    reason = f"has a key that belongs in partition {where} by its hash: {key[:64].hex()}"
    hint = "the rule of this operator may be another one; nothing was written"
    return DamagedError(reason, operation="rescale", subject=of.path, hint=hint)

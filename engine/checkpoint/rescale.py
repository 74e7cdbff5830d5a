"""Make another checkpoint of one batch of a query, with another number of partitions (design 0010, section 3).

The source is only read. Every key is hashed, and must be in the partition where its operator's rule has it. The files
of several partitions become one store by reference (section 2), those of one become several row by row, in the order of
their keys. Until all of it is there, nothing is at the target.
"""

import contextlib
import heapq
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

import msgspec

from blobstore.concurrency import map_bounded, run_blocking
from blobstore.opening import StoreSettings
from engine.checkpoint.backup import opened_checkpoint, refuse_damaged_logs
from engine.checkpoint.convert import bring_query, check_read, name_stores
from engine.checkpoint.errors import error_context, redact_paths
from engine.checkpoint.file_check import check_ssts
from engine.checkpoint.restore import make_target
from engine.checkpoint.store import StoreRestored, read_row_schema, write_snapshot
from engine.checkpoint.targets import CheckpointTarget, check_apart, dirs_below
from engine.errors import UsageError
from engine.local.checksums import crc32c
from engine.restore.staging import Staging, target_errors
from engine.rocksdb.merge import merge_stores, read_parent
from engine.rocksdb.sst_run import SstRun
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from engine.runtime import NO_PROGRESS, AddedProgress, Progress, Runtime, Stopwatch
from engine.settings import MIB, STORES_AT_ONCE
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import StateFileManager
from engine.state.key_rules import Partitioner, StoreRules, check_keys, partitions_of, read_key_rules
from engine.state.load import LoadMetrics, StateLoader
from engine.state.loaded import ColumnFamily
from engine.state.local_files import WorkingDir
from engine.state.query import (
    COMMITS,
    OFFSETS,
    PARTITIONS_KEY,
    PARTITIONS_MAX,
    QueryAt,
    StateOperator,
    StoreAt,
    StreamingCheckpoint,
)
from engine.state.settings import StateStoreSettings
from index.display import DisplayMixin
from index.rocksdb.merge import plan_merge
from index.snapshot.model import UniqueId
from index.spark.checkpoint import STATE, StoreId
from index.spark.checksums import split_values
from index.spark.metadata import NOT_COUNTED, StateMetadata
from index.spark.names import SSTS, StateVersion
from index.spark.query_logs import decode_commit, decode_offsets, encode_commit, encode_offsets
from index.spark.rescale import PartitionGroup, group_partitions, merge_state_metadata, repartition_operator

# What is hashed at once: fewer rows would leave a hash over arrays nothing to gain.
_CHUNK_ROWS_MAX: Final = 16_384
# Of all sources that are read side by side.
_CHUNK_BYTES: Final = 32 * MIB
_CHUNK_BYTES_MAX: Final = 4 * MIB


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
    # Of the sources: how many partitions the operator had, too.
    rules: StoreRules
    targets: tuple[tuple[StoreId, StateVersion], ...]
    partitions: int

    @property
    def settings(self) -> StateStoreSettings:
        return self.sources[0].settings

    @property
    def is_merge(self) -> bool:
        """Whether rows stay in their files."""
        return len(self.targets) == 1


class GroupRescaled(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a group, or would."""

    # None in a dry run.
    stores: tuple[StoreRestored, ...] = ()
    # Rows whose keys were found in place.
    rows: int
    # SSTs that the targets have by reference.
    files_linked: int
    bytes_linked: int
    # SSTs of sources whose rows are written again.
    bytes_rewritten: int


class RescalePlan(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What a rescale would make, or has made. All keys were hashed, and are in place."""

    dry_run: bool = True
    query_id: str
    batch: int
    source: str
    location: str
    # Of the operators that Spark does not plan with one.
    partitions_before: int
    partitions: int
    # Numbers of partitions for which no row would be written again.
    partitions_by_reference: tuple[int, ...]
    stores_before: int
    stores: int
    rows: int
    files_linked: int
    bytes_linked: int
    bytes_rewritten: int


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


class _Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A source, as a rocksdb_checkpoint that nobody writes to."""

    store: StoreAt
    # Where it is in the checkpoint.
    location: str
    directory: Path
    metadata: StateMetadata
    families: tuple[ColumnFamily, ...]
    metrics: LoadMetrics

    @property
    def sst_bytes(self) -> list[int]:
        return [path.stat().st_size for path in self.directory.glob("*.sst")]


async def rescale_checkpoint(
    source: str | Path,
    target: str | Path,
    choice: RescaleChoice,
    *,
    partitioner: Partitioner = partitions_of,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> RescaledCheckpoint:
    """Make a checkpoint at a new place of one batch of another one; the query goes on there after the batch.

    Stop the query first: from then on, only one of the two places may go on. `partitioner` hashes keys:
    `engine.spark.sources.key_hashes` has a faster one than the default.

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
    watch, done = Stopwatch(runtime), AddedProgress(progress)
    place = make_target(target, runtime, move_aside=False, settings=choice.store_settings)
    async with opened_checkpoint(source, choice.store_settings) as root:
        try:
            query_id, at, work = await _prepare(root, place, choice, runtime)
            await place.open(query_id, at.batch)
            files, size_bytes = await bring_query(root, place, at, _rewritten(at, work, choice.partitions))

            async def one(item: GroupToRescale) -> GroupRescaled:
                made = await rescale_group(root, item, place.directory, partitioner, runtime=runtime)
                done.add(files=sum(of.files for of in made.stores), bytes_=sum(of.size_bytes for of in made.stores))
                return made

            groups = await map_bounded(one, work, in_flight_max=choice.groups_at_once)
            made = [store for group in groups for store in group.stores]
            await place.publish([path for store in made for path in store.published])
            leftovers = await place.close()
        finally:
            await place.close()
    plan = _sum_up(query_id, at, root, place, choice, groups, work)
    return RescaledCheckpoint(
        **msgspec.structs.asdict(plan) | {"dry_run": False},
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
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> RescalePlan:
    """Find out what `rescale_checkpoint` would make, or refuse; nothing is written but temporary files.

    All state is loaded and every key hashed, as by the rescale itself. Raises likewise.
    """
    runtime = runtime or Runtime()
    done = AddedProgress(progress)
    place = make_target(target, runtime, move_aside=False, settings=choice.store_settings)
    async with opened_checkpoint(source, choice.store_settings) as root:
        try:
            query_id, at, work = await _prepare(root, place, choice, runtime)
            with tempfile.TemporaryDirectory(prefix="tidemark-rescale-", ignore_cleanup_errors=True) as scratch:

                async def one(item: GroupToRescale) -> GroupRescaled:
                    beside = Path(scratch) / item.targets[0][0].path / "new"
                    async with contextlib.AsyncExitStack() as stack:
                        with redact_paths(root.location, Path(scratch)):
                            loaded = await _load_all(stack, root, item, beside, runtime)
                            if item.is_merge:
                                await run_blocking(lambda: plan_merge([read_parent(of.directory) for of in loaded]))
                            counts = await run_blocking(_count_rows, loaded, item, partitioner)
                            found = await run_blocking(_measured, item, loaded, counts)
                    done.add(files=len(loaded), bytes_=found.bytes_linked + found.bytes_rewritten)
                    return found

                groups = await map_bounded(one, work, in_flight_max=choice.groups_at_once)
        finally:
            await place.close()
    return _sum_up(query_id, at, root, place, choice, groups, work)


def _sum_up(
    query_id: str,
    at: QueryAt,
    root: CheckpointDir,
    place: CheckpointTarget,
    choice: RescaleChoice,
    groups: Sequence[GroupRescaled],
    work: Sequence[GroupToRescale],
) -> RescalePlan:
    before = max((operator.partitions_count for operator in at.operators if not operator.is_single), default=1)
    return RescalePlan(
        query_id=query_id,
        batch=at.batch,
        source=root.location,
        location=place.location,
        partitions_before=before,
        partitions=choice.partitions,
        partitions_by_reference=tuple(number for number in range(1, before) if before % number == 0),
        stores_before=len(at.stores),
        stores=sum(len(item.targets) for item in work),
        rows=sum(group.rows for group in groups),
        files_linked=sum(group.files_linked for group in groups),
        bytes_linked=sum(group.bytes_linked for group in groups),
        bytes_rewritten=sum(group.bytes_rewritten for group in groups),
    )


async def _prepare(
    root: CheckpointDir, target: CheckpointTarget, choice: RescaleChoice, runtime: Runtime
) -> tuple[str, QueryAt, tuple[GroupToRescale, ...]]:
    """Refuse what cannot be done; return the query's id, its batch, and what is to be done. Nothing is written."""
    if not 1 <= choice.partitions <= PARTITIONS_MAX:
        hint = f"give one from 1 to {PARTITIONS_MAX:,}"
        raise UsageError(f"{choice.partitions} is not a number of partitions", operation="rescale", hint=hint)
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
    rules = await read_key_rules(root, at)
    return query_id, at, tuple(_groups(at, choice.partitions, rules, runtime))


def _operators_after(at: QueryAt, partitions: int) -> tuple[StateOperator, ...]:
    """Return the operators with their new number of partitions; those that Spark plans with one keep it."""
    return tuple(
        operator if operator.is_single else msgspec.structs.replace(operator, partitions_count=partitions)
        for operator in at.operators
    )


def _groups(
    at: QueryAt, partitions: int, rules: Mapping[tuple[int, str], StoreRules], runtime: Runtime
) -> list[GroupToRescale]:
    stores = {store.id: store for store in at.stores}

    def named(of: StoreId) -> tuple[StoreId, StateVersion]:
        unique_id = None if at.commit.unique_ids is None else runtime.unique_id()
        return of, StateVersion(at.batch + 1, unique_id)

    def group(old: StateOperator, new: StateOperator, store: str, of: PartitionGroup) -> GroupToRescale:
        return GroupToRescale(
            sources=tuple(stores[StoreId(old.id, partition, store)] for partition in of.sources),
            rules=rules[old.id, store],
            targets=tuple(named(StoreId(old.id, partition, store)) for partition in of.targets),
            partitions=new.partitions_count,
        )

    return [
        group(old, new, store, of)
        for old, new in zip(at.operators, _operators_after(at, partitions), strict=True)
        for store in old.stores
        for of in group_partitions(old.partitions_count, new.partitions_count)
    ]


def _rewritten(at: QueryAt, work: Sequence[GroupToRescale], partitions: int) -> Callable[[str, bytes], bytes]:
    """Return what makes of the content of a file of the query that of the new checkpoint (P4, P5)."""
    after = _operators_after(at, partitions)
    ids: dict[StoreId, UniqueId | None] = {of: named.unique_id for item in work for of, named in item.targets}
    rescaled = msgspec.structs.replace(at, operators=after)
    counts = {f"{STATE}/{operator.id}": operator.partitions_count for operator in after}

    def rewrite(path: str, before: bytes) -> bytes:
        if path.startswith(f"{COMMITS}/"):
            return encode_commit(name_stores(decode_commit(before, subject=path), rescaled, ids))
        if path.startswith(f"{OFFSETS}/"):
            offsets = decode_offsets(before, subject=path)
            conf = offsets.conf | {PARTITIONS_KEY: str(partitions)}
            return encode_offsets(msgspec.structs.replace(offsets, conf=conf, has_metadata=True))
        operator, metadata, _ = path.partition("/_metadata/")
        if metadata and operator in counts:
            return repartition_operator(before, counts[operator], subject=path)
        return before

    return rewrite


async def rescale_group(
    root: CheckpointDir, work: GroupToRescale, target: Path, partitioner: Partitioner, *, runtime: Runtime
) -> GroupRescaled:
    """Build the directories of all targets of a group below `target`, each whole or not at all. Raises as above."""
    results: list[StoreRestored] = []
    async with contextlib.AsyncExitStack() as stack:
        # On the file system of the target, so that files can be linked.
        held = await _opened_staging(stack, target / work.targets[0][0].path, runtime)
        beside = held.directory
        with redact_paths(root.location, beside.parent):
            loaded = await _load_all(stack, root, work, beside, runtime)
            if work.is_merge:
                merged = beside.with_name("merged")
                await run_blocking(merge_stores, [each.directory for each in loaded], merged)
                counts = await run_blocking(_count_rows, loaded, work, partitioner)
                made = [(merged, _metadata_of(loaded, counts))]
            else:
                counts, made = await run_blocking(_split, loaded, work, beside.with_name("split"), partitioner)
            # The first one goes last: with its staging everything that is beside it goes.
            for named, parts in reversed([*zip(work.targets, made, strict=True)]):
                of = named[0]
                async with contextlib.AsyncExitStack() as own:
                    is_last = named == work.targets[0]
                    staging = held if is_last else await _opened_staging(own, target / of.path, runtime)
                    files, now_ms = root.child(of.path), runtime.local_now_ms()
                    sizes = await _write_store(files, work.settings, staging.directory, named, parts, now_ms)
                    await run_blocking(staging.publish, dirs_below(staging.directory), {})
                costs = [each.metrics for each in loaded] if is_last else []
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
            measured = await run_blocking(_measured, work, loaded, counts)
    return msgspec.structs.replace(measured, stores=tuple(results[::-1]))


async def _opened_staging(stack: contextlib.AsyncExitStack, target: Path, runtime: Runtime) -> Staging:
    staging = Staging(target, runtime.session(), replace=False)
    stack.push_async_callback(run_blocking, staging.close)
    await run_blocking(staging.open)
    return staging


async def _write_store(
    files: CheckpointDir,
    settings: StateStoreSettings,
    into: Path,
    target: tuple[StoreId, StateVersion],
    made: tuple[Path, StateMetadata],
    now_ms: int,
) -> list[int]:
    """Write a rocksdb_checkpoint as the one snapshot of a store; return the sizes of its files."""
    of, named = target
    schema = await read_row_schema(files) if of.partition == 0 else None
    manager = StateFileManager(files, settings)
    captured = await run_blocking(manager.capture, made[0], named, made[1])
    summed_at_ms = now_ms if settings.file_checksums and named.unique_id is not None else None
    with target_errors(into):
        sizes = await run_blocking(write_snapshot, into, captured, schema, now_ms * 1_000_000, summed_at_ms)
    # Of what no changelog has touched nothing but its blocks says whether it is whole.
    await check_ssts(into / SSTS)
    return sizes


def _measured(work: GroupToRescale, loaded: Sequence[_Loaded], counts: "_Counts") -> GroupRescaled:
    sizes = [size for each in loaded for size in each.sst_bytes]
    return GroupRescaled(
        rows=counts.rows,
        files_linked=len(sizes) if work.is_merge else 0,
        bytes_linked=sum(sizes) if work.is_merge else 0,
        bytes_rewritten=0 if work.is_merge else sum(sizes),
    )


async def _load_all(
    stack: contextlib.AsyncExitStack, root: CheckpointDir, work: GroupToRescale, beside: Path, runtime: Runtime
) -> list[_Loaded]:
    """Load the sources of a group beside a directory, until the stack ends."""
    loaded = []
    for store in work.sources:
        place = await run_blocking(WorkingDir.open, beside.with_name(f"source-{store.id.partition}"))
        stack.push_async_callback(run_blocking, place.close)
        files = root.child(store.id.path)
        with redact_paths(files.location, place.directory):
            loaded.append(await _load(files, store, place, runtime))
    return loaded


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
            loaded.db.compact(force=True)
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
        location=files.location,
        directory=directory,
        metadata=loaded.metadata,
        families=tuple(loaded.families),
        metrics=metrics,
    )


class _Counts(msgspec.Struct):
    """Rows that were read, and those of them that belong to internal families."""

    rows: int = 0
    internal: int = 0

    def add(self, family: ColumnFamily) -> None:
        self.rows += 1
        self.internal += family.is_internal


def _metadata_of(loaded: Sequence[_Loaded], counts: _Counts) -> StateMetadata:
    """Combine the metadata of the sources for one target, with what was counted where the sources count (P3)."""
    subject = f"operator {loaded[0].store.id.operator}, store {loaded[0].store.id.store}"
    merged = merge_state_metadata([each.metadata for each in loaded], subject=subject)
    return msgspec.structs.replace(
        merged,
        num_keys=NOT_COUNTED if merged.num_keys == NOT_COUNTED else counts.rows - counts.internal,
        num_internal_keys=NOT_COUNTED if merged.num_internal_keys == NOT_COUNTED else counts.internal,
    )


def _rocksdb(work: GroupToRescale) -> RocksDbSettings:
    return msgspec.structs.replace(work.settings.rocksdb, merge_delimiter=work.settings.merge_delimiter)


def _placed_rows(
    source: _Loaded, work: GroupToRescale, partitioner: Partitioner, *, side_by_side: int = 1
) -> Iterator[tuple[ColumnFamily, bytes, bytes, int]]:
    """Yield every row of a source by its stored key: its family, key, value and partition among the new ones (H9, P2).

    A key's partition among the common multiple of both numbers says its partition among either, so that it is hashed
    once. A row with a checksum is compared with it.
    """
    before, here = work.rules.operator.partitions_count, source.store.id.partition
    common = math.lcm(before, work.partitions)
    checked = 0
    with redact_paths(source.location, source.directory), StoreReader.open(source.directory, _rocksdb(work)) as reader:
        bytes_max = min(_CHUNK_BYTES_MAX, _CHUNK_BYTES // side_by_side)
        for chunk in reader.chunks(rows_max=_CHUNK_ROWS_MAX, bytes_max=bytes_max):
            for family, rows in _by_family(chunk, source.families):
                keys = [key[len(family.prefix) :] for key, _ in rows]
                rule = work.rules.families.get(family.name)
                among = [here] * len(keys) if rule is None else partitioner(rule, keys, common)
                check_keys(work.rules, family.name, keys, [of % before for of in among], here, checked=checked)
                checked += len(keys)
                for (key, value), of in zip(rows, among, strict=True):
                    if work.settings.row_checksums:
                        split_values(key, value, delimiter=work.settings.merge_delimiter or b"", crc32c=crc32c)
                    yield family, key, value, of % work.partitions


def _count_rows(loaded: Sequence[_Loaded], work: GroupToRescale, partitioner: Partitioner) -> _Counts:
    """Read all rows, and find that each is in place. Blocks."""
    counts = _Counts()
    _metadata_of(loaded, counts)  # refuses sources that cannot be one store, before all is read
    for source in loaded:
        for family, *_ in _placed_rows(source, work, partitioner):
            counts.add(family)
    return counts


def _split(
    loaded: Sequence[_Loaded], work: GroupToRescale, scratch: Path, partitioner: Partitioner
) -> tuple[_Counts, list[tuple[Path, StateMetadata]]]:
    """Write the rows of all sources to files for each target, and make stores of them (P2). Blocks."""
    scratch.mkdir()
    rocksdb = _rocksdb(work)
    targets = [of.partition for of, _ in work.targets]
    runs = {target: SstRun(scratch, target, rocksdb) for target in targets}
    counts = {target: _Counts() for target in targets}
    # All sources side by side: the files of a target follow each other, and overlap nowhere.
    sorted_rows = [_placed_rows(source, work, partitioner, side_by_side=len(loaded)) for source in loaded]
    for family, key, value, target in heapq.merge(*sorted_rows, key=itemgetter(1)):
        runs[target].put(key, value)
        counts[target].add(family)
    made = []
    for target in targets:
        with StoreWriter.open(scratch / f"store-{target}", rocksdb, compactions_wait=True) as store:
            store.ingest(runs[target].finish())
            store.checkpoint(scratch / f"captured-{target}")
        made.append((scratch / f"captured-{target}", _metadata_of(loaded, counts[target])))
    total = _Counts(sum(of.rows for of in counts.values()), sum(of.internal for of in counts.values()))
    return total, made


def _by_family(
    chunk: Sequence[tuple[bytes, bytes]], families: Sequence[ColumnFamily]
) -> Iterator[tuple[ColumnFamily, list[tuple[bytes, bytes]]]]:
    """Yield the rows of each column family in a list that is sorted by stored key."""
    by_prefix = {family.prefix: family for family in families}
    size = len(next(iter(by_prefix), b""))
    for prefix, rows in itertools.groupby(chunk, key=lambda row: row[0][:size]):
        # One that the snapshot does not name has no rule.
        number = int.from_bytes(prefix, "little", signed=True)
        yield by_prefix.get(prefix) or ColumnFamily(f"number {number}", number), list(rows)

"""Make the stores of one group of partitions from those of another number (design 0010, P1 to P3)."""

import contextlib
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

import msgspec

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded, run_blocking
from engine.checkpoint.errors import redact_paths
from engine.checkpoint.file_check import check_sst
from engine.checkpoint.groups import GroupRescaled, GroupToRescale
from engine.checkpoint.processes import Processes
from engine.checkpoint.store import StoreRestored, check_read, checkpoint_of, staged, write_snapshot
from engine.errors import MisplacedKeyError
from engine.local.checksums import crc32c
from engine.restore.restore import read_index_of
from engine.restore.staging import target_errors
from engine.rocksdb.merge import merge_stores, read_parent
from engine.rocksdb.sst_run import SstRun, put_by_target
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from engine.runtime import NO_PROGRESS, Progress, Runtime
from engine.settings import MIB, STORES_AT_ONCE, TransferSettings
from engine.state.blocks import Blocks, split_entries
from engine.state.checkpoint_dir import CheckpointDir, StateFiles
from engine.state.files import StateFileManager
from engine.state.key_rules import BlockPartitioner, Partitioner, check_keys, partitions_of
from engine.state.load import LoadMetrics, StateLoader
from engine.state.loaded import ColumnFamily
from engine.state.local_files import WorkingDir, working_dir
from engine.state.query import StoreAt
from engine.state.restore import IndexStateFiles
from index.errors import PartitionKeyError, StoreMergeError
from index.rocksdb.sst import MERGE, VALUE, decode_rows
from index.spark.checksums import split_values
from index.spark.lineage import target_in_index
from index.spark.metadata import NOT_COUNTED, StateMetadata
from index.spark.names import StateVersion
from index.spark.rescale import merge_state_metadata

P = ParamSpec("P")
R = TypeVar("R")

# What is hashed at once: fewer rows would leave a hash over arrays nothing to gain.
_CHUNK_ROWS_MAX: Final = 16_384
# Of all sources that are read side by side.
_CHUNK_BYTES: Final = 32 * MIB
_CHUNK_BYTES_MAX: Final = 4 * MIB


# Opens one of the sources of a group, by its number: its files, and the version to load of them.
OpenStore: TypeAlias = Callable[[GroupToRescale, int], Awaitable[tuple[StateFiles, StateVersion]]]


def of_checkpoint(root: CheckpointDir) -> OpenStore:
    """Return what opens sources in a checkpoint: their SSTs are linked where that can be."""
    linked = root.linked()

    async def open_store(work: GroupToRescale, number: int) -> tuple[StateFiles, StateVersion]:
        store = work.sources[number]
        return linked.child(store.id.path), store.at

    return open_store


def of_backup(store: BlobStore, transfer: TransferSettings) -> OpenStore:
    """Return what opens sources in a repository, by their references. The caller holds a pin."""

    async def open_store(work: GroupToRescale, number: int) -> tuple[StateFiles, StateVersion]:
        index, _ = await read_index_of(store, work.references[number])
        at = work.sources[number].at
        unique_id = target_in_index(at.version, at.unique_id, index)
        return IndexStateFiles(store, index, transfer), StateVersion(at.version, unique_id)

    return open_store


class _Source(msgspec.Struct, frozen=True, kw_only=True):
    """A source as a rocksdb_checkpoint that nobody writes to, as another process gets it."""

    partition: int
    # What errors call it.
    location: str
    directory: Path
    metadata: StateMetadata
    families: tuple[ColumnFamily, ...]

    @property
    def sst_bytes(self) -> list[int]:
        return [path.stat().st_size for path in self.directory.glob("*.sst")]


class _Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A source, and what it took to load it."""

    source: _Source
    files: StateFiles
    metrics: LoadMetrics

    @property
    def requests(self) -> int:
        return 1 + self.files.requests if isinstance(self.files, IndexStateFiles) else 0

    @property
    def bytes_fetched(self) -> int:
        return self.files.bytes_fetched if isinstance(self.files, IndexStateFiles) else self.metrics.bytes_fetched


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """How groups are rescaled on this machine."""

    partitioner: Partitioner = partitions_of
    groups_at_once: int = STORES_AT_ONCE
    # Of what takes long, where there are any.
    processes: Processes | None = None
    progress: Progress = NO_PROGRESS
    runtime: Runtime = msgspec.field(default_factory=Runtime)


async def _run(how: Here, sources: Sequence[_Source], function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that reads all of these stores, in another process if there are any."""
    if how.processes is None:
        return await run_blocking(function, *args, **kwargs)
    return await how.processes.run(sum(sum(of.sst_bytes) for of in sources), function, *args, **kwargs)


async def rescale_group(
    open_store: OpenStore, work: GroupToRescale, target: Path, how: Here, *, replace: bool = False
) -> GroupRescaled:
    """Build the directories of all targets of a group below `target`, each whole or not at all.

    With `replace` they may have what an earlier attempt has left. Raises as `rescale_checkpoint`.
    """
    results: list[StoreRestored] = []
    async with (
        # On the file system of the target, so that files can be linked.
        staged(target / work.id.path, how.runtime, replace=replace) as beside,
        contextlib.AsyncExitStack() as stack,
    ):
        with redact_paths(work.subject, beside.parent):
            loaded, made, measured = await _make(stack, open_store, work, beside, how, splits=True)
            # The first one goes last: with its staging everything that is beside it goes.
            for (of, named), (directory, metadata) in reversed([*zip(work.targets, made, strict=True)]):
                is_last = of == work.id
                # A target that is done holds no descriptor while the next is made.
                async with contextlib.AsyncExitStack() as own:
                    other = staged(target / of.path, how.runtime, replace=replace)
                    into = beside if is_last else await own.enter_async_context(other)
                    manager = StateFileManager(loaded[0].files, work.settings)
                    captured = await run_blocking(manager.capture, directory, named, metadata)
                    schema = work.schema if of.partition == 0 else None
                    is_summed = work.sums_files and work.settings.file_checksums
                    summed_at_ms = how.runtime.local_now_ms() if is_summed else None
                    with target_errors(into):
                        sizes = await run_blocking(write_snapshot, into, captured, schema, None, summed_at_ms)
                costs = loaded if is_last else []
                results.append(
                    StoreRestored(
                        id=of,
                        files=len(sizes),
                        size_bytes=sum(sizes),
                        bytes_fetched=sum(cost.bytes_fetched for cost in costs),
                        requests=sum(cost.requests for cost in costs),
                        changelogs=sum(cost.metrics.changelogs for cost in costs),
                        records=sum(cost.metrics.records for cost in costs),
                    )
                )
    return msgspec.structs.replace(measured, stores=tuple(results[::-1]))


async def _make(
    stack: contextlib.AsyncExitStack,
    open_store: OpenStore,
    work: GroupToRescale,
    beside: Path,
    how: Here,
    *,
    splits: bool,
) -> tuple[list[_Loaded], list[tuple[Path, StateMetadata]], GroupRescaled]:
    """Load the sources of a group until the stack ends, check them, and make the targets beside a directory.

    Rows are split only if that is wanted. Returns the sources, what was made of them, and figures without stores.
    """
    loaded = []
    for number, store in enumerate(work.sources):
        place = await stack.enter_async_context(working_dir(beside.with_name(f"source-{store.id.partition}")))
        files, at = await open_store(work, number)
        with redact_paths(files.location, place.directory):
            loaded.append(await _load(files, at, store, place, how.runtime))
    sources, partitioner = [each.source for each in loaded], how.partitioner
    metadata = merge_state_metadata([each.metadata for each in sources], subject=work.subject)
    made: list[tuple[Path, StateMetadata]] = []
    if work.is_merge:
        sources, keys = await _check_entries(sources, work, how)
        made = [(beside.with_name("merged"), metadata)]
        await run_blocking(merge_stores, [each.directory for each in sources], made[0][0])
    elif splits:
        scratch = beside.with_name("split")
        keys, made = await _run(how, sources, _split, work, partitioner, sources, metadata, scratch)
    else:
        keys = await _run(how, sources, _check_rows, work, partitioner, sources)
    sizes = await run_blocking(lambda: [size for each in sources for size in each.sst_bytes])
    if work.is_merge:
        return loaded, made, GroupRescaled(keys_checked=keys, files_linked=len(sizes), bytes_linked=sum(sizes))
    return loaded, made, GroupRescaled(keys_checked=keys, bytes_rewritten=sum(sizes))


async def rescale_here(
    open_store: OpenStore, work: Sequence[GroupToRescale], target: Path, how: Here
) -> list[GroupRescaled]:
    """Rescale groups on this machine, several at once. Raises as `rescale_group`."""

    async def one(item: GroupToRescale) -> GroupRescaled:
        made = await rescale_group(open_store, item, target, how)
        how.progress.add(files=sum(of.files for of in made.stores), bytes_=sum(of.size_bytes for of in made.stores))
        return made

    return await map_bounded(one, work, in_flight_max=how.groups_at_once)


async def look_here(
    open_store: OpenStore, work: Sequence[GroupToRescale], scratch: Path, how: Here
) -> list[GroupRescaled]:
    """Load and check groups below a directory for temporary files; make nothing. Raises as `rescale_group`."""

    async def one(item: GroupToRescale) -> GroupRescaled:
        beside = scratch / item.id.path / "new"
        async with contextlib.AsyncExitStack() as stack:
            with redact_paths(item.subject, beside.parent):
                _, _, found = await _make(stack, open_store, item, beside, how, splits=False)
        how.progress.add(files=len(item.sources), bytes_=found.bytes_linked + found.bytes_rewritten)
        return found

    return await map_bounded(one, work, in_flight_max=how.groups_at_once)


async def _load(files: StateFiles, at: StateVersion, store: StoreAt, place: WorkingDir, runtime: Runtime) -> _Loaded:
    """Load a source with its changelogs, and make a rocksdb_checkpoint of it."""
    settings = msgspec.structs.replace(store.settings, snapshot_repair=False)
    loader = StateLoader(StateFileManager(files, settings), place, runtime)
    loaded, metrics = await loader.load(at, {}, read_only=True)

    try:
        directory = await run_blocking(checkpoint_of, place, loaded)
    finally:
        await run_blocking(loaded.db.close)
    await run_blocking(check_read, files, metrics)
    source = _Source(
        partition=store.id.partition,
        location=files.location,
        directory=directory,
        metadata=loaded.metadata,
        families=tuple(loaded.families),
    )
    return _Loaded(source=source, files=files, metrics=metrics)


def _rocksdb(work: GroupToRescale) -> RocksDbSettings:
    return msgspec.structs.replace(work.settings.rocksdb, merge_delimiter=work.settings.merge_delimiter)


def _placed_rows(
    source: _Source, work: GroupToRescale, partitioner: Partitioner, *, side_by_side: int = 1
) -> Iterator[tuple[ColumnFamily, list[tuple[bytes, bytes]], list[int]]]:
    """Yield all rows of a source by their stored keys, once each is found where it has to be (H9, P2).

    They come as some of one column family, each with its partition among the new ones.
    A key's partition among the common multiple of both numbers says its partition among either, so that it is hashed
    once. A row with a checksum is compared with it.
    """
    before, here = work.rules.operator.partitions_count, source.partition
    common = math.lcm(before, work.partitions)
    checked = 0
    with redact_paths(source.location, source.directory), StoreReader.open(source.directory, _rocksdb(work)) as reader:
        bytes_max = min(_CHUNK_BYTES_MAX, _CHUNK_BYTES // side_by_side)
        for chunk in reader.chunks(rows_max=_CHUNK_ROWS_MAX, bytes_max=bytes_max):
            for family, rows in _by_family(chunk, source.families):
                keys = [*map(itemgetter(0), rows)]
                if prefix_bytes := len(family.prefix):
                    keys = [key[prefix_bytes:] for key in keys]
                rule = work.rules.families.get(family.name)
                among = [here] * len(keys) if rule is None else partitioner(rule, keys, common)
                check_keys(work.rules, family.name, keys, [of % before for of in among], here, checked=checked)
                checked += len(keys)
                if work.settings.row_checksums:
                    for key, value in rows:
                        split_values(key, value, delimiter=work.settings.merge_delimiter or b"", crc32c=crc32c)
                yield family, rows, [of % work.partitions for of in among]


def _check_rows(work: GroupToRescale, partitioner: Partitioner, sources: Sequence[_Source]) -> int:
    """Read all rows, and find that each is in place; return their number. Blocks."""
    return sum(len(rows) for source in sources for _, rows, _ in _placed_rows(source, work, partitioner))


async def _check_entries(sources: Sequence[_Source], work: GroupToRescale, how: Here) -> tuple[list[_Source], int]:
    """Find that all that the SSTs of sources have is in place, so that they can be merged (R2).

    Returns:
        The sources, those compacted of which something was not in place, and the number of keys that were hashed.
    """

    async def one(of: _Source) -> tuple[_Source, int]:
        return await _run(how, [of], _check_source, work, how.partitioner, of)

    checked = await map_bounded(one, sources, in_flight_max=1 if how.processes is None else STORES_AT_ONCE)
    return [of for of, _ in checked], sum(keys for _, keys in checked)


def _check_source(work: GroupToRescale, partitioner: Partitioner, source: _Source) -> tuple[_Source, int]:
    """Check all entries of a source; return it, compacted if it had to be, and their number. Blocks."""
    try:
        if read_parent(source.directory).range_deletions:
            raise StoreMergeError("has deletions of ranges of keys", subject=work.subject)  # noqa: TRY301
        return source, _check_ssts(work, partitioner, source)
    except (MisplacedKeyError, PartitionKeyError, StoreMergeError):
        compacted = source.directory.with_name(f"{source.directory.name}-compacted")
        with StoreWriter.open(source.directory, _rocksdb(work)) as store:
            store.compact(force=True)
            store.checkpoint(compacted)
    source = msgspec.structs.replace(source, directory=compacted)
    return source, _check_ssts(work, partitioner, source)


def _check_ssts(work: GroupToRescale, partitioner: Partitioner, source: _Source) -> int:
    """Check each block of the SSTs of a source, hash the key of each entry; return the number of entries."""
    by_prefix = {family.prefix: family for family in source.families}
    prefix_bytes = len(next(iter(by_prefix), b""))
    split = partitioner.keys_in if isinstance(partitioner, BlockPartitioner) else split_entries
    operator, here = work.rules.operator, source.partition
    keys_checked = 0

    def take(blocks: Blocks) -> None:
        nonlocal keys_checked
        for prefix, keys in split(blocks, prefix_bytes):
            family = by_prefix.get(prefix) or _unnamed_family(prefix)
            rule = work.rules.families.get(family.name)
            found = [here] * len(keys) if rule is None else partitioner(rule, keys, operator.partitions_count)
            check_keys(work.rules, family.name, keys, found, here, checked=keys_checked)
            keys_checked += len(keys)
        if work.settings.row_checksums:
            for key, kind, value in itertools.chain.from_iterable(map(decode_rows, blocks)):
                if kind in (VALUE, MERGE):
                    split_values(key, value, delimiter=work.settings.merge_delimiter or b"", crc32c=crc32c)

    with redact_paths(source.location, source.directory):
        for path in sorted(source.directory.glob("*.sst")):
            report = check_sst(path, take)
            if report.unchecked:
                raise StoreMergeError(report.unchecked, subject=str(path))
    return keys_checked


def _split(
    work: GroupToRescale, partitioner: Partitioner, sources: Sequence[_Source], merged: StateMetadata, scratch: Path
) -> tuple[int, list[tuple[Path, StateMetadata]]]:
    """Write the rows of all sources to files for each target, and make stores of them (P2). Blocks.

    Returns the number of rows beside the stores; the metadata is `merged`, with their rows where that counts (P3).
    """
    scratch.mkdir()
    rocksdb = _rocksdb(work)
    targets = [of.partition for of, _ in work.targets]
    runs = {target: SstRun(scratch, target, rocksdb) for target in targets}
    # Rows by their target: all, and those of internal families.
    counted, internal = Counter[int](), Counter[int]()

    def placed_rows(source: _Source) -> Iterator[tuple[list[tuple[bytes, bytes]], list[int]]]:
        for family, rows, partitions in _placed_rows(source, work, partitioner, side_by_side=len(sources)):
            found = Counter(partitions)
            counted.update(found)
            if family.is_internal:
                internal.update(found)
            yield rows, partitions

    if len(sources) == 1:
        for placed in placed_rows(sources[0]):
            put_by_target(*placed, runs)
    else:
        # All sources side by side: the files of a target follow each other, and overlap nowhere.
        keyed = (
            ([(row[0], row, of) for row, of in zip(*placed, strict=True)] for placed in placed_rows(source))
            for source in sources
        )
        for run in merge_runs([*keyed]):
            _, rows, partitions = zip(*run, strict=True)
            put_by_target(rows, partitions, runs)
    made = []
    for target in targets:
        with StoreWriter.open(scratch / f"store-{target}", rocksdb, compactions_wait=True) as store:
            store.ingest(runs[target].finish())
            store.checkpoint(scratch / f"captured-{target}")
        rows_internal = internal[target]
        metadata = msgspec.structs.replace(
            merged,
            num_keys=NOT_COUNTED if merged.num_keys == NOT_COUNTED else counted[target] - rows_internal,
            num_internal_keys=NOT_COUNTED if merged.num_internal_keys == NOT_COUNTED else rows_internal,
        )
        made.append((scratch / f"captured-{target}", metadata))
    return counted.total(), made


# The key of a row, and anything.
_Row: TypeAlias = tuple[Any, ...]


def merge_runs(runs: Sequence[Iterator[list[_Row]]]) -> Iterator[list[_Row]]:
    """Merge runs of which the rows are sorted by key, no key twice, given and yielded in lists.

    Of each run one list is in memory.
    """
    left = [(rows, run) for run in runs if (rows := next(run, []))]
    while left:
        # Up to here all that is to come is known.
        end = min(rows[-1][0] for rows, _ in left)
        cuts = [bisect_right(rows, end, key=itemgetter(0)) for rows, _ in left]
        found = [row for (rows, _), cut in zip(left, cuts, strict=True) for row in rows[:cut]]
        found.sort(key=itemgetter(0))
        yield found
        after = [(rows[cut:] or next(run, []), run) for (rows, run), cut in zip(left, cuts, strict=True)]
        left = [(rows, run) for rows, run in after if rows]


def _by_family(
    chunk: list[tuple[bytes, bytes]], families: Sequence[ColumnFamily]
) -> Iterator[tuple[ColumnFamily, list[tuple[bytes, bytes]]]]:
    """Yield the rows of each column family in a list that is sorted by stored key."""
    by_prefix = {family.prefix: family for family in families}
    size = len(next(iter(by_prefix), b""))
    if size == 0 and b"" in by_prefix:
        yield by_prefix[b""], chunk
        return
    for prefix, rows in itertools.groupby(chunk, key=lambda row: row[0][:size]):
        yield by_prefix.get(prefix) or _unnamed_family(prefix), list(rows)


def _unnamed_family(prefix: bytes) -> ColumnFamily:
    """Return a family that the snapshot does not name; it has no rule."""
    number = int.from_bytes(prefix, "little", signed=True)
    return ColumnFamily(f"number {number}", number)

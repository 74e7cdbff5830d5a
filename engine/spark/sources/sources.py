"""The data sources of PySpark: state after a batch, what changed between two, and files (design 0005, D1 to D3)."""

import contextlib
import functools
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession, datasource
from pyspark.sql.types import StructType
from typing_extensions import override

from blobstore.checkpoint_files import FileStatus
from engine.errors import EngineError, UsageError
from engine.spark.sources.plan import (
    BackupPlace,
    CheckpointPlace,
    ReadPlan,
    SourceOptions,
    StoreWork,
    group_works,
    load_store,
    look_up,
    noting_hints,
    plan_read,
    plan_state,
)
from engine.spark.sources.tables import (
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    Column,
    Pair,
    Table,
    arrow_schema,
    columns,
    decode_keys,
    decode_values,
    encode_keys,
    spark_schema,
    split_bytes,
    split_typed,
    types_of,
)
from engine.state.checkpoint_dir import CheckpointDir, StateFiles
from engine.state.files import StateFileManager
from engine.state.key_rules import SCHEMA_PATH
from engine.state.loaded import LoadedState
from engine.state.overlay import align_chunks
from engine.state.query import StoreAt
from index.errors import FormatError
from index.snapshot.contents import files_of
from index.spark.checkpoint import belongs
from index.spark.names import SSTS, changelog_name, checksum_name, is_shared_path, parse_state_name, snapshot_name
from index.spark.schema import ArrayType, AtomType

# ---------------------------------------------------------------------- rows

# Key, the value before, the value after: None where there was none.
Change: TypeAlias = tuple[bytes, bytes | None, bytes | None]

_STORE: Final = columns(operator="integer", partition="integer", store="string")


def columns_of(table: Table | None, *, changes: bool) -> list[Column]:
    """Return the columns of `batches_of`: of rows of a table; without one, of bytes with their column family."""
    found = [*_STORE, *(columns(change="string") if changes else columns(version="long"))]
    names = ("before", "after") if changes else ()
    if table is None:
        values = dict.fromkeys(names or ("value",), "binary")
        return [*found, *columns(family="string", key="binary", **values)]
    return [*found, *table.key_columns(), *table.value_columns(*names)]


# Rows by column family.
LookedUp: TypeAlias = dict[str, list[Pair]]


def batches_of(work: StoreWork, stores: Sequence[LoadedState | LookedUp | None]) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a loaded store; of two, what changed from the first to the second, by family and key.

    Raises:
        DamagedError: A block is damaged, or a row does not fit the schema.
        RowChecksumError: A row that is checked does not fit its checksum.
    """
    schema = arrow_schema(columns_of(work.table, changes=work.changes))
    families = (store if isinstance(store, dict) else store.families.names for store in stores if store is not None)
    names = dict.fromkeys(itertools.chain.from_iterable(families))
    for family in names if work.family is None else names.keys() & {work.family}:
        chunks = (_chunks(store, family, share=len(stores)) for store in stores)
        for arrays in _change_columns(work, family, *chunks) if work.changes else _columns_of(work, family, *chunks):
            count = len(arrays[-1])
            values = (work.id.operator, work.id.partition, work.id.store)
            head = [pa.repeat(pa.scalar(v, of), count) for v, (_, of, _) in zip(values, _STORE, strict=True)]
            yield pa.RecordBatch.from_arrays([*head, *arrays], schema=schema)


def _chunks(store: LoadedState | LookedUp | None, family: str, *, share: int) -> Iterator[list[Pair]]:
    if isinstance(store, dict):
        return iter([rows] if (rows := store.get(family)) else [])
    if store is None or family not in store.families:
        return iter(())
    return store.chunks(family, rows_max=BATCH_ROWS_MAX // share, bytes_max=BATCH_BYTES_MAX // share)


def _columns_of(work: StoreWork, family: str, chunks: Iterator[list[Pair]]) -> Iterator[list[pa.Array]]:
    for pairs in chunks:
        parts = (
            [split_bytes(family, pairs)] if work.table is None else split_typed(work.table, pairs, subject=work.subject)
        )
        for arrays in parts:
            yield [pa.repeat(pa.scalar(work.version, pa.int64()), len(arrays[-1])), *arrays]


def _change_columns(
    work: StoreWork, family: str, before: Iterator[list[Pair]], after: Iterator[list[Pair]]
) -> Iterator[list[pa.Array]]:
    for changes in diff_pairs(before, after):
        kinds = pa.array(["added" if b is None else "removed" if a is None else "changed" for _, b, a in changes])
        keys, *values = ([change[part] for change in changes] for part in range(3))
        if work.table is None:
            families = pa.repeat(pa.scalar(family, pa.string()), len(changes))
            yield [kinds, families, *(pa.array(column, pa.binary()) for column in (keys, *values))]
            continue
        arrays = [kinds, *decode_keys(work.table, [key for key, _, _ in changes], subject=work.subject)]
        if work.table.kind != "timer":  # which is in its key, whole
            arrays += [decode_values(work.table, column, subject=work.subject) for column in values]
        yield arrays


def diff_pairs(before: Iterator[list[Pair]], after: Iterator[list[Pair]]) -> Iterator[list[Change]]:
    """Yield what changed from some rows to others, both in the order of their keys; a chunk of either is held."""
    for first, second in align_chunks(before, after):
        old, new = dict(first), dict(second)
        differing = sorted({key for key, _ in old.items() ^ new.items()})
        if differing:
            yield [(key, old.get(key), new.get(key)) for key in differing]


# ---------------------------------------------------------------------- files

Row = dict[str, Any]
Work = TypeVar("Work")

FILES_COLUMNS: Final[tuple[Column, ...]] = (
    *_STORE,
    *columns(version="long", unique_id="string", kind="string", path="string", size_bytes="long"),
    *columns(modified_at="timestamp", needed="boolean", blake3="string"),
    ("blobs", *types_of(ArrayType(AtomType("string"), contains_null=True))),
)
_BATCH: Final = r"(?P<batch>[0-9]{1,18})"
_OPERATOR: Final = r"state/(?P<operator>[0-9]{1,9})"
# The files of the query itself, by kind.
_QUERY_KINDS: Final = {
    "metadata": r"metadata",
    "source": r"sources/(.+/)?[^/.][^/]*",
    "offsets": rf"offsets/{_BATCH}",
    "commits": rf"commits/{_BATCH}",
    "operator metadata": rf"{_OPERATOR}/_metadata/(metadata|v2/{_BATCH})",
    "state schema": rf"{_OPERATOR}/_stateSchema/[^/]+/[^/.][^/]*",
    "foreign": rf"({_OPERATOR}/)?.*",
}


class FilesWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one task lists: the directory of a store, or all that is in none."""

    place: CheckpointPlace | BackupPlace
    batch: int
    store: StoreAt | None = None
    # Directories that other tasks list.
    left_out: tuple[str, ...] = ()


def plan_files(options: SourceOptions) -> tuple[FilesWork, ...]:
    """Return what there is to list. Raises as `plan_state`."""
    query = plan_state(msgspec.structs.replace(options, rows="bytes", max_partition_bytes=0), options.batch)
    works = tuple(FilesWork(place=read.place, batch=query.batch, store=read.store) for read in query.stores)
    if options.chooses_stores:
        return works
    left_out = tuple(read.store.id.path for read in query.stores)
    return (*works, FilesWork(place=query.place.of(), batch=query.batch, left_out=left_out))


def file_rows(work: FilesWork) -> Iterator[Row]:
    """Yield the rows of one task."""
    store = work.store
    if isinstance(work.place, BackupPlace):
        with work.place.open_store(store.id if store else None) as (_, files):
            for parts, entry in files_of(files.index.dir):
                yield _describe(work, "/".join(parts), needed=True) | {
                    "size_bytes": entry.metadata.size_bytes,
                    "modified_at": entry.metadata.modified_at_ns // 1000,
                    "blake3": entry.blake3.hex(),
                    "blobs": [blob.key for blob in entry.blobs],
                }
        return
    path = "" if store is None else store.id.path
    with work.place.open_logs() as (loop, directory):
        needed = loop.run(_find_needed(directory.child(path), store)) if store else None
        for status in loop.run(_walk(directory, path, work.left_out)):
            below = status.path.removeprefix(f"{path}/")
            yield _describe(work, below, needed=None if needed is None else below in needed) | {
                "size_bytes": status.size_bytes,
                "modified_at": status.modified_at_ms * 1000,
            }


async def _walk(directory: CheckpointDir, path: str, left_out: Sequence[str]) -> Sequence[FileStatus]:
    if not any(of.startswith(f"{path}/" if path else "") for of in left_out):
        return () if path in left_out else await directory.walk(path)
    found: list[FileStatus] = []
    for status in await directory.list(path):
        found += await _walk(directory, status.path, left_out) if status.is_directory else [status]
    return found


def _describe(work: FilesWork, path: str, *, needed: bool | None) -> Row:
    """Describe a file by its path, from the directory of the store or from the root of the checkpoint.

    Whether the batch takes one of the query's own files its name says, unless `needed` is true.
    """
    if work.store is None:
        kind, found = next((k, m) for k, of in _QUERY_KINDS.items() if (m := re.fullmatch(of, path, re.DOTALL)))
        batch, operator = (found.groupdict().get(name) for name in ("batch", "operator"))
        return {
            "path": path,
            "kind": kind,
            "operator": None if operator is None else int(operator),
            # Of the logs: the state that a batch makes is of the next version.
            "version": None if batch is None else int(batch) + 1,
            "needed": needed or (kind != "foreign" and belongs(tuple(path.split("/")), work.batch, work.batch)),
        }
    of = work.store.id
    row: Row = {**msgspec.structs.asdict(of), "path": f"{of.path}/{path}", "needed": needed, "kind": "foreign"}
    if (parsed := parse_state_name(path)) is not None:
        of_version = {"version": parsed.of.version, "unique_id": parsed.of.unique_id}
        return row | of_version | {"kind": "checksum" if parsed.checksum else parsed.kind}
    if path == SCHEMA_PATH:
        return row | {"kind": "schema"}
    if is_shared_path(path) or needed:
        row["kind"] = "sst" if path.startswith(f"{SSTS}/") else "log"
    return row


async def _find_needed(files: StateFiles, store: StoreAt) -> frozenset[str] | None:
    """Return what a version of a store takes, as paths in its directory; None if that is damaged."""
    manager = StateFileManager(files, store.settings)
    try:
        resolution = await manager.resolve(store.at.version, store.at.unique_id)
        names = [changelog_name(of) for of in resolution.changelogs]
        shared: list[str] = []
        if resolution.base is not None:
            names.append(snapshot_name(resolution.base))
        if resolution.rocksdb_snapshot is not None:
            metadata = (await manager.read_snapshot(resolution.rocksdb_snapshot)).metadata
            shared = [file.path for file in (*metadata.sst_files, *metadata.log_files)]
    except (FormatError, EngineError):
        return None
    return frozenset([*names, *map(checksum_name, names), *shared, SCHEMA_PATH])


# ---------------------------------------------------------------------- sources

_PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"

# Filters that are carried out here, on columns that name the store of a row and are never null; others are Spark's.
_COMPARED: Final[dict[type[datasource.Filter], Callable[[Any, Any], bool]]] = {
    datasource.EqualTo: operator.eq,
    datasource.EqualNullSafe: operator.eq,
    datasource.GreaterThan: operator.gt,
    datasource.GreaterThanOrEqual: operator.ge,
    datasource.LessThan: operator.lt,
    datasource.LessThanOrEqual: operator.le,
    datasource.In: lambda value, wanted: value in wanted,
    datasource.StringStartsWith: str.startswith,
    datasource.StringEndsWith: str.endswith,
    datasource.StringContains: operator.contains,
}


def can_filter(of: datasource.Filter, names: Collection[str]) -> bool:
    """Return whether a filter that Spark pushes down is carried out here, on one of some columns."""
    attribute: tuple[str, ...] = getattr(of, "attribute", ())
    return type(of) in _COMPARED and len(attribute) == 1 and attribute[0] in names


def filter_holds(of: datasource.Filter, values: Mapping[str, object]) -> bool:
    """Return whether a filter that `can_filter` has taken lets rows with these values through."""
    return _COMPARED[type(of)](values[of.attribute[0]], of.value)  # type: ignore[attr-defined]  # all of these have both


def wanted_keys(table: Table, filters: Sequence[datasource.Filter]) -> tuple[bytes, ...] | None:
    """Return the only keys that filters let through, where they say all fields of a key; else None."""
    wanted: dict[str, Sequence[Any]] = {}
    for of in filters:
        match of:
            case datasource.EqualTo(("key", name), value):
                wanted[name] = (value,)
            case datasource.In(("key", name), values):
                wanted[name] = tuple(values)
    return encode_keys(table, wanted)


def register_sources(spark: SparkSession, *, push_filters: bool = False) -> None:
    """Let a session read `tidemark_state`, `tidemark_state_diff` and `tidemark_files`.

    Which stores are read is best chosen by the options `operator`, `partition` and `store`.

    Args:
        spark: The session; others of the same application do not know them.
        push_filters: Let Spark push down filters on operator, partition, store and version of state, and those that say
            all of a key, which is then looked up in place (design 0013). It is a setting of the session for all sources
            written in Python. Spark up to 4.3 reads *every* use of a DataFrame with the filters of whichever use was
            planned last: then make a new DataFrame, with `load`, for each filter.
    """
    sources: tuple[type[datasource.DataSource], ...] = (StateSource, DiffSource, FilesSource)
    if push_filters:
        sources = (PushingStateSource, PushingDiffSource, FilesSource)
        spark.conf.set(_PUSHDOWN, "true")
    for source in sources:
        spark.dataSource.register(source)


class _Reader(datasource.DataSourceReader, Generic[Work]):
    """Reads works, one or several a partition, which say what a task reads: beside them the class alone travels."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    @override
    def __getstate__(self) -> dict[str, object]:
        return {}

    @override
    def partitions(self) -> Sequence[datasource.InputPartition]:
        return [datasource.InputPartition(works) for works in self.groups()]

    def groups(self) -> Sequence[tuple[Work, ...]]:
        return [(work,) for work in self._works]

    @override
    def read(self, partition: datasource.InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is not None:  # Spark's own partition, if filters left none
            with noting_hints():
                yield from self.batches(partition.value)

    def batches(self, works: Sequence[Work]) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError


class StoresReader(_Reader[StoreWork]):
    """Read stores, small ones together as one partition."""

    def __init__(self, works: Sequence[StoreWork], max_partition_bytes: int) -> None:
        super().__init__(works)
        self._max_partition_bytes = max_partition_bytes

    @override
    def groups(self) -> Sequence[tuple[StoreWork, ...]]:
        return group_works(self._works, self._max_partition_bytes)

    @override
    def batches(self, works: Sequence[StoreWork]) -> Iterator[pa.RecordBatch]:
        # All that a DataFrame reads is in one place.
        with next(read.place for work in works for read in work.reads if read).kept_open():
            for work in works:
                with contextlib.ExitStack() as stack:
                    stores: list[LoadedState | LookedUp | None] = []
                    for read in work.reads:
                        if read is None:
                            stores.append(None)
                        elif work.keys is None:
                            stores.append(stack.enter_context(load_store(read)))
                        else:
                            stores.append(look_up(read, work.keys, work.family))
                    yield from batches_of(work, stores)


class PushingReader(StoresReader):
    """The same, which lets Spark push filters down: see `register_sources`."""

    @override
    def pushFilters(self, filters: list[datasource.Filter]) -> list[datasource.Filter]:
        taken = [of for of in filters if self._works and can_filter(of, self._works[0].columns())]
        self._works = [work for work in self._works if all(filter_holds(of, work.columns()) for of in taken)]
        if self._works and (table := self._works[0].table) and (keys := wanted_keys(table, filters)) is not None:
            # Spark looks at them once more: other filters on keys say less than these.
            self._works = [msgspec.structs.replace(work, keys=keys) for work in self._works]
        return [of for of in filters if of not in taken]


class FilesReader(_Reader[FilesWork]):
    """List the files of each store as one partition, and all others as one."""

    @override
    def batches(self, works: Sequence[FilesWork]) -> Iterator[pa.RecordBatch]:
        for work in works:
            yield pa.RecordBatch.from_pylist(list(file_rows(work)), schema=arrow_schema(FILES_COLUMNS))


class _Source(datasource.DataSource):
    source: ClassVar[str]

    @classmethod
    @override
    def name(cls) -> str:
        return cls.source

    def parsed(self) -> SourceOptions:
        return SourceOptions.parse(self.options, self.source)


class _StoresSource(_Source):
    """Rows of stores as planned once: the batch and the schema stay, also when the query has gone on meanwhile."""

    reads_by: ClassVar[type[StoresReader]] = StoresReader

    @functools.cached_property
    def plan(self) -> ReadPlan:
        raise NotImplementedError

    @override
    def schema(self) -> StructType:
        with noting_hints():
            return spark_schema(columns_of(self.plan.table, changes=self.plan.changes))

    @override
    def reader(self, schema: StructType) -> datasource.DataSourceReader:
        with noting_hints():
            return self.reads_by(self.plan.works, self.plan.max_partition_bytes)


class StateSource(_StoresSource):
    """Rows of state, of a checkpoint or of a checkpoint backup.

    Options:
        checkpoint: The checkpointLocation of a query: a path, or a URL; or `load(path)`.
        repository: Instead of it, the URL of a repository with checkpoint backups.
        job: Of the repository; needed only if several have checkpoint backups.
        batch: A committed one; the newest if not given, chosen when the DataFrame is made.
        operator: Only this one.
        partition: Only these, such as `3` or `0,5`.
        store: Only stores of this name.
        family: Only this column family: a state variable of transformWithState, its timers, or a table of a join.
        s3.endpoint_url, s3.path_style, …: How an S3 store is reached, as `S3Settings`. No credentials.
        rows: `typed` or `bytes`. By default typed, if all that is read is one table that has a schema.
        max_partition_bytes: Stores are read by one task up to this size of their files together, by default 32 MiB; 0:
            each by its own.

    Columns: operator, partition, store, version, then typed rows as key and value, others as family, key and value. A
    list has a `list_element` in each row, a map `user_map_key` and `user_map_value`, and a timer
    `expiration_timestamp_ms`.
    """

    source = "tidemark_state"

    @functools.cached_property
    @override
    def plan(self) -> ReadPlan:
        options = self.parsed()
        return plan_read(options, options.batch)


class DiffSource(_StoresSource):
    """What changed in the state of a query between two of its batches.

    Options:
        from_batch, to_batch: Committed ones; the state is what they left. `to_batch` is the newest if not given.
        checkpoint, repository, job, operator, partition, store, family, rows, max_partition_bytes: As for
            `tidemark_state`.

    Columns: operator, partition, store, change (`added`, `removed` or `changed`), then for typed rows key, before and
    after, a list being an array, and timers having neither; for others family, key, before and after. What was not
    there is null.
    """

    source = "tidemark_state_diff"

    @functools.cached_property
    @override
    def plan(self) -> ReadPlan:
        options = self.parsed()
        if options.from_batch is None:
            hint = "name a committed batch"
            raise UsageError("is not given", operation=self.source, subject="from_batch", hint=hint)
        return plan_read(options, options.from_batch, options.to_batch)


class PushingStateSource(StateSource):
    """The same, whose reader lets Spark push filters down."""

    reads_by: ClassVar[type[StoresReader]] = PushingReader


class PushingDiffSource(DiffSource):
    """The same, whose reader lets Spark push filters down."""

    reads_by: ClassVar[type[StoresReader]] = PushingReader


class FilesSource(_Source):
    """The files of a checkpoint or of a checkpoint backup: what each is, and whether a batch needs it.

    Options:
        checkpoint, repository, job, batch, operator, partition, store: As for `tidemark_state`. Files outside of the
            directories of the batch's stores are left out if an operator, a partition or a store is chosen.

    Columns: operator, partition, store, version, unique_id, kind, path (from the root of the checkpoint), size_bytes,
    modified_at, needed (null if what the batch takes is damaged; true in a backup), and of a backup blake3 and blobs.
    `foreign` is the kind of what is not Spark's, and of what is in the directory of no store of the batch.
    """

    source = "tidemark_files"

    @override
    def schema(self) -> StructType:
        return spark_schema(FILES_COLUMNS)

    @override
    def reader(self, schema: StructType) -> datasource.DataSourceReader:
        with noting_hints():
            return FilesReader(plan_files(self.parsed()))

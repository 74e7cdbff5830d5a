"""`spark.read.format("tidemark_files")`: every file of a checkpoint, or of a picture of one (design 0005, D3)."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType
from typing_extensions import override

from engine.spark.file_rows import (
    DDL,
    FileRow,
    batch_of,
    find_needed,
    index_files,
    list_partition,
    list_partitions,
    list_query,
    query_row,
    store_row,
)
from engine.spark.source_filters import StoreFilters
from engine.spark.source_options import FILES_OPTIONS, SourceOptions, hints_told
from engine.spark.state_places import CheckpointPlace, PicturePlace, find_place, scratch_dir
from engine.spark.state_rows import STORE_COLUMNS
from engine.state.files import as_state_files
from engine.state.streaming_checkpoint import StoreAt, StreamingCheckpoint
from index.picture import QUERY_STORE, QUERY_TASK, StoreId

NAME: Final = "tidemark_files"


class FilesWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a task lists: a partition of an operator, a store of a picture, or the query's own files."""

    place: CheckpointPlace | PicturePlace
    batch: int
    # Both None: the query's own.
    operator: int | None = None
    partition: int | None = None
    # What the batch has of it.
    stores: tuple[StoreAt, ...] = ()


class FilesSource(DataSource):
    """The files of a checkpoint or of a picture: what each is, and whether a batch needs it.

    Options:
        checkpoint, repository, job, batch, operator, partition, store: As for `tidemark_state`. The files of the query
            itself are left out if a store is chosen.

    Columns: operator, partition, store, version, unique_id, kind, path (from the root of the checkpoint), size_bytes,
    modified_at, needed (null if what the batch takes is damaged), and of a picture blake3 and blobs. `foreign` is the
    kind of what Spark has not written there, or writes and forgets.
    """

    @classmethod
    @override
    def name(cls) -> str:
        return NAME

    @override
    def schema(self) -> str:
        with hints_told():
            self._plan()
        return DDL

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        with hints_told():
            return FilesReader(*self._plan())

    def _plan(self) -> tuple[SourceOptions, tuple[FilesWork, ...]]:
        found: tuple[SourceOptions, tuple[FilesWork, ...]] | None = getattr(self, "_planned", None)
        if found is None:
            options = SourceOptions.parse(self.options, source=NAME, also=FILES_OPTIONS)
            found = self._planned = (options, plan_files(options))
        return found


class FilesReader(DataSourceReader):
    """One partition of an operator is one partition."""

    def __init__(self, options: SourceOptions, works: tuple[FilesWork, ...]) -> None:
        self._options = options
        self._works = works
        self._filters = StoreFilters(STORE_COLUMNS)

    @override
    def partitions(self) -> Sequence[InputPartition]:
        wanted = [work for work in self._works if self._filters.accept(_columns(work))]
        return [InputPartition(work) for work in wanted]

    @override
    def __getstate__(self) -> dict[str, object]:
        # What is left of a partition after it was chosen depends on these; all else a task is told by its partition.
        return {"_options": self._options, "_filters": self._filters}

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        work: FilesWork | None = partition.value
        if work is not None:
            with hints_told():
                yield batch_of(row for row in read_files(work) if self._wants(row))

    def _wants(self, row: FileRow) -> bool:
        of = (row.operator, row.partition, row.store)
        if None not in of and not self._options.chooses(StoreId(*of)):  # type: ignore[arg-type]  # none is None
            return False
        return self._filters.accept({name: getattr(row, name) for name in STORE_COLUMNS})


class PushingFilesReader(FilesReader):
    """The same, which lets Spark push filters down: see `register_sources`."""

    @override
    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        return self._filters.take(filters)


class PushingFilesSource(FilesSource):
    """The same, whose reader lets Spark push filters down."""

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        with hints_told():
            return PushingFilesReader(*self._plan())


def plan_files(options: SourceOptions) -> tuple[FilesWork, ...]:
    """What there is to list, and what the batch has of it.

    Raises:
        As `StreamingCheckpoint.at`, and as `find_place`.
    """
    place = find_place(options, options.batch)
    with scratch_dir() as scratch, place.open_logs(scratch) as (loop, directory):
        query = loop.run(StreamingCheckpoint(directory).at(options.batch))
        if isinstance(place, CheckpointPlace):
            there = loop.run(list_partitions(directory))
        else:
            there = [(store.id.operator, store.id.partition) for store in query.stores]
    works = []
    for operator, partition in sorted(set(there)):
        stores = tuple(s for s in query.stores if (s.id.operator, s.id.partition) == (operator, partition))
        is_chosen = options.operator in {None, operator} and (not options.partitions or partition in options.partitions)
        if is_chosen:
            own = place.of(*(store.id for store in stores))
            works.append(FilesWork(place=own, batch=query.batch, operator=operator, partition=partition, stores=stores))
    if options.operator is None and options.store is None and not options.partitions:
        works.append(FilesWork(place=place.of_query(), batch=query.batch))
    return tuple(works)


def read_files(work: FilesWork) -> Iterator[FileRow]:
    """The rows of one partition."""
    if isinstance(work.place, PicturePlace):
        yield from _read_picture(work.place, work)
        return
    with work.place.open_root() as (loop, directory):
        if work.operator is None or work.partition is None:
            for file in loop.run(list_query(directory)):
                yield query_row(file, work.batch)
            return
        stores = {store.id: store for store in work.stores}
        for of, files in loop.run(list_partition(directory, work.operator, work.partition)).items():
            needed: frozenset[str] | None = frozenset()
            if of in stores:
                needed = loop.run(find_needed(as_state_files(directory.child(of.path)), stores[of]))
            for file in files:
                yield store_row(of, file, needed)


def _read_picture(place: PicturePlace, work: FilesWork) -> Iterator[FileRow]:
    if work.operator is None:
        with place.open_index(QUERY_TASK, QUERY_STORE) as (_, files):
            for file in index_files(files, ""):
                yield query_row(file, work.batch)
        return
    for store in work.stores:
        with place.open_index(store.id.task, store.id.store) as (loop, files):
            needed = loop.run(find_needed(files, store))
            for file in index_files(files, store.id.path):
                yield store_row(store.id, file, needed)


def _columns(work: FilesWork) -> dict[str, object]:
    """What all rows of a partition have in common."""
    known: dict[str, object] = {"partition": work.partition}
    if work.operator is not None:
        known["operator"] = work.operator
    else:
        known["store"] = None
    return known

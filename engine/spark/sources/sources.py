"""The data sources of PySpark: state after a batch, what changed between two, and files (design 0005, D1 to D3)."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType
from typing_extensions import override

from engine.spark.sources.files import FILES_SCHEMA, FilesWork, file_rows, plan_files
from engine.spark.sources.filters import StoreFilters
from engine.spark.sources.options import DIFF_OPTIONS, FILES_OPTIONS, STATE_OPTIONS, SourceOptions, noting_hints
from engine.spark.sources.plan import ReadPlan, StoreWork, load_store, plan_diff, plan_state
from engine.spark.sources.rows import batches_of, spark_schema

_PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"


def register_sources(spark: SparkSession, *, push_filters: bool = False) -> None:
    """Let a session read `tidemark_state`, `tidemark_state_diff` and `tidemark_files`.

    Which stores are read is best chosen by the options `operator`, `partition` and `store`.

    Args:
        spark: The session; others of the same application do not know them.
        push_filters: Let Spark push filters on operator, partition, store and version of state down, which is a setting
            of the session for all sources written in Python. Spark up to 4.3 reads *every* use of a DataFrame with the
            filters of whichever use was planned last: then make a new DataFrame, with `load`, for each filter.
    """
    sources: tuple[type[DataSource], ...] = (StateSource, DiffSource, FilesSource)
    if push_filters:
        sources = (PushingStateSource, PushingDiffSource, FilesSource)
        spark.conf.set(_PUSHDOWN, "true")
    for source in sources:
        spark.dataSource.register(source)


class _Reader(DataSourceReader):
    """What travels to every task is the class alone: its partition says what a task reads."""

    @override
    def __getstate__(self) -> dict[str, object]:
        return {}


class StoresReader(_Reader):
    """Read stores, each as one partition."""

    def __init__(self, plan: ReadPlan) -> None:
        self._works = plan.works
        self._filters = StoreFilters(plan.filtered)

    @override
    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(work) for work in self._works if self._filters.accept(work.columns())]

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        work: StoreWork | None = partition.value
        if work is not None:  # Spark's own partition, if filters left none
            with noting_hints(), contextlib.ExitStack() as stack:
                stores = [stack.enter_context(load_store(read)) if read else None for read in work.reads]
                yield from batches_of(work, stores)


class PushingReader(StoresReader):
    """The same, which lets Spark push filters down: see `register_sources`."""

    @override
    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        return self._filters.take(filters)


class _StoresSource(DataSource):
    """Rows of stores as planned once: the batch and the schema stay, also when the query has gone on meanwhile."""

    pushes_filters: ClassVar[bool] = False

    def _make_plan(self) -> ReadPlan:
        raise NotImplementedError

    def _plan(self) -> ReadPlan:
        found: ReadPlan | None = getattr(self, "_planned", None)
        if found is None:
            found = self._planned = self._make_plan()
        return found

    @override
    def schema(self) -> StructType:
        with noting_hints():
            plan = self._plan()
            return spark_schema(plan.table, changes=plan.changes)

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        with noting_hints():
            return (PushingReader if self.pushes_filters else StoresReader)(self._plan())


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
        s3.endpoint_url, s3.path_style, …: How an S3 store is reached, as `S3Settings`. No credentials.
        rows: `typed` or `bytes`. By default typed, if all that is read is one table that has a schema.

    Columns: operator, partition, store, version, then typed rows as key and value, others as family, key and value.
    """

    @classmethod
    @override
    def name(cls) -> str:
        return "tidemark_state"

    @override
    def _make_plan(self) -> ReadPlan:
        options = SourceOptions.parse(self.options, source=self.name(), also=STATE_OPTIONS)
        query = plan_state(options, options.batch)
        works = tuple(StoreWork(id=read.id, reads=(read,), table=query.table) for read in query.stores)
        return ReadPlan(works=works, table=query.table)


class DiffSource(_StoresSource):
    """What changed in the state of a query between two of its batches.

    Options:
        from_batch, to_batch: Committed ones; the state is what they left. `to_batch` is the newest if not given.
        checkpoint, repository, job, operator, partition, store, rows: As for `tidemark_state`.

    Columns: operator, partition, store, change (`added`, `removed` or `changed`), then for typed rows key, before and
    after; for others family, key, before and after. What was not there is null.
    """

    @classmethod
    @override
    def name(cls) -> str:
        return "tidemark_state_diff"

    @override
    def _make_plan(self) -> ReadPlan:
        return plan_diff(SourceOptions.parse(self.options, source=self.name(), also=DIFF_OPTIONS), source=self.name())


class PushingStateSource(StateSource):
    """The same, whose reader lets Spark push filters down."""

    pushes_filters = True


class PushingDiffSource(DiffSource):
    """The same, whose reader lets Spark push filters down."""

    pushes_filters = True


class FilesSource(DataSource):
    """The files of a checkpoint or of a checkpoint backup: what each is, and whether a batch needs it.

    Options:
        checkpoint, repository, job, batch, operator, partition, store: As for `tidemark_state`. Files outside of the
            directories of the batch's stores are left out if an operator, a partition or a store is chosen.

    Columns: operator, partition, store, version, unique_id, kind, path (from the root of the checkpoint), size_bytes,
    modified_at, needed (null if what the batch takes is damaged; true in a backup), and of a backup blake3 and blobs.
    `foreign` is the kind of what is not Spark's, and of what is in the directory of no store of the batch.
    """

    @classmethod
    @override
    def name(cls) -> str:
        return "tidemark_files"

    @override
    def schema(self) -> str:
        return ", ".join(f"{name} {spark}" for name, (spark, _) in FILES_SCHEMA.items())

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        with noting_hints():
            return FilesReader(plan_files(SourceOptions.parse(self.options, source=self.name(), also=FILES_OPTIONS)))


class FilesReader(_Reader):
    """List the files of each store as one partition, and all others as one."""

    def __init__(self, works: Sequence[FilesWork]) -> None:
        self._works = works

    @override
    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(work) for work in self._works]

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        work: FilesWork | None = partition.value
        if work is not None:
            arrow = pa.schema([pa.field(name, of) for name, (_, of) in FILES_SCHEMA.items()])
            with noting_hints():
                yield pa.RecordBatch.from_pylist(list(file_rows(work)), schema=arrow)

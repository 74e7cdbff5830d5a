"""`spark.read.format("tidemark_state")`: the rows of a query's state after a batch (design 0005, D1 to D3)."""

from collections.abc import Iterator, Sequence

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType
from typing_extensions import override

from engine.spark.sources.filters import StoreFilters
from engine.spark.sources.options import STATE_OPTIONS, SourceOptions, hints_told
from engine.spark.sources.plan import StatePlan, StoreRead, Table, load_store, plan_state
from engine.spark.sources.rows import STORE_COLUMNS, spark_schema, state_batches

NAME = "tidemark_state"


class StateSource(DataSource):
    """Rows of state, of a checkpoint or of a backup of one.

    Options:
        checkpoint: The checkpointLocation of a query: a path, or a URL; or `load(path)`.
        repository: Instead of it, the URL of a repository with backups.
        job: Of the repository; needed only if several have backups.
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
        return NAME

    @override
    def schema(self) -> StructType:
        with hints_told():
            return spark_schema(self._plan().table, ("key", "value"))

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        with hints_told():
            return StateReader(self._plan())

    def _plan(self) -> StatePlan:
        """Made once: what is read is what the schema is of, also when the query has gone on meanwhile."""
        found: StatePlan | None = getattr(self, "_planned", None)
        if found is None:
            options = SourceOptions.parse(self.options, source=NAME, also=STATE_OPTIONS)
            found = self._planned = plan_state(options, options.batch)
        return found


class StateReader(DataSourceReader):
    """One store is one partition."""

    def __init__(self, plan: StatePlan) -> None:
        self._plan = plan
        self._filters = StoreFilters(STORE_COLUMNS)

    @override
    def partitions(self) -> Sequence[InputPartition]:
        wanted = [read for read in self._plan.stores if self._filters.accept(_columns(read))]
        return [InputPartition(StateWork(read=read, table=self._plan.table)) for read in wanted]

    @override
    def __getstate__(self) -> dict[str, object]:
        # What travels to every task: each is told what it reads by its partition.
        return {}

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        work: StateWork | None = partition.value
        if work is not None:  # Spark's own partition, if filters left none
            with hints_told(), load_store(work.read) as store:
                yield from state_batches(work.read, store, work.table)


class PushingStateReader(StateReader):
    """The same, which lets Spark push filters down: see `register_sources`."""

    @override
    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        return self._filters.take(filters)


class PushingStateSource(StateSource):
    """The same, whose reader lets Spark push filters down."""

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        with hints_told():
            return PushingStateReader(self._plan())


class StateWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a task reads."""

    read: StoreRead
    table: Table | None


def _columns(read: StoreRead) -> dict[str, object]:
    of = read.id
    return {"operator": of.operator, "partition": of.partition, "store": of.store, "version": read.version}

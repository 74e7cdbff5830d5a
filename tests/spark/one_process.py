"""What the collection asks of a Spark session, carried out in this process: its tasks run for real, and fast."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import SparkSession
from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.opening import StoreSettings
from engine.blocking import LoopThread
from engine.collect.backend import NO_OPTIONS, CollectOptions
from engine.repository.repository import Repository, SyncRepository
from engine.settings import TransferSettings
from engine.spark.access import Access
from engine.spark.collection.backend import SparkBackend
from engine.spark.collection.tasks import Row, batch_of, rows_of
from index.snapshot.model import RepositoryRecord

# Few, so that the rows of one shard come in several batches.
ROWS_PER_BATCH = 7

_stores: list[BlobStore] = []
# Of each shuffle, into how many tasks.
tasks_started: list[int] = []


class HereAccess(Access, frozen=True, kw_only=True):
    """Tasks that work on a store of this process."""

    @override
    def open(self) -> SyncRepository:
        return SyncRepository(LoopThread(), Repository(_stores[int(self.url)], self.record, settings=self.transfer))


class Frame:
    """Rows that are worked out when they are asked for."""

    def __init__(self, work_out: Callable[[], list[Row]]) -> None:
        self._work_out = work_out

    def _then(self, change: Callable[[list[Row]], list[Row]]) -> "Frame":
        return Frame(lambda: change(self._work_out()))

    def selectExpr(self, *_: str) -> "Frame":  # noqa: N802
        return self

    def select(self, *_: str) -> "Frame":
        return self

    def repartitionById(self, count: int, _: str) -> "Frame":  # noqa: N802
        tasks_started.append(count)
        return self

    def sortWithinPartitions(self, _: str) -> "Frame":  # noqa: N802
        return self._then(lambda rows: sorted(rows, key=lambda row: row.position))

    def union(self, other: "Frame") -> "Frame":
        return self._then(lambda rows: rows + other._work_out())

    def where(self, condition: str) -> "Frame":
        return self._then(lambda rows: [row for row in rows if f"'{row.kind}'" in condition])

    def mapInArrow(self, task: Callable[..., Iterator[pa.RecordBatch]], _: str) -> "Frame":  # noqa: N802
        def work(rows: list[Row]) -> list[Row]:
            starts = range(0, len(rows), ROWS_PER_BATCH)
            return list(rows_of(task(batch_of(rows[start : start + ROWS_PER_BATCH]) for start in starts)))

        return self._then(work)

    def localCheckpoint(self, **_: object) -> "Frame":  # noqa: N802
        rows = self._work_out()
        return Frame(lambda: rows)

    def toArrow(self) -> pa.Table:  # noqa: N802
        return pa.Table.from_batches([batch_of(self._work_out())])

    def toLocalIterator(self) -> Iterator[Row]:  # noqa: N802
        return iter(self._work_out())


class OneProcessSpark:
    """Makes frames."""

    def createDataFrame(self, table: pa.Table, schema: object = None) -> Frame:  # noqa: N802
        rows = list(rows_of(iter(table.drop_columns("partition").to_batches())))
        return Frame(lambda: rows)


def backend_on(
    store: BlobStore, record: RepositoryRecord, options: CollectOptions = NO_OPTIONS, **settings: Any
) -> SparkBackend:
    """Return a backend whose tasks work on a store of this process."""
    _stores.append(store)
    access = HereAccess(url=str(len(_stores) - 1), record=record, store=StoreSettings(), transfer=TransferSettings())
    session = cast("SparkSession", OneProcessSpark())
    return SparkBackend(session, access, store, options, **({"partitions_max": 3, "cores": 2} | settings))

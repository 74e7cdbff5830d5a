"""`spark.read.format("tidemark_state_diff")`: what changed in the state from one batch to another, as rows."""

import contextlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType
from typing_extensions import override

from engine.errors import UsageError
from engine.spark.sources.filters import StoreFilters
from engine.spark.sources.options import DIFF_OPTIONS, SourceOptions, hints_told
from engine.spark.sources.plan import StoreRead, Table, load_store, plan_state
from engine.spark.sources.rows import (
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    decode_keys,
    row_fields,
    spark_schema,
    store_columns,
)
from engine.spark.sources.unsafe_rows import decode_rows
from engine.state.store import StateStore
from index.spark.checkpoint import StoreId

NAME: Final = "tidemark_state_diff"
_NAMES: Final = ("key", "before", "after")
_FILTERED: Final = ("operator", "partition", "store")

Pair: TypeAlias = tuple[bytes, bytes]
# Key, the value before, the value after: None where there was none.
Change: TypeAlias = tuple[bytes, bytes | None, bytes | None]


class DiffPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Every store that there is at either batch."""

    works: tuple["DiffWork", ...]
    table: Table | None


class DiffWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a task compares."""

    id: StoreId
    # None: the query had no such store at that batch.
    before: StoreRead | None
    after: StoreRead | None
    table: Table | None


class DiffSource(DataSource):
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
        return NAME

    @override
    def schema(self) -> StructType:
        with hints_told():
            return spark_schema(self._plan().table, _NAMES, change=True)

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        with hints_told():
            return DiffReader(self._plan())

    def _plan(self) -> DiffPlan:
        found: DiffPlan | None = getattr(self, "_planned", None)
        if found is None:
            found = self._planned = plan_diff(SourceOptions.parse(self.options, source=NAME, also=DIFF_OPTIONS))
        return found


class DiffReader(DataSourceReader):
    """One store is one partition."""

    def __init__(self, plan: DiffPlan) -> None:
        self._plan = plan
        self._filters = StoreFilters(_FILTERED)

    @override
    def partitions(self) -> Sequence[InputPartition]:
        works = [work for work in self._plan.works if self._filters.accept(msgspec.structs.asdict(work.id))]
        return [InputPartition(work) for work in works]

    @override
    def __getstate__(self) -> dict[str, object]:
        # As of the reader of state.
        return {}

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        work: DiffWork | None = partition.value
        if work is not None:
            with hints_told(), contextlib.ExitStack() as stack:
                before, after = (
                    None if read is None else stack.enter_context(load_store(read))
                    for read in (work.before, work.after)
                )
                yield from diff_batches(work, before, after)


class PushingDiffReader(DiffReader):
    """The same, which lets Spark push filters down: see `register_sources`."""

    @override
    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        return self._filters.take(filters)


class PushingDiffSource(DiffSource):
    """The same, whose reader lets Spark push filters down."""

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        with hints_told():
            return PushingDiffReader(self._plan())


def plan_diff(options: SourceOptions) -> DiffPlan:
    """Which stores to compare, and as what.

    Raises:
        UsageError: The batches are not said, or typed rows are asked for and the stores are not one table.
        As `plan_state`.
    """
    if options.from_batch is None:
        raise UsageError("is not given", operation=NAME, subject="from_batch", hint="name a committed batch")
    before, after = plan_state(options, options.from_batch), plan_state(options, options.to_batch)
    table = before.table if before.table == after.table else None
    if table is None and options.rows == "typed":
        raise UsageError("the rows of the two batches are not alike", operation=NAME, hint="read with rows=bytes")
    first, second = ({read.id: read for read in plan.stores} for plan in (before, after))
    ids = sorted(first.keys() | second.keys())
    works = (DiffWork(id=of, before=first.get(of), after=second.get(of), table=table) for of in ids)
    return DiffPlan(works=tuple(works), table=table)


def diff_batches(work: DiffWork, before: StateStore | None, after: StateStore | None) -> Iterator[pa.RecordBatch]:
    """All changes of one store, in the order of families and keys."""
    schema = pa.schema(
        [
            pa.field("operator", pa.int32()),
            pa.field("partition", pa.int32()),
            pa.field("store", pa.string()),
            pa.field("change", pa.string()),
            *row_fields(work.table, _NAMES),
        ]
    )
    names = [name for store in (before, after) if store is not None for name in store.families]
    for family in dict.fromkeys(names):
        for changes in diff_pairs(_chunks(before, family), _chunks(after, family)):
            parts = _typed(work.table, changes, work.id) if work.table is not None else _bytes(family, changes)
            kinds = pa.array(map(_kind, changes), pa.string())
            yield pa.RecordBatch.from_arrays([*store_columns(work.id, len(changes)), kinds, *parts], schema=schema)


def diff_pairs(before: Iterator[list[Pair]], after: Iterator[list[Pair]]) -> Iterator[list[Change]]:
    """What changed from some rows to others, both in the order of their keys; nothing is held but a chunk of either.

    Up to the lower of the last keys at hand both sides are known, and compared as sets.
    """
    first, second = next(before, []), next(after, [])
    while first or second:
        ends = [rows[-1][0] for rows in (first, second) if rows]
        bound = min(ends)
        cuts = [bisect_right(rows, bound, key=itemgetter(0)) for rows in (first, second)]
        old, new = dict(first[: cuts[0]]), dict(second[: cuts[1]])
        differing = sorted({key for key, _ in old.items() ^ new.items()})
        if differing:
            yield [(key, old.get(key), new.get(key)) for key in differing]
        first = first[cuts[0] :] or next(before, [])
        second = second[cuts[1] :] or next(after, [])


def _chunks(store: StateStore | None, family: str) -> Iterator[list[Pair]]:
    if store is None or family not in store.families:
        return iter(())
    return store.chunks(family, rows_max=BATCH_ROWS_MAX // 2, bytes_max=BATCH_BYTES_MAX // 2)


def _kind(change: Change) -> str:
    _, before, after = change
    if before is None:
        return "added"
    return "removed" if after is None else "changed"


def _bytes(family: str, changes: list[Change]) -> list[pa.Array]:
    columns = [pa.array([change[part] for change in changes], pa.binary()) for part in range(len(_NAMES))]
    return [pa.repeat(pa.scalar(family, pa.string()), len(changes)), *columns]


def _typed(table: Table, changes: list[Change], of: StoreId) -> list[pa.Array]:
    columns = [decode_keys(table, [key for key, _, _ in changes], of)]
    for values in ([change[1] for change in changes], [change[2] for change in changes]):
        there = np.fromiter((value is not None for value in values), np.bool_, len(values))
        found = decode_rows(table.value, [value for value in values if value is not None], subject=f"state of {of}")
        columns.append(found.take(pa.array(np.cumsum(there) - 1, mask=~there)))
    return columns

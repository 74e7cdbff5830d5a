"""Figures of a query's state by store and by operator, and what would change them.

Each figure is there with how it was found (`Method`); None stands for what is not known, and is never counted as 0.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from index.spark.checkpoint import StoreId
from index.spark.requests import Prices, RequestRate
from index.spark.state_rows import GROUPS_SHOWN, FamilyFigures, KeyGroup, RowAges

# `counted`: every row was read. `snapshot`: the count in a snapshot's metadata, of the query. `properties`: what
# all SSTs of a snapshot say. `estimated`: some of it was read, and the rest taken to be alike.
Method: TypeAlias = Literal["counted", "snapshot", "properties", "estimated", "unknown"]
_ORDER: Final[tuple[Method, ...]] = get_args(Method)
# Of stores: the figures that are summed up for an operator, and the methods of which the least exact one is its.
_SUMMED: Final = [
    "rows",
    "internal_rows",
    "row_bytes",
    "sst_bytes",
    "stored_bytes",
    "entries",
    "tombstones",
    "changelogs_after",
    "changelogs_after_bytes",
]
_METHODS: Final = ("rows_by", "row_bytes_by", "entries_by")

# Operators whose rows stay for ever, unless they have a time that a watermark reaches.
_KEEPING: Final = frozenset({"stateStoreSave", "dedupe", "globalLimit"})
_SKEWED: Final = 2.0
_TOMBSTONES: Final = 0.3
# Spark's default of minDeltasForSnapshot.
_DELTAS: Final = 10


class LevelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The SSTs of one level of a store."""

    level: int
    files: int
    size_bytes: int


class StoreFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one store: of a snapshot, unless all rows were counted."""

    operator: int
    partition: int
    store: str
    # The batch that the rows are of, and what was committed after it: changelogs, and their bytes.
    batch: int | None = None
    changelogs_after: int = 0
    changelogs_after_bytes: int = 0
    rows: int | None = None
    rows_by: Method = "unknown"
    # Rows of internal column families, which are not among `rows`.
    internal_rows: int | None = None
    # Of keys and values of all rows, internal ones too; as SSTs say it, with the numbers of column families and the
    # checksums of rows, where there are any.
    row_bytes: int | None = None
    row_bytes_by: Method = "unknown"
    # Of the snapshot; compressed.
    sst_bytes: int | None = None
    # Entries of SSTs, of which a row may have several, and those that only delete.
    entries: int | None = None
    tombstones: int | None = None
    entries_by: Method = "unknown"
    levels: tuple[LevelFigures, ...] = ()
    # All files of the store, those of other versions too.
    files: int = 0
    stored_bytes: int = 0
    # Only where all rows were counted.
    families: tuple[FamilyFigures, ...] = ()

    @property
    def id(self) -> StoreId:
        return StoreId(self.operator, self.partition, self.store)


class Skew(msgspec.Struct, frozen=True, kw_only=True):
    """How unlike the partitions of an operator are."""

    mean: float
    largest: int
    # Of the largest one; its share is `largest / mean`.
    partition: int
    # 0: all alike; near 1: one has it all.
    gini: float

    @property
    def ratio(self) -> float:
        return self.largest / self.mean if self.mean else 1.0


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an operator's state between two batches, by the stores that there are at both."""

    # The oldest and the newest batch of those that stores were compared with: snapshots are not of every batch.
    since_batch: int
    since_batch_last: int
    rows: int | None
    row_bytes: int | None
    sst_bytes: int | None


class OperatorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all stores of an operator; a sum is None where one of them is."""

    operator: int
    name: str
    partitions: int
    stores: int
    rows: int | None
    rows_by: Method
    internal_rows: int | None
    row_bytes: int | None
    row_bytes_by: Method
    sst_bytes: int | None
    stored_bytes: int
    entries: int | None
    tombstones: int | None
    entries_by: Method
    # Changelogs that the rows are without, and their bytes.
    changelogs_after: int
    changelogs_after_bytes: int
    row_skew: Skew | None
    byte_skew: Skew | None
    levels: tuple[LevelFigures, ...]
    families: tuple[FamilyFigures, ...]
    # Rows of which no watermark decides that they go; None: their operator decides, or they were not counted.
    never: int | None = None
    growth: Growth | None = None


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, what it would change, and by how much if that is known."""

    setting: str
    reason: str
    requests_per_day: float | None = None
    usd_per_day: float | None = None


def sum_up(
    operator: int, name: str, stores: Sequence[StoreFigures], *, before: Sequence[StoreFigures] = ()
) -> OperatorFigures:
    """Sum up the stores of an operator; `before` are those of an older batch."""
    families = tuple(_merged(stores)) if all(of.families for of in stores) else ()
    may_keep = bool(families) and name in _KEEPING and not any(of.unread for of in families)
    sums: dict[str, Any] = {figure: _sum(stores, figure) for figure in _SUMMED}
    methods: dict[str, Any] = {
        by: max((getattr(of, by) for of in stores), key=_ORDER.index, default="unknown") for by in _METHODS
    }
    return OperatorFigures(
        operator=operator,
        name=name,
        partitions=len({of.partition for of in stores}),
        stores=len(stores),
        **sums,
        **methods,
        row_skew=skew_of(_by_partition(stores, "rows")),
        byte_skew=skew_of(_by_partition(stores, "row_bytes")) or skew_of(_by_partition(stores, "sst_bytes")),
        levels=tuple(_levels(stores)),
        families=families,
        never=sum(of.rows if of.ages is None else of.ages.without for of in families) if may_keep else None,
        growth=_growth(stores, before),
    )


def skew_of(by_partition: Mapping[int, int | None]) -> Skew | None:
    """Return the skew of partitions; None if one of them is not known, or there is none."""
    values = [value for value in by_partition.values() if value is not None]
    if not values or len(values) < len(by_partition):
        return None
    total, count = sum(values), len(values)
    weighted = sum(rank * value for rank, value in enumerate(sorted(values), 1))
    largest = max(by_partition, key=lambda partition: by_partition[partition] or 0)
    return Skew(
        mean=total / count,
        largest=max(values),
        partition=largest,
        gini=2 * weighted / (count * total) - (count + 1) / count if total else 0.0,
    )


def estimate(stores: Sequence[StoreFigures], read: Mapping[StoreId, tuple[int, int, int, int]]) -> list[StoreFigures]:
    """Add entries, tombstones and bytes of rows to stores, from the properties of some of their SSTs.

    Of each store whose SSTs were read: their bytes, entries, tombstones and raw bytes. What was not read of it is taken
    to be like that, and a store of which nothing was read like the others of its operator and name. Bytes of rows are
    of all entries but tombstones, older ones of a row too, in the proportion of its rows, if those are known.
    """
    totals: dict[tuple[int, str], list[int]] = {}
    for of, counts in read.items():
        total = totals.setdefault((of.operator, of.store), [0, 0, 0, 0])
        total[:] = map(sum, zip(total, counts, strict=True))
    return [_estimated(of, read.get(of.id) or totals.get((of.operator, of.store))) for of in stores]


def _estimated(of: StoreFigures, counts: Sequence[int] | None) -> StoreFigures:
    if of.sst_bytes is None or not ((counts and counts[0]) or of.sst_bytes == 0):
        return of
    read_bytes, *rest = counts or (0, 0, 0, 0)
    is_all = read_bytes == of.sst_bytes
    entries, tombstones, raw_bytes = (
        found if is_all or not read_bytes else round(found * of.sst_bytes / read_bytes) for found in rest
    )
    puts, rows = entries - tombstones, of.rows
    found = msgspec.structs.replace(
        of, entries=entries, tombstones=tombstones, entries_by="properties" if is_all else "estimated"
    )
    if rows is None:
        # Each tombstone takes back one entry, if nothing was overwritten.
        rows = max(0, puts - tombstones)
        found = msgspec.structs.replace(found, rows=rows, rows_by="estimated")
    held = rows + (of.internal_rows or 0)
    is_exact = is_all and held == entries
    row_bytes = raw_bytes if held == entries else round(raw_bytes * held / entries) if entries else 0
    return msgspec.structs.replace(found, row_bytes=row_bytes, row_bytes_by="properties" if is_exact else "estimated")


def _sum(stores: Sequence[StoreFigures], name: str) -> int | None:
    values = [getattr(of, name) for of in stores]
    return None if None in values else sum(values)


def _by_partition(stores: Sequence[StoreFigures], name: str) -> dict[int, int | None]:
    partitions: dict[int, list[StoreFigures]] = {}
    for of in stores:
        partitions.setdefault(of.partition, []).append(of)
    return {number: _sum(found, name) for number, found in partitions.items()}


def _levels(stores: Sequence[StoreFigures]) -> Iterator[LevelFigures]:
    every = [level for of in stores for level in of.levels]
    for number in sorted({level.level for level in every}):
        files, size = (sum(getattr(of, name) for of in every if of.level == number) for name in ("files", "size_bytes"))
        yield LevelFigures(level=number, files=files, size_bytes=size)


def _merged(stores: Sequence[StoreFigures]) -> Iterator[FamilyFigures]:
    """Sum up the column families of all partitions, each by its store and its name."""
    found: dict[tuple[str, str], list[FamilyFigures]] = {}
    for of in stores:
        for family in of.families:
            found.setdefault((of.store, family.name), []).append(family)
    has_stores = len({store for store, _ in found}) > 1
    for (store, name), families in sorted(found.items()):
        rows, sizes = Counter[str](), Counter[str]()
        for group in (group for family in families for group in family.heaviest):
            rows[group.key] += group.rows
            sizes[group.key] += group.size_bytes
        heaviest = sorted(sizes, key=lambda key: (-sizes[key], key))[:GROUPS_SHOWN]
        ages = [family.ages for family in families if family.ages is not None]
        yield FamilyFigures(
            name=store if has_stores else name,
            is_internal=families[0].is_internal,
            rows=sum(of.rows for of in families),
            size_bytes=sum(of.size_bytes for of in families),
            heaviest=tuple(KeyGroup(key=key, rows=rows[key], size_bytes=sizes[key]) for key in heaviest),
            # What is not among those of a partition may have there as much as the last one that is.
            heaviest_error_bytes=sum(
                of.heaviest_error_bytes + (of.heaviest[-1].size_bytes if len(of.heaviest) == GROUPS_SHOWN else 0)
                for of in families
            )
            if len(families) > 1
            else families[0].heaviest_error_bytes,
            ages=reduce(RowAges.plus, ages) if ages else None,
            unread=next((of.unread for of in families if of.unread), ""),
        )


def _growth(stores: Sequence[StoreFigures], before: Sequence[StoreFigures]) -> Growth | None:
    older = {of.id: of for of in before}
    both = [(of, older[of.id]) for of in stores if of.id in older]
    # One snapshot that is the newest of both batches shows nothing.
    batches = [old.batch for of, old in both if of.batch is not None and old.batch is not None and old.batch < of.batch]
    if not both or len(batches) < len(both):
        return None

    def grown(name: str) -> int | None:
        now, then = (_sum([pair[n] for pair in both], name) for n in (0, 1))
        return None if now is None or then is None else now - then

    by_name = {name: grown(name) for name in ("rows", "row_bytes", "sst_bytes")}
    return Growth(since_batch=min(batches), since_batch_last=max(batches), **by_name)


def advise(operators: Sequence[OperatorFigures], rate: RequestRate | None, prices: Prices) -> tuple[Advice, ...]:
    """Say which settings would change requests and state; first those that save most."""
    found = [] if rate is None else list(_saving(rate, prices, sum(of.stores for of in operators)))
    return (*sorted(found, key=lambda of: -(of.requests_per_day or 0)), *_state_advice(operators))


def _saving(rate: RequestRate, prices: Prices, stores: int) -> Iterator[Advice]:
    def saving(setting: str, reason: str, requests: float) -> Advice:
        usd = requests / 1000 * prices.usd_per_1000_writes
        return Advice(setting=setting, reason=reason, requests_per_day=requests, usd_per_day=usd)

    every_s = rate.window_ms / rate.batches / 1000
    reason = f"a batch every {every_s:.1f} s; with twice the time, half of all requests"
    yield saving("trigger", reason, rate.requests_per_day() / 2)
    snapshots = rate.requests_per_day("snapshot") + rate.requests_per_day("sst")
    changelogs, checksums = rate.requests_per_day("changelog"), rate.requests_per_day("checksum")
    if stores > 1:
        reason = f"{stores} stores; half of the partitions, as by tidemark spark rescale"
        yield saving("spark.sql.shuffle.partitions", reason, (snapshots + changelogs + checksums) / 2)
    if changelogs and snapshots:
        reason = "half of the snapshots with twice the number; a restart then replays more"
        yield saving("spark.sql.streaming.stateStore.minDeltasForSnapshot", reason, snapshots / 2)
    elif snapshots and stores:
        per_changelog = 2 if rate.renames else 1
        saved = snapshots * (1 - 1 / _DELTAS) - stores * rate.batches_per_day * per_changelog
        if saved > 0:
            reason = f"true: changelogs, and a snapshot each {_DELTAS} batches"
            yield saving("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", reason, saved)
    if checksums:
        reason = "false: no checksums; Spark then does not see what was altered"
        yield saving("spark.sql.streaming.checkpoint.fileChecksum.enabled", reason, checksums)
    if copies := rate.copies_per_day:
        reason = "one that writes without renames makes no copies"
        yield saving("spark.sql.streaming.checkpointFileManagerClass", reason, copies)


def _state_advice(operators: Sequence[OperatorFigures]) -> Iterator[Advice]:
    for of in operators:
        which = f"operator {of.operator} ({of.name})"
        if of.never and of.rows and of.name != "globalLimit":
            reason = f"{which}: {of.never:,} of {of.rows:,} rows have no time that a watermark reaches, and stay"
            yield Advice(setting="withWatermark, and its column among the keys", reason=reason)
        if of.byte_skew is not None and of.partitions > 1 and of.byte_skew.ratio > _SKEWED:
            skew = of.byte_skew
            reason = f"{which}: partition {skew.partition} has {skew.ratio:.1f} times the bytes of the mean"
            groups = (group for family in of.families for group in family.heaviest)
            heaviest = max(groups, key=lambda group: group.size_bytes, default=None)
            if heaviest is not None and heaviest.size_bytes > skew.mean:
                reason += f"; {heaviest.key} alone has more than that mean, which more partitions may not divide"
            yield Advice(setting="spark.sql.shuffle.partitions, or other keys", reason=reason)
        if of.entries and of.tombstones and of.tombstones > _TOMBSTONES * of.entries:
            share = f"{of.tombstones / of.entries:.0%}"
            reason = f"{which}: {share} of all entries are tombstones; a compaction takes them away, at each snapshot"
            yield Advice(setting="spark.sql.streaming.stateStore.rocksdb.compactOnCommit", reason=reason)

"""Explain the state of a query's checkpoint, or of a backup of one: its size, its shape, its age, and what it costs.

Quick, it costs some ten requests for the listing and the logs, and the zip of a snapshot of each store, which has
Spark's count of its rows, its SSTs and its levels. The ends of SSTs count entries and tombstones: as many of them are
read as make two requests a store all in all. Full, every row is read. A snapshot is of an older batch than the newest:
`StoreFigures.batch` says of which.
"""

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from blobstore.base import BlobStore
from blobstore.checkpoint_files import FileStatus
from blobstore.concurrency import map_bounded, run_blocking
from blobstore.errors import BlobNotFoundError
from blobstore.opening import StoreSettings, local_path_of
from blobstore.wrappers.forwarding import MeteredStore
from engine.checkpoint.restore import CheckpointRestore, RestoreChoice, make_target
from engine.checkpoint.store import StoreToRestore, bring_row_schema
from engine.errors import EngineError, NotFoundError, TargetError
from engine.local.checksums import crc32c
from engine.local.scratch import scratch_dir
from engine.repository.repository import Repository
from engine.restore.restore import read_index_of
from engine.rocksdb.merge import parse_current, sst_name
from engine.runtime import NO_PROGRESS, Progress, Runtime, Stopwatch
from engine.settings import MIB
from engine.state.checkpoint_dir import CheckpointDir, StateFiles, opened_checkpoint
from engine.state.files import StateFileManager, resolve_with
from engine.state.key_rules import AVRO, read_forms
from engine.state.load import StateLoader, check_target
from engine.state.local_files import working_dir
from engine.state.query import QueryAt, StateOperator, StoreAt, StreamingCheckpoint
from engine.state.restore import IndexStateFiles
from engine.state.settings import ENCODING_KEY
from engine.state.zips import ZIP_BYTES_MAX, StateZip, read_state_zip
from index.errors import FormatError
from index.rocksdb import sst
from index.rocksdb.manifest import decode_manifest
from index.snapshot.contents import files_of
from index.spark.checkpoint import STATE, StoreId
from index.spark.lineage import Present, resolve
from index.spark.metadata import NOT_COUNTED, StoredFile
from index.spark.names import LOGS, SSTS, StateVersion, changelog_name, snapshot_name
from index.spark.query_logs import DEFAULT_STORE, decode_state_variables
from index.spark.requests import Prices, RequestRate, measure_requests
from index.spark.schema import KeyForm, StateSchema
from index.spark.state_figures import Advice, LevelFigures, OperatorFigures, StoreFigures, advise, estimate, sum_up
from index.spark.state_rows import FamilyFigures, FamilyScan

_IN_FLIGHT_MAX: Final = 16
# Of a backup these are an index and a zip, and no SST; an index of deltas takes one for each. On this machine, or where
# every row is read, there is none to save.
REQUESTS_PER_STORE: Final = 2
_TAILS_MAX: Final = 10_000
_ROWS_MAX: Final = 32_768
_ROWS_BYTES_MAX: Final = 4 * MIB
# What makes an operator's rows several in one value.
_LIST_STATE: Final = "ListState"
_JOIN_LIST: Final = "-keyWithTsToValues"
_MOVED: Final = "was deleted meanwhile, as the query goes on: explain it again"


class ExplainChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What to explain, and how."""

    # A committed one, or in a backup; None: the newest.
    batch: int | None = None
    # Compare with this batch.
    since: int | None = None
    # Read every row.
    full: bool = False
    # Whether the query's file manager renames (`index.spark.requests`).
    renames: bool = True
    prices: Prices = Prices()
    # Of stores that are read whole; None: the system's place.
    scratch: Path | None = None
    stores_at_once: int = 4
    store_settings: StoreSettings | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a day costs on an object store, measured from the times of the files that are listed."""

    rate: RequestRate
    batches_per_day: float
    puts_per_day: float
    copies_per_day: float
    requests_usd_per_day: float
    stored_usd_per_day: float


class StateExplained(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a query after one of its batches."""

    location: str
    query_id: str
    batch: int
    # Up to here events are over for the batch to come; None: the query has no watermark.
    watermark_ms: int | None
    is_full: bool
    operators: tuple[OperatorFigures, ...]
    stores: tuple[StoreFigures, ...]
    # None: `cost_unknown` says why.
    cost: Cost | None
    cost_unknown: str
    advice: tuple[Advice, ...]
    # Stores of which something could not be read, and why.
    problems: tuple[str, ...]
    # That it took: 0 of a directory of this machine, and of a backup those for its stores.
    requests: int
    seconds: float


class StoreToScan(msgspec.Struct, frozen=True, kw_only=True):
    """One store to be read whole, and what its rows are, by column family."""

    store: StoreAt
    operator: str
    watermark_ms: int
    forms: dict[str, tuple[StateSchema, KeyForm | None]] = {}
    # Column families of which a value is several rows.
    lists: frozenset[str] = frozenset()

    @property
    def id(self) -> StoreId:
        return self.store.id


class StoreScanned(msgspec.Struct, frozen=True, kw_only=True):
    """What all rows of a store have, or why they could not be read."""

    families: tuple[FamilyFigures, ...] = ()
    problem: str = ""


# A backend: reads all rows of stores, here or on executors, and returns their figures in the same order.
ScanStores = Callable[[Sequence[StoreToScan]], Awaitable[Sequence[StoreScanned]]]


async def explain_checkpoint(
    location: str | Path | BlobStore,
    choice: ExplainChoice | None = None,
    *,
    scan_stores: ScanStores | None = None,
    progress: Progress = NO_PROGRESS,
) -> StateExplained:
    """Explain a checkpoint; nothing in it changes, and its query may run meanwhile.

    Raises:
        NotFoundError: There is no checkpoint, or no such batch.
        ProviderError, FormatError, EngineError: As `StreamingCheckpoint.at`. What of a store cannot be read is a
            problem of the answer.
        StoreError: The blob store did not answer.
    """
    choice, watch = choice or ExplainChoice(), Stopwatch(Runtime())
    async with opened_checkpoint(location, choice.store_settings) as opened:
        root = opened.look()
        listed = await root.walk()
        checkpoint = StreamingCheckpoint(root)
        query_id, query = await checkpoint.query_id(), await checkpoint.at(choice.batch)
        explaining = _Explain(
            location=root.location,
            logs=root,
            checkpoint=checkpoint,
            files=_by_store(listed),
            open=lambda of: root.child(of.path),
            requests=lambda: root.requests,
            requests_max=REQUESTS_PER_STORE if root.local_root is None else None,
            choice=choice,
            scan_stores=scan_stores,
            progress=progress,
            watch=watch,
        )
        # Times of files that somebody copied are not those of their batches.
        oldest = min(await checkpoint.committed_batches(), default=query.batch)
        begun = [await checkpoint.offsets.get(oldest), query.offsets]
        logged = {n: of.timestamp_ms for n, of in zip((oldest, query.batch), begun, strict=True) if of is not None}
        rate = measure_requests(listed, logged_at_ms=logged, renames=choice.renames)
        unknown = "" if rate else "the times of its files are of one batch, or not those of their batches"
        return await explaining.run(query_id, query, rate, unknown)


async def explain_backup(
    repository: Repository,
    location: str,
    choice: ExplainChoice | None = None,
    *,
    job: str | None = None,
    progress: Progress = NO_PROGRESS,
) -> StateExplained:
    """Explain a backup in a repository: of the newest batch, or of the one that is chosen. It is pinned meanwhile.

    Quick, on a blob store elsewhere, entries and tombstones stay unknown: SSTs would take a third request a store.
    Raises as `explain_checkpoint`, and as `engine.checkpoint.restore.find_checkpoint_backup`.
    """
    choice, watch = choice or ExplainChoice(), Stopwatch(Runtime())
    async with scratch_dir(choice.scratch) as here, contextlib.AsyncExitStack() as stack:
        target = make_target(here / "target", Runtime(), move_aside=False, settings=None)
        restore = CheckpointRestore(repository, target, RestoreChoice(job=job, batch=choice.batch), Runtime())
        stack.push_async_callback(restore.aclose)
        root = here / "query"
        await run_blocking(root.mkdir)
        work = await restore.begin(root)

        metered = MeteredStore(repository.store)

        async def open_files(item: StoreToRestore) -> IndexStateFiles:
            index, _ = await read_index_of(metered, item.reference)
            return IndexStateFiles(metered, index, repository.settings)

        found = await map_bounded(open_files, work, in_flight_max=_IN_FLIGHT_MAX)
        opened = {item.id: files for item, files in zip(work, found, strict=True)}
        for of, files in opened.items():
            if of.partition == 0:
                await bring_row_schema(files, root, of)
        logs = await stack.enter_async_context(opened_checkpoint(root))
        explaining = _Explain(
            location=location,
            logs=logs,
            checkpoint=StreamingCheckpoint(logs),
            files={
                of: {"/".join(path): entry.metadata.size_bytes for path, entry in files_of(each.index.dir)}
                for of, each in opened.items()
            },
            open=opened.__getitem__,
            requests=metered.meter.requests.total,
            requests_max=None if repository.url and local_path_of(repository.url) else REQUESTS_PER_STORE,
            choice=choice,
            progress=progress,
            watch=watch,
        )
        unknown = "a backup has not all files of a time"
        return await explaining.run(restore.backup.query_id, restore.query, None, unknown)


class _Explain(msgspec.Struct, kw_only=True):
    """Gathers the figures of the state of one query: in a checkpoint, or in a backup of one."""

    location: str
    # The query's own files, and the schemas of stores.
    logs: CheckpointDir
    checkpoint: StreamingCheckpoint
    # Sizes of the files of each store.
    files: Mapping[StoreId, Mapping[str, int]]
    open: Callable[[StoreId], StateFiles]
    requests: Callable[[], int]
    # Of a store, unless there is none to save.
    requests_max: int | None
    choice: ExplainChoice
    scan_stores: ScanStores | None = None
    progress: Progress
    watch: Stopwatch
    problems: list[str] = []

    async def run(self, query_id: str, query: QueryAt, rate: RequestRate | None, unknown: str) -> StateExplained:
        since = self.choice.since
        before = None if since is None else await self.checkpoint.at(since)
        at_batches = 1 if before is None else 2
        self.progress.total(files=at_batches * len(query.stores), bytes_=0)
        stores = await self._figures(query, has_tails=True)
        older = [] if before is None else await self._figures(before, has_tails=False)
        operators = tuple(
            sum_up(
                of.id,
                of.name,
                [store for store in stores if store.operator == of.id],
                before=[store for store in older if store.operator == of.id],
            )
            for of in query.operators
        )
        prices = self.choice.prices
        return StateExplained(
            location=self.location,
            query_id=query_id,
            batch=query.batch,
            watermark_ms=query.commit.next_watermark_ms or None,
            is_full=self.choice.full,
            operators=operators,
            stores=tuple(stores),
            cost=None if rate is None else _cost(rate, prices),
            cost_unknown=unknown,
            advice=advise(operators, rate, prices),
            problems=tuple(self.problems),
            requests=self.requests(),
            seconds=self.watch.total_s(),
        )

    async def _figures(self, query: QueryAt, *, has_tails: bool) -> list[StoreFigures]:
        ssts: dict[StoreId, tuple[StoredFile, ...]] = {}

        async def look(store: StoreAt) -> StoreFigures:
            figures = await self._look(store, query, ssts)
            if not self.choice.full:
                self.progress.add(files=1, bytes_=0)
            return figures

        stores = list(await map_bounded(look, query.stores, in_flight_max=_IN_FLIGHT_MAX))
        read = await self._read_tails(ssts, len(stores)) if has_tails else {}
        stores = estimate(stores, read)
        if not self.choice.full:
            return stores
        work = await self._to_scan(query)
        scanned = await (self.scan_stores or self._scan_here)(work)
        figures = []
        for of, made in zip(stores, scanned, strict=True):
            if made.problem:
                self.problems.append(f"{of.id.path}: {made.problem}")
            # Of what could not be read, the quick figures stay.
            figures.append(_counted(of, query.batch, made.families) if made.families else of)
        return figures

    async def _look(self, store: StoreAt, query: QueryAt, ssts: dict[StoreId, tuple[StoredFile, ...]]) -> StoreFigures:
        """Read the snapshot that a version is built on, its zip alone; note its SSTs."""
        of, files = store.id, self.files.get(store.id, {})
        present = Present.of_names(files, is_hdfs=store.at.is_hdfs)
        figures = StoreFigures(
            operator=of.operator,
            partition=of.partition,
            store=of.store,
            files=len(files),
            stored_bytes=sum(files.values()),
        )
        try:
            base = await self._base(store, present, query)
            after = [c for c in present.changelogs if (base.version if base else 0) < c.version <= store.at.version]
            sizes: dict[int, int] = {}
            for attempt in after:
                # Of several attempts, the one that was committed.
                if attempt.version not in sizes or await self._is_committed(attempt, store, query):
                    sizes[attempt.version] = files.get(changelog_name(attempt), 0)
            figures = msgspec.structs.replace(
                figures, changelogs_after=len(sizes), changelogs_after_bytes=sum(sizes.values())
            )
            if base is None or base.is_hdfs:
                return figures
            name = snapshot_name(base)
            data = await self.open(of).read(name, size_bytes_max=ZIP_BYTES_MAX)
            zipped = await run_blocking(read_state_zip, data, subject=f"{of.path}/{name}")
            figures = _of_snapshot(figures, base, zipped)
        except (EngineError, FormatError, BlobNotFoundError) as error:
            message = _MOVED if isinstance(error, BlobNotFoundError) else str(error)
            self.problems.append(f"{of.path}: {message}")
            return figures
        ssts[of] = zipped.metadata.sst_files
        return figures

    async def _base(self, store: StoreAt, present: Present, query: QueryAt) -> StateVersion | None:
        """Find the newest snapshot on which a version is built; None: on none.

        The commits say which id a version has, for all partitions at once; only where they are gone, headers do.
        """
        target = store.at
        for found in sorted(present.snapshots, reverse=True):
            if found == target or (found.unique_id is None and target.unique_id is None and found < target):
                return found
            if found.unique_id is None or target.unique_id is None or found.version >= target.version:
                continue
            is_committed = await self._is_committed(found, store, query)
            if is_committed is None:
                break
            if is_committed:
                return found
        if not present.snapshots:
            return None
        manager = StateFileManager(self.open(store.id), store.settings)
        ask = partial(resolve, target.version, target.unique_id)
        return (await resolve_with(ask, present, manager.read_header)).base

    async def _is_committed(self, of: StateVersion, store: StoreAt, query: QueryAt) -> bool | None:
        """Return whether the commit of its batch has an attempt at a store; None: the commit is gone."""
        commit = await self.checkpoint.commits.get(of.version - 1)
        if commit is None:
            return None
        stores = next(each.stores for each in query.operators if each.id == store.id.operator)
        with contextlib.suppress(KeyError, IndexError):
            ids = (commit.unique_ids or {})[store.id.operator][store.id.partition]
            return ids[stores.index(store.id.store)] == of.unique_id
        return False

    async def _read_tails(
        self, ssts: Mapping[StoreId, Sequence[StoredFile]], stores: int
    ) -> dict[StoreId, tuple[int, int, int, int]]:
        """Read the ends of SSTs, the largest of each store first, as far as the requests allow."""
        ranked: list[tuple[int, int, StoreId, StoredFile]] = []
        for of, files in ssts.items():
            ordered = sorted(files, key=lambda file: -file.size_bytes)
            ranked += [(rank, -file.size_bytes, of, file) for rank, file in enumerate(ordered)]
        ranked.sort(key=lambda item: item[:3])
        most = None if self.choice.full else self.requests_max
        taken = ranked[: _TAILS_MAX if most is None else max(0, most * stores - self.requests())]

        totals: dict[StoreId, tuple[int, int, int, int]] = {}

        async def read(item: tuple[int, int, StoreId, StoredFile]) -> None:
            _, _, of, file = item
            size = min(sst.TAIL_BYTES, file.size_bytes)
            try:
                tail = await self.open(of).read_range(file.path, file.size_bytes - size, size)
            except (EngineError, FormatError, BlobNotFoundError) as error:
                self.problems.append(f"{of.path}: {error}")
                return
            if found := sst.parse_sst_counts(tail, file.size_bytes):
                size, entries, tombstones, raw = totals.get(of, (0, 0, 0, 0))
                raw += found.raw_bytes
                totals[of] = (size + file.size_bytes, entries + found.entries, tombstones + found.deletions, raw)

        await map_bounded(read, taken, in_flight_max=_IN_FLIGHT_MAX)
        return totals

    async def _to_scan(self, query: QueryAt) -> list[StoreToScan]:
        operators = {of.id: of for of in query.operators}
        by_name: dict[tuple[int, str], StoreToScan] = {}
        found = []
        for store in query.stores:
            key = store.id.operator, store.id.store
            if key not in by_name:
                by_name[key] = await self._first_to_scan(query, operators[store.id.operator], store)
            found.append(msgspec.structs.replace(by_name[key], store=store))
        return found

    async def _first_to_scan(self, query: QueryAt, operator: StateOperator, store: StoreAt) -> StoreToScan:
        """Read what the rows of stores of one name are; of what is not known, or Avro, they are only counted."""
        work = StoreToScan(store=store, operator=operator.name, watermark_ms=query.commit.next_watermark_ms)
        if operator.column_families and query.offsets.conf.get(ENCODING_KEY, "").lower() == AVRO:
            return work
        try:
            found = await read_forms(self.logs, operator, store.id.store, is_hdfs=store.at.is_hdfs)
            variables = decode_state_variables(operator.properties, subject=f"operator {operator.id}")
        except FormatError as error:
            self.problems.append(f"operator {operator.id}: rows are only counted: {error}")
            return work
        names = [schema.family for schema, _ in found]
        lists = frozenset(n for n in names if variables.get(n) == _LIST_STATE or n.endswith(_JOIN_LIST))
        return msgspec.structs.replace(work, forms={of[0].family: of for of in found}, lists=lists)

    async def _scan_here(self, work: Sequence[StoreToScan]) -> Sequence[StoreScanned]:
        async def one(item: StoreToScan) -> StoreScanned:
            figures = await scan_store(self.open(item.store.id), item, self.choice.scratch)
            self.progress.add(files=1, bytes_=0)
            return figures

        return await map_bounded(one, work, in_flight_max=self.choice.stores_at_once)


async def scan_store(files: StateFiles, work: StoreToScan, scratch: Path | None) -> StoreScanned:
    """Read every row of a store. StoreError: it did not answer; TargetError: `scratch` cannot be written."""
    try:
        return StoreScanned(families=await _scan(files, work, scratch))
    except TargetError:
        raise
    except (EngineError, FormatError, BlobNotFoundError) as error:
        return StoreScanned(problem=_MOVED if isinstance(error, BlobNotFoundError) else str(error))


async def _scan(files: StateFiles, work: StoreToScan, scratch: Path | None) -> tuple[FamilyFigures, ...]:
    settings = msgspec.structs.replace(
        work.store.settings,
        count_keys=False,
        rocksdb=msgspec.structs.replace(work.store.settings.rocksdb, compacts=False),
    )
    at = work.store.at
    target = check_target(at.version, at.unique_id, files, settings.format_version, read_only=True, empty=False)
    async with scratch_dir(scratch) as private, contextlib.AsyncExitStack() as stack:
        place = await stack.enter_async_context(working_dir(private / "store"))
        loader = StateLoader(StateFileManager(files, settings), place, Runtime())
        loaded, _ = await loader.load(target, {}, read_only=True, overlays=True)

        def scan() -> tuple[FamilyFigures, ...]:
            found = []
            for family in loaded.families:
                schema, form = work.forms.get(family.name, (None, None))
                counting = FamilyScan(
                    family.name,
                    None if family.is_internal else schema,
                    form,
                    operator=work.operator,
                    watermark_ms=work.watermark_ms,
                    is_internal=family.is_internal,
                    is_list=family.name in work.lists,
                )
                for pairs in loaded.chunks(family.name, rows_max=_ROWS_MAX, bytes_max=_ROWS_BYTES_MAX):
                    counting.add(pairs)
                found.append(counting.figures())
            return tuple(found)

        stack.push_async_callback(run_blocking, loaded.db.close)
        return await run_blocking(scan)


def _of_snapshot(figures: StoreFigures, base: StateVersion, zipped: StateZip) -> StoreFigures:
    metadata, subject = zipped.metadata, f"snapshot {base}"
    name = parse_current(zipped.files.get("CURRENT", b""), subject)
    if name not in zipped.files:
        raise NotFoundError(f"has no {name}", operation="explain", subject=subject)
    state = decode_manifest(zipped.files[name], crc32c=crc32c, subject=f"{subject}/{name}")
    levels: dict[int, list[int]] = {}
    named = {file.local_name for file in metadata.sst_files}
    for level, file in (of for family in state.families for of in family.files):
        if sst_name(file.number) in named:
            levels.setdefault(level, []).append(file.size_bytes)
    is_counted = metadata.num_keys != NOT_COUNTED
    return msgspec.structs.replace(
        figures,
        batch=base.version - 1,
        rows=metadata.num_keys if is_counted else None,
        rows_by="snapshot" if is_counted else "unknown",
        internal_rows=None if metadata.num_internal_keys == NOT_COUNTED else metadata.num_internal_keys,
        sst_bytes=sum(file.size_bytes for file in metadata.sst_files),
        levels=tuple(
            LevelFigures(level=level, files=len(sizes), size_bytes=sum(sizes))
            for level, sizes in sorted(levels.items())
        ),
    )


def _counted(of: StoreFigures, batch: int, families: tuple[FamilyFigures, ...]) -> StoreFigures:
    return msgspec.structs.replace(
        of,
        batch=batch,
        changelogs_after=0,
        changelogs_after_bytes=0,
        rows=sum(family.rows for family in families if not family.is_internal),
        rows_by="counted",
        internal_rows=sum(family.rows for family in families if family.is_internal),
        row_bytes=sum(family.size_bytes for family in families),
        row_bytes_by="counted",
        families=families,
    )


def _cost(rate: RequestRate, prices: Prices) -> Cost:
    return Cost(
        rate=rate,
        batches_per_day=rate.batches_per_day,
        puts_per_day=rate.puts_per_day,
        copies_per_day=rate.copies_per_day,
        requests_usd_per_day=rate.requests_usd_per_day(prices),
        stored_usd_per_day=rate.stored_usd_per_day(prices),
    )


def _by_store(listed: Sequence[FileStatus]) -> dict[StoreId, dict[str, int]]:
    """Return the sizes of the files of each store, by their paths from there; without hidden ones."""
    found: dict[StoreId, dict[str, int]] = {}
    for status in listed:
        parts = status.path.split("/")
        if len(parts) < 4 or parts[0] != STATE or parts[-1].startswith("."):  # noqa: PLR2004  # operator, partition, file
            continue
        name = [] if parts[3] in {SSTS, LOGS, "_metadata"} else parts[3:-1][:1]
        of = StoreId.parse(f"{parts[1]}-{parts[2]}", name[0] if name else DEFAULT_STORE)
        if of is not None:
            found.setdefault(of, {})["/".join(parts[3 + len(name) :])] = status.size_bytes
    return found

"""Make another checkpoint of one batch of a query, in another format or with another codec (design 0005, section 3a).

The source is only read. Each store becomes one snapshot, as a replayed restore makes it, and the logs of the batch name
what was made. Until all of it is there, nothing is at the target.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from blobstore.concurrency import map_bounded, run_blocking
from blobstore.opening import StoreSettings
from engine.checkpoint.backup import refuse_damaged_logs
from engine.checkpoint.errors import error_context, redact_paths
from engine.checkpoint.file_check import check_sst
from engine.checkpoint.groups import rewritten
from engine.checkpoint.live import LiveFiles, QueryFiles, live_files
from engine.checkpoint.restore import adapt_query_files, make_target, write_like
from engine.checkpoint.store import SnapshotToBuild, StoreRestored, build_snapshot, staged
from engine.checkpoint.targets import CheckpointTarget, check_apart
from engine.errors import UnsafeSourceError, UsageError
from engine.local.scan import refusing
from engine.runtime import NO_PROGRESS, Progress, Runtime, Stopwatch
from engine.settings import STORES_AT_ONCE, TransferSettings
from engine.state.checkpoint_dir import CheckpointDir, opened_checkpoint
from engine.state.compression import Codec
from engine.state.query import OFFSETS, QueryAt, StoreAt, StreamingCheckpoint, provider_of
from engine.state.settings import (
    CODEC_KEY,
    HDFS_PROVIDER,
    PROVIDER_KEY,
    ROCKSDB_PROVIDER,
    SPARK_OLD_CHECKPOINT,
    StateStoreSettings,
)
from index.display import DisplayMixin
from index.snapshot.model import FilePath
from index.spark.checkpoint import QUERY_ID, StoreId
from index.spark.hdfs_rows import SplitKey, prefix_key_splitter
from index.spark.names import SSTS, StateVersion
from index.spark.query_logs import UNIQUE_IDS_VERSION
from index.spark.replica import decode_fence
from index.spark.retention import SCHEMA_PATH
from index.spark.schema import SCHEMA_BYTES_MAX, decode_state_schema

# By the name that people give it.
PROVIDERS: Final = {"rocksdb": ROCKSDB_PROVIDER, "hdfs": HDFS_PROVIDER}
Provider = Literal["rocksdb", "hdfs"]
# To bring the files of a query that deletes some meanwhile.
_TRIES: Final = 3


class ConvertChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What to convert, and to what; what is not given stays as it is."""

    # The newest committed one if not given.
    batch: int | None = None
    # The state store provider: RocksDB's, for state that is HDFS-backed.
    provider: Provider | None = None
    # `stateStore.checkpointFormatVersion`: whether versions of state have unique ids.
    format_version: Literal[1, 2] | None = None
    # `stateStore.compression.codec`, of changelogs to come.
    codec: Codec | None = None
    # Number of stores worked on at once on this machine.
    stores_at_once: int = STORES_AT_ONCE
    # How a source and a target that are URLs are asked.
    store_settings: StoreSettings | None = None


class StoreToConvert(msgspec.Struct, frozen=True, kw_only=True):
    """One store, and what its version is called afterwards."""

    store: StoreAt
    named: StateVersion
    codec: Codec
    # As of `GroupToRescale`.
    sums_files: bool = True
    # By the metadata of the operator: the columns of a key that lead it.
    prefix_columns: int = 0

    @property
    def id(self) -> StoreId:
        return self.store.id


class ConversionPlan(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What a conversion would make, or has made."""

    dry_run: bool = True
    query_id: str
    batch: int
    source: str
    location: str
    # Before and after.
    provider_before: Provider
    provider: Provider
    format_before: Literal[1, 2]
    format_version: Literal[1, 2]
    codec_before: Codec
    codec: Codec
    stores: int

    @property
    def has_ids(self) -> bool:
        return self.format_version >= UNIQUE_IDS_VERSION


class ConvertedCheckpoint(ConversionPlan, frozen=True, kw_only=True):
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


# A backend: converts the stores, all of them, here or on executors.
ConvertStores = Callable[[Path, tuple[StoreToConvert, ...]], Awaitable[Sequence[StoreRestored]]]


async def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    choice: ConvertChoice | None = None,
    *,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> ConvertedCheckpoint:
    """Make a checkpoint at a new place of one batch of another one; the query goes on there after the batch.

    Stop the query first: from a conversion on, only one of the two places may go on.

    Raises:
        NotFoundError: There is no checkpoint, or the batch is not committed.
        TargetError: The target has content, or is the source's place, above it or below it.
        DamagedError, FormatError: A file of the source is not whole, or not there; the error names it.
        StoreError: As the blob stores say. After any error the target is as it was.
    """
    choice, runtime = choice or ConvertChoice(), runtime or Runtime()

    async with opened_checkpoint(source, choice.store_settings) as root:
        convert_stores = convert_here(root, choice.stores_at_once, progress, runtime)
        place = make_target(target, runtime, move_aside=False, settings=choice.store_settings)
        return await run_conversion(root, place, choice, convert_stores, runtime)


def convert_here(root: CheckpointDir, stores_at_once: int, progress: Progress, runtime: Runtime) -> ConvertStores:
    """Return what converts stores of a checkpoint on this machine, several at once."""

    async def convert_stores(directory: Path, work: tuple[StoreToConvert, ...]) -> Sequence[StoreRestored]:
        async def one(item: StoreToConvert) -> StoreRestored:
            made = await convert_store(root, item, directory / item.id.path, runtime=runtime)
            progress.add(files=made.files, bytes_=made.size_bytes)
            return made

        return await map_bounded(one, work, in_flight_max=stores_at_once)

    return convert_stores


async def run_conversion(
    root: CheckpointDir,
    target: CheckpointTarget,
    choice: ConvertChoice,
    convert_stores: ConvertStores,
    runtime: Runtime,
    *,
    metadata: bytes | None = None,
) -> ConvertedCheckpoint:
    """Carry out all steps of `convert_checkpoint` with a backend for the stores; `metadata` as of `bring_query`."""
    watch = Stopwatch(runtime)
    async with contextlib.aclosing(target):
        plan, at = await _plan(root, target, choice)
        columns = {operator.id: operator.prefix_columns for operator in at.operators}
        changed: dict[str, str] = {} if plan.codec == plan.codec_before else {CODEC_KEY: plan.codec}
        if plan.provider != plan.provider_before:
            changed[PROVIDER_KEY] = PROVIDERS[plan.provider]
        next_version = partial(StateVersion, plan.batch + 1, is_hdfs=plan.provider == "hdfs")
        work = tuple(
            StoreToConvert(
                store=store,
                named=next_version(runtime.unique_id() if plan.has_ids else None),
                codec=plan.codec,
                prefix_columns=columns[store.id.operator].get(store.id.store, 0),
            )
            for store in at.stores
        )
        rewrite = rewritten(at, {item.id: item.named.unique_id for item in work}, changed)
        made = await make_checkpoint(
            root, target, plan.query_id, at, rewrite, lambda below: convert_stores(below, work), metadata=metadata
        )
    return ConvertedCheckpoint(**msgspec.structs.asdict(plan) | made | {"dry_run": False}, seconds=watch.total_s())


async def make_checkpoint(
    root: CheckpointDir,
    target: CheckpointTarget,
    query_id: str,
    at: QueryAt,
    rewrite: Callable[[str, bytes], bytes],
    make_stores: Callable[[Path], Awaitable[Sequence[StoreRestored]]],
    *,
    metadata: bytes | None,
) -> dict[str, Any]:
    """Make a checkpoint of a batch at a target, which is closed; return what it cost, by the names of a result."""
    await target.open(query_id, at.batch)
    to = Gathering(target.directory, target.root)
    files, size_bytes = await bring_query(root, to, at, rewrite, metadata=metadata)
    made = await make_stores(target.directory)
    await target.publish({store.id: store.published for store in made})
    return {
        "files": files + sum(store.files for store in made),
        "size_bytes": size_bytes + sum(store.size_bytes for store in made),
        "bytes_fetched": sum(store.bytes_fetched for store in made),
        "changelogs": sum(store.changelogs for store in made),
        "records": sum(store.records for store in made),
        "leftovers": await target.aclose(),
    }


async def choose_batch(root: CheckpointDir, target: CheckpointTarget, batch: int | None) -> tuple[str, QueryAt]:
    """Return the id of the query and its batch, of which another checkpoint can be made at the target."""
    await check_apart(target, root, what="source")
    checkpoint = StreamingCheckpoint(root)
    with error_context(root.location, None):
        query_id = await checkpoint.query_id()
        at = await checkpoint.at(batch)
    await refuse_damaged_logs(root)
    await target.check(query_id, at.batch)
    return query_id, at


async def plan_conversion(source: str | Path, target: str | Path, choice: ConvertChoice) -> ConversionPlan:
    """Find out what `convert_checkpoint` would make, or what it would refuse. Nothing is written."""
    place = make_target(target, Runtime(), move_aside=False, settings=choice.store_settings)
    async with opened_checkpoint(source, choice.store_settings) as root, contextlib.aclosing(place):
        return (await _plan(root, place, choice))[0]


async def _plan(root: CheckpointDir, target: CheckpointTarget, choice: ConvertChoice) -> tuple[ConversionPlan, QueryAt]:
    query_id, at = await choose_batch(root, target, choice.batch)
    before: Literal[1, 2] = 1 if at.commit.unique_ids is None else 2
    codec = StateStoreSettings.from_conf(at.offsets.conf, SPARK_OLD_CHECKPOINT).codec
    provider_before: Provider = "hdfs" if provider_of(at.offsets) == HDFS_PROVIDER else "rocksdb"
    provider = choice.provider or provider_before
    if provider == "hdfs" and (provider_before != "hdfs" or choice.format_version == UNIQUE_IDS_VERSION):
        message = "the HDFS-backed provider knows no ids, and no rows of RocksDB's"
        hint = "convert it to RocksDB (--to rocksdb), with format 1 or 2"
        raise UsageError(message, operation="convert", subject=root.location, hint=hint)
    return ConversionPlan(
        query_id=query_id,
        batch=at.batch,
        source=root.location,
        location=target.location,
        provider_before=provider_before,
        provider=provider,
        format_before=before,
        format_version=choice.format_version or before,
        codec_before=codec,
        codec=choice.codec or codec,
        stores=len(at.stores),
    ), at


class Gathering(msgspec.Struct, frozen=True):
    """A directory where the files of a query are put, and the place that they are for."""

    directory: Path
    # The new checkpoint, as its files name it.
    root: str
    # Whether they are to outlast the machine there: the log of a file source has hundreds of them.
    is_synced: bool = True


async def bring_query(
    root: CheckpointDir,
    to: Gathering,
    at: QueryAt,
    rewrite: Callable[[str, bytes], bytes],
    *,
    metadata: bytes | None = None,
    planned: bool = True,
) -> tuple[int, int]:
    """Write the files of the query at a batch to a directory; return their number and size.

    Args:
        root: The checkpoint that they are brought from.
        to: Where they are put.
        at: The batch.
        rewrite: Makes of the path and the content of a file the new content.
        metadata: What `metadata` is to have instead of the id of the query.
        planned: Whether a batch after this one that is planned already is to be planned there, too.

    UnsafeSourceError: files vanish again and again.
    """
    directory = to.directory
    written: list[Path] = []

    def write(found: LiveFiles, paths: Iterable[FilePath]) -> tuple[int, int]:
        for path in paths:
            here, there = found.directory.joinpath(*path), directory.joinpath(*path)
            with refusing(here):
                before, like = here.read_bytes(), here.stat()
            is_planned = path == (OFFSETS, str(at.batch + 1))
            if is_planned and (not planned or decode_fence(before) is not None):
                continue
            there.parent.mkdir(parents=True, exist_ok=True)
            written.append(there)
            after = metadata if path == QUERY_ID else None
            write_like(there, after or rewrite("/".join(path), before), like, is_synced=to.is_synced)
        adapt_query_files(directory, to.root, {})
        sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
        return len(sizes), sum(sizes)

    async def bring() -> tuple[int, int]:
        async with live_files(root) as found:
            # As if every store began with this version: nothing of older batches belongs to the new checkpoint.
            first = at.batch + 1 if at.stores else None
            source = QueryFiles(found, at=at, base_version_max=first, lineages={})
            with redact_paths(found.location, found.directory):
                return await run_blocking(write, found, await source.bring())

    for _ in range(_TRIES - 1):
        try:
            return await bring()
        except UnsafeSourceError:
            # The query may be running, and deletes logs that it does not need any more.
            for path in written:
                await run_blocking(path.unlink, missing_ok=True)
            written.clear()
    return await bring()


async def convert_store(
    root: CheckpointDir, work: StoreToConvert, target: Path, *, runtime: Runtime, replace: bool = False
) -> StoreRestored:
    """Build the directory of one store on this machine, whole or not at all (V2).

    With `replace` the target may have what an earlier attempt has left. Raises as `convert_checkpoint`.
    """
    files, store = root.child(work.id.path), work.store
    settings = msgspec.structs.replace(store.settings, fetches_max=TransferSettings().in_flight_max)
    async with staged(target, runtime, replace=replace) as directory:
        with error_context(files.location, private=directory.parent):
            is_split = store.at.is_hdfs and not work.named.is_hdfs
            snapshot = SnapshotToBuild(
                id=work.id,
                at=store.at,
                named=work.named,
                settings=settings,
                codec=work.codec,
                modified_at_ns=runtime.local_now_ms() * 1_000_000,
                split_key=await key_splitter(root, work.id, work.prefix_columns) if is_split else None,
                sums_files=work.sums_files,
            )
            made = await build_snapshot(files, snapshot, directory, runtime=runtime)
            # What was not touched by a changelog was copied, and nothing but its blocks says whether it is whole.
            for path in sorted(await run_blocking(lambda: list((directory / SSTS).glob("*.sst")))):
                await run_blocking(check_sst, path)
    return made


async def key_splitter(root: CheckpointDir, of: StoreId, prefix_columns: int) -> SplitKey | None:
    """Find how RocksDB's encoder splits the keys of a store that was HDFS-backed (V2a); None: not at all."""
    if not prefix_columns:
        return None
    first = StoreId(of.operator, 0, of.store)
    path = "/".join((first.path, *SCHEMA_PATH))
    schemas = decode_state_schema(await root.read(path, size_bytes_max=SCHEMA_BYTES_MAX), subject=path)
    return prefix_key_splitter(schemas[0].key, prefix_columns)

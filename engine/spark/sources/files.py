"""`spark.read.format("tidemark_files")`: the files of a checkpoint, or of a backup of one (design 0005, D3)."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType
from typing_extensions import override

from blobstore.checkpoint_files import FileStatus
from engine.errors import EngineError
from engine.spark.places import BackupPlace, CheckpointPlace
from engine.spark.sources.options import FILES_OPTIONS, SourceOptions, hints_told
from engine.spark.sources.plan import plan_state
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import StateFileManager
from engine.state.query import StoreAt
from engine.state.sources import StateFiles, as_state_files
from index.errors import FormatError
from index.snapshot.contents import files_of
from index.spark.checkpoint import QUERY_STORE, QUERY_TASK
from index.spark.names import LOGS, SSTS, changelog_name, checksum_name, is_shared_path, parse_state_name, snapshot_name

NAME: Final = "tidemark_files"
# By name, each as Spark and as Arrow write its type.
_COLUMNS: Final = {
    **{name: ("int", pa.int32()) for name in ("operator", "partition")},
    "store": ("string", pa.string()),
    "version": ("bigint", pa.int64()),
    **{name: ("string", pa.string()) for name in ("unique_id", "kind", "path")},
    "size_bytes": ("bigint", pa.int64()),
    "modified_at": ("timestamp", pa.timestamp("us", tz="UTC")),
    "needed": ("boolean", pa.bool_()),
    "blake3": ("string", pa.string()),
    "blobs": ("array<string>", pa.list_(pa.field("element", pa.string()))),
}
_SCHEMA: Final = "_metadata/schema"
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

Row = dict[str, Any]


class FilesWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one task lists: the directory of a store, or all that is in none."""

    place: CheckpointPlace | BackupPlace
    batch: int
    store: StoreAt | None = None
    # Directories that other tasks list.
    left_out: tuple[str, ...] = ()


class FilesSource(DataSource):
    """The files of a checkpoint or of a backup: what each is, and whether a batch needs it.

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
        return NAME

    @override
    def schema(self) -> str:
        return ", ".join(f"{name} {spark}" for name, (spark, _) in _COLUMNS.items())

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        with hints_told():
            return FilesReader(plan_files(SourceOptions.parse(self.options, source=NAME, also=FILES_OPTIONS)))


class FilesReader(DataSourceReader):
    """One store is one partition, and the rest is one."""

    def __init__(self, works: Sequence[FilesWork]) -> None:
        self._works = works

    @override
    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(work) for work in self._works]

    @override
    def __getstate__(self) -> dict[str, object]:
        # As of the reader of state.
        return {}

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        work: FilesWork | None = partition.value
        if work is not None:
            arrow = pa.schema([pa.field(name, of) for name, (_, of) in _COLUMNS.items()])
            with hints_told():
                yield pa.RecordBatch.from_pylist(list(read_files(work)), schema=arrow)


def plan_files(options: SourceOptions) -> tuple[FilesWork, ...]:
    """Return what there is to list. Raises as `plan_state`."""
    plan = plan_state(msgspec.structs.replace(options, rows="bytes"), options.batch)
    works = tuple(FilesWork(place=read.place, batch=plan.batch, store=read.store) for read in plan.stores)
    if options.operator is not None or options.store is not None or options.partitions:
        return works
    left_out = tuple(read.id.path for read in plan.stores)
    return (*works, FilesWork(place=plan.place.of(), batch=plan.batch, left_out=left_out))


def read_files(work: FilesWork) -> Iterator[Row]:
    """Yield the rows of one task."""
    store = work.store
    path = "" if store is None else store.id.path
    if isinstance(work.place, BackupPlace):
        task, name = (QUERY_TASK, QUERY_STORE) if store is None else (store.id.task, store.id.store)
        with work.place.open_index(task, name) as (_, files):
            for parts, entry in files_of(files.index.dir):
                yield _row(work, "/".join(parts), needed=True) | {
                    "size_bytes": entry.metadata.size_bytes,
                    "modified_at": entry.metadata.modified_at_ns // 1000,
                    "blake3": entry.blake3.hex(),
                    "blobs": [blob.key for blob in entry.blobs],
                }
        return
    with work.place.open_root() as (loop, directory):
        needed = loop.run(_find_needed(as_state_files(directory.child(path)), store)) if store else None
        for status in loop.run(_walk(directory, path, work.left_out)):
            below = status.path.removeprefix(f"{path}/")
            yield _row(work, below, needed=None if needed is None else below in needed) | {
                "size_bytes": status.size_bytes,
                "modified_at": status.modified_at_ms * 1000,
            }


async def _walk(directory: CheckpointDir, path: str, left_out: Sequence[str]) -> Sequence[FileStatus]:
    """List the files below a path, without what is below others."""
    if not any(of.startswith(f"{path}/" if path else "") for of in left_out):
        return () if path in left_out else await directory.walk(path)
    found: list[FileStatus] = []
    for status in await directory.list(path):
        found += await _walk(directory, status.path, left_out) if status.is_directory else [status]
    return found


def _row(work: FilesWork, path: str, *, needed: bool | None) -> Row:
    """Say what a file is.

    Args:
        work: Of the task that lists it.
        path: From the directory of the store, or from the root of the checkpoint.
        needed: Whether the batch takes it; of the query's own files their names say it, unless this is true.
    """
    if work.store is None:
        return _query_row(path, work.batch) | ({"needed": True} if needed else {})
    of = work.store.id
    row: Row = {**msgspec.structs.asdict(of), "path": f"{of.path}/{path}", "needed": needed, "kind": "foreign"}
    parsed = parse_state_name(path)
    if parsed is not None:
        row |= msgspec.structs.asdict(parsed.of) | {"kind": "checksum" if parsed.checksum else parsed.kind}
    elif path == _SCHEMA:
        row["kind"] = "schema"
    elif is_shared_path(path) or needed:
        row["kind"] = "sst" if path.startswith(f"{SSTS}/") else "log"
    return row


def _query_row(path: str, batch: int) -> Row:
    """Say what a file in the directory of no store is; of the logs, the version is the batch plus one."""
    matches = ((kind, re.fullmatch(pattern, path, re.DOTALL)) for kind, pattern in _QUERY_KINDS.items())
    kind, found = next((kind, match.groupdict()) for kind, match in matches if match)
    of, operator = (int(found[name]) if found.get(name) else None for name in ("batch", "operator"))
    fits = {"foreign": False, "commits": of == batch, "offsets": of is not None and abs(of - batch) <= 1}
    needed = fits.get(kind, of is None or of <= batch)
    version = None if of is None else of + 1
    return {"path": path, "kind": kind, "operator": operator, "version": version, "needed": needed}


async def _find_needed(files: StateFiles, store: StoreAt) -> frozenset[str] | None:
    """Return what a version of a store takes, as paths in its directory; None if that is damaged."""
    manager = StateFileManager(files, codec=store.settings.codec)
    try:
        resolution = await manager.resolve(store.at.version, store.at.unique_id)
        names = [changelog_name(of) for of in resolution.changelogs]
        shared: list[str] = []
        if resolution.base is not None:
            names.append(snapshot_name(resolution.base))
            metadata = (await manager.read_snapshot(resolution.base)).metadata
            shared += [f"{SSTS}/{file.stored_name}" for file in metadata.sst_files]
            shared += [f"{LOGS}/{file.stored_name}" for file in metadata.log_files]
    except (FormatError, EngineError):
        return None
    return frozenset([*names, *map(checksum_name, names), *shared, _SCHEMA])

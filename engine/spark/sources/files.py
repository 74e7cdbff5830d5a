"""The rows of `tidemark_files`: what is listed of a checkpoint or a backup of one, and what a batch needs of it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from blobstore.checkpoint_files import FileStatus
from engine.errors import EngineError
from engine.spark.sources.options import SourceOptions
from engine.spark.sources.places import BackupPlace, CheckpointPlace
from engine.spark.sources.plan import plan_state
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import StateFileManager
from engine.state.query import StoreAt
from engine.state.settings import StateStoreSettings
from engine.state.sources import StateFiles
from index.errors import FormatError
from index.snapshot.contents import files_of
from index.spark.checkpoint import QUERY_STORE, QUERY_TASK, belongs
from index.spark.names import LOGS, SSTS, changelog_name, checksum_name, is_shared_path, parse_state_name, snapshot_name

Row = dict[str, Any]

# By name, each column's type as Spark and as Arrow write it.
FILES_SCHEMA: Final[Mapping[str, tuple[str, pa.DataType]]] = {
    **dict.fromkeys(("operator", "partition"), ("int", pa.int32())),
    "store": ("string", pa.string()),
    "version": ("bigint", pa.int64()),
    **dict.fromkeys(("unique_id", "kind", "path"), ("string", pa.string())),
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


class FilesWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one task lists: the directory of a store, or all that is in none."""

    place: CheckpointPlace | BackupPlace
    batch: int
    store: StoreAt | None = None
    # Directories that other tasks list.
    left_out: tuple[str, ...] = ()


def plan_files(options: SourceOptions) -> tuple[FilesWork, ...]:
    """Return what there is to list. Raises as `plan_state`."""
    query = plan_state(msgspec.structs.replace(options, rows="bytes"), options.batch)
    works = tuple(FilesWork(place=read.place, batch=query.batch, store=read.store) for read in query.stores)
    if options.chooses_stores:
        return works
    left_out = tuple(read.id.path for read in query.stores)
    return (*works, FilesWork(place=query.place.of(), batch=query.batch, left_out=left_out))


def file_rows(work: FilesWork) -> Iterator[Row]:
    """Yield the rows of one task."""
    store = work.store
    if isinstance(work.place, BackupPlace):
        task, name = (QUERY_TASK, QUERY_STORE) if store is None else (store.id.task, store.id.store)
        with work.place.open_index(task, name) as (_, files):
            for parts, entry in files_of(files.index.dir):
                yield _describe(work, "/".join(parts), needed=True) | {
                    "size_bytes": entry.metadata.size_bytes,
                    "modified_at": entry.metadata.modified_at_ns // 1000,
                    "blake3": entry.blake3.hex(),
                    "blobs": [blob.key for blob in entry.blobs],
                }
        return
    path = "" if store is None else store.id.path
    with work.place.open_root() as (loop, directory):
        needed = loop.run(_find_needed(directory.child(path), store)) if store else None
        for status in loop.run(_walk(directory, path, work.left_out)):
            below = status.path.removeprefix(f"{path}/")
            yield _describe(work, below, needed=None if needed is None else below in needed) | {
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


def _describe(work: FilesWork, path: str, *, needed: bool | None) -> Row:
    """Describe a file by its name.

    Args:
        work: Of the task that lists it.
        path: From the directory of the store, or from the root of the checkpoint.
        needed: Whether the batch takes it; of the query's own files their names say it, unless this is true.
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
        return row | msgspec.structs.asdict(parsed.of) | {"kind": "checksum" if parsed.checksum else parsed.kind}
    if path == _SCHEMA:
        return row | {"kind": "schema"}
    if is_shared_path(path) or needed:
        row["kind"] = "sst" if path.startswith(f"{SSTS}/") else "log"
    return row


async def _find_needed(files: StateFiles, store: StoreAt) -> frozenset[str] | None:
    """Return what a version of a store takes, as paths in its directory; None if that is damaged."""
    manager = StateFileManager(files, StateStoreSettings(codec=store.settings.codec))
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

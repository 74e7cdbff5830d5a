"""The files of a checkpoint, or of a picture of one, one row each: what they are, and whether a batch needs them."""

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import pyarrow as pa

from engine.errors import EngineError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.file_manager import StateFileManager
from engine.state.files import StateFiles
from engine.state.index_files import IndexStateFiles
from engine.state.streaming_checkpoint import StoreAt
from index.batch_log import DEFAULT_STORE, parse_batch_name
from index.errors import FormatError
from index.picture import StoreId
from index.reachable import files_of
from index.state_names import (
    LOGS,
    SSTS,
    changelog_name,
    checksum_name,
    is_shared_path,
    parse_state_name,
    snapshot_name,
)

FIELDS: Final = pa.schema(
    [
        pa.field("operator", pa.int32()),
        pa.field("partition", pa.int32()),
        pa.field("store", pa.string()),
        pa.field("version", pa.int64()),
        pa.field("unique_id", pa.string()),
        pa.field("kind", pa.string()),
        pa.field("path", pa.string()),
        pa.field("size_bytes", pa.int64()),
        pa.field("modified_at", pa.timestamp("us", tz="UTC")),
        pa.field("needed", pa.bool_()),
        pa.field("blake3", pa.string()),
        pa.field("blobs", pa.list_(pa.field("element", pa.string()))),
    ]
)
DDL: Final = (
    "operator int, partition int, store string, version bigint, unique_id string, kind string, path string, "
    "size_bytes bigint, modified_at timestamp, needed boolean, blake3 string, blobs array<string>"
)
# Beside these, every directory of a partition is a store's.
_NO_STORES: Final = frozenset({SSTS, LOGS, "_metadata"})
_SCHEMA: Final = "_metadata/schema"
_QUERY_KINDS: Final = {"metadata": "metadata", "offsets": "offsets", "commits": "commits", "sources": "source"}
_NAME_AND_BATCH: Final = 2


class FileRow(msgspec.Struct, frozen=True, kw_only=True):
    """One file. The order of the fields is the order of the columns."""

    operator: int | None = None
    partition: int | None = None
    store: str | None = None
    # Of a snapshot, a changelog or the checksum of one; of a file of the logs, its batch plus one.
    version: int | None = None
    unique_id: str | None = None
    kind: str
    path: str
    size_bytes: int
    modified_at: int
    # Whether the batch takes it; None: that cannot be told, as what the batch takes is damaged.
    needed: bool | None
    # In a picture: its hash, and the blobs that its bytes are in.
    blake3: str | None = None
    blobs: list[str] | None = None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One file as its directory, or the index of one, tells of it."""

    # From the root of the checkpoint.
    path: str
    size_bytes: int
    modified_at_us: int
    blake3: str | None = None
    blobs: list[str] | None = None


def store_row(of: StoreId, file: Found, needed: frozenset[str] | None) -> FileRow:
    """A file in the directory of a store.

    Args:
        of: Which store.
        file: It.
        needed: Paths in that directory that the batch takes; None if nobody can tell.
    """
    path = file.path.removeprefix(f"{of.path}/")
    kind, version, unique_id = "foreign", None, None
    parsed = parse_state_name(path)
    if parsed is not None:
        kind = "checksum" if parsed.checksum else parsed.kind
        version, unique_id = parsed.of.version, parsed.of.unique_id
    elif path == _SCHEMA:
        kind = "schema"
    elif is_shared_path(path) or (needed is not None and path in needed):
        kind = "sst" if path.startswith(f"{SSTS}/") else "log"
    return FileRow(
        operator=of.operator,
        partition=of.partition,
        store=of.store,
        version=version,
        unique_id=unique_id,
        kind=kind,
        path=file.path,
        size_bytes=file.size_bytes,
        modified_at=file.modified_at_us,
        needed=None if needed is None else path in needed,
        blake3=file.blake3,
        blobs=file.blobs,
    )


def query_row(file: Found, batch: int) -> FileRow:
    """A file of the query itself."""
    parts = file.path.split("/")
    kind, operator, version, needed = _QUERY_KINDS.get(parts[0], "foreign"), None, None, False
    if kind in {"offsets", "commits"}:
        of = parse_batch_name(parts[1]) if len(parts) == _NAME_AND_BATCH else None
        kind = kind if of is not None else "foreign"
        version = None if of is None else of + 1
        wanted = {batch} if kind == "commits" else {batch - 1, batch, batch + 1}
        needed = of in wanted
    elif kind in {"metadata", "source"}:
        needed = not parts[-1].startswith(".")
    elif parts[0] == "state":
        kind, operator, version, needed = _operator_file(parts, batch)
    return FileRow(
        operator=operator,
        version=version,
        kind=kind,
        path=file.path,
        size_bytes=file.size_bytes,
        modified_at=file.modified_at_us,
        needed=needed,
        blake3=file.blake3,
        blobs=file.blobs,
    )


def _operator_file(parts: list[str], batch: int) -> tuple[str, int | None, int | None, bool]:
    match parts:
        case ["state", operator, "_metadata", "metadata"]:
            return "operator metadata", parse_batch_name(operator), None, True
        case ["state", operator, "_metadata", "v2", name] if (of := parse_batch_name(name)) is not None:
            return "operator metadata", parse_batch_name(operator), of + 1, of <= batch
        case ["state", operator, "_stateSchema", _, name] if not name.startswith("."):
            return "state schema", parse_batch_name(operator), None, True
        case ["state", operator, *_]:
            return "foreign", parse_batch_name(operator), None, False
        case _:
            return "foreign", None, None, False


def batch_of(rows: Iterable[FileRow]) -> pa.RecordBatch:
    """Rows as Arrow."""
    listed = list(rows)
    columns = [pa.array([getattr(row, field.name) for row in listed], field.type) for field in FIELDS]
    return pa.RecordBatch.from_arrays(columns, schema=FIELDS)


async def find_needed(files: StateFiles, store: StoreAt) -> frozenset[str] | None:
    """What a version of a store takes, as paths in its directory; None if that cannot be told.

    Raises:
        StoreError: The store did not answer.
    """
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


async def list_partition(directory: CheckpointDir, operator: int, partition: int) -> dict[StoreId, list[Found]]:
    """The files below the directory of a partition, by the store that they are in."""
    found: dict[StoreId, list[Found]] = {}
    for status in await directory.walk(f"state/{operator}/{partition}"):
        first, *rest = status.path.split("/")[3:]
        store = first if rest and first not in _NO_STORES else DEFAULT_STORE
        file = Found(path=status.path, size_bytes=status.size_bytes, modified_at_us=status.modified_at_ms * 1000)
        found.setdefault(StoreId(operator, partition, store), []).append(file)
    return found


async def list_query(directory: CheckpointDir) -> list[Found]:
    """The files of the query itself: all but those of its stores."""
    roots: list[str] = []
    found = []
    for status in await directory.list():
        if not status.is_directory:
            found.append(status)
        elif status.path != "state":
            roots.append(status.path)
    for operator in await directory.list("state"):
        for status in await directory.list(operator.path) if operator.is_directory else ():
            if not status.is_directory:
                found.append(status)
            elif parse_batch_name(status.name) is None:
                roots.append(status.path)
    for root in roots:
        found += await directory.walk(root)
    return [Found(path=s.path, size_bytes=s.size_bytes, modified_at_us=s.modified_at_ms * 1000) for s in found]


async def list_partitions(directory: CheckpointDir) -> list[tuple[int, int]]:
    """Every operator and partition that there is a directory of, whether a batch has it or not."""
    found = []
    for operator in await directory.list("state"):
        of = parse_batch_name(operator.name) if operator.is_directory else None
        if of is not None:
            names = [status.name for status in await directory.list(operator.path) if status.is_directory]
            found += [(of, number) for name in names if (number := parse_batch_name(name)) is not None]
    return sorted(found)


def index_files(files: IndexStateFiles, root: str) -> Iterator[Found]:
    """The files of a snapshot index.

    Args:
        files: Of a store, or of the query itself.
        root: The path of the store in the checkpoint; "" for the query.
    """
    for path, entry in files_of(files.index.dir):
        yield Found(
            path="/".join((root, *path) if root else path),
            size_bytes=entry.metadata.size_bytes,
            modified_at_us=entry.metadata.modified_at_ns // 1000,
            blake3=entry.blake3.hex(),
            blobs=[blob.key for blob in entry.blobs],
        )

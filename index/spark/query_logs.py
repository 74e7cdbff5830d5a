"""The small files at the root of a streaming checkpoint, as Spark 2.1 to 4.3 writes them.

`offsets/<batch>` says what a batch reads and which settings the query is pinned to, `commits/<batch>` that it is done
and under which ids its stores are kept, `metadata` whose checkpoint it is, and the metadata of an operator which stores
it has. Each but `metadata` begins with a line `v<n>`: every file is read by its own (design 0004, B2).

The functions that decode raise BatchLogError for what Spark does not write, and UnknownFormatError for a newer version.
"""

import re
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from index.errors import BatchLogError, ClosedCheckpointError, UnknownFormatError
from index.java_text import decode_json, encode_jackson
from index.snapshot.model import SIZE_BYTES_MAX, UniqueId
from index.spark.replica import decode_fence, decode_replica

OFFSETS_VERSION_MAX: Final = 2
COMMITS_VERSION_MAX: Final = 3
OPERATOR_VERSION_MAX: Final = 2

# With this version the logs of a query name sources, and with that one they hold the ids of its stores.
SOURCE_NAMES_VERSION: Final = 2
UNIQUE_IDS_VERSION: Final = 2
SINKS_VERSION: Final = 3

# Where an operator has its schema files.
SCHEMAS: Final = "_stateSchema"
DEFAULT_STORE: Final = "default"
# The stores of a stream-stream join of state format 1 and 2, in the order in which `stateUniqueIds` has their ids.
JOIN_STORES: Final = (
    "left-keyToNumValues",
    "left-keyWithIndexToValue",
    "right-keyToNumValues",
    "right-keyWithIndexToValue",
)

_NO_OFFSET: Final = "-"
_VERSION_LINE: Final = re.compile(r"v([0-9]{1,9})")
_BATCH_NAME: Final = re.compile(r"0|[1-9][0-9]{0,18}")
_UPGRADE: Final = "a newer Spark wrote it; use a newer tidemark"

T = TypeVar("T")


class SourceMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a named source of a query was made by."""

    source_id: str
    provider_name: str
    api_version: str


class ControlBatch(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A batch that reads nothing and changes how the query runs."""

    operation_type: str
    operation_info: str | None = None


class SourceOffset(msgspec.Struct, frozen=True):
    """How far a batch reads one source."""

    # Its place among the sources of the query, or its name where they have names.
    source: str
    # As the source wrote it, on one line; None where the source has nothing yet.
    offset: str | None


class BatchOffsets(msgspec.Struct, frozen=True, kw_only=True):
    """A file of `offsets/`: written before its batch."""

    version: int = 1
    # False: the file has no such line, as Spark 2.1 wrote it; the next three are then empty.
    has_metadata: bool = True
    watermark_ms: int = 0
    # By the clock of the driver.
    timestamp_ms: int = 0
    # The settings that the query is pinned to, in the order of the file.
    conf: dict[str, str] = msgspec.field(default_factory=dict)
    # Of version 2 only.
    sources: dict[str, SourceMetadata] = msgspec.field(default_factory=dict)
    control: ControlBatch | None = None
    offsets: tuple[SourceOffset, ...] = ()


class SinkMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A sink that a query writes to, or wrote to."""

    sink_name: str
    commit_offset: str
    provider_name: str
    api_version: str
    is_active: bool


class BatchCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A file of `commits/`: written after its batch, and what commits it (design 0004, B3)."""

    version: int = 1
    next_watermark_ms: int = 0
    # Operator to partition to the ids of its stores; None where there are none: in version 1, or without state.
    unique_ids: dict[int, tuple[tuple[UniqueId, ...], ...]] | None = None
    # Of version 3 only; exactly one of them is active.
    sinks: dict[str, SinkMetadata] = msgspec.field(default_factory=dict)


class OperatorStore(msgspec.Struct, frozen=True, kw_only=True):
    """A store of a stateful operator."""

    name: str = msgspec.field(name="storeName")
    prefix_columns_count: int = msgspec.field(name="numColsPrefixKey")
    partitions_count: int = msgspec.field(name="numPartitions")
    # Of version 2 only; absolute, so Spark reads a checkpoint that was moved only once they are rewritten.
    schema_paths: tuple[str, ...] = msgspec.field(default=(), name="stateSchemaFilePaths")


class OperatorMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A stateful operator: `_metadata/metadata` (version 1) or `_metadata/v2/<batch>`."""

    version: int = 1
    id: int
    # As Spark calls it, such as "stateStoreSave" or "symmetricHashJoin".
    name: str
    stores: tuple[OperatorStore, ...]
    # Of version 2 only: JSON.
    properties: str = ""

    @property
    def schemas(self) -> tuple[str, ...]:
        """The names of its schema files below `SCHEMAS`: their paths are those of where it was made."""
        paths = (path for store in self.stores for path in store.schema_paths)
        return tuple(path.rpartition(f"/{SCHEMAS}/")[2] for path in paths)


class _OffsetsWire(msgspec.Struct, rename="camel"):
    batch_watermark_ms: int = 0
    batch_timestamp_ms: int = 0
    conf: dict[str, str] = {}


class _NamedOffsetsWire(_OffsetsWire, rename="camel"):
    source_metadata_info: dict[str, SourceMetadata] = {}
    control_batch_info: ControlBatch | msgspec.UnsetType = msgspec.UNSET


class _CommitWire(msgspec.Struct, rename="camel"):
    next_batch_watermark_ms: int = 0
    state_unique_ids: dict[int, tuple[tuple[UniqueId, ...], ...]] | msgspec.UnsetType | None = msgspec.UNSET
    sink_metadata_map: dict[str, SinkMetadata] | msgspec.UnsetType = msgspec.UNSET


class _OperatorInfoWire(msgspec.Struct, rename="camel"):
    operator_id: int
    operator_name: str


class _OperatorWire(msgspec.Struct, rename="camel"):
    operator_info: _OperatorInfoWire
    state_store_info: tuple[OperatorStore, ...]
    operator_properties_json: str = ""


class _VariableWire(msgspec.Struct, rename="camel"):
    state_name: str
    state_variable_type: str


class _PropertiesWire(msgspec.Struct, rename="camel"):
    state_variables: tuple[_VariableWire, ...] = ()


class _QueryWire(msgspec.Struct):
    id: str


def parse_batch_name(name: str) -> int | None:
    """Parse the batch of a file in `offsets/`, `commits/` or `_metadata/v2/`; None for a foreign name."""
    if _BATCH_NAME.fullmatch(name) is None:
        return None
    batch = int(name)
    return batch if batch < SIZE_BYTES_MAX else None


def encode_offsets(offsets: BatchOffsets) -> bytes:
    """Encode a file of `offsets/`, byte for byte as Spark writes it.

    Raises:
        BatchLogError: Something in it cannot be written in its version, or an offset is more than one line.
        UnknownFormatError: There is no such version.
    """
    _check_version(offsets.version, OFFSETS_VERSION_MAX, "offsets")
    named = offsets.version >= SOURCE_NAMES_VERSION
    if not named and (offsets.sources or offsets.control is not None):
        raise BatchLogError("version 1 has no field for sources by name", subject="offsets")
    wire = _OffsetsWire(offsets.watermark_ms, offsets.timestamp_ms, offsets.conf)
    if named:
        control = msgspec.UNSET if offsets.control is None else offsets.control
        wire = _NamedOffsetsWire(offsets.watermark_ms, offsets.timestamp_ms, offsets.conf, offsets.sources, control)
    lines = [f"v{offsets.version}", encode_jackson(wire).decode() if offsets.has_metadata else ""]
    for at, item in enumerate(offsets.offsets):
        text = _NO_OFFSET if item.offset is None else item.offset
        if "\n" in text or "\r" in text:
            raise BatchLogError("is more than one line", subject=f"offset of source {item.source}")
        if not named and item.source != str(at):
            raise BatchLogError("version 1 has no field for the name of a source", subject=f"source {item.source}")
        if named and (not item.source or any(c in item.source for c in ":\n\r")):
            raise BatchLogError("cannot be distinguished from its offset", subject=f"source {item.source!r}")
        lines.append(f"{item.source}:{text}" if named else text)
    return "\n".join(lines).encode()


def decode_offsets(data: bytes, *, subject: str = "offsets") -> BatchOffsets:
    """Decode a file of `offsets/`."""
    version, lines = _split(data, OFFSETS_VERSION_MAX, subject)
    if not lines:
        raise BatchLogError("ends after its version", subject=subject)
    named = version >= SOURCE_NAMES_VERSION
    found: list[SourceOffset] = []
    for at, line in enumerate(lines[1:]):
        source, colon, offset = line.partition(":") if named else (str(at), ":", line)
        if not colon:
            raise BatchLogError(f"has a line without a source: {line!r}", subject=subject)
        found.append(SourceOffset(source, None if offset == _NO_OFFSET else offset))
    offsets = BatchOffsets(version=version, has_metadata=bool(lines[0].strip()), offsets=tuple(found))
    if not offsets.has_metadata:
        return offsets
    wire: _OffsetsWire = _parse(lines[0], _NamedOffsetsWire if named else _OffsetsWire, subject)
    offsets = msgspec.structs.replace(
        offsets, watermark_ms=wire.batch_watermark_ms, timestamp_ms=wire.batch_timestamp_ms, conf=wire.conf
    )
    if isinstance(wire, _NamedOffsetsWire):
        control = None if wire.control_batch_info is msgspec.UNSET else wire.control_batch_info
        return msgspec.structs.replace(offsets, sources=wire.source_metadata_info, control=control)
    return offsets


def encode_commit(commit: BatchCommit) -> bytes:
    """Encode a file of `commits/`, byte for byte as Spark writes it.

    Raises:
        BatchLogError: Something in it cannot be written in its version, or not exactly one sink is active.
        UnknownFormatError: There is no such version.
    """
    _check_version(commit.version, COMMITS_VERSION_MAX, "commit")
    if commit.unique_ids is not None and commit.version < UNIQUE_IDS_VERSION:
        raise BatchLogError("version 1 has no field for unique ids", subject="commit")
    if commit.sinks and commit.version < SINKS_VERSION:
        raise BatchLogError(f"version {commit.version} has no field for sinks", subject="commit")
    wire = _CommitWire(commit.next_watermark_ms)
    if commit.unique_ids is not None:
        wire.state_unique_ids = commit.unique_ids
    if commit.version >= SINKS_VERSION:
        _check_sinks(commit.sinks, "commit")
        wire.sink_metadata_map = commit.sinks
    return f"v{commit.version}\n".encode() + encode_jackson(wire)


def decode_commit(data: bytes, *, subject: str = "commit") -> BatchCommit:
    """Decode a file of `commits/`. A version line alone, as Spark 2.1 wrote it, is of version 1."""
    version, lines = _split(data, COMMITS_VERSION_MAX, subject)
    wire = _parse(lines[0] if lines else "{}", _CommitWire, subject)
    # Spark reads no such fields in older versions, so they mean nothing there.
    ids = wire.state_unique_ids if version >= UNIQUE_IDS_VERSION else None
    sinks = wire.sink_metadata_map if version >= SINKS_VERSION else {}
    found = BatchCommit(
        version=version,
        next_watermark_ms=wire.next_batch_watermark_ms,
        unique_ids=None if ids is msgspec.UNSET else ids,
        sinks={} if sinks is msgspec.UNSET else sinks,
    )
    if version >= SINKS_VERSION:
        _check_sinks(found.sinks, subject)
    return found


def decode_query_id(data: bytes, *, subject: str = "metadata") -> str:
    """Decode the id of the query whose checkpoint it is."""
    if (replica := decode_replica(data, subject=subject)) is not None:
        raise ClosedCheckpointError(f"is that of a replica of {replica.replica_of}", subject=subject, hint=replica.hint)
    return _parse(_text(data, subject), _QueryWire, subject).id


def decode_operator(data: bytes, *, subject: str = "operator metadata") -> OperatorMetadata:
    """Decode the metadata of an operator."""
    version, lines = _split(data, OPERATOR_VERSION_MAX, subject)
    wire = _parse("\n".join(lines), _OperatorWire, subject)
    return OperatorMetadata(
        version=version,
        id=wire.operator_info.operator_id,
        name=wire.operator_info.operator_name,
        stores=wire.state_store_info,
        properties=wire.operator_properties_json,
    )


def decode_state_variables(properties: str, *, subject: str = "operator properties") -> dict[str, str]:
    """Decode the type of each state variable of an operator, such as `ListState`; most operators have none."""
    found = _parse(properties or "{}", _PropertiesWire, subject).state_variables
    return {variable.state_name: variable.state_variable_type for variable in found}


def order_stores(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of an operator's stores, from its metadata, in the order in which a commit has their ids.

    Raises:
        BatchLogError: An operator of several stores is unknown: which id belongs to which is not known.
    """
    found = tuple(names)
    if len(found) <= 1:
        return found
    if sorted(found) == sorted(JOIN_STORES):
        return JOIN_STORES
    raise BatchLogError(f"has the stores {', '.join(found)}, in no known order", subject="operator", hint=_UPGRADE)


def _check_sinks(sinks: dict[str, SinkMetadata], subject: str) -> None:
    if sum(sink.is_active for sink in sinks.values()) != 1:
        raise BatchLogError("not exactly one sink is active", subject=subject)


def _check_version(version: int, version_max: int, subject: str) -> None:
    if not 1 <= version <= version_max:
        raise UnknownFormatError(
            f"is of version {version}; 1 to {version_max} are known", subject=subject, hint=_UPGRADE
        )


def _split(data: bytes, version_max: int, subject: str) -> tuple[int, list[str]]:
    if (moved_to := decode_fence(data)) is not None:
        hint = "go on there; to go on here instead, delete this file and the copy there"
        raise ClosedCheckpointError(
            f"is closed: the query has moved to {moved_to.location}", subject=subject, hint=hint
        )
    first, *lines = _text(data, subject).replace("\r\n", "\n").removesuffix("\n").split("\n")
    return version_of(first.strip(), version_max, subject), lines


def version_of(line: str, version_max: int, subject: str) -> int:
    """Parse the version that a file begins with, such as `v1`. Raises as the functions that decode."""
    m = _VERSION_LINE.fullmatch(line)
    if m is None:
        raise BatchLogError(f"begins with {line[:40]!r}, not with a version", subject=subject)
    _check_version(int(m[1]), version_max, subject)
    return int(m[1])


def _text(data: bytes, subject: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BatchLogError("is not UTF-8", subject=subject) from error


def _parse(text: str, kind: type[T], subject: str) -> T:
    return decode_json(text, kind, BatchLogError, "is not what Spark writes", subject=subject)

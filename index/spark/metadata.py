"""The `metadata` entry of a snapshot: which SSTs and logs belong to it, and what it counts (design 0004, 4)."""

from typing import Final

import msgspec

from index.errors import FormatError, StateMetadataError, UnknownFormatError
from index.java_text import decode_json, encode_jackson
from index.snapshot.model import SIZE_BYTES_MAX
from index.spark.names import LOGS, SSTS, check_local_name, check_stored_name

# Some 250,000 files, more than any RocksDB has, and few enough to be read at once: what is read takes ten times that.
STATE_METADATA_BYTES_MAX: Final = 32 * 1024 * 1024
STATE_FILES_MAX: Final = 1_000_000
# A column family's number is a Java short.
COLUMN_FAMILY_ID_MAX: Final = 0x7FFF
# What `num_keys` is when the query does not count its rows.
NOT_COUNTED: Final = -1

_FIRST_LINE: Final = b"v1\n"
_HINT: Final = "the snapshot is damaged; load an older version, or restore the directory from a backup"


class StoredFile(msgspec.Struct, frozen=True):
    """One SST or archived WAL of a snapshot; encoded as Spark writes an SST."""

    # `000008.sst`: what RocksDB calls it.
    local_name: str = msgspec.field(name="localFileName")
    # `000008-<uuid>.sst`: what it is called in `SSTs/` or `logs/`.
    stored_name: str = msgspec.field(name="dfsSstFileName")
    size_bytes: int = msgspec.field(name="sizeBytes")

    @property
    def path(self) -> str:
        """Its path in the directory of a state store."""
        return f"{SSTS if self.stored_name.endswith('.sst') else LOGS}/{self.stored_name}"


class StateMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot says of itself.

    The three fields of column families come together: all of a store that was written by Spark 4 or by us, None in
    files of Spark 3, where the mapping and the greatest id are both absent.
    """

    sst_files: tuple[StoredFile, ...] = ()
    # Never seen from Spark, which writes no WAL, but part of the format.
    log_files: tuple[StoredFile, ...] = ()
    # Rows, without those of internal column families; NOT_COUNTED if the query does not count.
    num_keys: int
    # Rows of internal column families. Spark 3 and 4.0.0 do not write it: then it is 0.
    num_internal_keys: int = 0
    # Name and number of every virtual column family; empty when the store uses none.
    column_family_ids: tuple[tuple[str, int], ...] | None = None
    # Name, and whether the family is internal: timers, counters, indexes.
    column_family_internal: tuple[tuple[str, bool], ...] | None = None
    column_family_id_max: int | None = None

    @property
    def files(self) -> tuple[StoredFile, ...]:
        return (*self.sst_files, *self.log_files)


class _SparkLog(msgspec.Struct, frozen=True, rename="camel"):
    local_file_name: str
    dfs_log_file_name: str
    size_bytes: int


class _SparkMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Spark's `RocksDBCheckpointMetadata`, fields in its order."""

    sst_files: tuple[StoredFile, ...]
    log_files: tuple[_SparkLog, ...] | None = None
    num_keys: int
    # None only in what older versions wrote.
    num_internal_keys: int | None = None
    column_family_mapping: dict[str, int] | None = None
    column_family_type_map: dict[str, bool] | None = None
    max_column_family_id: int | None = None


def encode_state_metadata(metadata: StateMetadata) -> bytes:
    """Encode the entry as Spark 4.3 writes it.

    Raises:
        StateMetadataError: A value is out of range, a local name occurs twice, or one of the mapping of column families
            and the greatest id is there without the other.
        UnsafeNameError: A name is not what design 0004, N4 allows.
    """
    _check(metadata)
    ids, internal = metadata.column_family_ids, metadata.column_family_internal
    wire = _SparkMetadata(
        sst_files=metadata.sst_files,
        log_files=tuple(_SparkLog(f.local_name, f.stored_name, f.size_bytes) for f in metadata.log_files) or None,
        num_keys=metadata.num_keys,
        num_internal_keys=metadata.num_internal_keys,
        column_family_mapping=None if ids is None else dict(ids),
        column_family_type_map=None if internal is None else dict(internal),
        max_column_family_id=metadata.column_family_id_max,
    )
    try:
        return _FIRST_LINE + encode_jackson(wire)
    except UnicodeEncodeError as error:
        raise StateMetadataError("has a name that is not valid Unicode", subject="metadata", hint=_HINT) from error


def decode_state_metadata(data: bytes, *, subject: str = "metadata") -> StateMetadata:
    """Decode the entry of a snapshot of Spark 3.2 or newer, or of tidemark; unknown fields are ignored.

    Raises:
        UnknownFormatError: The first line is not `v1`.
        StateMetadataError: It is not JSON of this form, or breaks a rule of `encode_state_metadata`.
        UnsafeNameError: A name is not what design 0004, N4 allows.
    """
    if len(data) > STATE_METADATA_BYTES_MAX:
        message = f"{len(data)} bytes exceed the cap of {STATE_METADATA_BYTES_MAX}"
        raise StateMetadataError(message, subject=subject, hint=_HINT)
    if not data.startswith(_FIRST_LINE):
        line = data[:40].split(b"\n")[0].decode(errors="replace")
        hint = "if the first line is a later version, a newer Spark has written it: upgrade tidemark"
        raise UnknownFormatError(f"begins with {line!r}, not 'v1'", subject=subject, hint=hint)
    json, what = memoryview(data)[len(_FIRST_LINE) :], "is not what Spark writes"
    wire = decode_json(json, _SparkMetadata, StateMetadataError, what, subject=subject, hint=_HINT)
    metadata = _from_wire(wire)
    try:
        _check(metadata)
    except FormatError as error:
        error.add_note(f"while reading {subject}")
        raise
    return metadata


def _from_wire(wire: _SparkMetadata) -> StateMetadata:
    ids, internal, internal_keys = wire.column_family_mapping, wire.column_family_type_map, wire.num_internal_keys
    if internal_keys is None:
        # Spark 4.0 has column families and no such number; before it there was nothing to count.
        internal_keys = 0 if ids is None else NOT_COUNTED
    return StateMetadata(
        sst_files=wire.sst_files,
        log_files=tuple(StoredFile(f.local_file_name, f.dfs_log_file_name, f.size_bytes) for f in wire.log_files or ()),
        # Some of Spark 4.0 counts a removal of what is not there: a number below nothing is none.
        num_keys=max(NOT_COUNTED, wire.num_keys),
        num_internal_keys=max(NOT_COUNTED, internal_keys),
        column_family_ids=None if ids is None else tuple(ids.items()),
        column_family_internal=None if internal is None else tuple(internal.items()),
        column_family_id_max=wire.max_column_family_id,
    )


def _check(metadata: StateMetadata) -> None:
    if len(metadata.files) > STATE_FILES_MAX:
        raise _broken(f"names more than {STATE_FILES_MAX} files")
    for files, extension in ((metadata.sst_files, ".sst"), (metadata.log_files, ".log")):
        for file in files:
            check_local_name(file.local_name, extension)
            check_stored_name(file.stored_name, extension)
            if not 0 <= file.size_bytes <= SIZE_BYTES_MAX:
                raise _broken(f"gives {file.local_name} a size of {file.size_bytes}")
        if len({file.local_name for file in files}) != len(files):
            raise _broken("names a local file twice")
    for count, what in ((metadata.num_keys, "keys"), (metadata.num_internal_keys, "internal keys")):
        if not NOT_COUNTED <= count <= SIZE_BYTES_MAX:
            raise _broken(f"counts {count} {what}")
    _check_column_families(metadata)


def _check_column_families(metadata: StateMetadata) -> None:
    ids, most = metadata.column_family_ids, metadata.column_family_id_max
    if (ids is None) != (most is None):
        raise _broken("has one of columnFamilyMapping and maxColumnFamilyId without the other")
    if ids is None or most is None:
        return
    if not 0 <= most <= COLUMN_FAMILY_ID_MAX:
        raise _broken(f"has a greatest column family id of {most}")
    for name, number in ids:
        if not 0 <= number <= most:
            raise _broken(f"gives column family {name!r} the id {number}, and the greatest is {most}")
    if len({name for name, _ in ids}) != len(ids) or len({number for _, number in ids}) != len(ids):
        raise _broken("has a column family or its id twice")


def _broken(message: str) -> StateMetadataError:
    return StateMetadataError(message, subject="metadata", hint=_HINT)

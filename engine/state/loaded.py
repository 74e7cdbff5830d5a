"""One version of a state store that is open: its rows, what was written since, and where it came from.

rocksdict cannot write operands, so to merge is to set the whole value again: one by one, a thousand operands of one key
would cost what half a million do. So `PendingOperands` keeps them, and those of a key are joined once, at its next
read.

Column families are virtual: a prefix of two bytes before every key is the family (design 0004, §3 L4), and RocksDB
itself has one. A name gets the next number, and a number is never used twice in the life of a store: what an old
changelog says of a family that is gone must not reach a new one.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from engine.errors import DamagedError, UsageError
from engine.local.checksums import crc32c
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from engine.state.changelogs import PREFIX_BYTES, ChangelogWriter, KeyCounts
from engine.state.compression import Codec
from engine.state.local_files import unwritable_error
from engine.state.settings import StateStoreSettings
from index.snapshot.model import LineageItem, UniqueId
from index.spark.changelog import DELETE, DELETE_RANGE, MERGE, PUT, Record, changelog_version
from index.spark.checksums import Crc32c, split_values, unwrap_record, unwrap_value, wrap_deleted_key, wrap_value
from index.spark.lineage import LINEAGE_BYTES_MAX, Resolution, lineage_fits
from index.spark.metadata import COLUMN_FAMILY_ID_MAX, NOT_COUNTED, StateMetadata
from index.spark.names import StateVersion

DEFAULT_FAMILY: Final = "default"

NO_ID: Final = -1
NAME_CHARACTERS_MAX: Final = 1024


class ColumnFamily(msgspec.Struct, frozen=True):
    """One column family of a store."""

    name: str
    # NO_ID: families are off, and keys have no prefix.
    id: int
    # Whether it is bookkeeping of the operator, whose keys are counted apart.
    is_internal: bool = False

    @property
    def prefix(self) -> bytes:
        """The bytes before each of its keys: its number, little-endian as the machine that Spark runs on."""
        return self.id.to_bytes(PREFIX_BYTES, "little", signed=True) if self.id != NO_ID else b""


class ColumnFamilies:
    """The families of one loaded version."""

    def __init__(self, *, is_enabled: bool, families: tuple[ColumnFamily, ...] = (), id_max: int = 0) -> None:
        # Whether keys carry prefixes; if not, there is only `default`.
        self.is_enabled = is_enabled
        # The greatest number that was ever given.
        self.id_max = max([id_max, *(family.id for family in families)]) if is_enabled else 0
        self._prefixes: dict[str, bytes] = {}
        self._by_prefix: dict[bytes, ColumnFamily] = {}
        for family in families if is_enabled else (ColumnFamily(DEFAULT_FAMILY, NO_ID),):
            self._set(family)

    def __iter__(self) -> Iterator[ColumnFamily]:
        return iter(tuple(self._by_prefix.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._prefixes

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(family.name for family in sorted(self, key=lambda family: family.id))

    def prefix(self, name: str) -> bytes:
        """Return the prefix of the keys of a family; a `UsageError` if there is no such family."""
        try:
            return self._prefixes[name]
        except KeyError:
            known = ", ".join(self.names) or "none"
            hint = "add it with `add_family` first" if self.is_enabled else "the settings have no column families"
            reason = f"there is no such column family; there are: {known}"
            raise UsageError(reason, operation="state", subject=repr(name), hint=hint) from None

    def add(self, name: str, *, is_internal: bool) -> bool:
        """Give a name the next number; False if it has one.

        Raises:
            UsageError: Families are off, the name cannot be one, or all numbers are given.
        """
        if name in self:
            return False
        if not self.is_enabled:
            hint = "set `column_families`"
            raise UsageError("the settings have no column families", operation="add", subject=repr(name), hint=hint)
        if not name or name != name.strip() or len(name) > NAME_CHARACTERS_MAX:
            hint = "a name is not empty, has no space at its ends, and at most 1,024 characters"
            raise UsageError("is not a name of a column family", operation="add", subject=repr(name), hint=hint)
        if self.id_max >= COLUMN_FAMILY_ID_MAX:
            hint = "numbers of families that were dropped do not come back: begin a new store"
            raise UsageError(f"all {self.id_max} numbers are given", operation="add", subject=repr(name), hint=hint)
        # From 1 on, as Spark 4.3 does; its earlier sources begin at 0.
        self.id_max += 1
        self._set(ColumnFamily(name, self.id_max, is_internal))
        return True

    def drop(self, name: str) -> None:
        del self._by_prefix[self._prefixes.pop(name)]

    def is_internal(self, stored_key: bytes) -> bool:
        """Return whether a key, with its prefix, is of an internal family."""
        family = self._by_prefix.get(stored_key[:PREFIX_BYTES])
        return family is not None and family.is_internal

    def check_prefix(self, stored_key: bytes, directory: str) -> None:
        """Refuse a key whose family no snapshot names, and whose meaning is lost, with a `DamagedError`."""
        if stored_key[:PREFIX_BYTES] not in self._by_prefix:
            hint = "the snapshot that named the families is needed: load a version that has one"
            reason = f"keys begin with {stored_key[:PREFIX_BYTES].hex()}, which is not a known column family"
            raise DamagedError(reason, operation="load", subject=directory, hint=hint)

    def _set(self, family: ColumnFamily) -> None:
        self._prefixes[family.name] = family.prefix
        self._by_prefix[family.prefix] = family


def after_prefix(prefix: bytes) -> bytes:
    """Return the least key that sorts after every key with this prefix: the end of their range."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


# Above this they are written before any read.
OPERANDS_BYTES_MAX: Final = 4 * 1024 * 1024
# Memory of an operand beside its bytes.
_OVERHEAD_BYTES: Final = 100


class PendingOperands:
    """Operands by key, in order, that RocksDB does not have yet. Not for use by two threads at once."""

    def __init__(self, db: StoreWriter) -> None:
        self._db = db
        self._by_key: dict[bytes, list[bytes]] = {}
        self._size_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def add(self, key: bytes, operand: bytes) -> None:
        if key not in self._by_key:
            self._by_key[key] = []
            self._size_bytes += len(key) + _OVERHEAD_BYTES
        self._by_key[key].append(operand)
        self._size_bytes += len(operand) + _OVERHEAD_BYTES
        if self._size_bytes >= OPERANDS_BYTES_MAX:
            self.write()

    def drop(self, key: bytes) -> None:
        """Forget the operands of a key whose value is replaced or removed."""
        operands = self._by_key.pop(key, None)
        if operands is not None:
            self._size_bytes -= len(key) + _OVERHEAD_BYTES + sum(len(operand) + _OVERHEAD_BYTES for operand in operands)

    def write_one(self, key: bytes) -> None:
        """Write what was appended to this key; a failure can be tried again."""
        operands = self._by_key.get(key)
        if operands is not None:
            before = self._db.get(key)
            self._db.put(key, self._db.merge_delimiter.join(operands if before is None else (before, *operands)))
            self.drop(key)

    def write(self) -> None:
        """Write everything, one value after the other: each may be of any size."""
        for key in sorted(self._by_key):
            self.write_one(key)


class RowChecks:
    """Writes a checksum with every row of a store, and verifies it at every replay and at some reads.

    One of `row_check_ratio` rows read is verified, and with 0 none. What does not fit its checksum, or has none, is a
    `RowChecksumError`.
    """

    def __init__(self, settings: StateStoreSettings) -> None:
        self._delimiter = settings.merge_delimiter
        self._ratio = settings.row_check_ratio
        self._reads = 0

    def read(self, stored_key: bytes, stored: bytes) -> bytes:
        return unwrap_value(stored_key, stored, delimiter=self._delimiter, crc32c=self._turn())

    def replayed(self, record: Record) -> Record:
        """Verify a record of a changelog, and return it as it goes into RocksDB."""
        return unwrap_record(record, delimiter=self._delimiter, crc32c=crc32c)

    def check_snapshot(self, directory: Path, settings: RocksDbSettings) -> None:
        """Verify the rows of a rocksdb_checkpoint, by the ratio. Blocks."""
        if not self._ratio:
            return
        with StoreReader.open(directory, settings) as reader:
            for stored_key, stored in reader.items():
                if (check := self._turn()) is not None:
                    split_values(stored_key, stored, delimiter=self._delimiter, crc32c=check)

    def _turn(self) -> Crc32c | None:
        if not self._ratio:
            return None
        self._reads += 1
        return crc32c if self._reads % self._ratio == 0 else None


# An upper bound for an item of a lineage in a header, beside its id.
_ITEM_BYTES_MAX: Final = 64


class RunningCounts:
    """Counts keys on from `counted`, those of internal families apart; None: they are not counted."""

    def __init__(self, counted: KeyCounts | None) -> None:
        self.is_on = True
        counted = counted or KeyCounts(NOT_COUNTED, NOT_COUNTED)
        self.keys, self.internal_keys = counted.keys, counted.internal_keys
        self._stop_if_wrong()

    def add(self, count: int, *, is_internal: bool) -> None:
        if is_internal:
            self.internal_keys += count
        else:
            self.keys += count
        self._stop_if_wrong()

    def _stop_if_wrong(self) -> None:
        if min(self.keys, self.internal_keys) < 0:
            # The snapshot had too few, as some of Spark 4.0 have: a number known to be wrong is worse than none, and
            # where there is none, the next load counts.
            self.is_on = False
            self.keys = self.internal_keys = NOT_COUNTED


class LoadedState:
    """The rows of a version, in a RocksDB that is open at it, and the changes on top. Not for two threads at once."""

    def __init__(
        self,
        db: StoreWriter,
        settings: StateStoreSettings,
        resolution: Resolution,
        *,
        families: ColumnFamilies,
        counts: RunningCounts,
        rows: RowChecks | None,
    ) -> None:
        self.db = db
        self.settings = settings
        # What it takes to load the version once more, which G4 keeps.
        self.resolution = resolution
        # Of the newest snapshot that was made, uploaded or not: the next one is counted from it.
        self.snapshot_version = resolution.base.version if resolution.base is not None else 0
        self.families = families
        self.counts = counts
        # Whether it was declared empty, whatever there is of this version (`load(..., empty=True)`).
        self.is_empty_start = False
        self.is_read_only = True
        # Versions were deleted since, and what this one is made of was not kept: nothing can be built on it.
        self.is_outlived = False
        self.is_dirty = False
        # A change is in RocksDB, in the changelog or in neither, and it is not known where: an error came between.
        self.is_torn = False
        # RocksDB has found a damaged block.
        self.is_damaged = False
        # A family came or went, which only a snapshot can hold; or the store has no snapshot that opens.
        self.needs_snapshot = False
        # The header of the changelog that is being written does not hold the whole lineage (design 0004, C6).
        self.is_lineage_cut = False
        self.next_id: UniqueId | None = None
        self.writer: ChangelogWriter | None = None
        self._rows = rows
        self._operands = PendingOperands(db)

    def still_is(self, target: StateVersion, *, read_only: bool) -> bool:
        """Return whether this is the version, whole and as it was committed (design 0004, C2)."""
        changed = self.is_dirty or self.is_empty_start or self.is_damaged
        return self.target == target and not changed and (read_only or not self.is_outlived)

    def check_writable(self, operation: str) -> None:
        """Refuse a write with a `UsageError` if the version was loaded to be read only."""
        if self.is_read_only:
            hint = "load it without read_only"
            raise UsageError("was loaded to be read only", operation=operation, subject=str(self.target), hint=hint)

    def check_committable(self) -> None:
        """Refuse a commit with a `UsageError` if the version is read only, or a write has failed."""
        self.check_writable("commit")
        if self.is_torn:
            hint = "load the version again and repeat the work: an earlier write has failed half way"
            raise UsageError("a write has failed", operation="commit", subject=str(self.target), hint=hint)

    @property
    def target(self) -> StateVersion:
        return self.resolution.target

    def begin(self, changelog: Path, unique_id: UniqueId | None) -> None:
        """Prepare for the changes of the next version, with its changelog and its id (None for format 1)."""
        self.cancel()
        self.is_read_only = self.is_lineage_cut = False
        self.next_id = unique_id
        if self.settings.changelogs and not self.is_empty_start:
            families, codec = self.families.is_enabled, self.settings.codec
            self.writer, self.is_lineage_cut = new_changelog(
                changelog, codec, self.resolution, column_families=families, unique_ids=unique_id is not None
            )

    def cancel(self) -> None:
        """Remove the changelog that is being written, or was written and not taken by the store."""
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.cancel()
            writer.path.unlink(missing_ok=True)

    def advance(self, of: StateVersion, *, snapshot_is_uploaded: bool) -> None:
        self.is_dirty = self.is_torn = self.needs_snapshot = self.is_empty_start = False
        self.resolution = advanced(self.resolution, of)
        if snapshot_is_uploaded:
            self.resolution = rebased(self.resolution, of)

    def write_operands(self) -> None:
        """Bring RocksDB up to date with what was merged: before it is read by other methods than `get` and `items`."""
        self._operands.write()

    @property
    def metadata(self) -> StateMetadata:
        families = tuple(self.families) if self.families.is_enabled else ()
        return StateMetadata(
            num_keys=self.counts.keys,
            num_internal_keys=self.counts.internal_keys,
            column_family_ids=tuple((family.name, family.id) for family in families),
            column_family_internal=tuple((family.name, family.is_internal) for family in families),
            column_family_id_max=self.families.id_max,
        )

    def get(self, key: bytes, family: str = DEFAULT_FAMILY) -> bytes | None:
        stored_key = self.families.prefix(family) + key
        try:
            self._operands.write_one(stored_key)
            value = self.db.get(stored_key)
        except DamagedError:
            self.is_damaged = True
            raise
        if value is None or self._rows is None:
            return value
        return self._rows.read(stored_key, value)

    def get_many(self, keys: Sequence[bytes], family: str) -> list[tuple[bytes, bytes]]:
        """Return the rows of those keys that there are, in their order."""
        before, rows = self.families.prefix(family), self._rows
        self._operands.write()
        values = zip(keys, self.db.get_many([before + key for key in keys]), strict=True)
        found = [(key, value) for key, value in values if value is not None]
        return found if rows is None else [(key, rows.read(before + key, value)) for key, value in found]

    def items(self, prefix: bytes, family: str, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over keys and values in the order of the keys, as they are at this call."""
        before, rows = self.families.prefix(family), self._rows
        self._operands.write()
        scan = self.db.items(before + prefix, start=before + start)

        def without_prefix() -> Iterator[tuple[bytes, bytes]]:
            try:
                for stored_key, value in scan:
                    yield stored_key[len(before) :], value if rows is None else rows.read(stored_key, value)
            except DamagedError:
                self.is_damaged = True
                raise

        return without_prefix()

    def chunks(self, family: str, *, rows_max: int, bytes_max: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Iterate as `items`, in lists: see `StoreReader.chunks`."""
        before, rows = self.families.prefix(family), self._rows
        skip = len(before)
        self._operands.write()
        try:
            for chunk in self.db.chunks(before, rows_max=rows_max, bytes_max=bytes_max):
                if rows is not None:
                    yield [(key[skip:], rows.read(key, value)) for key, value in chunk]
                else:
                    yield [(key[skip:], value) for key, value in chunk] if skip else chunk
        except DamagedError:
            self.is_damaged = True
            raise

    def put(self, key: bytes, value: bytes, family: str) -> None:
        stored_key = self.families.prefix(family) + key
        value = self._wrapped(stored_key, value)
        self._note_new(stored_key)
        self._operands.drop(stored_key)
        self.db.put(stored_key, value)
        self._log((PUT, stored_key, value))

    def merge(self, key: bytes, operand: bytes, family: str) -> None:
        stored_key = self.families.prefix(family) + key
        if self.writer is not None and not self.families.is_enabled:
            hint = "set `column_families`: changelogs of versions 1 and 3 hold no MERGE (design 0004, L3)"
            raise UsageError("needs column families", operation="merge", subject=str(self.target), hint=hint)
        operand = self._wrapped(stored_key, operand)
        self._note_new(stored_key)
        self._operands.add(stored_key, operand)
        self._log((MERGE, stored_key, operand))

    def delete(self, key: bytes, family: str) -> None:
        stored_key = self.families.prefix(family) + key
        self.is_dirty = self.is_torn = True
        if self.counts.is_on and self._is_there(stored_key):
            self.counts.add(-1, is_internal=self.families.is_internal(stored_key))
        self._operands.drop(stored_key)
        self.db.delete(stored_key)
        self._log((DELETE, stored_key if self._rows is None else wrap_deleted_key(stored_key, crc32c), b""))

    def add_family(self, name: str, *, is_internal: bool) -> bool:
        if not self.families.add(name, is_internal=is_internal):
            return False
        self.is_dirty = self.needs_snapshot = True
        return True

    def drop_family(self, name: str) -> bool:
        if name not in self.families:
            return False
        if name == DEFAULT_FAMILY:
            hint = "delete its rows one by one"
            raise UsageError("cannot be dropped", operation="drop", subject=repr(name), hint=hint)
        begin = self.families.prefix(name)
        end = after_prefix(begin)
        # The range removes them.
        self._operands.write()
        if self.counts.is_on:
            count = sum(1 for _ in self.db.items(begin))
            self.counts.add(-count, is_internal=self.families.is_internal(begin))
        self.is_dirty = self.is_torn = self.needs_snapshot = True
        self.db.delete_range(begin, end)
        self._log((DELETE_RANGE, begin, self._wrapped(begin, end)))
        self.families.drop(name)
        return True

    def _wrapped(self, stored_key: bytes, value: bytes) -> bytes:
        """Return a value, an operand, or the end of a range, as it is stored under a key."""
        return value if self._rows is None else wrap_value(stored_key, value, crc32c)

    def _log(self, record: Record) -> None:
        """Note a change that is in RocksDB in the changelog, if there is one: it is whole then."""
        if self.writer is not None:
            try:
                self.writer.write(record)
            except OSError as error:
                raise unwritable_error("write", error) from error
        self.is_torn = False

    def _note_new(self, stored_key: bytes) -> None:
        self.is_dirty = self.is_torn = True
        if self.counts.is_on and not self._is_there(stored_key):
            self.counts.add(1, is_internal=self.families.is_internal(stored_key))

    def _is_there(self, stored_key: bytes) -> bool:
        try:
            return stored_key in self._operands or self.db.get(stored_key) is not None
        except DamagedError:
            self.is_damaged = True
            raise


def new_changelog(
    path: Path, codec: Codec, made_of: Resolution, *, column_families: bool, unique_ids: bool
) -> tuple[ChangelogWriter, bool]:
    """Begin the changelog of the version after one; return whether its header is too short for the whole lineage."""
    version = changelog_version(column_families=column_families, unique_ids=unique_ids)
    header = newest_that_fit(made_of.lineage) if unique_ids else ()
    return ChangelogWriter(path, codec, version, header), unique_ids and len(header) < len(made_of.lineage)


def advanced(made_of: Resolution, of: StateVersion) -> Resolution:
    """Return what the next version is made of, once its changelog is in the store."""
    own = () if of.unique_id is None else (LineageItem(of.version, of.unique_id),)
    return Resolution(of, made_of.base, (*made_of.changelogs, of), (*made_of.lineage, *own))


def rebased(made_of: Resolution, snapshot: StateVersion) -> Resolution:
    """Return what a version is made of once a snapshot of it, or of one that it was built on, is in the store.

    A snapshot of another history changes nothing. Nothing older than the base is needed any more.
    """
    if snapshot != made_of.target and snapshot not in made_of.changelogs:
        return made_of
    changelogs = tuple(of for of in made_of.changelogs if of.version > snapshot.version)
    lineage = tuple(item for item in made_of.lineage if item.version >= snapshot.version)
    return Resolution(made_of.target, snapshot, changelogs, lineage)


def newest_that_fit(lineage: tuple[LineageItem, ...]) -> tuple[LineageItem, ...]:
    """Return the lineage, or as many of its newest items as a header holds (design 0004, C6).

    What is cut off is found hop by hop, as after every snapshot (R5).
    """
    # Mostly this is clear without encoding it.
    most_bytes = sum(len(item.unique_id) for item in lineage) * 3 + len(lineage) * _ITEM_BYTES_MAX
    if most_bytes < LINEAGE_BYTES_MAX or lineage_fits(lineage):
        return lineage
    fitting = bisect_left(range(1, len(lineage)), 1, key=lambda count: 0 if lineage_fits(lineage[-count:]) else 1)
    return lineage[-fitting:]


def check_families_known(db: StoreWriter, families: ColumnFamilies) -> None:
    """Refuse a store with keys of an unnamed family, with a `DamagedError`; reads one key of each family."""
    prefix = start = b""
    while prefix != b"\xff" * PREFIX_BYTES and (found := next(iter(db.items(start=start)), None)) is not None:
        families.check_prefix(found[0], str(db.directory))
        prefix = found[0][:PREFIX_BYTES]
        start = after_prefix(prefix)

"""The only importer of rocksdict: RocksDB directories opened in raw mode only.

Outside raw mode rocksdict unpickles what it reads, which runs code from restored data. And every open here
passes its own options, so that an `OPTIONS` file that came with restored data decides nothing: its `wal_dir`,
`db_log_dir` and `db_paths` would make RocksDB write outside the directory. What rocksdict has no call for, a merge
operator for one, comes from an `OPTIONS` text of our own, in a directory of our own.

What an open leaves in the directory beside RocksDB's own data, and no snapshot may carry (design 0004, Z3): `LOG`,
`LOCK`, `IDENTITY` (for writing only) and `rocksdict-config.json`. An open for writing also rewrites MANIFEST, CURRENT
and OPTIONS, and begins a new `<number>.log`, which stays empty here.

Rows are scanned in lists, which is twice as fast as one by one. rocksdict's own iterator over rows runs outside the
interpreter, but ends at a damaged block as if there were no more: so its end is checked with another one of the same
moment.
"""

import itertools
import os
import re
import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Generic, Literal, Self, TypeVar

import msgspec
import rocksdict
from typing_extensions import override

from engine.errors import DamagedError, EngineError, NotFoundError, TargetError, UnsafeSourceError, UsageError
from engine.local.scan import LACKING
from engine.settings import KIB, MIB
from index.rocksdb.manifest import LEVELS_MAX

# The least that RocksDB takes for the text of its options.
_TEXT: Final = """\
[Version]
  rocksdb_version=9.8.4
  options_file_version=1.1

[DBOptions]

[CFOptions "default"]
%s
[TableOptions/BlockBasedTable "default"]
"""
# This form is the only one that RocksDB reads back as it was: the bare name, which it writes itself for an empty
# delimiter, means a comma to its parser.
_MERGE_OPERATOR: Final = "  merge_operator={id=StringAppendOperator;delimiter=%s;}\n"
_NO_COMPACTIONS: Final = "  disable_auto_compactions=true\n"
# Delimiters that this text can express; Spark's are a comma and nothing.
_DELIMITERS: Final = (b"", b",", b"|")
_RAW_MODE: Final = '{"raw_mode":true,"prefix_extractors":{}}'


class RocksDbSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a store is written. None of it is part of the data: every open may choose other values."""

    # Memory that a store fills before it writes one SST file; there are at most two such buffers.
    write_buffer_bytes: int = 16 * MIB
    # Size at which a compaction begins the next SST file.
    file_bytes: int = 16 * MIB
    # How much the first sorted level holds before files move on to the next.
    level_base_bytes: int = 64 * MIB
    # How many flushed files are merged into the first sorted level together.
    level_zero_files: int = 4
    block_cache_bytes: int = 8 * MIB
    compression: Literal["none", "lz4", "snappy", "zstd"] = "lz4"
    background_jobs_max: int = 2
    open_files_max: int = 256
    # Size of a block inside an SST file before compression. Larger ones make smaller files and slower reads.
    block_bytes: int = 4 * KIB
    # Whether files are merged in the background, which a store that is read once does not need.
    compacts: bool = True
    # Between the operands of one key when they are joined, by RocksDB's StringAppendOperator. None: no
    # merge operator, and a store that holds operands is refused.
    merge_delimiter: bytes | None = None


def spark_settings(merge_delimiter: bytes | None = None) -> RocksDbSettings:
    """Return what Spark opens its stores with by default: files that it can read, and goes on with.

    It is Spark's `RocksDBConf`, with RocksDB 9.8's own defaults where that sets none. Blocks of 4 KiB, ten bits of
    bloom filter per key and format 5 are what every open here writes anyway.
    """
    return RocksDbSettings(
        write_buffer_bytes=64 * MIB,
        file_bytes=64 * MIB,
        level_base_bytes=256 * MIB,
        compression="lz4",
        open_files_max=-1,
        merge_delimiter=merge_delimiter,
    )


def _make_options(settings: RocksDbSettings, *, compactions: bool = True) -> rocksdict.Options:
    """Make options in raw mode, of which none comes from the directory of the store."""
    delimiter = settings.merge_delimiter
    if delimiter is not None and delimiter not in _DELIMITERS:
        hint = "Spark's stores have a comma (merge operator version 1) or nothing (version 2)"
        raise UsageError(f"no store has {delimiter!r} between operands", operation="choose options", hint=hint)
    text = "" if delimiter is None else _MERGE_OPERATOR % delimiter.decode()
    text += "" if compactions else _NO_COMPACTIONS
    # RocksDB's defaults, in raw mode, with those two things that rocksdict has no call for.
    with tempfile.TemporaryDirectory(prefix="tidemark-options-") as private:
        Path(private, "OPTIONS-000001").write_text(_TEXT % text, encoding="ascii")
        Path(private, "rocksdict-config.json").write_text(_RAW_MODE, encoding="ascii")
        _, families = rocksdict.Options.load_latest(private)
    options = families["default"]
    options.create_if_missing(create_if_missing=False)
    options.set_write_buffer_size(settings.write_buffer_bytes)
    options.set_max_write_buffer_number(2)
    options.set_target_file_size_base(settings.file_bytes)
    options.set_max_bytes_for_level_base(settings.level_base_bytes)
    options.set_level_zero_file_num_compaction_trigger(settings.level_zero_files)
    options.set_max_background_jobs(settings.background_jobs_max)
    options.set_max_open_files(settings.open_files_max)
    options.set_compression_type(getattr(rocksdict.DBCompressionType, settings.compression)())
    # One file of RocksDB's own log is enough; none of them is backed up.
    options.set_keep_log_file_num(1)
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(rocksdict.Cache(settings.block_cache_bytes))
    blocks.set_bloom_filter(10, block_based=False)
    blocks.set_format_version(5)
    blocks.set_block_size(settings.block_bytes)
    options.set_block_based_table_factory(blocks)
    return options


# The most rows that are taken before their size is looked at.
_SLICE_ROWS_MAX: Final = 512

Found = TypeVar("Found")


class _Scan(Generic[Found]):
    """The iterator behind a scan of a store, over the rows of the moment at which it is made."""

    def __init__(self, directory: Path, iterator: rocksdict.RdictIter, prefix: bytes) -> None:
        self.directory = directory
        self._iterator: rocksdict.RdictIter | None = iterator
        self._prefix = prefix
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Found:
        if self._ended:
            raise StopIteration
        if self._iterator is None:
            raise UsageError("the store was closed during a scan", operation="scan", subject=str(self.directory))
        try:
            found = self._take(self._iterator)
        except Exception as error:
            raise _typed(error, "scan", self.directory) from error
        if not found:
            raise StopIteration
        return found

    def cut_off(self) -> None:
        """Release RocksDB's iterators; a scan that had not ended raises from now on."""
        self._iterator = None

    def _take(self, iterator: rocksdict.RdictIter) -> Found | None:
        """Return what comes next; nothing after `_end`."""
        raise NotImplementedError

    def _end(self) -> None:
        self._ended = True
        self.cut_off()


class _RowScan(_Scan[tuple[bytes, bytes]]):
    """The iterator behind `StoreReader.items`."""

    @override
    def _take(self, iterator: rocksdict.RdictIter) -> tuple[bytes, bytes] | None:
        if iterator.valid():
            key: bytes = iterator.key()
            if key.startswith(self._prefix):
                value: bytes = iterator.value()
                iterator.next()
                return key, value
        else:
            iterator.status()
        self._end()
        return None


class _ChunkScan(_Scan[list[tuple[bytes, bytes]]]):
    """The iterator behind `StoreReader.chunks`."""

    def __init__(self, directory: Path, db: rocksdict.Rdict, prefix: bytes, *, rows_max: int, bytes_max: int) -> None:
        # A witness: it does not take damage for the end.
        super().__init__(directory, db.iter(), prefix)
        self._rows: Iterator[Any] = db.items(from_key=prefix)
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._last: bytes | None = None
        self._slice_rows = 1

    @override
    def cut_off(self) -> None:
        super().cut_off()
        self._rows = iter(())

    @override
    def _take(self, iterator: rocksdict.RdictIter) -> list[tuple[bytes, bytes]]:
        rows_max, bytes_max = self._rows_max, self._bytes_max
        found: list[tuple[bytes, bytes]] = []
        size_bytes = 0
        while len(found) < rows_max and size_bytes < bytes_max and not self._ended:
            more = self._take_slice(iterator, min(self._slice_rows, rows_max - len(found)))
            found += more
            more_bytes = sum(map(len, itertools.chain.from_iterable(more)))
            size_bytes += more_bytes
            fit = bytes_max * len(more) // (more_bytes + 1)
            self._slice_rows = max(1, min(fit, 2 * self._slice_rows, _SLICE_ROWS_MAX))
        return found

    def _take_slice(self, witness: rocksdict.RdictIter, rows_max: int) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = list(itertools.islice(self._rows, rows_max))
        if not found:
            self._look_at_end(witness)
            return found
        self._last = found[-1][0]
        if not self._last.startswith(self._prefix):
            self._end()
            del found[bisect_left(found, 1, key=lambda row: 0 if row[0].startswith(self._prefix) else 1) :]
        return found

    def _look_at_end(self, witness: rocksdict.RdictIter) -> None:
        """Find out whether this is the end, or a block cannot be read; if neither, go on with the witness from here."""
        witness.seek(self._prefix if self._last is None else self._last)
        if self._last is not None and witness.valid() and witness.key() == self._last:
            witness.next()
        if witness.valid():
            self._rows = _remaining(witness)
        else:
            witness.status()
            self._end()


def _remaining(witness: rocksdict.RdictIter) -> Iterator[tuple[bytes, bytes]]:
    """Iterate over the rows from where an iterator is, to its end or to a damaged block."""
    while witness.valid():
        yield witness.key(), witness.value()
        witness.next()


DEFAULT_FAMILY: Final = "default"

_TABLE_PROPERTIES: Final = "rocksdb.aggregated-table-properties"
# How RocksDB's messages about this machine end, after the name of a file.
_LACKING: Final = tuple(os.strerror(number) for number in sorted(LACKING))
# How RocksDB begins where a directory has what we do not write: another comparator, a column family.
_REFUSALS: Final = ("Invalid argument", "Not implemented")
_OPERANDS: Final = re.compile(r"# merge operands=(\d+);")


class StoreReader:
    """A store as functions of users see it: keys and values are bytes, keys are ordered bytewise.

    Raises:
        DamagedError: From any read: a block does not match its checksum.
        UsageError: From any call after `close`.
    """

    def __init__(self, directory: Path, db: rocksdict.Rdict, merge_delimiter: bytes | None = None) -> None:
        self.directory = directory
        self._db = db
        self._merge_delimiter = merge_delimiter
        self._scans: weakref.WeakSet[_Scan[Any]] = weakref.WeakSet()

    @classmethod
    def open(cls, directory: Path, settings: RocksDbSettings | None = None) -> Self:
        """Open an existing store for reading.

        Nothing in the directory changes but `rocksdict-config.json`, which rocksdict writes at every open.

        Raises:
            NotFoundError: There is no RocksDB store.
            DamagedError: Its files contradict each other.
            UsageError: It holds operands, and the settings have no `merge_delimiter`.
        """
        _check_is_store(directory)
        settings = settings or RocksDbSettings()
        access = rocksdict.AccessType.read_only(error_if_log_file_exist=False)
        return cls(directory, _open(directory, settings, access), settings.merge_delimiter)

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if there is none."""
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise _typed(error, "get", self.directory) from error
        return value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of many keys in their order, None where there is none."""
        try:
            values: list[bytes | None] | None = self._db.get(list(keys)) if keys else []
        except Exception as error:
            raise _typed(error, "get", self.directory) from error
        return values or []

    def items(self, prefix: bytes = b"", *, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Iterate over every key with this prefix, from `start` on, and its value, in the order of the keys.

        The rows are those at this call: later writes are not among them. Unlike rocksdict's own iterators it
        does not take a damaged block for the end of the data.
        """
        with _typing("scan", self.directory):
            iterator = self._db.iter()
            iterator.seek(max(prefix, start))
        scan = _RowScan(self.directory, iterator, prefix)
        self._scans.add(scan)
        return scan

    def chunks(self, prefix: bytes = b"", *, rows_max: int, bytes_max: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """Iterate as `items`, in lists of at most `rows_max` rows that end soon after they have `bytes_max` bytes."""
        with _typing("scan", self.directory):
            scan = _ChunkScan(self.directory, self._db, prefix, rows_max=rows_max, bytes_max=bytes_max)
        self._scans.add(scan)
        return scan

    def count(self, *, prefix_bytes: int = 0) -> dict[bytes, int]:
        """Count the keys by their first bytes: a scan that leaves the values alone. All as one group is the fastest."""
        counts: dict[bytes, int] = {}
        count, prefix = 0, b""
        with _typing("scan", self.directory):
            iterator = self._db.iter()
            iterator.seek(b"")
            is_valid, move_on, read_key = iterator.valid, iterator.next, iterator.key
            while is_valid():
                if prefix_bytes and (group := read_key()[:prefix_bytes]) != prefix:
                    counts[prefix] = count
                    count, prefix = 0, group
                count += 1
                move_on()
            iterator.status()
        counts[prefix] = count
        return {group: number for group, number in counts.items() if number}

    def close(self) -> None:
        """Close the store; closing twice is fine.

        Scans that a caller still holds are cut off: RocksDB keeps its lock and its threads for as long as one
        iterator lives, and the directory could not be moved or opened again.
        """
        for scan in tuple(self._scans):
            scan.cut_off()
        with _typing("close", self.directory), suppress(rocksdict.DbClosedError):
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StoreWriter(StoreReader):
    """A store open for writing. There is no write-ahead log: only what `checkpoint` has captured counts.

    A store that is worked on belongs to one attempt, and a crash throws the attempt away; a log would be
    written and never read.
    """

    def __init__(self, directory: Path, db: rocksdict.Rdict, merge_delimiter: bytes | None = None) -> None:
        super().__init__(directory, db, merge_delimiter)
        self._compactions_wait = False
        self._unlogged = rocksdict.WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[method-assign,assignment]  # rocksdict's stub errs

    @classmethod
    @override
    def open(cls, directory: Path, settings: RocksDbSettings | None = None, *, compactions_wait: bool = False) -> Self:
        """Open a store for writing; it is created if there is none.

        With `compactions_wait` nothing is compacted before `begin_compactions`. What is due in a snapshot would
        otherwise begin at once, and take the processor from the replay.

        Raises:
            UnsafeSourceError: It is open already, here or in another process.
            DamagedError: Its files contradict each other.
            UsageError: It holds operands, and the settings have no `merge_delimiter`.
        """
        settings = settings or RocksDbSettings()
        access = rocksdict.AccessType.read_write()
        compactions = settings.compacts and not compactions_wait
        db = _open(directory, settings, access, create=True, compactions=compactions)
        store = cls(directory, db, settings.merge_delimiter)
        store._compactions_wait = settings.compacts and compactions_wait  # its own class
        return store

    def begin_compactions(self) -> None:
        """Let RocksDB compact from now on, if it was opened to wait for this."""
        if not self._compactions_wait:
            return
        with _typing("begin compactions", self.directory):
            self._db.set_options({"disable_auto_compactions": "false"})
        self._compactions_wait = False

    def put(self, key: bytes, value: bytes) -> None:
        """Set the value of a key."""
        try:
            self._db.put(key, value, self._unlogged)
        except Exception as error:
            raise _typed(error, "put", self.directory) from error

    def delete(self, key: bytes) -> None:
        """Remove a key; one that is not there is no error."""
        try:
            self._db.delete(key, self._unlogged)
        except Exception as error:
            raise _typed(error, "delete", self.directory) from error

    def merge(self, key: bytes, operand: bytes) -> None:
        """Append to the value of a key, behind the delimiter if there is a value.

        rocksdict cannot write operands, so this reads and sets the whole value, with the same result.

        Raises:
            UsageError: The store was opened without a delimiter.
        """
        delimiter = self.merge_delimiter
        value = self.get(key)
        self.put(key, operand if value is None else delimiter.join((value, operand)))

    @property
    def merge_delimiter(self) -> bytes:
        """The bytes between two operands; a `UsageError` if the store was opened without one."""
        if self._merge_delimiter is None:
            hint = "open it with a merge_delimiter"
            raise UsageError("has no merge operator", operation="merge", subject=str(self.directory), hint=hint)
        return self._merge_delimiter

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Remove every key from `begin` on and before `end`; none if `end` is not above `begin`."""
        if begin >= end:
            return
        with _typing("delete", self.directory):
            self._db.delete_range(begin, end, self._unlogged)

    def write_batch(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Set keys, and remove those whose value is None, all of it at once.

        They go in ascending order: RocksDB's table in memory takes them that way several times as fast.
        """
        with _typing("write", self.directory):
            batch = rocksdict.WriteBatch(raw_mode=True)
            put, delete = batch.put, batch.delete
            for key in sorted(changes):
                value = changes[key]
                if value is None:
                    delete(key)
                else:
                    put(key, value)
            self._db.write(batch, self._unlogged)

    def ingest(self, paths: Sequence[Path]) -> None:
        """Take the rows of files that `SstWriter` wrote, newer than all rows here. The files are moved."""
        with _typing("ingest", self.directory):
            options = rocksdict.IngestExternalFileOptions()
            options.set_move_files(True)
            # One by one: RocksDB refuses files of one call that overlap each other.
            for path in paths:
                self._db.ingest_external_file([str(path)], options)

    def flush(self) -> None:
        """Write what is in memory to SST files, and wait for it."""
        with _typing("flush", self.directory):
            self._db.flush()

    def compact(self, *, force: bool = False) -> None:
        """Merge all files into the last level; with `force` write them again even if they need only be moved there."""
        options = rocksdict.CompactOptions()
        if force:
            options.set_bottommost_level_compaction(rocksdict.BottommostLevelCompaction.force())
        with _typing("compact", self.directory):
            self._db.compact_range(None, None, options)

    def checkpoint(self, target: Path) -> None:
        """Make a rocksdb_checkpoint: a directory of the same file system with everything written so far.

        SST files are hard links, so it costs next to nothing; nobody writes to it (design 0002, I3).

        Raises:
            UsageError: `target` is there already.
        """
        if target.exists():
            raise UsageError("is there already", operation="checkpoint", subject=str(target))
        self.flush()
        with _typing("checkpoint", self.directory):
            # The object keeps the store open while it lives: it must not get a name.
            rocksdict.Checkpoint(self._db).create_checkpoint(str(target))


class SstWriter:
    """Writes one SST of rows that come in the order of their keys, of which there is one at least.

    It is for `StoreWriter.ingest`.
    """

    def __init__(self, path: Path, settings: RocksDbSettings) -> None:
        self.path = path
        # RocksDB's own, for `put_each`.
        self.raw = rocksdict.SstFileWriter(options=_make_options(settings))
        with _typing("write SST", path):
            self.raw.open(str(path))

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Write the next rows; an `EngineError` if a key is not above the last."""
        raw = self.raw
        with _typing("write SST", self.path):
            for key, value in rows:
                raw[key] = value

    @property
    def size_bytes(self) -> int:
        """The size of the blocks that are complete."""
        return int(self.raw.file_size())

    def finish(self) -> None:
        """Write what makes it a file."""
        with _typing("write SST", self.path):
            self.raw.finish()


def put_each(rows: Sequence[tuple[bytes, bytes]], writers: Sequence[SstWriter]) -> None:
    """Write the next rows, each by the writer at its place; an `EngineError` if a key is not above the last there."""
    # Which of them it was is not looked for: their files are in one directory.
    with _typing("write SST", writers[0].path.parent):
        for (key, value), raw in zip(rows, [each.raw for each in writers], strict=True):
            raw[key] = value


def _open(
    directory: Path,
    settings: RocksDbSettings,
    access: rocksdict.AccessType,
    *,
    create: bool = False,
    compactions: bool = True,
    family: str = DEFAULT_FAMILY,
) -> rocksdict.Rdict:
    options = _make_options(settings, compactions=compactions)
    options.create_if_missing(create_if_missing=create)
    if not create:
        # RocksDB refuses a store with files on more levels than its options have; a reader puts none there.
        options.set_num_levels(LEVELS_MAX)
    families = dict.fromkeys((DEFAULT_FAMILY, family), options)
    with _typing("open", directory):
        # Without options for the column family rocksdict would take those in the directory's OPTIONS file, whatever
        # else it is given: with their comparator and merge operator.
        db = rocksdict.Rdict(str(directory), options, families, access)
        if family != DEFAULT_FAMILY:
            # It keeps the store open by itself.
            whole, db = db, db.get_column_family(family)
            whole.close()
    try:
        if settings.merge_delimiter is None:
            _check_no_operands(db, directory)
    except BaseException:
        # Otherwise the directory would stay locked.
        db.close()
        raise
    return db


@contextmanager
def _typing(operation: str, directory: Path) -> Iterator[None]:
    """Raise typed errors instead of rocksdict's; too slow for single rows."""
    try:
        yield
    except Exception as error:
        raise _typed(error, operation, directory) from error


def _check_is_store(directory: Path) -> None:
    if not (directory / "CURRENT").is_file():
        raise NotFoundError("is not a RocksDB directory", operation="open", subject=str(directory))


def list_families(directory: Path) -> tuple[str, ...]:
    """List the column families of a store, sorted. Only its MANIFEST is read.

    Raises:
        NotFoundError: There is no RocksDB store.
        DamagedError: The MANIFEST is damaged.
    """
    _check_is_store(directory)
    with _typing("list column families", directory):
        return tuple(sorted(rocksdict.Rdict.list_cf(str(directory), _make_options(RocksDbSettings()))))


def open_family(directory: Path, family: str, settings: RocksDbSettings) -> StoreReader:
    """Open a column family that `list_families` returns for reading; as `StoreReader.open`, which opens `default`."""
    access = rocksdict.AccessType.read_only(error_if_log_file_exist=False)
    return StoreReader(directory, _open(directory, settings, access, family=family), settings.merge_delimiter)


def _check_no_operands(db: rocksdict.Rdict, directory: Path) -> None:
    """Refuse a store that cannot be read: an operand without an operator would end the process at once."""
    with _typing("open", directory):
        properties = db.property_value(_TABLE_PROPERTIES) or ""
    operands = _OPERANDS.search(properties)
    if operands is None or int(operands[1]):
        hint = "open it with the merge_delimiter of its writer: Spark's is a comma or nothing"
        raise UsageError("holds operands to be merged", operation="open", subject=str(directory), hint=hint)


def _typed(error: Exception, operation: str, directory: Path) -> EngineError:
    """Return the error to raise instead of rocksdict's plain `Exception`, by how its message begins."""
    message, subject = str(error), str(directory)
    if isinstance(error, rocksdict.DbClosedError):
        return UsageError("the store is closed", operation=operation, subject=subject)
    if isinstance(error, KeyError | TypeError):
        hint = "keys and values are bytes"
        return UsageError(message.strip("'"), operation=operation, subject=subject, hint=hint)
    is_refused = operation == "open" and message.startswith(_REFUSALS)
    if is_refused or message.startswith("Corruption"):
        hint = "bring back its last commit: `tidemark restore --replace`, without --trust-stat"
        if is_refused:
            hint = f"if its writer has options such as a comparator of its own, open it with that program; else {hint}"
        return DamagedError(message, operation=operation, subject=subject, hint=hint)
    if message.startswith("IO error") and message.endswith(_LACKING):
        hint = "check permissions, free space and open files on this machine"
        return TargetError(message, operation=operation, subject=subject, hint=hint)
    if message.startswith("IO error") and "lock" in message.lower():
        hint = "close whatever holds it open"
        return UnsafeSourceError(message, operation=operation, subject=subject, hint=hint)
    return EngineError(message, operation=operation, subject=subject)

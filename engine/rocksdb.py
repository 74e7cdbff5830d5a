"""The one door to rocksdict: RocksDB directories opened in raw mode only.

Outside raw mode rocksdict unpickles what it reads, which runs code from restored data. And every open here
passes its own options, so that an `OPTIONS` file that came with restored data decides nothing: its `wal_dir`,
`db_log_dir` and `db_paths` would make RocksDB write outside the directory.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import msgspec
import rocksdict
from typing_extensions import override

from engine.errors import DamagedError, EngineError, NotFoundError, UnsafeSourceError, UsageError

MIB: Final = 1024 * 1024

_COMPRESSIONS: Final = {
    "none": rocksdict.DBCompressionType.none,
    "lz4": rocksdict.DBCompressionType.lz4,
    "snappy": rocksdict.DBCompressionType.snappy,
    "zstd": rocksdict.DBCompressionType.zstd,
}


class RocksDbSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a store is written. None of it is part of the data: every open may choose anew."""

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


class StoreFile(msgspec.Struct, frozen=True):
    """One live SST file of an open store."""

    name: str
    level: int
    size_bytes: int


class StoreReader:
    """A store as functions of users see it: keys and values are bytes, keys are ordered bytewise.

    Raises:
        DamagedError: From any read: a block does not match its checksum.
        UsageError: From any call after `close`.
    """

    def __init__(self, directory: Path, db: rocksdict.Rdict) -> None:
        self._directory = directory
        self._db = db
        self._scans: weakref.WeakSet[_Scan] = weakref.WeakSet()

    @classmethod
    def open(cls, directory: Path, settings: RocksDbSettings | None = None) -> Self:
        """Open an existing store for reading.

        Nothing in the directory changes but `rocksdict-config.json`, which rocksdict writes at every open.

        Raises:
            NotFoundError: There is no RocksDB store.
            DamagedError: Its files contradict each other.
        """
        if not (directory / "CURRENT").is_file():
            raise NotFoundError("is not a RocksDB directory", operation="open", subject=str(directory))
        access = rocksdict.AccessType.read_only(error_if_log_file_exist=False)
        try:
            db = rocksdict.Rdict(str(directory), _options(settings or RocksDbSettings()), access_type=access)
        except Exception as error:
            raise _typed(error, "open", directory) from error
        return cls(directory, db)

    @property
    def directory(self) -> Path:
        """Where the store stands."""
        return self._directory

    def get(self, key: bytes) -> bytes | None:
        """The value of a key; None if there is none."""
        try:
            value: bytes | None = self._db.get(key)
        except Exception as error:
            raise _typed(error, "get", self._directory) from error
        return value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of many keys in their order, None where there is none."""
        try:
            values: list[bytes | None] | None = self._db.get(list(keys)) if keys else []
        except Exception as error:
            raise _typed(error, "get", self._directory) from error
        return values or []

    def items(self, prefix: bytes = b"", *, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Every key with this prefix, from `start` on, and its value, in the order of the keys.

        The picture is the one at this call: later writes are not in it. Unlike rocksdict's own iterators it
        does not take a damaged block for the end of the data.
        """
        try:
            iterator = self._db.iter()
            iterator.seek(max(prefix, start))
        except Exception as error:
            raise _typed(error, "scan", self._directory) from error
        scan = _Scan(self._directory, iterator, prefix)
        self._scans.add(scan)
        return scan

    def files(self) -> tuple[StoreFile, ...]:
        """The live SST files, by name."""
        try:
            live = self._db.live_files()
        except Exception as error:
            raise _typed(error, "list files", self._directory) from error
        found = (StoreFile(str(f["name"]).removeprefix("/"), int(f["level"]), int(f["size"])) for f in live)
        return tuple(sorted(found, key=lambda file: file.name))

    def close(self) -> None:
        """Close the store; closing twice is fine.

        Scans that a caller still holds are cut off: RocksDB keeps its lock and its threads for as long as one
        iterator lives, and the directory could not be moved or opened again.
        """
        for scan in tuple(self._scans):
            scan.cut_off()
        try:
            self._db.close()
        except rocksdict.DbClosedError:
            pass
        except Exception as error:
            raise _typed(error, "close", self._directory) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Scan:
    """The iterator behind `StoreReader.items`."""

    def __init__(self, directory: Path, iterator: rocksdict.RdictIter, prefix: bytes) -> None:
        self._directory = directory
        self._iterator: rocksdict.RdictIter | None = iterator
        self._prefix = prefix
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[bytes, bytes]:
        if self._ended:
            raise StopIteration
        iterator = self._iterator
        if iterator is None:
            raise UsageError("the store was closed during a scan", operation="scan", subject=str(self._directory))
        try:
            if iterator.valid():
                key: bytes = iterator.key()
                if key.startswith(self._prefix):
                    value: bytes = iterator.value()
                    iterator.next()
                    return key, value
            else:
                iterator.status()
        except Exception as error:
            raise _typed(error, "scan", self._directory) from error
        self._ended = True
        self._iterator = None
        raise StopIteration

    def cut_off(self) -> None:
        """Let go of RocksDB's iterator; a scan that had not ended raises from now on."""
        self._iterator = None


class StoreWriter(StoreReader):
    """A store open for writing. There is no write-ahead log: what counts is what `checkpoint` has taken down.

    A store that is worked on belongs to one attempt, and a crash throws the attempt away; a log would be
    written and never read.
    """

    def __init__(self, directory: Path, db: rocksdict.Rdict) -> None:
        super().__init__(directory, db)
        self._unlogged = rocksdict.WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[method-assign,assignment]  # rocksdict's stub errs

    @classmethod
    @override
    def open(cls, directory: Path, settings: RocksDbSettings | None = None) -> Self:
        """Open a store for writing; it is created if there is none.

        Raises:
            UnsafeSourceError: It is open already, here or in another process.
            DamagedError: Its files contradict each other.
        """
        options = _options(settings or RocksDbSettings())
        options.create_if_missing(create_if_missing=True)
        try:
            db = rocksdict.Rdict(str(directory), options)
        except Exception as error:
            raise _typed(error, "open", directory) from error
        return cls(directory, db)

    def put(self, key: bytes, value: bytes) -> None:
        """Set the value of a key."""
        try:
            self._db.put(key, value, self._unlogged)
        except Exception as error:
            raise _typed(error, "put", self._directory) from error

    def delete(self, key: bytes) -> None:
        """Remove a key; one that is not there is no error."""
        try:
            self._db.delete(key, self._unlogged)
        except Exception as error:
            raise _typed(error, "delete", self._directory) from error

    def write_batch(self, puts: Mapping[bytes, bytes], deletes: Iterable[bytes] = ()) -> None:
        """Remove keys, then set keys, all of it at once: several times as fast as one by one."""
        try:
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key in deletes:
                batch.delete(key)
            for key, value in puts.items():
                batch.put(key, value)
            self._db.write(batch, self._unlogged)
        except Exception as error:
            raise _typed(error, "write", self._directory) from error

    def flush(self) -> None:
        """Write what is in memory to SST files, and wait for it."""
        try:
            self._db.flush()
        except Exception as error:
            raise _typed(error, "flush", self._directory) from error

    def compact(self) -> None:
        """Merge all files into the last level."""
        try:
            self._db.compact_range(None, None)
        except Exception as error:
            raise _typed(error, "compact", self._directory) from error

    def checkpoint(self, target: Path) -> None:
        """Make a rocksdb_checkpoint: a directory of the same file system with everything written so far.

        SST files are hard links, so it costs next to nothing; nobody writes to it (design 0002, I3).

        Raises:
            UsageError: `target` is there already.
        """
        if target.exists():
            raise UsageError("is there already", operation="checkpoint", subject=str(target))
        self.flush()
        try:
            # The object keeps the store open while it lives: it must not get a name.
            rocksdict.Checkpoint(self._db).create_checkpoint(str(target))
        except Exception as error:
            raise _typed(error, "checkpoint", self._directory) from error


def _options(settings: RocksDbSettings) -> rocksdict.Options:
    """Options in raw mode; not one comes from the directory."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(create_if_missing=False)
    options.set_write_buffer_size(settings.write_buffer_bytes)
    options.set_max_write_buffer_number(2)
    options.set_target_file_size_base(settings.file_bytes)
    options.set_max_bytes_for_level_base(settings.level_base_bytes)
    options.set_level_zero_file_num_compaction_trigger(settings.level_zero_files)
    options.set_max_background_jobs(settings.background_jobs_max)
    options.set_max_open_files(settings.open_files_max)
    options.set_compression_type(_COMPRESSIONS[settings.compression]())
    # One file of RocksDB's own log is enough; none of them is backed up.
    options.set_keep_log_file_num(1)
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(rocksdict.Cache(settings.block_cache_bytes))
    blocks.set_bloom_filter(10, block_based=False)
    blocks.set_format_version(5)
    options.set_block_based_table_factory(blocks)
    return options


def _typed(error: Exception, operation: str, directory: Path) -> EngineError:
    """The error to raise instead of rocksdict's plain `Exception`, by how its message begins."""
    message, subject = str(error), str(directory)
    if isinstance(error, rocksdict.DbClosedError):
        return UsageError("the store is closed", operation=operation, subject=subject)
    if isinstance(error, KeyError | TypeError):
        hint = "keys and values are bytes"
        return UsageError(message.strip("'"), operation=operation, subject=subject, hint=hint)
    if message.startswith("Corruption"):
        hint = "restore the store from its last commit"
        return DamagedError(message, operation=operation, subject=subject, hint=hint)
    if message.startswith("IO error") and "lock" in message.lower():
        hint = "close whatever holds it open"
        return UnsafeSourceError(message, operation=operation, subject=subject, hint=hint)
    return EngineError(message, operation=operation, subject=subject)

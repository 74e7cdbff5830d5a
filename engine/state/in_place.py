"""A version of a state store, read in place: blocks of its snapshot are fetched as they are needed (0013, W9)."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from typing_extensions import override

from blobstore.concurrency import map_bounded
from engine.errors import DamagedError, NotFoundError
from engine.rocksdb.in_place import StoreInPlace, end_of_prefix
from engine.rocksdb.sst_table import not_in_place
from engine.rocksdb.store import DEFAULT_FAMILY
from engine.state.changelogs import Opener, Replayed
from engine.state.checkpoint_dir import StateFiles
from engine.state.overlay import OverlaidStore
from engine.state.zips import StateZip
from index.spark.changelog import Record

T = TypeVar("T")

# Runs what is asked of the store's loop, and waits for it.
Run = Callable[[Coroutine[Any, Any, T]], T]
Rows = list[tuple[bytes, bytes]]
_END: Final[Rows] = []


class _SnapshotRanges:
    """The files of a snapshot: small ones in its zip, SSTs beside it."""

    def __init__(self, files: StateFiles, zipped: StateZip, name: str) -> None:
        self.location = f"{files.location}/{name}"
        self._files = files
        self._zipped = zipped.files
        self._ssts = {file.local_name: file for file in zipped.metadata.sst_files}

    def names(self) -> Iterable[str]:
        return (*self._zipped, *self._ssts)

    def size_bytes(self, name: str) -> int:
        if name in self._zipped:
            return len(self._zipped[name])
        if name not in self._ssts:
            hint = "the snapshot is damaged; an older one may be whole"
            raise NotFoundError(f"has no file {name}", operation="read", subject=self.location, hint=hint)
        return self._ssts[name].size_bytes

    async def read(self, name: str, start: int, size_bytes: int, *, fresh: bool = False) -> bytes:
        if name in self._zipped:
            return self._zipped[name][start : start + size_bytes]
        return await self._files.read_range(self._ssts[name].path, start, size_bytes, fresh=fresh)


class StateInPlace(OverlaidStore):
    """A snapshot that is read in place, with changes laid over it; not for use by the thread of the loop itself."""

    def __init__(self, store: StoreInPlace, run: Run[Any], merge_delimiter: bytes | None) -> None:
        super().__init__(Path(store.location), cast("Any", None), merge_delimiter)
        self._store = store
        self._run = run

    @classmethod
    async def of_snapshot(
        cls, files: StateFiles, zipped: StateZip, name: str, run: Run[Any], merge_delimiter: bytes | None
    ) -> "StateInPlace":
        """Open a snapshot. Costs no request beyond that for its zip, which the caller has read.

        Raises:
            DamagedError: It has another column family than Spark writes, or none of RocksDB's files.
            UnknownFormatError, ManifestError: As `StoreInPlace.open`.
        """
        if zipped.metadata.log_files:
            raise not_in_place("archived write-ahead logs", f"{files.location}/{name}")
        store = await StoreInPlace.open(_SnapshotRanges(files, zipped, name))
        if store.families != (DEFAULT_FAMILY,):
            reason = f"has the column families {', '.join(store.families)}: Spark writes one"
            raise DamagedError(reason, operation="open", subject=store.location)
        return cls(store, run, merge_delimiter)

    @override
    def lay_over(
        self, changelogs: Iterable[Opener], check_row: Callable[[Record], Record] | None = None
    ) -> Replayed | None:
        """Show the changes of some changelogs from now on; an `UnknownFormatError` if they cannot be laid over rows."""
        replayed = super().lay_over(changelogs, check_row)
        if replayed is None:
            raise not_in_place("changelogs that are not laid over rows", self._store.location)
        return replayed

    @override
    def close(self) -> None:
        """Do nothing: the files belong to somebody else."""

    @override
    def _stored(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        async def get(key: bytes) -> bytes | None:
            return await self._store.get(key, merge_delimiter=self._merge_delimiter)

        return cast("list[bytes | None]", self._run(map_bounded(get, keys)))

    @override
    def _stored_items(self, prefix: bytes, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        for rows in self._chunks(prefix, start):
            yield from rows

    @override
    def _stored_chunks(self, prefix: bytes, rows_max: int, bytes_max: int) -> Iterator[Rows]:
        for rows in self._chunks(prefix, prefix):
            for at in range(0, len(rows), rows_max):
                yield rows[at : at + rows_max]

    def _chunks(self, prefix: bytes, start: bytes) -> Iterator[Rows]:
        first, stop = max(prefix, start), end_of_prefix(prefix)
        chunks = self._store.chunks(start=first, stop=stop, merge_delimiter=self._merge_delimiter)
        try:
            while rows := self._run(_next(chunks)):
                yield rows
        finally:
            self._run(chunks.aclose())


async def _next(chunks: AsyncIterator[Rows]) -> Rows:
    return await anext(chunks, _END)

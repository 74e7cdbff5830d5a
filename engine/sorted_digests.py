"""Sets of keys that may outgrow the memory: a set in memory up to a million, sorted digests on disk above (P6).

A record is the shard of a key (2 bytes, rooms one after the other), a digest of it (14 bytes), and a few bytes of the
caller's; records sort by shard first, so that they can be compared with an inventory shard by shard.
"""

import hashlib
import heapq
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Generic, Self, TypeVar

from index.keys import BLOBS, INDEXES, SHARDS_COUNT

IN_MEMORY_MAX: Final = 1_000_000
SHARD_BYTES: Final = 2
DIGEST_BYTES: Final = 16
# Records read from a file at a time.
_READ_RECORDS: Final = 4096
ROOMS: Final = (BLOBS, INDEXES)
SHARD_NUMBERS: Final = range(len(ROOMS) * SHARDS_COUNT)

Item = TypeVar("Item")


def shard_of(key: str) -> int:
    """The shard of a blob or an index, counted through both rooms."""
    room = ROOMS.index(BLOBS if key.startswith(BLOBS) else INDEXES)
    start = len(ROOMS[room])
    return room * SHARDS_COUNT + int(key[start : start + 2], 16)


def digest_of(key: str) -> bytes:
    """Shard and digest of the key of a blob or an index."""
    digest = hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES - SHARD_BYTES).digest()
    return shard_of(key).to_bytes(SHARD_BYTES) + digest


class SortedDigests:
    """A set of records of one size. All are added before any is read. Use it as a context manager: it has files."""

    def __init__(self, scratch: Path, *, note_bytes: int, in_memory_max: int = IN_MEMORY_MAX) -> None:
        """An empty set.

        Args:
            scratch: A directory for files, which have no names there.
            note_bytes: Size of what follows the digest in each record.
            in_memory_max: How many records are held in memory.
        """
        self._scratch = scratch
        self._record_bytes = DIGEST_BYTES + note_bytes
        self._in_memory_max = in_memory_max
        self._held: set[bytes] = set()
        self._files: list[IO[bytes]] = []
        self.added_count = 0

    def __enter__(self) -> Self:
        """The set itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up the files."""
        for file in self._files:
            file.close()

    @property
    def is_on_disk(self) -> bool:
        """Whether it has outgrown the memory."""
        return bool(self._files)

    def add(self, record: bytes) -> None:
        """Take up a record: a digest, and a note after it."""
        self.added_count += 1
        self._held.add(record)
        if len(self._held) >= self._in_memory_max:
            file = tempfile.TemporaryFile(dir=self._scratch)  # noqa: SIM115  (closed with the set)
            self._files.append(file)
            file.writelines(sorted(self._held))
            self._held.clear()

    def by_shard(self) -> Iterator[tuple[int, list[bytes]]]:
        """The records of each shard that has some, in order, each once."""
        merged = heapq.merge(*(self._read(file) for file in self._files), sorted(self._held))
        for number, records in groupby(merged, key=lambda record: int.from_bytes(record[:SHARD_BYTES])):
            yield number, [record for record, _ in groupby(records)]

    def _read(self, file: IO[bytes]) -> Iterator[bytes]:
        file.seek(0)
        while data := file.read(self._record_bytes * _READ_RECORDS):
            for start in range(0, len(data), self._record_bytes):
                yield data[start : start + self._record_bytes]


class ShardReader(Generic[Item]):
    """Reads what comes shard by shard, for shards asked for in ascending order."""

    def __init__(self, shards: Iterator[tuple[int, list[Item]]]) -> None:
        self._shards = shards
        self._next = next(shards, None)

    def take(self, number: int) -> list[Item]:
        """What there is of one shard."""
        if self._next is None or self._next[0] != number:
            return []
        items = self._next[1]
        self._next = next(self._shards, None)
        return items

"""What the check of a plan compares, shard by shard: uploads in a file, lines and reach as sorted digests (P6)."""

import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import IO, Final

import msgspec

from engine.sorted_digests import DIGEST_BYTES, SHARD_NUMBERS, ShardReader, SortedDigests, shard_of
from index.collect_plan import PlannedUpload

# By which roots something is reached; what the plan's own reach sorts first.
REACHED_THEN: Final = b"\0"
REACHED_LATER: Final = b"\1"
# What is kept of a line beside the digest of its key: size and creation.
_LINE: Final = struct.Struct(">Qq")
LINE_BYTES: Final = _LINE.size
_LENGTH_BYTES: Final = 8


class Listed(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A blob or an index that is there."""

    key: str
    size_bytes: int
    created_at_ms: int


class LineNote(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What is kept of a line of the plan."""

    size_bytes: int
    created_at_ms: int


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of what is compared; lines and reach by digest."""

    uploads: list[Listed]
    # The note of each line.
    lines: defaultdict[bytes, list[bytes]]
    # By which roots it is reached.
    reach: dict[bytes, bytes]


def pack_line(line: PlannedUpload) -> bytes:
    """The note of a line."""
    return _LINE.pack(line.size_bytes, line.created_at_ms)


def unpack_line(note: bytes) -> LineNote:
    """The inverse of `pack_line`, but for the key."""
    size_bytes, created_at_ms = _LINE.unpack(note)
    return LineNote(size_bytes=size_bytes, created_at_ms=created_at_ms)


def write_uploads(file: IO[bytes], uploads: list[Listed]) -> None:
    """Append the uploads of one shard, as a frame; blocks."""
    data = msgspec.msgpack.encode(uploads)
    file.write(len(data).to_bytes(_LENGTH_BYTES))
    file.write(data)


def _read_uploads(file: IO[bytes]) -> Iterator[tuple[int, list[Listed]]]:
    while length := file.read(_LENGTH_BYTES):
        uploads = msgspec.msgpack.decode(file.read(int.from_bytes(length)), type=list[Listed])
        yield shard_of(uploads[0].key), uploads


def read_shards(listed: IO[bytes], planned: SortedDigests, reached: SortedDigests) -> Iterator[Shard]:
    """What each shard has that has something; blocks.

    Args:
        listed: Frames of `write_uploads`, in the order of the shards.
        planned: The lines of the plan, with their notes.
        reached: What is reached, with `REACHED_THEN` or `REACHED_LATER`.
    """
    uploads, lines, reach = (
        ShardReader(_read_uploads(listed)),
        ShardReader(planned.by_shard()),
        ShardReader(reached.by_shard()),
    )
    for number in SHARD_NUMBERS:
        shard = Shard(uploads=uploads.take(number), lines=defaultdict(list), reach={})
        for record in lines.take(number):
            shard.lines[record[:DIGEST_BYTES]].append(record[DIGEST_BYTES:])
        for record in reach.take(number):
            shard.reach.setdefault(record[:DIGEST_BYTES], record[DIGEST_BYTES:])
        if shard.uploads or shard.lines:
            yield shard

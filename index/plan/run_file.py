"""What a collection on Spark leaves in `runs/<run>/` while it works: shards, objects, the header (design 0006, R2).

A plan is named by its own digest, so that of two collections that work on one run neither ever carries out what the
other has planned (R4), and so that a mark says which plan was carried out (R5).
"""

import hashlib
import re
from collections.abc import Iterable
from typing import Final

import msgspec

from index.decoding import decode_json
from index.errors import CorruptIndexError, UnknownFormatError
from index.snapshot.keys import BLOBS, INDEXES, SHARDS_COUNT, RunId

HEADER: Final = "run"
# The name of what says that a run has come to its end, and that what is left of it may go.
ENDED: Final = "ended"
# Newer releases may add fields, which an older one ignores; it takes up no run of a greater schema.
SCHEMA: Final = 1
HEADER_BYTES_MAX: Final = 64 * 1024

_ROOMS: Final = (BLOBS, INDEXES)
# Blobs and indexes, in the order of their keys.
POSITIONS_COUNT: Final = len(_ROOMS) * SHARDS_COUNT


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Written before anything is listed; a run that has one is not finished (design 0006, R3 and R6)."""

    schema: int = SCHEMA
    # It says when the run began, by the store's clock: the `now` of D2 for whoever takes the run up.
    run: RunId
    repository_id: str
    # The version of tidemark that began it; for people only.
    release: str


class Shard(msgspec.Struct, frozen=True, order=True):
    """One of the 512 parts of an inventory, by its place in the order of keys."""

    position: int

    @property
    def room(self) -> str:
        """`BLOBS` or `INDEXES`."""
        return _ROOMS[self.position // SHARDS_COUNT]

    @property
    def prefix(self) -> str:
        """What all of its keys begin with, and no others."""
        return f"{self.room}{self.position % SHARDS_COUNT:02x}/"

    @property
    def inventory_name(self) -> str:
        """Name of the object that says what was listed."""
        return f"inventory-{self._name}"

    @property
    def plan_file(self) -> str:
        """Name of the file of its lines, where a plan is written to files."""
        return self._name

    def plan_name(self, digest: bytes) -> str:
        """Name of the plan with this digest."""
        return f"plan-{self._name}-{digest.hex()}"

    def done_name(self, digest: bytes) -> str:
        """Name of the mark that the plan with this digest was carried out."""
        return f"done-{self._name}-{digest.hex()}"

    @property
    def _name(self) -> str:
        return f"{self.room.rstrip('/')}-{self.position % SHARDS_COUNT:02x}"


SHARDS: Final = tuple(Shard(position) for position in range(POSITIONS_COUNT))


_BY_PREFIX: Final = {shard.prefix: shard for shard in SHARDS}
_BY_MARK: Final = {shard.done_name(b"").removesuffix("-"): shard for shard in SHARDS}
_DIGEST: Final = re.compile("[0-9a-f]{64}")


def carried_out_plans(names: Iterable[str]) -> dict[int, tuple[bytes, ...]]:
    """Of the names of a run's objects, the digests of the plans that are marked as carried out, by their shards."""
    found: dict[int, tuple[bytes, ...]] = {}
    for name in sorted(names):
        mark, _, digest = name.rpartition("-")
        shard = _BY_MARK.get(mark)
        if shard is not None and _DIGEST.fullmatch(digest):
            found[shard.position] = (*found.get(shard.position, ()), bytes.fromhex(digest))
    return found


def group_by_shard(keys: Iterable[str]) -> dict[Shard, list[str]]:
    """The keys of blobs and indexes by the shards that they stand in.

    Raises:
        CorruptIndexError: One is the key of neither.
    """
    groups: dict[Shard, list[str]] = {}
    for key in keys:
        # Two digits and a slash after the room.
        shard = _BY_PREFIX.get(key[: key.find("/") + 4])
        if shard is None:
            raise CorruptIndexError("is not the key of a blob or an index", subject=repr(key))
        groups.setdefault(shard, []).append(key)
    return groups


def digest_of(data: bytes) -> bytes:
    """By which what stands in a run is told: SHA-256."""
    return hashlib.sha256(data).digest()


def encode_header(header: RunHeader) -> bytes:
    """One JSON object."""
    return msgspec.json.encode(header)


def decode_header(data: bytes, *, subject: str) -> RunHeader:
    """The header that was stored.

    Raises:
        CorruptIndexError: It is none.
        UnknownFormatError: A newer tidemark wrote it.
    """
    header = decode_json(data, RunHeader, what="not the header of a run", subject=subject)
    if header.schema > SCHEMA:
        raise UnknownFormatError(f"is of schema {header.schema}", subject=subject, hint="use a newer tidemark")
    return header

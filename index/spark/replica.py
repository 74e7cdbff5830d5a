"""The two files of a followed query that are not Spark's (design 0011, Q5 and Q7).

`metadata` of a replica has an object where Spark wants the id of a query, so that Spark refuses to start one there, and
shows the object. The fence is a line in the place of an entry of a log, so that Spark refuses to go on beyond it, and
shows the line.
"""

import re
from typing import Annotated, Final, Literal

import msgspec

from index.errors import UNDECODABLE, BatchLogError
from index.java_text import encode_jackson

_HINT: Final = "this is a replica of a running query; `tidemark spark cutover` makes it a checkpoint to go on with"

_FENCE: Final = re.compile(
    rb"the query has moved to (?P<where>\".*\") \((?P<id>[0-9a-f]{20})\) by `tidemark spark cutover`; [^\n]*\n?"
)
_BACK: Final = "delete this file, and the copy there, to let the query go on here instead"


class Replica(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is followed, and how: `metadata` of a replica."""

    # First, as Spark shows it.
    hint: str = _HINT
    # Given to no other replica, whatever its place is called.
    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{20}$")]
    # Where the checkpoint is that is followed: a path of the machine that follows, or a URL.
    replica_of: str
    # The file `metadata` that the replica gets when it is cut over, as Spark wrote it.
    metadata: str
    # The number of state partitions, and the provider, if they are others than at the source.
    partitions: int | None = None
    provider: Literal["rocksdb"] | None = None
    format: Literal[1] = 1


class _Wire(msgspec.Struct):
    id: Replica


def encode_replica(replica: Replica) -> bytes:
    """Encode `metadata` of a replica."""
    return encode_jackson(_Wire(replica))


def decode_replica(data: bytes, *, subject: str = "metadata") -> Replica | None:
    """Decode `metadata` of a checkpoint; None if it is that of no replica.

    Raises:
        BatchLogError: It is that of a replica, and not what `encode_replica` writes.
    """
    try:
        found = msgspec.json.decode(data)
    except UNDECODABLE:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("id"), dict):
        return None
    try:
        return msgspec.convert(found, _Wire).id
    except UNDECODABLE as error:
        hint = "a newer tidemark wrote it, or it is damaged; follow into a new place"
        raise BatchLogError(f"is not that of a replica: {error}", subject=subject, hint=hint) from error


class Fence(msgspec.Struct, frozen=True):
    """An entry that closes a log: which replica its query has moved to, and where that is."""

    replica_id: str
    location: str


def encode_fence(fence: Fence) -> bytes:
    """Encode what closes a log of a checkpoint whose query has moved."""
    where = msgspec.json.encode(fence.location).decode()
    return f"the query has moved to {where} ({fence.replica_id}) by `tidemark spark cutover`; {_BACK}\n".encode()


def decode_fence(data: bytes) -> Fence | None:
    """Decode what closes a log; None if an entry of it is something else."""
    found = _FENCE.fullmatch(data)
    if found is None:
        return None
    try:
        return Fence(found["id"].decode(), msgspec.json.decode(found["where"], type=str))
    except UNDECODABLE:
        return None

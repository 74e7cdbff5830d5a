"""Take a job beside a streaming query back to a batch, by what its commits say of the query (design 0005, 5a)."""

from typing import Final

import msgspec

from engine.errors import NotFoundError
from engine.repository.repository import Repository
from index.errors import UNDECODABLE
from index.plan.commits import Commit
from index.snapshot.model import Scope

# Batches that a hint lists.
_SHOWN_MAX: Final = 8


class BatchOffsets(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The offsets of a job's commit (J1)."""

    query_id: str
    batch: int
    # Of `offsets/<batch>` of the query, as it was planned: hexadecimal BLAKE3.
    planned: str

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def decode_batch_offsets(commit: Commit) -> BatchOffsets | None:
    """Decode the offsets of a commit; None if it is not of a batch of a query."""
    try:
        found = msgspec.json.decode(commit.record.offsets, type=BatchOffsets)
    except UNDECODABLE:
        return None
    return found if found.batch == commit.record.version else None


async def find_batch_commit(repository: Repository, job: str, query_id: str, batch: int) -> Commit:
    """Find the newest commit of a job that is of a batch of a query (J2).

    NotFoundError: the job has none; the hint lists the batches that it has.
    """
    batches = set()
    for commit in await repository.commits(Scope(job)):
        offsets = decode_batch_offsets(commit)
        if offsets is not None and offsets.query_id == query_id:
            if offsets.batch == batch:
                return commit
            batches.add(offsets.batch)
    if not batches:
        message, hint = f"has no commit of a batch of query {query_id}", "name a job of `StatefulJob.for_each_batch`"
    else:
        shown = ", ".join(map(str, sorted(batches)[-_SHOWN_MAX:]))
        message, hint = f"has no commit of batch {batch}", f"it has {shown}: restore at one of them (--batch)"
    raise NotFoundError(message, operation="restore", subject=f"job {job}", hint=hint)


async def take_back(repository: Repository, target: Commit) -> None:
    """Make a commit of a job the newest again, unless the newest is one of the same batch already (J2)."""
    newest = await repository.latest(target.scope)
    if newest is None or newest.record.offsets != target.record.offsets:
        await repository.rewind(target)

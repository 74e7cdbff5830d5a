"""Puts that were begun and never finished: few, and always this process's work (design 0002, D10)."""

from collections.abc import Sequence
from typing import Final

from blobstore.base import BlobStore, UnfinishedPut
from blobstore.errors import AccessDeniedError, CapabilityMissingError
from index.plan.collect import UnfinishedPlan, UnfinishedUpload, choose_unfinished
from index.snapshot.keys import BLOBS, INDEXES

# Unfinished puts that are given up in one call, which has the deadline of a short request.
ABORT_BATCH_MAX: Final = 100


async def plan_unfinished(store: BlobStore, now_ms: int, ttl_ms: int) -> tuple[UnfinishedPlan, str]:
    """What to do with puts of blobs and indexes that were begun and never finished: one request for each room.

    Returns:
        The plan, and why there is none: the right to see such puts is one of its own, and a store may not tell them.
        What nobody can see harms nobody, so that the rest of the collection goes on.
    """
    # Those of unknown keys are listed each time.
    puts: dict[UnfinishedUpload, None] = {}
    try:
        for room in (BLOBS, INDEXES):
            for put in await store.list_unfinished(room):
                puts[UnfinishedUpload(put.key, put.upload_id, put.begun_at_ms, put.size_bytes)] = None
    except (AccessDeniedError, CapabilityMissingError) as error:
        return choose_unfinished((), now_ms, ttl_ms), f"{error} ({error.hint})"
    return choose_unfinished(puts, now_ms, ttl_ms), ""


async def abort_puts(store: BlobStore, doomed: Sequence[UnfinishedUpload]) -> tuple[UnfinishedUpload, ...]:
    """Give up unfinished puts; returns those that are given up."""
    given_up: list[UnfinishedUpload] = []
    for start in range(0, len(doomed), ABORT_BATCH_MAX):
        batch = doomed[start : start + ABORT_BATCH_MAX]
        puts = [UnfinishedPut(key=p.key, upload_id=p.upload_id, begun_at_ms=p.begun_at_ms) for p in batch]
        try:
            left = {failure.key for failure in await store.abort_unfinished(puts)}
        except (AccessDeniedError, CapabilityMissingError):
            left = {put.key for put in batch}
        given_up += [put for put in batch if put.key not in left]
    return tuple(given_up)

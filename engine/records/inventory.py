"""Listing the whole of a room: blobs or indexes, of which there may be millions."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Final, TypeVar

from blobstore.base import BlobInfo, BlobStore, list_blobs, list_checked_page
from blobstore.concurrency import map_bounded
from index.snapshot.keys import KeyRange, choose_list_ranges

LISTS_IN_FLIGHT_MAX: Final = 16

Taken = TypeVar("Taken")


async def list_room(store: BlobStore, prefix: str, take: Callable[[BlobInfo], Taken]) -> list[Taken]:
    """Every blob of a prefix; what one page does not hold is listed in parts, at most 16 at once.

    Requests: p LISTs for p pages up to about 8; of more, at most a quarter of them again.

    Args:
        prefix: `BLOBS` or `INDEXES`; of another prefix the pages are listed one after the other.
        take: What to keep of a blob.

    Returns:
        What was kept, in the order of the keys.

    Raises:
        StoreUnavailableError: A page does not go forward: a list that cannot be trusted.
    """
    first = await list_checked_page(store, prefix)
    taken = [take(blob) for blob in first.blobs]
    if not first.truncated:
        return taken

    async def list_range(part: KeyRange) -> list[Taken]:
        found: list[Taken] = []
        async with aclosing(list_blobs(store, prefix, start_after=part.after)) as blobs:
            async for blob in blobs:
                if not part.reaches(blob.key):
                    break
                found.append(take(blob))
        return found

    ranges = choose_list_ranges(prefix, first.blobs[-1].key)
    for found in await map_bounded(list_range, ranges, in_flight_max=LISTS_IN_FLIGHT_MAX):
        taken += found
    return taken

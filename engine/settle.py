"""Completing the TTL removal of a commit (design 0002, T1 and T2)."""

from collections.abc import Iterable
from typing import Final

from blobstore.base import BlobStore, RequestMetadata
from blobstore.errors import BlobNotFoundError
from engine.bounded import map_bounded
from engine.errors import DamagedError
from engine.index_io import read_index
from index.model import BlobKey, CommitRecord
from index.reachable import new_blob_keys

REQUESTS_IN_FLIGHT_MAX: Final = 16


async def settle_keys(store: BlobStore, keys: Iterable[BlobKey]) -> None:
    """Remove the TTL of each key; one request each.

    Raises:
        DamagedError: A key that a commit needs is not there.
        StoreError: The store could not do it; doing it again is safe.
    """

    async def settle(key: BlobKey) -> None:
        try:
            await store.remove_ttl(key, metadata=RequestMetadata(payload_path="settle"))
        except BlobNotFoundError as error:
            raise DamagedError(
                "a blob of a commit is gone before its TTL was removed",
                operation="settle",
                subject=key,
                hint="run `tidemark verify` to see what is lost; `tidemark rewind` goes on from an older commit",
            ) from error

    await map_bounded(settle, keys, in_flight_max=REQUESTS_IN_FLIGHT_MAX)


async def new_keys_of(store: BlobStore, record: CommitRecord) -> tuple[BlobKey, ...]:
    """Every blob and index that came with a record: one GET per index that is new in it (more for deltas)."""
    keys: list[BlobKey] = []
    for reference in record.stores:
        if reference.number == record.number:
            keys.extend(sorted(new_blob_keys(await read_index(store, reference.index))))
            keys.append(reference.index.key)
    return tuple(keys)


async def settle_record(store: BlobStore, record: CommitRecord) -> int:
    """Make a record's new uploads permanent; idempotent.

    A record of which the predecessor is valid has a settled predecessor, because its writer saw to that (T2): so it is
    enough to settle the newest valid record.

    Returns:
        How many keys were settled.

    Raises:
        DamagedError: A blob or index of the record is missing.
    """
    keys = await new_keys_of(store, record)
    await settle_keys(store, keys)
    return len(keys)

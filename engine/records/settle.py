"""Complete the TTL removal of a commit (design 0002, T1 and T2)."""

from collections.abc import Callable, Iterable
from typing import Final

from blobstore.base import BlobStore, RequestMetadata
from blobstore.concurrency import map_bounded
from blobstore.errors import BlobNotFoundError
from engine.errors import DamagedError
from engine.records.indexes import read_index
from index.snapshot.contents import new_blob_keys
from index.snapshot.keys import INDEXES
from index.snapshot.model import BlobKey, CommitRecord, IndexReference

_SETTLE: Final = RequestMetadata(payload_path="settle")
REQUESTS_IN_FLIGHT_MAX: Final = 16

IsNeeded = Callable[[str], bool]


def _always(_: str) -> bool:
    return True


async def settle_keys(store: BlobStore, keys: Iterable[BlobKey], *, is_needed: IsNeeded = _always) -> None:
    """Remove the TTL of each key, of the indexes last; one request each, none where TTLs cannot be removed.

    An index without a TTL vouches for the blobs that are new in it (T1): give it together with all of them, or after
    them. `is_needed` says whether a key that is not there matters: what is gone has no TTL that could be left.

    Raises:
        DamagedError: A key that is needed is not there.
        StoreError: The store could not do it; doing it again is safe.
    """
    if not store.capabilities.removes_ttl:
        return
    settling = store.tagged(_SETTLE)

    async def settle(key: BlobKey) -> None:
        try:
            await settling.remove_ttl(key)
        except BlobNotFoundError as error:
            if not is_needed(key):
                return
            raise DamagedError(
                "a blob of a commit is gone before its TTL was removed",
                operation="settle",
                subject=key,
                hint="back up again with `--check-retained` where the files are still there; `tidemark verify` says "
                "what is lost, `tidemark rewind` goes on from an older commit",
            ) from error

    blobs: list[BlobKey] = []
    indexes: list[BlobKey] = []
    for key in keys:
        (indexes if key.startswith(INDEXES) else blobs).append(key)
    for group in (blobs, indexes):
        await map_bounded(settle, group, in_flight_max=REQUESTS_IN_FLIGHT_MAX)


def new_indexes_of(record: CommitRecord) -> tuple[IndexReference, ...]:
    """Return the indexes that came with a record; those of its other stores came with an earlier one."""
    return tuple(reference.index for reference in record.stores if reference.number == record.number)


async def has_ttl(store: BlobStore, key: str) -> bool | None:
    """Return whether a blob carries a TTL, by a `stat`; None if there is no such blob."""
    info = await store.tagged(_SETTLE).stat(key)
    return None if info is None else info.expires_at_ms is not None


async def settle_record(store: BlobStore, record: CommitRecord, *, is_needed: IsNeeded = _always) -> None:
    """Make the indexes that came with a record, and the blobs that are new in them, permanent; idempotent.

    A record of which the predecessor is valid has a settled predecessor, because its writer saw to that (T2): so it is
    enough to settle the newest valid record.

    Requests: one `stat` for each index; only of one that still carries a TTL the rest: a GET (more for deltas), and a
    removal for each of its new keys. None at all where TTLs cannot be removed.

    `is_needed` is as for `settle_keys`. Of an index that is not needed and cannot be read nothing is done.

    Raises:
        DamagedError: An index, or a blob that is new in it, is missing and needed.
        StoreError: The store could not do it; doing it again is safe.
    """
    if not store.capabilities.removes_ttl:
        return
    indexes = new_indexes_of(record)
    carry = await map_bounded(lambda i: has_ttl(store, i.key), indexes, in_flight_max=REQUESTS_IN_FLIGHT_MAX)
    for index, carries_ttl in zip(indexes, carry, strict=True):
        if carries_ttl is False:
            continue
        # One that is missing is found to be so when it is read.
        try:
            new_keys = sorted(new_blob_keys(await read_index(store, index)))
        except DamagedError:
            if is_needed(index.key):
                raise
            continue
        await settle_keys(store, [*new_keys, index.key], is_needed=is_needed)

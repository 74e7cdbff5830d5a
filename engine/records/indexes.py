"""Snapshot indexes in a store: read with every check, written whole or as a delta (design 0002, P2).

With what every upload goes through, blobs too: put under a new key with a TTL, and made permanent once it is committed.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from blobstore.base import BlobStore, Body, BytesBody, Created, Lost, RequestMetadata, Unknown, read_blob
from blobstore.concurrency import map_bounded, run_all, run_blocking
from blobstore.errors import BlobCorruptError, BlobNotFoundError, InvalidRequestError, StoreUnavailableError
from engine.errors import DamagedError, LeaseExpiredError
from engine.runtime import Pace
from index.errors import IndexInvariantError
from index.snapshot import model
from index.snapshot.codec import INDEX_BYTES_MAX, decode_index, encode_index
from index.snapshot.contents import blob_keys, new_blob_keys
from index.snapshot.delta import make_delta, resolve_deltas
from index.snapshot.invariants import INDEX_DELTAS_MAX, check_snapshot_index
from index.snapshot.keys import INDEXES, upload_key

# A smaller index is always stored whole: a delta would save less than the request costs that it adds to a reading.
WHOLE_BYTES_MAX: Final = 256 * 1024
# A delta has to be this many times smaller than the whole.
DELTA_GAIN_MIN: Final = 4
# A file of an index takes about this, compressed.
_FILE_BYTES_MAX: Final = 64
# What `_weigh` counts as one takes less than that in an index before compression: most take half of it.
WEIGHT_BYTES_MAX: Final = 512
# Bytes of files that are in an index itself and weigh as much as an entry.
INLINE_BYTES_PER_WEIGHT: Final = 256
# How many indexes an `IndexCache` holds, however large; and what more of them weigh together, if they are small.
CACHED_MAX: Final = 4
CACHED_WEIGHT_MAX: Final = 20_000

PAYLOAD: Final = "snapshot-index"
_SETTLE: Final = RequestMetadata(payload_path="settle")


IsNeeded = Callable[[str], bool]


class StoredSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An index as it is stored."""

    index: model.SnapshotIndex
    # Its reference, then that of each index that it is a delta on, down to one that is whole.
    chain: tuple[model.IndexReference, ...]

    @property
    def depth(self) -> int:
        """Number of deltas that lead to it; 0 if whole."""
        return len(self.chain) - 1

    @property
    def kept_keys(self) -> frozenset[str]:
        """Every key that it keeps alive: its own, those of the bases of deltas (P2), and the blobs."""
        return blob_keys(self.index) | {link.key for link in self.chain}


class IndexCache:
    """The indexes that a process has read or written last: the next backup's base is nearly always among them."""

    def __init__(self) -> None:
        # With what each weighs.
        self._snapshots: OrderedDict[model.IndexReference, tuple[StoredSnapshot, int]] = OrderedDict()

    def find(self, reference: model.IndexReference) -> StoredSnapshot | None:
        snapshot, _ = self._snapshots.get(reference, (None, 0))
        return snapshot

    def keep(self, snapshot: StoredSnapshot) -> None:
        """Remember an index; those that were remembered longest ago go if they are too many."""
        self._snapshots[snapshot.chain[0]] = snapshot, _weigh(snapshot.index)
        self._snapshots.move_to_end(snapshot.chain[0])
        weight = sum(weight for _, weight in self._snapshots.values())
        while len(self._snapshots) > CACHED_MAX and weight > CACHED_WEIGHT_MAX:
            _, (_, gone) = self._snapshots.popitem(last=False)
            weight -= gone


async def read_index(store: BlobStore, reference: model.IndexReference) -> model.SnapshotIndex:
    """Read the index that a reference names; errors as `read_stored_snapshot`."""
    return (await read_stored_snapshot(store, reference)).index


async def read_stored_snapshot(
    store: BlobStore, reference: model.IndexReference, pace: Pace | None = None
) -> StoredSnapshot:
    """Read an index, and the ones that it is a delta on; how long each GET took is added to the pace.

    Requests: one GET, and one more per delta on the way; at most 17.

    Raises:
        DamagedError: It is missing, altered or larger than the reference says, or its chain of deltas is broken. The
            cause is a `BlobNotFoundError` if it is missing.
        FormatError: The bytes are the right ones and this version of tidemark cannot read them.
    """
    chain: list[model.IndexReference] = []
    deltas: list[model.IndexDelta] = []
    while True:
        chain.append(reference)
        stored = await _read_stored(store, reference, pace)
        if isinstance(stored, model.SnapshotIndex):
            break
        # Depth counts down to 1, so that no chain is longer than its first delta says and none leads in a circle.
        expected = deltas[-1].depth - 1 if deltas else stored.depth
        if stored.depth != expected or not 1 <= stored.depth <= INDEX_DELTAS_MAX:
            raise _broken_chain(reference, f"is delta {stored.depth} and should be delta {expected}")
        deltas.append(stored)
        reference = stored.base
    if deltas and deltas[-1].depth != 1:
        raise _broken_chain(reference, f"is whole and should be delta {deltas[-1].depth - 1}")
    try:
        index = await run_blocking(resolve_deltas, stored, deltas[::-1]) if deltas else stored
    except IndexInvariantError as error:
        raise _broken_chain(chain[0], str(error)) from error
    return StoredSnapshot(index=index, chain=tuple(chain))


def check_is_of(index: model.SnapshotIndex, reference: model.StoreReference, *, operation: str) -> None:
    """Raise `DamagedError` for an index that is of another state than the reference which led to it."""
    if index.metadata.unique_id != reference.unique_id:
        message = f"is of {index.metadata.unique_id}, not of {reference.unique_id}"
        raise DamagedError(message, operation=operation, subject=reference.index.key)


def is_missing(error: DamagedError) -> bool:
    """Return whether something is not there at all, as after a collection; otherwise it is damaged for certain."""
    return isinstance(error.__cause__, BlobNotFoundError)


def delta_pays(*, whole_bytes: int, delta_bytes: int) -> bool:
    """Return whether to store an index as a delta: it is large, and the delta is less than a quarter of it."""
    return whole_bytes > WHOLE_BYTES_MAX and delta_bytes * DELTA_GAIN_MIN < whole_bytes


async def put_new(store: BlobStore, key: model.BlobKey, body: Body, *, ttl_ms: int) -> Created:
    """Put a blob under a key that was minted for it (design 0002, K2); return when the store created it.

    Raises:
        StoreUnavailableError: The store did not say whether it is there.
        DamagedError: Another blob is there, which nobody but us could have put.
        LeaseExpiredError: It was there, and is gone.
        StoreError: As the store says.
    """
    match await store.put_if_absent(key, body, ttl_ms=ttl_ms):
        case Created() as created:
            return created
        case Unknown(reason=reason):
            raise StoreUnavailableError(f"no answer: {reason}", operation="put_if_absent", key=key)
        case Lost():
            # The key is random and ours alone: what is there came from an earlier sending of this very request. Its
            # size is proof enough: a body keeps the hash of its first reading, and refuses another that differs.
            found = await store.stat(key)
            if found is None:
                message = "an upload was collected before it was answered"
                raise LeaseExpiredError(message, operation="backup", subject=key)
            if found.size_bytes != body.size_bytes:
                message = f"a new upload of {body.size_bytes} bytes was refused, and {found.size_bytes} bytes are there"
                hint = "somebody else writes to this repository's keys"
                raise DamagedError(message, operation="backup", subject=key, hint=hint)
            return Created(created_at_ms=found.created_at_ms)


async def write_index(
    store: BlobStore,
    index: model.SnapshotIndex,
    *,
    scope: model.Scope,
    ttl_ms: int,
    base: StoredSnapshot | None,
    counter: int = 0,
) -> tuple[StoredSnapshot, Created]:
    """Write an index with a TTL (C5), whole or as a delta on its base, whichever `delta_pays` says: one PUT.

    Its session and `counter`, 0 unless the session writes several indexes, make the key. `base` is the snapshot that it
    was diffed against, as it is stored.

    Raises:
        IndexInvariantError: The index breaks an invariant; nothing is written.
        StoreError, DamagedError: As `put_new`.
    """
    data, is_delta = await run_blocking(_encode, index, base)
    key = upload_key(INDEXES, scope, index.session, counter)
    reference = model.IndexReference(key=key, sha256=hashlib.sha256(data).digest(), size_bytes=len(data))
    metadata = RequestMetadata(
        job=scope.job, task=index.metadata.task, store=index.metadata.store, payload_path=PAYLOAD, size_bytes=len(data)
    )
    created = await put_new(store.tagged(metadata), key, BytesBody(data), ttl_ms=ttl_ms)
    chain = (reference, *(base.chain if is_delta and base is not None else ()))
    return StoredSnapshot(index=index, chain=chain), created


def _encode(index: model.SnapshotIndex, base: StoredSnapshot | None) -> tuple[bytes, bool]:
    """Encode an index; return whether the bytes are a delta, too. Blocks: many files take their time."""
    if base is None:
        return encode_index(index), False
    if base.depth >= INDEX_DELTAS_MAX:
        return encode_index(index, base.index), False
    # The whole one would have about as many bytes a file as the one that the base grew from. That one may have had many
    # more files, which must not make the few of now seem large.
    counts = [_count_files(each.dir) for each in (index, base.index)]
    expected_bytes = counts[0] * min(_FILE_BYTES_MAX, base.chain[-1].size_bytes // max(counts[1], 1))
    delta = _encode_delta(index, base) if expected_bytes > WHOLE_BYTES_MAX else None
    # Near the cap the whole is made, so that an index too large for it is refused now, not at the end of the chain.
    fits = _weigh(index) * WEIGHT_BYTES_MAX <= INDEX_BYTES_MAX // 2
    if fits and delta is not None and delta_pays(whole_bytes=expected_bytes, delta_bytes=len(delta)):
        check_snapshot_index(index, base.index)
        return delta, True
    whole = encode_index(index, base.index)
    if delta is None and expected_bytes <= WHOLE_BYTES_MAX < len(whole):
        delta = _encode_delta(index, base)
    if delta is not None and delta_pays(whole_bytes=len(whole), delta_bytes=len(delta)):
        return delta, True
    return whole, False


def _count_files(directory: model.DirIndex) -> int:
    return len(directory.files_present) + sum(map(_count_files, directory.sub_dirs_present))


def _weigh(index: model.SnapshotIndex) -> int:
    """Weigh an index: entries present and removed, their blobs and bytes inline, packs, steps of its lineage."""

    def weigh(directory: model.DirIndex) -> int:
        weight = 1
        for file in (*directory.files_present, *directory.files_removed):
            weight += max(1, len(file.blobs)) + (len(file.inline) // INLINE_BYTES_PER_WEIGHT if file.inline else 0)
        return weight + sum(map(weigh, (*directory.sub_dirs_present, *directory.sub_dirs_removed)))

    return len(index.metadata.lineage) + len(index.packs) + weigh(index.dir)


def _encode_delta(index: model.SnapshotIndex, base: StoredSnapshot) -> bytes | None:
    """Encode a delta; None where the index does not follow from its base alone (design 0001, X3)."""
    try:
        return encode_index(make_delta(base.index, base.chain[0], base.depth, index))
    except IndexInvariantError:
        return None


async def _read_stored(
    store: BlobStore, reference: model.IndexReference, pace: Pace | None = None
) -> model.StoredIndex:
    key = reference.key
    store = store.tagged(RequestMetadata(payload_path=PAYLOAD, size_bytes=reference.size_bytes))
    if reference.size_bytes > INDEX_BYTES_MAX:
        raise DamagedError(f"is said to have {reference.size_bytes} bytes", operation="read index", subject=key)
    # Bytes that are wrong are fetched once more: a fault on the way is not yet a fault of the blob.
    for fresh in (False, True):
        began_s = asyncio.get_running_loop().time()
        try:
            data = await read_blob(store, key, size_bytes_max=reference.size_bytes, fresh=fresh)
        except (BlobNotFoundError, BlobCorruptError, InvalidRequestError) as error:
            if fresh or isinstance(error, BlobNotFoundError):
                raise DamagedError(f"cannot be had: {error}", operation="read index", subject=key) from error
        else:
            if pace is not None:
                pace.add_answer(asyncio.get_running_loop().time() - began_s)
            if len(data) == reference.size_bytes and hashlib.sha256(data).digest() == reference.sha256:
                return await run_blocking(decode_index, data, subject=key)
    message = "is not what the reference to it says: cut short or altered"
    raise DamagedError(message, operation="read index", subject=key)


def _broken_chain(reference: model.IndexReference, reason: str) -> DamagedError:
    return DamagedError(f"its chain of deltas is broken: {reason}", operation="read index", subject=reference.key)


async def settle_keys(store: BlobStore, keys: Iterable[model.BlobKey], *, is_needed: IsNeeded = lambda _: True) -> None:
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

    async def settle(key: model.BlobKey) -> None:
        try:
            await settling.remove_ttl(key)
        except BlobNotFoundError as error:
            if not is_needed(key):
                return
            message = "a blob of a commit is gone before its TTL was removed"
            hint = "back up again with `--check-retained` where the files are still there; `tidemark verify` says "
            hint += "what is lost, `tidemark rewind` goes on from an older commit"
            raise DamagedError(message, operation="settle", subject=key, hint=hint) from error

    keys = list(keys)
    for are_indexes in (False, True):
        await run_all(settle, [key for key in keys if key.startswith(INDEXES) is are_indexes])


def new_indexes_of(record: model.CommitRecord) -> tuple[model.IndexReference, ...]:
    """Return the indexes that came with a record; those of its other stores came with an earlier one."""
    return tuple(reference.index for reference in record.stores if reference.number == record.number)


async def has_ttl(store: BlobStore, key: str) -> bool | None:
    """Return whether a blob carries a TTL, by a `stat`; None if there is no such blob."""
    info = await store.tagged(_SETTLE).stat(key)
    return None if info is None else info.expires_at_ms is not None


async def settle_record(store: BlobStore, record: model.CommitRecord, *, is_needed: IsNeeded = lambda _: True) -> None:
    """Make the indexes that came with a record, and the blobs that are new in them, permanent; idempotent.

    A record of which the predecessor is valid has a settled predecessor, because its writer saw to that (T2): so it is
    enough to settle the newest valid record.

    Requests: one `stat` for each index; only of one that still carries a TTL the rest: a GET (more for deltas), and a
    removal for each of its new keys. None at all where TTLs cannot be removed.

    `is_needed` and errors are as for `settle_keys`. Of an index that is not needed and cannot be read nothing is done.
    """
    if not store.capabilities.removes_ttl:
        return
    indexes = new_indexes_of(record)
    carry = await map_bounded(lambda i: has_ttl(store, i.key), indexes)
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

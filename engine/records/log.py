"""A scope's log in a store: listed, read, closed by a boundary; and what a store must be able to do to hold one.

The checks of a store read what it says of itself (design 0002; `blobstore.base.Capabilities`).
"""

import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from blobstore.base import BlobStore, BytesBody, CreateOutcome, list_blobs, read_blob
from blobstore.concurrency import map_bounded
from blobstore.errors import REFUSALS, BlobNotFoundError, InvalidRequestError, StoreError, StoreUnavailableError
from engine.errors import UnsafeStoreError
from engine.records.indexes import has_ttl, new_indexes_of
from index.errors import CorruptIndexError, FormatError, IndexInvariantError, UnknownFormatError, UnsafeNameError
from index.plan import commits as plan
from index.snapshot import keys
from index.snapshot.codec import RECORD_BYTES_MAX, decode_boundary, decode_commit, decode_repository, encode_record
from index.snapshot.model import Boundary, CommitPointer, CommitRecord, Scope

# A collection may run beside a reader; it moves the log at most once per run, so a few new attempts always suffice.
LOAD_ATTEMPTS_MAX: Final = 5

Loaded = TypeVar("Loaded")
Decoded_co = TypeVar("Decoded_co", covariant=True)


class Unreadable(msgspec.Struct, frozen=True, kw_only=True):
    """An object that is there and cannot be read: damaged, or of a newer tidemark."""

    key: str
    error: FormatError


class Noted(msgspec.Struct):
    """What a reading that goes on past damage has met."""

    unreadable: list[Unreadable] = []
    # Keys that tidemark never wrote.
    foreign: list[str] = []
    # Keys of pins that cannot be read, and are older than any pin lasts.
    outlived: list[str] = []

    async def read(self, key: str, reading: Awaitable[Loaded]) -> Loaded | None:
        try:
            return await reading
        except FormatError as error:
            self.unreadable.append(Unreadable(key=key, error=error))
            return None


class ScopeLog(msgspec.Struct, frozen=True, kw_only=True):
    """One scope's log as one consistent reading: the listing is dense, and every boundary is read."""

    listing: plan.LogListing
    # All but those whose number a lasting boundary closes; of `load_log` the open ones from the newest valid one on.
    records: dict[int, CommitRecord]
    boundaries: tuple[Boundary, ...]
    # Open records, and boundaries that decide something, that cannot be read.
    unreadable: tuple[Unreadable, ...] = ()
    # Late records for which something outside the log vouches (C5).
    vouched: frozenset[CommitPointer] = frozenset()

    @property
    def commits(self) -> tuple[plan.Commit, ...]:
        """Its valid commits, oldest first."""
        return plan.valid_commits(self.listing, self.records, self.boundaries, self.vouched)

    @property
    def reopenable(self) -> tuple[CommitRecord, ...]:
        """Its records that are closed, but by no lasting boundary (D3)."""
        found = plan.find_reopenable(self.boundaries)
        return tuple(record for record in self.records.values() if record.pointer in found)

    @property
    def newest(self) -> plan.Commit | None:
        """The newest commit that is neither void nor closed; None for a new or forgotten scope."""
        return next(reversed(self.commits), None)

    @property
    def void(self) -> tuple[CommitRecord, ...]:
        """Its open records that are late, and for which nothing vouches (C5)."""
        late = plan.find_late(self.listing, self.records, self.boundaries)
        return tuple(record for record in late if record.pointer not in self.vouched)

    @property
    def is_damaged(self) -> bool:
        """Whether something of it cannot be read, or none of its open records counts: nothing of it may go (D9)."""
        return bool(self.unreadable) or self.is_adrift

    @property
    def is_adrift(self) -> bool:
        """Whether records of it are open and none of them counts: perhaps it was moved, and lost its witnesses."""
        return bool(self.void) and not self.commits


class Decode(Protocol[Decoded_co]):
    """One of the decoders of `index.snapshot.codec`; raises `FormatError`."""

    def __call__(self, data: bytes, *, subject: str) -> Decoded_co: ...


async def read_record(store: BlobStore, key: str, decode: Decode[Loaded]) -> Loaded:
    """Read any record by its key.

    Raises:
        BlobNotFoundError: It is not there (any more).
        FormatError: Its bytes are not what `decode` takes, twice.
    """

    async def read(*, fresh: bool) -> Loaded:
        try:
            data = await read_blob(store, key, size_bytes_max=RECORD_BYTES_MAX, fresh=fresh)
        except InvalidRequestError as error:
            if error.operation != "get":
                raise  # a wrong setting: nothing was read
            raise CorruptIndexError("larger than any record, or cut short while it was read", subject=key) from error
        return decode(data, subject=key)

    try:
        return await read(fresh=False)
    except FormatError:
        # Perhaps it was altered on the way; one bit makes another format version or another kind of it, too. Perhaps it
        # was overwritten between two parts of a read that broke off, as a pin is.
        return await read(fresh=True)


async def read_commit(store: BlobStore, scope: Scope, number: int) -> CommitRecord:
    """Read one commit record; errors as `read_record`, `FormatError` also for one of another scope or number."""
    key = keys.commit_key(scope, number)
    record = await read_record(store, key, decode_commit)
    if record.scope != scope or record.number != number:
        raise IndexInvariantError(f"says that it is record {record.number} of {record.scope}", subject=key)
    return record


async def read_boundary(store: BlobStore, scope: Scope, number: int) -> Boundary:
    """Read one boundary; errors as `read_commit`."""
    key = keys.boundary_key(scope, number)
    boundary = await read_record(store, key, decode_boundary)
    if boundary.scope != scope or boundary.number != number:
        raise IndexInvariantError(f"says that it is boundary {boundary.number} of {boundary.scope}", subject=key)
    return boundary


async def find_boundary(store: BlobStore, scope: Scope, number: int) -> Boundary | None:
    """Read the boundary of a number that was found taken.

    None: a collector has met a newer one, which closes at least as much, and has taken this one away (D3).
    """
    with contextlib.suppress(BlobNotFoundError):
        return await read_boundary(store, scope, number)
    return None


async def put_boundary(store: BlobStore, boundary: Boundary, *, operation: str, may_arrive: str) -> CreateOutcome:
    """Create a boundary; a caller that finds its number taken asks `find_boundary`.

    `may_arrive` is a hint: what to do while the boundary may still arrive.

    Raises:
        StoreUnavailableError: The store failed, and the boundary may be there all the same, or arrive later.
        StoreError: As the store says: it was refused, and is not there.
    """
    key = keys.boundary_key(boundary.scope, boundary.number)
    try:
        return await store.put_if_absent(key, BytesBody(encode_record(boundary)))
    except REFUSALS:
        raise
    except StoreError as error:
        raise StoreUnavailableError(str(error), operation=operation, key=key, hint=may_arrive) from error


async def list_log(store: BlobStore, scope: Scope, *, from_number: int = 0) -> plan.LogListing:
    """List records and boundaries of a scope from a number on: one LIST per 1,000 of them."""
    start_after = keys.log_start_after(scope, from_number)
    listed = list_blobs(store, keys.log_prefix(scope), start_after=start_after)
    entries = [(blob.key, blob.created_at_ms) async for blob in listed]
    return plan.listing_of(scope, entries)


async def list_all_logs(store: BlobStore, noted: Noted | None = None) -> tuple[plan.LogListing, ...]:
    """Return the logs of all scopes, from one LIST per 1,000 keys; foreign keys are passed over, and noted."""
    noted = noted or Noted()
    by_scope: defaultdict[Scope, list[tuple[str, int]]] = defaultdict(list)
    async for blob in list_blobs(store, keys.LOG):
        try:
            by_scope[keys.parse_log_key(blob.key).scope].append((blob.key, blob.created_at_ms))
        except UnsafeNameError:
            noted.foreign.append(blob.key)
    return tuple(plan.listing_of(scope, by_scope[scope]) for scope in sorted(by_scope, key=str))


async def list_scopes(store: BlobStore) -> tuple[Scope, ...]:
    """List every scope that has a log."""
    return tuple(listing.scope for listing in await list_all_logs(store))


async def read_boundaries(store: BlobStore, listing: plan.LogListing) -> tuple[Boundary, ...]:
    """Read every listed boundary."""
    return tuple([await read_boundary(store, listing.scope, number) for number in listing.boundaries])


async def _note_boundaries(store: BlobStore, listing: plan.LogListing, noted: Noted) -> tuple[Boundary, ...]:
    """Read the listed boundaries; one that cannot be read and that a newer one supersedes decides nothing."""
    unreadable = Noted()
    found = [
        await unreadable.read(keys.boundary_key(listing.scope, number), read_boundary(store, listing.scope, number))
        for number in listing.boundaries
    ]
    boundaries = tuple(boundary for boundary in found if boundary is not None)
    lost = {number for number, boundary in zip(listing.boundaries, found, strict=True) if boundary is None}
    superseded = {keys.boundary_key(listing.scope, n) for n in plan.choose_superseded_boundaries(boundaries, lost)}
    noted.unreadable += [one for one in unreadable.unreadable if one.key not in superseded]
    return boundaries


async def load_log(store: BlobStore, scope: Scope, *, past_damage: bool = False) -> ScopeLog:
    """List a scope's log, read its boundaries and its newest valid commit.

    Requests: one LIST per 1,000 keys, one GET per boundary (one, normally), one GET per record from the newest down
    to the newest valid one (one, normally).

    With `past_damage` it goes on where something cannot be read, or the listing has holes, and the result says so.

    Raises:
        UnsafeStoreError: The listing has holes however often it is repeated (C1).
        FormatError: A record or boundary is damaged.
    """

    async def load() -> ScopeLog:
        noted = Noted()
        listing = await list_log(store, scope)
        boundaries = await _note_boundaries(store, listing, noted)
        if not past_damage:
            plan.check_dense(listing, boundaries)
        records: dict[int, CommitRecord] = {}
        vouched: frozenset[CommitPointer] = frozenset()
        # From the newest record down until one is valid; those above it say whether they built on it.
        for number, created_at_ms in reversed(listing.records):
            if plan.is_number_closed(number, boundaries):
                continue  # the log of a forgotten scope may be long
            record = await noted.read(keys.commit_key(scope, number), read_commit(store, scope, number))
            if record is None:
                continue
            records[number] = record
            if plan.is_late(record, created_at_ms):
                vouched |= await read_vouched(store, listing, records, boundaries)
            if plan.valid_commits(listing, records, boundaries, vouched):
                break
        if noted.unreadable and not past_damage:
            raise noted.unreadable[0].error
        unreadable = tuple(noted.unreadable)
        return ScopeLog(listing=listing, records=records, boundaries=boundaries, unreadable=unreadable, vouched=vouched)

    return await repeat_reading(load, operation="load", subject=str(scope))


async def load_scope(store: BlobStore, scope: Scope) -> ScopeLog:
    """Read the whole log of a scope: as `load_log`, but with a GET for every record."""

    async def load() -> ScopeLog:
        return await read_scope(store, await list_log(store, scope))

    return await repeat_reading(load, operation="load", subject=str(scope))


async def read_scope(
    store: BlobStore, listing: plan.LogListing, known: Mapping[int, CommitRecord] = {}, *, past_holes: bool = False
) -> ScopeLog:
    """Read what one listing promises and no lasting boundary closes by number; `known` records are not read again.

    Raises:
        ShortListingError: The listing has a hole, and it was not to be passed over.
        BlobNotFoundError: Something of it is gone.
    """
    noted = Noted()
    boundaries = await _note_boundaries(store, listing, noted)
    if not past_holes:
        plan.check_dense(listing, boundaries)

    async def read(number: int) -> CommitRecord | None:
        key = keys.commit_key(listing.scope, number)
        # What is closed and damaged keeps nothing.
        note = Noted() if plan.is_number_closed(number, boundaries) else noted
        found = known.get(number) or await note.read(key, read_commit(store, listing.scope, number))
        if note is not noted:
            noted.unreadable += [one for one in note.unreadable if isinstance(one.error, UnknownFormatError)]
        return found

    lasting = plan.lasting_boundaries(boundaries)
    numbers = [number for number, _ in listing.records if not plan.is_number_closed(number, lasting)]
    found = await map_bounded(read, numbers)
    records = {record.number: record for record in found if record is not None}
    return ScopeLog(
        listing=listing,
        records=records,
        boundaries=boundaries,
        unreadable=tuple(noted.unreadable),
        vouched=await read_vouched(store, listing, records, boundaries),
    )


async def read_vouched(
    store: BlobStore, listing: plan.LogListing, records: Mapping[int, CommitRecord], boundaries: Sequence[Boundary]
) -> frozenset[CommitPointer]:
    """Ask the store what vouches for a late record of which the log says nothing (C5).

    One whose lease began before the repository record was created here was copied, and not written here: nobody writes
    before that record is there. It may have been void at the old place, and lack what was collected there, and still
    does. One whose new indexes have no TTL was acknowledged (T1).

    Requests: none unless the newest record is late; then one STAT and one GET of the repository record, and one STAT of
    each index that is new in the record, or of all if none is.
    """
    record = plan.find_doubtful(listing, records, boundaries)
    if record is None:
        return frozenset()
    if created_ms := await repository_created_ms(store):
        repository = await read_record(store, keys.REPOSITORY, decode_repository)
        if plan.lease_began_ms(record, repository) < created_ms:
            indexes = new_indexes_of(record) or tuple(reference.index for reference in record.stores)
            found = [await store.stat(index.key) for index in indexes]
            return frozenset() if None in found else frozenset({record.pointer})
    # A fork names indexes that its source has settled: they say nothing of it.
    if record.kind != "commit" or not store.capabilities.removes_ttl:
        return frozenset()
    carry = [await has_ttl(store, index.key) for index in new_indexes_of(record)]
    return frozenset({record.pointer}) if False in carry and True not in carry else frozenset()


async def repository_created_ms(store: BlobStore) -> int:
    """Return when the repository record was created here, at the earliest; 0 if it is not there. One STAT."""
    there = await store.stat(keys.REPOSITORY)
    return 0 if there is None else there.created_at_ms - store.capabilities.created_late_ms


async def repeat_reading(read: Callable[[], Awaitable[Loaded]], *, operation: str, subject: str = "") -> Loaded:
    """Read logs again when a collection beside us took away what a listing had promised.

    Raises:
        UnsafeStoreError: That, or a hole, was met in every reading (C1); of many logs it names that one.
    """
    for _ in range(LOAD_ATTEMPTS_MAX - 1):
        with contextlib.suppress(BlobNotFoundError, plan.ShortListingError):
            return await read()
    try:
        return await read()
    except (BlobNotFoundError, plan.ShortListingError) as error:
        message = f"the log changed or had holes in each of {LOAD_ATTEMPTS_MAX} readings"
        where, hint = (error.key, "") if isinstance(error, BlobNotFoundError) else (error.subject, error.hint)
        raise UnsafeStoreError(message, operation=operation, subject=subject or where, hint=hint) from error


def check_commits(store: BlobStore, operation: str) -> None:
    """Refuse a store whose create-if-absent is not atomic, so that two writers could both win (K4). No request is made.

    Reading is not refused anywhere: what such a store still has can be restored.
    """
    if not store.capabilities.atomic_create:
        message = "of two creates of one key the blob store may let both win"
        hint = "use a blob store with atomic create-if-absent; `tidemark doctor` shows it, and a restore still works"
        raise UnsafeStoreError(message, operation=operation, hint=hint)


def check_consistent_lists(
    store: BlobStore, operation: str, danger: str = "a collection could be deleting what this refers to"
) -> None:
    """Refuse a store on which the pin of a fork, rewind or name could protect nothing, or a collection be unsafe (D4).

    As `check_commits`; and one whose lists may be stale: a boundary that is there would not be seen.
    """
    check_commits(store, operation)
    if not store.capabilities.consistent_lists:
        message = f"the blob store's lists may be stale: {danger}"
        hint = f"{operation} only on a blob store, or mount of it, with consistent lists; `tidemark doctor` shows which"
        raise UnsafeStoreError(message, operation=operation, hint=hint)

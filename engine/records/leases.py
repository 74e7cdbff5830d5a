"""Names and pins: the leases that keep what a commit refers to (design 0002, D5).

A pin is the lease of a process that reads, builds on or protects a commit; it ends by the store's clock. A name holds
until it is released. Each naming has a key of its own that is never used again, so that neither a late release nor a
late collector can hit another one. A name refers to the earliest of its namings that is live.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from blobstore import errors
from blobstore.base import BlobStore, BytesBody, Created, Unknown, list_blobs
from blobstore.concurrency import give_up
from engine.errors import CollectedError, LeaseExpiredError, NotFoundError, UnsafeStoreError, UsageError, restated
from engine.records import log
from engine.records.indexes import settle_record
from engine.runtime import Runtime
from engine.text import Where
from index.errors import FormatError, UnknownFormatError, UnsafeNameError
from index.plan.commits import Commit, Naming, choose_naming, is_closed
from index.snapshot.codec import decode_name, encode_record
from index.snapshot.keys import NAMES, name_key, name_prefix, names_prefix, parse_name_key, pin_key
from index.snapshot.model import PIN_DURATION_MS, NameRecord, Pin, RepositoryRecord, Scope

_LOG: Final = logging.getLogger(__name__)
RENEWALS_PER_DURATION: Final = 3


async def list_names(store: BlobStore, scope: Scope, noted: log.Noted | None = None) -> tuple[NameRecord, ...]:
    """Return every name of a scope that holds, sorted: not released, and written in time (design 0002, D5).

    One that cannot be read is passed over, and noted. Requests: one LIST per 1,000 namings, one GET for each.
    """
    by_name: defaultdict[str, list[Naming]] = defaultdict(list)
    for naming in await list_namings(store, noted or log.Noted(), names_prefix(scope)):
        by_name[naming.record.name].append(naming)
    chosen = [choose_naming(namings) for _, namings in sorted(by_name.items())]
    return tuple(naming.record for naming in chosen if naming is not None)


async def read_name(store: BlobStore, scope: Scope, name: str) -> NameRecord:
    """Read a name that holds. Requests as `read_namings`.

    Raises:
        NotFoundError: There is none, it was released, or it came too late to protect anything.
    """
    return _choose(await read_namings(store, scope, name), scope, name).record


async def read_namings(store: BlobStore, scope: Scope, name: str) -> tuple[Naming, ...]:
    """Read every record of a name, released and void ones too: one LIST, and a GET for each, mostly one."""
    noted = log.Noted()
    namings = await list_namings(store, noted, name_prefix(scope, name))
    for one in noted.unreadable:
        if isinstance(one.error, UnknownFormatError):
            raise one.error
        hint = (
            "commits are untouched: `tidemark list` shows them, and `restore --number` takes one; `tidemark discard "
            f"{one.key}` gives up the name, which a commit can then have again; if only the name held its commit, that "
            "comes back with an older version of this object alone"
        )
        raise restated(one.error, subject=one.key, hint=hint) from one.error
    return namings


async def _release(store: BlobStore, naming: Naming) -> None:
    """Overwrite one naming as released: one PUT, harmless to every other naming."""
    released = msgspec.structs.replace(naming.record, released=True)
    await store.put(naming.key, BytesBody(encode_record(released)))


def _choose(namings: tuple[Naming, ...], scope: Scope, name: str) -> Naming:
    chosen = choose_naming(namings)
    if chosen is None:
        what = "was released" if any(n.record.released for n in namings) else "is not there"
        raise NotFoundError(f"the name {name!r} {what}", operation="find", subject=str(scope))
    return chosen


async def list_namings(store: BlobStore, noted: log.Noted, prefix: str = NAMES) -> tuple[Naming, ...]:
    """Return every record of every name below a prefix; what cannot be read, and foreign keys, are noted."""
    namings: list[Naming] = []
    async for blob in list_blobs(store, prefix):
        try:
            naming_id = parse_name_key(blob.key)[2]
        except UnsafeNameError:
            noted.foreign.append(blob.key)
            continue
        try:
            record = await noted.read(blob.key, log.read_record(store, blob.key, decode_name))
        except errors.BlobNotFoundError:
            continue  # released, and collected since the listing
        if record is not None:
            namings.append(Naming(key=blob.key, created_at_ms=blob.created_at_ms, id=naming_id, record=record))
    if all(n.record.released or n.is_live for n in namings):
        return tuple(namings)
    # One is late: it holds all the same where it was copied with the whole repository.
    created_at_ms = await log.repository_created_ms(store)
    return tuple(msgspec.structs.replace(n, repository_created_at_ms=created_at_ms) for n in namings)


class PinLease:
    """A held pin.

    Attributes:
        pinned: False where the store denied the write or was full, or once the pin has lapsed (this process slept
            for longer than it lasts): nothing protects the reader any more, who plans again on a missing blob.
        valid_until_ms: Until when, by the store's clock, a record that rests on the pin may be created: a margin before
            the end of the pin as first written, which is what the check for a boundary has followed. Renewing does not
            move it. 0 if not pinned.
        last_error: Why the newest renewal failed, if it did.
        where: What it is, for a line of a log.
        kept: The pin is left to expire, not released: a record that rests on it may still land late (C3).
    """

    def __init__(self, store: BlobStore, pin: Pin, margin_ms: int) -> None:
        self._store = store
        self._pin = pin
        self._margin_ms = margin_ms
        self.where = Where(store, f"{pin.scope}: pin for {pin.purpose}")
        self._ends_at_ms = 0
        self.pinned = False
        self.valid_until_ms = 0
        self.last_error: errors.StoreError | None = None
        self.kept = False

    async def begin(self) -> None:
        created = await self._put(self._pin)
        self.pinned = True
        self._ends_at_ms = created.created_at_ms + self._pin.duration_ms
        self.valid_until_ms = self._ends_at_ms - self._margin_ms

    async def release(self) -> None:
        """Overwrite the pin as released, unless it is kept; only a collector deletes it (D1)."""
        if not self.kept:
            await self._put(msgspec.structs.replace(self._pin, duration_ms=0, stores=()))

    async def renew_for_ever(self) -> None:
        """Renew three times per duration until cancelled or lapsed; a failed renewal is remembered and tried again."""
        while self.pinned:
            await asyncio.sleep(self._pin.duration_ms / RENEWALS_PER_DURATION / 1000)
            try:
                created = await self._put(self._pin)
            except errors.StoreError as error:
                self.last_error = error
                _LOG.warning("%s was not renewed: %s", self.where, error)
                continue
            self.last_error = None
            # A pin that was over when it was renewed may have been overtaken by a collection: it protects nothing.
            self.pinned = created.created_at_ms < self._ends_at_ms
            self._ends_at_ms = created.created_at_ms + self._pin.duration_ms
        _LOG.warning("%s has ended before its work, which nothing protects any more", self.where)

    async def _put(self, pin: Pin) -> Created:
        """Put the pin's record: a copy that arrives late lets it end no sooner (design 0002, D5)."""
        return await self._store.put(pin_key(pin.id), BytesBody(encode_record(pin)), repeatable=True)


@contextlib.asynccontextmanager
async def hold_pin(
    store: BlobStore, runtime: Runtime, commit: Commit, *, purpose: str, margin_ms: int = 0, required: bool = False
) -> AsyncIterator[PinLease]:
    """Keep what a commit refers to from being collected while the block runs.

    The pin is written first, then the scope's boundaries are read: a collector that did not see the pin had written its
    boundary before, so that either it keeps the commit or this raises.

    Requests: one PUT, one LIST and a GET per boundary before the block; one PUT after it.

    Who writes a record that rests on the pin gives the repository's `margin_ms`, and `required`: then
    `AccessDeniedError` or `StoreFullError` is raised where no pin can be written. Readers go on without one
    (`PinLease.pinned`).

    Raises:
        CollectedError: The commit was closed before the pin was there. Choose again.
        UnsafeStoreError: The pin is required, and a record that rests on it would not be safe in this store.
    """
    if required:
        log.check_consistent_lists(store, purpose)
    pin = Pin(
        id=runtime.session(),
        scope=commit.scope,
        source=commit.pointer,
        duration_ms=PIN_DURATION_MS + margin_ms,
        purpose=purpose,
        stores=commit.record.stores,
    )
    lease = PinLease(store, pin, margin_ms)
    try:
        await lease.begin()
    except (errors.AccessDeniedError, errors.StoreFullError) as error:
        if required:
            raise
        lease.last_error = error
        _LOG.warning("%s cannot be written, so that nothing protects the work: %s", lease.where, error)
        yield lease
        return
    renewals: list[asyncio.Task[None]] = []
    try:
        await check_open(store, commit)
        renewals.append(asyncio.create_task(lease.renew_for_ever()))
        yield lease
    finally:
        await give_up(*renewals)
        # A pin that cannot be released expires by itself; the block's own outcome matters more.
        try:
            await lease.release()
        except errors.StoreError as error:
            _LOG.warning("%s was not released, and ends by itself: %s", lease.where, error)


async def check_open(store: BlobStore, commit: Commit) -> None:
    """Make sure that no boundary has closed a commit, or that the name it was found by still holds it.

    Raises:
        CollectedError: It may be collected at any moment, or was already.
        NotFoundError: The name that it was found by is gone.
        UnsafeStoreError: Collections kept changing the log while it was read.
    """
    if commit.name is not None:
        if (await read_name(store, commit.scope, commit.name)).source != commit.pointer:
            raise CollectedError("the name refers to another commit now", operation="pin", subject=commit.name)
        return

    async def is_over() -> bool:
        listing = await log.list_log(store, commit.scope, from_number=commit.pointer.number)
        boundaries = await log.read_boundaries(store, listing)
        return is_closed(commit.pointer, boundaries) or listing.created_at_ms(commit.pointer.number) is None

    if await log.repeat_reading(is_over, operation="pin", subject=str(commit.scope)):
        raise CollectedError(
            f"commit {commit.pointer.number} was collected meanwhile", operation="pin", subject=str(commit.scope)
        )


async def is_closed_by_now(store: BlobStore, commit: Commit) -> bool:
    """Return whether `check_open` would refuse a commit; not if nobody can say so."""
    with contextlib.suppress(errors.StoreError, FormatError, UnsafeStoreError):
        try:
            await check_open(store, commit)
        except NotFoundError:
            return True
    return False


async def give_name(
    store: BlobStore, repository: RepositoryRecord, runtime: Runtime, commit: Commit, name: str
) -> NameRecord:
    """Keep a commit under a name until the name is released (design 0002, D5).

    A name that refers to this commit already is left as it is: a call that got no answer can be repeated.

    Requests: one LIST of the name; those of `hold_pin` and of settling the commit; one PUT; the LIST again, with a GET
    for each record there.

    Raises:
        UsageError: The name is taken in this scope, or was given to another commit at the same moment.
        NotFoundError: The commit was collected meanwhile.
        LeaseExpiredError: The naming came too late to protect anything.
        UnsafeStoreError: A name would not be safe in this store; nothing was written.
        StoreUnavailableError: The outcome is unknown: the name may be there now or later.
    """
    standing = choose_naming(await read_namings(store, commit.scope, name))
    if standing is not None:
        if standing.record.source != commit.pointer:
            raise _name_is_taken(name)
        return standing.record
    async with hold_pin(store, runtime, commit, purpose="name", margin_ms=repository.margin_ms, required=True) as lease:
        await settle_record(store, commit.record)
        record = NameRecord(
            scope=commit.scope,
            name=name,
            source=commit.pointer,
            version=commit.record.version,
            committed_at_ms=commit.committed_at_ms,
            stores=commit.record.stores,
            valid_until_ms=lease.valid_until_ms,
            offsets=commit.record.offsets,
            layout=commit.record.layout,
        )
        key, data = name_key(commit.scope, name, runtime.session()), encode_record(record)
        # Until the outcome is known the naming may land late, and has to find its blobs when it does.
        lease.kept = True
        try:
            outcome = await store.put_if_absent(key, BytesBody(data))
        except errors.REFUSALS:
            lease.kept = False
            raise
        if isinstance(outcome, Unknown):
            raise errors.StoreUnavailableError(outcome.reason, operation="name", key=key)
        # Lost: nobody else has this key, so an earlier copy of the request was there first. One that came too late is
        # judged by the listing, as for every reader.
        lease.kept = isinstance(outcome, Created) and outcome.created_at_ms > record.valid_until_ms
        return await _judge_naming(store, key, record)


async def _judge_naming(store: BlobStore, key: str, record: NameRecord) -> NameRecord:
    """Let one of two writers of a name give way: each writes, then reads, so at least one sees the other."""
    namings = await read_namings(store, record.scope, record.name)
    mine = next((n for n in namings if n.key == key), None)
    if mine is None or mine.created_at_ms > record.valid_until_ms:
        # One that was in time holds until its pin is over, even if it is released.
        raise LeaseExpiredError("the name came after its pin had ended", operation="name", subject=record.name)
    if any(n.is_live and n.record.source != record.source for n in namings):
        await _release(store, mine)
        raise _name_is_taken(record.name)
    return record


async def release_name(store: BlobStore, scope: Scope, name: str) -> None:
    """Give up a name; the next collection frees what only it kept. Errors as `read_name`.

    What is released is what has the name now; a naming that comes later is not touched.
    """
    namings = await read_namings(store, scope, name)
    chosen = _choose(namings, scope, name)
    # The one that the name refers to comes last: should this end in between, the name still means the same.
    for naming in (*(n for n in namings if n.is_live and n is not chosen), chosen):
        await _release(store, naming)


def _name_is_taken(name: str) -> UsageError:
    return UsageError("the name is taken", operation="name", subject=name, hint="choose another name, or release it")

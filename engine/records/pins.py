"""Pins: the leases of those who read, build on or protect a commit (design 0002, D5)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from blobstore.base import BlobStore, BytesBody, Created
from blobstore.errors import AccessDeniedError, StoreError, StoreFullError
from engine.clock import Runtime
from engine.errors import CollectedError
from engine.records.log import list_log, read_boundaries, repeat_reading
from engine.records.names import read_name
from engine.records.repository import check_pins
from index.plan.commits import Commit, is_closed
from index.snapshot.codec import encode_record
from index.snapshot.keys import pin_key
from index.snapshot.records import PIN_DURATION_MS, Pin

RENEWALS_PER_DURATION: Final = 3


class PinLease:
    """A held pin.

    Attributes:
        pinned: False where the store denied the write or was full, or once the pin has lapsed (this process slept
            for longer than it lasts): nothing protects the reader any more, who plans again on a missing blob.
        valid_until_ms: Until when, by the store's clock, a record that rests on the pin may be created: a margin before
            the end of the pin as first written, which is what the check for a boundary has followed. Renewing does not
            move it. 0 if not pinned.
        last_error: Why the newest renewal failed, if it did.
    """

    def __init__(self, store: BlobStore, pin: Pin, margin_ms: int) -> None:
        self._store = store
        self._pin = pin
        self._margin_ms = margin_ms
        self._ends_at_ms = 0
        self._kept = False
        self.pinned = False
        self.valid_until_ms = 0
        self.last_error: StoreError | None = None

    def keep(self) -> None:
        """Leave the pin to expire: a record that rests on it is on its way and may land late (C3)."""
        self._kept = True

    def let_go(self) -> None:
        """Release the pin at the end after all: the outcome of that record is known."""
        self._kept = False

    async def begin(self) -> None:
        created = await self._put(self._pin)
        self.pinned = True
        self._ends_at_ms = created.created_at_ms + self._pin.duration_ms
        self.valid_until_ms = self._ends_at_ms - self._margin_ms

    async def release(self) -> None:
        """Overwrite the pin as released, unless it is kept; only a collector deletes it (D1)."""
        if not self._kept:
            await self._put(msgspec.structs.replace(self._pin, duration_ms=0, stores=()))

    async def renew_for_ever(self) -> None:
        """Renew three times per duration until cancelled or lapsed; a failed renewal is remembered and tried again."""
        while self.pinned:
            await asyncio.sleep(self._pin.duration_ms / RENEWALS_PER_DURATION / 1000)
            try:
                created = await self._put(self._pin)
            except StoreError as error:
                self.last_error = error
                continue
            self.last_error = None
            # A pin that was over when it was renewed may have been overtaken by a collection: it protects nothing.
            self.pinned = created.created_at_ms < self._ends_at_ms
            self._ends_at_ms = created.created_at_ms + self._pin.duration_ms

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
    `AccessDeniedError` or `StoreFullError` is raised where no pin can be written. Readers go on without one.

    Yields:
        The lease; `pinned` is False where the store denies writing pins or is full, and the block runs unprotected.

    Raises:
        CollectedError: The commit was closed before the pin was there. Choose again.
        UnsafeStoreError: The pin is required, and a record that rests on it would not be safe in this store.
    """
    if required:
        check_pins(store, purpose)
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
    except (AccessDeniedError, StoreFullError) as error:
        if required:
            raise
        lease.last_error = error
        yield lease
        return
    renewal: asyncio.Task[None] | None = None
    try:
        await check_open(store, commit)
        renewal = asyncio.create_task(lease.renew_for_ever())
        yield lease
    finally:
        if renewal is not None:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
        # A pin that cannot be released expires by itself; the block's own outcome matters more.
        with contextlib.suppress(StoreError):
            await lease.release()


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
        listing = await list_log(store, commit.scope, from_number=commit.pointer.number)
        boundaries = await read_boundaries(store, listing)
        return is_closed(commit.pointer, boundaries) or listing.created_at_ms(commit.pointer.number) is None

    if await repeat_reading(is_over, operation="pin", subject=str(commit.scope)):
        raise CollectedError(
            f"commit {commit.pointer.number} was collected meanwhile", operation="pin", subject=str(commit.scope)
        )

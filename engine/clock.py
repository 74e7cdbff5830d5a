"""The one door to this machine's clock and randomness.

What decides about stored data never asks it, but the store's clock.
"""

import secrets
import time
import uuid
from typing import Protocol

from blobstore.base import BlobStore
from blobstore.errors import AccessDeniedError, StoreFullError
from index.snapshot.model import UniqueId
from index.snapshot.records import WriteId


class Runtime(Protocol):
    """Clock and randomness, replaceable by a seeded one in tests."""

    def session(self) -> str:
        """A new upload session or pin id: 20 lower-case hexadecimal digits, never given twice."""
        ...

    def unique_id(self) -> UniqueId:
        """A new random id in the form of a UUID, as Spark's checkpointUniqueId."""
        ...

    def write_id(self) -> WriteId:
        """A new random id of a record."""
        ...

    def local_now_ms(self) -> int:
        """Return this machine's clock: for people, and to doubt the store's; it makes nothing old."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go backwards, for durations."""
        ...


class SystemRuntime:
    """The real thing."""

    def session(self) -> str:
        """80 random bits."""
        return secrets.token_hex(10)

    def unique_id(self) -> UniqueId:
        """A version 4 UUID."""
        return UniqueId(str(uuid.uuid4()))

    def write_id(self) -> WriteId:
        """128 random bits."""
        return WriteId(secrets.token_hex(16))

    def local_now_ms(self) -> int:
        """Wall clock."""
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        """Monotonic clock."""
        return time.monotonic()


async def read_now_ms(store: BlobStore) -> int:
    """Return the store's clock, for a reader: this machine's where the store says its own only to who may write.

    Never for a decision about stored data: whoever closes or deletes something asks the store, and fails without it.
    """
    try:
        return await store.now_ms()
    except (AccessDeniedError, StoreFullError):
        return SystemRuntime().local_now_ms()

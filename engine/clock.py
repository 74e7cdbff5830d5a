"""The only module that reads this machine's clock and draws random numbers.

What decides about stored data never asks it, but the store's clock.
"""

import secrets
import time
import uuid

from blobstore.base import BlobStore
from blobstore.errors import AccessDeniedError, StoreFullError
from index.snapshot.model import UniqueId, WriteId


class Runtime:
    """This machine's clock and random numbers; a test replaces them by seeded ones."""

    def session(self) -> str:
        """Make a new upload session or pin id: 20 lower-case hexadecimal digits, never given twice."""
        return secrets.token_hex(10)

    def unique_id(self) -> UniqueId:
        """Make a new random id in the form of a UUID, as Spark's checkpointUniqueId."""
        return UniqueId(str(uuid.uuid4()))

    def write_id(self) -> WriteId:
        return WriteId(secrets.token_hex(16))

    def local_now_ms(self) -> int:
        """Return this machine's clock: for people, and to doubt the store's; it makes nothing old."""
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()


class Stopwatch:
    """Measures a run and its phases, from its creation on."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._began_s = self._last_s = runtime.monotonic_s()
        self._phases_s: dict[str, float] = {}

    def end_phase(self, name: str) -> None:
        """Add the time since the last phase ended to a phase."""
        now_s = self._runtime.monotonic_s()
        self._phases_s[name] = self.phase_s(name) + now_s - self._last_s
        self._last_s = now_s

    def phase_s(self, name: str) -> float:
        """Return the length of a phase; 0 if there was none."""
        return self._phases_s.get(name, 0.0)

    def total_s(self) -> float:
        return self._runtime.monotonic_s() - self._began_s


async def read_now_ms(store: BlobStore) -> int:
    """Return the store's clock, for a reader: this machine's where the store says its own only to who may write.

    Never for a decision about stored data: what closes or deletes something asks the store, and fails without it.
    """
    try:
        return await store.now_ms()
    except (AccessDeniedError, StoreFullError):
        return Runtime().local_now_ms()

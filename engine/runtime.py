"""What a use case has of the process that it runs in: its clock and random numbers, and who hears of progress.

The only module that reads this machine's clock and draws random numbers. What decides about stored data never asks it,
but the store's clock.
"""

import math
import secrets
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Protocol

import msgspec
from typing_extensions import override

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
        # By name: floats, which are not said to be so that they can be given to a struct with other fields, too.
        self.phases_s: dict[str, Any] = {}

    def end_phase(self, name: str) -> None:
        """Add the time since the last phase ended to a phase."""
        now_s = self._runtime.monotonic_s()
        self.phases_s[name] = self.phase_s(name) + now_s - self._last_s
        self._last_s = now_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase, also where it fails. Phases follow one another: none is in another."""
        self._last_s = self._runtime.monotonic_s()
        try:
            yield
        finally:
            self.end_phase(name)

    def phase_s(self, name: str) -> float:
        """Return the length of a phase; 0 if there was none."""
        return float(self.phases_s.get(name, 0.0))

    def total_s(self) -> float:
        return self._runtime.monotonic_s() - self._began_s


class Pace(msgspec.Struct):
    """How fast a store answers and sends, as far as restores from it have shown. Not for two event loops at once."""

    # What a restore of less takes does not show a rate.
    BYTES_MIN: ClassVar = 8 * 1024 * 1024

    # The shortest wait for the answer to one request, and the highest rate of all that were under way together.
    answer_s: float = math.inf
    bytes_per_s: float = 0.0

    def add_answer(self, seconds: float) -> None:
        self.answer_s = min(self.answer_s, seconds)

    def add_transfer(self, size_bytes: int, seconds: float) -> None:
        if size_bytes >= self.BYTES_MIN and seconds > 0:
            self.bytes_per_s = max(self.bytes_per_s, size_bytes / seconds)


async def read_now_ms(store: BlobStore) -> int:
    """Return the store's clock, for a reader: this machine's where the store says its own only to who may write.

    Never for a decision about stored data: what closes or deletes something asks the store, and fails without it.
    """
    try:
        return await store.now_ms()
    except (AccessDeniedError, StoreFullError):
        return Runtime().local_now_ms()


class Progress(Protocol):
    """Hears of files and bytes as they are done. Called from the event loop only, and must return at once."""

    def total(self, *, files: int, bytes_: int) -> None:
        """Set what there is to do, as soon as it is planned; called again when a plan changes."""

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """Add what is done. Bytes that are sent or fetched a second time count once."""


class _NoProgress:
    def total(self, *, files: int, bytes_: int) -> None:
        """Ignore it."""

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """Ignore it."""


NO_PROGRESS: Final[Progress] = _NoProgress()


class CountedProgress:
    """Progress that is counted."""

    def __init__(self) -> None:
        self.files = self.bytes = self.files_total = self.bytes_total = 0

    def total(self, *, files: int, bytes_: int) -> None:
        self.files_total, self.bytes_total = files, bytes_

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        self.files += files
        self.bytes += bytes_


class AddedProgress:
    """Progress of one of several use cases whose total was reported to `whole` before them."""

    def __init__(self, whole: Progress) -> None:
        self.add = whole.add

    def total(self, *, files: int, bytes_: int) -> None:
        """Ignore it."""


class SummedProgress:
    """Progress of several use cases that run at the same time, each a `part`, reported to `whole` as that of one."""

    def __init__(self, whole: Progress) -> None:
        self.whole = whole
        self.files = self.bytes = 0

    def part(self) -> Progress:
        return _Part(self)


class _Part(AddedProgress):
    def __init__(self, sums: SummedProgress) -> None:
        super().__init__(sums.whole)
        self._sums = sums
        self._files = self._bytes = 0

    @override
    def total(self, *, files: int, bytes_: int) -> None:
        sums = self._sums
        sums.files += files - self._files
        sums.bytes += bytes_ - self._bytes
        self._files, self._bytes = files, bytes_
        sums.whole.total(files=sums.files, bytes_=sums.bytes)

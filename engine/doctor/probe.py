"""The store that `doctor` looks at, as several clients with connections of their own see it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar, runtime_checkable

from blobstore.base import (
    BlobInfo,
    BlobStore,
    BytesBody,
    Created,
    CreateOutcome,
    Lost,
    UnfinishedPut,
    read_blob,
)
from blobstore.errors import AccessDeniedError, BlobNotFoundError, StoreError, StoreUnavailableError
from blobstore.s3.lifecycle import Rule
from blobstore.s3.settings import KIB, MIB
from blobstore.sink import MemorySink
from engine.doctor.verdict import Failure

T = TypeVar("T")

ATTEMPTS_MAX: Final = 4
PAUSE_S: Final = 0.2
_READ_BYTES_MAX: Final = 8 * MIB
# Default size of what is written, and the TTL of what is created with one.
SMALL_BYTES: Final = 4 * KIB
TTL_MS: Final = 7 * 24 * 3_600_000


@runtime_checkable
class S3Capabilities(Protocol):
    """What an S3 store can do beside the contract of stores."""

    @property
    def prefix(self) -> str:
        """Return the prefix of the repository in the bucket."""
        ...

    async def put_parts_if_absent(
        self, key: str, body: BytesBody, *, ttl_ms: int | None = None, part_bytes: int | None = None
    ) -> CreateOutcome:
        """Create an object by a multipart upload."""
        ...

    async def begin_upload(self, key: str) -> UnfinishedPut:
        """Begin a multipart upload and leave it unfinished."""
        ...

    async def read_lifecycle(self) -> tuple[Rule, ...]:
        """Read the lifecycle rules of the bucket."""
        ...


class NotApplicableError(Exception):
    """There is nothing to look at in a store of this kind."""


class NoTimeError(Exception):
    """The time of the whole examination was over."""


class StoreProbe:
    """Look at a store with several clients at once.

    Attributes:
        clients: Stores without wrappers and with connections of their own.
        root: The prefix that everything is written below, with a slash.
        keys: Every key that may have been written.
        hiccups: Requests that were not answered, or with "try again".
    """

    def __init__(self, clients: Sequence[BlobStore], root: str, monotonic_s: Callable[[], float]) -> None:
        self.clients = clients
        self.root = root
        self.monotonic_s = monotonic_s
        self.keys: list[str] = []
        self.unfinished: list[UnfinishedPut] = []
        self.hiccups = 0

    def client(self, number: int) -> BlobStore:
        """Return a client; neighbouring numbers are different clients."""
        return self.clients[number % len(self.clients)]

    @property
    def s3(self) -> tuple[S3Capabilities, ...]:
        """Return the clients as S3 stores.

        Raises:
            NotApplicableError: They are none.
        """
        found = tuple(client for client in self.clients if isinstance(client, S3Capabilities))
        if not found:
            raise NotApplicableError("only S3 has this")
        return found

    def key(self, name: str) -> str:
        """Return a key below the root, which is deleted at the end."""
        key = f"{self.root}{name}"
        self.keys.append(key)
        return key

    def fresh_key(self, name: str) -> str:
        """Return a key that is another one each time: for a check that may be run a second time."""
        times = sum(key.partition("+")[0] == self.root + name for key in self.keys)
        return self.key(f"{name}+{times}" if times else name)

    async def tried(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request, again where the store is unavailable at first.

        Raises:
            StoreUnavailableError: It stays so.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                return await request()
            except StoreUnavailableError as error:
                self.hiccups += 1
                if attempt == ATTEMPTS_MAX:
                    raise
                await asyncio.sleep(min(2.0, error.retry_after_s or PAUSE_S * attempt))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def put(self, number: int, key: str, data: bytes) -> Created:
        """Put an object by one client."""
        return await self.tried(lambda: self.client(number).put(key, BytesBody(data)))

    async def create(self, number: int, key: str, data: bytes, *, ttl_ms: int | None = None) -> None:
        """Create an object that no client has seen yet."""

        async def create() -> None:
            outcome = await self.client(number).put_if_absent(key, BytesBody(data), ttl_ms=ttl_ms)
            if not isinstance(outcome, Created | Lost):
                raise StoreUnavailableError(outcome.reason, operation="put_if_absent", key=key)

        await self.tried(create)

    async def read(self, number: int, key: str) -> bytes | None:
        """Return the content that one client sees, None if there is none."""
        try:
            return await self.tried(lambda: read_blob(self.client(number), key, size_bytes_max=_READ_BYTES_MAX))
        except BlobNotFoundError:
            return None

    async def range(self, number: int, key: str, start: int, size_bytes: int | None) -> bytes:
        """Return a part of an object."""

        async def fetch() -> bytes:
            sink = MemorySink()
            await self.client(number).read_into(key, sink, start=start, size_bytes=size_bytes)
            return sink.data

        return await self.tried(fetch)

    async def stat(self, number: int, key: str) -> BlobInfo | None:
        """Return the facts that one client sees."""
        return await self.tried(lambda: self.client(number).stat(key))

    async def names(self, number: int, prefix: str, *, limit: int = 1000) -> AsyncIterator[tuple[str, ...]]:
        """Yield the keys of a prefix, page by page, without the root."""
        start_after = ""
        while True:
            page = await self.tried(
                lambda after=start_after: self.client(number).list_page(  # type: ignore[misc]
                    self.root + prefix, start_after=after, limit=limit
                )
            )
            yield tuple(blob.key.removeprefix(self.root) for blob in page.blobs)
            if not page.truncated or not page.blobs:
                return
            start_after = page.blobs[-1].key

    async def listed(self, number: int, prefix: str) -> list[str]:
        """Return all keys of a prefix."""
        return [name async for page in self.names(number, prefix) for name in page]

    async def is_alive(self) -> bool:
        """Return whether the store answers plain requests just now."""
        key = self.key("alive")
        try:
            for number in range(4):
                await self.client(number).put(key, BytesBody(b"alive"))
                if await self.client(number).stat(key) is None:
                    return False
        except StoreError:
            return False
        return True


def pattern(size_bytes: int, seed: str) -> bytes:
    """Return bytes in which no two places look alike, the same for a seed."""
    return hashlib.shake_256(seed.encode()).digest(size_bytes)


def failure_of(error: BaseException) -> Failure | None:
    """Return what ended a check, if that is an answer of a store."""
    if isinstance(error, NotApplicableError):
        return Failure.NOT_APPLICABLE
    if isinstance(error, NoTimeError):
        return Failure.NO_TIME
    if isinstance(error, AccessDeniedError):
        return Failure.DENIED
    if isinstance(error, StoreUnavailableError | TimeoutError):
        return Failure.UNAVAILABLE
    return Failure.UNSUPPORTED if isinstance(error, StoreError) else None

"""The storage contract: the only place that states it. Every sentence is a promise that the contract tests hold.

After it: what a store checks before it does anything, and reading and listing on top of the contract. What the bytes of
a blob are read into is part of it: one thread reads, hashes and writes many of them (design 0008).

Samza's `BlobStoreManager` is covered whole; `design/samza.md` maps each of its methods onto this protocol.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final, Protocol, TypedDict, runtime_checkable

import msgspec
from typing_extensions import override

from blobstore.concurrency import run_blocking
from blobstore.errors import InvalidRequestError, StoreUnavailableError

LIST_PAGE_MAX: Final = 1000
DELETE_BATCH_MAX: Final = 1000
KEY_BYTES_MAX: Final = 1024
# Bytes that are given to a sink at a time; no more are held for it, nor for longer.
SINK_BYTES: Final = 1024 * 1024
HELD_S: Final = 1.0

Buffer = bytes | bytearray | memoryview

# What one chunk of a body may have, as `Body.read_chunks` says.
_CHUNK_BYTES_MAX: Final = 8 * 1024 * 1024
# 255: what a file system, and a server that keeps objects as files, can name.
_COMPONENT = re.compile(r"[A-Za-z0-9_@~%+=,-][A-Za-z0-9_@~%+=,.-]{0,254}")


class RequestMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a request is made for: for traces, meters and audit. A store never decides anything by it.

    Samza's `Metadata`; `size_bytes` is -1 where it is not known.
    """

    job: str = ""
    task: str = ""
    store: str = ""
    # The local path of a file put or fetched, or a word such as "snapshot-index".
    payload_path: str = ""
    size_bytes: int = -1


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a store can and cannot do; the engine refuses what a store cannot do safely."""

    # Of several concurrent `put_if_absent` of one key exactly one is Created.
    atomic_create: bool
    # A blob whose put was acknowledged is in every later list and stat, a deleted one in none.
    consistent_lists: bool
    # `read_into(..., deleted=True)` can serve deleted blobs for a while.
    keeps_deleted: bool
    # Can be seen by other processes, so that tasks of a cluster may share it.
    shared: bool = True
    # False: `remove_ttl` changes nothing, and a TTL stays until the blob is deleted (design 0003, L5).
    removes_ttl: bool = True
    # False: a blob whose TTL was removed may show a later creation time than before (design 0003, C2).
    keeps_created_at: bool = True
    # How much later than `stat` shows it a create may give its time; what relies on such times keeps a margin above it.
    created_late_ms: int = 0


class BlobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a store knows of a blob. Times are milliseconds since the epoch by the store's clock."""

    key: str
    size_bytes: int
    created_at_ms: int
    # When the TTL ends; None once it is removed, or if the blob never had one.
    expires_at_ms: int | None = None
    # False: the answer does not say whether there is a TTL; `stat` does.
    ttl_known: bool = True


class ListPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list. `truncated` says that another page starting after the last key has more."""

    blobs: tuple[BlobInfo, ...]
    truncated: bool


class UnfinishedPut(msgspec.Struct, frozen=True, kw_only=True):
    """A put that was begun and is not visible: a multipart upload that nobody completed, a temporary file."""

    # Begins with a dot, which no key does, where the store does not know it: then it is a name of the store's own.
    key: str
    # What the store knows it by.
    upload_id: str
    # By the store's clock.
    begun_at_ms: int
    # What it holds; 0 where the store does not say.
    size_bytes: int = 0


class Created(msgspec.Struct, frozen=True, kw_only=True):
    """The blob is durable, and it was this call that created it."""

    # By the store's clock, at or after the `created_at_ms` that `stat` will return; on S3 it may be a second before it
    # (design 0003, C1).
    created_at_ms: int


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A blob of this key is there already; nothing was written.

    After a broken answer the blob may still be the caller's own, from a request that was sent twice: a caller who needs
    to know compares the content (design 0002, C3).
    """


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """The request was sent and the answer never came: the blob may be there, may not, or may still arrive."""

    reason: str


CreateOutcome = Created | Lost | Unknown


class DeleteFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One key of a batch that was not deleted, and why."""

    key: str
    reason: str


@runtime_checkable
class Body(Protocol):
    """Bytes to put. They can be read again from the start, so that a put can be repeated."""

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes that `read_chunks` yields."""
        ...

    def read_chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the bytes in chunks of at most 8 MiB; each call starts at the first byte."""
        ...


class ReadBody(Body):
    """A body whose bytes a function yields."""

    def __init__(self, size_bytes: int, read: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        self._size_bytes = size_bytes
        self._read = read

    @property
    @override
    def size_bytes(self) -> int:
        """Return the number of bytes that the function yields."""
        return self._size_bytes

    @override
    def read_chunks(self) -> AsyncGenerator[bytes, None]:
        return self._read()


class BytesBody(ReadBody):
    """A body in memory."""

    def __init__(self, data: bytes) -> None:
        async def read() -> AsyncGenerator[bytes, None]:
            for at in range(0, len(data), _CHUNK_BYTES_MAX):
                yield data[at : at + _CHUNK_BYTES_MAX]

        super().__init__(len(data), read)


class Sink(ABC):
    """Takes the bytes of a range."""

    # False: `write` never blocks, and bytes that come through the event loop are written there.
    blocks: bool = True

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Take the next bytes; what it raises ends the read.

        It may block, and is called in a thread, each time perhaps in another one, never twice at once. A sink that
        keeps bytes copies them: their place is used again.
        """

    async def take(self, chunks: Sequence[Buffer]) -> None:
        """Take the next bytes, in a thread if the sink blocks: also a cancelled call ends after whole writes."""
        if self.blocks:
            await run_blocking(_write_all, self, chunks)
        else:
            await self.write_here(chunks)

    async def write_here(self, chunks: Sequence[Buffer]) -> None:
        """Write on the event loop, to a sink that never blocks."""
        _write_all(self, chunks)


class TooLargeError(Exception):
    """More bytes came than a `MemorySink` may hold."""


class MemorySink(Sink):
    """Keeps the bytes in memory, at most `size_bytes_max` of them."""

    blocks = False

    def __init__(self, size_bytes_max: int | None = None) -> None:
        self._size_bytes_max = size_bytes_max
        self._size_bytes = 0
        self._chunks: list[bytes] = []

    @property
    def data(self) -> bytes:
        """The bytes that have come so far."""
        return b"".join(self._chunks)

    @override
    def write(self, data: Buffer) -> None:
        self._size_bytes += len(data)
        if self._size_bytes_max is not None and self._size_bytes > self._size_bytes_max:
            raise TooLargeError
        self._chunks.append(bytes(data))


class ReadOptions(TypedDict, total=False):
    """Which bytes of a blob are read, and how: what `BlobStore.read_into` takes."""

    start: int
    size_bytes: int | None
    deleted: bool
    fresh: bool


class BlobStore(ABC):
    """Bytes by key.

    Keys are `/`-separated components of `A-Za-z0-9._-@~%+=,`, none of them empty, starting with a dot or longer than
    255 bytes, at most 1,024 bytes in all, a store's own prefix included. Every method raises `InvalidRequestError` for
    another key or prefix, and any other `StoreError` for the reason that its class states. A store may refuse to put a
    key that is, or was, a directory of another, as `a` is of `a/b`. Methods may be called concurrently, also from other
    processes where `capabilities.shared`. A cancelled call leaves nothing half written.
    """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return what this store can do; constant from the first answer of the store on."""

    def place(self) -> tuple[str, ...]:
        """Return where the blobs are, from the outside in, to see whether two stores overlap: a kind, then components.

        No request is made, but links of a file system are followed. () if that is unknown.
        """
        return ()

    def tagged(self, metadata: RequestMetadata) -> "BlobStore":  # noqa: ARG002 - for stores that trace
        """Return a view of this store whose requests are made on behalf of somebody; by default the store itself.

        Its answers and requests are the same. A store that traces, meters or audits by it overrides this.
        """
        return self

    @abstractmethod
    async def put(self, key: str, body: Body, *, ttl_ms: int | None = None, repeatable: bool = False) -> Created:
        """Write a blob, replacing one that is there.

        A reader sees the old blob or the new one, whole, and never a mixture. On return the new one is durable. With
        `ttl_ms` it expires that long after its creation; without, never. An error leaves the old blob or the new one.
        A body that yields another number of bytes than its `size_bytes` raises `InvalidRequestError` and writes
        nothing. `repeatable` is for a blob of which a copy that arrives late does no harm, not even after another put
        of its key: where the answer is late the put may be sent again beside the first (`HedgedStore`), and whichever
        is cancelled may still arrive.
        """

    @abstractmethod
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        """Write a blob unless one of this key is there.

        Of concurrent calls for one key at most one returns `Created` where `capabilities.atomic_create`. `Lost` means
        that a blob is there and is unchanged, its TTL included. `Unknown` is never returned when the store said no.
        Calls for one key agree on whether they carry a TTL.
        """

    @abstractmethod
    async def read_into(
        self,
        key: str,
        sink: Sink,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        fresh: bool = False,
    ) -> None:
        """Give the bytes `[start, start + size_bytes)` of a blob, or from `start` to its end, to a sink.

        An expired blob is served until it is deleted (design 0002, D6). On return the sink has had exactly the bytes
        asked for, in their order; on an error or a cancellation, the first of them. In each case no call of it is
        under way, and none comes any more. What the sink raises is raised as it is; otherwise the error is
        `BlobNotFoundError` (`BlobDeletedError` where the store knows), or `InvalidRequestError` for a range that is
        not within the blob. With `deleted` a deleted blob that the store still retains is served too; a store without
        `keeps_deleted` treats it as not found. `fresh` is for bytes that came out wrong before: they come over a
        connection of their own, where there are connections.
        """

    @abstractmethod
    async def stat(self, key: str) -> BlobInfo | None:
        """Return what is known of a blob, `ttl_known` always; None if there is none."""

    @abstractmethod
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        """List blobs whose key starts with `prefix` and sorts after `start_after`, in the order of their UTF-8 keys.

        At most `limit` (1 to 1,000) of them; `truncated` is False on the last page. A prefix is a key, a part of one
        ending anywhere, or empty.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        """Delete up to 1,000 blobs; a key that is not there counts as deleted (idempotent).

        Returns the keys that were not deleted, each with its reason; all others are gone.
        """

    @abstractmethod
    async def remove_ttl(self, key: str) -> None:
        """Make a blob permanent. Doing it again changes nothing (idempotent). The content stays.

        The creation time stays where `capabilities.keeps_created_at`. Without `removes_ttl` the TTL stays.

        Raises:
            BlobNotFoundError: There is no such blob (`BlobDeletedError` where the store knows that there was).
        """

    @abstractmethod
    async def list_unfinished(self, prefix: str) -> tuple[UnfinishedPut, ...]:
        """List puts of keys of a prefix that were begun and never finished, also those that are still under way.

        One whose key the store does not know is listed for every prefix.
        """

    @abstractmethod
    async def abort_unfinished(self, puts: Sequence[UnfinishedPut]) -> tuple[DeleteFailure, ...]:
        """Abort puts and free what they hold; one that is not there any more counts as aborted (idempotent).

        A put that was under way fails. Returns those that were not aborted, each with its reason.
        """

    async def check_unused(self, operation: str, *, marker: str = "", prefixes: tuple[str, ...] = ()) -> None:
        """Refuse a place that holds what no store has put there, or lies within another one, as far as it can be seen.

        A store around this one has the key `marker` one or two levels above, and the way from there to here begins
        with one of the prefixes.
        """
        del operation, marker, prefixes

    @abstractmethod
    async def now_ms(self) -> int:
        """Return the time of the store's clock, by which creation times and expiry are given."""

    @abstractmethod
    async def close(self) -> None:
        """Release connections and files. Closing twice is fine; other calls after it are not."""


def is_component(name: str) -> bool:
    """Return whether a name can be a component of a key."""
    return _COMPONENT.fullmatch(name) is not None


def check_key(key: str, operation: str) -> str:
    """Return the key if it follows the grammar of `BlobStore`."""
    if len(key) > KEY_BYTES_MAX or not all(map(is_component, key.split("/"))):
        raise InvalidRequestError("is not a valid key", operation=operation, key=repr(key))
    return key


def check_put(key: str, ttl_ms: int | None, operation: str) -> None:
    """Refuse a key that is not valid, and a TTL that is not at least a millisecond."""
    check_key(key, operation)
    if ttl_ms is not None and ttl_ms < 1:
        raise InvalidRequestError(f"invalid TTL: {ttl_ms} ms", operation=operation, key=key)


def check_not_within(others: Sequence[str], operation: str) -> None:
    """Refuse a place within other stores, if there are any."""
    if others:
        message = f"lies within {others[0]!r}, which is in use"
        hint = "choose a place beside it: what is below it would be taken for its own"
        raise InvalidRequestError(message, operation=operation, key=others[0], hint=hint)


def check_list(prefix: str, limit: int) -> None:
    """Refuse a prefix that no key can have, and a limit outside 1 to 1,000."""
    if not 1 <= limit <= LIST_PAGE_MAX:
        raise InvalidRequestError(f"{limit} is not within 1 and {LIST_PAGE_MAX}", operation="list_page", key=prefix)
    if len(prefix) > KEY_BYTES_MAX:
        raise InvalidRequestError("is longer than a key", operation="list_page", key=repr(prefix))
    if prefix:
        # The beginning of a component follows the grammar of a whole one, so that only the last `/` is special.
        check_key(prefix.removesuffix("/"), "list_page")


def check_delete(keys: Sequence[str]) -> None:
    """Refuse too many keys at once, and one that is not valid."""
    if len(keys) > DELETE_BATCH_MAX:
        raise InvalidRequestError(f"{len(keys)} keys are more than {DELETE_BATCH_MAX}", operation="delete")
    for key in keys:
        check_key(key, "delete")


def check_read(key: str, start: int, size_bytes: int | None) -> None:
    """Refuse a key that is not valid, and a range that no blob has, before the blob is looked for."""
    check_key(key, "get")
    if start < 0 or (size_bytes is not None and size_bytes < 0):
        raise InvalidRequestError(f"the range of {size_bytes} bytes from {start} is negative", operation="get", key=key)


def range_size_bytes(start: int, size_bytes: int | None, *, blob_size_bytes: int, key: str) -> int:
    """Return the size of a range; refuse one that is not within the blob. An empty one at its very end is within it."""
    wanted = blob_size_bytes - start if size_bytes is None else size_bytes
    if wanted < 0 or start + wanted > blob_size_bytes:
        message = f"the range of {size_bytes} bytes from {start} is not within {blob_size_bytes} bytes"
        raise InvalidRequestError(message, operation="get", key=key)
    return wanted


async def checked_chunks(body: Body, *, operation: str, key: str) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a body; refuse one of another size than it claims, before the chunk that is too much."""
    seen = 0
    async with aclosing(body.read_chunks()) as chunks:
        async for chunk in chunks:
            seen += len(chunk)
            if seen > body.size_bytes:
                break
            yield chunk
    if seen != body.size_bytes:
        message = f"the body yields {'more' if seen > body.size_bytes else seen} instead of {body.size_bytes} bytes"
        hint = "what is read changed meanwhile, or its size was given wrong; nothing was written"
        raise InvalidRequestError(message, operation=operation, key=key, hint=hint)


async def read_blob(
    store: BlobStore, key: str, *, size_bytes_max: int, deleted: bool = False, fresh: bool = False
) -> bytes:
    """Read a whole small blob; one that is larger than `size_bytes_max` is refused, and no more than that ever held."""
    sink = MemorySink(size_bytes_max)
    try:
        await store.read_into(key, sink, deleted=deleted, fresh=fresh)
    except TooLargeError:
        message = f"is larger than the {size_bytes_max} bytes that it may have"
        hint = "the object is not what it claims to be; nothing was read further"
        raise InvalidRequestError(message, operation="get", key=key, hint=hint) from None
    return sink.data


async def list_checked_page(store: BlobStore, prefix: str, *, start_after: str = "") -> ListPage:
    """Return one page of a list; `StoreUnavailableError` for one that does not go forward: it cannot be trusted."""
    page = await store.list_page(prefix, start_after=start_after)
    for blob in page.blobs:
        if blob.key <= start_after or not blob.key.startswith(prefix):
            raise StoreUnavailableError("the list repeats or goes backwards", operation="list_page", key=prefix)
        start_after = blob.key
    if page.truncated and not page.blobs:
        raise StoreUnavailableError("the list has an empty page that claims more", operation="list_page", key=prefix)
    return page


async def list_blobs(store: BlobStore, prefix: str, *, start_after: str = "") -> AsyncGenerator[BlobInfo, None]:
    """Yield every blob of a prefix, page by page; errors as `list_checked_page`."""
    while True:
        page = await list_checked_page(store, prefix, start_after=start_after)
        for blob in page.blobs:
            yield blob
        if not page.truncated:
            return
        start_after = page.blobs[-1].key


async def write_chunks(chunks: AsyncGenerator[bytes, None], sink: Sink) -> None:
    """Give a stream to a sink, with few hops to a thread, and close the stream.

    Raises:
        Exception: What the stream or the sink raised. What came before the stream broke, the sink has had.
    """
    clock = asyncio.get_running_loop().time
    held: list[bytes] = []
    held_bytes, since_s = 0, 0.0  # the first bytes are passed on at once: somebody may wait for them

    async def write() -> None:
        nonlocal held, held_bytes, since_s
        writing, held, held_bytes, since_s = held, [], 0, clock()
        if writing:
            await sink.take(writing)

    async with aclosing(chunks) as incoming:
        try:
            async for chunk in incoming:
                held.append(chunk)
                held_bytes += len(chunk)
                if held_bytes >= SINK_BYTES or clock() >= since_s + HELD_S:
                    await write()
        except Exception:
            await write()
            raise
    await write()


def _write_all(sink: Sink, chunks: Sequence[Buffer]) -> None:
    if chunks:
        sink.write(chunks[0] if len(chunks) == 1 else b"".join(chunks))

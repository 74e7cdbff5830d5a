"""A manager that mints its own ids, such as Samza's `BlobStoreManager`, as a store.

A manager has four methods. It lists nothing and creates nothing conditionally, so that only bytes go to it: each of its
blobs has an entry in a store with the contract, at the blob's key, which says by what id the manager has the bytes
(design/samza.md, B1 to B8). What has no entry is not there.
"""

import copy
import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Annotated, Final, Literal, Protocol

import msgspec
from typing_extensions import override

from blobstore import base, errors
from blobstore.concurrency import map_bounded
from blobstore.wrappers.forwarding import ForwardingStore
from blobstore.wrappers.retry import RetryingStore, RetrySettings

# What other programs implement. They use `ManagedStore` too; its methods are those of the contract.
__all__ = ["BlobManager"]

_ENTRY_BYTES_MAX: Final = 64 * 1024
# Of one entry or blob of many: what the wrapper around the store repeats is all of them.
_SINGLE: Final = RetrySettings(attempts_max=3)


class BlobManager(Protocol):
    """The four methods of Samza's `BlobStoreManager`, all of them asynchronous.

    `StoreUnavailableError` is tried again; `BlobNotFoundError` says that the manager has no blob of an id, and
    `BlobDeletedError` that it had, before the first byte of a `get`. The metadata decide nothing.
    """

    async def put(self, body: base.Body, metadata: base.RequestMetadata) -> str:
        """Write a blob that expires after a TTL of the manager's own, and return its new id once it is durable."""
        ...

    def get(
        self, blob_id: str, metadata: base.RequestMetadata, *, deleted: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a blob from its start; with `deleted` also while a deleted one is kept."""
        ...

    async def delete(self, blob_id: str, metadata: base.RequestMetadata) -> None:
        """Delete a blob."""
        ...

    async def remove_ttl(self, blob_id: str, metadata: base.RequestMetadata) -> None:
        """Make a blob permanent; doing it again changes nothing."""
        ...


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What the store has of a blob: where its bytes are, and how many."""

    # Of another one nothing is known.
    schema: Literal[1] = 1
    id: str
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _AnyEntry(msgspec.Struct):
    schema: int


class _ForeignError(errors.BlobCorruptError):
    """Nobody wrote these bytes as an entry, so that the manager has nothing of them."""


def decode_entry(data: bytes, key: str) -> Entry:
    """Decode an entry; unknown fields are ignored."""
    try:
        return msgspec.json.decode(data, type=Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            if msgspec.json.decode(data, type=_AnyEntry).schema > 1:
                message, hint = "is the entry of a newer tidemark", "use the tidemark that wrote it, or a newer one"
                raise errors.BlobCorruptError(message, operation="get", key=key, hint=hint) from error
        raise _foreign(key) from error


def _foreign(key: str) -> _ForeignError:
    hint = "the key is below a prefix of the manager: was it written by a program without one?"
    return _ForeignError("is not the entry of a blob", operation="get", key=key, hint=hint)


class ManagedStore(ForwardingStore):
    """Keeps the bytes of some keys with a manager; everything else, and who has what, is the inner store's.

    Args:
        inner: A store with the contract. Give it bare, and put this one into `wrap_store`.
        prefixes: Of the keys whose bytes it has: in a repository `("blobs/", "indexes/")`.
        ttl_max_ms: The longest TTL that can be asked for, because bytes must not go before their entry does (B5): the
            manager's own TTL, less the three collection periods within which an interrupted commit is settled.
    """

    def __init__(
        self, inner: base.BlobStore, manager: BlobManager, *, prefixes: tuple[str, ...], ttl_max_ms: int
    ) -> None:
        super().__init__(inner)
        self._manager = manager
        self._prefixes = prefixes
        self._ttl_max_ms = ttl_max_ms
        self._metadata = base.RequestMetadata()
        self._single = RetryingStore(inner, _SINGLE)

    @property
    @override
    def capabilities(self) -> base.Capabilities:
        inner = super().capabilities
        # Where an entry cannot lose its TTL, another one takes its place (B3).
        keeps = inner.keeps_created_at and inner.removes_ttl
        return msgspec.structs.replace(inner, removes_ttl=True, keeps_created_at=keeps)

    @override
    def tagged(self, metadata: base.RequestMetadata) -> base.BlobStore:
        view = copy.copy(self)
        view._inner = self._inner.tagged(metadata)  # noqa: SLF001 - its own class
        view._metadata = metadata  # noqa: SLF001
        return view

    @override
    async def put(
        self, key: str, body: base.Body, *, ttl_ms: int | None = None, repeatable: bool = False
    ) -> base.Created:
        if not key.startswith(self._prefixes):
            return await super().put(key, body, ttl_ms=ttl_ms, repeatable=repeatable)
        entry = await self._upload("put", key, body, ttl_ms)
        replaced = await self._find_own(key)
        created = await self._inner.put(key, _body(entry), ttl_ms=ttl_ms)
        if replaced is not None:
            await self._forget(replaced)
        return created

    @override
    async def put_if_absent(self, key: str, body: base.Body, *, ttl_ms: int | None = None) -> base.CreateOutcome:
        if not key.startswith(self._prefixes):
            return await super().put_if_absent(key, body, ttl_ms=ttl_ms)
        entry = await self._upload("put_if_absent", key, body, ttl_ms)
        outcome = await self._inner.put_if_absent(key, _body(entry), ttl_ms=ttl_ms)
        # What is there may be this very entry, from a request that was sent twice. After Unknown it may yet arrive.
        if isinstance(outcome, base.Lost) and await self._find_own(key) != entry:
            await self._forget(entry)
        return outcome

    async def _upload(self, operation: str, key: str, body: base.Body, ttl_ms: int | None) -> Entry:
        """Give a body to the manager: an entry never leads to bytes that are not there, or not for as long (B2)."""
        base.check_put(key, ttl_ms, operation)
        if ttl_ms is not None and ttl_ms > self._ttl_max_ms:
            message = f"a TTL of {ttl_ms} ms is longer than the {self._ttl_max_ms} ms that the manager allows"
            hint = "init the repository with a shorter ttl_ms"
            raise errors.InvalidRequestError(message, operation=operation, key=key, hint=hint)
        read = functools.partial(base.checked_chunks, body, operation=operation, key=key)
        blob_id = await self._manager.put(base.ReadBody(body.size_bytes, read), self._metadata)
        if ttl_ms is None:
            await self._manager.remove_ttl(blob_id, self._metadata)
        return Entry(id=blob_id, size_bytes=body.size_bytes)

    @override
    async def read_into(
        self,
        key: str,
        sink: base.Sink,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        fresh: bool = False,
    ) -> None:
        if not key.startswith(self._prefixes):
            return await super().read_into(key, sink, start=start, size_bytes=size_bytes, deleted=deleted, fresh=fresh)
        base.check_read(key, start, size_bytes)
        tried: Entry | None = None
        while True:
            entry = await self._read_entry(key, deleted=deleted)
            wanted = base.range_size_bytes(start, size_bytes, blob_size_bytes=entry.size_bytes, key=key)
            chunks = self._manager.get(entry.id, self._metadata, deleted=deleted)
            try:
                return await base.write_chunks(_cut(chunks, start, start + wanted, key), sink)
            except errors.BlobNotFoundError as error:
                if entry == tried:
                    raise _bytes_gone(error, entry, "get", key) from error
                tried = entry  # it may have been replaced, or deleted, since the entry was read

    @override
    async def stat(self, key: str) -> base.BlobInfo | None:
        info = await super().stat(key)
        return None if info is None else await self._with_size(info)

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = base.LIST_PAGE_MAX) -> base.ListPage:
        while True:
            page = await super().list_page(prefix, start_after=start_after, limit=limit)

            async def with_size(info: base.BlobInfo) -> base.BlobInfo | None:
                return await self._single.repeat("list_page", info.key, lambda: self._with_size(info))

            sized = await map_bounded(with_size, page.blobs)
            blobs = tuple(blob for blob in sized if blob is not None)
            if blobs or not page.truncated:
                return base.ListPage(blobs=blobs, truncated=page.truncated)
            start_after = page.blobs[-1].key  # all of them were deleted since they were listed

    async def _with_size(self, info: base.BlobInfo) -> base.BlobInfo | None:
        if not info.key.startswith(self._prefixes):
            return info
        try:
            entry = await self._find(info.key)
        except errors.BlobCorruptError:
            return info  # a list that stops here would stop each collection, which alone can delete it (B4)
        return None if entry is None else msgspec.structs.replace(info, size_bytes=entry.size_bytes)

    @override
    async def delete(self, keys: Sequence[str]) -> tuple[base.DeleteFailure, ...]:
        base.check_delete(keys)
        managed = [key for key in dict.fromkeys(keys) if key.startswith(self._prefixes)]
        outcomes = await map_bounded(self._delete_bytes, managed)
        failures = tuple(failure for failure in outcomes if failure is not None)
        kept = {failure.key for failure in failures}
        return failures + await super().delete([key for key in keys if key not in kept])

    async def _delete_bytes(self, key: str) -> base.DeleteFailure | None:
        """Delete the bytes before the entry, which is what leads to them (B4)."""

        async def delete() -> None:
            if (entry := await self._find_own(key)) is not None:
                await self._forget(entry)

        try:
            await self._single.repeat("delete", key, delete)
        except errors.StoreUnavailableError:
            raise
        except errors.StoreError as error:
            return base.DeleteFailure(key=key, reason=str(error))
        return None

    @override
    async def remove_ttl(self, key: str) -> None:
        if key.startswith(self._prefixes) and (entry := await self._find(key)) is not None:
            try:
                await self._manager.remove_ttl(entry.id, self._metadata)
            except errors.BlobNotFoundError as error:
                raise _bytes_gone(error, entry, "remove_ttl", key) from error
            if not super().capabilities.removes_ttl:
                info = await super().stat(key)
                if info is not None and info.expires_at_ms is not None:
                    await self._inner.put(key, _body(entry))
                return
        # The entry's afterwards (B3). What is not there, the inner store says.
        await super().remove_ttl(key)

    async def _find(self, key: str) -> Entry | None:
        with suppress(errors.BlobNotFoundError):
            return await self._read_entry(key)
        return None

    async def _find_own(self, key: str) -> Entry | None:
        """Return None also for bytes that are not an entry: the manager has nothing of them."""
        with suppress(_ForeignError):
            return await self._find(key)
        return None

    async def _read_entry(self, key: str, *, deleted: bool = False) -> Entry:
        sink = base.MemorySink(_ENTRY_BYTES_MAX)
        try:
            await self._inner.read_into(key, sink, deleted=deleted)
        except base.TooLargeError:
            raise _foreign(key) from None
        return decode_entry(sink.data, key)

    async def _forget(self, entry: Entry) -> None:
        """Delete the bytes of an entry; those that are gone already are deleted."""
        with suppress(errors.BlobNotFoundError):
            await self._manager.delete(entry.id, self._metadata)


def _body(entry: Entry) -> base.BytesBody:
    return base.BytesBody(msgspec.json.encode(entry))


def _bytes_gone(error: errors.BlobNotFoundError, entry: Entry, operation: str, key: str) -> errors.BlobNotFoundError:
    kind = errors.BlobDeletedError if isinstance(error, errors.BlobDeletedError) else errors.BlobNotFoundError
    return kind(f"the manager has no blob {entry.id!r}", operation=operation, key=key)


async def _cut(chunks: AsyncGenerator[bytes, None], start: int, end: int, key: str) -> AsyncGenerator[bytes, None]:
    """Yield a range of a stream, and read no further; `StoreUnavailableError` if the stream ends before."""
    at = 0
    async with aclosing(chunks) as stream:
        if start == end:
            return
        async for chunk in stream:
            if part := chunk[max(0, start - at) : max(0, end - at)]:
                yield part
            at += len(chunk)
            if at >= end:
                return
    message = f"the manager sent {at} bytes, and {end} were asked for"
    raise errors.StoreUnavailableError(message, operation="get", key=key)

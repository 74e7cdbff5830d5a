"""S3 stores in memory: an honest one, some that lie in one way each, and one that fails on request."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from typing_extensions import override

from blobstore.base import (
    LIST_PAGE_MAX,
    BlobInfo,
    Body,
    BytesBody,
    Capabilities,
    Created,
    CreateOutcome,
    DeleteFailure,
    ListPage,
    Lost,
    MemorySink,
    Sink,
    UnfinishedPut,
    Unknown,
)
from blobstore.errors import CapabilityMissingError, InvalidRequestError, StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.s3.bucket_rules import Rule
from engine.runtime import Runtime

NOW_MS = 1_795_000_000_000


class HonestS3(MemoryStore):
    """What every client sees of a store that has everything that an S3 store can have."""

    prefix = "state"

    def __init__(self) -> None:
        super().__init__(clock=Runtime().local_now_ms)
        self.unfinished: dict[str, UnfinishedPut] = {}
        self.rules: list[Rule] = []
        self.ids = itertools.count()
        self.closed = 0

    @property
    @override
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, shared=True, keeps_deleted=False)

    async def put_parts_if_absent(
        self, key: str, body: BytesBody, *, ttl_ms: int | None = None, part_bytes: int | None = None
    ) -> CreateOutcome:
        return await MemoryStore.put_if_absent(self, key, body, ttl_ms=ttl_ms)

    async def begin_upload(self, key: str) -> UnfinishedPut:
        put = UnfinishedPut(key=key, upload_id=str(next(self.ids)), begun_at_ms=NOW_MS)
        self.unfinished[put.upload_id] = put
        return put

    @override
    async def list_unfinished(self, prefix: str) -> tuple[UnfinishedPut, ...]:
        return tuple(put for put in self.unfinished.values() if put.key.startswith(prefix))

    @override
    async def abort_unfinished(self, puts: Sequence[UnfinishedPut]) -> tuple[DeleteFailure, ...]:
        for put in puts:
            self.unfinished.pop(put.upload_id, None)
        return ()

    async def read_lifecycle(self) -> tuple[Rule, ...]:
        return tuple(self.rules)

    @override
    async def close(self) -> None:
        self.closed += 1

    @property
    def stored(self) -> list[str]:
        return list(self._sorted_keys)


class IgnoresConditions(HonestS3):
    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        return await self.put(key, body, ttl_ms=ttl_ms)


class LosersOverwrite(HonestS3):
    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        outcome = await super().put_if_absent(key, body, ttl_ms=ttl_ms)
        if isinstance(outcome, Lost):
            await self.put(key, body)
        return outcome


class EverybodyLoses(HonestS3):
    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        await super().put_if_absent(key, body, ttl_ms=ttl_ms)
        return Lost()


class OneListBehind(HonestS3):
    """Each list is as the one before would have been."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, ListPage] = {}

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        page = await super().list_page(prefix, start_after=start_after, limit=limit)
        if not prefix.endswith("lists/") or limit < LIST_PAGE_MAX:
            return page
        before, self.before[prefix] = self.before.get(prefix, page), page
        return before


class DeletedStaysListed(HonestS3):
    def __init__(self) -> None:
        super().__init__()
        self.ghosts: dict[str, BlobInfo] = {}

    @override
    async def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        self.ghosts |= {key: info for key in keys if (info := await self.stat(key)) is not None}
        return await super().delete(keys)

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        page = await super().list_page(prefix, start_after=start_after, limit=limit)
        ghosts = [info for key, info in self.ghosts.items() if key.startswith(prefix) and key > start_after]
        return ListPage(blobs=tuple(sorted((*page.blobs, *ghosts), key=lambda b: b.key)), truncated=page.truncated)


class UnorderedLists(HonestS3):
    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        page = await super().list_page(prefix, start_after=start_after, limit=limit)
        return ListPage(blobs=tuple(reversed(page.blobs)), truncated=page.truncated)


class PagesSkip(HonestS3):
    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        page = await super().list_page(prefix, start_after=start_after, limit=limit)
        return ListPage(blobs=page.blobs[1:] if start_after else page.blobs, truncated=page.truncated)


class Lists(HonestS3):
    """Only its file system knows what it shows."""

    @property
    @override
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(super().capabilities, consistent_lists=False)


class OneReadBehind(HonestS3):
    def __init__(self) -> None:
        super().__init__()
        self.old: dict[str, bytes] = {}

    @override
    async def put(self, key: str, body: Body, *, ttl_ms: int | None = None, repeatable: bool = False) -> Created:
        if key in self._blobs and "read/" in key:
            self.old[key] = self._blobs[key].data
        return await super().put(key, body, ttl_ms=ttl_ms)

    @override
    async def read_into(
        self, key: str, sink: Sink, *, start: int = 0, size_bytes: int | None = None, **how: Any
    ) -> None:
        if key in self.old:
            await sink.take([self.old.pop(key)])
        else:
            await super().read_into(key, sink, start=start, size_bytes=size_bytes)


class Alters(HonestS3):
    """Alters what is read where a test says so."""

    def alter(self, key: str, start: int, size_bytes: int | None, data: bytes) -> bytes:
        return data

    @override
    async def read_into(
        self, key: str, sink: Sink, *, start: int = 0, size_bytes: int | None = None, **how: Any
    ) -> None:
        whole = MemorySink()
        await super().read_into(key, whole, start=start, size_bytes=size_bytes)
        if altered := self.alter(key, start, size_bytes, whole.data):
            await sink.take([altered])


class MixesVersions(Alters):
    @override
    def alter(self, key: str, start: int, size_bytes: int | None, data: bytes) -> bytes:
        return data[:1000] + b"\0" * (len(data) - 1000) if key.endswith("/replace") else data


class ShiftsRanges(Alters):
    @override
    def alter(self, key: str, start: int, size_bytes: int | None, data: bytes) -> bytes:
        return data[1:] + data[:1] if start else data


class CutsRanges(Alters):
    @override
    def alter(self, key: str, start: int, size_bytes: int | None, data: bytes) -> bytes:
        return data[:-1] if start and len(data) > 1 else data


class IgnoresRanges(Alters):
    """As the S3 store reports a server that sends the whole object."""

    @override
    def alter(self, key: str, start: int, size_bytes: int | None, data: bytes) -> bytes:
        if start:
            raise StoreUnavailableError("the answer does not say which range it is", operation="get", key=key)
        return data


class ServesBehindTheEnd(HonestS3):
    @override
    async def read_into(
        self, key: str, sink: Sink, *, start: int = 0, size_bytes: int | None = None, **how: Any
    ) -> None:
        with suppress(InvalidRequestError):
            await super().read_into(key, sink, start=start, size_bytes=size_bytes)


class LosesTtls(HonestS3):
    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        return await super().put_if_absent(key, body)


class KeepsTtls(HonestS3):
    @override
    async def remove_ttl(self, key: str) -> None:
        return


class HasNoTags(HonestS3):
    @override
    async def remove_ttl(self, key: str) -> None:
        raise CapabilityMissingError("NotImplemented (501)", operation="remove_ttl", key=key)


class FailsAtTags(HonestS3):
    @override
    async def remove_ttl(self, key: str) -> None:
        raise StoreUnavailableError("500", operation="remove_ttl", key=key)


class DeletesNeighbours(HonestS3):
    @override
    async def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        return await super().delete([k for k in self.stored if k.startswith(tuple(keys))])


class MayNotDelete(HonestS3):
    @override
    async def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        return tuple(DeleteFailure(key=key, reason="AccessDenied: no") for key in keys)


class CompletesTwice(HonestS3):
    @override
    async def put_parts_if_absent(
        self, key: str, body: BytesBody, *, ttl_ms: int | None = None, part_bytes: int | None = None
    ) -> CreateOutcome:
        return await self.put(key, body, ttl_ms=ttl_ms)


class LosesParts(HonestS3):
    @override
    async def put_parts_if_absent(
        self, key: str, body: BytesBody, *, ttl_ms: int | None = None, part_bytes: int | None = None
    ) -> CreateOutcome:
        data = b"".join([chunk async for chunk in body.read_chunks()])
        return await MemoryStore.put_if_absent(self, key, BytesBody(data[: 5 << 20]), ttl_ms=ttl_ms)


class NobodyCompletes(HonestS3):
    """Of several uploads of one key none is completed, and each is reported the same."""

    outcome: CreateOutcome = Lost()

    @override
    async def put_parts_if_absent(
        self, key: str, body: BytesBody, *, ttl_ms: int | None = None, part_bytes: int | None = None
    ) -> CreateOutcome:
        if "conditional/race" in key:
            return self.outcome
        return await super().put_parts_if_absent(key, body, ttl_ms=ttl_ms)


class NobodyKnows(NobodyCompletes):
    outcome: CreateOutcome = Unknown(reason="no answer")


class ReportsTheWrongWinner(HonestS3):
    @override
    async def put_parts_if_absent(
        self, key: str, body: BytesBody, *, ttl_ms: int | None = None, part_bytes: int | None = None
    ) -> CreateOutcome:
        outcome = await super().put_parts_if_absent(key, body, ttl_ms=ttl_ms)
        if "conditional/race" in key and isinstance(outcome, Lost):
            await self.put(key, body)
        return outcome


class FailsAtAborts(HonestS3):
    reason = "InternalError: try again"

    @override
    async def abort_unfinished(self, puts: Sequence[UnfinishedPut]) -> tuple[DeleteFailure, ...]:
        return tuple(DeleteFailure(key=put.key, reason=self.reason) for put in puts)


class MayNotAbort(FailsAtAborts):
    reason = "AccessDenied: no"


class HasNoMultipart(HonestS3):
    @override
    async def put_parts_if_absent(
        self, key: str, body: BytesBody, *, ttl_ms: int | None = None, part_bytes: int | None = None
    ) -> CreateOutcome:
        raise CapabilityMissingError("NotImplemented (501)", operation="put_if_absent", key=key)

    @override
    async def begin_upload(self, key: str) -> UnfinishedPut:
        raise CapabilityMissingError("NotImplemented (501)", operation="begin_upload", key=key)


class HidesUploads(HonestS3):
    @override
    async def list_unfinished(self, prefix: str) -> tuple[UnfinishedPut, ...]:
        return ()


class IsAhead(HonestS3):
    def __init__(self, ms: int = 360_000) -> None:
        super().__init__()
        self._clock = lambda: Runtime().local_now_ms() + ms


class DatesWrongly(HonestS3):
    @override
    async def now_ms(self) -> int:
        return await super().now_ms() - 900_000


class Hangs(HonestS3):
    """Some requests are answered after an hour, the others each after a while."""

    def __init__(self, hangs: Callable[[str, str], bool], takes_s: float = 0.0) -> None:
        super().__init__()
        self.hangs = hangs
        self.takes_s = takes_s
        # As the requests were made.
        self.asked: list[tuple[str, str]] = []

    async def wait(self, operation: str, key: str) -> None:
        self.asked.append((operation, key))
        await asyncio.sleep(3600 if self.hangs(operation, key) else self.takes_s)

    @override
    async def put(self, key: str, body: Body, **more: Any) -> Created:
        await self.wait("put", key)
        return await super().put(key, body, **more)

    @override
    async def put_if_absent(self, key: str, body: Body, **more: Any) -> CreateOutcome:
        await self.wait("put_if_absent", key)
        return await super().put_if_absent(key, body, **more)

    @override
    async def put_parts_if_absent(
        self, key: str, body: BytesBody, *, ttl_ms: int | None = None, part_bytes: int | None = None
    ) -> CreateOutcome:
        await self.wait("put_parts_if_absent", key)
        return await super().put_parts_if_absent(key, body, ttl_ms=ttl_ms)

    @override
    async def begin_upload(self, key: str) -> UnfinishedPut:
        await self.wait("begin_upload", key)
        return await super().begin_upload(key)

    @override
    async def read_into(self, key: str, sink: Sink, **more: Any) -> None:
        await self.wait("get", key)
        await super().read_into(key, sink, **more)

    @override
    async def stat(self, key: str, **more: Any) -> BlobInfo | None:
        await self.wait("stat", key)
        return await super().stat(key, **more)

    @override
    async def list_page(self, prefix: str, **more: Any) -> ListPage:
        await self.wait("list_page", prefix)
        return await super().list_page(prefix, **more)

    @override
    async def delete(self, keys: Sequence[str], **more: Any) -> tuple[DeleteFailure, ...]:
        await self.wait("delete", "")
        return await super().delete(keys, **more)

    @override
    async def remove_ttl(self, key: str, **more: Any) -> None:
        await self.wait("remove_ttl", key)
        await super().remove_ttl(key, **more)

    @override
    async def read_lifecycle(self) -> tuple[Rule, ...]:
        await self.wait("read_lifecycle", "")
        return await super().read_lifecycle()


class HasNoLifecycle(HonestS3):
    @override
    async def read_lifecycle(self) -> tuple[Rule, ...]:
        raise CapabilityMissingError("NotImplemented (501)", operation="read_lifecycle")


class Faulty(HonestS3):
    """Some requests are not answered; none is answered wrongly."""

    def __init__(self, fails: Callable[[str, str], Exception | None]) -> None:
        super().__init__()
        self.fails = fails

    def enter(self, operation: str, key: str) -> None:
        if (error := self.fails(operation, key)) is not None:
            raise error

    @override
    async def put(self, key: str, body: Body, **more: Any) -> Created:
        self.enter("put", key)
        return await super().put(key, body, **more)

    @override
    async def put_if_absent(self, key: str, body: Body, **more: Any) -> CreateOutcome:
        self.enter("put_if_absent", key)
        return await super().put_if_absent(key, body, **more)

    @override
    async def read_into(self, key: str, sink: Sink, **more: Any) -> None:
        self.enter("get", f"{key} from {more.get('start', 0)}" if "ranges" in key else key)
        await super().read_into(key, sink, **more)

    @override
    async def stat(self, key: str, **more: Any) -> BlobInfo | None:
        self.enter("stat", key)
        return await super().stat(key, **more)

    @override
    async def list_page(self, prefix: str, **more: Any) -> ListPage:
        self.enter("list_page", prefix)
        return await super().list_page(prefix, **more)

    @override
    async def delete(self, keys: Sequence[str], **more: Any) -> tuple[DeleteFailure, ...]:
        for key in keys:
            self.enter("delete", key)
        return await super().delete(keys, **more)

    @override
    async def remove_ttl(self, key: str, **more: Any) -> None:
        self.enter("remove_ttl", key)
        await super().remove_ttl(key, **more)

    @override
    async def read_lifecycle(self) -> tuple[Rule, ...]:
        self.enter("read_lifecycle", "")
        return await super().read_lifecycle()


def busy(operation: str, key: str) -> Exception:
    """A store that gets too much."""
    return StoreUnavailableError("SlowDown (503)", operation=operation, key=key, asks_for_less=True)

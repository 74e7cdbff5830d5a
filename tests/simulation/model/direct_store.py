"""A second kind of simulated store, beside S3: lists show TTLs, times are in milliseconds."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

from typing_extensions import override

from blobstore.base import (
    LIST_PAGE_MAX,
    BlobInfo,
    BlobStore,
    Body,
    Capabilities,
    Created,
    CreateOutcome,
    DeleteFailure,
    ListPage,
    Lost,
    Sink,
    UnfinishedPut,
    Unknown,
    checked_chunks,
    range_size_bytes,
)
from blobstore.errors import BlobNotFoundError
from blobstore.s3.bucket_rules import EXPIRING, KEPT
from blobstore.s3.errors import TTL_MS, BrokenError, RefusedError, store_error
from tests.simulation.faults.request_faults import Fault, Request
from tests.simulation.model.s3 import SimObject, SimServer

T = TypeVar("T")


class DirectStore(BlobStore):
    """A store by itself: lists show TTLs, times are in ms, and an answer that was lost is nobody's to look for.

    Args:
        server: Who answers.
        process: The name of who asks, for the history.
        prefix: Of the repository, left out of the history.
        list_age_s: So old may a list be, unless this process has put something there since; the store says so.
        is_plain: Requests are carried out at once, without faults and unseen: for a judge.
    """

    def __init__(
        self, server: SimServer, process: str, prefix: str, *, list_age_s: float = 0, is_plain: bool = False
    ) -> None:
        self._server = server
        self._process = process
        self._root = f"{prefix}/" if prefix else ""
        self._is_plain = is_plain
        self._list_age_ms = list_age_s * 1000
        # By prefix: when it was listed, and what was there.
        self._listed: dict[str, tuple[int, tuple[BlobInfo, ...]]] = {}
        self._capabilities = Capabilities(atomic_create=True, consistent_lists=not list_age_s, keeps_deleted=False)

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @override
    def place(self) -> tuple[str, ...]:
        return "simulated", str(id(self._server)), *filter(None, self._root.split("/"))

    @override
    async def put(self, key: str, body: Body, *, ttl_ms: int | None = None, repeatable: bool = False) -> Created:
        try:
            return await self._put(key, body, ttl_ms, if_absent=False)
        except (RefusedError, BrokenError) as error:
            raise store_error(error, "put", key) from None

    @override
    async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        try:
            return await self._put(key, body, ttl_ms, if_absent=True)
        except BrokenError as error:
            if error.sent:
                return Unknown(reason=str(error))
            raise store_error(error, "put_if_absent", key) from None
        except RefusedError as error:
            if error.refusal.status == HTTPStatus.PRECONDITION_FAILED:
                return Lost()
            if error.refusal.status == 500:
                return Unknown(reason=str(error))
            raise store_error(error, "put_if_absent", key) from None

    async def _put(self, key: str, body: Body, ttl_ms: int | None, *, if_absent: bool) -> Created:
        async with aclosing(checked_chunks(body, operation="put", key=key)) as chunks:
            data = b"".join([chunk async for chunk in chunks])

        def put(created_ms: int) -> Created:
            tag = "" if ttl_ms is None else EXPIRING
            stored = SimObject(data=data, created_ms=created_ms, metadata={}, tag=tag, ttl_ms=ttl_ms)
            self._server.put(self._root + key, stored, if_absent=if_absent)
            self._listed = {p: listed for p, listed in self._listed.items() if not key.startswith(p)}
            return Created(created_at_ms=created_ms)

        return await self._ask("put_object", key, put, mutates=True, creates=if_absent, has_body=True)

    @override
    async def read_into(
        self, key: str, sink: Sink, *, start: int = 0, size_bytes: int | None = None, **how: Any
    ) -> None:
        def find(_: int) -> tuple[bytes, bool]:
            whole = self._server.find(self._root + key).data
            wanted = range_size_bytes(start, size_bytes, blob_size_bytes=len(whole), key=key)
            return whole[start : start + wanted], True

        def damage(body: tuple[bytes, bool], fault: Fault) -> tuple[bytes, bool]:
            return self._server.damaged(body[0], fault)

        try:
            data, is_whole = await self._ask("get_object", key, find, has_body=True, damage=damage)
        except (RefusedError, BrokenError) as error:
            raise store_error(error, "get", key) from None
        if data:
            await sink.take([data])
        if not is_whole:
            raise store_error(BrokenError("the body broke off"), "get", key)

    @override
    async def stat(self, key: str) -> BlobInfo | None:
        try:
            return await self._observed("head_object", "stat", key, lambda _: self._info(self._root + key))
        except BlobNotFoundError:
            return None

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        def page(_: int) -> ListPage:
            after = self._root + start_after if start_after else ""
            most = min(limit, self._server.page_max)
            if self._list_age_ms:
                left = [info for info in self._remembered(prefix) if self._root + info.key > after]
                return ListPage(blobs=tuple(left[:most]), truncated=len(left) > most)
            names, truncated = self._server.list_names(self._root + prefix, after, most)
            return ListPage(blobs=tuple(map(self._info, names)), truncated=truncated)

        return await self._observed("list_objects_v2", "list_page", prefix, page)

    def _remembered(self, prefix: str) -> tuple[BlobInfo, ...]:
        now_ms = self._server.now_ms()
        listed_ms, infos = self._listed.get(prefix, (now_ms, None))
        if infos is None or now_ms - listed_ms >= self._list_age_ms:
            names, _ = self._server.list_names(self._root + prefix, "", len(self._server.objects) + 1)
            infos = tuple(map(self._info, names))
            self._listed[prefix] = now_ms, infos
        return infos

    @override
    async def delete(self, keys: Sequence[str]) -> tuple[DeleteFailure, ...]:
        def delete(_: int) -> tuple[DeleteFailure, ...]:
            failed = self._server.delete_batch([self._root + key for key in keys])
            return tuple(DeleteFailure(key=name.removeprefix(self._root), reason="simulated") for name in failed)

        return await self._observed("delete_objects", "delete", " ".join(keys), delete, mutates=True)

    @override
    async def remove_ttl(self, key: str) -> None:
        await self._observed(
            "put_object_tagging", "remove_ttl", key, lambda _: self._server.keep(self._root + key), mutates=True
        )

    @override
    async def list_unfinished(self, prefix: str) -> tuple[UnfinishedPut, ...]:
        return ()

    @override
    async def abort_unfinished(self, puts: Sequence[UnfinishedPut]) -> tuple[DeleteFailure, ...]:
        return ()

    @override
    async def now_ms(self) -> int:
        return await self._observed("head_object", "now_ms", "", lambda _: self._server.now_ms())

    @override
    async def close(self) -> None:
        """Nothing is held."""

    def _info(self, name: str) -> BlobInfo:
        stored = self._server.find(name)
        ttl_ms = stored.ttl_ms
        if TTL_MS in stored.metadata and stored.tag != KEPT:
            ttl_ms = int(stored.metadata[TTL_MS])  # written through the other kind of client
        return BlobInfo(
            key=name.removeprefix(self._root),
            size_bytes=len(stored.data),
            created_at_ms=stored.created_ms,
            expires_at_ms=None if ttl_ms is None else stored.created_ms + ttl_ms,
        )

    async def _observed(
        self, method: str, operation: str, key: str, carry_out: Callable[[int], T], *, mutates: bool = False
    ) -> T:
        try:
            return await self._ask(method, key, carry_out, mutates=mutates)
        except (RefusedError, BrokenError) as error:
            raise store_error(error, operation, key) from None

    async def _ask(
        self, method: str, key: str, carry_out: Callable[[int], T], *, mutates: bool = False, **options: Any
    ) -> T:
        if self._is_plain:
            return carry_out(self._server.now_ms())
        damage = options.pop("damage", None)
        request = Request(process=self._process, method=method, key=key, mutates=mutates, **options)
        return await self._server.request(request, carry_out, damage=damage)

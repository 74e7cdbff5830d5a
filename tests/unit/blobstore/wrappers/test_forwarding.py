import copy
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar, cast

import pytest
from typing_extensions import override

from blobstore.base import (
    BlobInfo,
    BlobStore,
    BytesBody,
    Created,
    DeleteFailure,
    Lost,
    RequestMetadata,
    UnfinishedPut,
    read_blob,
)
from blobstore.errors import BlobNotFoundError
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import ForwardingStore, InFlightLimit, LimitedStore, Meter, MeteredStore
from blobstore.wrappers.retry import HedgedStore, RetryingStore
from tests.contract.sink_contract import Collecting

T = TypeVar("T")

BODY = BytesBody(b"abc")
WHO = RequestMetadata(job="job")
UNFINISHED = UnfinishedPut(key="u", upload_id="1", begun_at_ms=1)

SINK = Collecting()


class Recording:
    """Has every method, and keeps what each was called with."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        async def answer(*args: object, **kwargs: object) -> object:
            self.calls.append((name, args, kwargs))
            return name

        return answer


class Watching(ForwardingStore):
    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self.seen: list[str] = []

    @asynccontextmanager
    @override
    async def _around(self, operation: str, *keys: str) -> AsyncIterator[None]:
        self.seen.append(f"{operation} {' '.join(keys)}")
        try:
            yield
        except BlobNotFoundError:
            self.seen.append("not found")
            raise
        finally:
            self.seen.append("end")


@pytest.mark.parametrize(
    "call,expected,seen",
    [
        (
            lambda store: store.put("k", BODY, ttl_ms=5, repeatable=True),
            ("put", ("k", BODY), {"ttl_ms": 5, "repeatable": True}),
            "put k",
        ),
        (
            lambda store: store.put_if_absent("k", BODY, ttl_ms=5),
            ("put_if_absent", ("k", BODY), {"ttl_ms": 5}),
            "put_if_absent k",
        ),
        (
            lambda store: store.read_into("k", SINK, start=1, size_bytes=2, fresh=True),
            ("read_into", ("k", SINK), {"start": 1, "size_bytes": 2, "fresh": True}),
            "get k",
        ),
        (lambda store: store.stat("k"), ("stat", ("k",), {}), "stat k"),
        (
            lambda store: store.list_page("p", start_after="a", limit=7),
            ("list_page", ("p",), {"start_after": "a", "limit": 7}),
            "list_page p",
        ),
        (lambda store: store.delete(["a", "b"]), ("delete", (["a", "b"],), {}), "delete a b"),
        (lambda store: store.remove_ttl("k"), ("remove_ttl", ("k",), {}), "remove_ttl k"),
        (lambda store: store.list_unfinished("p"), ("list_unfinished", ("p",), {}), "list_unfinished p"),
        (
            lambda store: store.abort_unfinished([UNFINISHED]),
            ("abort_unfinished", ([UNFINISHED],), {}),
            "abort_unfinished u",
        ),
        (lambda store: store.now_ms(), ("now_ms", (), {}), "now_ms "),
    ],
)
async def test_a_request_is_passed_on_as_it_came_within_the_hook(
    call: Callable[[BlobStore], Awaitable[object]], expected: object, seen: str
) -> None:
    inner = Recording()
    store = Watching(cast("BlobStore", inner))
    assert await call(store) == (None if seen in {"remove_ttl k", "get k"} else seen.split(maxsplit=1)[0])
    assert inner.calls == [expected]
    assert store.seen == [seen, "end"]


async def test_a_read_is_within_the_hook_to_its_end() -> None:
    store = Watching(MemoryStore(chunk_bytes=1))
    await store.put("k", BODY)
    store.seen.clear()
    assert await read_blob(store, "k", size_bytes_max=3) == b"abc"
    with pytest.raises(BlobNotFoundError):
        await read_blob(store, "absent", size_bytes_max=3)
    assert store.seen == ["get k", "end", "get absent", "not found", "end"]


async def test_a_request_can_be_sent_again_by_the_other_hook() -> None:
    class Twice(ForwardingStore):
        @override
        async def _send(self, operation: str, keys: Sequence[str], request: Callable[[], Awaitable[T]]) -> T:
            await request()
            return await request()

    store = Twice(MemoryStore())
    assert isinstance(await store.put_if_absent("k", BODY), Lost)
    assert isinstance(await store.put("k", BODY), Created)
    assert await store.delete(["k"]) == tuple[DeleteFailure, ...]()


async def test_without_hooks_it_is_the_store() -> None:
    inner = MemoryStore()
    store = ForwardingStore(inner)
    assert store.capabilities == inner.capabilities
    await store.put("k", BODY)
    assert await store.stat("k") == await inner.stat("k")
    assert await store.list_page("") == await inner.list_page("")
    await store.close()


async def test_a_view_reports_the_store_on_whose_behalf_and_shares_what_the_wrappers_count() -> None:
    class Tracing(MemoryStore):
        by: tuple[str, ...] = ()

        @override
        def tagged(self, metadata: RequestMetadata) -> BlobStore:
            view = copy.copy(self)
            view.by = (*self.by, metadata.job)
            return view

        @override
        async def stat(self, key: str) -> BlobInfo | None:
            traced.append(self.by)
            return await super().stat(key)

    traced: list[tuple[str, ...]] = []
    meter = Meter()
    store = LimitedStore(RetryingStore(HedgedStore(MeteredStore(Tracing(), meter))), InFlightLimit(1))
    view = store.tagged(WHO)
    await view.put("k", BODY)
    assert await store.stat("k") == await view.stat("k") is not None
    assert traced == [(), ("job",)]
    assert meter.requests == {"put": 1, "stat": 2}


def test_without_a_store_that_traces_a_view_is_the_store() -> None:
    store = ForwardingStore(MemoryStore())
    assert store.tagged(WHO) is store


def test_nothing_of_the_contract_is_left_out() -> None:
    contract = {name for name, _ in inspect.getmembers(BlobStore) if not name.startswith("_")}
    assert contract <= set(vars(ForwardingStore))

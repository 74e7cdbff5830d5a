"""Multipart uploads by a client whose answers are scripted: what is aborted, what is not, what a failure leaves."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from blobstore.base import BytesBody, Created, CreateOutcome, Unknown
from blobstore.errors import StoreUnavailableError
from blobstore.s3 import writer
from blobstore.s3.client import ReadBody, SentBody
from blobstore.s3.errors import WRITE_ID, BrokenError, Refusal, RefusedError
from blobstore.s3.settings import MIB, S3Settings
from blobstore.s3.store import S3Store
from blobstore.wrappers.retry import RetryingStore, RetrySettings

DATE = {"HTTPHeaders": {"date": "Sat, 21 Nov 2026 19:00:00 GMT"}}
CREATED = datetime(2026, 11, 21, 18, 59, 58, tzinfo=UTC)
BODY = BytesBody(bytes(12 * MIB))  # three parts
Answers = dict[str, Callable[[], Any]]


def refused(status: int, code: str = "") -> RefusedError:
    return RefusedError(Refusal(status=status, code=code or str(status)))


def failing(error: BaseException) -> Callable[[], Any]:
    def fail() -> None:
        raise error

    return fail


class ScriptedClient:
    """Answers each method by its script, and remembers what was called."""

    def __init__(self, **scripts: Callable[[], Any]) -> None:
        self.scripts = scripts
        self.calls: list[str] = []
        self.write_ids: list[str] = []
        self.stored_id = ""
        # A value that no answer has.
        self.lacking = ""

    def send(self, read: ReadBody, *, size_bytes: int, sha256: str) -> SentBody:
        return SentBody(read, size_bytes=size_bytes, sha256=sha256, stall_s=1)

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self.calls.append(method)
        await asyncio.sleep(0)
        if "Metadata" in arguments:
            self.write_ids.append(arguments["Metadata"][WRITE_ID])
        if method in self.scripts:
            self.scripts[method]()
        if method == "head_object":
            if not self.stored_id:
                raise refused(404)
            found = {"Metadata": {WRITE_ID: self.stored_id}, "LastModified": CREATED, "ContentLength": BODY.size_bytes}
            return {**found, "ResponseMetadata": DATE}
        if method in {"complete_multipart_upload", "put_object"}:
            self.stored_id = self.write_ids[-1]
        answer = {"UploadId": "u", "ETag": "e", "ResponseMetadata": DATE}
        return {name: value for name, value in answer.items() if name != self.lacking}


def scripted_store(client: ScriptedClient) -> S3Store:
    settings = S3Settings(conditional_multipart=True, single_put_bytes_max=0, part_bytes=5 * MIB)
    store = S3Store("bucket", settings=settings, bound_by_profile=False)
    store._bucket.client = client  # type: ignore[assignment]
    return store


async def test_an_upload_is_begun_sent_in_parts_completed_and_dated_by_the_store() -> None:
    client = ScriptedClient()
    outcome = await scripted_store(client).put_if_absent("k", BODY)
    assert outcome == Created(created_at_ms=int(CREATED.timestamp()) * 1000)
    parts = ["upload_part"] * 3
    assert client.calls == ["create_multipart_upload", *parts, "complete_multipart_upload", "head_object"]


@pytest.mark.parametrize("error", [BrokenError("reset"), refused(500), refused(504), asyncio.CancelledError()])
async def test_an_upload_that_may_be_completing_is_not_aborted(error: BaseException) -> None:
    # Ceph carries out both, and an object that was asked to be created then loses its parts.
    client = ScriptedClient(complete_multipart_upload=failing(error))
    try:
        assert isinstance(await scripted_store(client).put_if_absent("k", BODY), Unknown)
    except asyncio.CancelledError:
        assert isinstance(error, asyncio.CancelledError)
    assert "abort_multipart_upload" not in client.calls


@pytest.mark.parametrize("method", ["upload_part", "complete_multipart_upload"])
async def test_an_upload_that_was_refused_is_aborted(method: str) -> None:
    client = ScriptedClient(**{method: failing(refused(409))})
    with pytest.raises(StoreUnavailableError):
        await scripted_store(client).put_if_absent("k", BODY)
    assert client.calls.count("abort_multipart_upload") == 1


@pytest.mark.parametrize("lacking, aborted", [("UploadId", 0), ("ETag", 1)])
async def test_an_answer_that_lacks_what_an_upload_goes_on_with_is_none(lacking: str, aborted: int) -> None:
    client = ScriptedClient()
    client.lacking = lacking
    for put in (S3Store.put, S3Store.put_if_absent):
        client.calls.clear()
        with pytest.raises(StoreUnavailableError, match=lacking):
            await put(scripted_store(client), "k", BODY)
        assert client.calls.count("abort_multipart_upload") == aborted


async def test_an_upload_that_a_collector_gave_up_is_begun_again() -> None:
    client = ScriptedClient(upload_part=failing(refused(404, "NoSuchUpload")))
    store = RetryingStore(scripted_store(client), RetrySettings(attempts_max=3, first_wait_s=0))
    with pytest.raises(StoreUnavailableError):
        await store.put_if_absent("k", BODY)
    assert client.calls.count("create_multipart_upload") == 3


async def test_an_upload_that_was_completed_unseen_is_not_sent_again() -> None:
    client = ScriptedClient(complete_multipart_upload=failing(BrokenError("reset")))
    store = scripted_store(client)
    assert isinstance(await store.put_if_absent("k", BODY), Unknown)
    client.stored_id = client.write_ids[0]  # it has landed meanwhile
    client.calls.clear()
    assert isinstance(await store.put_if_absent("k", BODY), Created)
    assert set(client.calls) == {"head_object"}


async def test_no_failure_costs_a_place_for_a_part() -> None:
    rng = Random(1)

    def sometimes() -> None:
        if rng.random() < 0.5:
            raise refused(503)

    client = ScriptedClient(upload_part=sometimes)
    store = scripted_store(client)
    for _ in range(200):
        sending: asyncio.Task[CreateOutcome] = asyncio.ensure_future(store.put_if_absent("k", BytesBody(b"x" * 100)))
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            sending.cancel()
        await asyncio.wait([sending])
        sending.cancelled() or sending.exception()
    assert store._writer.part_slots._value == store.settings.parts_in_memory_max


async def test_a_deadline_that_passes_while_a_failed_upload_is_aborted_is_no_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = ScriptedClient(upload_part=failing(BrokenError("reset")))
    call = client.call

    async def hanging(method: str, **arguments: Any) -> dict[str, Any]:
        if method == "abort_multipart_upload":
            await asyncio.Event().wait()
        return await call(method, **arguments)

    monkeypatch.setattr(client, "call", hanging)
    monkeypatch.setattr(writer, "_ABORT_TIMEOUT_S", 0.2)
    settings = RetrySettings(attempts_max=1, deadline_s=0.05, bytes_per_s_min=1_000_000_000)
    store = RetryingStore(scripted_store(client), settings)
    with pytest.raises(StoreUnavailableError, match="no answer within"):
        await store.put("k", BytesBody(bytes(MIB)))
    await asyncio.sleep(0.3)  # the abort ends


async def test_an_abort_that_the_store_cannot_take_now_is_tried_again() -> None:
    client = ScriptedClient(abort_multipart_upload=failing(refused(503, "SlowDown")))
    bare = scripted_store(client)
    put = await bare.begin_upload("k")
    store = RetryingStore(bare, RetrySettings(attempts_max=3, first_wait_s=0))
    with pytest.raises(StoreUnavailableError):
        await store.abort_unfinished([put, put])
    assert client.calls.count("abort_multipart_upload") >= 3


async def test_keys_go_one_by_one_where_a_batch_is_denied_and_what_cannot_be_done_now_is_tried_again() -> None:
    client = ScriptedClient(delete_objects=failing(refused(403)))
    bare = scripted_store(client)
    assert await bare.delete(["a", "b", "c"]) == ()
    assert client.calls == ["delete_objects", *["delete_object"] * 3]
    client.scripts["delete_object"] = failing(refused(503))
    with pytest.raises(StoreUnavailableError):
        await RetryingStore(bare, RetrySettings(attempts_max=2, first_wait_s=0)).delete(["a", "b"])
    client.scripts["delete_object"] = failing(refused(403))
    client.calls.clear()
    with pytest.raises(Exception, match="403"):
        await bare.delete(["a", "b", "c"])
    assert client.calls == ["delete_objects", "delete_object"]


@pytest.mark.parametrize("lacking", ["LastModified", "ContentLength"])
async def test_an_answer_that_lacks_something_is_none(lacking: str) -> None:
    client = ScriptedClient()
    client.stored_id = "x"
    store = scripted_store(client)
    whole = client.call

    async def call(method: str, **arguments: Any) -> dict[str, Any]:
        answer = await whole(method, **arguments)
        return {name: value for name, value in answer.items() if name != lacking}

    client.call = call  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError, match=lacking):
        await store.stat("k")
    with pytest.raises(StoreUnavailableError, match="IsTruncated"):
        await store.list_page("")

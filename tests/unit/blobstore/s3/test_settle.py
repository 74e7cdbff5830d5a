"""What a create that was not plainly answered comes to: the table of design 0003, W1 and W2, row by row."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from blobstore.base import BytesBody, Created, Lost, Unknown
from blobstore.errors import AccessDeniedError, StoreUnavailableError
from blobstore.s3.client import ReadBody, SentBody
from blobstore.s3.errors import WRITE_ID, BrokenError, Refusal, RefusedError
from blobstore.s3.store import S3Store

DATE = {"HTTPHeaders": {"date": "Sat, 21 Nov 2026 19:00:00 GMT"}}
CREATED = datetime(2026, 11, 21, 18, 59, 58, tzinfo=UTC)
OWN, OTHER, GONE = "own", "other", "gone"
BODY = BytesBody(b"content")


def refused(status: int, code: str = "") -> RefusedError:
    return RefusedError(Refusal(status=status, code=code or str(status)))


class ScriptedClient:
    """Answers PUTs from a script, and HEADs by what is said to be there."""

    def __init__(self, puts: Sequence[BaseException | None], there: str | Exception) -> None:
        self._puts = list(puts)
        self.there = there
        self.write_ids: list[str] = []
        self.calls: list[str] = []

    def send(self, read: ReadBody, *, size_bytes: int, sha256: str) -> SentBody:
        return SentBody(read, size_bytes=size_bytes, sha256=sha256, stall_s=1)

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self.calls.append(method)
        if method == "put_object":
            self.write_ids.append(arguments["Metadata"][WRITE_ID])
            assert arguments["IfNoneMatch"] == "*"
            error = self._puts.pop(0)
            if error is not None:
                raise error
            return {"ResponseMetadata": DATE}
        assert method == "head_object"
        if isinstance(self.there, Exception):
            raise self.there
        if self.there == GONE:
            raise refused(404)
        write_id = self.write_ids[0] if self.there == OWN else "f" * 32
        return {"Metadata": {WRITE_ID: write_id}, "LastModified": CREATED, "ContentLength": 7, "ResponseMetadata": DATE}


def scripted_store(client: ScriptedClient) -> S3Store:
    store = S3Store("bucket", bound_by_profile=False)
    store._bucket.client = client  # type: ignore[assignment]
    return store


@pytest.mark.parametrize(
    "answer,there,outcome",
    [
        (refused(412), OWN, Created),
        (refused(412), OTHER, Lost),
        (refused(412), GONE, StoreUnavailableError),
        (refused(412), refused(403), Lost),
        (refused(412), refused(503), StoreUnavailableError),
        (refused(412), BrokenError("reset"), StoreUnavailableError),
        (refused(409, "ConditionalRequestConflict"), OWN, Created),
        (refused(409, "ConditionalRequestConflict"), GONE, StoreUnavailableError),
        (refused(409, "ConditionalRequestConflict"), OTHER, Lost),
        (BrokenError("reset"), OWN, Created),
        (BrokenError("reset"), OTHER, Lost),
        (BrokenError("reset"), GONE, Unknown),
        (BrokenError("reset"), BrokenError("reset"), Unknown),
        (BrokenError("reset"), refused(403), Unknown),
        (refused(500, "InternalError"), OWN, Created),
        (refused(504), GONE, Unknown),
        (refused(404, "NoSuchUpload"), OWN, Created),
        (refused(404, "NoSuchUpload"), GONE, StoreUnavailableError),
    ],
)
async def test_a_doubtful_create_is_looked_at(answer: Exception, there: str | Exception, outcome: type) -> None:
    client = ScriptedClient([answer], there)
    store = scripted_store(client)
    if issubclass(outcome, Exception):
        with pytest.raises(outcome):
            await store.put_if_absent("k", BODY)
    else:
        assert isinstance(await store.put_if_absent("k", BODY), outcome)
    assert client.calls == ["put_object", "head_object"]


@pytest.mark.parametrize(
    "answer,error",
    [
        (refused(403, "AccessDenied"), AccessDeniedError),
        (refused(503, "SlowDown"), StoreUnavailableError),
        (BrokenError("no connection", sent=False), StoreUnavailableError),
    ],
)
async def test_a_create_that_certainly_did_not_happen_costs_no_look(answer: Exception, error: type[Exception]) -> None:
    client = ScriptedClient([answer], OTHER)
    with pytest.raises(error):
        await scripted_store(client).put_if_absent("k", BODY)
    assert client.calls == ["put_object"]


async def test_an_own_create_has_the_time_of_the_store() -> None:
    outcome = await scripted_store(ScriptedClient([refused(412)], OWN)).put_if_absent("k", BODY)
    assert outcome == Created(created_at_ms=int(CREATED.timestamp()) * 1000)


async def test_a_create_that_is_sent_again_after_an_unknown_outcome_knows_itself() -> None:
    client = ScriptedClient([BrokenError("reset"), refused(412)], GONE)
    store = scripted_store(client)
    assert isinstance(await store.put_if_absent("k", BODY), Unknown)
    client.there = OWN  # the first request has landed meanwhile
    assert isinstance(await store.put_if_absent("k", BODY), Created)
    assert client.write_ids[0] == client.write_ids[1]


async def test_a_create_of_other_bytes_has_a_write_id_of_its_own() -> None:
    client = ScriptedClient([BrokenError("reset"), refused(412)], GONE)
    store = scripted_store(client)
    assert isinstance(await store.put_if_absent("k", BODY), Unknown)
    client.there = OWN
    assert await store.put_if_absent("k", BytesBody(b"another")) == Lost()
    assert client.write_ids[0] != client.write_ids[1]


async def test_every_settled_create_begins_with_a_new_write_id() -> None:
    client = ScriptedClient([None, None, refused(412), None], OTHER)
    store = scripted_store(client)
    for _ in range(4):
        await store.put_if_absent("k", BODY)
    assert len(set(client.write_ids)) == 4


async def test_a_create_that_its_caller_gave_up_knows_itself_when_it_is_sent_again() -> None:
    client = ScriptedClient([asyncio.CancelledError(), refused(412)], OWN)
    store = scripted_store(client)
    with pytest.raises(asyncio.CancelledError):
        await store.put_if_absent("k", BODY)
    assert isinstance(await store.put_if_absent("k", BODY), Created)
    assert client.write_ids[0] == client.write_ids[1]


async def test_a_put_that_took_long_is_dated_by_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient([None], OWN)
    store = scripted_store(client)
    monkeypatch.setattr("blobstore.s3.writer.SLOW_PUT_S", -1.0)
    assert await store.put_if_absent("k", BODY) == Created(created_at_ms=int(CREATED.timestamp()) * 1000)
    assert client.calls == ["put_object", "head_object"]


async def test_a_create_that_was_collected_before_its_time_was_asked_for_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writer was paused for longer than the TTL: that is not a missing blob of a commit (F16)."""
    client = ScriptedClient([None, None], GONE)
    store = scripted_store(client)
    monkeypatch.setattr("blobstore.s3.writer.SLOW_PUT_S", -1.0)
    assert isinstance(await store.put_if_absent("k", BODY), Unknown)
    client.there = OWN
    assert isinstance(await store.put_if_absent("k", BODY), Created)
    assert client.write_ids[0] == client.write_ids[1]

"""The sole importer of the SDK against a server that answers what a test scripts, over real connections."""

import asyncio
import base64
import gc
import hashlib
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import botocore.loaders
import msgspec
import pytest
from aiohttp import web
from botocore.utils import parse_timestamp

from blobstore.base import BytesBody
from blobstore.errors import AccessDeniedError, InvalidRequestError
from blobstore.s3.client import S3Client, SentBody, check_endpoint, read_time
from blobstore.s3.errors import BrokenError, RefusedError
from blobstore.s3.settings import S3Settings
from blobstore.s3.store import S3Store
from blobstore.s3.threads import ThreadedSession

CANARY = "canary-4f1d-secret"
TOKEN = "canary-4f1d-token"
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class ScriptedServer:
    """Answers by `handler`; remembers what was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.handler: Handler | None = None
        self.url = ""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, dict(request.headers), body))
        if self.handler is not None:
            return await self.handler(request)
        return web.Response(text="<Answer><UploadId>u</UploadId></Answer>" if request.method == "POST" else "")

    @property
    def methods(self) -> list[str]:
        return [method for method, _, _ in self.requests]


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    runner = web.ServerRunner(web.Server(scripted.answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    scripted.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield scripted
    await runner.cleanup()


@pytest.fixture(autouse=True)
def chain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[S3Client]:
    made = S3Client(S3Settings(endpoint_url=server.url, read_timeout_s=2, connect_timeout_s=2))
    yield made
    await made.close()


@pytest.fixture(scope="module", autouse=True)
def nothing_left_open() -> Iterator[None]:
    """What a test left open is reported here at the latest: once, as it takes long where a worker has done much."""
    yield
    gc.collect()


def sent_body(*chunks: bytes, fails: Exception | None = None) -> SentBody:
    async def read() -> AsyncGenerator[bytes, None]:
        for chunk in chunks:
            yield chunk
        if fails is not None:
            raise fails

    data = b"".join(chunks)
    size_bytes = len(data) + (1 if fails else 0)
    return SentBody(read, size_bytes=size_bytes, sha256=hashlib.sha256(data).hexdigest(), stall_s=2)


async def put(client: S3Client, body: SentBody) -> Any:
    return await client.call("put_object", Bucket="bucket", Key="k", Body=body, ContentLength=body.size)


async def abort(request: web.BaseRequest) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def error_answer(status: int, code: str, message: str = "", **headers: str) -> Handler:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        return web.Response(status=status, text=text, headers=headers)

    return answer


@pytest.mark.parametrize(
    "endpoint, environment, verified",
    [
        ("http://127.0.0.1:9", {}, False),
        ("http://127.0.0.1:9", {"HTTP_PROXY": "http://proxy:1"}, True),
        ("http://127.0.0.1:9", {"HTTPS_PROXY": "http://proxy:1"}, True),
        ("http://127.0.0.1:9", {"HTTP_PROXY": "http://proxy:1", "NO_PROXY": "127.0.0.1"}, False),
        ("HTTP://127.0.0.1:9", {}, True),
        ("https://127.0.0.1:9", {}, True),
        ("", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, True),
        ("", {}, True),
    ],
)
async def test_certificates_are_asked_for_wherever_there_may_be_tls(
    endpoint: str, environment: dict[str, str], verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("blobstore.s3.client.ThreadedSession", seen := NotedSession)
    seen.verified.clear()
    client = S3Client(S3Settings(endpoint_url=endpoint, allow_http=True))
    await client._open()
    await client.close()
    assert seen.verified == [verified]


class NotedSession(ThreadedSession):
    """Notes whether it is to verify certificates."""

    verified: ClassVar[list[bool]] = []

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.verified.append(settings["verify"] is not False)


async def test_a_body_is_signed_by_its_hash_and_sent_with_its_length(server: ScriptedServer, client: S3Client) -> None:
    await put(client, sent_body(b"one", b"two" * 100_000))
    ((method, headers, body),) = server.requests
    assert method == "PUT"
    assert body == b"one" + b"two" * 100_000
    assert headers["X-Amz-Content-SHA256"] == hashlib.sha256(body).hexdigest()
    assert headers["Content-Length"] == str(len(body))
    assert "Expect" not in headers
    assert "Transfer-Encoding" not in headers
    assert "x-amz-content-sha256" in headers["Authorization"]


@pytest.mark.parametrize(
    "settings,headers",
    [
        (S3Settings(), {}),
        (S3Settings(encryption="AES256"), {"x-amz-server-side-encryption": "AES256"}),
        (
            S3Settings(encryption="aws:kms", kms_key_id="key-7"),
            {"x-amz-server-side-encryption": "aws:kms", "x-amz-server-side-encryption-aws-kms-key-id": "key-7"},
        ),
    ],
)
async def test_every_put_says_how_it_is_encrypted_and_what_its_checksum_is(
    server: ScriptedServer, settings: S3Settings, headers: dict[str, str]
) -> None:
    settings = msgspec.structs.replace(settings, endpoint_url=server.url)
    store = S3Store("bucket", settings=settings, bound_by_profile=False)
    await store.put("k", BytesBody(b"content"))
    await store.put_if_absent("k", BytesBody(b"content"), ttl_ms=1000)
    await store.begin_upload("k")
    assert server.methods == ["PUT", "PUT", "POST"]
    for method, sent, body in server.requests:
        shown = {name.lower(): value for name, value in sent.items()}
        assert {name: shown[name] for name in shown if "server-side-encryption" in name} == headers
        if method == "PUT":
            assert base64.b64decode(shown["x-amz-checksum-sha256"]) == hashlib.sha256(body).digest()
    await store.close()


async def test_the_region_is_what_every_other_sdk_takes_it_from(
    server: ScriptedServer, client: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    await client.call("head_object", Bucket="bucket", Key="k")
    assert "/eu-north-1/s3/" in server.requests[0][1]["Authorization"]


async def test_the_http_client_does_not_send_a_body_twice_by_itself(server: ScriptedServer, client: S3Client) -> None:
    await put(client, sent_body(b"warm"))  # a connection that is kept is one that the HTTP client would send again on
    server.handler = abort
    with pytest.raises(BrokenError) as caught:
        await put(client, sent_body(b"content"))
    assert caught.value.sent
    assert server.methods == ["PUT", "PUT"]


async def test_an_error_of_the_body_comes_out_as_it_is(client: S3Client) -> None:
    with pytest.raises(FileNotFoundError, match="the source is gone"):
        await put(client, sent_body(b"half", fails=FileNotFoundError("the source is gone")))


async def test_a_refusal_reports_what_may_be_reported(server: ScriptedServer, client: S3Client) -> None:
    headers = {"Retry-After": "7", "x-amz-request-id": "id-7", "Date": "Sat, 21 Nov 2026 19:00:00 GMT"}
    server.handler = error_answer(503, "SlowDown", "Please reduce\n your rate", **headers)
    with pytest.raises(RefusedError) as caught:
        await client.call("list_objects_v2", Bucket="bucket")
    refusal = caught.value.refusal
    assert (refusal.status, refusal.code, refusal.message) == (503, "SlowDown", "Please reduce your rate")
    assert (refusal.request_id, refusal.retry_after_s, refusal.date_ms) == ("id-7", 7.0, 1795287600000)
    assert server.methods == ["GET"]  # nothing but the retrying wrapper tries again


async def test_an_error_in_an_answer_of_200_is_an_error(server: ScriptedServer, client: S3Client) -> None:
    server.handler = error_answer(200, "InternalError")
    parts = {"Parts": [{"PartNumber": 1, "ETag": "x"}]}
    with pytest.raises(RefusedError) as caught:
        await client.call("complete_multipart_upload", Bucket="b", Key="k", UploadId="u", MultipartUpload=parts)
    assert caught.value.refusal.status == 500


def assert_no_secret(error: BaseException) -> None:
    seen: BaseException | None = error
    while seen is not None:
        for text in (str(seen), repr(seen), repr(seen.args), repr(vars(seen)), *getattr(seen, "__notes__", ())):
            assert CANARY not in text
            assert TOKEN not in text
        assert CANARY.encode() not in pickle.dumps(seen.args)
        assert TOKEN.encode() not in pickle.dumps(seen.args)
        seen = seen.__cause__ or seen.__context__  # also what a traceback does not print


@pytest.mark.parametrize("code", ["SignatureDoesNotMatch", "InvalidToken", "AccessDenied"])
async def test_what_a_refusal_quotes_of_the_request_stays_inside(server: ScriptedServer, code: str) -> None:
    async def quote(request: web.BaseRequest) -> web.StreamResponse:
        quoted = "".join(f"{name}:{value}" for name, value in request.headers.items())
        text = f"<Error><Code>{code}</Code><Message>{quoted}</Message><CanonicalRequest>{quoted}</CanonicalRequest>"
        return web.Response(status=403, text=f"{text}</Error>")

    server.handler = quote
    store = S3Store("bucket", settings=S3Settings(endpoint_url=server.url), bound_by_profile=False)
    with pytest.raises(AccessDeniedError) as caught:
        await store.put("k", BytesBody(b"x"))
    assert any(TOKEN in str(headers) for _, headers, _ in server.requests)  # it was sent, so it could have leaked
    assert_no_secret(caught.value)
    assert CANARY not in repr(store)
    await store.close()


async def test_a_broken_connection_does_not_carry_the_request_along(server: ScriptedServer, client: S3Client) -> None:
    server.handler = abort
    with pytest.raises(BrokenError) as caught:
        await client.call("head_object", Bucket="bucket", Key="k")
    assert_no_secret(caught.value)
    assert caught.value.__context__ is None


async def test_credentials_that_end_are_looked_up_again(
    server: ScriptedServer, client: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.call("head_object", Bucket="bucket", Key="k")
    server.handler = error_answer(400, "ExpiredToken")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second-key")
    with pytest.raises(BrokenError) as caught:
        await client.call("get_object_tagging", Bucket="bucket", Key="k")
    assert not caught.value.sent  # so that it is simply tried again
    server.handler = None
    await client.call("head_object", Bucket="bucket", Key="k")
    keys = [headers["Authorization"].split("Credential=")[1].split("/")[0] for _, headers, _ in server.requests]
    assert keys == ["first-key", "first-key", "second-key"]


async def test_credentials_that_were_never_good_are_refused_at_once(server: ScriptedServer, client: S3Client) -> None:
    server.handler = error_answer(400, "ExpiredToken")
    for _ in range(2):
        with pytest.raises(RefusedError):
            await client.call("get_object_tagging", Bucket="bucket", Key="k")
    assert len(server.requests) == 2


async def test_without_credentials_the_hint_says_where_they_come_from(
    client: S3Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(AccessDeniedError) as caught:
        await client.call("head_object", Bucket="bucket", Key="k")
    assert "standard chain" in caught.value.hint
    assert server.requests == []


async def test_what_cannot_be_reached_was_not_sent() -> None:
    client = S3Client(S3Settings(endpoint_url="http://127.0.0.1:1", connect_timeout_s=1))
    with pytest.raises(BrokenError) as caught:
        await client.call("head_object", Bucket="bucket", Key="k")
    assert not caught.value.sent
    await client.close()


async def test_a_body_that_breaks_off_is_no_end(server: ScriptedServer, client: S3Client) -> None:
    async def truncate(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"x" * 100)
        assert request.transport is not None
        await asyncio.sleep(0.1)  # what came so far is read by then
        request.transport.close()
        return response

    server.handler = truncate
    answer = await client.call("get_object", Bucket="bucket", Key="k")
    chunks = client.read(answer)
    assert await anext(chunks) == b"x" * 100
    with pytest.raises(BrokenError):
        await anext(chunks)


async def test_a_silent_server_is_given_up(server: ScriptedServer, client: S3Client) -> None:
    async def hang(_: web.BaseRequest) -> web.StreamResponse:
        await asyncio.sleep(4)
        return web.Response()

    server.handler = hang
    with pytest.raises(BrokenError) as caught:
        await client.call("head_object", Bucket="bucket", Key="k")
    assert caught.value.sent


@pytest.mark.parametrize(
    "url", ["https://s3.example.org", "http://localhost:1", "http://127.0.0.1", "http://[::1]:8000"]
)
def test_an_endpoint_that_nobody_overhears_is_allowed(url: str) -> None:
    check_endpoint(url, allow_http=False)


@pytest.mark.parametrize("url", ["http://s3.example.org", "http://10.0.0.1", "http://127.0.0.1.example.org", "ftp://x"])
def test_plain_http_to_another_machine_needs_to_be_allowed_by_name(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="not https"):
        check_endpoint(url, allow_http=False)
    if url.startswith("http"):
        check_endpoint(url, allow_http=True)


URLS_WITH_CREDENTIALS = (
    f"https://user:{CANARY}@host",
    f"https://user:a/{CANARY}@host",
    f"https://host/?X-Amz-Signature={CANARY}",
    f"https://host/#{CANARY}",
    f"https://[{CANARY}@host",
)


@pytest.mark.parametrize("url", URLS_WITH_CREDENTIALS)
def test_an_endpoint_with_credentials_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_endpoint(url, allow_http=True)
    assert CANARY not in f"{caught.value!r}{caught.value.hint}"


async def test_plain_http_to_another_machine_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://203.0.113.1")
    client = S3Client(S3Settings())
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="not https"):
            await client.call("head_object", Bucket="bucket", Key="k")
    await client.close()


async def test_an_upload_that_the_server_takes_nothing_of_is_given_up() -> None:
    is_over = asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_over.wait()
        writer.transport.abort()

    listening = await asyncio.start_server(stall, "127.0.0.1", 0, limit=1024)
    port = listening.sockets[0].getsockname()[1]
    client = S3Client(S3Settings(endpoint_url=f"http://127.0.0.1:{port}", read_timeout_s=0.5))

    async def read() -> AsyncGenerator[bytes, None]:
        for _ in range(64):
            yield bytes(1 << 20)

    body = client.send(read, size_bytes=64 << 20, sha256="0" * 64)
    with pytest.raises(BrokenError):
        async with asyncio.timeout(4):
            await put(client, body)
    await client.close()
    is_over.set()
    await asyncio.sleep(0)
    listening.close()
    await listening.wait_closed()


async def test_a_head_that_is_refused_without_a_word_may_mean_that_the_credentials_have_ended(
    server: ScriptedServer, client: S3Client
) -> None:
    await client.call("head_object", Bucket="bucket", Key="k")

    async def refuse(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=400)

    server.handler = refuse
    with pytest.raises(BrokenError):
        await client.call("head_object", Bucket="bucket", Key="k")
    with pytest.raises(RefusedError):  # new ones did not help
        await client.call("head_object", Bucket="bucket", Key="k")


async def test_no_proxy_stands_between_a_client_and_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://203.0.113.1:3128")
    client = S3Client(S3Settings(endpoint_url="http://127.0.0.1:1"))
    with pytest.raises(InvalidRequestError, match="proxy") as caught:
        await client.call("head_object", Bucket="bucket", Key="k")
    assert "NO_PROXY" in caught.value.hint
    await client.close()


@pytest.mark.parametrize("url", URLS_WITH_CREDENTIALS)
def test_settings_hold_no_credentials(url: str) -> None:
    with pytest.raises(ValueError, match="credentials") as caught:
        S3Settings(endpoint_url=url)
    assert CANARY not in repr(caught.value)


@pytest.mark.parametrize(
    "text,seconds", [("7", 7.0), ("Sat, 21 Nov 2026 19:00:30 GMT", 30.0), ("soon", None), ("-1", None)]
)
async def test_a_wait_may_be_asked_for_in_seconds_or_until_a_time(
    server: ScriptedServer, client: S3Client, text: str, seconds: float | None
) -> None:
    server.handler = error_answer(503, "SlowDown", **{"Retry-After": text, "Date": "Sat, 21 Nov 2026 19:00:00 GMT"})
    with pytest.raises(RefusedError) as caught:
        await client.call("list_objects_v2", Bucket="bucket")
    assert caught.value.refusal.retry_after_s == seconds


async def test_a_profile_that_is_not_there_is_none_however_the_store_says_so(server: ScriptedServer) -> None:
    server.handler = error_answer(404, "NotFound")
    store = S3Store("bucket", settings=S3Settings(endpoint_url=server.url))
    assert await store.stat("k") is None
    await store.close()


async def test_the_description_of_s3_is_read_once_a_process(
    server: ScriptedServer, client: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.call("head_object", Bucket="bucket", Key="key")
    read: list[str] = []
    reading = botocore.loaders.JSONFileLoader.load_file

    def noting(self: botocore.loaders.JSONFileLoader, path: str) -> Any:
        read.append(path)
        return reading(self, path)

    monkeypatch.setattr(botocore.loaders.JSONFileLoader, "load_file", noting)
    other = S3Client(S3Settings(endpoint_url=server.url, path_style=True))
    await other.call("head_object", Bucket="bucket", Key="key")
    await other.close()
    assert read == []


async def test_requests_name_tidemark_and_the_sdk(server: ScriptedServer, client: S3Client) -> None:
    await client.call("head_bucket", Bucket="b")
    named = server.requests[0][1]["User-Agent"].split()
    assert [name.split("/")[0] for name in named[:2]] == ["tidemark", "aiobotocore"]


MOMENT = datetime(2026, 11, 22, 14, 2, 21, tzinfo=UTC)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Sun, 22 Nov 2026 14:02:21 GMT", MOMENT),
        ("Sun, 22 Nov 2026 14:02:21 -0000", MOMENT),
        ("2026-11-22T14:02:21Z", MOMENT),
        ("2026-11-22T14:02:21.250Z", MOMENT.replace(microsecond=250_000)),
        ("2026-11-22T16:02:21+02:00", MOMENT),
        ("20261122T140221Z", MOMENT),
        (str(int(MOMENT.timestamp())), MOMENT),
    ],
)
def test_times_are_read_in_every_form_that_the_sdk_reads(text: str, expected: datetime) -> None:
    assert read_time(text) == expected == parse_timestamp(text)


@pytest.mark.parametrize("text", ["", "never", "2026-13-40T00:00:00Z"])
def test_what_is_no_time_is_an_error_as_the_sdk_s(text: str) -> None:
    for read in (read_time, parse_timestamp):
        with pytest.raises(ValueError, match=r"[Tt]imestamp"):
            read(text)


async def test_a_server_that_was_never_there_is_a_wrong_setting_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    client = S3Client(S3Settings(endpoint_url="http://127.0.0.1:1", connect_timeout_s=1))
    with pytest.raises(BrokenError, match="nothing listens there"):
        await client.call("list_buckets")
    monkeypatch.setattr("blobstore.s3.client._STARTING_S", 0.0)
    with pytest.raises(InvalidRequestError, match="nothing listens there") as refused:
        await client.call("list_buckets")
    assert (refused.value.operation, refused.value.__cause__, refused.value.__context__) == ("connect", None, None)
    await client.close()


async def test_a_server_that_was_there_is_only_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent to it may have been carried out: a refusal would say that it was not (design 0002, C3)."""
    monkeypatch.setattr("blobstore.s3.client._STARTING_S", 0.0)

    async def hang_up(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    runner = web.ServerRunner(web.Server(hang_up))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = S3Client(S3Settings(endpoint_url=f"http://127.0.0.1:{runner.addresses[0][1]}", connect_timeout_s=1))
    with pytest.raises(BrokenError) as broken:
        await client.call("list_buckets")
    assert broken.value.sent
    await runner.cleanup()
    for _ in range(2):
        with pytest.raises(BrokenError, match="no connection"):
            await client.call("list_buckets")
    await client.close()

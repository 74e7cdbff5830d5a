"""GETs that the SDK does not make: they are what it would have sent, and mean what it would have said."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from blobstore.s3.client import S3Client
from blobstore.s3.errors import Answer, BrokenError, RefusedError
from blobstore.s3.settings import S3Settings

SECRET = "canary-8b2c-secret"
TOKEN = "canary-8b2c-token"
BODY = b"0123456789"
# What the SDK alone sends.
OF_THE_SDK = "amz-sdk-invocation-id"


class Server:
    """Answers GETs with the whole of `BODY`, or as a test says; remembers their URLs and headers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.answer: Callable[[], Awaitable[web.StreamResponse]] | None = None
        self.url = ""

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append((self.url + request.raw_path, {k.lower(): v for k, v in request.headers.items()}))
        if self.answer is not None:
            return await self.answer()
        return web.Response(status=206, body=BODY, headers={"Content-Range": "bytes 0-9/10"})

    def refuse(self, status: int, code: str) -> None:
        async def answer() -> web.StreamResponse:
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
            return web.Response(status=status, text=text, headers={"x-amz-request-id": "r1", "Retry-After": "3"})

        self.answer = answer

    @property
    def made_by_the_sdk(self) -> list[bool]:
        return [OF_THE_SDK in headers for _, headers in self.asked]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    runner = web.ServerRunner(web.Server(server.serve))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.fixture
async def client(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[S3Client]:
    for name, value in {"ACCESS_KEY_ID": "first-key", "SECRET_ACCESS_KEY": SECRET, "SESSION_TOKEN": TOKEN}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    client = S3Client(S3Settings(endpoint_url=server.url, region="eu-test-1", path_style=True, read_timeout_s=2))
    yield client
    await client.close()


async def get(client: S3Client, key: str = "k", **arguments: str) -> Answer:
    answer = await client.call("get_object", Bucket="bucket", Key=key, **arguments)
    assert b"".join([chunk async for chunk in client.read(answer)]) == BODY
    return answer


def signature_of(url: str, headers: dict[str, str]) -> str:
    """The SDK's signature of a request as it arrived."""
    (named,) = re.findall("SignedHeaders=([^,]+)", headers["authorization"])
    request = AWSRequest("GET", url, {name: headers[name] for name in named.split(";")})
    request.context["timestamp"] = headers["x-amz-date"]
    auth = S3SigV4Auth(Credentials("first-key", SECRET, TOKEN), "s3", "eu-test-1")
    return str(auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request))


@pytest.mark.parametrize("key", ["k", "blobs/job/0-a_b.c~d/1", "a b+c/ü/(1)!'*%2F&=?#"])
@pytest.mark.parametrize("bytes_range", ["bytes=0-9", None])
async def test_a_further_get_is_what_the_sdk_sends_and_signs(
    server: Server, client: S3Client, key: str, bytes_range: str | None
) -> None:
    wanted = {} if bytes_range is None else {"Range": bytes_range}
    await get(client)
    await get(client, key, **wanted)
    await get(client, key, VersionId="v1", **wanted)
    assert server.made_by_the_sdk == [True, False, True]
    (url, headers), (by_the_sdk, of_the_sdk) = server.asked[1:]
    assert url == by_the_sdk.removesuffix("?versionId=v1")
    assert headers["authorization"].endswith(f"Signature={signature_of(url, headers)}")
    changing = {OF_THE_SDK, "amz-sdk-request", "authorization", "x-amz-date"}
    assert {k: v for k, v in headers.items() if k not in changing} == {
        k: v for k, v in of_the_sdk.items() if k not in changing
    }
    assert headers["x-amz-security-token"] == TOKEN


async def test_of_another_bucket_the_sdk_is_asked_first(server: Server, client: S3Client) -> None:
    for bucket in ("bucket", "other", "other", "bucket"):
        await client.call("get_object", Bucket=bucket, Key="k")
    assert server.made_by_the_sdk == [True, True, False, False]
    assert [url.rsplit("/", 2)[1] for url, _ in server.asked] == ["bucket", "other", "other", "bucket"]


async def test_nothing_is_learned_from_a_get_that_was_refused(server: Server, client: S3Client) -> None:
    server.refuse(404, "NoSuchKey")
    with pytest.raises(RefusedError):
        await get(client)
    server.answer = None
    await get(client)
    await get(client)
    assert server.made_by_the_sdk == [True, True, False]


@pytest.mark.parametrize(
    "status, code", [(404, "NoSuchKey"), (403, "AccessDenied"), (416, "InvalidRange"), (503, "SlowDown")]
)
async def test_a_refusal_says_what_it_says_of_a_get_by_the_sdk(
    server: Server, client: S3Client, status: int, code: str
) -> None:
    refusals = []
    server.refuse(status, code)
    for _ in range(2):
        with pytest.raises(RefusedError) as caught:
            await client.call("get_object", Bucket="bucket", Key="k")
        refusals.append(msgspec.structs.replace(caught.value.refusal, date_ms=None))
        assert SECRET not in repr(caught.value.__context__) + repr(caught.value.__cause__)
        server.answer = None
        await get(client)
        server.refuse(status, code)
    assert server.made_by_the_sdk == [True, True, False, False]
    assert (refusals[0].status, refusals[0].code, refusals[0].retry_after_s) == (status, code, 3)
    assert refusals[0] == refusals[1]


@pytest.mark.parametrize("status, code", [(301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed")])
async def test_where_a_bucket_is_that_has_moved_the_sdk_finds_out(
    server: Server, client: S3Client, status: int, code: str
) -> None:
    for _ in range(2):
        await get(client)
    server.refuse(status, code)
    with pytest.raises(RefusedError):
        await get(client)
    server.answer = None
    for _ in range(2):
        await get(client)
    assert server.made_by_the_sdk == [True, False, False, True, False]


async def test_every_get_has_the_same_kind_of_answer(server: Server, client: S3Client) -> None:
    answers = [await get(client), await get(client), await get(client, VersionId="v1")]
    assert {frozenset(answer) for answer in answers} == {frozenset({"Body", "ContentLength", "ContentRange"})}
    assert {(int(answer["ContentLength"]), answer["ContentRange"]) for answer in answers} == {(10, "bytes 0-9/10")}


@pytest.mark.parametrize("body", ["<Error><Code>SlowDown</Code>", "nonsense", ""])
async def test_a_refusal_that_cannot_be_read_is_the_same_either_way(
    server: Server, client: S3Client, body: str
) -> None:
    async def answer() -> web.StreamResponse:
        return web.Response(status=503, text=body)

    said = []
    server.answer = answer
    for _ in range(2):
        with pytest.raises((RefusedError, BrokenError)) as caught:
            await client.call("get_object", Bucket="bucket", Key="k")
        said.append((type(caught.value), str(caught.value)))
        server.answer = None
        await get(client)
        server.answer = answer
    assert server.made_by_the_sdk == [True, True, False, False]
    assert said[0] == said[1]


async def test_credentials_that_have_ended_are_looked_up_again(
    server: Server, client: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        await get(client)
    server.refuse(400, "ExpiredToken")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second-key")
    with pytest.raises(BrokenError, match="looked up again"):
        await get(client)
    server.answer = None
    for _ in range(2):
        await get(client)
    assert server.made_by_the_sdk == [True, False, False, True, False]
    assert ["first-key" in headers["authorization"] for _, headers in server.asked] == [True] * 3 + [False] * 2

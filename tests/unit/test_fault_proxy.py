"""The fault proxy: transparent without rules, and each fault does what it says and nothing else."""

import asyncio
import hashlib
import io
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import aiohttp
import pytest
from aiohttp import web

from tests.fault_proxy import FaultProxy
from tests.fault_rules import (
    Answer,
    Break,
    Drip,
    Fault,
    FlipUpload,
    Hang,
    Request,
    Rule,
    Stage,
    conditional_conflict,
    every,
    expired_token,
    flipped,
    lose_answer,
    on,
    on_method,
    s3_error,
    shifted_range,
    slow_down,
    soak_rules,
    substituted,
    truncated,
)

MIB = 1024 * 1024
ROOT = Path(__file__).resolve().parents[2]


class Upstream:
    """Keeps what is put, and remembers what it was asked."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.hosts: list[str] = []
        self.peers: set[object] = set()
        self.sent_bytes = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:  # noqa: PLR0911 - one for each kind of answer
        self.asked.append(f"{request.method} {request.path}")
        self.hosts.append(request.headers["Host"])
        self.peers.add(request.transport.get_extra_info("peername") if request.transport else None)
        match request.method, request.path:
            case _, "/refuse-early":
                return web.Response(status=403, text="no")
            case _, "/chunked":
                return await self._chunked(request)
            case _, "/endless":
                return await self._endless(request)
            case "PUT" | "POST", path:
                self.objects[path] = await request.read()
                return web.Response(text=hashlib.sha256(self.objects[path]).hexdigest())
            case "DELETE", path:
                self.objects.pop(path, None)
                return web.Response(status=204)
        data = self.objects[request.path]
        if (asked := request.http_range).start is None:
            return web.Response(body=data)
        part = data[asked]
        head = {"Content-Range": f"bytes {asked.start}-{asked.start + len(part) - 1}/{len(data)}"}
        return web.Response(status=206, body=part, headers=head)

    async def _chunked(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        for i in range(100):
            await answer.write(bytes([i]) * (1 + i * 97))
        await answer.write_eof()
        return answer

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(bytes(MIB))
            self.sent_bytes += MIB


CHUNKED = b"".join(bytes([i]) * (1 + i * 97) for i in range(100))


class Bench(NamedTuple):
    """A server, a proxy in front of it, and a client."""

    upstream: Upstream
    proxy: FaultProxy
    http: aiohttp.ClientSession

    def url(self, path: str) -> str:
        return self.proxy.endpoint_url + path

    async def get(self, path: str, **headers: str) -> bytes:
        async with self.http.get(self.url(path), headers=headers) as answer:
            return await answer.read()

    async def put(self, path: str, data: bytes, **headers: str) -> int:
        async with self.http.put(self.url(path), data=io.BytesIO(data), headers=headers) as answer:
            await answer.read()
            return answer.status

    async def raw(self, request: bytes) -> tuple[bytes, bool]:
        """What comes back on a connection of its own, and whether it ended with a reset."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy.port)
        came = bytearray()
        try:
            writer.write(request)
            await writer.drain()
            while data := await reader.read(65536):
                came += data
        except ConnectionResetError:
            return bytes(came), True
        finally:
            writer.close()
        return bytes(came), False


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    upstream = Upstream()
    application = web.Application(client_max_size=256 * MIB)
    application.router.add_route("*", "/{path:.*}", upstream.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    # One connection, never sent again by the client itself: a fault is seen once.
    connector = aiohttp.TCPConnector(limit=1)
    async with FaultProxy(f"127.0.0.1:{port}") as proxy, aiohttp.ClientSession(connector=connector) as http:
        http._retry_connection = False
        yield Bench(upstream, proxy, http)
    await runner.cleanup()


def pattern(size_bytes: int) -> bytes:
    return Random(size_bytes).randbytes(size_bytes)


# --- transparent ---


async def test_without_rules_everything_passes_byte_for_byte(bench: Bench) -> None:
    data = pattern(20 * MIB)
    assert await bench.put("/b/key", data) == 200
    assert bench.upstream.objects["/b/key"] == data
    assert await bench.get("/b/key") == data
    assert await bench.get("/b/key", Range="bytes=5-1000004") == data[5:1_000_005]
    async with bench.http.head(bench.url("/b/key")) as answer:
        assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(data)))
    async with bench.http.delete(bench.url("/b/key")) as answer:
        assert answer.status == 204
    assert [(e.upstream_status, e.answered, e.fault) for e in bench.proxy.exchanges] == [
        (status, True, "") for status in (200, 200, 206, 200, 204)
    ]


async def test_chunked_bodies_pass_both_ways(bench: Bench) -> None:
    data = pattern(5 * MIB)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 100_001):
            yield data[start : start + 100_001]

    async with bench.http.put(bench.url("/b/key"), data=pieces()) as answer:
        assert answer.status == 200
    assert bench.upstream.objects["/b/key"] == data
    assert await bench.get("/chunked") == CHUNKED


async def test_connections_are_kept_on_both_sides(bench: Bench) -> None:
    for i in range(10):
        await bench.put(f"/b/{i}", b"data")
    assert {e.connection for e in bench.proxy.exchanges} == {1}
    assert len(bench.upstream.peers) == 1


async def test_the_host_header_stays_what_the_client_sent(bench: Bench) -> None:
    await bench.get("/b/key", Host="bucket.example:1234")
    assert bench.upstream.hosts == ["bucket.example:1234"]


async def test_a_client_that_waits_for_100_continue_gets_it_from_the_server(bench: Bench) -> None:
    async with bench.http.put(bench.url("/b/key"), data=io.BytesIO(pattern(MIB)), expect100=True) as answer:
        assert answer.status == 200
    assert bench.upstream.objects["/b/key"] == pattern(MIB)


async def test_an_answer_that_comes_before_the_body_was_read_is_passed_on(bench: Bench) -> None:
    assert await bench.put("/refuse-early", pattern(4 * MIB)) == 403


async def test_many_requests_at_once_do_not_mix(bench: Bench) -> None:
    async with aiohttp.ClientSession() as http:

        async def there_and_back(i: int) -> bool:
            data = pattern(10_000 + i)
            async with http.put(bench.url(f"/b/{i}"), data=data):
                pass
            async with http.get(bench.url(f"/b/{i}")) as answer:
                return await answer.read() == data

        assert all(await asyncio.gather(*(there_and_back(i) for i in range(60))))
    assert bench.proxy.in_flight_most > 5


async def test_a_client_that_does_not_read_stops_the_server(bench: Bench) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.proxy.port, limit=1024)
    writer.write(b"GET /endless HTTP/1.1\r\nHost: h\r\n\r\n")
    await reader.read(1)
    for _ in range(100):
        sent_bytes = bench.upstream.sent_bytes
        await asyncio.sleep(0.1)
        if sent_bytes == bench.upstream.sent_bytes:
            break
    # The rest is in the buffers of the system, on four ends of two connections.
    assert bench.upstream.sent_bytes < 40 * MIB
    writer.transport.abort()


async def test_a_server_that_is_not_there_is_a_broken_connection() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with FaultProxy(f"127.0.0.1:{taken.getsockname()[1]}") as proxy, aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientError):
                await http.get(proxy.endpoint_url)


# --- faults ---


async def test_a_lost_answer_leaves_the_object_with_the_server(bench: Bench) -> None:
    rule = bench.proxy.add(Rule(fault=lose_answer(), when=on("PutObject")))
    with pytest.raises(aiohttp.ClientError):
        await bench.put("/b/key", b"data")
    exchange = bench.proxy.exchanges[0]
    assert bench.upstream.objects["/b/key"] == b"data"
    assert (exchange.reached_upstream, exchange.upstream_status, exchange.answered) == (True, 200, False)
    assert (exchange.fault, rule.struck) == ("reset answer", 1)


@pytest.mark.parametrize(
    "fault, is_reset", [(lose_answer(), True), (lose_answer(polite=True), False)], ids=["reset", "polite"]
)
async def test_a_break_is_a_real_reset_or_a_real_fin(bench: Bench, fault: Fault, is_reset: bool) -> None:
    bench.proxy.add(Rule(fault=fault))
    assert await bench.raw(b"PUT /b/key HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\ndata") == (b"", is_reset)
    assert bench.upstream.objects["/b/key"] == b"data"


@pytest.mark.parametrize("polite", [False, True])
async def test_a_break_of_the_request_reaches_nobody(bench: Bench, polite: bool) -> None:
    bench.proxy.add(Rule(fault=Break(at=Stage.REQUEST, polite=polite)))
    request = b"PUT /b/key HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\ndata"
    assert await bench.raw(request) == (b"", not polite)
    assert bench.upstream.asked == []
    assert not bench.proxy.exchanges[0].reached_upstream


@pytest.mark.parametrize("after_bytes", [None, 0, 1, 700_000])
async def test_a_break_in_mid_upload_leaves_nothing_with_the_server(bench: Bench, after_bytes: int | None) -> None:
    bench.proxy.add(Rule(fault=Break(at=Stage.UPLOAD, after_bytes=after_bytes)))
    with pytest.raises(aiohttp.ClientError):
        await bench.put("/b/key", pattern(MIB))
    assert bench.upstream.objects == {}
    assert not bench.proxy.exchanges[0].reached_upstream


@pytest.mark.parametrize("polite", [False, True])
@pytest.mark.parametrize("path", ["/b/key", "/chunked"])
async def test_a_break_in_mid_body_gives_the_first_part(bench: Bench, path: str, polite: bool) -> None:
    data = bench.upstream.objects["/b/key"] = pattern(100_000) if path == "/b/key" else CHUNKED
    bench.proxy.add(Rule(fault=Break(at=Stage.BODY, after_bytes=50_000, polite=polite)))
    came, is_reset = await bench.raw(f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    head, _, body = came.partition(b"\r\n\r\n")
    assert is_reset is not polite
    if path == "/b/key":
        assert b"Content-Length: 100000" in head
        assert body == data[:50_000]
    assert not bench.proxy.exchanges[0].answered


async def test_a_client_notices_a_body_that_ends_before_its_content_length(bench: Bench) -> None:
    bench.upstream.objects["/b/key"] = pattern(100_000)
    bench.proxy.add(Rule(fault=Break(at=Stage.BODY, polite=True)))
    with pytest.raises(aiohttp.ClientPayloadError):
        await bench.get("/b/key")


async def test_a_truncated_body_looks_whole(bench: Bench) -> None:
    bench.upstream.objects["/b/key"] = pattern(100_000)
    bench.proxy.add(Rule(fault=truncated(99_999)))
    assert await bench.get("/b/key") == pattern(100_000)[:99_999]
    assert await bench.get("/b/key") == pattern(100_000)


async def test_one_bit_of_an_answer_is_flipped(bench: Bench) -> None:
    bench.upstream.objects["/b/key"] = b"abcd"
    bench.proxy.add(Rule(fault=flipped(2)))
    assert await bench.get("/b/key") == b"abbd"


async def test_one_bit_of_a_chunked_answer_is_flipped(bench: Bench) -> None:
    bench.proxy.add(Rule(fault=flipped(1000)))
    came = await bench.get("/chunked")
    assert [i for i in range(len(CHUNKED)) if came[i] != CHUNKED[i]] == [1000]


@pytest.mark.parametrize("at_byte", [0, 65_535, 65_536, MIB - 1])
async def test_one_bit_of_an_upload_is_flipped(bench: Bench, at_byte: int) -> None:
    data = pattern(MIB)
    bench.proxy.add(Rule(fault=FlipUpload(at_byte=at_byte)))
    await bench.put("/b/key", data)
    stored = bench.upstream.objects["/b/key"]
    assert len(stored) == MIB
    assert [i for i in range(MIB) if stored[i] != data[i]] == [at_byte]


async def test_slow_down_names_itself_and_says_when_to_return(bench: Bench) -> None:
    bench.proxy.add(Rule(fault=slow_down(retry_after_s=7), times=2))
    for _ in range(2):
        async with bench.http.put(bench.url("/b/key"), data=io.BytesIO(pattern(MIB))) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "7")
            assert "<Code>SlowDown</Code>" in await answer.text()
    assert await bench.put("/b/key", b"data") == 200
    assert bench.upstream.asked == ["PUT /b/key"]
    assert {e.connection for e in bench.proxy.exchanges} == {1}


async def test_a_client_that_waits_for_100_continue_gets_the_refusal_in_its_place(bench: Bench) -> None:
    bench.proxy.add(Rule(fault=slow_down()))
    async with bench.http.put(bench.url("/b/key"), data=io.BytesIO(pattern(MIB)), expect100=True) as answer:
        assert answer.status == 503
    assert bench.upstream.asked == []


@pytest.mark.parametrize("after_upstream", [False, True])
async def test_an_error_can_come_in_a_200_and_after_the_work_was_done(bench: Bench, after_upstream: bool) -> None:
    bench.proxy.add(Rule(fault=s3_error(200, "InternalError", after_upstream=after_upstream)))
    async with bench.http.put(bench.url("/b/key"), data=b"data") as answer:
        assert (answer.status, "<Code>InternalError</Code>" in await answer.text()) == (200, True)
    assert bench.upstream.objects == ({"/b/key": b"data"} if after_upstream else {})


@pytest.mark.parametrize(
    "fault, status, code",
    [(conditional_conflict(), 409, "ConditionalRequestConflict"), (expired_token(), 400, "ExpiredToken")],
    ids=["409", "expired"],
)
async def test_conflicts_and_expired_credentials_are_reported_as_s3_does(
    bench: Bench, fault: Fault, status: int, code: str
) -> None:
    bench.proxy.add(Rule(fault=fault))
    async with bench.http.get(bench.url("/b/key")) as answer:
        assert (answer.status, code in await answer.text()) == (status, True)


async def test_a_wrong_range_says_so_itself_or_does_not(bench: Bench) -> None:
    bench.upstream.objects["/b/key"] = b"0123456789"
    bench.proxy.add(Rule(fault=shifted_range(2)))
    bench.proxy.add(Rule(fault=substituted(b"4567")))
    headers = {"Range": "bytes=2-5"}
    async with bench.http.get(bench.url("/b/key"), headers=headers) as answer:
        assert (answer.headers["Content-Range"], await answer.read()) == ("bytes 4-7/10", b"2345")
    async with bench.http.get(bench.url("/b/key"), headers=headers) as answer:
        assert (answer.headers["Content-Range"], await answer.read()) == ("bytes 2-5/10", b"4567")


@pytest.mark.parametrize("at", [Stage.REQUEST, Stage.ANSWER, Stage.BODY])
async def test_a_hang_says_nothing_until_the_client_gives_up(bench: Bench, at: Stage) -> None:
    bench.upstream.objects["/b/key"] = pattern(100_000)
    bench.proxy.add(Rule(fault=Hang(at=at)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await bench.get("/b/key")
    assert await bench.get("/b/key") == pattern(100_000)
    assert len(bench.upstream.asked) == (1 if at is Stage.REQUEST else 2)


@pytest.mark.parametrize("at", [Stage.REQUEST, Stage.ANSWER, Stage.BODY])
async def test_a_hang_of_some_time_ends(bench: Bench, at: Stage) -> None:
    bench.upstream.objects["/b/key"] = pattern(100_000)
    bench.proxy.add(Rule(fault=Hang(at=at, seconds=0.2)))
    began_s = asyncio.get_running_loop().time()
    assert await bench.get("/b/key") == pattern(100_000)
    assert asyncio.get_running_loop().time() - began_s > 0.19


async def test_a_hang_ends_when_what_it_waits_for_has_happened(bench: Bench) -> None:
    bench.upstream.objects["/b/key"] = b"data"
    happened = asyncio.Event()
    bench.proxy.add(Rule(fault=Hang(at=Stage.REQUEST, until=happened)))
    hanging = asyncio.ensure_future(bench.get("/b/key"))
    await asyncio.sleep(0.1)
    assert not hanging.done()
    happened.set()
    assert await hanging == b"data"


async def test_a_drip_has_its_rate(bench: Bench) -> None:
    bench.upstream.objects["/b/key"] = pattern(10_000)
    bench.proxy.add(Rule(fault=Drip(bytes_per_s=20_000)))
    began_s = asyncio.get_running_loop().time()
    assert await bench.get("/b/key") == pattern(10_000)
    assert 0.4 < asyncio.get_running_loop().time() - began_s < 3


async def test_a_proxy_that_closes_ends_what_hangs(bench: Bench) -> None:
    async with FaultProxy(f"127.0.0.1:{bench.proxy.port}") as second, aiohttp.ClientSession() as http:
        second.add(Rule(fault=Hang(at=Stage.REQUEST)))
        hanging = asyncio.ensure_future(http.get(second.endpoint_url))
        await asyncio.sleep(0.1)
        await second.__aexit__(None, None, None)
        with pytest.raises(aiohttp.ClientError):
            await hanging


# --- rules ---


@pytest.mark.parametrize(
    "method, target, operation",
    [
        ("PUT", "/b/k/ey", "PutObject"),
        ("PUT", "/b/key?partNumber=1&uploadId=x", "UploadPart"),
        ("PUT", "/b/key?tagging", "PutObjectTagging"),
        ("GET", "/b/key", "GetObject"),
        ("GET", "/b/key?tagging", "GetObjectTagging"),
        ("HEAD", "/b/key", "HeadObject"),
        ("POST", "/b/key?uploads", "CreateMultipartUpload"),
        ("POST", "/b/key?uploadId=x", "CompleteMultipartUpload"),
        ("DELETE", "/b/key?uploadId=x", "AbortMultipartUpload"),
        ("DELETE", "/b/key", "DeleteObject"),
        ("POST", "/b?delete", "DeleteObjects"),
        ("GET", "/b?list-type=2&prefix=a%2Fb", "ListObjectsV2"),
        ("GET", "/b/?uploads", "ListMultipartUploads"),
        ("PUT", "/b?lifecycle", "PutBucketLifecycleConfiguration"),
        ("HEAD", "/b", "HeadBucket"),
        ("PATCH", "/b/key", ""),
    ],
)
def test_requests_are_known_by_the_name_that_s3_gives_them(method: str, target: str, operation: str) -> None:
    assert Request(method=method, target=target).operation == operation


def test_a_rule_matches_by_operation_method_and_part_of_the_target() -> None:
    request = Request(method="PUT", target="/b/log/job%3D1/7")
    assert on("PutObject", key="log/job=1")(request)
    assert on(key="log/")(request)
    assert on_method("PUT", "POST", containing="/7")(request)
    assert every(request)
    assert not on("GetObject")(request)
    assert not on("PutObject", key="blobs/")(request)
    assert not on_method("GET")(request)


async def test_rules_strike_in_their_order_as_often_as_they_say(bench: Bench) -> None:
    bench.proxy.add(Rule(fault=s3_error(500, "InternalError"), after=1, times=2))
    bench.proxy.add(Rule(fault=conditional_conflict(), times=2))
    statuses = [await bench.put("/b/key", b"") for _ in range(5)]
    assert statuses == [409, 500, 500, 409, 200]
    bench.proxy.clear()
    assert bench.proxy.exchanges == ()


def test_random_numbers_are_repeated_by_their_seed() -> None:
    request = Request(method="GET", target="/b/key")

    def history(seed: int) -> list[bool]:
        rule = Rule(fault=lose_answer(), times=None, probability=0.3)
        rng = Random(seed)
        return [rule.strikes(request, rng) for _ in range(1000)]

    assert history(1) == history(1) != history(2)
    assert 250 < sum(history(1)) < 350


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD", "DELETE"])
def test_the_rules_of_a_soak_strike_the_share_that_was_asked_for(method: str) -> None:
    rules, rng = soak_rules(0.05, 0.10), Random(4)
    request = Request(method=method, target="/b/key")
    struck = [next((i for i, r in enumerate(rules) if r.strikes(request, rng)), None) for _ in range(20_000)]
    assert 0.045 < struck.count(0) / 20_000 < 0.055
    assert 0.09 < sum(i not in {0, None} for i in struck) / 20_000 < 0.11


def test_headers_are_changed_whatever_their_case() -> None:
    answer = Answer(status=200, headers=(("ETag", "a"), ("Content-Length", "1")))
    assert answer.with_headers(etag="b", content_length=None).headers == (("etag", "b"),)


# --- as a process ---


async def test_as_a_process_it_prints_its_port_and_then_what_it_did(bench: Bench) -> None:
    command = (
        "-m",
        "tests.fault_proxy",
        f"127.0.0.1:{bench.proxy.port}",
        "--seed",
        "3",
        "--lose",
        "0.2",
        "--reset",
        "0.2",
    )
    process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        failed = 0
        for i in range(200):
            try:
                async with bench.http.put(f"http://127.0.0.1:{port}/b/{i}", data=b"data") as answer:
                    await answer.read()
            except aiohttp.ClientError:
                failed += 1
        assert 40 < failed < 130
        process.send_signal(signal.SIGTERM)
        counts = json.loads(await process.stdout.read())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert counts["reset answer"] > 10
    assert counts["reset request"] + counts["reset upload"] > 10
    assert sum(counts.values()) == 200
    # What was lost had been carried out; what was reset had not.
    assert len(bench.upstream.objects) == counts["reset answer"] + counts["passed on"]
    assert all(re.fullmatch(r"/b/\d+", path) for path in bench.upstream.objects)

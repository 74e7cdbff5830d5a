"""A thousand commits on a real S3 server, through a proxy that loses answers and breaks connections.

Some of them beside a collector that never stops, some right after the writer was killed. Then: every acknowledged
version that retention keeps restores byte for byte, nobody got a conflict that was none, and after a
collection nothing is left that has no reason to be there.
"""

import asyncio
import itertools
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from subprocess import PIPE, Popen

import pytest

from blobstore.base import list_blobs
from blobstore.opening import open_store
from engine.repository.repository import Repository
from index.plan.commits import Retention
from tests.integration.soak_worker import JOB, STORE, TRANSFER, files_of
from tests.servers.s3_server import S3Server
from tests.walker import expected_keys

ROOT = Path(__file__).resolve().parents[2]
KEEP_LAST = 60


class Scale:
    """How much of everything: the soak's, and a short one."""

    def __init__(self, *, alone: int, killed: int, collected: int, ttl_ms: int) -> None:
        self.alone, self.killed, self.collected, self.ttl_ms = alone, killed, collected, ttl_ms


@contextmanager
def run_worker(*words: str, log: Path) -> Iterator[Popen[str]]:
    command = [sys.executable, "-m", *words]
    with (
        log.open("a") as errors,
        Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=errors, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def run_proxy(server: S3Server, log: Path, *, seed: int) -> Iterator[str]:
    upstream = server.endpoint_url.removeprefix("http://")
    words = ("tests.fault_proxy", upstream, "--seed", str(seed), "--lose", "0.05", "--reset", "0.05")
    with run_worker(*words, log=log) as proxy:
        assert proxy.stdout is not None
        yield f"http://127.0.0.1:{int(proxy.stdout.readline())}"
        proxy.send_signal(signal.SIGTERM)
        log.write_text(f"{log.read_text()}\nproxy: {proxy.stdout.read()}")


def read_acknowledged(line: str) -> tuple[int, int]:
    number, version = map(int, line.split())
    return number, version


def write_commits(url: str, directory: Path, count: int, acknowledged: list[tuple[int, int]]) -> None:
    """Let a writer commit, and note what it was shown."""
    log = directory / "writer.log"
    with run_worker("tests.integration.soak_worker", "write", url, str(directory), str(count), log=log) as writer:
        assert writer.stdout is not None
        acknowledged.extend(map(read_acknowledged, writer.stdout))
    assert writer.returncode == 0, log.read_text()[-3000:]


def write_and_kill(url: str, directory: Path, kills: int, acknowledged: list[tuple[int, int]], rng: Random) -> None:
    """Kill a writer at any moment after its first commit, so often; each life begins with a commit after a kill."""
    log = directory / "writer.log"
    for _ in range(kills):
        words = ("tests.integration.soak_worker", "write", url, str(directory), "1000")
        with run_worker(*words, log=log) as writer:
            assert writer.stdout is not None
            line = writer.stdout.readline()
            assert line, log.read_text()[-3000:]
            acknowledged.append(read_acknowledged(line))
            time.sleep(rng.random() * 0.3)
            writer.kill()
            # What it had printed was acknowledged, whether or not anybody had read it.
            acknowledged.extend(read_acknowledged(line) for line in writer.stdout if line.endswith("\n"))


def read_tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def restore_and_compare(url: str, versions: list[int], directory: Path) -> None:
    """Every version has exactly the bytes that follow from its number."""
    repository = await Repository.open(open_store(url, STORE), settings=TRANSFER)
    # Found at once: to find one by its version reads every record.
    commits = {commit.record.version: commit for commit in await repository.commits(JOB)}
    slots = asyncio.Semaphore(4)

    async def check(version: int) -> None:
        target = directory / f"v{version}"
        async with slots:
            await repository.restore(commits[version], target)
        assert await asyncio.to_thread(read_tree, target) == files_of(version), version
        await asyncio.to_thread(shutil.rmtree, target)

    async with asyncio.TaskGroup() as group:
        for version in versions:
            group.create_task(check(version))
    await repository.close()


@pytest.mark.s3
@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(
            Scale(alone=8, killed=3, collected=6, ttl_ms=21_000),
            id="short",
            marks=[pytest.mark.soak, pytest.mark.timeout(240)],
        ),
        pytest.param(
            Scale(alone=740, killed=60, collected=240, ttl_ms=120_000),
            id="thousand",
            marks=[pytest.mark.soak, pytest.mark.timeout(3600)],
        ),
    ],
)
def test_commits_through_a_bad_network_beside_a_collector_and_after_kills(
    s3_server: S3Server, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: Scale
) -> None:
    acknowledged: list[tuple[int, int]] = []
    rng = Random(7)
    clean_url = s3_server.endpoint_url
    url = f"s3://{s3_bucket}/soak"
    writer_dir = tmp_path / "writer"
    writer_dir.mkdir()
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)

    async def init() -> None:
        made = await Repository.init(
            open_store(url, STORE), ttl_ms=scale.ttl_ms, margin_ms=scale.ttl_ms // 3, collection_period_ms=scale.ttl_ms
        )
        await made.close()

    asyncio.run(init())
    with run_proxy(s3_server, tmp_path / "proxy.log", seed=7) as bad_url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", bad_url)
        write_commits(url, writer_dir, scale.alone, acknowledged)
        write_and_kill(url, writer_dir, scale.killed, acknowledged, rng)
        before = len(acknowledged)
        assert before >= scale.alone + scale.killed
        # All of them, before anything may be collected; through the same network.
        asyncio.run(restore_and_compare(url, [version for _, version in acknowledged], tmp_path))
        words = ("tests.integration.soak_worker", "collect", url, str(KEEP_LAST))
        with run_worker(*words, log=tmp_path / "collector.log") as collector:
            write_commits(url, writer_dir, scale.collected, acknowledged)
            assert collector.poll() is None, (tmp_path / "collector.log").read_text()[-3000:]
            assert collector.stdout is not None
            # On a slow machine a few commits are made before the first collection has come to its end.
            first = collector.stdout.readline()
            collector.terminate()
            assert first
    assert len(acknowledged) == before + scale.collected
    # No number and no version was acknowledged twice, and none was skipped by a conflict with itself.
    numbers, versions = zip(*acknowledged, strict=True)
    assert list(numbers) == sorted(set(numbers))
    assert all(later > earlier for earlier, later in itertools.pairwise(versions))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", clean_url)
    asyncio.run(restore_and_compare(url, list(versions[-min(KEEP_LAST, len(versions)) :]), tmp_path))
    asyncio.run(assert_no_leak(url, scale.ttl_ms))


async def assert_no_leak(url: str, ttl_ms: int) -> None:
    """Past the TTL of every upload, two collections leave exactly what has a reason to be there."""
    store = open_store(url, STORE)
    repository = await Repository.open(store)
    now_ms = await store.now_ms()
    youngest_ms = max([blob.created_at_ms async for blob in list_blobs(store, "")], default=now_ms)
    await asyncio.sleep(max(0, youngest_ms + ttl_ms - now_ms) / 1000 + 1)
    for _ in range(2):
        report = await repository.collect(Retention(keep_last=KEEP_LAST), delete_share_max=1)
        assert not report.failed
    assert {blob.key async for blob in list_blobs(store, "")} == await expected_keys(store, await store.now_ms())
    assert await store.list_unfinished("") == ()
    await repository.close()

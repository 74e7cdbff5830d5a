"""A repository in S3 that was copied key by key, with and without tags, and versions that were put back."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UnsafeStoreError
from engine.inspect.verify import Level
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.keys import commit_key
from index.snapshot.model import Scope
from tests.servers.moto_server import MotoServer
from tests.servers.s3_server import S3Server

pytestmark = pytest.mark.s3
JOB = Scope("job")


async def fill(url: str, state: Path) -> list[str]:
    """Three commits whose leases are over when they are copied; returns their keys."""
    async with await Repository.init(url, ttl_ms=16_000, margin_ms=7_000) as repository:
        for text in ("one", "two", "three"):
            (state / "x.sst").write_bytes(text.encode() * 50_000)
            await repository.commit(JOB, [await repository.backup(JOB, state)])
    return [commit_key(JOB, number) for number in (1, 2, 3)]


def copy_all(client: Any, bucket: str, target: str, **how: str) -> None:
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket, Prefix="old/")["Contents"]]
    for key in sorted(keys, key=lambda key: key == "old/repository"):
        new = key.replace("old/", "new/", 1)
        client.copy_object(Bucket=target, Key=new, CopySource={"Bucket": bucket, "Key": key}, **how)


async def check(url: str, target: Path) -> None:
    async with await Repository.open(url) as repository:
        assert [c.pointer.number for c in await repository.commits(JOB)] == [3, 2, 1]
        report = await repository.verify(level=Level.CONTENT)
        assert (report.commits_count, report.damaged, report.late) == (3, False, ())
        kept = (await repository.collect(Retention(keep_last=10), delete_share_max=1)).kept
        assert [c.number for c in kept] == [1, 2, 3]
        await repository.find_and_restore(JOB, target)
        assert (target / "x.sst").read_bytes() == b"three" * 50_000


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """An empty directory."""
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def versioned(moto_server: MotoServer, new_bucket: Callable[[S3Server], str]) -> str:
    """A bucket that keeps versions."""
    bucket = new_bucket(moto_server)
    moto_server.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    return bucket


async def test_copies_and_versions_keep_every_commit(
    moto_server: MotoServer, versioned: str, state: Path, tmp_path: Path
) -> None:
    client, other = moto_server.client, f"{versioned}-other"
    client.create_bucket(Bucket=other)
    keys = await fill(f"s3://{versioned}/old", state)
    await asyncio.sleep(17)
    copy_all(client, versioned, other)
    await check(f"s3://{other}/new", tmp_path / "with tags")
    copy_all(client, versioned, versioned, TaggingDirective="REPLACE")
    await check(f"s3://{versioned}/new", tmp_path / "without tags")
    # An older record, the newest one and an index, each brought back by its version.
    async with await Repository.open(f"s3://{versioned}/old") as repository:
        index = (await repository.commits(JOB))[0].record.stores[0].index.key
    for number, key in enumerate((keys[0], keys[2], index)):
        name = f"old/{key}"
        version = client.head_object(Bucket=versioned, Key=name)["VersionId"]
        client.put_object(Bucket=versioned, Key=name, Body=b"overwritten")
        source = {"Bucket": versioned, "Key": name, "VersionId": version}
        client.copy_object(Bucket=versioned, Key=name, CopySource=source)
        await check(f"s3://{versioned}/old", tmp_path / f"put back {number}")


async def test_no_repository_begins_within_another_one_in_a_bucket(versioned: str) -> None:
    async with await Repository.init(f"s3://{versioned}/team/state"):
        for prefix in ("team/state/pins", "team/state/log/job"):
            with pytest.raises(UnsafeStoreError, match="lies within"):
                await Repository.init(f"s3://{versioned}/{prefix}")
        async with await Repository.init(f"s3://{versioned}/team/other"):
            pass

"""The backstop of design 0003, L4, carried out by a real store whose day is a few seconds long."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.base import list_blobs
from blobstore.opening import open_s3
from blobstore.s3.bucket_rules import backstop_rules, plan_lifecycle
from blobstore.s3.store import S3Store
from engine.inspect.verify import Level
from engine.repository.repository import Repository
from index.snapshot.model import Scope
from tests.conftest import ceph_or_skip
from tests.servers.ceph_rgw import CephRgw
from tests.servers.s3_server import S3Server
from tests.unit.engine.conftest import text_tree
from tests.unit.engine.workbench import read_tree

pytestmark = pytest.mark.s3

DAY_S = 5
PREFIX = "team-a/state"
SCOPE = Scope("job")
OTHERS_RULE = {"ID": "others", "Status": "Enabled", "Filter": {"Prefix": "scratch/"}, "Expiration": {"Days": 1000}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, no_account_of_this_machine: None) -> Iterator[CephRgw]:
    ceph_or_skip()
    with CephRgw(tmp_path_factory.mktemp("ceph"), lc_debug_interval_s=DAY_S) as server:
        yield server


@pytest.fixture
def bucket(server: CephRgw, new_bucket: Callable[[S3Server], str]) -> str:
    return new_bucket(server)


@pytest.fixture
async def store(bucket: str) -> AsyncIterator[S3Store]:
    """For a look behind the repository, and for its rules."""
    store = open_s3(f"s3://{bucket}/{PREFIX}")
    yield store
    await store.close()


@pytest.fixture
async def repository(bucket: str) -> AsyncIterator[Repository]:
    async with await Repository.init(f"s3://{bucket}/{PREFIX}") as repository:
        yield repository


async def install_backstop(store: S3Store) -> None:
    """As `tidemark lifecycle --install` does it, but with one of the short days instead of seven."""
    plan = plan_lifecycle(await store.read_lifecycle(), backstop_rules(PREFIX, days=1), prefix=PREFIX)
    assert len(plan.added) == 2
    await store.write_lifecycle((*plan.others, *plan.added))


def write_tree(directory: Path, text: str) -> Path:
    for name, data in text_tree(text).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


async def keys_of(store: S3Store) -> set[str]:
    return {blob.key async for blob in list_blobs(store, "")}


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(20 * DAY_S * 4):
        if await condition():
            return
        await asyncio.sleep(0.25)
    pytest.fail("the store does not carry the rules out")


def tags_of(server: S3Server, bucket: str, keys: set[str]) -> dict[str, str]:
    """Of the blobs that are tagged at all: the only tag that they have."""
    tagged: dict[str, str] = {}
    for key in keys:
        tags = server.client.get_object_tagging(Bucket=bucket, Key=f"{PREFIX}/{key}")["TagSet"]
        if tags:
            assert [tag["Key"] for tag in tags] == ["tidemark"]
            tagged[key] = tags[0]["Value"]
    return tagged


async def test_the_store_deletes_what_was_abandoned_and_keeps_what_was_committed(
    server: CephRgw, bucket: str, store: S3Store, repository: Repository, tmp_path: Path
) -> None:
    first = await repository.backup(SCOPE, write_tree(tmp_path / "first", "one"))
    commit = await repository.commit(SCOPE, [first])
    committed = await keys_of(store)
    assert set(tags_of(server, bucket, committed).values()) == {"kept"}

    abandoned: set[str] = set((await repository.backup(SCOPE, write_tree(tmp_path / "second", "two"))).new_keys)
    assert await keys_of(store) == committed | abandoned
    assert tags_of(server, bucket, abandoned) == dict.fromkeys(abandoned, "expiring")
    assert abandoned
    upload = await store.begin_upload("blobs/begun")
    # The time that a list shows is the server's own, that of the answer may be of the next second.
    assert [put.upload_id for put in await store.list_unfinished("")] == [upload.upload_id]
    beside = begin_upload(server, bucket, "beside/blob")
    server.client.put_object(Bucket=bucket, Key="beside/expiring", Body=b"another's", Tagging="tidemark=expiring")

    await store.write_lifecycle([OTHERS_RULE])
    await install_backstop(store)

    async def abandoned_is_gone() -> bool:
        return not await keys_of(store) & abandoned and not await store.list_unfinished("")

    await wait_until(abandoned_is_gone)
    # What is begun now falls to a later round: all that was there has then been looked at once more.
    later: set[str] = set((await repository.backup(SCOPE, write_tree(tmp_path / "third", "three"))).new_keys)
    assert later

    async def later_is_gone() -> bool:
        return not await keys_of(store) & later

    await wait_until(later_is_gone)

    assert await keys_of(store) == committed
    assert not (await repository.verify(level=Level.CONTENT)).damaged
    await repository.restore(commit, tmp_path / "target")
    assert read_tree(tmp_path / "target") == text_tree("one")
    # Nor does the rule reach what is beside the repository.
    assert server.client.get_object(Bucket=bucket, Key="beside/expiring")["Body"].read() == b"another's"
    left = server.client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["UploadId"] for upload in left] == [beside]
    rules = await store.read_lifecycle()
    assert [rule for rule in rules if rule["ID"] == "others"] == [OTHERS_RULE]


def begin_upload(server: S3Server, bucket: str, name: str) -> Any:
    return server.client.create_multipart_upload(Bucket=bucket, Key=name)["UploadId"]

"""What was deleted by mistake comes back while the store keeps it: Samza's `getDeleted`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.base import list_blobs
from blobstore.errors import CapabilityMissingError
from blobstore.memory import MemoryStore
from blobstore.opening import StoreSettings, open_store
from blobstore.wrappers.forwarding import UndeletingStore
from engine.errors import DamagedError
from engine.repository.repository import Repository
from engine.restore.restore import RestoreOptions
from index.snapshot.model import Scope
from tests.integration.conftest import FIRST, SECOND, Shell, content
from tests.opaque_store import OpaqueStore
from tests.servers.moto_server import MotoServer

JOB = Scope("flights")
DELETED = RestoreOptions(deleted=True)


async def delete_uploads(repository: Repository) -> None:
    """As a lifecycle rule of somebody does, or a hand that slipped."""
    for prefix in ("blobs/", "indexes/"):
        await repository.store.delete([blob.key async for blob in list_blobs(repository.store, prefix)])


async def test_a_directory_that_keeps_deleted_blobs_gives_them_back(shell: Shell, tmp_path: Path) -> None:
    source = shell.tree("source", FIRST)
    settings = StoreSettings(deleted_retention_ms=3_600_000)
    async with await Repository.init(open_store(str(tmp_path / "repository"), settings)) as repository:
        commit = await repository.commit(JOB, [await repository.backup(JOB, source)])
        await delete_uploads(repository)
        with pytest.raises(DamagedError):
            await repository.restore(commit, tmp_path / "there")
        plan = await repository.plan_restore(commit.record.stores[0], tmp_path / "there", DELETED)
        assert plan.files_count == len(FIRST)
        await repository.restore(commit, tmp_path / "there", options=DELETED)
        assert content(tmp_path / "there") == FIRST
    # Everything that reads can be given such a store.
    async with await Repository.open(UndeletingStore(open_store(str(tmp_path / "repository"), settings))) as repository:
        await repository.find_and_restore(JOB, tmp_path / "again")
    assert content(tmp_path / "again") == FIRST


async def test_a_store_that_keeps_nothing_is_no_place_for_deleted_blobs(shell: Shell, tmp_path: Path) -> None:
    async with await Repository.init(OpaqueStore()) as repository:
        assert isinstance(repository.store, MemoryStore)
        commit = await repository.commit(JOB, [await repository.backup(JOB, shell.tree("source", FIRST))])
        with pytest.raises(CapabilityMissingError) as caught:
            await repository.restore(commit, tmp_path / "there", options=DELETED)
    assert "S3Settings(serve_deleted=True)" in caught.value.hint
    assert not (tmp_path / "there").exists()


@pytest.mark.s3
def test_of_several_stores_deleted_blobs_of_the_newest_commit_are_taken_before_an_older_commit(
    shell: Shell, moto_server: MotoServer, new_bucket: Callable[[MotoServer], str]
) -> None:
    bucket = new_bucket(moto_server)
    shell.environment["TIDEMARK_REPOSITORY"] = f"s3://{bucket}"
    client = moto_server.client
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    shell.run("init")
    for files in (FIRST, SECOND):
        shell.run("backup", str(shell.tree("source", files)))
    for each in client.list_objects_v2(Bucket=bucket, Prefix="indexes/")["Contents"]:
        client.delete_object(Bucket=bucket, Key=each["Key"])
    either = ("--all", "--deleted", "--or-newest-complete")
    result = shell.run("restore", "there", *either)
    assert content(shell.directory / "there/0/default") == SECOND
    assert "not the commit that was chosen" not in result.stderr
    # A dry run cannot see it.
    assert shell.refused("restore", "there", *either, "--dry-run", code=2)["error"] == "UsageError"


@pytest.mark.s3
def test_the_command_line_restores_deleted_objects_of_a_bucket_with_versions(
    shell: Shell, moto_server: MotoServer, new_bucket: Callable[[MotoServer], str]
) -> None:
    bucket = new_bucket(moto_server)
    shell.environment["TIDEMARK_REPOSITORY"] = f"s3://{bucket}/below"
    client = moto_server.client
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    shell.run("init")
    shell.run("backup", str(shell.tree("source", FIRST)))
    for each in client.list_objects_v2(Bucket=bucket)["Contents"]:
        if each["Key"].startswith(("below/blobs/", "below/indexes/")):
            client.delete_object(Bucket=bucket, Key=each["Key"])
    assert shell.refused("restore", "there", code=4)["error"] == "IncompleteError"
    shell.run("restore", "there", "--deleted")
    assert content(shell.directory / "there") == FIRST
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Suspended"})
    refused = shell.refused("restore", "elsewhere", "--deleted", code=9)
    assert refused["error"] == "CapabilityMissingError"

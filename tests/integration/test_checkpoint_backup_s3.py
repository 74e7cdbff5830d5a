"""Backups of a checkpoint on a real S3 server, in a repository on the same (design 0005, P6 and section 7)."""

import asyncio
from pathlib import Path

import pytest

from blobstore.opening import open_store
from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.repository.repository import Repository
from tests.servers.s3_server import S3Server
from tests.unit.engine.checkpoint.live_query import LiveQuery, check_rows, names_below, restore_backup

pytestmark = pytest.mark.s3


@pytest.mark.parametrize("format_version", [1, 2], ids=["V1", "V2"])
async def test_a_query_on_s3_is_backed_up_while_it_goes_on(s3_bucket: str, tmp_path: Path, format_version: int) -> None:
    url = f"s3://{s3_bucket}/checkpoints/query"
    files = open_store(url)
    query = LiveQuery(tmp_path / "query", files, format_version=format_version)
    try:
        async with await Repository.init(f"s3://{s3_bucket}/backups", margin_ms=3_600_000) as repository:
            await query.run(4)
            # As Spark calls it.
            first = await backup_checkpoint(repository, url.replace("s3:", "s3a:", 1), BackupChoice(scratch=tmp_path))
            assert (first.backup.batch, first.is_new) == (3, True)
            assert not (await backup_checkpoint(repository, url)).is_new
            running = asyncio.create_task(query.run(8))
            backups = [first]
            while not running.done():
                backups.append(await backup_checkpoint(repository, url))
            await running
            backups.append(await backup_checkpoint(repository, url))
            assert len({backup.backup.batch for backup in backups}) > 2
            assert backups[-1].backup.batch == 11
            for number, done in enumerate(backups[:1] + backups[-3:]):
                target = await restore_backup(repository, done.commit, tmp_path / f"restored-{number}")
                await check_rows(target, tmp_path / str(number), batch=done.backup.batch)
        assert not [name for name in names_below(tmp_path) if name.startswith("tidemark-")]
    finally:
        await query.close()
        await files.close()


async def test_what_it_costs(s3_bucket: str, s3_server: S3Server, tmp_path: Path) -> None:
    url = f"s3://{s3_bucket}/checkpoints/query"
    files = open_store(url)
    query = LiveQuery(tmp_path / "query", files, partitions=1)
    try:
        async with await Repository.init(f"s3://{s3_bucket}/backups", margin_ms=3_600_000) as repository:
            await query.run(4)
            # As Hadoop marks directories, and leaves what it could not rename.
            for hadoop in ("", "commits/", "commits/.3.0f1d.tmp", "state/0/0/", "state/0/0/.4.zip.0f1d.tmp"):
                bucket, _, root = s3_bucket.partition("/")
                key = "/".join(filter(None, (root, "checkpoints/query", hadoop))) + ("" if hadoop else "/")
                s3_server.client.put_object(Bucket=bucket, Key=key, Body=b"")
            await backup_checkpoint(repository, url)
            await query.run()
            done = await backup_checkpoint(repository, url)
    finally:
        await query.close()
        await files.close()
    # Of the store a list, the zip, its checksum, the schema, and the new changelog with its checksum.
    assert (done.state.files_added, done.state.source_requests) == (2, 6)
    # Of the query the offsets and the commit of each of five batches, once, and 24 that do not depend on its logs.
    assert done.query.source_requests <= 2 * 5 + 24
    assert done.state.requests <= 3
    assert done.query.requests <= 3

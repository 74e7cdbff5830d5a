"""State on a real S3 server: a checkpoint there, and a backup in a repository there."""

import asyncio
import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.repository.repository import Repository, SyncRepository
from engine.state.checkpoint_dir import CheckpointDir
from tests.servers.s3_server import S3Server
from tests.spark.s3_storage import workers_sign_as
from tests.spark.sources.reading import by_us, ran, reading_session, rows_of
from tests.spark.state.queries import AGGREGATION, FORMAT

pytestmark = [pytest.mark.spark, pytest.mark.s3, pytest.mark.soak]


async def copy_checkpoint(files: dict[str, Path], url: str) -> None:
    """What a query writes that has its checkpoint on S3."""
    directory = await CheckpointDir.open(url)
    for path, file in files.items():
        await directory.publish(path, file, overwrite=False)
    await directory.close()


def test_state_on_s3_is_read_as_on_a_disk(
    spark: SparkSession, tmp_path: Path, s3_server: S3Server, s3_bucket: str
) -> None:
    made = ran(spark, AGGREGATION, tmp_path / "query", {FORMAT: "2"}, batches=4)
    checkpoint, repository_url = f"s3://{s3_bucket}/checkpoint", f"s3://{s3_bucket}/repository"

    # Spark's maintenance goes on for a while, and may upload another snapshot.
    still = shutil.copytree(made.checkpoint, tmp_path / "still", ignore=shutil.ignore_patterns(".*"))
    below = [file for file in still.rglob("*") if file.is_file()]

    async def backup() -> None:
        await copy_checkpoint({str(file.relative_to(still)): file for file in below}, checkpoint)
        async with await Repository.open(repository_url) as repository:
            await backup_checkpoint(repository, made.checkpoint, BackupChoice(job="query"))

    SyncRepository.init(repository_url).close()
    asyncio.run(backup())
    with workers_sign_as(spark, s3_server, tmp_path):
        session = reading_session(made)
        reach = {"s3.endpoint_url": s3_server.endpoint_url, "s3.path_style": "true"}
        expected = rows_of(by_us(session, made))
        read = session.read.format("tidemark_state").options(**reach)
        assert rows_of(read.load(checkpoint.replace("s3://", "s3a://"))) == expected
        assert (
            rows_of(session.read.format("tidemark_state").options(**reach, repository=repository_url).load())
            == expected
        )
        files = session.read.format("tidemark_files").options(**reach)
        needed = {row.path for row in files.load(checkpoint).where("needed").collect()}
        local = session.read.format("tidemark_files").load(str(still))
        assert needed == {row.path for row in local.where("needed").collect()}

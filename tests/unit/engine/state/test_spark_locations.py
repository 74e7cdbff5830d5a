"""Locations as Spark prints them, and those that only Spark can reach (the URLs that `store_url` takes)."""

from pathlib import Path

import pytest

from blobstore.errors import InvalidRequestError
from engine.checkpoint.restore import RestoreChoice, make_target
from engine.checkpoint.targets import DirectoryTarget
from engine.runtime import Runtime
from engine.state import checkpoint_dir
from engine.state.checkpoint_dir import CheckpointDir, store_url


@pytest.mark.parametrize(
    "spark, ours",
    [
        ("s3a://bucket/a", "s3://bucket/a"),
        ("S3N://bucket/a", "s3://bucket/a"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("file:/a/b c", "file:///a/b c"),
        ("file:///a", "file:///a"),
        ("/a/b", "/a/b"),
        ("a:b", "a:b"),
        ("s3a:/bucket", "s3a:/bucket"),
    ],
)
def test_a_location_of_sparks_is_one_of_ours(spark: str, ours: str) -> None:
    assert store_url(spark) == ours


@pytest.mark.parametrize(
    "url, tool",
    [
        ("abfss://container@account.dfs.core.windows.net/a", "blobfuse2"),
        ("gs://bucket/a", "gcsfuse"),
        ("hdfs://name:8020/a", "NFS"),
        ("hdfs:/a", "NFS"),
        ("dbfs:/a", "/dbfs"),
    ],
)
async def test_what_only_spark_reaches_is_refused_with_what_to_do(
    url: str, tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint_dir, "_DBFS", tmp_path / "not there")
    for attempt in (lambda: CheckpointDir.open(url), lambda: _made(url)):
        with pytest.raises(InvalidRequestError, match="not reached from here") as caught:
            await attempt()
        assert tool in caught.value.hint
        assert "credentials" not in str(caught.value)


async def _made(url: str) -> None:
    make_target(url, Runtime(), RestoreChoice())


async def test_a_mounted_place_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_dir, "_DBFS", tmp_path)
    (tmp_path / "query").mkdir()
    (tmp_path / "query/metadata").write_bytes(b"x")
    for url in ("dbfs:/query", f"file:{tmp_path}/query", f"file://{tmp_path}/query"):
        opened = await CheckpointDir.open(url)
        assert await opened.read("metadata", size_bytes_max=10) == b"x"
        await opened.close()
        assert isinstance(make_target(url, Runtime(), RestoreChoice()), DirectoryTarget)

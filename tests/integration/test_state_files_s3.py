"""The file manager on a real S3 server."""

import asyncio
from pathlib import Path

import pytest

from blobstore.errors import CheckpointFileExistsError
from engine.state.checkpoint_dir import CheckpointDir
from tests.unit.engine.state.state_bench import StateBench, at, delete_old_versions, files, tree


@pytest.mark.s3
async def test_versions_are_saved_loaded_and_deleted_on_s3(s3_bucket: str, tmp_path: Path) -> None:
    root = await CheckpointDir.open(f"s3://{s3_bucket}/checkpoint")
    bench = StateBench(tmp_path, root.child("state/0/0"), versions_retained_min=2)
    contents = [files(s1=100_000, **{f"s{version}": 1000 * version}) for version in range(2, 6)]
    saved = []
    for version, content in enumerate(contents, 1):
        await bench.changelog(at(version, f"id{version}"))
        saved.append(await bench.save(content, at(version, f"id{version}")))
    assert saved[-1].files_reused == 1
    with pytest.raises(CheckpointFileExistsError):
        await bench.changelog(at(4, "id4"), b"another")
    saving = bench.save(files(s1=100_000, s9=9), at(5, "id5"))
    _, deleted = await asyncio.gather(saving, delete_old_versions(bench.manager, versions_retained_min=2))
    assert deleted.snapshots in {2, 3}
    assert max(await bench.versions(".zip")) == 5
    for version in (4, 5):
        await bench.load(at(version, f"id{version}"))
        assert tree(bench.working) == (contents[3] if version == 4 else files(s1=100_000, s9=9))
    await root.close()

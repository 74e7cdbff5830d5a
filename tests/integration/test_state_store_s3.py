"""A state store on a real S3 server: its process is killed, and another machine goes on from the last commit."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from index.snapshot.model import UniqueId
from index.spark.retention import StateListing
from tests.unit.index.builders import latest_version
from tidemark import StateStore, StateStoreSettings

SETTINGS = StateStoreSettings(
    column_families=True, deltas_per_snapshot=3, versions_retained_min=4, versions_deleted_min=1
)
SECONDS_MAX = 60


def rows_of(version: int) -> dict[bytes, bytes]:
    """What a version holds follows from its number; a third of the keys change each time."""
    return {b"%03d" % key: Random((version - key) // 3).randbytes(100) for key in range(60)}


async def write(url: str, work: Path, version: int, unique_id: UniqueId | None) -> None:
    """Commit version after version, report each, and never end."""
    async with await StateStore.open(url, work, SETTINGS) as store:
        await store.load(version, unique_id)
        while True:
            version += 1
            for key, value in rows_of(version).items():
                if store.get(key) != value:
                    store.put(key, value)
            store.merge(b"history", b"%d;" % version)
            committed = await store.commit()
            print(committed.version, committed.unique_id, flush=True)  # noqa: T201  (read by the test)
            if version % 5 == 0:
                await store.maintain()


def write_until_killed(url: str, work: Path, version: int, unique_id: UniqueId | None, commits: int) -> list[UniqueId]:
    """The ids of the versions that were acknowledged before the process was killed, wherever it was then."""
    arguments = [url, str(work), str(version), unique_id or ""]
    command = [sys.executable, "-m", "tests.integration.test_state_store_s3", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(commits)]
        # Somewhere in the next commit, or in an upload.
        time.sleep(Random(version).random() * 0.1)
        process.send_signal(signal.SIGKILL)
        lines.extend(process.stdout)
    assert process.returncode == -signal.SIGKILL
    whole = [line.split() for line in lines if line.endswith("\n")]
    assert [int(number) for number, _ in whole] == [*range(version + 1, version + 1 + len(whole))]
    return [UniqueId(name) for _, name in whole]


@pytest.mark.s3
async def test_another_machine_goes_on_where_a_killed_process_was(s3_bucket: str, tmp_path: Path) -> None:
    url = f"s3://{s3_bucket}/checkpoint/state/0/0"
    ids: list[UniqueId | None] = [None]
    for attempt in range(2):
        # The same working directory: what the killed process left there is in nobody's way.
        work = write_until_killed(url, tmp_path / "work", len(ids) - 1, ids[-1], 8)
        ids.extend(work)
        assert len(ids) > 8 * (attempt + 1)
    newest = len(ids) - 1
    async with await StateStore.open(url, tmp_path / "elsewhere", SETTINGS) as store:
        for version in (newest, newest - 3, newest):
            await store.load(version, ids[version], read_only=version < newest)
            found = dict(store.items())
            history = found.pop(b"history")
            assert found == rows_of(version)
            assert history == b"".join(b"%d;" % number for number in range(1, version + 1))
            assert store.last_load is not None
            assert store.last_load.base is not None
            assert store.last_load.changelogs <= 6
        for version in range(newest + 1, newest + 8):
            for key, value in rows_of(version).items():
                store.put(key, value)
            committed = await store.commit()
            ids.append(committed.unique_id)
        deleted = (await store.maintain()).deleted
        assert deleted.changelogs > 0
        await store.load(newest + 7, ids[-1])
        assert {key: store.get(key) for key in rows_of(0)} == rows_of(newest + 7)
        assert latest_version(StateListing.of_names(await store.manager.files.names())) >= newest + 7


if __name__ == "__main__":
    location, directory, start, unique = sys.argv[1:]
    os.setpgrp()
    asyncio.run(write(location, Path(directory), int(start), UniqueId(unique) if unique else None))

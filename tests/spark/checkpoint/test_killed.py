"""kill -9 of a driver in the middle of a batch, while it is backed up; twice over, from inside and from outside."""

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import msgspec
import pytest
from pyspark.sql import SparkSession

from blobstore.local.store import LocalStore
from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.repository.repository import SyncRepository
from index.snapshot.model import Scope
from index.spark.checkpoint import decode_checkpoint_backup
from tests.doubles import InterposedStore
from tests.spark.checkpoint.doomed_driver import IN_BACKUP, IN_BATCH, Settings
from tests.spark.checkpoint.shows import DEADLINE_S, Show
from tests.spark.state.queries import FORMAT, QUERIES

pytestmark = [pytest.mark.spark, pytest.mark.soak]

ROOT = Path(__file__).resolve().parents[3]


def read_until(output: IO[bytes], words: set[str]) -> None:
    """Read lines until all words were said.

    Raises:
        AssertionError: They are not said in time.
    """
    deadline = time.monotonic() + DEADLINE_S
    os.set_blocking(output.fileno(), False)
    heard = b""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while not words <= set(heard.decode().splitlines()):
            assert time.monotonic() < deadline, f"heard only {heard!r}"
            if selector.select(1):
                part = output.read()
                assert part != b"", f"it ended by itself, and said only {heard!r}"
                heard += part or b""


@pytest.mark.parametrize("state_format", ["1", "2"])
@pytest.mark.parametrize("query", ["aggregation", "join2", "transformWithState"])
def test_a_query_that_was_killed_in_a_batch_during_a_backup_goes_on(
    spark: SparkSession, tmp_path: Path, url: str, query: str, state_format: str
) -> None:
    conf = {FORMAT: state_format}
    show = Show(spark, QUERIES[query], tmp_path / "show", conf, batches=7)
    expected = show.run("expected", tmp_path / "uninterrupted")
    repository_path = url.removeprefix("file://")
    settings = tmp_path / "settings.json"
    shown = Settings(
        root=str(show.root),
        repository=repository_path,
        query=query,
        state_format=state_format,
        batches=show.batches,
        hangs_in_batch=4,
        hangs_after_backups=1,
    )
    settings.write_bytes(msgspec.json.encode(shown))
    command = [sys.executable, "-m", "tests.spark.checkpoint.doomed_driver", str(settings)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as driver:
        try:
            assert driver.stdout is not None
            read_until(driver.stdout, {IN_BATCH, IN_BACKUP})
            store = InterposedStore(LocalStore(Path(repository_path)))

            async def kill() -> None:
                # Driver, JVM and Python workers alike.
                os.killpg(driver.pid, signal.SIGKILL)

            store.before("put_if_absent", "indexes/", kill)
            with SyncRepository.open(store) as repository:
                made = repository.loop.run(
                    backup_checkpoint(repository.asynchronous, show.checkpoint, BackupChoice(job="show"))
                )
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == -signal.SIGKILL
    assert made.backup.batch == 3
    shutil.rmtree(show.checkpoint)
    with SyncRepository.open(url) as repository:
        taken = [decode_checkpoint_backup(commit.record.offsets) for commit in repository.commits(Scope("show"))]
        batches = sorted(backup.batch for backup in taken if backup is not None)
        assert len(batches) == 2
        for batch in batches:
            name = f"from-{batch}"
            target = tmp_path / name
            restored = repository.loop.run(
                restore_checkpoint(repository.asynchronous, target, RestoreChoice(batch=batch))
            )
            assert restored.batch == batch
            show.copy_results("sink", name)
            assert show.run(name, target) == expected

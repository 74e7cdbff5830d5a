"""A driver that is killed: its query hangs in the middle of a batch, and its listener in the middle of a backup.

`python -m tests.spark.checkpoint.doomed_driver <settings>`, a JSON file with what `Settings` has. It says on standard
output how far it has come, one word a line, and then waits for its end.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from pyspark.sql import SparkSession
from typing_extensions import override

from blobstore.local.store import LocalStore
from blobstore.wrappers.forwarding import ForwardingStore
from engine.checkpoint.backup import BackupChoice
from engine.spark.listener import BackupListener
from tests.spark.checkpoint.shows import Show
from tests.spark.short_lived import SHORT_LIVED
from tests.spark.state.queries import FORMAT, QUERIES

IN_BATCH = "in the batch"
IN_BACKUP = "in the backup"


class Settings(msgspec.Struct, kw_only=True):
    """What the driver is given."""

    root: str
    repository: str
    query: str
    state_format: str
    batches: int
    # The batch that never ends; and the one whose backup is all but committed then.
    hangs_in_batch: int
    hangs_after_backups: int


class HangingStore(ForwardingStore):
    """A directory store that takes a number of commit records and hangs at the next, when all of it is uploaded."""

    def __init__(self, root: Path, *, records: int) -> None:
        super().__init__(LocalStore(root))
        self._records = records

    @asynccontextmanager
    @override
    async def _around(self, operation: str, *keys: str) -> AsyncIterator[None]:
        if operation == "put_if_absent" and keys[0].startswith("log/"):
            self._records -= 1
            if self._records < 0:
                _say(IN_BACKUP)
                await asyncio.sleep(3600)
        yield


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main(settings: Settings) -> None:
    """Run until killed."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", SHORT_LIVED)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")

    def hang(batch: int) -> None:
        if batch == settings.hangs_in_batch:
            _say(IN_BATCH)
            time.sleep(3600)

    query = QUERIES[settings.query]
    conf = {FORMAT: settings.state_format}
    show = Show(spark, query, Path(settings.root), conf, batches=settings.batches, is_fed=True)
    store = HangingStore(Path(settings.repository), records=settings.hangs_after_backups)
    listener = BackupListener(show.checkpoint, store, BackupChoice(job="show"))
    show.start("sink", listener=listener, before=hang).awaitTermination()


if __name__ == "__main__":
    main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Settings))

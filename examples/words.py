"""Count words in a job whose tasks keep state: `python examples/words.py REPOSITORY --tasks N TEXT...`.

`tidemark rescale words --key examples.words:key_columns` gives it another number of tasks.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from engine.rocksdb.store import StoreWriter


def count(store: "StoreWriter", batches: "Iterator[pa.RecordBatch]", _task: str) -> None:
    """Add the words of one task to its store: a word in UTF-8 is the key."""
    for batch in batches:
        for word in batch.column("word").to_pylist():
            seen = int.from_bytes(store.get(word.encode()) or b"")
            store.put(word.encode(), (seen + 1).to_bytes(8))


def key_columns(key: bytes) -> list[str]:
    """Return the key columns of the job, here the word, of a key of its stores."""
    return [key.decode()]


def main() -> None:
    """Run the job once. `rescale` imports this module, and needs no Spark."""
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from tidemark.spark import StatefulJob  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("text", nargs="+")
    options = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    rows = spark.createDataFrame([(word,) for line in options.text for word in line.split()], "word string")
    arguments = {"job": "words", "key_columns": ["word"], "tasks": options.tasks, "update": count}
    with tempfile.TemporaryDirectory() as disk, StatefulJob(options.repository, **arguments, local_root=disk) as job:
        version = job.run(rows).commit.record.version
    spark.stop()
    sys.stdout.write(f"version {version}\n")


if __name__ == "__main__":
    main()

"""State into a DataFrame: our data source against Spark's own `statestore`, on state that Spark has written.

A real Spark query writes the state as `bench_state_load.py` has it: an aggregation over 8 partitions, format 2,
changelogs above the last snapshot. Then either side reads it in turn in one session, both warm:

- all of it, counted: every row is read, typed and handed to the JVM, which is all that a count takes;
- all of it, summed up by a column: the rows are looked at;
- one partition: ours is given its number; `statestore` has no way to be, and filters what it has read.

Both sides count the same keys, and come to the same sums. Also measured: decoding rows alone.

Run `make bench`, or `python benchmarks/bench_read_state.py` for the table alone. Environment as of that benchmark, but
TIDEMARK_BENCH_STATE_MB (300 here).
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
from pyspark.sql import DataFrame, SparkSession

os.environ.setdefault("TIDEMARK_BENCH_STATE_MB", "300")

from benchmarks import bench_state_load as load
from engine.arrow.unsafe_rows import decode_pairs
from engine.spark.sources.sources import register_sources
from index.spark.schema import AtomType, Field, StructType

ROUNDS = load.ROUNDS
SIDES = ("tidemark", "statestore")

Read = Callable[[SparkSession, str, str], object]


def rows_of(spark: SparkSession, side: str, checkpoint: str, **options: str) -> DataFrame:
    name = "tidemark_state" if side == "tidemark" else side
    return spark.read.format(name).options(**options).load(checkpoint)


def count_all(spark: SparkSession, side: str, checkpoint: str) -> object:
    return rows_of(spark, side, checkpoint).count()


def sum_up(spark: SparkSession, side: str, checkpoint: str) -> object:
    length = F.length(F.col("value").getField("max"))
    found = rows_of(spark, side, checkpoint).agg(F.sum("value.count"), F.sum("key.id"), F.sum(length))
    return tuple(found.collect()[0])


def count_partition(spark: SparkSession, side: str, checkpoint: str) -> object:
    if side == "tidemark":
        return rows_of(spark, side, checkpoint, partition="3").count()
    return rows_of(spark, side, checkpoint).where("partition_id = 3").count()


READS: dict[str, Read] = {"count": count_all, "sum up": sum_up, "one partition": count_partition}


def measure(
    root: Path, *, rounds: int = ROUNDS, state_mb: int = load.STATE_MB, names: Sequence[str] = tuple(READS)
) -> dict[str, dict[str, list[float]]]:
    """Seconds by read and side, the sides in turn; the first round is thrown away."""
    checkpoint = str(root / "checkpoint")
    with load.spark_session() as spark:
        load.write_state(spark, root, state_mb)
        load.report_state(root / "checkpoint", load.last_version(root / "checkpoint"))
        register_sources(spark)
        results: dict[str, dict[str, list[float]]] = {name: {side: [] for side in SIDES} for name in names}
        for name, n in itertools.product(names, range(rounds + 1)):
            answers = set()
            for side in SIDES:
                began = time.perf_counter()
                answers.add(READS[name](spark, side, checkpoint))
                seconds = time.perf_counter() - began
                if n:
                    results[name][side].append(seconds)
            assert len(answers) == 1, f"{name}: {answers}"
    return results


def report(results: dict[str, dict[str, list[float]]]) -> None:
    for name, sides in results.items():
        shown = "; ".join(
            f"{side} median {statistics.median(runs):.2f} s, from {min(runs):.2f} to {max(runs):.2f}"
            for side, runs in sides.items()
        )
        ratio = statistics.median(theirs / ours for ours, theirs in zip(*sides.values(), strict=True))
        print(f"{name:14} {shown}; statestore / tidemark, pair by pair, median {ratio:.2f}")


def report_decoding() -> None:
    """Rows of a key, a count and a text, a batch at a time, without Spark and without RocksDB."""
    key = StructType((Field("id", AtomType("long"), nullable=True),))
    value = StructType(
        (Field("count", AtomType("long"), nullable=True), Field("max", AtomType("string"), nullable=True))
    )
    text = b"x" * 384
    row = bytes(9) + (7).to_bytes(8, "little") + (24 << 32 | len(text)).to_bytes(8, "little") + text
    pairs = [(bytes(9) + n.to_bytes(8, "little"), row) for n in range(20_000)]
    began = time.perf_counter()
    for _ in range(20):
        decode_pairs(key, value, pairs, subject="rows")
    print(f"decoding alone: {20 * len(pairs) / (time.perf_counter() - began) / 1000:.0f} thousand rows/s")


def test_reading_state_against_spark(tmp_path: Path) -> None:
    kept = os.environ.get("TIDEMARK_BENCH_STATE_DIR")
    report(measure(Path(kept) if kept else tmp_path / "state"))


def test_decoding_rows() -> None:
    report_decoding()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        test_reading_state_against_spark(Path(directory))
        test_decoding_rows()

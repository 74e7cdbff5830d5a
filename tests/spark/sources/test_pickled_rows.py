"""Rows that are pickles with a payload stay bytes on executors, too (architecture, H8)."""

import asyncio
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from engine.spark.sources.sources import register_sources
from tests.hostile.payloads import payloads
from tests.unit.engine.checkpoint.written_query import WrittenQuery

pytestmark = pytest.mark.spark


def test_a_state_full_of_payloads_is_read_as_bytes(spark: SparkSession, tmp_path: Path) -> None:
    canary = tmp_path / "the-payload-was-run"
    planted = {b"k%03d" % number + data: data for number, data in enumerate(payloads(canary))}

    async def write() -> None:
        query = await WrittenQuery(tmp_path / "query", tmp_path / "work", partitions=1, planted=planted).begin()
        await query.run(2)

    asyncio.run(write())
    # Of its own: what is registered in a session, those made of it know too, and refuse to register again.
    spark = spark.newSession()
    register_sources(spark)
    for source in ("tidemark_state", "tidemark_files"):
        read = spark.read.format(source)
        rows = (read.option("rows", "bytes") if source == "tidemark_state" else read).load(str(tmp_path / "query"))
        found = [row.asDict() for row in rows.collect()]
        if source == "tidemark_state":
            assert planted.items() <= {bytes(row["key"]): bytes(row["value"]) for row in found}.items()
    assert not canary.exists()

"""What a state holds, by Spark's own reader and by ours, in the form that `forms` has for both."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
from pyspark.sql import DataFrame

from engine.state.query import StreamingCheckpoint
from engine.state.store import StateStore
from index.spark.names import StateVersion
from tests.spark.state.forms import StateRow
from tests.spark.state.queries import FORMAT, StatefulQuery

# Of one store: by batch and partition.
Rows = dict[tuple[int, int], Counter[StateRow]]


def spark_rows(query: StatefulQuery, batches: Sequence[int], store: str = "default", operator: int = 0) -> Rows:
    """Every row of one store after each of these batches, as Spark reads it."""
    # Format 2 is read only if the session says so; format 1 either way.
    session = query.session({FORMAT: query.conf.get(FORMAT, "1")})

    def after(batch: int) -> DataFrame:
        rows = session.read.format("statestore").options(
            batchId=batch, operatorId=operator, storeName=store, _readAllColumnFamilies="true"
        )
        return rows.load(str(query.checkpoint)).select(
            F.lit(batch).alias("batch"),
            F.spark_partition_id().alias("partition"),
            "column_family_name",
            "key_bytes",
            "value_bytes",
        )

    # One job for all batches: planning one costs more than reading it.
    found: Rows = {}
    for row in reduce(DataFrame.unionAll, map(after, batches)).collect():
        known = query.query.forms.of_spark(row.column_family_name, bytes(row.key_bytes), bytes(row.value_bytes))
        found.setdefault((row.batch, row.partition), Counter())[known] += 1
    return found


def our_rows(
    query: StatefulQuery,
    batches: Sequence[int],
    directory: Path,
    store: str = "default",
    operator: int = 0,
    *,
    versions: dict[tuple[int, int], StateVersion] | None = None,
) -> Rows:
    """The same, as we read it.

    Args:
        query: Whose state.
        batches: Committed ones.
        directory: To work in.
        store: Which of the operator's.
        operator: Which of the query's.
        versions: Notes which version was read for each batch and partition.
    """

    async def read() -> Rows:
        found: Rows = {}
        checkpoint = await StreamingCheckpoint.open(query.checkpoint)
        settings = (await checkpoint.state(operator, store=store, batch=batches[-1])).settings
        partitions = (await checkpoint.at(batches[-1])).operators[operator].partitions_count
        for partition in range(partitions):
            files = checkpoint.state_dir(operator, partition, store)
            async with await StateStore.open(files, directory / f"{store}-{partition}", settings) as opened:
                # Forwards and back, so that what is there from the last load is used, and is not trusted too far.
                for batch in (*batches[::2], *batches[1::2]):
                    of = (await checkpoint.state(operator, partition, store, batch=batch)).at
                    await opened.load(of.version, of.unique_id, read_only=True)
                    stored = [(f, key, value) for f in opened.families for key, value in opened.items(family=f)]
                    assert opened.num_keys + opened.num_internal_keys == len(stored)
                    rows: Counter[StateRow] = Counter()
                    for row in stored:
                        rows.update(query.query.forms.of_ours(*row, settings.merge_delimiter))
                    if rows:
                        found[batch, partition] = rows
                    if versions is not None:
                        versions[batch, partition] = of
        await checkpoint.close()
        return found

    return asyncio.run(read())

"""The partitions of keys are Spark's own: by its `hash`, by its shuffle, and by where its operators put them (0010)."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession

from engine.arrow.key_hashes import partitions_of
from engine.errors import MisplacedKeyError
from engine.state import key_rules
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.key_rules import Partitioner, StoreRules, read_key_rules
from engine.state.query import StreamingCheckpoint
from engine.state.store import StateStore
from index.spark.partition_keys import choose_key_rule
from index.spark.schema import KeyForm, StateSchema, StructType, decode_type
from tests.spark.checkpoint.kinds import KINDS, PROVIDERS, Provider
from tests.spark.sources.reading import RICH
from tests.spark.state.queries import ENCODING, EXPIRING, REMINDING, SESSION, TRANSFORM, Query, StatefulQuery, join
from tests.unit.engine.state.key_check import check_store

pytestmark = pytest.mark.spark

PARTITIONS: Final = "spark.sql.shuffle.partitions"
COUNTS: Final = (3, 5, 200)
ROWS: Final = 3000
# `r` is a number of 64 bits that looks random; of each column some are null.
COLUMNS: Final = {
    "long": "r",
    "integer": "int(r % 2147483648)",
    "short": "cast(r % 32768 as short)",
    "byte": "cast(r % 128 as byte)",
    "boolean": "r % 2 = 0",
    "double": "case id % 50 when 0 then -0.0D when 1 then 0.0D when 2 then double('NaN') else r / 1e3D end",
    "float": "case id % 50 when 0 then cast('-0.0' as float) when 1 then float('NaN') else cast(r as float) / 7 end",
    "text": "substring(repeat(sha2(string(r), 256), 5), 1, int(id % 300))",
    "unicode": "substring(concat(repeat('日本😀é', 9), r), 1, int(id % 40))",
    "char": "cast(r % 1000 as char(9))",
    "binary": "substring(unhex(sha2(string(r), 512)), 1, int(id % 65))",
    "small": "cast(r % 100000000 as decimal(10, 2)) / 4",
    "eighteen": "cast(r % 1000000000000000000 as decimal(18, 0))",
    "wide": "cast(r as decimal(38, 4)) * cast(pow(10, id % 15) as decimal(16, 0)) / 1000",
    "date": "date_from_unix_date(int(r % 100000))",
    "timestamp": "timestamp_micros(r % 100000000000000000)",
    "ntz": "to_timestamp_ntz(timestamp_micros(r % 100000000000000000))",
    "days": "make_dt_interval(int(r % 100), 1, 2, id)",
    "months": "make_ym_interval(int(r % 100), 3)",
    "struct": "named_struct('a', r, 'b', if(id % 3 = 0, null, named_struct('c', string(r), 'd', id)))",
    "array": "transform(sequence(0, int(id % 70)), x -> if(x % 4 = 2, null, r + x))",
    "texts": "transform(sequence(1, int(id % 4)), x -> array(string(r), null, string(x)))",
    "structs": "transform(sequence(1, int(id % 5)), x -> named_struct('x', x, 'y', string(r)))",
}


def keys_of(rows: DataFrame, names: list[str]) -> list[bytes]:
    """Keys as Spark encodes a row of these columns."""
    plan: Any = rows.select(*names)._jdf.queryExecution().executedPlan()
    return [b"\0" + bytes(row.getBytes()) for row in plan.executeCollect()]


def test_generated_rows_of_every_type_have_the_hash_and_the_partition_that_spark_gives_them(
    spark: SparkSession,
) -> None:
    base = spark.range(ROWS).selectExpr("id", "xxhash64(id) as r")
    nullable = [f"if(id % 11 = {n % 11}, null, {of}) as `{name}`" for n, (name, of) in enumerate(COLUMNS.items())]
    rows = base.selectExpr("id", *nullable).cache()
    few = rows.where(f"id < {ROWS // 8}")
    for names in [[name] for name in COLUMNS] + [[*COLUMNS]]:
        chosen = rows if len(names) > 1 else few
        schema = decode_type(chosen.select(*names).schema.json())
        assert isinstance(schema, StructType)
        of = StateSchema(key=schema, value=schema)
        rule = choose_key_rule(0, "dedupe", "default", of, KeyForm(), variables={})
        keys = keys_of(chosen, names)
        assert len(keys) == (ROWS if len(names) > 1 else ROWS // 8)
        listed = ", ".join(f"`{name}`" for name in names)
        expected = chosen.selectExpr(*(f"pmod(hash({listed}), {count})" for count in COUNTS)).collect()
        for count, found in zip(COUNTS, zip(*expected, strict=True), strict=True):
            assert partitions_of(rule, keys, count) == [*found], names
        assert key_rules.partitions_of(rule, keys, COUNTS[0]) == [row[0] for row in expected], names
        if len(names) > 1:
            shuffled = rows.repartition(COUNTS[1], *names).selectExpr("id", "spark_partition_id()").collect()
            assert partitions_of(rule, keys, COUNTS[1]) == [partition for _, partition in sorted(map(tuple, shuffled))]
    rows.unpersist()


async def _check(
    checkpoint: Path, work: Path, partitioner: Partitioner, change: Callable[[StoreRules], StoreRules]
) -> Counter[str]:
    """Check every store of a checkpoint; returns keys by operator, store and family."""
    directory = await CheckpointDir.open(checkpoint)
    query = await StreamingCheckpoint(directory).at()
    rules = await read_key_rules(directory, query)
    counts: Counter[str] = Counter()
    for n, found in enumerate(query.stores):
        of = change(rules[found.id.operator, found.id.store])
        async with await StateStore.open(directory.child(found.id.path), work / str(n), found.settings) as store:
            await store.load(found.at.version, found.at.unique_id, read_only=True)
            for family, keys in check_store(
                of, store, store.families, found.id.partition, partitioner=partitioner
            ).items():
                counts[f"{of.operator.name} {of.store} {family}"] += keys
    await directory.close()
    return counts


def check(
    query: StatefulQuery,
    partitioner: Partitioner = partitions_of,
    change: Callable[[StoreRules], StoreRules] = lambda of: of,
) -> Counter[str]:
    work = query.root / f"work-{len(list(query.root.iterdir()))}"
    work.mkdir()
    return asyncio.run(_check(query.checkpoint, work, partitioner, change))


MAP_KEY = Query(
    name="map in a key",
    build=lambda sources: (
        sources[0]
        .selectExpr(
            "map('b', v, k, null) as m", "make_ym_interval(int(v % 9), 3) as ym", "cast(k as varchar(20)) as vc"
        )
        .groupBy("m", "ym", "vc")
        .count()
    ),
    mode="update",
)
AVRO: Final = {ENCODING: "avro"}
# What the table of kinds has not: times that expire, in both encodings, and keys of every type.
MORE: Final[list[tuple[Query, Provider, dict[str, str]]]] = [
    (EXPIRING, "V2", AVRO),
    (EXPIRING, "V1", {}),
    (REMINDING, "V2", AVRO),
    (REMINDING, "V2", {}),
    (RICH, "V2", {}),
    (RICH, "HDFS", {}),
    (MAP_KEY, "V2", {}),
    (msgspec.structs.replace(RICH, name="rich, 200"), "V1", {PARTITIONS: "200"}),
]
KINDS_OF: Final[list[tuple[Query, Provider, dict[str, str]]]] = [
    (kind.query, provider, {})
    for kind in KINDS
    if not kind.is_endless
    for provider in kind.providers
    if provider != "HDFS" or kind.hdfs_since <= (4, 3)
]
# What `make test` has of it.
SHORT: Final = {"reminding-V2-avro", "join4-V2", "rich-HDFS", "session-V1"}


def cases() -> Iterator[Any]:
    for n, (query, provider, conf) in enumerate([*MORE, *KINDS_OF]):
        name = f"{query.name}-{provider}{'-avro' * (conf == AVRO)}"
        marks = () if name in SHORT else pytest.mark.soak
        yield pytest.param(query, PROVIDERS[provider] | {PARTITIONS: str(COUNTS[n % 2])} | conf, id=name, marks=marks)


@pytest.mark.parametrize("query, conf", [*cases()])
def test_every_key_is_where_spark_put_it(
    spark: SparkSession, tmp_path: Path, query: Query, conf: dict[str, str]
) -> None:
    made = StatefulQuery(spark, msgspec.structs.replace(query, conf=query.conf | conf), tmp_path)
    made.feed(2)
    made.run()
    counts = check(made)
    assert counts == check(made, key_rules.partitions_of)
    assert sum(counts.values()) or query.name == "stateless"


def _with_the_last_field(of: StoreRules) -> StoreRules:
    rules = {family: msgspec.structs.replace(rule, count=len(rule.row.fields)) for family, rule in of.families.items()}
    return msgspec.structs.replace(of, families=rules)


def _with_one_field(of: StoreRules) -> StoreRules:
    """Hash the user's key of a map too, as if it were a column."""
    rules = {family: msgspec.structs.replace(rule, is_within=False) for family, rule in of.families.items()}
    return msgspec.structs.replace(of, families=rules)


@pytest.mark.parametrize(
    "query, provider, change, store",
    [
        pytest.param(join(2), "V2", _with_the_last_field, "store left-keyWithIndexToValue", marks=pytest.mark.soak),
        (SESSION, "HDFS", _with_the_last_field, "store default"),
        pytest.param(EXPIRING, "V2", _with_one_field, r"column family \$ttl_seen", marks=pytest.mark.soak),
    ],
    ids=["the index of a join", "the start of a session", "the key of a map"],
)
def test_a_wrong_rule_is_refused(
    spark: SparkSession, tmp_path: Path, query: Query, provider: Any, change: Any, store: str
) -> None:
    made = StatefulQuery(spark, query, tmp_path, PROVIDERS[provider] | {PARTITIONS: "5"})
    made.feed(2)
    made.run()
    check(made)
    with pytest.raises(MisplacedKeyError, match=rf"operator 0 \(.*{store}.*in partition . of 5, and belongs in"):
        check(made, change=change)


@pytest.mark.soak
def test_a_key_with_a_collation_is_refused_by_spark_itself(spark: SparkSession, tmp_path: Path) -> None:
    for n, collation in enumerate(("UTF8_LCASE", "UNICODE")):
        query = msgspec.structs.replace(
            TRANSFORM,
            build=lambda sources, of=collation: sources[0].selectExpr(f"k collate {of} as k").groupBy("k").count(),
        )
        made = StatefulQuery(spark, query, tmp_path / str(n))
        made.feed(1)
        with pytest.raises(Exception, match="STATE_STORE_UNSUPPORTED_OPERATION_BINARY_INEQUALITY"):
            made.run()

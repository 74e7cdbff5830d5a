"""Every key that Spark wrote is in the partition of its operator's rule, and what is not is refused (0010, H8, H9)."""

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.errors import MisplacedKeyError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.key_rules import StoreRules, read_key_rules, show_key
from engine.state.query import QueryAt, StreamingCheckpoint
from engine.state.store import StateStore
from index.errors import PartitionKeyError
from tests.unit.engine.state.key_check import check_store

GOLDEN = Path(__file__).parents[3] / "golden/spark"
# Aggregations of both formats and both providers. Those of column families have no schemas there; real ones are in
# `tests/spark/state/test_key_partitions.py`.
WHOLE = ("changelog-v1-lz4", "changelog-v3-lz4", "lost-attempts", "hdfs-provider")

Rules = dict[tuple[int, str], StoreRules]


async def opened(checkpoint: Path) -> tuple[CheckpointDir, QueryAt, Rules]:
    directory = await CheckpointDir.open(checkpoint)
    query = await StreamingCheckpoint(directory).at()
    return directory, query, await read_key_rules(directory, query)


@asynccontextmanager
async def stores_of(checkpoint: Path, work: Path) -> AsyncIterator[list[StateStore]]:
    directory, query, _ = await opened(checkpoint)
    stores = []
    try:
        for n, found in enumerate(query.stores):
            stores.append(await StateStore.open(directory.child(found.id.path), work / str(n), found.settings))
            await stores[-1].load(found.at.version, found.at.unique_id, read_only=True)
        yield stores
    finally:
        for store in stores:
            await store.close()


class Rows:
    """A store with these keys."""

    def __init__(self, keys: list[bytes]) -> None:
        self._keys = keys

    def chunks(self, family: str, *, rows_max: int, bytes_max: int) -> Iterator[list[tuple[bytes, bytes]]]:
        yield [(key, b"") for key in self._keys]


@pytest.mark.parametrize("name", WHOLE)
async def test_every_key_that_spark_wrote_is_in_place(name: str, tmp_path: Path) -> None:
    _, query, rules = await opened(GOLDEN / name)
    checked = 0
    async with stores_of(GOLDEN / name, tmp_path) as stores:
        for found, store in zip(query.stores, stores, strict=True):
            counts = check_store(rules[0, found.id.store], store, store.families, found.id.partition)
            checked += sum(counts.values())
    assert checked == 19


async def test_a_key_in_another_partition_is_refused(tmp_path: Path) -> None:
    _, _, rules = await opened(GOLDEN / "changelog-v1-lz4")
    of = msgspec.structs.replace(
        rules[0, "default"], operator=msgspec.structs.replace(rules[0, "default"].operator, partitions_count=3)
    )
    (rule,) = of.families.values()
    async with stores_of(GOLDEN / "changelog-v1-lz4", tmp_path) as (store, *_):
        keys = [key for key, _ in store.items()]
    parts = [[key for key in keys if rule.partition_of(key, 3) == part] for part in range(3)]
    assert all(parts)
    assert [check_store(of, Rows(part), ["default"], n) for n, part in enumerate(parts)] == [
        {"default": len(part)} for part in parts
    ]
    shown = show_key(rule, parts[1][0])
    assert shown.startswith("k='key-")
    reason = (
        rf"operator 0 \(stateStoreSave\), store default: the key {shown} is in partition 0 of 3, and belongs in "
        rf"partition 1 by the hash of the whole key; {len(parts[0])} keys before it are in place"
    )
    with pytest.raises(MisplacedKeyError, match=reason) as caught:
        check_store(of, Rows([*parts[0], parts[1][0]]), ["default"], 0)
    assert caught.value.checked == len(parts[0])


async def test_a_wrong_number_of_partitions_and_keys_without_a_rule_are_refused(tmp_path: Path) -> None:
    _, _, rules = await opened(GOLDEN / "changelog-v1-lz4")
    of = rules[0, "default"]
    wrong = msgspec.structs.replace(of, operator=msgspec.structs.replace(of.operator, partitions_count=3))
    async with stores_of(GOLDEN / "changelog-v1-lz4", tmp_path) as (first, *_):
        with pytest.raises(MisplacedKeyError, match=r"the key .* is in partition 0 of 3,"):
            check_store(wrong, first, first.families, 0)
        with pytest.raises(PartitionKeyError, match="the column family default, which no schema names"):
            check_store(msgspec.structs.replace(of, families={}), first, first.families, 0)


async def test_a_store_without_a_schema_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "changelog-v1-lz4", checkpoint)
    (checkpoint / "state/0/0/_metadata/schema").unlink()
    with pytest.raises(PartitionKeyError, match=r"\(stateStoreSave\), store default: has no schema of its keys"):
        await opened(checkpoint)
    with pytest.raises(PartitionKeyError, match=r"\(transformWithStateInPySparkExec\), store default: has no schema"):
        await opened(GOLDEN / "changelog-v2-lz4")


async def test_an_operator_of_one_partition_has_no_rule_and_its_keys_are_in_the_first(tmp_path: Path) -> None:
    _, _, rules = await opened(GOLDEN / "changelog-v1-lz4")
    operator = msgspec.structs.replace(
        rules[0, "default"].operator, name="globalLimit", is_single=True, partitions_count=1
    )
    single = StoreRules(operator=operator, store="default", families={})
    assert check_store(single, Rows([b"any", b"key"]), ["default"], 0) == {"default": 2}
    with pytest.raises(MisplacedKeyError, match=r"globalLimit.*616e79 is in partition 1 of 1, .* one partition"):
        check_store(single, Rows([b"any"]), ["default"], 1)

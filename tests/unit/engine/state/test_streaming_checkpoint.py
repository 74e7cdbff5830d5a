from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from blobstore.local.store import LocalStore
from blobstore.memory import MemoryStore
from engine.errors import DamagedError, NotFoundError, ProviderError, UsageError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import StateOperator, StreamingCheckpoint
from engine.state.settings import HDFS_PROVIDER, ROCKSDB_PROVIDER, StateStoreSettings
from index.errors import BatchLogError, UnsafeNameError
from index.snapshot.model import UniqueId
from index.spark.names import StateVersion
from index.spark.query_logs import JOIN_STORES, BatchCommit, BatchOffsets, OperatorMetadata, OperatorStore
from tests.unit.index.spark.written_metadata import encode_operator, encode_query_id

CONF = {
    "spark.sql.streaming.stateStore.providerClass": ROCKSDB_PROVIDER,
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.stateStore.compression.codec": "zstd",
    "spark.sql.streaming.stateStore.rocksdb.mergeOperatorVersion": "2",
    "spark.sql.streaming.stateStore.rowChecksum.enabled": "true",
}
SAVE = OperatorMetadata(
    id=0, name="stateStoreSave", stores=(OperatorStore(name="default", prefix_columns_count=0, partitions_count=2),)
)
JOIN = OperatorMetadata(
    id=1,
    name="symmetricHashJoin",
    # Not in the order of the ids.
    stores=tuple(OperatorStore(name=n, prefix_columns_count=0, partitions_count=2) for n in sorted(JOIN_STORES)[::-1]),
)

Ids = dict[int, tuple[tuple[UniqueId, ...], ...]]


def ids_of(batch: int, *operators: OperatorMetadata) -> Ids:
    return {
        op.id: tuple(tuple(UniqueId(f"b{batch}o{op.id}p{p}s{s}") for s in range(len(op.stores))) for p in range(2))
        for op in operators
    }


class World:
    """A checkpoint in memory that a test fills."""

    def __init__(self, directory: CheckpointDir) -> None:
        self.directory = directory
        self.checkpoint = StreamingCheckpoint(directory)

    async def batch(
        self,
        batch: int,
        ids: Ids | None = None,
        *,
        conf: dict[str, str] = CONF,
        committed: bool = True,
        version: int = 0,
    ) -> None:
        assert await self.checkpoint.offsets.add(batch, BatchOffsets(conf=conf))
        if committed:
            commit = BatchCommit(version=version or (1 if ids is None else 2), unique_ids=ids)
            assert await self.checkpoint.commits.add(batch, commit)

    async def operator(self, operator: OperatorMetadata, batch: int | None = None) -> None:
        name = "metadata" if batch is None else f"v2/{batch}"
        path = f"state/{operator.id}/_metadata/{name}"
        await self.directory.publish(path, encode_operator(operator), overwrite=False)


@pytest.fixture
async def world() -> World:
    return World(await CheckpointDir.open(MemoryStore(), "a/checkpoint"))


async def test_a_version_without_ids_is_the_batch_and_one(world: World) -> None:
    await world.operator(SAVE)
    await world.batch(0)
    await world.batch(1)
    checkpoint = world.checkpoint
    assert await checkpoint.committed_batches() == (0, 1)
    assert (await checkpoint.state(0, 0, batch=0)).at == StateVersion(1)
    assert (await checkpoint.state(0, 1, batch=1)).at == StateVersion(2)
    settings = (await checkpoint.state(batch=1)).settings
    assert settings.format_version == 1


async def test_a_version_with_ids_has_the_one_of_its_store(world: World) -> None:
    await world.operator(SAVE)
    await world.operator(JOIN)
    await world.batch(4, ids_of(4, SAVE, JOIN))
    checkpoint = world.checkpoint
    assert (await checkpoint.state(0, 1, batch=4)).at == StateVersion(5, UniqueId("b4o0p1s0"))
    for at, store in enumerate(JOIN_STORES):
        assert (await checkpoint.state(1, 0, store, batch=4)).at == StateVersion(5, UniqueId(f"b4o1p0s{at}"))


async def test_operators_report_their_stores_and_partitions(world: World) -> None:
    await world.operator(SAVE)
    await world.operator(JOIN)
    await world.batch(0, ids_of(0, SAVE, JOIN))
    save = StateOperator(id=0, name="stateStoreSave", stores=("default",), partitions_count=2, column_families=False)
    join = StateOperator(id=1, name="symmetricHashJoin", stores=JOIN_STORES, partitions_count=2, column_families=False)
    assert (await world.checkpoint.at()).operators == (save, join)
    assert (await world.checkpoint.at(0)).operators == (save, join)
    assert (await world.checkpoint.at(0)).operators[1] == join


async def test_a_query_without_state_has_no_operators(world: World) -> None:
    await world.batch(0)
    assert (await world.checkpoint.at()).operators == ()
    with pytest.raises(NotFoundError, match="no stateful operator 0"):
        await world.checkpoint.state(batch=0)


async def test_the_metadata_of_an_operator_that_applies_is_the_newest_not_above_the_batch(world: World) -> None:
    for batch, name in ((0, "first"), (3, "third"), (10, "tenth")):
        await world.operator(OperatorMetadata(version=2, id=0, name=name, stores=SAVE.stores, properties="{}"), batch)
    for batch in (0, 2, 3, 9, 10, 11):
        await world.batch(batch, ids_of(batch, SAVE))
    found = {batch: (await world.checkpoint.at(batch)).operators[0] for batch in (0, 2, 3, 9, 10, 11)}
    assert [operator.name for operator in found.values()] == ["first", "first", "third", "third", "tenth", "tenth"]
    # Stores of an operator that is described this way have column families.
    assert (await world.checkpoint.state(batch=2)).settings.column_families
    assert not found[0].stores[1:]


async def test_an_operator_that_came_later_is_none_of_an_earlier_batch(world: World) -> None:
    await world.operator(SAVE)
    await world.operator(OperatorMetadata(version=2, id=1, name="late", stores=SAVE.stores, properties="{}"), 5)
    await world.batch(4, ids_of(4, SAVE))
    assert [operator.id for operator in (await world.checkpoint.at(4)).operators] == [0]
    with pytest.raises(NotFoundError, match="no stateful operator 1"):
        await world.checkpoint.state(1, batch=4)


async def test_the_partitions_of_a_batch_are_those_of_its_commit(world: World) -> None:
    """After an offline repartition the metadata of the operator still has the old number."""
    await world.operator(SAVE)
    await world.batch(0, ids_of(0, SAVE))
    await world.batch(1, {0: tuple((UniqueId(f"p{n}"),) for n in range(3))})
    assert (await world.checkpoint.at(0)).operators[0].partitions_count == 2
    assert (await world.checkpoint.at(1)).operators[0].partitions_count == 3
    assert (await world.checkpoint.state(0, 2, batch=1)).at == StateVersion(2, UniqueId("p2"))
    with pytest.raises(NotFoundError, match="has no partition 2"):
        await world.checkpoint.state(0, 2, batch=0)


async def test_without_ids_the_pinned_number_of_partitions_counts(world: World) -> None:
    await world.operator(SAVE)
    await world.batch(0, conf=CONF | {"spark.sql.shuffle.partitions": "5"})
    assert (await world.checkpoint.at(0)).operators[0].partitions_count == 5


@pytest.mark.parametrize("ids", [None, {0: ((UniqueId("a"),),)}])
async def test_a_global_limit_has_one_partition_whatever_its_metadata_says(world: World, ids: Ids | None) -> None:
    await world.operator(OperatorMetadata(id=0, name="globalLimit", stores=SAVE.stores))
    await world.batch(0, ids)
    assert (await world.checkpoint.at()).operators[0].partitions_count == 1


async def test_settings_are_those_that_the_query_is_pinned_to(world: World) -> None:
    await world.operator(SAVE)
    await world.batch(0, ids_of(0, SAVE))
    base = StateStoreSettings(format_version=1, merge_operator_version=1, deltas_per_snapshot=3)
    settings = (await world.checkpoint.state(batch=0, base=base)).settings
    assert (settings.format_version, settings.codec, settings.row_checksums) == (2, "zstd", True)
    assert (settings.merge_operator_version, settings.column_families) == (2, False)
    assert settings.deltas_per_snapshot == 3


async def test_settings_that_an_old_checkpoint_lacks_are_what_they_were_then(world: World) -> None:
    await world.operator(SAVE)
    await world.batch(0, conf={"spark.sql.streaming.stateStore.providerClass": ROCKSDB_PROVIDER})
    settings = (await world.checkpoint.state()).settings
    assert (settings.codec, settings.merge_operator_version, settings.row_checksums) == ("lz4", 1, False)
    assert (await world.checkpoint.at()).operators[0].partitions_count == 2


async def test_a_batch_that_is_not_committed_has_no_state(world: World) -> None:
    """Whatever files its attempts left (design 0004, B3)."""
    await world.operator(SAVE)
    await world.batch(0)
    await world.batch(1, committed=False)
    await world.directory.publish("state/0/0/2.changelog", b"", overwrite=False)
    with pytest.raises(NotFoundError, match="batch 1: it is not committed"):
        await world.checkpoint.state(batch=1)
    assert await world.checkpoint.committed_batches() == (0,)


async def test_a_store_that_the_operator_does_not_have_is_refused(world: World) -> None:
    await world.operator(JOIN)
    await world.batch(0, ids_of(0, JOIN))
    with pytest.raises(NotFoundError, match="has no store 'default'"):
        await world.checkpoint.state(1, batch=0)


async def test_ids_that_do_not_match_the_stores_are_refused(world: World) -> None:
    await world.operator(JOIN)
    await world.batch(0, {1: ((UniqueId("only one"),), (UniqueId("x"),))})
    with pytest.raises(BatchLogError, match="1 ids for the 4 stores"):
        await world.checkpoint.state(1, 0, JOIN_STORES[0], batch=0)


async def test_an_id_that_leads_out_of_the_directory_is_refused(world: World) -> None:
    await world.operator(SAVE)
    await world.batch(0, {0: ((UniqueId("../../x"),),)})
    with pytest.raises(UnsafeNameError):
        await world.checkpoint.state(batch=0)
    with pytest.raises(UnsafeNameError):
        world.checkpoint.state_dir(0, 0, "../up")
    with pytest.raises(NotFoundError, match="no stateful operator -1"):
        await world.checkpoint.state(-1)


@pytest.mark.parametrize(
    "conf, names", [(CONF | {"spark.sql.streaming.stateStore.providerClass": "org.x.Own"}, r"provider org\.x\.Own")]
)
async def test_another_provider_is_named(world: World, conf: dict[str, str], names: str) -> None:
    await world.operator(SAVE)
    await world.batch(0, conf=conf)
    checkpoint = world.checkpoint
    readings: tuple[Coroutine[Any, Any, object], ...] = (checkpoint.at(), checkpoint.state())
    for reading in readings:
        with pytest.raises(ProviderError, match=names) as caught:
            await reading
        assert "RocksDBStateStoreProvider" in caught.value.hint
        assert caught.value.subject == "offsets/0"


@pytest.mark.parametrize("conf", [CONF | {"spark.sql.streaming.stateStore.providerClass": HDFS_PROVIDER}, {}])
async def test_where_no_provider_is_pinned_it_is_the_hdfs_backed_one(world: World, conf: dict[str, str]) -> None:
    await world.operator(SAVE)
    await world.batch(0, conf=conf | {"spark.sql.shuffle.partitions": "1"})
    (store,) = (await world.checkpoint.at()).stores
    assert store.at == StateVersion(1, is_hdfs=True)


async def test_the_query_is_known_by_its_id(world: World) -> None:
    with pytest.raises(NotFoundError, match="there is no checkpoint here") as caught:
        await world.checkpoint.query_id()
    assert caught.value.subject == world.directory.location
    await world.directory.publish("metadata", encode_query_id("an-id"), overwrite=False)
    assert await world.checkpoint.query_id() == "an-id"


async def test_what_is_not_there_is_reported_as_such(world: World) -> None:
    with pytest.raises(NotFoundError, match="no batch is committed"):
        await world.checkpoint.at()
    assert await world.checkpoint.committed_batches() == ()
    await world.batch(3)
    await world.directory.delete(["offsets/3"])
    with pytest.raises(NotFoundError, match="its offsets are not there") as caught:
        await world.checkpoint.state(batch=3)
    assert caught.value.subject == "offsets/3"


async def test_a_store_other_than_the_default_has_a_directory_of_its_own(tmp_path: Path) -> None:
    checkpoint = await StreamingCheckpoint.open(tmp_path)
    assert checkpoint.state_dir(2, 1).local_root == tmp_path / "state/2/1"
    assert checkpoint.state_dir(2, 1, "left-keyToNumValues").local_root == tmp_path / "state/2/1/left-keyToNumValues"
    await checkpoint.close()


async def test_a_checkpoint_is_read_from_a_directory_store_too(tmp_path: Path) -> None:
    world = World(await CheckpointDir.open(LocalStore(tmp_path)))
    await world.operator(SAVE)
    await world.batch(0, ids_of(0, SAVE))
    checkpoint = await StreamingCheckpoint.open(tmp_path)
    assert (await checkpoint.state(0, 1, batch=0)).at == StateVersion(1, UniqueId("b0o0p1s0"))
    await checkpoint.close()


class TestUndescribedState:
    """State without metadata of its operator is never taken for none."""

    @pytest.mark.parametrize("there", ["state/0/0/1.zip", "state/1/0/1.zip", "else"])
    async def test_an_operator_that_the_commit_has_ids_for(self, world: World, there: str) -> None:
        await world.directory.publish(there, b"", overwrite=False)
        await world.batch(0, ids_of(0, SAVE))
        with pytest.raises(DamagedError, match="is not there, and the operator has state") as caught:
            await world.checkpoint.at()
        assert caught.value.subject == "state/0/_metadata"

    async def test_an_operator_whose_metadata_is_all_of_later_batches(self, world: World) -> None:
        later = OperatorMetadata(version=2, id=0, name="later", stores=SAVE.stores, properties="{}")
        await world.operator(later, 5)
        await world.batch(4)
        assert (await world.checkpoint.at()).operators == ()
        await world.batch(3, ids_of(3, SAVE))
        with pytest.raises(DamagedError, match="state/0/_metadata"):
            await world.checkpoint.at(3)

    async def test_without_ids_partitions_say_that_there_is_state(self, world: World) -> None:
        await world.batch(0)
        await world.directory.publish("state/0/notes", b"", overwrite=False)
        assert (await world.checkpoint.at()).stores == ()
        await world.directory.publish("state/0/1/1.zip", b"", overwrite=False)
        with pytest.raises(DamagedError, match="state/0/_metadata: is not there") as caught:
            await world.checkpoint.at()
        assert "start the query once with Spark 4" in caught.value.hint

    async def test_a_commit_without_ids_of_any_store_has_no_state(self, world: World) -> None:
        await world.batch(0, {0: ((), ())})
        assert (await world.checkpoint.at()).stores == ()

    async def test_metadata_of_another_operator(self, world: World) -> None:
        other = OperatorMetadata(id=7, name="stateStoreSave", stores=SAVE.stores)
        await world.directory.publish("state/0/_metadata/metadata", encode_operator(other), overwrite=False)
        await world.batch(0, ids_of(0, SAVE))
        with pytest.raises(BatchLogError, match="state/0/_metadata/metadata: describes operator 7"):
            await world.checkpoint.at()


@pytest.mark.parametrize(
    "names, unique_id, conf, subject",
    [
        (("default",), "../x", {}, "commits/0"),
        (("../x",), "a", {}, "state/0/_metadata/metadata"),
        (("one", "two"), "a", {}, "state/0/_metadata/metadata"),
        (("default",), "a", {"spark.sql.streaming.stateStore.compression.codec": "rar"}, "offsets/0"),
    ],
    ids=["id", "store", "stores", "setting"],
)
async def test_what_cannot_be_used_names_the_file_that_has_it(
    world: World, names: tuple[str, ...], unique_id: str, conf: dict[str, str], subject: str
) -> None:
    stores = tuple(OperatorStore(name=name, prefix_columns_count=0, partitions_count=1) for name in names)
    await world.operator(OperatorMetadata(id=0, name="any", stores=stores))
    await world.batch(0, {0: ((UniqueId(unique_id),),)}, conf=CONF | conf)
    with pytest.raises((BatchLogError, UnsafeNameError, UsageError)) as caught:
        await world.checkpoint.at()
    assert getattr(caught.value, "subject", "") == subject

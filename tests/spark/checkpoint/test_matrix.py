"""Every kind of checkpoint goes through a loss, and its query comes to the results and the state of one that did not.

`make endure` runs it on three releases of Spark (`scripts/matrix.sh`). With the older two fewer providers are tried,
no older batch is resumed, and the state is compared as we read it alone.
"""

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any, Final

import pyspark
import pyspark.sql.functions as F  # noqa: N812 (as all of Spark's documentation has it)
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from engine.checkpoint.backup import BackupChoice, backup_checkpoint
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.restore import RestoreChoice, restore_checkpoint
from engine.repository.repository import Repository
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import StreamingCheckpoint
from engine.state.store import StateStore
from tests.spark.checkpoint.kinds import KINDS, PROVIDERS, Kind, Provider
from tests.spark.checkpoint.quiet_files import QUIET, make_files_quiet
from tests.spark.checkpoint.shows import Results, Show, wait_until

pytestmark = pytest.mark.spark

SPARK: Final = tuple(map(int, pyspark.__version__.split(".")[:2]))
# The first whose own reader shows the stored bytes of state.
READS_RAW: Final = (4, 2)
BATCHES: Final = 6
BACKED_UP: Final = 2
OLDER: Final = 1
# Of a query that is rescaled; more than it had, and no multiple.
PARTITIONS: Final = 4

# By operator, partition and store: each row with its family.
State = dict[tuple[int, int, str], Counter[tuple[str, bytes, bytes]]]

HERE: Final = [kind for kind in KINDS if kind.since <= SPARK]
# What `make test` has of it.
SHORT: Final = {("flatMapGroupsWithState", "V1"), ("aggregation names", "V2"), ("two aggregations", "HDFS")}


def providers_of(kind: Kind) -> tuple[Provider, ...]:
    """Those that are tried with this release."""
    providers = tuple(each for each in kind.providers if each != "HDFS" or kind.hdfs_since <= SPARK)
    if SPARK >= READS_RAW:
        return providers
    return providers[:1] if SPARK == (4, 0) else tuple(dict.fromkeys((providers[0], providers[-1])))


# Spark gives a driver's worker of transformWithState ten seconds to connect, however busy the machine is. A query that
# ends with this is started again, as its user would.
TOO_SLOW: Final = "Python worker failed to connect back"
STARTS_MAX: Final = 3

CASES: Final = [
    pytest.param(
        kind, provider, id=f"{kind.name}-{provider}", marks=() if (kind.name, provider) in SHORT else pytest.mark.soak
    )
    for kind in HERE
    for provider in providers_of(kind)
]


@pytest.fixture(scope="module")
def quiet(spark: SparkSession) -> SparkSession:
    """A session that starts no process for each file."""
    make_files_quiet(spark)
    return spark


@pytest.mark.parametrize("kind, provider", CASES)
def test_a_lost_query_comes_to_the_results_and_the_state_of_one_that_was_not_lost(
    quiet: SparkSession, tmp_path: Path, url: str, kind: Kind, provider: Provider
) -> None:
    show = Show(quiet, kind.query, tmp_path / "show", QUIET | PROVIDERS[provider], batches=BATCHES)

    begun: dict[int, State] = {}

    def back_up(batch: int) -> None:
        # Within a batch, as a query that is alive is backed up: its state is partly there, and it is not committed.
        if batch == BACKED_UP + 1 and not begun:
            shutil.copytree(tmp_path / "show" / "sink", tmp_path / "show" / "seen")
            asyncio.run(_back_up(url, show.checkpoint))
            begun.update({older: state_of(show.checkpoint, older) for older in (OLDER, BACKED_UP)})

    expected = run(show, kind, "sink", show.checkpoint, before=back_up)
    newest = BATCHES - 1 if kind.is_endless else show.committed()
    assert newest >= BATCHES - 1
    state = state_of(show.checkpoint, newest)
    assert any(state.values()) == (kind.name != "stateless")
    ways = [
        ("older", RestoreChoice(batch=OLDER), OLDER),
        ("plain", RestoreChoice(), BACKED_UP),
        ("replayed", RestoreChoice(replayed=True), BACKED_UP),
    ]
    if provider != "HDFS":
        ways.append(("rescaled", RestoreChoice(partitions=PARTITIONS), BACKED_UP))
    for name, choice, begin in ways:
        target = tmp_path / "elsewhere" / name
        assert asyncio.run(_restore(url, target, choice)) == begin
        assert asyncio.run(check_checkpoint(target)).findings == ()
        placed = everywhere if name == "rescaled" else dict
        assert placed(state_of(target, begin)) == placed(begun[begin]), name
        if name == "older" and (SPARK < READS_RAW or provider != kind.providers[0]):
            continue
        show.copy_results("seen", name)
        assert run(show, kind, name, target) == expected, name
        assert kind.is_endless or show.committed(target) == newest
        assert asyncio.run(check_checkpoint(target)).findings == ()
        found, wanted = placed(state_of(target, newest)), placed(state)
        assert comparable(found, kind) == comparable(wanted, kind), name
    assert asyncio.run(check_checkpoint(show.checkpoint)).findings == ()
    if SPARK >= READS_RAW and kind.is_read_by_spark and provider != "HDFS":
        theirs = [
            sparks_state_of(show, tmp_path / name, newest, state) for name in ("show/checkpoint", "elsewhere/plain")
        ]
        assert comparable(theirs[0], kind) == comparable(theirs[1], kind)


def run(show: Show, kind: Kind, sink: str, checkpoint: Path, **rest: Any) -> Results:
    """Run to the end of the input, or to the last batch that is compared."""
    for start in range(1, STARTS_MAX + 1):
        try:
            _run_once(show, kind, sink, checkpoint, **rest)
            break
        except StreamingQueryException as error:
            if TOO_SLOW not in str(error) or start == STARTS_MAX:
                raise
    return {batch: rows for batch, rows in show.results(sink).items() if batch < BATCHES or not kind.is_endless}


def _run_once(show: Show, kind: Kind, sink: str, checkpoint: Path, **rest: Any) -> None:
    query = show.start(sink, checkpoint, available_now=not kind.is_endless, **rest)
    try:
        if kind.is_endless:
            wait_until(lambda: show.committed(checkpoint) >= BATCHES - 1 or not query.isActive)
        else:
            query.awaitTermination()
        if (error := query.exception()) is not None:
            raise error
    finally:
        query.stop()


async def _back_up(url: str, checkpoint: Path) -> None:
    async with await Repository.open(url) as repository:
        done = await backup_checkpoint(repository, checkpoint, BackupChoice(keep_batches=BACKED_UP - OLDER))
        assert done.backup.batch == BACKED_UP
        assert done.findings == ()


async def _restore(url: str, target: Path, choice: RestoreChoice) -> int:
    async with await Repository.open(url) as repository:
        return (await restore_checkpoint(repository, target, choice)).batch


def state_of(checkpoint: Path, batch: int) -> State:
    """Every row of every store after a batch, as we read it."""

    async def read(scratch: Path) -> State:
        opened = await StreamingCheckpoint.open(checkpoint)
        stores = (await opened.at(batch)).stores
        await opened.close()
        found: State = {}
        for number, store in enumerate(stores):
            files = await CheckpointDir.open(checkpoint, store.id.path)
            async with await StateStore.open(files, scratch / str(number), store.settings, owns_files=True) as state:
                await state.load(store.at.version, store.at.unique_id, read_only=True)
                rows = ((family, key, value) for family in state.families for key, value in state.items(family=family))
                found[store.id.operator, store.id.partition, store.id.store] = Counter(rows)
        return found

    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(read(Path(scratch)))


def sparks_state_of(show: Show, checkpoint: Path, batch: int, stores: Iterable[tuple[int, int, str]]) -> State:
    """The same, as Spark reads it."""
    session = show.session()
    frames = [
        session.read.format("statestore")
        .options(batchId=batch, operatorId=operator, storeName=store, _readAllColumnFamilies="true")
        .load(str(checkpoint))
        .select(
            F.struct(F.lit(operator), F.spark_partition_id(), F.lit(store)).alias("of"),
            F.struct("column_family_name", F.col("key_bytes"), F.col("value_bytes")).alias("row"),
        )
        for operator, store in sorted({(operator, store) for operator, _, store in stores})
    ]
    found: State = {}
    for of, (family, key, value) in reduce(DataFrame.unionAll, frames).collect() if frames else ():
        found.setdefault((of[0], of[1], of[2]), Counter())[family, bytes(key), bytes(value)] += 1
    return found


def everywhere(state: State) -> State:
    """The rows of each store in all partitions, as of partition 0."""
    found: State = {}
    for (operator, _, store), rows in state.items():
        found.setdefault((operator, 0, store), Counter()).update(rows)
    return found


def comparable(state: State, kind: Kind) -> object:
    """A state, or how many rows it has."""
    return {store: rows.total() for store, rows in state.items()} if kind.is_clocked else state


@pytest.mark.soak
@pytest.mark.parametrize("kind", [kind for kind in HERE if kind.hdfs_since > SPARK], ids=lambda kind: kind.name)
def test_spark_refuses_the_hdfs_backed_provider(spark: SparkSession, tmp_path: Path, kind: Kind) -> None:
    show = Show(spark, kind.query, tmp_path / "show", PROVIDERS["HDFS"], batches=1)
    with pytest.raises(StreamingQueryException, match=r"multiple column families|STORE_BACKEND_NOT_SUPPORTED_FOR_TWS"):
        show.run("sink")

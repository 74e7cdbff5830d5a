"""What `spark explain` finds in real stores: against their rows, within its requests, and past what is damaged."""

import shutil
from pathlib import Path

import msgspec

from blobstore.base import BytesBody
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import Meter, MeteredStore
from engine.checkpoint.backup import backup_checkpoint
from engine.checkpoint.explain import ExplainChoice, StateExplained, explain_backup, explain_checkpoint
from engine.repository.repository import Repository
from index.spark.query_logs import decode_commit, encode_commit
from index.spark.state_figures import OperatorFigures
from tests.unit.engine.checkpoint.checked import below
from tests.unit.engine.checkpoint.written_query import rows_of

PARTITIONS = 200
FULL = ExplainChoice(full=True)


async def of_many_partitions(checkpoint: Path) -> MemoryStore:
    """The checkpoint with each of its two partitions a hundred times."""
    store = MemoryStore()
    for path in below(checkpoint, "**/[!.]*"):
        if not path.is_file():
            continue
        name, data = path.relative_to(checkpoint).as_posix(), path.read_bytes()
        parts = name.split("/")
        if parts[0] == "commits":
            commit = decode_commit(data)
            ids = (commit.unique_ids or {})[0]
            data = encode_commit(msgspec.structs.replace(commit, unique_ids={0: ids * (PARTITIONS // 2)}))
        copies = range(int(parts[2]), PARTITIONS, 2) if parts[0] == "state" and parts[2].isdecimal() else [None]
        for partition in copies:
            key = name if partition is None else "/".join([*parts[:2], str(partition), *parts[3:]])
            await store.put(key, BytesBody(data))
    return store


def operator(found: StateExplained) -> OperatorFigures:
    (only,) = found.operators
    return only


async def test_two_hundred_partitions_take_at_most_two_requests_each(checkpoint: Path) -> None:
    meter = Meter()
    found = await explain_checkpoint(MeteredStore(await of_many_partitions(checkpoint), meter))
    assert found.requests == meter.requests.total() <= 2 * PARTITIONS
    assert (operator(found).partitions, found.problems) == (PARTITIONS, ())
    here = operator(await explain_checkpoint(checkpoint))
    assert operator(found).rows == here.rows * PARTITIONS // 2  # type: ignore[operator]
    assert operator(found).entries_by == "estimated"
    assert operator(found).entries == here.entries * PARTITIONS // 2  # type: ignore[operator]


async def test_quick_figures_are_of_the_batch_that_they_name(checkpoint: Path, tmp_path: Path) -> None:
    found = await explain_checkpoint(checkpoint)
    batches = {of.batch for of in found.stores}
    (batch,) = batches
    assert batch is not None
    assert batch < found.batch == 7
    rows = await rows_of(checkpoint, tmp_path, batch=batch)
    for of in found.stores:
        assert (of.rows, of.rows_by) == (len(rows[of.id]), "snapshot")
        assert of.changelogs_after == found.batch - batch
        assert sum(level.size_bytes for level in of.levels) == of.sst_bytes


async def test_full_figures_are_those_of_all_rows(checkpoint: Path, tmp_path: Path) -> None:
    found = await explain_checkpoint(checkpoint, FULL)
    rows = await rows_of(checkpoint, tmp_path)
    assert {of.id: (of.rows, of.row_bytes) for of in found.stores} == {
        of: (len(each), sum(len(key) + len(value) for (_, key), value in each.items())) for of, each in rows.items()
    }
    assert operator(found).rows_by == operator(found).row_bytes_by == "counted"


async def test_a_backup_has_the_same_figures(repository: Repository, checkpoint: Path) -> None:
    await backup_checkpoint(repository, checkpoint)
    of_backup, of_checkpoint = (
        await explain_backup(repository, "here", FULL),
        await explain_checkpoint(checkpoint, FULL),
    )
    assert of_backup.batch == of_checkpoint.batch
    for name in ("rows", "row_bytes", "sst_bytes", "entries", "levels", "never"):
        assert getattr(operator(of_backup), name) == getattr(operator(of_checkpoint), name)
    assert of_backup.cost is None


async def test_a_backup_takes_at_most_two_requests_a_store(
    repository: Repository, checkpoint: Path, tmp_path: Path
) -> None:
    await backup_checkpoint(repository, checkpoint)
    there = await explain_backup(repository, "there")
    quick = await explain_checkpoint(checkpoint)
    assert 0 < there.requests <= 2 * len(there.stores)
    assert [(of.rows, of.sst_bytes, of.levels) for of in there.stores] == [
        (of.rows, of.sst_bytes, of.levels) for of in quick.stores
    ]
    assert operator(there).entries is None
    # In a directory of this machine no request is to be saved.
    async with await Repository.init(f"file://{tmp_path}/repository") as here:
        await backup_checkpoint(here, checkpoint)
        assert operator(await explain_backup(here, "here")).entries == operator(quick).entries


async def test_growth_is_against_the_batch_that_is_named(checkpoint: Path, tmp_path: Path) -> None:
    found = await explain_checkpoint(checkpoint, ExplainChoice(full=True, since=4))
    before, now = await rows_of(checkpoint, tmp_path / "4", batch=4), await rows_of(checkpoint, tmp_path / "7")
    growth = operator(found).growth
    assert growth is not None
    assert growth.since_batch == growth.since_batch_last == 4
    assert growth.rows == sum(map(len, now.values())) - sum(map(len, before.values())) > 0


async def test_growth_between_two_batches_of_one_snapshot_is_unknown(checkpoint: Path) -> None:
    assert operator(await explain_checkpoint(checkpoint, ExplainChoice(since=6))).growth is None
    growth = operator(await explain_checkpoint(checkpoint, ExplainChoice(since=3))).growth
    assert growth is not None
    assert (growth.since_batch, growth.rows) == (2, 6)


async def test_a_snapshot_of_a_lost_attempt_does_not_count(checkpoint: Path) -> None:
    whole = await explain_checkpoint(checkpoint)
    older, newer = below(checkpoint, "state/0/0/*.zip")[-2:]
    # Newer than what counts, and of another history.
    version = int(newer.name.partition("_")[0]) + 1
    shutil.copyfile(older, newer.with_name(f"{version}_00000000-0000-0000-0000-000000000000.zip"))
    found = await explain_checkpoint(checkpoint)
    assert [(of.batch, of.rows) for of in found.stores] == [(of.batch, of.rows) for of in whole.stores]


async def test_a_changelog_of_a_lost_attempt_does_not_count(checkpoint: Path) -> None:
    whole = await explain_checkpoint(checkpoint)
    newest = below(checkpoint, "state/0/0/*.changelog")[-1]
    version = newest.name.partition("_")[0]
    for digit in "0f":
        lost = newest.with_name(f"{version}_{digit * 8}-0000-0000-0000-000000000000.changelog")
        lost.write_bytes(newest.read_bytes() * 2)
    (found, _), (before, _) = (await explain_checkpoint(checkpoint)).stores, whole.stores
    assert before.changelogs_after > 0
    assert (found.changelogs_after, found.changelogs_after_bytes) == (
        before.changelogs_after,
        before.changelogs_after_bytes,
    )


async def test_what_cannot_be_read_is_unknown_and_not_nothing(checkpoint: Path) -> None:
    for path in below(checkpoint, "state/0/1/*.zip"):
        path.write_bytes(b"PK")
    found = await explain_checkpoint(checkpoint)
    assert [of.rows is None for of in found.stores] == [False, True]
    assert (operator(found).rows, operator(found).rows_by, operator(found).row_skew) == (None, "unknown", None)
    assert [problem.partition(":")[0] for problem in found.problems] == ["state/0/1"]

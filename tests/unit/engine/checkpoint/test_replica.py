"""A replica has the rows of its source, batch by batch, and goes on once it is cut over (design 0011, Q1 to Q10)."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.checkpoint import groups, replica
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.cutover import CutoverChoice, cut_over, plan_cutover
from engine.checkpoint.replica import FollowChoice, QueryFollower, opened_follower
from engine.errors import MisplacedKeyError, NotFoundError, PromotedError, TargetBusyError, TargetError, UsageError
from tests.unit.engine.checkpoint.test_rescale import by_another_hash
from tests.unit.engine.checkpoint.written_query import Rows, WrittenQuery, by_crc, joined, rows_of, whole_key_rules

PLANTED = {b"planted-%d" % n: b"%d" % n for n in range(40)}


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "read_key_rules", whole_key_rules)
    monkeypatch.setattr(replica, "read_key_rules", whole_key_rules)


async def written(tmp_path: Path, partitions: int = 4, batches: int = 2, **options: Any) -> WrittenQuery:
    query = WrittenQuery(
        tmp_path / "query", tmp_path / "work", partitions=partitions, planted=PLANTED, hashed=True, **options
    )
    await (await query.begin()).run(batches)
    return query


class Looks:
    """Reads the rows of checkpoints, each time in a directory of its own."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._count = 0

    async def at(self, checkpoint: Path, batch: int | None = None) -> Rows:
        self._count += 1
        return joined(await rows_of(checkpoint, self._scratch / str(self._count), batch=batch))


@pytest.fixture
def looks(tmp_path: Path) -> Looks:
    return Looks(tmp_path / "looks")


@pytest.mark.parametrize(
    ("before", "after", "format_version", "options"),
    [
        (4, 2, 2, {}),
        (4, 8, 2, {"families": True}),
        (4, 6, 1, {"row_checksums": True}),
        (4, 1, 1, {"families": True}),
        (3, None, 2, {"row_checksums": True, "families": True}),
        (2, None, 1, {"codec": "zstd"}),
    ],
)
async def test_a_replica_has_every_batch_and_goes_on_after_a_cutover(
    tmp_path: Path, looks: Looks, before: int, after: int | None, format_version: Literal[1, 2], options: dict[str, Any]
) -> None:
    query = await written(tmp_path, before, format_version=format_version, **options)
    target, choice = tmp_path / "target", FollowChoice(partitions=after, snapshot_every=3)
    async with opened_follower(query.root, target, choice, partitioner=by_crc) as follower:
        assert await follower.batch() == 1
        snapshots = 0
        for batch in range(2, 9):
            await query.run(1)
            step = await follower.step()
            assert (step.batch, step.batches, step.copied) == (batch, 1, "")
            assert await looks.at(target) == await looks.at(query.root)
            snapshots += step.snapshots
        assert snapshots >= (after or before)
        await query.run(3)
        assert (await follower.step()).batches == 3
    assert not list(tmp_path.glob(".target*"))
    done = await cut_over(target, CutoverChoice(wait_s=0), partitioner=by_crc)
    assert (done.batch, done.planned_batch, done.batches) == (11, None, 0)
    expected = await looks.at(query.root, 11)
    assert await looks.at(target) == expected
    report = await check_checkpoint(target)
    assert report.is_sound, report.findings
    assert not report.warnings
    await query.resume(target, 11)
    await query.run(2)
    assert (await looks.at(target)).items() >= {("default", key): value for key, value in PLANTED.items()}.items()

"""Queries that are followed, and what they have at their replicas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.follower import FollowChoice, QueryStep, opened_follower
from engine.state.checkpoint_dir import CheckpointDir
from tests.unit.engine.checkpoint.written_query import Rows, WrittenQuery, by_crc, joined, rows_of

PLANTED = {b"planted-%d" % n: b"%d" % n for n in range(40)}


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


class KilledError(BaseException):
    """Stands for a kill: nothing that runs afterwards may write."""


class Killer:
    """Ends a process before one of the writes to a checkpoint, and lets none through after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        self.writes = 0
        for name in ("publish", "delete"):
            monkeypatch.setattr(CheckpointDir, name, self._before(getattr(CheckpointDir, name)))

    def _before(self, write: Callable[..., Any]) -> Callable[..., Any]:
        async def run(*args: Any, **options: Any) -> Any:
            self.writes += 1
            if self.left is not None:
                if self.left == 0:
                    raise KilledError
                self.left -= 1
            return await write(*args, **options)

        return run


async def step(query: WrittenQuery, target: Path, choice: FollowChoice | None = None) -> QueryStep:
    async with opened_follower(query.root, target, choice, partitioner=by_crc) as follower:
        return await follower.step()


async def check_goes_on(query: WrittenQuery, target: Path, looks: Looks, batch: int) -> None:
    """The query goes on at a replica that was cut over, and everything there is whole."""
    assert await looks.at(target) == await looks.at(query.root, batch)
    root, before = query.root, query.batch
    await query.resume(target, batch)
    await query.run(2)
    report = await check_checkpoint(target)
    assert report.is_sound, report.findings
    await query.resume(root, before)


# Every kill is tried by `make endure`.
STRIDES = [pytest.param(1, marks=pytest.mark.soak), 8]


def newest(checkpoint: Path) -> int:
    return max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdecimal())

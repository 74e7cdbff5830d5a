"""A lifecycle rule of the store leaves collections the time to heal a commit whose writer was killed (0002, T3)."""

from pathlib import Path
from random import Random

import pytest

from blobstore.base import list_blobs
from blobstore.memory import MemoryStore
from blobstore.s3.bucket_rules import DAY_MS, backstop_days
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.model import Scope
from tests.doubles import InterposedStore, SteppedClock

HOUR_MS = DAY_MS // 24
JOB = Scope("job")


class Bucket:
    """A store with a lifecycle rule, to which somebody goes at known times."""

    def __init__(self, days: int) -> None:
        self.clock = SteppedClock()
        self.store = MemoryStore(clock=self.clock)
        self._days = days
        self._began_ms = self.clock.now_ms

    async def wait_until(self, at_ms: int) -> None:
        """Let the time pass, and the rule do its work."""
        self.clock.now_ms = self._began_ms + at_ms
        for prefix in ("blobs/", "indexes/"):
            for blob in [blob async for blob in list_blobs(self.store, prefix)]:
                is_old = self.clock.now_ms >= blob.created_at_ms + self._days * DAY_MS
                if is_old and blob.expires_at_ms is not None:
                    await self.store.delete([blob.key])


async def check_commit_survives(
    tmp_path: Path, *, ttl_ms: int, margin_ms: int, period_ms: int, backup_at_ms: int, commit_at_ms: int, missed: int
) -> None:
    """The writer is killed between its record and the removal of TTLs; then a number of collections do not happen."""
    days = backstop_days(ttl_ms=ttl_ms, margin_ms=margin_ms, collection_period_ms=period_ms)
    bucket = Bucket(days)
    writing = InterposedStore(bucket.store)
    repository = await Repository.init(writing, ttl_ms=ttl_ms, margin_ms=margin_ms, collection_period_ms=period_ms)
    state = tmp_path / "state"
    state.mkdir(exist_ok=True)
    (state / "base.sst").write_bytes(b"base" * 40_000)

    await bucket.wait_until(backup_at_ms)
    result = await repository.backup(JOB, state)
    await bucket.wait_until(commit_at_ms)
    for prefix in ("blobs/", "indexes/"):
        writing.fail("remove_ttl", prefix)
    await repository.commit(JOB, [result])

    first = commit_at_ms // period_ms + 1 + missed
    for number in range(first, first + 3 + days * DAY_MS // period_ms):
        await bucket.wait_until(number * period_ms)
        collector = await Repository.open(bucket.store)
        await collector.collect(Retention(keep_last=1), delete_share_max=1)
    commit = await (await Repository.open(bucket.store)).latest(JOB)
    assert commit is not None
    await repository.restore(commit, tmp_path / "restored")
    assert (tmp_path / "restored" / "base.sst").read_bytes() == b"base" * 40_000


async def test_a_commit_late_in_a_long_lease_is_healed_in_time(tmp_path: Path) -> None:
    """A rule after the TTL and a day deleted it on day 8.00, where the collection came on day 8.90."""
    await check_commit_survives(
        tmp_path,
        ttl_ms=7 * DAY_MS,
        margin_ms=HOUR_MS,
        period_ms=2 * DAY_MS,
        backup_at_ms=26 * HOUR_MS,
        commit_at_ms=26 * HOUR_MS + 167 * HOUR_MS,
        missed=0,
    )


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_init_accepts_two_collections_may_fail(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    ttl_ms = rng.randint(2 * HOUR_MS, 30 * DAY_MS)
    margin_ms = rng.randint(HOUR_MS // 60, (ttl_ms - 1) // 2)
    backup_at_ms = rng.randint(0, 10 * DAY_MS)
    await check_commit_survives(
        tmp_path,
        ttl_ms=ttl_ms,
        margin_ms=margin_ms,
        period_ms=rng.randint(DAY_MS // 2, 12 * DAY_MS),
        backup_at_ms=backup_at_ms,
        commit_at_ms=backup_at_ms + rng.choice([0, (ttl_ms - margin_ms) // 2, ttl_ms - margin_ms]),
        missed=2,
    )

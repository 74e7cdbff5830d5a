"""Collection on a real Spark: the same as in one process, with nothing on the driver that grows with the inventory."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from blobstore.base import list_blobs
from engine.collect.report import CollectReport
from engine.errors import DamagedError, TooMuchToDeleteError
from engine.repository.repository import SyncRepository
from engine.spark import collect
from index.plan.collect import DeleteReason
from index.plan.commits import SHRINK_FLOOR_BYTES, Commit, Retention
from index.snapshot.keys import AUDIT, RUNS
from index.snapshot.model import Scope

pytestmark = pytest.mark.spark

KEEP_TWO = Retention(keep_last=2)
SCOPES = (Scope("flights"), Scope("rides"))
STORES = (("0", "facts"), ("1", "facts"))


@pytest.fixture
def repository(url: str) -> Iterator[SyncRepository]:
    with SyncRepository.open(url) as opened:
        yield opened


def back_up(repository: SyncRepository, root: Path, generation: int) -> list[Commit]:
    """A commit of every scope: each store keeps most of its files, has one more, and one changed."""
    commits = []
    for scope in SCOPES:
        results = []
        for task, store in STORES:
            directory = root / scope.job / task
            directory.mkdir(parents=True, exist_ok=True)
            for name in (f"{generation:06d}.sst", "CURRENT"):
                (directory / name).write_bytes(f"{scope} {task} {name} {generation}\n".encode() * 3000)
            results.append(repository.backup(scope, directory, task=task, store=store))
        commits.append(repository.commit(scope, results, offsets=f"generation {generation}"))
    return commits


def stored(repository: SyncRepository, prefix: str = "") -> set[str]:
    async def keys() -> set[str]:
        return {blob.key async for blob in list_blobs(repository.asynchronous.store, prefix)}

    return repository.loop.run(keys())


def facts(report: CollectReport) -> dict[str, object]:
    shown = {name: getattr(report, name) for name in report.__struct_fields__ if name not in {"run", "dry_run"}}
    return shown | {"deletes": sorted((d.key, d.reason, d.size_bytes) for d in report.deletes)}


def test_it_agrees_with_the_collection_in_one_process(
    spark: SparkSession, url: str, repository: SyncRepository, tmp_path: Path
) -> None:
    for generation in range(1, 5):
        back_up(repository, tmp_path / "disk", generation)
    then_s = time.time() - 2 * 86_400
    for path in (tmp_path / "repository").glob("[bi]*/**/*"):
        if path.is_file():
            os.utime(path, (then_s, then_s))
    (tmp_path / "disk" / "rides" / "1" / "more").write_bytes(b"never committed" * 9999)
    repository.backup(SCOPES[1], tmp_path / "disk" / "rides" / "1", task="1", store="facts")
    foreign = tmp_path / "repository" / "blobs" / "00" / "somebody-elses"
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_bytes(b"not ours")
    before = stored(repository)
    expected = repository.collect(KEEP_TWO, dry_run=True, delete_share_max=1)
    planned = collect(spark, url, KEEP_TWO, dry_run=True, delete_share_max=1)
    assert facts(planned) == facts(expected)
    assert stored(repository) == before
    report = collect(spark, url, KEEP_TWO, delete_share_max=1)
    assert facts(report) == facts(expected)
    assert report.waiting_count > 0
    assert report.foreign == ("blobs/00/somebody-elses",)
    assert {total.reason for total in report.totals} == {DeleteReason.CLOSED_COMMIT, DeleteReason.UNREACHABLE_UPLOAD}
    assert before - stored(repository) == {delete.key for delete in report.deletes}
    assert stored(repository, RUNS) == set()
    for scope in SCOPES:
        kept = repository.commits(scope)
        assert [commit.record.offsets for commit in kept] == ["generation 4", "generation 3"]
        for commit in kept:
            repository.restore(commit, tmp_path / f"{scope} {commit.pointer.number}", task="1", store="facts")


def test_it_refuses_to_shrink_a_job_as_one_process_does(
    spark: SparkSession, url: str, repository: SyncRepository, tmp_path: Path
) -> None:
    """Design 0006, P9."""
    scope, state = Scope("flights"), tmp_path / "state"
    for size_bytes in (2 * SHRINK_FLOOR_BYTES, 1, 2):
        state.mkdir(exist_ok=True)
        (state / "1.sst").write_bytes(bytes(size_bytes))
        repository.commit(scope, [repository.backup(scope, state)])
    expected = repository.collect(KEEP_TWO, dry_run=True)
    assert [job.job for job in expected.shrunk] == ["flights"]
    assert facts(collect(spark, url, KEEP_TWO, dry_run=True)) == facts(expected)
    with pytest.raises(TooMuchToDeleteError, match=r"would shrink flights from 2\.0 MiB to 2 B"):
        collect(spark, url, KEEP_TWO)
    assert len(repository.commits(scope)) == 3
    assert collect(spark, url, KEEP_TWO, delete_share_max=1).boundaries


@pytest.mark.soak  # test_collect_backend shows it without a JVM
def test_it_deletes_nothing_if_an_index_is_altered(
    spark: SparkSession, url: str, repository: SyncRepository, tmp_path: Path
) -> None:
    back_up(repository, tmp_path / "disk", 1)
    altered = back_up(repository, tmp_path / "disk", 2)[0].record.stores[0].index.key
    (tmp_path / "repository").joinpath(*altered.split("/")).write_bytes(b"altered")
    before = stored(repository)
    with pytest.raises(DamagedError, match=altered):
        collect(spark, url, KEEP_TWO, delete_share_max=1)
    left = stored(repository)
    assert {key for key in left if not key.startswith((RUNS, AUDIT))} == before
    planned = collect(spark, url, KEEP_TWO, delete_share_max=1, dry_run=True)
    assert (planned.damaged, [key for key, _ in planned.unreadable], planned.deletes) == (True, [altered], ())
    assert stored(repository) == left

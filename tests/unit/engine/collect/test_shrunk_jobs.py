"""A collection that would take the last large state of a job (design 0006, P9)."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.cli import tidemark
from engine.cli.run import ExitCode
from engine.collect.report import CollectReport
from engine.errors import TooMuchToDeleteError
from engine.repository.repository import Repository
from index.display import human_bytes
from index.plan.collect import ShrunkJob
from index.plan.commits import SHRINK_FLOOR_BYTES, Commit, Retention
from index.snapshot.model import Scope
from tests.unit.engine.conftest import TTL_MS, World

LARGE = 2 * SHRINK_FLOOR_BYTES
LAST = Retention(keep_last=1)
LAST_THREE = Retention(keep_last=3)
SCOPE = Scope("flights")
NEARLY_EMPTY = 4096


async def commit(world: World, repository: Repository, size_bytes: int, scope: Scope = SCOPE) -> Commit:
    """Commit one file of this size that no other commit has."""
    world.clock.advance(1000)
    seed = world.clock.now_ms.to_bytes(8)
    tree = world.tree({"000001.sst": (seed * (size_bytes // len(seed) + 1))[:size_bytes]})
    return await repository.commit(scope, [await repository.backup(scope, tree, task=scope.task or "0")])


async def with_seven_others(world: World, *sizes: int) -> Repository:
    """Commit states of these sizes of a job beside seven other jobs; all uploads are older than the TTL."""
    repository = await world.process()
    for number in range(7):
        await commit(world, repository, LARGE, Scope(f"other-{number}"))
    for size_bytes in sizes:
        await commit(world, repository, size_bytes)
    world.clock.advance(TTL_MS)
    return repository


async def plan(repository: Repository, retention: Retention = LAST, share_max: float = 0.2) -> CollectReport:
    return await repository.collect(retention, dry_run=True, delete_share_max=share_max)


async def test_a_job_that_backed_up_a_nearly_empty_directory_keeps_its_last_large_state(world: World) -> None:
    repository = await with_seven_others(world, LARGE, NEARLY_EMPTY, NEARLY_EMPTY, NEARLY_EMPTY)
    planned = await plan(repository, LAST_THREE)
    # Of the whole repository it is less than P4 allows.
    assert planned.freed_bytes < 0.2 * planned.listed_bytes
    assert planned.refused
    assert planned.shrunk == (ShrunkJob(job="flights", before_bytes=LARGE, after_bytes=NEARLY_EMPTY),)
    there = await world.keys()
    message = rf"would shrink flights from {human_bytes(LARGE)} to 4\.0 KiB \(99\.8%\), and may shrink a job by 50\.0%"
    for _ in range(2):
        with pytest.raises(TooMuchToDeleteError, match=message):
            await (await world.process()).collect(LAST_THREE)
    assert {key for key in await world.keys() if not key.startswith("audit/")} == there
    assert not (await plan(repository, LAST_THREE, share_max=1)).shrunk
    report = await repository.collect(LAST_THREE, delete_share_max=1)
    assert report.freed_bytes == planned.freed_bytes > LARGE


async def test_what_was_uploaded_too_recently_to_go_is_not_closed_either(world: World) -> None:
    repository = await world.process()
    for size_bytes in (LARGE, NEARLY_EMPTY):
        await commit(world, repository, size_bytes)
    planned = await plan(repository)
    assert planned.freed_bytes == 0
    with pytest.raises(TooMuchToDeleteError, match="would shrink flights"):
        await repository.collect(LAST)
    assert [c.pointer.number for c in await repository.commits(SCOPE)] == [2, 1]


async def test_a_job_that_rewrites_all_of_its_files_is_not_shrunk(world: World) -> None:
    repository = await world.process()
    for percent in (100, 180, 95, 120, 140, 110, 100):
        await commit(world, repository, LARGE * percent // 100)
    world.clock.advance(TTL_MS)
    planned = await plan(repository)
    # Of all bytes it is too much, as before.
    assert planned.freed_bytes > 0.8 * planned.listed_bytes
    assert planned.shrunk == ()
    with pytest.raises(TooMuchToDeleteError, match=r"would delete 88\.\d% of all bytes[^;]*; nothing"):
        await repository.collect(LAST)


@pytest.mark.parametrize(
    "after_bytes, share_max, is_refused",
    [
        (LARGE // 2, 0.2, False),
        (LARGE // 2 - 1, 0.2, True),
        (LARGE // 2 - 1, 0, True),
        (LARGE // 5, 0.9, False),
        (LARGE // 20, 0.9, True),
        (0, 1, False),
    ],
)
async def test_half_may_go_and_more_only_where_more_is_allowed(
    world: World, after_bytes: int, share_max: float, is_refused: bool
) -> None:
    repository = await world.process()
    for size_bytes in (LARGE, after_bytes):
        await commit(world, repository, size_bytes)
    planned = await plan(repository, share_max=share_max)
    assert (planned.refused, bool(planned.shrunk)) == (is_refused, is_refused)


async def test_a_forgotten_job_goes_without_a_word(world: World) -> None:
    repository = await with_seven_others(world, LARGE)
    await repository.forget(SCOPE)
    report = await repository.collect(LAST)
    assert (report.shrunk, report.freed_bytes > LARGE) == ((), True)


async def test_a_small_job_may_lose_everything(world: World) -> None:
    repository = await with_seven_others(world, SHRINK_FLOOR_BYTES - 1, 0)
    report = await repository.collect(LAST)
    assert (report.shrunk, report.freed_bytes >= SHRINK_FLOOR_BYTES - 1) == ((), True)


async def test_an_old_state_that_a_name_keeps_stands_for_none_that_is_newer(world: World) -> None:
    repository = await world.process()
    old = await commit(world, repository, LARGE)
    await repository.name(old, "release")
    await commit(world, repository, NEARLY_EMPTY)
    # The large one stays, and what goes is small.
    assert (await plan(repository)).shrunk == ()
    for size_bytes in (LARGE, NEARLY_EMPTY):
        await commit(world, repository, size_bytes)
    assert [job.job for job in (await plan(repository)).shrunk] == ["flights"]


async def test_tasks_that_commit_for_themselves_are_one_job(world: World) -> None:
    repository = await world.process()
    tasks = [Scope("flights", str(number)) for number in range(3)]
    for scope in tasks:
        await commit(world, repository, LARGE, scope)
    await commit(world, repository, 0, tasks[0])
    assert (await plan(repository)).shrunk == ()
    await commit(world, repository, 0, tasks[1])
    assert (await plan(repository)).shrunk == (ShrunkJob(job="flights", before_bytes=3 * LARGE, after_bytes=LARGE),)


async def test_of_many_jobs_the_first_are_named(world: World) -> None:
    repository = await world.process()
    for number in range(7):
        for size_bytes in (SHRINK_FLOOR_BYTES, 0):
            await commit(world, repository, size_bytes, Scope(f"job-{number}"))
    with pytest.raises(TooMuchToDeleteError, match=r"job-4 from 1\.0 MiB to 0 B \(100\.0%\), 2 other jobs, and may"):
        await repository.collect(LAST)


def test_the_command_names_the_job_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TIDEMARK_REPOSITORY", str(tmp_path / "repository"))
    state = tmp_path / "state"
    state.mkdir()

    def run(*words: str, ends: int = ExitCode.OK) -> str:
        result = CliRunner().invoke(tidemark, list(words))
        assert result.exit_code == ends, result.output
        return result.output

    run("init")
    (state / "000001.sst").write_bytes(bytes(range(256)) * (LARGE // 256))
    run("backup", str(state), "--job", "flights")
    (state / "000001.sst").unlink()
    run("backup", str(state), "--job", "flights", ends=ExitCode.TOO_MUCH)
    run("backup", str(state), "--job", "flights", "--shrink-max", "100%")
    planned = run("collect", "--keep-last", "1", "-n", ends=ExitCode.TOO_MUCH)
    assert "flights would shrink from 2.0 MiB to 0 B (100.0%)" in planned
    assert "WOULD BE REFUSED: more than --delete-at-most" in planned
    refused = run("collect", "--keep-last", "1", ends=ExitCode.TOO_MUCH)
    assert "would shrink flights from 2.0 MiB to 0 B (100.0%)" in refused
    assert "say --delete-at-most 100%" in refused
    run("collect", "--keep-last", "1", "--delete-at-most", "100%")

"""What a real checkpoint leaves behind goes to a quarantine, once two looks agree (design 0014)."""

import os
import shutil
import uuid
from pathlib import Path

import pytest

from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.collect import (
    CheckpointCollected,
    CheckpointLook,
    CollectChoice,
    collect_checkpoint,
    read_look,
    undo_collection,
    write_look,
)
from engine.checkpoint.findings import Finding
from engine.cli.cmd.spark_collect import _lines
from engine.errors import ConflictError, NotFoundError, TooMuchToDeleteError, UsageError
from engine.state.query import StreamingCheckpoint
from tests.unit.engine.workbench import read_tree

SPARK = Path(__file__).resolve().parents[3] / "golden" / "spark"
# Real Spark wrote it: of versions 5 and 8 two attempts each have left files.
LOST = {
    "state/0/0/5_3065dc3e-f285-4aee-9fb2-bcce3627200b.changelog",
    "state/0/0/5_78dfe417-c5c9-47b8-ba1c-194b1306852e.changelog",
    "state/0/0/8_52aa8f69-d1a6-40e8-b98a-3074cb297a9f.changelog",
    "state/0/0/8_52aa8f69-d1a6-40e8-b98a-3074cb297a9f.zip",
    "state/0/0/8_bf09c4fb-2c25-4ed1-8727-5772c7f4d47f.changelog",
    "state/0/0/8_bf09c4fb-2c25-4ed1-8727-5772c7f4d47f.zip",
}
UUID = str(uuid.UUID(int=7))
ORPHAN = f"state/0/0/SSTs/000099-{UUID}.sst"
DEAD = f"state/3/0/2_{UUID}.changelog"
GONE = f"state/0/5/2_{UUID}.changelog"
DAY_S = 24 * 3600
STOPPED = CollectChoice(is_stopped=True, taken_share_max=1)


def age(root: Path, days: float) -> None:
    """Let all that is there be older."""
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (path.stat().st_mtime - days * DAY_S,) * 2)


def files_of(root: Path) -> dict[str, bytes]:
    return {path: data for path, data in read_tree(root).items() if not path.endswith("/")}


def refresh(root: Path) -> None:
    """Let the snapshots be younger than all other state, and the newest commit younger than all of it."""
    age(root, 2)
    for path in root.glob("state/0/0/*.zip"):
        os.utime(path)
    age(root, 2)
    os.utime(root / "commits" / "9")


def plant(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"planted")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of which all but the newest commit is days old."""
    root = tmp_path / "checkpoint"
    shutil.copytree(SPARK / "lost-attempts", root, copy_function=shutil.copyfile)
    (root / "rows.json").unlink()
    age(root, 3)
    os.utime(root / "commits" / "9")
    return root


async def state_findings(root: Path) -> list[Finding]:
    """What is wrong with the state; its sources nobody has kept."""
    return [finding for finding in (await check_checkpoint(root)).findings if finding.path.startswith("state/")]


async def collect(
    root: Path, before: CheckpointLook | None = None, choice: CollectChoice = STOPPED, *, dry_run: bool = False
) -> tuple[CheckpointCollected, CheckpointLook]:
    return await collect_checkpoint(root, root.with_name("aside"), before, choice, dry_run=dry_run)


async def test_the_first_look_moves_nothing(checkpoint: Path) -> None:
    before = files_of(checkpoint)
    found, _ = await collect(checkpoint)
    assert {each.reason for each in found.found} == {"lost attempt"}
    assert (found.taken, found.waits_for) == ((), "a second look")
    assert files_of(checkpoint) == before


async def test_a_second_look_that_finds_nothing_does_not_say_that_something_was_moved(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    _, look = await collect(checkpoint, look)
    found, _ = await collect(checkpoint, look)
    for dry_run in (False, True):
        assert _lines(found, "aside", dry_run=dry_run)[1:] == ["found nothing that nobody needs", "nothing was moved"]


async def test_waste_of_every_kind_is_taken_and_nothing_else(checkpoint: Path) -> None:
    plant(checkpoint, ORPHAN, DEAD, GONE, "state/0/0/SSTs/not-of-spark.sst", "state/9/notes.txt")
    refresh(checkpoint)
    before = files_of(checkpoint)
    _, look = await collect(checkpoint)
    found, _ = await collect(checkpoint, look)
    reasons = {each.path: each.reason for each in found.taken}
    assert {path: reasons.pop(path) for path in (ORPHAN, DEAD, GONE)} == {
        ORPHAN: "orphan",
        DEAD: "dead operator",
        GONE: "dead partition",
    }
    assert set(reasons.values()) == {"lost attempt"}
    assert {path.removesuffix(".crc") for path in reasons} <= LOST
    after, aside = files_of(checkpoint), files_of(checkpoint.with_name("aside"))
    assert aside.pop("metadata") == before["metadata"]
    assert {**after, **aside} == before
    assert set(aside) == {each.path for each in found.taken}
    assert await state_findings(checkpoint) == []
    # What the snapshot of a lost attempt alone has named is an orphan for the next run, and goes then.
    _, look = await collect(checkpoint)
    again, _ = await collect(checkpoint, look)
    assert {each.reason for each in again.taken} <= {"orphan"}
    assert await state_findings(checkpoint) == []


async def test_orphans_of_a_query_that_may_run_stay(checkpoint: Path) -> None:
    plant(checkpoint, ORPHAN)
    refresh(checkpoint)
    found, _ = await collect(checkpoint, choice=CollectChoice(taken_share_max=1))
    assert found.found
    assert ORPHAN not in {each.path for each in found.found}


async def test_undo_brings_all_back(checkpoint: Path) -> None:
    before = files_of(checkpoint)
    _, look = await collect(checkpoint)
    found, _ = await collect(checkpoint, look)
    assert found.taken
    back = await undo_collection(checkpoint, checkpoint.with_name("aside"))
    assert set(back) == {each.path for each in found.taken}
    assert files_of(checkpoint) == before
    assert files_of(checkpoint.with_name("aside")) == {}
    with pytest.raises(NotFoundError, match="no quarantine here"):
        await undo_collection(checkpoint, checkpoint.with_name("aside"))


async def test_a_live_query_has_to_commit_a_batch_between(checkpoint: Path) -> None:
    choice = CollectChoice(taken_share_max=1)
    _, look = await collect(checkpoint, choice=choice)
    found, look = await collect(checkpoint, look, choice)
    assert (found.taken, found.waits_for) == ((), "another batch to be committed")
    for log in ("offsets", "commits"):
        shutil.copyfile(checkpoint / log / "9", checkpoint / log / "10")
    found, _ = await collect(checkpoint, look, choice)
    assert found.taken
    assert found.batch == 10


async def test_a_stopped_query_that_goes_on_is_waited_for(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    shutil.copyfile(checkpoint / "offsets" / "9", checkpoint / "offsets" / "10")
    found, _ = await collect(checkpoint, look)
    assert (found.taken, found.waits_for[:17]) == ((), "the query to stop")


async def test_a_query_that_was_taken_back_is_refused(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    (checkpoint / "commits" / "9").unlink()
    with pytest.raises(ConflictError, match="taken back"):
        await collect(checkpoint, look)


async def test_commits_that_spark_purges_during_a_look_are_not_missed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go one after the other, while the commits are read."""
    _, look = await collect(checkpoint)
    list_batches = StreamingCheckpoint.committed_batches

    async def list_and_purge(self: StreamingCheckpoint) -> tuple[int, ...]:
        batches = await list_batches(self)
        (checkpoint / "commits" / str(batches[1])).unlink()
        return batches

    with monkeypatch.context() as patched:
        patched.setattr(StreamingCheckpoint, "committed_batches", list_and_purge)
        found, _ = await collect(checkpoint, look)
    assert (found.taken, found.waits_for[:17]) == ((), "the query to stop")


async def test_looks_without_a_batch_in_common_are_refused(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    for path in (checkpoint / "commits").iterdir():
        if path.name != "9":
            path.unlink()
    (checkpoint / "commits" / "9").rename(checkpoint / "commits" / "10")
    with pytest.raises(ConflictError, match="batch 9 of the first look is purged"):
        await collect(checkpoint, look)


async def test_a_file_that_was_written_again_stays(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    taken_first = {each.path for each in look.collectable}
    touched = min(taken_first)
    os.utime(checkpoint / touched)
    found, _ = await collect(checkpoint, look)
    assert {each.path for each in found.taken} == taken_first - {touched}


async def test_nothing_young_is_taken(checkpoint: Path) -> None:
    age(checkpoint, -2.5)
    os.utime(checkpoint / "commits" / "9")
    found, _ = await collect(checkpoint)
    assert found.found == ()


async def test_a_snapshot_that_cannot_be_read_keeps_the_orphans(checkpoint: Path) -> None:
    plant(checkpoint, ORPHAN)
    refresh(checkpoint)
    found, _ = await collect(checkpoint)
    assert ORPHAN in {each.path for each in found.found}
    (checkpoint / "state/0/0/4_c95511a4-f7e0-40ac-9d4f-112c04dc4b86.zip").write_bytes(b"damaged")
    found, _ = await collect(checkpoint)
    assert ORPHAN not in {each.path for each in found.found}


async def test_more_than_a_share_is_refused(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    before = files_of(checkpoint)
    with pytest.raises(TooMuchToDeleteError, match="of the state"):
        await collect(checkpoint, look, CollectChoice(is_stopped=True, taken_share_max=0.0001))
    assert files_of(checkpoint) == before


async def test_a_dry_run_moves_nothing(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    before = files_of(checkpoint)
    found, _ = await collect(checkpoint, look, dry_run=True)
    assert found.taken
    assert files_of(checkpoint) == before


async def test_a_quarantine_within_the_checkpoint_is_refused(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    with pytest.raises(UsageError, match="is in the checkpoint"):
        await collect_checkpoint(checkpoint, checkpoint / "state" / "aside", look, STOPPED)


async def test_a_quarantine_around_the_checkpoint_is_refused(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    with pytest.raises(UsageError, match="or the checkpoint in it"):
        await collect_checkpoint(checkpoint, checkpoint.parent, look, STOPPED)
    assert not (checkpoint.parent / "state").exists()


async def test_a_quarantine_that_no_undo_would_take_is_refused(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    other = checkpoint.with_name("aside")
    shutil.copytree(checkpoint, other)
    before = files_of(other)
    with pytest.raises(UsageError, match="has commits, and no undo would take it"):
        await collect(checkpoint, look)
    assert files_of(other) == before


@pytest.mark.parametrize("place", [".", "..", "state", "../copy"])
async def test_undo_moves_only_what_a_collection_takes(checkpoint: Path, place: str) -> None:
    shutil.copytree(checkpoint, checkpoint.with_name("copy"))
    before = files_of(checkpoint.parent)
    with pytest.raises(UsageError, match=r"in the checkpoint|no collection takes commits/0"):
        await undo_collection(checkpoint, checkpoint / place)
    assert files_of(checkpoint.parent) == before


async def test_a_quarantine_is_of_one_query(checkpoint: Path) -> None:
    other = shutil.copytree(checkpoint, checkpoint.with_name("other"))
    (other / "metadata").write_text('{"id":"00000000-0000-4000-8000-000000000001"}')
    _, look = await collect(checkpoint)
    await collect(checkpoint, look)
    aside, before = checkpoint.with_name("aside"), files_of(checkpoint.parent)
    with pytest.raises(UsageError, match="of another query"):
        await undo_collection(other, aside)
    _, look = await collect(other)
    with pytest.raises(UsageError, match="of another query"):
        await collect_checkpoint(other, aside, look, STOPPED)
    # Of whom its files are nobody can say.
    (aside / "metadata").rename(checkpoint.with_name("metadata"))
    with pytest.raises(NotFoundError, match="no quarantine here"):
        await undo_collection(checkpoint, aside)
    checkpoint.with_name("metadata").rename(aside / "metadata")
    assert files_of(checkpoint.parent) == before


async def test_a_checkpoint_without_a_committed_batch_is_refused_and_no_look_is_kept_of_it(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "commits")
    with pytest.raises(NotFoundError, match="has no committed batch"):
        await collect(checkpoint)


async def test_undo_needs_a_checkpoint(checkpoint: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint here"):
        await undo_collection(checkpoint.with_name("typo"), checkpoint.with_name("aside"))


async def test_undo_keeps_what_is_there_again_in_another_form(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    found, _ = await collect(checkpoint, look)
    first, *others = [each.path for each in found.taken]
    (checkpoint / first).write_bytes(b"another, which is longer" * 1000)
    before = files_of(checkpoint.with_name("aside"))
    with pytest.raises(ConflictError, match="has another file at"):
        await undo_collection(checkpoint, checkpoint.with_name("aside"))
    assert files_of(checkpoint.with_name("aside")) == {name: before[name] for name in (first, "metadata")}
    assert files_of(checkpoint).keys() >= {first, *others}


async def test_nothing_in_a_quarantine_is_replaced(checkpoint: Path) -> None:
    _, look = await collect(checkpoint)
    aside = checkpoint.with_name("aside")
    first, *_ = (each.path for each in look.collectable)
    # As a run that was stopped between a copy and a removal leaves it.
    (aside / first).parent.mkdir(parents=True)
    shutil.copyfile(checkpoint / first, aside / first)
    last = look.collectable[-1].path
    (aside / last).write_bytes(b"of another checkpoint")
    with pytest.raises(ConflictError, match="has another file at"):
        await collect(checkpoint, look)
    assert (aside / last).read_bytes() == b"of another checkpoint"
    assert (checkpoint / last).exists()
    (aside / last).unlink()
    _, look = await collect(checkpoint)
    found, _ = await collect(checkpoint, look)
    assert last in {each.path for each in found.taken}


async def test_what_is_deeper_than_a_store_stays(checkpoint: Path) -> None:
    plant(checkpoint, DEAD, f"state/3/0/mine/older/2_{UUID}.changelog", f"state/0/5/a/b/SSTs/000099-{UUID}.sst")
    refresh(checkpoint)
    found, _ = await collect(checkpoint)
    assert {each.path for each in found.found if each.reason.startswith("dead")} == {DEAD}


async def test_another_checkpoints_plan_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    _, look = await collect(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "copy")
    with pytest.raises(UsageError, match="the first look is of"):
        await collect(tmp_path / "copy", look)


async def test_the_same_name_in_another_directory_is_another_checkpoint(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found, look = await collect_checkpoint("checkpoint", "aside", None, STOPPED)
    assert found.location == "checkpoint"
    (tmp_path / "there").mkdir()
    shutil.copytree(checkpoint, tmp_path / "there" / "checkpoint")
    monkeypatch.chdir(tmp_path / "there")
    with pytest.raises(UsageError, match="the first look is of"):
        await collect_checkpoint("checkpoint", "aside", look, STOPPED)


async def test_a_plan_file_keeps_a_look(checkpoint: Path, tmp_path: Path) -> None:
    _, look = await collect(checkpoint)
    assert read_look(tmp_path / "plan") is None
    write_look(tmp_path / "plan", look)
    assert read_look(tmp_path / "plan") == look
    (tmp_path / "plan").write_bytes(b"{}")
    with pytest.raises(UsageError, match="is not a plan"):
        read_look(tmp_path / "plan")

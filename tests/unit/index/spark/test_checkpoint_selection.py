import pytest

from index.errors import BatchLogError
from index.plan.commits import Commit
from index.snapshot.model import CommitRecord, Scope, WriteId
from index.spark.checkpoint import CheckpointBackup, StoredBackup, choose_checkpoint_backup, select_query_files

Path = tuple[str, ...]


def taken(number: int, oldest: int, batch: int) -> StoredBackup:
    record = CommitRecord(scope=Scope("job"), number=number, write_id=WriteId(str(number)), valid_until_ms=10**15)
    commit = Commit(record=record, created_at_ms=number * 100, committed_at_ms=number * 100)
    return commit, CheckpointBackup(query_id="q", batch=batch, oldest_batch=oldest)


# Newest first; batch 4 was taken twice.
BACKUPS = (taken(5, 18, 20), taken(4, 8, 12), taken(3, 3, 4), taken(2, 3, 4), taken(1, 0, 2))


@pytest.mark.parametrize(
    "batch, number",
    [
        (None, 5),
        (20, 5),
        (4, 3),  # the newest of those whose batch it is
        (3, 2),  # of those that still have it the oldest batch, and of these the first
        (0, 1),
        (2, 1),
        (8, 4),
        (13, None),
        (7, None),
        (21, None),
    ],
)
def test_a_batch_is_restored_from_its_own_backup_or_the_oldest_later_one(batch: int | None, number: int | None) -> None:
    found = choose_checkpoint_backup(BACKUPS, batch=batch)
    assert (found and found[0].record.number) == number


@pytest.mark.parametrize("at_ms, number", [(500, 5), (499, 4), (100, 1), (99, None)])
def test_a_time_finds_what_was_the_newest_then(at_ms: int, number: int | None) -> None:
    found = choose_checkpoint_backup(BACKUPS, at_ms=at_ms)
    assert (found and found[0].record.number) == number


@pytest.mark.parametrize("batch, number", [(12, 5), (9, 5), (10, 5), (7, 4), (6, 4), (14, 3), (3, 1)])
def test_batches_that_were_given_up_come_last(batch: int, number: int) -> None:
    """The query was taken back from batch 14 to batch 5, and went on."""
    backups = (taken(5, 8, 12), taken(4, 5, 7), taken(3, 8, 14), taken(2, 5, 10), taken(1, 3, 5))
    found = choose_checkpoint_backup(backups, batch=batch)
    assert found is not None
    assert found[0].record.number == number


def test_of_two_that_have_a_batch_the_sound_one_is_chosen() -> None:
    commit, backup = taken(2, 2, 4)
    damaged = commit, backup.with_damage(["sources/0/3"])
    backups = (taken(3, 2, 6), damaged, taken(1, 0, 2))
    for batch, number in ((3, 3), (4, 3), (2, 1)):
        found = choose_checkpoint_backup(backups, batch=batch)
        assert found is not None
        assert found[0].record.number == number
    assert choose_checkpoint_backup((damaged,), batch=4) == damaged


def test_nothing_is_found_in_nothing() -> None:
    assert choose_checkpoint_backup(()) is None


def paths(*names: str) -> list[Path]:
    return [tuple(name.split("/")) for name in names]


THERE = paths(
    "metadata",
    *(f"commits/{n}" for n in range(2, 7)),
    *(f"offsets/{n}" for n in range(1, 8)),
    "sources/0/0",
    "sources/0/9.compact",
    "state/0/_metadata/metadata",
    "state/1/_metadata/v2/0",
    "state/1/_metadata/v2/4",
    "state/1/_metadata/v2/5",
    "state/1/_stateSchema/default/0_x",
)


def test_nothing_newer_than_the_batch_is_chosen() -> None:
    chosen = select_query_files(THERE, oldest_batch=3, batch=4)
    assert set(chosen) == set(
        paths(
            "metadata",
            "commits/3",
            "commits/4",
            "offsets/2",
            "offsets/3",
            "offsets/4",
            "offsets/5",
            "sources/0/0",
            "sources/0/9.compact",
            "state/0/_metadata/metadata",
            "state/1/_metadata/v2/0",
            "state/1/_metadata/v2/4",
            "state/1/_stateSchema/default/0_x",
        )
    )


@pytest.mark.parametrize(
    "foreign", ["commits/x", "commits/04", "junk", "state/0/0/5.zip", "state/x/_metadata/metadata"]
)
def test_what_nobody_knows_is_left(foreign: str) -> None:
    assert paths(foreign)[0] not in select_query_files([*THERE, *paths(foreign)], oldest_batch=2, batch=6)


@pytest.mark.parametrize("missing", ["metadata", "commits/3", "commits/4", "offsets/4"])
def test_a_file_that_the_query_needs_is_missed_by_name(missing: str) -> None:
    with pytest.raises(BatchLogError, match=missing):
        select_query_files([p for p in THERE if p != tuple(missing.split("/"))], oldest_batch=3, batch=4)

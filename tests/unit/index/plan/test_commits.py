"""Which records count, from listings alone (design 0002, C1, C4, C5, C7, D3)."""

import msgspec
import pytest

from index.errors import IndexInvariantError
from index.plan.commits import (
    Commit,
    LogListing,
    ShortListingError,
    check_dense,
    commit_of,
    descends_from,
    find_doubtful,
    find_late,
    is_closed,
    is_late,
    listing_of,
    valid_commits,
)
from index.snapshot.keys import boundary_key, commit_key
from index.snapshot.model import Boundary, CommitPointer, CommitRecord, Scope, WriteId

JOB = Scope("job")


def pointer(number: int, write_id: str = "w") -> CommitPointer:
    return CommitPointer(number, WriteId(f"{write_id}{number}"))


def record(number: int, *, valid_until_ms: int = 10**15, write_id: str = "w", parent_time: int = 0) -> CommitRecord:
    return CommitRecord(
        scope=JOB,
        number=number,
        write_id=pointer(number, write_id).write_id,
        predecessor=pointer(number - 1) if number > 1 else None,
        valid_until_ms=valid_until_ms,
        predecessor_committed_at_ms=parent_time,
    )


def over(number: int, *, valid_until_ms: int = 10**15) -> CommitRecord:
    """A record of which the predecessor is the first one."""
    return msgspec.structs.replace(record(number, valid_until_ms=valid_until_ms), predecessor=pointer(1))


def boundary(number: int, *kept: int) -> Boundary:
    return Boundary(scope=JOB, number=number, kept=tuple(pointer(n) for n in kept))


def listing(*numbers: int, boundaries: tuple[int, ...] = ()) -> LogListing:
    return LogListing(scope=JOB, records=tuple((n, 1000 + n) for n in numbers), boundaries=boundaries)


@pytest.mark.parametrize(
    "numbers, boundaries, dense",
    [
        ((), (), True),
        ((1,), (), True),
        ((1, 2, 3), (), True),
        ((2,), (), False),
        ((1, 3), (), False),
        ((4, 5), (boundary(3),), True),
        ((5,), (boundary(3),), False),
        ((1, 4), (boundary(3, 1),), True),
        ((4,), (boundary(3, 1),), False),
        ((2, 4), (boundary(3),), True),  # a closed record that is not deleted yet
        ((), (boundary(3),), True),
        ((5,), (boundary(2, 1), boundary(4)), True),  # what the newer one closed may be gone
        ((5,), (boundary(2), boundary(4, 1)), True),  # closed stays closed, whatever the newer one lists
    ],
)
def test_a_gap_above_the_newest_boundary_is_a_short_listing(
    numbers: tuple[int, ...], boundaries: tuple[Boundary, ...], dense: bool
) -> None:
    listed = listing(*numbers, boundaries=tuple(b.number for b in boundaries))
    if dense:
        check_dense(listed, boundaries)
    else:
        with pytest.raises(ShortListingError):
            check_dense(listed, boundaries)


@pytest.mark.parametrize(
    "number, boundaries, closed",
    [
        (3, (), False),
        (3, (boundary(2),), False),
        (3, (boundary(3),), True),
        (3, (boundary(3, 3),), False),
        (3, (boundary(5, 3),), False),
        (3, (boundary(5, 1),), True),
        (3, (boundary(3), boundary(5, 3)), True),
    ],
)
def test_any_boundary_at_or_above_that_does_not_list_a_record_closes_it(
    number: int, boundaries: tuple[Boundary, ...], closed: bool
) -> None:
    assert is_closed(pointer(number), boundaries) == closed


def test_a_record_of_the_same_number_and_another_write_id_is_closed() -> None:
    assert is_closed(pointer(3, "zombie"), (boundary(3, 3),))


@pytest.mark.parametrize("created, void", [(99, False), (100, False), (101, True)])
def test_a_record_is_late_once_it_is_created_after_its_lease(created: int, void: bool) -> None:
    assert is_late(record(1, valid_until_ms=100), created) == void


def test_valid_commits_leave_out_void_and_closed_ones() -> None:
    records = {n: record(n, valid_until_ms=0 if n == 3 else 10**15) for n in (1, 2, 3)}
    records[4] = CommitRecord(
        scope=JOB, number=4, write_id=WriteId("w4"), predecessor=pointer(1), valid_until_ms=10**15
    )
    commits = valid_commits(listing(1, 2, 3, 4, boundaries=(2,)), records, (boundary(2, 1),))
    assert [c.pointer.number for c in commits] == [1, 4]


def test_a_late_record_counts_that_a_later_one_a_boundary_or_the_store_vouches_for() -> None:
    late = {n: record(n, valid_until_ms=0) for n in (1, 2, 3, 4)}
    late[3] = over(3, valid_until_ms=0)
    log, boundaries = listing(1, 2, 3, 4), ()
    assert [r.number for r in find_late(log, late, boundaries)] == [2, 4]
    assert find_doubtful(log, late, boundaries) == late[4]
    assert [c.pointer.number for c in valid_commits(log, late, boundaries)] == [1, 3]
    assert [c.pointer.number for c in valid_commits(log, late, boundaries, {pointer(4)})] == [1, 3, 4]
    kept = (boundary(4, 2, 4),)
    assert [c.pointer.number for c in valid_commits(listing(1, 2, 3, 4, boundaries=(4,)), late, kept)] == [2, 4]


def test_nothing_outside_the_log_vouches_for_a_record_that_a_later_one_passed_over() -> None:
    records = {1: record(1), 2: record(2, valid_until_ms=0)}
    assert find_doubtful(listing(1, 2), records, ()) == records[2]
    records[3] = CommitRecord(
        scope=JOB, number=3, write_id=WriteId("w3"), predecessor=pointer(1), valid_until_ms=10**15
    )
    assert find_doubtful(listing(1, 2, 3), records, ()) is None


@pytest.mark.parametrize("created, parent, time", [(50, 10, 50), (50, 90, 90)])
def test_commit_time_is_monotone_along_the_chain(created: int, parent: int, time: int) -> None:
    assert commit_of(record(2, parent_time=parent), created).committed_at_ms == time


def commits(*records: CommitRecord) -> list[Commit]:
    return [commit_of(r, 1) for r in records]


def test_a_record_in_the_chain_of_the_newest_is_not_lost() -> None:
    assert descends_from(pointer(1), [])
    assert descends_from(pointer(1), commits(record(2), record(3)))
    assert not descends_from(pointer(1, "zombie"), commits(record(2), record(3)))


def test_the_chain_may_skip_a_void_number() -> None:
    skipping = over(3, valid_until_ms=10**15)
    assert descends_from(pointer(1), commits(skipping))


def test_the_newest_number_counts_boundaries_and_void_records() -> None:
    assert listing().newest_number == 0
    assert listing(1, 2).newest_number == 2
    assert listing(1, boundaries=(7,)).newest_number == 7


def test_a_listing_is_sorted_refuses_another_log_and_passes_over_what_is_foreign() -> None:
    entries = [(commit_key(JOB, 2), 20), (boundary_key(JOB, 1), 15), (commit_key(JOB, 1), 10)]
    listed = listing_of(JOB, entries)
    assert listed.records == ((1, 10), (2, 20))
    assert listed.boundaries == (1,)
    assert listed.created_at_ms(2) == 20
    assert listed.created_at_ms(3) is None
    with pytest.raises(IndexInvariantError):
        listing_of(JOB, [(commit_key(Scope("other"), 1), 0)])
    assert listing_of(JOB, [("log/job/readme.txt", 0)]).foreign == ("log/job/readme.txt",)

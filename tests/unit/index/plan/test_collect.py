"""What may be deleted, from listings alone (design 0002, D1 to D3 and D5)."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from index.plan.collect import (
    DeleteReason,
    PlannedUpload,
    UnfinishedPlan,
    UnfinishedUpload,
    Upload,
    choose_closed_records,
    choose_unfinished,
    choose_uploads,
    pin_is_live,
    pin_is_removable,
    plan_scope,
    waiting_until_ms,
)
from index.plan.commits import (
    KeepReason,
    LogListing,
    Retention,
    choose_superseded_boundaries,
    is_closed,
    lasting_boundaries,
    valid_commits,
)
from index.snapshot.keys import BLOBS, upload_key
from index.snapshot.model import (
    BlobKey,
    Boundary,
    CommitPointer,
    CommitRecord,
    IndexReference,
    Pin,
    Scope,
    StoreReference,
    UniqueId,
    WriteId,
)

JOB = Scope("job")
LAST = Retention(keep_last=1)


def pointer(number: int) -> CommitPointer:
    return CommitPointer(number, WriteId(f"w{number}"))


def records(*numbers: int, void: tuple[int, ...] = ()) -> dict[int, CommitRecord]:
    return {
        n: CommitRecord(scope=JOB, number=n, write_id=pointer(n).write_id, valid_until_ms=0 if n in void else 10**15)
        for n in numbers
    }


def listing(*numbers: int, boundaries: tuple[int, ...] = ()) -> LogListing:
    return LogListing(scope=JOB, records=tuple((n, n) for n in numbers), boundaries=boundaries)


def test_everything_but_the_newest_is_closed_by_a_boundary_at_the_highest_closed_number() -> None:
    plan = plan_scope(listing(1, 2, 3), records(1, 2, 3), (), LAST, ())
    assert plan.boundary == Boundary(scope=JOB, number=2, kept=())
    assert [(c.pointer.number, r) for c, r in plan.kept] == [(3, KeepReason.NEWEST)]


def test_nothing_to_close_writes_no_boundary() -> None:
    assert plan_scope(listing(1), records(1), (), LAST, ()).boundary is None
    assert plan_scope(listing(), {}, (), LAST, ()).boundary is None
    closed = Boundary(scope=JOB, number=1, kept=())
    assert plan_scope(listing(1, 2, boundaries=(1,)), records(1, 2), (closed,), LAST, ()).boundary is None


def test_the_commit_that_leaves_the_least_behind_decides_how_much_a_scope_shrinks() -> None:
    """Design 0006, P9: of the states by number, those to keep, and what of which goes."""
    for states, keep_last, named, expected in (
        ((), 1, (), (0, 0)),
        ((100,), 1, (), (100, 100)),
        ((100, 90), 2, (), (90, 90)),
        ((100, 90), 1, (), (100, 90)),
        ((100, 120), 1, (), (120, 120)),
        ((100, 1, 1, 1), 3, (), (100, 1)),
        ((100, 1, 80, 1), 2, (), (100, 80)),
        ((100, 1, 1, 50), 1, (), (100, 50)),
        ((100, 90, 1), 1, (1,), (90, 1)),
        ((1000, 900, 90, 1), 1, (2,), (90, 1)),
        ((100, 90, 60), 1, (2,), (100, 90)),
    ):
        numbers = range(1, len(states) + 1)
        sized = {
            number: msgspec.structs.replace(record, stores=(store(states[number - 1]),))
            for number, record in records(*numbers).items()
        }
        kept = {pointer(number) for number in named}
        plan = plan_scope(listing(*numbers), sized, (), Retention(keep_last=keep_last), kept)
        assert (plan.before_bytes, plan.after_bytes) == expected, states


def store(size_bytes: int) -> StoreReference:
    index = IndexReference(key=BlobKey("indexes/00/job/a"), sha256=bytes(32), size_bytes=1)
    return StoreReference(
        task="0",
        store="default",
        version=1,
        unique_id=UniqueId("u"),
        index=index,
        number=1,
        files_count=1,
        size_bytes=size_bytes,
    )


def test_void_records_above_the_newest_valid_one_are_left_alone() -> None:
    plan = plan_scope(listing(1, 2, 3), records(1, 2, 3, void=(3,)), (), LAST, ())
    assert plan.boundary == Boundary(scope=JOB, number=1, kept=())


def test_a_boundary_passes_a_void_record_once_a_newer_one_is_valid() -> None:
    plan = plan_scope(listing(1, 2, 3), records(1, 2, 3, void=(2,)), (), Retention(keep_last=2), ())
    assert plan.boundary == Boundary(scope=JOB, number=2, kept=(pointer(1),))


def boundary(number: int, *kept: int) -> Boundary:
    return Boundary(scope=JOB, number=number, kept=tuple(pointer(n) for n in kept))


def test_a_boundary_lasts_unless_a_newer_one_closes_its_number() -> None:
    """D3: such a number may have come twice."""
    assert lasting_boundaries([boundary(3), boundary(5, 2)]) == (boundary(5, 2),)
    assert lasting_boundaries([boundary(3), boundary(5, 2, 3)]) == (boundary(3), boundary(5, 2, 3))
    assert lasting_boundaries([boundary(2), boundary(3), boundary(5, 3)]) == (boundary(3), boundary(5, 3))


def test_what_only_a_boundary_closes_that_does_not_last_stays() -> None:
    twice = [boundary(3), boundary(5, 2)]
    assert choose_closed_records(listing(1, 2, 3, 4, 5, 6), records(1, 2, 3, 4, 5, 6), twice) == (1, 3, 4, 5)
    crossing = [boundary(3), boundary(5, 2, 3)]
    assert choose_closed_records(listing(1, 2, 3, 4, 5, 6), records(1, 2, 3, 4, 5, 6), crossing) == (1, 2, 3, 4, 5)


def test_superseded_boundaries_are_those_that_a_newer_one_repeats() -> None:
    assert choose_superseded_boundaries([boundary(2, 1), boundary(5, 1)]) == (2,)
    assert choose_superseded_boundaries([boundary(2, 1), boundary(5)]) == (2,)
    assert choose_superseded_boundaries([boundary(2), boundary(5, 1)]) == ()
    assert choose_superseded_boundaries([boundary(2), boundary(5, 4)]) == (2,)
    assert choose_superseded_boundaries([boundary(2)]) == ()
    # Number 3 repeats 2, and does not last.
    assert choose_superseded_boundaries([boundary(2), boundary(3), boundary(5, 2)]) == ()


@given(
    kept=st.lists(st.sets(st.integers(1, 8)), min_size=1, max_size=5),
    numbers=st.lists(st.integers(1, 8), min_size=5, max_size=5, unique=True),
)
def test_deleting_superseded_boundaries_never_opens_a_closed_record(kept: list[set[int]], numbers: list[int]) -> None:
    boundaries = [
        Boundary(scope=JOB, number=n, kept=tuple(sorted(pointer(k) for k in ks if k <= n)))
        for n, ks in zip(numbers, kept, strict=False)
    ]
    left = [b for b in boundaries if b.number not in choose_superseded_boundaries(boundaries)]
    for number in range(1, 9):
        assert is_closed(pointer(number), boundaries) == is_closed(pointer(number), left)
    assert max(b.number for b in left) == max(b.number for b in boundaries)


@given(
    count=st.integers(1, 12),
    void=st.sets(st.integers(1, 12)),
    keep_last=st.integers(1, 5),
    named=st.sets(st.integers(1, 12)),
    earlier=st.one_of(st.none(), st.tuples(st.integers(1, 12), st.sets(st.integers(1, 12)))),
)
def test_a_plan_keeps_what_it_says_and_closes_the_rest(
    count: int, void: set[int], keep_last: int, named: set[int], earlier: tuple[int, set[int]] | None
) -> None:
    numbers = range(1, count + 1)
    boundaries: tuple[Boundary, ...] = ()
    if earlier is not None and earlier[0] < count:
        boundaries = (
            Boundary(
                scope=JOB, number=earlier[0], kept=tuple(pointer(n) for n in sorted(earlier[1]) if n <= earlier[0])
            ),
        )
    all_records = records(*numbers, void=tuple(void))
    log = listing(*numbers, boundaries=tuple(b.number for b in boundaries))
    before = valid_commits(log, all_records, boundaries)
    plan = plan_scope(log, all_records, boundaries, Retention(keep_last=keep_last), {pointer(n) for n in named})
    after_boundaries = (*boundaries, plan.boundary) if plan.boundary else boundaries
    after = valid_commits(log, all_records, after_boundaries)
    assert [c.pointer for c in after] == [c.pointer for c, _ in plan.kept]
    assert {c.pointer for c in before if c.pointer.number in named} <= {c.pointer for c in after}
    assert {c.pointer for c in after} <= {c.pointer for c in before}
    if before:
        assert after[-1] == before[-1]
        assert after[-keep_last:] == before[-keep_last:]
    gone = choose_closed_records(log, all_records, after_boundaries)
    assert not set(gone) & {c.pointer.number for c in after}


TTL_MS = 1000


def test_unreachable_uploads_go_when_they_are_a_ttl_old() -> None:
    uploads = [Upload("old", 10, 5000 - TTL_MS), Upload("young", 10, 5001 - TTL_MS), Upload("older", 10, 0)]
    assert choose_uploads(uploads, now_ms=5000, ttl_ms=TTL_MS) == (
        PlannedUpload("old", DeleteReason.UNREACHABLE_UPLOAD, 10, created_at_ms=5000 - TTL_MS),
        PlannedUpload("older", DeleteReason.UNREACHABLE_UPLOAD, 10, created_at_ms=0),
    )
    assert waiting_until_ms(uploads[:2], TTL_MS) == 5001
    assert waiting_until_ms((), TTL_MS) == 0


def test_unfinished_puts_of_ours_that_are_older_than_the_ttl_are_given_up() -> None:
    key = upload_key(BLOBS, JOB, "0" * 20, 7)
    old = UnfinishedUpload(key, "old", 4000)
    young = UnfinishedUpload(key, "young", 4001)
    foreign = UnfinishedUpload("blobs/theirs", "foreign", 0)
    plan = choose_unfinished([foreign, young, old, foreign], now_ms=5000, ttl_ms=TTL_MS)
    assert plan == UnfinishedPlan(doomed=(old,), young=(young,), foreign=("blobs/theirs",))


def test_a_pin_lives_until_its_duration_is_over_and_its_object_a_margin_longer() -> None:
    pin = Pin(id="0" * 20, scope=JOB, source=pointer(1), duration_ms=100, purpose="test")
    released = Pin(id="0" * 20, scope=JOB, source=pointer(1), duration_ms=0, purpose="test")
    assert [pin_is_live(pin, 1000, now) for now in (1000, 1099, 1100)] == [True, True, False]
    assert [pin_is_removable(pin, 1000, now, 50) for now in (1100, 1149, 1150)] == [False, False, True]
    assert not pin_is_live(released, 1000, 1000)
    assert pin_is_removable(released, 1000, 1000, 50)

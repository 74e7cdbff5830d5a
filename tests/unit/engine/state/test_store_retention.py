"""What maintenance counts from and keeps: what was loaded to be written on, or committed, last (design 0004, G4)."""

import pytest

from tests.unit.engine.state.state_store_kit import Bench, Conf, Ids, check_numbers, rows, write, write_numbers

FEW: Conf = {"deltas_per_snapshot": 2, "versions_retained_min": 2, "versions_deleted_min": 0}
MANY: Conf = {**FEW, "versions_retained_min": 100}


async def _left_at_14_taken_back_to_6(bench: Bench) -> tuple[Ids, Ids]:
    """Ids of the history that was left, and of the one that goes on with a version 7 of its own."""
    ids: Ids = [None]
    async with bench.store(**MANY) as store:
        await write_numbers(store, ids, range(1, 15), maintain_every=1)
    async with bench.store(**MANY) as store:
        seventh = await write(store, 6, ids[6], {b"x": b"y"})
    return ids, [*ids[:7], seventh.unique_id]


async def test_nothing_is_deleted_before_a_version_was_loaded_to_be_written_on(bench: Bench) -> None:
    _, ids = await _left_at_14_taken_back_to_6(bench)
    async with bench.store(**FEW) as store:
        maintained = await store.maintain()
        assert (maintained.deletion_waits, maintained.deleted.oldest_kept) == (True, 0)
        await store.load(7, ids[7])
        maintained = await store.maintain()
        assert (maintained.deletion_waits, maintained.deleted.oldest_kept) == (False, 6)
        assert rows(store) == {b"6": b"6", b"x": b"y"}
    async with bench.store(**FEW) as store:
        await store.load(7, ids[7])


async def test_a_look_at_another_version_makes_nothing_of_the_current_one_go(bench: Bench) -> None:
    left, ids = await _left_at_14_taken_back_to_6(bench)
    async with bench.store(**FEW) as store:
        await store.load(7, ids[7])
        await store.load(14, left[14], read_only=True)
        assert (await store.maintain()).deleted.oldest_kept == 6
        assert rows(store) == {b"14": b"14"}
        await store.load(7, ids[7])
        assert rows(store) == {b"6": b"6", b"x": b"y"}


async def test_nothing_is_built_on_what_was_only_looked_at_before_a_deletion(bench: Bench) -> None:
    ids: Ids = [None]
    async with bench.store(**MANY) as store:
        await write_numbers(store, ids, range(1, 15), maintain_every=1)
    async with bench.store(**FEW) as store:
        await store.load(14, ids[14])
        await store.load(3, ids[3], read_only=True)
        assert (await store.maintain()).deleted.snapshots > 0
        await store.load(3, ids[3], read_only=True)
        assert rows(store) == {b"3": b"3"}
        with pytest.raises(Exception, match="3_"):
            await store.load(3, ids[3])
        await check_numbers(store, ids, [14, 13])


async def test_a_snapshot_that_arrives_after_an_abort_counts_for_the_next_deletion(bench: Bench) -> None:
    ids: Ids = [None]
    async with bench.store(**FEW) as store:
        await write_numbers(store, ids, range(1, 5), maintain_every=2)
        await write_numbers(store, ids, range(5, 7))
        await store.abort()
        maintained = await store.maintain()
        assert maintained.uploaded is not None
        assert (maintained.uploaded.version, maintained.deleted.oldest_kept) == (6, 4)
        # Nothing of what version 6 was made of before its snapshot came.
        assert bench.changelogs() == [4, 5, 6]
        await check_numbers(store, ids, [6, 5])


async def test_the_only_version_to_retain_is_no_attempt_that_may_lose(bench: Bench) -> None:
    one: Conf = {**FEW, "versions_retained_min": 1}
    ids: Ids = [None]
    async with bench.store(**one) as loser, bench.store(**one) as winner:
        await write_numbers(loser, ids, range(1, 4), maintain_every=1)
        await winner.load(3, ids[3])
        for store in (loser, winner):
            store.put(b"x", b"y")
        await loser.commit(snapshot=True)
        assert bench.snapshots() == [2, 4]
        await loser.maintain()
        fourth = await winner.commit()
        async with bench.store(**one) as reader:
            await reader.load(4, fourth.unique_id, read_only=True)
        fifth = await winner.commit(snapshot=True)
        # Once it is loaded it is known to count.
        await winner.load(5, fifth.unique_id)
        assert (await winner.maintain()).deleted.oldest_kept == 5
        assert bench.changelogs() == [5]

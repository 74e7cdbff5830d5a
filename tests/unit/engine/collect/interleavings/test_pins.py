"""Readers that pin what a collection would take, in every order of the two (design 0002, D4 and D5)."""

import asyncio
from typing import Any

import pytest
from typing_extensions import override

from blobstore.base import BlobStore, Body, BytesBody, Created, read_blob
from blobstore.errors import AccessDeniedError, StoreError, StoreFullError
from blobstore.wrappers.forwarding import ForwardingStore
from blobstore.wrappers.retry import HedgedStore, HedgeSettings
from engine.errors import CollectedError, ConflictError, DamagedError, FencedError
from engine.repository.repository import Repository
from engine.runtime import Runtime
from index.plan.collect import DeleteReason
from index.plan.commits import Commit
from index.snapshot.codec import encode_record
from index.snapshot.keys import PINS, commit_key, pin_key
from index.snapshot.model import PIN_DURATION_MS, Pin, Scope
from tests.unit.engine.collect.interleavings.judging import LAST, check_exact, check_kept, keys
from tests.unit.engine.conftest import JOB, World


class HeldRecord:
    """A record that is not sent before it may be; its pin is there by then."""

    def __init__(self) -> None:
        self.pin_stands, self.may_be_sent = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        self.pin_stands.set()
        await self.may_be_sent.wait()


async def test_a_pinned_commit_restores_while_its_record_is_collected(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two", "three")
    commit = await repository.find(JOB, version=1)
    async with repository.pinned(commit):
        await repository.collect(LAST, delete_share_max=1)
        assert [c.record.version for c in await repository.commits(JOB)] == [3]
        target = world.target()
        await repository.restore_reference(commit.record.stores[0], target)
        assert (target / "CURRENT").read_text() == "one"
        await check_exact(world)
    report = await repository.collect(LAST, delete_share_max=1)
    assert DeleteReason.EXPIRED_PIN in {d.reason for d in report.deletes}
    await check_exact(world)


async def test_a_commit_that_was_closed_cannot_be_pinned_any_more(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    commit = await repository.find(JOB, version=1)
    await repository.collect(LAST, delete_share_max=1)
    with pytest.raises(CollectedError):
        await repository.restore(commit, world.target())


async def test_a_boundary_that_goes_while_a_pinner_reads_it_is_not_missed(world: World) -> None:
    """The collection that took it has left a newer one, which shows it (design 0002, D3)."""
    repository, reader = await world.process(), await world.process()
    first, *_ = await world.history(repository, "one", "two", "three")
    await repository.name(first, "kept")
    await repository.collect(LAST, delete_share_max=1)
    commit = await reader.find(JOB, version=1)

    async def collect_again() -> None:
        await repository.release_name(JOB, "kept")
        await world.history(repository, "four")
        await repository.collect(LAST, delete_share_max=1)

    world.store.after("list_page", "log/", collect_again)
    with pytest.raises(CollectedError, match="commit 1 was collected meanwhile"):
        await reader.restore(commit, world.target())


async def test_a_pin_written_after_the_collector_looked_meets_the_boundary(world: World) -> None:
    """D5, the other order: the pin comes after the second reading of the roots, and the pinner sees the boundary."""
    repository, reader = await world.process(), await world.process()
    await world.history(repository, "one", "two")
    commit = await reader.find(JOB, version=1)
    refused = []

    async def pin_now() -> None:
        try:
            await reader.restore(commit, world.target())
        except CollectedError:
            refused.append(True)

    world.store.before("delete", "log/", pin_now)
    await repository.collect(LAST, delete_share_max=1)
    assert refused == [True]


async def test_a_pin_written_between_plan_and_second_reading_keeps_the_blobs(world: World) -> None:
    repository, reader = await world.process(), await world.process()
    await world.history(repository, "one", "two")
    commit = await reader.find(JOB, version=1)
    leases = []

    async def pin_now() -> None:
        lease = reader.pinned(commit)
        await lease.__aenter__()
        leases.append(lease)

    world.store.before("put_if_absent", ".boundary", pin_now)
    await repository.collect(LAST, delete_share_max=1)
    target = world.target()
    await reader.restore_reference(commit.record.stores[0], target)
    assert (target / "CURRENT").read_text() == "one"
    await leases[0].__aexit__(None, None, None)


@pytest.mark.parametrize("listing", ["pins/", "names/", "log/"])
async def test_fork_between_the_collectors_second_readings_is_kept(world: World, listing: str) -> None:
    """Design 0002, D4: the fork's pin comes after the first reading of the roots and before the boundary; its
    record comes, and its pin goes, after any one of the listings with which the roots are read for the second time."""
    repository, forker = await world.process(), await world.process()
    await world.history(repository, "one", "two")
    commit = await forker.find(JOB, version=1)
    record = HeldRecord()
    forks: list[asyncio.Task[Commit]] = []

    async def begin_the_fork() -> None:
        world.store.before("put_if_absent", commit_key(Scope("fork"), 1), record.wait)
        forks.append(asyncio.create_task(forker.fork(commit, Scope("fork"))))
        await record.pin_stands.wait()

    async def end_the_fork() -> None:
        record.may_be_sent.set()
        await forks[0]

    async def end_it_within_the_second_reading() -> None:
        world.store.after("list_page", listing, end_the_fork)

    world.store.before("put_if_absent", ".boundary", begin_the_fork)
    world.store.after("put_if_absent", ".boundary", end_it_within_the_second_reading)
    await repository.collect(LAST, delete_share_max=1)
    assert forks[0].done()
    assert [c.record.version for c in await repository.commits(JOB)] == [2]
    target = world.target()
    await forker.restore(forks[0].result(), target)
    assert (target / "CURRENT").read_text() == "one"
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


@pytest.mark.parametrize("use", ["rewind", "name"])
async def test_a_name_that_is_released_within_the_second_reading_has_kept_its_commit(world: World, use: str) -> None:
    """D5: somebody who pins what a name leads to finds it live when the pins were read, and it is released before the
    names are. The first reading did not know the name yet."""
    repository, other = await world.process(), await world.process()
    one, *_ = await world.old_history(repository, "one", "two")
    record = HeldRecord()
    uses: list[asyncio.Task[object]] = []

    async def give_the_name() -> None:
        await other.name(one, "old")

    async def use_the_name_and_release_it() -> None:
        named = await other.find(JOB, name="old")
        made = commit_key(JOB, 3) if use == "rewind" else "names/job/new"
        world.store.before("put_if_absent", made, record.wait)
        uses.append(asyncio.create_task(other.rewind(named) if use == "rewind" else other.name(named, "new")))
        await record.pin_stands.wait()
        await repository.release_name(JOB, "old")

    async def read_again() -> None:
        world.store.after("list_page", "pins/", use_the_name_and_release_it)

    world.store.before("put_if_absent", ".boundary", give_the_name)
    world.store.after("put_if_absent", ".boundary", read_again)
    await (await world.process()).collect(LAST, delete_share_max=1)
    record.may_be_sent.set()
    await uses[0]
    assert await world.restored_text(await world.process(), **({} if use == "rewind" else {"name": "new"})) == "one"
    world.clock.advance(2 * PIN_DURATION_MS)
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


async def test_a_naming_that_is_released_while_it_is_read_stays_for_as_long_as_a_pin_lasts(world: World) -> None:
    """D5: the list has the time of the naming, the read its release; what was pinned by the name may still land."""
    repository = await world.process()
    one, *_ = await world.old_history(repository, "one", "two", "three")
    await repository.name(one, "old")
    world.clock.advance(2 * PIN_DURATION_MS)

    async def release_it() -> None:
        await repository.release_name(JOB, "old")

    async def read_again() -> None:
        world.store.after("list_page", "names/", release_it)

    world.store.after("put_if_absent", ".boundary", read_again)
    await (await world.process()).collect(LAST, delete_share_max=1)
    assert await repository.names(JOB) == ()
    assert len(await keys(world, "names/")) == 1
    await repository.collect(LAST, delete_share_max=1)
    assert len(await keys(world, "names/")) == 1
    world.clock.advance(2 * PIN_DURATION_MS)
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


@pytest.mark.parametrize("use", ["fork", "rewind", "name"])
@pytest.mark.parametrize("by", ["collect", "forget"])
async def test_what_is_closed_by_another_within_the_second_reading_was_kept(world: World, use: str, by: str) -> None:
    """D4: somebody who pins a commit finds it open when the pins were read, and another closes it before the logs are.

    The first reading did not know the commit yet, which holds what only a closed one had.
    """
    repository, other, closer = await world.process(), await world.process(), await world.process()
    one, *_ = await world.old_history(repository, "one", "two")
    record = HeldRecord()
    uses: list[asyncio.Task[object]] = []

    async def rewind_and_go_on() -> None:
        await other.rewind(one)  # commit 3
        await world.history(other, "four")

    async def use_it_and_close_it() -> None:
        three = await other.find(JOB, number=3)
        made = {"fork": commit_key(Scope("fork"), 1), "rewind": commit_key(JOB, 5), "name": "names/job/new"}[use]
        world.store.before("put_if_absent", made, record.wait)
        doing = {"fork": lambda: other.fork(three, Scope("fork")), "rewind": lambda: other.rewind(three)}
        uses.append(asyncio.create_task(doing.get(use, lambda: other.name(three, "new"))()))
        await record.pin_stands.wait()
        await (closer.forget(JOB) if by == "forget" else closer.collect(LAST, delete_share_max=1))

    async def read_again() -> None:
        world.store.before("list_page", "names/", use_it_and_close_it)

    world.store.before("put_if_absent", ".boundary", rewind_and_go_on)
    world.store.after("put_if_absent", ".boundary", read_again)
    await (await world.process()).collect(LAST, delete_share_max=1)
    record.may_be_sent.set()
    if (use, by) == ("rewind", "forget"):  # its number is closed, too
        with pytest.raises(FencedError):
            await uses[0]
        return
    await uses[0]
    if use == "fork":
        target = world.target()
        reader = await world.process()
        await reader.restore(await reader.find(Scope("fork")), target)
        assert (target / "CURRENT").read_text() == "one"
    else:
        found = {} if use == "rewind" else {"name": "new"}
        assert await world.restored_text(await world.process(), **found) == "one"
    world.clock.advance(2 * PIN_DURATION_MS)
    await repository.collect(LAST, delete_share_max=1)
    await check_exact(world)


async def test_a_collection_ends_where_others_never_cease_to_close(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: as with one more boundary in each reading. Nothing is deleted."""
    waits = (0.0, 0.0)
    monkeypatch.setattr("engine.records.roots._WAITS_S", waits)
    repository, other = await world.process(), await world.process()
    await world.old_history(repository, "one", "two", "three")
    readings: list[int] = []

    async def close_something() -> None:
        readings.append(len(readings))
        one = await other.find(JOB)
        fork = Scope(f"fork{len(readings)}")
        await other.fork(one, fork)
        await other.forget(fork)
        world.store.before("list_page", "names/", close_something)

    async def read_again() -> None:
        world.store.before("list_page", "names/", close_something)

    world.store.after("put_if_absent", ".boundary", read_again)
    uploads = await keys(world, "blobs/")
    with pytest.raises(ConflictError, match="closes commits"):
        await (await world.process()).collect(LAST, delete_share_max=1)
    assert len(readings) == len(waits) + 1
    assert await keys(world, "blobs/") == uploads


@pytest.mark.parametrize("hanging", [1, 2], ids=["written", "released"])
async def test_a_put_of_a_pin_that_hangs_is_sent_once_more(world: World, hanging: int) -> None:
    """Design 0008, H6. It hangs longer than a test may take."""
    repository = await Repository.open(HedgedStore(world.store, HedgeSettings(first_patience_s=0.1)))
    await world.history(repository, "one")
    puts = []

    async def hang() -> None:
        puts.append("hangs")
        await asyncio.sleep(3600)

    async def pass_by() -> None:
        puts.append("passes")

    world.store.before("put", "pins/", hang if hanging == 1 else pass_by)
    if hanging == 2:
        world.store.before("put", "pins/", hang)
    restored = await repository.find_and_restore(JOB, world.target())
    assert restored.pinned
    assert puts[-1] == "hangs"
    report = await repository.collect(LAST)
    assert [d.reason for d in report.deletes if d.key.startswith(PINS)] == [DeleteReason.EXPIRED_PIN]


class SlowPuts(ForwardingStore):
    """Every put takes this long."""

    def __init__(self, inner: BlobStore, takes_s: float) -> None:
        super().__init__(inner)
        self._takes_s = takes_s
        self.puts = 0

    @override
    async def put(self, key: str, body: Body, **how: Any) -> Created:
        self.puts += 1
        await asyncio.sleep(self._takes_s)
        return await super().put(key, body, **how)


async def test_a_store_that_is_slow_is_not_made_slower_by_pins(world: World) -> None:
    """All pins of a store have one habit and one budget (design 0008, H3)."""
    await world.history(await world.process(), "one")
    slow = SlowPuts(world.store, 0.35)
    repository = await Repository.open(HedgedStore(slow))
    commit = await repository.find(JOB)

    async def pin() -> None:
        async with repository.pinned(commit):
            pass

    await asyncio.gather(*(pin() for _ in range(20)))
    assert slow.puts <= 2 * 20 + HedgeSettings().extra_in_reserve


async def test_a_copy_of_a_pin_that_lands_after_its_release_ends_with_its_time(world: World) -> None:
    """Design 0002, D5."""
    repository = await world.process()
    await world.history(repository, "one", "two")
    one = await repository.find(JOB, version=1)
    async with repository.pinned(one):
        (key,) = await world.keys(PINS)
        record = await read_blob(world.store, key, size_bytes_max=10_000)
    await world.store.inner.put(key, BytesBody(record))
    report = await repository.collect(LAST, delete_share_max=1)
    assert [d.reason for d in report.deletes] == [DeleteReason.CLOSED_COMMIT]
    await check_exact(world)
    world.clock.advance(10 * PIN_DURATION_MS)
    report = await repository.collect(LAST, delete_share_max=1)
    assert DeleteReason.EXPIRED_PIN in {d.reason for d in report.deletes}
    await check_exact(world)


async def test_an_expired_pin_protects_nothing_and_goes_after_a_margin(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    lease = repository.pinned(await repository.find(JOB, version=1))
    await lease.__aenter__()
    world.clock.advance(10 * PIN_DURATION_MS)
    report = await repository.collect(LAST, delete_share_max=1)
    assert DeleteReason.EXPIRED_PIN in {d.reason for d in report.deletes}
    await check_exact(world)
    await lease.__aexit__(None, None, None)


@pytest.mark.parametrize("error", [AccessDeniedError, StoreFullError])
async def test_a_reader_who_cannot_write_a_pin_restores_and_says_so(world: World, error: type[StoreError]) -> None:
    repository = await world.process()
    await world.history(repository, "one")
    world.store.fail("put", "pins/", error("no", operation="put", key="pins/"))
    restored = await repository.find_and_restore(JOB, world.target())
    assert not restored.pinned
    world.store.fail("put", "pins/", error("no", operation="put", key="pins/"))
    with pytest.raises(error):
        await repository.rewind(restored.commit)


async def test_an_unpinned_reader_that_is_overtaken_chooses_again(world: World) -> None:
    repository, reader = await world.process(), await world.process()
    await world.old_history(repository, "one")
    world.store.fail("put", "pins/", AccessDeniedError("no", operation="put", key="pins/"))

    async def overtake() -> None:
        await world.history(repository, "two")
        await repository.collect(LAST, delete_share_max=1)

    world.store.before("get", "indexes/", overtake)
    # The hook's own backup reads an index too; the rule is used up by then.
    restored = await reader.find_and_restore(JOB, world.target())
    assert restored.commit.record.version == 2


async def pin_at(world: World, commit: Commit) -> None:
    """A pin of a reader that has not yet asked whether the commit is open, and dies."""
    pin = Pin(
        id=Runtime().session(),
        scope=JOB,
        source=commit.pointer,
        duration_ms=PIN_DURATION_MS,
        purpose="read",
        stores=commit.record.stores,
    )
    await world.store.inner.put(pin_key(pin.id), BytesBody(encode_record(pin)))


async def test_a_pin_on_something_collected_keeps_nothing_and_stops_nobody(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    one = await repository.find(JOB, version=1)
    await repository.collect(LAST, delete_share_max=1)
    await pin_at(world, one)
    await world.history(repository, "three")
    report = await repository.collect(LAST, delete_share_max=1)
    assert report.deletes
    assert await world.restored_text(repository) == "three"


async def test_a_late_pin_on_something_collected_does_not_stop_the_second_reading(world: World) -> None:
    repository, other = await world.process(), await world.process()
    await world.history(repository, "one", "two")
    one = await repository.find(JOB, version=1)
    await other.collect(LAST, delete_share_max=1)
    await world.history(repository, "three")

    async def pin() -> None:
        await pin_at(world, one)

    world.store.before("put_if_absent", "boundary", pin)
    assert (await repository.collect(LAST, delete_share_max=1)).deletes
    await check_kept(repository)


async def test_a_pinned_index_that_a_commit_needs_too_has_to_be_there(world: World) -> None:
    repository = await world.process()
    await world.history(repository, "one", "two")
    two = await repository.find(JOB)
    await pin_at(world, two)
    await world.store.inner.delete([two.record.stores[0].index.key])
    before = await keys(world)
    with pytest.raises(DamagedError):
        await repository.collect(LAST, delete_share_max=1)
    assert await keys(world) == before

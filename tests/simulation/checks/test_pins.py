"""The judges see that what a live pin protects has gone, and excuse what went before a pin came."""

import asyncio
from pathlib import Path
from typing import Final

import pytest

from blobstore.base import list_blobs, read_blob
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.model import BlobKey, CommitPointer, IndexReference, Pin, Scope, StoreReference, UniqueId, WriteId
from tests.simulation.checks.pins import StandingPins
from tests.simulation.faults.mutations import MUTATIONS
from tests.simulation.model.processes import EPOCH_S, SimProcess, plain_store, watched_locks
from tests.simulation.model.s3 import SimServer
from tests.simulation.model.virtual_loop import run_virtual
from tests.simulation.scenarios.builder import COLLECTOR, HOUR_MS, READER, TTL_MS, WRITER
from tests.simulation.scenarios.schedule import Advance, Control, Do, Schedule, Trap
from tests.simulation.scenarios.small_trees import check_keys, tree, write_tree
from tests.simulation.simulate import simulate
from tests.walker import keys_to_keep

JOB: Final = Scope("job")
PIN, INDEX, BLOB = "pins/1", "indexes/1", "blobs/1"


def test_the_walker_misses_what_only_a_live_pin_leads_to(fast_directory: Path) -> None:
    async def live() -> None:
        server = SimServer(seed=1, clock=asyncio.get_running_loop().time)
        process = SimProcess(server, "reader")
        await process.run(hold_and_lose(server, await process.init(), fast_directory))

    with watched_locks():
        run_virtual(live(), seed=1, start_s=EPOCH_S)


async def hold_and_lose(server: SimServer, repository: Repository, directory: Path) -> None:
    for text in ("one", "two"):
        await repository.commit(JOB, [await repository.backup(JOB, write_tree(directory / text, tree(text)))])
    _, old = await repository.commits(JOB)
    # What is unreachable goes when it is a TTL old.
    await asyncio.sleep(repository.record.ttl_ms / 1000)
    async with repository.pinned(old):
        await repository.collect(Retention(keep_last=1), delete_share_max=1)
        await check_keys(server)
        [pin] = [name.removeprefix("repository/") for name in server.objects if "/pins/" in name]
        lost = min(key for key in await expected(server) - await expected(server, but=pin) if key.startswith("blobs/"))
        server.delete(f"repository/{lost}")
        with pytest.raises(AssertionError, match=lost):
            await check_keys(server)
        # Of a copy that came late nobody can ask that.
        assert lost not in await expected(server, late_pins={pin})


async def expected(server: SimServer, *, but: str = "", late_pins: set[str] | None = None) -> set[str]:
    store = plain_store(server)
    found = {blob.key: blob async for blob in list_blobs(store, "") if blob.key != but}
    data = {key: await read_blob(store, key, size_bytes_max=1 << 30) for key in found if not key.startswith("blobs/")}
    return keys_to_keep(found, data, await store.now_ms(), late_pins=late_pins or ())


def test_a_schedule_in_which_a_collector_takes_what_a_pin_protects_is_a_violation() -> None:
    steps = (
        Do(process=WRITER, verb="push"),
        Do(process=WRITER, verb="push", store=1),
        Advance(ms=TTL_MS),
        Trap(process=READER, operation="get", prefix="blobs/", phase="before", effect="stop"),
        Do(process=READER, verb="restore", wait=False),
        Do(process=WRITER, verb="push"),
        Do(process=WRITER, verb="push", store=1),
        Do(process=COLLECTOR, verb="collect"),
        Control(process=READER, what="wake"),
    )
    schedule = Schedule(
        seed=1, store="memory", beginning=0, faults_per_mille=0, deltas=False, themes=(), is_judged=False, steps=steps
    )
    assert simulate(schedule).violations == ()
    with MUTATIONS["first_stores_are_protected"].patch():
        violations = simulate(schedule).violations
    assert any(shown.startswith("D5: ") and " protects" in shown for shown in violations)


class TestStandingPins:
    """One pin on one index with one blob, which lasts for an hour; nothing else is reported."""

    @pytest.fixture(autouse=True)
    def _world(self) -> None:
        self.now_ms = 0
        self.pins = StandingPins({INDEX: frozenset({INDEX, BLOB})}, lambda: self.now_ms)

    def put(self, at_ms: int, *, finds_open: bool = True, duration_ms: int = HOUR_MS) -> None:
        self.now_ms = at_ms
        store = StoreReference(
            task="0",
            store="a",
            version=1,
            unique_id=UniqueId("1"),
            index=IndexReference(key=BlobKey(INDEX), sha256=b"", size_bytes=0),
            number=1,
            files_count=1,
            size_bytes=1,
        )
        pin = Pin(
            id="1",
            scope=JOB,
            source=CommitPointer(1, WriteId("1")),
            duration_ms=duration_ms,
            purpose="read",
            stores=(store,) if duration_ms else (),
        )
        self.pins.put(PIN, pin, at_ms, finds_open=finds_open)

    def protects(self, at_ms: int) -> bool:
        self.now_ms = at_ms
        assert self.pins.protector("blobs/2") is None
        return self.pins.protector(BLOB) == self.pins.protector(INDEX) == PIN

    def test_it_protects_until_its_time_is_over(self) -> None:
        self.put(0)
        assert self.protects(HOUR_MS - 1)
        assert not self.protects(HOUR_MS)

    def test_renewed_in_time_it_protects_although_its_commit_is_closed(self) -> None:
        self.put(0)
        self.put(HOUR_MS - 1, finds_open=False)
        assert self.protects(2 * HOUR_MS - 2)

    def test_put_when_its_commit_is_closed_it_protects_nothing(self) -> None:
        self.put(0, finds_open=False)
        assert not self.protects(1)
        assert self.pins.over == {PIN}

    @pytest.mark.parametrize("finds_open", [True, False])
    def test_renewed_too_late_it_protects_nothing(self, *, finds_open: bool) -> None:
        self.put(0)
        self.put(HOUR_MS, finds_open=finds_open)
        assert not self.protects(HOUR_MS)
        assert self.pins.over == {PIN}

    def test_a_copy_that_lands_after_the_release_protects_nothing(self) -> None:
        self.put(0)
        self.put(1, duration_ms=0)
        self.put(2)
        assert not self.protects(2)

    def test_a_copy_that_lands_after_it_has_gone_protects_nothing(self) -> None:
        self.put(0)
        assert self.pins.deleting(PIN)
        self.put(1)
        assert not self.protects(1)
        assert not self.pins.deleting(PIN)

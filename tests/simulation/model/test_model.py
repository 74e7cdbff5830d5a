"""The simulation itself: its clock, its order, its processes and its bucket do what they promise."""

import asyncio
import gc
import os
from pathlib import Path

import pytest

from blobstore.base import BytesBody, list_blobs
from blobstore.errors import StoreUnavailableError
from blobstore.local.files import open_to_read
from blobstore.wrappers.retry import HedgeSettings, RetrySettings
from engine.errors import CommitUnknownError, UnsafeStoreError
from index.plan.commits import Retention
from index.snapshot.model import Scope
from tests.simulation.faults.request_faults import Fault, FaultPlan, matching
from tests.simulation.model.processes import EPOCH_S, KilledError, Kind, SimProcess, plain_store, watched_locks
from tests.simulation.model.s3 import PAGES, SimServer, page_max_of
from tests.simulation.model.virtual_loop import DeadlockError, run_virtual
from tests.walker import expected_keys

JOB = Scope("job")


def write(root: Path, text: str) -> Path:
    (root / "sub").mkdir(parents=True)
    (root / "CURRENT").write_text(text)
    (root / "big").write_bytes(text.encode() * 10_000)
    (root / "sub" / "same").write_bytes(b"same" * 1000)
    # Times of this machine would be in the index, in its compressed size, and so in the deadline of its PUT.
    for path in (root, *root.rglob("*")):
        os.utime(path, (EPOCH_S, EPOCH_S))
    return root


def test_days_pass_in_no_time() -> None:
    async def wait() -> float:
        await asyncio.sleep(10 * 86_400)
        return asyncio.get_running_loop().time()

    assert run_virtual(wait(), seed=1, start_s=5) == pytest.approx(5 + 10 * 86_400)


def test_the_seed_chooses_the_order() -> None:
    async def race() -> str:
        said: list[str] = []

        async def say(word: str) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
                said.append(word)

        await asyncio.gather(*map(say, "abc"))
        return "".join(said)

    orders = {seed: run_virtual(race(), seed=seed) for seed in range(20)}
    assert len(set(orders.values())) > 10
    assert orders == {seed: run_virtual(race(), seed=seed) for seed in range(20)}


def test_a_deadlock_names_who_waits() -> None:
    async def wait_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError, match="wait_for_ever"):
        run_virtual(wait_for_ever(), seed=1)


@pytest.mark.parametrize("kind", ["s3", "direct"])
def test_a_repository_lives_in_the_simulation(kind: Kind, fast_directory: Path) -> None:
    def history(seed: int, directory: Path) -> list[str]:
        async def live() -> list[str]:
            server = SimServer(seed=seed, clock=asyncio.get_running_loop().time)
            server.faults = FaultPlan(seed, {fault: 0.01 for fault in Fault if fault is not Fault.BURST})
            process = SimProcess(server, "p1", seed=seed, kind=kind)
            repository = await process.init()
            for text in ("one", "two"):
                result = await process.run(repository.backup(JOB, write(directory / text, text)))
                await process.run(repository.commit(JOB, [result]))
            await process.run(repository.find_and_restore(JOB, directory / "target"))
            assert (directory / "target" / "CURRENT").read_text() == "two"
            await asyncio.sleep(5 * 86_400)
            for _ in range(2):
                await process.run(repository.collect(Retention(keep_last=1), delete_share_max=1))
            judge = plain_store(server)
            assert {name.removeprefix("repository/") for name in server.objects} == await expected_keys(
                judge, await judge.now_ms()
            )
            return server.history

        with watched_locks():
            return run_virtual(live(), seed=seed, start_s=EPOCH_S)

    histories = [history(seed, fast_directory / f"{kind}-{seed}-{run}") for seed in range(5) for run in range(2)]
    assert histories[::2] == histories[1::2]
    assert len({tuple(h) for h in histories}) == 5


def test_a_killed_process_sends_nothing_and_a_stopped_one_waits(fast_directory: Path) -> None:
    async def live() -> None:
        server = SimServer(seed=1, clock=asyncio.get_running_loop().time)
        alive, doomed = (SimProcess(server, name) for name in ("alive", "doomed"))
        repository = await alive.init()
        other = await doomed.open()
        result = await doomed.run(other.backup(JOB, write(fast_directory / "one", "one")))
        gate = server.faults.hold(matching("put_object", ".commit"))
        committing = asyncio.ensure_future(doomed.run(other.commit(JOB, [result])))
        await gate.reached.wait()
        doomed.stop()
        gate.open()
        await asyncio.sleep(60)
        # The record is there, and its writer does not know.
        assert (await alive.run(repository.find(JOB))).pointer.number == 1
        assert not committing.done()
        sent = len(server.history)
        await asyncio.sleep(600)
        assert len(server.history) == sent
        doomed.wake()
        assert (await committing).pointer.number == 1
        restoring = asyncio.ensure_future(doomed.run(other.find_and_restore(JOB, fast_directory / "target")))
        gate = server.faults.hold(matching("get_object", "blobs/", "doomed"))
        await gate.reached.wait()
        doomed.kill()
        gate.open()
        with pytest.raises(KilledError):
            await restoring
        # What was on its way when it was killed arrives.
        await asyncio.sleep(1)
        sent = len(server.history)
        await asyncio.sleep(600)
        assert not any("doomed" in line for line in server.history[sent:])
        assert not (fast_directory / "target").exists()
        await alive.run(repository.find_and_restore(JOB, fast_directory / "target"))
        assert (fast_directory / "target" / "CURRENT").read_text() == "one"

    with watched_locks():
        run_virtual(live(), seed=1, start_s=EPOCH_S)


def test_what_a_killed_process_had_just_opened_is_closed_at_the_end(fast_directory: Path) -> None:
    path = fast_directory / "file"
    path.write_bytes(b"bytes")
    opened_when_killed = []

    async def die_while_opening() -> None:
        process = SimProcess(SimServer(seed=1, clock=asyncio.get_running_loop().time), "writer")

        def kill_after_opening(moment: str, name: str) -> None:
            if moment == "after" and name == "open":
                opened_when_killed.append(name)
                process.kill()

        async def read() -> None:
            async with open_to_read(path):
                pass

        process.on_blocking = kill_after_opening
        with pytest.raises(KilledError):
            await process.run(read())

    for seed in (None, *range(10)):
        opened_when_killed.clear()
        run_virtual(die_while_opening(), seed=seed)
        assert opened_when_killed
        gc.collect()  # a file that nobody closed is reported here


def test_on_stale_lists_collect_refuses() -> None:
    async def live() -> None:
        server = SimServer(seed=1, clock=asyncio.get_running_loop().time)
        process = SimProcess(server, "p1", kind="stale")
        repository = await process.init()
        with pytest.raises(UnsafeStoreError):
            await process.run(repository.collect(Retention(keep_last=1), delete_share_max=1))
        assert not any("delete" in line for line in server.history)

    run_virtual(live(), seed=1, start_s=EPOCH_S)


def server_with(page_max: int = PAGES[-1]) -> SimServer:
    return SimServer(seed=1, clock=asyncio.get_running_loop().time, page_max=page_max)


def test_lists_come_in_pages() -> None:
    async def live() -> int:
        server = server_with(page_max=2)
        process = SimProcess(server, "p1")
        await process.init()
        for number in range(5):
            await process.run(process.store.put(f"blobs/{number}", BytesBody(b"data")))
        names = [blob.key async for blob in list_blobs(plain_store(server), "")]
        assert len(names) > 5
        assert names == sorted(name.removeprefix("repository/") for name in server.objects)
        return len(names)

    assert run_virtual(live(), seed=1, start_s=EPOCH_S)
    assert {page_max_of(seed) for seed in range(100)} == set(PAGES)


@pytest.mark.parametrize("fault", [Fault.NEVER, Fault.NEVER_DONE])
@pytest.mark.parametrize("kind", ["s3", "direct"])
def test_who_asks_ends_what_is_never_answered(kind: Kind, fault: Fault) -> None:
    async def live(deadline_s: float) -> float:
        server = server_with()
        await SimProcess(server, "p1", kind=kind).init()
        # A read is asked for again beside the first (design 0008, H1); but not the profile, which S3 reads first.
        for _ in range(HedgeSettings().requests_max if (kind, fault) == ("direct", Fault.NEVER) else 1):
            server.faults.arm(fault, matching("put_object", "pins/") if fault is Fault.NEVER_DONE else matching())
        process = SimProcess(server, "p2", kind=kind, retry=RetrySettings(deadline_s=deadline_s))
        began_s = asyncio.get_running_loop().time()
        await process.open()
        if fault is Fault.NEVER_DONE:
            await process.run(process.store.put("pins/one", BytesBody(b"one")))
        return asyncio.get_running_loop().time() - began_s

    # The server never does: it takes as long as anyone who asks has patience.
    for deadline_s in (60, 1_000_000):
        took_s = run_virtual(live(deadline_s), seed=1, start_s=EPOCH_S)
        assert deadline_s < took_s < deadline_s + 5


@pytest.mark.parametrize("kind", ["s3", "direct"])
def test_the_put_of_a_pin_that_is_late_is_sent_again(kind: Kind, fast_directory: Path) -> None:
    """So that its copies land late here, too (design 0002, D5)."""

    async def live() -> list[str]:
        server = server_with()
        process = SimProcess(server, "p1", kind=kind)
        repository = await process.init()
        await process.run(
            repository.commit(JOB, [await process.run(repository.backup(JOB, write(fast_directory / "one", "one")))])
        )
        server.faults.arm(Fault.LATE, matching("put_object", "pins/"))
        await process.run(repository.find_and_restore(JOB, fast_directory / "target"))
        await asyncio.sleep(4 * 86_400)
        return [line.split()[-1] for line in server.history if "put_object pins/" in line]

    # The one that is late, its copy, and the release; then it lands after all.
    assert run_virtual(live(), seed=1, start_s=EPOCH_S) == ["hangs", "none", "none", "late"]


@pytest.mark.parametrize("reserve, note", [(100, "attempt 6 of at most 6"), (2, "the retry budget is spent")])
def test_a_burst_is_longer_than_anybody_tries(reserve: int, note: str) -> None:
    async def live() -> None:
        server = server_with()
        await SimProcess(server, "p1").init()
        server.faults.burst = (50, 50)
        server.faults.arm(Fault.BURST, matching(process="p2"))
        process = SimProcess(server, "p2", retry=RetrySettings(retries_in_reserve=reserve))
        with pytest.raises(StoreUnavailableError) as shown:
            await process.open()
        assert note in "".join(shown.value.__notes__)
        await SimProcess(server, "p3").open()
        server.faults.end_bursts()
        await process.open()

    run_virtual(live(), seed=1, start_s=EPOCH_S)


@pytest.mark.parametrize("kind", ["s3", "direct"])
def test_a_batch_that_is_deleted_in_part_says_which(kind: Kind) -> None:
    async def live() -> None:
        server = server_with()
        process = SimProcess(server, "p1", kind=kind)
        keys = [f"blobs/{number}" for number in range(9)]
        for key in keys:
            await process.run(process.store.put(key, BytesBody(b"data")))
        server.faults.arm(Fault.PARTIAL, matching("delete_objects"))
        failures = await process.run(process.store.delete(keys))
        left = [failure.key for failure in failures]
        assert 0 < len(left) < 9
        assert left == [blob.key async for blob in list_blobs(plain_store(server), "")]

    run_virtual(live(), seed=1, start_s=EPOCH_S)


@pytest.mark.parametrize("kind", ["s3", "direct"])
def test_what_is_adrift_lands_as_it_was_sent(kind: Kind, fast_directory: Path) -> None:
    async def live() -> None:
        server = server_with()
        process = SimProcess(server, "p1", kind=kind)
        repository = await process.init()
        result = await process.run(repository.backup(JOB, write(fast_directory / "one", "one")))
        record = matching("put_object", ".commit")
        server.faults.arm(Fault.ADRIFT, record)
        for _ in range(5):
            server.faults.arm(Fault.RESET, record)
        with pytest.raises(CommitUnknownError):
            await process.run(repository.commit(JOB, [result]))
        assert not any(name.endswith(".commit") for name in server.objects)
        assert server.land() == 1
        # The same process knows it for its own.
        commit = await process.run(repository.commit(JOB, [result]))
        assert commit.pointer.number == 1
        assert server.land() == 0

    run_virtual(live(), seed=1, start_s=EPOCH_S)


def test_bodies_go_in_parts_and_what_is_begun_is_given_up(fast_directory: Path) -> None:
    async def live() -> None:
        server = server_with(page_max=1)
        source = write(fast_directory / "one", "one")
        process, doomed = (SimProcess(server, name, kind="parts") for name in ("p1", "p2"))
        repository = await process.init()
        server.faults.arm(Fault.BURST, matching("upload_part"))
        result = await process.run(repository.backup(JOB, source))
        assert any("abort_multipart_upload" in line for line in server.history)
        assert server.uploads == {}
        other = await doomed.open()
        gate = server.faults.hold(matching("complete_multipart_upload", process="p2"))
        backing_up = asyncio.ensure_future(doomed.run(other.backup(JOB, source)))
        await gate.reached.wait()
        doomed.kill()
        with pytest.raises(KilledError):
            await backing_up
        assert server.uploads
        await process.run(repository.commit(JOB, [result]))
        await asyncio.sleep(5 * 86_400)
        await process.run(repository.collect(Retention(keep_last=1), delete_share_max=1))
        assert server.uploads == {}
        await process.run(repository.find_and_restore(JOB, fast_directory / "target"))
        assert (fast_directory / "target" / "CURRENT").read_text() == "one"

    run_virtual(live(), seed=1, start_s=EPOCH_S)

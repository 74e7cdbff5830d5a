"""The simulation itself: its clock, its order, its processes and its bucket are what they say."""

import asyncio
from pathlib import Path

import pytest

from engine.errors import UnsafeStoreError
from index.model import Scope
from index.retention import Retention
from tests.simulation.faults import Fault, FaultPlan, matching
from tests.simulation.processes import EPOCH_S, KilledError, Kind, SimProcess, plain_store, watched_locks
from tests.simulation.sim_s3 import SimServer
from tests.simulation.virtual_loop import DeadlockError, run_virtual
from tests.walker import expected_keys

JOB = Scope("job")


def write(root: Path, text: str) -> Path:
    (root / "sub").mkdir(parents=True)
    (root / "CURRENT").write_text(text)
    (root / "big").write_bytes(text.encode() * 10_000)
    (root / "sub" / "same").write_bytes(b"same" * 1000)
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
            server.faults = FaultPlan(seed, dict.fromkeys(Fault, 0.01))
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
        # The record is there, and whoever wrote it does not know.
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
        sent = len(server.history)
        await asyncio.sleep(600)
        assert not any("doomed" in line for line in server.history[sent + 1 :])
        assert not (fast_directory / "target").exists()
        await alive.run(repository.find_and_restore(JOB, fast_directory / "target"))
        assert (fast_directory / "target" / "CURRENT").read_text() == "one"

    with watched_locks():
        run_virtual(live(), seed=1, start_s=EPOCH_S)


def test_on_stale_lists_collect_refuses() -> None:
    async def live() -> None:
        server = SimServer(seed=1, clock=asyncio.get_running_loop().time)
        process = SimProcess(server, "p1", kind="stale")
        repository = await process.init()
        with pytest.raises(UnsafeStoreError):
            await process.run(repository.collect(Retention(keep_last=1), delete_share_max=1))
        assert not any("delete" in line for line in server.history)

    run_virtual(live(), seed=1, start_s=EPOCH_S)

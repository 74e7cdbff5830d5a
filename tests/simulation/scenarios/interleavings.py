"""Directed interleavings, one for each way in which breaking a rule of design 0002 loses or leaks data.

Each ends as it should with the real code for every seed; `faults/mutations.py` shows which rule each guards.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from engine.backup.backup import BackupOptions, BackupResult
from engine.errors import EngineError
from engine.inspect.verify import Level
from engine.repository.repository import Repository
from index.plan.commits import Commit, Retention
from index.snapshot.model import Scope, UniqueId
from tests.simulation.faults.request_faults import Fault, FaultPlan, matching
from tests.simulation.model.processes import EPOCH_S, Kind, SimProcess, watched_locks
from tests.simulation.model.s3 import SimServer, page_max_of
from tests.simulation.model.virtual_loop import run_virtual
from tests.simulation.scenarios.schedule import Times
from tests.simulation.scenarios.small_trees import check_keys, read_tree, small_deltas, tree, write_tree

T = TypeVar("T")

JOB: Final = Scope("job")
FORK: Final = Scope("fork")
HOUR_S: Final = 3600.0
DAY_S: Final = 24 * HOUR_S
TTL_MS: Final = 3_600_000
MARGIN_MS: Final = TTL_MS // 10
LIFECYCLE_MS: Final = 8 * 86_400_000


class Actor:
    """A process with its repository, in a scene."""

    def __init__(self, scene: "Scene", process: SimProcess, repository: Repository) -> None:
        self._scene = scene
        self.process = process
        self.repository = repository

    async def backup(self, text: str, store: str = "a", *, label: str = "") -> BackupResult:
        """Back up a tree as a store of the job; a label is its unique id."""
        unique_id = UniqueId(label) if label else None
        return await self.process.run(
            self.repository.backup(
                JOB, self._scene.source(text), store=store, options=BackupOptions(unique_id=unique_id)
            )
        )

    async def commit(self, *results: BackupResult) -> Commit:
        """Commit to the job."""
        return await self.process.run(self.repository.commit(JOB, results))

    async def push(self, text: str, store: str = "a", *, label: str = "") -> Commit:
        """Back up and commit."""
        return await self.commit(await self.backup(text, store, label=label))

    async def rewind(self, commit: Commit) -> Commit:
        """Go back to a commit."""
        return await self.process.run(self.repository.rewind(commit))

    async def collect(self, retention: Retention | None = None) -> None:
        """Collect; only the newest commit stays if nothing else is said."""
        await self.process.run(self.repository.collect(retention or Retention(keep_last=1), delete_share_max=1))

    async def restore(self, commit: Commit, store: str = "a") -> dict[str, bytes]:
        """The files of a commit."""
        target = self._scene.new_directory()
        await self.process.run(self.repository.restore(commit, target, store=store))
        return read_tree(target)


class Scene:
    """One run of an interleaving.

    Attributes:
        server: The bucket.
        seed: Of this run.
        times: What the first process makes the repository with.
    """

    def __init__(self, name: str, seed: int, directory: Path, kind: Kind, expiry_ms: int | None) -> None:
        clock = asyncio.get_running_loop().time
        self.server = SimServer(
            seed=seed, clock=clock, faults=FaultPlan(seed), expiry_ms=expiry_ms, page_max=page_max_of((name, seed))
        )
        self.seed = seed
        self.times = Times(ttl_ms=TTL_MS, margin_ms=MARGIN_MS, period_ms=24 * 3_600_000)
        self.directory = directory
        self._kind: Kind = kind
        self._directories_count = 0
        self._is_made = False

    async def actor(self, name: str, kind: Kind | None = None, *, machine: str = "", behind_s: float = 0) -> Actor:
        """A process, of the interleaving's kind if no other is named; the first one makes the repository.

        On one machine processes share what they note; its clock may be behind.
        """
        cache_dir = self.directory / machine if machine else None
        process = SimProcess(
            self.server, name, seed=self.seed, kind=kind or self._kind, skew_s=-behind_s, cache_dir=cache_dir
        )
        if self._is_made:
            return Actor(self, process, await process.open())
        self._is_made = True
        times = self.times
        made = process.init(ttl_ms=times.ttl_ms, margin_ms=times.margin_ms, collection_period_ms=times.period_ms)
        return Actor(self, process, await made)

    def new_directory(self) -> Path:
        """A path at which nothing is."""
        self._directories_count += 1
        return self.directory / f"target-{self._directories_count}"

    def source(self, text: str) -> Path:
        """The local directory of a tree."""
        directory = self.directory / f"source-{text}"
        return directory if directory.exists() else write_tree(directory, tree(text))

    @contextlib.asynccontextmanager
    async def held(
        self, operation: str, key: str, who: str, work: Awaitable[T], *, after: bool = False
    ) -> AsyncIterator["asyncio.Future[T]"]:
        """Begin some work, and hold this request of it while the block runs."""
        gate = self.server.faults.hold(matching(operation, key, who), after=after)
        working = asyncio.ensure_future(work)
        await gate.reached.wait()
        yield working
        gate.open()

    def delay_record(self) -> None:
        """Let the next record arrive ten minutes later, with no answer to any attempt."""
        faults, record = self.server.faults, matching("put_object", ".commit")
        faults.late_s = (600, 600)
        faults.arm(Fault.LATE, record)
        for _ in range(5):
            faults.arm(Fault.RESET, record)

    async def check(self, expected: dict[str, str], scope: Scope = JOB) -> None:
        """Somebody new restores the newest commit: these stores with these texts, byte for byte."""
        somebody = await self.actor(f"reader-{self._directories_count}")
        commit = await somebody.process.run(somebody.repository.find(scope))
        found_stores = {s.store for s in commit.record.stores}
        assert found_stores == set(expected), f"the newest commit has {sorted(found_stores)}"
        for store, text in expected.items():
            found = await somebody.restore(commit, store)
            assert found == tree(text), f"store {store} is not {text}"

    async def check_all_goes(self) -> None:
        """When everybody is gone, two collections leave what the walker says and nothing is damaged."""
        await asyncio.sleep(10 * DAY_S)
        last = await self.actor("last")
        for _ in range(2):
            await last.collect()
        await check_keys(self.server)
        report = await last.process.run(last.repository.verify(level=Level.CONTENT))
        assert report.problems == (), report.problems


async def succeeds(work: Awaitable[object], refusal: type[Exception]) -> bool:
    """Do it; False if it was refused so."""
    with contextlib.suppress(refusal):
        await work
        return True
    return False


async def two_old_commits(writer: Actor) -> Commit:
    """Make two commits, and wait until the uploads are older than the TTL; returns the first."""
    old = await writer.push("one")
    await writer.push("two")
    await asyncio.sleep(2 * HOUR_S)
    return old


async def overtaken(zombie: Actor, other: Actor, collector: Actor) -> BackupResult:
    """Return a result of a writer whose number others have used and closed since."""
    await zombie.push("one")
    result = await zombie.backup("zombie")
    for text in ("two", "three"):
        await other.push(text)
    await collector.collect()
    return result


Interleaving = Callable[[Scene], Awaitable[None]]


class _Listed:
    """An interleaving and the world that it needs."""

    def __init__(self, interleaving: Interleaving, kind: Kind, expiry_ms: int | None) -> None:
        self.interleaving = interleaving
        self.kind: Kind = kind
        self.expiry_ms = expiry_ms


INTERLEAVINGS: Final[dict[str, _Listed]] = {}


def interleaving(*, kind: Kind = "s3", expiry_ms: int | None = None) -> Callable[[Interleaving], Interleaving]:
    """Put an interleaving on the list."""

    def take(run: Interleaving) -> Interleaving:
        INTERLEAVINGS[getattr(run, "__name__", "")] = _Listed(run, kind, expiry_ms)
        return run

    return take


def run_interleaving(name: str, seed: int, directory: Path) -> list[str]:
    """Run an interleaving; raises where it ends otherwise than it should. Returns the history."""
    listed = INTERLEAVINGS[name]

    async def live() -> list[str]:
        scene = Scene(name, seed, directory, listed.kind, listed.expiry_ms)
        await listed.interleaving(scene)
        return scene.server.history

    try:
        with watched_locks(), small_deltas():
            return run_virtual(live(), seed=seed, start_s=EPOCH_S)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def refused(kind: type[EngineError]) -> Iterator[None]:
    """What happens within ends with this error."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")

"""The use cases that `faults/store_effects.py` stops, each with what has to be there before it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from engine.backup.backup import BackupResult
from engine.errors import CommitLostError, EngineError, NotFoundError, StaleResultError, UsageError
from engine.repository.repository import Repository
from engine.restore.restore import RestoreOptions
from index.plan.commits import Retention
from index.snapshot.model import Scope
from tests.simulation.faults.request_faults import FaultPlan, Request
from tests.simulation.model.processes import KilledError, Kind, SimProcess
from tests.simulation.model.s3 import SimObject, SimServer
from tests.simulation.scenarios.small_trees import tree, write_tree

JOB: Final = Scope("job")
FORK: Final = Scope("fork")
DAY_S: Final = 86_400.0
TTL_MS: Final = 3_600_000
MARGIN_MS: Final = TTL_MS // 10
SEED: Final = 7
_PAGE_MAX: Final[dict[Kind, int]] = {"s3": 3, "direct": 2}


class Snapshot(msgspec.Struct):
    """A bucket as `prepare` left it, and the results of backups that were not committed."""

    objects: dict[str, SimObject]
    at_s: float
    results: list[BackupResult]


class World:
    """One run: a bucket, a directory for local directories, and what was acknowledged.

    Attributes:
        base: Directories that `prepare` made, shared by all runs: nobody changes them.
        directory: Of this run alone.
        said: What the use case acknowledged, in order.
    """

    def __init__(self, base: Path, directory: Path, snapshot: Snapshot | None, kind: Kind) -> None:
        loop = asyncio.get_running_loop()
        self.base = base
        self.directory = directory
        self.kind = kind
        # Lists have several pages, of other sizes with each kind of store.
        self.server = SimServer(seed=SEED, clock=loop.time, faults=FaultPlan(SEED), page_max=_PAGE_MAX.get(kind, 7))
        self.results: list[BackupResult] = []
        self.said: list[str] = []
        if snapshot is not None:
            self.server.restore(snapshot.objects)
            self.results = snapshot.results

    def process(self, name: str) -> SimProcess:
        """A process that has not begun."""
        return SimProcess(self.server, name, seed=SEED, kind=self.kind)


class UseCase(msgspec.Struct, frozen=True, kw_only=True):
    """What is stopped."""

    do: Callable[[World, SimProcess], Awaitable[None]]
    # What the newest commit may restore to before anything was acknowledged.
    allowed: frozenset[str]
    prepare: Callable[[World, SimProcess], Awaitable[None]]
    # Whether its calls in threads are effects, too.
    changes_files: bool = False
    # Errors that doing it again may end with, because it was done; and what the newest commit then has to hold.
    done_errors: tuple[type[EngineError], ...] = ()
    done_says: str = ""
    # Whether there are no commits of the job in the end, and whether there is a fork of the first.
    is_forgotten: bool = False
    is_forked: bool = False


# ---------------------------------------------------------------------------------------------- the world


def source(world: World, text: str) -> Path:
    """The local directory of a tree."""
    directory = world.base / text
    return directory if directory.exists() else write_tree(directory, tree(text))


async def commit_tree(world: World, process: SimProcess, repository: Repository, text: str) -> None:
    result = await process.run(repository.backup(JOB, source(world, text)))
    await process.run(repository.commit(JOB, [result], offsets=text))


async def prepare_empty(world: World, process: SimProcess) -> None:
    """Nothing is there."""


async def prepare(world: World, process: SimProcess) -> None:
    """Three commits, the second with a name."""
    repository = await process.init(ttl_ms=TTL_MS, margin_ms=MARGIN_MS)
    for text in ("one", "two", "three"):
        await commit_tree(world, process, repository, text)
    await process.run(repository.name(await process.run(repository.find(JOB, version=2)), "second"))
    source(world, "four")


async def prepare_commit(world: World, process: SimProcess) -> None:
    """And the backup of a fourth."""
    await prepare(world, process)
    repository = process.repository
    assert repository is not None
    world.results.append(await process.run(repository.backup(JOB, source(world, "four"))))


async def prepare_settle(world: World, process: SimProcess) -> None:
    """And of the third commit, TTL removal was interrupted."""
    await prepare(world, process)
    repository = process.repository
    assert repository is not None
    result = await process.run(repository.backup(JOB, source(world, "unsettled")))

    def die(phase: str, request: Request) -> bool:
        if request.method == "put_object_tagging":
            process.kill()
            return False
        return True

    world.server.on_effect = die
    with contextlib.suppress(KilledError):
        await process.run(repository.commit(JOB, [result], offsets="unsettled"))
    world.server.on_effect = None
    other = world.process("prepare-2")
    repository = await other.open()
    world.results.append(await other.run(repository.backup(JOB, source(world, "four"))))


async def prepare_collect(world: World, process: SimProcess) -> None:
    """And the name is given up, a fork went on, and a backup was never committed; all TTLs are over."""
    await prepare_commit(world, process)
    repository = process.repository
    assert repository is not None
    await process.run(repository.release_name(JOB, "second"))
    await process.run(repository.fork(await process.run(repository.find(JOB, version=1)), FORK))
    result = await process.run(repository.backup(FORK, source(world, "four")))
    await process.run(repository.commit(FORK, [result]))
    await asyncio.sleep(2 * DAY_S)


# ---------------------------------------------------------------------------------------------- the use cases


async def do_init(world: World, process: SimProcess) -> None:
    await process.init(ttl_ms=TTL_MS, margin_ms=MARGIN_MS)
    world.said.append("")


async def do_backup(world: World, process: SimProcess) -> None:
    repository = await process.open()
    await process.run(repository.backup(JOB, source(world, "four")))


async def do_commit(world: World, process: SimProcess) -> None:
    repository = await process.open()
    await process.run(repository.commit(JOB, world.results, offsets="four"))
    world.said.append("four")


async def do_rewind(world: World, process: SimProcess) -> None:
    repository = await process.open()
    await process.run(repository.rewind(await process.run(repository.find(JOB, version=2))))
    world.said.append("two")


async def do_fork(world: World, process: SimProcess) -> None:
    repository = await process.open()
    await process.run(repository.fork(await process.run(repository.find(JOB, version=1)), FORK))


async def do_name(world: World, process: SimProcess) -> None:
    repository = await process.open()
    await process.run(repository.name(await process.run(repository.find(JOB, version=1)), "first"))


async def do_release(world: World, process: SimProcess) -> None:
    repository = await process.open()
    await process.run(repository.release_name(JOB, "second"))


async def do_restore(world: World, process: SimProcess) -> None:
    repository = await process.open()
    target = world.directory / "fresh" / "target"
    commit = await process.run(repository.find(JOB))
    if not target.exists():
        await process.run(repository.restore(commit, target))


async def do_replace(world: World, process: SimProcess) -> None:
    target = world.directory / "target"
    if not target.exists():
        write_tree(target, tree("two"))
    repository = await process.open()
    await process.run(repository.find_and_restore(JOB, target, options=RestoreOptions(replace=True)))


async def do_collect(world: World, process: SimProcess) -> None:
    repository = await process.open()
    await process.run(repository.collect(Retention(keep_last=1, keep_named=False), delete_share_max=1))


async def do_forget(world: World, process: SimProcess) -> None:
    repository = await process.open()
    await process.run(repository.forget(JOB, with_names=True))


async def do_heal(world: World, process: SimProcess) -> None:
    repository = await process.open()
    await process.run(repository.verify(heal=True))


_ONLY_THREE: Final = frozenset({"three"})
# A result is committed once.
_OVERTAKEN: Final = (CommitLostError, StaleResultError)
CASES: Final[dict[str, UseCase]] = {
    "init": UseCase(prepare=prepare_empty, do=do_init, allowed=frozenset(), done_errors=(UsageError,)),
    # Its tree leaves the packs thin: the live part is packed again (P1), and its index is a delta (P2).
    "backup": UseCase(prepare=prepare, do=do_backup, allowed=_ONLY_THREE),
    "commit": UseCase(
        prepare=prepare_commit,
        do=do_commit,
        allowed=frozenset({"three", "four"}),
        done_errors=_OVERTAKEN,
        done_says="four",
    ),
    "settle": UseCase(
        prepare=prepare_settle,
        do=do_commit,
        allowed=frozenset({"unsettled", "four"}),
        done_errors=_OVERTAKEN,
        done_says="four",
    ),
    "heal": UseCase(prepare=prepare_settle, do=do_heal, allowed=frozenset({"unsettled"})),
    "rewind": UseCase(prepare=prepare, do=do_rewind, allowed=frozenset({"three", "two"})),
    "fork": UseCase(prepare=prepare, do=do_fork, allowed=_ONLY_THREE, done_errors=(UsageError,), is_forked=True),
    "name": UseCase(prepare=prepare, do=do_name, allowed=_ONLY_THREE),
    "release": UseCase(prepare=prepare, do=do_release, allowed=_ONLY_THREE, done_errors=(NotFoundError,)),
    "restore": UseCase(prepare=prepare, do=do_restore, allowed=_ONLY_THREE, changes_files=True),
    "replace": UseCase(prepare=prepare, do=do_replace, allowed=_ONLY_THREE, changes_files=True),
    "collect": UseCase(prepare=prepare_collect, do=do_collect, allowed=_ONLY_THREE),
    "forget": UseCase(prepare=prepare_commit, do=do_forget, allowed=_ONLY_THREE, is_forgotten=True),
}

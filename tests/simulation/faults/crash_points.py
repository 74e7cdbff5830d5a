"""Stop a use case before each of its effects, in a process that really ends there, and judge what is left.

Every effect on a file system is an audit event of CPython (open for writing, rename, link, mkdir, ...), or a call of
`os.fsync`, `os.write` or `os.pwrite`, which are counted by wrapping them. A child process is forked for each number k
and ends by `os._exit` just before its k-th effect: no `finally`, no `atexit`. The state before effect k is also the
state after effect k - 1, so that stopping before each, and not at all, covers before and after. Recovery runs in
another child, so that this process stays free of threads and safe to fork.

Run as `python -m tests.simulation.faults.crash_points SCENARIO DIRECTORY SHARE`; the last line printed is JSON.
With a SHARE of 1 the child is stopped before every effect. With one of n, where that shows as much (`choose_points`):
not after an effect that leaves no trace in a file system whose machine goes on, and after one that only changes what
is in a file, 1 in n times.
"""

import asyncio
import itertools
import json
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest import mock

import msgspec
from typing_extensions import override

from blobstore.base import list_blobs
from blobstore.local.store import LocalStore
from engine.backup.backup import BackupResult
from engine.errors import PromotedError
from engine.repository.repository import Repository
from engine.restore.restore import RestoreOptions
from engine.restore.staging import Staging
from engine.runtime import Runtime
from engine.settings import TransferSettings
from index.plan.commits import Retention
from index.snapshot.model import Scope
from tests.walker import expected_keys

CRASHED: Final = 77
JOB: Final = Scope("job")
FOLLOWED: Final = Scope("followed")
STORE: Final[dict[str, Any]] = {"task": "0", "store": "default"}
TTL_MS: Final = 3_600_000
POINTS_MAX: Final = 2_000
# Enough to see what is wrong.
FAILURES_MAX: Final = 3
# One request at a time, so that a number means the same effect in every run.
SETTINGS: Final = TransferSettings(
    in_flight_max=1, pack_file_bytes_max=4096, pack_bytes_max=16_384, chunk_bytes=16_384, blob_bytes_max=65_536
)
_CALLS: Final = "mkdir", "rename", "link", "symlink", "remove", "rmdir", "chmod", "utime", "truncate", "chown"
# Before and after one of these, everybody sees the same files, names, bytes and times.
_TRACELESS: Final = frozenset({"fsync", "fdatasync"})
# Nearly always on a file that nobody knows of yet.
_WITHIN_A_FILE: Final = frozenset({"open", "write", "pwrite", "os.chmod", "os.chown", "os.truncate"})
_EVENTS: Final = frozenset(f"os.{call}" for call in _CALLS)
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class LaterStore(LocalStore):
    """A directory store that reports a later time, so that a TTL is over without waiting."""

    shift_ms = 0

    @override
    async def now_ms(self) -> int:
        return await super().now_ms() + self.shift_ms


class LaterRuntime(Runtime):
    """The clock of a machine at that time: a store that is ahead of it deletes nothing for its age (S2)."""

    def __init__(self, shift_ms: int) -> None:
        super().__init__()
        self._shift_ms = shift_ms

    @override
    def local_now_ms(self) -> int:
        return super().local_now_ms() + self._shift_ms


# ---------------------------------------------------------------------------------------------- the world


def tree(text: str) -> dict[str, bytes]:
    return {
        "CURRENT": text.encode(),
        "MANIFEST-000005": f"manifest of {text}".encode() * 100,
        "archive/000009.log": f"log of {text}".encode() * 20_000,
        "archive/deep/always": b"the same" * 1000,
        "empty": b"",
    }


def write_tree(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def read_tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


async def opened(world: Path, *, shift_ms: int = 0) -> Repository:
    store = LaterStore(world / "repository")
    store.shift_ms = shift_ms
    return await Repository.open(store, settings=SETTINGS, runtime=LaterRuntime(shift_ms))


async def prepare(world: Path) -> None:
    """Three commits; a fourth backup's directory; the result of that backup; an old restored directory."""
    (world / "repository").mkdir(parents=True)
    repository = await Repository.init(
        LaterStore(world / "repository"), ttl_ms=TTL_MS, margin_ms=TTL_MS // 10, settings=SETTINGS
    )
    for text in ("one", "two", "three"):
        write_tree(world / text, tree(text))
        result = await repository.backup(JOB, world / text)
        commit = await repository.commit(JOB, [result], offsets=text)
        if text == "two":
            await repository.restore(commit, world / "target")
            await repository.name(commit, "second")
    write_tree(world / "four", tree("four"))


# ---------------------------------------------------------------------------------------------- the use cases


async def do_backup(world: Path, acknowledge: Callable[[str], None]) -> None:
    repository = await opened(world)
    await repository.backup(JOB, world / "four")


async def prepare_commit(world: Path) -> None:
    await prepare(world)
    repository = await opened(world)
    result = await repository.backup(JOB, world / "four")
    (world / "result").write_bytes(msgspec.msgpack.encode(result))


async def do_commit(world: Path, acknowledge: Callable[[str], None]) -> None:
    repository = await opened(world)
    result = msgspec.msgpack.decode((world / "result").read_bytes(), type=BackupResult)
    await repository.commit(JOB, [result], offsets="four")
    acknowledge("four")


async def do_rewind(world: Path, acknowledge: Callable[[str], None]) -> None:
    repository = await opened(world)
    await repository.rewind(await repository.find(JOB, version=2))
    acknowledge("two")


async def do_restore(world: Path, acknowledge: Callable[[str], None]) -> None:
    repository = await opened(world)
    await repository.restore(await repository.find(JOB), world / "fresh" / "target")


async def do_replace(world: Path, acknowledge: Callable[[str], None]) -> None:
    repository = await opened(world)
    await repository.restore(await repository.find(JOB), world / "target", options=RestoreOptions(replace=True))


async def do_collect(world: Path, acknowledge: Callable[[str], None]) -> None:
    repository = await opened(world)
    await repository.collect(Retention(keep_last=1, keep_named=False), delete_share_max=1)


async def prepare_collect(world: Path) -> None:
    await prepare(world)
    repository = await opened(world)
    await repository.release_name(JOB, "second")


async def do_name(world: Path, acknowledge: Callable[[str], None]) -> None:
    repository = await opened(world)
    await repository.name(await repository.find(JOB, version=1), "first")


async def do_fork(world: Path, acknowledge: Callable[[str], None]) -> None:
    repository = await opened(world)
    await repository.fork(await repository.find(JOB, version=1), Scope("fork"))


async def do_release(world: Path, acknowledge: Callable[[str], None]) -> None:
    repository = await opened(world)
    await repository.release_name(JOB, "second")


async def prepare_follow(world: Path) -> None:
    """Prepare what `prepare` does, and a directory that follows, at the second commit."""
    await prepare(world)
    repository = await opened(world)
    await repository.fork(await repository.find(JOB, version=2), FOLLOWED)
    await repository.follow(FOLLOWED, world / "standby", **STORE)
    result = await repository.backup(FOLLOWED, world / "three")
    await repository.commit(FOLLOWED, [result])


async def do_follow(world: Path, acknowledge: Callable[[str], None]) -> None:
    repository = await opened(world)
    await repository.follow(FOLLOWED, world / "standby", **STORE)


async def do_follow_aside(world: Path, acknowledge: Callable[[str], None]) -> None:
    """Follow on a file system that exchanges no names."""
    with mock.patch.object(Staging, "_exchange", return_value=False):
        await do_follow(world, acknowledge)


async def do_promote(world: Path, acknowledge: Callable[[str], None]) -> None:
    repository = await opened(world)
    await repository.promote(FOLLOWED, world / "standby", **STORE)
    write_tree(world, {"promoted": b""})


async def judge_follower(scenario: str, world: Path) -> None:
    """The directory is an exact commit, which its status names, and goes on from there (design 0011, F4 to F6)."""
    standby = world / "standby"
    repository = await opened(world)
    is_absent = read_tree(standby) == {}
    assert not is_absent or scenario == "follow-aside", "nothing is there"
    status = await repository.follow_status(FOLLOWED, standby, **STORE)
    number = status.commit_number
    if not is_absent:
        assert read_tree(standby) == tree({1: "two", 2: "three"}[number]), f"it is not commit {number}"
    assert status.promoted or "promoted" not in read_tree(world), "it was promoted, and is not"
    if not status.promoted:
        step = await repository.follow(FOLLOWED, standby, **STORE)
        assert step.commit.pointer.number == 2
        assert read_tree(standby) == tree("three")
        status = await repository.promote(FOLLOWED, standby, **STORE)
    assert (status.promoted, status.commit_number) == (True, 2)
    try:
        await repository.follow(FOLLOWED, standby, **STORE)
    except PromotedError:
        pass
    else:
        raise AssertionError("it is followed after its promotion")
    left = {name for name in await asyncio.to_thread(os.listdir, world) if name.startswith(".standby")}
    assert left <= {".standby.tidemark-follow", ".standby.tidemark-follow-lock"}, f"left beside it: {left}"
    for name in left:
        os.unlink(world / name)  # noqa: PTH108
    # What follows expects the scopes that it knows.
    await repository.forget(FOLLOWED)


# name: (prepare, do, what the newest commit may restore to if nothing was acknowledged)
SCENARIOS: dict[
    str, tuple[Callable[[Path], Awaitable[None]], Callable[[Path, Callable[[str], None]], Awaitable[None]], set[str]]
] = {
    "backup": (prepare, do_backup, {"three"}),
    "commit": (prepare_commit, do_commit, {"three", "four"}),
    "rewind": (prepare, do_rewind, {"three", "two"}),
    "restore": (prepare, do_restore, {"three"}),
    "replace": (prepare, do_replace, {"three"}),
    "collect": (prepare_collect, do_collect, {"three"}),
    "name": (prepare, do_name, {"three"}),
    "fork": (prepare, do_fork, {"three"}),
    "release": (prepare, do_release, {"three"}),
    "follow": (prepare_follow, do_follow, {"three"}),
    "follow-aside": (prepare_follow, do_follow_aside, {"three"}),
    "promote": (prepare_follow, do_promote, {"three"}),
}


# ---------------------------------------------------------------------------------------------- stopping


def choose_points(scenario: str, effects: list[str], share: int) -> list[int]:
    """Before which effects to stop, counted from 1; the last number is one more than there are effects.

    Stopping before an effect shows what the one before it left behind. After a traceless one, that is what was there
    before it: nothing new to be judged. Names, links and times are judged after each change of theirs, whatever the
    share.
    """
    if share == 1:
        return list(range(1, len(effects) + 2))
    rng = Random(scenario)
    points = [1]
    for number, effect in enumerate(effects, 1):
        if effect not in _TRACELESS and (effect not in _WITHIN_A_FILE or rng.randrange(share) == 0):
            points.append(number + 1)
    return points


def arm(stop_before: int, report: Callable[[str], None]) -> None:
    """End this process just before its `stop_before`-th effect (counted from 1); 0 never stops."""
    count = 0
    lock = threading.Lock()

    def effect(kind: str) -> None:
        nonlocal count
        with lock:
            count += 1
            report(kind)
            if count == stop_before:
                os._exit(CRASHED)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS or (event == "open" and arguments[2] is not None and arguments[2] & _WRITING):
            effect(event)

    for name in ("fsync", "write", "pwrite", "fdatasync"):
        original = getattr(os, name)

        def counted(*arguments: Any, original: Any = original, name: str = name) -> Any:
            effect(name)
            return original(*arguments)

        setattr(os, name, counted)
    sys.addaudithook(hook)


def in_child(work: Callable[[Callable[[str], None]], None], *, stop_before: int | None) -> tuple[int, list[str]]:
    """Run `work` in a forked child; returns its exit status and what it said before it ended."""
    said_read, said_write = os.pipe()
    os.set_inheritable(said_write, True)
    child = os.fork()
    if child == 0:
        raw_write = os.write

        def say(word: str) -> None:
            raw_write(said_write, word.encode() + b"\n")

        status = 1
        try:
            if stop_before is not None:
                arm(stop_before, lambda kind: say(f"#{kind}"))
            work(say)
            status = 0
        except BaseException:  # noqa: BLE001 - the child must never return into the parent's stack
            say("! " + traceback.format_exc().replace("\n", "\n! "))
        finally:
            os._exit(status)
    os.close(said_write)
    with os.fdopen(said_read, "rb") as pipe:
        said = pipe.read().decode().splitlines()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


# ---------------------------------------------------------------------------------------------- judging


async def judge(scenario: str, world: Path, acknowledged: list[str]) -> None:
    allowed = set(acknowledged[-1:]) or SCENARIOS[scenario][2]
    for target in (world / "target", world / "fresh" / "target"):
        if target.exists():
            assert read_tree(target) in [tree(text) for text in ("two", "three")], (
                f"{target} is neither absent nor complete"
            )
    if SCENARIOS[scenario][0] is prepare_follow:
        await judge_follower(scenario, world)
    repository = await opened(world)
    newest = world / "judged"
    await repository.find_and_restore(JOB, newest)
    found = (newest / "CURRENT").read_text()
    assert found in allowed, f"restored {found}, allowed are {allowed}"
    assert read_tree(newest) == tree(found)
    # Anyone who comes next can do the use case's work again, and go on.
    for target in (world / "target", world / "fresh" / "target"):
        await repository.find_and_restore(JOB, target, options=RestoreOptions(replace=True))
        assert read_tree(target) == tree(found)
        left = [p.name for p in target.parent.iterdir() if "tidemark" in p.name]
        assert left == [], f"left beside the target: {left}"
    write_tree(world / "five", tree("five"))
    await repository.commit(JOB, [await repository.backup(JOB, world / "five")])
    later = await opened(world, shift_ms=10 * 24 * 3_600_000)
    for retention in (Retention(keep_last=100), Retention(keep_last=1)):
        await later.collect(retention, delete_share_max=1)
        there = {blob.key async for blob in list_blobs(later.store, "")}
        expected = await expected_keys(later.store, await later.store.now_ms())
        assert there == expected, f"too many: {there - expected}; missing: {expected - there}"
    report = await later.verify()
    assert report.problems == (), report.problems
    target = world / "after"
    await later.find_and_restore(JOB, target)
    assert read_tree(target) == tree("five")


def run(scenario: str, directory: Path, *, share: int = 1) -> dict[str, Any]:
    prepare_world = SCENARIOS[scenario][0]
    template, world = directory / "template", directory / "world"
    status, said = in_child(lambda say: asyncio.run(_awaited(prepare_world(template))), stop_before=None)
    if status != 0:
        raise SystemExit("\n".join(said))
    shutil.copytree(template, world, symlinks=True)
    status, said = in_child(partial(_do, scenario, world), stop_before=0)
    if status != 0:
        raise SystemExit("\n".join(said))
    effects = [word[1:] for word in said if word[0] == "#"]
    failures: list[str] = []
    points = choose_points(scenario, effects, share)
    ended = False
    for stop_before in itertools.chain(points, range(points[-1] + 1, POINTS_MAX)):
        shutil.rmtree(world, ignore_errors=True)
        shutil.copytree(template, world, symlinks=True)
        status, said = in_child(partial(_do, scenario, world), stop_before=stop_before)
        if status not in {0, CRASHED}:
            failures.append(f"{scenario} before effect {stop_before}: " + "\n".join(s for s in said if s[0] == "!"))
        acknowledged = [word for word in said if word[0] not in "#!"]
        judged, verdict = in_child(partial(_judge, scenario, world, acknowledged), stop_before=None)
        if judged != 0:
            failures.append(f"{scenario} stopped before effect {stop_before}: " + "\n".join(verdict))
        # Past the last chosen point, until it was not stopped any more: no two runs need the same number of effects.
        ended = status == 0
        if (ended and stop_before >= points[-1]) or len(failures) >= FAILURES_MAX:
            break
    return {"scenario": scenario, "effects": len(effects), "points": len(points), "ended": ended, "failures": failures}


def _do(scenario: str, world: Path, say: Callable[[str], None]) -> None:
    asyncio.run(_awaited(SCENARIOS[scenario][1](world, say)))


def _judge(scenario: str, world: Path, acknowledged: list[str], say: Callable[[str], None]) -> None:
    asyncio.run(judge(scenario, world, acknowledged))


async def _awaited(work: Awaitable[None]) -> None:
    await work


if __name__ == "__main__":
    summary = run(sys.argv[1], Path(sys.argv[2]), share=int(sys.argv[3]))
    sys.stdout.write(json.dumps(summary) + "\n")
    sys.exit(1 if summary["failures"] else 0)

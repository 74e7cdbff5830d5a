"""Who acts in a schedule, and how: each action is what a user of `Repository` would do, and says what it was told.

An action runs within its process, so that it ends or stands still with it. What may go wrong in it is listed here;
anything else is a violation of invariant 7.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from typing_extensions import override

from blobstore.errors import BlobNotFoundError, InvalidRequestError, StoreError
from engine.backup import BackupResult
from engine.errors import (
    CommitLostError,
    CommitUnknownError,
    ConflictError,
    DamagedError,
    EngineError,
    FencedError,
    LeaseExpiredError,
    NotFoundError,
    StaleResultError,
    TargetError,
    UnsafeStoreError,
)
from engine.pins import PIN_DURATION_MS
from engine.repository import Repository
from index.log import Commit
from index.model import Scope, UniqueId
from index.retention import Retention
from tests.simulation.chronicle import Collecting, StoreName, Tree
from tests.simulation.coverage import Coverage, Moment
from tests.simulation.judge import Acknowledged, Ledger, Releases, read_tree
from tests.simulation.processes import SimProcess
from tests.simulation.schedule import Do, Trap, Verb
from tests.simulation.sim_world import WatchedServer

TASK: Final = "0"
# When files were changed, whatever the real clock says: it stands in indexes.
_MODIFIED_NS: Final = 1_600_000_000_000_000_000
_WRITING: Final[frozenset[Verb]] = frozenset({"push", "commit", "fork", "rewind", "name"})
_AGAINST_COLLECT: Final[dict[Verb, Moment]] = {
    "fork": Moment.FORK_AGAINST_COLLECT,
    "name": Moment.NAME_AGAINST_COLLECT,
    "rewind": Moment.REWIND_AGAINST_COLLECT,
    "restore": Moment.RESTORE_AGAINST_COLLECT,
    "release": Moment.RELEASE_AGAINST_COLLECT,
}
_ERRORS: Final[tuple[tuple[type[Exception], Moment], ...]] = (
    (FencedError, Moment.FENCED),
    (CommitLostError, Moment.COMMIT_LOST),
    (StaleResultError, Moment.STALE_RESULT),
    (LeaseExpiredError, Moment.TOO_OLD),
)

Results = dict[StoreName, BackupResult]


class Member:
    """One process after another, under one number: what it is at, and what it holds in memory.

    Attributes:
        traps: Set for whatever its process asks next.
        work: The action under way; done if there is none.
        verb: Of that action.
        halted: Set while its process is stopped, and when it was killed at work.
    """

    def __init__(self, number: int, directory: Path) -> None:
        self.number = number
        self.directory = directory / f"p{number}"
        self.process: Actor | None = None
        self.generation = 0
        self.skew_s = 0.0
        self.traps: list[Trap] = []
        self.work: asyncio.Task[None] | None = None
        self.verb: Verb | None = None
        self.halted = asyncio.Event()
        self.stopped_at_s: float | None = None
        self.closings_when_stopped = 0
        # Traps were sprung or the process stood still during this action: how long it took says nothing.
        self.was_held = False
        self.results: dict[Scope, Results] = {}
        # Requests without an answer: to be asked for again with the same words.
        self.unanswered: dict[Scope, tuple[str, Results]] = {}
        self._files: Tree = {}

    @property
    def is_busy(self) -> bool:
        """Whether an action is under way, or stands still."""
        return self.work is not None and not self.work.done()

    def write(self, files: Tree) -> Path:
        """Let its directory hold exactly these files."""
        root = self.directory / "state"
        if not self._files:
            (root / "sub").mkdir(parents=True, exist_ok=True)
        for gone in self._files.keys() - files.keys():
            (root / gone).unlink()
        for name, data in files.items():
            if self._files.get(name) != data:
                path = f"{root}/{name}"
                with open(path, "wb") as file:  # noqa: PTH123 - pathlib takes longer than the write
                    file.write(data)
                os.utime(path, ns=(_MODIFIED_NS, _MODIFIED_NS))
        self._files = files
        return root

    def forget(self) -> None:
        """What was in the memory of a process that is no more."""
        self.results, self.unanswered = {}, {}


class Actor(SimProcess):
    """A process that tells its member when it stands still, dies and wakes."""

    member: Member
    server: WatchedServer

    @override
    def stop(self) -> None:
        super().stop()
        member = self.member
        member.was_held = True
        member.stopped_at_s = asyncio.get_running_loop().time()
        member.closings_when_stopped = self.server.chronicle.closings
        member.halted.set()

    @override
    def wake(self) -> None:
        member, met = self.member, self.server.coverage.met
        if member.stopped_at_s is not None and member.is_busy:
            slept_s = asyncio.get_running_loop().time() - member.stopped_at_s
            closed = self.server.chronicle.closings > member.closings_when_stopped
            met(Moment.ZOMBIE_AFTER_BOUNDARY, int(member.verb in _WRITING and closed))
            met(Moment.PIN_LAPSED, int(member.verb == "restore" and slept_s * 1000 > PIN_DURATION_MS))
        member.stopped_at_s = None
        member.halted.clear()
        super().wake()

    @override
    def kill(self) -> None:
        member, met = self.member, self.server.coverage.met
        if member.is_busy:
            met(Moment.KILLED_WRITER, int(member.verb in _WRITING))
            met(Moment.KILLED_COLLECTOR, int(member.verb == "collect"))
            met(Moment.KILLED_READER, int(member.verb == "restore"))
        member.forget()
        member.stopped_at_s = None
        super().kill()


class Actions:
    """What can be done.

    Args:
        server: The bucket.
        ledger: Where everybody says what they asked for and what they were told.
        coverage: Where rare moments are counted.
        stale: The store says that its lists may be stale.
    """

    def __init__(self, server: WatchedServer, ledger: Ledger, coverage: Coverage, *, stale: bool) -> None:
        self._server = server
        self._ledger = ledger
        self._met = coverage.met
        self._stale = stale
        self._members: list[Member] = []
        # Beyond what a repository may begin with.
        self._counter = len(ledger.trees) + len(ledger.requests)
        self._forks: list[Scope] = []
        self._verbs: dict[Verb, Callable[[Member, Repository, Do], Awaitable[None]]] = {
            "backup": self._backup,
            "commit": self._commit,
            "push": self._push,
            "hand": self._hand,
            "restore": self._restore,
            "fork": self._fork,
            "rewind": self._rewind,
            "name": self._name,
            "release": self._release,
            "collect": self._collect,
            "heal": self._heal,
        }

    def join(self, members: list[Member]) -> None:
        """Who takes part."""
        self._members = members

    async def perform(self, member: Member, repository: Repository, step: Do) -> None:
        """One action, to its end. Errors that may happen are noted and end here."""
        closings = self._server.chronicle.closings
        try:
            await self._verbs[step.verb](member, repository, step)
        except (EngineError, StoreError) as error:
            for kind, moment in _ERRORS:
                self._met(moment, int(isinstance(error, kind)))
            if not self._may_happen(member, step, error):
                self._ledger.errors.append(f"7: p{member.number} {step.verb} ends with {error!r}")
        if step.verb in _AGAINST_COLLECT and self._server.chronicle.closings > closings:
            self._met(_AGAINST_COLLECT[step.verb])

    def _may_happen(self, member: Member, step: Do, error: Exception) -> bool:
        if isinstance(error, BlobNotFoundError | InvalidRequestError | TargetError):
            return False
        if isinstance(error, DamagedError):
            # A reader whose pin has lapsed while it stood still may have been overtaken (D5).
            return (step.verb == "restore" and member.was_held) or self._ledger.tampered
        if isinstance(error, ConflictError | CommitUnknownError | LeaseExpiredError):
            return step.verb in _WRITING
        return True

    def _next(self) -> int:
        self._counter += 1
        return self._counter

    def _scope(self, step: Do) -> Scope:
        if step.scope < 2:  # two jobs from the start
            return Scope(("alpha", "beta")[step.scope])
        return self._forks[-1] if self._forks else Scope("alpha")

    # ------------------------------------------------------------------ writing

    async def _backup(self, member: Member, repository: Repository, step: Do) -> None:
        scope, store = self._scope(step), f"s{step.store}"
        number = self._next()
        unique_id = UniqueId(f"{number:08x}-0000-4000-8000-{member.number:012x}")
        tree = make_tree(number)
        self._ledger.trees[unique_id] = tree
        result = await repository.backup(scope, member.write(tree), task=TASK, store=store, unique_id=unique_id)
        member.results.setdefault(scope, {})[TASK, store] = result
        if result.stats.files_repacked and any(m.is_busy and m.verb == "restore" for m in self._members):
            self._met(Moment.REPACK_AGAINST_RESTORE)

    async def _push(self, member: Member, repository: Repository, step: Do) -> None:
        await self._backup(member, repository, step)
        await self._commit(member, repository, step)

    async def _commit(self, member: Member, repository: Repository, step: Do) -> None:
        for scope in sorted({*member.results, *member.unanswered}, key=str):
            if scope in member.unanswered:
                offsets, results = member.unanswered.pop(scope)
                asked_before = True
            else:
                offsets, results = f"r{self._next()}", member.results.pop(scope)
                asked_before = False
                self._ledger.requests[offsets] = {k: r.reference.unique_id for k, r in results.items()}
            try:
                commit = await repository.commit(scope, list(results.values()), offsets=offsets)
            except CommitUnknownError:
                member.unanswered[scope] = offsets, results
                raise
            self._met(Moment.ADOPTED, int(asked_before))
            self._acknowledge(scope, commit, offsets)

    def _acknowledge(self, scope: Scope, commit: Commit, offsets: str | None = None) -> None:
        self._met(Moment.INTERRUPTED_TTL_REMOVAL, int(not commit.settled))
        if commit.scope != scope or (offsets is not None and commit.record.offsets != offsets):
            self._ledger.errors.append(f"1: {scope} was acknowledged {commit.record}")
        after = self._server.chronicle.events
        self._ledger.commits.setdefault(scope, []).append(Acknowledged(record=commit.record, after=after))

    async def _hand(self, member: Member, repository: Repository, step: Do) -> None:
        other = self._members[step.other]
        for scope, results in member.results.items():
            other.results.setdefault(scope, {}).update(results)
        member.results = {}

    # ------------------------------------------------------------------ reading and protecting

    async def _choose(self, repository: Repository, step: Do) -> Commit | None:
        commits = await repository.commits(self._scope(step))
        return commits[step.choice % len(commits)] if commits else None

    async def _restore(self, member: Member, repository: Repository, step: Do) -> None:
        target = member.directory / f"target-{step.target}"
        scope = self._scope(step)
        # Whatever it was, it stays until something that is known takes its place.
        allowed = self._ledger.restored.setdefault(target, [])
        if step.choice == 0:
            # Which commit it will be is known only later: any that has this store.
            allowed += self._known_states(scope)
            restored = await repository.find_and_restore(scope, target, task=TASK, store="s0", replace=True)
            commit = restored.commit
        else:
            chosen = await self._choose(repository, step)
            if chosen is None or chosen.store(TASK, "s0") is None:
                return
            commit = chosen
            allowed += self._known_states(scope)
            await repository.restore(commit, target, task=TASK, store="s0", replace=True)
        reference = commit.store(TASK, "s0")
        assert reference is not None
        self._ledger.restored[target] = [reference.unique_id]
        if read_tree(target) != self._ledger.trees[reference.unique_id]:
            self._ledger.errors.append(f"1: p{member.number} restores {commit.pointer} to other bytes")
        self._ledger.newly_restored.add(commit.pointer)

    def _known_states(self, scope: Scope) -> list[str]:
        written = self._server.chronicle.records.get(scope, {}).values()
        return [s.unique_id for w in written for s in w.record.stores if s.store == "s0"]

    async def _fork(self, member: Member, repository: Repository, step: Do) -> None:
        commit = await self._choose(repository, step)
        if commit is None:
            return
        scope = Scope(f"fork-{self._next()}")
        forked = await repository.fork(commit, scope)
        self._forks.append(scope)
        self._acknowledge(scope, forked)

    async def _rewind(self, member: Member, repository: Repository, step: Do) -> None:
        commit = await self._choose(repository, step)
        if commit is not None:
            self._acknowledge(commit.scope, await repository.rewind(commit))

    async def _name(self, member: Member, repository: Repository, step: Do) -> None:
        commit = await self._choose(repository, step)
        if commit is None:
            return
        name = f"name-{step.choice % 2}"
        releases = self._ledger.releases.setdefault((commit.scope, name), Releases())
        ended = releases.ended
        await repository.name(commit, name)
        # What is being released while it is given stands, or does not.
        if not releases.begun - ended:
            self._ledger.names[commit.scope, name] = commit.pointer

    async def _release(self, member: Member, repository: Repository, step: Do) -> None:
        scope, name = self._scope(step), f"name-{step.choice % 2}"
        releases = self._ledger.releases.setdefault((scope, name), Releases())
        releases.begun += 1
        self._ledger.names.pop((scope, name), None)
        with contextlib.suppress(NotFoundError):
            await repository.release_name(scope, name)
        # One that was not answered, or whose process died, may still be heard.
        releases.ended += 1

    # ------------------------------------------------------------------ care

    async def _collect(self, member: Member, repository: Repository, step: Do) -> None:
        assert member.process is not None
        now_ms = self._server.now_ms()
        since_ms = None if step.keep_last else now_ms - step.since_ms
        retention = Retention(keep_last=step.keep_last, keep_since_ms=since_ms)
        chronicle = self._server.chronicle
        chronicle.collecting.setdefault(member.process.name, []).append(
            Collecting(keep_last=step.keep_last, keep_since_ms=since_ms, began=chronicle.events)
        )
        others = [m for m in self._members if m is not member and m.is_busy and m.verb == "collect"]
        self._met(Moment.TWO_COLLECTORS, int(bool(others)))
        try:
            report = await repository.collect(retention, delete_share_max=1)
        except UnsafeStoreError:
            self._met(Moment.STALE_LISTS_REFUSED, int(self._stale))
            raise
        self._met(Moment.SPARED, int(report.spared_count > 0))
        if self._stale:
            self._ledger.errors.append("4: a store with stale lists was collected")

    async def _heal(self, member: Member, repository: Repository, step: Do) -> None:
        report = await repository.verify(heal=True)
        if report.damaged and not self._ledger.tampered:
            self._ledger.errors.append(f"2: verify finds {report.problems[:2]}")


def make_tree(number: int) -> Tree:
    """The files of one state: some of them as in the state before, all sizes that are stored in another way."""
    files = {
        "CURRENT": f"{number}".encode(),
        "a": f"a of {number}".encode() * 30,
        "b": f"b of {number // 2}".encode() * 30,
        "c": f"c of {number // 5}".encode() * 30,
        "sub/always": b"the same" * 100,
    }
    if number % 3 == 0:
        files["large"] = f"large of {number}".encode() * 400
    return files

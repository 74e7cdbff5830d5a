"""The actions of a schedule: each is what a user of `Repository` would do, and records the answer.

An action runs within its process, so that it ends or is paused with it. What may go wrong in it is listed here;
anything else is a violation of invariant 7.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from blobstore.errors import StoreError
from engine.backup.backup import BackupOptions, WholeDirectory, backup_source
from engine.commit.record import ANY, LayoutChange
from engine.errors import (
    CommitLostError,
    CommitUnknownError,
    EngineError,
    FencedError,
    LeaseExpiredError,
    NotFoundError,
    PromotedError,
    StaleResultError,
    TargetBusyError,
    UnsafeStoreError,
)
from engine.inspect.verify import ProblemKind
from engine.records.repository import StoreAddress
from engine.repository.repository import Repository
from engine.restore.restore import RestoreOptions
from index.errors import FormatError
from index.plan.commits import Commit, Retention
from index.snapshot.keys import commit_key, encode_component
from index.snapshot.model import DirIndex, FileIndex, Scope, ScopeLayout, SnapshotIndex, StoreReference, UniqueId
from tests.simulation.checks.coverage import Coverage, Moment
from tests.simulation.checks.error_causes import Asked, Causes
from tests.simulation.checks.history import Collecting, Tree
from tests.simulation.checks.judge import Acknowledged, CallLog, Releases, index_keys, read_tree
from tests.simulation.faults.file_effects import changing_files
from tests.simulation.model.participants import Member, Results, Wanted
from tests.simulation.model.world import WatchedServer
from tests.simulation.scenarios.builder import USUAL
from tests.simulation.scenarios.schedule import TASK_SCOPE, Do, Times, Verb

TASK: Final = "0"
# Rescaled again and again, a store does not grow without end.
_FILES_MAX: Final = 12
_AGAINST_COLLECT: Final[dict[Verb, Moment]] = {
    "fork": Moment.FORK_AGAINST_COLLECT,
    "name": Moment.NAME_AGAINST_COLLECT,
    "rewind": Moment.REWIND_AGAINST_COLLECT,
    "restore": Moment.RESTORE_AGAINST_COLLECT,
    "rescale": Moment.RESCALE_AGAINST_COLLECT,
    "follow": Moment.FOLLOW_AGAINST_COLLECT,
    "release": Moment.RELEASE_AGAINST_COLLECT,
}
_ERRORS: Final[tuple[tuple[type[Exception], Moment], ...]] = (
    (FencedError, Moment.FENCED),
    (CommitLostError, Moment.COMMIT_LOST),
    (StaleResultError, Moment.STALE_RESULT),
    (LeaseExpiredError, Moment.TOO_OLD),
)


class Actions:
    """What can be done.

    Args:
        server: The bucket.
        call_log: Where everybody says what they asked for and what they were shown.
        coverage: Where rare moments are counted.
        times: Of the repository.

    Attributes:
        causes: Says which errors may happen.
    """

    def __init__(self, server: WatchedServer, call_log: CallLog, coverage: Coverage, *, times: Times = USUAL) -> None:
        self._server = server
        self._call_log = call_log
        self._met = coverage.met
        self.causes = Causes(server, call_log, times=times)
        # By the name of their process.
        self._asked: dict[str, Asked] = {}
        self._members: list[Member] = []
        # Beyond what a repository may begin with.
        self._counter = len(call_log.trees) + len(call_log.requests)
        self._forks: list[Scope] = []
        # After which event each name was last given.
        self._named: dict[tuple[Scope, str], int] = {}
        # How often somebody has asked to promote a followed directory.
        self._promotions: Counter[Path] = Counter()
        self._verbs: dict[Verb, Callable[[Member, Repository, Do], Awaitable[None]]] = {
            "backup": self._backup,
            "commit": self._commit,
            "push": self._push,
            "again": self._again,
            "hand": self._hand,
            "restore": self._restore,
            "follow": self._follow,
            "promote": self._promote,
            "fork": self._fork,
            "rewind": self._rewind,
            "name": self._name,
            "release": self._release,
            "collect": self._collect,
            "heal": self._heal,
            "drop": self._drop,
            "rescale": self._rescale,
            "forget": self._forget,
        }

    def join(self, members: list[Member]) -> None:
        """Who takes part."""
        self._members = members

    async def perform(self, member: Member, repository: Repository, step: Do) -> None:
        """One action, to its end. Errors that have a cause are noted and end here."""
        assert member.process is not None
        now_s, server = asyncio.get_running_loop().time, self._server
        asked = self._asked[member.process.name] = self.causes.begin(member, step.verb, self._scope(step), now_s())
        collections = server.collections.copy()
        try:
            await self._verbs[step.verb](member, repository, step)
        except (EngineError, FormatError, StoreError) as error:
            for kind, moment in _ERRORS:
                self._met(moment, int(isinstance(error, kind)))
            if not self.causes.explains(asked, member, error):
                self._call_log.errors.append(f"7: p{member.number} {step.verb} ends without a cause with {error!r}")
        if self.causes.takes_too_long(asked, member, now_s()):
            self._call_log.errors.append(f"7: p{member.number} {step.verb} took {now_s() - asked.began_s:.0f} s")
        if step.verb in _AGAINST_COLLECT and server.collections[asked.scope] > collections[asked.scope]:
            self._met(_AGAINST_COLLECT[step.verb])
            self._met(Moment.BY_NAME_AGAINST_COLLECT, int(asked.name is not None))
        self._met(Moment.RELEASED_IN_USE, int(self.causes.is_released(asked)))

    def _next(self) -> int:
        self._counter += 1
        return self._counter

    def _scope(self, step: Do) -> Scope:
        if step.scope < 2:  # two jobs from the start
            return Scope(("alpha", "beta")[step.scope])
        if step.scope == TASK_SCOPE:
            return Scope("alpha", TASK)
        return self._forks[-1] if self._forks else Scope("alpha")

    # ------------------------------------------------------------------ writing

    async def _backup(self, member: Member, repository: Repository, step: Do) -> None:
        scope, store = self._scope(step), f"s{step.store}"
        number = self._next()
        unique_id = UniqueId(f"{step.label or number:08x}-0000-4000-8000-{0 if step.label else member.number:012x}")
        tree = make_tree(step.tree or number)
        result = await repository.backup(
            scope, member.write(tree), task=TASK, store=store, options=BackupOptions(unique_id=unique_id)
        )
        key = result.reference.index.key
        self._call_log.trees[key] = tree
        self._server.record_history.bases[key] = result.base.key if result.base is not None else None
        member.results.setdefault(scope, {})[TASK, store] = result
        self._met(Moment.REPACKED, int(result.stats.files_repacked > 0))
        self._met(Moment.RESUMED, int(result.stats.blobs_resumed > 0))
        if result.stats.files_repacked and any(m.is_busy and m.verb == "restore" for m in self._members):
            self._met(Moment.REPACK_AGAINST_RESTORE)

    async def _push(self, member: Member, repository: Repository, step: Do) -> None:
        await self._backup(member, repository, step)
        await self._commit(member, repository, step)

    async def _commit(self, member: Member, repository: Repository, step: Do) -> None:
        for scope in sorted({*member.results, *member.unanswered}, key=str):
            if scope in member.unanswered and not (step.label and scope in member.results):
                wanted = member.unanswered.pop(scope)
            else:
                # Who makes a backup once more may ask with the same words: the offsets that have no answer yet.
                unanswered = member.unanswered.pop(scope, None)
                offsets = unanswered[0] if unanswered is not None else f"r{self._next()}"
                results = member.results.pop(scope)
                self._want(offsets, results)
                wanted = (offsets, results, frozenset(), None)
            await self._ask(member, repository, scope, wanted)

    async def _again(self, member: Member, repository: Repository, step: Do) -> None:
        """Commit a result a second time, as a driver does that tries again, or that has it in a file."""
        scope = self._scope(step)
        results = member.committed.get(scope)
        if results is not None:
            offsets = f"r{self._next()}"
            self._want(offsets, results)
            await self._ask(member, repository, scope, (offsets, results, frozenset(), None))
            self._met(Moment.COMMITTED_AGAIN)

    def _want(self, offsets: str, results: Results) -> None:
        brought = index_keys([result.reference for result in results.values()])
        self._call_log.requests.setdefault(offsets, []).append(brought)

    async def _ask(self, member: Member, repository: Repository, scope: Scope, wanted: Wanted) -> None:
        assert member.process is not None
        offsets, results, dropped, change = wanted
        asked = self._asked_by(member)
        self.causes.aim(asked, scope)
        asked.offsets, asked.results, asked.dropped = offsets, results, dropped
        layout, asked.parent = change or (None, None)
        server = self._server
        stood_before = {w.record.pointer for w in server.record_history.records.get(scope, {}).values()}
        try:
            commit = await repository.commit(
                scope,
                list(results.values()),
                offsets=offsets,
                layout=layout,
                parent=asked.parent or ANY,
                dropped=dropped,
            )
        except CommitUnknownError:
            member.unanswered[scope] = wanted
            raise
        self._acknowledge(scope, commit, offsets)
        brought = index_keys([result.reference for result in results.values()])
        if not brought.items() <= index_keys(commit.record.stores).items():
            self._call_log.errors.append(f"3: {brought} was asked for, and {commit.record} acknowledged")
        if results:
            member.committed[scope] = results
        # It was there before this was asked, or was in the way of its own second attempt.
        key = commit_key(scope, commit.pointer.number)
        is_adopted = commit.pointer in stood_before or key in server.met[member.process.name]
        self._met(Moment.ADOPTED, int(is_adopted))
        self._met(Moment.DROPPED, int(bool(dropped) and change is None))
        self._met(Moment.RESCALED, int(change is not None))
        self._met(Moment.TASK_SCOPE, int(scope.task is not None))
        began_again = commit.record.predecessor is None and scope in self._server.record_history.forgotten_until
        self._met(Moment.BEGAN_AGAIN, int(began_again))

    async def _drop(self, member: Member, repository: Repository, step: Do) -> None:
        """A commit of nothing but that a store is no more."""
        commits = await repository.commits(self._scope(step))
        if not commits or not commits[0].record.stores:
            return
        stores = commits[0].record.stores
        store = stores[-1 - step.choice % len(stores)]
        offsets = f"r{self._next()}"
        dropped = frozenset({(store.task, store.store)})
        self._call_log.requests[offsets], self._call_log.drops[offsets] = [{}], dropped
        member.results.get(commits[0].scope, {}).pop((store.task, store.store), None)
        await self._ask(member, repository, commits[0].scope, (offsets, {}, dropped, None))

    async def _rescale(self, member: Member, repository: Repository, step: Do) -> None:
        """As `Repository.rescale`, of any files: each store gets those of others by reference."""
        async with repository.find_pinned(self._scope(step), purpose="rescale") as (commit, _):
            record, scope = commit.record, commit.scope
            self.causes.aim(self._asked_by(member), scope)
            held = [(s, await repository.read_index(s.index)) for s in record.stores]
            number, results = self._next(), {}
            for reference in record.stores[: None if step.choice else 1]:
                files, previous = _of_all(held, self._call_log.trees, number)
                unique_id = UniqueId(f"{self._next():08x}-0000-4000-8000-{member.number:012x}")
                result = await backup_source(
                    repository.opened,
                    WholeDirectory(member.write(files)),
                    StoreAddress(scope, reference.task, reference.store),
                    reference,
                    BackupOptions(unique_id=unique_id, version=record.version, lineage=()),
                    previous=previous,
                )
                key = result.reference.index.key
                self._call_log.trees[key] = files
                self._server.record_history.bases[key] = reference.index.key
                results[reference.task, reference.store] = result
            offsets = f"r{self._next()}"
            self._want(offsets, results)
            dropped = frozenset({(s.task, s.store) for s in record.stores} - results.keys())
            self._call_log.drops[offsets], self._call_log.parents[offsets] = dropped, commit.pointer
            after = ScopeLayout(tasks_count=number, key_hash="h", key_columns=("k int",))
            change = LayoutChange(before=record.layout, after=after), commit.pointer
            try:
                await self._ask(member, repository, scope, (offsets, results, dropped, change))
            except CommitLostError:
                self._met(Moment.RESCALE_LOST)
                raise

    def _acknowledge(self, scope: Scope, commit: Commit, offsets: str | None = None) -> None:
        self._met(Moment.INTERRUPTED_TTL_REMOVAL, int(not commit.settled))
        if commit.scope != scope or (offsets is not None and commit.record.offsets != offsets):
            self._call_log.errors.append(f"1: {scope} was acknowledged {commit.record}")
        after = self._server.record_history.events
        self._call_log.commits.setdefault(scope, []).append(Acknowledged(record=commit.record, after=after))

    async def _hand(self, member: Member, repository: Repository, step: Do) -> None:
        other = self._members[step.other]
        for scope, results in member.results.items():
            other.results.setdefault(scope, {}).update(results)
        member.results = {}

    # ------------------------------------------------------------------ reading and protecting

    async def _choose(self, member: Member, repository: Repository, step: Do) -> Commit | None:
        scope = self._scope(step)
        if step.by_name:
            name = _name_of(step)
            self.causes.aim_by_name(self._asked_by(member), scope, name)
            named = await repository.find(scope, name=name)
            self.causes.aim(self._asked_by(member), scope, named.pointer)
            return named
        commits = await repository.commits(scope)
        chosen = commits[step.choice % len(commits)] if commits else None
        if chosen is not None:
            self.causes.aim(self._asked_by(member), chosen.scope, chosen.pointer)
        return chosen

    def _asked_by(self, member: Member) -> Asked:
        assert member.process is not None
        return self._asked[member.process.name]

    async def _restore(self, member: Member, repository: Repository, step: Do) -> None:
        target = member.directory / f"target-{step.target}"
        scope = self._scope(step)
        # Whatever it was, it stays until something that is known takes its place.
        allowed = self._call_log.restored.setdefault(target, [])
        if step.choice == 0 and not step.by_name:
            # Which commit it will be is known only later: any that has this store.
            allowed += self._known_states(scope)
            with changing_files():
                restored = await repository.find_and_restore(
                    scope, target, task=TASK, store="s0", options=RestoreOptions(replace=True)
                )
            commit = restored.commit
        else:
            chosen = await self._choose(member, repository, step)
            if chosen is None or chosen.store(TASK, "s0") is None:
                return
            commit = chosen
            allowed += self._known_states(scope)
            with changing_files():
                await repository.restore(commit, target, task=TASK, store="s0", options=RestoreOptions(replace=True))
        reference = commit.store(TASK, "s0")
        assert reference is not None
        self._call_log.restored[target] = [reference.index.key]
        if read_tree(target) != self._call_log.trees[reference.index.key]:
            self._call_log.errors.append(f"1: p{member.number} restores {commit.pointer} to other bytes")
        self._call_log.newly_restored.add(commit.pointer)

    async def _follow(self, member: Member, repository: Repository, step: Do) -> None:
        scope, directory = self._followed(step)
        asked_before = self._promotions[directory]
        try:
            with changing_files():
                done = await repository.follow(scope, directory, task=TASK, store="s0")
        except PromotedError:
            self._met(Moment.PROMOTED_UNDER_WAY, int(not asked_before))
            if not self._promotions[directory]:
                self._call_log.errors.append(f"5: {directory.name} is promoted, and nobody has asked for it")
            return
        except TargetBusyError:
            self._check_busy(member)
            return
        self._check_state_of(directory, done.commit, f"p{member.number} follows")

    async def _promote(self, member: Member, repository: Repository, step: Do) -> None:
        scope, directory = self._followed(step)
        catch_up = step.choice == 0
        if not catch_up and not directory.exists():
            return
        self._promotions[directory] += 1
        try:
            with changing_files():
                status = await repository.promote(scope, directory, task=TASK, store="s0", catch_up=catch_up)
        except PromotedError:
            if self._promotions[directory] == 1:
                self._call_log.errors.append(f"5: {directory.name} is promoted, and nobody has asked for it")
            return
        except TargetBusyError:
            self._check_busy(member)
            return
        assert status.commit is not None
        if self._call_log.followed[directory][1] is not None:
            self._call_log.errors.append(f"5: {directory.name} was promoted twice")
        self._call_log.followed[directory] = scope, status.commit.pointer
        self._check_state_of(directory, status.commit, f"p{member.number} promotes")
        self._met(Moment.PROMOTED)

    def _followed(self, step: Do) -> tuple[Scope, Path]:
        """Return the one directory of each scope, which all processes share."""
        scope = self._scope(step)
        directory = self._members[0].directory.parent / f"standby-{encode_component(str(scope))}-{step.target}"
        self._call_log.followed.setdefault(directory, (scope, None))
        return scope, directory

    def _check_state_of(self, directory: Path, commit: Commit, what: str) -> None:
        reference = commit.store(TASK, "s0")
        assert reference is not None
        # A step of somebody else may have moved it on since, and nobody moves what is promoted.
        is_alone = sum(m.is_busy and m.verb in {"follow", "promote"} for m in self._members) == 1
        is_right = directory.exists() and read_tree(directory) == self._call_log.trees[reference.index.key]
        if is_alone and not is_right:
            self._call_log.errors.append(f"5: {what} {commit.pointer}, and {directory.name} has other bytes")

    def _check_busy(self, member: Member) -> None:
        if not any(m is not member and m.is_busy and m.verb in {"follow", "promote"} for m in self._members):
            self._call_log.errors.append(f"5: p{member.number} {member.verb} finds a lock that nobody holds")

    def _known_states(self, scope: Scope) -> list[str]:
        written = self._server.record_history.records.get(scope, {}).values()
        return [s.index.key for w in written for s in w.record.stores if s.store == "s0"]

    async def _fork(self, member: Member, repository: Repository, step: Do) -> None:
        commit = await self._choose(member, repository, step)
        if commit is None:
            return
        scope = Scope(f"fork-{self._next()}")
        self._asked_by(member).written_scope = scope
        forked = await repository.fork(commit, scope)
        self._forks.append(scope)
        self._acknowledge(scope, forked)

    async def _rewind(self, member: Member, repository: Repository, step: Do) -> None:
        commit = await self._choose(member, repository, step)
        if commit is not None:
            self._acknowledge(commit.scope, await repository.rewind(commit))

    async def _name(self, member: Member, repository: Repository, step: Do) -> None:
        commit = await self._choose(member, repository, step)
        if commit is None:
            return
        # What has a name gets the other one.
        name = _name_of(step, other=step.by_name)
        releases = self._call_log.releases.setdefault((commit.scope, name), Releases())
        ended = releases.ended
        await repository.name(commit, name)
        self._named[commit.scope, name] = self._server.record_history.events
        # What is being released while it is given is there, or not.
        if not releases.begun - ended:
            self._call_log.names[commit.scope, name] = commit.pointer

    async def _release(self, member: Member, repository: Repository, step: Do) -> None:
        scope, name = self._scope(step), _name_of(step)
        releases = self._call_log.releases.setdefault((scope, name), Releases())
        releases.begun += 1
        self._call_log.names.pop((scope, name), None)
        with contextlib.suppress(NotFoundError):
            await repository.release_name(scope, name)
            named, collecting = self._named.get((scope, name), 0), self._server.record_history.collecting
            at_work = [m.process.name for m in self._members if m.process and m.is_busy and m.verb == "collect"]
            began = [collecting[process][-1].began for process in at_work if process in collecting]
            self._met(Moment.NAMED_WITHIN_COLLECT, int(any(named > event for event in began)))
        # One that was not answered, or whose process died, may still be heard.
        releases.ended += 1

    # ------------------------------------------------------------------ care

    async def _forget(self, member: Member, repository: Repository, step: Do) -> None:
        assert member.process is not None
        scope, with_names = self._scope(step), step.choice % 2 == 1
        record_history, call_log = self._server.record_history, self._call_log
        record_history.forgetting.setdefault(scope, set()).add(member.process.name)
        given = [(scope, f"name-{n}") for n in range(2)] if with_names else []
        releases = [call_log.releases.setdefault(name, Releases()) for name in given]
        for name, release in zip(given, releases, strict=True):
            release.begun += 1
            call_log.names.pop(name, None)
        report = await repository.forget(scope, with_names=with_names)
        for release in releases:
            release.ended += 1
        self._met(Moment.FORGOTTEN, int(report.newest is not None))

    async def _collect(self, member: Member, repository: Repository, step: Do) -> None:
        assert member.process is not None
        now_ms = self._server.now_ms()
        since_ms = None if step.keep_last else now_ms - step.since_ms
        retention = Retention(keep_last=step.keep_last, keep_since_ms=since_ms)
        record_history = self._server.record_history
        record_history.collecting.setdefault(member.process.name, []).append(
            Collecting(keep_last=step.keep_last, keep_since_ms=since_ms, began=record_history.events)
        )
        others = [m for m in self._members if m is not member and m.is_busy and m.verb == "collect"]
        self._met(Moment.TWO_COLLECTORS, int(bool(others)))
        try:
            report = await repository.collect(retention, delete_share_max=1)
        except UnsafeStoreError:
            self._met(Moment.STALE_LISTS_REFUSED, int(member.is_stale))
            raise
        self._met(Moment.KEPT_BY_SECOND_READING, int(report.excluded_count > 0))
        if member.is_stale:
            self._call_log.errors.append("4: a store with stale lists was collected")

    async def _heal(self, member: Member, repository: Repository, step: Do) -> None:
        report = await repository.verify(heal=True)
        record_history = self._server.record_history
        # A scope of which every record came too late looks like a copy that was not made well (C5).
        late = {str(scope) for scope in record_history.records if not record_history.open_records(scope)}
        problems = [p for p in report.problems if p.kind is not ProblemKind.ADRIFT or p.scope not in late]
        if report.damaged and problems and not self._call_log.tampered:
            self._call_log.errors.append(f"2: verify finds {problems[:2]}")


def _name_of(step: Do, *, other: bool = False) -> str:
    return f"name-{(step.choice + other) % 2}"


def _of_all(
    held: Sequence[tuple[StoreReference, SnapshotIndex]], trees: Mapping[str, Tree], number: int
) -> tuple[Tree, SnapshotIndex]:
    """Return files of every store under other names, with one of its own; and an index that says where those are."""
    files: Tree = {"CURRENT": f"{number}".encode(), "sub/always": b"the same" * 100}
    entries: dict[str, FileIndex] = {}
    for reference, index in held:
        for entry in index.dir.files_present:
            name = f"{reference.store}-{entry.name}"[-100:]
            if entry.name != "CURRENT" and len(entries) < _FILES_MAX:
                files[name] = trees[reference.index.key][entry.name]
                entries[name] = msgspec.structs.replace(entry, name=name)
    packs = {pack.key: pack for _, index in held for pack in index.packs}
    known = DirIndex("", tuple(entries[name] for name in sorted(entries)))
    return files, msgspec.structs.replace(held[0][1], dir=known, packs=tuple(packs[key] for key in sorted(packs)))


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

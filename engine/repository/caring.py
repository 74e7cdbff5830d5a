"""The side of a repository that cares for what is committed: names it, collects, checks and explains."""

from collections.abc import Callable, Sequence

from blobstore.base import BlobStore
from engine.clock import read_now_ms
from engine.collect.backend import CollectBackend
from engine.collect.check.plan import PlanCheck, verify_plan
from engine.collect.collect import DELETE_SHARE_MAX, collect
from engine.collect.report import CollectReport
from engine.commit.naming import give_name, release_name
from engine.inspect.discard import Discarded, discard
from engine.inspect.explain import Explanation, explain
from engine.inspect.verify import Level, ProblemKind, VerifyReport, verify, with_logs
from engine.progress import NO_PROGRESS, Progress
from engine.records.log import Noted, ScopeLog
from engine.records.roots import read_pins
from engine.repository.restoring import RestoringRepository
from index.plan.commits import Commit
from index.plan.retention import Retention, RetentionPolicy
from index.snapshot.model import Scope
from index.snapshot.records import NameRecord


class CaringRepository(RestoringRepository):
    """What of a `Repository` needs no writer and changes what is kept, or says what is."""

    async def name(self, commit: Commit, name: str) -> NameRecord:
        """Keep a commit under a name until the name is released; see `engine.commit.naming.give_name`."""
        return await give_name(self.store, self.record, self._runtime, commit, name)

    async def release_name(self, scope: Scope, name: str) -> None:
        """Give up a name; see `engine.commit.naming.release_name`."""
        await release_name(self.store, scope, name)

    async def collect(
        self,
        retention: Retention | RetentionPolicy,
        *,
        dry_run: bool = False,
        delete_share_max: float = DELETE_SHARE_MAX,
        plan_to: BlobStore | None = None,
        backend: CollectBackend | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> CollectReport:
        """Delete what nothing keeps; see `engine.collect.collect`."""
        return await collect(
            self.store,
            self.record,
            retention,
            dry_run=dry_run,
            delete_share_max=delete_share_max,
            plan_to=plan_to,
            backend=backend,
            runtime=self._runtime,
            progress=progress,
        )

    async def explain(self, key: str, retention: Retention | RetentionPolicy) -> Explanation:
        """Say what leads to a key, and what a collection would do with it; see `engine.inspect.explain.explain`."""
        return await explain(self.store, self.record, retention, key)

    async def discard(self, key: str, *, dry_run: bool = False) -> Discarded:
        """Remove one object that cannot be read; see `engine.inspect.discard.discard`."""
        return await discard(self.store, key, dry_run=dry_run)

    async def verify_plan(self, plan: BlobStore, *, meant: Callable[[int], RetentionPolicy] | None = None) -> PlanCheck:
        """Check the plan of a collection by deriving it another way; see `engine.collect.check.plan.verify_plan`."""
        return await verify_plan(self.store, self.record, plan, meant=meant)

    async def verify(
        self,
        commits: Sequence[Commit] | None = None,
        *,
        scope: Scope | None = None,
        level: Level = Level.EXISTENCE,
        sample: float = 1.0,
        seed: int = 0,
        heal: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> VerifyReport:
        """Check commits, or all of a scope or of the repository with names and logs; see `engine.inspect.verify`.

        Where damage is found and commits were collected meanwhile, those that are left are checked again: what a
        collection took is no damage.
        """
        logs: tuple[ScopeLog, ...] = ()
        noted = Noted()
        if commits is None:
            scopes = (scope,) if scope is not None else await self.scopes()
            logs = tuple([await self.log(scope) for scope in scopes])
            commits = [commit for log in logs for commit in await self._with_named(log, noted)]
            if scope is None:
                await read_pins(self.store, self.record, await read_now_ms(self.store), noted)
        report = await self._verify(commits, level=level, sample=sample, seed=seed, heal=heal, progress=progress)
        return with_logs(report, logs, noted.unreadable)

    async def _verify(
        self, chosen: Sequence[Commit], *, level: Level, sample: float, seed: int, heal: bool, progress: Progress
    ) -> VerifyReport:
        report = await verify(self.store, chosen, level=level, sample=sample, seed=seed, heal=heal, progress=progress)
        if not report.damaged:
            return report
        self.missing_blobs.note(p.key for p in report.problems if p.kind is not ProblemKind.AT_RISK)
        still_open = {(c.scope, c.pointer) for c in await self._all_commits()}
        left = [c for c in chosen if (c.scope, c.pointer) in still_open]
        if len(left) == len(chosen):
            return report
        return await self._verify(left, level=level, sample=sample, seed=seed, heal=heal, progress=progress)

    async def _all_commits(self) -> Sequence[Commit]:
        return [commit for scope in await self.scopes() for commit in await self.commits(scope, with_named=True)]

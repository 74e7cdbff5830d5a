"""Collection: delete what nothing keeps (design 0002, D1 to D11; design 0006).

A run gathers facts, plans, refuses a plan that is too large, writes boundaries, reads the roots again, and deletes what
is still in the plan. An error on the way means that nothing is deleted after it. What grows with the inventory is done
by `CollectBackend`, so that Spark tasks can do it; the rest is always this process's work.

After the run itself: reading the roots again where another collector came in between, puts that nobody finished, and
what earlier collections have left.
"""

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby
from typing import Final, TypeVar

from blobstore.base import BlobStore, Created, Lost, UnfinishedPut, list_blobs
from blobstore.concurrency import map_bounded
from blobstore.errors import AccessDeniedError, CapabilityMissingError, StoreError
from blobstore.release import installed_release
from engine.clock import Runtime, SystemRuntime, read_now_ms
from engine.collect.backend import KEYS_TOLD_MAX, CollectBackend, Deleted, DeleteTally
from engine.collect.in_process import InProcessBackend, delete_keys
from engine.collect.plan_writer import check_place, write_header, write_summary
from engine.collect.report import CollectReport, make_audit, make_report, tell_error, write_audit
from engine.collect.state import Facts
from engine.errors import DamagedError, EngineError, TooMuchToDeleteError, UnsafeStoreError, UsageError
from engine.progress import NO_PROGRESS, Progress
from engine.records.damage import Unread, assess, find_broken
from engine.records.indexes import is_missing
from engine.records.log import ScopeLog, find_boundary, list_scopes, load_log, put_boundary
from engine.records.repository import check_collects
from engine.records.roots import (
    IN_FLIGHT_MAX,
    References,
    Roots,
    kept_references,
    open_references,
    plan_log_deletes,
    plan_scopes,
    reachable_keys,
    read_roots,
)
from engine.records.settle import settle_record
from index.errors import FormatError, UnknownFormatError, UnsafeNameError
from index.plan.collect import (
    DeleteReason,
    PlannedDelete,
    ScopePlan,
    UnfinishedPlan,
    UnfinishedUpload,
    choose_unfinished,
)
from index.plan.plan_format import (
    RUN_ENDED,
    RUN_HEADER,
    Outcome,
    PlanHeader,
    PlanSummary,
    RootCommit,
    RootName,
    RootPin,
)
from index.plan.retention import Retention, RetentionPolicy, as_policy
from index.snapshot.keys import (
    AUDIT,
    BLOBS,
    INDEXES,
    RUNS,
    RunId,
    audit_key,
    boundary_key,
    make_run_id,
    parse_audit_key,
    parse_name_key,
    parse_run_key,
    run_began_at_ms,
)
from index.snapshot.model import IndexReference, Scope
from index.snapshot.records import Boundary, RepositoryRecord
from index.text import count

# The share of all bytes of blobs and indexes that one run may delete unless it is told another.
DELETE_SHARE_MAX: Final = 0.2

_MAY_ARRIVE: Final = (
    "collect again before you change the retention: the boundary may still arrive, and closes what this one gave up"
)

SettleError = EngineError | FormatError | StoreError


async def collect(
    store: BlobStore,
    repository: RepositoryRecord,
    retention: Retention | RetentionPolicy,
    *,
    dry_run: bool = False,
    delete_share_max: float = DELETE_SHARE_MAX,
    plan_to: BlobStore | None = None,
    backend: CollectBackend | None = None,
    runtime: Runtime | None = None,
    progress: Progress = NO_PROGRESS,
) -> CollectReport:
    """Delete what nothing keeps, in the order that D4 demands, and leave a record of it.

    Args:
        retention: Which commits stay, for all jobs or for each by its name; the newest of every scope always does.
        dry_run: Plan only: nothing in the repository is written or deleted, no TTL is removed.
        delete_share_max: A run that plans to delete more than this share of the bytes of all blobs and indexes ends
            before it closes or deletes anything (design 0006, P4); 1 allows everything.
        plan_to: An empty place outside the repository for the plan, key by key.
        hands: Who lists, marks and deletes; this process if not given. Whoever gives them has told them of `plan_to`.
        runtime: Where the run's id comes from, how long it took, and the clock that the store's is compared with: where
            that is more than a margin ahead of it and of the newest upload, nothing is deleted for its age.

    Returns:
        What went, each reason with its numbers, and what stayed.

    Raises:
        TooMuchToDeleteError: The plan is larger than allowed: nothing was closed or deleted; the newest commits are
            settled. A dry run reports it instead.
        UnsafeStoreError: The store cannot be collected (`check_collects`), or a listing had holes: nothing was deleted.
        DamagedError: Something cannot be read, or is missing: nothing was deleted of its scope and of those that it may
            refer to. A dry run reports it instead.
        TargetError: There is something in `plan_to`, or it is in the repository.
        UsageError: The share is none.
        StoreError: As the store says: nothing was deleted after it.
    """
    if not 0 <= delete_share_max <= 1:
        raise UsageError("is no share of a whole", operation="collect", subject="delete_share_max", hint="give 0 to 1")
    runtime = runtime or SystemRuntime()
    now_ms = await (read_now_ms(store) if dry_run else store.now_ms())
    check_collects(store)
    if plan_to is not None:
        await check_place(plan_to, store)
    facts = Facts(
        run=make_run_id(now_ms, runtime.session()),
        repository=repository,
        policy=as_policy(retention),
        now_ms=now_ms,
        dry_run=dry_run,
        delete_share_max=delete_share_max,
    )
    backend = backend or InProcessBackend(store, progress, plan_to)
    run = _Run(store, facts, backend, plan_to=plan_to, runtime=runtime, progress=progress)
    if dry_run:
        await run.plan()
        run.foresee()
        return make_report(facts)
    try:
        marked = await run.plan()
        await run.close_commits(marked)
        await run.delete()
    except (EngineError, FormatError, StoreError) as error:
        outcome: Outcome = "refused" if isinstance(error, TooMuchToDeleteError) else "failed"
        if missing := await run.leave_audit(outcome, tell_error(error)):
            error.add_note(f"there is no audit record of this: {missing}")
        raise
    failed, unsettled = facts.failed_count(), run.left_over_error()
    done: Outcome = "failed" if unsettled else "partly" if failed else "done"
    missing = await run.leave_audit(done, tell_error(unsettled) if unsettled else "")
    # After the record, which nobody would write any more.
    run_left = "" if failed else await run.end()
    if unsettled:
        raise unsettled
    return make_report(facts, audit_missing=missing, run_left=run_left)


class _Run:
    """The steps, in their order; what they find out stands in `facts`."""

    def __init__(
        self,
        store: BlobStore,
        facts: Facts,
        backend: CollectBackend,
        *,
        plan_to: BlobStore | None,
        runtime: Runtime,
        progress: Progress,
    ) -> None:
        self._store = store
        self._facts = facts
        self._backend = backend
        self._plan_to = plan_to
        self._progress = progress
        self._runtime = runtime
        # Indexes that are missing or altered.
        self._broken: Mapping[IndexReference, Unread] = {}
        # Why newest commits could not be settled.
        self._unsettled: tuple[SettleError, ...] = ()
        self._began_s = runtime.monotonic_s()

    async def plan(self) -> References:
        """List, read the roots, settle the newest commits, mark, sweep; refuse what is too much.

        Returns:
            The indexes that were marked.

        Raises:
            TooMuchToDeleteError: As `collect`.
        """
        facts, ttl_ms = self._facts, self._facts.repository.ttl_ms
        facts.listing = await self._backend.list_uploads(facts.run, facts.now_ms)
        # The clock of a directory is a machine's, and may step: what looks old by it may be the newest that there is.
        believed_ms = max(facts.listing.newest_created_at_ms, self._runtime.local_now_ms())
        if facts.now_ms > believed_ms + facts.repository.margin_ms:
            facts.clock_ahead_ms = facts.now_ms - believed_ms
            facts.policy = facts.policy.ageless()
        facts.unfinished, facts.unfinished_hidden = await plan_unfinished(self._store, facts.age_now_ms, ttl_ms)
        facts.leftovers = await plan_leftovers(self._store, facts.age_now_ms, ttl_ms)
        for attempt in range(PLANS_MAX):
            try:
                _, marked, _ = await read_until_not_overtaken(self._read_roots, None, self._choose, self._sweep)
            except (DamagedError, FormatError):
                if attempt == PLANS_MAX - 1:
                    raise
                # Of a scope that is left alone because of one broken index more is kept, and more may be broken.
                broken = await find_broken(self._store, kept_references(facts.plans, facts.roots))
                if broken.keys() <= self._broken.keys():
                    raise
                self._broken = {**self._broken, **broken}
            else:
                return marked
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def close_commits(self, marked: References) -> None:
        """Write the boundaries, then read the roots again and spare what they lead to beside what was marked (D4)."""
        facts = self._facts
        standing = [await write_boundary(self._store, boundary) for boundary in self._planned_boundaries()]
        facts.boundaries = tuple(boundary for boundary in standing if boundary is not None)

        async def follow(_roots: Roots, references: References, _chosen: None) -> frozenset[str]:
            unmarked = references.everything - marked.everything
            return await reachable_keys(self._store, unmarked, optional=references.optional)

        def choose(roots: Roots) -> tuple[References, None]:
            return open_references(roots).without(self._broken, marked.protected), None

        damage = facts.damage
        facts.roots, _, spared = await read_until_not_overtaken(self._read_roots, facts.roots, choose, follow)
        if not set(facts.damage.reasons) <= set(damage.reasons):
            raise self._damaged("something more cannot be read than before; nothing was deleted")
        if spared:
            facts.swept = await self._backend.spare(spared)
        facts.log_deletes = plan_log_deletes(facts.roots, damaged=damage.scopes)

    def foresee(self) -> None:
        """What `close_commits` would do if nobody did anything meanwhile."""
        self._facts.boundaries = self._planned_boundaries()
        facts = self._facts
        facts.log_deletes = plan_log_deletes(facts.roots, planned=facts.boundaries, damaged=facts.damage.scopes)

    async def delete(self) -> None:
        """Records, then indexes, then blobs; a room is begun only when the one before is empty (D1)."""
        facts = self._facts
        uploads = sum(total.count for total in facts.swept.totals)
        self._progress.total(files=len(facts.log_deletes) + uploads, bytes_=facts.planned_bytes)
        facts.has_begun_to_delete = True
        left = await delete_keys(self._store, facts.log_deletes, self._progress, tally=facts.log_tally)
        facts.log_left = frozenset(left)
        for room in (INDEXES, BLOBS):
            if not facts.failed_before(room):
                await self._delete_room(room)
        facts.aborted = await abort_puts(self._store, facts.unfinished.doomed)
        await delete_leftovers(self._store, facts.leftovers, facts.leftovers_tally)

    def left_over_error(self) -> SettleError | None:
        """Return why something was left alone: it cannot be read, or a newest commit could not be settled."""
        errors: list[SettleError] = list(self._unsettled)
        if self._facts.damage.errors:
            stayed = ", ".join(self._facts.damage.protected.told()).replace("*", "all jobs")
            errors.insert(0, self._damaged(f"nothing was deleted of {stayed}; the rest was done"))
        for other in errors[1:]:
            errors[0].add_note(f"and of another scope: {other}")
        return next(iter(errors), None)

    def _damaged(self, what: str) -> DamagedError | UnknownFormatError:
        """Say what cannot be read; what only a newer tidemark can read is no damage."""
        errors = self._facts.damage.errors
        message = f"{count(len(errors), 'object')} cannot be read, and {what}"
        subject = next((error.subject for error in errors), "")
        error: DamagedError | UnknownFormatError = DamagedError(
            message,
            operation="collect",
            subject=subject,
            hint="`tidemark verify` names them; put an older version back, or see `tidemark discard`",
        )
        if errors and all(isinstance(one, UnknownFormatError) for one in errors):
            error = UnknownFormatError(
                message, subject=subject, hint="collect with the newest tidemark that writes here"
            )
        for one in errors[:KEYS_TOLD_MAX]:
            error.add_note(str(one))
        return error

    async def end(self) -> str:
        """Let the run's own objects go; returns why they are still there, which harms nobody (R6)."""
        try:
            await self._backend.end()
        except (EngineError, StoreError) as error:
            return f"{error} ({error.hint})"
        return ""

    async def leave_audit(self, outcome: Outcome, error: str = "") -> str:
        """Write down how the run ended; returns why that could not be done."""
        seconds = self._runtime.monotonic_s() - self._began_s
        return await write_audit(self._store, make_audit(self._facts, seconds=seconds, outcome=outcome, error=error))

    async def _delete_room(self, room: str) -> None:
        facts = self._facts
        try:
            deleted = await self._backend.delete(room)
        except (EngineError, FormatError, StoreError):
            # The audit record says what is known to be gone, and of how much nobody knows.
            known = self._backend.so_far() or Deleted(totals=(), unknown_count=self._backend.planned_count(room))
            facts.deleted = {**facts.deleted, room: known}
            raise
        facts.deleted = {**facts.deleted, room: deleted}

    async def _read_roots(self, known: Roots | None) -> Roots:
        try:
            roots = await read_roots(self._store, self._facts.repository, self._facts.age_now_ms, known=known)
        except (EngineError, StoreError):
            if not self._facts.dry_run:
                await settle_each(self._store)
            raise
        self._facts.damage = await assess(self._store, roots, self._broken)
        return roots

    def _choose(self, roots: Roots) -> tuple[References, tuple[ScopePlan, ...]]:
        damage = self._facts.damage
        plans = plan_scopes(roots, self._facts.policy, damage.scopes)
        return kept_references(plans, roots).without(self._broken, damage.protected), plans

    async def _sweep(self, roots: Roots, references: References, plans: tuple[ScopePlan, ...]) -> None:
        facts = self._facts
        facts.roots, facts.plans = roots, plans
        if not facts.dry_run:
            # Before anything that can fail or be refused every night: it protects, and nobody else may do it in time.
            self._unsettled = await settle_newest(self._store, roots)
        now_ms = min(facts.listing.listed_at_ms, facts.age_now_ms)
        facts.swept = await self._backend.sweep(references, now_ms, facts.repository.ttl_ms)
        if self._plan_to is not None:
            await write_header(self._plan_to, make_header(facts))
            await write_summary(self._plan_to, make_summary(facts))
        facts.refused = facts.planned_bytes > facts.delete_share_max * facts.listing.size_bytes
        if facts.refused and not facts.dry_run:
            raise _too_much(facts)

    def _planned_boundaries(self) -> tuple[Boundary, ...]:
        planned = [plan.boundary for plan in self._facts.plans if plan.boundary is not None]
        return tuple(sorted(planned, key=lambda b: str(b.scope)))


def make_header(facts: Facts) -> PlanHeader:
    """What a plan is made of: every root that was examined (design 0006, P1)."""
    kept = {(plan.scope, c.pointer): reason for plan in facts.plans for c, reason in plan.kept}
    return PlanHeader(
        run=facts.run,
        repository_id=facts.repository.id,
        release=installed_release(),
        ttl_ms=facts.repository.ttl_ms,
        now_ms=facts.now_ms,
        listed_at_ms=facts.listing.listed_at_ms,
        retention=facts.policy,
        commits=tuple(
            RootCommit(
                scope=log.listing.scope,
                number=commit.pointer.number,
                version=commit.record.version,
                committed_at_ms=commit.committed_at_ms,
                kept=kept.get((log.listing.scope, commit.pointer)),
            )
            for log in facts.roots.logs
            for commit in log.commits
        ),
        names=tuple(
            RootName(
                scope=name.scope,
                name=parse_name_key(name.key)[1],
                number=name.source.number,
                is_live=bool(name.stores),
            )
            for name in facts.roots.names
        ),
        pins=tuple(
            RootPin(id=pin.key.rpartition("/")[2], scope=pin.scope, number=pin.source.number, is_live=bool(pin.stores))
            for pin in facts.roots.pins
        ),
    )


def make_summary(facts: Facts) -> PlanSummary:
    """The end of a plan."""
    return PlanSummary(
        run=facts.run,
        lines_count=sum(total.count for total in facts.swept.totals),
        size_bytes=facts.planned_bytes,
        totals=facts.swept.totals,
        listed_count=facts.listing.count,
        listed_bytes=facts.listing.size_bytes,
        waiting_count=facts.swept.waiting_count,
        waiting_bytes=facts.swept.waiting_bytes,
    )


def _too_much(facts: Facts) -> TooMuchToDeleteError:
    share = facts.planned_bytes / facts.listing.size_bytes
    return TooMuchToDeleteError(
        f"would delete {share:.1%} of all bytes, and may delete {facts.delete_share_max:.1%}; nothing was deleted",
        operation="collect",
        subject=audit_key(facts.run),
    )


async def settle_newest(store: BlobStore, roots: Roots) -> tuple[SettleError, ...]:
    """Complete the TTL removal of the newest valid commit of every scope (T2), whatever fails in another one.

    Requests: one `stat` for each index that is new in a newest commit; more only where a TTL is left.

    Returns:
        Why that failed, of each scope in which it did.
    """

    async def settle(log: ScopeLog) -> SettleError | None:
        try:
            if log.commits:
                await settle_record(store, log.commits[-1].record)
        except (EngineError, FormatError, StoreError) as error:
            return error
        return None

    failures = await map_bounded(settle, roots.logs, in_flight_max=IN_FLIGHT_MAX)
    return tuple(error for error in failures if error is not None)


async def settle_each(store: BlobStore) -> None:
    """Complete TTL removal where the roots cannot be read: of each scope whose own log can be, as far as it goes (T2).

    A log with a hole stops every run, and the other scopes have nobody else who would do it in time.
    """

    async def settle(scope: Scope) -> None:
        with contextlib.suppress(EngineError, FormatError, StoreError):
            log = await load_log(store, scope, past_damage=True)
            if log.newest is not None:
                await settle_record(store, log.newest.record)

    with contextlib.suppress(StoreError):
        await map_bounded(settle, await list_scopes(store), in_flight_max=IN_FLIGHT_MAX)


async def write_boundary(store: BlobStore, boundary: Boundary) -> Boundary | None:
    """Write a boundary, or adopt the one that has its number already (D3).

    Returns:
        The one that stands. None: it was another's, and is superseded and gone already; the second reading of the roots
        finds the newer one, and nothing goes that this leaves open (D4).

    Raises:
        UnsafeStoreError: The store did not answer: the boundary may stand, or arrive later.
        StoreError: As the store says; its hint tells what may arrive later.
    """
    match await put_boundary(store, boundary, operation="collect", may_arrive=_MAY_ARRIVE):
        case Created():
            return boundary
        case Lost():
            return await find_boundary(store, boundary.scope, boundary.number)
        case unknown:
            key = boundary_key(boundary.scope, boundary.number)
            message = f"no answer for the boundary: {unknown.reason}"
            raise UnsafeStoreError(message, operation="collect", subject=key, hint=_MAY_ARRIVE)


# A collector that is overtaken by a commit and another collector plans again this often.
PLANS_MAX: Final = 3

Chosen = TypeVar("Chosen")
Found = TypeVar("Found")

# Reads the roots; records of an earlier reading are not read again.
ReadRoots = Callable[[Roots | None], Awaitable[Roots]]


async def read_until_not_overtaken(
    read: ReadRoots,
    known: Roots | None,
    choose: Callable[[Roots], tuple[References, Chosen]],
    follow: Callable[[Roots, References, Chosen], Awaitable[Found]],
) -> tuple[Roots, References, Found]:
    """Read roots and follow what they lead to; again if something missing shows that this collector was overtaken.

    Returns:
        The roots, the indexes that were followed, and what that found.

    Raises:
        DamagedError: Something is missing though the roots still need it, or is altered.
    """
    overtaken: tuple[frozenset[IndexReference], DamagedError] | None = None
    for attempt in range(PLANS_MAX):
        known = await read(known)
        references, chosen = choose(known)
        if overtaken is not None and references.required == overtaken[0]:
            raise overtaken[1]
        try:
            return known, references, await follow(known, references, chosen)
        except DamagedError as error:
            if not is_missing(error) or attempt == PLANS_MAX - 1:
                raise
            overtaken = references.required, error
    raise AssertionError("unreachable: the last attempt returns or raises")


# Unfinished puts that are given up in one call, which has the deadline of a short request.
ABORT_BATCH_MAX: Final = 100


async def plan_unfinished(store: BlobStore, now_ms: int, ttl_ms: int) -> tuple[UnfinishedPlan, str]:
    """What to do with puts of blobs and indexes that were begun and never finished: one request for each room.

    Returns:
        The plan, and why there is none: the right to see such puts is one of its own, and a store may not tell them.
        What nobody can see harms nobody, so that the rest of the collection goes on.
    """
    # Those of unknown keys are listed each time.
    puts: dict[UnfinishedUpload, None] = {}
    try:
        for room in (BLOBS, INDEXES):
            for put in await store.list_unfinished(room):
                puts[UnfinishedUpload(put.key, put.upload_id, put.begun_at_ms, put.size_bytes)] = None
    except (AccessDeniedError, CapabilityMissingError) as error:
        return choose_unfinished((), now_ms, ttl_ms), f"{error} ({error.hint})"
    return choose_unfinished(puts, now_ms, ttl_ms), ""


async def abort_puts(store: BlobStore, doomed: Sequence[UnfinishedUpload]) -> tuple[UnfinishedUpload, ...]:
    """Give up unfinished puts; returns those that are given up."""
    given_up: list[UnfinishedUpload] = []
    for start in range(0, len(doomed), ABORT_BATCH_MAX):
        batch = doomed[start : start + ABORT_BATCH_MAX]
        puts = [UnfinishedPut(key=p.key, upload_id=p.upload_id, begun_at_ms=p.begun_at_ms) for p in batch]
        try:
            left = {failure.key for failure in await store.abort_unfinished(puts)}
        except (AccessDeniedError, CapabilityMissingError):
            left = {put.key for put in batch}
        given_up += [put for put in batch if put.key not in left]
    return tuple(given_up)


AUDITS_KEPT_MAX: Final = 1000
# After everything else, and in this order. Without its header nobody would know that the others belong to a run, and a
# header without the mark that the run has ended would be taken up.
_LAST: Final = (RUN_HEADER, RUN_ENDED)


async def plan_leftovers(store: BlobStore, now_ms: int, ttl_ms: int) -> tuple[PlannedDelete, ...]:
    """What may go, in the order in which it may; a key that tidemark never wrote is left alone.

    Args:
        now_ms: When this run began, by the store's clock. A run that it could have taken up is never among them.
        ttl_ms: The repository's TTL.
    """
    runs: list[tuple[RunId, str, int]] = []
    ended: set[RunId] = set()
    audits: list[tuple[str, int]] = []
    async for blob in list_blobs(store, RUNS):
        try:
            run, name = parse_run_key(blob.key)
        except UnsafeNameError:
            continue
        runs.append((run, blob.key, blob.size_bytes))
        if name == RUN_ENDED or run_began_at_ms(run) + ttl_ms <= now_ms:
            ended.add(run)
    async for blob in list_blobs(store, AUDIT):
        try:
            parse_audit_key(blob.key)
        except UnsafeNameError:
            continue
        audits.append((blob.key, blob.size_bytes))
    # One more is written at the end of this run; its id is the newest.
    old = audits[: max(0, len(audits) - (AUDITS_KEPT_MAX - 1))]
    leftovers = [PlannedDelete(key, DeleteReason.LEFT_RUN, size) for run, key, size in runs if run in ended]
    leftovers += [PlannedDelete(key, DeleteReason.OLD_AUDIT, size) for key, size in old]
    return tuple(sorted(leftovers, key=lambda planned: (_stage(planned), planned.key)))


async def delete_leftovers(store: BlobStore, leftovers: tuple[PlannedDelete, ...], tally: DeleteTally) -> None:
    """Delete what `plan_leftovers` has planned; once something of a run stays, no later stage is begun.

    A request deletes its keys in any order, and some of them may fail: so each stage has requests of its own.

    Raises:
        StoreError: As the store says: nothing was deleted after it.
    """
    for _, stage in groupby(leftovers, key=_stage):
        left = await delete_keys(store, list(stage), tally=tally)
        if any(key.startswith(RUNS) for key in left):
            return


def _stage(planned: PlannedDelete) -> int:
    """What has a greater one may go only when everything of a smaller one is gone."""
    name = planned.key.rpartition("/")[2]
    return _LAST.index(name) + 1 if planned.reason is DeleteReason.LEFT_RUN and name in _LAST else 0

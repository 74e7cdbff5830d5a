"""Collection: delete what nothing keeps (design 0002, D1 to D11; design 0006).

A run lists, reads the roots, marks and sweeps, refuses a plan that is too large, writes boundaries, reads the roots
again, and deletes what is still in the plan. Each step is a function that takes the values of the ones before
(`engine.collect.report`); an error in one means that nothing is deleted after it. What grows with the inventory is
done by `CollectBackend`, so that Spark tasks can do it; the rest is always this process's work.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec

from blobstore.base import BlobStore, BytesBody, Created, Lost, UnfinishedPut
from blobstore.concurrency import map_bounded, run_blocking
from blobstore.errors import AccessDeniedError, CapabilityMissingError, StoreError
from blobstore.tracing import traced
from engine.collect import report
from engine.collect.backend import (
    KEYS_LISTED_MAX,
    NO_OPTIONS,
    CollectBackend,
    CollectOptions,
    DeleteTally,
    Deletion,
    InProcessBackend,
    Kept,
    Leftovers,
    Listing,
    Marked,
    Rules,
    delete_keys,
)
from engine.collect.runs import delete_leftovers, plan_leftovers
from engine.errors import DamagedError, EngineError, TargetError, TooMuchToDeleteError, UnsafeStoreError, UsageError
from engine.local.scan import find_overlap
from engine.records.indexes import is_missing, settle_record
from engine.records.log import ScopeLog, check_consistent_lists, find_boundary, list_scopes, load_log, put_boundary
from engine.records.roots import (
    Damage,
    Roots,
    Unread,
    assess,
    find_broken,
    plan_log_deletes,
    plan_scopes,
    reachable_keys,
    read_roots,
    references_of,
)
from engine.runtime import NO_PROGRESS, Progress, Runtime, read_now_ms
from engine.text import Where
from index.display import count
from index.errors import FormatError, UnknownFormatError
from index.plan.collect import UnfinishedUpload, choose_unfinished, is_upload_key
from index.plan.commits import Retention, RetentionPolicy, as_policy
from index.plan.plan_format import PLAN_HEADER_NAME, PLAN_SUMMARY_NAME, Outcome, encode_indented
from index.snapshot.keys import BLOBS, INDEXES, audit_key, boundary_key, make_run_id
from index.snapshot.model import Boundary, IndexReference, RepositoryRecord, Scope
from tidemark.errors import TidemarkError

_LOG: Final = logging.getLogger(__name__)

# The most often that a run plans again because the roots have changed meanwhile.
PLANS_MAX: Final = 3
# Unfinished puts that are given up in one call, which has the deadline of a short request.
ABORT_BATCH_MAX: Final = 100

_MAY_ARRIVE: Final = (
    "collect again before you change the retention: the boundary may still arrive, and closes what this one gave up"
)


@traced("collect")
async def collect(
    store: BlobStore,
    repository: RepositoryRecord,
    retention: Retention | RetentionPolicy,
    options: CollectOptions = NO_OPTIONS,
    *,
    backend: CollectBackend | None = None,
    runtime: Runtime | None = None,
    progress: Progress = NO_PROGRESS,
) -> report.CollectReport:
    """Delete what nothing keeps, in the order that D4 demands, and leave a record of it.

    Args:
        retention: Which commits stay, for all jobs or for each by its name; the newest of every scope always does.
        backend: This process if not given. It was given `plan_to`, too.
        runtime: Its clock is compared with the store's (D11).

    Raises:
        TooMuchToDeleteError: The plan is larger than allowed: nothing was closed or deleted; the newest commits are
            settled. A dry run reports it instead.
        UnsafeStoreError: The store cannot be collected (`check_consistent_lists`), or a listing had holes: nothing was
            deleted.
        DamagedError: Something cannot be read, or is missing: nothing was deleted of its scope and of those that it may
            refer to. A dry run reports it instead.
        ConflictError: Others close commits all the time, or the roots take too long to read: nothing was deleted.
        TargetError: There is something in `plan_to`, or it is in the repository.
        UsageError: The share is not between 0 and 1.
        StoreError: As the store says: nothing was deleted after it.
    """
    if not 0 <= options.delete_share_max <= 1:
        raise UsageError("is not between 0 and 1", operation="collect", subject="delete_share_max", hint="give 0 to 1")
    runtime = runtime or Runtime()
    now_ms = await (read_now_ms(store) if options.dry_run else store.now_ms())
    check_consistent_lists(store, "collect", "what a commit needs could be taken for garbage")
    if options.plan_to is not None:
        await _check_place(options.plan_to, store)
    run = make_run_id(now_ms, runtime.session())
    rules = Rules(run=run, repository=repository, policy=as_policy(retention), now_ms=now_ms, options=options)
    audit, began_s = report.Audit(rules=rules), runtime.monotonic_s()

    async def write_record(outcome: Outcome, error: TidemarkError | None) -> str:
        seconds = runtime.monotonic_s() - began_s
        return await report.write_audit(store, report.make_audit(audit, outcome, seconds=seconds, error=error))

    backend = backend or InProcessBackend(store, progress, options.plan_to)
    try:
        audit.rules = rules = judge_clock(rules, await backend.list_uploads(run, now_ms), runtime.local_now_ms())
        leftovers = await _find_leftovers(store, rules)
        marking = _Marking(store, rules, backend, audit)
        marked = await _mark(marking)
        if options.dry_run:
            return report.make_report(rules, _plan_deletion(marked, leftovers))
        if excess := report.describe_excess(rules, marked.kept, marked.sweep_result):
            raise TooMuchToDeleteError(f"{excess}; nothing was deleted", operation="collect", subject=audit_key(run))
        written = [await write_boundary(store, boundary) for boundary in marked.kept.boundaries]
        audit.boundaries = boundaries = tuple(boundary for boundary in written if boundary is not None)
        deletion = await _read_again(marking, marked, boundaries, leftovers)
        audit.sweep_result = deletion.sweep_result
        audit.deletion = deletion
        await _delete(store, deletion, backend, progress)
    except TidemarkError as error:
        if not options.dry_run:
            refused = isinstance(error, TooMuchToDeleteError)
            if missing := await write_record("refused" if refused else "failed", error):
                error.add_note(f"there is no audit record of this: {missing}")
            _log(Where(store, run), audit.deletion)
        raise
    failed, left_alone = deletion.failed_count(), _left_alone(marked, deletion.kept.damage)
    outcome: Outcome = "failed" if left_alone else "partly" if failed else "done"
    audit_missing = await write_record(outcome, left_alone)
    # After the record, which nobody would write any more.
    run_left = "" if failed else await _end(backend)
    _log(Where(store, run), deletion)
    if left_alone:
        raise left_alone
    return report.make_report(rules, deletion, audit_missing=audit_missing, run_left=run_left)


async def _check_place(plan_to: BlobStore, store: BlobStore) -> None:
    """Refuse a place for a plan that overlaps the repository (P2), or that holds anything: two plans would mix."""
    ours, theirs = await run_blocking(plan_to.place), await run_blocking(store.place)
    if find_overlap(ours, theirs):
        problem, hint = "overlaps the repository", "name one outside it"
    elif (await plan_to.list_page("", limit=1)).blobs:
        problem, hint = "is not empty", "name one that is absent or empty"
    else:
        return
    raise TargetError(problem, operation="collect", subject="the plan's directory", hint=hint)


def judge_clock(rules: Rules, listing: Listing, local_now_ms: int) -> Rules:
    """Decide by which time ages are judged (D11).

    The clock of a directory is a machine's, and may step: what looks old by it may be the newest that there is.
    """
    ahead_ms = rules.now_ms - max(listing.newest_created_at_ms, local_now_ms)
    if ahead_ms <= rules.repository.margin_ms:
        return msgspec.structs.replace(rules, listing=listing, age_now_ms=rules.now_ms)
    return msgspec.structs.replace(rules, listing=listing, policy=rules.policy.ageless(), clock_ahead_ms=ahead_ms)


async def _find_leftovers(store: BlobStore, rules: Rules) -> Leftovers:
    """Find puts of blobs and indexes that were begun and never finished, and what earlier runs have left.

    Such puts may be hidden: the right to see them is one of its own. What nobody can see harms nobody.
    """
    ttl_ms, hidden = rules.repository.ttl_ms, ""
    # Those of unknown keys are listed each time.
    puts: dict[UnfinishedUpload, None] = {}
    try:
        for prefix in (BLOBS, INDEXES):
            for put in await store.list_unfinished(prefix):
                puts[UnfinishedUpload(put.key, put.upload_id, put.begun_at_ms, put.size_bytes)] = None
    except (AccessDeniedError, CapabilityMissingError) as error:
        puts.clear()
        hidden = f"{error} ({error.hint})"
    unfinished = choose_unfinished(puts, rules.age_now_ms, ttl_ms)
    runs = await plan_leftovers(store, rules.age_now_ms, ttl_ms)
    return Leftovers(unfinished=unfinished, unfinished_hidden=hidden, runs=runs)


class _Marking(msgspec.Struct, frozen=True):
    """What is marked, and by whom."""

    store: BlobStore
    rules: Rules
    backend: CollectBackend
    audit: report.Audit

    async def read_roots(
        self, broken: dict[IndexReference, Unread], known: Roots | None, written: Sequence[Boundary] | None = None
    ) -> tuple[Roots, Damage]:
        """Read the roots, but no record of those that are `known` again; boundaries were `written` since."""
        rules = self.rules
        try:
            roots = await read_roots(self.store, rules.repository, rules.age_now_ms, known=known, written=written)
        except (EngineError, StoreError):
            if not self.rules.options.dry_run:
                await settle_each(self.store)
            raise
        return roots, await assess(self.store, roots, broken)


async def _mark(marking: _Marking) -> Marked:
    """Settle the newest commits, mark and sweep; plan again while what is read shows that the roots were not whole."""
    broken: dict[IndexReference, Unread] = {}

    async def read(known: Roots | None) -> Kept:
        roots, damage = await marking.read_roots(broken, known)
        scopes = plan_scopes(roots, marking.rules.policy, damage.scopes)
        references = references_of(roots, scopes).without(broken, damage.protected)
        return Kept(roots=roots, damage=damage, scopes=scopes, references=references)

    followed = kept = await read(None)

    async def sweep(chosen: Kept) -> Marked:
        nonlocal followed
        followed = chosen
        return await _sweep(marking, chosen, broken)

    for attempt in range(PLANS_MAX):
        try:
            return (await read_until_not_overtaken(kept, read, sweep))[1]
        except (DamagedError, FormatError):
            if attempt == PLANS_MAX - 1:
                raise
            # Of a scope that is left alone because of one broken index more is kept, and more may be broken.
            found = await find_broken(marking.store, references_of(followed.roots, followed.scopes))
            if found.keys() <= broken.keys():
                raise
            broken |= found
            kept = await read(None)
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _sweep(marking: _Marking, kept: Kept, broken: dict[IndexReference, Unread]) -> Marked:
    rules = marking.rules
    marking.audit.kept = kept
    # Before anything that can fail or be refused every night: it protects, and nobody else may do it in time.
    unsettled = () if rules.options.dry_run else await settle_newest(marking.store, kept.roots)
    now_ms = min(rules.listing.listed_at_ms, rules.age_now_ms)
    sweep_result = await marking.backend.sweep(kept.references, now_ms, rules.repository.ttl_ms)
    marking.audit.sweep_result = sweep_result
    if (plan_to := rules.options.plan_to) is not None:
        header, summary = report.make_header(rules, kept), report.make_summary(rules, sweep_result)
        await plan_to.put(PLAN_HEADER_NAME, BytesBody(encode_indented(header)))
        await plan_to.put(PLAN_SUMMARY_NAME, BytesBody(encode_indented(summary)))
    return Marked(kept=kept, sweep_result=sweep_result, broken=dict(broken), unsettled=unsettled)


async def _read_again(
    marking: _Marking, marked: Marked, boundaries: tuple[Boundary, ...], leftovers: Leftovers
) -> Deletion:
    """Read the roots again, and exclude what they lead to beside what was marked (D4)."""
    first = marked.kept

    async def read(known: Roots | None) -> Kept:
        roots, damage = await marking.read_roots(marked.broken, known, boundaries)
        references = references_of(roots).without(marked.broken, first.references.protected)
        return Kept(roots=roots, damage=damage, scopes=first.scopes, references=references)

    async def follow(kept: Kept) -> frozenset[str]:
        unmarked = kept.references.everything - first.references.everything
        return await reachable_keys(marking.store, unmarked, optional=kept.references.optional)

    kept, reached = await read_until_not_overtaken(await read(first.roots), read, follow)
    marking.audit.kept = kept
    if not set(kept.damage.reasons) <= set(first.damage.reasons):
        raise _damaged(kept.damage, "something more cannot be read than before; nothing was deleted")
    return Deletion(
        kept=kept,
        boundaries=boundaries,
        log=DeleteTally(planned=plan_log_deletes(kept.roots, damaged=first.damage.scopes)),
        sweep_result=await marking.backend.exclude(reached) if reached else marked.sweep_result,
        leftovers=leftovers,
        runs=DeleteTally(planned=leftovers.runs),
    )


def _plan_deletion(marked: Marked, leftovers: Leftovers) -> Deletion:
    """Return the deletion as it would be if nothing changed meanwhile and all of it succeeded."""
    kept, boundaries = marked.kept, marked.kept.boundaries
    deletion = Deletion(
        kept=kept,
        boundaries=boundaries,
        log=DeleteTally(planned=plan_log_deletes(kept.roots, planned=boundaries, damaged=kept.damage.scopes)),
        sweep_result=marked.sweep_result,
        leftovers=leftovers,
        runs=DeleteTally(planned=leftovers.runs),
    )
    deletion.complete()
    return deletion


async def _delete(store: BlobStore, deletion: Deletion, backend: CollectBackend, progress: Progress) -> None:
    """Delete records, then indexes, then blobs; a prefix is begun only when the one before is empty (D1)."""
    log, uploads = deletion.log, deletion.sweep_result
    progress.total(files=len(log.planned) + uploads.planned_count, bytes_=uploads.planned_bytes)
    await delete_keys(store, log.planned, progress, tally=log)
    for prefix in (INDEXES, BLOBS):
        if not deletion.may_begin(prefix):
            continue
        try:
            deletion.uploads[prefix] = await backend.delete(prefix)
        except TidemarkError:
            # The audit record says what is known to be gone, and of how much nobody knows.
            deletion.uploads[prefix] = backend.so_far(prefix)
            raise
    deletion.aborted = await abort_puts(store, deletion.leftovers.unfinished.doomed)
    await delete_leftovers(store, deletion.runs)


def _log(where: Where, deletion: Deletion | None) -> None:
    if deletion is None:
        return
    for gone in deletion.totals():
        _LOG.info("%s: deleted %d keys, %d bytes: %s", where, gone.count, gone.size_bytes, gone.reason.value)
    if failed := deletion.failed_count():
        _LOG.warning("%s: %d keys are still there and were to go", where, failed)
    if unknown := deletion.unknown_count():
        _LOG.warning("%s: %d keys were asked for, and no answer came: they may be gone", where, unknown)


async def _end(backend: CollectBackend) -> str:
    """Remove the run's own objects; return why they are still there, which harms nobody (R6)."""
    try:
        await backend.end()
    except (EngineError, StoreError) as error:
        return f"{error} ({error.hint})"
    return ""


def _left_alone(marked: Marked, damage: Damage) -> TidemarkError | None:
    """Return why something was left alone: it cannot be read, or a newest commit could not be settled."""
    errors: list[TidemarkError] = list(marked.unsettled)
    if damage.errors:
        stayed = ", ".join(damage.protected.scope_names()).replace("*", "all jobs")
        errors.insert(0, _damaged(damage, f"nothing was deleted of {stayed}; the rest was done"))
    for other in errors[1:]:
        errors[0].add_note(f"and of another scope: {other}")
    return next(iter(errors), None)


def _damaged(damage: Damage, consequence: str) -> DamagedError | UnknownFormatError:
    """Return the error for what cannot be read; what only a newer tidemark can read is not damaged."""
    # One that several indexes are deltas on is one object.
    errors = tuple({(one.subject, str(one)): one for one in damage.errors}.values())
    keys = [error.subject for error in errors] or [key for key, _ in damage.reasons]
    message = f"{count(len(keys), 'object')} cannot be read, and {consequence}"
    subject = keys[0]
    error: DamagedError | UnknownFormatError
    if errors and all(isinstance(one, UnknownFormatError) for one in errors):
        hint = "collect with the newest tidemark that writes here"
        error = UnknownFormatError(message, subject=subject, hint=hint)
    else:
        hint = f"`tidemark discard {subject}` gives it up, and with -n says first what that means"
        if is_upload_key(subject):
            hint = "`tidemark repair` says which commits need it, and what can be done"
        error = DamagedError(message, operation="collect", subject=subject, hint=hint)
    for one in errors[:KEYS_LISTED_MAX]:
        error.add_note(str(one))
    return error


async def _settle(store: BlobStore, log: ScopeLog) -> TidemarkError | None:
    try:
        if log.newest is not None:
            await settle_record(store, log.newest.record)
    except TidemarkError as error:
        return error
    return None


async def settle_newest(store: BlobStore, roots: Roots) -> tuple[TidemarkError, ...]:
    """Complete the TTL removal of the newest valid commit of every scope (T2); return why, where that failed.

    Requests: one `stat` for each index that is new in a newest commit; more only where a TTL is left.
    """
    failures = await map_bounded(partial(_settle, store), roots.logs)
    return tuple(error for error in failures if error is not None)


async def settle_each(store: BlobStore) -> None:
    """Complete TTL removal where the roots cannot be read: of each scope whose own log can be, as far as it goes (T2).

    A log with a hole stops every run, and the other scopes have nobody else who would do it in time.
    """

    async def settle(scope: Scope) -> None:
        with contextlib.suppress(TidemarkError):
            await _settle(store, await load_log(store, scope, past_damage=True))

    with contextlib.suppress(StoreError):
        await map_bounded(settle, await list_scopes(store))


async def write_boundary(store: BlobStore, boundary: Boundary) -> Boundary | None:
    """Write a boundary, or adopt and return the one that has its number already (D3).

    None: it was another's, and is superseded and gone already; the second reading of the roots finds the newer one, and
    nothing goes that this leaves open (D4).

    Raises:
        UnsafeStoreError: The store did not answer: the boundary may be there, or arrive later.
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


Found = TypeVar("Found")


async def read_until_not_overtaken(
    kept: Kept, read: Callable[[Roots | None], Awaitable[Kept]], follow: Callable[[Kept], Awaitable[Found]]
) -> tuple[Kept, Found]:
    """Follow what roots lead to; read them again if something missing shows that another collector came in between.

    `kept` is the first reading; `read` reads again, but no record of the earlier reading. Returns the reading that was
    followed to its end, and what that found.

    Raises:
        DamagedError: Something is missing though the roots still need it, or is altered.
    """
    for _ in range(PLANS_MAX - 1):
        try:
            return kept, await follow(kept)
        except DamagedError as error:
            if not is_missing(error):
                raise
            required = kept.references.required
            kept = await read(kept.roots)
            if kept.references.required == required:
                raise
    return kept, await follow(kept)


async def abort_puts(store: BlobStore, doomed: Sequence[UnfinishedUpload]) -> tuple[UnfinishedUpload, ...]:
    """Abort unfinished puts; return those that are aborted."""
    aborted: list[UnfinishedUpload] = []
    for start in range(0, len(doomed), ABORT_BATCH_MAX):
        batch = doomed[start : start + ABORT_BATCH_MAX]
        puts = [UnfinishedPut(key=p.key, upload_id=p.upload_id, begun_at_ms=p.begun_at_ms) for p in batch]
        try:
            left = {failure.key for failure in await store.abort_unfinished(puts)}
        except (AccessDeniedError, CapabilityMissingError):
            left = {put.key for put in batch}
        aborted += [put for put in batch if put.key not in left]
    return tuple(aborted)

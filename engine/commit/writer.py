"""Make a commit: the one conditional write that acknowledges the work of all stores of a scope.

The rules C1 to C8, T1, T2 and T4 of design 0002 are kept here; each step names its rule.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Literal

import msgspec

from blobstore.base import BlobStore, BytesBody, Created, Lost, Unknown
from blobstore.concurrency import give_up
from blobstore.errors import REFUSALS, BlobNotFoundError, StoreError
from blobstore.tracing import traced
from engine import errors
from engine.backup.backup import BackupResult
from engine.commit.record import (
    ANY,
    LayoutChange,
    Request,
    Sent,
    acknowledge,
    check_bases,
    check_granularity,
    check_parent,
    check_results,
    compose_commit,
    compose_copy,
    encode_commit,
    find_committed,
    is_answer,
    request_of,
)
from engine.records.indexes import is_missing, new_indexes_of, settle_keys, settle_record
from engine.records.leases import hold_pin
from engine.records.log import check_commits, load_log, read_commit
from engine.runtime import Runtime
from engine.text import Where
from index.errors import FormatError
from index.plan.commits import Commit, Head
from index.snapshot.keys import commit_key
from index.snapshot.model import BlobKey, CommitPointer, CommitRecord, RepositoryRecord, Scope, ScopeLayout

_LOG: Final = logging.getLogger(__name__)

# A writer meets its own late record at most once per attempt; more means that something else is wrong.
COMMIT_ATTEMPTS_MAX: Final = 3
# Of more records without an answer the oldest are forgotten: a caller who asks for one then may get a conflict.
UNRESOLVED_MAX: Final = 100

Compose = Callable[[Head], Awaitable[CommitRecord]]


class CommitWriter:
    """One writer of one scope. It remembers the records of which it never learned the outcome (C3).

    A failed commit leaves nothing behind that the next one could trip over: the next one loads the log again.
    """

    def __init__(self, store: BlobStore, repository: RepositoryRecord, scope: Scope, runtime: Runtime) -> None:
        self._store = store
        self._repository = repository
        self._scope = scope
        self._where = Where(store, scope)
        self._runtime = runtime
        self._head: Head | None = None
        self._unresolved: dict[CommitPointer, Sent] = {}
        self._one_at_a_time = asyncio.Lock()

    async def head(self, *, reload: bool = False) -> Head:
        """Return where the scope is: remembered after an own commit, loaded otherwise, or if `reload`."""
        async with self._one_at_a_time:
            if reload:
                self._head = None
            return await self._load_head()

    async def settle(self, parent: CommitPointer) -> None:
        """Make the newest commit, which the caller has seen (`parent`), permanent, as the next one does first (T2).

        Raises:
            DamagedError: Something of it is missing.
        """
        async with self._one_at_a_time:
            await self._settle_parent(await self._load_head(parent), frozenset())

    @traced("commit")
    async def commit(
        self,
        results: Sequence[BackupResult],
        *,
        version: int | None = None,
        offsets: str = "",
        layout: ScopeLayout | LayoutChange | None = None,
        parent: CommitPointer | Literal["any"] | None = ANY,
        dropped: Collection[tuple[str, str]] = (),
    ) -> Commit:
        """Make backups visible, all or none.

        Args:
            results: At most one per store; stores of the parent without a result are carried over (C2).
            version: The caller's own version; the parent's plus one if not given.
            offsets: The caller's own position in its input, opaque.
            layout: How keys are spread over tasks; must equal the scope's, or change it together with every store (K3).
                None takes the parent's.
            parent: The commit that the results were made against; None: there was no commit.
            dropped: Task and name of stores that the scope no longer has: they are not carried over (design 0006, F3).

        Returns:
            The acknowledged commit. `settled` is False if TTL removal was interrupted: the next commit completes it.

        Raises:
            StaleResultError: A result was made against another parent.
            CommitLostError: Another writer was first.
            FencedError: A collector has closed this writer's past.
            LeaseExpiredError: The uploads are too old; back up again.
            CommitUnknownError: No answer; calling again with the same arguments finds out, unless a collection has
                taken the record meanwhile: then the newest commit decides.
            NotFoundError: A store is to be dropped that the newest commit does not have.
            UsageError: Two results for one store, a result of another scope or of a store that is dropped, another
                layout, or a value that cannot be written down.
            CommitDamagedError: The commit is made, and something that was uploaded for it is gone.
            DamagedError: Of the parent something is missing that the results do not replace; nothing was written.
            UnsafeStoreError: What is committed to this store would not be safe there; nothing was written.
            StoreError: The store refused; nothing was written.
        """
        check_results(self._scope, results, dropped)
        request = request_of(results, version=version, offsets=offsets, layout=layout, parent=parent, dropped=dropped)

        async def compose(head: Head) -> CommitRecord:
            check_bases(self._scope, head, results)
            return compose_commit(
                head,
                request,
                results,
                scope=self._scope,
                write_id=self._runtime.write_id(),
                repository=self._repository,
                committed_before=await find_committed(self._store, head, results),
            )

        async with self._submitting():
            gone = frozenset(key for result in results for key in result.missing_keys)
            return await self._submit(request, compose, results, gone=gone)

    @traced("rewind")
    async def rewind(self, target: Commit) -> Commit:
        """Make an older commit's stores the newest again, as a new commit (C6); other errors as `commit`.

        Raises:
            NotFoundError: The target was collected meanwhile.
        """
        return await self._submit_copy(Request(kind="rewind", source=target.pointer), target)

    @traced("fork")
    async def fork(self, target: Commit) -> Commit:
        """Begin this writer's scope with another scope's stores, copying no bytes; errors as `rewind`.

        Raises:
            UsageError: This scope has commits already, or is of the other kind (K3).
        """
        request = Request(kind="fork", source=target.pointer, source_scope=target.scope)
        return await self._submit_copy(request, target)

    # ------------------------------------------------------------------ one way to a record

    @asynccontextmanager
    async def _submitting(self) -> AsyncIterator[None]:
        """Let one request at a time be sent, and log that it came to nothing, or that nobody knows."""
        try:
            async with self._one_at_a_time:
                yield
        except (errors.ConflictError, errors.LeaseExpiredError, errors.CommitUnknownError) as error:
            _LOG.warning("%s: %s: %s", self._where, type(error).__name__, error)
            raise

    async def _submit_copy(self, request: Request, target: Commit) -> Commit:
        """Commit what another commit holds, under a pin on it (D5)."""
        async with self._submitting():
            standing = await self._resolve(request, await self._load_head()) if self._unresolved else None
            if standing is not None:
                return await self._finish(standing, (), settle_keys(self._store, ()))
            margin_ms = self._repository.margin_ms
            async with hold_pin(
                self._store, self._runtime, target, purpose=request.kind, margin_ms=margin_ms, required=True
            ) as lease:
                await settle_record(self._store, target.record)

                async def compose(head: Head) -> CommitRecord:
                    write_id, until_ms = self._runtime.write_id(), lease.valid_until_ms
                    source = target.record
                    return compose_copy(
                        head, request, source, scope=self._scope, write_id=write_id, valid_until_ms=until_ms
                    )

                # Until the outcome is known the record may land late, and has to find its blobs when it does.
                lease.kept = True
                try:
                    commit = await self._submit(request, compose, ())
                except (errors.EngineError, StoreError) as error:
                    lease.kept = isinstance(error, errors.CommitUnknownError | errors.UnsafeStoreError)
                    raise
                lease.kept = False
                return commit

    async def _submit(
        self, request: Request, compose: Compose, results: Sequence[BackupResult], *, gone: frozenset[str] | None = None
    ) -> Commit:
        """Bring one request to its end: find its record, or send it, and acknowledge it.

        `gone` is what of the parent is missing and not needed any more (design 0006, M1); None: all of it.
        """
        why = ""
        for _ in range(COMMIT_ATTEMPTS_MAX):
            remembered = self._head
            head = await self._load_head(request.parent)
            standing = await self._resolve(request, head)
            if standing is not None:
                blobs = _new_blobs(standing.record, results)
                return await self._finish(standing, results, settle_keys(self._store, blobs))
            check_commits(self._store, request.kind)
            check_parent(self._scope, head, request)
            try:
                record = self._sent_before(request, head) or await compose(head)
            except (errors.StaleResultError, errors.NotFoundError, errors.UsageError):
                # What does not fit a head that is remembered may fit the one that others have made since.
                if head is remembered and await self._is_overtaken(head):
                    why = "other writers keep committing"
                    continue
                raise
            data = encode_commit(record)
            if head.newest is None or head.newest.record.predecessor is None:
                await check_granularity(self._store, self._scope, request.kind, head.newest)
            try:
                await self._settle_parent(head, gone)
            except errors.DamagedError as error:
                if is_missing(error) and await self._is_overtaken(head):
                    why = "other writers keep committing, and collections take what this one builds on"
                    continue
                raise
            if await self._send(request, record, data):
                # Beside the list that decides about the record: a blob without a TTL vouches for nothing (T1).
                settling = asyncio.ensure_future(settle_keys(self._store, _new_blobs(record, results)))
                try:
                    return await self._finish(await self._judge_sent(record), results, settling)
                finally:
                    await give_up(settling)
            why = "own late records keep arriving"
        raise errors.CommitLostError(why, operation=request.kind, subject=str(self._scope))

    async def _load_head(self, parent: CommitPointer | Literal["any"] | None = ANY) -> Head:
        """Return where the scope is; what is remembered does not count if the caller has seen another newest commit."""
        head = self._head
        may_move = head is None or any(p.number >= head.next_number for p in self._unresolved)
        if head is None or may_move or parent not in {ANY, head.pointer}:
            log = await load_log(self._store, self._scope)
            closed_at_ms = log.listing.closed_at_ms
            head = Head(newest=log.newest, next_number=log.listing.newest_number + 1, closed_at_ms=closed_at_ms)
            self._head = head
        return head

    async def _is_overtaken(self, head: Head) -> bool:
        """Return whether others have moved the head: what was remembered may have been collected or forgotten."""
        self._head = None
        now = await self._load_head()
        return (now.pointer, now.next_number) != (head.pointer, head.next_number)

    async def _resolve(self, request: Request, head: Head) -> Commit | None:
        """Find the commit of a request that was made before (C3).

        The newest commit is it if it names the very indexes as new, even if another process sent it. Of an own record
        that was not answered, what is at its number decides once the log has passed it, or `CommitUnknownError`.
        """
        if head.newest is not None and is_answer(head.newest.record, request):
            if head.newest.record.predecessor is None:
                # It is there also where its writer was refused, because the other kind of scope came first (K3).
                await check_granularity(self._store, self._scope, request.kind, head.newest)
            return head.newest
        for pointer, sent in tuple(self._unresolved.items()):
            if pointer.number >= head.next_number:
                continue  # it may still arrive; at that number the next record meets it
            if sent.request == request and (standing := await self._look_back(sent)) is not None:
                return standing
            # Who brought other results may still ask; without results an equal request may be meant as another one.
            if sent.request == request or not sent.request.results:
                del self._unresolved[pointer]
        return None

    async def _look_back(self, sent: Sent) -> Commit | None:
        """Read what is at the number of an own record; None if it is another's, or void or no part of the chain.

        `CommitUnknownError`: it is closed or gone, perhaps after others had built on it; or it cannot be read.
        """
        record = sent.record
        try:
            is_mine = (await self._read(record)).pointer == record.pointer
            return await acknowledge(self._store, record) if is_mine else None
        except (errors.CommitLostError, errors.LeaseExpiredError):
            return None
        except (errors.CommitUnknownError, errors.FencedError) as error:
            # The outcome can no longer be determined. Asked for again, a rewind is a new one; results may not be sent
            # twice.
            if not sent.request.results:
                del self._unresolved[record.pointer]
            raise _gone(record) from error
        except (StoreError, FormatError) as error:
            raise _unknown(record, f"record {record.number} was there, and its outcome cannot be read") from error

    def _sent_before(self, request: Request, head: Head) -> CommitRecord | None:
        """Return the record of an unanswered attempt, if it still fits: the same bytes are sent again (C3)."""
        same = (sent.record for sent in self._unresolved.values() if sent.request == request)
        fits = (head.next_number, head.pointer)
        return next((record for record in same if (record.number, record.predecessor) == fits), None)

    async def _send(self, request: Request, record: CommitRecord, data: bytes) -> bool:
        """Write the record; False if an own earlier record turns out to have its number.

        Raises:
            CommitLostError: Another writer's record is there.
            CommitUnknownError: No answer, or what is there cannot be read; the record is remembered.
            StoreError: The store refused it, so that it certainly is not there.
        """
        self._head = None
        sent_before = record.pointer in self._unresolved
        self._unresolved[record.pointer] = Sent(request, record)
        if len(self._unresolved) > UNRESOLVED_MAX:
            del self._unresolved[min(self._unresolved)]
        try:
            outcome = await self._store.put_if_absent(commit_key(self._scope, record.number), BytesBody(data))
        except REFUSALS:
            if not sent_before:
                del self._unresolved[record.pointer]
            raise
        except StoreError as error:
            # A request may have arrived in spite of an error; what is not known is not assumed (C3).
            raise _unknown(record, f"writing record {record.number} failed") from error
        match outcome:
            case Created():
                return True
            case Unknown(reason=reason):
                raise _unknown(record, f"no answer for record {record.number}: {reason}")
            case Lost():
                return await self._is_mine(record)

    async def _is_mine(self, record: CommitRecord) -> bool:
        """Return after Lost whether the record that is there is the one just sent, by its write id (C3).

        If not, an own earlier record of another request is there. Raises what `_send` does.
        """
        try:
            there = (await self._read(record)).pointer
        except (StoreError, FormatError) as error:
            raise _unknown(record, f"record {record.number} exists and cannot be read") from error
        if there == record.pointer:
            return True
        del self._unresolved[record.pointer]
        if there in self._unresolved:
            return False
        raise errors.CommitLostError(
            f"another writer has taken number {record.number}", operation=record.kind, subject=str(self._scope)
        )

    async def _read(self, record: CommitRecord) -> CommitRecord:
        """Read the record at the number of one that was sent; raises CommitUnknownError if it is gone."""
        try:
            return await read_commit(self._store, self._scope, record.number)
        except BlobNotFoundError as error:
            raise _gone(record) from error

    async def _judge_sent(self, record: CommitRecord) -> Commit:
        """Acknowledge a record that was just created; what is refused for good is forgotten."""
        try:
            return await acknowledge(self._store, record)
        except (StoreError, FormatError) as error:
            raise _unknown(record, f"record {record.number} was written but could not be confirmed") from error
        except (errors.ConflictError, errors.LeaseExpiredError, errors.UsageError):
            del self._unresolved[record.pointer]
            raise

    async def _finish(self, commit: Commit, results: Sequence[BackupResult], settling: Awaitable[None]) -> Commit:
        """Remove the TTLs of what the record names as new, and of nothing else (T1); `settling` does it for the blobs.

        Interrupted here, the same request finds its commit. `CommitDamagedError`: something that is new in it is gone.
        """
        gone: errors.DamagedError | None = None
        # The commit is made whatever happens now; while `settled` is False the next commit completes it.
        try:
            await settling
            await settle_keys(self._store, [r.reference.index.key for r in _new_results(commit.record, results)])
            commit = msgspec.structs.replace(commit, settled=True)
        except StoreError as error:
            _LOG.warning("%s: commit %d keeps TTLs until the next one: %s", self._where, commit.pointer.number, error)
        except errors.DamagedError as error:
            gone = error
        if self._head is None or self._head.next_number <= commit.pointer.number + 1:
            self._head = Head(newest=commit, next_number=commit.pointer.number + 1)
        self._unresolved.pop(commit.pointer, None)
        _LOG.info(
            "%s: %s %d of version %d is acknowledged; settled: %s",
            self._where,
            commit.record.kind,
            commit.pointer.number,
            commit.record.version,
            commit.settled,
        )
        if gone is not None and not await self._is_superseded(commit):
            message = f"is gone: commit {commit.pointer.number} of {self._scope} is committed and damaged"
            raise errors.CommitDamagedError(
                message, operation=commit.record.kind, subject=gone.subject
            ) from gone.__cause__
        return commit

    async def _is_superseded(self, commit: Commit) -> bool:
        """Return whether a collection has closed a commit since it was acknowledged: others are built on it."""
        self._head = None
        try:
            await acknowledge(self._store, commit.record)
        except (errors.EngineError, StoreError) as error:
            return isinstance(error, errors.ConflictError)
        return False

    async def _settle_parent(self, head: Head, gone: frozenset[str] | None) -> None:
        """Make sure that nothing which a new record retains carries a TTL any more (T2)."""
        if head.newest is not None and not head.newest.settled:
            await settle_record(
                self._store, head.newest.record, is_needed=lambda key: gone is not None and key not in gone
            )
            self._head = msgspec.structs.replace(head, newest=msgspec.structs.replace(head.newest, settled=True))


# A new process cannot find out at once what happened.
ASKED_MAX: Final = 3


async def until_known(commit: Callable[[], Awaitable[Commit]]) -> Commit:
    """Commit; while the outcome is unknown ask again with the same writer, which finds out (C3)."""
    for _ in range(ASKED_MAX - 1):
        with suppress(errors.CommitUnknownError):
            return await commit()
    return await commit()


def _new_results(record: CommitRecord, results: Sequence[BackupResult]) -> list[BackupResult]:
    """Return those of some results that a record names as new."""
    named = set(new_indexes_of(record))
    return [result for result in results if result.reference.index in named]


def _new_blobs(record: CommitRecord, results: Sequence[BackupResult]) -> list[BlobKey]:
    """Return what they have uploaded, but for their indexes."""
    new = _new_results(record, results)
    return [key for result in new for key in result.new_keys if key != result.reference.index.key]


def _gone(record: CommitRecord) -> errors.CommitUnknownError:
    message = f"record {record.number} was closed or collected before its outcome was known"
    hint = "look at the newest commit, compare its offsets with yours, and go on from there"
    return errors.CommitUnknownError(message, operation=record.kind, subject=str(record.scope), hint=hint)


def _unknown(record: CommitRecord, message: str) -> errors.CommitUnknownError:
    return errors.CommitUnknownError(message, operation=record.kind, subject=str(record.scope))

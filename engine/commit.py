"""Making a commit: the one conditional write that acknowledges the work of all stores of a scope.

The rules C1 to C7, T1 and T2 of design 0002 stand here; each step names its rule.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Literal

import msgspec

from blobstore.base import BlobStore, BytesBody, Created, Lost, Unknown
from blobstore.errors import BlobNotFoundError, StoreError
from engine.backup import BackupResult
from engine.clock import Ambient
from engine.errors import (
    CommitLostError,
    CommitUnknownError,
    ConflictError,
    FencedError,
    LeaseExpiredError,
    StaleResultError,
    UnsafeStoreError,
    UsageError,
)
from engine.log_io import LOAD_ATTEMPTS_MAX, list_log, load_log, read_boundaries, read_commit
from engine.pins import PinLease, hold_pin
from engine.settle import settle_keys, settle_record
from index.codec import encode_record
from index.keys import LOG, commit_key, encode_component
from index.log import Commit, commit_of, descends_from, is_closed, is_void
from index.model import (
    SIZE_BYTES_MAX,
    BlobKey,
    CommitPointer,
    CommitRecord,
    RepositoryRecord,
    Scope,
    ScopeLayout,
    StoreReference,
)

# A writer meets its own late record at most once per attempt; more means that something else is wrong.
COMMIT_ATTEMPTS_MAX: Final = 3
# Any commit may be the parent, as far as the caller is concerned; what the results were diffed against counts (C2).
ANY: Final = "any"


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Where a scope stands for a writer."""

    newest: Commit | None
    # The number that the next record takes: the newest number loaded, void ones and boundaries counted, plus one (C1).
    next_number: int


class CommitWriter:
    """One writer of one scope. It remembers the records of which it never learned the outcome (C3).

    A failed commit leaves nothing behind that the next one could trip over: the next one loads the log anew.
    """

    def __init__(self, store: BlobStore, repository: RepositoryRecord, scope: Scope, ambient: Ambient) -> None:
        self._store = store
        self._repository = repository
        self._scope = scope
        self._ambient = ambient
        self._head: Head | None = None
        self._unresolved: dict[CommitPointer, CommitRecord] = {}
        self._one_at_a_time = asyncio.Lock()

    async def head(self) -> Head:
        """Where the scope stands: remembered after an own commit, loaded otherwise."""
        if self._head is None or self._unresolved:
            log = await load_log(self._store, self._scope)
            self._head = Head(newest=log.newest, next_number=log.listing.newest_number + 1)
        return self._head

    async def commit(
        self,
        results: Sequence[BackupResult],
        *,
        version: int | None = None,
        offsets: str = "",
        layout: ScopeLayout | None = None,
        parent: CommitPointer | Literal["any"] | None = ANY,
    ) -> Commit:
        """Make backups visible, all or none.

        Args:
            results: At most one per store; stores of the parent without a result are carried over (C2).
            version: The caller's own version; the parent's plus one if not given.
            offsets: The caller's own position in its input, opaque.
            layout: How keys are spread over tasks; must equal the scope's (K3). None takes the parent's.
            parent: The commit that the results were made against, if the caller wants to be sure of it; None: there was
                no commit.

        Returns:
            The acknowledged commit. `settled` is False if TTL removal was interrupted: the next commit completes it.

        Raises:
            StaleResultError: A result was made against another parent.
            CommitLostError: Another writer was first.
            FencedError: A collector has closed this writer's past.
            LeaseExpiredError: The uploads are too old; back up again.
            CommitUnknownError: No answer; calling again with the same results finds out.
            UsageError: Two results for one store, a result of another scope, or another layout.
            StoreError: As the store says; nothing is acknowledged.
        """
        _check_results(self._scope, results)
        async with self._one_at_a_time:
            for _ in range(COMMIT_ATTEMPTS_MAX):
                head = await self.head()
                adopted = await self._adopt(head, results)
                if adopted is not None:
                    return adopted
                if parent not in {ANY, head.newest.pointer if head.newest else None}:
                    raise CommitLostError(
                        f"the newest commit is {head.newest and head.newest.pointer.number} and not the parent given",
                        operation="commit",
                        subject=str(self._scope),
                    )
                record = self._pending(head, results) or self._compose(head, results, version, offsets, layout)
                if head.newest is None:
                    await self._check_granularity()
                await self._check_lease(record)
                await self._settle_parent(head)
                committed = await self._create(record)
                if committed is not None:
                    new_keys = tuple(key for result in results for key in result.new_keys)
                    return await self._finish(committed, new_keys)
            raise CommitLostError("own late records keep arriving", operation="commit", subject=str(self._scope))

    async def rewind(self, target: Commit) -> Commit:
        """Make an older commit's stores the newest again, as a new commit (C6).

        Raises:
            NotFoundError: The target was collected meanwhile.
            ConflictError, CommitUnknownError, StoreError: As `commit`.
        """
        async with self._one_at_a_time, self._pinned(target, "rewind") as lease:
            await settle_record(self._store, target.record)
            head = await self.head()
            await self._settle_parent(head)
            record = self._record(
                head,
                kind="rewind",
                source=target.pointer,
                version=target.record.version,
                offsets=target.record.offsets,
                layout=target.record.layout,
                stores=target.record.stores,
                valid_until_ms=lease.valid_until_ms,
            )
            return await self._create_or_raise(record)

    async def fork(self, target: Commit) -> Commit:
        """Begin this writer's scope with another scope's stores, copying no bytes.

        Raises:
            UsageError: This scope has commits already.
            NotFoundError: The target was collected meanwhile.
            ConflictError, CommitUnknownError, StoreError: As `commit`.
        """
        async with self._one_at_a_time, self._pinned(target, "fork") as lease:
            await settle_record(self._store, target.record)
            head = await self.head()
            if head.newest is not None:
                raise UsageError("the scope has commits already", operation="fork", subject=str(self._scope))
            await self._check_granularity()
            stores = tuple(msgspec.structs.replace(s, number=head.next_number) for s in target.record.stores)
            record = self._record(
                head,
                kind="fork",
                source=target.pointer,
                source_scope=target.scope,
                version=target.record.version,
                offsets=target.record.offsets,
                layout=target.record.layout,
                stores=stores,
                valid_until_ms=lease.valid_until_ms,
            )
            return await self._create_or_raise(record)

    def _pinned(self, target: Commit, purpose: str) -> AbstractAsyncContextManager[PinLease]:
        return hold_pin(
            self._store,
            self._ambient,
            target,
            purpose=purpose,
            margin_ms=self._repository.margin_ms,
            required=True,
        )

    async def _create_or_raise(self, record: CommitRecord) -> Commit:
        committed = await self._create(record)
        if committed is None:
            raise CommitLostError("an own earlier record arrived late", operation="commit", subject=str(self._scope))
        return await self._finish(committed, ())

    def _pending(self, head: Head, results: Sequence[BackupResult]) -> CommitRecord | None:
        """The record of an unanswered attempt at just this commit: the same bytes are sent again (C3)."""
        newest = head.newest.pointer if head.newest else None
        for record in self._unresolved.values():
            if record.number == head.next_number and record.predecessor == newest and _carries(record, results):
                return record
        return None

    def _compose(
        self, head: Head, results: Sequence[BackupResult], version: int | None, offsets: str, layout: ScopeLayout | None
    ) -> CommitRecord:
        parent = head.newest.record if head.newest else None
        _check_bases(self._scope, head.newest, results)
        if parent is not None and layout is not None and layout != parent.layout:
            raise UsageError(
                f"the scope was begun with {parent.layout}, not {layout}",
                operation="commit",
                subject=str(self._scope),
                hint="the number of tasks and the key hash of a job never change; start a new job",
            )
        stores = {(s.task, s.store): s for s in (parent.stores if parent else ())}
        for result in results:
            reference = msgspec.structs.replace(result.reference, number=head.next_number)
            stores[reference.task, reference.store] = reference
        births = [result.oldest_birth_ms for result in results]
        lease_ms = self._repository.ttl_ms - self._repository.margin_ms
        return self._record(
            head,
            kind="commit",
            version=version if version is not None else (parent.version + 1 if parent else 1),
            offsets=offsets,
            layout=layout or (parent.layout if parent else ScopeLayout()),
            stores=tuple(stores[key] for key in sorted(stores)),
            valid_until_ms=min(births) + lease_ms if births else SIZE_BYTES_MAX,
        )

    def _record(self, head: Head, **fields: object) -> CommitRecord:
        newest = head.newest
        return CommitRecord(
            scope=self._scope,
            number=head.next_number,
            write_id=self._ambient.write_id(),
            predecessor=newest.pointer if newest else None,
            predecessor_committed_at_ms=newest.committed_at_ms if newest else 0,
            settled_through=newest.pointer.number if newest else 0,
            **fields,  # type: ignore[arg-type]
        )

    async def _check_granularity(self) -> None:
        """A job commits as a whole or by task, never both: a store belongs to exactly one scope (K3)."""
        job = f"{LOG}{encode_component(self._scope.job)}"
        other = f"{job}@" if self._scope.task is None else f"{job}/"
        if (await self._store.list_page(other, limit=1)).blobs:
            raise UsageError(
                "the job already commits " + ("task by task" if self._scope.task is None else "as a whole"),
                operation="commit",
                subject=str(self._scope),
                hint="use the same kind of scope, or another job name",
            )

    async def _check_lease(self, record: CommitRecord) -> None:
        """Spare a number when the lease is already over (C5); asked only if this machine's clock suspects it."""
        if record.valid_until_ms < self._ambient.local_now_ms() and record.valid_until_ms < await self._store.now_ms():
            raise LeaseExpiredError(
                "less than the margin is left of the uploads' TTL", operation="commit", subject=str(self._scope)
            )

    async def _settle_parent(self, head: Head) -> None:
        """T2: whatever a new record retains carries no TTL any more."""
        if head.newest is not None and not head.newest.settled:
            await settle_record(self._store, head.newest.record)
            self._head = msgspec.structs.replace(head, newest=msgspec.structs.replace(head.newest, settled=True))

    async def _adopt(self, head: Head, results: Sequence[BackupResult]) -> Commit | None:
        """Find out what became of unanswered records; the one that carries these results is this commit (C3)."""
        found: Commit | None = None
        for pointer, record in tuple(self._unresolved.items()):
            if pointer.number >= head.next_number:
                continue
            del self._unresolved[pointer]
            try:
                there = await read_commit(self._store, self._scope, pointer.number)
            except BlobNotFoundError:
                continue
            if there.write_id == pointer.write_id and _carries(record, results):
                # Lost, fenced or void after all: then it is no commit, and a new attempt is judged on its own.
                with contextlib.suppress(ConflictError, LeaseExpiredError):
                    found = await self._acknowledge(record, answered_at_ms=0)
        if found is None:
            return None
        return await self._finish(found, tuple(key for result in results for key in result.new_keys))

    async def _create(self, record: CommitRecord) -> Commit | None:
        """Write the record and acknowledge it; None if an own earlier record turns out to stand there."""
        self._head = None
        self._unresolved[record.pointer] = record
        outcome = await self._put(record)
        answered_at_ms = 0
        match outcome:
            case Created(created_at_ms=answered_at_ms):
                pass
            case Lost():
                try:
                    there = await read_commit(self._store, self._scope, record.number)
                except BlobNotFoundError:
                    there = None
                if there is None or there.pointer not in self._unresolved:
                    del self._unresolved[record.pointer]
                    raise CommitLostError(
                        f"another writer has taken number {record.number}", operation="commit", subject=str(self._scope)
                    )
                if there.pointer != record.pointer:
                    del self._unresolved[record.pointer]
                    return None
            case Unknown(reason=reason):
                raise CommitUnknownError(
                    f"no answer for record {record.number}: {reason}", operation="commit", subject=str(self._scope)
                )
        try:
            commit = await self._acknowledge(record, answered_at_ms)
        except StoreError as error:
            raise CommitUnknownError(
                f"record {record.number} was written but could not be confirmed",
                operation="commit",
                subject=str(self._scope),
            ) from error
        except (ConflictError, LeaseExpiredError):
            del self._unresolved[record.pointer]
            raise
        del self._unresolved[record.pointer]
        return commit

    async def _put(self, record: CommitRecord) -> Created | Lost | Unknown:
        try:
            return await self._store.put_if_absent(
                commit_key(self._scope, record.number), BytesBody(encode_record(record))
            )
        except StoreError as error:
            # An error may stand for a request that arrived all the same; what is not known is not assumed (C3).
            raise CommitUnknownError(
                f"writing record {record.number} failed", operation="commit", subject=str(self._scope)
            ) from error

    async def _acknowledge(self, record: CommitRecord, answered_at_ms: int) -> Commit:
        """C4 and C5: one LIST from the own number on decides between acknowledged, lost, fenced and void."""
        for _ in range(LOAD_ATTEMPTS_MAX):
            listing = await list_log(self._store, self._scope, from_number=record.number)
            try:
                boundaries = await read_boundaries(self._store, listing)
                numbers = [number for number, _ in listing.records if number > record.number]
                newer = (
                    [await read_commit(self._store, self._scope, number) for number in numbers]
                    if not boundaries
                    else []
                )
            except BlobNotFoundError:
                continue
            if is_closed(record.pointer, boundaries):
                raise FencedError(
                    f"boundary {boundaries[-1].number} does not list record {record.number}",
                    operation="commit",
                    subject=str(self._scope),
                )
            created_at_ms = listing.created_at_ms(record.number)
            if created_at_ms is None:
                raise UnsafeStoreError(
                    "the record just written is not in the listing",
                    operation="commit",
                    subject=commit_key(self._scope, record.number),
                )
            if is_void(record, max(created_at_ms, answered_at_ms)):
                raise LeaseExpiredError(
                    f"record {record.number} was created after the lease of its uploads: it is void",
                    operation="commit",
                    subject=str(self._scope),
                )
            # A boundary that lists this record has seen it in the chain; only without one can later records contradict.
            valid = [
                commit_of(other, created)
                for other in newer
                if (created := listing.created_at_ms(other.number)) is not None and not is_void(other, created)
            ]
            if not descends_from(record.pointer, valid):
                raise CommitLostError(
                    f"later records do not descend from record {record.number}",
                    operation="commit",
                    subject=str(self._scope),
                )
            return commit_of(record, created_at_ms)
        raise UnsafeStoreError("the log keeps changing", operation="commit", subject=str(self._scope))

    async def _finish(self, commit: Commit, new_keys: Sequence[BlobKey]) -> Commit:
        """T1, after the acknowledgement: an interruption here costs nothing, the next commit completes it."""
        # The commit stands whatever the store says now; while `settled` is False the next commit completes it.
        with contextlib.suppress(StoreError):
            await settle_keys(self._store, new_keys)
            commit = msgspec.structs.replace(commit, settled=True)
        self._head = Head(newest=commit, next_number=commit.pointer.number + 1)
        return commit


def _carries(record: CommitRecord, results: Sequence[BackupResult]) -> bool:
    """Whether these results are exactly what was new in a record."""
    new = {(s.task, s.store, s.unique_id) for s in record.stores if s.number == record.number}
    return new == {(r.reference.task, r.reference.store, r.reference.unique_id) for r in results}


def _check_results(scope: Scope, results: Sequence[BackupResult]) -> None:
    seen: set[tuple[str, str]] = set()
    for result in results:
        reference = result.reference
        if result.scope != scope:
            raise UsageError(f"a result belongs to {result.scope}", operation="commit", subject=str(scope))
        if scope.task not in {None, reference.task}:
            raise UsageError(f"a result belongs to task {reference.task}", operation="commit", subject=str(scope))
        if (reference.task, reference.store) in seen:
            raise UsageError(
                f"two results for store {reference.store} of task {reference.task}",
                operation="commit",
                subject=str(scope),
            )
        seen.add((reference.task, reference.store))


def _check_bases(scope: Scope, parent: Commit | None, results: Sequence[BackupResult]) -> None:
    """C2: what a result was diffed against must be what the parent holds."""
    for result in results:
        held: StoreReference | None = None
        if parent is not None:
            held = parent.store(result.reference.task, result.reference.store)
        if result.base_unique_id != (held.unique_id if held else None):
            raise StaleResultError(
                f"store {result.reference.store} of task {result.reference.task} was backed up against "
                f"{result.base_unique_id}, but the newest commit holds {held.unique_id if held else None}",
                operation="commit",
                subject=str(scope),
            )

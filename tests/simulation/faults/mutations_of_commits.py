"""The rules of keys, commits and TTL removal, broken; see `mutations.py`."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import msgspec

from blobstore.base import BlobStore, Body, CreateOutcome
from blobstore.errors import BlobNotFoundError
from blobstore.s3 import bucket_rules as s3_bucket
from blobstore.wrappers.retry import RetryingStore
from engine.backup.backup import BackupResult, backup_source
from engine.backup.upload import Uploader
from engine.commit import record as commit_record
from engine.commit.record import LayoutChange, Request
from engine.commit.writer import CommitWriter
from engine.errors import CommitLostError, DamagedError, StaleResultError
from engine.records.indexes import new_indexes_of, settle_keys
from engine.records.journal import HashedBody, UploadJournal, UploadJournals
from engine.records.log import list_log, read_vouched
from index.plan import commits as log
from index.plan.commits import Commit, Head
from index.snapshot.keys import BLOBS, INDEXES
from index.snapshot.model import BlobKey, Boundary, CommitPointer, CommitRecord, IndexReference, Scope
from tests.simulation.faults.mutation import IS_DAMAGED, NO_BLOB, NO_INDEX, everywhere, mutation
from tests.simulation.model.processes import SimRuntime
from tests.simulation.scenarios import interleavings_of_commits


@mutation(
    "K2",
    "the PUT of an upload is not create-if-absent",
    interleavings_of_commits.a_put_that_lands_late_brings_no_ttl_back,
    shows=NO_BLOB,
)
def uploads_replace() -> Iterator[None]:
    real = RetryingStore.put_if_absent

    async def put_if_absent(self: RetryingStore, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
        if key.startswith((BLOBS, INDEXES)):
            return await self.put(key, body, ttl_ms=ttl_ms)
        return await real(self, key, body, ttl_ms=ttl_ms)

    with mock.patch.object(RetryingStore, "put_if_absent", put_if_absent):
        yield


@mutation(
    "K2",
    "the session in the keys of uploads is always the same",
    interleavings_of_commits.a_writer_builds_on_what_it_has_loaded_and_on_nothing_later,
    shows="DamagedError: backup ",
)
def keys_repeat() -> Iterator[None]:
    with mock.patch.object(SimRuntime, "session", return_value="0" * 20):
        yield


@mutation(
    "K3",
    "after a scope's first record nobody looks for the other kind again",
    interleavings_of_commits.of_two_kinds_of_scope_one_goes_on,
    shows="no UsageError",
)
def granularity_is_looked_at_once() -> Iterator[None]:
    real = commit_record.check_granularity

    async def check(store: BlobStore, scope: Scope, operation: str, first: Commit | None = None) -> None:
        if first is None:
            await real(store, scope, operation)

    with everywhere(real, check):
        yield


@mutation(
    "K3",
    "a change of the layout is made on any commit",
    interleavings_of_commits.a_change_of_the_layout_follows_its_parent_alone,
    shows="no CommitLostError",
)
def any_commit_is_rescaled() -> Iterator[None]:
    real = commit_record.check_parent

    def check(scope: Scope, head: Head, request: Request) -> None:
        if not isinstance(request.layout, LayoutChange):
            real(scope, head, request)

    with everywhere(real, check):
        yield


@mutation(
    "K3",
    "a commit of another layout is taken",
    interleavings_of_commits.a_change_of_the_layout_follows_its_parent_alone,
    shows="no UsageError",
)
def any_layout_is_taken() -> Iterator[None]:
    with mock.patch.object(commit_record, "_check_layout", return_value=None):
        yield


@mutation(
    "C1",
    "the number is the newest that is found just before the record is sent",
    interleavings_of_commits.a_writer_builds_on_what_it_has_loaded_and_on_nothing_later,
    shows="the newest commit has ['a']",
)
def number_found_later() -> Iterator[None]:
    real = CommitWriter._send

    async def send(self: CommitWriter, request: Request, record: CommitRecord, data: bytes) -> bool:
        listing = await list_log(self._store, record.scope)
        later = msgspec.structs.replace(record, number=listing.newest_number + 1)
        sent = await real(self, request, later, commit_record.encode_commit(later))
        # The sender goes on with what is there.
        for name in record.__struct_fields__:
            msgspec.structs.force_setattr(record, name, getattr(later, name))
        return sent

    with mock.patch.object(CommitWriter, "_send", send):
        yield


@mutation(
    "C2",
    "a record names only the stores that have a result",
    interleavings_of_commits.stores_without_a_result_are_carried_over,
    shows="the newest commit has ['a']",
)
def nothing_is_carried_over() -> Iterator[None]:
    real = commit_record.compose_commit

    def compose(head: Head, request: Request, results: Sequence[BackupResult], **options: Any) -> CommitRecord:
        record = real(head, request, results, **options)
        fresh = tuple(s for s in record.stores if s.number == record.number)
        return msgspec.structs.replace(record, stores=fresh)

    with everywhere(real, compose):
        yield


@mutation(
    "C2",
    "a result of any base is taken",
    interleavings_of_commits.a_result_of_another_base_is_refused,
    shows="no StaleResultError",
)
def bases_are_not_checked() -> Iterator[None]:
    with everywhere(commit_record.check_bases, lambda *_: None):
        yield


@mutation(
    "C2",
    "a base is known by its unique id",
    interleavings_of_commits.two_snapshots_of_one_id_are_two,
    shows="no StaleResultError",
)
def bases_are_known_by_their_ids() -> Iterator[None]:
    real, ids = backup_source, {}

    async def backup(*of: Any, **how: Any) -> BackupResult:
        result = await real(*of, **how)
        ids[result.reference.index] = result.reference.unique_id
        return result

    def check(scope: Scope, head: Head, results: Sequence[BackupResult]) -> None:
        for result in results:
            held = head.newest.store(result.reference.task, result.reference.store) if head.newest else None
            # What a schedule begins with was made before.
            known = result.base is None or result.base in ids
            base = ids[result.base] if result.base is not None and known else result.base
            if base != (None if held is None else held.unique_id if known else held.index):
                raise StaleResultError("another id", operation="commit", subject=str(scope))

    with everywhere(real, backup), everywhere(commit_record.check_bases, check):
        yield


@mutation(
    "C3",
    "results of the same unique ids are the same request",
    interleavings_of_commits.another_result_is_not_answered_with_the_first_ones_record,
    shows="store a is not two",
)
def requests_are_known_by_their_ids() -> Iterator[None]:
    real = commit_record.request_of

    def request(results: Sequence[BackupResult], **options: Any) -> Request:
        named = [
            (
                r.reference.task,
                r.reference.store,
                IndexReference(key=BlobKey(r.reference.unique_id), sha256=b"", size_bytes=0),
            )
            for r in results
        ]
        return msgspec.structs.replace(real(results, **options), results=tuple(sorted(named, key=lambda n: n[:2])))

    with everywhere(real, request):
        yield


@mutation(
    "C3",
    "after Lost nobody looks whose record is there: another's, it is believed",
    interleavings_of_commits.a_lost_answer_is_not_a_conflict,
    shows="CommitLostError",
)
def lost_is_lost() -> Iterator[None]:
    async def is_mine(self: CommitWriter, record: CommitRecord) -> bool:
        del self._unresolved[record.pointer]
        raise CommitLostError("somebody was first", operation="commit", subject=str(record.scope))

    with mock.patch.object(CommitWriter, "_is_mine", is_mine):
        yield


@mutation(
    "C3",
    "after Lost nobody looks whose record is there: the own, it is believed",
    interleavings_of_commits.a_writer_builds_on_what_it_has_loaded_and_on_nothing_later,
    shows="store a is not three",
)
def lost_is_own() -> Iterator[None]:
    async def is_mine(self: CommitWriter, record: CommitRecord) -> bool:
        return True

    with mock.patch.object(CommitWriter, "_is_mine", is_mine):
        yield


@mutation(
    "C3",
    "a record without an answer is forgotten",
    interleavings_of_commits.a_record_that_arrives_after_all_is_adopted,
    shows="StaleResultError",
)
def unresolved_is_forgotten() -> Iterator[None]:
    async def resolve(self: CommitWriter, request: Request, head: Head) -> Commit | None:
        self._unresolved.clear()
        return None

    with mock.patch.object(CommitWriter, "_resolve", resolve):
        yield


@mutation(
    "C4",
    "a record that was created is acknowledged without a look at the log",
    interleavings_of_commits.a_zombie_whose_number_became_free_is_fenced,
    shows="store a is not zombie",
)
def acknowledged_unseen() -> Iterator[None]:
    async def acknowledge(_: BlobStore, record: CommitRecord) -> Commit:
        return log.commit_of(record, 0)

    with everywhere(commit_record.acknowledge, acknowledge):
        yield


@mutation(
    "C5",
    "no record is void, however late it came",
    interleavings_of_commits.a_record_that_comes_after_its_lease_is_void,
    shows=IS_DAMAGED,
)
def nothing_is_void() -> Iterator[None]:
    with everywhere(log.is_late, lambda *_: False):
        yield


@mutation(
    "C5",
    "a late record is void no matter what vouches for it",
    interleavings_of_commits.a_copied_repository_keeps_its_commits,
    shows="are left of three commits",
)
def nothing_vouches() -> Iterator[None]:
    def late(
        listing: log.LogListing, records: Mapping[int, CommitRecord], boundaries: Sequence[Boundary]
    ) -> tuple[CommitRecord, ...]:
        found = ((records.get(number), created_at_ms) for number, created_at_ms in listing.records)
        return tuple(
            record
            for record, created_at_ms in found
            if record is not None
            and log.is_late(record, created_at_ms)
            and not log.is_closed(record.pointer, boundaries)
        )

    async def vouched(*_: object) -> frozenset[CommitPointer]:
        return frozenset()

    with everywhere(log.find_late, late), everywhere(read_vouched, vouched):
        yield


@mutation(
    "C7",
    "the time of a commit is asked of its own record alone",
    interleavings_of_commits.a_copied_repository_keeps_its_times,
    shows="the times are those of the copy",
)
def successors_say_no_times() -> Iterator[None]:
    real = log.commit_of

    def commit_of(record: CommitRecord, created_at_ms: int, newer: Commit | None = None) -> Commit:
        del newer
        return real(record, created_at_ms)

    with everywhere(real, commit_of):
        yield


@mutation(
    "T1", "TTLs are never removed", interleavings_of_commits.a_put_that_lands_late_brings_no_ttl_back, shows=NO_INDEX
)
def nothing_is_settled() -> Iterator[None]:
    async def settle(*_: object, **__: object) -> None:
        """Nothing."""

    with everywhere(settle_keys, settle):
        yield


@mutation(
    "T1",
    "the TTL of indexes is removed before that of blobs",
    interleavings_of_commits.the_one_who_completes_it_may_be_interrupted_too,
    shows=NO_BLOB,
)
def indexes_are_settled_first() -> Iterator[None]:
    async def settle(store: BlobStore, keys: Iterable[BlobKey], **_: object) -> None:
        for key in sorted(keys, key=lambda key: not key.startswith(INDEXES)):
            with contextlib.suppress(BlobNotFoundError):
                await store.remove_ttl(key)

    with everywhere(settle_keys, settle):
        yield


@mutation(
    "T1",
    "the TTL of indexes is removed before the acknowledgement, as that of blobs is",
    interleavings_of_commits.a_record_that_comes_within_the_margin_is_void,
    shows="store a is not one",
)
def indexes_are_settled_unseen() -> Iterator[None]:
    real = CommitWriter._judge_sent

    async def judge(self: CommitWriter, record: CommitRecord) -> Commit:
        await settle_keys(self._store, [index.key for index in new_indexes_of(record)])
        return await real(self, record)

    with mock.patch.object(CommitWriter, "_judge_sent", judge):
        yield


@mutation(
    "T2",
    "a writer does not settle its parent",
    interleavings_of_commits.the_next_committer_settles_what_was_interrupted,
    shows=NO_INDEX,
)
def parent_stays_unsettled() -> Iterator[None]:
    async def settle_parent(self: CommitWriter, head: Head, gone: frozenset[str] | None) -> None:
        """Nothing."""

    with mock.patch.object(CommitWriter, "_settle_parent", settle_parent):
        yield


@mutation(
    "T4",
    "a result that is committed again is new",
    interleavings_of_commits.a_result_that_comes_again_after_its_lease_is_void,
    shows=NO_INDEX,
)
def every_result_is_new() -> Iterator[None]:
    async def find_committed(*_: object) -> frozenset[IndexReference]:
        return frozenset()

    with everywhere(commit_record.find_committed, find_committed):
        yield


@mutation(
    "T1",
    "a new blob that is gone is not reported",
    interleavings_of_commits.a_commit_whose_blob_is_gone_is_not_acknowledged,
    shows="no CommitDamagedError",
)
def missing_blobs_are_passed_over() -> Iterator[None]:
    real = settle_keys

    async def settle(*of: Any, **how: Any) -> None:
        with contextlib.suppress(DamagedError):
            await real(*of, **how)

    with everywhere(real, settle):
        yield


@mutation(
    "T3",
    "the backstop begins three collection periods after an upload",
    interleavings_of_commits.the_backstop_waits_for_a_collection_after_the_last_lease,
    shows="1 object cannot be read",
)
def backstop_counts_from_the_upload() -> Iterator[None]:
    real = s3_bucket.backstop_days

    def days(*, ttl_ms: int, margin_ms: int, collection_period_ms: int) -> int:
        del margin_ms
        day_ms = 86_400_000
        return max(7, -(-ttl_ms // day_ms) + 1, -(-3 * collection_period_ms // day_ms))

    with everywhere(real, days):
        yield


@mutation(
    "U2",
    "the keys of a later attempt are those of the first one",
    interleavings_of_commits.a_backup_that_was_broken_off_goes_on,
    shows="DamagedError: ",
)
def attempts_share_their_keys() -> Iterator[None]:
    real = UploadJournal._go_on

    def go_on(self: UploadJournal, *arguments: Any) -> bool:
        has_gone_on = real(self, *arguments)
        self.counter_first = 0
        return has_gone_on

    with mock.patch.object(UploadJournal, "_go_on", go_on):
        yield


@mutation(
    "U3",
    "nobody asks whether a noted blob is still there",
    interleavings_of_commits.what_a_collection_took_of_an_earlier_attempt_is_sent_again,
    shows=IS_DAMAGED,
)
def notes_are_believed() -> Iterator[None]:
    async def resume(self: Uploader, counter: int, body: HashedBody) -> bool:
        key = self.journal.take(body.size_bytes, (await body.read_digest()).blake3)
        if key is not None:
            self.resumed[counter] = key, body.size_bytes
        return key is not None

    with mock.patch.object(Uploader, "_resume", resume):
        yield


@mutation(
    "U3",
    "the clock of the machine says what is too old",
    interleavings_of_commits.what_is_old_by_the_clock_of_the_store_is_sent_again,
    shows="LeaseExpiredError",
)
def machines_say_what_is_old() -> Iterator[None]:
    real = UploadJournals.open

    async def open_(self: UploadJournals, journal: UploadJournal, *arguments: Any) -> None:
        await real(self, journal, *arguments)
        journal.usable_from_ms = 0

    with mock.patch.object(UploadJournals, "open", open_):
        yield


@mutation(
    "U4",
    "what was uploaded before a job was forgotten is used again",
    interleavings_of_commits.what_was_uploaded_before_a_job_was_forgotten_is_sent_again,
    shows="StaleResultError",
)
def journals_outlive_a_job() -> Iterator[None]:
    with mock.patch.object(UploadJournals, "since", lambda self, _: self):
        yield


@mutation(
    "U5",
    "the lease begins with the first upload of the last attempt",
    interleavings_of_commits.the_lease_begins_with_the_first_upload_that_is_used,
    shows="no LeaseExpiredError",
)
def only_own_uploads_have_a_lease() -> Iterator[None]:
    real = Uploader._resume

    async def resume(self: Uploader, counter: int, body: HashedBody) -> bool:
        created_ms = [*self.created_ms]
        is_there = await real(self, counter, body)
        self.created_ms[:] = created_ms
        return is_there

    with mock.patch.object(Uploader, "_resume", resume):
        yield

"""The rules of deletion, broken; see `mutations.py`."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import msgspec

from blobstore.base import BlobStore
from blobstore.errors import StoreError
from engine.backup.backup import BackupResult
from engine.collect import backend as in_process_backend
from engine.collect import collect as run
from engine.collect.backend import CollectBackend, Deletion, Listing, Rules, SweepResult
from engine.commit.writer import CommitWriter
from engine.errors import DamagedError, EngineError
from engine.inspect import discard
from engine.records import log as log_io
from engine.records import roots
from engine.records.leases import PinLease, check_open, hold_pin
from engine.runtime import Progress, Runtime
from index.plan import collect as collect_plan
from index.plan import commits as log
from index.plan.collect import PlannedUpload, Protection, ScopePlan, Upload
from index.plan.commits import Commit, LogListing
from index.snapshot import model
from index.snapshot.keys import BLOBS, INDEXES
from index.snapshot.model import Boundary, CommitPointer, IndexReference, NameRecord, Scope
from tests.simulation.faults.mutation import IS_DAMAGED, NO_BLOB, NO_INDEX, everywhere, mutation
from tests.simulation.scenarios import interleavings_of_collection, interleavings_of_commits


@mutation(
    "D1",
    "blobs are deleted first, then indexes, then records",
    interleavings_of_collection.records_go_before_indexes_and_indexes_before_blobs,
    shows="['blobs', 'indexes', 'log']",
)
def blobs_go_first() -> Iterator[None]:
    async def delete(store: BlobStore, deletion: Deletion, backend: CollectBackend, _progress: Progress) -> None:
        for prefix in (BLOBS, INDEXES):
            deletion.uploads[prefix] = await backend.delete(prefix)
        await in_process_backend.delete_keys(store, deletion.log.planned, tally=deletion.log)

    with everywhere(run._delete, delete):
        yield


@mutation(
    "D1",
    "a writer whose commit fails deletes what it has uploaded",
    interleavings_of_commits.an_unknown_outcome_is_left_alone,
    shows=NO_INDEX,
)
def writers_tidy_up() -> Iterator[None]:
    real = CommitWriter.commit

    async def commit(self: CommitWriter, results: Sequence[BackupResult], **options: Any) -> Commit:
        try:
            return await real(self, results, **options)
        except (EngineError, StoreError):
            await self._store.delete([key for result in results for key in result.new_keys])
            raise

    with mock.patch.object(CommitWriter, "commit", commit):
        yield


@mutation(
    "D2",
    "what is unreachable goes, however young it is",
    interleavings_of_collection.the_uploads_of_a_backup_under_way_stay,
    shows=IS_DAMAGED,
)
def age_is_not_asked() -> Iterator[None]:
    real = collect_plan.choose_uploads

    def choose(unreachable: Iterable[Upload], now_ms: int, ttl_ms: int, *rest: Any) -> tuple[PlannedUpload, ...]:
        del ttl_ms
        return real(unreachable, now_ms, 0, *rest)

    with everywhere(real, choose):
        yield


@mutation(
    "D2",
    "what has lost its TTL goes, however young it is",
    interleavings_of_collection.a_result_that_is_committed_again_stays,
    shows="the index is gone",
)
def closed_uploads_go() -> Iterator[None]:
    real = in_process_backend.list_uploads

    async def listed(store: BlobStore, prefixes: Iterable[str]) -> tuple[tuple[Upload, ...], tuple[str, ...]]:
        uploads, foreign = await real(store, prefixes)
        shown = [await store.stat(upload.key) for upload in uploads]
        settled = {info.key for info in shown if info is not None and info.expires_at_ms is None}
        return tuple(Upload(u.key, u.size_bytes, 0) if u.key in settled else u for u in uploads), foreign

    with everywhere(real, listed):
        yield


@mutation(
    "D2",
    "an upload may go before its lease is over",
    interleavings_of_collection.a_result_that_is_committed_again_stays,
    shows="the index is gone",
)
def leases_are_cut_short() -> Iterator[None]:
    real = collect_plan.choose_uploads

    def choose(unreachable: Iterable[Upload], now_ms: int, ttl_ms: int, *rest: Any) -> tuple[PlannedUpload, ...]:
        return real(unreachable, now_ms, ttl_ms // 2, *rest)

    with everywhere(real, choose):
        yield


@mutation(
    "D2",
    "what was never committed stays when it is a TTL old",
    interleavings_of_collection.what_was_never_committed_goes,
    shows="AssertionError: too many: ['blobs/",
)
def expired_stays() -> Iterator[None]:
    real = collect_plan.choose_uploads

    def choose(unreachable: Iterable[Upload], now_ms: int, ttl_ms: int, *rest: Any) -> tuple[PlannedUpload, ...]:
        return real((), now_ms, ttl_ms, *rest) if any(unreachable) else ()

    with everywhere(real, choose):
        yield


@mutation(
    "D3",
    "only the boundary with the greatest number counts",
    interleavings_of_collection.what_was_closed_stays_closed,
    shows="[5, 2] seem open",
)
def newest_boundary_counts() -> Iterator[None]:
    def is_closed(pointer: CommitPointer, boundaries: Iterable[Boundary]) -> bool:
        newest = max(boundaries, key=lambda b: b.number, default=None)
        return newest is not None and newest.number >= pointer.number and pointer not in newest.kept

    def is_number_closed(number: int, boundaries: Iterable[Boundary]) -> bool:
        newest = max(boundaries, key=lambda b: b.number, default=None)
        return (
            newest is not None and newest.number >= number and number not in {pointer.number for pointer in newest.kept}
        )

    with everywhere(log.is_closed, is_closed), everywhere(log.is_number_closed, is_number_closed):
        yield


@mutation(
    "D3",
    "every boundary may go",
    interleavings_of_collection.the_last_boundary_stays,
    shows="the log changed or had holes",
)
def all_boundaries_go() -> Iterator[None]:
    def choose(boundaries: Iterable[Boundary], *_: object) -> tuple[int, ...]:
        return tuple(boundary.number for boundary in boundaries)

    with everywhere(log.choose_superseded_boundaries, choose):
        yield


@mutation(
    "D3",
    "every boundary lasts",
    interleavings_of_collection.what_the_second_boundary_of_a_number_closes_is_closed_again,
    shows="the log changed or had holes",
)
def every_boundary_lasts() -> Iterator[None]:
    with everywhere(log.lasting_boundaries, tuple):
        yield


@mutation(
    "D3",
    "the newest valid record is closed like any other",
    interleavings_of_collection.the_newest_commit_is_never_closed,
    shows="NotFoundError: find job",
)
def newest_is_closed() -> Iterator[None]:
    real = collect_plan.plan_scope

    def plan(listing: LogListing, *rest: Any, **how: Any) -> ScopePlan:
        planned = real(listing, *rest, **how)
        if not listing.records:
            return planned
        boundary = Boundary(scope=listing.scope, number=listing.newest_number, kept=())
        return ScopePlan(scope=planned.scope, kept=(), boundary=boundary)

    with everywhere(real, plan):
        yield


@mutation(
    "D3",
    "no boundary is written",
    interleavings_of_collection.records_go_before_indexes_and_indexes_before_blobs,
    shows="['indexes', 'blobs']",
)
def nothing_is_written_down() -> Iterator[None]:
    async def write(_store: BlobStore, boundary: Boundary) -> Boundary:
        return boundary

    with everywhere(run.write_boundary, write):
        yield


@mutation(
    "D4",
    "what the second reading of the roots leads to is not excluded",
    interleavings_of_collection.a_fork_between_the_two_readings_is_kept,
    shows=NO_BLOB,
)
def nothing_is_excluded() -> Iterator[None]:
    real = in_process_backend.InProcessBackend.exclude

    async def exclude(self: in_process_backend.InProcessBackend, _keys: frozenset[str]) -> SweepResult:
        return await real(self, frozenset())

    with mock.patch.object(in_process_backend.InProcessBackend, "exclude", exclude):
        yield


@mutation(
    "D4",
    "an index that is missing is not an error",
    interleavings_of_collection.an_error_means_that_nothing_is_deleted,
    shows=NO_BLOB,
)
def errors_are_passed_over() -> Iterator[None]:
    real = roots.reachable_keys

    async def reachable(
        store: BlobStore, references: Iterable[IndexReference], *, optional: frozenset[IndexReference] = frozenset()
    ) -> frozenset[str]:
        wanted = frozenset(references)
        return await real(store, wanted, optional=wanted)

    with everywhere(real, reachable):
        yield


@mutation(
    "D9",
    "what cannot be read protects nothing",
    interleavings_of_collection.a_rotten_record_stops_its_own_job_alone,
    shows=NO_INDEX,
)
def unreadable_protects_nothing() -> Iterator[None]:
    with mock.patch.object(Protection, "covers", return_value=False):
        yield


@mutation(
    "D9",
    "what cannot be read stops the whole run",
    interleavings_of_collection.a_rotten_record_stops_its_own_job_alone,
    shows="are left of the other job",
)
def unreadable_stops_all() -> Iterator[None]:
    real = roots.assess

    async def assess(store: BlobStore, found: roots.Roots, *rest: Any) -> roots.Damage:
        if found.all_unreadable():
            raise DamagedError("something cannot be read", operation="collect")
        return await real(store, found, *rest)

    with everywhere(real, assess):
        yield


@mutation(
    "D5",
    "after a pin was written nobody looks whether the commit is still open",
    interleavings_of_collection.a_pin_that_came_too_late_protects_nothing,
    shows=NO_BLOB,
)
def pins_are_believed() -> Iterator[None]:
    async def check(*_: object) -> None:
        """Nothing."""

    with everywhere(check_open, check):
        yield


@mutation(
    "D5",
    "first it is looked whether the commit is open, then the pin is written",
    interleavings_of_collection.a_pin_is_written_before_the_boundaries_are_read,
    shows=NO_BLOB,
)
def pins_come_second() -> Iterator[None]:
    @asynccontextmanager
    async def hold(store: BlobStore, runtime: Runtime, commit: Commit, **options: Any) -> AsyncIterator[PinLease]:
        await check_open(store, commit)
        async with hold_pin(store, runtime, commit, **options) as lease:
            yield lease

    async def check(*_: object) -> None:
        """Nothing."""

    with everywhere(hold_pin, hold), everywhere(check_open, check):
        yield


@mutation(
    "D5",
    "who protects a commit may go by lists that are old",
    interleavings_of_collection.a_reader_of_old_lists_protects_nothing,
    shows=NO_BLOB,
)
def old_lists_are_believed() -> Iterator[None]:
    with everywhere(log_io.check_consistent_lists, lambda *_: None):
        yield


@mutation(
    "D5", "nobody writes a pin", interleavings_of_collection.what_is_restored_stays_while_it_is_restored, shows=NO_BLOB
)
def pins_are_not_written() -> Iterator[None]:
    async def begin(self: PinLease) -> None:
        self.pinned, self.valid_until_ms = True, 1 << 62

    async def release(self: PinLease) -> None:
        """Nothing."""

    with mock.patch.object(PinLease, "begin", begin), mock.patch.object(PinLease, "release", release):
        yield


@mutation(
    "D5",
    "a collector protects only the first store of what a pin stands for",
    interleavings_of_collection.every_store_of_what_is_restored_stays,
    shows=NO_BLOB,
)
def first_stores_are_protected() -> Iterator[None]:
    with everywhere(roots.read_pins, _with_stores_up_to(1)):
        yield


@mutation(
    "D5",
    "a collector does not ask for pins",
    interleavings_of_collection.what_is_restored_stays_while_it_is_restored,
    shows=NO_BLOB,
)
def pins_are_not_asked_for() -> Iterator[None]:
    with everywhere(roots.read_pins, _with_stores_up_to(0)):
        yield


def _with_stores_up_to(count: int) -> Callable[..., Awaitable[tuple[roots.Lease, ...]]]:
    real = roots.read_pins

    async def read(*of: Any) -> tuple[roots.Lease, ...]:
        return tuple(msgspec.structs.replace(lease, stores=lease.stores[:count]) for lease in await real(*of))

    return read


@mutation(
    "D4",
    "the second reading is taken as it is",
    interleavings_of_collection.what_is_closed_by_another_between_two_listings_was_kept,
    shows=NO_BLOB,
)
def the_second_reading_is_taken_as_it_is() -> Iterator[None]:
    def no_boundaries(_roots: roots.Roots) -> set[tuple[Scope, int]]:
        return set()

    with everywhere(roots._boundaries, no_boundaries):
        yield


@mutation(
    "D4",
    "the second reading may take as long as it likes",
    interleavings_of_collection.a_name_given_by_a_name_that_goes_within_a_listing_keeps_its_commit,
    shows=NO_BLOB,
)
def the_second_reading_takes_long() -> Iterator[None]:
    real = roots.read_roots

    async def read(*of: Any, **how: Any) -> roots.Roots:
        with mock.patch.object(model, "PIN_DURATION_MS", 10**15):
            return await real(*of, **how)

    with everywhere(real, read):
        yield


@mutation(
    "D5",
    "a released name keeps nothing",
    interleavings_of_collection.a_name_that_is_released_between_two_listings_has_kept_its_commit,
    shows=NO_BLOB,
)
def released_names_keep_nothing() -> Iterator[None]:
    real = roots.read_roots

    async def read(*of: Any, **how: Any) -> roots.Roots:
        return msgspec.structs.replace(await real(*of, **how), retained=())

    with everywhere(real, read):
        yield


@mutation(
    "D5",
    "a released naming goes once its own lease is over",
    interleavings_of_collection.a_released_name_is_there_as_long_as_a_pin_on_it,
    shows=NO_BLOB,
)
def released_names_go_early() -> Iterator[None]:
    real = collect_plan.name_is_removable

    def is_removable(name: NameRecord, _written_at_ms: int, now_ms: int, _margin_ms: int, **how: Any) -> bool:
        return real(name, 0, now_ms, 0, **how)

    with everywhere(real, is_removable):
        yield


@mutation(
    "D8",
    "the boundary of a forgotten scope has the number of its newest record",
    interleavings_of_collection.a_forgotten_job_takes_its_writer_with_it,
    shows=NO_INDEX,
)
def forgotten_at_the_newest() -> Iterator[None]:
    with mock.patch.object(log, "FORGOTTEN_AHEAD", 0):
        yield


@mutation(
    "D12",
    "the boundary of a discarded newest record has its number",
    interleavings_of_collection.a_discarded_commit_takes_its_writer_with_it,
    shows=NO_INDEX,
)
def discarded_at_the_newest() -> Iterator[None]:
    with mock.patch.object(discard, "FORGOTTEN_AHEAD", 0):
        yield


@mutation(
    "D11",
    "the clock of a store is believed however far ahead it is",
    interleavings_of_collection.a_clock_that_jumps_ages_nothing,
    shows=IS_DAMAGED,
)
def any_clock_is_believed() -> Iterator[None]:
    def judge(rules: Rules, listing: Listing, _local_now_ms: int) -> Rules:
        return msgspec.structs.replace(rules, listing=listing, age_now_ms=rules.now_ms)

    with everywhere(run.judge_clock, judge):
        yield

"""A rehearsal: the restore of a whole commit, to a directory that goes again or to nowhere, looked at closely."""

import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final, Unpack

import msgspec

from blobstore.bounded import map_bounded
from blobstore.errors import StoreError
from blobstore.local_files import run_blocking
from engine.clock import Ambient, SystemAmbient
from engine.complete import naming_complete
from engine.cores import cores_count
from engine.digest_cache import DigestCache
from engine.errors import EngineError
from engine.progress import NO_PROGRESS, Progress
from engine.rehearsal.model import MESSAGE_LENGTH_MAX, Measured, Rehearsal
from engine.rehearsal.nowhere import Fetched, restore_to_nowhere
from engine.rehearsal.probes import choose_pieces, probe_disk, probe_store
from engine.rehearsal.scratch import scratch_directory
from engine.rehearsal.timed_store import TimedStore
from engine.repository_reading import Choice, ReadingRepository
from engine.restore import read_index_of, restore_store
from engine.rocksdb import StoreReader, spark_settings
from engine.staging import target_errors
from engine.transfer_settings import STORES_AT_ONCE, TransferSettings, share_among
from engine.words import shortened
from index.errors import FormatError
from index.keys import encode_component
from index.log import Commit
from index.model import Scope, StoreReference
from index.restore_plan import plan_restore

# The indexes of so many stores are read for the network's probe.
PROBED_STORES_MAX: Final = 8
# An operator that reads whatever operands a store holds; nothing is read but what an opening reads.
_OPENING: Final = spark_settings(merge_delimiter=b",")
_NOTHING: Final = Measured(
    requests_count=0,
    bytes_fetched=0,
    bytes_written=0,
    files_written=0,
    first_byte_p50_s=0,
    first_byte_p99_s=0,
    first_byte_max_s=0,
    answers_s=0,
    bytes_s=0,
    taker_s=0,
    load=0,
    cpu_s=0,
    loop_cpu_s=0,
    round_trip_s=0,
    network_bytes_per_s=0,
    network_busy=0,
    disk_bytes_per_s=0,
    disk_file_s=0,
    opened_count=0,
    open_slowest_s=0,
)


async def rehearse(
    repository: ReadingRepository,
    scope: Scope,
    *,
    scratch: Path | None,
    keep: bool = False,
    stores_at_once: int = STORES_AT_ONCE,
    slo_ms: int | None = None,
    ambient: Ambient | None = None,
    progress: Progress = NO_PROGRESS,
    **choice: Unpack[Choice],
) -> Rehearsal:
    """Restore all stores of a commit to a scratch directory or to nowhere, open what is RocksDB, and say what it took.

    Requests: as a restore of each store; then a GET for each index of up to `PROBED_STORES_MAX` stores, some of a
    byte, and ranges of about `PROBE_BYTES_MAX` at most.

    Args:
        repository: Where from.
        scope: Whose commit; `choice` says which, as for `Repository.find`.
        scratch: A directory that is there. A fresh one is made in it, which it has room for, and removed at the end,
            also after an error; if it does not go, a note on the error names it. None: everything is read and hashed,
            and nothing is written or opened.
        keep: Leave the fresh directory where it is. RocksDB was open in it: it is not byte for byte what was backed up.
        stores_at_once: So many stores share the requests and the memory of `repository.settings`, as on an executor.
        slo_ms: What it may take; nothing but noted.
        ambient: Clock and chance.
        progress: Told what there is to do and what is done.

    Returns:
        What was measured; what a probe could not find out is 0, and its warnings say so.

    Raises:
        NotFoundError: No commit fits.
        TargetError: The scratch directory is not there, cannot be used, or has no room.
        DamagedError: Something is missing or altered, or a RocksDB does not open.
        StoreError: As the store says.
    """
    ambient = ambient or SystemAmbient()
    began_at_ms, began_s = ambient.local_now_ms(), ambient.monotonic_s()
    find = repository.find_pinned(scope, purpose="rehearse a restore", **choice)
    async with naming_complete(repository.store, lambda: repository.commits(scope)), find as (commit, lease):
        find_s = ambient.monotonic_s() - began_s
        stores = commit.record.stores
        at_once, settings = share_among(repository.settings, max(1, min(stores_at_once, len(stores))))
        async with scratch_directory(scratch, commit, ambient, keep=keep) as directory:
            run = _Run(
                repository,
                commit=commit,
                directory=directory,
                ambient=ambient,
                at_once=at_once,
                settings=settings,
                progress=progress,
            )
            with repository.gaps.noting():
                restore_s = await run.restore()
                open_s = await run.open_stores()
                await run.probe()
    return Rehearsal(
        began_at_ms=began_at_ms,
        release=version("tidemark"),
        repository_id=repository.record.id,
        job=scope.job,
        task=scope.task,
        commit_number=commit.pointer.number,
        version=commit.record.version,
        pinned=lease.pinned,
        to_disk=directory is not None,
        kept_at=str(directory) if directory is not None and await run_blocking(directory.exists) else "",
        cores_count=cores_count(),
        in_flight_max=at_once * settings.in_flight_max,
        stores_at_once=at_once,
        stores_count=len(stores),
        files_count=sum(store.files_count for store in stores),
        size_bytes=sum(store.size_bytes for store in stores),
        largest_store_bytes=max((store.size_bytes for store in stores), default=0),
        find_s=find_s,
        restore_s=restore_s,
        open_s=open_s,
        measured=run.measured,
        slo_ms=slo_ms,
        warnings=tuple(run.warnings),
    )


class _Run:
    """The steps of one rehearsal."""

    def __init__(
        self,
        repository: ReadingRepository,
        *,
        commit: Commit,
        directory: Path | None,
        ambient: Ambient,
        at_once: int,
        settings: TransferSettings,
        progress: Progress,
    ) -> None:
        self._store = TimedStore(repository.store, ambient.monotonic_s)
        self._bare_store = repository.store
        self._all_settings = repository.settings
        self._commit = commit
        self._stores = commit.record.stores
        self._size_bytes = sum(store.size_bytes for store in self._stores)
        self._directory = directory
        self._ambient = ambient
        self._at_once = at_once
        self._settings = settings
        self._progress = progress
        self.measured = _NOTHING
        self.warnings: list[str] = []

    async def probe(self) -> None:
        """Look at the store and at the disk by themselves; last, so that the restore makes its own connections.

        The rehearsal has come to its end by then: a probe that fails leaves its figures at 0, and is warned of.
        """
        for name, probe in (("network and requests", self._probe_store), ("disk", self._probe_disk)):
            try:
                await probe()
            except (StoreError, EngineError, FormatError, OSError) as error:
                warning = f"not measured, and no part of the verdict: {name}: {error}"
                self.warnings.append(shortened(warning, MESSAGE_LENGTH_MAX))

    async def _probe_store(self) -> None:
        chosen = self._stores[:: max(1, len(self._stores) // PROBED_STORES_MAX)][:PROBED_STORES_MAX]
        plans = []
        for reference in chosen:
            index, _ = await read_index_of(self._bare_store, reference)
            plans.append(plan_restore(index, {}, range_bytes=self._settings.range_bytes, owners_count=False))
        self.measured = await probe_store(
            self._bare_store,
            choose_pieces(plans, fetch_bytes=self._size_bytes, at_once=self._all_settings.in_flight_max),
            in_flight_max=self._all_settings.in_flight_max,
            monotonic_s=self._ambient.monotonic_s,
            into=self.measured,
        )

    async def _probe_disk(self) -> None:
        if self._directory is None:
            return
        with target_errors(self._directory):
            self.measured = await run_blocking(
                probe_disk,
                self._directory,
                size_bytes=self._size_bytes,
                monotonic_s=self._ambient.monotonic_s,
                into=self.measured,
            )

    async def restore(self) -> float:
        """Bring back all stores, so many at once; how long that took."""
        files_count = sum(store.files_count for store in self._stores)
        self._progress.total(files=files_count, bytes_=self._size_bytes)
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        began_s, cpu_s, loop_cpu_s = self._ambient.monotonic_s(), time.process_time(), time.thread_time()
        done = await map_bounded(self._restore_one, self._stores, in_flight_max=self._at_once)
        took_s = self._ambient.monotonic_s() - began_s
        written, waits = self._directory is not None, self._store.waits
        self.measured = msgspec.structs.replace(
            self.measured,
            requests_count=sum(one.requests for one in done),
            bytes_fetched=sum(one.bytes_fetched for one in done),
            bytes_written=self._size_bytes if written else 0,
            files_written=files_count if written else 0,
            first_byte_p50_s=waits.first_byte_s(0.5),
            first_byte_p99_s=waits.first_byte_s(0.99),
            first_byte_max_s=waits.first_byte_s(1.0),
            answers_s=waits.answers_s,
            bytes_s=waits.bytes_s,
            taker_s=waits.taker_s,
            load=load,
            cpu_s=time.process_time() - cpu_s,
            loop_cpu_s=time.thread_time() - loop_cpu_s,
        )
        return took_s

    async def _restore_one(self, reference: StoreReference) -> Fetched:
        progress = _Adding(self._progress)
        if self._directory is None:
            return await restore_to_nowhere(self._store, reference, settings=self._settings, progress=progress)
        result = await restore_store(
            self._store,
            reference=reference,
            target=_target(self._directory, reference),
            settings=self._settings,
            ambient=self._ambient,
            cache=DigestCache(),
            progress=progress,
        )
        return Fetched(requests=result.requests, bytes_fetched=result.bytes_fetched)

    async def open_stores(self) -> float:
        """Open what is RocksDB, so many at once; how long that took."""
        if self._directory is None:
            return 0.0
        found = await run_blocking(_rocksdb_dirs, self._directory)
        began_s = self._ambient.monotonic_s()
        times_s = await map_bounded(self._open_one, found, in_flight_max=self._at_once)
        took_s = self._ambient.monotonic_s() - began_s
        self.measured = msgspec.structs.replace(
            self.measured, opened_count=len(found), open_slowest_s=max(times_s, default=0.0)
        )
        return took_s if found else 0.0

    async def _open_one(self, directory: Path) -> float:
        return await run_blocking(_open_and_close, directory, self._ambient.monotonic_s)


def _target(directory: Path, reference: StoreReference) -> Path:
    """Where a store goes. Names of tasks and stores are made safe as in keys: they come from the store."""
    return directory / encode_component(reference.task) / encode_component(reference.store)


def _rocksdb_dirs(directory: Path) -> list[Path]:
    return [
        Path(path)
        for path, _, names in os.walk(directory)
        if "CURRENT" in names and any(name.startswith("MANIFEST-") for name in names)
    ]


def _open_and_close(directory: Path, monotonic_s: Callable[[], float]) -> float:
    """Open a store in raw mode, for reading only; how long until it could be read."""
    began_s = monotonic_s()
    with StoreReader.open(directory, _OPENING):
        return monotonic_s() - began_s


class _Adding:
    """Progress of one of several restores: what there is to do was told before."""

    def __init__(self, whole: Progress) -> None:
        self._whole = whole

    def total(self, *, files: int, bytes_: int) -> None:
        """Known already."""

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        """So much more is done."""
        self._whole.add(files=files, bytes_=bytes_)

"""Whether everything that a streaming checkpoint has committed is there and is what was written (design 0005, 4).

Three moves, so that the middle one can be spread over executors: `begin_check` reads the logs and says which stores
there are, `stores.check_store` reads one, `finish_check` puts it together. Each looks again at what a running query has
moved.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded
from blobstore.opening import StoreSettings
from engine.checkpoint.check.logs import LogsChecked, check_logs
from engine.checkpoint.check.stores import StoreWork, check_store
from engine.checkpoint.findings import CheckLevel, CheckReport, StoreChecked
from engine.clock import Runtime
from engine.progress import NO_PROGRESS, Progress
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import StreamingCheckpoint

# How often logs that a running query has moved are read again.
_LOOKS_MAX = 3


class CheckPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to check."""

    level: CheckLevel
    logs: LogsChecked
    began_s: float

    @property
    def stores(self) -> tuple[StoreWork, ...]:
        return self.logs.stores


async def check_checkpoint(
    location: str | Path | BlobStore,
    *,
    store_settings: StoreSettings | None = None,
    scratch: Path | None = None,
    level: CheckLevel = "full",
    stores_at_once: int = 4,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> CheckReport:
    """Check a checkpoint; nothing in it changes, and its query may run meanwhile.

    Args:
        location: Of the checkpoint: a path, a URL as `open_store` takes it, or a store.
        store_settings: Of the store that is opened.
        scratch: Where private directories are made, of the size of `stores_at_once` stores; None: where this machine
            keeps such files.
        level: `quick` leaves out the content of SSTs, and loading the newest version.
        stores_at_once: How many.
        progress: Hears of stores, as files, and of bytes.
        runtime: The clock.

    Raises:
        NotFoundError: There is no checkpoint here.
        ProviderError: Its state is not RocksDB's (K8).
        TargetError: The scratch directory cannot be written, or this machine lacks what it takes to read a file.
        StoreError: The store did not answer.
    """
    runtime = runtime or Runtime()
    root = await CheckpointDir.open(location, settings=store_settings)
    try:
        plan = await begin_check(root, level=level, runtime=runtime)
        progress.total(files=len(plan.stores), bytes_=0)

        async def check(work: StoreWork) -> StoreChecked:
            checked = await check_store(root, work, scratch=scratch, level=level)
            progress.add(files=1, bytes_=checked.size_bytes)
            return checked

        checked = await map_bounded(check, plan.stores, in_flight_max=stores_at_once)
        return await finish_check(root, plan, checked, runtime=runtime)
    finally:
        await root.close()


async def begin_check(root: CheckpointDir, *, level: CheckLevel, runtime: Runtime) -> CheckPlan:
    """Read the logs."""
    began_s = runtime.monotonic_s()
    return CheckPlan(level=level, logs=await check_logs(root), began_s=began_s)


async def finish_check(
    root: CheckpointDir, plan: CheckPlan, checked: Iterable[StoreChecked], *, runtime: Runtime
) -> CheckReport:
    """Put together what came of the logs and of all stores.

    What a query has deleted since the logs were listed is not a finding: if it has gone on, they are read again.
    """
    logs = plan.logs
    stores = tuple(checked)
    for _ in range(_LOOKS_MAX):
        if not logs.findings or await StreamingCheckpoint(root).committed_batches() == logs.batches:
            break
        logs = await check_logs(root)
    findings = [*logs.findings, *(finding for store in stores for finding in store.findings)]
    return CheckReport(
        location=root.location,
        level=plan.level,
        query_id=logs.query_id,
        oldest_batch=min(logs.batches, default=-1),
        newest_batch=max(logs.batches, default=-1),
        batches=len(logs.batches),
        stores=len(stores),
        findings=tuple(sorted(findings, key=lambda finding: (finding.kind, finding.path))),
        versions=sum(store.versions for store in stores),
        versions_gone=sum(store.versions_gone for store in stores),
        files=logs.files + sum(store.files for store in stores),
        size_bytes=sum(store.size_bytes for store in stores),
        ssts=sum(store.ssts for store in stores),
        blocks=sum(store.blocks for store in stores),
        keys=sum(max(0, store.keys) for store in stores),
        seconds=runtime.monotonic_s() - plan.began_s,
    )

"""Pictures of checkpoints, taken with nothing but a copy of the right files and a backup (design 0005, P1 to P8)."""

import shutil
from pathlib import Path

from engine.backup import BackupResult
from engine.repository import Repository
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.file_manager import StateFileManager
from engine.state.streaming_checkpoint import (
    QueryAt,
    StoreAt,
    StreamingCheckpoint,
    open_query_state,
)
from index.log import Commit
from index.model import LineageItem, Scope
from index.picture import QUERY_STORE, QUERY_TASK, Picture, StoreId
from index.state_names import changelog_name, checksum_name, snapshot_name

Rows = dict[tuple[str, bytes], bytes]


async def take_picture(
    repository: Repository, checkpoint: Path, scratch: Path, *, job: str = "query", batch: int | None = None
) -> Commit:
    """A picture of a checkpoint that nobody works in, after a batch; the newest if none is given."""
    opened = await StreamingCheckpoint.open(checkpoint)
    query, query_id = await opened.at(batch), await opened.query_id()
    await opened.close()
    scope, version = Scope(job), query.batch + 1
    results: list[BackupResult] = []
    oldest = 0
    for store in query.stores:
        staged = scratch / f"{job}-{query.batch}" / store.id.path
        base, lineage = await _stage_store(checkpoint / store.id.path, store, staged)
        oldest = max(oldest, base - 1)
        results.append(
            await repository.backup(
                scope,
                staged,
                task=store.id.task,
                store=store.id.store,
                version=version,
                unique_id=store.at.unique_id,
                lineage=lineage,
            )
        )
    staged = scratch / f"{job}-{query.batch}" / "query"
    _stage_query(checkpoint, staged, query, oldest)
    results.append(
        await repository.backup(scope, staged, task=QUERY_TASK, store=QUERY_STORE, version=version, lineage=())
    )
    picture = Picture(query_id=query_id, batch=query.batch, oldest_batch=oldest, location=str(checkpoint))
    return await repository.commit(scope, results, version=version, offsets=picture.encode())


async def _stage_store(directory: Path, store: StoreAt, staged: Path) -> tuple[int, tuple[LineageItem, ...]]:
    manager = StateFileManager(await CheckpointDir.open(directory), codec=store.settings.codec)
    resolution = await manager.resolve(store.at.version, store.at.unique_id)
    names = [changelog_name(of) for of in resolution.changelogs]
    if resolution.base is not None:
        names.append(snapshot_name(resolution.base))
        metadata = (await manager.read_snapshot(resolution.base)).metadata
        names += [f"SSTs/{file.stored_name}" for file in metadata.sst_files]
        names += [f"logs/{file.stored_name}" for file in metadata.log_files]
    await manager.close()
    names += [checksum_name(name) for name in names if (directory / checksum_name(name)).exists()]
    names += ["_metadata/schema"] if (directory / "_metadata/schema").exists() else []
    for name in names:
        _copy(directory / name, staged / name)
    base = 0 if resolution.base is None else resolution.base.version
    return base, resolution.lineage[:-1]


def _stage_query(checkpoint: Path, staged: Path, query: QueryAt, oldest: int) -> None:
    _copy(checkpoint / "metadata", staged / "metadata")
    for log, batches in (
        ("commits", range(oldest, query.batch + 1)),
        ("offsets", range(max(0, oldest - 1), query.batch + 2)),
    ):
        for batch in batches:
            if (checkpoint / log / str(batch)).exists():
                _copy(checkpoint / log / str(batch), staged / log / str(batch))
    patterns = ("sources/**/*", "state/*/_metadata/**/*", "state/*/_stateSchema/**/*")
    for path in sorted(path for pattern in patterns for path in checkpoint.glob(pattern)):
        if path.is_file() and not path.name.startswith("."):
            _copy(path, staged / path.relative_to(checkpoint))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


async def rows_of(checkpoint: Path, scratch: Path, *, batch: int | None = None) -> dict[StoreId, Rows]:
    """Every row of every store of a checkpoint after a batch."""
    opened = await StreamingCheckpoint.open(checkpoint)
    query = await opened.at(batch)
    await opened.close()
    found: dict[StoreId, Rows] = {}
    for number, store in enumerate(query.stores):
        state = await open_query_state(
            checkpoint,
            scratch / f"rows-{number}",
            batch=query.batch,
            operator=store.id.operator,
            partition=store.id.partition,
            store=store.id.store,
        )
        async with state:
            families = state.families
            found[store.id] = {(f, key): value for f in families for key, value in state.items(family=f)}
    return found

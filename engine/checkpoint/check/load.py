"""Loads the newest version of a store as a task would, and counts its base (design 0005, K5)."""

from pathlib import Path

import msgspec

from blobstore.concurrency import run_blocking
from engine.clock import SystemRuntime
from engine.state.files import StateFileManager
from engine.state.load import StateLoader
from engine.state.local_files import WorkingDir
from engine.state.replay import KeyCounts, count_store
from engine.state.settings import StateStoreSettings
from engine.state.sources import StateFiles
from index.errors import StateMetadataError
from index.spark.lineage import Resolution
from index.spark.metadata import NOT_COUNTED, StateMetadata
from index.spark.names import snapshot_name


async def check_load(
    files: StateFiles,
    resolution: Resolution,
    metadata: StateMetadata | None,
    settings: StateStoreSettings,
    directory: Path,
) -> tuple[int, str]:
    """Build a version and compare the keys of its base with what the snapshot says of them.

    Args:
        files: Of the store; every one that the version takes has passed on its own.
        resolution: What the version is made of.
        metadata: Of its base; None if it starts from nothing.
        settings: Of the store.
        directory: A working directory, private to this call. It takes the size of the version.

    Returns:
        How many keys the base has, internal ones not counted, 0 without one; and what is doubtful about their number.

    Raises:
        StateMetadataError: The snapshot says that there are more.
        EngineError, FormatError: The version does not load, whatever its files say one by one.
    """
    # Another snapshot in the place of the one that is to be looked at would prove nothing.
    settings = msgspec.structs.replace(settings, snapshot_repair=False)
    runtime = SystemRuntime()
    manager = StateFileManager(files, settings, runtime=runtime)
    place = await run_blocking(WorkingDir.open, directory)
    try:
        loader = StateLoader(manager, place, settings, runtime)
        keys, doubt = 0, ""
        if resolution.base is not None and metadata is not None:
            state, _ = await loader.load(resolution.base, {}, read_only=True)
            try:
                is_internal = state.families.is_internal if settings.column_families else None
                counted = await run_blocking(count_store, state.db, is_internal)
            finally:
                await run_blocking(state.db.close)
            doubt = check_counts(metadata, counted, subject=snapshot_name(resolution.base))
            keys = counted.keys
        if resolution.changelogs:
            state, _ = await loader.load(resolution.target, {}, read_only=True)
            await run_blocking(state.db.close)
        return keys, doubt
    finally:
        await run_blocking(place.close)


def check_counts(metadata: StateMetadata, counted: KeyCounts, *, subject: str) -> str:
    """Compare what was counted with what a snapshot says, each number on its own; one that it lacks is as it should be.

    Returns:
        Where there are more keys than it says, that; a query may have miscounted, and nothing is missing.

    Raises:
        StateMetadataError: There are fewer.
    """
    internal = metadata.num_internal_keys
    keys_least = keys_most = counted.keys
    if internal == NOT_COUNTED:
        # Spark 4.0 does not say which column families are internal, nor whether it counted them.
        keys_least, keys_most = 0, counted.keys + counted.internal_keys
    found = [
        (said, there, said > most)
        for said, least, most, there in (
            (metadata.num_keys, keys_least, keys_most, f"keys, and it has {keys_most}"),
            (internal, counted.internal_keys, counted.internal_keys, f"internal ones, and has {counted.internal_keys}"),
        )
        if said != NOT_COUNTED and not least <= said <= most
    ]
    told = "says that it has " + "; ".join(f"{said} {there}" for said, there, _ in found)
    if any(is_lacking for _, _, is_lacking in found):
        hint = "rows are missing, though every block is what was written; restore an older batch"
        raise StateMetadataError(told, subject=subject, hint=hint)
    return told if found else ""

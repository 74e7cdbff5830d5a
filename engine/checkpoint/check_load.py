"""Loads the newest version of a store as a task would, and counts its base (design 0005, K5)."""

from pathlib import Path

import msgspec

from blobstore.local_files import run_blocking
from engine.clock import SystemAmbient
from engine.state.file_manager import StateFileManager
from engine.state.files import StateFiles
from engine.state.load import StateLoader
from engine.state.replay import KeyCounts, count_store
from engine.state.settings import StateStoreSettings
from engine.state.working_dir import WorkingDir
from index.errors import StateMetadataError
from index.lineage import Resolution
from index.state_metadata import NOT_COUNTED, StateMetadata
from index.state_names import snapshot_name


async def check_load(
    files: StateFiles,
    resolution: Resolution,
    metadata: StateMetadata | None,
    settings: StateStoreSettings,
    directory: Path,
) -> int:
    """Build a version and compare the keys of its base with what the snapshot says of them.

    Args:
        files: Of the store; every one that the version takes has passed on its own.
        resolution: What the version is made of.
        metadata: Of its base; None if it starts from nothing.
        settings: Of the store.
        directory: A working directory, private to this call. It takes the size of the version.

    Returns:
        How many keys the base has, internal ones not counted; 0 without one.

    Raises:
        StateMetadataError: The snapshot says another number.
        EngineError, FormatError: The version does not load, whatever its files say one by one.
    """
    # Another snapshot in the place of the one that is to be looked at would prove nothing.
    settings = msgspec.structs.replace(settings, snapshot_repair=False)
    ambient = SystemAmbient()
    manager = StateFileManager(files, codec=settings.codec, file_checksums=settings.file_checksums, ambient=ambient)
    place = await run_blocking(WorkingDir.open, directory)
    try:
        loader = StateLoader(manager, place, settings, ambient)
        keys = 0
        if resolution.base is not None and metadata is not None:
            state, _ = await loader.load(resolution.base, {}, read_only=True)
            try:
                is_internal = state.families.is_internal if settings.column_families else None
                counted = await run_blocking(count_store, state.db, is_internal)
            finally:
                await run_blocking(state.db.close)
            check_counts(metadata, counted, subject=snapshot_name(resolution.base))
            keys = counted.keys
        if resolution.changelogs:
            state, _ = await loader.load(resolution.target, {}, read_only=True)
            await run_blocking(state.db.close)
        return keys
    finally:
        await run_blocking(place.close)


def check_counts(metadata: StateMetadata, counted: KeyCounts, *, subject: str) -> None:
    """Compare what was counted with what a snapshot says; what it does not say is as it should be.

    Raises:
        StateMetadataError: They differ.
    """
    said = (metadata.num_keys, metadata.num_internal_keys)
    if NOT_COUNTED in said or said == (counted.keys, counted.internal_keys):
        return
    raise StateMetadataError(
        f"says that it has {said[0]} keys and {said[1]} internal ones, and it has {counted.keys} and "
        f"{counted.internal_keys}",
        subject=subject,
        hint="rows are missing or too many, though every block is what was written; restore an older batch",
    )

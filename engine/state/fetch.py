"""Making a working directory hold exactly the files of a snapshot (design 0004, C1)."""

from pathlib import Path

from blobstore.concurrency import map_bounded, run_blocking
from blobstore.errors import BlobNotFoundError
from engine.errors import DamagedError, TargetError, UnsafeSourceError
from engine.state.file_map import StateFileMap
from engine.state.file_metrics import FilesLoaded
from engine.state.files import StateFiles
from engine.state.local_files import ARCHIVE, local_path, look_at, remove_all_but, shared_path
from engine.state.zips import StateZip
from index.spark.metadata import StoredFile
from index.spark.names import StateVersion
from index.spark.sharing import LocalStateFile


async def fetch_snapshot(
    files: StateFiles, base: StateVersion, state: StateZip, directory: Path, known: StateFileMap, *, gets_max: int
) -> FilesLoaded:
    """Keep what is right, remove everything else, and fetch the rest.

    Args:
        files: Of the state store.
        base: The snapshot.
        state: Its zip.
        directory: The working directory; made if it is not there.
        known: What is known of its files; true afterwards, also of what is left if this fails.
        gets_max: Requests under way at once.

    Raises:
        DamagedError: A file of the snapshot is missing or has another size.
        TargetError: The directory cannot be written.
        StoreError: As the store says.
    """
    wanted = (*state.metadata.sst_files, *state.metadata.log_files)
    local = await run_blocking(_look_for, directory, wanted)
    kept = known.begin_load(base.version, local, wanted)
    await empty(directory, kept)
    await run_blocking(_write_zipped, directory, state)
    missing = [file for file in wanted if file.local_name not in kept]

    async def fetch(file: StoredFile) -> tuple[StoredFile, LocalStateFile]:
        return file, await _fetch_shared(files, base, file, directory)

    fetched = await map_bounded(fetch, missing, in_flight_max=gets_max)
    known.end_load(base.version, fetched)
    known.remember_named(base, [shared_path(file.stored_name) for file in wanted], None)
    return FilesLoaded(
        files_fetched=len(missing),
        files_reused=len(kept),
        bytes_fetched=sum(file.size_bytes for file in missing),
        zip_bytes=state.content_bytes,
    )


async def empty(directory: Path, kept: frozenset[str] = frozenset()) -> None:
    """Remove everything from a working directory but SSTs and archived WALs of these local names.

    Raises:
        TargetError: The directory cannot be written.
    """
    try:
        await run_blocking(remove_all_but, directory, kept)
    except OSError as error:
        raise TargetError(error.strerror or str(error), operation="load", subject=str(directory)) from error


async def _fetch_shared(files: StateFiles, base: StateVersion, file: StoredFile, directory: Path) -> LocalStateFile:
    path = shared_path(file.stored_name)
    target = local_path(directory, file.local_name)
    try:
        await files.fetch(path, target, size_bytes=file.size_bytes)
    except BlobNotFoundError as error:
        raise DamagedError(
            f"snapshot {base} names it, and it is not there",
            operation="load",
            subject=f"{files.location}/{path}",
            hint="it was deleted while it was needed; an older snapshot may be whole",
        ) from error
    return await run_blocking(look_at, target)


def _look_for(directory: Path, wanted: tuple[StoredFile, ...]) -> tuple[LocalStateFile, ...]:
    """Those of the wanted files that stand in the directory under their names, whatever they are."""
    found: list[LocalStateFile] = []
    for file in wanted:
        path = local_path(directory, file.local_name)
        try:
            if path.lstat().st_size == file.size_bytes:
                found.append(look_at(path))
        except (OSError, UnsafeSourceError):
            continue  # it is fetched
    return tuple(found)


def _write_zipped(directory: Path, state: StateZip) -> None:
    try:
        if state.metadata.log_files:
            (directory / ARCHIVE).mkdir(exist_ok=True)
        for name, content in state.files.items():
            (directory / name).write_bytes(content)
    except OSError as error:
        raise TargetError(error.strerror or str(error), operation="load", subject=str(directory)) from error

"""Files with a `.crc` beside them: Spark's file checksums, written and verified (Spark 4.1 and newer).

A file and its checksum are two files, and nothing makes them one. So a checksum is never there while the file beside it
may be another: it goes before the file is replaced, and a file that has none gets none when it is replaced by somebody
who cannot know who else writes it.

Source:
    Spark `ChecksumCheckpointFileManager` (SPARK-51972, SPARK-54290), which writes and deletes both at once.
"""

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Final, TypeVar

from blobstore.concurrency import run_blocking
from blobstore.errors import BlobNotFoundError
from engine.clock import Runtime
from engine.errors import TargetError
from engine.local.hashing import crc32c
from engine.local.scan import READ_FLAGS
from engine.state.checkpoint_dir import READ_BYTES_MAX, CheckpointDir
from engine.state.files import StateFiles
from index.spark.checksums import (
    FILE_CHECKSUM_BYTES_MAX,
    FileChecksum,
    check_file_checksum,
    decode_file_checksum,
    encode_file_checksum,
)
from index.spark.names import checksum_name

# What a checksum says of who made it, where Spark names an executor.
CREATOR: Final = "tidemark"

_READ_BYTES: Final = 1024 * 1024

T = TypeVar("T")


async def publish_checked(
    directory: CheckpointDir,
    path: str,
    source: Path | bytes,
    *,
    overwrite: bool,
    runtime: Runtime,
    skip_where_missing: bool = True,
) -> int:
    """Publish a file and its checksum.

    Requests: one PUT for each. With `overwrite` also a question for each, and a DELETE of a checksum that is there.

    Args:
        directory: Where to.
        path: Of the file in it.
        source: Its content: bytes, or a local file that nobody changes.
        overwrite: Whether it may replace one that is there.
        runtime: Tells the time that the checksum says.
        skip_where_missing: With `overwrite`: a file that is there without a checksum is replaced by one without.

    Returns:
        How many bytes the file has.

    Raises:
        CheckpointFileExistsError: Without `overwrite`: a file is there. It is unchanged, as is its checksum.
        CheckpointUnknownError: The store never said whether it took one of the two.
        OSError: The source cannot be read.
        StoreError: The store did not take one of the two.
    """
    name = checksum_name(path)
    if overwrite:
        has_checksum = await directory.exists(name)
        if skip_where_missing and not has_checksum and await directory.exists(path):
            return await publish(directory, path, source, overwrite=True)
        if has_checksum:
            await directory.delete((name,))
    if isinstance(source, bytes):
        found, size_bytes = crc32c(source), len(source)
    else:
        found, size_bytes = await run_blocking(_read_crc32c, source)
    checksum = FileChecksum.of_file(
        crc32c=found, size_bytes=size_bytes, timestamp_ms=runtime.local_now_ms(), executor_id=CREATOR
    )
    data = encode_file_checksum(checksum)
    await publish(directory, path, source, overwrite=overwrite)
    # Only now, and not at the same time: where the name is taken, this would be the checksum of another file.
    await directory.publish_bytes(name, data, overwrite=overwrite)
    return size_bytes


async def publish(directory: CheckpointDir, path: str, source: Path | bytes, *, overwrite: bool) -> int:
    """Publish a file without a checksum, one request; as `publish_checked`."""
    if isinstance(source, bytes):
        await directory.publish_bytes(path, source, overwrite=overwrite)
        return len(source)
    return await directory.publish_file(path, source, overwrite=overwrite)


async def read_checked(files: StateFiles, path: str, *, size_bytes_max: int = READ_BYTES_MAX) -> bytes:
    """The content of a small file, verified if a checksum is there.

    Raises:
        BlobNotFoundError: There is no such file.
        FileChecksumError: It does not fit its checksum.
        UnknownFormatError: Its checksum is of another algorithm.
        DamagedError: It is larger than `size_bytes_max`, or its checksum is larger than any.
        StoreError: As the store says.
    """
    async with asyncio.TaskGroup() as both:
        reading = both.create_task(_outcome(files.read(path, size_bytes_max=size_bytes_max)))
        expecting = both.create_task(_outcome(_read_checksum(files, path)))
    data = _taken(reading.result())
    expected = _taken(expecting.result())
    if expected is not None:
        check_file_checksum(expected, crc32c=crc32c(data), size_bytes=len(data), subject=f"{files.location}/{path}")
    return data


async def fetch_checked(files: StateFiles, path: str, target: Path, *, size_bytes_max: int | None = None) -> int:
    """Copy a file to this machine, verified if a checksum is there: nothing of `target` is there before it is.

    Returns:
        How many bytes it has.

    Raises:
        BlobNotFoundError: There is no such file.
        DamagedError: It is larger than `size_bytes_max`, or its checksum is larger than any.
        FileChecksumError: It does not fit its checksum.
        UnknownFormatError: Its checksum is of another algorithm.
        TargetError: The target cannot be written.
        StoreError: As the store says.
    """
    # Cut by bytes: that is what a file system counts.
    unverified = target.with_name(f".{os.fsdecode(os.fsencode(target.name)[:200])}.unverified")
    try:
        async with asyncio.TaskGroup() as both:
            fetching = both.create_task(_outcome(files.fetch(path, unverified, size_bytes_max=size_bytes_max)))
            expecting = both.create_task(_outcome(_read_checksum(files, path)))
        size_bytes = _taken(fetching.result())
        expected = _taken(expecting.result())
        if expected is not None:
            found, found_bytes = await run_blocking(_read_crc32c, unverified)
            check_file_checksum(expected, crc32c=found, size_bytes=found_bytes, subject=f"{files.location}/{path}")
        await run_blocking(unverified.replace, target)
    except OSError as error:
        raise TargetError(error.strerror or str(error), operation="fetch", subject=str(target)) from error
    finally:
        await run_blocking(unverified.unlink, missing_ok=True)
    return size_bytes


async def _read_checksum(files: StateFiles, path: str) -> FileChecksum | None:
    name = checksum_name(path)
    try:
        data = await files.read(name, size_bytes_max=FILE_CHECKSUM_BYTES_MAX)
    except BlobNotFoundError:
        return None
    return decode_file_checksum(data, subject=f"{files.location}/{name}")


async def _outcome(work: Awaitable[T]) -> T | Exception:
    """The result or the error, so that two errors at once do not become a group of errors."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 — raised by `_taken`
        return error


def _taken(outcome: T | Exception) -> T:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _read_crc32c(path: Path) -> tuple[int, int]:
    """The CRC32C of a file, and its size. Blocks."""
    checksum = size_bytes = 0
    descriptor = os.open(path, READ_FLAGS)
    try:
        while chunk := os.pread(descriptor, _READ_BYTES, size_bytes):
            checksum = crc32c(chunk, checksum)
            size_bytes += len(chunk)
    finally:
        os.close(descriptor)
    return checksum, size_bytes

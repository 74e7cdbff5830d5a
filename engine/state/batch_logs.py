"""The offset log and the commit log of a streaming query: one file for each batch, published once and never changed.

What Spark's `HDFSMetadataLog` does for them. That two queries never both think that a batch is theirs is as good as
what publishes the files: here one atomic request (design 0004, B1).
"""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from blobstore.checkpoint_files import FileStatus
from blobstore.errors import BlobNotFoundError, CheckpointFileExistsError
from engine.errors import UsageError
from engine.state.checkpoint_dir import CheckpointDir
from index.snapshot.model import SIZE_BYTES_MAX
from index.spark.query_logs import (
    BatchCommit,
    BatchOffsets,
    decode_commit,
    decode_offsets,
    encode_commit,
    encode_offsets,
    parse_batch_name,
)

OFFSETS: Final = "offsets"
COMMITS: Final = "commits"

# Offsets of a source with very many partitions take megabytes.
ENTRY_BYTES_MAX: Final = 64 * 1024 * 1024

E = TypeVar("E")


class BatchLog(Generic[E]):
    """A directory with one file for each batch. Use `OffsetLog` or `CommitLog`.

    Args:
        directory: Where the files are; it need not exist.
        name: What to call the log in errors.
        encode: From an entry to the bytes of its file.
        decode: The way back; told what to call the file in errors.
    """

    def __init__(
        self, directory: CheckpointDir, name: str, encode: Callable[[E], bytes], decode: Callable[[bytes, str], E]
    ) -> None:
        self._directory = directory
        self._name = name
        self._encode = encode
        self._decode = decode

    async def add(self, batch: int, entry: E) -> bool:
        """Write the file of a batch, unless there is one.

        Costs one request.

        Returns:
            Whether this call wrote it. If not, nothing was changed: another query works on this checkpoint, or an
            earlier attempt of the caller got further than it knew. `get` tells which.

        Raises:
            CheckpointUnknownError: The store never said; `get` tells, once it answers.
            StoreError: It was not written.
            FormatError: The entry cannot be told in its version.
        """
        name = self._file_name(batch, "add")
        try:
            await self._directory.publish_bytes(name, self._encode(entry), overwrite=False)
        except CheckpointFileExistsError:
            return False
        return True

    async def get(self, batch: int) -> E | None:
        """What the file of a batch says; None if there is none. Costs one request.

        Raises:
            BatchLogError: It is not what Spark writes.
            UnknownFormatError: It is of a newer version (design 0004, B2).
        """
        name = self._file_name(batch, "get")
        try:
            data = await self._directory.read(name, size_bytes_max=ENTRY_BYTES_MAX)
        except BlobNotFoundError:
            return None
        return self._decode(data, f"{self._name}/{name}")

    async def batches(self) -> tuple[int, ...]:
        """Every batch that has a file, ascending. Costs one list."""
        found = map(_batch_of, await self._directory.list())
        return tuple(sorted(batch for batch in found if batch is not None))

    async def latest(self) -> tuple[int, E] | None:
        """The newest batch and what its file says; None if there is none.

        Raises:
            FormatError: As `get`. An older batch is never taken for a newer one that cannot be read.
        """
        batches = await self.batches()
        if not batches:
            return None
        entry = await self.get(batches[-1])
        # Only a purge that ran meanwhile can have taken it, and a purge leaves the newest.
        return None if entry is None else (batches[-1], entry)

    def _file_name(self, batch: int, operation: str) -> str:
        if not 0 <= batch < SIZE_BYTES_MAX:
            raise UsageError(f"{batch} is no batch", operation=operation, subject=self._name)
        return str(batch)


class OffsetLog(BatchLog[BatchOffsets]):
    """`offsets/`: what each batch reads. Written before the batch."""

    def __init__(self, directory: CheckpointDir) -> None:
        super().__init__(directory, OFFSETS, encode_offsets, lambda data, name: decode_offsets(data, subject=name))


class CommitLog(BatchLog[BatchCommit]):
    """`commits/`: which batches are done, and under which ids their state is kept (design 0004, B3)."""

    def __init__(self, directory: CheckpointDir) -> None:
        super().__init__(directory, COMMITS, encode_commit, lambda data, name: decode_commit(data, subject=name))


def _batch_of(status: FileStatus) -> int | None:
    """The batch that a file is of; None for a directory and for what is none of Spark's."""
    return None if status.is_directory else parse_batch_name(status.name)

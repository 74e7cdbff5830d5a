"""What the file manager of a state store reads from: a directory, or a snapshot index of one (design 0004, R6)."""

from pathlib import Path
from typing import Protocol, runtime_checkable

from typing_extensions import override

from blobstore.errors import InvalidRequestError
from engine.errors import DamagedError
from engine.state.checkpoint_dir import READ_BYTES_MAX, CheckpointDir
from index.snapshot.model import LineageItem
from index.spark.names import StateVersion


@runtime_checkable
class StateFiles(Protocol):
    """The files of one state store. Paths are names in its directory, or `SSTs/<name>` and `logs/<name>`."""

    @property
    def location(self) -> str:
        """What errors call it."""
        ...

    @property
    def is_writable(self) -> bool:
        """Whether it is a directory, `DirectoryStateFiles`, and not a backup of one."""
        ...

    async def names(self) -> tuple[str, ...]:
        """The names of the files that stand directly in the directory; none if there is no directory."""
        ...

    async def read(self, path: str, *, size_bytes_max: int = READ_BYTES_MAX) -> bytes:
        """The content of a small file.

        Raises:
            BlobNotFoundError: There is no such file.
            DamagedError: It is larger than `size_bytes_max`, and so not what it has to be.
            StoreError: As the store says.
        """
        ...

    async def fetch(
        self, path: str, target: Path, *, size_bytes: int | None = None, size_bytes_max: int | None = None
    ) -> int:
        """Copy a file to this machine, whole or not at all.

        Args:
            path: Of the file.
            target: Its new name; replaced if it is there. Its directory exists.
            size_bytes: What it has to have; None if that is not known.
            size_bytes_max: What it may have; None for any size.

        Returns:
            How many bytes it has.

        Raises:
            BlobNotFoundError: There is no such file.
            DamagedError: It is not what it has to be.
            TargetError: The target cannot be written.
            StoreError: As the store says.
        """
        ...

    def known_lineage(self, of: StateVersion) -> tuple[LineageItem, ...] | None:
        """What the header of this changelog says, where that is known without reading it; None where it is not."""
        ...

    async def close(self) -> None:
        """Release what was opened for it."""
        ...


class DirectoryStateFiles(StateFiles):
    """The directory of a state store.

    Args:
        directory: Where it is; closed with this object.

    Attributes:
        directory: The same, for whoever writes.
    """

    def __init__(self, directory: CheckpointDir) -> None:
        self.directory = directory

    @property
    @override
    def location(self) -> str:
        return self.directory.location

    @property
    @override
    def is_writable(self) -> bool:
        return True

    @override
    async def names(self) -> tuple[str, ...]:
        return tuple(status.name for status in await self.directory.list() if not status.is_directory)

    @override
    async def read(self, path: str, *, size_bytes_max: int = READ_BYTES_MAX) -> bytes:
        try:
            return await self.directory.read(path, size_bytes_max=size_bytes_max)
        except InvalidRequestError as error:
            # Names are checked long before: it is the size that no caller can do anything about.
            raise DamagedError(
                f"is larger than the {size_bytes_max} bytes that are read of it",
                operation="load",
                subject=f"{self.location}/{path}",
                hint="it is not what its name says; an older version may be whole",
            ) from error

    @override
    async def fetch(
        self, path: str, target: Path, *, size_bytes: int | None = None, size_bytes_max: int | None = None
    ) -> int:
        return await self.directory.fetch(path, target, size_bytes=size_bytes, size_bytes_max=size_bytes_max)

    @override
    def known_lineage(self, of: StateVersion) -> tuple[LineageItem, ...] | None:
        return None  # a listing knows names only

    @override
    async def close(self) -> None:
        await self.directory.close()


def as_state_files(files: StateFiles | CheckpointDir) -> StateFiles:
    """A directory as what it is to a state store; anything else as it is."""
    return DirectoryStateFiles(files) if isinstance(files, CheckpointDir) else files

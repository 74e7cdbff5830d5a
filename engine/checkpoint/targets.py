"""Where a restored checkpoint is put: what may stand there before, and how all of it appears at once (R3 and R4)."""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from blobstore.base import BlobStore
from blobstore.concurrency import run_blocking
from engine.clock import Runtime
from engine.errors import TargetError
from engine.restore.staging import Staging
from index.snapshot.model import FilePath
from index.text import iso_time

_NOT_IN_NAMES: Final = re.compile(r"[^0-9TZ]")


class CheckpointTarget(Protocol):
    """A place for a checkpoint, from `open` to `close`.

    Attributes:
        location: What people call it.
        root: What the paths in the checkpoint begin with: an absolute path, or `s3://bucket/prefix`.
        moved_aside: Where what stood there is now; "" if nothing did, or it stands there still.
    """

    location: str
    root: str
    moved_aside: str

    @property
    def directory(self) -> Path:
        """Where the checkpoint is gathered, on this machine, from `open` on."""
        ...

    async def place(self) -> tuple[str, ...]:
        """Where it is, as `BlobStore.place`."""
        ...

    async def check(self, query_id: str, batch: int) -> None:
        """Refuse a target that may not be restored to; nothing is changed.

        Args:
            query_id: Whose checkpoint is to come.
            batch: The newest batch that it will have.

        Raises:
            TargetError: It has content that may not be moved aside.
        """
        ...

    async def open(self, query_id: str, batch: int) -> None:
        """Claim the target, as `check`."""
        ...

    async def publish(self, published: Iterable[str] = ()) -> None:
        """Put what was gathered at the target; what stood there is `moved_aside` then.

        Args:
            published: What others have put there already, as paths of the checkpoint.

        Raises:
            TargetError: The target has changed meanwhile, or cannot be written.
            StoreError: As the store says.
        """
        ...

    async def close(self) -> tuple[str, ...]:
        """Remove what was gathered; once is enough.

        Returns:
            What could not be removed.
        """
        ...


class DirectoryTarget:
    """A directory, built beside its place and renamed into it (R3)."""

    def __init__(self, path: Path, runtime: Runtime, *, move_aside: bool) -> None:
        path = path.absolute()
        self.location = self.root = str(path)
        self._move_aside = move_aside
        self._path = path
        aside = f"{path.name}.aside-{moment(runtime)}" if move_aside else ""
        self._staging = Staging(path, runtime.session(), replace=move_aside, aside=aside)
        self._aside = path.parent / aside
        self.moved_aside = ""
        self._is_closed = False

    @property
    def directory(self) -> Path:
        """Beside the target, private until it is complete."""
        return self._staging.directory

    async def place(self) -> tuple[str, ...]:
        """As `CheckpointTarget.place`."""
        return "file", *(await run_blocking(self._path.resolve)).parts

    async def check(self, query_id: str, batch: int) -> None:  # noqa: ARG002  (a directory is replaced as a whole)
        """As `CheckpointTarget.check`."""
        if not self._move_aside and await run_blocking(_has_content, self._path):
            raise TargetError(
                "is a directory with content",
                operation="restore",
                subject=self.location,
                hint="restore to a new place, or have it moved aside",
            )

    async def open(self, query_id: str, batch: int) -> None:
        """As `CheckpointTarget.open`."""
        await self.check(query_id, batch)
        await run_blocking(self._staging.open)

    async def publish(self, published: Iterable[str] = ()) -> None:  # noqa: ARG002  (they are in the directory)
        """As `CheckpointTarget.publish`."""
        try:
            await run_blocking(lambda: self._staging.publish(dirs_below(self.directory), {}))
        finally:
            # After an error it is back, unless that failed too.
            if self._staging.replaces and await run_blocking(self._aside.exists):
                self.moved_aside = str(self._aside)

    async def close(self) -> tuple[str, ...]:
        """As `CheckpointTarget.close`."""
        if not self._is_closed:
            self._is_closed = True
            await run_blocking(self._staging.close)
        return tuple(self._staging.leftovers)


def moment(runtime: Runtime) -> str:
    """Now, in the name of what is moved aside: by this machine's clock, as it is for people only."""
    return _NOT_IN_NAMES.sub("", iso_time(runtime.local_now_ms()))


async def check_apart(target: CheckpointTarget, repository: BlobStore) -> None:
    """Refuse a target that is the place of the repository, above it or below it: moved aside, it would be lost.

    Raises:
        TargetError: It is.
    """
    ours, theirs = await target.place(), await run_blocking(repository.place)
    if ours and theirs and all(one == other for one, other in zip(ours, theirs, strict=False)):
        where = "above" if len(ours) < len(theirs) else "below" if len(ours) > len(theirs) else "at"
        raise TargetError(
            f"is {where} the place of the repository itself",
            operation="restore",
            subject=target.location,
            hint="restore to a place beside the repository",
        )


def _has_content(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        return next(entries, None) is not None
    return False


def dirs_below(root: Path) -> list[FilePath]:
    """Every directory below one, parents first."""
    found = [Path(directory, name).relative_to(root) for directory, names, _ in os.walk(root) for name in names]
    return sorted((path.parts for path in found), key=len)

"""The fresh directory of a rehearsal: made with room for all stores, and removed at the end (design 0009, R2)."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from blobstore.concurrency import run_blocking
from engine.clock import Runtime
from engine.errors import TargetError
from engine.restore.staging import remove_tree, target_errors
from index.plan.commits import Commit

SCRATCH_PREFIX: Final = "tidemark-rehearsal-"


@asynccontextmanager
async def scratch_directory(
    scratch: Path | None, commit: Commit, runtime: Runtime, *, keep: bool
) -> AsyncIterator[Path | None]:
    """A fresh directory with room for a commit, which is removed at the end unless all went well and it is kept.

    If an error ends the block and the directory does not go, a note on the error names it.

    Args:
        scratch: Where it is made; None: there is none.
        commit: What it has room for.
        runtime: Names it.
        keep: Leave it where it is if all went well.

    Raises:
        TargetError: The scratch directory is not there, cannot be used, or has no room.
    """
    if scratch is None:
        yield None
        return
    directory = await run_blocking(scratch.absolute) / f"{SCRATCH_PREFIX}{runtime.session()}"
    try:
        with target_errors(directory):
            await run_blocking(_make_with_room, directory, commit)
        yield directory
    except BaseException as error:
        if reason := await run_blocking(_remove, directory):
            error.add_note(f"could not be removed: {directory}: {reason}")
        raise
    if not keep:
        await run_blocking(_remove, directory)


def _make_with_room(directory: Path, commit: Commit) -> None:
    """Refuse before the first byte is fetched what the file system has no room for, all stores together.

    Raises:
        TargetError: There is no directory to make it in, or too little space is left.
    """
    # Never made: where a disk is not mounted, what is measured would be the disk of the root.
    if not directory.parent.is_dir():
        raise TargetError(
            "there is no such directory",
            operation="rehearse",
            subject=str(directory.parent),
            hint="see that its disk is mounted, or make it; or choose another one with --to",
        )
    directory.mkdir(mode=0o700)
    room = os.statvfs(directory)
    size_bytes = sum(store.size_bytes for store in commit.record.stores)
    files_count = sum(store.files_count for store in commit.record.stores)
    # A file takes whole blocks: half a block more on average.
    needed_bytes = size_bytes + files_count * room.f_frsize // 2
    free_bytes = room.f_bavail * room.f_frsize
    if needed_bytes > free_bytes:
        raise TargetError(
            f"there is no room: needs {needed_bytes:,} bytes and {free_bytes:,} are free",
            operation="rehearse",
            subject=str(directory.parent),
            hint="choose another disk with --to, or rehearse with --to-nowhere",
        )


def _remove(directory: Path) -> str:
    """Remove as much of a directory as goes; why the rest stays, empty if all went."""
    remove_tree(directory, ignore_errors=True)
    try:
        # Once more, of what is left: now the first error is told.
        remove_tree(directory)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""

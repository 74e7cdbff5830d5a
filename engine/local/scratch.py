"""Private directories for the length of a block."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from blobstore.concurrency import acquired


@asynccontextmanager
async def scratch_dir(
    parent: Path | None = None, prefix: str = "tidemark-", *, may_stay: bool = False
) -> AsyncIterator[Path]:
    """Make a private directory for a block, in the system's place if there is no parent.

    OSError: it cannot be made, or removed again, unless it `may_stay`.
    """
    make = partial(tempfile.TemporaryDirectory, prefix=prefix, dir=parent, ignore_cleanup_errors=may_stay)
    async with acquired(make, tempfile.TemporaryDirectory[str].cleanup) as made:
        yield Path(made.name)

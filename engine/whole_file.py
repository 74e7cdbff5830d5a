"""A small file that is there whole or not at all, for whoever looks at it meanwhile."""

import contextlib
import tempfile
from pathlib import Path
from typing import Final

_READABLE: Final = 0o644


def write_whole(path: Path, data: bytes, *, for_all: bool = False) -> None:
    """Write a file, replacing an older one at once.

    Args:
        path: Where; its directory is there.
        data: All of it.
        for_all: Whether others than its owner may read it.

    Raises:
        OSError: It cannot be written; an older one is as it was.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "wb") as out:  # noqa: PTH123  (a descriptor, not a path)
            out.write(data)
        if for_all:
            Path(temporary).chmod(_READABLE)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise

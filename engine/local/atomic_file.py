"""A small file that is there whole or not at all, for whoever looks at it meanwhile."""

import contextlib
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, replacing an older one at once.

    Args:
        path: Where; its directory is there.
        data: All of it.

    Raises:
        OSError: It cannot be written; an older one is as it was.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "wb") as out:  # noqa: PTH123  (a descriptor, not a path)
            out.write(data)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise

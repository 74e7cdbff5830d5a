"""Copy local files, by the kernel where it can."""

import errno
import os
import stat
from pathlib import Path
from typing import Final

from blobstore.local.files import write_all_at
from engine.local.scan import NEW_FILE_FLAGS, opened

# How much one call copies: so much at most is copied after the other side of the copy went away.
_COPY_BYTES: Final = 64 * 1024 * 1024
_READ_BYTES: Final = 1024 * 1024
# What copy_file_range(2) answers between file systems that do not know each other, or on a kernel without it.
_CANNOT_COPY: Final = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM})


def copy_file(source: Path, target: Path) -> int:
    """Copy a regular file to a new name, which is not there yet; return its size in bytes.

    The blocks are shared where the file system can (reflink), but never the inode: what is written to one of the two
    files never shows in the other. OSError: ELOOP for a symbolic link, EISDIR or EINVAL for another kind of file.
    """
    with opened(source) as incoming:
        return copy_opened(incoming, source, target)


def copy_opened(incoming: int, source: Path, target: Path) -> int:
    """As `copy_file`, of a file that is open already; errors name it `source`."""
    if not stat.S_ISREG(os.fstat(incoming).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(source))
    copied = 0
    with opened(target, NEW_FILE_FLAGS) as outgoing:
        if hasattr(os, "copy_file_range"):
            try:
                while count := os.copy_file_range(incoming, outgoing, _COPY_BYTES, copied, copied):
                    copied += count
            except OSError as error:
                if error.errno not in _CANNOT_COPY:
                    raise
        # What is left: everything where the call is not known, and nothing, for the price of one read, where it is.
        # Some kernels copy nothing from a file system that makes up its files, and report success.
        while chunk := os.pread(incoming, _READ_BYTES, copied):
            write_all_at(outgoing, copied, chunk)
            copied += len(chunk)
    return copied

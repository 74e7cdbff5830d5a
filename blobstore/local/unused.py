"""Whether a directory is nobody's, so that a store may be made of it."""

import os
import re
import stat
from contextlib import suppress
from typing import Final

from blobstore.errors import InvalidRequestError
from blobstore.local.deleted import DELETED
from blobstore.local.dirs import StoreDirs
from blobstore.local.temp import TEMP, is_temp_name
from blobstore.local.ttl import TTL

# What `doctor` writes below.
_DOCTOR: Final = "doctor"
_DOCTORS: Final = re.compile(rf"{_DOCTOR}(/[0-9a-f]{{20}}(/.+)?)?")
# What mkfs(8) makes at the top of a file system.
_LOST_AND_FOUND: Final = "lost+found"


def check_unused(dirs: StoreDirs, operation: str) -> None:
    """Refuse a directory with anything in it but what a killed `init` or `doctor` leaves. Blocks.

    Raises:
        InvalidRequestError: It has.
    """
    with suppress(FileNotFoundError), dirs.opened("") as root:
        for parent, directories, names, opened in os.fwalk(".", dir_fd=root):
            within = parent.removeprefix(".").removeprefix("/")
            for name in (*directories, *names):
                path = f"{within}/{name}".removeprefix("/")
                mode = os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode
                if not _is_left(path, is_dir=stat.S_ISDIR(mode)):
                    raise InvalidRequestError(
                        f"the directory has something else in it: {path!r}",
                        operation=operation,
                        key=str(dirs.root),
                        hint="name an empty directory, or one to be made: a repository has its directory to itself",
                    )
            if not within and _LOST_AND_FOUND in directories:
                directories.remove(_LOST_AND_FOUND)  # is root's alone


def _is_left(path: str, *, is_dir: bool) -> bool:
    top, _, below = path.partition("/")
    if not below:
        return is_dir and top in {TEMP, TTL, DELETED, _DOCTOR, _LOST_AND_FOUND}
    if top == TEMP:
        return is_temp_name(below)
    return _DOCTORS.fullmatch(path if top == _DOCTOR else below) is not None

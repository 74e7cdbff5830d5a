"""The keys of a directory store in order, reading only the directories that the answer needs."""

import os
from collections.abc import Iterator

from blobstore.base import check_key
from blobstore.errors import InvalidRequestError
from blobstore.local.dirs import ReadDirs


def walk_keys(dirs: ReadDirs, prefix: str, start_after: str, *, links: bool = False) -> Iterator[str]:
    """Yield the keys that start with `prefix` and sort after `start_after`, in their order. Blocks.

    They are those of regular files, or with `links` those of symbolic links. Names that no key has are passed over:
    those with a leading dot, and whatever a person or a file system left there.
    """
    # A directory stands for all keys that start with its name and `/`, so it sorts as that: `a-b` is before `a/b`,
    # though `a` is before `a-b`. What is on top of the stack comes next.
    stack = _entries(dirs, prefix[: prefix.rfind("/") + 1], prefix, start_after, links=links)
    while stack:
        entry = stack.pop()
        if entry.endswith("/"):
            stack += _entries(dirs, entry, prefix, start_after, links=links)
        else:
            yield entry


def _entries(dirs: ReadDirs, directory: str, prefix: str, start_after: str, *, links: bool) -> list[str]:
    """Return the files and directories (with `/` at their end) of one directory that may matter, last one first."""
    found: list[str] = []
    descriptor = dirs.enter(directory.removesuffix("/"))
    if descriptor is None:
        return []
    with os.scandir(descriptor) as scan:
        for entry in scan:
            if not is_component(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                below = f"{directory}{entry.name}/"
                # All its keys come after `start_after`, or that is one of them.
                in_range = below > start_after or start_after.startswith(below)
                if in_range and (below.startswith(prefix) or prefix.startswith(below)):
                    found.append(below)
            elif entry.is_symlink() if links else entry.is_file(follow_symlinks=False):
                key = directory + entry.name
                if key > start_after and key.startswith(prefix):
                    found.append(key)
    found.sort(reverse=True)
    return found


def is_component(name: str) -> bool:
    """Return whether a name can be a component of a key."""
    try:
        check_key(name, "list_page")
    except InvalidRequestError:
        return False
    return True

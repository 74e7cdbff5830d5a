"""The keys of a directory store in order, reading only the directories that the answer needs."""

import os
from collections.abc import Iterator
from pathlib import Path

from blobstore.base import check_key
from blobstore.errors import InvalidRequestError


def walk_keys(root: Path, prefix: str, start_after: str) -> Iterator[str]:
    """Keys of regular files below `root` that start with `prefix` and sort after `start_after`, in their order. Blocks.

    Names that no key has are passed over: those with a leading dot, and whatever a person or a file system left there.
    """
    # A directory stands for all keys that start with its name and `/`, so it sorts as that: `a-b` is before `a/b`,
    # though `a` is before `a-b`. What is on top of the stack comes next.
    stack = _entries(root, prefix[: prefix.rfind("/") + 1], prefix, start_after)
    while stack:
        entry = stack.pop()
        if entry.endswith("/"):
            stack += _entries(root, entry, prefix, start_after)
        else:
            yield entry


def _entries(root: Path, directory: str, prefix: str, start_after: str) -> list[str]:
    """Files and directories (with `/` at their end) of one directory that may have something, last one first."""
    found: list[str] = []
    try:
        with os.scandir(root / directory) as scan:
            for entry in scan:
                if not _is_component(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    below = f"{directory}{entry.name}/"
                    # All its keys come after `start_after`, or that is one of them.
                    in_range = below > start_after or start_after.startswith(below)
                    if in_range and (below.startswith(prefix) or prefix.startswith(below)):
                        found.append(below)
                elif entry.is_file(follow_symlinks=False):
                    key = directory + entry.name
                    if key > start_after and key.startswith(prefix):
                        found.append(key)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found.sort(reverse=True)
    return found


def _is_component(name: str) -> bool:
    try:
        check_key(name, "list_page")
    except InvalidRequestError:
        return False
    return True

"""The directories of a directory store, opened without following a link (design 0002, S2), and the keys below them.

Every component below the root is opened by itself, relative to the directory above it, and must be a directory: so
nobody who may write to a part of the store leads a write, a rename or a deletion out of it. Descriptors are held for
one step only, so that a store that is moved, wiped or sent to another process needs no care.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from blobstore.base import check_key
from blobstore.errors import InvalidRequestError
from blobstore.local.files import make_durable, sync_dir

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# How many directories are remembered as durable.
_DURABLE_MAX: Final = 10_000


class StoreDirs:
    """Opens and makes the directories below a root. Blocks.

    Args:
        root: Made too, with its parents, where a directory is to be made. Links that lead to it are followed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        # Directories whose names this process has synced, all the way up to the root. Others may have been made by
        # a process that has not synced them yet.
        self._durable: set[str] = set()
        self._shared_mode: int | None = None

    @property
    def shared_mode(self) -> int:
        """Return the permissions that others than the owner get: those of the root, if its owner shares it.

        Permission to write for the group, or the set-group-ID bit, shares with the group; permission to write for
        everybody shares with everybody. What a umask leaves for reading shares nothing.
        """
        if self._shared_mode is None:
            with suppress(OSError):
                mode = self.root.stat().st_mode
                by_group = mode & (stat.S_IRWXG | stat.S_ISGID) if mode & (stat.S_IWGRP | stat.S_ISGID) else 0
                self._shared_mode = by_group | (mode & stat.S_IRWXO if mode & stat.S_IWOTH else 0)
        return self._shared_mode or 0

    def share(self, file: int) -> None:
        """Give others the permissions on a new file that they have on the root; the umask has no say."""
        if self.shared_mode:
            os.fchmod(file, 0o600 | self.shared_mode & 0o066)

    @contextmanager
    def opened(self, directory: str, *, make: bool = False) -> Iterator[int]:
        """Open a directory, by its path below the root, for the block.

        With `make` it and its parents are made unless they are there, and their names made durable.

        Raises:
            FileNotFoundError: It is not there.
            NotADirectoryError: A component is a file.
            OSError: With ELOOP where a component is a symbolic link.
        """
        descriptor = self._open(directory, make=make)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, directory: str, *, make: bool) -> int:
        try:
            at = os.open(self.root, _FLAGS)
        except FileNotFoundError:
            if not make:
                raise
            make_durable(self.root, 0o700)
            at = os.open(self.root, _FLAGS)
        path = ""
        for name in directory.split("/") if directory else ():
            path = f"{path}/{name}" if path else name
            try:
                below = self._enter(at, name, path, make=make)
            except OSError as error:
                error.filename = str(self.root / path)
                raise
            finally:
                os.close(at)
            at = below
        return at

    def _enter(self, above: int, name: str, path: str, *, make: bool) -> int:
        is_made, is_durable = False, path in self._durable
        try:
            found = _open_below(above, name)
        except FileNotFoundError:
            if not make:
                raise
            is_durable = False
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=above)
                is_made = True
            found = _open_below(above, name)
        with ExitStack() as undo:
            undo.callback(os.close, found)
            if is_made and self.shared_mode:
                # Not by its name, which a link may have by now.
                os.fchmod(found, 0o700 | self.shared_mode)
            if make and not is_durable:
                sync_dir(above)
                if len(self._durable) >= _DURABLE_MAX:
                    self._durable.clear()
                self._durable.add(path)
            undo.pop_all()
        return found


class ReadDirs:
    """Opens one directory after the other and keeps the last one open: what follows is mostly in it too. Blocks."""

    def __init__(self, dirs: StoreDirs) -> None:
        self._dirs = dirs
        self._stack = ExitStack()
        self._directory: str | None = None
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def enter(self, directory: str) -> int | None:
        """Open a directory, which stays open until the next call for another one; None if it is not there."""
        if directory != self._directory:
            self._stack.close()
            self._directory = self._descriptor = None
            with suppress(FileNotFoundError, NotADirectoryError):
                self._descriptor = self._stack.enter_context(self._dirs.opened(directory))
            self._directory = directory
        return self._descriptor

    def find(self, key: str) -> tuple[int, os.stat_result] | None:
        """Return the open directory of a key and what `lstat` says of its file; None if it has no regular file."""
        directory, name = split_key(key)
        opened = self.enter(directory)
        found = None if opened is None else read_regular(name, opened)
        return None if opened is None or found is None else (opened, found)


def _open_below(above: int, name: str) -> int:
    try:
        return os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=above)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def split_key(key: str) -> tuple[str, str]:
    """Split a key into its directory and its name there."""
    directory, _, name = key.rpartition("/")
    return directory, name


def read_regular(name: str, directory: int) -> os.stat_result | None:
    """Return what `lstat` says of a regular file; None if there is none of this name."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def walk_keys(dirs: ReadDirs, prefix: str, start_after: str, *, links: bool = False) -> Iterator[str]:
    """Yield the keys that start with `prefix` and sort after `start_after`, in their order. Blocks.

    They are those of regular files, or with `links` those of symbolic links. Names that no key has are passed over:
    those with a leading dot, and whatever a person or a file system left there.
    """
    # A directory represents all keys that start with its name and `/`, so it sorts as that: `a-b` is before `a/b`,
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

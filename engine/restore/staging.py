"""The place where a restore builds a directory, and the swap that puts it at its target, whole or not at all.

```
<parent>/<name>                          the target
<parent>/.<name>.tidemark-lock           held (flock) by the restore at work; gone when none is
<parent>/.<name>.tidemark-<session>/new  what is being built; private until it is complete
<parent>/.<name>.tidemark-old-<session>  what was at the target, between the two renames of the swap; always whole
<parent>/.<name>.tidemark-trash-<session>  the same once it is not needed any more, while it is being removed
```

With `exchange` the two directories change places by one call, and what was at the target is then in that of `new`.
A crash leaves at most the last four. The next holder of the lock knows that nobody works on them, and cleans up.
Everything here blocks and is made for a thread.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from blobstore.local.files import TOO_MANY_OPEN, TOO_MANY_OPEN_HINT, make_durable, sync_dir
from engine.errors import TargetBusyError, TargetError
from engine.local.scan import DIR_FLAGS, find_overlap, hold, opened
from index.snapshot.model import FilePath

# The lock's file may go between opening and locking it, once for every restore that ends just then.
LOCK_ATTEMPTS_MAX: Final = 16

_NEW: Final = "new"
_PERMISSIONS: Final = 0o7777
_PRIVATE: Final = 0o700
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_TAKEN: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
_HINTS: Final = {
    errno.EBUSY: "it is a mount point or in use: restore to a directory below it",
    errno.EXDEV: "a directory of a container's image cannot be replaced: restore to a volume, or to a new directory",
    **dict.fromkeys(TOO_MANY_OPEN, TOO_MANY_OPEN_HINT),
}
# Of renameat2(2): both names keep something at every moment (design 0011, F4). A directory that its owner may not write
# to does not move to another parent, but it can be renamed where it is.
_RENAME_EXCHANGE: Final = 2
# Of this process's mount namespace, a mount on each line; the fifth field is where.
_MOUNTS: Final = Path("/proc/self/mountinfo")
_CANNOT_EXCHANGE: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES})


class Staging:
    """One restore's claim on a target, from `open` to `close`.

    `session` distinguishes its names beside the target from those of others. With `replace` a directory with content
    may go: it gets, and keeps, the name `aside` beside the target, or is removed without one. With `exchange` it goes
    in the moment in which the new one comes, where the file system can do that.
    """

    def __init__(self, target: Path, session: str, *, replace: bool, aside: str = "", exchange: bool = False) -> None:
        self.target = target.absolute()
        # Whether the target is a directory with content, which the restore may replace.
        self.replaces = False
        # The directory that is being built, open; -1 before `open` and after `close`.
        self.descriptor = -1
        # Paths that could not be removed: of earlier restores after `open`, of this one after `close`.
        self.leftovers: list[str] = []
        self._may_replace = replace
        self._name = self.target.name
        self._lock_name = f".{self._name}.tidemark-lock"
        self._staging_name = f".{self._name}.tidemark-{session}"
        self._old_prefix = f".{self._name}.tidemark-old-"
        self._keeps_old = bool(aside)
        self._may_exchange = exchange and not aside
        self._old_name = aside or f"{self._old_prefix}{session}"
        self._trash_prefix = f".{self._name}.tidemark-trash-"
        # What dead restores had moved aside, and may be the only copy, whatever is at the target by now.
        self._kept: list[str] = []
        self._there: os.stat_result | None = None
        self._parent = self._staging = self._lock = -1
        self._made = self._moved_aside = self._exchanged = self._published = False

    @property
    def directory(self) -> Path:
        return self.target.parent / self._staging_name / _NEW

    def open(self) -> None:
        """Claim the target and make an empty private directory beside it.

        TargetError: the target is not a directory, has content that may not be replaced, is being restored to by
        somebody else, or cannot be written beside. Then `close` leaves everything as it was.
        """
        with target_errors(self.target):
            _check_named(self.target)
            make_durable(self.target.parent)
            self._parent = os.open(self.target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._lock = self._take_lock()
            self._clean_up()
            self._there, self.replaces = look_at_target(self.target, replace=self._may_replace, parent=self._parent)
            os.mkdir(self._staging_name, _PRIVATE, dir_fd=self._parent)
            self._made = True
            self._staging = os.open(self._staging_name, DIR_FLAGS, dir_fd=self._parent)
            # Files in it have the permissions that they will have; directories get theirs last, as `publish` says.
            os.mkdir(_NEW, _PRIVATE, dir_fd=self._staging)
            self.descriptor = os.open(_NEW, DIR_FLAGS, dir_fd=self._staging)

    def prepare(self, dirs: Sequence[FilePath], sizes_bytes: Sequence[int]) -> None:
        """Make directories in the one that is being built, parents first.

        Refuses with a `TargetError`, before the first byte is fetched, files that the file system has no space for.
        """
        with target_errors(self.target):
            if lack := find_lack_of_space(self.descriptor, sum(sizes_bytes), len(sizes_bytes)):
                aside = "".join(f", beside {self.target.parent / name}, moved aside before" for name in self._kept)
                raise _full(self.target, lack + aside)
            for path in dirs:
                os.mkdir("/".join(path), _PRIVATE, dir_fd=self.descriptor)

    def publish(self, dirs: Sequence[FilePath], modes: Mapping[FilePath, int]) -> None:
        """Put what was built at the target, durably. What was there goes, or comes back if that fails.

        `dirs` are all directories in it, parents first; every file in them is synced already. `modes` are permission
        bits of directories, the target's under (), which a directory that is there overrules; every other directory
        stays its owner's alone. TargetError: the target has changed since `open`, or the file system refuses.
        """
        with target_errors(self.target):
            # Descriptors follow a directory that is renamed: what is there by now may be in use.
            if not os.path.samestat(os.fstat(self._parent), self.target.parent.stat()):
                message, hint = "the directory above it was moved meanwhile", "see who moved it, then restore again"
                raise TargetError(message, operation="restore", subject=str(self.target), hint=hint)
            mode = modes.get((), _PRIVATE)
            if self._there is not None:
                # The new directory gets the mode, and where that is allowed the owner, of the one that it replaces.
                mode = self._there.st_mode & _PERMISSIONS
                with contextlib.suppress(PermissionError):
                    os.fchown(self.descriptor, self._there.st_uid, self._there.st_gid)
            for path in reversed(dirs):
                with opened("/".join(path), DIR_FLAGS, dir_fd=self.descriptor) as below:
                    if path in modes:
                        os.fchmod(below, modes[path])
                    sync_dir(below)
            # A directory moves to another parent only if its owner may write to it.
            os.fchmod(self.descriptor, mode | stat.S_IWUSR)
            sync_dir(self.descriptor)
            try:
                if self.replaces and self._may_exchange and self._exchange():
                    self._exchanged = True
                    self._check_moved_aside(os.stat(_NEW, dir_fd=self._staging, follow_symlinks=False))
                else:
                    if self.replaces:
                        self._rename(self._name, self._old_name)
                        self._moved_aside = True
                        self._check_moved_aside(self._stat(self._old_name))
                    # Onto nothing, or onto an empty directory: rename(2) refuses everything else.
                    os.rename(_NEW, self._name, src_dir_fd=self._staging, dst_dir_fd=self._parent)
                self._published = True
                os.fchmod(self.descriptor, mode)
                sync_dir(self.descriptor)
                sync_dir(self._parent)
            except (OSError, TargetError):
                try:
                    self._swap_back()
                except OSError as error:
                    if not (self._moved_aside or self._exchanged):
                        raise
                    message = f"what was there could not be put back, and is at {self.target.parent / self._old_name}"
                    hint = "see who else works there; then move it back, or restore again"
                    raise TargetError(message, operation="restore", subject=str(self.target), hint=hint) from error
                raise

    def close(self) -> None:
        """Remove what is not part of the target any more, and give the claim back.

        What was at the target before is removed only once the new directory is in its place. Once is enough.
        """
        if self._parent < 0:
            return
        if self._exchanged and not self._published:
            # What was at the target could not be put back: it stays beside it, as after two renames.
            self.leftovers.append(str(self.target.parent / self._old_name))
            os.rename(_NEW, self._old_name, src_dir_fd=self._staging, dst_dir_fd=self._parent)
        if self._made:
            self._remove(self._staging_name)
        if self._published:
            if self._moved_aside and not self._keeps_old:
                self._kept.append(self._old_name)
            self.remove_kept()
        if self._lock >= 0:
            try:
                os.unlink(self._lock_name, dir_fd=self._parent)
            except OSError:
                self.leftovers.append(str(self.target.parent / self._lock_name))
        descriptors = self.descriptor, self._staging, self._lock, self._parent
        self.descriptor = self._staging = self._lock = self._parent = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def remove_kept(self) -> None:
        """Remove what was moved aside, by dead restores too, unless there is nothing at the target.

        First it gets a name that no later restore brings back: half of it is of no use.
        """
        if not (self.replaces or self._published):
            return
        kept, self._kept = self._kept, []
        for name in kept:
            trash = self._trash_prefix + name.removeprefix(self._old_prefix)
            try:
                self._rename(name, trash)
                sync_dir(self._parent)
            except FileNotFoundError:
                continue
            except OSError:
                self.leftovers.append(str(self.target.parent / (trash if self._is_there(trash) else name)))
            else:
                self._remove(trash)

    def _take_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(LOCK_ATTEMPTS_MAX):
            try:
                # Its owner may be done with it between our opening and locking it.
                if (descriptor := hold(self._lock_name, flags, dir_fd=self._parent)) >= 0:
                    return descriptor
            except BlockingIOError as error:
                message = "another restore is at work here"
                raise TargetBusyError(message, operation="restore", subject=str(self.target)) from error
        raise TargetError("its lock keeps changing owners", operation="restore", subject=str(self.target))

    def _clean_up(self) -> None:
        """Remove what dead restores left. What one of them had moved aside comes back, if it may be of use."""
        pattern = re.compile(rf"\.{re.escape(self._name)}\.tidemark-(?:old-|trash-)?[0-9a-f]{{20}}")
        with os.scandir(self._parent) as entries:
            names = sorted(entry.name for entry in entries if pattern.fullmatch(entry.name))
        for name in names:
            if not name.startswith(self._old_prefix):
                self._remove(name)
            elif self._may_replace and not self._is_there(self._name):
                # An "old" without a target: that restore died between its two renames.
                self._rename(name, self._name)
            else:
                self._kept.append(name)

    def _exchange(self) -> bool:
        """Let the new directory and the one at the target change places; False: nothing here can do that."""
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is None:
            return False
        # As the renames of `os` do.
        sys.audit("os.rename", _NEW, self._name, self._staging, self._parent)
        name = os.fsencode(self._name)
        if renameat2(self._staging, _NEW.encode(), self._parent, name, _RENAME_EXCHANGE) == 0:
            return True
        number = ctypes.get_errno()
        if number in _CANNOT_EXCHANGE:
            return False
        raise OSError(number, os.strerror(number))

    def _check_moved_aside(self, moved: os.stat_result) -> None:
        if self._there is None or not os.path.samestat(moved, self._there):
            message = "has changed since the restore began: another directory is there"
            hint = "see who else works there, then restore again"
            raise TargetError(message, operation="restore", subject=str(self.target), hint=hint)

    def _swap_back(self) -> None:
        # First: what cannot be put back is not to be removed.
        was_published, self._published = self._published, False
        if self._exchanged:
            os.fchmod(self.descriptor, _PRIVATE)
            if not self._exchange():
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            self._exchanged = False
        elif was_published:
            os.fchmod(self.descriptor, _PRIVATE)
            os.rename(self._name, _NEW, src_dir_fd=self._parent, dst_dir_fd=self._staging)
        if self._moved_aside:
            self._rename(self._old_name, self._name)
            self._moved_aside = False

    def _stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._parent, follow_symlinks=False)

    def _is_there(self, name: str) -> bool:
        try:
            self._stat(name)
        except FileNotFoundError:
            return False
        return True

    def _rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._parent, dst_dir_fd=self._parent)

    def _remove(self, name: str) -> None:
        try:
            remove_tree(name, parent=self._parent)
        except FileNotFoundError:
            pass
        except (OSError, RecursionError):  # of what nests deep
            self.leftovers.append(str(self.target.parent / name))


def find_lack_of_space(directory: int | Path, size_bytes: int, files_count: int) -> str:
    """Return what the file system of a directory, or of its descriptor, lacks for some files; empty if nothing."""
    space = os.statvfs(directory)
    # A file takes whole blocks: half a block more on average, and never less than what it holds.
    needed_bytes = size_bytes + files_count * space.f_frsize // 2
    free_bytes = space.f_bavail * space.f_frsize
    if needed_bytes > free_bytes:
        return f"needs {needed_bytes:,} bytes and {free_bytes:,} are free"
    if space.f_files and files_count > space.f_favail:
        return f"needs {files_count:,} inodes and {space.f_favail:,} are free"
    return ""


def remove_tree(name: str | Path, *, parent: int | None = None, ignore_errors: bool = False) -> None:
    """Remove a directory and all below it, also where nobody may write to a directory, as to a restored one."""
    with contextlib.suppress(OSError):
        for *_, directory in os.fwalk(name, dir_fd=parent):
            with contextlib.suppress(PermissionError):
                os.fchmod(directory, _PRIVATE)
    shutil.rmtree(name, ignore_errors=ignore_errors, dir_fd=parent)


def look_at_target(target: Path, *, replace: bool, parent: int | None = None) -> tuple[os.stat_result | None, bool]:
    """Look at a target: its stat, and whether it is a directory with content, which a restore would replace.

    Where the directory above it is open as `parent`, it is looked at from there. TargetError: it is not a directory,
    has content that may not be replaced, has something mounted on it or below, or cannot be looked at.
    """
    target = target.absolute()
    _check_named(target)
    name = str(target) if parent is None else target.name
    with target_errors(target):
        try:
            there = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None, False
        if not stat.S_ISDIR(there.st_mode):
            is_link = stat.S_ISLNK(there.st_mode)
            kind, hint = (
                ("a symbolic link", "name what it leads to") if is_link else ("not a directory", "name another")
            )
            raise TargetError(f"is {kind}", operation="restore", subject=str(target), hint=hint)
        if mounted := _find_mount(target):
            # Nothing takes the place of a mount point; and what is mounted below would be moved aside, and removed.
            hint = "restore to a directory below a mount point, and with none in it"
            raise TargetError(f"something is mounted on {mounted}", operation="restore", subject=str(target), hint=hint)
        with opened(name, DIR_FLAGS, dir_fd=parent) as descriptor, os.scandir(descriptor) as entries:
            has_content = next(entries, None) is not None
    if has_content and not replace:
        raise TargetError("is a directory with content", operation="restore", subject=str(target))
    return there, has_content


def _find_mount(directory: Path) -> str:
    """Return where something is mounted on a directory or below it; empty if nothing is, or the system does not say."""
    place = os.fsencode(os.path.realpath(directory))
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_bytes().split(b"\n")[:-1]:
            mounted = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), line.split(b" ")[4])
            if mounted == place or mounted.startswith(place + b"/"):
                return os.fsdecode(mounted)
    return ""


def check_apart(subject: str, ours: Sequence[str], theirs: Sequence[str], *, what: str = "repository") -> None:
    """Refuse a target whose place is that of what is read, above it or below it: replaced, it would be lost."""
    if where := find_overlap(ours, theirs):
        message, hint = f"is {where} the place of the {what} itself", f"choose a place beside the {what}"
        raise TargetError(message, operation="restore", subject=subject, hint=hint)


def _check_named(target: Path) -> None:
    if not target.name or target.name == "..":
        raise TargetError("is not a name for a directory", operation="restore", subject=str(target))


@contextmanager
def target_errors(path: Path) -> Iterator[None]:
    """Turn what the system says of a target into the `TargetError` that names it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise _full(path, reason) from error
        if error.errno in _TAKEN:
            message = f"somebody else writes there: {reason}"
            raise TargetError(message, operation="restore", subject=str(path)) from error
        hint = _HINTS.get(error.errno or 0, "see that this user may write there")
        raise TargetError(f"cannot be written: {reason}", operation="restore", subject=str(path), hint=hint) from error


def _full(path: Path, reason: str) -> TargetError:
    hint = "free some, or choose another disk"
    return TargetError(f"there is no space: {reason}", operation="restore", subject=str(path), hint=hint)

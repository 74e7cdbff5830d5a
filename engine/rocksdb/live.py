"""Copy a RocksDB that another process writes to, without its help (design 0012).

Nothing in its directory is changed or locked, and its LOCK is never opened (see `engine.rocksdb.lock`). What is read
there is hostile until it was checked. Everything here blocks and is made for a thread.
"""

import contextlib
import errno
import mmap
import os
import re
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from engine.errors import DamagedError, SourceChangedError, TargetError, UnsafeSourceError
from engine.local.checksums import crc32c
from engine.local.copy import copy_file, copy_opened
from engine.local.scan import READ_FLAGS, SourceDir, opened, opened_dir, special_error, unreadable_error
from engine.rocksdb.merge import CURRENT, MANIFEST_BYTES_MAX, read_current, sst_name
from index.rocksdb import manifest

# Each but the first has to link only what has come since the one before.
ATTEMPTS_MAX: Final = 1000

_LOG: Final = re.compile(r"[0-9]{6,20}\.log")
_OPTIONS: Final = re.compile(r"OPTIONS-[0-9]{6,20}")
# Of the second name of a log.
_HELD: Final = ".held"
_LOG_DIRECTORY: Final = re.compile(rb"^ *wal_dir=(.+)$", re.MULTILINE)
_OPTIONS_BYTES_MAX: Final = 16 * 1024 * 1024
# Other file systems, those of other owners (fs.protected_hardlinks), and those that know no links.
_CANNOT_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})
_CANNOT_WRITE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class LiveCopy(msgspec.Struct, frozen=True, kw_only=True):
    """What one copy took."""

    ssts: int
    # Of SSTs that could not be linked.
    bytes_copied: int
    # Whole records of write-ahead logs, and what is left of an older log in the file of one.
    log_bytes: int
    attempts: int


class _MovedOnError(Exception):
    """What was read is not of one time; `missing` was not there as the MANIFEST or CURRENT says."""

    def __init__(self, missing: str = "") -> None:
        super().__init__(missing)
        self.missing = missing


class LiveReader:
    """Takes copies of one RocksDB. It holds the MANIFEST open from one to the next, and decodes each edit once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._manifest = ""
        # Held open, so that no other file gets its inode.
        self._descriptor = -1
        # Whether it is another one than that of the files in the copy so far.
        self._is_new = True
        self.close()

    def close(self) -> None:
        """Close the MANIFEST; the next copy opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._state: manifest.ManifestState | None = None
        # Of an atomic group whose end is not there yet.
        self._half_group: list[manifest.VersionEdit] = []
        self._whole_bytes = 0
        # The write-ahead logs before it are not needed, also not for transactions that are only prepared.
        self._log_number_min: int | None = None

    def copy(self, target: Path) -> LiveCopy:
        """Fill an empty directory with a RocksDB as it was at one time of this call (design 0012, L1 to L9).

        SSTs are links where the file system can have them, and are never to be written to.

        Raises:
            NotFoundError: It is not a RocksDB directory.
            SourceChangedError: It was written to faster than it could be copied.
            UnsafeSourceError: It cannot be read, has what is not a file, or has its write-ahead logs elsewhere.
            DamagedError, ManifestError: Its files are not what its MANIFEST says, or that is none.
            UnknownFormatError: It has what cannot be copied, such as blob files.
            TargetError: There is no space for the copy.
        """
        missing = ""
        with opened_dir(self.directory) as source, opened_dir(target) as made:
            for attempt in range(1, ATTEMPTS_MAX + 1):
                try:
                    return self._copy(source, made, attempt)
                except _MovedOnError as error:
                    if missing and missing == error.missing:
                        # RocksDB deletes a file after it has written that nobody needs it (L2).
                        reason = f"has no {missing} as its MANIFEST or CURRENT says"
                        hint = "the store is damaged: bring it back from a backup"
                        subject = str(self.directory)
                        raise DamagedError(reason, operation="backup", subject=subject, hint=hint) from None
                    missing = error.missing
                except OSError as error:
                    if error.errno in _CANNOT_WRITE:
                        reason, hint = f"cannot be written: {error.strerror}", "choose another scratch directory"
                        raise TargetError(reason, operation="backup", subject=str(target), hint=hint) from error
                    raise unreadable_error(self.directory / (error.filename or ""), error) from error
        message = f"was written to faster than it could be copied, {ATTEMPTS_MAX} times"
        hint = "back up again, or back up a RocksDB checkpoint of it"
        raise SourceChangedError(message, operation="backup", subject=str(self.directory), hint=hint)

    def _copy(self, source: SourceDir, made: SourceDir, attempt: int) -> LiveCopy:
        target = made.path
        self._follow_current()
        self._read_on()
        state, current = self._require_state(), self._manifest
        needed = [family.log_number for family in state.families]
        if self._log_number_min is not None:
            needed.append(self._log_number_min)
        with contextlib.ExitStack() as held:
            logs = self._hold_logs(min(needed), target, held)
            if not all(edit.is_compaction for edit in self._read_on_same()):
                raise _MovedOnError
            state, whole_bytes = self._require_state(), self._whole_bytes
            wanted = {sst_name(file.number): file.size_bytes for family in state.families for _, file in family.files}
            there = {name for name in os.listdir(target) if not name.endswith(_HELD)}  # noqa: PTH208  (names, not paths)
            kept = set() if self._is_new else there & wanted.keys()
            for name in there - kept:
                (target / name).unlink()
            self._is_new = False
            copied = sum(_take_sst(source, made, name, size) for name, size in wanted.items() if name not in kept)
            log_bytes = _take_logs(logs, target)
            self._take_options(target)
            copy_opened(self._descriptor, self.directory / current, target / current)
            os.truncate(target / current, whole_bytes)
            if not all(edit.is_compaction or edit.is_flush for edit in self._read_on_same()):
                raise _MovedOnError
            if not all(log.is_whole() for log in logs):
                raise _MovedOnError
        (target / CURRENT).write_text(f"{current}\n", encoding="ascii")
        return LiveCopy(ssts=len(wanted), bytes_copied=copied, log_bytes=log_bytes, attempts=attempt)

    def _follow_current(self) -> bool:
        """Open the MANIFEST that CURRENT names, unless that is the one that is open; return whether it did."""
        name = read_current(self.directory, "backup")
        path = self.directory / name
        try:
            if self._descriptor >= 0 and os.path.samestat(path.lstat(), os.fstat(self._descriptor)):
                return False
            self.close()
            self._is_new, self._manifest = True, name
            self._descriptor = os.open(path, READ_FLAGS)
        except FileNotFoundError:
            raise _MovedOnError(name) from None
        if not stat.S_ISREG(mode := os.fstat(self._descriptor).st_mode):
            raise special_error(path, mode)
        return True

    def _read_on(self) -> list[manifest.VersionEdit]:
        """Apply what was added to the MANIFEST in whole records, and return it with the rest of its group."""
        subject = str(self.directory / self._manifest)
        block = self._whole_bytes // manifest.BLOCK_BYTES * manifest.BLOCK_BYTES
        size_bytes = os.fstat(self._descriptor).st_size - block
        if size_bytes > MANIFEST_BYTES_MAX:
            reason, hint = f"has more than {MANIFEST_BYTES_MAX} bytes", "open and close the store: RocksDB rewrites it"
            raise UnsafeSourceError(reason, operation="backup", subject=subject, hint=hint)
        data, start = os.pread(self._descriptor, size_bytes, block), self._whole_bytes - block
        records, end = manifest.decode_log(data, crc32c=crc32c, is_live=True, start=start, subject=subject)
        edits = [manifest.decode_edit(record, subject=subject) for record in records]
        groups = self._half_group + edits
        whole = next((n for n in range(len(groups), 0, -1) if not groups[n - 1].group_left), 0)
        if whole:
            self._state = manifest.apply_edits(groups[:whole], onto=self._state, subject=subject)
            logs = [edit.log_number_min for edit in groups[:whole] if edit.log_number_min is not None]
            self._log_number_min = max(logs, default=self._log_number_min)
        self._half_group, self._whole_bytes = groups[whole:], block + end
        # What was half of a group is judged once the group goes on.
        return groups if edits else []

    def _read_on_same(self) -> list[manifest.VersionEdit]:
        """Read on, unless CURRENT names another MANIFEST by now."""
        if self._follow_current():
            raise _MovedOnError
        return self._read_on()

    def _require_state(self) -> manifest.ManifestState:
        if self._state is None:
            reason = "has no whole record"
            raise DamagedError(reason, operation="backup", subject=str(self.directory / self._manifest))
        return self._state

    def _hold_logs(self, least: int, target: Path, held: contextlib.ExitStack) -> list["_HeldLog"]:
        """Hold the write-ahead logs from a number on, the newest first, whatever becomes of their names (L4)."""
        logs: list[_HeldLog] = []
        for name in self._names(_LOG):
            if int(name.removesuffix(".log")) < least:
                break
            with contextlib.suppress(FileNotFoundError):  # nobody needs it, or an edit says so (L5)
                logs.append(_HeldLog.hold(self.directory / name, target, held))
        there = {log.path.name for log in logs}
        # A listing is not of one moment: one that has a log may lack the log before it.
        for name in self._names(_LOG):
            if logs and least <= int(name.removesuffix(".log")) < logs[0].number and name not in there:
                raise _MovedOnError
        return logs

    def _take_options(self, target: Path) -> None:
        """Copy the newest OPTIONS, which decide nothing when we open the copy; refuse logs that are elsewhere (L9)."""
        for name in self._names(_OPTIONS):
            with contextlib.suppress(FileNotFoundError):
                if copy_file(self.directory / name, target / name) > _OPTIONS_BYTES_MAX:
                    raise UnsafeSourceError("is too large", operation="backup", subject=str(self.directory / name))
                elsewhere = _LOG_DIRECTORY.search((target / name).read_bytes())
                here = os.fsencode(self.directory.resolve())
                if elsewhere is not None and os.path.realpath(elsewhere[1].rstrip(b"/")) != here:
                    message = f"keeps its write-ahead logs elsewhere: {os.fsdecode(elsewhere[1])}"
                    hint = "back up a RocksDB checkpoint of it"
                    raise UnsafeSourceError(message, operation="backup", subject=str(self.directory), hint=hint)
                return

    def _names(self, pattern: re.Pattern[str]) -> Collection[str]:
        """List the files whose names fit, the greatest number first."""
        names = os.listdir(self.directory)  # noqa: PTH208  (names, not paths)
        found = [name for name in names if pattern.fullmatch(name)]
        return sorted(found, key=lambda name: int(re.sub("[^0-9]", "", name)), reverse=True)


def _take_sst(source: SourceDir, made: SourceDir, name: str, size_bytes: int) -> int:
    """Link an SST, and return how many bytes had to be copied instead."""
    copied = 0
    try:
        try:
            os.link(name, name, src_dir_fd=source.descriptor, dst_dir_fd=made.descriptor, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            copied = copy_file(source.path / name, made.path / name)
        status = os.stat(name, dir_fd=made.descriptor, follow_symlinks=False)
    except FileNotFoundError:
        raise _MovedOnError(name) from None
    if not stat.S_ISREG(status.st_mode):
        raise special_error(source.path / name, status.st_mode)
    if status.st_size != size_bytes:
        os.unlink(name, dir_fd=made.descriptor)
        raise _MovedOnError(name)
    return copied


class _HeldLog(NamedTuple):
    """A write-ahead log that stays readable, and with a second name also whole, when RocksDB deletes it (L14)."""

    path: Path
    descriptor: int
    is_linked: bool

    @classmethod
    def hold(cls, path: Path, target: Path, held: contextlib.ExitStack) -> Self:
        link, is_linked = target / f"{path.name}{_HELD}", True
        try:
            os.link(path, link, follow_symlinks=False)
            held.callback(link.unlink)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            is_linked = False
        return cls(path, held.enter_context(opened(link if is_linked else path)), is_linked)

    @property
    def number(self) -> int:
        return int(self.path.stem)

    def is_whole(self) -> bool:
        """Return whether it is still what it was when it was held, and what came behind that."""
        status = os.fstat(self.descriptor)
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(self.path.lstat(), status)
        return self.is_linked and status.st_nlink == 1


def _take_logs(logs: Sequence[_HeldLog], target: Path) -> int:
    """Copy write-ahead logs, the newest first (L4); return the bytes of their records."""
    log_bytes = 0
    for log in logs:
        copy = target / log.path.name
        size_bytes = copy_opened(log.descriptor, log.path, copy)
        if size_bytes and not log_bytes:
            # What comes after the newest record may be half of one.
            with copy.open("r+b") as file:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    size_bytes = manifest.measure_log(data)
                file.truncate(size_bytes)
        log_bytes += size_bytes
        if not size_bytes:
            copy.unlink()
    return log_bytes

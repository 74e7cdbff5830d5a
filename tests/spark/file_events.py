"""Count what a process asks of a directory of this machine, by inotify: what an object store would be asked for.

Seen are files that are made, renamed, deleted and opened to be read, and directories that are listed. Not seen: whether
a file is there (`stat`), which an object store answers by HEAD, and what a client of an object store asks beside.
"""

import ctypes
import os
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Final, Self

_OPEN, _MOVED_TO, _CREATE, _DELETE, _IS_DIR, _NONBLOCK = 0x20, 0x80, 0x100, 0x200, 0x40000000, 0o4000
_EVENT: Final = struct.Struct("iIII")
_NAMES: Final = {_CREATE: "PUT", _MOVED_TO: "COPY", _DELETE: "DELETE", _OPEN: "GET"}


class FileEvents:
    """Counts for a block what becomes of a directory and all below it, also of directories that are made meanwhile."""

    def __init__(self, root: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._root = root
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._watched: dict[int, Path] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._descriptor = self._libc.inotify_init1(_NONBLOCK)
        self._watch(self._root)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._take()
        os.close(self._descriptor)

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self._take()

    def _watch(self, directory: Path) -> None:
        for path in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
            number = self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), sum(_NAMES))
            assert number > 0
            self._watched[number] = path

    def _take(self) -> None:
        try:
            while data := os.read(self._descriptor, 1 << 20):
                at = 0
                while at < len(data):
                    number, mask, _, size = _EVENT.unpack_from(data, at)
                    at += _EVENT.size + size
                    self._note(number, mask, data[at - size : at].rstrip(b"\0").decode())
        except BlockingIOError:
            return

    def _note(self, number: int, mask: int, name: str) -> None:
        if mask & _IS_DIR:
            # Of one that is opened both it and its parent say so.
            self.counts["LIST"] += bool(mask & _OPEN and not name)
            if mask & _CREATE:
                self._watch(self._watched[number] / name)
        elif not (name.startswith(".") and name.endswith(".crc")):  # Hadoop's, of a local file system
            for kind, what in _NAMES.items():
                self.counts[what] += bool(mask & kind)
            # What is made is opened, too.
            self.counts["GET"] -= bool(mask & _CREATE)

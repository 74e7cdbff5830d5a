"""Hadoop's hidden checksums and left-overs, which no store lists: on this machine's file systems only (0005, K2, K7).

All of it blocks.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from engine.checkpoint.errors import unreadable
from engine.checkpoint.findings import DELETE, Finding, damage
from engine.errors import DamagedError
from engine.local.scan import READ_FLAGS
from index.errors import FileChecksumError
from index.spark.checksums import HadoopSums, hadoop_checksum_bytes, hadoop_checksum_name

_READ_BYTES: Final = 1024 * 1024
_HIDDEN_BYTES_MAX: Final = 256 * 1024 * 1024
_HINT: Final = "the file was replaced by something else, or the disk fails; take it from a backup"


def check_hidden(path: Path) -> None:
    """Compare a file with Hadoop's hidden checksum, if it has one.

    Raises:
        FileChecksumError: They do not fit.
        DamagedError: One of them cannot be read.
        TargetError: This machine lacks what it takes to read them.
    """
    hidden = path.with_name(hadoop_checksum_name(path.name))
    try:
        descriptor = os.open(hidden, READ_FLAGS)
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(hidden, error, _HINT) from error
    try:
        with os.fdopen(descriptor, "rb") as source:
            size_bytes = path.stat().st_size
            stored = source.read(min(_HIDDEN_BYTES_MAX, hadoop_checksum_bytes(size_bytes, 1)) + 1)
        sums = HadoopSums(stored, subject=str(path))
        with os.fdopen(os.open(path, READ_FLAGS), "rb", buffering=0) as source:
            while data := source.read(_READ_BYTES):
                sums.update(data)
        sums.finish()
    except OSError as error:
        raise unreadable(path, error, _HINT) from error


def find_hidden_misfits(root: Path, paths: list[str]) -> list[Finding]:
    """Those files that do not fit their hidden checksums, where nothing else tells which of the two was altered."""
    found = []
    for path in paths:
        try:
            check_hidden(root / path)
        except (FileChecksumError, DamagedError) as error:
            if (root / path).exists():
                found.append(damage(path, error, "K2"))
    return found


def find_left_overs(root: Path, before_ms: int) -> Iterator[Finding]:
    """What writers that died left under hidden names, and checksums of files that are gone.

    Args:
        root: Of the checkpoint.
        before_ms: What is younger may be at work.
    """
    for directory, _, names in os.walk(root):
        here = set(names)
        is_ours = Path(directory).name == ".tmp"
        for name in names:
            path = Path(directory, name)
            if name.startswith(".") and name.endswith(".crc") and (name[1:-4] in here):
                continue
            if not is_ours and not (name.startswith(".") and name.endswith((".tmp", ".crc"))):
                continue
            try:
                status = path.lstat()
            except OSError:
                continue
            if status.st_mtime_ns // 1_000_000 < before_ms:
                yield Finding(
                    kind="waste",
                    path=path.relative_to(root).as_posix(),
                    message="was left by a writer that ended before its file was whole, or by a file that is gone",
                    hint=DELETE,
                    rule="K7",
                    size_bytes=status.st_size,
                )

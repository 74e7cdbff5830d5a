"""Restored files of a query that have to fit another batch or another place (design 0005, R2 and R5). Blocks."""

import os
from collections.abc import Mapping
from pathlib import Path

from blobstore.local.files import flush
from engine.errors import UsageError
from index.spark.checkpoint import SOURCES
from index.spark.sources import PathMap, join_entries, plan_cut, relocate_operator


def cut_source_log(log: Path, newest: int) -> None:
    """Let the log of a file source end with an entry.

    Raises:
        BatchLogError: An entry is not what Spark writes.
    """
    cut = plan_cut([path.name for path in log.iterdir()], newest)
    if cut.written:
        files = [(f"{SOURCES}/{log.name}/{name}", (log / name).read_bytes()) for name in cut.joined]
        _write(log / cut.written, join_entries(files, newest), (log / cut.joined[-1]).stat())
    for name in cut.dropped:
        (log / name).unlink()


def relocate(checkpoint: Path, root: str, *, exact: bool, map_paths: Mapping[str, str]) -> None:
    """Rewrite what names an absolute path.

    Args:
        checkpoint: Where the files are.
        root: Where they will be, as `relocate_operator` takes it.
        exact: As there.
        map_paths: Of inputs, old prefix to new.

    Raises:
        UsageError: A mapping matches nothing.
        FormatError: A file is not what Spark writes.
    """
    for file in sorted(checkpoint.glob("state/*/_metadata/v2/*")):
        data = file.read_bytes()
        subject = file.relative_to(checkpoint).as_posix()
        _rewrite(file, data, relocate_operator(data, root, exact=exact, subject=subject))
    if not map_paths:
        return
    inputs = PathMap(map_paths)
    for file in sorted(checkpoint.glob(f"{SOURCES}/**/*")):
        if file.is_file():
            data = file.read_bytes()
            _rewrite(file, data, inputs.relocate_log(data))
    if inputs.unused:
        raise UsageError(
            f"nothing in {SOURCES}/ begins with {', '.join(sorted(inputs.unused))}",
            operation="map paths",
            hint="give the old prefix as the query had it; only file sources name paths",
        )


def _rewrite(file: Path, before: bytes, after: bytes) -> None:
    if after != before:
        _write(file, after, file.stat())


def _write(file: Path, data: bytes, like: os.stat_result) -> None:
    """Write a file, synced, with the time and permissions of another one (R8)."""
    with file.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fchmod(opened.fileno(), like.st_mode & 0o777)
        os.utime(opened.fileno(), ns=(like.st_atime_ns, like.st_mtime_ns))
        flush(opened.fileno())

"""Merge RocksDB directories by reference: hard links and a MANIFEST of our own (design 0010, section 2)."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from engine.errors import DamagedError, NotFoundError, TargetError, UnsafeSourceError, UsageError
from engine.local.checksums import crc32c
from engine.local.scan import opened
from index.errors import StoreMergeError
from index.rocksdb.manifest import decode_manifest, encode_manifest
from index.rocksdb.merge import MergeParent, MergePlan, plan_merge
from index.rocksdb.sst import TAIL_BYTES, MoreBytesNeeded, parse_range_deletions

CURRENT: Final = "CURRENT"
_CURRENT_BYTES_MAX: Final = 64
_MANIFEST: Final = re.compile(rb"(MANIFEST-[0-9]{6,20})\n")
# Some thousand SSTs have less than a megabyte, and each edit since the store was opened adds to it.
MANIFEST_BYTES_MAX: Final = 256 * 1024 * 1024
_DAMAGED: Final = "bring the store back from a backup"


def merge_stores(parents: Sequence[Path], target: Path) -> MergePlan:
    """Make a store of all rows of `parents`, closed or rocksdb_checkpoints, whose keys are disjoint. Blocks.

    Their SSTs are linked, not copied: `target`, which must not be there, is on the same file system. It has no more
    than these, CURRENT, a MANIFEST, and the OPTIONS of the first parent; it is whole once CURRENT is there.

    Raises:
        StoreMergeError: A parent has what cannot be merged by reference; the error names it.
        DamagedError, ManifestError, UnknownFormatError: A file of a parent is not what RocksDB writes.
        NotFoundError: A parent is not a RocksDB directory.
        TargetError: The target cannot be written.
    """
    if not parents:
        raise UsageError("there is nothing to merge", operation="merge", subject=str(target))
    plan = plan_merge([read_parent(directory) for directory in parents])
    try:
        target.mkdir()
        for link in plan.links:
            source = parents[link.parent] / sst_name(link.before)
            os.link(source, target / sst_name(link.number), follow_symlinks=False)
        # What opens a merged store reads none of it, as ours and Spark's do not, or all of it, as RocksDB's tools do.
        options = max(parents[0].glob("OPTIONS-*"), key=lambda path: path.name, default=None)
        if options is not None:
            (target / f"OPTIONS-{plan.options_number:06d}").write_bytes(options.read_bytes())
        manifest = f"MANIFEST-{plan.manifest_number:06d}"
        (target / manifest).write_bytes(encode_manifest(plan.state, crc32c=crc32c))
        (target / CURRENT).write_bytes(f"{manifest}\n".encode())
    except OSError as error:
        raise TargetError(error.strerror or str(error), operation="merge", subject=str(target)) from error
    return plan


def read_parent(directory: Path) -> MergeParent:
    """Read which SSTs a store has, and what of it cannot be merged by reference. Raises as `merge_stores`. Blocks."""
    path = directory / read_current(directory, "merge")
    try:
        if path.stat().st_size > MANIFEST_BYTES_MAX:
            reason = f"has more than {MANIFEST_BYTES_MAX} bytes"
            hint = "open and close the store: RocksDB then writes a new one"
            raise StoreMergeError(reason, subject=str(path), hint=hint)
        state = decode_manifest(path.read_bytes(), crc32c=crc32c, subject=str(path))
        # Before the least number that a family still needs, logs are left-overs.
        needed = min(family.log_number for family in state.families)
        logs = [log for log in directory.glob("*.log") if log.stem.isdecimal() and log.stat().st_size]
        files = [file for family in state.families for _, file in family.files]
        deleting = [of.number for of in files if _deletes_ranges(directory / sst_name(of.number), of.size_bytes)]
    except OSError as error:
        reason, subject = error.strerror or str(error), str(error.filename or directory)
        raise UnsafeSourceError(reason, operation="merge", subject=subject) from error
    return MergeParent(
        subject=str(directory),
        state=state,
        logs=tuple(sorted(log.name for log in logs if int(log.stem) >= needed)),
        range_deletions=frozenset(deleting),
    )


def read_current(directory: Path, operation: str) -> str:
    """Read the name of a store's MANIFEST.

    Raises:
        DamagedError: CURRENT does not name one.
        NotFoundError: The directory is not one of RocksDB.
    """
    try:
        with opened(directory / CURRENT) as descriptor:
            current = os.read(descriptor, _CURRENT_BYTES_MAX)
    except OSError as error:
        reason, hint = "is not a RocksDB directory", f"name the directory that has its {CURRENT}"
        raise NotFoundError(reason, operation=operation, subject=str(directory), hint=hint) from error
    return parse_current(current, str(directory), operation)


def parse_current(current: bytes, subject: str, operation: str = "read") -> str:
    """Return the name of the MANIFEST that CURRENT names; a `DamagedError` if it names none."""
    name = _MANIFEST.fullmatch(current)
    if name is None:
        raise DamagedError("does not name a MANIFEST", operation=operation, subject=subject, hint=_DAMAGED)
    return name[1].decode()


def sst_name(number: int) -> str:
    """Return what RocksDB calls an SST."""
    return f"{number:06d}.sst"


def _deletes_ranges(path: Path, size_bytes: int) -> bool:
    answer: bool | MoreBytesNeeded = MoreBytesNeeded(min(TAIL_BYTES, size_bytes))
    with opened(path) as descriptor:
        if os.fstat(descriptor).st_size != size_bytes:
            reason = f"has another size than the {size_bytes} bytes that the MANIFEST says"
            raise DamagedError(reason, operation="merge", subject=str(path), hint=_DAMAGED)
        try:
            while isinstance(answer, MoreBytesNeeded):
                tail = os.pread(descriptor, answer.tail_bytes, size_bytes - answer.tail_bytes)
                answer = parse_range_deletions(tail, size_bytes)
        except ValueError as error:
            raise DamagedError(str(error), operation="merge", subject=str(path), hint=_DAMAGED) from error
    return answer

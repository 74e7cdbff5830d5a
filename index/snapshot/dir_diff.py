"""Split a directory into files to upload, to keep and to drop: Samza's `DirDiff`.

First come the values of a directory on disk, then the rule that says when a file on disk is the file of a snapshot
(design 0002, I1), then the diff.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, TypeVar

import msgspec

from index.errors import IndexInvariantError
from index.snapshot.contents import dirs_of, group_by_dir
from index.snapshot.invariants import DEPTH_MAX
from index.snapshot.model import DirIndex, FileIndex, FileMetadata, FilePath, SstIdentity

_BUILD_HINT: Final = "the uploads do not belong to this diff; run the backup again"

_Entry = TypeVar("_Entry", FileIndex, DirIndex)
_name = attrgetter("name")


class LocalFile(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One regular file as a scan saw it.

    The identity facts stay None until somebody asks for them: a scan reads no contents.
    """

    name: str
    metadata: FileMetadata
    device: int
    inode: int
    # The ctime: changes with the content and with the metadata, and no program can set it back.
    changed_at_ns: int
    sst: SstIdentity | None = None
    # 32 bytes, over the whole file.
    blake3: bytes | None = None
    # IEEE CRC32 over the whole file, unsigned.
    crc32: int | None = None


class LocalDir(msgspec.Struct, frozen=True, kw_only=True):
    """One directory as a scan saw it; files and sub-directories each sorted by name. The root's name is empty."""

    name: str
    files: tuple[LocalFile, ...] = ()
    sub_dirs: tuple["LocalDir", ...] = ()
    # Permission bits; None where only the files were looked at.
    mode: int | None = None


def local_dir_of(files: Mapping[FilePath, LocalFile]) -> LocalDir:
    """Make a directory that has these files, by path from the root, and no others."""

    def build(name: str, files: Iterable[tuple[FilePath, LocalFile]]) -> LocalDir:
        own, below = group_by_dir(files)
        return LocalDir(name=name, files=tuple(own), sub_dirs=tuple(build(*part) for part in below))

    return build("", files.items())


def is_same_file(local: LocalFile, remote: FileIndex) -> bool:
    """Return whether the snapshot holds the bytes of a local file already; of the metadata only the size counts.

    Two empty files are the same. Two SSTs are the same if their session id, original file number and size are. All
    other files are the same if their content hash and size are; so is an SST of which one side has no identity. A local
    fact that is missing is never taken for equality: the file is uploaded again, which costs and harms nothing. The
    facts are those that `pairs_to_identify` asks for.

    Design 0002, I1. RocksDB names the files of its own backups after the same three facts
    (`BackupEngineOptions::kUseDbSessionId`).
    """
    size_bytes = remote.metadata.size_bytes
    if local.metadata.size_bytes != size_bytes:
        return False
    if size_bytes == 0:
        return True
    if local.sst is not None and remote.sst is not None:
        return local.sst == remote.sst
    return local.blake3 is not None and local.blake3 == remote.blake3


def is_stored_alike(a: FileIndex, b: FileIndex) -> bool:
    """Return whether two entries name the same stored bytes in the same place, whatever their metadata say."""
    return a.blobs == b.blobs and a.inline == b.inline and a.blake3 == b.blake3


class DirDiff(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup does with one directory; every list is sorted by name (Samza `DirDiff`).

    A name may be both added and removed: a mutable file such as CURRENT is uploaded again and its old entry dropped. A
    name is never both added and retained, nor both retained and removed; the same holds for sub-directories.
    """

    name: str
    # To upload.
    files_added: tuple[LocalFile, ...] = ()
    # In the snapshot already. An entry whose mode differs on disk carries the local metadata in place of the old.
    files_retained: tuple[FileIndex, ...] = ()
    # Gone, or replaced by an added file of the same name.
    files_removed: tuple[FileIndex, ...] = ()
    # Not in the snapshot: everything below is added.
    sub_dirs_added: tuple["DirDiff", ...] = ()
    # On both sides; what is below may differ.
    sub_dirs_retained: tuple["DirDiff", ...] = ()
    # Gone with everything below; without what these directories had themselves listed as removed.
    sub_dirs_removed: tuple[DirIndex, ...] = ()
    # Of the directory on disk.
    mode: int | None = None


class DiffStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over a whole diff; a removed sub-directory counts with every file and directory below it."""

    files_added: int = 0
    files_retained: int = 0
    files_removed: int = 0
    sub_dirs_added: int = 0
    sub_dirs_retained: int = 0
    sub_dirs_removed: int = 0
    bytes_added: int = 0
    bytes_retained: int = 0
    bytes_removed: int = 0


def diff_dir(local: LocalDir, remote: DirIndex, path: FilePath = ()) -> DirDiff:
    """Split one directory, and all below it, into files to upload, keep and drop.

    Args:
        local: What is on disk now, one entry per name, sorted by name.
        remote: The same directory in the previous snapshot, or an empty one. What it lists as removed plays no part.
        path: Where both are, for errors.

    Returns:
        In each directory `added` + `retained` name exactly `local`; `retained` + `removed` are exactly what `remote`
        has present. A file that became a directory, or the reverse, is removed as one and added as the other. A
        retained entry is the remote one, except that it carries the local metadata (mode, times, owner, group) if the
        modes differ; another time or owner alone changes nothing, so that an untouched tree stays the same value. A
        directory has the local mode.

    Raises:
        IndexInvariantError: A name occurs twice on either side, a list is not sorted, or the tree is deeper than
            DEPTH_MAX.

    Source:
        Samza `DirDiffUtil.getDirDiff`; design 0002, I1.
    """
    _check_depth(path)
    remote_files = _by_name(remote.files_present, path)
    added: list[LocalFile] = []
    retained: list[FileIndex] = []
    previous = ""
    for file in local.files:
        if file.name <= previous:
            raise _unsorted(path, file.name)
        previous = file.name
        known = remote_files.get(file.name)
        if known is None or not is_same_file(file, known):
            added.append(file)
        elif file.metadata.mode == known.metadata.mode:
            retained.append(known)
        else:
            retained.append(msgspec.structs.replace(known, metadata=file.metadata))
    removed: tuple[FileIndex, ...] = ()
    if len(retained) != len(remote_files):
        kept = {file.name for file in retained}
        removed = tuple(file for file in remote.files_present if file.name not in kept)
    sub_dirs_added, sub_dirs_retained, sub_dirs_removed = _diff_sub_dirs(local, remote, path)
    return DirDiff(
        name=local.name,
        files_added=tuple(added),
        files_retained=tuple(retained),
        files_removed=removed,
        sub_dirs_added=sub_dirs_added,
        sub_dirs_retained=sub_dirs_retained,
        sub_dirs_removed=sub_dirs_removed,
        mode=local.mode,
    )


def build_dir_index(diff: DirDiff, uploaded: Mapping[FilePath, FileIndex]) -> DirIndex:
    """Build the directory of the new snapshot from a diff, once the added files are uploaded (Samza's `putDir`).

    `uploaded` has the new entry of every added file by its path from the root, and no other.

    Returns:
        Present = uploaded + retained, removed = removed. A removed entry whose bytes the new entry of that name names
        again in the same place (an empty file, an unchanged inline one) was not removed and is left out.

    Raises:
        IndexInvariantError: An added file has no entry in `uploaded` or one of another name, or `uploaded` has more.
    """
    built = _build_dir_index(diff, uploaded, ())
    if (added_count := diff_stats(diff).files_added) != len(uploaded):
        reason = f"{len(uploaded)} entries for {added_count} added files"
        raise IndexInvariantError(reason, subject="uploaded files", hint=_BUILD_HINT)
    return built


def diff_stats(diff: DirDiff) -> DiffStats:
    """Count files, sub-directories and bytes of a diff and of everything below it."""
    sums: Counter[str] = Counter()

    def add_files(group: str, files: Sequence[LocalFile | FileIndex]) -> None:
        sums[f"files_{group}"] += len(files)
        sums[f"bytes_{group}"] += sum(file.metadata.size_bytes for file in files)

    def add(diff: DirDiff) -> None:
        add_files("added", diff.files_added)
        add_files("retained", diff.files_retained)
        add_files("removed", diff.files_removed)
        sums["sub_dirs_added"] += len(diff.sub_dirs_added)
        sums["sub_dirs_retained"] += len(diff.sub_dirs_retained)
        for sub in (*diff.sub_dirs_added, *diff.sub_dirs_retained):
            add(sub)
        for top in diff.sub_dirs_removed:
            for gone in (top, *(sub for _, sub in dirs_of(top))):
                sums["sub_dirs_removed"] += 1
                add_files("removed", gone.files_present)

    add(diff)
    return DiffStats(**sums)


def pairs_to_identify(
    local: LocalDir, remote: DirIndex, path: FilePath = ()
) -> Iterator[tuple[FilePath, list[tuple[LocalFile, FileIndex]]]]:
    """Yield the files whose identity `is_same_file` needs, by directory, each with the entry that it may be equal to.

    Only a file that has the same name, place and size in the snapshot, is not empty and does not carry its identity
    yet: every other one is decided by its size or absence. Where the remote entry has an SST identity, the local SST
    identity answers; where it has none, or the local file turns out to have none, the content hash does. A tree deeper
    than DEPTH_MAX is refused.
    """
    _check_depth(path)
    entries = {file.name: file for file in remote.files_present}
    yield (
        path,
        [
            (file, entry)
            for file in local.files
            if file.blake3 is None
            and (entry := entries.get(file.name)) is not None
            and entry.metadata.size_bytes == file.metadata.size_bytes > 0
            and (file.sst is None or entry.sst is None)
        ],
    )
    remote_dirs = {sub.name: sub for sub in remote.sub_dirs_present}
    for sub in local.sub_dirs:
        if (known := remote_dirs.get(sub.name)) is not None:
            yield from pairs_to_identify(sub, known, (*path, sub.name))


def strip_removed(directory: DirIndex) -> DirIndex:
    """Return a directory without its removed lists, at any depth; the same value if it has none."""
    sub_dirs = _strip_all(directory.sub_dirs_present)
    if sub_dirs is directory.sub_dirs_present and not directory.files_removed and not directory.sub_dirs_removed:
        return directory
    return DirIndex(directory.name, directory.files_present, sub_dirs, mode=directory.mode)


def _strip_all(directories: tuple[DirIndex, ...]) -> tuple[DirIndex, ...]:
    stripped = tuple(strip_removed(d) for d in directories)
    return stripped if any(a is not b for a, b in zip(stripped, directories, strict=True)) else directories


def _diff_sub_dirs(
    local: LocalDir, remote: DirIndex, path: FilePath
) -> tuple[tuple[DirDiff, ...], tuple[DirDiff, ...], tuple[DirIndex, ...]]:
    if not local.sub_dirs and not remote.sub_dirs_present:
        return (), (), ()
    remote_dirs = _by_name(remote.sub_dirs_present, path)
    local_files = {file.name for file in local.files}
    added: list[DirDiff] = []
    retained: list[DirDiff] = []
    previous = ""
    for sub in local.sub_dirs:
        name = sub.name
        if name <= previous or name in local_files:
            raise _unsorted(path, name)
        previous = name
        known = remote_dirs.pop(name, None)
        diff = diff_dir(sub, known or DirIndex(name), (*path, name))
        (added if known is None else retained).append(diff)
    return tuple(added), tuple(retained), _strip_all(tuple(remote_dirs.values()))


def _build_dir_index(diff: DirDiff, uploaded: Mapping[FilePath, FileIndex], path: FilePath) -> DirIndex:
    new_files: dict[str, FileIndex] = {}
    for file in diff.files_added:
        entry = uploaded.get((*path, file.name))
        if entry is None or entry.name != file.name:
            raise IndexInvariantError("has no entry of its own", subject="/".join((*path, file.name)), hint=_BUILD_HINT)
        new_files[file.name] = entry
    below = (*diff.sub_dirs_added, *diff.sub_dirs_retained)
    sub_dirs = [_build_dir_index(sub, uploaded, (*path, sub.name)) for sub in below]
    return DirIndex(
        diff.name,
        tuple(sorted((*new_files.values(), *diff.files_retained), key=_name)),
        tuple(sorted(sub_dirs, key=_name)),
        tuple(
            file
            for file in diff.files_removed
            if (entry := new_files.get(file.name)) is None or not is_stored_alike(file, entry)
        ),
        diff.sub_dirs_removed,
        diff.mode,
    )


def _by_name(entries: tuple[_Entry, ...], path: FilePath) -> dict[str, _Entry]:
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) != len(entries):
        raise IndexInvariantError("a name occurs twice in the snapshot", subject="/".join(path) or "root")
    return by_name


def _check_depth(path: FilePath) -> None:
    if len(path) > DEPTH_MAX:
        hint = "no RocksDB store nests like this; back up the store's own directory"
        subject = "/".join(path[:3]) + "/…"
        raise IndexInvariantError(f"directories nest deeper than {DEPTH_MAX}", subject=subject, hint=hint)


def _unsorted(path: FilePath, name: str) -> IndexInvariantError:
    reason, hint = "a name occurs twice, or names are not sorted", "the scan is at fault; please report it"
    return IndexInvariantError(reason, subject="/".join((*path, name)), hint=hint)

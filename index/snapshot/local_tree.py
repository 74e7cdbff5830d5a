"""A directory on disk as a value: what a scan saw, and the identity facts that a decision needed."""

from collections.abc import Mapping

import msgspec

from index.snapshot.model import FileMetadata, SstIdentity


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


def local_dir_of(files: Mapping[tuple[str, ...], LocalFile]) -> LocalDir:
    """A directory that has these files and no others.

    Args:
        files: By path from the root, the last component being the name of the file.
    """
    by_dir: dict[str, dict[tuple[str, ...], LocalFile]] = {}
    for path, file in files.items():
        if len(path) > 1:
            by_dir.setdefault(path[0], {})[path[1:]] = file
    return LocalDir(
        name="",
        files=tuple(sorted((file for path, file in files.items() if len(path) == 1), key=lambda file: file.name)),
        sub_dirs=tuple(msgspec.structs.replace(local_dir_of(by_dir[name]), name=name) for name in sorted(by_dir)),
    )

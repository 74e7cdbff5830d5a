"""A directory on disk as a value: what a scan saw, and the identity facts that a decision needed."""

import msgspec

from index.model import FileMetadata, SstIdentity


class LocalFile(msgspec.Struct, frozen=True, kw_only=True):
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

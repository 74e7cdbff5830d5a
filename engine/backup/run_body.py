"""A run of bytes of a file that was scanned, on its way into a store: hashed whenever it is read."""

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing

from blobstore.concurrency import run_blocking
from blobstore.local.files import LocalFile as OpenFile
from blobstore.local.files import open_to_read
from engine.errors import UnsafeSourceError
from engine.local.hashing import ContentHasher, Digest, FileHasher
from engine.local.scan import FilePath, changed_error, check_unchanged, refusing
from engine.local.transfer import SourceDir
from index.snapshot.dir_diff import LocalFile


class FileRunBody:
    """A `Body`: a run of bytes of a file that was scanned, hashed while it is read.

    Attributes:
        digest: The hashes of the run, once it has been read to its end. The CRC32 is that of a whole file: of any other
            run nobody asks it, and it is 0.
    """

    def __init__(
        self,
        source: SourceDir,
        path: FilePath,
        file: LocalFile,
        *,
        start: int,
        size_bytes: int,
        chunk_bytes: int,
    ) -> None:
        self._path = source.path.joinpath(*path)
        self._name = "/".join(path)
        self._source = source
        self._file = file
        self._start = start
        self._size_bytes = size_bytes
        self._chunk_bytes = chunk_bytes
        self.digest: Digest | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the run."""
        return self._size_bytes

    async def read_chunks(self) -> AsyncGenerator[bytes, None]:
        """The bytes of the run.

        Raises:
            UnsafeSourceError: The file is no longer what was scanned, at the start or at the end (design 0002, I3); or
                what was read before had other bytes.
        """
        is_whole = self._size_bytes == self._file.metadata.size_bytes
        # A CRC32 takes longer than BLAKE3, and tells nothing more of bytes that were read before.
        hasher = FileHasher() if is_whole and self.digest is None else ContentHasher()
        with refusing(self._path):
            async with open_to_read(self._name, dir_fd=self._source.descriptor) as source:
                check_unchanged(self._path, self._file, await source.stat())
                while hasher.size_bytes < self._size_bytes:
                    left = self._size_bytes - hasher.size_bytes
                    at = self._start + hasher.size_bytes
                    chunk = await run_blocking(_read_hashed, source, at, min(left, self._chunk_bytes), hasher)
                    if not chunk:
                        raise changed_error(self._path)
                    if hasher.size_bytes == self._size_bytes:
                        # Before the last chunk is handed out: a store that has all it asked for comes for no more.
                        check_unchanged(self._path, self._file, await source.stat())
                        self._note(hasher)
                    yield chunk

    async def read_digest(self) -> Digest:
        """The hashes of the run; it is read now if no store has read it to its end.

        Raises:
            UnsafeSourceError: As `read_chunks`.
        """
        if self.digest is None:
            async with aclosing(self.read_chunks()) as chunks:
                async for _ in chunks:
                    pass
        if self.digest is None:
            raise changed_error(self._path)
        return self.digest

    def _note(self, hasher: ContentHasher) -> None:
        """Keep the hashes of the first reading; refuse another one that had other bytes."""
        if self.digest is None:
            self.digest = Digest(hasher.blake3, hasher.digest.crc32 if isinstance(hasher, FileHasher) else 0)
        elif hasher.blake3 != self.digest.blake3:
            raise read_twice_error(str(self._path))


def read_twice_error(path: str) -> UnsafeSourceError:
    """The error for a file of which two readings do not agree."""
    return UnsafeSourceError(
        "was read twice and did not have the same bytes, though its stat says that it has not changed",
        operation="backup",
        subject=path,
        hint="see that the disk, the memory and the file system are well",
    )


def _read_hashed(source: OpenFile, at: int, size_bytes: int, hasher: ContentHasher) -> bytes:
    """Read and hash one chunk in one hop to a thread."""
    chunk = os.pread(source.descriptor, size_bytes, at)
    hasher.update(chunk)
    return chunk

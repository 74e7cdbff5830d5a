"""The files of a snapshot, read by ranges of their blobs (design 0013, W1)."""

from collections.abc import Iterable

from blobstore.base import BlobStore, MemorySink
from blobstore.errors import BlobCorruptError, BlobNotFoundError, InvalidRequestError
from engine.errors import DamagedError, NotFoundError
from engine.local.digests import hash_content
from index.snapshot.contents import files_of
from index.snapshot.model import FileBlob, FileIndex, SnapshotIndex


class SnapshotRanges:
    """Reads the files that a snapshot index names. What it is of has to stay pinned while this is in use."""

    def __init__(self, store: BlobStore, index: SnapshotIndex) -> None:
        metadata = index.metadata
        self.location = f"{metadata.job}/{metadata.task}/{metadata.store}@{metadata.version}_{metadata.unique_id}"
        # GETs so far, and the bytes that they brought.
        self.requests = 0
        self.bytes_fetched = 0
        self._store = store
        # By path: its names, and the file.
        self.entries = {"/".join(path): (path, file) for path, file in files_of(index.dir)}

    def names(self) -> Iterable[str]:
        return self.entries

    def size_bytes(self, name: str) -> int:
        return self._find(name).metadata.size_bytes

    async def read(self, name: str, start: int, size_bytes: int, *, fresh: bool = False) -> bytes:
        """Read a range; a whole file is compared with its hash.

        Raises:
            NotFoundError: There is no such file.
            DamagedError: A blob is missing, is shorter than its index says, or has other bytes.
            StoreError: As the store says.
        """
        file = self._find(name)
        end = start + size_bytes
        data = b"" if file.inline is None else file.inline[start:end]
        for blob in file.blobs:
            first = max(start, blob.file_offset_bytes)
            last = min(end, blob.file_offset_bytes + blob.size_bytes)
            if first < last:
                data += await self._fetch(name, blob, first - blob.file_offset_bytes, last - first, fresh=fresh)
        if len(data) != size_bytes:
            raise self._damaged(name, f"has no bytes {start} to {end}")
        if size_bytes == file.metadata.size_bytes and hash_content(data) != file.blake3:
            if fresh:
                raise self._damaged(name, "its bytes are not the ones that were backed up")
            return await self.read(name, start, size_bytes, fresh=True)
        return data

    async def _fetch(self, name: str, blob: FileBlob, start: int, size_bytes: int, *, fresh: bool) -> bytes:
        self.requests += 1
        self.bytes_fetched += size_bytes
        sink = MemorySink(size_bytes)
        try:
            await self._store.read_into(
                blob.key, sink, start=blob.blob_offset_bytes + start, size_bytes=size_bytes, fresh=fresh
            )
        except BlobNotFoundError as error:
            raise self._damaged(name, f"its blob {blob.key} is missing") from error
        except (BlobCorruptError, InvalidRequestError) as error:
            raise self._damaged(name, f"its blob {blob.key} is not what was backed up") from error
        return sink.data

    def _find(self, name: str) -> FileIndex:
        if name not in self.entries:
            hint = "see what there is with `tidemark show --files`"
            raise NotFoundError(f"has no file {name}", operation="read", subject=self.location, hint=hint)
        return self.entries[name][1]

    def _damaged(self, name: str, reason: str) -> DamagedError:
        return DamagedError(reason, operation="read", subject=f"{self.location}/{name}")

"""A store in memory that shows and can do as little as an S3 store (design 0003, L5, C2 and W5)."""

from collections.abc import Callable, Sequence

import msgspec
from typing_extensions import override

from blobstore.base import LIST_PAGE_MAX, BlobInfo, Capabilities, DeleteFailure, ListPage, UnfinishedPut
from blobstore.memory import MemoryStore


def set_created(store: MemoryStore, key: str, created_at_ms: int) -> None:
    blob = store._blobs[key]
    info = msgspec.structs.replace(blob.info, created_at_ms=created_at_ms)
    store._blobs[key] = msgspec.structs.replace(blob, info=info)


class OpaqueStore(MemoryStore):
    """Lists do not show TTLs; removing one moves the creation time; puts can be left unfinished.

    Attributes:
        weaknesses: Capabilities that differ from those of an S3 store.
        unfinished: Puts that were begun and never finished.
        stuck: Upload ids that the store will not give up.
        opaque: False lets a test look through: lists show TTLs as they are.
    """

    def __init__(self, *, clock: Callable[[], int] | None = None, **weaknesses: bool) -> None:
        super().__init__(clock=clock)
        self.weaknesses = weaknesses
        self.unfinished: list[UnfinishedPut] = []
        self.stuck: set[str] = set()
        self.opaque = True

    @property
    @override
    def capabilities(self) -> Capabilities:
        like_s3 = {"keeps_deleted": False, "keeps_created_at": False}
        return msgspec.structs.replace(super().capabilities, **(like_s3 | self.weaknesses))

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        page = await super().list_page(prefix, start_after=start_after, limit=limit)
        if not self.opaque:
            return page
        return ListPage(blobs=tuple(map(_without_metadata, page.blobs)), truncated=page.truncated)

    @override
    async def remove_ttl(self, key: str) -> None:
        if not self.capabilities.removes_ttl:
            assert await self.stat(key) is not None
            return
        await super().remove_ttl(key)
        set_created(self, key, await self.now_ms())

    def begin(self, key: str, upload_id: str, begun_at_ms: int) -> None:
        """Leave a put unfinished."""
        self.unfinished.append(UnfinishedPut(key=key, upload_id=upload_id, begun_at_ms=begun_at_ms))

    @override
    async def list_unfinished(self, prefix: str) -> tuple[UnfinishedPut, ...]:
        return tuple(put for put in self.unfinished if put.key.startswith(prefix))

    @override
    async def abort_unfinished(self, puts: Sequence[UnfinishedPut]) -> tuple[DeleteFailure, ...]:
        gone = {put.upload_id for put in puts} - self.stuck
        self.unfinished = [put for put in self.unfinished if put.upload_id not in gone]
        return tuple(DeleteFailure(key=put.key, reason="stuck") for put in puts if put.upload_id in self.stuck)


def _without_metadata(blob: BlobInfo) -> BlobInfo:
    return msgspec.structs.replace(blob, expires_at_ms=None, ttl_known=False)

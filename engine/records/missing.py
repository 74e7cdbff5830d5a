"""What a commit needs and the store does not have: remembered for the next backup, or looked for (design 0006, M1)."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from blobstore.base import BlobStore, RequestMetadata
from blobstore.concurrency import map_bounded
from blobstore.errors import BlobNotFoundError
from engine.errors import DamagedError
from index.snapshot.keys import BLOBS, INDEXES
from index.snapshot.model import BlobKey

# More gaps than this are found again, by the next backup or by whoever is told to look.
GAPS_MAX: Final = 10_000
STATS_IN_FLIGHT_MAX: Final = 16


class Gaps:
    """Blobs and indexes that were found missing or altered, by their keys; what was noted longest ago goes first."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    @property
    def keys(self) -> frozenset[str]:
        """All that were noted."""
        return frozenset(self._keys)

    def note(self, keys: Iterable[str]) -> None:
        """Remember those of the keys that are of uploads."""
        for key in keys:
            if key.startswith((BLOBS, INDEXES)):
                self._keys[key] = None
        while len(self._keys) > GAPS_MAX:
            del self._keys[next(iter(self._keys))]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Remember what a block fails on, if it fails because something is missing or altered."""
        try:
            yield
        except DamagedError as error:
            self.note([key_of(error)])
            raise


def key_of(error: DamagedError) -> str:
    """The key of what is missing or altered; whoever tells of a file may name that in its place."""
    cause = error.__cause__
    return cause.key if isinstance(cause, BlobNotFoundError) and cause.key else error.subject


async def find_missing(store: BlobStore, needed: Mapping[BlobKey, int]) -> frozenset[str]:
    """Those blobs that are not there, or are shorter than they have to be: one `stat` for each, at most 16 at once.

    Args:
        store: Where they should be.
        needed: How many bytes each must at least have.
    """

    async def is_missing(item: tuple[BlobKey, int]) -> bool:
        key, size_bytes = item
        info = await store.stat(key, metadata=RequestMetadata(payload_path="check"))
        return info is None or info.size_bytes < size_bytes

    gone = await map_bounded(is_missing, needed.items(), in_flight_max=STATS_IN_FLIGHT_MAX)
    return frozenset(key for key, is_gone in zip(needed, gone, strict=True) if is_gone)

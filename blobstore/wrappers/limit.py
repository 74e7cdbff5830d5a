"""A cap on the requests that are under way at once."""

from contextlib import AbstractAsyncContextManager

from typing_extensions import override

from blobstore.base import BlobStore
from blobstore.wrappers.forwarding import ForwardingStore
from blobstore.wrappers.in_flight import InFlightLimit


class LimitedStore(ForwardingStore):
    """Lets so many requests through at once; the others wait in the order in which they came.

    A `get` counts from its first chunk until it is read to its end or closed. Never wait for one request to a store
    while a get of the same task stands open: at times there is one slot for all.

    Args:
        inner: The store.
        limit: How many. A number, at least 1, is a limit that stays as it is.
    """

    def __init__(self, inner: BlobStore, limit: InFlightLimit | int) -> None:
        super().__init__(inner)
        self._limit = InFlightLimit(limit) if isinstance(limit, int) else limit

    @override
    def _around(self, operation: str, *keys: str) -> AbstractAsyncContextManager[None]:
        return self._limit.slot()

"""Where the time of requests goes while they are under way: until they are answered, for bytes, or to their taker."""

from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from typing_extensions import override

from blobstore.base import BlobStore, RequestMetadata
from blobstore.forwarding import ForwardingStore
from blobstore.sinks import Buffer, Sink


class Waits:
    """What was noted of all gets together; of each, eight bytes.

    Attributes:
        answers_s: From asking to the first bytes.
        bytes_s: For further bytes.
        taker_s: Whoever takes the bytes had them: hashing, writing.
    """

    def __init__(self) -> None:
        self._first_bytes_s = array("d")
        self.answers_s = self.bytes_s = self.taker_s = 0.0

    def add(self, *, answer_s: float, bytes_s: float, taker_s: float) -> None:
        """One get has ended."""
        self._first_bytes_s.append(answer_s)
        self.answers_s += answer_s
        self.bytes_s += bytes_s
        self.taker_s += taker_s

    def first_byte_s(self, share: float) -> float:
        """The time within which this share of the gets began to be answered; 0 if there was none."""
        if not self._first_bytes_s:
            return 0.0
        times_s = sorted(self._first_bytes_s)
        return times_s[min(len(times_s) - 1, int(share * len(times_s)))]


class TimedStore(ForwardingStore):
    """Notes where the time of each get goes; passes on everything.

    Args:
        inner: The store, in all its wrappers: a request that is repeated counts until it is answered.
        monotonic_s: Seconds that never go backwards.
    """

    def __init__(self, inner: BlobStore, monotonic_s: Callable[[], float]) -> None:
        super().__init__(inner)
        self._monotonic_s = monotonic_s
        self.waits = Waits()

    @override
    async def get(
        self,
        key: str,
        *,
        start: int = 0,
        size_bytes: int | None = None,
        deleted: bool = False,
        fresh: bool = False,
        metadata: RequestMetadata | None = None,
    ) -> AsyncGenerator[bytes, None]:
        watch = _Watch(self._monotonic_s)
        stream = super().get(key, start=start, size_bytes=size_bytes, deleted=deleted, fresh=fresh, metadata=metadata)
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    watch.given()
                    yield chunk
                    watch.taken()
        finally:
            watch.end(self.waits)

    @override
    async def pour(
        self,
        key: str,
        sink: Sink,
        *,
        start: int = 0,
        size_bytes: int,
        fresh: bool = False,
        metadata: RequestMetadata | None = None,
    ) -> None:
        watch = _Watch(self._monotonic_s)
        timed = _TimedSink(sink, watch)
        try:
            await super().pour(key, timed, start=start, size_bytes=size_bytes, fresh=fresh, metadata=metadata)
        finally:
            watch.end(self.waits)


class _Watch:
    """Of one get: begun when it is asked for."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._since_s = monotonic_s()
        self._answer_s: float | None = None
        self._bytes_s = self._taker_s = 0.0

    def given(self) -> None:
        """Bytes have come."""
        passed_s = self._lap_s()
        if self._answer_s is None:
            self._answer_s = passed_s
        else:
            self._bytes_s += passed_s

    def taken(self) -> None:
        """Whoever takes them wants more."""
        self._taker_s += self._lap_s()

    def end(self, waits: Waits) -> None:
        """No more bytes come; a get that was never answered is not noted."""
        if self._answer_s is not None:
            waits.add(answer_s=self._answer_s, bytes_s=self._bytes_s + self._lap_s(), taker_s=self._taker_s)

    def _lap_s(self) -> float:
        now_s = self._monotonic_s()
        passed_s, self._since_s = now_s - self._since_s, now_s
        return passed_s


class _TimedSink(Sink):
    def __init__(self, sink: Sink, watch: _Watch) -> None:
        self._sink = sink
        self._watch = watch

    @override
    def write(self, data: Buffer) -> None:
        self._watch.given()
        self._sink.write(data)
        self._watch.taken()

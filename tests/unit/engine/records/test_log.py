"""Records as they are read: what was altered on the way is read again."""

from typing import Any

import msgspec
import pytest
from typing_extensions import override

from blobstore.base import BytesBody, MemorySink, Sink
from blobstore.errors import StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.wrappers.retry import RetryingStore, RetrySettings
from engine.records.log import read_record
from index.errors import FormatError, UnknownFormatError
from index.snapshot.codec import decode_pin, encode_record
from index.snapshot.model import CommitPointer, Pin, Scope, WriteId

KEY = "pins/0123456789abcdef0123"
PIN = Pin(
    id="0123456789abcdef0123",
    scope=Scope("job"),
    source=CommitPointer(1, WriteId("0" * 32)),
    duration_ms=1000,
    purpose="restore",
)


class BitFlipper(MemoryStore):
    """Alters one bit of what it serves, until it is asked again."""

    bit = 0
    always = False

    @override
    async def read_into(self, key: str, sink: Sink, *, fresh: bool = False, **how: Any) -> None:
        whole = MemorySink()
        await super().read_into(key, whole, **how)
        altered = bytearray(whole.data)
        if not fresh or self.always:
            altered[self.bit // 8] ^= 1 << self.bit % 8
        await sink.take([altered])


async def test_whichever_bit_was_altered_on_the_way_the_record_is_read_again() -> None:
    store, data = BitFlipper(), encode_record(PIN)
    await store.put(KEY, BytesBody(data))
    for bit in range(len(data) * 8):
        store.bit = bit
        assert await read_record(store, KEY, decode_pin) == PIN


async def test_a_record_that_stays_of_a_newer_format_is_reported_as_such() -> None:
    store = BitFlipper()
    await store.put(KEY, BytesBody(encode_record(PIN)))
    store.always, store.bit = True, 9 * 8 + 6
    with pytest.raises(UnknownFormatError, match="format version"):
        await read_record(store, KEY, decode_pin)
    store.bit = 0
    with pytest.raises(FormatError):
        await read_record(store, KEY, decode_pin)


class OverwrittenWhileRead(MemoryStore):
    """Breaks the first read off near its end, and by then holds a shorter record."""

    shorter: bytes | None = None

    @override
    async def read_into(self, key: str, sink: Sink, **how: Any) -> None:
        if self.shorter is None:
            return await super().read_into(key, sink, **how)
        whole, shorter, self.shorter = MemorySink(), self.shorter, None
        await super().read_into(key, whole, **how)
        await sink.take([whole.data[:-1]])
        await self.put(key, BytesBody(shorter))
        raise StoreUnavailableError("the connection broke", operation="get", key=key)


async def test_a_record_that_became_shorter_while_it_was_read_is_read_again() -> None:
    store, released = OverwrittenWhileRead(), msgspec.structs.replace(PIN, purpose="", duration_ms=0)
    await store.put(KEY, BytesBody(encode_record(PIN)))
    store.shorter = encode_record(released)
    assert await read_record(RetryingStore(store, RetrySettings(first_wait_s=0.001)), KEY, decode_pin) == released

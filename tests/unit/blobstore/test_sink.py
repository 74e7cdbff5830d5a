import asyncio
import time

import pytest
from typing_extensions import override

from blobstore.base import Buffer, MemorySink, Sink, TooLargeError
from blobstore.wrappers.forwarding import CountedSink, WatchedSink
from tests.contract.sink_contract import Collecting


class Slow(Collecting):
    @override
    def write(self, data: Buffer) -> None:
        time.sleep(0.3)
        super().write(data)


@pytest.mark.parametrize("kind", [CountedSink, lambda sink: WatchedSink(sink, time.monotonic)])
async def test_what_a_sink_has_written_counts_also_where_the_call_was_cancelled(kind: type[CountedSink]) -> None:
    """Otherwise the bytes would be read again, and written twice."""
    slow = Slow()
    sink = kind(slow)
    task = asyncio.create_task(sink.take([b"abc", b"de"]))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (bytes(slow.data), sink.size_bytes) == (b"abcde", 5)


async def test_a_sink_in_memory_is_written_where_the_bytes_come() -> None:
    sink = MemorySink(3)
    counted = CountedSink(sink)
    await counted.take([b"ab", bytearray(b"c")])
    assert (sink.data, counted.size_bytes) == (b"abc", 3)
    with pytest.raises(TooLargeError):
        await counted.take([b"d"])
    assert (sink.data, counted.size_bytes) == (b"abc", 3)


def test_a_sink_blocks_unless_it_says_otherwise() -> None:
    sinks: list[Sink] = [Collecting(), MemorySink(), CountedSink(Collecting()), CountedSink(MemorySink())]
    assert [sink.blocks for sink in sinks] == [True, False, True, False]

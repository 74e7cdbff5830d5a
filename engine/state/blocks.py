"""Data blocks of SSTs, and the keys of all entries in them (design 0010, H9)."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Self, TypeAlias

import msgspec

from engine.settings import MIB
from index.rocksdb.sst import decode_rows

# A reader of many blocks at once may touch these bytes before and behind them.
BLOCK_MARGIN_BYTES: Final = 1024
_KEYS_BYTES_MAX: Final = 4 * MIB


class Blocks(msgspec.Struct, frozen=True):
    """Data blocks, decompressed, in one buffer: with a margin before the first one and behind the last one."""

    data: bytes | bytearray
    begins: Sequence[int]
    sizes: Sequence[int]

    @classmethod
    def joined(cls, blocks: Sequence[bytes]) -> Self:
        """Lay blocks one behind the other."""
        margin, sizes = bytes(BLOCK_MARGIN_BYTES), [*map(len, blocks)]
        begins = [*itertools.accumulate(sizes, initial=BLOCK_MARGIN_BYTES)][:-1]
        return cls(b"".join([margin, *blocks, margin]), begins, sizes)

    def __iter__(self) -> Iterator[bytes]:
        return (bytes(self.data[begin : begin + size]) for begin, size in zip(self.begins, self.sizes, strict=True))


# Takes blocks while it is called: their buffer is used again.
TakeBlocks: TypeAlias = Callable[[Blocks], None]


def split_entries(blocks: Blocks, prefix_bytes: int) -> Iterator[tuple[bytes, Sequence[bytes]]]:
    """Yield the keys of all entries of data blocks of SSTs: of deletions, and of what newer entries replace, too.

    They come as a prefix, which says their column family, with the keys that have it, without it. A prefix may come
    again. Raises as `decode_rows`.
    """
    found: dict[bytes, list[bytes]] = {}
    held_bytes = 0
    for block in blocks:
        for key, _, _ in decode_rows(block):
            found.setdefault(key[:prefix_bytes], []).append(key[prefix_bytes:])
            held_bytes += len(key)
            if held_bytes > _KEYS_BYTES_MAX:
                yield from found.items()
                found, held_bytes = {}, 0
    yield from found.items()

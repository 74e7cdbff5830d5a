"""The keys of data blocks of SSTs as a matrix: all restart intervals of many blocks side by side.

`index.rocksdb.sst.decode_rows` is the reference. An entry says how many bytes its key shares with the one before it, so
that an interval is read one entry after the other; here the n-th entries of all intervals are read at once. No length
is believed beyond the bytes given, and what is held is bounded.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from engine.settings import MIB
from engine.state.blocks import BLOCK_MARGIN_BYTES, Blocks, split_entries
from index.rocksdb.sst import KEY_TRAILER_BYTES, KINDS_KNOWN

Ints: TypeAlias = npt.NDArray[np.int64]
Octets: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint64]

# Longer keys are read one by one. A key is read from as many bytes before it on as it shares with the one before.
_WIDTH_MAX: Final = BLOCK_MARGIN_BYTES
_INTERVALS_MAX: Final = 16_384
_HELD_BYTES_MAX: Final = 16 * MIB
_VARINT_BITS: Final = 35
_WORD: Final = 8
_HASH_INDEX: Final = 1 << 31
_COUNT_BYTES: Final = 4
_IS_KNOWN: Final = np.isin(np.arange(256), sorted(KINDS_KNOWN))


class KeyColumn(Sequence[bytes]):
    """Keys as rows of a matrix, each with its size; what is behind it in its row means nothing."""

    def __init__(self, octets: Octets, sizes: Ints) -> None:
        self.octets, self.sizes = octets, sizes

    @override
    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, number: int) -> bytes: ...
    @overload
    def __getitem__(self, number: slice) -> "KeyColumn": ...
    @override
    def __getitem__(self, number: int | slice) -> "bytes | KeyColumn":
        if isinstance(number, slice):
            return KeyColumn(self.octets[number], self.sizes[number])
        return self.octets[number, : self.sizes[number]].tobytes()


class _UnusualError(Exception):
    """A key is longer, or shorter, than what is worth a matrix."""


def split_columns(blocks: Blocks, prefix_bytes: int) -> Iterator[tuple[bytes, Sequence[bytes]]]:
    """Yield the keys of all entries of data blocks, as `split_entries` does, in another order. Raises likewise."""
    found: list[tuple[Words, Ints]] = []
    held = 0
    try:
        for rows, sizes in _steps(blocks, prefix_bytes):
            found.append((rows, sizes))
            held += rows.nbytes
            if held > _HELD_BYTES_MAX:
                yield from _by_prefix(found, prefix_bytes)
                found, held = [], 0
        yield from _by_prefix(found, prefix_bytes)
    except _UnusualError:
        yield from split_entries(blocks, prefix_bytes)


def _by_prefix(found: list[tuple[Words, Ints]], prefix_bytes: int) -> Iterator[tuple[bytes, Sequence[bytes]]]:
    if not found:
        return
    sizes = np.concatenate([of for _, of in found])
    words = np.empty((len(sizes), max(rows.shape[1] for rows, _ in found)), np.uint64)
    at = 0
    for rows, _ in found:
        words[at : at + len(rows), : rows.shape[1]] = rows
        at += len(rows)
    octets = words.view(np.uint8)
    sizes -= KEY_TRAILER_BYTES
    is_known = _IS_KNOWN[octets[np.arange(len(sizes)), sizes]]
    if not is_known.all():
        raise NotImplementedError("entries of an unknown kind")
    if not prefix_bytes:
        yield b"", KeyColumn(octets, sizes)
        return
    numbers = octets[:, :prefix_bytes].astype(np.int64) @ (1 << 8 * np.arange(prefix_bytes))
    for number in np.unique(numbers).tolist():
        of = numbers == number
        column = KeyColumn(octets[:, prefix_bytes:], sizes - prefix_bytes)
        if not of.all():
            column = KeyColumn(column.octets[of], column.sizes[of])
        yield number.to_bytes(prefix_bytes, "little"), column


def _steps(blocks: Blocks, prefix_bytes: int) -> Iterator[tuple[Words, Ints]]:
    """Yield keys with their trailers, and their sizes: the first entries of many intervals, then the second ones."""
    data = np.frombuffer(blocks.data, np.uint8)
    begins, ends = _intervals(data, blocks)
    for start in range(0, len(begins), _INTERVALS_MAX):
        at, end = begins[start : start + _INTERVALS_MAX], ends[start : start + _INTERVALS_MAX]
        rows, sizes = np.empty((len(at), 0), np.uint64), np.zeros(len(at), np.int64)
        while len(at):
            shared, unshared, value_bytes, at = _lengths(data, at)
            after = at + unshared + value_bytes
            if (shared > sizes).any() or (after > end).any():
                raise ValueError("has an entry that reaches beyond its block")
            sizes = shared + unshared
            least, most = int(sizes.min()), int(sizes.max())
            if least < KEY_TRAILER_BYTES:
                raise ValueError("has a key without its trailer")
            if most > _WIDTH_MAX or least < KEY_TRAILER_BYTES + prefix_bytes:
                raise _UnusualError
            before, rows = rows, _take(data, at - shared, -(-most // _WORD))
            if shared.any():
                both = min(rows.shape[1], before.shape[1])
                masks = _shared_masks(both)[np.minimum(shared, _WORD * both)]
                rows[:, :both] ^= (rows[:, :both] ^ before[:, :both]) & masks
            yield rows, sizes
            at, is_left = after, after < end
            if not is_left.all():
                at, end, rows, sizes = at[is_left], end[is_left], rows[is_left], sizes[is_left]


def _take(data: Octets, at: Ints, words: int) -> Words:
    size = _WORD * words
    found: npt.NDArray[Any] = np.ndarray((len(data) - size + 1,), f"V{size}", data, strides=(1,))[at]
    return found.view("<u8").reshape(len(at), words)


@functools.cache
def _shared_masks(words: int) -> Words:
    """Return, for each number of bytes up to all of them, the mask of these first bytes in a row of words."""
    size = _WORD * words
    octets = np.where(np.arange(size) < np.arange(size + 1)[:, None], 0xFF, 0).astype(np.uint8)
    return octets.view("<u8")


def _intervals(data: Octets, blocks: Blocks) -> tuple[Ints, Ints]:
    block_begins, block_bytes = np.array(blocks.begins, np.int64), np.array(blocks.sizes, np.int64)
    if block_bytes.min() < _COUNT_BYTES:
        raise ValueError("is not a block: it is too short")
    block_ends = block_begins + block_bytes
    words: npt.NDArray[Any] = np.ndarray((len(data) - 3,), "<u4", data, strides=(1,))
    counts = words[block_ends - 4].astype(np.int64)
    if (counts >= _HASH_INDEX).any():
        raise NotImplementedError("data blocks with a hash index")
    if ((counts == 0) | (counts > (block_bytes - 4) // 4)).any():
        raise ValueError("is not a block: its end is not what a block ends in")
    entries_ends = block_ends - 4 - 4 * counts
    firsts = np.cumsum(counts) - counts
    number = np.arange(counts.sum()) - np.repeat(firsts, counts)
    offsets = words[np.repeat(entries_ends, counts) + 4 * number].astype(np.int64)
    begins = np.repeat(block_begins, counts) + offsets
    ends = np.empty_like(begins)
    ends[:-1] = begins[1:]
    ends[firsts + counts - 1] = entries_ends
    if offsets[firsts].any() or (begins >= ends).any():
        raise ValueError("has restarts that are not one behind the other")
    return begins, ends


def _lengths(data: Octets, at: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Decode the three numbers that an entry begins with; return them, and where the bytes of its key are."""
    words = _take(data, at, 1)[:, 0].view(np.int64)
    if not (words & 0x8080).any():
        value_bytes, length = _varint(words >> 16)
        return words & 0x7F, words >> 8 & 0x7F, value_bytes, at + 2 + length
    numbers = []
    for _ in range(3):
        number, length = _varint(_take(data, at, 1)[:, 0].view(np.int64))
        numbers.append(number)
        at = at + length
    return numbers[0], numbers[1], numbers[2], at


def _varint(words: Ints) -> tuple[Ints, Ints | int]:
    """Decode the number that each word begins with; return them, and of how many bytes each is."""
    found, length = words & 0x7F, np.ones(len(words), np.int64)
    more = words & 0x80
    bits = 7
    while more.any():
        if bits >= _VARINT_BITS:
            raise ValueError("has a number that is none")
        is_more = more != 0
        words = words >> 8
        found |= np.where(is_more, (words & 0x7F) << bits, 0)
        length += is_more
        more = np.where(is_more, words & 0x80, 0)
        bits += 7
    return found, length

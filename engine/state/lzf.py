"""Blocks of LZF, as the JVM's compress-lzf writes and reads them.

A block is a row of commands. A first byte below 32 copies as many bytes and one more from the block. Any other repeats
what was written before: its three upper bits are the length less 2, or 7 if the length less 9 stands in a byte of its
own, and the five lower bits with the last byte are the distance less 1.

No wheel that is kept up has this format. Spark offers it beside three faster ones, so plain Python has to do.
"""

from typing import Final

BLOCK_BYTES_MAX: Final = 0xFFFF

_LITERALS_MAX: Final = 32
_DISTANCE_MAX: Final = 1 << 13
_MATCH_MIN: Final = 3
_MATCH_MAX: Final = 264
# The last bytes of a block are left as they are: no match is worth a search there.
_TAIL_BYTES: Final = 4
_LONG: Final = 7


def compress_block(data: bytes) -> bytes | None:
    """Compress up to `BLOCK_BYTES_MAX` bytes.

    Returns:
        None if the result would not be smaller: the stream keeps such a block as it is.
    """
    size = len(data)
    seen: dict[bytes, int] = {}
    out = bytearray()
    literals_from = at = 0
    while at < size - _TAIL_BYTES:
        start = data[at : at + _MATCH_MIN]
        earlier = seen.get(start)
        seen[start] = at
        if earlier is None or at - earlier > _DISTANCE_MAX:
            at += 1
            continue
        length = _match_length(data, earlier, at, min(_MATCH_MAX, size - at))
        _append_literals(out, data[literals_from:at])
        distance = at - earlier - 1
        if length - 2 < _LONG:
            out += bytes(((length - 2) << 5 | distance >> 8, distance & 0xFF))
        else:
            out += bytes((_LONG << 5 | distance >> 8, length - 2 - _LONG, distance & 0xFF))
        at += length
        literals_from = at
    _append_literals(out, data[literals_from:])
    return bytes(out) if len(out) < size else None


def decompress_block(data: bytes, size: int) -> bytes:
    """Decompress one block of `size` bytes.

    Raises:
        ValueError: The block does not come out at that size, or refers to what is not there.
    """
    out = bytearray()
    at, end = 0, len(data)
    try:
        while at < end:
            command = data[at]
            at += 1
            if command < _LITERALS_MAX:
                after = at + command + 1
                if after > end:
                    raise ValueError("a literal goes beyond the end of its block")
                out += data[at:after]
                at = after
                continue
            length = command >> 5
            if length == _LONG:
                length += data[at]
                at += 1
            length += 2
            begin = len(out) - ((command & 0x1F) << 8) - data[at] - 1
            at += 1
            if begin < 0:
                raise ValueError("a match refers to what is before its block")
            if len(out) + length > size:
                break
            repeated = out[begin : begin + length]
            while len(repeated) < length:  # the match overlaps itself
                repeated += repeated[: length - len(repeated)]
            out += repeated
    except IndexError as error:
        raise ValueError("a command goes beyond the end of its block") from error
    if at < end or len(out) != size:
        raise ValueError(f"a block does not come out at {size} bytes")
    return bytes(out)


def _match_length(data: bytes, earlier: int, at: int, most: int) -> int:
    """How many bytes from `at` on are those from `earlier` on; at least the three that are known to be."""
    length = _MATCH_MIN
    while length + 8 <= most and data[earlier + length : earlier + length + 8] == data[at + length : at + length + 8]:
        length += 8
    while length < most and data[earlier + length] == data[at + length]:
        length += 1
    return length


def _append_literals(out: bytearray, literals: bytes) -> None:
    for start in range(0, len(literals), _LITERALS_MAX):
        run = literals[start : start + _LITERALS_MAX]
        out.append(len(run) - 1)
        out += run

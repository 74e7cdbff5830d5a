"""The four streams of Spark's changelogs, as the JVM has them.

None of the four is the usual file format of its algorithm but zstd's:

- lz4: blocks of lz4-java's `LZ4BlockOutputStream`, each `LZ4Block`, a token (upper half: 1 as it is, 2 compressed;
  lower half: the logarithm of the greatest block less 10), two little-endian lengths, and the lower 28 bits of the
  xxHash32 of what is in it; an empty block ends the stream.
- zstd: frames.
- snappy: a head of 16 bytes, then per block its big-endian length and a raw block (snappy-java).
- lzf: per block `ZV`, 0 or 1 (as it is, compressed), its length of two bytes and, if compressed, the one in it.

No length is believed before it was checked against what the format allows, and decompressing holds one block.

A block of LZF is a row of commands, as the JVM's compress-lzf writes and reads them. A first byte below 32 copies as
many bytes and one more from the block. Any other repeats what was written before: its three upper bits are the length
less 2, or 7 if the length less 9 is in a byte of its own, and the five lower bits with the last byte are the distance
less 1. No maintained wheel has this format. Spark offers it beside three faster ones, so plain Python has to do.

Source:
    facts of Spark 4.3, `CompressionCodec.scala`; design 0004, section 3.
"""

import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, TypeAlias, get_args

import cramjam
import xxhash

from engine.errors import DamagedError, UsageError
from engine.rocksdb.sst_blocks import ZSTD_WINDOW_LOG_MAX

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LZF_BLOCK_BYTES_MAX: Final = 0xFFFF

_LITERALS_MAX: Final = 32
_DISTANCE_MAX: Final = 1 << 13
_MATCH_MIN: Final = 3
_MATCH_MAX: Final = 264
# The last bytes of a block are left as they are: no match is worth a search there.
_TAIL_BYTES: Final = 4
_LONG: Final = 7


def compress_block(data: bytes) -> bytes | None:
    """Compress up to `LZF_BLOCK_BYTES_MAX` bytes; None if the result is not smaller: the stream keeps such a block."""
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
    """Decompress one block; a `ValueError` if it does not come out at `size` bytes, or refers to what is not there."""
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
    """Count the bytes from `at` on that equal those from `earlier` on; three are known to."""
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


Codec: TypeAlias = Literal["lz4", "zstd", "snappy", "lzf"]
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)

# What Spark's defaults are; a reader takes every size that the formats allow.
BLOCK_BYTES: Final = 32 * 1024
ZSTD_LEVEL: Final = 1
# The greatest block that an lz4 token can announce. Snappy has no limit of its own, and gets this one.
BLOCK_BYTES_MAX: Final = 32 * 1024 * 1024
# What a frame of zstd comes out in.
_PIECE_BYTES: Final = 256 * 1024

_LZ4_MAGIC: Final = b"LZ4Block"
_LZ4_HEAD: Final = struct.Struct("<8sBiiI")
_LZ4_RAW: Final = 0x10
_LZ4_COMPRESSED: Final = 0x20
_LZ4_LEVEL_BASE: Final = 10
_LZ4_SEED: Final = 0x9747B28C
_LZ4_CHECKSUM_MASK: Final = 0x0FFFFFFF
_LZ4_LEVEL: Final = BLOCK_BYTES.bit_length() - 1 - _LZ4_LEVEL_BASE
_LZ4_END: Final = _LZ4_HEAD.pack(_LZ4_MAGIC, _LZ4_RAW | _LZ4_LEVEL, 0, 0, 0)

_SNAPPY_MAGIC: Final = b"\x82SNAPPY\x00"
_SNAPPY_HEAD: Final = _SNAPPY_MAGIC + struct.pack(">ii", 1, 1)
_SNAPPY_LENGTH: Final = struct.Struct(">i")
# A raw block that grows: what snappy's own bound says.
_SNAPPY_COMPRESSED_MAX: Final = 32 + BLOCK_BYTES_MAX + BLOCK_BYTES_MAX // 6

_LZF_MAGIC: Final = b"ZV"
_LZF_LENGTH: Final = struct.Struct(">H")


def decompress_chunks(codec: Codec, chunks: Iterable[bytes], *, subject: str = "") -> Iterator[bytes]:
    """Decompress a stream, cut anywhere into chunks, into pieces of at most `BLOCK_BYTES_MAX`, most of them far below.

    Streams behind one another are one, as for the JVM's readers. Errors name the subject.

    Raises:
        DamagedError: From the iteration: a block is cut short, contradicts its checksum, or is none.
        UsageError: There is no such codec.
    """
    _check_known(codec)
    return _DECODERS[codec](_Source(chunks, subject))


class Compressor:
    """Compresses one stream: zstd's own, or blocks of one size, encoded one after another. Not for two threads at once.

    A codec that there is not is a `UsageError`.
    """

    def __init__(self, codec: Codec) -> None:
        _check_known(codec)
        self._zstd = zstd.ZstdCompressor(level=ZSTD_LEVEL) if codec == "zstd" else None
        self._encode = _BLOCK_ENCODERS.get(codec, bytes)
        self._block_bytes = LZF_BLOCK_BYTES_MAX if codec == "lzf" else BLOCK_BYTES
        self._head = _SNAPPY_HEAD if codec == "snappy" else b""
        self._end = _LZ4_END if codec == "lz4" else b""
        self._pending = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> bytes:
        """Take the next bytes, and return the part of the stream that is finished, maybe nothing."""
        if self._zstd is not None:
            return self._zstd.compress(data)
        self._pending += data
        if len(self._pending) < self._block_bytes:
            return b""
        return self._encoded(len(self._pending) // self._block_bytes * self._block_bytes)

    def finish(self) -> bytes:
        """Return the rest of the stream. Nothing may be written after it."""
        if self._zstd is not None:
            return self._zstd.flush()
        return self._encoded(len(self._pending)) + self._end

    def _encoded(self, until: int) -> bytes:
        with memoryview(self._pending) as pending:
            blocks = [
                self._encode(bytes(pending[at : min(at + self._block_bytes, until)]))
                for at in range(0, until, self._block_bytes)
            ]
        del self._pending[:until]
        head, self._head = self._head, b""
        return head + b"".join(blocks)


def _lz4_block(data: bytes) -> bytes:
    kind, compressed = _LZ4_COMPRESSED, bytes(cramjam.lz4.compress_block(data, store_size=False))
    if len(compressed) >= len(data):
        kind, compressed = _LZ4_RAW, data
    checksum = xxhash.xxh32_intdigest(data, _LZ4_SEED) & _LZ4_CHECKSUM_MASK
    return _LZ4_HEAD.pack(_LZ4_MAGIC, kind | _LZ4_LEVEL, len(compressed), len(data), checksum) + compressed


def _snappy_block(data: bytes) -> bytes:
    compressed = bytes(cramjam.snappy.compress_raw(data))
    return _SNAPPY_LENGTH.pack(len(compressed)) + compressed


def _lzf_block(data: bytes) -> bytes:
    compressed = compress_block(data)
    if compressed is None:
        return _LZF_MAGIC + b"\x00" + _LZF_LENGTH.pack(len(data)) + data
    return _LZF_MAGIC + b"\x01" + _LZF_LENGTH.pack(len(compressed)) + _LZF_LENGTH.pack(len(data)) + compressed


_BLOCK_ENCODERS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "lz4": _lz4_block,
    "snappy": _snappy_block,
    "lzf": _lzf_block,
}


class _Source:
    def __init__(self, chunks: Iterable[bytes], subject: str) -> None:
        self._chunks = iter(chunks)
        self._chunk = b""
        self._at = 0
        self._before = 0
        self._subject = subject

    def is_at_end(self) -> bool:
        """Return whether there is nothing more; may read on."""
        while self._at == len(self._chunk):
            chunk = next(self._chunks, None)
            if chunk is None:
                return True
            self._before += len(self._chunk)
            self._chunk, self._at = chunk, 0
        return False

    def rest_of_chunk(self) -> bytes:
        """Return the rest of the current chunk, at least a byte unless the stream is at its end."""
        if self.is_at_end():
            return b""
        rest = self._chunk[self._at :]
        self._at = len(self._chunk)
        return rest

    def give_back(self, size: int) -> None:
        self._at -= size

    def take(self, size: int, what: str) -> bytes:
        pieces = []
        while size:
            if self.is_at_end():
                raise self.damaged(f"ends within {what}")
            piece = self._chunk[self._at : self._at + size]
            self._at += len(piece)
            size -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def damaged(self, message: str) -> DamagedError:
        place = self._before + self._at
        hint = "the file was cut short or altered, or another codec wrote it; fetch it again"
        return DamagedError(f"{message} (byte {place})", operation="decompress", subject=self._subject, hint=hint)


def _lz4_pieces(source: _Source) -> Iterator[bytes]:
    ended = False
    while not source.is_at_end():
        magic, token, compressed_bytes, plain_bytes, checksum = _LZ4_HEAD.unpack(
            source.take(_LZ4_HEAD.size, "the head of a block")
        )
        kind, most = token & 0xF0, 1 << (token & 0x0F) + _LZ4_LEVEL_BASE
        if magic != _LZ4_MAGIC or kind not in (_LZ4_RAW, _LZ4_COMPRESSED):
            raise source.damaged("is not a stream of lz4 blocks")
        raw = kind == _LZ4_RAW
        fits = 0 <= plain_bytes <= most and 0 <= compressed_bytes <= most
        if not fits or (not plain_bytes) != (not compressed_bytes) or (raw and plain_bytes != compressed_bytes):
            raise source.damaged(f"has a block of {compressed_bytes} bytes for {plain_bytes}, where {most} are allowed")
        ended = plain_bytes == 0
        if ended:
            if checksum:
                raise source.damaged("has an end block with a checksum")
            continue
        block = source.take(compressed_bytes, "a block")
        plain = block if raw else _lz4_plain(source, block, plain_bytes)
        if xxhash.xxh32_intdigest(plain, _LZ4_SEED) & _LZ4_CHECKSUM_MASK != checksum:
            raise source.damaged("has a block that does not match its checksum")
        yield plain
    if not ended:
        raise source.damaged("ends without an end block")


def _lz4_plain(source: _Source, block: bytes, plain_bytes: int) -> bytes:
    plain = bytearray(plain_bytes)
    try:
        size: int = cramjam.lz4.decompress_block_into(block, plain, output_len=plain_bytes)
    except cramjam.DecompressionError as error:
        raise source.damaged("has a block that is not lz4") from error
    if size != plain_bytes:
        raise source.damaged(f"has a block of {size} bytes that says {plain_bytes}")
    return bytes(plain)


def _zstd_pieces(source: _Source) -> Iterator[bytes]:
    options = {int(zstd.DecompressionParameter.window_log_max): ZSTD_WINDOW_LOG_MAX}
    while True:
        frame = zstd.ZstdDecompressor(options=options)
        while not frame.eof:
            data = source.rest_of_chunk() if frame.needs_input else b""
            if frame.needs_input and not data:
                raise source.damaged("ends within a frame")
            try:
                piece = frame.decompress(data, max_length=_PIECE_BYTES)
            except zstd.ZstdError as error:
                raise source.damaged(f"is not zstd: {error}") from error
            if piece:
                yield piece
        source.give_back(len(frame.unused_data))
        if source.is_at_end():
            return


def _snappy_pieces(source: _Source) -> Iterator[bytes]:
    if source.take(len(_SNAPPY_HEAD), "the head")[: len(_SNAPPY_MAGIC)] != _SNAPPY_MAGIC:
        raise source.damaged("is not a stream of snappy-java")
    while not source.is_at_end():
        start = source.take(_SNAPPY_LENGTH.size, "the length of a block")
        if start == _SNAPPY_MAGIC[:4]:  # another stream behind the first
            source.take(len(_SNAPPY_HEAD) - len(start), "a head")
            continue
        (size,) = _SNAPPY_LENGTH.unpack(start)
        if not 0 <= size <= _SNAPPY_COMPRESSED_MAX:
            raise source.damaged(f"has a block of {size} bytes, where {_SNAPPY_COMPRESSED_MAX} are allowed")
        block = source.take(size, "a block")
        try:
            plain_bytes = cramjam.snappy.decompress_raw_len(block)
            if plain_bytes > BLOCK_BYTES_MAX:
                raise source.damaged(f"has a block for {plain_bytes} bytes, where {BLOCK_BYTES_MAX} are allowed")
            yield bytes(cramjam.snappy.decompress_raw(block))
        except cramjam.DecompressionError as error:
            raise source.damaged("has a block that is not snappy") from error


def _lzf_pieces(source: _Source) -> Iterator[bytes]:
    while not source.is_at_end():
        head = source.take(5, "the head of a block")
        if head[:2] != _LZF_MAGIC or head[2] > 1:
            raise source.damaged("is not a stream of lzf blocks")
        (size,) = _LZF_LENGTH.unpack_from(head, 3)
        if head[2] == 0:
            yield source.take(size, "a block")
            continue
        (plain_bytes,) = _LZF_LENGTH.unpack(source.take(2, "the head of a block"))
        try:
            yield decompress_block(source.take(size, "a block"), plain_bytes)
        except ValueError as error:
            raise source.damaged(f"is not lzf: {error}") from error


_DECODERS: Final[dict[str, Callable[[_Source], Iterator[bytes]]]] = {
    "lz4": _lz4_pieces,
    "zstd": _zstd_pieces,
    "snappy": _snappy_pieces,
    "lzf": _lzf_pieces,
}


def _check_known(codec: str) -> None:
    if codec not in CODECS:
        hint = f"one of {', '.join(CODECS)}"
        raise UsageError("is not a codec of Spark's", operation="choose a codec", subject=str(codec), hint=hint)

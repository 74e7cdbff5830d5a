"""Sets off one bomb in a process that may not take more memory than a reader's share, and shows what came of it.

    python -m tests.hostile.bomb_probe BOMB

The last line is the class of the error, or the number of bytes that came out; a process that takes more than its share
dies of a MemoryError, which no bomb may cause (architecture, H3).
"""

import bz2
import hashlib
import io
import resource
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, Final

import cramjam
import msgspec
import xxhash

from engine.rocksdb.sst_blocks import decompress_sst_block
from engine.state.compression import Codec, Compressor, decompress_chunks
from engine.state.zips import read_state_zip
from index.snapshot.codec import KIND_COMMIT, KIND_INDEX, decode_commit, decode_index
from index.spark.changelog import ChangelogDecoder, encode_header
from index.spark.checksums import decode_file_checksum
from index.spark.schema import decode_state_schema
from tests.hostile.forger import sealed

MIB: Final = 1024 * 1024
# Beside what the interpreter and its libraries have mapped before the bomb goes off.
SHARE_BYTES: Final = 320 * MIB
# What a bomb would become: more than such a process can hold.
_BOMB_BYTES: Final = 1 << 29
_SUBJECT: Final = "bomb"


def _pieces(codec: Codec, data: bytes) -> int:
    return sum(map(len, decompress_chunks(codec, [data], subject=_SUBJECT)))


def zstd_bomb() -> int:
    """Half a gigabyte of zeros in some ten kilobytes: they come out in pieces."""
    compressor = Compressor("zstd")
    parts = [compressor.write(bytes(MIB)) for _ in range(_BOMB_BYTES // MIB)]
    return _pieces("zstd", b"".join((*parts, compressor.finish())))


def zstd_window() -> int:
    """A frame that asks for a window of two gigabytes."""
    head = struct.pack("<I", 0xFD2FB528) + bytes((0x00, (31 - 10) << 3))
    return _pieces("zstd", head + bytes(100))


def lz4_bomb() -> int:
    """A block that says it holds two gigabytes."""
    return _pieces("lz4", struct.pack("<8sBiiI", b"LZ4Block", 0x2F, 100, (1 << 31) - 1, 0) + bytes(100))


def _unzipped_bytes(data: bytes) -> int:
    return sum(map(len, read_state_zip(data, subject=_SUBJECT).files.values()))


def lz4_blocks() -> int:
    """Eight blocks of 32 MiB each, one behind the other."""
    plain = bytes(32 * MIB)
    packed = bytes(cramjam.lz4.compress_block(plain, store_size=False))
    checksum = xxhash.xxh32_intdigest(plain, 0x9747B28C) & 0x0FFFFFFF
    block = struct.pack("<8sBiiI", b"LZ4Block", 0x2F, len(packed), len(plain), checksum) + packed
    end = struct.pack("<8sBiiI", b"LZ4Block", 0x15, 0, 0, 0)
    return _pieces("lz4", block * 8 + end)


def snappy_bomb() -> int:
    """A block that says it holds four gigabytes."""
    block = b"\xff\xff\xff\xff\x0f" + bytes(20)
    return _pieces("snappy", b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, len(block)) + block)


def lzf_bomb() -> int:
    """Ten thousand blocks that each repeat a byte as often as a block can."""
    command = bytes((0, 7)) + bytes((0xE0, 255, 0)) * 248
    block = b"ZV\x01" + struct.pack(">HH", len(command), 1 + 264 * 248)
    return _pieces("lzf", (block + command) * 100)


def zip_bomb() -> int:
    """An entry of 300 MiB, which says that it is as large."""
    return _unzipped_bytes(_zipped(300 * MIB))


def zip_that_lies() -> int:
    """The same, but it says that it has one byte."""
    data = bytearray(_zipped(64 * MIB))
    listed = data.rfind(b"PK\x01\x02")
    data[listed + 24 : listed + 28] = (1).to_bytes(4, "little")
    return _unzipped_bytes(bytes(data))


def zip_of_many() -> int:
    """A hundred and forty entries, none of them large."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
        for number in range(140):
            out.writestr(f"MANIFEST-{number:06d}", bytes(2 * MIB))
    return _unzipped_bytes(target.getvalue())


def _zipped(size_bytes: int) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out, out.open("CURRENT", "w") as entry:
        for _ in range(size_bytes // MIB):
            entry.write(bytes(MIB))
    return target.getvalue()


def index_that_inflates() -> int:
    """An envelope that says it holds a thousand bytes and inflates to 64 MiB."""
    return _index(_deflated(64 * MIB), raw_bytes=1000)


def index_that_lies() -> int:
    """An envelope that says it holds an exabyte."""
    return _index(zlib.compress(b"x"), raw_bytes=1 << 60)


def _deflated(size_bytes: int) -> bytes:
    deflater = zlib.compressobj(1)
    return b"".join([*(deflater.compress(bytes(MIB)) for _ in range(size_bytes // MIB)), deflater.flush()])


def _index(stored: bytes, *, raw_bytes: int) -> int:
    head = struct.pack("<8scBBBQ", b"TIDEMARK", KIND_INDEX, 1, 1, 0, raw_bytes)
    decode_index(head + hashlib.sha256(head + stored).digest() + stored, subject=_SUBJECT)
    return 0


def index_of_counts() -> int:
    """Arrays that say they have four thousand million entries, one in another."""
    payload = b"\x84\xa4kind\xa8snapshot\xa3dir" + b"\x92\xa0\xdd\xff\xff\xff\xff" * 50
    decode_index(sealed(KIND_INDEX, msgspec.Raw(payload)), subject=_SUBJECT)
    return 0


def index_that_nests() -> int:
    """A million arrays, one in another."""
    decode_index(sealed(KIND_INDEX, msgspec.Raw(b"\x81\xa1x" + b"\x91" * MIB)), subject=_SUBJECT)
    return 0


def record_of_text() -> int:
    """A text that says it has four gigabytes."""
    payload = b"\x81\xa7offsets\xdb\xff\xff\xff\xff"
    decode_commit(sealed(KIND_COMMIT, msgspec.Raw(payload)), subject=_SUBJECT)
    return 0


def changelog_of_one_key() -> int:
    """A key that says it has two gigabytes."""
    return _changelog(struct.pack(">i", (1 << 31) - 1) + bytes(100))


def changelog_of_a_large_key() -> int:
    """A key of almost as much as may be, of which nothing comes: nothing is set aside for it."""
    return _changelog(struct.pack(">i", 500 * MIB) + bytes(100))


def changelog_lineage() -> int:
    """A lineage that nests as deep as its 65,535 bytes allow."""
    text = b"[" * 65_000
    return _changelog(encode_header(3)[:4] + len(text).to_bytes(2, "big") + text)


def _changelog(data: bytes) -> int:
    decoder = ChangelogDecoder(_SUBJECT)
    decoder.feed(data)
    decoder.finish()
    return 0


def _zstd(plain: bytes) -> bytes:
    compressor = Compressor("zstd")
    return compressor.write(plain) + compressor.finish()


def sst_block() -> int:
    """A compressed block of an SST, by each algorithm, that holds far more than it may."""
    plain = bytes(64 * MIB)
    for kind, block in (
        (2, _deflated(64 * MIB)[2:-4]),
        (3, bz2.compress(plain)),
        (7, _zstd(plain)),
        (1, bytes(cramjam.snappy.compress_raw(plain))),
        (5, bytes(cramjam.lz4.compress_block(plain, store_size=False))),
    ):
        for sized in (False, True):
            try:
                decompress_sst_block(kind, b"\xff\xff\xff\xff\x0f" * sized + block, sized=sized, plain_bytes_max=MIB)
            except ValueError:
                continue
            raise AssertionError(f"a block of kind {kind} was taken")
    return 0


def schema_of_counts() -> int:
    """A schema that says it has thirty-two thousand families of a thousand pieces each."""
    decode_state_schema(b"\0\2v3" + struct.pack(">i", 32_768) + b"\0\1a\0\0" + struct.pack(">i", 1024) + bytes(100))
    return 0


def checksum_of_lies() -> int:
    """A checksum file without end."""
    decode_file_checksum(b"[" * (32 * MIB), subject=_SUBJECT)
    return 0


BOMBS: Final[dict[str, Callable[[], int]]] = {
    bomb.__name__: bomb
    for bomb in (
        *(zstd_bomb, zstd_window, lz4_bomb, lz4_blocks, snappy_bomb, lzf_bomb),
        *(zip_bomb, zip_that_lies, zip_of_many),
        *(index_that_inflates, index_that_lies, index_of_counts, index_that_nests, record_of_text),
        *(changelog_of_one_key, changelog_of_a_large_key, changelog_lineage),
        *(sst_block, schema_of_counts, checksum_of_lies),
    )
}


def main() -> None:
    """Set it off."""
    with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + SHARE_BYTES, mapped_bytes + SHARE_BYTES))
    for name in sys.argv[1:]:
        begun = time.monotonic()
        try:
            came: Any = BOMBS[name]()
        except Exception as error:  # noqa: BLE001  (reported, whatever it is)
            came = type(error).__name__
        sys.stdout.write(f"{name} {came} {time.monotonic() - begun:.1f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

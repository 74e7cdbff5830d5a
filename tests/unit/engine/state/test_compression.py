"""The four streams of Spark's changelogs (design 0004, section 3; cases with bytes of the JVM's own libraries)."""

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Iterator

import pytest

from engine.errors import DamagedError, UsageError
from engine.state.compression import BLOCK_BYTES, CODECS, Codec, Compressor, decompress_chunks

HELLO = b"hello hello hello hello"
# Written by lz4-java 1.11, zstd-jni 1.5.7, snappy-java 1.1.10 and compress-lzf 1.2, set up as Spark 4.3 sets them up.
OF_THE_JVM: dict[tuple[Codec, bytes], str] = {
    ("lz4", HELLO): "4c5a34426c6f636b250f00000017000000226416086868656c6c6f2006005068656c6c6f"
    "4c5a34426c6f636b15000000000000000000000000",
    ("zstd", HELLO): "28b52ffd00486500003068656c6c6f200100994b11",
    ("snappy", HELLO): "82534e415050590000000001000000010000000b171468656c6c6f20420600",
    ("lzf", HELLO): "5a5601000d00170568656c6c6f20e00605016c6f",
    ("lz4", b"a" * 17): "4c5a34426c6f636b250a00000011000000fbaf36051761010050616161616"
    "14c5a34426c6f636b15000000000000000000000000",
    ("zstd", b"a" * 17): "28b52ffd004845000010616101001dc002",
    ("snappy", b"a" * 17): "82534e41505059000000000100000001000000061100613e0100",
    ("lzf", b"a" * 17): "5a5601000800110061e00500016161",
    ("lz4", b"x"): "4c5a34426c6f636b1501000000010000001093c001784c5a34426c6f636b15000000000000000000000000",
    ("lzf", b"x"): "5a5600000178",
    ("lz4", b""): "4c5a34426c6f636b15000000000000000000000000",
    ("zstd", b""): "28b52ffd2000010000",
    ("snappy", b""): "82534e41505059000000000100000001",
    ("lzf", b""): "",
}


def mixed(size: int, seed: int = 1) -> bytes:
    rng = random.Random(seed)
    parts: list[bytes] = []
    while sum(map(len, parts)) < size:
        parts += [b"key-%06d" % rng.randrange(1000) for _ in range(200)]
        parts.append(rng.randbytes(300))
        parts.append(bytes(rng.randrange(2000)))
    return b"".join(parts)[:size]


def compressed(codec: Codec, data: bytes, step: int = 7001) -> bytes:
    compressor = Compressor(codec)
    written = [compressor.write(data[at : at + step]) for at in range(0, len(data), step)]
    return b"".join(written) + compressor.finish()


def chunks(data: bytes, step: int) -> Iterator[bytes]:
    return (data[at : at + step] for at in range(0, len(data), step))


def plain(codec: Codec, data: bytes, step: int = 65_536) -> bytes:
    return b"".join(decompress_chunks(codec, chunks(data, step), subject="7.changelog"))


@pytest.mark.parametrize("codec, data", OF_THE_JVM)
def test_streams_of_the_jvm_are_read(codec: Codec, data: bytes) -> None:
    assert plain(codec, stream_of_the_jvm(codec, data)) == data
    assert plain(codec, stream_of_the_jvm(codec, data), step=1) == data


@pytest.mark.parametrize("codec, data", [case for case in OF_THE_JVM if case[0] != "lzf"])
def test_what_is_written_is_byte_for_byte_what_the_jvm_writes(codec: Codec, data: bytes) -> None:
    assert compressed(codec, data) == stream_of_the_jvm(codec, data)


def stream_of_the_jvm(codec: Codec, data: bytes) -> bytes:
    return bytes.fromhex(OF_THE_JVM[codec, data])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "size", [0, 1, 15, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, 65_535, 65_536, 300_001]
)
def test_what_was_compressed_comes_back(codec: Codec, size: int) -> None:
    for data in (mixed(size), random.Random(2).randbytes(size), bytes(size)):
        stream = compressed(codec, data)
        for step in (1 if len(stream) < 3000 else 501, 65_536):
            assert plain(codec, stream, step) == data


@pytest.mark.parametrize("codec", CODECS)
def test_the_size_of_the_writes_does_not_matter(codec: Codec) -> None:
    data = mixed(200_000)
    assert compressed(codec, data, step=13) == compressed(codec, data, step=200_000)


@pytest.mark.parametrize("codec", CODECS)
def test_streams_behind_one_another_are_one(codec: Codec) -> None:
    first, second = mixed(70_000), mixed(100, seed=2)
    stream = compressed(codec, first) + compressed(codec, second)
    assert plain(codec, stream) == first + second
    assert plain(codec, stream, step=97) == first + second


@pytest.mark.parametrize("codec", ["lz4", "zstd", "snappy"])
def test_a_stream_that_is_cut_anywhere_never_comes_back_whole(codec: Codec) -> None:
    data = mixed(3 * BLOCK_BYTES)
    stream = compressed(codec, data)
    for cut in [*range(0, len(stream), 211), len(stream) - 1]:
        try:
            whole = plain(codec, stream[:cut])
        except DamagedError:
            continue
        # Snappy's has no end mark: a cut between two blocks does not show, and the records have to show it.
        assert codec == "snappy"
        assert len(whole) < len(data)
        assert len(whole) % BLOCK_BYTES == 0


def test_an_error_names_the_file_and_the_place() -> None:
    with pytest.raises(DamagedError, match=r"7\.changelog: ends within a block \(byte 500\)") as raised:
        plain("lz4", compressed("lz4", mixed(BLOCK_BYTES))[:500])
    assert raised.value.subject == "7.changelog"


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_stream_without_its_end_is_damaged(codec: Codec) -> None:
    with pytest.raises(DamagedError):
        plain(codec, b"")
    with pytest.raises(DamagedError):
        plain(codec, compressed(codec, mixed(1000))[:-1])


def test_lz4_without_its_end_block_is_damaged() -> None:
    with pytest.raises(DamagedError, match="end block"):
        plain("lz4", compressed("lz4", mixed(1000))[:-21])


def test_every_altered_byte_of_an_lz4_stream_is_found_or_changes_nothing() -> None:
    data = random.Random(4).randbytes(600) + mixed(600)
    stream = compressed("lz4", data)
    found = 0
    for at in range(len(stream)):
        altered = bytearray(stream)
        altered[at] ^= 0x04
        try:
            assert plain("lz4", bytes(altered)) == data
        except DamagedError:
            found += 1
    # What nothing protects: the greatest block that a token allows, and which of two equal places a match refers to.
    assert found >= len(stream) - 40


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", range(50))
def test_no_bytes_do_more_than_be_refused(codec: Codec, seed: int) -> None:
    rng = random.Random(seed)
    stream = bytearray(compressed(codec, mixed(5000)))
    for _ in range(rng.randrange(1, 4)):
        stream[rng.randrange(len(stream))] = rng.randrange(256)
    with contextlib.suppress(DamagedError):
        plain(codec, bytes(stream), step=rng.choice([1, 100, 10_000]))


LZ4_BLOCK = struct.Struct("<8sBiiI")


@pytest.mark.parametrize(
    "codec, stream",
    [
        pytest.param("lz4", LZ4_BLOCK.pack(b"LZ4Block", 0x25, 10, 32_769, 0), id="lz4: above what its token allows"),
        pytest.param("lz4", LZ4_BLOCK.pack(b"LZ4Block", 0x25, -1, 10, 0), id="lz4: a negative length"),
        pytest.param("lz4", LZ4_BLOCK.pack(b"LZ4Block", 0x25, 2**31 - 1, 10, 0), id="lz4: 2 GiB in ten bytes"),
        pytest.param("lz4", LZ4_BLOCK.pack(b"LZ4Block", 0x15, 5, 6, 0) + b"abcde", id="lz4: raw of another length"),
        pytest.param("lz4", LZ4_BLOCK.pack(b"LZ4Block", 0x35, 5, 5, 0) + b"abcde", id="lz4: an unknown method"),
        pytest.param("lz4", LZ4_BLOCK.pack(b"LZ4Block", 0x15, 0, 0, 1), id="lz4: an end with a checksum"),
        pytest.param("lz4", LZ4_BLOCK.pack(b"LZ4Block", 0x25, 0, 5, 0), id="lz4: five bytes from none"),
        pytest.param("lz4", b"\x04\x22\x4d\x18" + bytes(30), id="lz4: the frame format"),
        pytest.param("zstd", b"LZ4Block" + bytes(40), id="zstd: another codec"),
        pytest.param("zstd", bytes.fromhex("28b52ffd00b8") + b"\x00" * 20, id="zstd: a window of 8 GiB"),
        pytest.param("snappy", b"\xff\x06\x00\x00sNaPpY" + bytes(30), id="snappy: the framing format"),
        pytest.param("snappy", b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, -5), id="snappy: a negative length"),
        pytest.param("snappy", b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, 2**31 - 1), id="snappy: 2 GiB"),
        pytest.param(
            "snappy",
            b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, 8) + b"\xff\xff\xff\xff\x0fabc",
            id="snappy: 4 GiB from eight bytes",
        ),
        pytest.param("lzf", b"ZV\x02\x00\x01a", id="lzf: an unknown kind"),
        pytest.param("lzf", b"ZX\x00\x00\x01a", id="lzf: another head"),
        pytest.param("lzf", b"ZV\x00\x00\x05abc", id="lzf: cut"),
        pytest.param("lzf", b"ZV\x01\x00\x04\xff\xff\x00a\x20\x01", id="lzf: a match before the block"),
    ],
)
def test_a_stream_that_is_none_is_refused_before_memory_is_spent_on_it(codec: Codec, stream: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError) as raised:
            plain(codec, stream)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert raised.value.subject == "7.changelog"
    assert raised.value.hint
    assert peak_bytes < 1024 * 1024


@pytest.mark.parametrize("codec", CODECS)
def test_a_stream_of_zeros_comes_out_in_small_pieces(codec: Codec) -> None:
    size = 2_000_000 if codec == "lzf" else 20_000_000
    pieces = [len(piece) for piece in decompress_chunks(codec, [compressed(codec, bytes(size), step=1_000_000)])]
    assert sum(pieces) == size
    assert max(pieces) <= 256 * 1024


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_read_before_it_is_asked_for(codec: Codec) -> None:
    stream = compressed(codec, random.Random(3).randbytes(1_000_000))
    taken: list[int] = []

    def source() -> Iterator[bytes]:
        for chunk in chunks(stream, 10_000):
            taken.append(len(chunk))
            yield chunk

    pieces = decompress_chunks(codec, source())
    assert taken == []
    next(pieces)
    assert sum(taken) <= 140_000


def test_a_codec_that_spark_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="codec") as raised:
        Compressor("gzip")  # type: ignore[arg-type]
    assert "lz4, zstd, snappy, lzf" in raised.value.hint
    with pytest.raises(UsageError, match="codec"):
        decompress_chunks("none", [])  # type: ignore[arg-type]

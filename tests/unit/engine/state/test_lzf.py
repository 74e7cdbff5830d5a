import contextlib
import random

import pytest

from engine.state.compression import LZF_BLOCK_BYTES_MAX, compress_block, decompress_block


def words(seed: int, size: int) -> bytes:
    """Bytes with repetitions of all lengths and distances, and some without."""
    rng = random.Random(seed)
    out = bytearray()
    while len(out) < size:
        match rng.randrange(3):
            case 0:
                out += rng.randbytes(rng.randrange(1, 50))
            case 1:
                out += bytes([rng.randrange(256)]) * rng.randrange(1, 700)
            case _ if out:
                begin = rng.randrange(len(out))
                out += out[begin : begin + rng.randrange(1, 400)]
    return bytes(out[:size])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(bytes(LZF_BLOCK_BYTES_MAX), id="one byte, as often as goes"),
        pytest.param(b"abc" * 1000, id="a match that overlaps itself"),
        pytest.param(b"a" * 12, id="the shortest that gets smaller"),
        pytest.param((bytes(range(256)) * 33)[: 8192 + 300], id="matches at the greatest distance"),
        pytest.param(b"key-000001key-000002key-000003", id="short matches"),
        *(pytest.param(words(seed, 1000 + seed * 4000), id=f"words {seed}") for seed in range(16)),
    ],
)
def test_what_was_compressed_comes_back(data: bytes) -> None:
    compressed = compress_block(data)
    assert compressed is not None
    assert len(compressed) < len(data)
    assert decompress_block(compressed, len(data)) == data


@pytest.mark.parametrize("data", [b"", b"x", b"abcdefgh", random.Random(1).randbytes(5000)])
def test_what_would_not_get_smaller_is_left_to_the_stream(data: bytes) -> None:
    assert compress_block(data) is None


@pytest.mark.parametrize(
    "block, data",
    [
        ("00 61", b"a"),
        ("00 61 20 00", b"aaaa"),  # distance 1, length 3
        ("02 61 62 63 40 02", b"abcabca"),  # distance 3, length 4: it overlaps itself
        ("00 61 e0 00 00", b"a" * 10),  # the length 9 in a byte of its own
        ("00 61 e0 ff 00", b"a" * 265),
        ("05 68656c6c6f20 e0 06 05 01 6c6f", b"hello hello hello hello"),
    ],
)
def test_commands_mean_what_the_jvm_means_by_them(block: str, data: bytes) -> None:
    assert decompress_block(bytes.fromhex(block), len(data)) == data


@pytest.mark.parametrize(
    "block, size",
    [
        pytest.param("05 61 62", 6, id="literals go beyond the end"),
        pytest.param("00 61 20", 4, id="no space for the distance"),
        pytest.param("00 61 e0", 11, id="no space for the length"),
        pytest.param("00 61 20 01", 4, id="a match before the block"),
        pytest.param("20 00", 3, id="a match before anything"),
        pytest.param("00 61 20 00", 5, id="shorter than it says"),
        pytest.param("00 61 20 00", 3, id="longer than it says"),
        pytest.param("00 61 e0 ff 00", 10, id="much longer than it says"),
        pytest.param("00 61", 0, id="something where nothing is said"),
    ],
)
def test_blocks_that_are_damaged_are_refused(block: str, size: int) -> None:
    with pytest.raises(ValueError, match="block"):
        decompress_block(bytes.fromhex(block), size)


@pytest.mark.parametrize("seed", range(200))
def test_no_bytes_do_more_than_be_refused_or_come_out_at_their_size(seed: int) -> None:
    rng = random.Random(seed)
    block, size = rng.randbytes(rng.randrange(40)), rng.randrange(200)
    with contextlib.suppress(ValueError):
        assert len(decompress_block(block, size)) == size

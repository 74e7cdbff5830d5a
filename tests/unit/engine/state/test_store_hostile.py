"""Snapshots that nobody wrote by accident: an older one takes their place, and nothing gets out of hand (N4, R7)."""

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import cramjam
import pytest
import xxhash

from engine.state.changelogs import open_changelog
from engine.state.compression import Codec
from engine.state.zips import ZIP_BYTES_MAX
from index.spark.changelog import PUT, encode_end, encode_record
from index.spark.checksums import FILE_CHECKSUM_BYTES_MAX
from tests.unit.engine.state.state_store_kit import Bench, Conf, Ids, check_numbers, last_load, write_numbers


def rezip(path: Path, **changed: bytes | Callable[[bytes], bytes]) -> None:
    """Change or add entries of a zip."""
    target = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        contents = {name: source.read(name) for name in source.namelist()}
        for name, change in changed.items():
            contents[name] = change if isinstance(change, bytes) else change(contents[name])
        for name, data in contents.items():
            out.writestr(name, data)
    path.write_bytes(target.getvalue())
    path.with_name(f"{path.name}.crc").unlink(missing_ok=True)


def rename_sst(metadata: bytes) -> bytes:
    said = json.loads(metadata.removeprefix(b"v1\n"))
    said["sstFiles"][0]["dfsSstFileName"] = "000001-a b\u00e9.sst"
    return b"v1\n" + json.dumps(said).encode()


def add_log(metadata: bytes) -> bytes:
    said = json.loads(metadata.removeprefix(b"v1\n"))
    said["logFiles"] = [{"localFileName": "000001.log", "dfsLogFileName": "000001-x.log", "sizeBytes": 1}]
    return b"v1\n" + json.dumps(said).encode()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a name that no store takes": lambda path: rezip(path, metadata=rename_sst),
    "a file in place of the archive": lambda path: rezip(path, archive=b"x", metadata=add_log),
    "a lock": lambda path: rezip(path, LOCK=b""),
    "too large a zip": lambda path: path.write_bytes(path.read_bytes() + bytes(ZIP_BYTES_MAX)),
    "too large a checksum": lambda path: Path(f"{path}.crc").write_bytes(b" " * (FILE_CHECKSUM_BYTES_MAX + 1)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
async def test_an_older_snapshot_takes_the_place_of_a_hostile_one(bench: Bench, damage: Callable[[Path], None]) -> None:
    conf: Conf = {"deltas_per_snapshot": 2}
    ids: Ids = [None]
    async with bench.store(**conf) as store:
        await write_numbers(store, ids, range(1, 6), maintain_every=1)
    assert bench.snapshots() == [2, 4]
    damage(bench.file(4, "zip"))
    async with bench.store(**conf) as store:
        await check_numbers(store, ids, [5])
        assert last_load(store).snapshots_repaired == 1


async def test_a_zip_that_goes_and_is_too_large_stops_no_deletion(bench: Bench) -> None:
    conf: Conf = {"deltas_per_snapshot": 2, "versions_retained_min": 1, "versions_deleted_min": 0}
    ids: Ids = [None]
    async with bench.store(**{**conf, "versions_retained_min": 100}) as store:
        await write_numbers(store, ids, range(1, 5), maintain_every=1)
    bench.file(2, "zip").write_bytes(bytes(ZIP_BYTES_MAX + 1))
    async with bench.store(**conf) as store:
        await store.load(4, ids[4])
        assert (await store.maintain()).deleted.snapshots == 1
    assert bench.snapshots() == [4]


def lz4_block(plain: bytes) -> bytes:
    head = struct.Struct("<8sBiiI")
    packed = bytes(cramjam.lz4.compress_block(plain, store_size=False))
    checksum = xxhash.xxh32_intdigest(plain, 0x9747B28C) & 0x0FFFFFFF
    block = head.pack(b"LZ4Block", 0x20 | 15, len(packed), len(plain), checksum) + packed
    return block + head.pack(b"LZ4Block", 0x10 | 5, 0, 0, 0)


def snappy_block(plain: bytes) -> bytes:
    packed = bytes(cramjam.snappy.compress_raw(plain))
    return b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, len(packed)) + packed


@pytest.mark.parametrize("codec, encode", [("lz4", lz4_block), ("snappy", snappy_block)])
def test_one_large_block_of_small_records_is_read_in_a_bounded_part(
    tmp_path: Path, codec: Codec, encode: Callable[[bytes], bytes]
) -> None:
    record = encode_record(1, (PUT, b"ab", b"cd"))
    count = 4 * 1024 * 1024 // len(record)
    path = tmp_path / "1.changelog"
    path.write_bytes(encode(record * count + encode_end(1)))
    with open_changelog(path, codec) as changelog:
        sizes = list(map(len, changelog))
    assert sum(sizes) == count
    # A record takes two hundred bytes once it is read, and here twelve before.
    assert max(sizes) < 30_000

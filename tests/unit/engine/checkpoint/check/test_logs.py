"""What a check finds in the logs of a query, its sources and its schemas (0005, 4)."""

import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from blobstore.memory import MemoryStore
from engine.checkpoint.backup import backup_checkpoint
from engine.checkpoint.check import check_checkpoint, judge_watermarks
from engine.errors import DamagedError
from engine.repository.repository import Repository
from index.spark.checksums import hadoop_checksum_name
from tests.unit.engine.checkpoint.checked import GOLDEN, below, first, flip, found
from tests.unit.engine.checkpoint.written_query import WrittenQuery

# ---------------------------------------------------------------------- sources and schemas


@pytest.fixture
async def files_query(tmp_path: Path) -> WrittenQuery:
    """One that reads files, 4 batches of it."""
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", file_offsets=True).begin()
    await query.run(4)
    return query


@pytest.mark.parametrize("entry", ["0", "3"])
@pytest.mark.parametrize("how", ["gone", "cut", "empty"])
async def test_an_entry_of_a_source_that_is_not_whole_is_damage(
    files_query: WrittenQuery, entry: str, how: str
) -> None:
    report = await check_checkpoint(files_query.root)
    assert report.findings == ()
    assert report.files > 4 + len(below(files_query.root, "sources/0/*"))
    path = files_query.root / "sources/0" / entry
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else path.read_bytes()[:-3])
    assert await found(files_query.root) == [("damage", f"sources/0/{entry}")]


async def test_a_compacted_log_of_a_source_is_whole(files_query: WrittenQuery) -> None:
    log_dir = files_query.root / "sources/0"
    entries = [(log_dir / str(entry)).read_bytes() for entry in range(3)]
    (log_dir / "2.compact").write_bytes(b"\n".join([entries[0], *(e.removeprefix(b"v1\n") for e in entries[1:])]))
    for entry in range(3):
        (log_dir / str(entry)).unlink()
    assert await found(files_query.root) == []
    (log_dir / "3").unlink()
    assert await found(files_query.root) == [("damage", "sources/0/3")]


async def test_a_source_that_is_used_twice_is_a_warning(files_query: WrittenQuery) -> None:
    for path in below(files_query.root, "offsets/*"):
        file = files_query.root / path
        file.write_text(f"{file.read_text()}\n{file.read_text().splitlines()[-1]}")
    assert await found(files_query.root) == [("warning", "offsets/3")]
    (files_query.root / "sources/0/2").unlink()
    assert await found(files_query.root) == [("damage", "sources/0/2"), ("warning", "offsets/3")]


async def test_an_offset_far_beyond_the_log_is_reported_in_no_time(files_query: WrittenQuery) -> None:
    path = files_query.root / "offsets/3"
    path.write_text(path.read_text().replace('"logOffset":3', '"logOffset":333333333333333'))
    paths = [path for _, path in await found(files_query.root)]
    assert paths[0].startswith("sources/0/1")


@pytest.mark.parametrize("families", [False, True])
async def test_a_schema_that_cannot_be_read_is_damage(tmp_path: Path, families: Any) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", families=families).begin()
    await query.run(1)
    name = "state/0/_stateSchema/default/0_abc" if families else "state/0/0/_metadata/schema"
    path = query.root / name
    path.write_bytes(path.read_bytes()[:-3])
    assert await found(query.root) == [("damage", name)]
    if not families:
        path.unlink()
        assert await found(query.root) == [("damage", name)]


@pytest.mark.parametrize("state_format", [1, 2])
async def test_a_join_of_the_first_state_format_needs_no_schema(tmp_path: Path, state_format: int) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work").begin()
    await query.run(1)
    name, conf = "left-keyToNumValues", f'"spark.sql.streaming.join.stateFormatVersion":"{state_format}"'
    for path, old, new in (
        ("state/0/_metadata/metadata", '"default"', f'"{name}"'),
        ("offsets/0", '"conf":{', f'"conf":{{{conf},'),
    ):
        (query.root / path).write_text((query.root / path).read_text().replace(old, new))
    for partition in ("0", "1"):
        (query.root / "state/0" / partition).rename(tmp_path / "store")
        (query.root / "state/0" / partition).mkdir()
        (tmp_path / "store").rename(query.root / "state/0" / partition / name)
    schema = f"state/0/0/{name}/_metadata/schema"
    (query.root / schema).unlink()
    assert await found(query.root) == ([] if state_format == 1 else [("damage", schema)])


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("offsets/3", 'partitions":"2"', 'partitions":"3"'),
        ("offsets/1", '"stateStore.compression.codec":"lz4"', '"stateStore.compression.codec":"lzf"'),
        ("offsets/3", "spark.sql.shuffle.partitions", "spark.sql.shuffle.partitionz"),
    ],
)
async def test_what_contradicts_the_rest_of_the_logs_is_damage(tmp_path: Path, name: str, old: str, new: str) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work").begin()
    await query.run(4)
    path = query.root / name
    old, new = (text.replace('"stateStore', '"spark.sql.streaming.stateStore') for text in (old, new))
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    # Changelogs are read by the codec that the offsets pin.
    assert ("damage", name) in await found(query.root)


async def test_stores_of_one_operator_have_the_same_partitions(tmp_path: Path) -> None:
    root = Path(shutil.copytree(GOLDEN / "join", tmp_path / "query"))
    name = "state/0/_metadata/metadata"
    text = (root / name).read_text()
    start, _, end = text.rpartition('"numPartitions":')
    (root / name).write_text(f'{start}"numPartitions":9{end.lstrip("0123456789")}')
    assert ("damage", name) in await found(root)


@pytest.mark.parametrize("name", ["metadata~", "_SUCCESS", "v2/0.orig", "old/metadata"])
async def test_a_foreign_file_beside_the_metadata_of_an_operator_is_no_damage(tmp_path: Path, name: str) -> None:
    """Neither Spark nor a restore reads it: an editor or another program has left it."""
    root = Path(shutil.copytree(GOLDEN / "join", tmp_path / "query"))
    before = await found(root)
    foreign = root / "state/0/_metadata" / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(b"not of Spark's")
    assert await found(root) == before


async def test_a_link_is_named_where_a_file_behind_it_is_not_read(tmp_path: Path) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work").begin()
    await query.run(1)
    first = query.root / "state/0/0"
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedError, match=f"there is a symbolic link at {first}: none is followed"):
        await backup_checkpoint(await Repository.init(MemoryStore()), query.root)


async def test_a_foreign_file_beside_schemas_is_no_damage(tmp_path: Path) -> None:
    """Spark reads those that the metadata names, whatever else is there."""
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", families=True).begin()
    await query.run(1)
    (query.root / "state/0/_stateSchema/default/0_abc~").write_bytes(b"not of Spark's")
    assert await found(query.root) == []
    repository = await Repository.init(MemoryStore())
    assert (await backup_checkpoint(repository, query.root)).is_new


# ---------------------------------------------------------------------- logs


@pytest.mark.parametrize(
    "batches, name, kinds",
    [(2, "batchTimestampNs", []), (3, "batchTimeMs", ["warning"]), (3, "batchTimestampNs", ["damage"])],
)
async def test_a_name_in_the_newest_entry_may_be_a_new_one(
    tmp_path: Path, batches: int, name: str, kinds: list[str]
) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work").begin()
    await query.run(batches)
    path = query.root / f"offsets/{batches - 1}"
    path.write_text(path.read_text().replace("batchTimestampMs", name))
    assert [kind for kind, _ in await found(query.root)] == kinds


@pytest.mark.parametrize(
    "announced, begun, altered",
    [
        (6, (5, 5, 5), "commits"),
        (4, (5, 5, 5), "commits"),
        (5, (5, 9, 5), "offsets"),
        (6, (5, 7, 8), ""),
        (6, (5, 7), ""),
    ],
)
def test_a_watermark_that_goes_back_says_which_file_is_altered(
    announced: int, begun: tuple[int, ...], altered: str
) -> None:
    assert judge_watermarks(3, announced, dict(enumerate(begun, start=3))) == altered


async def test_a_watermark_that_is_altered_in_a_commit_is_named_there(checkpoint: Path) -> None:
    path = checkpoint / "commits/3"
    path.write_text(path.read_text().replace('"nextBatchWatermarkMs":0', '"nextBatchWatermarkMs":4'))
    assert await found(checkpoint) == [("damage", "commits/3")]


@pytest.mark.parametrize("source, target", [(6, 7), (4, 3)])
async def test_a_copy_of_another_batchs_offsets_is_a_warning(checkpoint: Path, source: int, target: int) -> None:
    """With it the query reads again what it has read: each entry is planned at a time of its own."""
    shutil.copy(checkpoint / f"offsets/{source}", checkpoint / f"offsets/{target}")
    assert await found(checkpoint) == [("warning", f"offsets/{max(source, target)}")]


async def test_a_store_of_an_impossible_name_is_damage_of_the_metadata(checkpoint: Path) -> None:
    metadata = checkpoint / "state/0/_metadata/metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b'"default"', b'"def`ult"'))
    report = await check_checkpoint(checkpoint)
    assert "state/0/_metadata/metadata" in {f.path for f in report.of_kind("damage")}


async def test_logs_with_gaps_are_damage(checkpoint: Path) -> None:
    (checkpoint / "commits/4").unlink()
    (checkpoint / "offsets/2").unlink()
    assert await found(checkpoint, level="quick") == [("damage", "commits/4"), ("damage", "offsets/2")]


async def test_a_gap_of_any_length_is_one_finding(checkpoint: Path) -> None:
    for log in ("commits", "offsets"):
        shutil.copy(checkpoint / log / "7", checkpoint / log / "99999999999999")
    report = await check_checkpoint(checkpoint, level="quick")
    assert ("damage", "commits/8") in [(f.kind, f.path) for f in report.findings]
    assert len(report.findings) < 20


async def test_a_copy_of_two_instants_is_a_warning(checkpoint: Path) -> None:
    for batch in (6, 7):
        (checkpoint / f"commits/{batch}").unlink()
    report = await check_checkpoint(checkpoint, level="quick")
    assert report.is_sound
    assert report.findings[0].path == "offsets/7"


async def test_a_hidden_checksum_that_does_not_fit_is_damage(checkpoint: Path) -> None:
    stale = b"crc\0\0\0\2\0" + b"\1\2\3\4"
    zip_ = first(checkpoint, "state/0/0/[0-9]*.zip")
    for path in (checkpoint / "offsets/5", zip_):
        path.with_name(hadoop_checksum_name(path.name)).write_bytes(stale)
    # Of a zip, which proves itself, the hidden file is the stale one; of a log nobody can know.
    assert await found(checkpoint) == [("damage", "offsets/5"), ("damage", f"state/0/0/.{zip_.name}.crc")]


async def test_a_byte_that_no_reader_reads_is_found_by_the_hidden_checksum(tmp_path: Path) -> None:
    """Without ids there is no `.crc`: of the two that do not fit, the file may be the altered one."""
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", format_version=1).begin()
    await query.run(3)
    path = first(query.root, "state/0/0/[0-9]*.zip")
    data = path.read_bytes()
    sums = [zlib.crc32(data[at : at + 512]).to_bytes(4, "big") for at in range(0, len(data), 512)]
    hidden = b"crc\0" + (512).to_bytes(4, "big") + b"".join(sums)
    path.with_name(hadoop_checksum_name(path.name)).write_bytes(hidden)
    assert await found(query.root) == []
    flip(path, data.rindex(b"PK\1\2") + 12)  # the time of an entry
    assert await found(query.root) == [("damage", f"state/0/0/{path.name}")]

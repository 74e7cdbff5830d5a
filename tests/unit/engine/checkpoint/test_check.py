"""A check finds what is wrong with a checkpoint, names the file, and finds nothing where nothing is (0005, 4)."""

import errno
import os
import shutil
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blobstore.base import BytesBody
from blobstore.memory import MemoryStore
from engine import rocksdb as rocksdb_module
from engine.checkpoint import check_store as check_store_module
from engine.checkpoint.check import begin_check, check_checkpoint, finish_check
from engine.checkpoint.check_entries import judge_watermarks
from engine.checkpoint.check_load import check_counts
from engine.checkpoint.check_store import check_store
from engine.checkpoint.findings import CheckReport, Finding
from engine.clock import SystemAmbient
from engine.errors import NotFoundError, ProviderError, TargetError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.replay import KeyCounts
from engine.state.streaming_checkpoint import StreamingCheckpoint
from engine.state.zips import build_state_zip, read_state_zip
from index.errors import StateMetadataError
from index.hadoop_checksum import hadoop_checksum_name
from index.state_metadata import StateMetadata
from index.state_names import snapshot_name
from tests.unit.engine.checkpoint.live_query import LiveQuery, NewQuery, stats_below
from tests.unit.engine.checkpoint.written_query import WrittenQuery

GOLDEN = Path(__file__).parents[3] / "golden" / "spark"
# Of these copies.
LEFT_OUT = {"state/0/_stateSchema/default", "sources/0"}
WHOLE = ["changelog-v1-lz4", "changelog-v2-lz4", "changelog-v3-lz4", "changelog-v4-lz4", "row-checksums"]


async def found(root: Path | LiveQuery, **settings: Any) -> list[tuple[str, str]]:
    """Kinds and paths of what a check finds."""
    report = await check_checkpoint(root.location if isinstance(root, LiveQuery) else root, **settings)
    return [(finding.kind, finding.path) for finding in report.findings]


def below(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern))


def first(root: Path, pattern: str) -> Path:
    return below(root, pattern)[0]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x04
    path.write_bytes(data)


@pytest.fixture
def checkpoint(checkpoints: dict[int, Path], tmp_path: Path) -> Path:
    """A checkpoint of 8 batches, with ids."""
    return shutil.copytree(checkpoints[8], tmp_path / "checkpoint")


# ---------------------------------------------------------------------- nothing is wrong


FORMS: list[dict[str, Any]] = [
    {"format_version": version, "families": families, **settings}
    for version in (1, 2)
    for families in (False, True)
    for settings in (
        {},
        {"codec": "zstd"},
        {"codec": "snappy", "row_checksums": True},
        {"codec": "lzf"},
        {"changelogs": False},
    )
]
FEW = (0, 11, 18)


@pytest.mark.parametrize(
    "settings",
    [pytest.param(form, marks=() if number in FEW else pytest.mark.soak) for number, form in enumerate(FORMS)],
    ids=lambda form: "-".join(map(str, form.values())),
)
async def test_nothing_is_found_in_what_state_stores_write(tmp_path: Path, settings: dict[str, Any]) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", **settings).begin()
    await query.run(5)
    before = stats_below(query.root)
    report = await check_checkpoint(query.root)
    assert report.findings == ()
    assert (report.batches, report.newest_batch, report.stores, report.versions) == (5, 4, 2, 10)
    assert report.keys > 0
    assert report.ssts > 0
    assert stats_below(query.root) == before


@pytest.mark.parametrize("name", WHOLE)
async def test_nothing_is_found_in_what_spark_wrote(name: str) -> None:
    report = await check_checkpoint(GOLDEN / name)
    assert {f.path.rpartition("/")[0] for f in report.findings} <= LEFT_OUT
    assert (report.versions, report.versions_gone) == (3, 0)


@pytest.mark.parametrize("format_version", [1, 2])
async def test_what_retention_has_deleted_is_no_finding(new_query: NewQuery, format_version: int) -> None:
    query = new_query(format_version=format_version, versions_retained_min=2, versions_deleted_min=1)
    await query.run(14)
    report = await check_checkpoint(query.root)
    assert report.findings == ()
    assert report.versions_gone >= 2 * 8
    assert report.versions + report.versions_gone == 2 * 14


async def test_a_batch_that_runs_is_no_finding(new_query: NewQuery) -> None:
    query = new_query()
    await query.run(5)
    await query.run(1, commit=False)
    assert await found(query) == []


async def test_a_query_without_a_batch_is_sound(tmp_path: Path) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work").begin()
    report = await check_checkpoint(query.root)
    assert (report.findings, report.batches, report.newest_batch) == ((), 0, -1)


async def test_a_checkpoint_on_another_store_is_fetched_once(new_query: NewQuery, tmp_path: Path) -> None:
    query = new_query(remote=True)
    await query.run(7)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    report = await check_checkpoint(query.location, scratch=scratch)
    assert (report.findings, report.versions) == ((), 14)
    assert list(scratch.iterdir()) == []


async def test_a_quick_check_looks_at_no_sst(checkpoint: Path) -> None:
    for path in below(checkpoint, "state/0/*/SSTs/*.sst"):
        flip(path, 100)
    report = await check_checkpoint(checkpoint, level="quick")
    assert (report.findings, report.ssts, report.keys) == ((), 0, 0)
    assert len((await check_checkpoint(checkpoint)).of_kind("damage")) == len(below(checkpoint, "state/0/*/SSTs/*"))


# ---------------------------------------------------------------------- damage


KINDS = {
    "SST": "state/0/0/SSTs/*.sst",
    "zip": "state/0/1/[0-9]*.zip",
    "changelog": "state/0/0/[0-9]*.changelog",
    "checksum of a changelog": "state/0/0/[0-9]*.changelog.crc",
    "checksum of a zip": "state/0/1/[0-9]*.zip.crc",
}


@pytest.mark.parametrize("pattern", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("share, remote", [(0.1, False), (0.5, True), (0.9, False)])
async def test_a_byte_that_is_altered_is_found_and_its_file_is_named(
    checkpoint: Path, pattern: str, share: float, remote: bool
) -> None:
    path = first(checkpoint, pattern)
    at = int(path.stat().st_size * share)
    if path.suffix == ".crc":
        at = path.read_bytes().index(b'"value":') + 9 + int(share * 4)
        data = bytearray(path.read_bytes())
        data[at] ^= 1  # another digit
        path.write_bytes(data)
    else:
        flip(path, at)
    root = await in_memory(checkpoint) if remote else checkpoint
    report = await check_checkpoint(root)
    assert [(f.kind, f.path) for f in report.findings] == [("damage", path.relative_to(checkpoint).as_posix())]
    assert not report.is_sound
    assert report.findings[0].hint


async def in_memory(checkpoint: Path) -> Any:
    store = MemoryStore()
    for path in below(checkpoint, "**/*"):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
            await store.put(name, BytesBody(path.read_bytes()))
    return store


@pytest.mark.parametrize(
    "path", ["metadata", "commits/3", "commits/7", "offsets/0", "offsets/7", "state/0/_metadata/metadata"]
)
@pytest.mark.parametrize("at", [0, 5])
async def test_a_log_that_does_not_parse_is_named(checkpoint: Path, path: str, at: int) -> None:
    flip(checkpoint / path, at)
    # A newer Spark may have given the newest batch other fields.
    kinds = {"warning", "damage"} if path.endswith("/7") and at else {"damage"}
    assert path in {path for kind, path in await found(checkpoint) if kind in kinds}


async def test_an_id_that_is_altered_in_a_commit_file_is_named_there(checkpoint: Path) -> None:
    path = checkpoint / "commits/4"
    data = bytearray(path.read_bytes())
    at = data.rindex(b'"') - 3
    data[at : at + 1] = b"0" if data[at : at + 1] != b"0" else b"1"
    path.write_bytes(data)
    report = await check_checkpoint(checkpoint)
    assert [f.path for f in report.of_kind("damage")] == ["commits/4"]
    assert "what came after it was built on" in report.findings[0].message


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_most_bytes_that_are_altered_in_a_log_are_found(tmp_path: Path, number: int) -> None:
    """No JSON has a checksum: what goes unseen is the value of a number."""
    root = shutil.copytree(GOLDEN / "lost-attempts", tmp_path / "query")
    log = ("commits/4", "offsets/4", "state/0/_metadata/metadata")[number]
    data = (root / log).read_bytes()
    unseen = 0
    for at in range(number, len(data), 140):
        flip(root / log, at)
        paths = {path for kind, path in await found(root, level="quick") if kind != "waste"}
        unseen += not any(log.startswith(path) or path.startswith("state/0/0") for path in paths)
        (root / log).write_bytes(data)
    assert unseen <= (0, 1, 1)[number]


@pytest.mark.parametrize("name", WHOLE)
async def test_a_byte_that_is_altered_in_what_spark_wrote_is_found(tmp_path: Path, name: str) -> None:
    for number, pattern in enumerate(("SSTs/*.sst", "[0-9]*.zip", "[0-9]*.changelog")):
        root = shutil.copytree(GOLDEN / name, tmp_path / str(number))
        path = first(root / "state/0/0", pattern)
        flip(path, path.stat().st_size // 3)
        paths = [path for _, path in await found(root) if path.rpartition("/")[0] not in LEFT_OUT]
        assert paths == [path.relative_to(root).as_posix()]


async def test_each_file_of_sparks_that_is_cut_short_or_gone_is_named(tmp_path: Path) -> None:
    names = ["metadata", "commits/4", "offsets/4", "state/0/_metadata/metadata"]
    names += [first(GOLDEN / "lost-attempts", f"state/0/0/{p}").name for p in ("3_*.changelog", "10_*.changelog")]
    for number, name in enumerate(names):
        for gone in (False, True):
            root = shutil.copytree(GOLDEN / "lost-attempts", tmp_path / f"{number}-{gone}")
            path = root / name if "/" in name or name == "metadata" else root / "state/0/0" / name
            if gone:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:-3])
            paths = {path for kind, path in await found(root, level="quick") if kind == "damage"}
            wanted = path.relative_to(root).as_posix()
            assert any(wanted == other or wanted.startswith(f"{other}/") for other in paths), (name, gone, paths)


async def test_an_sst_that_is_gone_is_named_with_the_snapshot_that_needs_it(checkpoint: Path) -> None:
    path = first(checkpoint, "state/0/1/SSTs/*.sst")
    path.unlink()
    (finding,) = (await check_checkpoint(checkpoint)).findings
    assert (finding.path, finding.rule) == (path.relative_to(checkpoint).as_posix(), "K1")
    assert "is not there, and snapshot" in finding.message


async def test_an_sst_of_another_size_is_named(checkpoint: Path) -> None:
    path = first(checkpoint, "state/0/1/SSTs/*.sst")
    path.write_bytes(path.read_bytes()[:-1])
    (finding,) = (await check_checkpoint(checkpoint, level="quick")).findings
    assert finding.path == path.relative_to(checkpoint).as_posix()
    assert "bytes, and snapshot" in finding.message


async def test_a_snapshot_that_counts_other_keys_than_there_are_is_damage(new_query: NewQuery, tmp_path: Path) -> None:
    query = new_query(format_version=1)
    await query.run(8)
    zips = sorted(below(query.root, "state/0/0/[0-9]*.zip"), key=lambda path: int(path.stem))
    state = read_state_zip(zips[-1].read_bytes(), subject="")
    for name, content in state.files.items():
        (tmp_path / "zip" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "zip" / name).write_bytes(content)
    altered = msgspec.structs.replace(state.metadata, num_keys=state.metadata.num_keys + 1)
    zips[-1].write_bytes(build_state_zip(tmp_path / "zip", altered)[0])
    (finding,) = (await check_checkpoint(query.root)).findings
    assert (finding.kind, finding.rule, finding.path) == ("damage", "K5", f"state/0/0/{zips[-1].name}")
    altered = msgspec.structs.replace(state.metadata, num_keys=state.metadata.num_keys - 1)
    zips[-1].write_bytes(build_state_zip(tmp_path / "zip", altered)[0])
    (finding,) = (await check_checkpoint(query.root)).findings
    assert (finding.kind, finding.rule, finding.path) == ("warning", "K5", f"state/0/0/{zips[-1].name}")


@pytest.mark.parametrize(
    "keys, internal, verdict",
    [
        (4, 2, "sound"),
        (-1, 2, "sound"),
        (-1, 3, "damage"),
        (5, 2, "damage"),
        (5, 0, "damage"),
        (3, 2, "warning"),
        (4, 1, "warning"),
        # As Spark 4.0 has it: whether internal keys are in the number is not known.
        (4, -1, "sound"),
        (6, -1, "sound"),
        (7, -1, "damage"),
    ],
)
def test_each_number_of_keys_is_compared_on_its_own(keys: int, internal: int, verdict: str) -> None:
    metadata = StateMetadata(num_keys=keys, num_internal_keys=internal)
    try:
        said = "warning" if check_counts(metadata, KeyCounts(4, 2), subject="1.zip") else "sound"
    except StateMetadataError:
        said = "damage"
    assert said == verdict


async def test_a_schema_that_the_metadata_names_and_that_is_gone_is_damage(tmp_path: Path) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", families=True).begin()
    await query.run(1)
    (query.root / "state/0/_stateSchema/default/0_abc").unlink()
    assert await found(query.root) == [("damage", "state/0/_stateSchema/default/0_abc")]


async def test_a_state_that_is_gone_is_damage_of_the_newest_batch_only(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "state/0/1")
    (finding,) = (await check_checkpoint(checkpoint)).of_kind("damage")
    assert finding.path.startswith("state/0/1/8_")
    assert "(commits/7)" in finding.message


@pytest.mark.parametrize("format_version", [1, 2])
async def test_state_that_nobody_describes_is_damage_and_no_waste(tmp_path: Path, format_version: Any) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", format_version=format_version).begin()
    await query.run(2)
    shutil.rmtree(query.root / "state/0/_metadata")
    assert await found(query.root) == [("damage", "state/0/_metadata")]


@pytest.mark.parametrize("number", ["0", "999999999"])
async def test_a_number_of_partitions_that_nobody_has_is_damage(tmp_path: Path, number: str) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", format_version=1).begin()
    await query.run(2)
    path = query.root / "offsets/1"
    path.write_text(path.read_text().replace('partitions":"2"', f'partitions":"{number}"'))
    assert await found(query.root) == [("damage", "offsets/1")]


async def test_a_partition_that_the_newest_batch_wrote_and_does_not_count_is_damage(tmp_path: Path) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work", format_version=1).begin()
    await query.run(3)
    for batch in range(3):
        path = query.root / f"offsets/{batch}"
        path.write_text(path.read_text().replace('partitions":"2"', 'partitions":"1"'))
    assert await found(query.root) == [("damage", "offsets/2")]


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
    room = files_query.root / "sources/0"
    entries = [(room / str(entry)).read_bytes() for entry in range(3)]
    (room / "2.compact").write_bytes(b"\n".join([entries[0], *(e.removeprefix(b"v1\n") for e in entries[1:])]))
    for entry in range(3):
        (room / str(entry)).unlink()
    assert await found(files_query.root) == []
    (room / "3").unlink()
    assert await found(files_query.root) == [("damage", "sources/0/3")]


async def test_an_offset_far_beyond_the_log_is_told_in_no_time(files_query: WrittenQuery) -> None:
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
        assert await found(query.root) == []


# ---------------------------------------------------------------------- logs


@pytest.mark.parametrize("batches, kinds", [(2, []), (3, ["warning"])])
async def test_of_the_newest_entries_nobody_can_say_that_they_are_altered(
    tmp_path: Path, batches: int, kinds: list[str]
) -> None:
    query = await WrittenQuery(tmp_path / "query", tmp_path / "work").begin()
    await query.run(batches)
    path = query.root / f"offsets/{batches - 1}"
    path.write_text(path.read_text().replace("batchTimestampMs", "batchTimestampNs"))
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


async def test_a_store_of_an_impossible_name_is_damage_of_the_metadata(checkpoint: Path) -> None:
    metadata = checkpoint / "state/0/_metadata/metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b'"default"', b'"def`ult"'))
    report = await check_checkpoint(checkpoint)
    assert "state/0/_metadata/metadata" in {f.path for f in report.of_kind("damage")}


async def test_logs_with_gaps_are_damage(checkpoint: Path) -> None:
    (checkpoint / "commits/4").unlink()
    (checkpoint / "offsets/2").unlink()
    assert await found(checkpoint, level="quick") == [("damage", "commits/4"), ("damage", "offsets/2")]


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
    # Of a zip, which proves itself, the hidden file is the stale one; of a log nobody can tell.
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


# ---------------------------------------------------------------------- warnings and waste


async def test_a_lineage_near_its_limit_is_a_warning(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_store_module, "LINEAGE_BYTES_MAX", 160)
    warnings = (await check_checkpoint(checkpoint)).of_kind("warning")
    assert {finding.rule for finding in warnings} == {"K6"}
    assert "commits fail after about" in warnings[0].message


async def test_a_newer_history_is_a_warning(checkpoint: Path) -> None:
    changelog = first(checkpoint, "state/0/0/8_*.changelog")
    shutil.copy(changelog, changelog.with_name("12_abandoned.changelog"))
    assert await found(checkpoint) == [("warning", "state/0/0/12_abandoned.changelog")]


Change = Callable[[Path], object]
WASTE: dict[str, Change] = {
    "state/0/0/4_lost.changelog": lambda path: path.write_bytes(b"of another attempt"),
    "state/0/0/3_gone.zip.crc": lambda path: path.write_bytes(b"{}"),
    "state/0/1/notes.txt": lambda path: path.write_bytes(b"what is this"),
    "state/0/7": lambda path: shutil.copytree(path.with_name("1"), path),
    "state/3": lambda path: shutil.copytree(path.with_name("0"), path),
    "state/0/0/.9.changelog.5b0a2b5e.tmp": lambda path: path.write_bytes(b"half"),
    "state/0/0/SSTs/000099-00000000-0000-4000-8000-000000000000.sst": lambda path: path.write_bytes(b"an orphan"),
}


@pytest.mark.parametrize("path", WASTE)
async def test_what_nobody_needs_is_waste(checkpoint: Path, path: str) -> None:
    WASTE[path](checkpoint / path)
    if (checkpoint / path).is_file():
        os.utime(checkpoint / path, (1, 1))
    report = await check_checkpoint(checkpoint)
    assert [(f.kind, f.path) for f in report.findings] == [("waste", path)]
    assert report.is_sound
    assert report.waste_bytes > 0


async def test_what_is_being_written_is_no_waste(checkpoint: Path) -> None:
    (checkpoint / "state/0/0/.9.changelog.5b0a2b5e.tmp").write_bytes(b"half")
    (checkpoint / "state/0/0/SSTs/000099-00000000-0000-4000-8000-000000000000.sst").write_bytes(b"on its way")
    assert await found(checkpoint) == []


@pytest.mark.parametrize("name", ["backup.zip", "007.changelog", "x.crc"])
async def test_a_foreign_name_that_spark_fails_on_is_a_warning(checkpoint: Path, name: str) -> None:
    (checkpoint / "state/0/1" / name).write_bytes(b"foreign")
    assert await found(checkpoint) == [("warning", f"state/0/1/{name}")]


async def test_attempts_that_lost_are_waste_and_their_damage_is_nobodys(tmp_path: Path) -> None:
    root = shutil.copytree(GOLDEN / "lost-attempts", tmp_path / "query")
    lost = first(root, "state/0/0/8_bf09*.zip")
    lost.write_bytes(b"damaged")
    report = await check_checkpoint(root)
    assert {f.path.rpartition("/")[0] for f in report.of_kind("damage")} <= LEFT_OUT
    assert f"state/0/0/{lost.name}" in {finding.path for finding in report.of_kind("waste")}


# ---------------------------------------------------------------------- a query that runs, and what is none


async def test_what_a_running_query_deletes_meanwhile_is_no_finding(new_query: NewQuery) -> None:
    query = new_query(versions_retained_min=2, versions_deleted_min=1)
    await query.run(6)
    root = await CheckpointDir.open(query.root)
    plan = await begin_check(root, level="full", ambient=SystemAmbient())
    await query.run(10)
    for batch in range(10):
        (query.root / f"commits/{batch}").unlink()
        (query.root / f"offsets/{batch}").unlink()
    checked = [await check_store(root, work, scratch=None, level="full") for work in plan.stores]
    report = await finish_check(root, plan, checked, ambient=SystemAmbient())
    assert (report.findings, report.newest_batch) == ((), 5)
    assert {store.versions for store in checked} == {1}


async def test_what_a_running_query_writes_meanwhile_is_no_finding(new_query: NewQuery) -> None:
    query = new_query()
    await query.run(4)
    root = await CheckpointDir.open(query.root)
    plan = await begin_check(root, level="full", ambient=SystemAmbient())
    # The batch after the next one, too, and it has just begun to write; an older snapshot is on its way, too.
    await query.run(3)
    for partition in range(2):
        at = plan.stores[partition].versions[1]
        (query.root / f"state/0/{partition}/{snapshot_name(at)}.crc").write_bytes(b"{}")
        (query.root / f"state/0/{partition}/8_{uuid.uuid4()}.changelog.crc").write_bytes(b"{}")
    checked = [await check_store(root, work, scratch=None, level="full") for work in plan.stores]
    assert [finding for store in checked for finding in store.findings] == []


async def test_a_store_that_stays_damaged_while_its_query_runs_is_looked_at_twice(
    new_query: NewQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = new_query(deltas_per_snapshot=100)
    await query.run(4)
    root = await CheckpointDir.open(query.root)
    plan = await begin_check(root, level="full", ambient=SystemAmbient())
    await query.run(1)
    changelog = first(query.root, "state/0/0/2_*.changelog")
    changelog.unlink()
    looks = []
    look_at = check_store_module._look_at

    async def count(*looked_at: Any) -> Any:
        looks.append(looked_at)
        await query.run(1)
        return await look_at(*looked_at)

    monkeypatch.setattr(check_store_module, "_look_at", count)
    checked = await check_store(root, plan.stores[0], scratch=None, level="full")
    assert changelog.name in checked.findings[0].path
    assert len(looks) == 2


async def test_of_zips_only_what_they_name_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    """A store may have a hundred, each of many megabytes inside."""
    root = await CheckpointDir.open(checkpoint)
    plan = await begin_check(root, level="quick", ambient=SystemAmbient())
    check = check_store_module._StoreCheck(
        root.child(plan.stores[0].id.path), StreamingCheckpoint(root), plan.stores[0], tmp_path, "quick"
    )
    await check.run()
    assert {type(state) for state in check._contents.zips.values()} == {StateMetadata}


# ---------------------------------------------------------------------- what is wrong with this machine


@pytest.mark.parametrize("pattern", ["state/0/0/SSTs/*.sst", "state/0/0/[0-9]*.zip", "state/0/0/[0-9]*.changelog"])
@pytest.mark.parametrize("hidden", [False, True])
async def test_what_this_machine_lacks_is_no_damage(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, hidden: Any
) -> None:
    path = first(checkpoint, pattern)
    if hidden:
        path = path.with_name(hadoop_checksum_name(path.name))
    open_file = os.open

    def refuse(name: Any, *flags: Any, **more: Any) -> int:
        if str(name) == str(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(name))
        return open_file(name, *flags, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TargetError, match="Too many open files"):
        await check_checkpoint(checkpoint)


def test_what_rocksdb_says_of_this_machine_is_no_damage(tmp_path: Path) -> None:
    message = "IO error: No space left on device: While appending to file: /w/000012.sst: No space left on device"
    assert isinstance(rocksdb_module._typed(Exception(message), "put", tmp_path), TargetError)


async def test_scratch_that_cannot_be_written_is_told_as_such(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="not there"):
        await check_checkpoint(checkpoint, scratch=tmp_path / "not there")


async def test_another_provider_is_refused() -> None:
    with pytest.raises(ProviderError, match="HDFSBackedStateStoreProvider"):
        await check_checkpoint(GOLDEN / "hdfs-provider")


async def test_what_is_no_checkpoint_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint"):
        await check_checkpoint(tmp_path)


async def test_a_report_can_be_sent(checkpoint: Path) -> None:
    flip(checkpoint / "commits/3", 0)
    report = await check_checkpoint(checkpoint)
    assert msgspec.json.decode(msgspec.json.encode(report), type=CheckReport) == report
    assert all(isinstance(finding, Finding) for finding in report.findings)

"""A check finds what is wrong with a checkpoint, names the file, and finds nothing where nothing is (0005, 4)."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blobstore.base import BytesBody
from blobstore.memory import MemoryStore
from engine.checkpoint.check import check_checkpoint
from engine.checkpoint.store_check import check_counts
from engine.state.changelogs import KeyCounts
from engine.state.zips import build_state_zip, read_state_zip
from index.errors import StateMetadataError
from index.spark.metadata import StateMetadata
from tests.unit.engine.checkpoint.checked import GOLDEN, LEFT_OUT, WHOLE, below, first, flip, found
from tests.unit.engine.checkpoint.live_query import NewQuery, stats_below
from tests.unit.engine.checkpoint.written_query import WrittenQuery

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
        paths = {path for _, path in await found(root, level="quick")}
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
async def test_state_that_nobody_describes_is_damage(tmp_path: Path, format_version: Any) -> None:
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

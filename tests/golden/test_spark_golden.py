"""What Spark 4.3 wrote is read as what it means, and would be written byte for byte the same (design 0004)."""

import itertools
import json
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from engine.local.checksums import crc32c
from engine.state.changelogs import open_changelog
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.compression import Codec, decompress_chunks
from engine.state.files import StateFileManager
from engine.state.query import StreamingCheckpoint
from engine.state.store import StateStore
from index.errors import LineageError, VersionMissingError
from index.snapshot.model import LineageItem
from index.spark.changelog import DELETE, MERGE, ChangelogHeader, Record, encode_end, encode_header, encode_record
from index.spark.checksums import check_file_checksum, decode_file_checksum, encode_file_checksum
from index.spark.lineage import HeaderNeeded, Lineage, Present, full_lineage, resolve
from index.spark.metadata import decode_state_metadata, encode_state_metadata
from index.spark.names import StateVersion, parse_state_name
from index.spark.query_logs import (
    JOIN_STORES,
    decode_commit,
    decode_offsets,
    decode_operator,
    decode_query_id,
    encode_commit,
    encode_offsets,
)
from index.spark.retention import StateListing
from tests.spark.state.forms import Forms, KeyForm, StateRow
from tests.unit.index.builders import latest_version
from tests.unit.index.spark.written_metadata import encode_operator, encode_query_id

SPARK = Path(__file__).parent / "spark"
BATCHES = 3
FORMS = Forms({"seen": KeyForm("prefix", (("bytes",),), (("word",),))}, frozenset({"items"}))
QUERIES = {1: "aggregation", 2: "transformWithState", 3: "aggregation", 4: "transformWithState"}
CHANGELOGS = [f"changelog-v{version}-{codec}" for version in QUERIES for codec in ("lz4", "zstd", "snappy", "lzf")]
WHOLE = [
    "changelog-v1-lz4",
    "changelog-v2-lz4",
    "changelog-v3-lz4",
    "changelog-v4-lz4",
    "row-checksums",
    "lost-attempts",
    "hdfs-provider",
]

Rows = Counter[StateRow]


def paths(pattern: str) -> list[str]:
    """The golden files of a name, as ids of tests."""
    found = sorted(str(path.relative_to(SPARK)) for path in SPARK.glob(pattern) if path.is_file())
    assert found
    return found


def rows_of(name: str) -> dict[int, Rows]:
    """The rows of every batch by Spark's reader."""
    file = SPARK / name / "rows.json"
    if not file.exists():
        others = {"row-checksums": "transformWithState", "hdfs-provider": "aggregation"}
        query = others.get(name) or QUERIES[int(name[11])]
        file = SPARK / f"{query}.rows.json"
    raw: dict[str, list[list[str]]] = json.loads(file.read_text())
    return {
        int(batch): Counter(FORMS.of_spark(f, bytes.fromhex(k), bytes.fromhex(v)) for f, k, v in rows)
        for batch, rows in raw.items()
    }


def read(path: Path, codec: str) -> tuple[ChangelogHeader, list[Record]]:
    with open_changelog(path, cast("Codec", codec)) as changelog:
        return changelog.header, list(itertools.chain.from_iterable(changelog))


def committed(name: str) -> list[StateVersion]:
    """The versions of the one store of a checkpoint, by its commit log."""
    commits = SPARK / name / "commits"
    found = []
    for batch in range(len(list(commits.iterdir()))):
        ids = decode_commit((commits / str(batch)).read_bytes()).unique_ids
        found.append(StateVersion(batch + 1, None if ids is None else ids[0][0][0]))
    return found


# --- the logs


@pytest.mark.parametrize("path", paths("*/offsets/*"))
def test_offsets_come_back_byte_for_byte(path: str) -> None:
    data = (SPARK / path).read_bytes()
    assert encode_offsets(decode_offsets(data)) == data


@pytest.mark.parametrize("path", paths("*/commits/*"))
def test_commits_come_back_byte_for_byte(path: str) -> None:
    data = (SPARK / path).read_bytes()
    assert encode_commit(decode_commit(data)) == data


@pytest.mark.parametrize("path", [*paths("*/state/*/_metadata/metadata"), *paths("*/state/*/_metadata/v2/*")])
def test_operators_come_back_byte_for_byte(path: str) -> None:
    data = (SPARK / path).read_bytes()
    assert encode_operator(decode_operator(data)) == data


@pytest.mark.parametrize("path", paths("*/metadata"))
def test_the_id_of_a_query_comes_back_byte_for_byte(path: str) -> None:
    data = (SPARK / path).read_bytes()
    assert encode_query_id(decode_query_id(data)) == data


def test_sources_and_sinks_have_names() -> None:
    offsets = decode_offsets((SPARK / "named-sources-and-sinks/offsets/1").read_bytes())
    commit = decode_commit((SPARK / "named-sources-and-sinks/commits/1").read_bytes())
    assert (offsets.version, commit.version) == (2, 3)
    assert [(each.source, each.offset) for each in offsets.offsets] == [("clicks", '{"logOffset":1}')]
    assert commit.sinks["counts"].is_active


async def test_every_store_of_a_join_has_its_id() -> None:
    checkpoint = await StreamingCheckpoint.open(SPARK / "join")
    (operator,) = (await checkpoint.at(1)).operators
    assert operator.stores == JOIN_STORES
    ids = decode_commit((SPARK / "join/commits/1").read_bytes()).unique_ids
    assert ids is not None
    assert [(await checkpoint.state(0, 0, store, batch=1)).at.unique_id for store in JOIN_STORES] == list(ids[0][0])
    await checkpoint.close()


# --- changelogs


@pytest.mark.spark_case(12)
@pytest.mark.parametrize("name", CHANGELOGS)
def test_changelogs_of_every_version_and_codec_make_the_rows_that_sparks_reader_gives(name: str) -> None:
    version, codec = int(name[11]), name.rpartition("-")[2]
    ids = _families(f"changelog-v{version}-lz4")
    stored: dict[bytes, bytes] = {}
    before: LineageItem | None = None
    for batch, of in enumerate(committed(name)):
        header, records = read(SPARK / name / f"state/0/0/{of}.changelog", codec)
        assert header.version == version
        assert header.lineage[-1:] == (() if before is None else (before,))
        for kind, key, value in records:
            if kind == DELETE:
                stored.pop(key, None)
            else:
                stored[key] = stored[key] + value if kind == MERGE and key in stored else value
        rows: Rows = Counter()
        for stored_key, value in stored.items():
            family, key = (ids[stored_key[:2]], stored_key[2:]) if ids else ("default", stored_key)
            rows.update(FORMS.of_ours(family, key, value, b""))
        assert rows == rows_of(name)[batch]
        before = None if of.unique_id is None else LineageItem(of.version, of.unique_id)


def _families(name: str) -> dict[bytes, str]:
    """The column families of a store by what is before their keys; none if it has none."""
    snapshot = next((SPARK / name / "state/0/0").glob("*.zip"))
    with zipfile.ZipFile(snapshot) as entries:
        metadata = decode_state_metadata(entries.read("metadata"))
    return {number.to_bytes(2, "little"): family for family, number in metadata.column_family_ids or ()}


@pytest.mark.spark_case(12)
@pytest.mark.parametrize("path", paths("*/state/0/0/*.changelog"))
def test_a_changelog_would_be_written_byte_for_byte_the_same(path: str) -> None:
    name = path.partition("/")[0]
    codec = name.rpartition("-")[2] if name in CHANGELOGS else "lz4"
    header, records = read(SPARK / path, codec)
    ours = encode_header(header.version, header.lineage)
    ours += b"".join(encode_record(header.version, record) for record in records) + encode_end(header.version)
    theirs = b"".join(decompress_chunks(cast("Codec", codec), [(SPARK / path).read_bytes()]))
    assert ours == theirs
    assert records


# --- snapshots and checksums


@pytest.mark.spark_case(21)
@pytest.mark.parametrize("path", paths("*/state/0/0/*.zip"))
def test_metadata_of_a_snapshot_would_be_written_byte_for_byte_the_same(path: str) -> None:
    with zipfile.ZipFile(SPARK / path) as entries:
        data = entries.read("metadata")
    metadata = decode_state_metadata(data)
    assert encode_state_metadata(metadata) == data
    for file in metadata.sst_files:
        assert (SPARK / path).parent.joinpath("SSTs", file.stored_name).stat().st_size == file.size_bytes


@pytest.mark.parametrize("path", paths("*/state/0/0/*.crc"))
def test_a_file_fits_its_checksum(path: str) -> None:
    data = (SPARK / path).read_bytes()
    checksum = decode_file_checksum(data, subject=path)
    assert encode_file_checksum(checksum) == data
    main = (SPARK / path.removesuffix(".crc")).read_bytes()
    check_file_checksum(checksum, crc32c=crc32c(main), size_bytes=len(main), subject=path)


@pytest.mark.parametrize("name", WHOLE)
async def test_every_committed_version_is_what_sparks_reader_gave(name: str, tmp_path: Path) -> None:
    """Also operands of one list in two SSTs, with the delimiter of nothing that Spark's `OPTIONS` cannot express."""
    checkpoint = await StreamingCheckpoint.open(SPARK / name)
    settings = (await checkpoint.state()).settings
    expected = rows_of(name)
    async with await StateStore.open(checkpoint.state_dir(), tmp_path / "work", settings) as store:
        for batch in (*expected, *reversed(expected)):
            of = (await checkpoint.state(batch=batch)).at
            await store.load(of.version, of.unique_id, read_only=True)
            found: Rows = Counter()
            for family in store.families:
                for key, value in store.items(family=family):
                    found.update(FORMS.of_ours(family, key, value, settings.merge_delimiter))
            assert found == expected[batch]
    assert await checkpoint.committed_batches() == tuple(expected)
    await checkpoint.close()


# --- lineage, on headers that Spark wrote, with two attempts at version 5 and at version 8

ATTEMPTS = SPARK / "lost-attempts/state/0/0"


def headers() -> dict[StateVersion, Lineage]:
    """The header of every changelog, of attempts that lost as well."""
    found = {}
    for file in ATTEMPTS.glob("*.changelog"):
        name = parse_state_name(file.name)
        assert name is not None
        found[name.of] = read(file, "lz4")[0].lineage
    return found


def item(of: StateVersion) -> LineageItem:
    assert of.unique_id is not None
    return LineageItem(of.version, of.unique_id)


def items(versions: Sequence[StateVersion]) -> Lineage:
    return tuple(map(item, versions))


@pytest.mark.spark_case(28)
def test_one_changelog_covers_the_range_that_its_header_has() -> None:
    chain, known = committed("lost-attempts"), headers()
    of = max(chain, key=lambda of: len(known[of]))
    reached = known[of][0].version
    assert of.version - reached > 1
    assert full_lineage(reached, item(of), {of: known[of]}) == items(chain[reached - 1 : of.version])


@pytest.mark.spark_case(29)
def test_the_whole_history_is_found_hop_by_hop() -> None:
    chain, known = committed("lost-attempts"), headers()
    asked: dict[StateVersion, Lineage] = {}
    found = full_lineage(1, item(chain[-1]), asked)
    while isinstance(found, HeaderNeeded):
        asked[found.changelog] = known[found.changelog]
        found = full_lineage(1, item(chain[-1]), asked)
    assert found == items(chain)
    assert 1 < len(asked) < len(chain)


@pytest.mark.spark_case(30)
def test_of_several_lineages_of_a_version_only_the_one_that_was_asked_for_is_followed() -> None:
    chain, known = committed("lost-attempts"), headers()
    lost = sorted(known.keys() - set(chain))
    assert [of.version for of in lost] == [5, 8]
    assert full_lineage(1, item(chain[-1]), known) == items(chain)
    for of in lost:
        assert full_lineage(1, item(of), known) == items([*chain[: of.version - 1], of])


@pytest.mark.spark_case(31)
def test_a_version_alone_takes_no_header() -> None:
    newest = committed("lost-attempts")[-1]
    assert full_lineage(newest.version, item(newest), {}) == (item(newest),)


@pytest.mark.spark_case(32)
def test_a_header_with_a_gap_is_an_error() -> None:
    chain, known = committed("lost-attempts"), headers()
    of = max(chain, key=lambda of: len(known[of]))
    holed = known | {of: known[of][:-2] + known[of][-1:]}
    with pytest.raises(LineageError, match="not increasing by one"):
        full_lineage(1, item(of), holed)


@pytest.mark.spark_case(33)
def test_a_header_that_leads_nowhere_is_an_error() -> None:
    chain, known = committed("lost-attempts"), headers()
    with pytest.raises(LineageError, match="Cannot find version smaller than"):
        full_lineage(1, item(chain[-1]), known | {chain[-1]: ()})


@pytest.mark.parametrize("snapshots", [True, False], ids=["with snapshots", "without"])
def test_every_committed_version_resolves_to_its_own_files(*, snapshots: bool) -> None:
    chain, known = committed("lost-attempts"), headers()
    present = Present.of_names(file.name for file in ATTEMPTS.iterdir() if snapshots or ".zip" not in file.name)
    for of, header in known.items():
        present = present.with_headers({of: header})
    for of in chain:
        found = resolve(of.version, of.unique_id, present)
        assert not isinstance(found, HeaderNeeded)
        base = 0 if found.base is None else found.base.version
        assert found.base in {None, *chain}
        assert list(found.changelogs) == chain[base : of.version]
        assert (base > 0) == (snapshots and of.version >= min(s.version for s in present.snapshots))
        if not snapshots:
            assert base == 0


async def test_a_missing_changelog_is_named(tmp_path: Path) -> None:
    chain = committed("lost-attempts")
    for file in ATTEMPTS.iterdir():
        if file.is_file() and ".zip" not in file.name and not file.name.startswith(f"{chain[1]}."):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    manager = StateFileManager(await CheckpointDir.open(tmp_path))
    with pytest.raises((VersionMissingError, LineageError), match=f"{chain[1]}"):
        await manager.resolve(3, chain[2].unique_id)
    assert latest_version(StateListing.of_names(await manager.files.names())) == chain[-1].version
    await manager.files.close()

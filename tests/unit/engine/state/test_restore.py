"""One version of a state store comes back from a repository as a directory of Spark's (design 0004, R6)."""

import asyncio
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.base import BytesBody
from engine.backup.backup import BackupOptions
from engine.errors import CollectedError, DamagedError, NotFoundError, TargetError
from engine.repository.repository import SyncRepository
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import StreamingCheckpoint
from engine.state.restore import INDEXES_READ_MAX, StateRestoreOptions, restore_state
from index.errors import FormatError, LineageError, StateMetadataError, UnsafeNameError, VersionMissingError
from index.plan.commits import Commit, Retention
from index.snapshot.model import LineageItem
from index.spark.names import StateVersion, changelog_name, parse_state_name, snapshot_name
from tests.unit.engine.conftest import JOB, TTL_MS
from tests.unit.engine.state.state_repository import PACKED, PLAIN, StateWorld, names_below, states, unique
from tests.unit.engine.state.state_store_kit import rows
from tests.unit.engine.state.test_index_files import blob_of, ssts_of
from tidemark import StateStore

__all__ = ["states"]

both_settings = pytest.mark.parametrize("settings", [PLAIN, PACKED], ids=["blobs", "packs"])


def shared_of(root: Path, name: str) -> set[str]:
    """Paths of the SSTs that a snapshot names."""
    with zipfile.ZipFile(root / name) as source:
        said = json.loads(source.read("metadata").split(b"\n", 1)[1])
    return {f"SSTs/{file['dfsSstFileName']}" for file in said["sstFiles"]}


def with_checksums(*names: str) -> set[str]:
    return {*names, *(f"{name}.crc" for name in names)}


@both_settings
async def test_the_files_of_the_version_come_back_and_no_others(states: StateWorld, settings: object) -> None:
    await states.grow(range(1, 9))
    (states.bench.root / "_metadata").mkdir()
    (states.bench.root / "_metadata" / "schema").write_bytes(b"v2\n{}")
    (states.bench.root / ".8.changelog.crc").write_bytes(b"Hadoop's")
    commit = await states.backup()
    repository = await states.process(settings)  # type: ignore[arg-type]
    target = states.world.target()
    restored = await repository.restore_state(commit, target)
    assert (restored.resolution.base, restored.resolution.target) == (states.of(6), states.of(8))
    small = with_checksums(snapshot_name(states.of(6)), changelog_name(states.of(7)), changelog_name(states.of(8)))
    expected = small | shared_of(states.bench.root, snapshot_name(states.of(6))) | {"_metadata/schema"}
    assert names_below(target) == expected
    assert restored.result.files_total == len(expected)
    for name in expected:
        assert (target / name).read_bytes() == (states.bench.root / name).read_bytes()
    await states.check(target, [8, 7, 6])
    # A directory like any other: the history goes on from it.
    async with states.bench.store(work=states.bench.new_work()) as store:
        await store.load(8, states.ids[8])


async def test_no_more_is_asked_than_the_index_and_a_blob_for_each_file(states: StateWorld) -> None:
    await states.grow(range(1, 9))
    commit = await states.backup()
    repository = await states.process()
    restored = await restore_state(repository.opened, commit.record.stores[0], states.world.target())
    asked = states.requests()
    # An index, a zip and two changelogs, a checksum for each, and SSTs.
    assert [operation for operation, _ in asked] == ["get"] * (1 + 6 + ssts_of(states, 6))
    assert len({key for _, key in asked}) == len(asked) == restored.result.requests
    await repository.restore_state(commit, states.world.target())
    assert [(operation, key) for operation, key in states.requests() if operation == "list_page"] == [
        ("list_page", "log/job/")
    ]


@both_settings
async def test_every_version_that_the_directory_holds_comes_back(states: StateWorld, settings: object) -> None:
    await states.grow(range(1, 9))
    commit = await states.backup()
    repository = await states.process(settings)  # type: ignore[arg-type]
    for version in range(1, 9):
        target = states.world.target()
        await repository.restore_state(
            commit, target, options=StateRestoreOptions(version=version, unique_id=states.ids[version])
        )
        await states.check(target, [version])
        assert f"{version + 1}_" not in "".join(names_below(target))


async def test_an_id_that_the_lineage_knows_need_not_be_given(states: StateWorld) -> None:
    await states.grow(range(1, 9))
    commit = await states.backup()
    repository = await states.process()
    target = states.world.target()
    restored = await repository.restore_state(commit, target, options=StateRestoreOptions(version=7))
    assert restored.resolution.target == states.of(7)
    await states.check(target, [7])
    # Before the newest snapshot nobody knows it.
    with pytest.raises(VersionMissingError, match="version 2") as caught:
        await repository.restore_state(commit, states.world.target(), options=StateRestoreOptions(version=2))
    assert "with unique ids only" in caught.value.hint


async def test_a_lineage_that_the_index_lacks_is_read(states: StateWorld) -> None:
    await states.grow(range(1, 9))
    commit = await states.backup(known=False)
    repository = await states.process()
    target = states.world.target()
    await repository.restore_state(commit, target)
    await states.check(target, [8])


@both_settings
async def test_format_1_comes_back_by_number(states: StateWorld, settings: object) -> None:
    await states.grow(range(1, 9), format_version=1)
    commit = await states.backup()
    repository = await states.process(settings)  # type: ignore[arg-type]
    for version in (None, 8, 5):
        target = states.world.target()
        restored = await repository.restore_state(commit, target, options=StateRestoreOptions(version=version))
        assert restored.resolution.target.unique_id is None
        await states.check(target, [version or 8])
    # The id of the backup names its version, and no other one.
    named = commit.record.stores[0].unique_id
    await repository.restore_state(
        commit, states.world.target(), options=StateRestoreOptions(version=8, unique_id=named)
    )
    with pytest.raises(VersionMissingError):
        await repository.restore_state(
            commit, states.world.target(), options=StateRestoreOptions(version=7, unique_id=named)
        )


async def test_format_1_that_was_continued_as_format_2_comes_back(states: StateWorld) -> None:
    await states.grow(range(1, 5), format_version=1)
    await states.grow(range(5, 6), format_version=2)
    commit = await states.backup()
    repository = await states.process()
    target = states.world.target()
    restored = await repository.restore_state(commit, target)
    assert (restored.resolution.base, restored.resolution.changelogs) == (states.of(3), (states.of(4), states.of(5)))
    assert [states.ids[version] is None for version in (3, 4, 5)] == [True, True, False]
    await states.check(target, [5, 4, 3])


async def test_version_0_is_an_empty_directory(states: StateWorld) -> None:
    await states.grow(range(1, 3))
    commit = await states.backup()
    repository = await states.process()
    target = states.world.target()
    await repository.restore_state(commit, target, options=StateRestoreOptions(version=0))
    assert (target.is_dir(), names_below(target)) == (True, set())


async def test_what_stands_at_the_target_is_replaced_when_that_is_wanted_and_reused(states: StateWorld) -> None:
    await states.grow(range(1, 9))
    commit = await states.backup()
    repository = await states.process()
    target = states.world.target()
    await repository.restore_state(commit, target)
    (target / "stray").write_bytes(b"x")
    with pytest.raises(TargetError, match="with content"):
        await repository.restore_state(commit, target)
    result = (
        await repository.restore_state(commit, target, options=StateRestoreOptions(version=7, replace=True))
    ).result
    assert result.files_reused > 0
    assert "stray" not in names_below(target)
    await states.check(target, [7])


SPARK = Path(__file__).parents[3] / "golden" / "spark"


@pytest.mark.parametrize("known", [True, False], ids=["lineage given", "lineage read"])
@pytest.mark.parametrize(
    "name", [*(f"changelog-v{version}-lz4" for version in (1, 2, 3, 4)), "row-checksums", "lost-attempts"]
)
async def test_what_spark_wrote_comes_back_version_by_version(states: StateWorld, name: str, known: bool) -> None:
    """With attempts that lost, too: they are not among what comes back."""
    checkpoint = await StreamingCheckpoint.open(SPARK / name)
    settings = (await checkpoint.state()).settings
    versions = [(await checkpoint.state(batch=batch)).at for batch in await checkpoint.committed_batches()]
    original = SPARK / name / "state" / "0" / "0"
    newest = versions[-1]
    lineage = [LineageItem(of.version, of.unique_id) for of in versions[:-1] if of.unique_id is not None]
    repository = await states.process(PACKED)
    result = await repository.backup(
        JOB,
        original,
        options=BackupOptions(version=newest.version, unique_id=newest.unique_id, lineage=lineage if known else None),
    )
    commit = await repository.commit(JOB, [result])

    async def load(files: CheckpointDir | Path, of: StateVersion) -> dict[str, dict[bytes, bytes]]:
        async with await StateStore.open(files, states.bench.new_work(), settings) as store:
            await store.load(of.version, of.unique_id, read_only=True)
            return {family: rows(store, family) for family in store.families}

    for of in versions:
        target = states.world.target()
        restored = await repository.restore_state(
            commit, target, options=StateRestoreOptions(version=of.version, unique_id=of.unique_id)
        )
        assert restored.resolution.target == of
        back = names_below(target)
        assert back < names_below(original)
        assert all((target / name).read_bytes() == (original / name).read_bytes() for name in back)
        named = {parsed.of for name in back if (parsed := parse_state_name(name)) is not None}
        assert named <= set(versions)
        assert await load(target, of) == await load(checkpoint.state_dir(), of)
    await checkpoint.close()


# ---------------------------------------------------------------------- which commit


async def test_the_commit_of_a_version_is_found_or_a_later_one_that_still_has_it(states: StateWorld) -> None:
    commits: dict[int, Commit] = {}
    for version in range(1, 9):
        await states.grow(range(version, version + 1))
        if version in {2, 5, 8}:
            commits[version] = await states.backup()
    repository = await states.process()

    async def found(version: int, unique_id: str | None = None) -> int:
        commit = await repository.find_state(
            JOB, version=version, unique_id=None if unique_id is None else unique(unique_id)
        )
        return commit.record.stores[0].version

    assert [await found(v, states.ids[v]) for v in (2, 5, 8)] == [2, 5, 8]
    assert [await found(v) for v in (2, 5, 8)] == [2, 5, 8]
    # The next one above it, as that has the fewest files that the version does not need.
    assert [await found(v, states.ids[v]) for v in (1, 3, 4, 6, 7)] == [2, 5, 5, 8, 8]
    assert await found(4) == 5
    for version, unique_id in ((9, None), (8, "gone"), (4, "gone")):
        with pytest.raises(NotFoundError, match=f"version {version}"):
            await found(version, unique_id)
    commit = await repository.find_state(JOB, version=4, unique_id=states.ids[4])
    target = states.world.target()
    await repository.restore_state(commit, target, options=StateRestoreOptions(version=4, unique_id=states.ids[4]))
    await states.check(target, [4])


async def test_the_search_reads_a_bounded_number_of_indexes(states: StateWorld) -> None:
    await states.grow(range(1, 2))
    for version in range(2, INDEXES_READ_MAX + 5):
        await states.grow(range(version, version + 1))
        await states.backup()
    repository = await states.process()
    with pytest.raises(NotFoundError):
        await repository.find_state(JOB, version=1, unique_id=unique("gone"))
    indexes = [key for operation, key in states.requests() if operation == "get" and key.startswith("indexes/")]
    assert len(indexes) == INDEXES_READ_MAX


async def test_a_version_that_was_taken_back_is_distinguished_from_its_successor(states: StateWorld) -> None:
    await states.grow(range(1, 6))
    taken_back = states.of(5)
    first = await states.backup()
    del states.ids[4:]
    await states.grow(range(4, 6))
    second = await states.backup()
    assert second.record.stores[0].version == 5
    repository = await states.process()
    for of, commit in ((taken_back, first), (states.of(5), second)):
        assert (await repository.find_state(JOB, version=5, unique_id=of.unique_id)).pointer == commit.pointer
    target = states.world.target()
    # The directory still holds both histories; a version takes the files of its own.
    restored = await repository.restore_state(second, target)
    assert taken_back.unique_id is not None
    assert taken_back.unique_id not in "".join(names_below(target))
    assert restored.resolution.lineage[-1] == LineageItem(5, states.ids[5] or unique(""))
    await states.check(target, [5, 4])


# ---------------------------------------------------------------------- what cannot be


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """Change the entries of a zip; its checksum goes, as nobody could have planned the change."""
    with zipfile.ZipFile(path) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    change(entries)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as changed:
        for name, data in entries.items():
            changed.writestr(name, data)
    path.write_bytes(stream.getvalue())
    path.with_name(f"{path.name}.crc").unlink(missing_ok=True)


def saying(**changed: object) -> Callable[[dict[str, bytes]], None]:
    """Let the metadata say something else of the first SST."""

    def change(entries: dict[str, bytes]) -> None:
        first, said = entries["metadata"].split(b"\n", 1)
        value = json.loads(said)
        value["sstFiles"][0] |= changed
        entries["metadata"] = first + b"\n" + json.dumps(value).encode()

    return change


def with_entry(name: str) -> Callable[[dict[str, bytes]], None]:
    return lambda entries: entries.update({name: b"x"})


@pytest.mark.parametrize(
    "change, error",
    [
        (saying(dfsSstFileName="../../evil.sst"), UnsafeNameError),
        (saying(dfsSstFileName="/etc/evil.sst"), UnsafeNameError),
        (saying(dfsSstFileName="..\\evil.sst"), UnsafeNameError),
        (saying(dfsSstFileName="..", localFileName=".."), UnsafeNameError),
        (saying(localFileName="../CURRENT"), UnsafeNameError),
        (saying(dfsSstFileName="000008-gone.sst"), VersionMissingError),
        (saying(sizeBytes=7), StateMetadataError),
        (saying(sizeBytes=-7), StateMetadataError),
        (with_entry("../evil"), UnsafeNameError),
        (with_entry("000008.sst"), UnsafeNameError),
        (lambda entries: entries.pop("metadata"), DamagedError),
    ],
    ids=[
        "up",
        "absolute",
        "backslash",
        "dots",
        "local name",
        "missing SST",
        "other size",
        "negative size",
        "entry",
        "SST inside",
        "no metadata",
    ],
)
async def test_a_hostile_or_damaged_snapshot_is_refused_before_anything_is_written(
    states: StateWorld, change: Callable[[dict[str, bytes]], None], error: type[Exception]
) -> None:
    await states.grow(range(1, 5))
    lineage = await states.lineage()
    rewritten(states.bench.file(3, "zip"), change)
    commit = await states.backup(lineage=lineage)
    repository = await states.process()
    target = states.world.target()
    before = names_below(states.world.directory)
    with pytest.raises(error):
        await repository.restore_state(commit, target)
    assert not target.exists()
    assert names_below(states.world.directory) == before


@pytest.mark.parametrize("damage", ["missing", "altered"])
@pytest.mark.parametrize("kind", ["zip", "changelog", "sst"])
async def test_a_blob_that_is_missing_or_altered_leaves_the_target_as_it_was(
    states: StateWorld, kind: str, damage: str
) -> None:
    await states.grow(range(1, 5))
    commit = await states.backup()
    repository = await states.process()
    path = {
        "zip": snapshot_name(states.of(3)),
        "changelog": changelog_name(states.of(4)),
        "sst": next(iter(shared_of(states.bench.root, snapshot_name(states.of(3))))),
    }[kind]
    key = await blob_of(repository, commit, path)
    if damage == "missing":
        await states.world.store.inner.delete([key])
    else:
        await states.world.store.inner.put(key, BytesBody(b"x" * (states.bench.root / path).stat().st_size))
    target = states.world.tree({"here": b"before"})
    with pytest.raises(DamagedError, match=path):
        await repository.restore_state(commit, target, options=StateRestoreOptions(replace=True))
    assert names_below(target) == {"here"}


async def test_a_directory_that_lacks_a_changelog_names_it(states: StateWorld) -> None:
    await states.grow(range(1, 6))
    lineage = await states.lineage()
    states.bench.file(4, "changelog").unlink()
    commit = await states.backup(lineage=lineage)
    repository = await states.process()
    target = states.world.target()
    with pytest.raises(VersionMissingError, match=changelog_name(states.of(4))):
        await repository.restore_state(commit, target)
    await repository.restore_state(commit, target, options=StateRestoreOptions(version=3, unique_id=states.ids[3]))
    await states.check(target, [3])


async def test_a_lineage_that_does_not_lead_back_is_reported(states: StateWorld) -> None:
    await states.grow(range(1, 3))
    wrong = [LineageItem(1, unique("somebody-else"))]
    commit = await states.backup(lineage=wrong)
    repository = await states.process()
    with pytest.raises((LineageError, VersionMissingError), match="1_somebody-else"):
        await repository.restore_state(commit, states.world.target())


async def test_a_plain_directory_is_no_state(states: StateWorld) -> None:
    repository = await states.process()
    commit = await repository.commit(JOB, [await states.world.backup(repository, "plain")])
    with pytest.raises(FormatError):
        await repository.restore_state(commit, states.world.target())
    with pytest.raises(NotFoundError, match="has no store 7/default"):
        await repository.restore_state(commit, states.world.target(), task="7")


async def test_a_commit_that_was_collected_is_reported(states: StateWorld) -> None:
    await states.grow(range(1, 3))
    old = await states.backup()
    await states.grow(range(3, 4))
    await states.backup()
    repository = await states.process()
    states.world.clock.advance(2 * TTL_MS)
    await repository.collect(Retention(keep_last=1), delete_share_max=1)
    with pytest.raises(CollectedError):
        await repository.restore_state(old, states.world.target())
    # The newer commit still has the version.
    commit = await repository.find_state(JOB, version=2, unique_id=states.ids[2])
    target = states.world.target()
    await repository.restore_state(commit, target, options=StateRestoreOptions(version=2, unique_id=states.ids[2]))
    await states.check(target, [2])


async def test_the_blocking_repository_does_the_same(states: StateWorld, tmp_path: Path) -> None:
    await states.grow(range(1, 6))
    lineage = await states.lineage()

    def work() -> Path:
        with SyncRepository.init(f"file://{tmp_path / 'repository'}") as repository:
            result = repository.backup(
                JOB, states.bench.root, options=BackupOptions(version=5, unique_id=states.ids[5], lineage=lineage)
            )
            repository.commit(JOB, [result])
            commit = repository.find_state(JOB, version=4, unique_id=states.ids[4])
            restored = repository.restore_state(commit, tmp_path / "restored", options=StateRestoreOptions(version=4))
            assert restored.resolution.target == states.of(4)
        return tmp_path / "restored"

    await states.check(await asyncio.to_thread(work), [4])

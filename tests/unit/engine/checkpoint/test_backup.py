"""A backup has what a batch takes, nothing else, and nothing that is damaged (design 0005, section 2)."""

import os
import shutil
import zlib
from collections import Counter
from pathlib import Path

import pytest

from blobstore.base import BytesBody
from blobstore.memory import MemoryStore
from engine.checkpoint.backup import BackupChoice, CheckpointBackupResult, backup_checkpoint, preview_backup
from engine.checkpoint.errors import DAMAGE_HINT
from engine.errors import DamagedError, EngineError, NotFoundError, UnsafeSourceError, UsageError
from engine.records.indexes import read_index
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from index.errors import FormatError
from index.snapshot.contents import files_of
from index.snapshot.model import FileIndex, Scope
from index.spark.checkpoint import QUERY_STORE, QUERY_TASK, decode_checkpoint_backup
from index.spark.query_logs import (
    BatchCommit,
    BatchOffsets,
    OperatorMetadata,
    OperatorStore,
    encode_commit,
    encode_offsets,
)
from tests.doubles import InterposedStore, SteppedClock
from tests.unit.engine.checkpoint.checked import found
from tests.unit.engine.checkpoint.live_query import NewQuery, check_rows, names_below, restore_backup, stats_below
from tests.unit.engine.checkpoint.written_query import FAMILIES_SCHEMA
from tests.unit.index.spark.written_metadata import encode_operator, encode_query_id

both_formats = pytest.mark.parametrize("format_version", [1, 2], ids=["V1", "V2"])
in_both_places = pytest.mark.parametrize("remote", [False, True], ids=["directory", "store"])

# Of a query with one operator and one source, whatever is in its logs: lists and metadata.
FIXED_REQUESTS = 24

# Each file in a blob of its own: what was sent follows from the requests.
PLAIN = TransferSettings(inline_file_bytes_max=0, pack_file_bytes_max=0, pack_bytes_max=0, chunk_bytes=4096)


async def files_in(
    repository: Repository, done: CheckpointBackupResult, task: str, store: str = "default"
) -> dict[str, FileIndex]:
    reference = done.commit.store(task, store)
    assert reference is not None
    return {"/".join(path): file for path, file in files_of((await read_index(repository.store, reference.index)).dir)}


@in_both_places
@both_formats
async def test_what_is_restored_is_the_query_at_its_newest_batch(
    new_query: NewQuery, tmp_path: Path, repository: Repository, format_version: int, remote: bool
) -> None:
    query = new_query(remote=remote, format_version=format_version)
    await query.run(8)
    done = await backup_checkpoint(repository, query.location)
    assert (done.backup.batch, done.is_new, done.attempts) == (7, True, 1)
    assert done.backup.query_id == query.query_id
    assert done.commit.scope == Scope(f"spark-{query.query_id}")
    assert decode_checkpoint_backup(done.commit.record.offsets) == done.backup
    assert done.commit.record.version == 8
    ids = [s.unique_id for s in done.commit.record.stores if s.task != QUERY_TASK]
    assert format_version == 1 or ids == query.ids(8)
    target = await restore_backup(repository, done.commit, tmp_path / "restored")
    await check_rows(target, tmp_path, batch=7)


async def test_it_has_what_the_batch_takes_and_nothing_else(
    new_query: NewQuery, tmp_path: Path, repository: Repository
) -> None:
    query = new_query(partitions=1)
    await query.run(7)
    lost = await query.write(0, 5)
    # The batch after it has begun, and its state is there; so are what Spark and Hadoop leave behind, and strangers.
    await query.run(1, commit=False)
    for name in ("commits/.9.crc", ".why.crc", "state/0/0/.8.zip.x.tmp", "sources/0/1.tmp", "commits/notes", "why"):
        (query.root / name).write_bytes(b"left behind")
    done = await backup_checkpoint(repository, query.root)
    ids = [query.ids(version)[0] for version in range(8)]
    state = await files_in(repository, done, "0-0")
    ssts = {name for name in state if name.startswith("SSTs/")}
    names = {f"6_{ids[6]}.zip", f"7_{ids[7]}.changelog"}
    assert set(state) - ssts == names | {f"{name}.crc" for name in names} | {"_metadata/schema"}
    assert ssts
    assert str(lost) not in " ".join(state)
    logs = {f"commits/{n}" for n in (5, 6)} | {f"offsets/{n}" for n in (4, 5, 6, 7)}
    others = {"metadata", "sources/0/0", "state/0/_metadata/metadata"}
    assert set(await files_in(repository, done, QUERY_TASK, QUERY_STORE)) == logs | others
    assert (done.backup.batch, done.backup.oldest_batch) == (6, 5)
    index = await read_index(repository.store, done.commit.record.stores[0].index)
    assert [(item.version, item.unique_id) for item in index.metadata.lineage] == [(6, ids[6])]
    assert done.backup.location == str(query.root)


async def test_a_checkpoint_may_be_at_a_path_that_is_not_utf8(
    new_query: NewQuery, tmp_path: Path, repository: Repository
) -> None:
    query = new_query()
    await query.run(1)
    moved = query.root.rename(tmp_path / "caf\udce9")
    first, again = [await backup_checkpoint(repository, moved) for _ in range(2)]
    assert first.backup.location == f"{tmp_path}/caf\\udce9"
    assert (first.is_new, again.is_new) == (True, False)


async def test_a_store_that_the_query_has_no_longer_is_in_no_new_backup(
    new_query: NewQuery, tmp_path: Path, repository: Repository
) -> None:
    """Design 0006, F3."""
    query = new_query(partitions=1)
    await query.run(2)
    first = (await backup_checkpoint(repository, query.root)).commit
    (tmp_path / "left").mkdir()
    left = await repository.backup(first.scope, tmp_path / "left", task="9-9", store="left")
    foreign = await repository.backup(first.scope, tmp_path / "left", task="mine", store="left")
    await repository.commit(first.scope, [left, foreign], version=first.record.version, offsets=first.record.offsets)
    await query.run(1)
    stores = (await backup_checkpoint(repository, query.root)).commit.record.stores
    # What is named as no query names its stores is somebody else's.
    kept = {(s.task, s.store) for s in first.record.stores} | {("mine", "left")}
    assert {(s.task, s.store) for s in stores} == kept


async def test_a_state_that_begins_with_nothing_can_be_restored_from_the_first_batch(
    new_query: NewQuery, tmp_path: Path, repository: Repository
) -> None:
    query = new_query(deltas_per_snapshot=100)
    await query.run(4)
    done = await backup_checkpoint(repository, query.root)
    assert (done.backup.batch, done.backup.oldest_batch) == (3, 0)


async def test_batches_whose_logs_were_purged_cannot_be_restored(
    new_query: NewQuery, tmp_path: Path, repository: Repository
) -> None:
    query = new_query(deltas_per_snapshot=100)
    await query.run(4)
    for name in ("offsets/0", "commits/0", "commits/1"):
        (query.root / name).unlink()
    assert (await backup_checkpoint(repository, query.root)).backup.oldest_batch == 2


@both_formats
async def test_nothing_is_made_or_touched_in_the_checkpoint(
    new_query: NewQuery, tmp_path: Path, repository: Repository, format_version: int
) -> None:
    query = new_query(format_version=format_version)
    await query.run(5)
    before = stats_below(query.root)
    await backup_checkpoint(repository, query.root)
    assert stats_below(query.root) == before


def write_logs(root: Path, *, batches: int, commit: BatchCommit | None = None) -> Path:
    """A checkpoint of a query without state."""
    files = {"metadata": encode_query_id("q")}
    for batch in range(batches):
        files[f"offsets/{batch}"] = encode_offsets(BatchOffsets(timestamp_ms=batch))
        files[f"commits/{batch}"] = encode_commit(commit or BatchCommit())
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


async def test_a_query_without_state_has_a_backup_of_its_logs(tmp_path: Path, repository: Repository) -> None:
    root = write_logs(tmp_path / "query", batches=2)
    done = await backup_checkpoint(repository, root)
    assert (done.backup.batch, done.backup.oldest_batch, done.state.stores) == (1, 1, 0)
    target = await restore_backup(repository, done.commit, tmp_path / "restored")
    assert names_below(target) == {"metadata", "offsets/0", "offsets/1", "commits/1"}
    assert not (await backup_checkpoint(repository, root)).is_new


async def test_a_next_batch_that_is_planned_again_meanwhile_is_backed_up_as_it_is_now(
    tmp_path: Path, repository: Repository
) -> None:
    """Of the same size and, by a clock of whole seconds, the same time."""
    plans = [encode_offsets(BatchOffsets(timestamp_ms=at_ms)) for at_ms in (3, 4)]
    assert len(plans[0]) == len(plans[1])
    logs = await in_memory(write_logs(tmp_path / "query", batches=3), clock=SteppedClock())
    await logs.put("offsets/3", BytesBody(plans[0]))
    store = InterposedStore(logs)

    async def plan_again() -> None:
        await logs.put("offsets/3", BytesBody(plans[1]))

    store.after("get", "offsets/3", plan_again)
    done = await backup_checkpoint(repository, store)
    target = await restore_backup(repository, done.commit, tmp_path / "restored")
    assert (target / "offsets/3").read_bytes() == plans[1]


async def test_batches_without_both_files_are_no_damage_to_a_query_without_state(
    tmp_path: Path, repository: Repository
) -> None:
    """As asynchronous progress tracking leaves them (K2)."""
    root = write_logs(tmp_path / "query", batches=7)
    for batch in (1, 2, 4, 5):
        (root / f"offsets/{batch}").unlink()
        (root / f"commits/{batch}").unlink()
    (root / "offsets/9").write_bytes((root / "offsets/6").read_bytes())
    assert await found(root) == [("warning", "commits/1")]
    done = await backup_checkpoint(repository, root, BackupChoice(keep_batches=3))
    assert (done.backup.batch, done.backup.oldest_batch, done.backup.damaged) == (6, 6, 0)
    target = await restore_backup(repository, done.commit, tmp_path / "restored")
    assert names_below(target) == {"metadata", "offsets/3", "offsets/6", "commits/6"}
    assert await found(target) == []
    (target / "offsets/3").unlink()
    assert await found(target) == [("damage", "offsets/5")]
    (root / "commits/3").unlink()
    assert await found(root) == [("damage", "commits/3"), ("warning", "commits/1")]
    # Two that began, and none of them is committed: no query logs like that.
    (root / "offsets/8").write_bytes((root / "offsets/6").read_bytes())
    assert ("warning", "offsets/9") in await found(root)


async def test_older_batches_of_a_query_without_state_are_kept_too(tmp_path: Path, repository: Repository) -> None:
    root = write_logs(tmp_path / "query", batches=6)
    done = await backup_checkpoint(repository, root, BackupChoice(keep_batches=2))
    assert (done.backup.batch, done.backup.oldest_batch) == (5, 3)
    assert (
        await backup_checkpoint(repository, root, BackupChoice(job="all", keep_batches=99))
    ).backup.oldest_batch == 0


@both_formats
async def test_each_log_is_asked_for_once_and_every_request_is_counted(
    new_query: NewQuery, repository: Repository, format_version: int
) -> None:
    """Design 0005, section 7."""
    query = new_query(remote=True, format_version=format_version, partitions=1)
    store = query.files
    assert isinstance(store, InterposedStore)
    costs = []
    for batches in (9, 12):
        await query.run(batches)
        store.requests.clear()
        done = await backup_checkpoint(repository, store)
        assert done.state.source_requests + done.query.source_requests == len(store.requests)
        gets = Counter(key for operation, key in store.requests if operation == "get")
        # Beside the logs of the batch, what is read before it was listed, and what a store takes, too.
        again = {f"{log}/{done.backup.batch}" for log in ("commits", "offsets")}
        again |= {"metadata", "state/0/_metadata/metadata", "state/0/0/_metadata/schema"}
        assert {key for key, count in gets.items() if count > 1} == again
        costs.append(done.query.source_requests)
    # Two for each batch in the logs, its offsets and its commit; for the rest as many, however long the logs are.
    assert costs[1] - costs[0] == 2 * 12
    assert costs[0] - 2 * 9 <= FIXED_REQUESTS


class TestAgain:
    @in_both_places
    @both_formats
    async def test_only_what_is_new_is_sent(
        self, new_query: NewQuery, tmp_path: Path, format_version: int, remote: bool
    ) -> None:
        repository = await Repository.init(MemoryStore(), settings=PLAIN)
        query = new_query(remote=remote, format_version=format_version, partitions=1)
        await query.run(7)
        first = await backup_checkpoint(repository, query.location)
        await query.run(1)
        second = await backup_checkpoint(repository, query.location)
        # One changelog, and with ids its checksum.
        assert second.state.files_added == (1 if format_version == 1 else 2)
        before, after = [await files_in(repository, done, "0-0") for done in (first, second)]
        assert {name: file.blobs for name, file in before.items() if name in after} == {
            name: file.blobs for name, file in after.items() if name in before
        }
        if remote:
            # A list, the zip, the schema, the new changelog; with ids two checksums, without the older changelog, which
            # may be another one by now, and a list to see whether it has become one.
            assert second.state.source_requests == 6
        target = await restore_backup(repository, second.commit, tmp_path / "restored")
        await check_rows(target, tmp_path, batch=7, partitions=1)

    @both_formats
    async def test_a_file_whose_name_is_given_once_is_not_read_again(
        self, new_query: NewQuery, tmp_path: Path, repository: Repository, format_version: int
    ) -> None:
        query = new_query(format_version=format_version, partitions=1)
        await query.run(6)
        await backup_checkpoint(repository, query.root)
        for sst in (query.root / "state/0/0/SSTs").iterdir():
            sst.write_bytes(bytes(sst.stat().st_size))
        await query.run()
        preview = await preview_backup(repository, query.root)
        done = await backup_checkpoint(repository, query.root)
        assert (preview.batch, preview.is_taken, preview.files) == (6, False, done.state.files)
        assert done.state.files_added <= preview.files_new < preview.files
        target = await restore_backup(repository, done.commit, tmp_path / "restored")
        await check_rows(target, tmp_path, batch=6, partitions=1)

    async def test_the_same_batch_is_reported_and_nothing_is_written(
        self, new_query: NewQuery, tmp_path: Path, repository: Repository
    ) -> None:
        query = new_query()
        await query.run(3)
        first = await backup_checkpoint(repository, query.root)
        store = repository.store
        assert isinstance(store, InterposedStore)
        store.requests.clear()
        again = await backup_checkpoint(repository, query.root)
        assert (again.is_new, again.commit.pointer, again.backup) == (False, first.commit.pointer, first.backup)
        assert not [request for request in store.requests if request[0].startswith("put")]

    @both_formats
    async def test_offsets_that_have_begun_since_are_taken(
        self, new_query: NewQuery, tmp_path: Path, repository: Repository, format_version: int
    ) -> None:
        query = new_query(format_version=format_version, partitions=1)
        await query.run(4)
        await backup_checkpoint(repository, query.root)
        await query.run(1, commit=False)
        done = await backup_checkpoint(repository, query.root)
        assert (done.is_new, done.backup.batch) == (True, 3)
        target = await restore_backup(repository, done.commit, tmp_path / "restored")
        assert (target / "offsets/4").exists()
        assert not (await backup_checkpoint(repository, query.root)).is_new
        # The query was taken back to the end of the batch.
        (query.root / "offsets/4").unlink()
        assert (await backup_checkpoint(repository, query.root)).is_new

    @pytest.mark.parametrize("unique_ids", [None, {}], ids=["V1", "V2"])
    async def test_a_batch_that_was_run_again_is_another_one(
        self, tmp_path: Path, repository: Repository, unique_ids: dict[int, tuple[()]] | None
    ) -> None:
        entry = BatchCommit(version=2, unique_ids={}) if unique_ids is not None else BatchCommit()
        root = write_logs(tmp_path / "query", batches=2, commit=entry)
        await backup_checkpoint(repository, root)
        assert not (await backup_checkpoint(repository, root)).is_new
        (root / "offsets/1").write_bytes(encode_offsets(BatchOffsets(timestamp_ms=99)))
        done = await backup_checkpoint(repository, root)
        assert done.is_new
        target = await restore_backup(repository, done.commit, tmp_path / "restored")
        assert (target / "offsets/1").read_bytes() == (root / "offsets/1").read_bytes()


class TestRefused:
    @pytest.mark.parametrize("made", [(), ("metadata",), ("metadata", "offsets/0")], ids=["nothing", "id", "offsets"])
    async def test_a_checkpoint_without_a_committed_batch_has_no_backup(
        self, tmp_path: Path, repository: Repository, made: tuple[str, ...]
    ) -> None:
        data = {"metadata": encode_query_id("q"), "offsets/0": encode_offsets(BatchOffsets())}
        for name in made:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data[name])
        with pytest.raises(NotFoundError, match="no batch is committed" if made else "no checkpoint"):
            await backup_checkpoint(repository, tmp_path)

    async def test_a_job_of_another_query_or_of_something_else(
        self, new_query: NewQuery, tmp_path: Path, repository: Repository
    ) -> None:
        query, other = new_query(partitions=1), new_query(name="other", partitions=1)
        await query.run()
        await other.run()
        await backup_checkpoint(repository, query.root, BackupChoice(job="flights"))
        (tmp_path / "plain").mkdir()
        await repository.commit(Scope("plain"), [await repository.backup(Scope("plain"), tmp_path / "plain")])
        store = repository.store
        assert isinstance(store, InterposedStore)
        store.requests.clear()
        for job, message in (("flights", f"query {query.query_id}, and this is"), ("plain", "no checkpoint backup")):
            with pytest.raises(UsageError, match=message):
                await backup_checkpoint(repository, other.root, BackupChoice(job=job))
        assert not [request for request in store.requests if request[0].startswith("put")]


class TestCopies:
    """Two copies of one checkpoint have one query id, and must not share a job (P9)."""

    async def test_a_checkpoint_that_is_reached_by_a_link_is_no_copy(
        self, new_query: NewQuery, tmp_path: Path, repository: Repository
    ) -> None:
        query, link = new_query(), tmp_path / "link"
        link.symlink_to(query.root)
        for newest, place in ((2, query.root), (5, link), (8, query.root)):
            await query.run(3)
            for path in query.root.glob("[co]*/[0-9]*"):
                # As Spark purges what it does not retain.
                if int(path.name) < newest - 1:
                    path.unlink()
            assert (await backup_checkpoint(repository, place)).is_new

    @both_formats
    async def test_a_copy_that_has_run_by_itself_is_refused(
        self, new_query: NewQuery, tmp_path: Path, repository: Repository, format_version: int
    ) -> None:
        query = new_query(format_version=format_version, partitions=1)
        await query.run(3)
        copy = shutil.copytree(query.root, tmp_path / "copy")
        await query.run(2)
        production = await backup_checkpoint(repository, query.root)
        for moved in (False, True):
            if moved:
                # The copy has come to the same number with a batch of its own.
                shutil.rmtree(copy)
                shutil.copytree(query.root, copy)
                offsets = (copy / "offsets/4").read_bytes()
                assert b'"batchTimestampMs":4' in offsets
                (copy / "offsets/4").write_bytes(offsets.replace(b'"batchTimestampMs":4', b'"batchTimestampMs":9'))
            with pytest.raises(UsageError, match="does not have batch 4 that was backed up from") as caught:
                await backup_checkpoint(repository, copy)
            assert "--job" in caught.value.hint
            assert "--moved" in caught.value.hint
            with pytest.raises(UsageError):
                await preview_backup(repository, copy)
        newest = await repository.latest(production.commit.scope)
        assert newest is not None
        assert newest.pointer == production.commit.pointer
        assert (await backup_checkpoint(repository, copy, BackupChoice(job="test"))).is_new
        assert (await preview_backup(repository, copy, BackupChoice(moved=True))).batch == 4
        assert (await backup_checkpoint(repository, copy, BackupChoice(moved=True))).is_new
        # From here on it is the other one that is elsewhere.
        with pytest.raises(UsageError):
            await backup_checkpoint(repository, query.root)

    async def test_a_checkpoint_that_goes_on_elsewhere_is_no_copy(
        self, new_query: NewQuery, tmp_path: Path, repository: Repository
    ) -> None:
        query = new_query(partitions=1)
        await query.run(3)
        first = await backup_checkpoint(repository, query.root)
        same = shutil.copytree(query.root, tmp_path / "same")
        assert not (await backup_checkpoint(repository, same)).is_new
        await query.run(2)
        further = shutil.move(query.root, tmp_path / "further")
        done = await backup_checkpoint(repository, further)
        assert (done.backup.batch, done.commit.record.predecessor) == (4, first.commit.pointer)

    async def test_a_query_that_was_taken_back_where_it_stands_is_no_copy(
        self, new_query: NewQuery, tmp_path: Path, repository: Repository
    ) -> None:
        query = new_query(partitions=1)
        await query.run(3)
        older = shutil.copytree(query.root, tmp_path / "older")
        await query.run(2)
        await backup_checkpoint(repository, query.root)
        shutil.rmtree(query.root)
        older.rename(query.root)
        assert (await backup_checkpoint(repository, query.root)).backup.batch == 2


def flip(path: Path, at: int) -> None:
    """Another byte in place of one, and the times as they were."""
    data, status = bytearray(path.read_bytes()), path.stat()
    data[at] ^= 0x5A
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


class TestDamage:
    @pytest.mark.parametrize(
        "pattern, at",
        [
            ("state/0/1/SSTs/*.sst", 12),
            ("state/0/1/*.zip", 40),
            ("state/0/1/8_*.changelog", -30),
            ("state/0/1/8_*.changelog.crc", 30),
            ("commits/7", 1),
            ("offsets/7", 1),
            ("metadata", 3),
            ("state/0/_metadata/metadata", 4),
        ],
    )
    async def test_what_is_not_whole_is_named_and_older_backups_stay(
        self, tmp_path: Path, repository: Repository, checkpoints: dict[int, Path], pattern: str, at: int
    ) -> None:
        query = tmp_path / "query"
        shutil.copytree(checkpoints[5], query)
        older = await backup_checkpoint(repository, query)
        shutil.rmtree(query)
        shutil.copytree(checkpoints[8], query)
        newest = max(query.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
        flip(newest, at)
        for location in (query, await in_memory(query)):
            with pytest.raises((EngineError, FormatError)) as caught:
                await backup_checkpoint(repository, location, BackupChoice(job=older.commit.scope.job))
            assert newest.name.removesuffix(".crc") in str(caught.value)
        newest_commit = await repository.latest(older.commit.scope)
        assert newest_commit is not None
        assert newest_commit.pointer == older.commit.pointer
        target = await restore_backup(repository, older.commit, tmp_path / "restored")
        await check_rows(target, tmp_path, batch=4)

    async def test_a_log_that_can_still_be_read_has_to_fit_the_checksum_that_hadoop_wrote(
        self, tmp_path: Path, repository: Repository, checkpoints: dict[int, Path]
    ) -> None:
        query = tmp_path / "query"
        shutil.copytree(checkpoints[5], query)
        commit = query / "commits/3"
        sums = (512).to_bytes(4, "big") + zlib.crc32(commit.read_bytes()).to_bytes(4, "big")
        commit.with_name(".3.crc").write_bytes(b"crc\0" + sums)
        assert (await backup_checkpoint(repository, query)).is_new
        # A letter of the name of a field, which a reader passes over.
        flip(commit, commit.read_bytes().index(b"Watermark"))
        with pytest.raises(DamagedError, match="commits/3"):
            await backup_checkpoint(repository, query, BackupChoice(job="another"))

    @pytest.mark.parametrize(
        "pattern, at",
        [
            ("state/0/1/SSTs/*.sst", 12),
            ("state/0/1/*.zip", 40),
            ("state/0/1/8_*.changelog", -30),
            ("state/0/1/8_*.changelog", None),
            ("state/0/1/SSTs/*.sst", None),
            ("commits/7", 1),
            ("commits/6", 1),
            ("offsets/6", 1),
            ("state/0/_metadata/metadata", 4),
        ],
    )
    async def test_errors_name_files_of_the_checkpoint_and_what_to_do_about_it(
        self, tmp_path: Path, repository: Repository, checkpoints: dict[int, Path], pattern: str, at: int | None
    ) -> None:
        query, scratch = tmp_path / "query", tmp_path / "scratch"
        scratch.mkdir()
        shutil.copytree(checkpoints[8], query)
        damaged = max(query.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
        if at is None:
            damaged.unlink()
        else:
            flip(damaged, at)
        path = str(damaged.relative_to(query))
        for location in (query, await in_memory(query)):
            with pytest.raises((EngineError, FormatError)) as caught:
                await backup_checkpoint(repository, location, BackupChoice(scratch=scratch))
            error = caught.value
            assert isinstance(error, EngineError | FormatError)
            shown = str(error)
            name = str(query) if location == query else "MemoryStore"
            assert error.subject in (f"{name}/{path}", f"{name}/state/0/1")
            assert damaged.name.rpartition(".")[0] in shown
            assert str(scratch) not in shown
            assert error.hint == DAMAGE_HINT
            assert not list(scratch.iterdir())


class TestStateThatIsGone:
    @both_formats
    @pytest.mark.parametrize("gone", ["state/0/_metadata", "state"])
    async def test_a_backup_without_it_is_refused(
        self, new_query: NewQuery, repository: Repository, format_version: int, gone: str
    ) -> None:
        query = new_query(format_version=format_version, partitions=1)
        await query.run(3)
        await backup_checkpoint(repository, query.root)
        await query.run(1)
        shutil.rmtree(query.root / gone)
        # Without ids and without `state/` only an older backup shows that there was some.
        jobs = (None,) if (format_version, gone) == (1, "state") else (None, "fresh")
        for job in jobs:
            with pytest.raises(DamagedError, match="has no state, and" if len(jobs) == 1 else "state/0/_metadata"):
                await backup_checkpoint(repository, query.root, BackupChoice(job=job))

    async def test_schemas_that_the_metadata_names_have_to_be_there(
        self, tmp_path: Path, repository: Repository, checkpoints: dict[int, Path]
    ) -> None:
        query = tmp_path / "query"
        shutil.copytree(checkpoints[5], query)
        store = OperatorStore(
            name="default",
            prefix_columns_count=0,
            partitions_count=2,
            schema_paths=("s3a://else/where/state/0/_stateSchema/default/0_x",),
        )
        (query / "state/0/_metadata/v2").mkdir()
        operator = OperatorMetadata(version=2, id=0, name="any", stores=(store,), properties="{}")
        (query / "state/0/_metadata/v2/0").write_bytes(encode_operator(operator))
        with pytest.raises(DamagedError, match="state/0/_stateSchema/default/0_x: is not there"):
            await backup_checkpoint(repository, query)
        (query / "state/0/_stateSchema/default").mkdir(parents=True)
        (query / "state/0/_stateSchema/default/0_x").write_bytes(FAMILIES_SCHEMA)
        assert (await backup_checkpoint(repository, query)).is_new


class TestOldestBatch:
    """Every batch that a backup says it has can be gone on from."""

    @pytest.mark.parametrize(
        "missing, oldest", [("offsets/4", 6), ("offsets/5", 7), ("commits/6", 7), ("offsets/3", 5)]
    )
    async def test_its_logs_are_there(
        self, tmp_path: Path, repository: Repository, checkpoints: dict[int, Path], missing: str, oldest: int
    ) -> None:
        query = tmp_path / "query"
        shutil.copytree(checkpoints[8], query)
        assert (await backup_checkpoint(repository, query)).backup.oldest_batch == 5
        (query / missing).unlink()
        with pytest.raises(DamagedError, match=missing):
            await backup_checkpoint(repository, query, BackupChoice(job="another"))
        choice = BackupChoice(job="another", despite_damage=True)
        backup = (await backup_checkpoint(repository, query, choice)).backup
        assert (backup.oldest_batch, backup.damage) == (oldest, (missing,))

    async def test_the_newest_batch_goes_on(
        self, tmp_path: Path, repository: Repository, checkpoints: dict[int, Path]
    ) -> None:
        query = tmp_path / "query"
        shutil.copytree(checkpoints[8], query)
        (query / "offsets/6").unlink()
        for batch in range(7):
            (query / f"commits/{batch}").unlink()
        with pytest.raises(DamagedError, match="offsets/6: is not there, and without it the query does not go on"):
            await backup_checkpoint(repository, query)
        shutil.copy(query / "offsets/7", query / "offsets/8")
        assert (await backup_checkpoint(repository, query)).backup.oldest_batch == 7

    @in_both_places
    async def test_its_commits_name_the_states_that_the_backup_has(
        self, tmp_path: Path, repository: Repository, checkpoints: dict[int, Path], remote: bool
    ) -> None:
        query = tmp_path / "query"
        shutil.copytree(checkpoints[8], query)
        commit = query / "commits/5"
        data = commit.read_bytes()
        commit.write_bytes(data.replace(b"-4", b"-5"))
        assert commit.read_bytes() != data
        # What check says of the stores of older batches is not asked: the backup has nothing of them.
        done = await backup_checkpoint(repository, await in_memory(query) if remote else query)
        assert done.backup.oldest_batch == 6
        assert "commits/5" not in await files_in(repository, done, QUERY_TASK, QUERY_STORE)
        commit.write_bytes(data.replace(b"-4", b"/4"))
        with pytest.raises(DamagedError, match="commits/5: unique id"):
            await backup_checkpoint(repository, query, BackupChoice(job="another"))


@pytest.mark.parametrize("linked", ["sources/0/0", "sources/0", "commits/5"])
async def test_a_link_in_a_checkpoint_is_refused(
    tmp_path: Path, repository: Repository, checkpoints: dict[int, Path], linked: str
) -> None:
    query = tmp_path / "query"
    shutil.copytree(checkpoints[8], query)
    (query / linked).rename(tmp_path / "aside")
    (query / linked).symlink_to(tmp_path / "aside")
    # Of the logs nothing follows a link: what is one is not there.
    refused, reason = (DamagedError, "not there") if linked == "commits/5" else (UnsafeSourceError, "a symbolic link")
    with pytest.raises(refused, match=f"{linked}: is {reason}"):
        await backup_checkpoint(repository, query)


async def in_memory(root: Path, *, clock: SteppedClock | None = None) -> MemoryStore:
    """A directory as another store has it."""
    store = MemoryStore(clock=clock)
    for name in names_below(root):
        await store.put(name, BytesBody((root / name).read_bytes()))
    return store

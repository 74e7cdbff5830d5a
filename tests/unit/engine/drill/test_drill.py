import asyncio
import errno
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from blobstore.base import BlobStore, Buffer, Sink
from blobstore.local.store import LocalStore
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import ForwardingStore
from engine.drill.drill import SCRATCH_PREFIX, DrillOptions, run_restore_drill
from engine.errors import DamagedError, EngineError, IncompleteError, NotFoundError, TargetError
from engine.rocksdb.store import StoreWriter
from engine.settings import KIB, TransferSettings
from index.snapshot.model import Scope
from tidemark import Repository

SCOPE = Scope("flights")
RANDOM = random.Random(6)


class SlowStore(ForwardingStore):
    """Every read waits before each chunk."""

    chunk_s = 0.0

    @override
    async def read_into(self, key: str, sink: Sink, **how: Any) -> None:
        await super().read_into(key, _SlowSink(sink, self.chunk_s), **how)


class _SlowSink(Sink):
    def __init__(self, sink: Sink, chunk_s: float) -> None:
        self._sink = sink
        self._chunk_s = chunk_s

    @override
    def write(self, data: Buffer) -> None:
        self._sink.write(data)

    @override
    async def take(self, chunks: Sequence[Buffer]) -> None:
        for chunk in chunks:
            for at in range(0, len(chunk), 64 * KIB):
                await asyncio.sleep(self._chunk_s)
                await self._sink.take([chunk[at : at + 64 * KIB]])


def _rocksdb(directory: Path, *, rows: int = 20) -> Path:
    with StoreWriter.open(directory / "live") as store:
        for number in range(rows):
            store.put(number.to_bytes(4), RANDOM.randbytes(1000))
        store.checkpoint(directory / "checkpoint")
    return directory / "checkpoint"


def _files(directory: Path, *, count: int, size_bytes: int) -> Path:
    directory.mkdir(parents=True)
    for number in range(count):
        (directory / f"{number:04d}").write_bytes(RANDOM.randbytes(size_bytes))
    return directory


@asynccontextmanager
async def _repository(store: BlobStore, *directories: Path, **settings: Any) -> AsyncIterator[Repository]:
    """A repository whose newest commit has a store for each directory."""
    async with await Repository.init(store, settings=TransferSettings(**settings)) as repository:
        results = [
            await repository.backup(SCOPE, directory, task=str(number)) for number, directory in enumerate(directories)
        ]
        await repository.commit(SCOPE, results)
        yield repository


@pytest.fixture
async def repository(tmp_path: Path) -> AsyncIterator[Repository]:
    """Two RocksDB stores, one of them below the root of its snapshot, and one that only looks like one."""
    below = tmp_path / "below"
    _rocksdb(below)
    (below / "live").rename(tmp_path / "live")
    lookalike = _files(tmp_path / "lookalike", count=3, size_bytes=300 * KIB)
    (lookalike / "CURRENT").write_text("somewhere")
    async with _repository(
        LocalStore(tmp_path / "repository"), _rocksdb(tmp_path / "root"), below, lookalike
    ) as opened:
        yield opened


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    directory = tmp_path / "scratch"
    directory.mkdir()
    return directory


def _left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


async def test_all_stores_come_back_are_opened_and_go_again(repository: Repository, scratch: Path) -> None:
    done = await run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch, slo_ms=60_000))
    assert (done.stores_count, done.measured.opened_count, done.to_disk) == (3, 2, True)
    assert done.size_bytes > 900 * KIB
    assert done.measured.bytes_fetched > 900 * KIB
    assert done.measured.requests_count >= 6
    assert min(done.find_s, done.restore_s, done.open_s) > 0
    assert not done.is_slow
    assert done.kept_at == ""
    assert _left(scratch) == []


async def test_what_is_kept_is_the_state(repository: Repository, scratch: Path, tmp_path: Path) -> None:
    done = await run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch, keep=True, stores_at_once=1))
    kept = Path(done.kept_at)
    assert kept.parent == scratch
    assert (kept / "2" / "default" / "0001").read_bytes() == (tmp_path / "lookalike" / "0001").read_bytes()
    assert _left(kept) == ["0", "1", "2"]


async def test_to_nowhere_reads_what_a_restore_reads_and_writes_nothing(repository: Repository, scratch: Path) -> None:
    to_disk = await run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch))
    before = _left(scratch.parent)
    nowhere = await run_restore_drill(repository, SCOPE, DrillOptions(scratch=None))
    assert _left(scratch.parent) == before
    assert nowhere.measured.requests_count == to_disk.measured.requests_count
    assert nowhere.measured.bytes_fetched == to_disk.measured.bytes_fetched
    assert (nowhere.to_disk, nowhere.open_s, nowhere.measured.opened_count) == (False, 0, 0)


class _Heard:
    def __init__(self) -> None:
        self.totals: list[tuple[int, int]] = []
        self.files = self.bytes = 0

    def total(self, *, files: int, bytes_: int) -> None:
        self.totals.append((files, bytes_))

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        self.files += files
        self.bytes += bytes_


@pytest.mark.parametrize("to_disk", [True, False])
async def test_progress_is_of_all_stores_together(repository: Repository, scratch: Path, *, to_disk: bool) -> None:
    heard = _Heard()
    done = await run_restore_drill(
        repository, SCOPE, DrillOptions(scratch=scratch if to_disk else None), progress=heard
    )
    assert heard.totals == [(done.files_count, done.size_bytes)]
    assert (heard.files, heard.bytes) == (done.files_count, done.size_bytes)


def _largest_blob(tmp_path: Path) -> Path:
    return max(
        (p for p in (tmp_path / "repository" / "blobs").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )


def _alter(blob: Path) -> None:
    data = bytearray(blob.read_bytes())
    data[100] ^= 1
    blob.write_bytes(data)


@pytest.mark.parametrize("to_disk", [True, False])
@pytest.mark.parametrize("harm, kind", [(_alter, DamagedError), (Path.unlink, IncompleteError)])
async def test_what_is_altered_or_missing_is_found_and_nothing_is_left(
    repository: Repository,
    scratch: Path,
    tmp_path: Path,
    harm: Callable[[Path], None],
    kind: type[Exception],
    *,
    to_disk: bool,
) -> None:
    harm(_largest_blob(tmp_path))
    with pytest.raises(kind):
        await run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch if to_disk else None))
    assert _left(scratch) == []


async def test_a_rocksdb_that_does_not_open_is_found(tmp_path: Path, scratch: Path) -> None:
    checkpoint = _rocksdb(tmp_path / "root")
    next(checkpoint.glob("MANIFEST-*")).write_bytes(b"no manifest")
    async with _repository(LocalStore(tmp_path / "repository"), checkpoint) as repository:
        with pytest.raises(EngineError, match="open"):
            await run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch, keep=True))
    assert _left(scratch) == []


async def test_a_rocksdb_without_its_current_is_found(tmp_path: Path, scratch: Path) -> None:
    """It was so when it was backed up: what comes back is what was there, and no job can begin with it."""
    checkpoint = _rocksdb(tmp_path / "root")
    (checkpoint / "CURRENT").unlink()
    async with _repository(LocalStore(tmp_path / "repository"), checkpoint) as repository:
        with pytest.raises(DamagedError, match="no CURRENT"):
            await run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch))
    assert _left(scratch) == []


async def test_too_little_space_for_all_stores_is_reported_before_a_byte_is_fetched(
    repository: Repository, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = _Heard()
    full = os.statvfs_result((4096, 4096, 1000, 200, 200, 1000, 500, 500, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(TargetError, match="too little space"):
        await run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch), progress=heard)
    assert heard.totals == []
    assert _left(scratch) == []


async def test_a_scratch_directory_that_is_not_there_is_not_made(repository: Repository, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such directory") as raised:
        await run_restore_drill(repository, SCOPE, DrillOptions(scratch=tmp_path / "not mounted"))
    assert "mounted" in raised.value.hint
    assert not (tmp_path / "not mounted").exists()


@pytest.fixture
def nothing_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.rmtree

    def refuse(path: Path | str, **options: Any) -> None:
        if not Path(path).name.startswith(SCRATCH_PREFIX):
            real(path, **options)
        elif not options.get("ignore_errors"):
            raise OSError(errno.EIO, "the disk went away", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)


@pytest.mark.usefixtures("nothing_goes")
async def test_what_stays_after_an_error_is_named_by_it(repository: Repository, scratch: Path, tmp_path: Path) -> None:
    _largest_blob(tmp_path).unlink()
    with pytest.raises(IncompleteError) as raised:
        await run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch))
    (left,) = _left(scratch)
    assert raised.value.__notes__ == [f"could not be removed: {scratch / left}: the disk went away"]


async def test_a_task_may_be_called_as_anything(tmp_path: Path, scratch: Path) -> None:
    state = _files(tmp_path / "state", count=1, size_bytes=9000)
    async with await Repository.init(MemoryStore()) as repository:
        tasks = ("probe-00", ".probe", "0")
        await repository.commit(SCOPE, [await repository.backup(SCOPE, state, task=task) for task in tasks])
        done = await run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch, keep=True))
    assert len(_left(Path(done.kept_at))) == 3


async def test_no_commit_is_reported(repository: Repository, scratch: Path) -> None:
    with pytest.raises(NotFoundError):
        await run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch), number=9)


async def test_who_is_cancelled_leaves_nothing(tmp_path: Path, scratch: Path) -> None:
    state = _files(tmp_path / "state", count=4, size_bytes=300 * KIB)
    slow = SlowStore(MemoryStore())
    async with _repository(slow, state) as repository:
        slow.chunk_s = 5
        task = asyncio.create_task(run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert _left(scratch) == []


async def test_a_commit_of_empty_files_is_restored_too(tmp_path: Path, scratch: Path) -> None:
    state = _files(tmp_path / "state", count=2, size_bytes=0)
    async with _repository(LocalStore(tmp_path / "repository"), state) as repository:
        done = await run_restore_drill(repository, SCOPE, DrillOptions(scratch=scratch))
    assert done.measured.bytes_fetched == 0

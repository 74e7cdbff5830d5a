import asyncio
import os
import threading
from contextlib import aclosing
from pathlib import Path

import pytest

from blobstore.concurrency import acquired, run_blocking
from blobstore.local import files as local_files
from blobstore.local.files import (
    check_regular,
    create_to_write,
    make_durable,
    open_to_read,
    read_chunks,
    write_all_at,
    write_whole,
)


async def read_all(path: Path | str, *size_bytes: int) -> bytes:
    return b"".join([chunk async for chunk in read_chunks(path, *size_bytes)])


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def permissions(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_no_file_takes_the_place_of_a_pipe_or_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        write_whole(tmp_path / "pipe", b"data")
    assert (tmp_path / "pipe").is_fifo()
    # Also where it is redirected to a file.
    for name in ("null", "stdout"):
        with pytest.raises(OSError, match="not a regular file"):
            check_regular(Path("/dev", name))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    return path


@pytest.mark.parametrize(
    "size_bytes,expected", [((), b"0123456789"), ((4,), b"0123"), ((0,), b""), ((99,), b"0123456789")]
)
async def test_the_first_bytes_of_a_file_are_read(file: Path, size_bytes: tuple[int, ...], expected: bytes) -> None:
    assert await read_all(file, *size_bytes) == expected


@pytest.mark.parametrize("size_bytes,last", [((), b"89"), ((9,), b"8"), ((8,), None), ((99,), b"89")])
async def test_chunks_have_one_size(
    file: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: tuple[int, ...], last: bytes | None
) -> None:
    monkeypatch.setattr(local_files, "CHUNK_BYTES", 4)
    chunks = [chunk async for chunk in read_chunks(file, *size_bytes)]
    assert chunks == [b"0123", b"4567", *([] if last is None else [last])]


async def test_a_file_can_be_opened_relative_to_a_directory(file: Path) -> None:
    descriptor = os.open(file.parent, os.O_RDONLY)
    try:
        async with open_to_read("file", dir_fd=descriptor) as opened:
            assert os.pread(opened, 99, 0) == b"0123456789"
        async with create_to_write("made", dir_fd=descriptor) as made:
            write_all_at(made, 0, b"x")
    finally:
        os.close(descriptor)
    assert (file.parent / "made").read_bytes() == b"x"


async def test_a_symbolic_link_is_not_followed(file: Path) -> None:
    link = file.parent / "link"
    link.symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        await read_all(link)


async def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        await read_all(tmp_path)


async def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Invalid argument"):
        await read_all(tmp_path / "pipe")


async def test_stat_shows_a_change_while_the_file_is_open(file: Path) -> None:
    async with open_to_read(file) as opened:
        before = os.fstat(opened)
        with file.open("ab") as other:
            other.write(b"more")
        after = os.fstat(opened)
    assert (before.st_size, after.st_size) == (10, 14)
    assert before.st_ino == after.st_ino


async def test_parts_are_written_at_their_offsets_by_many_tasks(tmp_path: Path) -> None:
    parts = {number * 1000: bytes([number]) * 1000 for number in range(50)}
    async with create_to_write(tmp_path / "new") as new, asyncio.TaskGroup() as group:
        for offset, data in reversed(parts.items()):
            group.create_task(run_blocking(write_all_at, new, offset, data))
    assert await read_all(tmp_path / "new") == b"".join(parts.values())


async def test_a_new_file_replaces_nothing_and_takes_its_mode(file: Path) -> None:
    with pytest.raises(FileExistsError):
        async with create_to_write(file):
            pass
    assert await read_all(file) == b"0123456789"
    async with create_to_write(file.parent / "private", mode=0o600):
        pass
    assert permissions(file.parent / "private") == 0o600


async def test_a_cancelled_call_waits_for_its_thread() -> None:
    entered, leave, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        leave.wait(10)
        done.set()

    task = asyncio.ensure_future(run_blocking(work))
    await asyncio.to_thread(entered.wait, 10)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()


async def test_a_cancelled_call_does_not_report_the_error_of_its_thread() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        leave.wait(10)
        raise OSError("nobody is interested any more")

    task = asyncio.ensure_future(run_blocking(work))
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_a_thread_acquires_for_a_cancelled_call_is_released() -> None:
    entered, leave, released = threading.Event(), threading.Event(), list[str]()

    def acquire() -> str:
        entered.set()
        leave.wait(10)
        return "a lock"

    async def work() -> None:
        async with acquired(acquire, released.append):
            pytest.fail("the block was entered")

    task = asyncio.ensure_future(work())
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert released == ["a lock"]


async def test_no_descriptor_is_left_open_by_cancelled_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "CHUNK_BYTES", 1)

    async def opened_count() -> int:
        return len(await asyncio.to_thread(os.listdir, "/proc/self/fd"))

    await read_all(file)
    before = await opened_count()
    for turns in range(30):
        task = asyncio.ensure_future(read_all(file))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert await opened_count() == before


async def test_an_error_of_closing_does_not_hide_what_went_wrong_before(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with open_to_read(file) as opened:
            os.close(opened)  # so that closing fails
            raise ValueError("the first error")

    with pytest.raises(ValueError, match="the first error"):
        await work()


# --- make_durable ---


def test_new_directories_are_synced_into_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(local_files, "sync_dir", lambda path: synced.append(str(path.relative_to(tmp_path))))
    make_durable(tmp_path / "above" / "new", 0o700)
    assert synced == [".", "above"]
    assert (tmp_path / "above" / "new").stat().st_mode & 0o777 == 0o700
    make_durable(tmp_path / "above" / "new")
    assert synced == [".", "above"]


async def test_reading_may_stop_early(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "CHUNK_BYTES", 1)
    async with aclosing(read_chunks(file)) as chunks:
        assert await anext(chunks) == b"0"

"""Spark's own cases (`CheckpointFileManagerSuite`, SPARK-23966), and what they leave out."""

import asyncio
from pathlib import Path

import pytest

from blobstore.base import BlobStore, BytesBody, MemorySink, Unknown
from blobstore.checkpoint_files import DIRECTORY_MARKER, CheckpointFiles
from blobstore.errors import (
    AccessDeniedError,
    BlobNotFoundError,
    CheckpointFileExistsError,
    CheckpointUnknownError,
    InvalidRequestError,
    StoreUnavailableError,
)
from blobstore.local.store import LocalStore
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import Meter, MeteredStore
from tests.unit.blobstore.scripted_store import LostAnswer, ScriptedStore


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "root")


@pytest.fixture(params=["", "job/checkpoint"])
def files(request: pytest.FixtureRequest, store: BlobStore) -> CheckpointFiles:
    return CheckpointFiles(store, request.param)


async def write(files: CheckpointFiles, path: str, content: bytes, *, overwrite: bool) -> None:
    async with files.create_atomic(path, overwrite=overwrite) as writer:
        await writer.write(content)


async def read(files: CheckpointFiles, path: str) -> bytes:
    sink = MemorySink()
    await files.read_into(path, sink)
    return sink.data


async def cancel(files: CheckpointFiles, path: str, *, overwrite: bool) -> None:
    async with files.create_atomic(path, overwrite=overwrite) as writer:
        await writer.write(b"cancelled")
        writer.cancel()
        assert writer.is_cancelled


# --- mkdirs, list, createAtomic, open, delete, exists, in Spark's order ---


async def test_sparks_sequence_of_all_operations(files: CheckpointFiles) -> None:
    directory = "dir/subdir/subsubdir"
    assert not await files.exists(directory)
    await files.mkdirs(directory)
    assert await files.exists(directory)
    await files.mkdirs(directory)  # again is fine

    assert [status.name for status in await files.list("")] == ["dir"]

    path = f"{directory}/file"
    assert not await files.exists(path)
    await cancel(files, path, overwrite=False)
    assert not await files.exists(path)
    await write(files, path, b"2", overwrite=False)
    assert await files.exists(path)
    assert await read(files, path) == b"2"
    with pytest.raises(CheckpointFileExistsError):
        await write(files, path, b"3", overwrite=False)
    assert await read(files, path) == b"2"

    path = f"{directory}/file2"
    assert not await files.exists(path)
    await cancel(files, path, overwrite=True)
    assert not await files.exists(path)
    await write(files, path, b"5", overwrite=True)
    assert await read(files, path) == b"5"
    await write(files, path, b"6", overwrite=True)
    assert await read(files, path) == b"6"
    sink = MemorySink()
    await files.read_into(path, sink)
    assert sink.data == b"6"
    await files.delete(path)
    assert not await files.exists(path)
    with pytest.raises(BlobNotFoundError):
        await read(files, path)
    await files.delete(path)  # no error
    await files.delete(directory)  # with a file in it
    assert not await files.exists(f"{directory}/file")
    assert not await files.exists(directory)


# --- which implementation it is, and its errors: here a store is chosen, and the errors are the same on each ---


async def test_every_error_is_of_the_same_class_on_every_store(files: CheckpointFiles) -> None:
    await write(files, "a/file", b"x", overwrite=False)
    for path in ("absent", "a/absent", "a"):
        with pytest.raises(BlobNotFoundError):
            await read(files, path)
    for path in ("absent", "a/file"):
        with pytest.raises(BlobNotFoundError):
            await files.list(path)
    for path in ("", "/a", "a/", "a//b", "../a", ".a.tmp", f"a/{DIRECTORY_MARKER}"):
        with pytest.raises(InvalidRequestError):
            await write(files, path, b"x", overwrite=True)
        with pytest.raises(InvalidRequestError):
            await files.delete(path)
    with pytest.raises(CheckpointFileExistsError) as caught:
        await files.mkdirs("a/file/below")
    assert caught.value.hint
    assert await read(files, "a/file") == b"x"


# --- publishing ---


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_file_is_published_by_one_request(overwrite: bool) -> None:
    meter = Meter()
    files = CheckpointFiles(MeteredStore(MemoryStore(), meter), "root")
    await write(files, "a/b/file", b"content", overwrite=overwrite)
    assert meter.requests == {"put" if overwrite else "put_if_absent": 1}


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_block_that_raises_publishes_nothing(files: CheckpointFiles, overwrite: bool) -> None:
    async def write_and_fail() -> None:
        async with files.create_atomic("file", overwrite=overwrite) as writer:
            await writer.write(b"half")
            raise ValueError("the other half is missing")

    with pytest.raises(ValueError, match="other half"):
        await write_and_fail()
    assert not await files.exists("file")


async def test_a_cancelled_block_publishes_nothing(files: CheckpointFiles) -> None:
    reached = asyncio.Event()

    async def write_and_wait() -> None:
        async with files.create_atomic("file", overwrite=False) as writer:
            await writer.write(b"half")
            reached.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(write_and_wait())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await files.exists("file")


async def test_of_many_writers_exactly_one_publishes_and_all_others_fail(files: CheckpointFiles) -> None:
    contents = [bytes([number]) * 100 for number in range(12)]
    results = await asyncio.gather(
        *(write(files, "commits/7", content, overwrite=False) for content in contents), return_exceptions=True
    )
    assert sum(isinstance(result, CheckpointFileExistsError) for result in results) == 11
    assert results.count(None) == 1
    assert await read(files, "commits/7") == contents[results.index(None)]


async def test_an_unknown_outcome_is_an_error_of_its_own() -> None:
    files = CheckpointFiles(ScriptedStore(LostAnswer(Unknown(reason="connection reset"))))
    with pytest.raises(CheckpointUnknownError, match="connection reset") as caught:
        await write(files, "file", b"content", overwrite=False)
    assert not isinstance(caught.value, StoreUnavailableError)  # nobody tries again without looking
    assert await read(files, "file") == b"content"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "error",
    [AccessDeniedError("no", operation="put"), StoreUnavailableError("down", operation="put")],
    ids=["denied", "unavailable"],
)
async def test_a_failed_upload_is_an_error(error: Exception, overwrite: bool) -> None:
    files = CheckpointFiles(ScriptedStore(error))
    with pytest.raises(type(error)):
        await write(files, "file", b"content", overwrite=overwrite)
    assert not await files.exists("file")


@pytest.mark.parametrize("size_bytes", [0, 99, 100, 101, 5000])
async def test_a_large_file_goes_through_a_scratch_file_that_is_gone_afterwards(
    store: BlobStore, size_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setattr("blobstore.checkpoint_files._MEMORY_BYTES_MAX", 100)
    files = CheckpointFiles(store)
    content = bytes(number % 251 for number in range(size_bytes))
    async with files.create_atomic("file", overwrite=False) as writer:
        for at in range(0, size_bytes, 40):
            await writer.write(content[at : at + 40])
    assert await read(files, "file") == content
    assert list(scratch.iterdir()) == []


# --- directories ---


@pytest.fixture
async def tree(files: CheckpointFiles) -> CheckpointFiles:
    for path in ("1.delta", "10.delta", "2.delta", "sub/x", "sub/y/z", "sub-x/w", "sub0", "zoo/~odd/f"):
        await write(files, path, path.encode(), overwrite=False)
    await files.mkdirs("empty/inner")
    return files


@pytest.mark.parametrize(
    "path,names",
    [
        ("", ["1.delta", "10.delta", "2.delta", "empty/", "sub/", "sub-x/", "sub0", "zoo/"]),
        ("sub", ["x", "y/"]),
        ("sub/y", ["z"]),
        ("empty", ["inner/"]),
        ("empty/inner", []),
        ("zoo", ["~odd/"]),
    ],
)
async def test_list_shows_what_is_directly_in_a_directory(tree: CheckpointFiles, path: str, names: list[str]) -> None:
    found = await tree.list(path)
    assert [f"{status.name}/" if status.is_directory else status.name for status in found] == names
    assert all(status.path == (f"{path}/{status.name}" if path else status.name) for status in found)
    assert all(status.size_bytes == (0 if status.is_directory else len(status.path)) for status in found)
    assert all(status.is_directory or status.modified_at_ms > 0 for status in found)


async def test_list_of_many_files_and_directories_goes_on_past_a_page(files: CheckpointFiles) -> None:
    files = CheckpointFiles(MemoryStore())
    for number in range(1100):
        await write(files, f"a/{number:04d}", b"", overwrite=False)
        await write(files, f"many/{number:04d}", b"", overwrite=False)
    await write(files, "z", b"", overwrite=False)
    assert [status.name for status in await files.list()] == ["a", "many", "z"]
    assert [status.name for status in await files.list("many")] == [f"{number:04d}" for number in range(1100)]
    await files.delete("many")
    assert [status.name for status in await files.list()] == ["a", "z"]


async def test_delete_removes_a_directory_with_all_in_it_and_nothing_beside(tree: CheckpointFiles) -> None:
    await tree.delete("sub")
    assert [status.name for status in await tree.list()] == [
        "1.delta",
        "10.delta",
        "2.delta",
        "empty",
        "sub-x",
        "sub0",
        "zoo",
    ]
    await tree.delete("empty")
    assert not await tree.exists("empty/inner")


@pytest.mark.parametrize(
    "path,exists",
    [("", True), ("sub", True), ("sub/y", True), ("su", False), ("sub/y/z/q", False), ("1.delta", True), ("1", False)],
)
async def test_files_and_directories_exist_and_parts_of_names_do_not(
    tree: CheckpointFiles, path: str, exists: bool
) -> None:
    assert await tree.exists(path) == exists


async def test_a_directory_that_was_made_stays_when_its_last_file_goes(files: CheckpointFiles) -> None:
    await files.mkdirs("made/by/hand")
    await write(files, "made/by/hand/file", b"x", overwrite=False)
    await files.delete("made/by/hand/file")
    assert await files.list("made/by/hand") == ()
    await files.delete("made/by/hand")
    assert await files.list("made/by") == ()
    assert not await files.exists("made/by/hand")
    await files.mkdirs("made/by/hand")
    assert await files.exists("made/by/hand")


async def test_the_root_exists_once_it_is_made(files: CheckpointFiles) -> None:
    assert not await files.exists("")
    with pytest.raises(BlobNotFoundError):
        await files.list()
    await files.mkdirs("")
    assert await files.exists("")
    assert await files.list() == ()


async def test_the_root_is_not_deleted_by_a_slip(tree: CheckpointFiles) -> None:
    with pytest.raises(InvalidRequestError):
        await tree.delete("")
    assert await tree.exists("1.delta")


async def test_what_is_beside_the_prefix_is_not_seen(store: BlobStore) -> None:
    for key in ("job-other/file", "jo", "job2"):
        await store.put(key, BytesBody(b"x"))
    files = CheckpointFiles(store, "job")
    await files.mkdirs("")
    assert await files.list() == ()


def test_who_opens_a_store_says_whether_it_is_local() -> None:
    assert not CheckpointFiles(MemoryStore()).is_local
    assert CheckpointFiles(MemoryStore(), is_local=True).is_local


# --- in one step, and many at once ---


async def test_a_body_is_published_in_one_step(files: CheckpointFiles) -> None:
    await files.publish("dir/file", BytesBody(b"first"), overwrite=False)
    with pytest.raises(CheckpointFileExistsError, match="publish"):
        await files.publish("dir/file", BytesBody(b"second"), overwrite=False)
    assert await read(files, "dir/file") == b"first"
    await files.publish("dir/file", BytesBody(b"third"), overwrite=True)
    assert await read(files, "dir/file") == b"third"
    with pytest.raises(InvalidRequestError):
        await files.publish("", BytesBody(b""), overwrite=True)


async def test_an_unknown_outcome_of_a_publication_is_reported() -> None:
    files = CheckpointFiles(ScriptedStore(LostAnswer(Unknown(reason="gone"))))
    with pytest.raises(CheckpointUnknownError, match="gone"):
        await files.publish("file", BytesBody(b""), overwrite=False)


async def test_files_are_deleted_many_at_once_and_directories_are_not(tree: CheckpointFiles) -> None:
    await tree.delete_files(["1.delta", "sub", "sub/x", "not-there"])
    await tree.delete_files([])
    assert [status.name for status in await tree.list("sub")] == ["y"]
    assert "1.delta" not in [status.name for status in await tree.list()]


async def test_a_thousand_files_are_one_request_to_delete() -> None:
    meter = Meter()
    await CheckpointFiles(MeteredStore(MemoryStore(), meter)).delete_files([f"f{number}" for number in range(1001)])
    assert meter.requests == {"delete": 2}

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from blobstore.base import Buffer, BytesBody, Created, Lost, MemorySink, Unknown, list_blobs, read_blob
from blobstore.errors import (
    AccessDeniedError,
    BlobCorruptError,
    BlobDeletedError,
    BlobNotFoundError,
    CapabilityMissingError,
    InvalidRequestError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from blobstore.local.dirs import TempFiles
from blobstore.local.store import LocalStore
from tests.contract.bodies import ChunkedBody, WaitingBody

HOUR_MS = 3_600_000


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def names_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


def fail(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, code: int, *, after: bool = False) -> None:
    """Let a function of the file system fail, before or after it has done its work."""
    real = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> None:
        if after:
            real(*args, **kwargs)
        raise OSError(code, os.strerror(code), "some/path")

    monkeypatch.setattr(owner, name, failing)


# --- what is on the disk ---


async def test_a_blob_is_a_file_of_its_name_and_bytes_and_the_ttl_is_a_link(store: LocalStore, tmp_path: Path) -> None:
    data = bytes(range(256)) * 10
    await store.put_if_absent("blobs/0f/a", ChunkedBody(data[:100], data[100:]), ttl_ms=HOUR_MS)
    await store.put_if_absent("log/1.commit", BytesBody(b"record"))
    assert names_in(tmp_path) == [".ttl/blobs/0f/a", "blobs/0f/a", "log/1.commit"]
    assert (tmp_path / "blobs/0f/a").read_bytes() == data
    assert str((tmp_path / ".ttl/blobs/0f/a").readlink()) == "ttl:3600000ms"
    await store.remove_ttl("blobs/0f/a")
    assert str((tmp_path / ".ttl/blobs/0f/a").readlink()) == "ttl:removed"
    await store.delete(["blobs/0f/a", "log/1.commit"])
    assert names_in(tmp_path) == []


async def test_a_link_without_a_blob_means_nothing(store: LocalStore, tmp_path: Path) -> None:
    await store.put_if_absent("a/k", BytesBody(b"x"), ttl_ms=HOUR_MS)
    (tmp_path / "a/k").unlink()
    assert await store.stat("a/k") is None
    assert (await store.list_page("")).blobs == ()
    assert await store.delete(["a/k"]) == ()
    assert names_in(tmp_path) == []


async def test_a_ttl_link_that_somebody_else_wrote_is_not_taken_for_no_ttl(store: LocalStore, tmp_path: Path) -> None:
    await store.put_if_absent("k", BytesBody(b"x"), ttl_ms=HOUR_MS)
    (tmp_path / ".ttl/k").unlink()
    (tmp_path / ".ttl/k").symlink_to("1700000000000")
    with pytest.raises(BlobCorruptError) as caught:
        await store.stat("k")
    assert str(tmp_path / ".ttl/k") in caught.value.hint
    with pytest.raises(BlobCorruptError):
        await store.list_page("")


async def test_what_is_no_blob_is_not_listed_and_not_served(store: LocalStore, tmp_path: Path) -> None:
    await store.put("a/k", BytesBody(b"x"))
    (tmp_path / "a/link").symlink_to(tmp_path / "a/k")
    (tmp_path / "a/.nfs0001").write_text("deleted while open")
    (tmp_path / "a/what a name").write_text("")
    (tmp_path / "a/dir").mkdir()
    os.mkfifo(tmp_path / "a/pipe")
    assert [blob.key async for blob in list_blobs(store, "")] == ["a/k"]
    for key in ("a/link", "a/pipe", "a/dir"):
        assert await store.stat(key) is None
    for key in ("a/link", "a/pipe"):
        with pytest.raises(BlobCorruptError):
            await read_blob(store, key, size_bytes_max=10)


async def test_reading_makes_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "absent")
    assert await store.stat("k") is None
    assert (await store.list_page("")).blobs == ()
    assert await store.delete(["k"]) == ()
    with pytest.raises(BlobNotFoundError):
        await read_blob(store, "k", size_bytes_max=1)
    with pytest.raises(BlobNotFoundError):
        await store.remove_ttl("k")
    assert not (tmp_path / "absent").exists()


def test_a_root_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="not a directory"):
        LocalStore(tmp_path / "file")


async def test_a_store_that_was_wiped_while_open_can_be_written_again(store: LocalStore, tmp_path: Path) -> None:
    await store.put_if_absent("a/b/k", BytesBody(b"x"), ttl_ms=HOUR_MS)
    shutil.rmtree(tmp_path)
    assert isinstance(await store.put_if_absent("a/b/k", BytesBody(b"y"), ttl_ms=HOUR_MS), Created)
    assert await read_blob(store, "a/b/k", size_bytes_max=1) == b"y"


async def test_a_list_reads_only_the_directories_that_it_needs(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        await store.put(f"blobs/{number}/scope/k", BytesBody(b"x"))
        await store.put(f"other/{number}/k", BytesBody(b"x"))
    read: list[str] = []
    real = os.scandir

    def scandir(directory: int) -> Any:
        read.append(os.path.relpath(Path(f"/proc/self/fd/{directory}").readlink(), tmp_path))
        return real(directory)

    monkeypatch.setattr(os, "scandir", scandir)
    assert len((await store.list_page("blobs/3/")).blobs) == 1
    assert read == ["blobs/3", "blobs/3/scope"]
    read.clear()
    assert len((await store.list_page("blobs/", start_after="blobs/7/scope/k")).blobs) == 2
    assert read == ["blobs", "blobs/7", "blobs/7/scope", "blobs/8", "blobs/8/scope", "blobs/9", "blobs/9/scope"]
    read.clear()
    assert (await store.list_page("", limit=1)).truncated
    assert read == [".", "blobs", "blobs/0", "blobs/0/scope", "blobs/1", "blobs/1/scope"]


# --- times ---


async def test_a_blob_is_created_when_it_gets_its_name_and_not_when_its_first_byte_came(store: LocalStore) -> None:
    body = WaitingBody(b"first", b"second")
    task = asyncio.ensure_future(store.put_if_absent("k", body, ttl_ms=HOUR_MS))
    await body.is_waiting.wait()
    await asyncio.sleep(0.03)
    late_ms = await store.now_ms()
    body.go_on.set()
    await task
    info = await store.stat("k")
    assert info is not None
    assert info.created_at_ms >= late_ms


async def test_a_writer_that_is_stopped_before_the_link_fails_and_readers_see_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.05)
        real(*args, **kwargs)

    monkeypatch.setattr(os, "link", slow)
    before_ms = await store.now_ms()
    outcome = await store.put_if_absent("k", BytesBody(b"x"))
    info = await store.stat("k")
    assert isinstance(outcome, Created)
    assert info is not None
    assert outcome.created_at_ms >= info.created_at_ms >= before_ms + 30


class KilledError(BaseException):
    """The process is gone."""


@pytest.fixture
async def killed_after_link(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A process was stopped before it linked `k`, and killed right after; when it linked."""
    with monkeypatch.context() as patched:
        real_link, real_utime = os.link, os.utime
        linked_at_ms: list[int] = []

        def link(*args: Any, **kwargs: Any) -> None:
            time.sleep(0.2)
            real_link(*args, **kwargs)
            linked_at_ms.append((tmp_path / "k").lstat().st_ctime_ns // 1_000_000)

        def utime(*args: Any, **kwargs: Any) -> None:
            if linked_at_ms:
                raise KilledError
            real_utime(*args, **kwargs)

        patched.setattr(os, "link", link)
        patched.setattr(os, "utime", utime)
        patched.setattr(TempFiles, "unlink", lambda _, temp: None)
        with pytest.raises(KilledError):
            await store.put_if_absent("k", BytesBody(b"x"))
    assert (tmp_path / "k").lstat().st_mtime_ns // 1_000_000 < linked_at_ms[0] - 100
    return linked_at_ms[0]


async def give_up_all(store: LocalStore) -> int:
    puts = await store.list_unfinished("")
    assert await store.abort_unfinished(puts) == ()
    return len(puts)


async def birth_ms(store: LocalStore) -> int:
    info = await store.stat("k")
    assert info is not None
    (listed,) = [blob async for blob in list_blobs(store, "k")]
    assert info == listed
    return info.created_at_ms


async def test_a_blob_whose_writer_died_after_the_link_is_as_old_as_its_name(
    store: LocalStore, tmp_path: Path, killed_after_link: int
) -> None:
    assert await birth_ms(store) == killed_after_link
    await asyncio.sleep(0.05)
    assert await give_up_all(store) == 1
    assert names_in(tmp_path) == ["k"]
    assert await birth_ms(store) == killed_after_link


@pytest.mark.parametrize("step", ["utime", "unlink"])
async def test_a_cleaner_that_dies_leaves_the_birth_as_it_was(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after_link: int, step: str
) -> None:
    def die(*args: Any, **kwargs: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(os, step, die)
        with pytest.raises(KilledError):
            await give_up_all(store)
    assert await birth_ms(store) == killed_after_link
    await asyncio.sleep(0.05)
    os.utime(tmp_path / "k", ns=(0, (tmp_path / "k").lstat().st_mtime_ns))  # moves the change time
    assert await birth_ms(store) == killed_after_link
    assert await give_up_all(store) == 1
    assert names_in(tmp_path) == ["k"]
    assert await birth_ms(store) == killed_after_link


async def test_a_copy_of_the_store_made_of_links_changes_no_time(store: LocalStore, tmp_path: Path) -> None:
    await store.put_if_absent("k", BytesBody(b"x"))
    created_ms = await birth_ms(store)
    await asyncio.sleep(0.05)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "k").hardlink_to(tmp_path / "k")
    assert (tmp_path / "k").lstat().st_ctime_ns // 1_000_000 > created_ms
    assert await birth_ms(store) == created_ms


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
async def test_a_time_that_cannot_be_set_after_the_link_is_reported_all_the_same(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with monkeypatch.context() as patched:
        real = os.link

        def link(*args: Any, **kwargs: Any) -> None:
            time.sleep(0.1)
            real(*args, **kwargs)
            fail(patched, os, "utime", code)

        patched.setattr(os, "link", link)
        # No refusal: it is there.
        assert isinstance(await store.put_if_absent("k", BytesBody(b"x")), Unknown)
    found = (tmp_path / "k").lstat()
    assert found.st_mtime_ns < found.st_ctime_ns - 50_000_000
    assert await birth_ms(store) >= found.st_mtime_ns // 1_000_000 + 50


@pytest.mark.parametrize("put", [LocalStore.put, LocalStore.put_if_absent])
async def test_an_error_of_closing_what_was_synced_changes_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[..., Awaitable[object]]
) -> None:
    def close_and_say(descriptor: int) -> Created:
        os.close(descriptor)  # so that closing fails
        return Created(created_at_ms=1)

    monkeypatch.setattr("blobstore.local.store._created", close_and_say)
    assert await put(store, "k", BytesBody(b"x")) == Created(created_at_ms=1)
    assert names_in(tmp_path) == ["k"]


# --- temporary files ---


# --- deleted blobs ---


async def test_a_deleted_blob_is_kept_for_its_retention_and_then_removed_by_a_later_delete(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, deleted_retention_ms=60)
    for key in ("a/first", "second"):
        await store.put(key, BytesBody(b"content"))
    await store.delete(["a/first"])
    assert names_in(tmp_path) == [".deleted/a/first", "second"]
    assert await read_blob(store, "a/first", size_bytes_max=10, deleted=True) == b"content"
    await asyncio.sleep(0.1)
    await store.delete(["second"])
    assert names_in(tmp_path) == [".deleted/second"]
    with pytest.raises(BlobNotFoundError) as caught:
        await read_blob(store, "a/first", size_bytes_max=10, deleted=True)
    assert not isinstance(caught.value, BlobDeletedError)


async def test_a_deleted_blob_in_the_way_of_another_is_not_kept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, deleted_retention_ms=HOUR_MS)
    await store.put("a", BytesBody(b"x"))
    await store.delete(["a"])
    await store.put("a/b", BytesBody(b"y"))
    assert await store.delete(["a/b"]) == ()
    assert await store.stat("a/b") is None


# --- errors ---

KINDS = [
    (errno.EACCES, AccessDeniedError),
    (errno.EPERM, AccessDeniedError),
    (errno.EROFS, AccessDeniedError),
    (errno.ENOSPC, StoreFullError),
    (errno.EDQUOT, StoreFullError),
    (errno.EFBIG, StoreFullError),
    (errno.EIO, StoreUnavailableError),
    (errno.ESTALE, StoreUnavailableError),
    (errno.EMFILE, StoreUnavailableError),
    (errno.ENFILE, StoreUnavailableError),
    (errno.ENOENT, StoreUnavailableError),
    (errno.ENAMETOOLONG, InvalidRequestError),
    (errno.EOPNOTSUPP, CapabilityMissingError),
]


@pytest.mark.parametrize("meaning", KINDS, ids=lambda meaning: errno.errorcode[meaning[0]])
@pytest.mark.parametrize("method", ["put", "put_if_absent"])
@pytest.mark.parametrize("function", ["pwrite", "fsync", "utime"])
async def test_an_error_of_the_file_system_has_its_kind_and_leaves_nothing(
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    meaning: tuple[int, type[StoreError]],
    method: str,
    function: str,
) -> None:
    code, kind = meaning
    await store.put("warm", BytesBody(b"x"))  # directories are made and synced
    with monkeypatch.context() as patched:
        fail(patched, os, function, code)
        with pytest.raises(kind) as caught:
            await getattr(store, method)("k", BytesBody(b"x"), ttl_ms=HOUR_MS)
    assert type(caught.value) is kind
    assert (caught.value.operation, caught.value.key) == (method, "k")
    assert caught.value.hint
    assert ("ulimit -n" in caught.value.hint) == (code in {errno.EMFILE, errno.ENFILE})
    assert isinstance(caught.value.__cause__, OSError)
    # A link without its blob may stay; it means nothing.
    assert [name for name in names_in(store._root) if not name.startswith(".ttl/")] == ["warm"]


@pytest.mark.parametrize("code,kind", [(errno.EIO, StoreUnavailableError), (errno.EACCES, AccessDeniedError)])
async def test_an_error_while_reading_has_its_kind(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StoreError]
) -> None:
    await store.put("k", BytesBody(b"x"))
    fail(monkeypatch, os, "preadv", code)
    with pytest.raises(kind):
        await read_blob(store, "k", size_bytes_max=1)


async def test_a_file_that_becomes_shorter_while_it_is_read_is_damage(store: LocalStore, tmp_path: Path) -> None:
    await store.put("k", BytesBody(bytes(3 << 20)))

    class Truncating(MemorySink):
        @override
        def write(self, data: Buffer) -> None:
            super().write(data)
            os.truncate(tmp_path / "k", 100)

    with pytest.raises(BlobCorruptError):
        await store.read_into("k", Truncating())


async def test_a_key_that_cannot_be_deleted_is_reported_with_its_reason_and_the_others_go(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("a", "b", "c"):
        await store.put_if_absent(key, BytesBody(b"x"), ttl_ms=HOUR_MS)
    real = os.unlink

    def unlink(name: str, *, dir_fd: int) -> None:
        if name == "b":
            raise PermissionError(errno.EACCES, "Permission denied", name)
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    (failure,) = await store.delete(["a", "b", "c"])
    assert failure.key == "b"
    assert "Permission denied" in failure.reason
    assert [blob.key for blob in (await store.list_page("")).blobs] == ["b"]
    info = await store.stat("b")
    assert info is not None
    assert info.expires_at_ms is not None


async def test_a_deletion_that_may_not_be_durable_counts_as_failed(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("x/a", "x/b"):
        await store.put(key, BytesBody(b"x"))
    fail(monkeypatch, os, "fsync", errno.EIO)
    for _ in range(2):  # also the second time, when they are gone already
        assert {failure.key for failure in await store.delete(["x/a", "x/b", "y/absent"])} == {"x/a", "x/b"}
    monkeypatch.undo()
    assert await store.delete(["x/a", "x/b"]) == ()


# --- the link that publishes (design 0002, S1) ---


@pytest.mark.parametrize(
    "code,after,expected",
    [
        pytest.param(errno.EEXIST, True, Created, id="the link was made, and its repetition refused"),
        pytest.param(errno.EIO, True, Created, id="made, and the answer was lost"),
        pytest.param(errno.EIO, False, Unknown, id="no answer, and it is not there yet"),
        pytest.param(errno.ESTALE, False, Unknown, id="no answer either"),
        pytest.param(errno.EPERM, False, CapabilityMissingError, id="a file system without hard links"),
        pytest.param(errno.ENOSPC, False, StoreFullError, id="no space for the name"),
        pytest.param(errno.ENOENT, False, StoreUnavailableError, id="the temporary file is gone"),
    ],
)
async def test_an_error_of_the_link_is_reported_for_what_it_means(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, after: bool, expected: type
) -> None:
    fail(monkeypatch, os, "link", code, after=after)
    outcome: object
    try:
        outcome = await store.put_if_absent("k", BytesBody(b"x"), ttl_ms=HOUR_MS)
    except StoreError as error:
        outcome = error
    assert isinstance(outcome, expected)
    assert (await store.stat("k") is not None) == (expected is Created)


async def test_a_name_that_may_not_be_durable_is_unknown_and_lost_the_next_time(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("a/warm", BytesBody(b"x"))
    real = os.fsync
    directory = (tmp_path / "a").stat().st_ino

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == directory:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        assert isinstance(await store.put_if_absent("a/k", BytesBody(b"x")), Unknown)
        # Nor is it said to be there before it is sure to stay.
        with pytest.raises(StoreUnavailableError):
            await store.put_if_absent("a/k", BytesBody(b"x"))
    assert await store.put_if_absent("a/k", BytesBody(b"x")) == Lost()

"""Files of a checkpoint's directory: on this machine as Spark has them, and on any store."""

import errno
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from blobstore.base import BlobStore, BytesBody, Sink
from blobstore.errors import (
    AccessDeniedError,
    BlobNotFoundError,
    CheckpointFileExistsError,
    InvalidRequestError,
    StoreError,
    StoreUnavailableError,
)
from blobstore.local.store import LocalStore
from blobstore.memory import MemoryStore
from engine.errors import DamagedError, TargetError
from engine.state.checkpoint_dir import CheckpointDir
from tests.doubles import InterposedStore


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(params=["path", "url", "store"])
async def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CheckpointDir]:
    root = tmp_path / "a checkpoint"
    url = "file://" + str(root).replace(" ", "%20")
    locations: dict[str, str | Path | BlobStore] = {"path": root, "url": url, "store": MemoryStore()}
    opened = await CheckpointDir.open(locations[request.param])
    yield opened
    await opened.close()


async def test_what_is_published_is_listed_read_and_fetched(checkpoint: CheckpointDir, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"from a file")
    store_dir = checkpoint.child("state/0/0")
    assert await store_dir.list() == ()
    await store_dir.publish("1.changelog", b"bytes", overwrite=False)
    assert await store_dir.publish("SSTs/000001-x.sst", source, overwrite=False) == 11
    listed = await store_dir.list()
    assert [(status.path, status.is_directory, status.size_bytes) for status in listed] == [
        ("1.changelog", False, 5),
        ("SSTs", True, 0),
    ]
    assert [status.path for status in await store_dir.list("SSTs")] == ["SSTs/000001-x.sst"]
    assert await store_dir.read("1.changelog") == b"bytes"
    assert await checkpoint.read("state/0/0/1.changelog") == b"bytes"
    assert await store_dir.list("logs") == ()
    target = tmp_path / "target"
    target.write_bytes(b"replaced")
    assert await store_dir.fetch("SSTs/000001-x.sst", target, size_bytes=11) == 11
    assert target.read_bytes() == b"from a file"
    await store_dir.delete(["1.changelog", "SSTs/000001-x.sst", "never-there"])
    assert await checkpoint.list("state/0/0/SSTs") == ()


async def test_a_file_is_overwritten_only_where_that_is_allowed(checkpoint: CheckpointDir) -> None:
    await checkpoint.publish("1.zip", b"first", overwrite=False)
    with pytest.raises(CheckpointFileExistsError):
        await checkpoint.publish("1.zip", b"second", overwrite=False)
    assert await checkpoint.read("1.zip") == b"first"
    await checkpoint.publish("1.zip", b"third", overwrite=True)
    assert await checkpoint.read("1.zip") == b"third"


@pytest.mark.parametrize("wanted", [{"size_bytes": 4}, {"size_bytes": 6}, {"size_bytes_max": 4}])
async def test_a_file_of_another_size_is_not_fetched(
    checkpoint: CheckpointDir, tmp_path: Path, wanted: dict[str, int]
) -> None:
    await checkpoint.publish("file", b"12345", overwrite=False)
    target = tmp_path / "targets" / "file"
    target.parent.mkdir()
    with pytest.raises(DamagedError, match="bytes"):
        await checkpoint.fetch("file", target, **wanted)
    assert names_in(target.parent) == []


async def test_what_cannot_be_fetched_leaves_nothing(checkpoint: CheckpointDir, tmp_path: Path) -> None:
    targets = tmp_path / "targets"
    targets.mkdir()
    with pytest.raises(BlobNotFoundError):
        await checkpoint.fetch("not-there", targets / "file")
    assert names_in(targets) == []
    await checkpoint.publish("file", b"12345", overwrite=False)
    with pytest.raises(TargetError):
        await checkpoint.fetch("file", targets / "no such directory" / "file")


async def test_a_fetch_that_breaks_off_leaves_the_older_file(tmp_path: Path) -> None:
    store = InterposedStore(MemoryStore())
    checkpoint = await CheckpointDir.open(store)
    await checkpoint.publish("file", b"new", overwrite=False)
    store.fail("get", "file")
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with pytest.raises(StoreError):
        await checkpoint.fetch("file", target)
    assert target.read_bytes() == b"old"
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("path", ["../file", "/etc/passwd", ".hidden", "a//b", ""])
async def test_a_path_that_leads_elsewhere_is_refused(checkpoint: CheckpointDir, tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_bytes(b"outside")
    with pytest.raises(InvalidRequestError):
        await checkpoint.fetch(path, tmp_path / "target")
    with pytest.raises(InvalidRequestError):
        await checkpoint.publish(path, b"", overwrite=True)
    with pytest.raises(InvalidRequestError):
        await checkpoint.delete([path])
    with pytest.raises(InvalidRequestError):
        checkpoint.child(path)
    assert (tmp_path / "file").read_bytes() == b"outside"


# --- on this machine ---


async def test_a_fetched_file_shares_no_inode_with_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = await CheckpointDir.open(tmp_path / "checkpoint")
    await checkpoint.publish("file", bytes(range(256)) * 20_000, overwrite=False)
    await checkpoint.fetch("file", tmp_path / "fetched")
    fetched, stored = tmp_path / "fetched", tmp_path / "checkpoint" / "file"
    assert fetched.read_bytes() == stored.read_bytes()
    assert fetched.stat().st_ino != stored.stat().st_ino
    assert stored.stat().st_nlink == 1
    fetched.write_bytes(b"changed")
    assert stored.stat().st_size == 256 * 20_000


async def test_a_symbolic_link_in_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    checkpoint = await CheckpointDir.open(tmp_path / "checkpoint")
    await checkpoint.publish("file", b"", overwrite=False)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "checkpoint" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError):
        await checkpoint.fetch("link", tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", ["5.zip", "5.zip.crc", "5.changelog"])
async def test_hadoops_hidden_checksum_goes_with_the_file_that_it_is_of(tmp_path: Path, name: str) -> None:
    checkpoint = await CheckpointDir.open(tmp_path)
    store_dir = checkpoint.child("state/0/0")
    directory = tmp_path / "state" / "0" / "0"
    hidden, other = directory / f".{name}.crc", directory / ".6.zip.crc"

    async def written_by_spark() -> None:
        await store_dir.publish(name, b"spark's", overwrite=True)
        hidden.write_bytes(b"crc")

    await written_by_spark()
    other.write_bytes(b"crc")
    with pytest.raises(CheckpointFileExistsError):
        await store_dir.publish(name, b"ours", overwrite=False)
    assert hidden.exists()
    await store_dir.publish(name, b"ours", overwrite=True)
    assert not hidden.exists()
    await written_by_spark()
    await store_dir.delete([name])
    assert not hidden.exists()
    # One that was left behind when its file was deleted by somebody else.
    hidden.write_bytes(b"crc")
    await store_dir.publish(name, b"ours", overwrite=False)
    assert not hidden.exists()
    assert other.exists()


async def test_a_hidden_checksum_is_gone_before_its_file_is_replaced(tmp_path: Path) -> None:
    store = InterposedStore(LocalStore(tmp_path))
    checkpoint = CheckpointDir(store, local_root=tmp_path)
    await checkpoint.publish("5.zip", b"old", overwrite=True)
    seen: list[bool] = []

    async def look() -> None:
        seen.append((tmp_path / ".5.zip.crc").exists())

    for operation in ("put", "delete"):
        (tmp_path / ".5.zip.crc").write_bytes(b"crc")
        store.before(operation, "5.zip", look)
        await (
            checkpoint.publish("5.zip", b"new", overwrite=True) if operation == "put" else checkpoint.delete(["5.zip"])
        )
    assert seen == [False, False]


async def test_what_is_not_spark_s_is_hidden_in_the_root(tmp_path: Path) -> None:
    checkpoint = await CheckpointDir.open(tmp_path)
    await checkpoint.child("state/0/0").publish("1.zip", b"", overwrite=False)
    assert names_in(tmp_path / "state" / "0" / "0") == ["1.zip"]
    assert [name for name in names_in(tmp_path) if not name.startswith(".")] == ["state"]


async def test_closing_a_child_leaves_the_store_open() -> None:
    closed: list[bool] = []

    class Noticing(MemoryStore):
        async def close(self) -> None:  # type: ignore[explicit-override]
            closed.append(True)

    checkpoint = await CheckpointDir.open(Noticing(), "below")
    await checkpoint.child("state").close()
    await checkpoint.close()
    assert closed == []  # its opener closes it


async def test_a_walk_names_every_file_below_with_its_size(checkpoint: CheckpointDir) -> None:
    assert await checkpoint.walk() == ()
    for name in ("state/0/0/1.zip", "state/0/0/SSTs/1.sst", "state/0/1/1.zip", "state/00", "metadata"):
        await checkpoint.publish(name, name.encode(), overwrite=False)
    everything = await checkpoint.walk()
    assert {status.path: status.size_bytes for status in everything} == {
        name: len(name)
        for name in ("metadata", "state/0/0/1.zip", "state/0/0/SSTs/1.sst", "state/0/1/1.zip", "state/00")
    }
    below = [status.path for status in await checkpoint.child("state").walk("0/0")]
    assert below == ["0/0/1.zip", "0/0/SSTs/1.sst"]
    assert all(status.modified_at_ms > 0 and not status.is_directory for status in everything)


async def test_what_writers_that_died_left_goes_after_a_day_and_nothing_else_does(tmp_path: Path) -> None:
    checkpoint = await CheckpointDir.open(tmp_path)
    await checkpoint.publish("state/0/0/1.delta", b"x", overwrite=False)
    for name, age_h in (("0" * 32, 25), ("1" * 32, 23), ("theirs", 25)):
        path = tmp_path / ".tmp" / name
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_h * 3600,) * 2)
    await checkpoint.child("state/0/0").give_up_unfinished()
    left = sorted(os.listdir(tmp_path / ".tmp"))  # noqa: PTH208
    assert left == ["1" * 32, "theirs"]
    assert await checkpoint.read("state/0/0/1.delta") == b"x"
    await checkpoint.close()


class Untrusted(MemoryStore):
    """A store whose server cannot be spoken to, which is found out at the first request."""

    @override
    async def read_into(self, key: str, sink: Sink, **how: Any) -> None:
        raise InvalidRequestError("the server's certificate is not trusted", operation="connect", hint="set ca_bundle")


async def test_a_wrong_setting_is_no_damage_of_what_was_to_be_read() -> None:
    directory = await CheckpointDir.open(Untrusted())
    with pytest.raises(InvalidRequestError, match="certificate"):
        await directory.read("metadata")


async def test_a_look_refuses_a_file_that_is_too_large_also_when_it_has_read_it() -> None:
    store = MemoryStore()
    await store.put("metadata", BytesBody(b"content"))
    look = (await CheckpointDir.open(store)).look()
    assert await look.read("metadata") == b"content"
    with pytest.raises(DamagedError, match="larger than the 6 bytes"):
        await look.read("metadata", size_bytes_max=6)
    assert await look.read("metadata", size_bytes_max=7) == b"content"


@pytest.mark.parametrize("code, kind", [(errno.EROFS, AccessDeniedError), (errno.EIO, StoreUnavailableError)])
async def test_a_hidden_checksum_that_cannot_be_removed_is_an_error_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[StoreError]
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(code, os.strerror(code), str(self))

    directory = await CheckpointDir.open(tmp_path / "query")
    await directory.publish("offsets/0", b"v1", overwrite=False)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(kind, match=f"delete offsets/1: {os.strerror(code)}"):
        await directory.publish("offsets/1", b"v1", overwrite=False)
    with pytest.raises(kind, match="delete offsets/0"):
        await directory.delete(["offsets/0"])
    monkeypatch.undo()
    await directory.close()
    assert names_in(tmp_path / "query/offsets") == ["0"]

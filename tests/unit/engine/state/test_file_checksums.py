"""Files with a checksum beside them, with Spark's outcomes of its own suite of them."""

from pathlib import Path

import pytest

from blobstore.errors import BlobNotFoundError, CheckpointFileExistsError
from blobstore.memory import MemoryStore
from engine.errors import DamagedError
from engine.local.checksums import crc32c
from engine.runtime import Runtime
from engine.state.changelogs import fetch_checked, publish_checked, read_checked
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import StateFileManager
from index.errors import FileChecksumError
from index.spark.checksums import CREATOR, FILE_CHECKSUM_BYTES_MAX, decode_file_checksum
from index.spark.names import StateVersion
from tests.doubles import InterposedStore
from tests.unit.engine.state.state_bench import tree

RUNTIME = Runtime()


@pytest.fixture
def store() -> InterposedStore:
    return InterposedStore(MemoryStore())


@pytest.fixture
async def directory(store: InterposedStore) -> CheckpointDir:
    return await CheckpointDir.open(store)


async def publish(directory: CheckpointDir, data: bytes | Path) -> None:
    await publish_checked(directory, "file", data, runtime=RUNTIME)


@pytest.mark.parametrize("source", ["bytes", "file"])
async def test_a_checksum_says_what_the_file_is(directory: CheckpointDir, tmp_path: Path, source: str) -> None:
    (tmp_path / "source").write_bytes(b"content")
    await publish(directory, b"content" if source == "bytes" else tmp_path / "source")
    checksum = decode_file_checksum(await directory.read("file.crc"), subject="file.crc")
    assert (checksum.crc32c, checksum.main_file_size_bytes) == (crc32c(b"content"), 7)
    assert checksum.creator.executor_id == CREATOR
    assert await directory.read("file") == b"content"


@pytest.mark.spark_case(51)
@pytest.mark.parametrize("corrupt", [b"Content", b"content and more", b""])
async def test_a_corrupt_file_is_detected(directory: CheckpointDir, tmp_path: Path, corrupt: bytes) -> None:
    await publish(directory, b"content")
    assert await read_checked(directory, "file") == b"content"
    await directory.publish("file", corrupt, overwrite=True)
    with pytest.raises(FileChecksumError, match="file"):
        await read_checked(directory, "file")
    with pytest.raises(FileChecksumError, match="file"):
        await fetch_checked(directory, "file", tmp_path / "target")
    assert tree(tmp_path) == {}


@pytest.mark.spark_case(53)
async def test_a_file_without_a_checksum_is_read_unverified(directory: CheckpointDir, tmp_path: Path) -> None:
    await directory.publish("file", b"content", overwrite=False)
    assert await read_checked(directory, "file") == b"content"
    assert await fetch_checked(directory, "file", tmp_path / "target") == 7
    assert (tmp_path / "target").read_bytes() == b"content"
    with pytest.raises(BlobNotFoundError):
        await read_checked(directory, "not-there")


@pytest.mark.spark_case(54)
async def test_a_file_without_an_id_is_overwritten_without_a_checksum(directory: CheckpointDir, tmp_path: Path) -> None:
    manager = StateFileManager(directory)
    for content in (b"0", b"1"):
        (tmp_path / "changelog").write_bytes(content)
        await manager.publish_changelog(StateVersion(1), tmp_path / "changelog")
        assert await directory.read("1.changelog") == content
        assert "1.changelog.crc" not in await directory.names()


async def test_a_file_that_is_there_keeps_its_bytes_and_its_checksum(directory: CheckpointDir) -> None:
    await publish(directory, b"first")
    with pytest.raises(CheckpointFileExistsError, match="file"):
        await publish(directory, b"second")
    assert await read_checked(directory, "file") == b"first"


async def test_a_crash_while_a_file_is_replaced_leaves_no_checksum_of_another_file(
    directory: CheckpointDir, store: InterposedStore, tmp_path: Path
) -> None:
    await publish_checked(directory, "1.changelog", b"old", runtime=RUNTIME)

    class CrashError(Exception):
        pass

    async def crash() -> None:
        raise CrashError

    store.before("put", "1.changelog", crash)
    (tmp_path / "changelog").write_bytes(b"new")
    with pytest.raises(CrashError):
        await StateFileManager(directory).publish_changelog(StateVersion(1), tmp_path / "changelog")
    assert await read_checked(directory, "1.changelog") == b"old"


async def test_a_name_that_is_taken_by_a_file_without_a_checksum_gets_none(directory: CheckpointDir) -> None:
    await directory.publish("file", b"first", overwrite=False)
    with pytest.raises(CheckpointFileExistsError, match="file"):
        await publish(directory, b"second")
    assert "file.crc" not in await directory.names()
    assert await read_checked(directory, "file") == b"first"


async def test_a_name_as_long_as_a_file_system_takes_is_fetched(directory: CheckpointDir, tmp_path: Path) -> None:
    await publish(directory, b"content")
    # 255 bytes, in 128 characters.
    target = tmp_path / ("\u00e9" * 127 + "x")
    assert await fetch_checked(directory, "file", target) == 7
    assert target.read_bytes() == b"content"


async def test_a_checksum_that_is_too_large_is_damage(directory: CheckpointDir, tmp_path: Path) -> None:
    await publish(directory, b"content")
    await directory.publish("file.crc", b" " * (FILE_CHECKSUM_BYTES_MAX + 1), overwrite=True)
    with pytest.raises(DamagedError, match=r"file\.crc"):
        await read_checked(directory, "file")
    with pytest.raises(DamagedError, match=r"file\.crc"):
        await fetch_checked(directory, "file", tmp_path / "target")
    with pytest.raises(DamagedError, match="is larger than the 3 bytes"):
        await read_checked(directory, "file", size_bytes_max=3)

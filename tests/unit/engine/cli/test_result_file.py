"""A result file comes from outside: nothing in it is believed that the store can show."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from blobstore.base import BytesBody
from blobstore.memory import MemoryStore
from engine.backup.backup import BackupResult
from engine.cli.cmd.commit import ResultFile, check_uploaded, read_result, write_result
from engine.cli.run import ExitCode, choose_exit_code
from engine.errors import DamagedError, LeaseExpiredError, StaleResultError, UsageError
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.model import Scope
from tests.doubles import SteppedClock

SCOPE = Scope("flights")


async def _backed_up(tmp_path: Path) -> tuple[Repository, BackupResult]:
    repository = await Repository.init(MemoryStore())
    return repository, await repository.backup(SCOPE, _source(tmp_path))


def _source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"a" * 5000)
    (source / "b").write_bytes(b"b" * 5000)
    return source


def _listed(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def _changed(path: Path, place: str, value: object) -> None:
    """Set one value deep inside the file."""
    document: Any = msgspec.json.decode(path.read_bytes())
    inner = document
    *parents, last = place.split(".")
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    path.write_bytes(msgspec.json.encode(document))


async def test_a_result_survives_the_way_through_a_file(tmp_path: Path) -> None:
    repository, result = await _backed_up(tmp_path)
    path = tmp_path / "result.json"
    write_result(path, ResultFile(repository_id=repository.record.id, result=result))
    read = read_result(path, repository_id=repository.record.id)
    assert read == result
    checked = await check_uploaded(repository, path, read)
    assert checked.oldest_birth_ms <= result.oldest_birth_ms
    assert msgspec.structs.replace(checked, oldest_birth_ms=result.oldest_birth_ms) == result
    assert _listed(tmp_path) == ["result.json", "source"]


async def test_a_result_of_another_repository_is_refused(tmp_path: Path) -> None:
    repository, result = await _backed_up(tmp_path)
    path = tmp_path / "result.json"
    write_result(path, ResultFile(repository_id=repository.record.id, result=result))
    with pytest.raises(UsageError, match="another repository"):
        read_result(path, repository_id="another")


@pytest.mark.parametrize(
    "place, value",
    [
        ("schema", 1),
        ("schema", 3),
        ("tidemark", "something else"),
        ("surprise", 1),
        ("result.scope.job", ""),
        ("result.scope.job", "x" * 300),
        ("result.scope.task", "another task"),
        ("result.reference.index.key", "blobs/00/flights/aaaaaaaaaaaaaaaaaaaa-000000"),
        ("result.reference.index.key", "../../etc/passwd"),
        ("result.reference.index.sha256", "AAAA"),
        ("result.reference.index.size_bytes", -1),
        ("result.reference.index.size_bytes", 2**63),
        ("result.reference.files_count", -1),
        ("result.reference.task", ""),
        ("result.reference.version", -1),
        ("result.oldest_birth_ms", -1),
        ("result.oldest_birth_ms", 2**70),
        ("result.oldest_birth_ms", "soon"),
        ("result.new_keys", ["repository"]),
        ("result.new_keys", ["log/flights/00000000000000000001.commit"]),
        ("result.new_keys", ["blobs/69/flights/aaaaaaaaaaaaaaaaaaaa-000000"]),
        ("result.base", {"key": "../../etc/passwd", "sha256": "", "size_bytes": 1}),
        ("result.stats", None),
        ("result", []),
    ],
)
async def test_a_file_with_a_value_that_nobody_writes_is_refused(tmp_path: Path, place: str, value: object) -> None:
    repository, result = await _backed_up(tmp_path)
    path = tmp_path / "result.json"
    write_result(path, ResultFile(repository_id=repository.record.id, result=result))
    _changed(path, place, value)
    with pytest.raises(UsageError) as refused:
        read_result(path, repository_id=repository.record.id)
    assert refused.value.subject == str(path)
    assert refused.value.hint


@pytest.mark.parametrize(
    "place, value",
    [
        ("result.reference.version", 7),
        ("result.reference.unique_id", "another"),
        ("result.reference.store", "another"),
        ("result.reference.files_count", 1),
        ("result.reference.size_bytes", 1),
        ("result.new_keys", []),
    ],
)
async def test_a_file_that_says_something_else_than_the_store_is_refused(
    tmp_path: Path, place: str, value: object
) -> None:
    repository, result = await _backed_up(tmp_path)
    path = tmp_path / "result.json"
    write_result(path, ResultFile(repository_id=repository.record.id, result=result))
    _changed(path, place, value)
    read = read_result(path, repository_id=repository.record.id)
    with pytest.raises(UsageError):
        await check_uploaded(repository, path, read)


async def test_a_birth_that_would_stretch_the_lease_is_not_believed(tmp_path: Path) -> None:
    repository, result = await _backed_up(tmp_path)
    checked = await check_uploaded(repository, tmp_path, msgspec.structs.replace(result, oldest_birth_ms=2**60))
    assert checked.oldest_birth_ms <= result.oldest_birth_ms


@pytest.mark.parametrize("prefix", ["blobs/", "indexes/"])
async def test_a_result_of_which_an_upload_is_gone_has_expired(tmp_path: Path, prefix: str) -> None:
    repository, result = await _backed_up(tmp_path)
    await repository.store.delete([next(key for key in result.new_keys if key.startswith(prefix))])
    with pytest.raises(LeaseExpiredError):
        await check_uploaded(await Repository.open(repository.store), tmp_path / "result.json", result)


async def test_a_result_that_a_collection_took_after_its_ttl_has_expired(tmp_path: Path) -> None:
    """It is not damage, which it was called before (exit code 4): the hint is to back up again (6)."""
    clock = SteppedClock()
    repository = await Repository.init(MemoryStore(clock=clock))
    result = await repository.backup(SCOPE, _source(tmp_path))
    clock.advance(2 * repository.record.ttl_ms)
    await repository.collect(Retention(keep_last=1), delete_share_max=1)
    with pytest.raises(LeaseExpiredError) as expired:
        await check_uploaded(await Repository.open(repository.store), tmp_path / "result.json", result)
    assert choose_exit_code(expired.value) is ExitCode.CONFLICT


async def test_a_result_of_which_the_index_is_altered_is_damage(tmp_path: Path) -> None:
    repository, result = await _backed_up(tmp_path)
    await repository.store.put(result.reference.index.key, BytesBody(b"altered"))
    with pytest.raises(DamagedError):
        await check_uploaded(await Repository.open(repository.store), tmp_path / "result.json", result)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"' + b"x" * 100, b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(data)
    with pytest.raises(UsageError):
        read_result(path, repository_id="any")


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UsageError, match="64 MiB"):
        read_result(path, repository_id="any")


def test_a_directory_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_result(tmp_path, repository_id="any")


async def test_a_result_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    repository, result = await _backed_up(tmp_path)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="regular"):
        write_result(tmp_path / "taken", ResultFile(repository_id=repository.record.id, result=result))
    assert _listed(tmp_path) == ["source", "taken"]


async def _on_a_base(tmp_path: Path) -> tuple[Repository, BackupResult]:
    repository, first = await _backed_up(tmp_path)
    await repository.commit(SCOPE, [first])
    (tmp_path / "source" / "new").write_bytes(b"n" * 5000)
    return repository, await repository.backup(SCOPE, tmp_path / "source")


async def test_a_file_that_names_another_base_is_refused(tmp_path: Path) -> None:
    """Else it could be committed on a parent that does not protect what it retains."""
    repository, result = await _on_a_base(tmp_path)
    assert (await check_uploaded(repository, tmp_path, result)).base == result.base
    other = await repository.backup(SCOPE, tmp_path / "source", store="other")
    for base in (other.reference.index, None):
        with pytest.raises(UsageError, match="base"):
            await check_uploaded(repository, tmp_path, msgspec.structs.replace(result, base=base))


async def test_a_result_whose_base_is_gone_is_stale(tmp_path: Path) -> None:
    repository, result = await _on_a_base(tmp_path)
    assert result.base is not None
    await repository.store.delete([result.base.key])
    with pytest.raises(StaleResultError):
        await check_uploaded(repository, tmp_path, result)

"""A directory store leaves alone what is not its own, whatever is in its directory (design 0002, S2)."""

import asyncio
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.base import BytesBody, Created, UnfinishedPut, read_blob
from blobstore.errors import BlobCorruptError, BlobNotFoundError, InvalidRequestError, StoreError
from blobstore.local.dirs import StoreDirs
from blobstore.local.store import LocalStore

HOUR_MS = 3_600_000
LONG_AGO_S = time.time() - 40 * 24 * 3600


def make_theirs(directory: Path) -> dict[str, bytes]:
    """Fill a directory with what somebody might have, also under names that look like the store's."""
    (directory / "deep").mkdir(parents=True)
    for name in ("thesis.tex", "deep/notes", "0f" * 16, "k", "a", "deep/k"):
        (directory / name).write_bytes(b"theirs")
        os.utime(directory / name, (LONG_AGO_S, LONG_AGO_S))
    return contents(directory)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


async def tried(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except StoreError as error:
        return error


async def use_everything(store: LocalStore, prefix: str = "") -> list[Any]:
    """Call every method that changes something; return the outcomes."""
    return [
        await tried(call)
        for call in (
            store.put(f"{prefix}a", BytesBody(b"x"), ttl_ms=HOUR_MS),
            store.put_if_absent(f"{prefix}deep/new", BytesBody(b"x"), ttl_ms=HOUR_MS),
            store.put_if_absent(f"{prefix}new", BytesBody(b"x")),
            store.remove_ttl(f"{prefix}a"),
            store.delete([f"{prefix}k", f"{prefix}deep/k", f"{prefix}new"]),
            store.now_ms(),
            store.abort_unfinished(
                [
                    *await tried_list(store),
                    UnfinishedPut(key=".tmp/thesis.tex", upload_id="thesis.tex", begun_at_ms=0),
                    UnfinishedPut(key=".tmp/deep", upload_id="deep", begun_at_ms=0),
                ]
            ),
        )
    ]


async def tried_list(store: LocalStore) -> tuple[UnfinishedPut, ...]:
    found = await tried(store.list_unfinished(""))
    return () if isinstance(found, StoreError) else found


async def test_files_of_others_in_the_temporary_directory_stay(tmp_path: Path) -> None:
    make_theirs(tmp_path / ".tmp")
    store = LocalStore(tmp_path)
    (tmp_path / ".tmp" / ("0f" * 16)).unlink()  # this name could be the store's own
    theirs = contents(tmp_path / ".tmp")
    outcomes = await use_everything(store)
    assert not [o for o in outcomes if isinstance(o, StoreError)]
    assert contents(tmp_path / ".tmp") == theirs
    assert (tmp_path / ".tmp/deep").is_dir()


@pytest.mark.parametrize("name", [".tmp", ".ttl", ".deleted", "pins"])
async def test_nothing_is_changed_behind_a_link(tmp_path: Path, name: str) -> None:
    theirs = make_theirs(tmp_path / "victim")
    before = sorted(p.name for p in (tmp_path / "victim").iterdir())
    root = tmp_path / "repository"
    store = LocalStore(root, deleted_retention_ms=1)
    for key in ("k", "deep/k"):
        await store.put(key, BytesBody(b"x"))
    if (root / name).exists():
        (root / name).rename(tmp_path / "moved")
    (root / name).symlink_to(tmp_path / "victim")
    outcomes = await use_everything(store, "pins/" if name == "pins" else "")
    outcomes += await use_everything(LocalStore(root, deleted_retention_ms=1), "pins/" if name == "pins" else "")
    assert contents(tmp_path / "victim") == theirs
    assert sorted(p.name for p in (tmp_path / "victim").iterdir()) == before
    refused = [o for o in outcomes if isinstance(o, StoreError) and not isinstance(o, BlobNotFoundError)]
    assert refused or name == ".deleted"  # which delete() reports key by key
    for error in refused:
        assert isinstance(error, BlobCorruptError)
        assert str(root / name) in error.hint
    if name == "pins":
        for call in (store.list_page("pins/"), store.stat("pins/k"), read_blob(store, "pins/k", size_bytes_max=9)):
            assert isinstance(await tried(call), BlobCorruptError)


async def test_a_shard_that_becomes_a_link_while_a_blob_is_put_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = make_theirs(tmp_path / "victim")
    root = tmp_path / "repository"
    store = LocalStore(root)
    await store.put("blobs/warm", BytesBody(b"x"))
    real = os.utime

    def swap(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        for name in ("blobs", ".tmp"):
            if not (root / name).is_symlink():
                (root / name).rename(tmp_path / f"moved {name}")
                (root / name).symlink_to(tmp_path / "victim")

    monkeypatch.setattr(os, "utime", swap)
    await tried(store.put_if_absent("blobs/k", BytesBody(b"x")))
    await tried(store.put("blobs/a", BytesBody(b"x")))
    assert contents(tmp_path / "victim") == theirs


async def test_a_new_directory_that_becomes_a_link_passes_no_permissions_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, root = tmp_path / "victim", tmp_path / "repository"
    victim.mkdir(mode=0o700)
    root.mkdir()
    root.chmod(0o777)  # shared: so that new directories get permissions that the umask would not leave
    real = os.mkdir

    def swap(path: Any, *args: Any, **kwargs: Any) -> None:
        real(path, *args, **kwargs)
        if path == "blobs":
            (root / path).rmdir()
            (root / path).symlink_to(victim)

    monkeypatch.setattr(os, "mkdir", swap)
    assert isinstance(await tried(LocalStore(root).put("blobs/a", BytesBody(b"x"))), BlobCorruptError)
    assert stat.S_IMODE(victim.stat().st_mode) == 0o700


async def test_a_root_behind_a_link_is_its_users_choice(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert isinstance(await LocalStore(tmp_path / "link").put_if_absent("a/k", BytesBody(b"x")), Created)
    assert (tmp_path / "real/a/k").is_file()


# --- directories ---


async def test_directories_are_made_again_and_durable_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def sync(directory: int) -> None:
        synced.append(os.path.relpath(Path(f"/proc/self/fd/{directory}").readlink(), tmp_path))

    monkeypatch.setattr("blobstore.local.dirs.sync_dir", sync)
    dirs = StoreDirs(tmp_path / "root")

    def make(dirs: StoreDirs, path: str) -> list[str]:
        synced.clear()
        with dirs.opened(path, make=True):
            return list(synced)

    assert make(dirs, "a/b") == ["root", "root/a"]
    assert make(dirs, "a/b") == []
    # Another process has made them, and may not have synced them yet.
    assert make(StoreDirs(tmp_path / "root"), "a") == ["root"]
    (tmp_path / "root/a/b").rmdir()
    assert make(dirs, "a/b") == ["root/a"]


# --- init ---


@pytest.mark.parametrize(
    "make",
    [
        lambda root: (root / "thesis.tex").write_text("mine"),
        lambda root: (root / "empty").mkdir(),
        lambda root: (root / "blobs").mkdir(),
        lambda root: (root / ".config").mkdir(),
        lambda root: make_theirs(root / ".tmp"),
        lambda root: make_theirs(root / ".ttl"),
        lambda root: (root / ".tmp").symlink_to("/"),
        lambda root: (root / ".ttl").symlink_to("/"),
        lambda root: (root / "doctor").write_text("my doctor's address"),
    ],
)
def test_a_directory_with_something_else_in_it_is_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path)
    (name,) = [path.name for path in tmp_path.iterdir()]
    with pytest.raises(InvalidRequestError) as caught:
        asyncio.run(LocalStore(tmp_path).check_unused("init"))
    assert name in str(caught.value)
    assert "empty directory" in caught.value.hint


async def test_what_a_killed_init_or_doctor_leaves_is_not_refused(tmp_path: Path) -> None:
    await LocalStore(tmp_path / "absent").check_unused("init")
    assert not (tmp_path / "absent").exists()
    store = LocalStore(tmp_path, deleted_retention_ms=HOUR_MS)
    await store.check_unused("init")
    await store.put_if_absent(f"doctor/{'0' * 20}/a", BytesBody(b"x"), ttl_ms=HOUR_MS)
    await store.put_if_absent(f"doctor/{'0' * 20}/b", BytesBody(b"x"), ttl_ms=HOUR_MS)
    await store.delete([f"doctor/{'0' * 20}/a"])
    (tmp_path / ".tmp" / ("0f" * 16)).write_text("half")
    (tmp_path / "lost+found").mkdir()
    await store.check_unused("init")


# --- permissions ---


def modes(root: Path) -> dict[str, int]:
    return {str(p.relative_to(root)): stat.S_IMODE(p.lstat().st_mode) for p in root.rglob("*") if not p.is_symlink()}


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("root_mode", [None, 0o755, 0o750, 0o700])
async def test_what_is_stored_is_its_owners_alone(tmp_path: Path, umask: None, root_mode: int | None) -> None:
    root = tmp_path / "root"
    if root_mode is not None:
        root.mkdir()
        root.chmod(root_mode)
    store = LocalStore(root, deleted_retention_ms=HOUR_MS)
    await store.put_if_absent("blobs/a", BytesBody(b"x"), ttl_ms=HOUR_MS)
    await store.put("pins/a", BytesBody(b"x"))
    await store.put("b", BytesBody(b"x"))
    await store.delete(["b"])
    assert stat.S_IMODE(root.stat().st_mode) == (root_mode or 0o700)
    found = modes(root)
    assert {path: mode for path, mode in found.items() if mode != (0o600 if (root / path).is_file() else 0o700)} == {}
    assert {"blobs", "blobs/a", "pins/a", ".tmp", ".ttl/blobs", ".deleted/b"} <= found.keys()


@pytest.mark.parametrize(
    "root_mode, directory, file",
    [
        (0o770, 0o770, 0o660),
        (0o2770, 0o2770, 0o660),
        (0o2750, 0o2750, 0o640),
        (0o775, 0o770, 0o660),
        (0o777, 0o777, 0o666),
    ],
)
async def test_what_is_stored_is_shared_with_those_with_whom_the_root_is(
    tmp_path: Path, umask: None, root_mode: int, directory: int, file: int
) -> None:
    await asyncio.to_thread(tmp_path.chmod, root_mode)
    store = LocalStore(tmp_path)
    await store.put_if_absent("blobs/a", BytesBody(b"x"), ttl_ms=HOUR_MS)
    await store.put("pins/a", BytesBody(b"x"))
    found = modes(tmp_path)
    assert {
        path: mode for path, mode in found.items() if mode != (file if (tmp_path / path).is_file() else directory)
    } == {}

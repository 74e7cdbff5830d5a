"""Symbolic links, planted wherever one could lead a backup or a restore out of its directory (architecture, H7)."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from engine.errors import TargetError, UnsafeSourceError
from engine.runtime import Runtime
from index.snapshot.keys import BLOBS, upload_key
from tests.hostile.forger import SCOPE, SESSION, Forger, a_file, an_index, in_blob
from tests.unit.engine.workbench import Workbench, read_tree

UNSAFE: Final = 9
TREE: Final = {"CURRENT": b"MANIFEST-1\n", "000001.sst": b"s" * 3000, "sub/f": b"f" * 40}


class FixedRuntime(Runtime):
    """An id that an attacker has guessed."""

    def session(self) -> str:  # type: ignore[explicit-override]
        return "c" * 20


@pytest.fixture
async def bench(tmp_path: Path) -> Workbench:
    """A backup in a store, a secret beside it, and a target that is not there yet."""
    bench = Workbench(tmp_path)
    bench.write(TREE)
    await bench.backup()
    bench.runtime = FixedRuntime()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (outside / "secret").chmod(0o600)
    return bench


def outside(bench: Workbench) -> Path:
    return bench.root / "outside"


def is_as_it_was(bench: Workbench) -> bool:
    """Whether nothing was written through a link, or removed through one."""
    secret = outside(bench) / "secret"
    return read_tree(outside(bench)) == {"secret": b"secret"} and secret.stat().st_mode & 0o777 == 0o600


SOURCES: Final[dict[str, Callable[[Workbench], object]]] = {
    "to a file outside": lambda b: (b.directory / "x.sst").symlink_to(outside(b) / "secret"),
    "to a file inside": lambda b: (b.directory / "x.sst").symlink_to("000001.sst"),
    "to a directory outside": lambda b: (b.directory / "d").symlink_to(outside(b)),
    "to its own parent": lambda b: (b.directory / "sub" / "loop").symlink_to(".."),
    "to itself": lambda b: (b.directory / "self").symlink_to("self"),
    "to nowhere": lambda b: (b.directory / "x").symlink_to("/nowhere/at/all"),
    "deep below": lambda b: (b.directory / "sub" / "x").symlink_to(outside(b) / "secret"),
    "a FIFO": lambda b: os.mkfifo(b.directory / "fifo"),
}


@pytest.mark.parametrize("plant", SOURCES.values(), ids=SOURCES.keys())
async def test_a_source_with_a_link_in_it_is_refused_and_nothing_is_uploaded(
    bench: Workbench, plant: Callable[[Workbench], object]
) -> None:
    plant(bench)
    bench.meter.reset()
    with pytest.raises(UnsafeSourceError) as refused:
        await bench.backup()
    assert refused.value.hint
    assert str(bench.directory) in refused.value.subject
    assert set(bench.meter.requests) <= {"get"}


async def test_a_source_that_is_a_link_is_refused(bench: Workbench) -> None:
    link = bench.root / "link"
    link.symlink_to(bench.directory)
    with pytest.raises(UnsafeSourceError, match="symbolic link"):
        await bench.backup(directory=link)


async def test_a_file_that_becomes_a_link_while_it_is_read_is_not_followed(bench: Workbench) -> None:
    """The upload opens with O_NOFOLLOW what the scan saw as a file."""
    bench.write({**TREE, "new": b"n" * 4000, "other": b"o" * 4000})

    async def swap() -> None:
        for name in ("new", "other"):
            path = bench.directory / name
            if not path.is_symlink():
                path.unlink()
                path.symlink_to(outside(bench) / "secret")

    bench.store.before("put_if_absent", "", swap)
    with pytest.raises(UnsafeSourceError):
        await bench.backup(base=None)


async def test_a_source_with_a_socket_is_refused(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.directory)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        with pytest.raises(UnsafeSourceError, match="socket"):
            await bench.backup()


TARGETS: Final[dict[str, Callable[[Workbench], object]]] = {
    "to a directory": lambda b: b.target.symlink_to(outside(b)),
    "to nowhere": lambda b: b.target.symlink_to(b.root / "made-by-the-link"),
    "to itself": lambda b: b.target.symlink_to("target"),
    "in the place of the lock": lambda b: (b.root / ".target.tidemark-lock").symlink_to(outside(b) / "secret"),
    "in the place of the staging directory": lambda b: (b.root / f".target.tidemark-{'c' * 20}").symlink_to(outside(b)),
}


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("plant", TARGETS.values(), ids=TARGETS.keys())
async def test_a_target_with_a_link_in_its_place_is_refused(
    bench: Workbench, plant: Callable[[Workbench], object], replace: bool
) -> None:
    """A guessed name beside the target is refused too: nothing of a restore is ever made where something is."""
    plant(bench)
    with pytest.raises(TargetError) as refused:
        await bench.restore(replace=replace)
    assert refused.value.hint
    assert is_as_it_was(bench)
    assert not (bench.root / "made-by-the-link").exists()


async def test_a_staging_directory_that_an_attacker_has_made_is_not_used(bench: Workbench) -> None:
    """One that is there is a dead restore's: it goes with all that is in it, but nothing goes through its links."""
    staging = bench.root / f".target.tidemark-{'c' * 20}"
    (staging / "new").mkdir(parents=True)
    (staging / "new" / "CURRENT").symlink_to(outside(bench) / "secret")
    (staging / "new" / "sub").symlink_to(outside(bench))
    await bench.restore()
    assert read_tree(bench.target) == TREE
    assert is_as_it_was(bench)
    assert not staging.exists()


async def test_a_link_among_the_left_overs_of_dead_restores_is_left_alone(bench: Workbench) -> None:
    for kind in ("", "trash-", "old-"):
        (bench.root / f".target.tidemark-{kind}{'d' * 20}").symlink_to(outside(bench))
    result = await bench.restore()
    assert read_tree(bench.target) == TREE
    assert is_as_it_was(bench)
    assert result.leftovers


async def test_a_target_below_a_link_is_meant_and_written_there(bench: Workbench) -> None:
    """What leads to the target is the caller's own path; only the target itself may be no link."""
    elsewhere = bench.root / "elsewhere"
    elsewhere.mkdir()
    (bench.root / "way").symlink_to(elsewhere)
    await bench.restore(target=bench.root / "way" / "target")
    assert read_tree(elsewhere / "target") == TREE
    assert is_as_it_was(bench)


INSIDE: Final[dict[str, Callable[[Path, Path], object]]] = {
    "in the place of a file": lambda target, there: _swap(target / "CURRENT", there / "secret"),
    "in the place of an SST": lambda target, there: _swap(target / "000001.sst", there / "secret"),
    "in the place of a directory": lambda target, there: _swap(target / "sub", there),
    "beside them": lambda target, there: (target / "stray").symlink_to(there),
}


def _swap(path: Path, there: Path) -> None:
    if path.is_dir():
        (path / "f").unlink()
        path.rmdir()
    else:
        path.unlink()
    path.symlink_to(there)


@pytest.mark.parametrize("plant", INSIDE.values(), ids=INSIDE.keys())
async def test_a_link_in_a_target_that_is_replaced_is_neither_followed_nor_reused(
    bench: Workbench, plant: Callable[[Path, Path], object]
) -> None:
    await bench.restore()
    plant(bench.target, outside(bench))
    await bench.restore(replace=True)
    assert read_tree(bench.target) == TREE
    assert not any(path.is_symlink() for path in bench.target.rglob("*"))
    assert is_as_it_was(bench)


async def test_a_staged_directory_that_becomes_a_link_is_not_written_through(bench: Workbench) -> None:
    """Files are opened with O_EXCL and O_NOFOLLOW, relative to the directory that was opened first."""

    async def plant() -> None:
        staged = bench.root / f".target.tidemark-{'c' * 20}" / "new"
        for name in ("CURRENT", "000001.sst"):
            if not (staged / name).is_symlink() and not (staged / name).exists():
                (staged / name).symlink_to(outside(bench) / "secret")

    bench.store.after("get", "", plant)
    with pytest.raises(TargetError):
        await bench.restore()
    assert is_as_it_was(bench)
    assert not bench.target.exists()


def test_a_blob_that_is_a_link_is_not_read(forger: Forger) -> None:
    """A directory store reads no links: what a key leads to is in the repository."""
    secret = forger.shell.directory / "secret"
    secret.write_bytes(b"forged")
    key = upload_key(BLOBS, SCOPE, SESSION, 7)
    forger.put(key, b"").unlink()
    (forger.root / key).symlink_to(secret)
    forger.commit(an_index(in_blob("f", key)))
    result = forger.shell.run("restore", "target", "--json", code=4)
    assert "secret" not in result.stderr
    assert not forger.target.exists()


def test_the_command_line_refuses_links_with_its_exit_code(forger: Forger) -> None:
    forger.commit(an_index(a_file("f")))
    forger.target.symlink_to(forger.shell.directory)
    failure = forger.shell.refused("restore", "target", "--replace", code=UNSAFE)
    assert failure["error"] == "TargetError"
    source = forger.shell.tree("source", {"f": b"x"})
    (source / "link").symlink_to("/etc/passwd")
    failure = forger.shell.refused("backup", "source", code=UNSAFE)
    assert failure["subject"].endswith("source/link")

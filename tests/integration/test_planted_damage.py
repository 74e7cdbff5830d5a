"""From a planted damage to a restored directory, by nothing but the hints that are printed (design 0006, M1 to M3)."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engine.cli import tidemark
from tests.integration.conftest import FIRST, SECOND, Shell, content

NEWEST, OLDER = 2, 1
OF_HINT = re.compile(r"`(tidemark [a-z]+|--[a-z-]+)[^`]*`")


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


def objects(shell: Shell, room: str) -> list[Path]:
    """What is in a room, the oldest first."""
    found = [path for path in (shell.directory / "repository" / room).rglob("*") if path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def own(shell: Shell, room: str, number: int, size_bytes: int = 0) -> Path:
    """The object that a commit has brought: its index, its record, or its blob of a size."""
    (found, *_) = [p for p in objects(shell, room) if not size_bytes or p.stat().st_size == size_bytes][number - 1 :]
    return found


PLACES: dict[str, Callable[[Shell, int], Path]] = {
    # FIRST brings 000001.sst, SECOND 000002.sst, each as a blob of its own.
    "blob": lambda shell, number: own(shell, "blobs", 1, {OLDER: 400_000, NEWEST: 300_000}[number]),
    # Small files of the first commit share a pack; the one that changed alone is a blob of the second.
    "pack": lambda shell, number: own(shell, "blobs", 1, {OLDER: 11_000, NEWEST: 7_000}[number]),
    "index": lambda shell, number: own(shell, "indexes", number),
    "record": lambda shell, number: own(shell, "log", number),
}


class Hints:
    """An operator who runs what the last answer advised, and nothing else."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.transcript: list[str] = []

    def run(self, *words: str) -> Result:
        result = CliRunner().invoke(tidemark, list(words), env=self.shell.environment)
        assert "Traceback" not in result.output
        self.transcript += [f"$ tidemark {' '.join(words)}", result.stdout, result.stderr, f"({result.exit_code})"]
        return result

    def restored(self) -> dict[str, bytes] | None:
        """What a restore brings back in the end; None: an honest end without it."""
        result = self.run("restore", "target")
        if result.exit_code == 0:
            return content(Path("target"))
        advised = set(OF_HINT.findall(result.stderr))
        assert advised, result.stderr
        if "tidemark discard" in advised:
            (key,) = re.findall(r"`tidemark discard (\S+)`", result.stderr)
            assert self.run("discard", key, "--yes").exit_code == 0
            assert self.run("restore", "target").exit_code == 0
            return content(Path("target"))
        if "--or-newest-complete" in advised:
            assert self.run("restore", "target", "--or-newest-complete").exit_code == 0
            return content(Path("target"))
        if "tidemark repair" not in advised and "tidemark verify" not in advised:
            return None
        told = self.run("repair")
        if keys := re.findall(r"`tidemark discard (\S+)`", told.stdout):
            assert self.run("discard", keys[0], "--yes").exit_code == 0
        elif "--from DIR" in told.stdout:
            assert "no commit is whole" in told.stdout
            assert self.run("repair", "--from", "source").exit_code == 3
        assert self.run("restore", "target").exit_code == 0, self.transcript
        return content(Path("target"))


@pytest.mark.parametrize("number", [NEWEST, OLDER], ids=["newest", "older"])
@pytest.mark.parametrize("harm", [alter, cut, remove])
@pytest.mark.parametrize("what", sorted(PLACES))
def test_a_whole_state_comes_back_by_the_hints_alone(
    two_commits: Shell, what: str, harm: Callable[[Path], None], number: int
) -> None:
    harm(PLACES[what](two_commits, number))
    hints = Hints(two_commits)
    came_back = hints.restored()
    assert came_back in (FIRST, SECOND), "\n".join(hints.transcript)


@pytest.mark.parametrize("harm", [alter, cut, remove])
@pytest.mark.parametrize("what", ["blob", "index"])
def test_the_job_is_whole_again_by_what_repair_offers(
    two_commits: Shell, what: str, harm: Callable[[Path], None]
) -> None:
    shell = two_commits
    harm(PLACES[what](shell, NEWEST))
    told = shell.run("repair", code=4)
    assert "--from DIR" in told.stdout
    assert "--rewind: makes commit 1 (version 8" in told.stdout
    offsets = ("--offsets", "2013-08") if what == "index" else ()
    repaired = shell.told("repair", "--from", "source", *offsets, code=3)
    assert (repaired["commit"]["number"], repaired["commit"]["offsets"]) == (3, "2013-08")
    assert repaired["left"] == [2]
    assert shell.told("repair", "--drop", "--yes")["dropped"] == [2]
    shell.run("restore", "target")
    assert content(Path("target")) == SECOND
    shell.grow_old()
    assert shell.told("collect", "--keep-last", "9")["deleted_count"] > 0
    assert "no damage" in shell.run("verify", "--level", "content").stdout


def test_without_a_local_directory_the_newest_whole_commit_is_the_newest_again(two_commits: Shell) -> None:
    shell = two_commits
    remove(PLACES["blob"](shell, NEWEST))
    assert shell.told("repair", "--rewind", "--drop", "--yes")["left"] == []
    assert shell.told("show")["commit"]["offsets"] == "2013-07"
    shell.run("restore", "target")
    assert content(Path("target")) == FIRST


def test_a_directory_of_another_state_does_not_get_the_offsets_of_the_commit(two_commits: Shell) -> None:
    shell = two_commits
    alter(PLACES["blob"](shell, NEWEST))
    source = shell.tree("source", {**SECOND, "000003.sst": b"3"})
    refused = shell.refused("repair", "--from", str(source), code=2)
    assert "--offsets" in refused["hint"]
    told = shell.told("repair", "--from", str(source), "--offsets", "2013-09", code=3)
    assert told["commit"]["offsets"] == "2013-09"


def test_what_is_whole_needs_no_repair_and_drop_asks_first(two_commits: Shell) -> None:
    shell = two_commits
    assert "nothing that a commit needs is damaged" in shell.run("repair").stdout
    alter(PLACES["index"](shell, OLDER))
    shell.run("repair", code=3)
    assert "--yes" in shell.refused("repair", "--drop", code=2)["hint"]
    assert shell.refused("repair", "--from", "source", "--rewind", code=2)["hint"] == "choose one of the two"

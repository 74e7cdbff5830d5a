"""What the command line says and does where something of a commit is missing (design 0006, M1 and M2)."""

from pathlib import Path

import msgspec
import pytest

from tests.integration.conftest import FIRST, SECOND, Shell, content


@pytest.fixture
def backed_up(shell: Shell) -> Shell:
    """A repository with two commits of one directory, versions 8 and 9."""
    shell.run("init")
    for version, files in ((8, FIRST), (9, SECOND)):
        shell.run("backup", str(shell.tree("source", files)), "--version", str(version))
    return shell


def lose(shell: Shell, *sizes_bytes: int, prefix: str = "blobs") -> None:
    """Delete the blobs of these sizes."""
    for path in (shell.directory / "repository" / prefix).rglob("*"):
        if path.is_file() and path.stat().st_size in sizes_bytes:
            path.unlink()


@pytest.fixture
def lost(backed_up: Shell) -> Shell:
    """The newest commit misses the blob of `000002.sst`, which the one before has not."""
    lose(backed_up, 300_000)
    return backed_up


def test_a_restore_names_the_commit_that_is_whole_and_takes_it_when_asked_to(lost: Shell) -> None:
    failure = lost.refused("restore", "target", code=4)
    assert failure["error"] == "IncompleteError"
    assert "commit 1 (version 8) is the newest of which everything is there" in failure["hint"]
    assert "--or-newest-complete" in failure["hint"]
    assert not Path("target").exists()
    result = lost.run("restore", "target", "--or-newest-complete")
    assert "it is not the commit that was chosen" in result.stderr
    assert content(Path("target"))["CURRENT"] == b"MANIFEST-1\n"


def test_of_several_stores_all_are_of_the_commit_that_is_whole(lost: Shell) -> None:
    failure = lost.refused("restore", "target", "--all", code=4)
    assert "commit 1 (version 8) is the newest" in failure["hint"]
    result = lost.run("restore", "target", "--all", "--or-newest-complete")
    assert "it is not the commit that was chosen" in result.stderr
    assert content(Path("target/0/default"))["CURRENT"] == b"MANIFEST-1\n"
    shown = lost.result("restore", "again", "--all", "--or-newest-complete", "--number", "1")
    assert (shown["commit"]["number"], shown["instead_because"]) == (1, "")


def test_a_backup_that_checks_retained_files_sends_again_what_is_missing(lost: Shell) -> None:
    assert lost.result("backup", "source")["stats"]["files_healed"] == 0
    assert "for what is missing" in lost.run("backup", "source", "--check-retained", "--dry-run").stdout
    assert lost.result("backup", "source", "--check-retained", "-n")["files_healed"] == 1
    assert "uploaded again 1 file (293.0 KiB)" in lost.run("backup", "source", "--check-retained").stdout
    lost.run("restore", "target")
    assert content(Path("target")) == SECOND
    assert {p["number"] for p in lost.result("verify", code=4)["problems"]} == {2, 3}


def test_an_index_that_is_missing_stops_no_backup(backed_up: Shell) -> None:
    shell = backed_up
    for path in (shell.directory / "repository/indexes").rglob("*"):
        if path.is_file():
            path.unlink()
    assert shell.result("backup", "source")["stats"]["files_healed"] == len(SECOND)
    shell.run("restore", "target")
    assert content(Path("target")) == SECOND


def test_a_result_travels_with_what_it_heals_and_is_not_believed(lost: Shell) -> None:
    lost.run("backup", "source", "--check-retained", "--no-commit", "--result", "result.json")
    made = msgspec.json.decode(Path("result.json").read_bytes())
    [gone] = made["result"]["missing_keys"]
    assert gone.startswith("blobs/")
    lost.run("backup", "source", "--no-commit", "--result", "unhealed.json")
    unhealed = msgspec.json.decode(Path("unhealed.json").read_bytes())
    for keys in ([gone], ["indexes/00/flights/0-0"]):
        unhealed["result"]["missing_keys"] = keys
        Path("forged.json").write_bytes(msgspec.json.encode(unhealed))
        assert "needs what it says to be missing" in lost.refused("commit", "forged.json", code=2)["message"]
    lost.run("commit", "result.json")
    lost.run("restore", "target")
    assert content(Path("target")) == SECOND


def test_a_verification_says_what_can_be_done(lost: Shell) -> None:
    assert "tidemark repair" in lost.run("verify", code=4).stdout

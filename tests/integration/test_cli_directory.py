"""A repository in a directory: whose directory it may be, and what killed writers leave in it."""

import os
import shutil
import time
from pathlib import Path

import pytest

from index.snapshot.keys import BLOBS, upload_key
from index.snapshot.model import Scope
from tests.integration.conftest import Shell, content

LONG_AGO_S = time.time() - 2 * 24 * 3600


@pytest.mark.parametrize("verb", ["init", "doctor"])
def test_a_directory_that_is_somebodys_is_refused_and_stays_as_it_was(shell: Shell, verb: str) -> None:
    home = shell.tree("repository", {".tmp/thesis.tex": b"mine", "notes": b"mine"})
    os.utime(home / ".tmp/thesis.tex", (LONG_AGO_S, LONG_AGO_S))
    before = content(home)
    refused = shell.refused(verb, code=9)
    assert refused["error"] == "UnsafeStoreError"
    assert "'.tmp/thesis.tex'" in refused["message"] or "'notes'" in refused["message"]
    assert content(home) == before


def test_doctor_and_init_and_both_again_go_together(shell: Shell) -> None:
    (shell.directory / "repository").mkdir()
    shell.run("doctor")
    shell.run("init")
    shell.run("doctor")
    assert "already" in shell.refused("init", code=2)["message"]


def test_what_killed_writers_left_goes_with_the_ttl_and_is_shown(two_commits: Shell) -> None:
    root = two_commits.directory / "repository"
    leave(root, "0" * 32, 1000)
    leave(root, f"{'1' * 32}.born-5", 200)
    leave(root, "thesis.tex", 30)
    young = root / ".tmp" / ("2" * 32)
    young.write_bytes(b"x" * 4)
    # The writer was killed before its blob was there.
    link = root / ".ttl" / upload_key(BLOBS, Scope("flights"), "0" * 20, 0)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to("ttl:86400000ms")
    os.utime(link, (LONG_AGO_S, LONG_AGO_S), follow_symlinks=False)
    metrics = two_commits.run("metrics").stdout
    assert 'tidemark_orphan_bytes{state="unfinished"} 1204.0' in metrics
    assert 'tidemark_orphan_objects{state="unfinished"} 4.0' in metrics
    for flags in (("--dry-run",), ()):
        shown = two_commits.result("collect", "--keep-last", "5", *flags)
        assert {"reason": "unfinished_upload", "count": 3, "size_bytes": 1200} in shown["totals"]
        assert (shown["unfinished_count"], shown["unfinished_bytes"]) == (1, 4)
        assert shown["freed_bytes"] >= 1200
        assert link.is_symlink() == bool(flags)
    assert sorted(path.name for path in (root / ".tmp").iterdir()) == [young.name, "thesis.tex"]
    assert two_commits.result("collect", "--keep-last", "5")["deleted_count"] == 0
    assert two_commits.result("verify", "--level", "content")["problems"] == []


def leave(root: Path, name: str, size_bytes: int) -> None:
    path = root / ".tmp" / name
    path.write_bytes(b"x" * size_bytes)
    os.utime(path, (LONG_AGO_S, LONG_AGO_S))


def test_a_container_restores_only_where_nothing_is(two_commits: Shell) -> None:
    target = two_commits.directory / "state"
    target.mkdir()
    assert two_commits.result("restore", str(target), "--if-absent")["commit"]["number"] == 2
    (target / "CURRENT").write_bytes(b"newer than any commit")
    before = content(target)
    shutil.rmtree(two_commits.directory / "repository")
    # Nothing is asked of the repository.
    view = two_commits.result("restore", str(target), "--if-absent")
    assert (view["target"], view["restored"]) == (str(target), False)
    assert "left as it is" in two_commits.run("restore", str(target), "--if-absent", "--dry-run").stdout
    assert content(target) == before


@pytest.mark.parametrize("option", ["--all", "--replace"])
def test_what_may_mix_two_commits_is_not_restored_if_absent(two_commits: Shell, option: str) -> None:
    assert "each store" in two_commits.refused("restore", "state", "--if-absent", option, code=2)["hint"]


def test_a_file_is_not_a_directory_with_content(two_commits: Shell) -> None:
    (two_commits.directory / "state").write_bytes(b"")
    two_commits.refused("restore", str(two_commits.directory / "state"), "--if-absent", code=9)


def test_a_restore_of_one_store_of_several_warns_unless_it_was_chosen(two_commits: Shell) -> None:
    two_commits.run("backup", str(two_commits.tree("other", {"CURRENT": b"x"})), "--task", "other")
    assert "1 other store" in two_commits.run("restore", str(two_commits.directory / "one")).stderr
    for number, chosen in enumerate((("--task", "other"), ("--all",))):
        assert "warning" not in two_commits.run("restore", str(two_commits.directory / f"all{number}"), *chosen).stderr


def test_a_forgotten_job_does_not_lead_back_to_the_list(two_commits: Shell) -> None:
    two_commits.run("forget", "flights", "--yes")
    for verb in (("list",), ("restore", str(two_commits.directory / "there"))):
        refused = two_commits.refused(*verb, code=7)
        assert refused["message"].endswith("has no commits")
        assert "tidemark list" not in refused["hint"]

"""`forget`, `commit --drop-store`, `collect explain` and `collect verify-plan` as people run them."""

import json
from pathlib import Path

import pytest

from tests.integration.conftest import FIRST, SECOND, Shell, content


def keys(shell: Shell, prefix: str) -> list[str]:
    """The keys below a prefix."""
    root = shell.directory / "repository"
    return sorted(str(p.relative_to(root)) for p in (root / prefix).rglob("*") if p.is_file())


# ---------------------------------------------------------------------- forget


def test_forget_says_what_it_would_do_and_waits_for_a_yes(two_commits: Shell) -> None:
    refused = two_commits.refused("forget", "flights", code=2)
    assert "not confirmed: flights, 2 records, newest commit 2 of version 9" in refused["message"]
    assert "--yes" in refused["hint"]
    shown = two_commits.result("forget", "flights", "-n")
    assert (shown["dry_run"], shown["scopes"][0]["records_count"], shown["scopes"][0]["closed"]) == (True, 2, True)
    assert len(two_commits.result("list")["commits"]) == 2


def test_a_forgotten_job_is_gone_and_may_begin_again(two_commits: Shell) -> None:
    shell = two_commits
    lines = shell.run("forget", "flights", "--yes").stdout
    assert lines.startswith("flights is forgotten: the newest was 2, version 9; 2 records closed\n")
    shell.refused("restore", "target", code=7)
    shell.refused("list", code=7)
    scope = shell.result("list", "--jobs")["scopes"][0]
    assert (scope["newest"], scope["forgotten"]) == (None, True)
    assert "forgotten" in shell.run("list", "--jobs").stdout
    assert shell.run("forget", "flights", "--yes").stdout.startswith("flights was forgotten before\n")
    shell.grow_old()
    shell.run("collect", "--keep-last", "1", "--delete-at-most", "100%")
    assert keys(shell, "blobs") == []
    shown = shell.result("backup", str(shell.tree("source", FIRST)))
    assert (shown["commit"]["number"], shown["version"]) == (1_000_000_003, 1)
    shell.run("restore", "target")
    assert content(shell.directory / "target") == FIRST


def test_names_are_listed_and_released_on_request(two_commits: Shell) -> None:
    shell = two_commits
    shell.run("name", "v8", "kept\x1b[2J")
    lines = shell.run("forget", "flights", "--yes").stdout
    assert "NOT forgotten, because names hold it: kept\\x1b[2J" in lines
    shell.run("restore", "target", "--name", "kept\x1b[2J")
    shown = shell.result("forget", "flights", "--with-names", "--yes")["scopes"][0]
    assert (shown["closed"], shown["names"], shown["released"]) == (False, [], ["kept\x1b[2J"])


def test_every_task_of_a_job_is_forgotten_or_one(shell: Shell) -> None:
    shell.run("init", "--margin", "30m")
    for task in ("0", "1", "2"):
        shell.run("backup", str(shell.tree("source", FIRST)), "--commit-per-task", "--task", task)
    shell.refused("forget", "flights", "--yes", code=7)
    shell.refused("forget", "flights", "--task", "1", "--yes", code=2)
    shell.run("forget", "flights", "--commit-per-task", "--task", "1", "--yes")
    scopes = shell.result("list", "--jobs")["scopes"]
    assert [s["newest"] is None for s in scopes] == [False, True, False]
    shown = shell.result("forget", "flights", "--commit-per-task", "--yes")
    assert [(s["commit_task"], s["closed"]) for s in shown["scopes"]] == [("0", True), ("1", False), ("2", True)]


@pytest.mark.parametrize("job", ["other", "x" * 300])
def test_a_job_that_never_was_is_not_forgotten(two_commits: Shell, job: str) -> None:
    two_commits.refused("forget", job, "--yes", code=7 if job == "other" else 2)


# ---------------------------------------------------------------------- commit --drop-store


def two_stores(shell: Shell) -> None:
    """A job with the stores 0/default and 1/default."""
    shell.run("init", "--margin", "30m")
    for task in ("0", "1"):
        shell.run("backup", str(shell.tree("source", FIRST)), "--task", task, "--offsets", "7")


def test_a_store_that_left_is_left_out_and_collected(shell: Shell) -> None:
    two_stores(shell)
    before = keys(shell, "blobs")
    shown = shell.result("commit", "--drop-store", "1/default")
    assert (shown["commit"]["stores_count"], shown["commit"]["offsets"], shown["already"]) == (1, "7", False)
    shell.grow_old()
    shell.run("collect", "--keep-last", "1", "--delete-at-most", "100%")
    assert len(keys(shell, "blobs")) == len(before) // 2
    shell.run("restore", "target", "--task", "0")
    assert content(shell.directory / "target") == FIRST


def test_a_store_is_dropped_together_with_results_and_the_command_may_be_repeated(shell: Shell) -> None:
    two_stores(shell)
    words = ("--no-commit", "--result", "result.json", "--task", "0")
    shell.run("backup", str(shell.tree("source", SECOND)), *words)
    for already in (False, True):
        shown = shell.result("commit", "result.json", "--drop-store", "1/default", "--offsets", "8")
        assert (shown["commit"]["number"], shown["commit"]["stores_count"], shown["already"]) == (3, 1, already)


def test_dropping_again_changes_nothing(shell: Shell) -> None:
    two_stores(shell)
    for already in (False, True):
        shown = shell.result("commit", "--drop-store", "1/default")
        assert (shown["commit"]["number"], shown["commit"]["stores_count"], shown["already"]) == (3, 1, already)
    # One that was never there is a mistake all the same.
    shell.refused("commit", "--drop-store", "1/default", "--drop-store", "1/defualt", code=7)


@pytest.mark.parametrize(
    "words, code",
    [
        ((), 2),
        (("--drop-store", "default"), 2),
        (("--drop-store", "/default"), 2),
        (("--drop-store", "7/default"), 7),
        (("--drop-store", "0/sate"), 7),
    ],
)
def test_what_cannot_be_dropped_is_reported(shell: Shell, words: tuple[str, ...], code: int) -> None:
    two_stores(shell)
    shell.refused("commit", *words, code=code)
    assert len(shell.result("list")["commits"]) == 2


# ---------------------------------------------------------------------- explain


def test_a_key_is_explained(two_commits: Shell) -> None:
    shell = two_commits
    big = next(key for key in keys(shell, "blobs") if (shell.directory / "repository" / key).stat().st_size > 350_000)
    lines = shell.run("collect", "explain", big, "--keep-last", "1").stdout
    assert "commit 2 of flights (stays: newest)" in lines
    assert "commit 1 of flights (is to be closed)" in lines
    assert "000001.sst" in lines
    assert lines.endswith("collect: it stays; something that is kept leads to it (0002, D2)\n")
    result = shell.run("collect", "explain", big, "--json")
    shown = json.loads(result.stdout)
    assert (shown["verb"], shown["kind"], shown["fate"], shown["paths_count"]) == ("collect explain", "blob", "kept", 2)
    (shell.directory / "repository" / big).unlink()
    assert "MISSING" in shell.run("collect", "explain", big, code=4).stdout


def test_a_key_of_nobody_is_explained(two_commits: Shell) -> None:
    assert "nothing that tidemark writes" in two_commits.run("collect", "explain", "blobs/zz/foreign").stdout
    assert "\x1b" not in two_commits.run("collect", "explain", "blobs/\x1b[2J", code=2).stderr


# ---------------------------------------------------------------------- verify-plan


def planned(shell: Shell) -> Path:
    """The directory of a plan that takes the first commit."""
    shell.grow_old()
    shell.run("collect", "--keep-last", "1", "-n", "--plan", "plan", "--delete-at-most", "100%")
    return shell.directory / "plan"


def test_the_plan_of_a_dry_run_is_right(two_commits: Shell) -> None:
    planned(two_commits)
    assert two_commits.run("collect", "verify-plan", "plan").stdout.endswith(": right and complete\n")
    shown = json.loads(two_commits.run("collect", "verify-plan", "plan", "--json", "--keep-last", "1").stdout)
    assert (shown["verb"], shown["is_right"], shown["is_complete"]) == ("collect verify-plan", True, True)
    assert shown["planned_count"] > 0
    other = two_commits.run("collect", "verify-plan", "plan", "--keep-last", "2", code=9).stdout
    assert "is not the one that is meant" in other
    two_commits.run("collect", "--keep-last", "1", "--delete-at-most", "100%")
    assert "nothing left to compare" in two_commits.run("collect", "verify-plan", "plan", code=3).stdout


def test_a_plan_with_a_key_that_is_needed_is_wrong(two_commits: Shell) -> None:
    plan = planned(two_commits)
    needed = keys(two_commits, "indexes")
    file = next(plan.glob("*.jsonl"))
    lines = file.read_text().splitlines()
    forged = [json.dumps({**json.loads(lines[0]), "key": key}) for key in needed]
    file.write_text("\n".join(forged) + "\n")
    result = two_commits.run("collect", "verify-plan", "plan", code=9)
    assert "something that is kept leads to it" in result.stdout
    assert "missed: blobs/" in result.stdout


def test_a_plan_that_lacks_a_key_is_not_complete(two_commits: Shell) -> None:
    plan = planned(two_commits)
    file, summary = next(plan.glob("*.jsonl")), plan / "summary.json"
    first, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join(rest))
    shown = json.loads(summary.read_text())
    shown["lines_count"] -= 1
    shown["size_bytes"] -= json.loads(first)["size_bytes"]
    (total,) = shown["totals"]
    total["count"] -= 1
    total["size_bytes"] -= json.loads(first)["size_bytes"]
    summary.write_text(json.dumps(shown))
    assert "1 missed" in two_commits.run("collect", "verify-plan", "plan", code=3).stdout


def test_a_plan_that_is_none_is_refused(two_commits: Shell) -> None:
    (two_commits.directory / "empty").mkdir()
    two_commits.refused("collect", "verify-plan", "empty", code=2)
    two_commits.run("collect", "verify-plan", "absent", code=2)

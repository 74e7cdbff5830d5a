"""What `verify` finds and `collect` deletes, as people run them."""

import json
from pathlib import Path
from typing import Any

import pytest

from blobstore.base import DeleteFailure
from blobstore.errors import StoreUnavailableError
from blobstore.local.store import LocalStore
from tests.integration.conftest import FIRST, Shell


def _blob(shell: Shell, size_bytes: int) -> Path:
    """The file of the repository that has this size."""
    return next(
        p
        for p in (shell.directory / "repository" / "blobs").rglob("*")
        if p.is_file() and p.stat().st_size >= size_bytes
    )


@pytest.mark.parametrize(
    "damage, level, kind",
    [("remove", "existence", "blob_missing"), ("cut", "existence", "blob_short"), ("flip", "content", "content_wrong")],
)
def test_damage_is_found_and_ends_with_4(two_commits: Shell, damage: str, level: str, kind: str) -> None:
    shell = two_commits
    blob = _blob(shell, 300_000)
    data = bytearray(blob.read_bytes())
    blob.unlink()
    if damage == "cut":
        blob.write_bytes(data[:1000])
    elif damage == "flip":
        data[100] ^= 1
        blob.write_bytes(data)
    report = shell.result("verify", "--level", level, code=4)
    assert report["damaged"]
    assert {p["kind"] for p in report["problems"]} == {kind}
    assert "damage" in shell.run("verify", "--level", level, code=4).stdout
    damaged = [
        shell.run("restore", f"target-{n}", "--number", str(n), "-q", code=4).stderr
        for n in (1, 2)
        if _needs(shell, n, blob)
    ]
    assert damaged
    # Which of the two it hurts is random: where the other one is whole, the hint names it.
    assert all("`tidemark repair`" in text for text in damaged)
    assert not list(shell.directory.glob("target-*"))


def _needs(shell: Shell, number: int, blob: Path) -> bool:
    store = shell.result("show", str(number), "--files")["stores"][0]
    return any(b["key"].endswith(blob.name) for f in store["files"] for b in f["blobs"])


def test_a_sample_reads_a_part(shell: Shell) -> None:
    shell.run("init")
    shell.run("backup", str(shell.tree("source", {f"f{i}": bytes([i]) * 100 for i in range(200)})))
    report = shell.result("verify", "--level", "content", "--sample", "25%", "--seed", "1")
    assert 20 < report["files_read"] < 80
    assert report["sample"] == 0.25
    assert shell.result("verify", "--level", "content")["files_read"] == 200


def test_a_ttl_that_is_left_is_reported_and_healed(two_commits: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = two_commits

    async def fail(*args: object, **kwargs: object) -> None:
        raise StoreUnavailableError("no answer", operation="remove_ttl")

    with monkeypatch.context() as broken:
        broken.setattr("engine.commit.writer.settle_keys", fail)
        shown = shell.result("backup", str(shell.tree("source", FIRST)))
        assert not shown["settled"]
    report = shell.result("verify", code=3)
    assert {p["kind"] for p in report["problems"]} == {"at_risk"}
    assert not report["damaged"]
    assert "run with --heal" in shell.run("verify", code=3).stdout
    assert all(p["healed"] for p in shell.result("verify", "--heal")["problems"])
    assert shell.result("verify")["problems"] == []


def test_keys_that_cannot_be_deleted_end_with_3(two_commits: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = two_commits
    shell.grow_old()
    delete = LocalStore.delete

    async def refuse_blobs(self: LocalStore, keys: list[str], **kwargs: Any) -> tuple[DeleteFailure, ...]:
        refused = tuple(DeleteFailure(key=key, reason="locked") for key in keys if key.startswith("blobs/"))
        return (*refused, *await delete(self, [k for k in keys if not k.startswith("blobs/")], **kwargs))

    monkeypatch.setattr(LocalStore, "delete", refuse_blobs)
    assert shell.result("collect", "--keep-last", "1", code=3)["failed"]
    assert "NOT deleted" in shell.run("collect", "--keep-last", "1", code=3).stdout


def test_collect_reports_each_key_with_its_reason(two_commits: Shell) -> None:
    shell = two_commits
    summary = shell.run("collect", "--keep-last", "1", "-n").stdout
    assert "commit record closed by a boundary" in summary
    assert "log/flights" not in summary
    assert "unreachable, and younger than the TTL: 2 uploads" in summary
    verbose = shell.run("collect", "--keep-last", "1", "-n", "-v").stdout
    assert "log/flights/00000000000000000001.commit" in verbose
    assert "would delete" in verbose
    for words in (("collect",), ("collect", "explain", "log/flights/00000000000000000001.commit")):
        refused = shell.refused(*words, "--keep-since", "2100-01-01", code=2)
        assert "is yet to come" in refused["message"]
    text = shell.run("collect", "--keep-since", "0s").stdout
    assert "deleted" in text
    assert [c["number"] for c in shell.result("list")["commits"]] == [2]


def test_a_collection_that_would_delete_too_much_ends_with_10_and_its_plan_can_be_read(two_commits: Shell) -> None:
    shell = two_commits
    shell.grow_old()
    shell.environment["TIDEMARK_COLLECT_DELETE_AT_MOST"] = "1%"
    refused = shell.refused("collect", "--keep-last", "1", code=10)
    assert (refused["error"], str(refused["subject"]).split("/")[0]) == ("TooMuchToDeleteError", "audit")
    assert len(shell.result("list")["commits"]) == 2
    planned = shell.result("collect", "--keep-last", "1", "-n", code=10)
    assert Path(str(planned["plan"])).name == planned["run"]
    assert planned["refused"]
    plan = Path(planned["plan"])
    assert plan.is_relative_to(shell.directory / "xdg_cache_home")
    lines = [line for path in plan.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == json.loads((plan / "summary.json").read_text())["lines_count"] > 0
    words = ("collect", "--keep-last", "1", "--delete-at-most", "100%", "--plan", "my plan", "--one-line")
    shown = shell.run(*words).stdout
    assert shown.startswith("deleted ")
    assert shown.count("\n") == 1
    assert (shell.directory / "my plan" / "plan.json").exists()
    assert shell.refused(*words, code=9)["error"] == "TargetError"


def test_each_job_has_a_rule_of_its_own(two_commits: Shell) -> None:
    shell = two_commits
    shell.run("fork", "1", "replay")
    (shell.directory / "rules.toml").write_text(
        '[[job]]\nmatch = "fl*"\nkeep_last = 1\n[[job]]\nmatch = "misspelt"\nkeep_since = "7d"\n'
    )
    result = shell.run("collect", "--policy", "rules.toml", "-v")
    assert "'misspelt' matches no job" in result.stderr
    assert "all is kept of replay: no rule matches" in result.stderr
    assert [c["number"] for c in shell.result("list")["commits"]] == [2]
    assert "no rule" not in result.stdout
    assert shell.refused("collect", "--policy", "rules.toml", "--keep-last", "1", code=2)["error"] == "UsageError"
    assert shell.refused("collect", "--keep-last", "1", "explained", code=2)["error"] == "UsageError"
    early = shell.refused("collect", "--keep-last", "1", "explain", "KEY", code=2)
    assert "--keep-last is before explain" in early["message"]

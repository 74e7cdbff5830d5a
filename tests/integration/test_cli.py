"""The whole way of a user through the command line, on a store of files and small directories."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from blobstore.base import DeleteFailure
from blobstore.errors import StoreUnavailableError
from blobstore.local import LocalStore
from engine.cli import tidemark
from index.samza_json import decode_samza_index, from_samza

ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


class Shell:
    """A user's shell: a directory to work in, a repository, and nothing left over from other users."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Of a repository with two commits a collection takes most.
        self.environment = {
            "TIDEMARK_REPOSITORY": f"file://{directory}/repository",
            "TIDEMARK_JOB": "flights",
            "TIDEMARK_COLLECT_DELETE_AT_MOST": "100%",
        }

    def run(self, *words: str, code: int = 0, **environment: str) -> Result:
        """Run a command line that ends with `code`."""
        result = CliRunner().invoke(tidemark, list(words), env={**self.environment, **environment})
        assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.output
        return result

    def told(self, *words: str, code: int = 0) -> dict[str, Any]:
        """The JSON object of a run that ends with `code`; progress and other noise would break it."""
        result = self.run(*words, "--json", code=code)
        assert result.stderr == ""
        told: dict[str, Any] = json.loads(result.stdout)
        assert (told["schema"], told["verb"]) == (1, words[0])
        return told

    def refused(self, *words: str, code: int) -> dict[str, Any]:
        """The JSON object of an error."""
        result = self.run(*words, "--json", code=code)
        assert result.stdout == ""
        failure: dict[str, Any] = json.loads(result.stderr)
        assert failure.keys() == {"schema", "error", "code", "operation", "subject", "message", "hint", "causes"}
        assert (failure["schema"], failure["code"]) == (1, code)
        assert failure["hint"]
        return failure

    def tree(self, name: str, files: dict[str, bytes]) -> Path:
        """A directory with exactly these files."""
        root = self.directory / name
        for path in sorted(root.rglob("*"), reverse=True) if root.exists() else []:
            path.rmdir() if path.is_dir() else path.unlink()
        for path_, data in files.items():
            path = root / path_
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return root


def content(root: Path) -> dict[str, bytes]:
    """The files below a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


FIRST = {"000001.sst": b"1" * 400_000, "CURRENT": b"MANIFEST-1\n", "small/a": b"a" * 5000, "small/b": b"b" * 6000}
SECOND = {**FIRST, "000002.sst": b"2" * 300_000, "CURRENT": b"MANIFEST-2\n", "small/b": b"B" * 7000}
del SECOND["small/a"]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A shell in an empty directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    return Shell(tmp_path)


@pytest.fixture
def two_commits(shell: Shell) -> Shell:
    """A repository with two commits of one directory, versions 8 and 9."""
    shell.run("init", "--margin", "30m")
    shell.run("backup", str(shell.tree("source", FIRST)), "--version", "8", "--offsets", "2013-07")
    shell.run("backup", str(shell.tree("source", SECOND)), "--offsets", "2013-08")
    return shell


def test_the_whole_journey(two_commits: Shell) -> None:
    shell = two_commits
    commits = shell.told("list")["commits"]
    assert [(c["number"], c["version"], c["offsets"], c["files_count"], c["kind"]) for c in commits] == [
        (2, 9, "2013-08", 4, "commit"),
        (1, 8, "2013-07", 4, "commit"),
    ]
    # By version, time, name and number, each into a directory of its own.
    shell.run("name", "v8", "before-upgrade")
    shell.run("restore", "by-version", "--version", "8")
    shell.run("restore", "by-time", "--at", commits[1]["committed_at"])
    shell.run("restore", "by-name", "--name", "before-upgrade")
    shell.run("restore", "by-number", "--number", "1")
    for target in ("by-version", "by-time", "by-name", "by-number"):
        assert content(shell.directory / target) == FIRST
    shell.run("restore", "latest")
    assert content(shell.directory / "latest") == SECOND

    difference = shell.told("diff", "1", "v9")["stores"][0]
    assert [f["path"] for f in difference["added"]] == ["000002.sst"]
    assert [f["path"] for f in difference["removed"]] == ["small/a"]
    assert [(f["path"], f["before_bytes"], f["after_bytes"]) for f in difference["changed"]] == [
        ("CURRENT", 11, 11),
        ("small/b", 6000, 7000),
    ]
    assert (difference["unchanged_count"], difference["unchanged_bytes"]) == (1, 400_000)

    assert shell.told("verify", "--level", "content")["problems"] == []
    made = shell.told("rewind", "before-upgrade")
    assert (made["commit"]["number"], made["commit"]["kind"], made["source_number"]) == (3, "rewind", 1)
    shell.run("restore", "rewound")
    assert content(shell.directory / "rewound") == FIRST
    forked = shell.told("fork", "9_" + difference["after_unique_id"], "replay")
    assert (forked["commit"]["job"], forked["commit"]["number"]) == ("replay", 1)
    assert [(s["job"], s["newest"]["number"]) for s in shell.told("list", "--jobs")["scopes"]] == [
        ("flights", 3),
        ("replay", 1),
    ]

    planned = shell.told("collect", "--keep-last", "1", "--dry-run")
    assert planned["dry_run"]
    assert len(shell.told("list")["commits"]) == 3
    collected = shell.told("collect", "--keep-last", "1")
    assert collected["failed"] == []
    # Record 2 goes; its snapshot stays, because the fork carries it. Record 1 stays for its name.
    assert {(k["job"], k["number"], k["reason"]) for k in collected["kept"]} == {
        ("flights", 3, "newest"),
        ("flights", 1, "named"),
        ("replay", 1, "newest"),
    }
    assert {d["key"] for d in planned["deleted"]} <= {d["key"] for d in collected["deleted"]}
    shell.run("unname", "before-upgrade")
    shell.run("collect", "--keep-last", "1")
    assert [c["number"] for c in shell.told("list")["commits"]] == [3]
    assert shell.told("verify", "--level", "content")["problems"] == []
    shell.run("restore", "replayed", TIDEMARK_JOB="replay")
    assert content(shell.directory / "replayed") == SECOND
    # Two collections after the last reader nothing is left over (D7).
    shell.run("collect", "--keep-last", "1")
    assert shell.told("collect", "--keep-last", "1")["deleted"] == []


@pytest.mark.parametrize("words", [("rewind", "1"), ("fork", "1", "replay"), ("name", "1", "kept")])
def test_rewind_fork_and_name_work_with_the_times_that_init_chooses(shell: Shell, words: tuple[str, ...]) -> None:
    shell.run("init")
    shell.run("backup", str(shell.tree("source", FIRST)))
    shell.run(*words)
    assert words[0] != "name" or shell.told("list")["commits"][0]["names"] == ["kept"]


def test_a_name_keeps_a_commit_that_retention_has_taken(two_commits: Shell) -> None:
    shell = two_commits
    shell.run("name", "1", "kept")
    shell.run("collect", "--keep-last", "1", "--no-keep-named")
    commits = shell.told("list")["commits"]
    assert [(c["number"], c["kind"], c["names"]) for c in commits] == [(2, "commit", []), (1, "named", ["kept"])]
    assert shell.told("verify", "--level", "content")["commits_count"] == 2
    shell.run("restore", "target", "--name", "kept")
    assert content(shell.directory / "target") == FIRST


def test_a_released_name_is_free_again_at_once(two_commits: Shell) -> None:
    shell = two_commits
    shell.run("name", "1", "kept")
    shell.run("name", "1", "kept")
    assert shell.refused("name", "2", "kept", code=2)["hint"] == "choose another name, or release it"
    shell.run("unname", "kept")
    assert shell.refused("unname", "kept", code=7)["error"] == "NotFoundError"
    assert shell.told("name", "2", "kept")["number"] == 2
    shell.run("collect", "--keep-last", "5")
    assert shell.told("show", "kept")["commit"]["number"] == 2


def test_show_tells_files_blobs_packs_and_lineage(two_commits: Shell) -> None:
    shown = two_commits.told("show", "--files")
    store = shown["stores"][0]
    assert (shown["commit"]["number"], shown["predecessor_number"]) == (2, 1)
    assert (store["task"], store["store"], store["version"], store["since_number"]) == ("0", "default", 9, 2)
    assert [item["version"] for item in store["lineage"]] == [8]
    files = {f["path"]: f for f in store["files"]}
    assert {path: (f["stored"], f["size_bytes"]) for path, f in files.items()} == {
        "000001.sst": ("blob", 400_000),
        "000002.sst": ("blob", 300_000),
        "CURRENT": ("inline", 11),
        "small/b": ("blob", 7000),
    }
    assert all(ISO.fullmatch(f["modified_at"]) for f in files.values())
    assert two_commits.told("show", "1")["stores"][0]["packs"][0]["size_bytes"] == 11_000
    text = two_commits.run("show", "--files").stdout
    assert "000002.sst" in text
    assert "lineage  8_" in text


def test_dead_bytes_of_a_pack_are_shown(shell: Shell) -> None:
    shell.run("init")
    files = {f"f{i}": bytes([i]) * 5000 for i in range(10)}
    shell.run("backup", str(shell.tree("source", files)))
    del files["f3"], files["f4"]
    shell.run("backup", str(shell.tree("source", files)))
    store = shell.told("show")["stores"][0]
    assert [(p["size_bytes"], p["live_bytes"], p["dead_bytes"]) for p in store["packs"]] == [(50_000, 40_000, 10_000)]
    assert store["dead_bytes"] == 10_000
    assert "9.8 KiB" in shell.run("show").stdout


def test_a_dry_run_of_a_backup_sends_nothing(shell: Shell) -> None:
    shell.run("init")
    source = str(shell.tree("source", FIRST))
    before = content(shell.directory / "repository")
    plan = shell.told("backup", source, "--dry-run")
    assert plan["dry_run"]
    assert (plan["files_added"], plan["bytes_added"], plan["files_retained"]) == (4, 411_011, 0)
    assert (plan["packs_count"], plan["packs_bytes"], plan["files_inline"], plan["bytes_inline"]) == (1, 11_000, 1, 11)
    assert (plan["uploads_count"], plan["upload_bytes"]) == (2, 411_000)
    assert plan["files"] == sorted(FIRST)
    assert content(shell.directory / "repository") == before
    text = shell.run("backup", source, "-n").stdout
    assert "nothing was sent" in text
    done = shell.told("backup", source)["stats"]
    assert (done["files_added"], done["bytes_uploaded"], done["blobs"]) == (4, plan["upload_bytes"], 2)


def test_a_dry_run_of_a_restore_writes_nothing_and_tells_what_would_be_reused(two_commits: Shell) -> None:
    shell = two_commits
    plan = shell.told("restore", "target", "--dry-run")["stores"][0]
    assert (plan["files_fetched"], plan["files_reused"], plan["files_inline"]) == (3, 0, 1)
    assert not (shell.directory / "target").exists()
    shell.run("restore", "target")
    plan = shell.told("restore", "target", "--version", "8", "--replace", "--dry-run")["stores"][0]
    assert plan["reused"] == ["000001.sst"]
    assert plan["fetched"] == ["small/a", "small/b"]
    assert content(shell.directory / "target") == SECOND
    done = shell.told("restore", "target", "--version", "8", "--replace")["stores"][0]["result"]
    assert (done["files_reused"], done["bytes_reused"], done["files_fetched"]) == (1, 400_000, 2)
    assert content(shell.directory / "target") == FIRST
    assert shell.refused("restore", "target", "-n", code=9)["error"] == "TargetError"


def test_several_backups_become_one_commit(shell: Shell) -> None:
    shell.run("init")
    results = []
    for task in ("0", "1", "../2"):
        source = str(shell.tree("source", {"state": task.encode() * 1000}))
        result = f"result-{task.replace('/', '-')}.json"
        told = shell.told("backup", source, "--task", task, "--no-commit", "--result", result)
        assert (told["commit"], told["result_file"]) == (None, result)
        results.append(result)
    assert shell.told("list", "--jobs")["scopes"] == []
    made = shell.told("commit", *results, "--offsets", "42", "--version", "7")
    assert (made["commit"]["version"], made["commit"]["offsets"], made["commit"]["stores_count"]) == (7, "42", 3)
    assert (made["already"], made["settled"]) == (False, True)
    # Running it again finds what stands; saying something else is a conflict.
    assert shell.told("commit", *results, "--offsets", "42")["already"]
    assert shell.refused("commit", *results, "--offsets", "43", code=6)["error"] == "StaleResultError"
    restored = shell.told("restore", "all", "--all")["stores"]
    assert [r["failure"] for r in restored] == [None] * 3
    # A task's name cannot lead out of the target.
    assert content(shell.directory / "all") == {
        "0/default/state": b"0" * 1000,
        "1/default/state": b"1" * 1000,
        "~2E.~2F2/default/state": b"../2" * 1000,
    }
    plans = shell.told("restore", "elsewhere", "--all", "--dry-run")["stores"]
    assert [p["target"] for p in plans] == [f"elsewhere/{p}/default" for p in ("~2E.~2F2", "0", "1")]


def test_a_store_that_cannot_be_restored_does_not_keep_the_others_from_it(shell: Shell) -> None:
    shell.run("init")
    for store in ("a", "b"):
        shell.run("backup", str(shell.tree("source", {"state": store.encode()})), "--store", store)
    shell.tree("all/0/a", {"in the way": b""})
    told = shell.told("restore", "all", "--all", code=3)
    first, second = told["stores"]
    assert (first["result"], first["failure"]["error"], first["failure"]["code"]) == (None, "TargetError", 9)
    assert second["failure"] is None
    assert content(shell.directory / "all") == {"0/a/in the way": b"", "0/b/state": b"b"}
    text = shell.run("restore", "all", "--all", "--replace", "--dry-run").stdout
    assert "all/0/a" in text
    # If none came back, that is no part of a success.
    shell.tree("all/0/b", {"in the way": b""})
    assert "FAILED" not in shell.run("restore", "all", "--all", code=9).stdout


def test_a_job_may_commit_task_by_task(shell: Shell) -> None:
    shell.run("init")
    for task in ("0", "1"):
        source = str(shell.tree("source", {"state": task.encode()}))
        shell.run("backup", source, "--commit-per-task", "--task", task)
    shell.run("backup", str(shell.tree("source", {"state": b"one"})), "--commit-per-task", "--task", "1")
    assert [(s["commit_task"], s["newest"]["number"]) for s in shell.told("list", "--jobs")["scopes"]] == [
        ("0", 1),
        ("1", 2),
    ]
    assert len(shell.told("list", "--commit-per-task", "--task", "1")["commits"]) == 2
    shell.run("restore", "target", "--commit-per-task", "--task", "1", "--number", "2")
    assert content(shell.directory / "target") == {"state": b"one"}
    failure = shell.refused("list", code=7)
    assert failure["hint"] == "the job commits task by task: use --commit-per-task with --task 0, 1"
    assert shell.refused("backup", str(shell.directory / "source"), code=2)["error"] == "UsageError"
    shell.run("collect", "--keep-last", "1")
    assert [c["number"] for c in shell.told("list", "--commit-per-task", "--task", "1")["commits"]] == [2]
    result = str(shell.directory / "result.json")
    shell.run("backup", str(shell.directory / "source"), "--commit-per-task", "--no-commit", "--result", result)
    shell.refused("commit", result, code=2)
    assert shell.told("commit", result, "--commit-per-task")["commit"]["commit_task"] == "0"


def test_a_second_backup_does_not_read_what_it_knows(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.run("init")
    source = shell.tree("source", {"big": b"x" * 300_000})
    monkeypatch.setattr("engine.digest_cache.SETTLING_TIME_MS", -1)
    shell.run("backup", str(source))
    repository_id = shell.told("init", "-r", "memory://other")["repository_id"]
    caches = [p for p in (shell.directory / "xdg_cache_home" / "tidemark").iterdir() if p.name != repository_id]
    assert [p.suffix for p in caches[0].iterdir()] == [".digests"]

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a file was read")

    monkeypatch.setattr("engine.identify._map_read", fail)
    assert shell.told("backup", str(source), "-n")["files_retained"] == 1
    # Without the cache it has to read.
    assert "a file was read" in shell.run("backup", str(source), "-n", "--no-cache", code=1).stderr


def test_a_cache_that_cannot_be_kept_is_a_warning(shell: Shell) -> None:
    shell.run("init")
    (shell.directory / "cache").write_text("this is no directory")
    source = str(shell.tree("source", FIRST))
    result = shell.run("backup", source, "--cache-dir", "cache")
    assert result.stderr.startswith("warning: file hashes are not remembered")
    assert "commit 1 of flights" in result.stdout


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
    report = shell.told("verify", "--level", level, code=4)
    assert report["damaged"]
    assert {p["kind"] for p in report["problems"]} == {kind}
    assert "damage" in shell.run("verify", "--level", level, code=4).stdout
    damaged = [
        shell.run("restore", f"target-{n}", "--number", str(n), "-q", code=4).stderr
        for n in (1, 2)
        if _needs(shell, n, blob)
    ]
    assert damaged
    # Which of the two it hurts is chance: where the other one is whole, the hint names it.
    assert all("hint: run `tidemark verify`" in text or "complete" in text for text in damaged)
    assert not list(shell.directory.glob("target-*"))


def _needs(shell: Shell, number: int, blob: Path) -> bool:
    store = shell.told("show", str(number), "--files")["stores"][0]
    return any(b["key"].endswith(blob.name) for f in store["files"] for b in f["blobs"])


def test_a_sample_reads_a_part(shell: Shell) -> None:
    shell.run("init")
    shell.run("backup", str(shell.tree("source", {f"f{i}": bytes([i]) * 100 for i in range(200)})))
    report = shell.told("verify", "--level", "content", "--sample", "25%", "--seed", "1")
    assert 20 < report["files_read"] < 80
    assert report["sample"] == 0.25
    assert shell.told("verify", "--level", "content")["files_read"] == 200


def test_a_ttl_that_is_left_is_told_and_healed(two_commits: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = two_commits

    async def fail(*args: object, **kwargs: object) -> None:
        raise StoreUnavailableError("no answer", operation="remove_ttl")

    with monkeypatch.context() as broken:
        broken.setattr("engine.commit.settle_keys", fail)
        told = shell.told("backup", str(shell.tree("source", FIRST)))
        assert not told["settled"]
    report = shell.told("verify", code=3)
    assert {p["kind"] for p in report["problems"]} == {"at_risk"}
    assert not report["damaged"]
    assert "run with --heal" in shell.run("verify", code=3).stdout
    assert all(p["healed"] for p in shell.told("verify", "--heal")["problems"])
    assert shell.told("verify")["problems"] == []


def test_keys_that_cannot_be_deleted_end_with_3(two_commits: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = two_commits
    delete = LocalStore.delete

    async def refuse_blobs(self: LocalStore, keys: list[str], **kwargs: Any) -> tuple[DeleteFailure, ...]:
        refused = tuple(DeleteFailure(key=key, reason="locked") for key in keys if key.startswith("blobs/"))
        return (*refused, *await delete(self, [k for k in keys if not k.startswith("blobs/")], **kwargs))

    monkeypatch.setattr(LocalStore, "delete", refuse_blobs)
    assert shell.told("collect", "--keep-last", "1", code=3)["failed"]
    assert "NOT deleted" in shell.run("collect", "--keep-last", "1", code=3).stdout


def test_collect_tells_each_key_with_its_reason(two_commits: Shell) -> None:
    shell = two_commits
    summary = shell.run("collect", "--keep-last", "1", "-n").stdout
    assert "commit record closed by a boundary" in summary
    assert "log/flights" not in summary
    verbose = shell.run("collect", "--keep-last", "1", "-n", "-v").stdout
    assert "log/flights/00000000000000000001.commit" in verbose
    assert "would delete" in verbose
    text = shell.run("collect", "--keep-since", "2100-01-01").stdout
    assert "deleted" in text
    assert [c["number"] for c in shell.told("list")["commits"]] == [2]


def test_a_collection_that_would_delete_too_much_ends_with_10_and_its_plan_can_be_read(two_commits: Shell) -> None:
    shell = two_commits
    shell.environment["TIDEMARK_COLLECT_DELETE_AT_MOST"] = "1%"
    refused = shell.refused("collect", "--keep-last", "1", code=10)
    assert (refused["error"], str(refused["subject"]).split("/")[0]) == ("TooMuchToDeleteError", "audit")
    assert len(shell.told("list")["commits"]) == 2
    planned = shell.told("collect", "--keep-last", "1", "-n", code=10)
    assert Path(str(planned["plan"])).name == planned["run"]
    assert planned["refused"]
    plan = Path(planned["plan"])
    assert plan.is_relative_to(shell.directory / "xdg_cache_home")
    lines = [line for path in plan.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == json.loads((plan / "summary.json").read_text())["lines_count"] > 0
    words = ("collect", "--keep-last", "1", "--delete-at-most", "100%", "--plan", "my plan", "--one-line")
    told = shell.run(*words).stdout
    assert told.startswith("deleted ")
    assert told.count("\n") == 1
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
    assert [c["number"] for c in shell.told("list")["commits"]] == [2]
    assert "no rule" not in result.stdout
    assert shell.refused("collect", "--policy", "rules.toml", "--keep-last", "1", code=2)["error"] == "UsageError"
    assert shell.refused("collect", "--keep-last", "1", "explained", code=2)["error"] == "UsageError"
    early = shell.refused("collect", "--keep-last", "1", "explain", "KEY", code=2)
    assert "--keep-last stands before explain" in early["message"]


@pytest.mark.parametrize(
    "words, code, error",
    [
        (("show", "99"), 7, "NotFoundError"),
        (("show", "v99"), 7, "NotFoundError"),
        (("show", "nobody"), 7, "NotFoundError"),
        (("show", "@2000-01-01"), 7, "NotFoundError"),
        (("show", "--store", "none"), 7, "NotFoundError"),
        (("diff", "1", "2", "--store", "none"), 7, "NotFoundError"),
        (("restore", "target", "--store", "none"), 7, "NotFoundError"),
        (("restore", "target", "--number", "99"), 7, "NotFoundError"),
        (("unname", "nobody"), 7, "NotFoundError"),
        (("list", "--job", "nobody"), 7, "NotFoundError"),
        (("verify", "--job", "nobody"), 7, "NotFoundError"),
        (("restore", "source"), 9, "TargetError"),
        (("init",), 2, "UsageError"),
        (("init", "--ttl", "1h"), 2, "UsageError"),
        (("fork", "1", "flights"), 2, "UsageError"),
        (("backup", "source", "--version", "3"), 2, "UsageError"),
        (("backup", "source", "--no-commit"), 2, "UsageError"),
        (("backup", "source", "--no-commit", "--result", "r", "--offsets", "x"), 2, "UsageError"),
        (("commit", "source/CURRENT"), 2, "UsageError"),
    ],
)
def test_each_refusal_has_its_exit_code(two_commits: Shell, words: tuple[str, ...], code: int, error: str) -> None:
    assert two_commits.refused(*words, code=code)["error"] == error


def test_what_is_not_there_is_explained_by_what_is(two_commits: Shell) -> None:
    assert two_commits.refused("show", "--job", "fligths", code=7)["hint"] == "the repository has flights"
    assert two_commits.refused("restore", "t", "--store", "x", code=7)["hint"] == "it has 0/default"


def test_nothing_is_printed_with_quiet(two_commits: Shell) -> None:
    for words in (("list",), ("show",), ("verify",), ("restore", "target"), ("collect", "--keep-last", "5")):
        assert two_commits.run(*words, "--quiet").output == ""
    assert two_commits.run("show", "99", "-q", code=7).stderr


def test_a_traceback_is_shown_only_for_debug(two_commits: Shell) -> None:
    result = CliRunner().invoke(tidemark, ["show", "99", "--debug"], env=two_commits.environment)
    assert result.exit_code == 7
    assert result.stderr.startswith("Traceback")
    assert "\nerror: " in result.stderr


def test_text_from_the_store_cannot_steer_the_terminal(shell: Shell) -> None:
    shell.run("init")
    source = str(shell.tree("source", {"name\x1b[2J": b"x"}))
    shell.run("backup", source, "--offsets", "\x1b[31mred\n", "--job", "j\x07b")
    for words in (("list",), ("list", "--jobs"), ("show", "--files"), ("diff", "1"), ("restore", "target")):
        text = shell.run(*words, "--job", "j\x07b").output
        assert not {c for c in text if not c.isprintable()} - {"\n"}


def test_export_writes_samzas_index_and_keeps_what_it_refers_to(two_commits: Shell) -> None:
    output = two_commits.directory / "index.json"
    refused = two_commits.refused("export", "latest", str(output), code=2)
    assert "--unpack" in refused["hint"]
    exported = two_commits.told("export", "latest", str(output), "--unpack")
    index = decode_samza_index(output.read_bytes(), blob_id="index.json")
    assert {"/".join(file.path) for file in from_samza(index).files} == set(SECOND)
    two_commits.refused("export", "latest", str(output), "--unpack", code=9)
    two_commits.run("collect", "--keep-last", "1")
    listed = two_commits.told("list", "--job", "flights.samza")
    assert listed["commits"][0]["names"] == [exported["name"]]

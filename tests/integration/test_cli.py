"""The whole way of a user through the command line, on a store of files and small directories."""

import re

import pytest

from index.samza.format import decode_samza_index
from tests.integration.conftest import FIRST, SECOND, Shell, content

ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def test_the_whole_journey(two_commits: Shell) -> None:
    shell = two_commits
    commits = shell.result("list")["commits"]
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
    late = shell.run("restore", "late", "--at", "2999-01-01T00:00:00Z")
    assert "2999-01-01T00:00:00.000Z is yet to come: the newest is taken" in late.stderr
    assert content(shell.directory / "late") == SECOND
    assert "yet to come" not in shell.run("restore", "latest").stderr
    assert content(shell.directory / "latest") == SECOND

    difference = shell.result("diff", "1", "v9")["stores"][0]
    assert [f["path"] for f in difference["added"]] == ["000002.sst"]
    assert [f["path"] for f in difference["removed"]] == ["small/a"]
    assert [(f["path"], f["before_bytes"], f["after_bytes"]) for f in difference["changed"]] == [
        ("CURRENT", 11, 11),
        ("small/b", 6000, 7000),
    ]
    assert (difference["unchanged_count"], difference["unchanged_bytes"]) == (1, 400_000)

    assert shell.result("verify", "--level", "content")["problems"] == []
    made = shell.result("rewind", "before-upgrade")
    assert (made["commit"]["number"], made["commit"]["kind"], made["source_number"]) == (3, "rewind", 1)
    shell.run("restore", "rewound")
    assert content(shell.directory / "rewound") == FIRST
    forked = shell.result("fork", "9_" + difference["after_unique_id"], "replay")
    assert (forked["commit"]["job"], forked["commit"]["number"]) == ("replay", 1)
    assert [(s["job"], s["newest"]["number"]) for s in shell.result("list", "--jobs")["scopes"]] == [
        ("flights", 3),
        ("replay", 1),
    ]

    planned = shell.result("collect", "--keep-last", "1", "--dry-run")
    assert planned["dry_run"]
    assert len(shell.result("list")["commits"]) == 3
    collected = shell.result("collect", "--keep-last", "1")
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
    assert [c["number"] for c in shell.result("list")["commits"]] == [3]
    assert shell.result("verify", "--level", "content")["problems"] == []
    shell.run("restore", "replayed", TIDEMARK_JOB="replay")
    assert content(shell.directory / "replayed") == SECOND
    # Two collections after the last reader nothing is left over (D7).
    shell.run("collect", "--keep-last", "1")
    assert shell.result("collect", "--keep-last", "1")["deleted"] == []


@pytest.mark.parametrize("words", [("rewind", "1"), ("fork", "1", "replay"), ("name", "1", "kept")])
def test_rewind_fork_and_name_work_with_the_times_that_init_chooses(shell: Shell, words: tuple[str, ...]) -> None:
    shell.run("init")
    shell.run("backup", str(shell.tree("source", FIRST)))
    shell.run(*words)
    assert words[0] != "name" or shell.result("list")["commits"][0]["names"] == ["kept"]


def test_a_name_keeps_a_commit_that_retention_has_taken(two_commits: Shell) -> None:
    shell = two_commits
    shell.run("name", "1", "kept")
    shell.run("collect", "--keep-last", "1", "--no-keep-named")
    commits = shell.result("list")["commits"]
    assert [(c["number"], c["kind"], c["names"]) for c in commits] == [(2, "commit", []), (1, "named", ["kept"])]
    assert shell.result("verify", "--level", "content")["commits_count"] == 2
    shell.run("restore", "target", "--name", "kept")
    assert content(shell.directory / "target") == FIRST


def test_a_released_name_is_free_again_at_once(two_commits: Shell) -> None:
    shell = two_commits
    shell.run("name", "1", "kept")
    shell.run("name", "1", "kept")
    assert shell.refused("name", "2", "kept", code=2)["hint"] == "choose another name, or release it"
    shell.run("unname", "kept")
    assert shell.refused("unname", "kept", code=7)["error"] == "NotFoundError"
    assert shell.result("name", "2", "kept")["number"] == 2
    shell.run("collect", "--keep-last", "5")
    assert shell.result("show", "kept")["commit"]["number"] == 2


def test_show_reports_files_blobs_packs_and_lineage(two_commits: Shell) -> None:
    shown = two_commits.result("show", "--files")
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
    assert two_commits.result("show", "1")["stores"][0]["packs"][0]["size_bytes"] == 11_000
    text = two_commits.run("show", "--files").stdout
    assert "000002.sst" in text
    assert "lineage  8_" in text


def test_dead_bytes_of_a_pack_are_shown(shell: Shell) -> None:
    shell.run("init")
    files = {f"f{i}": bytes([i]) * 5000 for i in range(10)}
    shell.run("backup", str(shell.tree("source", files)))
    del files["f3"], files["f4"]
    shell.run("backup", str(shell.tree("source", files)))
    store = shell.result("show")["stores"][0]
    assert [(p["size_bytes"], p["live_bytes"], p["dead_bytes"]) for p in store["packs"]] == [(50_000, 40_000, 10_000)]
    assert store["dead_bytes"] == 10_000
    assert "9.8 KiB" in shell.run("show").stdout


def test_a_dry_run_of_a_backup_sends_nothing(shell: Shell) -> None:
    shell.run("init")
    source = str(shell.tree("source", FIRST))
    before = content(shell.directory / "repository")
    plan = shell.result("backup", source, "--dry-run")
    assert plan["dry_run"]
    assert (plan["files_added"], plan["bytes_added"], plan["files_retained"]) == (4, 411_011, 0)
    assert (plan["packs_count"], plan["packs_bytes"], plan["files_inline"], plan["bytes_inline"]) == (1, 11_000, 1, 11)
    assert (plan["uploads_count"], plan["upload_bytes"]) == (2, 411_000)
    assert plan["files"] == sorted(FIRST)
    assert content(shell.directory / "repository") == before
    text = shell.run("backup", source, "-n").stdout
    assert "nothing was sent" in text
    done = shell.result("backup", source)["stats"]
    assert (done["files_added"], done["bytes_uploaded"], done["blobs"]) == (4, plan["upload_bytes"], 2)


def test_a_dry_run_of_a_restore_writes_nothing_and_reports_what_would_be_reused(two_commits: Shell) -> None:
    shell = two_commits
    plan = shell.result("restore", "target", "--dry-run")["stores"][0]
    assert (plan["files_fetched"], plan["files_reused"], plan["files_inline"]) == (3, 0, 1)
    assert not (shell.directory / "target").exists()
    shell.run("restore", "target")
    plan = shell.result("restore", "target", "--version", "8", "--replace", "--dry-run")["stores"][0]
    assert plan["reused"] == ["000001.sst"]
    assert plan["fetched"] == ["small/a", "small/b"]
    assert content(shell.directory / "target") == SECOND
    done = shell.result("restore", "target", "--version", "8", "--replace")["stores"][0]["result"]
    assert (done["files_reused"], done["bytes_reused"], done["files_fetched"]) == (1, 400_000, 2)
    assert content(shell.directory / "target") == FIRST
    assert shell.refused("restore", "target", "-n", code=9)["error"] == "TargetError"


def test_some_files_alone_come_back(two_commits: Shell) -> None:
    shell = two_commits
    plan = shell.result("restore", "some", "--files", "*.sst", "--files", "small/*", "--dry-run")["stores"][0]
    assert plan["fetched"] == ["000001.sst", "000002.sst", "small/b"]
    shell.run("restore", "some", "--files", "*.sst", "--files", "small/*", "--version", "8")
    assert content(shell.directory / "some") == {path: data for path, data in FIRST.items() if path != "CURRENT"}
    refused = shell.refused("restore", "none", "--files", "*.log", code=7)
    assert "no file matches '*.log'" in refused["message"]
    assert not (shell.directory / "none").exists()
    for more in ((), ("--dry-run",)):
        refused = shell.refused("restore", "some", "--files", "*.sst", "--replace", *more, code=9)
        assert "would take the place" in refused["message"]


@pytest.mark.parametrize("pattern", ["", ".", "./"])
@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--all",), ("--files", "*.sst")])
def test_an_empty_pattern_is_refused_before_anything_is_opened(
    shell: Shell, pattern: str, more: tuple[str, ...]
) -> None:
    # There is no repository, and nobody has found that out.
    refused = shell.refused("restore", "deep/some", "--files", pattern, *more, code=2)
    assert refused["message"] == f"restore {pattern!r}: is an empty pattern"
    assert not (shell.directory / "deep").exists()


def test_a_dry_run_counts_the_chosen_files_and_not_the_store(two_commits: Shell) -> None:
    shell = two_commits
    words = ("restore", "some", "--files", "CURRENT")
    plan = shell.result(*words, "--dry-run")["stores"][0]
    assert (plan["files_total"], plan["bytes_total"], plan["files_inline"]) == (1, 11, 1)
    assert re.search(r" +1 +11 B +0 B +0 B +0$", shell.run(*words, "--dry-run").stdout, re.MULTILINE)
    done = shell.result(*words)["stores"][0]["result"]
    assert (done["files_total"], done["bytes_total"]) == (1, 11)


def test_a_dry_run_refuses_a_target_as_the_restore_does(two_commits: Shell) -> None:
    shell = two_commits
    (shell.directory / "link").symlink_to(shell.directory)
    shell.tree("full", {"x": b""})
    # Of two reasons the same one is given.
    for target, more in (("link", ()), ("full", ()), ("full", ("--files", "*.log")), ("full/x", ("--replace",))):
        failures = [shell.refused("restore", target, *more, *dry, code=9) for dry in ((), ("--dry-run",))]
        assert failures[0] == failures[1]


def test_a_dry_run_of_all_stores_reports_failures_store_by_store(shell: Shell) -> None:
    shell.run("init")
    results = []
    for task, files in (("0", FIRST), ("1", {"other": b"x"})):
        results.append(shell.directory / f"{task}.json")
        source = str(shell.tree(f"state{task}", files))
        shell.run("backup", source, "--task", task, "--no-commit", "--result", str(results[-1]))
    shell.run("commit", *map(str, results), "--version", "1")
    words = ("restore", "all", "--all", "--files", "*.sst")
    plan = shell.result(*words, "--dry-run", code=3)
    assert [(s["task"], s["files_total"], bool(s["failure"])) for s in plan["stores"]] == [
        ("0", 1, False),
        ("1", 0, True),
    ]
    text = shell.run(*words, "--dry-run", code=3).stdout
    assert "FAILED 1/default: restore 1/default: no file matches '*.sst'" in text
    assert "0/default" in text
    done = shell.result(*words, code=3)
    assert [s["failure"] for s in done["stores"]] == [s["failure"] for s in plan["stores"]]
    assert shell.refused("restore", "none", "--all", "--files", "*.log", "--dry-run", code=7)["subject"] == "0/default"


def test_several_backups_become_one_commit(shell: Shell) -> None:
    shell.run("init")
    results = []
    for task in ("0", "1", "../2"):
        source = str(shell.tree("source", {"state": task.encode() * 1000}))
        result = f"result-{task.replace('/', '-')}.json"
        failures = shell.result("backup", source, "--task", task, "--no-commit", "--result", result)
        assert (failures["commit"], failures["result_file"]) == (None, result)
        results.append(result)
    assert shell.result("list", "--jobs")["scopes"] == []
    made = shell.result("commit", *results, "--offsets", "42", "--version", "7")
    assert (made["commit"]["version"], made["commit"]["offsets"], made["commit"]["stores_count"]) == (7, "42", 3)
    assert (made["already"], made["settled"]) == (False, True)
    # Running it again finds what is there; saying something else is a conflict.
    assert shell.result("commit", *results, "--offsets", "42")["already"]
    assert shell.refused("commit", *results, "--offsets", "43", code=6)["error"] == "StaleResultError"
    restored = shell.result("restore", "all", "--all")["stores"]
    assert [r["failure"] for r in restored] == [None] * 3
    # A task's name cannot lead out of the target.
    assert content(shell.directory / "all") == {
        "0/default/state": b"0" * 1000,
        "1/default/state": b"1" * 1000,
        "~2E.~2F2/default/state": b"../2" * 1000,
    }
    plans = shell.result("restore", "elsewhere", "--all", "--dry-run")["stores"]
    assert [p["target"] for p in plans] == [f"elsewhere/{p}/default" for p in ("~2E.~2F2", "0", "1")]


def test_a_store_that_cannot_be_restored_does_not_keep_the_others_from_it(shell: Shell) -> None:
    shell.run("init")
    for store in ("a", "b"):
        shell.run("backup", str(shell.tree("source", {"state": store.encode()})), "--store", store)
    shell.tree("all/0/a", {"in the way": b""})
    failures = shell.result("restore", "all", "--all", code=3)
    first, second = failures["stores"]
    assert (first["result"], first["failure"]["error"], first["failure"]["code"]) == (None, "TargetError", 9)
    assert second["failure"] is None
    assert content(shell.directory / "all") == {"0/a/in the way": b"", "0/b/state": b"b"}
    text = shell.run("restore", "all", "--all", "--replace", "--dry-run").stdout
    assert "all/0/a" in text
    # If none came back, that is not partial success.
    shell.tree("all/0/b", {"in the way": b""})
    assert "FAILED" not in shell.run("restore", "all", "--all", code=9).stdout


def test_a_job_may_commit_task_by_task(shell: Shell) -> None:
    shell.run("init")
    for task in ("0", "1"):
        source = str(shell.tree("source", {"state": task.encode()}))
        shell.run("backup", source, "--commit-per-task", "--task", task)
    shell.run("backup", str(shell.tree("source", {"state": b"one"})), "--commit-per-task", "--task", "1")
    assert [(s["commit_task"], s["newest"]["number"]) for s in shell.result("list", "--jobs")["scopes"]] == [
        ("0", 1),
        ("1", 2),
    ]
    assert len(shell.result("list", "--commit-per-task", "--task", "1")["commits"]) == 2
    shell.run("restore", "target", "--commit-per-task", "--task", "1", "--number", "2")
    assert content(shell.directory / "target") == {"state": b"one"}
    failure = shell.refused("list", code=7)
    assert failure["hint"] == "the job commits task by task: use --commit-per-task with --task 0, 1"
    assert shell.refused("backup", str(shell.directory / "source"), code=2)["error"] == "UsageError"
    shell.run("collect", "--keep-last", "1")
    assert [c["number"] for c in shell.result("list", "--commit-per-task", "--task", "1")["commits"]] == [2]
    result = str(shell.directory / "result.json")
    shell.run("backup", str(shell.directory / "source"), "--commit-per-task", "--no-commit", "--result", result)
    shell.refused("commit", result, code=2)
    assert shell.result("commit", result, "--commit-per-task")["commit"]["commit_task"] == "0"


def test_a_second_backup_does_not_read_what_it_knows(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.run("init")
    source = shell.tree("source", {"big": b"x" * 300_000, "000009.sst": b"y" * 300_000})
    monkeypatch.setattr("engine.local.digests.SETTLING_TIME_NS", -(10**9))
    shell.run("backup", str(source))
    repository_id = shell.result("init", "-r", "memory://other")["repository_id"]
    caches = [p for p in (shell.directory / "xdg_cache_home" / "tidemark").iterdir() if p.name != repository_id]
    assert [p.suffix for p in caches[0].iterdir()] == [".digests"]

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a file was read")

    monkeypatch.setattr("engine.local.digests._map_read", fail)
    # What may be written through a mapping is read all the same.
    assert "a file was read" in shell.run("backup", str(source), "-n", code=1).stderr
    assert shell.result("backup", str(source), "-n", "--trust-stat")["files_retained"] == 2
    (source / "big").unlink()
    assert shell.result("backup", str(source), "-n")["files_retained"] == 1
    # Without the cache it has to read.
    assert "a file was read" in shell.run("backup", str(source), "-n", "--no-cache", code=1).stderr


def test_a_cache_that_cannot_be_kept_is_a_warning(shell: Shell) -> None:
    shell.run("init")
    (shell.directory / "cache").write_text("this is not a directory")
    source = str(shell.tree("source", FIRST))
    result = shell.run("backup", source, "--cache-dir", "cache")
    assert result.stderr.startswith("warning: file hashes are not remembered")
    assert "commit 1 of flights" in result.stdout


def test_export_writes_samzas_index_and_keeps_what_it_refers_to(two_commits: Shell) -> None:
    output = two_commits.directory / "index.json"
    refused = two_commits.refused("export", "latest", str(output), code=2)
    assert "--unpack" in refused["hint"]
    two_commits.refused("export", "latest", "nowhere/index.json", "--unpack", code=9)
    two_commits.refused("list", "--job", "flights.samza", code=7)
    exported = two_commits.result("export", "latest", str(output), "--unpack")
    index = decode_samza_index(output.read_bytes(), blob_id="index.json")
    directory = index.dir_index
    names = {file.file_name for file in directory.files_present}
    names |= {f"{sub.dir_name}/{file.file_name}" for sub in directory.sub_dirs_present for file in sub.files_present}
    assert names == set(SECOND)
    two_commits.refused("export", "latest", str(output), "--unpack", code=9)
    blobs = str(two_commits.directory / "repository")
    shown = two_commits.run("import", "samza", str(output), blobs, "--job", "taken-over").stdout
    assert f"task 0, store default: {len(SECOND)} files" in shown
    assert (
        "already, nothing to do" in two_commits.run("import", "samza", str(output), blobs, "--job", "taken-over").stdout
    )
    two_commits.run("collect", "--keep-last", "1")
    listed = two_commits.result("list", "--job", "flights.samza")
    assert listed["commits"][0]["names"] == [exported["name"]]

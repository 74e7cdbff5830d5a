"""What a command line refuses, and what it says and does not say."""

import os

import pytest
from click.testing import CliRunner

from engine.cli import tidemark
from tests.integration.conftest import Shell


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
        (("backup", "source", "--no-commit", "--result", "nowhere/r"), 9, "TargetError"),
        (("commit", "source/CURRENT"), 2, "UsageError"),
        (("spark", "collect", "source", "--plan", "p", "--undo", "-n"), 2, "UsageError"),
        (("spark", "collect", "s3a://bucket/", "--plan", "p"), 2, "UsageError"),
        (("follow", "flights", "standby", "--once", "--no-catch-up"), 2, "UsageError"),
        (("spark", "follow", "source", "target", "--status", "--partitions", "3"), 2, "UsageError"),
        (("spark", "follow", "source", "target", "--status", "--every", "1s"), 2, "UsageError"),
        (("spark", "restore", "target", "--map-path", "/in=/a", "--map-path", "/in/=/b"), 2, "UsageError"),
        (("report", "-o", "pipe"), 1, "OSError"),
    ],
)
def test_each_refusal_has_its_exit_code(two_commits: Shell, words: tuple[str, ...], code: int, error: str) -> None:
    os.mkfifo(two_commits.directory / "pipe")
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


def test_the_repository_may_be_given_as_an_argument_of_init(shell: Shell) -> None:
    assert shell.result("init", f"file://{shell.directory}/elsewhere")["repository_id"]
    assert [path.name for path in shell.directory.iterdir()] == ["elsewhere"]
    assert shell.refused("init", "a", "-r", "b", code=2)["hint"] == "give one of them"


@pytest.mark.parametrize(
    "words, order", [(("backup", "{}", "ck"), "CHECKPOINT REPO"), (("restore", "ck", "{}"), "REPO CHECKPOINT")]
)
def test_a_repository_in_place_of_a_checkpoint_is_reported(shell: Shell, words: tuple[str, ...], order: str) -> None:
    shell.run("init")
    (shell.directory / "ck").mkdir()
    places = [
        word.format(shell.environment["TIDEMARK_REPOSITORY"]).replace("ck", str(shell.directory / "ck"), 1)
        for word in words[1:]
    ]
    refused = shell.refused("spark", words[0], *places, code=2)
    assert refused["hint"] == f"exchange the two: tidemark spark {words[0]} {order}"
    assert [*(shell.directory / "ck").iterdir()] == []


def test_a_backup_names_the_verb_that_its_directory_is_for(shell: Shell) -> None:
    shell.run("init")
    checkpoint = shell.tree("query", {"metadata": b"{}", "offsets/0": b"v1", "commits/0": b"v1"})
    assert f"`tidemark spark backup {checkpoint}`" in shell.run("backup", str(checkpoint)).stderr
    tasks = shell.tree("tasks", {"0/CURRENT": b"MANIFEST-1\n", "1/CURRENT": b"MANIFEST-1\n"})
    assert "with --tasks" in shell.run("backup", str(tasks), "--job", "tasks").stderr
    one = shell.tree("one", {"CURRENT": b"MANIFEST-1\n", "below/CURRENT": b"MANIFEST-1\n"})
    assert shell.run("backup", str(one), "--job", "one").stderr == ""
    (shell.directory / "empty").mkdir()
    assert "is empty" in shell.run("backup", str(shell.directory / "empty"), "--job", "empty").stderr


def test_a_misspelt_variable_of_the_verb_is_reported_and_others_are_let_be(shell: Shell) -> None:
    shell.run("init")
    wrong = {"TIDEMARK_IN_FLIGTH_MAX": "3", "TIDEMARK_BACKUP_SHRINKMAX": "1%", "TIDEMARK_SOMETHING": "x"}
    shell.environment |= wrong
    state = shell.tree("state", {"CURRENT": b"MANIFEST-1\n"})
    lines = shell.run("backup", str(state)).stderr.splitlines()
    assert [line.split()[5].rstrip(":") for line in lines] == ["TIDEMARK_BACKUP_SHRINKMAX", "TIDEMARK_IN_FLIGTH_MAX"]
    assert "TIDEMARK_BACKUP_SHRINK_MAX" in lines[0]
    assert shell.run("list").stderr == ""
    # It shows what is set for all verbs.
    assert "TIDEMARK_BACKUP_SHRINKMAX" in shell.run("config", "show").stderr
    del shell.environment["TIDEMARK_JOB"]
    for name in ("TIDEMARK_REPOSITORY", *wrong):
        del shell.environment[name]
    hint = shell.refused("list", code=2)["hint"]
    assert "nobody reads" not in hint
    shell.environment["TIDEMARK_REPOSITRY"] = "x"
    assert shell.refused("list", code=2)["hint"] == f"nobody reads TIDEMARK_REPOSITRY; {hint}"


@pytest.mark.parametrize("text", ["repository = 5", "repository = true", "cache_dir = 1.5", "[s3]\nendpoint_url = 5"])
def test_what_is_no_text_in_a_settings_file_is_refused(shell: Shell, text: str) -> None:
    file = shell.directory / "settings.toml"
    file.write_text(f"{text}\n")
    refused = shell.refused("list", "--config", str(file), code=2)
    assert refused["hint"].startswith("write it in quotes: ")
    assert str(file) in refused["subject"]


@pytest.mark.parametrize("value", ["true", "2.9"])
@pytest.mark.parametrize("key", ["keep_last", "keep_daily"])
def test_what_decides_what_is_deleted_is_a_whole_number(shell: Shell, key: str, value: str) -> None:
    file = shell.directory / "settings.toml"
    file.write_text(f"[collect]\n{key} = {value}\n")
    assert shell.refused("collect", "-n", "--config", str(file), code=2)["hint"] == "write a whole number"


def test_names_in_a_settings_file_may_be_numbers(shell: Shell) -> None:
    shell.run("init")
    file = shell.directory / "settings.toml"
    file.write_text("[backup]\njob = 2026\ntask = 7\n")
    shell.tree("source", {"a": b"x"})
    shell.run("backup", str(shell.directory / "source"), "--config", str(file), TIDEMARK_JOB="")
    assert shell.result("list", "--job", "2026")["commits"][0]["number"] == 1


@pytest.mark.parametrize("words", [("help", "backup"), ("backup", "--help")])
def test_help_is_a_verb_too(shell: Shell, words: tuple[str, ...]) -> None:
    assert shell.run(*words).stdout == shell.run("backup", "-h").stdout


@pytest.mark.parametrize("word", ["version", "-V", "--version"])
def test_the_version_is_asked_for_in_each_way(shell: Shell, word: str) -> None:
    assert shell.run(word).stdout.startswith("tidemark, version ")


@pytest.mark.parametrize(
    "words",
    [
        ("rewind", "1", "--task", "3"),
        ("fork", "1", "copy", "--task", "3"),
        ("fork", "1", "copy", "--new-task", "3"),
        ("name", "1", "before", "--task", "3"),
        ("unname", "before", "--task", "3"),
        ("verify", "--task", "3"),
        ("list", "--task", "3"),
        ("forget", "flights", "--task", "3", "--yes"),
        ("restore", "target", "--all", "--task", "3"),
        ("restore", "target", "--all", "--store", "facts"),
        ("restore", "target", "--all", "--store", "facts", "--commit-per-task", "--task", "3"),
        ("backup", "source", "--tasks", "--task", "3"),
    ],
)
def test_a_task_or_store_that_nobody_would_look_at_is_refused(two_commits: Shell, words: tuple[str, ...]) -> None:
    two_commits.refused(*words, code=2)
    assert len(two_commits.result("list")["commits"]) == 2


def test_a_task_in_the_environment_is_for_other_verbs(two_commits: Shell) -> None:
    two_commits.run("rewind", "1", TIDEMARK_TASK="3")
    two_commits.run("restore", str(two_commits.directory / "all"), "--all", TIDEMARK_TASK="3")
    # Of this verb alone it is for this verb.
    two_commits.run("forget", "flights", "--yes", code=2, TIDEMARK_FORGET_TASK="3")

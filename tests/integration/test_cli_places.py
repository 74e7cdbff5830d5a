"""Directories that are given in the wrong place: what would harm the repository or go astray is refused."""

from pathlib import Path

import pytest

from tests.integration.conftest import Shell


@pytest.mark.parametrize("options", [(), ("-n",)])
@pytest.mark.parametrize(
    "target, all_stores, where",
    [
        ("repository", (), "at"),
        (".", (), "above"),
        ("repository/blobs", (), "below"),
        ("link/new", (), "below"),
        ("repository", ("--all",), "below"),
    ],
)
def test_nothing_is_restored_over_the_repository(
    two_commits: Shell,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    all_stores: tuple[str, ...],
    where: str,
    options: tuple[str, ...],
) -> None:
    monkeypatch.chdir(two_commits.directory)
    Path("link").symlink_to("repository")
    failure = two_commits.refused("restore", target, "--replace", *all_stores, *options, code=9)
    assert f"is {where} the place of the repository itself" in failure["message"]
    two_commits.run("verify", "--level", "content")
    assert not Path("repository/new").exists()


@pytest.mark.parametrize("source, where", [(".", "above"), ("repository", "at"), ("repository/log", "below")])
def test_no_repository_backs_itself_up(
    two_commits: Shell, monkeypatch: pytest.MonkeyPatch, source: str, where: str
) -> None:
    monkeypatch.chdir(two_commits.directory)
    failure = two_commits.refused("backup", source, "--job", "another", code=9)
    assert f"is {where} the place of the repository itself" in failure["message"]


@pytest.mark.parametrize("target", ["s3://bucket/prefix", "file://elsewhere/state", "~/state", "~", ""])
def test_a_target_that_is_no_path_of_this_machine_is_refused(
    two_commits: Shell, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    (two_commits.directory / "work").mkdir()
    monkeypatch.chdir(two_commits.directory / "work")
    two_commits.refused("restore", target, code=2)
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("init", "{}"),
        ("follow", "flights", "{}", "--once"),
        ("collect", "--keep-last", "1", "-n", "--plan", "{}"),
        ("report", "-o", "{}.html"),
        ("metrics", "--textfile", "{}"),
        ("backup", "../source", "--cache-dir", "{}"),
        ("bench", "restore", "--report", "{}"),
    ],
)
def test_no_directory_is_called_as_a_url_or_by_what_a_shell_reads(
    two_commits: Shell, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (two_commits.directory / "work").mkdir()
    monkeypatch.chdir(two_commits.directory / "work")
    for place in ("~/backups", "s3://bucket/prefix") if words[0] != "init" else ("~/backups",):
        failure = two_commits.refused(*(word.format(place) for word in words), code=2)
        assert "./" in failure["message"] + failure["hint"]
    assert not list(Path.cwd().iterdir())


def test_a_page_may_have_a_time_in_its_name(two_commits: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two_commits.directory)
    two_commits.run("report", "-o", "report-2026-11-29T10:00.html")
    assert Path("report-2026-11-29T10:00.html").is_file()
    two_commits.run("report", "-o", f"file://{two_commits.directory}/a%20page.html")
    assert Path("a page.html").is_file()


def test_an_error_names_the_directory_of_a_path_as_spark_prints_it(two_commits: Shell) -> None:
    failure = two_commits.refused("list", "-r", "file:/absent/50%", code=7)
    assert failure["repository"] == "/absent/50%"


def test_a_target_may_have_the_form_of_the_repository(two_commits: Shell) -> None:
    two_commits.run("restore", f"file://{two_commits.directory}/new")
    assert (two_commits.directory / "new" / "CURRENT").exists()


@pytest.mark.parametrize("replace", [(), ("--replace",)])
def test_a_link_has_a_hint_of_its_own(
    two_commits: Shell, monkeypatch: pytest.MonkeyPatch, replace: tuple[str, ...]
) -> None:
    monkeypatch.chdir(two_commits.directory)
    Path("link").symlink_to("source")
    assert two_commits.refused("restore", "link", *replace, code=9)["hint"] == "name what it leads to"


def test_a_task_of_another_commit_is_not_left_without_a_word(two_commits: Shell) -> None:
    source, target = (str(two_commits.directory / name) for name in ("source", "all"))
    two_commits.run("backup", source, "--task", "1")
    assert "of no store" not in two_commits.run("restore", target, "--all").stderr
    assert "of no store" not in two_commits.run("restore", target, "--all", "--replace").stderr
    back = two_commits.run("restore", target, "--all", "--replace", "--number", "2")
    assert f"of no store of this commit: {target}/1/default" in back.stderr

"""What a command line refuses, and what it says and does not say."""

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

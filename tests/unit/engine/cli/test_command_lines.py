"""Helps, and command lines that are wrong."""

import json

import pytest

from engine.cli import tidemark
from engine.cli.options import Verb, walk_verbs
from tests.unit.engine.cli.conftest import Run


@pytest.mark.parametrize("command", tuple(walk_verbs(tidemark)), ids=lambda verb: verb.table)
def test_the_help_of_a_verb_fits_one_screen_and_has_an_example(run: Run, command: Verb) -> None:
    result = run(*command.words.split(), "--help", COLUMNS="80")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 45
    assert all(len(line) <= 80 for line in lines)
    assert f"  {command.example}" in lines
    assert command.example.startswith(f"tidemark {command.words} ")


@pytest.mark.parametrize(
    "words",
    ["", "restore", "history", "collect", "collect explain", "collect verify-plan", "bench restore", "spark restore"],
)
def test_a_help_that_has_times_of_a_day_says_that_they_are_utc(run: Run, words: str) -> None:
    shown = " ".join(run(*words.split(), "--help", COLUMNS="80").stdout.split())
    assert shown.count("yesterday 18:00'") == shown.count("yesterday 18:00' (UTC)") > 0


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_without_a_verb_it_prints_its_help(run: Run, words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 0
    for verb in tidemark.commands:
        assert f"\n  {verb} " in result.stdout
    for code in ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "130"):
        assert f"\n  {code} " in result.stdout


@pytest.mark.parametrize(
    "words, message",
    [
        (("lst",), "No such command 'lst'"),
        (("--quiet", "list"), "No such option"),
        (("list", "--jobb", "x"), "No such option"),
        (("list", "extra"), "unexpected extra argument"),
        (("list", "-r"), "requires an argument"),
        (("backup", "/absent", "-j", "j"), "does not exist"),
        (("restore", "x", "-j", "j", "--number", "0"), "not in the range"),
        (("backup", ".", "-j", "j", "--version", str(2**63 - 1)), "not in the range"),
        (("commit", "result", "--version", str(2**63 - 1)), "not in the range"),
        (("restore", "x", "-j", "j", "--at", "soon"), "neither a time nor a duration"),
        (("restore", "x", "-j", "j", "--version", "v8"), "not a version"),
        (("restore", "x", "-j", "j", "--owners", "mine"), "is not one of"),
        (("verify", "--sample", "0%"), "not a share"),
        (("collect", "--keep-since", "7x"), "neither a time nor a duration"),
        (("restore", "x", "-j", "j", "--number", "1", "--name", "y"), "more than one of"),
        (("restore", "x", "-j", "j", "--name", "v8"), "reads like"),
        (("name", "latest", "12", "-j", "j"), "reads like"),
        (("name", "latest", "x" * 300, "-j", "j"), "longer than"),
        (("collect",), "would keep nothing"),
        (("verify", "3"), "numbered by job"),
        (("list", "-j", ""), "is empty"),
        (("show", "-j", "j", "@never"), "neither a time nor a duration"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_a_hint(run: Run, words: tuple[str, ...], message: str) -> None:
    environment = {"TIDEMARK_REPOSITORY": "memory://nothing-here"}
    shown = run(*words, **environment)
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert "\nhint: " in shown.stderr
    assert shown.stdout == ""
    failure = json.loads(run(*words, **environment, TIDEMARK_JSON="1").stderr)
    assert (failure["schema"], failure["error"], failure["code"]) == (1, "UsageError", 2)
    assert message in failure["message"]
    assert failure["hint"]


@pytest.mark.parametrize(
    "url, code", [("gopher://x", 2), ("file://host/x", 2), ("s3://bucket/x", 8), ("memory://fresh", 7), ("http:x", 2)]
)
def test_a_url_that_is_not_a_repository_is_distinguished(run: Run, url: str, code: int) -> None:
    result = run("list", "-r", url)
    assert result.exit_code == code
    assert "\nhint: " in result.stderr


def test_a_secret_in_a_url_is_not_repeated(run: Run) -> None:
    result = run("list", "-r", "s3://key:hunter2@bucket/x")
    assert result.exit_code == 2
    assert "hunter2" not in result.output

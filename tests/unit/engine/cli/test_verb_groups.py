"""A group of verbs: its variables, its table in the settings file, its arguments."""

import json
from pathlib import Path

import click
import msgspec
import pytest

from engine.cli import tidemark
from engine.cli.options import checkpoint_and_repository, on_spark_option, repository_and_checkpoint
from engine.cli.output import tabulate
from engine.cli.session import Session, verb
from engine.text import Prose
from tests.unit.engine.cli.conftest import Run

Seen = dict[str, object]


@pytest.fixture
def group_shown(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the verbs of a group `tide` were given."""
    seen: Seen = {}

    @verb("tide backup")
    @checkpoint_and_repository
    @click.option("--depth")
    @on_spark_option
    def backup(session: Session, checkpoint: str, depth: str | None, *, on_spark: bool) -> None:
        seen.update(checkpoint=checkpoint, depth=depth, on_spark=on_spark)
        seen.update(verb=session.verb, repository=session.common.repository)

    @verb("tide restore")
    @repository_and_checkpoint
    def restore(session: Session, checkpoint: str) -> None:
        seen.update(checkpoint=checkpoint, verb=session.verb, repository=session.common.repository)

    @verb("tide check", needs_repository=False)
    @click.argument("checkpoint")
    def check(session: Session, checkpoint: str) -> None:
        seen.update(checkpoint=checkpoint, verb=session.verb, repository=session.common.repository)

    tide = click.Group("tide", commands=[backup, restore, check])
    monkeypatch.setitem(tidemark.commands, "tide", tide)
    return seen


def test_a_verb_of_a_group_has_variables_and_a_table_of_its_own(run: Run, group_shown: Seen, tmp_path: Path) -> None:
    (tmp_path / "tidemark.toml").write_text(
        'repository = "memory://a"\non_spark = true\n[backup]\nno_commit = true\n[tide-backup]\ndepth = "file"\n'
    )
    assert run("tide", "backup", "/c").exit_code == 0
    assert group_shown == {
        "verb": "tide backup",
        "repository": "memory://a",
        "checkpoint": "/c",
        "depth": "file",
        "on_spark": True,
    }
    environment = {"TIDEMARK_TIDE_BACKUP_DEPTH": "environment", "TIDEMARK_DEPTH": "nobody's"}
    run("tide", "backup", "/c", "memory://nearer", **environment)
    assert (group_shown["depth"], group_shown["repository"]) == ("environment", "memory://nearer")
    (tmp_path / "tidemark.toml").write_text("[tide-backup]\nno_commit = true\n")
    assert "unknown key 'no_commit' in [tide-backup]" in run("tide", "backup", "/c").stderr


def test_a_repository_may_stand_before_the_checkpoint(run: Run, group_shown: Seen) -> None:
    run("tide", "restore", "/c", TIDEMARK_REPOSITORY="memory://environment")
    assert (group_shown["checkpoint"], group_shown["repository"]) == ("/c", "memory://environment")
    run("tide", "restore", "memory://nearer", "/c", TIDEMARK_REPOSITORY="memory://environment")
    assert (group_shown["checkpoint"], group_shown["repository"]) == ("/c", "memory://nearer")
    assert "Missing argument 'CHECKPOINT'" in run("tide", "restore").stderr
    extra = run("tide", "restore", "memory://a", "/c", "/d")
    assert (extra.exit_code, "unexpected extra argument (/d)" in extra.stderr) == (2, True)
    missing = run("tide", "restore", "/c", "--json")
    assert missing.exit_code == 2
    assert "TIDEMARK_REPOSITORY" in json.loads(missing.stderr)["hint"]


def test_a_verb_may_do_without_a_repository(run: Run, group_shown: Seen) -> None:
    assert run("tide", "check", "/c").exit_code == 0
    assert group_shown == {"verb": "tide check", "repository": "", "checkpoint": "/c"}


@pytest.mark.parametrize("words", [("spark", "lst"), ("spark", "--quiet"), ("tide", "backup", "--nothing")])
def test_a_wrong_command_line_of_a_group_names_the_help_of_the_group(
    run: Run, group_shown: Seen, words: tuple[str, ...]
) -> None:
    seen = run(*words)
    assert seen.exit_code == 2
    assert f"see `tidemark {' '.join(words[:-1])} --help`" in seen.stderr


def test_a_verb_prints_what_it_declares(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Declared(msgspec.Struct):
        said: str = "yes"

    class Other(msgspec.Struct):
        said: str = "no"

    @verb("say", None, Declared, needs_repository=False)
    @click.argument("what")
    def say(session: Session, what: str) -> None:
        session.show(Declared() if what == "declared" else Other(), ["said"])

    monkeypatch.setitem(tidemark.commands, "say", say)
    assert json.loads(run("say", "declared", "--json").stdout)["said"] == "yes"
    refused = run("say", "other")
    assert refused.exit_code == 1
    assert "say prints a Other that it does not declare" in refused.stderr


def test_what_is_stored_moves_no_cursor_and_breaks_no_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Said(msgspec.Struct):
        name: str

    @verb("say", None, Said, needs_repository=False)
    @click.argument("what")
    def say(session: Session, what: str) -> None:
        session.show(Said(what), [f"said {what}", *tabulate([Said(what)], {"name": "name"}), Prose(f"or {what}")])
        session.warn(f"heard {what}")

    monkeypatch.setitem(tidemark.commands, "say", say)
    result = run("say", "a\x1b[2J\nb\u202ec")
    escaped = "a\\x1b[2J\\nb\\u202ec"
    assert result.stdout.splitlines() == [f"said {escaped}", "name", escaped, f"or {escaped}"]
    assert result.stderr.splitlines()[-1] == f"warning: heard {escaped}"


@pytest.mark.parametrize("group", ["bench", "config", "import", "spark"])
def test_the_help_of_a_group_names_a_command_that_there_is(run: Run, group: str) -> None:
    assert f"Run `tidemark {group} VERB --help`" in " ".join(run(group).output.split())

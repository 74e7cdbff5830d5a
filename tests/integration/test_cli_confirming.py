"""What cannot be taken back asks on a terminal; without one, what is for ever needs a word."""

import pytest
from click.testing import CliRunner, Result

from engine.cli import tidemark
from engine.cli.session import Session
from tests.integration.conftest import Shell


@pytest.fixture
def on_terminal(two_commits: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A shell in which somebody sits at a terminal, and a commit with a name."""
    two_commits.run("name", "1", "kept")
    monkeypatch.setattr(Session, "can_ask", lambda self: not (self.common.json or self.common.quiet))
    return two_commits


def answered(shell: Shell, answer: str, *words: str) -> Result:
    return CliRunner().invoke(tidemark, list(words), input=answer, env=shell.environment)


def is_there(shell: Shell) -> bool:
    """Whether the name and both commits are."""
    listed = shell.result("list")["commits"]
    return len(listed) == 2 and "kept" in listed[1]["names"]


@pytest.mark.parametrize("words", [("forget", "flights"), ("unname", "kept")])
@pytest.mark.parametrize("answer", ["n\n", "\n"])
def test_it_asks_and_nothing_happens_without_a_yes(on_terminal: Shell, words: tuple[str, ...], answer: str) -> None:
    done = answered(on_terminal, answer, *words)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "[y/N]: " in done.stderr
    assert done.stderr.endswith("\nnothing was changed\n")
    assert words[1] in done.stderr
    assert is_there(on_terminal)


@pytest.mark.parametrize("words", [("forget", "flights"), ("unname", "kept")])
def test_with_a_yes_it_is_done(on_terminal: Shell, words: tuple[str, ...]) -> None:
    done = answered(on_terminal, "y\n", *words)
    assert done.exit_code == 0
    shown = on_terminal.run("list", "--jobs").stdout if words[0] == "forget" else ""
    assert "forgotten" in shown or on_terminal.refused("unname", "kept", code=7)["error"] == "NotFoundError"


@pytest.mark.parametrize("words", [("forget", "flights"), ("unname", "kept")])
@pytest.mark.parametrize("yes", ["-y", "--yes"])
def test_a_word_for_it_asks_nobody(on_terminal: Shell, words: tuple[str, ...], yes: str) -> None:
    done = answered(on_terminal, "", *words, yes)
    assert done.exit_code == 0
    assert "[y/N]" not in done.output


def test_who_asks_for_silence_or_json_is_not_asked(on_terminal: Shell) -> None:
    assert on_terminal.refused("forget", "flights", code=2)["hint"].startswith("say --yes")
    on_terminal.run("forget", "flights", "--quiet", code=2)
    # A name was always released without a question where nobody can be asked.
    assert on_terminal.result("unname", "kept")["name"] == "kept"


def test_an_interrupt_instead_of_an_answer_changes_nothing(on_terminal: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("click.termui.visible_prompt_func", interrupted)
    monkeypatch.setattr("click.termui.visible_input", interrupted, raising=False)
    done = answered(on_terminal, "", "forget", "flights")
    assert done.exit_code == 130
    assert is_there(on_terminal)

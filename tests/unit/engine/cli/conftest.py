from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from engine.cli import session, tidemark
from engine.cli.options import Common

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in an empty directory, with nothing in the environment that could speak for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def invoke(*words: str, **environment: str) -> Result:
        return CliRunner().invoke(tidemark, list(words), env=environment)

    return invoke


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Common]:
    """The common options of each run; the runs end there."""
    seen: list[Common] = []

    def stop(self: session.Session, verb: str, common: Common, values: object) -> None:
        seen.append(common)
        raise click.exceptions.Exit(0)

    monkeypatch.setattr(session.Session, "__init__", stop)
    return seen

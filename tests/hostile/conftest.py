"""A repository in a directory, and who attacks it."""

from pathlib import Path

import pytest

from tests.hostile.forger import Forger
from tests.integration.conftest import Shell


@pytest.fixture
def forger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Forger:
    """In a directory of its own, with no settings and no cache of the one who runs the tests."""
    directory = tmp_path / "home"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    return Forger(Shell(directory))

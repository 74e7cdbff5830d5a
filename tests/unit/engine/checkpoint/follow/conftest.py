"""What tests of followers and of cut-overs share."""

from pathlib import Path

import pytest

from tests.unit.engine.checkpoint.follow.followed import Killer, Looks
from tests.unit.engine.checkpoint.written_query import whole_key_rules


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("groups", "follower"):
        monkeypatch.setattr(f"engine.checkpoint.{module}.read_key_rules", whole_key_rules)


@pytest.fixture
def looks(tmp_path: Path) -> Looks:
    return Looks(tmp_path / "looks")


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)

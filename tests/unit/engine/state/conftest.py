from pathlib import Path

import pytest

from tests.unit.engine.state.state_store_kit import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A place for state stores; the files about the file manager have benches of their own."""
    return Bench(tmp_path)

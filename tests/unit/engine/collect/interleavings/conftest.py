import pytest

from tests.unit.engine.conftest import World


@pytest.fixture(params=["world", "opaque_world"], ids=["lists show TTLs", "lists show none"])
def world(request: pytest.FixtureRequest) -> World:
    """Every interleaving on a store that shows TTLs in lists, and on one that does not."""
    chosen: World = request.getfixturevalue(request.param)
    return chosen

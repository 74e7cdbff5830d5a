"""The judges of what a collection leaves; the walker of tests/walker.py says what that should be."""

from engine.inspect.verify import Level
from engine.repository.repository import Repository
from index.plan.commits import Retention
from index.snapshot.keys import AUDIT
from tests.unit.engine.conftest import World
from tests.walker import expected_keys

LAST = Retention(keep_last=1)


async def keys(world: World, prefix: str = "") -> set[str]:
    """All but the evidence of collections."""
    return {key for key in await world.keys(prefix) if not key.startswith(AUDIT)}


async def check_exact(world: World) -> None:
    assert await world.keys() == await expected_keys(world.store.inner, world.clock.now_ms)


async def check_kept(repository: Repository) -> None:
    assert not (await repository.verify(level=Level.CONTENT)).problems

"""D4 of design 0002: what rests on a pin is refused where a boundary that is there may not be listed."""

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from engine.errors import UnsafeStoreError
from engine.repository.repository import Repository
from index.plan.commits import Commit
from index.snapshot.keys import PINS
from index.snapshot.model import Scope
from tests.unit.engine.conftest import World

Use = Callable[[Repository, Commit], Awaitable[object]]


@pytest.mark.parametrize(
    "use",
    [
        lambda repository, commit: repository.fork(commit, Scope("fork")),
        lambda repository, commit: repository.rewind(commit),
        lambda repository, commit: repository.name(commit, "kept"),
    ],
    ids=["fork", "rewind", "name"],
)
async def test_it_is_refused_before_anything_is_written(
    world: World, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = await world.process()
    one, _ = await world.history(repository, "one", "two")
    weak = msgspec.structs.replace(world.store.inner.capabilities, consistent_lists=False)
    monkeypatch.setattr(type(world.store), "capabilities", property(lambda _: weak))
    with pytest.raises(UnsafeStoreError, match="stale") as refused:
        await use(repository, one)
    assert "consistent lists" in refused.value.hint
    assert await world.keys(PINS) == set()
    assert await world.restored_text(repository) == "two"
    await world.history(repository, "three")

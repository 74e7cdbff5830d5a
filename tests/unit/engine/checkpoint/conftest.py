import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.memory import MemoryStore
from engine.repository.repository import Repository
from tests.doubles import InterposedStore
from tests.unit.engine.checkpoint.live_query import LiveQuery, NewQuery


@pytest.fixture
async def repository() -> Repository:
    return await Repository.init(InterposedStore(MemoryStore()))


@pytest.fixture
async def new_query(tmp_path: Path) -> AsyncIterator[NewQuery]:
    """Makes queries that end with the test; on a store in memory instead of a directory if `remote`."""
    queries: list[LiveQuery] = []

    def new(*, remote: bool = False, name: str = "query", **settings: Any) -> LiveQuery:
        queries.append(LiveQuery(tmp_path / name, InterposedStore(MemoryStore()) if remote else None, **settings))
        return queries[-1]

    yield new
    for query in queries:
        await query.close()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A checkpoint after 5 batches and after 8, with ids; its files are to be copied."""
    root = tmp_path_factory.mktemp("checkpoints")

    async def make() -> None:
        query = LiveQuery(root / "query")
        for batches in (5, 8):
            await query.run(batches - query.batches)
            shutil.copytree(query.root, root / str(batches))
        await query.close()

    asyncio.run(make())
    return {batches: root / str(batches) for batches in (5, 8)}


@pytest.fixture
def checkpoint(checkpoints: dict[int, Path], tmp_path: Path) -> Path:
    """A checkpoint of 8 batches, with ids."""
    return shutil.copytree(checkpoints[8], tmp_path / "checkpoint")

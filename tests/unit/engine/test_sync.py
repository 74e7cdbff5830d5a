import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from typing_extensions import override

from blobstore.base import LIST_PAGE_MAX, ListPage
from blobstore.memory import MemoryStore
from engine.sync import LoopThread, SyncRepository
from tests.unit.engine.conftest import JOB


class SlowStore(MemoryStore):
    """Lists for ever once it is told to."""

    slow = False

    @override
    async def list_page(self, prefix: str, *, start_after: str = "", limit: int = LIST_PAGE_MAX) -> ListPage:
        if self.slow:
            await asyncio.Event().wait()
        return await super().list_page(prefix, start_after=start_after, limit=limit)


def interrupt_soon() -> None:
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def test_closing_twice_is_fine() -> None:
    repository = SyncRepository.init(MemoryStore())
    repository.close()
    repository.close()


def test_an_interrupt_waits_for_nothing_but_what_it_interrupted(tmp_path: Path) -> None:
    store = SlowStore()
    (tmp_path / "file").write_text("x")
    with SyncRepository.init(store) as repository:
        commit = repository.commit(JOB, [repository.backup(JOB, tmp_path)])
        # The renewal of the pin is a task of the same loop, and sleeps for twenty minutes.
        with repository.pinned(commit):
            store.slow = True
            interrupt_soon()
            begun_s = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                repository.commits(JOB)
            assert time.monotonic() - begun_s < 5
            store.slow = False
        assert len(repository.commits(JOB)) == 1


def test_what_is_interrupted_cleans_up_before_the_caller_goes_on() -> None:
    loop = LoopThread()
    cleaned: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            cleaned.append("all")

    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert cleaned == ["all"]
    loop.stop()
    loop.stop()


def test_cleaning_up_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sync.CLEANUP_S_MAX", 0.1)
    loop = LoopThread()
    let_go = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await let_go.wait()

    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())

    async def release() -> None:
        let_go.set()
        await asyncio.sleep(0)

    loop.run(release())
    loop.stop()

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from typing_extensions import override

from blobstore.base import LIST_PAGE_MAX, ListPage
from blobstore.memory import MemoryStore
from engine.blocking import Facade, LoopThread
from engine.errors import NotFoundError
from engine.repository.repository import Repository, SyncRepository
from tests.unit.engine.conftest import JOB

R = TypeVar("R")


class SlowStore(MemoryStore):
    """Lists for ever once it is set to."""

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
        except asyncio.CancelledError as error:
            await asyncio.sleep(0.2)
            cleaned.append("all")
            error.add_note("but one")
            raise

    interrupt_soon()
    with pytest.raises(KeyboardInterrupt) as raised:
        loop.run(work())
    assert cleaned == ["all"]
    assert raised.value.__notes__ == ["but one"]
    loop.stop()
    loop.stop()


def test_a_second_interrupt_at_once_does_not_keep_the_first_from_cancelling(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = LoopThread()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0.5)
            ended.append("whole")
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    real, calls = loop._loop.call_soon_threadsafe, 0

    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:  # of the first interrupt, to cancel
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(loop._loop, "call_soon_threadsafe", call)
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    time.sleep(0.6)
    loop.stop()
    assert ended == ["cancelled"]


def test_an_interrupt_that_another_thread_gets_is_heard() -> None:
    loop = LoopThread()

    async def work() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        await asyncio.sleep(5)

    begun_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert time.monotonic() - begun_s < 3
    loop.stop()


def test_cleaning_up_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.blocking.CLEANUP_S_MAX", 0.1)
    loop = LoopThread()
    let_go = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await let_go.wait()

    interrupt_soon()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        loop.run(work())
    assert interrupted.value.__notes__ == ["its cleaning up takes longer than 0.1 s: what it wrote may be left behind"]

    async def release() -> None:
        let_go.set()
        await asyncio.sleep(0)

    loop.run(release())
    loop.stop()


def interrupted_at(instruction: int, loop: LoopThread) -> bool:
    """Interrupt `LoopThread.run` before one instruction of this thread, wherever it is there; False past its end."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename == weakref.WeakSet.add.__code__.co_filename:
            return None  # a callback of the garbage collector: what it raises, nobody hears
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == instruction:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    async def work() -> str:
        await asyncio.sleep(0.01)
        return "done"

    # What a callback of the garbage collector raises nobody hears, and Hypothesis has one.
    gc.disable()
    sys.settrace(trace)
    try:
        assert loop.run(work()) == "done"
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        gc.enable()
    return False


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_interrupt_at_any_instruction_leaves_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.blocking.CLEANUP_S_MAX", 5)
    loop = LoopThread()

    async def answer() -> int:
        return 42

    def ask(answers: list[int]) -> None:
        answers.append(loop.run(answer()))

    instruction = 1
    while interrupted_at(instruction, loop):
        begun_s = time.monotonic()
        answers: list[int] = []
        asking = threading.Thread(target=ask, args=(answers,), daemon=True)
        asking.start()
        asking.join(5)
        assert answers == [42], f"the loop hangs after an interrupt at instruction {instruction}"
        assert time.monotonic() - begun_s < 5
        instruction += 1
    assert instruction > 50
    loop.stop()


async def test_every_error_of_a_repository_opened_by_its_url_names_it_once(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/repository"
    named = [f"repository: {url}"]
    async with await Repository.init(url) as repository:
        with pytest.raises(NotFoundError) as raised:
            await repository.find(JOB)
        assert raised.value.__notes__ == named
        with pytest.raises(NotFoundError) as raised:
            await repository.find_and_restore(JOB, tmp_path / "target")
        assert raised.value.__notes__ == named
    with SyncRepository.open(url) as blocking, pytest.raises(NotFoundError) as raised:
        blocking.find(JOB)
    assert raised.value.__notes__ == named


async def test_who_opens_a_repository_with_a_store_knows_which_it_is() -> None:
    async with await Repository.init(MemoryStore()) as repository:
        with pytest.raises(NotFoundError) as raised:
            await repository.find(JOB)
    assert not hasattr(raised.value, "__notes__")


class ExitingProgress:
    """Ends the program, which its callback runs in the event loop of the repository."""

    def total(self, *, files: int, bytes_: int) -> None:
        raise SystemExit(3)

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        raise AssertionError("unreachable: the total comes first")


@pytest.mark.timeout(30)
def test_an_exit_within_a_callback_reaches_the_caller_and_ends_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with SyncRepository.init(MemoryStore()) as repository:
        with pytest.raises(SystemExit):
            repository.backup(JOB, tmp_path, progress=ExitingProgress())
        assert repository.commits(JOB) == ()
    with pytest.raises(RuntimeError, match="has ended"):
        repository.commits(JOB)


@pytest.mark.timeout(30)
def test_a_call_after_an_interrupted_stop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = LoopThread()
    join = threading.Thread.join

    def interrupt(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.stop()
    with pytest.raises(RuntimeError, match="has ended"):
        loop.run(asyncio.sleep(0))


@pytest.mark.timeout(30)
def test_a_call_that_waits_for_itself_is_refused() -> None:
    with SyncRepository.init(MemoryStore()) as repository:

        async def call_back() -> object:
            return repository.commits(JOB)

        with pytest.raises(RuntimeError, match="is the caller"):
            repository.loop.run(call_back())


@pytest.mark.timeout(30)
def test_a_forked_process_is_refused_the_loop_of_its_parent() -> None:
    with SyncRepository.init(MemoryStore()) as repository:
        child = os.fork()
        if child == 0:
            try:
                repository.commits(JOB)
            except RuntimeError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert repository.commits(JOB) == ()


def test_what_was_entered_when_an_interrupt_came_is_left() -> None:
    said: list[str] = []

    @contextlib.asynccontextmanager
    async def context() -> AsyncIterator[None]:
        said.append("entered")
        yield
        said.append("left")

    class Interrupted(LoopThread):
        @override
        def run(self, work: Coroutine[Any, Any, R]) -> R:
            result = super().run(work)
            if said == ["entered"]:
                said.append("interrupted")
                raise KeyboardInterrupt
            return result

    facade = Facade(Interrupted(), contextlib.AsyncExitStack())
    with facade, pytest.raises(KeyboardInterrupt), facade.inside(context()):
        pytest.fail("the block was entered")
    assert said == ["entered", "interrupted", "left"]

"""The order of a directory store's steps, and what a crash between any two of them leaves behind."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from blobstore.base import BytesBody, Created, Lost, read_blob
from blobstore.local.store import LocalStore

HOUR_MS = 3_600_000


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


STEPS = (
    (Path, "mkdir"),
    (os, "mkdir"),
    (os, "pwrite"),
    (os, "fsync"),
    (os, "utime"),
    (os, "symlink"),
    (os, "link"),
    (os, "replace"),
    (os, "unlink"),
)


class CrashError(BaseException):
    """From here on this process does nothing any more."""


class Steps:
    """Counts steps on the file system, remembers them, and stops everything at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, crash_at: int = 0) -> None:
        self._root = root
        self._crash_at = crash_at
        self.taken: list[str] = []
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._crash_at and len(self.taken) + 1 >= self._crash_at:
                raise CrashError
            # The name that a step makes or changes is its last one; what it moves or links is its first.
            subject = args[1] if name in {"symlink", "link"} else args[0]
            directory = next(
                (kwargs[k] for k in ("dir_fd", f"{'dst' if name == 'link' else 'src'}_dir_fd") if k in kwargs), None
            )
            self.taken.append(f"{name} {self._what(subject, directory)}")
            return real(*args, **kwargs)

        return step

    def _what(self, subject: str | Path | int, directory: int | None) -> str:
        path = Path(f"/proc/self/fd/{subject}").readlink() if isinstance(subject, int) else Path(subject)
        if directory is not None:
            path = Path(f"/proc/self/fd/{directory}").readlink() / path
        name = os.path.relpath(path, self._root)
        return ".tmp/*" if name.startswith(".tmp/") else name


async def test_everything_is_durable_before_what_stands_on_it(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put_if_absent("a/warm", BytesBody(b"x"), ttl_ms=HOUR_MS)

    async def steps_of(call: Callable[[], Any]) -> list[str]:
        with monkeypatch.context() as patched:
            steps = Steps(patched, tmp_path)
            await call()
            return steps.taken

    assert await steps_of(lambda: store.put_if_absent("a/k", BytesBody(b"x"), ttl_ms=HOUR_MS)) == [
        "pwrite .tmp/*",
        "fsync .tmp/*",
        "symlink .ttl/a/k",
        "fsync .ttl/a",
        "utime .tmp/*",
        "link a/k",
        "utime .tmp/*",
        "fsync .tmp/*",
        "fsync a",
        "unlink .tmp/*",
    ]
    assert await steps_of(lambda: store.put("a/k", BytesBody(b"y"), ttl_ms=2 * HOUR_MS)) == [
        "pwrite .tmp/*",
        "fsync .tmp/*",
        "symlink .tmp/*",
        "replace .tmp/*",
        "fsync .ttl/a",
        "utime .tmp/*",
        "replace .tmp/*",
        "fsync a",
    ]
    assert await steps_of(lambda: store.put("a/k", BytesBody(b"z"))) == [
        "pwrite .tmp/*",
        "fsync .tmp/*",
        "utime .tmp/*",
        "replace .tmp/*",
        "fsync a",
        "symlink .tmp/*",
        "replace .tmp/*",
        "fsync .ttl/a",
    ]
    assert await steps_of(lambda: store.remove_ttl("a/warm")) == ["symlink .tmp/*", "replace .tmp/*", "fsync .ttl/a"]
    assert await steps_of(lambda: store.delete(["a/k", "a/warm"])) == [
        "unlink a/k",
        "unlink a/warm",
        "fsync a",
        "unlink .ttl/a/k",
        "unlink .ttl/a/warm",
    ]


async def put_old(store: LocalStore) -> None:
    await store.put_if_absent("a/k", BytesBody(b"old" * 1000), ttl_ms=HOUR_MS)


async def put_permanent(store: LocalStore) -> None:
    await store.put("a/k", BytesBody(b"old" * 1000))


async def nothing(_: LocalStore) -> None:
    pass


OLD, NEW = b"old" * 1000, b"new" * 1000
NO, WITH, ANY = (False,), (True,), (False, True)


class Case(NamedTuple):
    prepare: Callable[[LocalStore], Awaitable[object]]
    act: Callable[[LocalStore], Awaitable[object]]
    # What may be there after a crash, and whether it may have a TTL.
    left: dict[bytes | None, tuple[bool, ...]]


CASES = {
    "create with a TTL": Case(
        nothing, lambda store: store.put_if_absent("a/k", BytesBody(NEW), ttl_ms=HOUR_MS), {None: NO, NEW: WITH}
    ),
    "create without": Case(nothing, lambda store: store.put_if_absent("a/k", BytesBody(NEW)), {None: NO, NEW: NO}),
    "lose": Case(put_old, lambda store: store.put_if_absent("a/k", BytesBody(NEW), ttl_ms=HOUR_MS), {OLD: WITH}),
    "remove the TTL": Case(put_old, lambda store: store.remove_ttl("a/k"), {OLD: ANY}),
    "replace a permanent blob by one with a TTL": Case(
        put_permanent, lambda store: store.put("a/k", BytesBody(NEW), ttl_ms=HOUR_MS), {OLD: ANY, NEW: WITH}
    ),
    "replace a blob with a TTL by a permanent one": Case(
        put_old, lambda store: store.put("a/k", BytesBody(NEW)), {OLD: WITH, NEW: ANY}
    ),
    "delete": Case(put_old, lambda store: store.delete(["a/k"]), {OLD: WITH, None: NO}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("retention_ms", [0, HOUR_MS])
async def test_a_crash_at_any_step_leaves_the_old_or_the_new_and_the_call_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, retention_ms: int
) -> None:
    for crash_at in range(1, 100):
        root = tmp_path / str(crash_at)
        await case.prepare(LocalStore(root, deleted_retention_ms=retention_ms))
        with monkeypatch.context() as patched:
            Steps(patched, root, crash_at)
            try:
                await case.act(LocalStore(root, deleted_retention_ms=retention_ms))
            except CrashError:
                pass
            else:
                break

        survivor = LocalStore(root, deleted_retention_ms=retention_ms)
        info = await survivor.stat("a/k")
        data = None if info is None else await read_blob(survivor, "a/k", size_bytes_max=10_000)
        assert data in case.left, f"crash at step {crash_at}"
        assert (info is not None and info.expires_at_ms is not None) in case.left[data], f"crash at step {crash_at}"
        assert {blob.key for blob in (await survivor.list_page("")).blobs} == ({"a/k"} if info else set())

        assert isinstance(await case.act(survivor), Created | Lost | None | tuple)
        # And nothing of the crash clings to the key once it is deleted.
        assert await survivor.delete(["a/k"]) == ()
        await survivor.put_if_absent("a/k", BytesBody(b"again"), ttl_ms=2 * HOUR_MS)
        again = await survivor.stat("a/k")
        assert again is not None
        assert again.expires_at_ms == again.created_at_ms + 2 * HOUR_MS
    else:
        pytest.fail("it has more steps than this test takes")
    assert crash_at > 1


async def test_a_link_that_a_crash_has_left_serves_the_next_attempt_with_its_own_time(
    store: LocalStore, tmp_path: Path
) -> None:
    link = tmp_path / ".ttl/k"
    for text in ("ttl:3600000ms", "ttl:5ms", "ttl:removed"):
        await store.delete(["k"])
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(text)
        outcome = await store.put_if_absent("k", BytesBody(b"x"), ttl_ms=HOUR_MS)
        assert isinstance(outcome, Created)
        info = await store.stat("k")
        assert info is not None
        assert info.expires_at_ms == info.created_at_ms + HOUR_MS

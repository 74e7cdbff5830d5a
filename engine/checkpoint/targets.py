"""Put a restored checkpoint in its place: what may be there before, and how all of it appears at once (R3 and R4).

A directory is renamed. On an object store nothing is: files are published in an order, `commits/` last.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from blobstore.base import BlobStore
from blobstore.checkpoint_files import FileStatus
from blobstore.concurrency import run_all, run_blocking
from blobstore.local.files import place_of
from blobstore.opening import StoreSettings
from engine.errors import TargetError, UsageError
from engine.local.scratch import scratch_dir
from engine.restore import staging
from engine.runtime import Runtime
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import ENTRY_BYTES_MAX
from index.display import iso_time
from index.snapshot.model import FilePath
from index.spark.checkpoint import COMMITS, OFFSETS, SOURCES, STATE, StoreId
from index.spark.names import LOGS, SSTS, parse_state_name
from index.spark.query_logs import decode_query_id, parse_batch_name

_NOT_IN_NAMES: Final = re.compile(r"[^0-9TZ]")
# Files under way at once.
_IN_FLIGHT_MAX: Final = 8
_QUERY_ID: Final = "metadata"
_TOPS: Final = frozenset({_QUERY_ID, COMMITS, OFFSETS, SOURCES, STATE})
_HINT: Final = "restore to a new prefix"


class DirectoryTarget:
    """A directory, built beside its place and renamed into it (R3)."""

    def __init__(self, path: Path, runtime: Runtime, *, move_aside: bool) -> None:
        self._path = path = path.absolute()
        # What people call it, and what the paths in the checkpoint begin with: absolute, or `s3://bucket/prefix`.
        self.location = self.root = str(path)
        self._move_aside = move_aside
        aside = f"{path.name}.aside-{_moment(runtime)}" if move_aside else ""
        self._staging = staging.Staging(path, runtime.session(), replace=move_aside, aside=aside)
        self._aside = path.parent / aside
        # Where the former content is now; "" if there was none, or it is still there.
        self.moved_aside = ""

    @property
    def directory(self) -> Path:
        """Where the checkpoint is gathered: beside the target, private until it is complete."""
        return self._staging.directory

    async def place(self) -> tuple[str, ...]:
        """Return where it is, as `BlobStore.place`."""
        return await run_blocking(place_of, self._path)

    async def check(self, query_id: str, batch: int) -> None:  # noqa: ARG002  (a directory is replaced as a whole)
        """Refuse a target with content that may not be moved aside for this batch of a query; nothing is changed."""
        _, has_content = await run_blocking(lambda: staging.look_at_target(self._path, replace=True))
        if has_content and not self._move_aside:
            hint = "restore to a new place, or have what is there moved aside (--move-aside)"
            raise TargetError("is a directory with content", operation="restore", subject=self.location, hint=hint)

    async def open(self, query_id: str, batch: int) -> None:
        await self.check(query_id, batch)
        await run_blocking(self._staging.open)

    async def publish(self, stores: Mapping[StoreId, Sequence[str]]) -> None:
        """Put what was gathered at the target; its former content is `moved_aside` then.

        `stores` were made, here or by executors; with paths of the checkpoint that these have published already.
        TargetError: a store is not there, or the target has changed meanwhile, or cannot be written.
        """
        for store in stores:
            if not await run_blocking(_has_content, self.directory / store.path):
                message = f"the store {store} was made, and is not in {self.directory}"
                hint = "every executor has to see the target under this path, as the same directory"
                raise TargetError(message, operation="restore", subject=self.location, hint=hint)
        await run_blocking(_remove_attempts, self.directory)
        try:
            await run_blocking(lambda: self._staging.publish(dirs_below(self.directory), {}))
        finally:
            # After an error it is back, unless that failed too.
            if self._staging.replaces and await run_blocking(self._aside.exists):
                self.moved_aside = str(self._aside)

    async def aclose(self) -> tuple[str, ...]:
        """Remove what was gathered; once is enough. Returns what could not be removed."""
        await run_blocking(self._staging.close)
        return tuple(self._staging.leftovers)


class ObjectTarget:
    """A prefix of an object store, with methods as `DirectoryTarget`. It is gathered on this machine first.

    It is `name` below `parent`, which is a URL, opened with `settings`, or a store whose root it is. `location` is what
    people, and paths in the checkpoint, call it.
    """

    def __init__(
        self,
        parent: str | BlobStore,
        name: str,
        *,
        location: str,
        runtime: Runtime,
        move_aside: bool,
        settings: StoreSettings | None = None,
    ) -> None:
        self.location = self.root = location
        self._parent, self._name, self._settings = parent, name, settings
        self._aside = f"{name}.aside-{_moment(runtime)}"
        self._move_aside = move_aside
        self._above: CheckpointDir | None = None
        self._scratch: Path | None = None
        self._resources = contextlib.AsyncExitStack()
        self.moved_aside = ""
        # Whether there was any when it was checked.
        self.has_content = False
        self._is_clear = False
        self._of = ("", 0)

    @property
    def directory(self) -> Path:
        if self._scratch is None:
            raise UsageError("the target is not open", operation="restore")
        return self._scratch

    async def place(self) -> tuple[str, ...]:
        directory = await self._directory()
        return await run_blocking(directory.place)

    async def check(self, query_id: str, batch: int) -> None:
        directory = await self._directory()
        found = await _walk(directory)
        self.has_content = bool(found)
        if not found:
            return
        if not self._move_aside:
            hint = "restore to a new one, or have what is there moved aside (--move-aside)"
            raise self._refused("is a prefix with content", hint)
        paths = [status.path for status in found]
        newer = next((path for path in paths if is_newer(path, batch)), None)
        if newer is not None:
            message = f"holds {newer}, which is newer than batch {batch}"
            raise self._refused(message, f"{_HINT}: executors may still live")
        is_named = _QUERY_ID in paths
        if is_named:
            there = decode_query_id(await directory.read(_QUERY_ID, size_bytes_max=ENTRY_BYTES_MAX))
            if there != query_id:
                raise self._refused(f"holds query {there}, and query {query_id} is to come", _HINT)
        # Without metadata, what an interrupted restore leaves; of anything else the owner is unknown.
        known = _TOPS if is_named else _TOPS - {COMMITS}
        foreign = next((path for path in paths if _top(path) not in known), None)
        if foreign is not None:
            what = "which is not part of a checkpoint" if is_named else "and no metadata that says whose it is"
            raise self._refused(f"holds {foreign}, {what}", _HINT)

    async def open(self, query_id: str, batch: int) -> None:
        self._of = query_id, batch
        await self.check(query_id, batch)
        self._scratch = await self._resources.enter_async_context(scratch_dir())

    async def publish(self, stores: Mapping[StoreId, Sequence[str]]) -> None:
        """Publish what was gathered; what others publish they do after `clear`."""
        published = frozenset(path for paths in stores.values() for path in paths)
        if not self._is_clear:
            await self.clear()
        directory = await self._directory()
        files = await run_blocking(files_below, self.directory)
        logs = [path for path in files if _top(path) == COMMITS]
        ours = await publish_files(directory, self.directory, [path for path in files if _top(path) != COMMITS])
        await self._check_alone(directory, ours, published)
        await publish_files(directory, self.directory, logs)

    async def _check_alone(self, directory: CheckpointDir, ours: Mapping[str, int], theirs: frozenset[str]) -> None:
        """See that what this restore has published is there, and nothing else, before it becomes a checkpoint."""
        there = {status.path: status.size_bytes for status in await _walk(directory)}
        strange = [path for path in there.keys() - theirs if there[path] != ours.get(path)]
        if theirs:
            # Of attempts that Spark lost; nothing names them.
            strange = [path for path in strange if path in ours or PurePosixPath(path).parent.name not in {SSTS, LOGS}]
        strange += (ours.keys() | theirs) - there.keys()
        if strange:
            message = f"has by now, or has no more, what this restore did not do: {min(strange)}; "
            hint = "see who does, the query's executors perhaps, and stop it; then restore again"
            raise self._refused(f"{message}somebody else writes there", hint)

    async def aclose(self) -> tuple[str, ...]:
        self._scratch = self._above = None
        await self._resources.aclose()
        return ()

    async def _directory(self, name: str = "") -> CheckpointDir:
        if self._above is None:
            self._above = await CheckpointDir.open(self._parent, settings=self._settings)
            self._resources.push_async_callback(self._above.close)
        return self._above.child(name or self._name)

    async def clear(self) -> None:
        """Copy what is there beside it, and delete it once all of it is there, unless it changes meanwhile."""
        await self.check(*self._of)
        directory = await self._directory()
        if found := await _walk(directory):
            await self._put_aside(directory, found)
        self._is_clear = True

    async def _put_aside(self, directory: CheckpointDir, found: Sequence[FileStatus]) -> None:
        aside = await self._directory(self._aside)
        if await aside.list():
            raise self._refused(f"cannot be moved aside: {self._aside} is there", "try again in a moment")
        async with scratch_dir() as scratch:

            async def copy(numbered: tuple[int, FileStatus]) -> None:
                number, status = numbered
                local = scratch / str(number)
                await directory.fetch(status.path, local, size_bytes=status.size_bytes)
                await aside.publish(status.path, local, overwrite=True)
                await run_blocking(local.unlink)

            await run_all(copy, enumerate(found), in_flight_max=_IN_FLIGHT_MAX)
        there = {status.path: status.size_bytes for status in await aside.walk()}
        missing = next((s.path for s in found if there.get(s.path) != s.size_bytes), None)
        if missing is not None:
            message = f"is not whole where it was copied to: {self._aside}/{missing}"
            raise self._refused(message, "see who deletes there")
        if changed := set(found) ^ set(await _walk(directory)):
            raise self._refused(
                f"changes while it is moved aside: {min(status.path for status in changed)}; nothing was deleted",
                f"stop the query and its executors, then restore again; the copy {self._aside} is of no use",
            )
        self.moved_aside = f"{self.location.rstrip('/').rpartition('/')[0]}/{self._aside}"
        # Without its commits the rest is not taken for whole.
        await directory.delete(sorted((s.path for s in found), key=lambda path: (_top(path) != COMMITS, path)))

    def _refused(self, reason: str, hint: str) -> TargetError:
        return TargetError(reason, operation="restore", subject=self.location, hint=hint)


CheckpointTarget = DirectoryTarget | ObjectTarget


async def _walk(directory: CheckpointDir) -> list[FileStatus]:
    """List every file but those that Hadoop marks directories with, and what its writers left under hidden names."""
    found = await directory.walk()
    return [s for s in found if not any(not name or name.startswith(".") for name in s.path.split("/"))]


async def publish_files(directory: CheckpointDir, root: Path, paths: Iterable[str]) -> dict[str, int]:
    """Publish files so that whatever names a file comes after it (R4).

    A file there under one of the names is replaced. Returns how many bytes each has.
    """
    sizes: dict[str, int] = {}
    stages: dict[tuple[int, int], list[str]] = {}
    for path in paths:
        stages.setdefault(_stage(path), []).append(path)

    async def publish(path: str) -> None:
        sizes[path] = await directory.publish(path, root / path, overwrite=True)

    for stage in sorted(stages):
        await run_all(publish, stages[stage], in_flight_max=_IN_FLIGHT_MAX)
    return sizes


def _stage(path: str) -> tuple[int, int]:
    """When a file is published; the commits one after the other."""
    place = PurePosixPath(path)
    if place.parts[0] == COMMITS:
        return 5, parse_batch_name(place.name) or 0
    if place.parts[0] == OFFSETS:
        return 4, 0
    if place.parent.name in {SSTS, LOGS}:
        return 0, 0
    parsed = parse_state_name(place.name)
    if parsed is not None and place.parts[0] != SOURCES:
        return 1 if parsed.kind == "snapshot" else 2, 0
    return 3, 0


def is_newer(path: str, batch: int) -> bool:
    """Return whether a file of a checkpoint is of what comes after a batch (R2)."""
    parts = path.split("/")
    match parts:
        case ["commits", name]:
            return (parse_batch_name(name) or 0) > batch
        case ["offsets", name]:
            return (parse_batch_name(name) or 0) > batch + 1
        case ["state", _, "_metadata", "v2", name]:
            return (parse_batch_name(name) or 0) > batch + 1
        case ["state", _, _, *_, name]:
            parsed = parse_state_name(name)
            return parsed is not None and parsed.of.version > batch + 1
        case _:
            return False


def _top(path: str) -> str:
    return path.partition("/")[0]


def files_below(root: Path) -> Sequence[str]:
    """List every file below a directory, as paths of a checkpoint. Blocks."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def _moment(runtime: Runtime) -> str:
    """Now, in the name of what is moved aside: by this machine's clock, as it is for people only."""
    return _NOT_IN_NAMES.sub("", iso_time(runtime.local_now_ms()))


async def check_apart(target: CheckpointTarget, other: BlobStore | CheckpointDir, *, what: str = "repository") -> None:
    """Refuse a target that is the place of what is read, above it or below it: moved aside, it would be lost."""
    theirs = await run_blocking(other.place)
    staging.check_apart(target.location, await target.place(), theirs, what=what)


def _remove_attempts(directory: Path) -> None:
    """Remove what attempts that Spark lost have left beside stores, or still write there, in vain then. Blocks."""
    for path in list(directory.glob(f"{STATE}/**/.*.tidemark-*")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _has_content(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        return next(entries, None) is not None
    return False


def dirs_below(root: Path) -> list[FilePath]:
    """List every directory below one, parents first."""
    found = [Path(directory, name).relative_to(root) for directory, names, _ in os.walk(root) for name in names]
    return sorted((path.parts for path in found), key=len)

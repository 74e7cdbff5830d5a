"""A checkpoint on an object store, where nothing is renamed: files in an order, `commits/` last (design 0005, R4)."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from blobstore.base import BlobStore
from blobstore.checkpoint_files import FileStatus
from blobstore.concurrency import run_all, run_blocking
from blobstore.opening import StoreSettings
from engine.checkpoint.targets import moment
from engine.clock import Runtime
from engine.errors import TargetError, UsageError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import ENTRY_BYTES_MAX
from index.spark.checkpoint import COMMITS, OFFSETS, SOURCES, STATE
from index.spark.names import LOGS, SSTS, parse_state_name
from index.spark.query_logs import decode_query_id, parse_batch_name

# Files under way at once.
IN_FLIGHT_MAX: Final = 8

_QUERY_ID: Final = "metadata"
_TOPS: Final = frozenset({_QUERY_ID, COMMITS, OFFSETS, SOURCES, STATE})
_HINT: Final = "restore to a new prefix"


class ObjectTarget:
    """A prefix of an object store. What it is to hold is gathered on this machine first.

    Args:
        parent: The URL of the prefix above, or a store whose root it is.
        name: Of the prefix itself.
        location: What people, and paths in the checkpoint, call it.
        runtime: Tells when something was moved aside.
        move_aside: Whether content may be moved aside.
        settings: Of the store that is opened.

    Attributes:
        has_content: Whether there was any when it was checked.
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
        self._aside = f"{name}.aside-{moment(runtime)}"
        self._move_aside = move_aside
        self._above: CheckpointDir | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.moved_aside = ""
        self.has_content = False
        self._is_clear = False
        self._of = ("", 0)

    @property
    def directory(self) -> Path:
        """A private directory of this machine."""
        return directory_of(self._scratch)

    async def place(self) -> tuple[str, ...]:
        """As `CheckpointTarget.place`."""
        directory = await self._directory()
        return await run_blocking(directory.place)

    async def check(self, query_id: str, batch: int) -> None:
        """As `CheckpointTarget.check`: empty, or what may be moved aside."""
        directory = await self._directory()
        found = await _walk(directory)
        self.has_content = bool(found)
        if not found:
            return
        if not self._move_aside:
            raise self._refused("is a prefix with content", "restore to a new one, or have it moved aside")
        newer = next((status.path for status in found if _is_newer(status.path, batch)), None)
        if newer is not None:
            raise self._refused(
                f"holds {newer}, which is newer than batch {batch}", f"{_HINT}: executors may still live"
            )
        is_named = any(status.path == _QUERY_ID for status in found)
        if is_named:
            there = decode_query_id(await directory.read(_QUERY_ID, size_bytes_max=ENTRY_BYTES_MAX))
            if there != query_id:
                raise self._refused(f"holds query {there}, and query {query_id} is to come", _HINT)
        # Without metadata, what an interrupted restore leaves; of anything else nobody knows whose it is.
        known = _TOPS if is_named else _TOPS - {COMMITS}
        foreign = next((status.path for status in found if _top(status.path) not in known), None)
        if foreign is not None:
            told = "which is no part of a checkpoint" if is_named else "and no metadata that says whose it is"
            raise self._refused(f"holds {foreign}, {told}", _HINT)

    async def open(self, query_id: str, batch: int) -> None:
        """As `CheckpointTarget.open`."""
        self._of = query_id, batch
        await self.check(query_id, batch)
        self._scratch = await run_blocking(lambda: tempfile.TemporaryDirectory(prefix="tidemark-"))

    async def publish(self, published: Iterable[str] = ()) -> None:
        """As `CheckpointTarget.publish`. What others publish they do after `clear`."""
        if not self._is_clear:
            await self.clear()
        directory = await self._directory()
        files = await run_blocking(files_below, self.directory)
        logs = [path for path in files if _top(path) == COMMITS]
        ours = await publish_files(directory, self.directory, [path for path in files if _top(path) != COMMITS])
        await self._check_alone(directory, ours, frozenset(published))
        await publish_files(directory, self.directory, logs)

    async def _check_alone(self, directory: CheckpointDir, ours: Mapping[str, int], theirs: frozenset[str]) -> None:
        """See that what this restore has published is there, and nothing else, before it becomes a checkpoint.

        Raises:
            TargetError: Somebody else writes or deletes there.
        """
        there = {status.path: status.size_bytes for status in await _walk(directory)}
        strange = [path for path in there.keys() - theirs if there[path] != ours.get(path)]
        if theirs:
            # Of attempts that Spark lost; nothing names them.
            strange = [path for path in strange if path in ours or PurePosixPath(path).parent.name not in {SSTS, LOGS}]
        strange += (ours.keys() | theirs) - there.keys()
        if strange:
            raise self._refused(
                f"has by now, or has no more, what this restore did not do: {min(strange)}; somebody else writes there",
                "see who does, the query's executors perhaps, and stop it; then restore again",
            )

    async def close(self) -> tuple[str, ...]:
        """As `CheckpointTarget.close`."""
        scratch, self._scratch = self._scratch, None
        above, self._above = self._above, None
        try:
            if scratch is not None:
                await run_blocking(scratch.cleanup)
        finally:
            if above is not None:
                await above.close()
        return ()

    async def _directory(self, name: str = "") -> CheckpointDir:
        """The prefix itself, or another one beside it."""
        if self._above is None:
            self._above = await CheckpointDir.open(self._parent, settings=self._settings)
        return self._above.child(name or self._name)

    async def clear(self) -> None:
        """Copy what is there beside it, and delete it once all of it is there, unless it changes meanwhile.

        Raises:
            As `check`.
        """
        await self.check(*self._of)
        directory = await self._directory()
        if found := await _walk(directory):
            await self._put_aside(directory, found)
        self._is_clear = True

    async def _put_aside(self, directory: CheckpointDir, found: Sequence[FileStatus]) -> None:
        aside = await self._directory(self._aside)
        if await aside.list():
            raise self._refused(f"cannot be moved aside: {self._aside} is there", "try again in a moment")
        with tempfile.TemporaryDirectory(prefix="tidemark-") as scratch:

            async def copy(numbered: tuple[int, FileStatus]) -> None:
                number, status = numbered
                local = Path(scratch, str(number))
                await directory.fetch(status.path, local, size_bytes=status.size_bytes)
                await aside.publish_file(status.path, local, overwrite=True)
                await run_blocking(local.unlink)

            await run_all(copy, enumerate(found), in_flight_max=IN_FLIGHT_MAX)
        there = {status.path: status.size_bytes for status in await aside.walk()}
        missing = next((s.path for s in found if there.get(s.path) != s.size_bytes), None)
        if missing is not None:
            raise self._refused(
                f"is not whole where it was copied to: {self._aside}/{missing}", "see who deletes there"
            )
        if changed := set(found) ^ set(await _walk(directory)):
            raise self._refused(
                f"changes while it is moved aside: {min(status.path for status in changed)}; nothing was deleted",
                f"stop the query and its executors, then restore again; the copy {self._aside} is of no use",
            )
        self.moved_aside = f"{self.location.rstrip('/').rpartition('/')[0]}/{self._aside}"
        # Without its commits nobody takes for whole what is left.
        await directory.delete(sorted((s.path for s in found), key=lambda path: (_top(path) != COMMITS, path)))

    def _refused(self, reason: str, hint: str) -> TargetError:
        return TargetError(reason, operation="restore", subject=self.location, hint=hint)


async def _walk(directory: CheckpointDir) -> list[FileStatus]:
    """Every file but those that Hadoop marks directories with, and what its writers left under hidden names."""
    found = await directory.walk()
    return [s for s in found if not any(not name or name.startswith(".") for name in s.path.split("/"))]


def directory_of(scratch: tempfile.TemporaryDirectory[str] | None) -> Path:
    """Where a target is gathered.

    Raises:
        UsageError: It is not open.
    """
    if scratch is None:
        raise UsageError("the target is not open", operation="restore")
    return Path(scratch.name)


async def publish_files(directory: CheckpointDir, root: Path, paths: Iterable[str]) -> dict[str, int]:
    """Publish files so that whatever names a file comes after it (R4).

    Args:
        directory: Where to; what stands there under one of the names is replaced.
        root: Where the files are on this machine.
        paths: Which, relative to both.

    Returns:
        How many bytes each has.
    """
    sizes: dict[str, int] = {}
    stages: dict[tuple[int, int], list[str]] = {}
    for path in paths:
        stages.setdefault(_stage(path), []).append(path)

    async def publish(path: str) -> None:
        sizes[path] = await directory.publish_file(path, root / path, overwrite=True)

    for stage in sorted(stages):
        await run_all(publish, stages[stage], in_flight_max=IN_FLIGHT_MAX)
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


def _is_newer(path: str, batch: int) -> bool:
    """Whether a file of a checkpoint is of what comes after a batch (R2)."""
    parts = path.split("/")
    match parts:
        case ["commits", name]:
            return (parse_batch_name(name) or 0) > batch
        case ["offsets", name]:
            return (parse_batch_name(name) or 0) > batch + 1
        case ["state", _, _, *_, name]:
            parsed = parse_state_name(name)
            return parsed is not None and parsed.of.version > batch + 1
        case _:
            return False


def _top(path: str) -> str:
    return path.partition("/")[0]


def files_below(root: Path) -> Sequence[str]:
    """Every file below a directory, as paths of a checkpoint. Blocks."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())

"""A checkpoint on an object store, where nothing is renamed: files in an order, `commits/` last (design 0005, R4)."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from blobstore.base import BlobStore
from blobstore.bounded import carry_out_all
from blobstore.checkpoint_files import FileStatus
from blobstore.local_files import run_blocking
from blobstore.opening import StoreSettings
from engine.checkpoint.targets import moment
from engine.clock import Ambient
from engine.errors import TargetError
from engine.state.batch_logs import ENTRY_BYTES_MAX
from engine.state.checkpoint_dir import CheckpointDir
from index.batch_log import decode_query_id, parse_batch_name
from index.picture_selection import COMMITS, OFFSETS, SOURCES, STATE
from index.state_names import LOGS, SSTS, parse_state_name

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
        ambient: Tells when something was moved aside.
        move_aside: Whether content may be moved aside.
        early: Whether that is done by `open` already, because others publish parts of the checkpoint before `publish`.
        settings: Of the store that is opened.
    """

    def __init__(
        self,
        parent: str | BlobStore,
        name: str,
        *,
        location: str,
        ambient: Ambient,
        move_aside: bool,
        early: bool = False,
        settings: StoreSettings | None = None,
    ) -> None:
        self.location = self.root = location
        self._parent, self._name, self._settings = parent, name, settings
        self._aside = f"{name}.aside-{moment(ambient)}"
        self._move_aside = move_aside
        self._early = early
        self._above: CheckpointDir | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._moved_aside = ""
        self._of = ("", 0)

    @property
    def directory(self) -> Path:
        """A private directory of this machine."""
        return Path("" if self._scratch is None else self._scratch.name)

    async def check(self, query_id: str, batch: int) -> None:
        """As `CheckpointTarget.check`: empty, or what may be moved aside."""
        directory = await self._directory()
        found = await _walk(directory)
        if not found:
            return
        if not self._move_aside:
            raise self._refused("is a prefix with content", "restore to a new one, or have it moved aside")
        newer = next((status.path for status in found if _is_newer(status.path, batch)), None)
        if newer is not None:
            raise self._refused(
                f"holds {newer}, which is newer than batch {batch}", f"{_HINT}: executors may still live"
            )
        if any(status.path == _QUERY_ID for status in found):
            there = decode_query_id(await directory.read(_QUERY_ID, size_bytes_max=ENTRY_BYTES_MAX))
            if there != query_id:
                raise self._refused(f"holds query {there}, and query {query_id} is to come", _HINT)
            return
        # What an interrupted restore leaves; of anything else nobody knows whose it is.
        foreign = next((s.path for s in found if s.path.split("/")[0] not in _TOPS or _top(s.path) == COMMITS), None)
        if foreign is not None:
            raise self._refused(f"holds {foreign}, and no metadata that says whose it is", _HINT)

    async def open(self, query_id: str, batch: int) -> None:
        """As `CheckpointTarget.open`."""
        self._of = query_id, batch
        await self.check(query_id, batch)
        self._scratch = await run_blocking(lambda: tempfile.TemporaryDirectory(prefix="tidemark-"))
        if self._early:
            await self._clear()

    async def publish(self) -> str:
        """As `CheckpointTarget.publish`."""
        if not self._early:
            await self._clear()
        directory = await self._directory()
        files = await run_blocking(files_below, self.directory)
        logs = [path for path in files if _top(path) == COMMITS]
        await publish_files(directory, self.directory, [path for path in files if _top(path) != COMMITS])
        if await _walk(directory.child(COMMITS)):
            raise self._refused(
                f"has {COMMITS}/ by now: somebody else writes there", "see who does, then restore again"
            )
        await publish_files(directory, self.directory, logs)
        return self._moved_aside

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

    async def _directory(self) -> CheckpointDir:
        if self._above is None:
            self._above = await CheckpointDir.open(self._parent, settings=self._settings)
        return self._above.child(self._name)

    async def _clear(self) -> None:
        """Copy what is there beside it, and delete it once all of it is there."""
        await self.check(*self._of)
        directory = await self._directory()
        found = await _walk(directory)
        if not found or self._above is None:
            return
        aside = self._above.child(self._aside)
        if await aside.list():
            raise self._refused(f"cannot be moved aside: {self._aside} is there", "try again in a moment")
        with tempfile.TemporaryDirectory(prefix="tidemark-") as scratch:

            async def copy(numbered: tuple[int, FileStatus]) -> None:
                number, status = numbered
                local = Path(scratch, str(number))
                await directory.fetch(status.path, local, size_bytes=status.size_bytes)
                await aside.publish_file(status.path, local, overwrite=True)
                await run_blocking(local.unlink)

            await carry_out_all(copy, enumerate(found), in_flight_max=IN_FLIGHT_MAX)
        there = {status.path: status.size_bytes for status in await aside.walk()}
        missing = next((s.path for s in found if there.get(s.path) != s.size_bytes), None)
        if missing is not None:
            raise self._refused(
                f"is not whole where it was copied to: {self._aside}/{missing}", "see who deletes there"
            )
        # Without its commits nobody takes for whole what is left.
        await directory.delete(sorted((s.path for s in found), key=lambda path: (_top(path) != COMMITS, path)))
        self._moved_aside = f"{self.location.rstrip('/').rpartition('/')[0]}/{self._aside}"

    def _refused(self, reason: str, hint: str) -> TargetError:
        return TargetError(reason, operation="restore", subject=self.location, hint=hint)


async def _walk(directory: CheckpointDir) -> list[FileStatus]:
    """Every file but those that Hadoop marks directories with, and what its writers left under hidden names."""
    found = await directory.walk()
    return [s for s in found if not any(not name or name.startswith(".") for name in s.path.split("/"))]


async def publish_files(directory: CheckpointDir, root: Path, paths: Iterable[str]) -> None:
    """Publish files so that whatever names a file comes after it (R4).

    Args:
        directory: Where to; what stands there under one of the names is replaced.
        root: Where the files are on this machine.
        paths: Which, relative to both.
    """
    stages: dict[tuple[int, int], list[str]] = {}
    for path in paths:
        stages.setdefault(_stage(path), []).append(path)

    async def publish(path: str) -> None:
        await directory.publish_file(path, root / path, overwrite=True)

    for stage in sorted(stages):
        await carry_out_all(publish, stages[stage], in_flight_max=IN_FLIGHT_MAX)


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

"""What a picture takes of the query itself: its logs, its metadata and its sources (design 0005, P7)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from typing_extensions import override

from blobstore.local_files import run_blocking
from engine.backup_source import BackupSource
from engine.checkpoint.check_hidden import check_hidden
from engine.checkpoint.live_files import LiveFiles, read_small
from engine.local_stat import FilePath, changed_error
from engine.state.batch_logs import COMMITS, ENTRY_BYTES_MAX, OFFSETS
from engine.state.streaming_checkpoint import QueryAt
from index.backup_plan import PlannedFile
from index.batch_log import decode_commit, decode_offsets, decode_operator, decode_query_id, parse_batch_name
from index.local_tree import LocalDir, LocalFile, local_dir_of
from index.model import SnapshotIndex

_QUERY: Final[FilePath] = ("metadata",)
_SOURCES: Final = "sources"
_STATE: Final = "state"
_METADATA: Final = "_metadata"
_SCHEMA: Final = "_stateSchema"
# `state/<operator>/_metadata/v2/<batch>` and `state/<operator>/_metadata/metadata`.
_BY_BATCH: Final = "v2"
_OPERATOR: Final = "metadata"


class QueryFiles(BackupSource):
    """The files of a query at a batch. They are small, and all are read. Made for one backup, after the stores.

    Args:
        files: The checkpoint.
        at: The newest batch of the picture, as its logs were when its stores were taken.
        base_version_max: The greatest version that a store of the picture begins with, 0 being nothing; None if the
            query has no state.
        verify: Whether what is new is checked before it counts (P5).

    Attributes:
        oldest_batch: The oldest one that can be restored. Known once it was looked at.
    """

    def __init__(
        self,
        files: LiveFiles,
        *,
        at: QueryAt,
        base_version_max: int | None,
        verify: bool = True,
    ) -> None:
        self.oldest_batch = at.batch
        self._files = files
        self._at = at
        self._batch = at.batch
        self._base_version_max = base_version_max
        self._verify = verify

    @property
    @override
    def directory(self) -> Path:
        return self._files.directory

    @property
    @override
    def is_lasting(self) -> bool:
        return self._files.is_lasting

    @property
    def requests(self) -> int:
        """How many were made of the checkpoint's store."""
        return self._files.requests

    @override
    async def look(self, previous: SnapshotIndex | None) -> LocalDir:
        brought = await self._files.bring(await self.choose())
        await run_blocking(self._check_batch)
        return local_dir_of(brought)

    async def choose(self) -> tuple[FilePath, ...]:
        """Which files there are: a list for each directory that may have some."""
        rooms = [f"{_STATE}/{operator.id}/{room}" for operator in self._at.operators for room in (_METADATA, _SCHEMA)]
        listed = await self._files.list((COMMITS, OFFSETS, _SOURCES, *rooms))
        self.oldest_batch = _oldest_batch(listed, self._batch, self._base_version_max)
        return tuple(dict.fromkeys((_QUERY, *self._own_logs, *filter(self._is_taken, listed))))

    @property
    def _own_logs(self) -> tuple[FilePath, FilePath]:
        return (COMMITS, str(self._batch)), (OFFSETS, str(self._batch))

    def _check_batch(self) -> None:
        """Refuse the logs of another run of the batch than the one whose stores were taken."""
        commit, offsets = (self._files.directory.joinpath(*path) for path in self._own_logs)
        same = decode_commit(read_small(commit, ENTRY_BYTES_MAX), subject=str(commit)) == self._at.commit
        if not same or decode_offsets(read_small(offsets, ENTRY_BYTES_MAX), subject=str(offsets)) != self._at.offsets:
            raise changed_error(commit)

    def _is_taken(self, path: FilePath) -> bool:
        match path:
            case ("commits", name):
                return _is_within(name, self.oldest_batch, self._batch)
            case ("offsets", name):
                return _is_within(name, self.oldest_batch - 1, self._batch + 1)
            case ("state", _, "_metadata", "v2", name):
                return _is_within(name, 0, self._batch)
            case ("state", _, "_metadata", *rest):
                return rest == [_OPERATOR]
            case _:
                return True

    @override
    async def prepare(self, planned: Sequence[PlannedFile]) -> LocalDir | None:
        if self._verify:
            await run_blocking(self._check, [item.path for item in planned if item.expected is None])
        return None

    def _check(self, paths: Sequence[FilePath]) -> None:
        """Refuse what Spark could not read (P5)."""
        for path in paths:
            at = self._files.directory.joinpath(*path)
            # Of a log one byte may be another, and what stands there can still be read.
            check_hidden(at)
            decode = _decoder(path)
            if decode is not None:
                data = read_small(at, ENTRY_BYTES_MAX)
                decode(data, f"{self._files.location}/{'/'.join(path)}")

    @override
    async def check_held_still(self) -> None:
        """Each file was looked at while it was read, and none is written twice: what is gone since was there."""


def _oldest_batch(listed: Mapping[FilePath, LocalFile], batch: int, base_version_max: int | None) -> int:
    """The oldest batch of which the picture has all state, and whose commit and all after it are there."""
    first = batch if base_version_max is None else max(0, base_version_max - 1)
    oldest = batch
    while oldest > first and (COMMITS, str(oldest - 1)) in listed:
        oldest -= 1
    return oldest


def _is_within(name: str, first: int, last: int) -> bool:
    batch = parse_batch_name(name)
    return batch is not None and first <= batch <= last


def _decoder(path: FilePath) -> Callable[[bytes, str], object] | None:
    match path:
        case ("metadata",):
            return lambda data, subject: decode_query_id(data, subject=subject)
        case ("commits", _):
            return lambda data, subject: decode_commit(data, subject=subject)
        case ("offsets", _):
            return lambda data, subject: decode_offsets(data, subject=subject)
        case ("state", _, "_metadata", *_):
            return lambda data, subject: decode_operator(data, subject=subject)
        case _:
            return None

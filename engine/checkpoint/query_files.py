"""What a backup takes of the query itself: its logs, its metadata and its sources (design 0005, P7)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, TypeVar

from typing_extensions import override

from blobstore.concurrency import run_blocking
from engine.backup.source import BackupSource
from engine.checkpoint.hidden import check_hidden
from engine.checkpoint.live_files import LiveFiles, read_small
from engine.checkpoint.naming import DAMAGE_HINT, located
from engine.errors import DamagedError
from engine.local.scan import changed_error
from engine.state.query import COMMITS, ENTRY_BYTES_MAX, OFFSETS, QueryAt
from index.plan.backup import PlannedFile
from index.snapshot.dir_diff import LocalDir, local_dir_of
from index.snapshot.model import FilePath, SnapshotIndex, UniqueId
from index.spark.checkpoint import StoreId, belongs
from index.spark.lineage import Lineage
from index.spark.names import check_unique_id
from index.spark.query_logs import BatchCommit, decode_commit, decode_offsets, decode_operator, decode_query_id

_QUERY: Final[FilePath] = ("metadata",)
_SOURCES: Final = "sources"
_STATE: Final = "state"
_METADATA: Final = "_metadata"
_SCHEMA: Final = "_stateSchema"

# What an id is of that no store of the backup's has: then the batch cannot be restored from it.
_NO_STORE: Final = ("",)

Entry = TypeVar("Entry")


class QueryFiles(BackupSource):
    """The files of a query at a batch. They are small, and all are read. Made for one backup, after the stores.

    Args:
        files: The checkpoint.
        at: The newest batch of the backup, as its logs were when its stores were taken.
        base_version_max: The greatest version that a store of the backup begins with, 0 being nothing; None if the
            query has no state.
        lineages: Of every store of the backup, the versions with ids that it grew from.
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
        lineages: Mapping[StoreId, Lineage],
        verify: bool = True,
    ) -> None:
        self.oldest_batch = at.batch
        self._files = files
        self._at = at
        self._batch = at.batch
        # Without state, nothing is left of older batches.
        self._first = at.batch if base_version_max is None else max(0, base_version_max - 1)
        self._ids = _ids_by_version(lineages)
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
        rooms = [f"{_STATE}/{operator.id}/{room}" for operator in self._at.operators for room in (_METADATA, _SCHEMA)]
        listed = await self._files.list((COMMITS, OFFSETS, _SOURCES, *rooms))
        self._check_needed(listed)
        before = _batches_before(self._batch, self._first, listed)
        own_logs: tuple[FilePath, FilePath] = ((COMMITS, str(self._batch)), (OFFSETS, str(self._batch)))
        await self._files.bring([*own_logs, *((COMMITS, str(batch)) for batch in before)])
        await run_blocking(self._check_batch)
        self.oldest_batch = await run_blocking(self._oldest_batch, before)
        return local_dir_of(await self._files.bring({_QUERY, *own_logs, *filter(self._is_taken, listed)}))

    def _check_needed(self, listed: Collection[FilePath]) -> None:
        """Refuse a checkpoint from whose newest batch no query goes on.

        Spark reads the offsets of the newest batch that has some, and of the one before it.
        """
        if self._batch and not {(OFFSETS, str(self._batch + at)) for at in (-1, 1)} & set(listed):
            raise self._missing((OFFSETS, str(self._batch - 1)), "the query does not go on")
        for operator in self._at.operators:
            for schema in operator.schemas:
                path = (_STATE, str(operator.id), _SCHEMA, *schema.split("/"))
                if path not in listed:
                    raise self._missing(path, f"nobody can read the rows of operator {operator.id}")

    def _missing(self, path: FilePath, without: str) -> DamagedError:
        subject = f"{self._files.location}/{'/'.join(path)}"
        message = f"is not there, and without it {without}"
        return DamagedError(message, operation="backup", subject=subject, hint=DAMAGE_HINT)

    def _check_batch(self) -> None:
        """Refuse the logs of another run of the batch than the one whose stores were taken."""
        offsets = self._read((OFFSETS, str(self._batch)), decode_offsets)
        if offsets != self._at.offsets or self._commit(self._batch) != self._at.commit:
            raise changed_error(f"{self._files.location}/{COMMITS}/{self._batch}")

    def _oldest_batch(self, before: Sequence[int]) -> int:
        """The oldest of these batches from which on every commit names the state that the backup has."""
        oldest = self._batch
        for batch in before:
            if self._ids_of(batch) != self._ids.get(batch + 1, {}):
                break
            oldest = batch
        return oldest

    def _ids_of(self, batch: int) -> dict[StoreId, UniqueId]:
        """What a commit says of the stores of the backup's operators."""
        path = (COMMITS, str(batch))
        stores = {operator.id: operator.stores for operator in self._at.operators}
        with self._named(path):
            if self._verify:
                check_hidden(self._files.directory.joinpath(*path))
            found = self._commit(batch).unique_ids or {}
            return {
                StoreId(operator, partition, store): check_unique_id(unique_id)
                for operator, partitions in found.items()
                for partition, ids in enumerate(partitions)
                for store, unique_id in zip(stores.get(operator, ()) + _NO_STORE * len(ids), ids, strict=False)
            }

    def _commit(self, batch: int) -> BatchCommit:
        return self._read((COMMITS, str(batch)), decode_commit)

    def _read(self, path: FilePath, decode: Callable[..., Entry]) -> Entry:
        with self._named(path):
            return decode(read_small(self._files.directory.joinpath(*path), ENTRY_BYTES_MAX), subject="/".join(path))

    def _named(self, path: FilePath) -> AbstractContextManager[None]:
        """Lets errors of a block name a file as it is in the checkpoint."""
        return located(self._files.location, "/".join(path), private=self._files.directory)

    def _is_taken(self, path: FilePath) -> bool:
        return belongs(path, self.oldest_batch, self._batch)

    @override
    async def prepare(self, planned: Sequence[PlannedFile]) -> LocalDir | None:
        if self._verify:
            await run_blocking(self._check, [item.path for item in planned if item.expected is None])
        return None

    def _check(self, paths: Sequence[FilePath]) -> None:
        """Refuse what Spark could not read (P5)."""
        for path in paths:
            with self._named(path):
                # Of a log one byte may be another, and what stands there can still be read.
                check_hidden(self._files.directory.joinpath(*path))
            decode = _decoder(path)
            if decode is not None:
                self._read(path, decode)

    @override
    async def check_held_still(self) -> None:
        """Each file was looked at while it was read, and none is written twice: what is gone since was there."""


def _batches_before(batch: int, first: int, listed: Collection[FilePath]) -> tuple[int, ...]:
    """The batches before one, newest first, whose logs are all there, with the offsets of the batch before the last."""
    found = []
    for before in range(batch - 1, first - 1, -1):
        if any((room, str(before)) not in listed for room in (COMMITS, OFFSETS)):
            break
        if before and (OFFSETS, str(before - 1)) not in listed:
            break
        found.append(before)
    return tuple(found)


def _ids_by_version(lineages: Mapping[StoreId, Lineage]) -> dict[int, dict[StoreId, UniqueId]]:
    found: dict[int, dict[StoreId, UniqueId]] = {}
    for store, lineage in lineages.items():
        for item in lineage:
            found.setdefault(item.version, {})[store] = item.unique_id
    return found


def _decoder(path: FilePath) -> Callable[..., object] | None:
    match path:
        case ("metadata",):
            return decode_query_id
        case ("commits", _):
            return decode_commit
        case ("offsets", _):
            return decode_offsets
        case ("state", _, "_metadata", *_):
            return decode_operator
        case _:
            return None

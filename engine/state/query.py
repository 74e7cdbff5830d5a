"""A streaming query's checkpoint as a whole: which batches are committed, and which state of which store each one is.

The commit log is the root (design 0004, B3): file names alone cannot say which attempt at a version counts.

The offset log and the commit log have one file for each batch, published once, by one atomic request, and never changed
(design 0004, B1): two queries never both own a batch. Spark's `HDFSMetadataLog` does the same.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Generic, Literal, Self, TypeVar

import msgspec

from blobstore.base import BlobStore
from blobstore.checkpoint_files import FileStatus
from blobstore.errors import BlobNotFoundError, CheckpointFileExistsError
from engine.errors import DamagedError, NotFoundError, ProviderError, UsageError, bare_message, restated
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.settings import (
    HDFS_PROVIDER,
    PROVIDER_KEY,
    ROCKSDB_PROVIDER,
    SPARK_OLD_CHECKPOINT,
    StateStoreSettings,
)
from index.errors import BatchLogError, FormatError
from index.snapshot.model import SIZE_BYTES_MAX, UniqueId
from index.spark import query_logs
from index.spark.checkpoint import STATE, StoreId
from index.spark.names import StateVersion, check_store_dir, check_unique_id
from index.spark.schema import SCHEMA_BYTES_MAX, decode_state_schema

OFFSETS: Final = "offsets"
COMMITS: Final = "commits"

# Offsets of a source with very many partitions take megabytes.
ENTRY_BYTES_MAX: Final = 64 * 1024 * 1024

E = TypeVar("E")


class BatchLog(Generic[E]):
    """A directory of a checkpoint with one file for each batch, which need not exist: its offset or commit log."""

    def __init__(self, root: CheckpointDir, name: str, encode: Callable[[E], bytes], decode: Callable[..., E]) -> None:
        self._directory = root.child(name)
        self._name = name
        self._encode = encode
        self._decode = decode

    async def add(self, batch: int, entry: E) -> bool:
        """Write the file of a batch, unless there is one; return whether this call wrote it. Costs one request.

        If not, another query works on this checkpoint, or an earlier attempt of the caller got further than it knew.
        `get` shows which.

        Raises:
            CheckpointUnknownError: The store never said; `get` shows it, once it answers.
            StoreError: It was not written.
            FormatError: The entry cannot be written in its version.
        """
        name = self._file_name(batch, "add")
        try:
            await self._directory.publish(name, self._encode(entry), overwrite=False)
        except CheckpointFileExistsError:
            return False
        return True

    async def get(self, batch: int) -> E | None:
        """Read the file of a batch; None if there is none. Costs one request.

        Raises:
            BatchLogError: It is not what Spark writes.
            UnknownFormatError: It is of a newer version (design 0004, B2).
        """
        name = self._file_name(batch, "get")
        try:
            data = await self._directory.read(name, size_bytes_max=ENTRY_BYTES_MAX)
        except BlobNotFoundError:
            return None
        return self._decode(data, subject=f"{self._name}/{name}")

    async def batches(self) -> tuple[int, ...]:
        """List the batches that have a file, ascending. Costs one list."""
        return tuple(_numbers(status for status in await self._directory.list() if not status.is_directory))

    def _file_name(self, batch: int, operation: str) -> str:
        if not 0 <= batch < SIZE_BYTES_MAX:
            raise UsageError(f"{batch} is not a batch", operation=operation, subject=self._name)
        return str(batch)


def _numbers(named: Iterable[FileStatus]) -> list[int]:
    return sorted(found for of in named if (found := query_logs.parse_batch_name(of.name)) is not None)


PARTITIONS_KEY: Final = "spark.sql.shuffle.partitions"
# More than any query has; each is a directory that is looked for.
PARTITIONS_MAX: Final = 100_000

_METADATA: Final = "metadata"
_OPERATOR_DIR: Final = "_metadata"
_OPERATOR: Final = "_metadata/metadata"
_OPERATOR_BY_BATCH: Final = "_metadata/v2"
_LOST: Final = "take the directory from a backup, or restore the checkpoint"
_LOST_OR_OLD: Final = (
    "Spark before 4.0 writes none: start the query once with Spark 4; if it was lost, take it from a backup"
)

# Keeps its state in one partition, whatever its metadata says of their number; so does this one without grouping keys.
SINGLE_PARTITION: Final = frozenset({"globalLimit"})
_AGGREGATION: Final = "stateStoreSave"
_FIRST_SCHEMA: Final = "0/_metadata/schema"


class StateOperator(msgspec.Struct, frozen=True, kw_only=True):
    """A stateful operator as one batch left it."""

    id: int
    # As Spark calls it, such as "stateStoreSave".
    name: str
    # In the order in which a commit has their ids.
    stores: tuple[str, ...]
    partitions_count: int
    # Whether it has one partition, whatever the query pins.
    is_single: bool = False
    # Whether the keys of its stores carry the number of a virtual column family.
    column_families: bool
    # By store: the columns of a key that lead it, where any do.
    prefix_columns: dict[str, int] = {}
    # The files that its metadata names in `state/<id>/_stateSchema/`, from there.
    schemas: tuple[str, ...] = ()
    # As `OperatorMetadata`.
    properties: str = ""


class _Committed(msgspec.Struct, frozen=True, kw_only=True):
    batch: int
    commit: query_logs.BatchCommit
    offsets: query_logs.BatchOffsets

    def describe(
        self, metadata: query_logs.OperatorMetadata, stores: tuple[str, ...], *, is_keyless: bool
    ) -> StateOperator:
        """Describe an operator as the batch left it, with partitions by the commit, or else by the pinned settings."""
        is_single = is_keyless or metadata.name in SINGLE_PARTITION
        if self.commit.unique_ids is not None:
            count = len(self.commit.unique_ids.get(metadata.id, ()))
        elif is_single:
            count = 1
        else:
            # After an offline repartition the metadata of the operator still has the old number.
            pinned = self.offsets.conf.get(PARTITIONS_KEY, "")
            count = int(pinned) if pinned.isdecimal() else max((s.partitions_count for s in metadata.stores), default=0)
            if not 0 < count <= PARTITIONS_MAX:
                message = f"gives operator {metadata.id} {count} partitions, and 1 to {PARTITIONS_MAX} can be"
                raise BatchLogError(message, subject=f"{OFFSETS}/{self.batch}")
        return StateOperator(
            id=metadata.id,
            name=metadata.name,
            stores=stores,
            partitions_count=count,
            is_single=is_single,
            # Spark describes an operator in this form exactly if its stores have virtual column families.
            column_families=metadata.version > 1,
            prefix_columns={s.name: s.prefix_columns_count for s in metadata.stores if s.prefix_columns_count},
            schemas=metadata.schemas,
            properties=metadata.properties,
        )

    @property
    def is_hdfs(self) -> bool:
        return provider_of(self.offsets) == HDFS_PROVIDER

    def check_provider(self) -> None:
        """Refuse a checkpoint whose provider is none of Spark's, by a `ProviderError` that names it (0004, B4)."""
        provider = provider_of(self.offsets)
        if provider not in {ROCKSDB_PROVIDER, HDFS_PROVIDER}:
            reason = f"the query is pinned to the state store provider {provider}"
            raise ProviderError(reason, operation="read state", subject=f"{OFFSETS}/{self.batch}")

    def settings_of(self, operator: StateOperator, base: StateStoreSettings) -> StateStoreSettings:
        version: Literal[1, 2] = 1 if self.commit.unique_ids is None else 2
        pinned = msgspec.structs.replace(
            base, format_version=version, column_families=operator.column_families, is_hdfs=self.is_hdfs
        )
        with _of_file(f"{OFFSETS}/{self.batch}"):
            return StateStoreSettings.from_conf(self.offsets.conf, pinned)

    def version_of(self, operator: StateOperator, partition: int, store: str) -> StateVersion:
        unique_ids = self.commit.unique_ids
        which = f"operator {operator.id} ({operator.name})"
        if store not in operator.stores:
            raise _no_such(f"{which} has no store {store!r}, but {', '.join(operator.stores)}", self.batch)
        if not 0 <= partition < operator.partitions_count:
            raise _no_such(f"{which} has no partition {partition}", self.batch)
        if unique_ids is None:
            return StateVersion(self.batch + 1, is_hdfs=self.is_hdfs)
        ids = unique_ids[operator.id][partition]
        if len(ids) != len(operator.stores):
            reason = f"has {len(ids)} ids for the {len(operator.stores)} stores of operator {operator.id}"
            raise BatchLogError(reason, subject=f"{COMMITS}/{self.batch}")
        with _of_file(f"{COMMITS}/{self.batch}"):
            return StateVersion(self.batch + 1, check_unique_id(ids[operator.stores.index(store)]))


class StoreAt(msgspec.Struct, frozen=True, kw_only=True):
    """One state store as a batch left it: what to load, and how."""

    id: StoreId
    at: StateVersion
    settings: StateStoreSettings


class QueryAt(_Committed, frozen=True, kw_only=True):
    """A query as one committed batch left it."""

    # By id; none for a query without state.
    operators: tuple[StateOperator, ...]
    # Every store of every partition of every operator, in this order.
    stores: tuple[StoreAt, ...]


class StreamingCheckpoint:
    """Reads the checkpoint of one query.

    Nothing that can change is cached, so what the query writes meanwhile is seen; only a directory that is a look
    (`CheckpointDir.look`) shows each file as it read it first. A batch that is an argument is a committed one, by
    default the newest.

    Raises:
        NotFoundError: From every method of a batch: it is not committed, or has no such operator, partition or store.
        ProviderError: Likewise: the state is not RocksDB's (design 0004, B4).
        BatchLogError: Likewise: a file is not what Spark writes.
    """

    def __init__(self, directory: CheckpointDir, *, single: Collection[int] = ()) -> None:
        self._directory = directory
        # By operator: whether it is an aggregation without grouping keys. Of those in `single`, one partition is known.
        self._keyless: dict[int, bool] = dict.fromkeys(single, True)
        # What each batch reads, written before it; which are done, and under which ids their state is kept (B3).
        self.offsets = BatchLog(directory, OFFSETS, query_logs.encode_offsets, query_logs.decode_offsets)
        self.commits = BatchLog(directory, COMMITS, query_logs.encode_commit, query_logs.decode_commit)

    @classmethod
    async def open(cls, location: str | Path | BlobStore, prefix: str = "") -> Self:
        """Open a checkpoint, as `CheckpointDir.open`. No request is made."""
        return cls(await CheckpointDir.open(location, prefix))

    async def close(self) -> None:
        """Release connections and files."""
        await self._directory.close()

    async def query_id(self) -> str:
        """Read the id of the query; a `NotFoundError` if there is no checkpoint here."""
        try:
            data = await self._directory.read(_METADATA, size_bytes_max=ENTRY_BYTES_MAX)
        except BlobNotFoundError as error:
            hint = "name the checkpointLocation of a query"
            place = self._directory.location
            raise NotFoundError("there is no checkpoint here", operation="read", subject=place, hint=hint) from error
        return query_logs.decode_query_id(data)

    async def committed_batches(self) -> tuple[int, ...]:
        """List the batches that are committed and not purged, ascending. Costs one list."""
        return await self.commits.batches()

    async def at(self, batch: int | None = None, *, base: StateStoreSettings = SPARK_OLD_CHECKPOINT) -> QueryAt:
        """Read the whole query as a batch left it, which a backup is made of (design 0005, P1).

        Costs a list, and for each operator two or three requests more. `base` are the settings where neither the offset
        log nor the commit log says anything, such as whether there are changelogs.

        Raises:
            DamagedError: There is state of an operator, and no metadata of it.
            UnsafeNameError: An id in the commit log, or the name of a store, cannot be part of a path.
            UsageError: A pinned setting is unknown.
        """
        at = await self._committed(batch)
        operators = await self._operators(at)
        stores = []
        for operator in operators:
            settings = at.settings_of(operator, base)
            for partition in range(operator.partitions_count):
                for store in operator.stores:
                    of = StoreId(operator.id, partition, store)
                    stores.append(StoreAt(id=of, at=at.version_of(operator, partition, store), settings=settings))
        return QueryAt(batch=at.batch, commit=at.commit, offsets=at.offsets, operators=operators, stores=tuple(stores))

    async def _operators(self, at: _Committed) -> tuple[StateOperator, ...]:
        there = await self._numbered(STATE)
        if there:  # a query without state is pinned to whatever the session said
            at.check_provider()
        ids = at.commit.unique_ids
        operators = []
        for number in sorted({*there, *(ids or ())}):
            if ids is not None and number not in ids:
                continue  # a later batch brought it, or an earlier one had it
            operator = await self._operator(number, at)
            if operator is not None:
                operators.append(operator)
            elif any(map(any, ids[number])) if ids is not None else await self._is_undescribed(number):
                reason, subject = "is not there, and the operator has state", f"{STATE}/{number}/{_OPERATOR_DIR}"
                hint = _LOST_OR_OLD if ids is None else _LOST
                raise DamagedError(reason, operation="read", subject=subject, hint=hint)
        return tuple(operators)

    async def _numbered(self, path: str) -> list[int]:
        return _numbers(status for status in await self._directory.list(path) if status.is_directory)

    async def _is_undescribed(self, operator: int) -> bool:
        """Return whether an operator has state and no metadata, not even of a later batch."""
        root = f"{STATE}/{operator}"
        return bool(await self._numbered(root)) and not await self._directory.list(f"{root}/{_OPERATOR_BY_BATCH}")

    async def state(
        self,
        operator: int = 0,
        partition: int = 0,
        store: str = query_logs.DEFAULT_STORE,
        *,
        batch: int | None = None,
        base: StateStoreSettings = SPARK_OLD_CHECKPOINT,
    ) -> StoreAt:
        """Find one store as `at` does, with one request or two for its operator alone."""
        at = await self._committed(batch)
        at.check_provider()
        found = await self._operator(operator, at)
        if found is None:
            raise _no_such(f"the query has no stateful operator {operator}", at.batch)
        version, settings = at.version_of(found, partition, store), at.settings_of(found, base)
        return StoreAt(id=StoreId(operator, partition, store), at=version, settings=settings)

    def state_dir(self, operator: int = 0, partition: int = 0, store: str = query_logs.DEFAULT_STORE) -> CheckpointDir:
        """Open the directory of one store, which is closed with this.

        Raises:
            UsageError: Operator or partition is negative.
            UnsafeNameError: The store has a bad name.
        """
        if operator < 0 or partition < 0:
            raise UsageError("is negative", operation="read", subject=f"operator {operator}, partition {partition}")
        return self._directory.child(StoreId(operator, partition, store).path)

    async def _committed(self, batch: int | None) -> _Committed:
        if batch is None:
            batches = await self.commits.batches()
            if not batches:
                raise NotFoundError("no batch is committed", operation="read", subject=COMMITS, hint="run the query")
            batch = batches[-1]
        commit = await self.commits.get(batch)
        if commit is None:
            raise _no_such("it is not committed, or was purged", batch)
        offsets = await self.offsets.get(batch)
        if offsets is None:
            reason = "its batch is committed, but its offsets are not there"
            hint = "take the file from a backup, or restore the checkpoint"
            raise NotFoundError(reason, operation="read", subject=f"{OFFSETS}/{batch}", hint=hint)
        return _Committed(batch=batch, commit=commit, offsets=offsets)

    async def _operator(self, operator: int, at: _Committed) -> StateOperator | None:
        """Read an operator from the metadata that applies to a batch; None if there is none."""
        root = self._directory.child(f"{STATE}/{operator}")
        name, by_batch = _OPERATOR, _numbers(await root.list(_OPERATOR_BY_BATCH))
        if by_batch:
            applies = max((found for found in by_batch if found <= at.batch), default=None)
            if applies is None:
                return None
            name = f"{_OPERATOR_BY_BATCH}/{applies}"
        try:
            data = await root.read(name, size_bytes_max=ENTRY_BYTES_MAX)
        except BlobNotFoundError:
            return None
        path = f"{STATE}/{operator}/{name}"
        metadata = query_logs.decode_operator(data, subject=path)
        if metadata.id != operator:
            raise BatchLogError(f"describes operator {metadata.id}", subject=path)
        with _of_file(path):
            stores = query_logs.order_stores(check_store_dir(store.name) for store in metadata.stores)
        ids = at.commit.unique_ids
        may_be_keyless = metadata.name == _AGGREGATION and (ids is None or len(ids.get(operator, ())) == 1)
        is_keyless = may_be_keyless and await self._is_keyless(operator, root)
        return at.describe(metadata, stores, is_keyless=is_keyless)

    async def _is_keyless(self, operator: int, root: CheckpointDir) -> bool:
        """Return whether an aggregation has no grouping keys, which Spark plans with one partition; as the schema says.

        It is read once, as it never changes. Where it is not there, or damaged, there are keys.
        """
        if operator not in self._keyless:
            try:
                data = await root.read(_FIRST_SCHEMA, size_bytes_max=SCHEMA_BYTES_MAX)
                self._keyless[operator] = not decode_state_schema(data)[0].key.fields
            except (BlobNotFoundError, DamagedError, FormatError):
                return False
        return self._keyless[operator]


def name_stores(
    commit: query_logs.BatchCommit, at: QueryAt, ids: Mapping[StoreId, UniqueId | None]
) -> query_logs.BatchCommit:
    """Give a commit the ids of the new stores; none, and a version that knows of none, for format 1."""
    if not ids:
        return commit  # without state there is nothing to name
    if None in ids.values():
        version = commit.version if commit.version >= query_logs.SINKS_VERSION else 1
        return msgspec.structs.replace(commit, version=version, unique_ids=None)
    unique_ids = {
        operator.id: tuple(
            tuple(ids[StoreId(operator.id, partition, store)] or "" for store in operator.stores)
            for partition in range(operator.partitions_count)
        )
        for operator in at.operators
    }
    version = max(commit.version, query_logs.UNIQUE_IDS_VERSION)
    return msgspec.structs.replace(commit, version=version, unique_ids=unique_ids)


def provider_of(offsets: query_logs.BatchOffsets) -> str:
    """Return the state store provider that a query is pinned to.

    Spark pins it since before it had one for RocksDB: where none is pinned, it was the HDFS-backed one.
    """
    return offsets.conf.get(PROVIDER_KEY, HDFS_PROVIDER)


@contextmanager
def _of_file(path: str) -> Iterator[None]:
    try:
        yield
    except (FormatError, UsageError) as error:
        message = bare_message(error)
        message = f"{error.subject}: {message}" if error.subject else message
        raise restated(error, subject=path, message=message) from error.__cause__


def _no_such(reason: str, batch: int) -> NotFoundError:
    hint = "commits/ of the checkpoint says which batches there are, state/ which operators and partitions"
    return NotFoundError(reason, operation="read", subject=f"batch {batch}", hint=hint)

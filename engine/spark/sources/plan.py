"""Plan a read of state on the driver, from Spark's options: where it is, which stores at which versions, what rows.

What travels to a task says where to look and holds no credentials: each process finds its own. A place, which is a
checkpoint or a backup of one in a repository, opens the files of a store, and the logs and the metadata of the query
laid out as in a checkpoint; each for a block, with the loop thread that runs what is asked of them.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Final, Literal, TypeAlias, get_args

import msgspec

from blobstore.concurrency import map_bounded
from blobstore.errors import BlobNotFoundError
from blobstore.opening import StoreSettings
from blobstore.s3.settings import S3Settings
from engine.blocking import LoopThread
from engine.checkpoint.restore import find_checkpoint_backup
from engine.errors import DamagedError, NotFoundError, UsageError
from engine.records.find import require_store
from engine.repository.repository import Repository
from engine.restore.restore import read_index_of, staged_restore
from engine.runtime import Runtime
from engine.settings import MIB
from engine.spark.access import Access, SparkOptions, absolute, open_on_driver
from engine.spark.sources.tables import Kind, Table
from engine.state.checkpoint_dir import CheckpointDir, StateFiles, opened_checkpoint
from engine.state.files import StateFileManager
from engine.state.key_rules import AVRO, SCHEMA_PATH, read_families
from engine.state.load import StateLoader, check_target
from engine.state.loaded import LoadedState
from engine.state.local_files import WorkingDir, unwritable_error
from engine.state.query import QueryAt, StateOperator, StoreAt, StreamingCheckpoint
from engine.state.restore import IndexStateFiles
from engine.state.settings import ENCODING_KEY
from index.errors import BatchLogError, FormatError
from index.plan.commits import Commit
from index.snapshot.contents import files_of, select_files
from index.spark.checkpoint import QUERY_STORE, QUERY_TASK, SOURCES, StoreId, single_operators
from index.spark.query_logs import decode_state_variables
from index.spark.schema import (
    SCHEMA_BYTES_MAX,
    KeyForm,
    StateSchema,
    StructType,
    decode_key_form,
    decode_state_schema,
    with_unique_names,
)

RowForm = Literal["typed", "bytes"]

_WHERE: Final = frozenset({"path", "checkpoint", "repository", "job"})
_WHICH: Final = frozenset({"operator", "partition", "store"})
_ROWS: Final = frozenset({"family", "rows", "max_partition_bytes"})
# What each source takes beside where to read.
_TAKEN: Final = {
    "tidemark_state": _WHICH | _ROWS | {"batch"},
    "tidemark_state_diff": _WHICH | _ROWS | {"from_batch", "to_batch"},
    "tidemark_files": _WHICH | {"batch"},
}
_NUMBERS: Final = frozenset({"batch", "operator", "from_batch", "to_batch", "max_partition_bytes"})
_CHANGES: Final = "the source tidemark_state_diff, from the batch before the first change: from_batch, to_batch"
_NO_SNAPSHOT: Final = "batch, and partition where one is enough; a snapshot that is damaged is passed over by itself"
# What Spark's own reader of state, `statestore`, calls its options, in lower case, and what does the same here.
_SPARKS: Final = {
    "batchid": "batch, or from_batch and to_batch",
    "operatorid": "operator",
    "storename": "store, or family where one store has all families",
    "joinside": "store, or family where one store has all families, such as left-keyWithIndexToValue",
    "statevarname": "family",
    "readregisteredtimers": "family: $eventTimers_keyToTimestamp or $procTimers_keyToTimestamp",
    "flattencollectiontypes": "lists and maps always have a row for each element",
    **dict.fromkeys(("readchangefeed", "changestartbatchid", "changeendbatchid"), _CHANGES),
    **dict.fromkeys(("snapshotstartbatchid", "snapshotpartitionid"), _NO_SNAPSHOT),
}
# Of `blobstore.s3.settings.S3Settings`: `s3.endpoint_url`, `s3.path_style` and so on.
_S3: Final = "s3."
# What Spark's other file systems for S3 are called.
_HADOOP_S3: Final = re.compile(r"s3[an]://", re.IGNORECASE)


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one read."""

    # Exactly one of these two.
    checkpoint: str | None = None
    repository: str | None = None
    # Of the repository; None: the only one that has checkpoint backups.
    job: str | None = None
    # A committed one; None: the newest.
    batch: int | None = None
    from_batch: int | None = None
    to_batch: int | None = None
    # None: all of them.
    operator: int | None = None
    partitions: tuple[int, ...] = ()
    store: str | None = None
    # A state variable, or another column family, of stores that have them.
    family: str | None = None
    # None: typed where one table fits all that is read, else bytes.
    rows: RowForm | None = None
    # Stores share an input partition up to this size of their files together, and 4 MiB for each. A task of Spark that
    # runs Python costs as much as to read some 10 MB, and a large store should not wait for another.
    max_partition_bytes: int = 32 * MIB
    # How the store is reached; its credentials each process finds by itself.
    s3: S3Settings = S3Settings()

    @classmethod
    def parse(cls, options: Mapping[str, str], source: str) -> "SourceOptions":
        """Check the options of a source as Spark gives them, of any case.

        Raises:
            UsageError: One is unknown, cannot be read, or they contradict each other.
        """
        said = {name.lower(): value for name, value in options.items()}
        s3 = {name: said.pop(f"{_S3}{name}") for name in S3Settings.__struct_fields__ if f"{_S3}{name}" in said}
        known = _WHERE | _TAKEN[source]
        for name in said:
            if name in _SPARKS:
                raise _refused(source, name, f"is an option of Spark's reader; here: {_SPARKS[name]}")
            if name not in known:
                raise _refused(source, name, f"is not an option; there are {', '.join(sorted(known - {'path'}))}")
        values: dict[str, object] = {name: _value(source, name, text) for name, text in said.items()}
        path = values.pop("path", None)
        if path is not None:
            if "checkpoint" in values:
                raise _refused(source, "checkpoint", "is given, and a path too")
            values["checkpoint"] = path
        if ("checkpoint" in values) == ("repository" in values):
            raise _refused(source, "checkpoint", "or repository has to be given, and not both")
        if "job" in values and "repository" not in values:
            raise _refused(source, "job", "goes with a repository")
        try:
            values["s3"] = msgspec.convert(s3, S3Settings, strict=False)
        except msgspec.ValidationError as error:
            raise _refused(source, f"{_S3}*", f"cannot be: {error}") from None
        partitions = str(values.pop("partition", ""))
        if partitions:
            values["partitions"] = tuple(_number(source, "partition", each) for each in partitions.split(","))
        return msgspec.convert(values, cls)

    def chooses(self, of: StoreId) -> bool:
        is_of = self.operator in {None, of.operator} and self.store in {None, of.store}
        return is_of and (not self.partitions or of.partition in self.partitions)

    @property
    def chooses_stores(self) -> bool:
        return self.operator is not None or self.store is not None or bool(self.partitions)


@contextlib.contextmanager
def noting_hints() -> Iterator[None]:
    """Add the hint of an error to its notes: of what a worker raises Spark shows the traceback alone."""
    try:
        yield
    except Exception as error:
        hint = getattr(error, "hint", "")
        if hint:
            error.add_note(f"hint: {hint}")
        raise


def _value(source: str, name: str, text: str) -> str | int:
    if name in _NUMBERS:
        return _number(source, name, text)
    if name == "rows" and text not in get_args(RowForm):
        raise _refused(source, name, f"is {text!r}, and has to be one of {', '.join(get_args(RowForm))}")
    return _HADOOP_S3.sub("s3://", text) if name in {"path", "checkpoint"} else text


def _number(source: str, name: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal()):
        raise _refused(source, name, f"is {text!r}, and has to be a number")
    return int(text)


def _refused(source: str, name: str, reason: str) -> UsageError:
    return UsageError(reason, operation=source, subject=name, hint="see docs/how-to/spark.md on reading state")


# Where Spark lets a worker keep what is too large for memory.
_LOCAL_DIRS: Final = "SPARK_LOCAL_DIRS"
_MEASURED_AT_ONCE: Final = 16
# What it takes to open a store and to load its files, one after the other, in bytes that are read meanwhile.
_OPEN_BYTES: Final = 4 * MIB


class CheckpointPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, by its path or URL."""

    location: str
    settings: StoreSettings = StoreSettings()

    # As of `StreamingCheckpoint`, which finds out itself.
    single: ClassVar[frozenset[int]] = frozenset()

    def of(self, *stores: StoreId) -> "CheckpointPlace":  # noqa: ARG002  # all of it is one place
        return self

    def measure(self, loop: LoopThread, directory: CheckpointDir, stores: Sequence[StoreId]) -> list[int]:
        """Return the bytes of each store's files, in `directory` as `open_logs` has opened it: one LIST for each."""

        async def measure(of: StoreId) -> int:
            return sum(status.size_bytes for status in await directory.walk(of.path))

        return loop.run(map_bounded(measure, stores, in_flight_max=_MEASURED_AT_ONCE))

    @contextlib.contextmanager
    def open_store(self, store: StoreId) -> Iterator[tuple[LoopThread, StateFiles]]:
        with self.open_logs() as (loop, directory):
            yield loop, directory.child(store.path)

    @contextlib.contextmanager
    def open_logs(self, scratch: Path | None = None) -> Iterator[tuple[LoopThread, CheckpointDir]]:  # noqa: ARG002
        """Open all of it; no copy is made. Within `kept_open` it is that which is open."""
        if self in _KEPT_OPEN:
            yield _KEPT_OPEN[self]
            return
        with contextlib.ExitStack() as stack:
            loop = LoopThread()
            stack.callback(loop.stop)
            directory = loop.run(CheckpointDir.open(self.location, settings=self.settings))
            stack.callback(lambda: loop.run(directory.close()))
            yield loop, directory

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Open it once for all that opens it in a block, which is run by one thread of this process at a time."""
        with self.open_logs() as opened:
            _KEPT_OPEN[self] = opened
            try:
                yield
            finally:
                del _KEPT_OPEN[self]


class BackupPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint backup in a repository. What is read of it is pinned meanwhile (design 0002, D5)."""

    access: Access
    commit: Commit

    @property
    def single(self) -> frozenset[int]:
        """As of `StreamingCheckpoint`."""
        return single_operators(self.commit.record.stores, self.commit.record.version)

    def of(self, *stores: StoreId) -> "BackupPlace":
        """Keep these stores and the query's own: a task is not sent what all others read."""
        wanted = {(QUERY_TASK, QUERY_STORE), *((of.task, of.store) for of in stores)}
        kept = tuple(store for store in self.commit.record.stores if (store.task, store.store) in wanted)
        record = msgspec.structs.replace(self.commit.record, stores=kept)
        return msgspec.structs.replace(self, commit=msgspec.structs.replace(self.commit, record=record))

    def measure(self, loop: LoopThread, directory: CheckpointDir, stores: Sequence[StoreId]) -> list[int]:  # noqa: ARG002
        """Return the bytes of each store's files, as the commit has them."""
        return [require_store(self.commit, of.task, of.store).size_bytes for of in stores]

    def kept_open(self) -> AbstractContextManager[object]:
        return self.access.borrow()

    @contextlib.contextmanager
    def open_store(self, store: StoreId | None) -> Iterator[tuple[LoopThread, IndexStateFiles]]:
        """Open the files of a store; None: of the query's own."""
        task, name = (QUERY_TASK, QUERY_STORE) if store is None else (store.task, store.store)
        with self.access.borrow() as repository:
            files = repository.asynchronous.state_files(self.commit, task=task, store=name)
            with repository.inside(files) as opened:
                yield repository.loop, opened

    @contextlib.contextmanager
    def open_logs(self, scratch: Path) -> Iterator[tuple[LoopThread, CheckpointDir]]:
        """Bring the logs to this machine, without those of sources, which may be long."""
        with self.access.borrow() as repository:
            target = scratch / "query"
            repository.loop.run(self._fetch_logs(repository.asynchronous, target))
            with repository.inside(opened_checkpoint(target)) as directory:
                yield repository.loop, directory

    async def _fetch_logs(self, repository: Repository, target: Path) -> None:
        reference = require_store(self.commit, QUERY_TASK, QUERY_STORE)
        opened = repository.opened.without_digests()
        async with repository.pinned(self.commit, "read logs"), staged_restore(opened, target) as staged:
            index, requests = await read_index_of(repository.store, reference)
            wanted = [(path, entry) for path, entry in files_of(index.dir) if path[0] != SOURCES]
            await staged.download(select_files(index, wanted), requests=requests)
            await staged.publish()


Place: TypeAlias = CheckpointPlace | BackupPlace
_KEPT_OPEN: Final[dict[CheckpointPlace, tuple[LoopThread, CheckpointDir]]] = {}


def find_place(options: SourceOptions, batch: int | None) -> Place:
    """Find the state after a batch, the newest if none is given. For the driver."""
    settings = StoreSettings(s3=options.s3)
    if options.repository is None:
        return CheckpointPlace(location=absolute(options.checkpoint or ""), settings=settings)
    repository, access = open_on_driver(options.repository, SparkOptions(store=settings))
    with repository:
        commit, _ = repository.loop.run(find_checkpoint_backup(repository.asynchronous, options.job, batch=batch))
    return BackupPlace(access=access, commit=commit)


@contextlib.contextmanager
def scratch_dir() -> Iterator[Path]:
    """Make a directory for a block, where Spark keeps its temporary files if it says where."""
    roots = (root for root in os.environ.get(_LOCAL_DIRS, "").split(",") if os.access(root, os.W_OK))
    with tempfile.TemporaryDirectory(prefix="tidemark-", dir=next(roots, None), ignore_cleanup_errors=True) as found:
        yield Path(found)


_READ: Final = "read state"
# By the type of a state variable, as the operator's metadata has it.
_KINDS: Final[dict[str, Kind]] = {"ListState": "list", "MapState": "map", "TimerState": "timer"}
_JOIN: Final = "symmetricHashJoin"
# The column families of a join of state format 4: what is under one key and time is a list.
_JOIN_LISTS: Final = ("-keyWithTsToValues", "-tsWithKey")


# By operator, its column families and the schemas that each has had, as `read_families`.
_Families: TypeAlias = dict[int, dict[str, list[StateSchema]]]


class StoreRead(msgspec.Struct, frozen=True, kw_only=True):
    """One store to read, and where."""

    place: Place
    store: StoreAt
    # Of all of its files, those of other versions too.
    size_bytes: int = 0


class QueryRead(msgspec.Struct, frozen=True, kw_only=True):
    """The stores of a query that one of its batches left, as the options choose them."""

    batch: int
    place: Place
    stores: tuple[StoreRead, ...]
    # None: the rows are read as bytes.
    table: Table | None
    # Empty if no read depends on them.
    families: _Families

    def has(self, family: str) -> bool:
        """Return whether an operator had a column family."""
        return any(family in names for names in self.families.values())


class StoreWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one task reads: the rows of a store at one batch, or what changed from one batch to another."""

    id: StoreId
    # None: the query had no such store at that batch.
    reads: tuple[StoreRead | None, ...]
    table: Table | None
    # None: the rows of all column families.
    family: str | None = None
    # As they are stored; None: the rows of all keys.
    keys: tuple[bytes, ...] | None = None

    @property
    def changes(self) -> bool:
        return len(self.reads) > 1

    @property
    def version(self) -> int | None:
        return None if self.changes or self.reads[0] is None else self.reads[0].store.at.version

    @property
    def subject(self) -> str:
        return f"state of {self.id}"

    @property
    def size_bytes(self) -> int:
        return sum(read.size_bytes for read in self.reads if read is not None)

    def columns(self) -> dict[str, object]:
        """Return the values of the columns that are known before anything is read; filters are pushed down on these."""
        return {**msgspec.structs.asdict(self.id), **({} if self.changes else {"version": self.version})}


class ReadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one DataFrame reads, a task for one store or several small ones."""

    works: tuple[StoreWork, ...]
    table: Table | None
    changes: bool
    max_partition_bytes: int


def plan_state(options: SourceOptions, batch: int | None) -> QueryRead:
    """Choose the stores to read for a batch, and what their rows are.

    Raises:
        NotFoundError: There is no such batch, operator or store.
        UsageError: Typed rows are asked for, and there is no one table.
        ProviderError, FormatError, EngineError, StoreError: As `StreamingCheckpoint.at`.
    """
    place = find_place(options, batch)
    with scratch_dir() as scratch, place.open_logs(scratch) as (loop, directory):
        query = loop.run(StreamingCheckpoint(directory, single=place.single).at(batch))
        chosen = tuple(store for store in query.stores if options.chooses(store.id))
        if not chosen and query.stores:
            raise _no_such_store(options, query)
        families: _Families = {}
        if options.family is not None or options.rows == "typed":
            ids = {store.id.operator for store in chosen}
            families = {of.id: loop.run(read_families(directory, of)) for of in query.operators if of.id in ids}
        table = None if options.rows == "bytes" else _find_table(place, query, chosen, families, options.family)
        is_alone = len(chosen) <= 1 or not options.max_partition_bytes
        sizes = [0] * len(chosen) if is_alone else place.measure(loop, directory, [store.id for store in chosen])
    sized = zip(chosen, sizes, strict=True)
    reads = tuple(StoreRead(place=place.of(of.id), store=of, size_bytes=size) for of, size in sized)
    found = QueryRead(batch=query.batch, place=place, stores=reads, table=table, families=families)
    # It may be there after the other batch.
    is_missing = bool(families) and options.family is not None and not found.has(options.family)
    if options.rows == "typed" and table is None and not is_missing:
        names = ", ".join(sorted(frozenset[str]().union(*families.values())))
        which = f"`family` ({names})" if names else "`store`"
        message = "the stores have no schema, or not all the same one, or it has types that only Spark knows"
        hint = f"choose one table with the options `operator` and {which}, or read with rows=bytes"
        raise UsageError(message, operation=_READ, subject=directory.location, hint=hint)
    return found


def plan_read(options: SourceOptions, *batches: int | None) -> ReadPlan:
    """Choose the stores to read after a batch; of two batches to compare, every one that there is after either.

    Raises:
        NotFoundError: An operator has no such column family after any of the batches.
        UsageError: Typed rows or a column family are asked for, and the rows are not of one table.
        As `plan_state`.
    """
    queries = [plan_state(options, batch) for batch in batches]
    if options.family is not None:
        _check_family(queries, options.family)
    # A family that is not there after a batch has no rows there.
    tables = {query.table for query in queries if options.family is None or query.has(options.family)}
    table = _common_table(tables)
    if table is None and (options.rows == "typed" or (options.family is not None and len(tables) > 1)):
        raise UsageError("the rows of the two batches are not alike", operation=_READ, hint="read with rows=bytes")
    stores = [{read.store.id: read for read in query.stores} for query in queries]
    ids = sorted(frozenset[StoreId]().union(*stores))
    works = tuple(
        StoreWork(id=of, reads=tuple(found.get(of) for found in stores), table=table, family=options.family)
        for of in ids
    )
    most = options.max_partition_bytes
    return ReadPlan(works=works, table=table, changes=len(batches) > 1, max_partition_bytes=most)


def group_works(works: Sequence[StoreWork], size_bytes_max: int) -> list[tuple[StoreWork, ...]]:
    """Give the stores to tasks, in their order: to each as many as are within the size together, at least one.

    Each counts 4 MiB more than it has, as files do in Spark.
    """
    groups: list[list[StoreWork]] = []
    held_bytes = 0
    for work in works:
        taken_bytes = work.size_bytes + _OPEN_BYTES
        held_bytes += taken_bytes
        if not groups or held_bytes > size_bytes_max:
            groups.append([])
            held_bytes = taken_bytes
        groups[-1].append(work)
    return [tuple(group) for group in groups]


@contextlib.contextmanager
def load_store(read: StoreRead, *, in_place: bool = False) -> Iterator[LoadedState]:
    """Load a store as a version, to be scanned on this machine for a block; raises as `StateStore.load`.

    With `in_place` its snapshot is not fetched; raises as `StateLoader.load_in_place`, and reads of rows do likewise.
    """
    with (
        scratch_dir() as scratch,
        read.place.open_store(read.store.id) as (loop, files),
        contextlib.ExitStack() as stack,
    ):
        settings, at = read.store.settings, read.store.at
        # Without what only pays if there is a next version.
        rocksdb = msgspec.structs.replace(settings.rocksdb, compacts=False)
        settings = msgspec.structs.replace(settings, count_keys=False, rocksdb=rocksdb)
        target = check_target(at.version, at.unique_id, files, settings.format_version, read_only=True, empty=False)
        place = WorkingDir.open(scratch / "store")
        stack.callback(place.close)
        loader = StateLoader(StateFileManager(files, settings), place, Runtime())
        try:
            if in_place:
                loaded = loop.run(loader.load_in_place(target, loop.run))
            else:
                loaded, _ = loop.run(loader.load(target, {}, read_only=True, overlays=True))
        except OSError as error:
            raise unwritable_error("load", error) from error
        stack.callback(loaded.db.close)
        place.clear_fetched()
        yield loaded


def look_up(read: StoreRead, keys: Sequence[bytes], family: str | None) -> dict[str, list[tuple[bytes, bytes]]]:
    """Return the rows of some keys, by column family: of one, or of all.

    They are looked up in place. What cannot be read so, or is damaged, is loaded as a whole, which may repair it.
    Raises as `load_store`.
    """

    def rows_of(loaded: LoadedState) -> dict[str, list[tuple[bytes, bytes]]]:
        names = loaded.families.names
        return {name: loaded.get_many(keys, name) for name in names if family in {None, name}}

    try:
        with load_store(read, in_place=True) as loaded:
            return rows_of(loaded)
    except (FormatError, DamagedError, NotFoundError, BlobNotFoundError):
        with load_store(read) as loaded:
            return rows_of(loaded)


def _find_table(
    place: Place, query: QueryAt, stores: tuple[StoreAt, ...], families: _Families, family: str | None
) -> Table | None:
    """Find the one table that all these stores are, or that this column family of all is; None if there is none.

    Design 0005, D2.
    """
    operators = {operator.id: operator for operator in query.operators}
    # The first store of each name: they are all alike.
    firsts = {(store.id.operator, store.id.store): store for store in reversed(stores)}
    tables: set[Table | None] = set()
    for (operator, name), store in sorted(firsts.items()):
        of = operators[operator]
        if of.column_families:
            avro = query.offsets.conf.get(ENCODING_KEY, "").lower() == AVRO
            if family is None:
                tables.add(None)
            elif schemas := families[operator].get(family):
                tables.add(_family_table(of, schemas, store, avro=avro))
        else:
            # The HDFS-backed provider splits no keys.
            prefix_columns = 0 if store.at.is_hdfs else of.prefix_columns.get(name, 0)
            tables.add(_store_table(place, StoreId(operator, 0, name), prefix_columns))
    return tables.pop() if len(tables) == 1 else None


def _family_table(of: StateOperator, schemas: list[StateSchema], store: StoreAt, *, avro: bool) -> Table | None:
    newest = schemas[-1]
    subject = f"schema of {newest.family}"
    key_form = decode_key_form(newest, subject=subject)
    if key_form is None:
        return None
    variables = decode_state_variables(of.properties, subject=f"properties of operator {of.id}")
    kind: Kind = _KINDS.get(variables.get(newest.family, ""), "value")
    if of.name == _JOIN and newest.family.endswith(_JOIN_LISTS):
        kind = "values"
    table = Table(
        key=_row(newest.key),
        value=_row(newest.value),
        key_form=key_form,
        kind=kind,
        delimiter=store.settings.merge_delimiter,
        avro=tuple({schema.value_id: _row(schema.value) for schema in schemas}.items()) if avro else (),
    )
    return table if table.is_known else None


def _store_table(place: Place, first: StoreId, prefix_columns: int) -> Table | None:
    try:
        with place.of(first).open_store(first) as (loop, files):
            data = loop.run(files.read(SCHEMA_PATH, size_bytes_max=SCHEMA_BYTES_MAX))
    except BlobNotFoundError:
        return None
    subject = f"schema of {first}"
    schemas = decode_state_schema(data, subject=subject)
    if len(schemas) != 1:
        return None
    key = _row(schemas[0].key)
    if not 0 <= prefix_columns < max(1, len(key.fields)):
        raise BatchLogError(f"has {len(key.fields)} fields in a key, and {prefix_columns} lead", subject=subject)
    form = KeyForm("prefix", tuple(range(prefix_columns))) if prefix_columns else KeyForm()
    table = Table(key=key, value=_row(schemas[0].value), key_form=form)
    return table if table.is_known else None


def _row(of: StructType) -> StructType:
    named = with_unique_names(of)
    return named if isinstance(named, StructType) else of


def _common_table(tables: set[Table | None]) -> Table | None:
    """Return the table that all rows are of; in Avro that of the newest schema, which has to know the older ones."""
    known = {table for table in tables if table is not None}
    if not known or known != tables:
        return None
    newest = max(known, key=lambda table: len(table.avro))
    for table in known - {newest}:
        evolved = msgspec.structs.replace(table, value=newest.value, avro=newest.avro)
        if not table.avro or evolved != newest or not {*table.avro} <= {*newest.avro}:
            return None
    return newest


def _check_family(queries: Sequence[QueryRead], family: str) -> None:
    for operator in sorted(frozenset[int]().union(*(query.families for query in queries))):
        names = frozenset[str]().union(*(query.families.get(operator, ()) for query in queries))
        if family not in names:
            hint = f"it has {', '.join(sorted(names)) or 'none'}; the option `operator` chooses another"
            raise NotFoundError(f"operator {operator} has no column family {family}", operation=_READ, hint=hint)


def _no_such_store(options: SourceOptions, query: QueryAt) -> NotFoundError:
    have = "; ".join(f"operator {o.id} ({o.name}): {', '.join(o.stores)}" for o in query.operators) or "no state"
    partitions = ",".join(map(str, options.partitions)) or None
    said = (("operator", options.operator), ("partition", partitions), ("store", options.store))
    wanted = ", ".join(f"{name} {value}" for name, value in said if value is not None)
    return NotFoundError(
        f"the query has no {wanted}", operation=_READ, subject=f"batch {query.batch}", hint=f"it has {have}"
    )

"""Keep a replica of the checkpoint of a running query, with other partitions if asked for (design 0011, Q1 to Q6).

```
<target>/                          a checkpoint; its `metadata` says that it is a replica, until it is cut over
<parent>/.<target>.tidemark-follow what a follower works with; of a target on an object store a temporary directory
```
"""

import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from blobstore.concurrency import acquired, map_bounded, run_blocking
from blobstore.errors import BlobNotFoundError, CheckpointFileExistsError
from blobstore.opening import StoreSettings
from engine.checkpoint.convert import (
    PROVIDERS,
    ConvertChoice,
    Gathering,
    Provider,
    bring_query,
    convert_here,
    key_splitter,
    run_conversion,
)
from engine.checkpoint.errors import QueryMovedOnError
from engine.checkpoint.groups import GroupRescaled, GroupToRescale, check_partitions, operators_after, rewritten
from engine.checkpoint.replica import (
    METADATA,
    QueryFollowStatus,
    check_not_moved,
    look_at_lag,
    name_of,
    newest_committed,
    newest_of_both,
    opened_place,
    own_replica,
    planned_batch,
    taken_back,
)
from engine.checkpoint.rescale import RescaleChoice, run_rescale
from engine.checkpoint.rescale_stores import Here, of_checkpoint, rescale_here
from engine.checkpoint.restore import make_target
from engine.checkpoint.route import ReplicaStore, Route, Source, UnroutableError
from engine.checkpoint.targets import CheckpointTarget, check_apart, files_below, is_newer, publish_files
from engine.errors import DamagedError, NotFoundError, TargetBusyError, TargetError, UnsafeSourceError, UsageError
from engine.local.scratch import scratch_dir
from engine.restore.staging import target_errors
from engine.runtime import NO_PROGRESS, Progress, Runtime
from engine.settings import STORES_AT_ONCE
from engine.state.checkpoint_dir import CheckpointDir, opened_checkpoint
from engine.state.key_rules import Partitioner, partitions_of, read_key_rules
from engine.state.local_files import WorkingDir, remove_tree
from engine.state.query import COMMITS, ENTRY_BYTES_MAX, OFFSETS, QueryAt, StreamingCheckpoint
from engine.state.settings import PROVIDER_KEY, SPARK_DEFAULTS
from index.errors import FormatError
from index.snapshot.model import UniqueId
from index.spark.checkpoint import SOURCES, STATE, StoreId
from index.spark.names import StateVersion
from index.spark.query_logs import decode_query_id
from index.spark.replica import Replica, encode_replica
from index.spark.rescale import group_partitions

_OPERATION: Final = "follow"
_LOCK: Final = "lock"
# Of one step; after as many, entries of logs that are too old are deleted.
_BATCHES_MAX: Final = 16
# How often a copy of all state is tried, while batches that were copied vanish.
_COPIES_MAX: Final = 3
# Of a path: `state`, operator and partition.
_STORE_DEPTH: Final = 3


class FollowChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How a query is followed."""

    # Of the replica; what is not given is as at the source.
    partitions: int | None = None
    provider: Provider | None = None
    # Number of batches after which a store gets a snapshot; None: ten, as Spark's default, which no log has.
    snapshot_every: int | None = None
    # Number of stores worked on at once on this machine.
    stores_at_once: int = STORES_AT_ONCE
    # Of a target on an object store: where files are gathered and loaded; None: this machine's place for such files.
    scratch: Path | None = None
    # How a source and a target that are URLs are asked.
    store_settings: StoreSettings | None = None


class QueryStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did."""

    # The replica is at this batch now.
    batch: int
    # Batches that it went on by, and what was in their changelogs; 0: nothing was new, or all was copied.
    batches: int = 0
    records: int = 0
    changelog_bytes: int = 0
    snapshots: int = 0
    # Why all state was copied; "" if it was not.
    copied: str = ""
    seconds: float = 0.0


class QueryFollower:
    """Follows one query to one place. Not for two event loops at once.

    After any error of `step` the replica is at an exact batch, and the next step goes on.
    """

    def __init__(
        self,
        source: CheckpointDir,
        target: CheckpointDir,
        replica: Replica,
        choice: FollowChoice,
        work_dir: Path,
        how: Here,
        *,
        begin: Callable[[], CheckpointTarget] | None = None,
    ) -> None:
        # Gives the place where the replica is to be made; None: there is one.
        self._begin = begin
        self.source = source
        self.target = target
        self.replica = replica
        self._choice = choice
        self._work_dir = work_dir
        self._how = how
        self._runtime = how.runtime
        self._logs = StreamingCheckpoint(source)
        # The batch of the replica, as the source has it; None: not known yet.
        self._at: QueryAt | None = None
        self._routes: dict[tuple[int, str], tuple[Route, ...]] = {}
        # Size and time of the files of the query that were published, by path.
        self._published: dict[str, tuple[int, int]] = {}

    # --- what there is

    async def check_replica(self) -> None:
        """Refuse to go on with what is not a replica of this source any more. Costs a GET."""
        if (await own_replica(self.source, self.target)).id != self.replica.id:
            message = "is another replica by now"
            raise TargetError(message, operation=_OPERATION, subject=self.target.location)

    async def newest_batch(self) -> int:
        """Return the newest committed batch of the source. NotFoundError: there is none."""
        return await newest_committed(self.source)

    async def status(self) -> QueryFollowStatus:
        """Return which batch the replica is at, and the lag, as `look_at_lag`."""
        return await look_at_lag(self.source, self.target, self.replica, self._runtime)

    # --- one step

    async def step(self, *, snapshots: bool = True) -> QueryStep:
        """Bring the replica to the newest batch, or by as many as one step takes.

        Raises:
            NotFoundError: There is no checkpoint, or no batch is committed.
            PromotedError: The replica was cut over.
            TargetBusyError: Somebody else wrote a batch there.
            TargetError: The target cannot be written, or is ahead of the source, or that is of another query by now.
            MisplacedKeyError, PartitionKeyError, StoreMergeError: As of a rescale (0010).
            DamagedError, FormatError: A file of the source is not whole, or not there.
            StoreError: As the stores say.
        """
        began_s = self._runtime.monotonic_s()
        if (begin := self._begin) is not None:
            batch = await self.copy(lambda batch: self.make(begin(), batch))
            done = QueryStep(batch=batch, copied="there was no replica yet")
            self._begin = None
            return msgspec.structs.replace(done, seconds=self._runtime.monotonic_s() - began_s)
        await self.check_replica()
        here, newest = await newest_of_both(self.source, self.target)
        if here != newest:
            await self._check_query()
        if here is not None:
            await self._check_history(here)
        try:
            done = await self._advance(here, newest)
        except UnroutableError as reason:
            self._at = None
            done = QueryStep(batch=await self.copy(self._copy_over), copied=str(reason))
        except BaseException:
            # What was published of a batch that is not committed is published again.
            self._at = None
            raise
        if snapshots:
            made = await self.make_snapshots(done, is_behind=done.batch < newest)
            done = msgspec.structs.replace(done, snapshots=made)
        if done.batch // _BATCHES_MAX > (-1 if here is None else here) // _BATCHES_MAX:
            await self._delete_logs(done.batch - SPARK_DEFAULTS.versions_retained_min)
        return msgspec.structs.replace(done, seconds=self._runtime.monotonic_s() - began_s)

    async def _advance(self, here: int | None, newest: int) -> QueryStep:
        if here is None:
            raise UnroutableError("there was no state yet")
        at = self._at if self._at is not None and self._at.batch == here else await self._open(here)
        batches = range(here + 1, min(newest, here + _BATCHES_MAX) + 1)
        return await self._route(at, batches) if batches else QueryStep(batch=here)

    async def _check_history(self, batch: int) -> None:
        """Refuse to go on if the query has run the batch of the replica once more: names without ids do not show it."""
        read, copied = [await StreamingCheckpoint(root).offsets.get(batch) for root in (self.source, self.target)]
        if read is None or copied is None:
            return  # purged
        if (read.offsets, read.timestamp_ms) != (copied.offsets, copied.timestamp_ms):
            raise taken_back(self.target, f"has another batch {batch} than the query by now")

    async def _check_query(self) -> None:
        """Refuse another query than the one that was followed, which may have purged the batches that would show it."""
        before, now = decode_query_id(self.replica.metadata.encode()), await self._logs.query_id()
        if now != before:
            message = f"follows query {before}, and the source has query {now} by now"
            hint = "follow it into a new place"
            raise TargetError(message, operation=_OPERATION, subject=self.target.location, hint=hint)

    async def _query_at(self, batch: int) -> QueryAt:
        """Read the query at a batch as the source has it; UnroutableError: it was purged."""
        try:
            return await self._logs.at(batch)
        except NotFoundError as error:
            raise UnroutableError(f"batch {batch} is not there any more") from error

    async def _open(self, batch: int) -> QueryAt:
        """Find what the stores of the replica are made of at its batch; return the query at it."""
        await self.aclose()
        at = await self._query_at(batch)
        there = await StreamingCheckpoint(self.target).at(batch)
        rules, after = None, at.operators
        if (partitions := self.replica.partitions) is not None:
            rules, after = await read_key_rules(self.source, at), operators_after(at, partitions)
        shapes = [[(of.id, of.stores, of.partitions_count) for of in each] for each in (after, there.operators)]
        if shapes[0] != shapes[1]:
            raise UnroutableError("the query has other operators than the replica")
        stores = {
            store.id: ReplicaStore(
                store,
                self.target.linked().child(store.id.path),
                self._work_dir / f"store-{store.id.operator}-{store.id.partition}-{store.id.store}",
                self._runtime,
            )
            for store in there.stores
        }
        await map_bounded(lambda of: stores[of.id].open(of.at), there.stores, in_flight_max=STORES_AT_ONCE)
        routes = {}
        for old, new in zip(at.operators, after, strict=True):
            for name in old.stores:
                columns = old.prefix_columns.get(name, 0) if self.replica.provider else 0
                split_key = await key_splitter(self.source, StoreId(old.id, 0, name), columns)
                routes[old.id, name] = tuple(
                    Route(
                        sources=group.sources,
                        targets=tuple(stores[StoreId(old.id, partition, name)] for partition in group.targets),
                        rules=None if rules is None else rules[old.id, name],
                        partitions=new.partitions_count,
                        partitioner=self._how.partitioner,
                        split_key=split_key,
                    )
                    for group in group_partitions(old.partitions_count, new.partitions_count)
                )
        self._routes, self._at = routes, at
        return at

    @property
    def _stores(self) -> list[ReplicaStore]:
        return [of for routes in self._routes.values() for route in routes for of in route.targets]

    async def _route(self, at: QueryAt, batches: range) -> QueryStep:
        """Bring the replica from one batch through the next ones by changelogs (Q2, Q3)."""
        records = size_bytes = 0
        for batch in batches:
            before, at = at, await self._query_at(batch)
            if at.operators != before.operators or _forms(at) != _forms(before):
                raise UnroutableError(f"operators or settings changed with batch {batch}")
            named = {of.id: self._name(at) for of in self._stores}
            for routed, published_bytes in await self._route_batch(before, at, named):
                records += routed
                size_bytes += published_bytes
            ids = {of: version.unique_id for of, version in named.items()}
            async with self._scratch("query") as scratch:
                to = Gathering(scratch, self.target.location, is_synced=False)
                await bring_query(self.source, to, at, self._rewrite(at, ids), planned=False)
                await self._publish_query(scratch)
            self._at = at
        return QueryStep(batch=at.batch, batches=len(batches), records=records, changelog_bytes=size_bytes)

    async def _route_batch(
        self, before: QueryAt, at: QueryAt, named: Mapping[StoreId, StateVersion]
    ) -> Sequence[tuple[int, int]]:
        of_both = zip(at.stores, before.stores, strict=True)
        sources = {store.id: Source(store=store, before=old.at) for store, old in of_both}

        async def follow(work: tuple[int, str, Route]) -> tuple[int, int]:
            operator, name, route = work
            async with self._scratch(f"batch-{operator}-{name}-{route.sources[0]}") as scratch:
                return await route.follow(
                    self.source,
                    [sources[StoreId(operator, partition, name)] for partition in route.sources],
                    [named[of.id] for of in route.targets],
                    scratch,
                )

        work = [(*of, route) for of, routes in self._routes.items() for route in routes]
        return await map_bounded(follow, work, in_flight_max=self._choice.stores_at_once)

    def _name(self, at: QueryAt) -> StateVersion:
        return StateVersion(at.batch + 1, None if at.commit.unique_ids is None else self._runtime.unique_id())

    def _rewrite(self, at: QueryAt, ids: Mapping[StoreId, UniqueId | None]) -> Callable[[str, bytes], bytes]:
        """Return what makes of the content of a file of the query that of the replica."""
        changed = {PROVIDER_KEY: PROVIDERS[self.replica.provider]} if self.replica.provider else {}
        return rewritten(at, ids, changed, partitions=self.replica.partitions)

    async def _remove_newer(self, batch: int) -> None:
        """Remove what dead followers have left: files of later batches, and commits before one that is not there."""
        newer = [status.path for status in await self.target.walk() if is_newer(status.path, batch)]
        # What was listed while it was a replica is not of a query there.
        await self.check_replica()
        await self.target.delete(newer)
        commits = set(await StreamingCheckpoint(self.target).committed_batches())
        first = next(number for number in itertools.count(batch, -1) if number - 1 not in commits)
        await self._delete_logs(first)

    async def settle(self, *, is_lost: bool) -> int | None:
        """Bring the files of the query once more, with a batch that is planned (Q8, Q9); return that batch.

        Without the source they come from the replica itself: an entry of a source's log that a dead follower has
        left there may lead beyond its offsets.
        """
        batch = await newest_committed(self.target)
        root = self.target if is_lost else self.source
        await self._remove_newer(batch)
        there = await StreamingCheckpoint(self.target).at(batch)
        at = there if is_lost else await self._logs.at(batch)
        rewrite = _unchanged if is_lost else self._rewrite(at, {store.id: store.at.unique_id for store in there.stores})
        planned = await planned_batch(root, batch)
        async with self._scratch("query") as scratch:
            to = Gathering(scratch, self.target.location, is_synced=False)
            await bring_query(root, to, at, rewrite, planned=planned is not None)
            await self._publish_query(scratch, cuts=True)
        return planned

    async def _publish_query(self, directory: Path, *, cuts: bool = False) -> None:
        """Publish the files of the query from a directory; entries of logs never replace others (Q3).

        With `cuts` entries of a source's log go, too, that come after those.
        TargetBusyError: somebody else has committed the batch there.
        """
        await self.check_replica()
        found = {
            path: (directory / path).stat()
            for path in await run_blocking(files_below, directory)
            if path != METADATA and not _is_of_store(path)
        }
        logs = sorted(path for path in found if path.partition("/")[0] in {OFFSETS, COMMITS})
        looks = {path: (of.st_size, of.st_mtime_ns) for path, of in found.items() if path not in logs}
        changed = [path for path, look in looks.items() if self._published.get(path) != look]
        await publish_files(self.target, directory, changed)
        self._published |= {path: looks[path] for path in changed}
        for path in sorted(logs, key=lambda path: path.startswith(COMMITS)):
            content = await run_blocking((directory / path).read_bytes)
            try:
                await self.target.publish(path, content, overwrite=False)
            except CheckpointFileExistsError as error:
                if await self.target.read(path, size_bytes_max=ENTRY_BYTES_MAX) != content:
                    message = f"{path} is another one: somebody else writes there"
                    raise TargetBusyError(message, operation=_OPERATION, subject=self.target.location) from error
        # Entries that the query has joined or purged since. Newer ones are somebody else's by now.
        newest = {path.rpartition("/")[0]: _entry_of(path) for path in sorted(looks, key=_entry_of)}
        there = [status.path for status in await self.target.walk(SOURCES)]
        stale = [
            path
            for path in there
            if path not in looks and (cuts or _entry_of(path) < newest.get(path.rpartition("/")[0], -1))
        ]
        await self.check_replica()
        await self.target.delete(stale)
        for path in stale:
            self._published.pop(path, None)

    # --- copies and snapshots

    async def copy(self, make: Callable[[int], Awaitable[None]]) -> int:
        """Have a copy made of the newest batch, again if the query has purged it meanwhile; return the batch."""
        newest = await self.newest_batch()
        for attempt in itertools.count(1):
            try:
                await make(newest)
            except (DamagedError, FormatError, NotFoundError, UnsafeSourceError):
                tried, newest = newest, await self.newest_batch()
                if attempt == _COPIES_MAX or newest == tried:
                    raise
            else:
                break
        try:
            await self._open(newest)
        except UnroutableError as error:
            message = f"batch {newest} was copied, and by now the query has purged it"
            raise QueryMovedOnError(message, operation=_OPERATION, subject=self.source.location) from error
        return newest

    async def _copy_over(self, batch: int) -> None:
        """Copy all state of a batch on top of what is there (Q4)."""
        async with self._scratch("copy") as scratch:
            whole = scratch / "whole"
            place = make_target(whole, self._runtime, move_aside=False, settings=None)
            place.root = self.target.location
            await self.make(place, batch)
            await self.check_replica()
            await publish_files(self.target, whole, [path for path in files_below(whole) if _is_of_store(path)])
            await self._publish_query(whole)
        # Of the batches in between there is nothing.
        await self._delete_logs(batch)

    async def make(self, place: CheckpointTarget, batch: int) -> None:
        """Make a checkpoint of a batch at a new place, as a replica."""
        metadata, settings = encode_replica(self.replica), self._choice.store_settings
        if (partitions := self.replica.partitions) is not None:
            rescale = RescaleChoice(partitions=partitions, batch=batch, store_settings=settings)
            await run_rescale(self.source, place, rescale, self._rescale, self._runtime, metadata=metadata)
            return
        convert = ConvertChoice(batch=batch, provider=self.replica.provider, store_settings=settings)
        stores = convert_here(self.source.linked(), self._choice.stores_at_once, self._how.progress, self._runtime)
        await run_conversion(self.source, place, convert, stores, self._runtime, metadata=metadata)

    async def _rescale(self, directory: Path, work: tuple[GroupToRescale, ...]) -> Sequence[GroupRescaled]:
        return await rescale_here(of_checkpoint(self.source), work, directory, self._how)

    async def make_snapshots(self, done: QueryStep | None = None, *, is_behind: bool = False) -> int:
        """Make every snapshot that is due, so that a query that begins there has little to replay; return their number.

        After a step these are a share of all stores, as of the batches (Q6). Where snapshots take long, the query
        commits meanwhile: then its batches come first, and one snapshot in each step.
        """
        every = max(1, self._choice.snapshot_every or SPARK_DEFAULTS.deltas_per_snapshot)
        due = [of for of in self._stores if of.is_due(2 * every if is_behind else every)]
        due.sort(key=lambda of: -of.versions_since_snapshot)
        if done is not None:
            due = due[: -(-len(self._stores) * max(1, done.batches) // every)]
        for number, of in enumerate(due):
            if number and done is not None and await self.newest_batch() > done.batch:
                return number
            await of.snapshot()
        return len(due)

    async def _delete_logs(self, batch: int) -> None:
        """Delete the commits before a batch, and the offsets before those that it follows."""
        logs = StreamingCheckpoint(self.target)
        await self.target.delete([f"{COMMITS}/{number}" for number in await logs.commits.batches() if number < batch])
        # The batch before it, unless the query logs only some.
        older = [number for number in await logs.offsets.batches() if number < batch]
        await self.target.delete([f"{OFFSETS}/{number}" for number in older[:-1]])

    @contextlib.asynccontextmanager
    async def _scratch(self, name: str) -> AsyncIterator[Path]:
        path = self._work_dir / name
        with target_errors(path):
            await run_blocking(remove_tree, path) if path.exists() else None
            await run_blocking(lambda: path.mkdir(parents=True))
            try:
                yield path
            finally:
                await run_blocking(shutil.rmtree, path, ignore_errors=True)

    async def aclose(self) -> None:
        stores, self._routes, self._at = self._stores, {}, None
        for of in stores:
            await of.close()


def _unchanged(_: str, content: bytes) -> bytes:
    return content


def _is_of_store(path: str) -> bool:
    """Return whether a file of a checkpoint is one of a state store, not of the query."""
    parts = path.split("/")
    return parts[0] == STATE and len(parts) > _STORE_DEPTH and parts[2].isdecimal() and "_metadata" not in parts


def _entry_of(path: str) -> int:
    """Return the number of an entry of a source's log; -1 of another file."""
    number = path.rpartition("/")[2].removesuffix(".compact")
    return int(number) if path.startswith(f"{SOURCES}/") and number.isdecimal() else -1


@contextlib.asynccontextmanager
async def opened_follower(
    source: str | Path,
    target: str | Path,
    choice: FollowChoice | None = None,
    *,
    partitioner: Partitioner = partitions_of,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> AsyncIterator[QueryFollower]:
    """Open a follower of a query for a block; if the target is not there yet, the first step makes it (Q1).

    Raises:
        NotFoundError: There is no checkpoint, or no batch is committed.
        UsageError: The choice is another one than the replica was made with, or the state is HDFS-backed.
        PromotedError: The target is a checkpoint of its own.
        TargetBusyError: Another follower works there, on this machine.
        TargetError: The target is the source's place, above it or below it, or has other content; or the source has
            moved to another replica.
        As `QueryFollower.step`.
    """
    choice, runtime = choice or FollowChoice(), runtime or Runtime()
    how = Here(partitioner=partitioner, groups_at_once=choice.stores_at_once, progress=progress, runtime=runtime)
    settings = choice.store_settings
    new_place = partial(make_target, target, runtime, move_aside=False, settings=settings)
    place = new_place()
    async with (
        contextlib.aclosing(place),
        opened_checkpoint(source, settings) as root,
        opened_place(target, settings) as there,
    ):
        await check_apart(place, root, what="source")
        replica, is_there = await _agree(root, there, choice, runtime)
        # A directory appears at once, and on one file system takes links to files of state.
        begin = None if is_there or there.local_root is None else new_place
        if not is_there:
            await place.check("", 0)
            if begin is None:
                await _mark(there, replica)
        async with _work_dir(there, choice.scratch) as work_dir:
            follower = QueryFollower(root, there, replica, choice, work_dir, how, begin=begin)
            async with contextlib.aclosing(follower):
                yield follower


async def _mark(target: CheckpointDir, replica: Replica) -> None:
    """Let an empty prefix be that of a replica."""
    try:
        await target.publish(METADATA, encode_replica(replica), overwrite=False)
    except CheckpointFileExistsError as error:
        message = "another follower has begun there"
        raise TargetBusyError(message, operation=_OPERATION, subject=target.location) from error


async def _agree(
    root: CheckpointDir, target: CheckpointDir, choice: FollowChoice, runtime: Runtime
) -> tuple[Replica, bool]:
    """Return how the source is followed, by the choice or as the replica that is there was made; and if one is."""
    try:
        found = await own_replica(root, target)
    except NotFoundError:
        wanted = await _wanted(root, choice, runtime)
        await check_not_moved(root, await newest_committed(root), wanted.id)
        return wanted, False
    if choice.partitions is None and choice.provider is None:
        return found, True
    wanted = await _wanted(root, choice, runtime)
    for name in ("partitions", "provider"):
        if getattr(choice, name) is not None and getattr(wanted, name) != (there := getattr(found, name)):
            message = f"is followed with {name} {there or 'as at the source'}"
            raise UsageError(message, operation=_OPERATION, subject=target.location, hint="follow into a new place")
    return found, True


async def _wanted(root: CheckpointDir, choice: FollowChoice, runtime: Runtime) -> Replica:
    """Return how a source is to be followed; refuse what cannot be done."""
    if choice.partitions is not None:
        check_partitions(choice.partitions)
        if choice.provider is not None:
            hint = "follow with the one, and follow that replica's checkpoint with the other once it is cut over"
            raise UsageError("cannot change partitions and provider at once", operation=_OPERATION, hint=hint)
    try:
        metadata = await root.read(METADATA, size_bytes_max=ENTRY_BYTES_MAX)
    except BlobNotFoundError as error:
        hint = "name the checkpointLocation of a query"
        raise NotFoundError("there is no checkpoint", operation=_OPERATION, subject=root.location, hint=hint) from error
    decode_query_id(metadata, subject=f"{root.location}/{METADATA}")
    at = await StreamingCheckpoint(root).at(await newest_committed(root))
    is_hdfs = any(store.at.is_hdfs for store in at.stores)
    if choice.provider == "hdfs" or (is_hdfs and choice.provider is None):
        hint = "follow it with --provider rocksdb"
        raise UsageError("a replica has RocksDB's provider", operation=_OPERATION, subject=root.location, hint=hint)
    partitions = {operator.partitions_count for operator in at.operators if not operator.is_single}
    return Replica(
        id=runtime.session(),
        replica_of=name_of(root),
        metadata=metadata.decode(),
        partitions=None if partitions == {choice.partitions} else choice.partitions,
        provider="rocksdb" if is_hdfs else None,
    )


def _forms(at: QueryAt) -> list[tuple[object, ...]]:
    """Return how the files of each store are written."""
    found = [(store.at.is_hdfs, store.at.unique_id is None, store.settings) for store in at.stores]
    return [(*names, of.codec, of.row_checksums, of.column_families, of.merge_delimiter) for *names, of in found]


@contextlib.asynccontextmanager
async def _work_dir(target: CheckpointDir, scratch: Path | None) -> AsyncIterator[Path]:
    """Make a directory to work in, on the file system of the target where that is one of this machine."""
    if target.local_root is None:
        async with scratch_dir(scratch) as made:
            yield made
        return
    root = target.local_root.resolve()
    path = root.with_name(f".{root.name}.tidemark-follow")
    if await run_blocking(path.is_symlink):
        # All that is in it is removed.
        hint = "remove the link"
        raise TargetError("is a symbolic link", operation=_OPERATION, subject=str(path), hint=hint)

    def lock() -> WorkingDir:
        try:
            return WorkingDir.open(path / _LOCK)
        except TargetBusyError as error:
            hint = "end the follower that works there"
            message = "another follower of this machine works on it"
            raise TargetBusyError(message, operation=_OPERATION, subject=target.location, hint=hint) from error

    # The lock stays, as somebody else may be waiting for it.
    async with acquired(lock, WorkingDir.close):
        await run_blocking(_remove_others, path)
        try:
            yield path
        finally:
            await run_blocking(_remove_others, path)


def _remove_others(directory: Path) -> None:
    """Remove what a follower works with, or one that died has left. Blocks."""
    for path in directory.iterdir():
        if path.name != _LOCK:
            remove_tree(path)

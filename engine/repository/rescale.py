"""Give a job another number of tasks: one commit in which other stores take the place of all of them (design 0010, T).

Stores of several tasks become one by reference, those of one become several row by row. The newest commit is only read;
until every key is found in place, and all stores are uploaded, there is no other.
"""

import contextlib
import heapq
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from blobstore.concurrency import run_blocking
from engine.backup.backup import BackupOptions, BackupResult, WholeDirectory, backup_source
from engine.commit.record import LayoutChange
from engine.commit.writer import until_known
from engine.errors import MisplacedKeyError, UsageError
from engine.local.scratch import scratch_dir
from engine.records.repository import StoreAddress
from engine.restore.staging import target_errors
from engine.rocksdb.merge import merge_stores, read_parent, sst_name
from engine.rocksdb.sst_run import SstRun
from engine.rocksdb.store import DEFAULT_FAMILY, RocksDbSettings, StoreReader, StoreWriter, list_families
from engine.runtime import Progress, Stopwatch
from engine.settings import KIB, MIB
from index.display import DisplayMixin, format_texts
from index.errors import StoreMergeError
from index.plan.commits import Commit
from index.rocksdb.merge import MergePlan
from index.snapshot.model import DirIndex, Scope, SnapshotIndex, StoreReference
from index.spark.rescale import group_partitions
from index.spark.task_keys import KEY_HASH, TASKS_MAX, TaskKeys

if TYPE_CHECKING:
    from engine.repository.repository import Repository

# Returns of a key of a RocksDB store the values of the job's key columns.
KeyColumns = Callable[[bytes], Sequence[object]]

_OPERATION: Final = "rescale"
# Of all stores that are read side by side.
_READ_BYTES: Final = 32 * MIB
_READ_BYTES_MIN: Final = 64 * KIB
_OPEN_FILES: Final = 512
_OPEN_FILES_MIN: Final = 16
_CHUNK_ROWS_MAX: Final = 4096
_SHOWN_BYTES_MAX: Final = 64
_WRONG: Final = (
    "nothing was committed: the key function is not the one by which these keys were made, or the store is damaged"
)
_HIDDEN: Final = (
    "nothing was committed: a task has deleted a key of another; split the stores once, to any other number"
)
_DROP: Final = "leave them out first: `tidemark commit --drop-store TASK/STORE`"
_DOUBLE: Final = "nothing was committed: tasks of one job share no key; `tidemark keys` shows what each of both has"


class RescaleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the stores of a job become those of another number of tasks."""

    tasks: int
    # One function for every store, or one for each name of a store. Splits need it.
    key_columns: KeyColumns | Mapping[str, KeyColumns] | None = None
    # Merge stores without it: then nobody finds out whether keys are in the tasks where they belong.
    unchecked: bool = False
    # Read, hash and compare everything, and upload nothing.
    dry_run: bool = False
    # On a local disk with space for twice the stores that become each other. None: the system's temporary directory.
    scratch: Path | None = None


class RescaledJob(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What was done, or would be."""

    json_omitted: ClassVar = ("commit",)
    json_properties: ClassVar = {"number": "number"}

    dry_run: bool
    # None in a dry run.
    commit: Commit | None
    tasks_before: int
    tasks: int
    stores_before: int
    stores: int
    rows: int
    # Whether every key was hashed.
    checked: bool
    # SSTs that the new stores have by reference, and those whose rows are written again.
    files_linked: int
    bytes_linked: int
    bytes_rewritten: int
    # Indexes count.
    bytes_uploaded: int
    seconds: float

    @property
    def number(self) -> int | None:
        """Of the new commit."""
        return self.commit.pointer.number if self.commit is not None else None


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    """Stores of one name whose rows become those of others, and of no others (P1)."""

    store: str
    before: int
    after: int
    # By task; at least one.
    sources: tuple[tuple[int, StoreReference], ...]
    targets: tuple[int, ...]
    key_columns: KeyColumns | None
    hashes: TaskKeys | None

    @property
    def is_merge(self) -> bool:
        return len(self.targets) == 1

    def rows(self, directory: Path) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over a store, in the share of memory and files that it has while all sources are read."""
        share_bytes = max(_READ_BYTES_MIN, _READ_BYTES // len(self.sources))
        files_max = max(_OPEN_FILES_MIN, _OPEN_FILES // len(self.sources))
        settings = RocksDbSettings(block_cache_bytes=share_bytes, open_files_max=files_max)
        with StoreReader.open(directory, settings) as reader:
            for chunk in reader.chunks(rows_max=_CHUNK_ROWS_MAX, bytes_max=share_bytes):
                yield from chunk

    def place_of(self, task: int, key: bytes) -> int:
        """Return the new task of a key. A key is hashed once: its place among the common multiple says both (P2).

        Raises:
            MisplacedKeyError: It does not belong in the task where it is.
            PartitionKeyError: What the key function returns does not fit the key columns.
            UsageError: The key function fails.
        """
        if self.key_columns is None or self.hashes is None:
            return self.targets[0]
        try:
            values = self.key_columns(key)
        except Exception as error:
            subject = f"key {_shown(key)} of store {self.store}"
            message = f"the key function fails: {type(error).__name__}: {error}"
            raise UsageError(message, operation=_OPERATION, subject=subject) from error
        place = self.hashes.partition_of(values, math.lcm(self.before, self.after))
        if place % self.before != task:
            message = (
                f"the key {_shown(key)} is in task {task} of {self.before}, and belongs in task {place % self.before}, "
                f"by {KEY_HASH} of {', '.join(self.hashes.columns)}, which are {tuple(values)!r:.200}"
            )
            raise MisplacedKeyError(message, operation=_OPERATION, subject=f"store {self.store}", hint=_WRONG)
        return place % self.after


async def rescale_job(
    repository: "Repository", scope: Scope, options: RescaleOptions, progress: Progress
) -> RescaledJob:
    """Carry out `Repository.rescale`."""
    watch = Stopwatch(repository.opened.runtime)
    async with repository.find_pinned(scope, purpose=_OPERATION) as (commit, _):
        record = commit.record
        groups = _plan(commit, options)
        progress.total(files=sum(s.files_count for s in record.stores), bytes_=record.state_bytes)
        results: list[BackupResult] = []
        totals = Counter[str]()
        for group in groups:
            totals += await _rescale(repository, commit, group, options, results, progress)
        committed = None
        if not options.dry_run:
            after = msgspec.structs.replace(record.layout, tasks_count=options.tasks)
            there = {(result.reference.task, result.reference.store) for result in results}
            committed = await until_known(
                lambda: repository.commit(
                    scope,
                    results,
                    version=record.version,
                    offsets=record.offsets,
                    layout=LayoutChange(before=record.layout, after=after),
                    parent=commit.pointer,
                    dropped={(s.task, s.store) for s in record.stores} - there,
                )
            )
    return RescaledJob(
        dry_run=options.dry_run,
        commit=committed,
        tasks_before=record.layout.tasks_count,
        tasks=options.tasks,
        stores_before=len(record.stores),
        stores=totals["stores"],
        rows=totals["rows"],
        checked=all(group.key_columns is not None for group in groups),
        files_linked=totals["files_linked"],
        bytes_linked=totals["bytes_linked"],
        bytes_rewritten=totals["bytes_rewritten"],
        bytes_uploaded=sum(result.stats.bytes_uploaded + result.stats.index_bytes for result in results),
        seconds=watch.total_s(),
    )


def _plan(commit: Commit, options: RescaleOptions) -> list[_Group]:
    """Choose which stores become which; refuse what cannot be done."""
    layout, after = commit.record.layout, options.tasks
    names = sorted({reference.store for reference in commit.record.stores})
    of = options.key_columns
    functions = of if isinstance(of, Mapping) else {} if of is None else dict.fromkeys(names, of)
    if strange := sorted(set(functions) - set(names)):
        message = f"has no store {format_texts(strange)}, for which there is a key function"
        hint = "`tidemark show` lists the stores of a commit"
        raise UsageError(message, operation=_OPERATION, subject=str(commit.scope), hint=hint)
    message, hint = _refusal(commit, functions, options)
    if message:
        raise UsageError(message, operation=_OPERATION, subject=str(commit.scope), hint=hint)
    stores = {(int(s.task), s.store): s for s in commit.record.stores}
    hashes = TaskKeys(layout) if functions else None
    chosen = [(name, group) for name in names for group in group_partitions(layout.tasks_count, after)]
    groups = [
        _Group(
            store=name,
            before=layout.tasks_count,
            after=after,
            sources=tuple((task, stores[task, name]) for task in group.sources if (task, name) in stores),
            targets=group.targets,
            key_columns=functions.get(name),
            hashes=hashes,
        )
        for name, group in chosen
    ]
    return [group for group in groups if group.sources]


def _refusal(commit: Commit, functions: Collection[str], options: RescaleOptions) -> tuple[str, str]:
    """Return why it cannot be done, with a key function for some stores, and a hint; or two empty texts."""
    after, names = options.tasks, {reference.store for reference in commit.record.stores}
    bare = sorted(names - set(functions))
    layout, before = commit.record.layout, commit.record.layout.tasks_count
    if commit.scope.task is not None or layout.key_hash != KEY_HASH or not 0 < before <= TASKS_MAX:
        return "its commits do not say how keys are spread over tasks", "a job of `StatefulJob` says it"
    if before == after or not 0 < after <= TASKS_MAX:
        return f"has {before} tasks, and {after} is not another number from 1 to {TASKS_MAX}", ""
    if strange := {s.task for s in commit.record.stores} - {str(task) for task in range(before)}:
        return f"has stores of tasks that are not among its {before}: {format_texts(sorted(strange))}", _DROP
    if bare and before % after:
        numbers = ", ".join(str(number) for number in range(1, before) if before % number == 0)
        message = f"splits its stores, and there is no key function for {format_texts(bare)}"
        return message, f"give one (--key); without it stores can only be merged: to {numbers or 'no other number'}"
    if bare and not options.unchecked:
        hint = "give one (--key), or merge without hashing keys (--unchecked)"
        return f"there is no key function for {format_texts(bare)}", hint
    return "", ""


async def _rescale(
    repository: "Repository",
    commit: Commit,
    group: _Group,
    options: RescaleOptions,
    results: list[BackupResult],
    progress: Progress,
) -> Counter[str]:
    """Restore the sources of a group, make its targets beside them, upload these, and count. No file is left behind."""
    async with AsyncExitStack() as resources:
        with target_errors(options.scratch or Path(tempfile.gettempdir())):
            beside = await resources.enter_async_context(scratch_dir(options.scratch, "tidemark-rescale-"))
        sources: dict[int, Path] = {}
        for task, reference in group.sources:
            await repository.restore_reference(reference, beside / f"source-{task}", progress=progress)
            sources[task] = await run_blocking(_prepare, beside / f"source-{task}", group)
        # What was compacted before is uploaded as any other rows that are written again.
        linked, rewritten = list[int](), list[int]()
        for task, directory in sources.items():
            is_linked = group.is_merge and directory == beside / f"source-{task}"
            (linked if is_linked else rewritten).extend(path.stat().st_size for path in directory.glob("*.sst"))
        counts, made = await run_blocking(_sort_rows, sources, group, beside, is_written=not options.dry_run)
        previous = None
        if group.is_merge and not options.dry_run:
            plan = await run_blocking(merge_stores, list(sources.values()), beside / "merged")
            made = {group.targets[0]: beside / "merged"}
            previous = _known([await repository.read_index(of.index) for _, of in group.sources], plan)
        for task, directory in made.items():
            source = WholeDirectory(directory)
            source.is_lasting = False
            held = commit.store(str(task), group.store)
            address = StoreAddress(commit.scope, str(task), group.store)
            version = BackupOptions(version=commit.record.version, lineage=())
            with repository.missing_blobs.recording():
                results.append(
                    await backup_source(repository.opened, source, address, held, version, previous=previous)
                )
    moved = Counter(files_linked=len(linked), bytes_linked=sum(linked), bytes_rewritten=sum(rewritten))
    return Counter(stores=len(counts), rows=counts.total()) + moved


def _prepare(directory: Path, group: _Group) -> Path:
    """Refuse a store of which a part would stay behind; return where it is without deletions of ranges (R1). Blocks."""
    families = list_families(directory)
    if families != (DEFAULT_FAMILY,):
        reason = f"has column families, of which only the default one can be rescaled: {format_texts(families)}"
        raise StoreMergeError(reason, subject=str(directory), hint="the job keeps its number of tasks")
    if not group.is_merge or not read_parent(directory).range_deletions:
        return directory
    compacted = directory.with_name(f"{directory.name}-compacted")
    with StoreWriter.open(directory, compactions_wait=True) as store:
        store.compact(force=True)
        store.checkpoint(compacted)
    return compacted


def _placed_rows(task: int, directory: Path, group: _Group) -> Generator[tuple[bytes, bytes, int, int], None, None]:
    """Yield the rows of a source in the order of keys: key, value, its task and its new one."""
    for key, value in group.rows(directory):
        yield key, value, task, group.place_of(task, key)


def _sort_rows(
    sources: Mapping[int, Path], group: _Group, beside: Path, *, is_written: bool
) -> tuple[Counter[int], dict[int, Path]]:
    """Read all sources side by side, and find every key in place and in one of them alone (T3). Blocks.

    What they become by reference is read beside them, and has the same rows: a task that has deleted a key of another
    one would hide it there.

    Returns:
        The number of rows of each new store, which has some after a split; and where it is, if it is split and written.
    """
    runs = {target: SstRun(beside, target, RocksDbSettings()) for target in group.targets}
    counts = Counter(dict.fromkeys(group.targets, 0) if group.is_merge else {})
    merged: Iterator[tuple[bytes, bytes]] | None = None
    if group.is_merge:
        # In a directory of its own: an open leaves files there that no snapshot may have.
        merge_stores(list(sources.values()), beside / "opened")
        merged = group.rows(beside / "opened")
    last, last_task = None, -1
    with contextlib.ExitStack() as stack:
        sides = [_placed_rows(task, directory, group) for task, directory in sources.items()]
        for side in sides:
            stack.enter_context(contextlib.closing(side))
        for key, value, task, target in heapq.merge(*sides, key=itemgetter(0)):
            if key == last:
                message = f"the key {_shown(key)} is in task {last_task} and in task {task}"
                raise MisplacedKeyError(message, operation=_OPERATION, subject=f"store {group.store}", hint=_DOUBLE)
            if merged is not None and next(merged, None) != (key, value):
                message = f"rows from key {_shown(key)} on would be others"
                raise StoreMergeError(message, subject=f"store {group.store}", hint=_HIDDEN)
            last, last_task = key, task
            counts[target] += 1
            if is_written and not group.is_merge:
                runs[target].put(((key, value),))
    if merged is not None and next(merged, None) is not None:
        raise StoreMergeError("rows would be added", subject=f"store {group.store}", hint=_HIDDEN)
    made = {}
    for target, run in runs.items():
        if paths := run.finish():
            made[target] = beside / f"target-{target}"
            with StoreWriter.open(beside / f"new-{target}", compactions_wait=True) as store:
                store.ingest(paths)
                store.checkpoint(made[target])
    return counts, made


def _known(indexes: Sequence[SnapshotIndex], plan: MergePlan) -> SnapshotIndex:
    """Describe what the parents of a merge have uploaded, by the names that it has in the merged store (T4)."""
    entries = [{file.name: file for file in index.dir.files_present} for index in indexes]
    named = {sst_name(link.number): entries[link.parent].get(sst_name(link.before)) for link in plan.links}
    options = max((name for name in entries[0] if name.startswith("OPTIONS-")), default="")
    named[f"OPTIONS-{plan.options_number:06d}"] = entries[0].get(options)
    files = tuple(msgspec.structs.replace(of, name=name) for name, of in sorted(named.items()) if of is not None)
    packs = {pack.key: pack for index in indexes for pack in index.packs}
    return msgspec.structs.replace(
        indexes[0], dir=DirIndex("", files), packs=tuple(packs[key] for key in sorted(packs))
    )


def _shown(key: bytes) -> str:
    return key[:_SHOWN_BYTES_MAX].hex() + ("…" if len(key) > _SHOWN_BYTES_MAX else "")

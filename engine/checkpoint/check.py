"""Whether everything that a streaming checkpoint has committed is there and is what was written (design 0005, 4).

Three moves, so that the middle one can be spread over executors: `check_logs` reads the logs and the metadata, one by
one and together (K1, K2 and K8), and says which stores there are; `store_check.check_store` reads one; `finish_check`
puts it together. Each looks again at what a running query has moved.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from blobstore.base import BlobStore
from blobstore.concurrency import map_bounded, run_blocking
from blobstore.errors import BlobCorruptError, BlobNotFoundError
from blobstore.opening import StoreSettings
from engine.checkpoint.file_check import check_hidden
from engine.checkpoint.findings import MEND_HINT, CheckLevel, CheckReport, Finding, Findings, StoreChecked
from engine.checkpoint.store_check import StoreWork, check_store
from engine.errors import DamagedError, NotFoundError, ProviderError, UsageError, bare_message
from engine.runtime import NO_PROGRESS, Progress, Runtime, Stopwatch
from engine.state.checkpoint_dir import CheckpointDir, opened_checkpoint
from engine.state.query import ENTRY_BYTES_MAX, PARTITIONS_KEY, QueryAt, StoreAt, StreamingCheckpoint
from index.display import count
from index.errors import UNDECODABLE, BatchLogError, ClosedCheckpointError, FileChecksumError, FormatError
from index.spark import query_logs
from index.spark.checkpoint import (
    COMMITS,
    OFFSETS,
    SOURCES,
    STATE,
    StoreId,
    check_entry,
    is_entry,
    missing_entries,
    newest_entries,
    newest_entry,
)
from index.spark.names import parse_state_name
from index.spark.schema import decode_state_schema

_READS_MAX: Final = 16
# With fewer entries it is not certain which one is altered.
_ENTRIES_MIN: Final = 3

# Of format 1 Spark 4.3 writes no schema; it goes on with such a join where it is set not to check schemas.
_JOIN_FORMAT: Final = "spark.sql.streaming.join.stateFormatVersion"
_NO_SCHEMA: Final = "is not there, and without it no reader knows the rows"
# More batches in a row, or in several, of which nothing is there, are one finding.
_LACKING_MAX: Final = 1_000
_SKIPPED_HINT: Final = (
    "with asyncProgressTrackingEnabled Spark logs only some batches; without it, take the files from a backup"
)
_REPEATED_HINT: Final = (
    "a query that uses one stream twice has its offset twice; if it has more sources, take their logs from a backup"
)
# Letters in which an altered name differs from what it was.
_SLIP_MAX: Final = 2

T = TypeVar("T")


class LogsChecked(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the logs, what is wrong with them, and which stores there are to check."""

    query_id: str
    batches: tuple[int, ...]
    # Every store of every committed batch.
    stores: tuple[StoreWork, ...]
    findings: tuple[Finding, ...]
    files: int


async def check_checkpoint(
    location: str | Path | BlobStore,
    *,
    store_settings: StoreSettings | None = None,
    scratch: Path | None = None,
    level: CheckLevel = "full",
    stores_at_once: int = 4,
    progress: Progress = NO_PROGRESS,
    runtime: Runtime | None = None,
) -> CheckReport:
    """Check a checkpoint; nothing in it changes, and its query may run meanwhile.

    The level `quick` leaves out the content of SSTs, and loading the newest version. Private directories are made in
    `scratch`, of the size of `stores_at_once` stores; without it where this machine keeps such files. `progress` hears
    of stores, as files, and of bytes.

    Raises:
        NotFoundError: There is no checkpoint here.
        ProviderError: Its state is not RocksDB's (K8).
        TargetError: The scratch directory cannot be written, or this machine lacks what it takes to read a file.
        StoreError: The blob store did not answer.
    """
    watch = Stopwatch(runtime or Runtime())
    async with opened_checkpoint(location, store_settings) as root:
        logs = await check_logs(root)
        progress.total(files=len(logs.stores), bytes_=0)

        async def check(work: StoreWork) -> StoreChecked:
            checked = await check_store(root, work, scratch=scratch, level=level)
            progress.add(files=1, bytes_=checked.size_bytes)
            return checked

        checked = await map_bounded(check, logs.stores, in_flight_max=stores_at_once)
        return await finish_check(root, logs, checked, level=level, watch=watch)


async def finish_check(
    root: CheckpointDir, logs: LogsChecked, stores: Sequence[StoreChecked], *, level: CheckLevel, watch: Stopwatch
) -> CheckReport:
    """Put together what came of the logs and of all stores.

    What a query has deleted since the logs were listed is not a finding.
    """
    logs = await confirm_logs(root, logs)
    findings = [*logs.findings, *(finding for store in stores for finding in store.findings)]
    return CheckReport(
        location=root.location,
        level=level,
        query_id=logs.query_id,
        oldest_batch=min(logs.batches, default=-1),
        newest_batch=max(logs.batches, default=-1),
        batches=len(logs.batches),
        stores=len(stores),
        findings=tuple(sorted(findings, key=lambda finding: (finding.kind != "damage", finding.path))),
        versions=sum(store.versions for store in stores),
        versions_gone=sum(store.versions_gone for store in stores),
        files=logs.files + sum(store.files for store in stores),
        size_bytes=sum(store.size_bytes for store in stores),
        ssts=sum(store.ssts for store in stores),
        blocks=sum(store.blocks for store in stores),
        keys=sum(max(0, store.keys) for store in stores),
        seconds=watch.total_s(),
    )


async def check_logs(root: CheckpointDir) -> LogsChecked:
    """Read every log and every metadata of a query, each once. Raises as `check_checkpoint`."""
    return await _LogsCheck(root.look()).run()


async def confirm_logs(root: CheckpointDir, logs: LogsChecked) -> LogsChecked:
    """Read logs with findings again: only a file with findings in both looks has any (K9).

    A running query purges `offsets/` before `commits/`, and whatever is read between the two seems to be lost.
    """
    if not logs.findings:
        return logs
    paths = {finding.path for finding in logs.findings}
    again = await check_logs(root.look(again=True))
    return msgspec.structs.replace(again, findings=tuple(f for f in again.findings if f.path in paths))


class _LogsCheck:
    def __init__(self, root: CheckpointDir) -> None:
        self._root = root
        self._checkpoint = StreamingCheckpoint(root)
        self._findings = Findings()
        # Paths of what was read and is what it says; only these are compared with what is hidden beside them.
        self._sound: list[str] = []

    async def run(self) -> LogsChecked:
        committed = await self._checkpoint.committed_batches()
        offset_batches = await self._checkpoint.offsets.batches()
        query_id = await self._read("metadata", query_logs.decode_query_id)
        if query_id is None and not self._findings.found:
            if not committed and not offset_batches:
                hint = "name the checkpointLocation of a query"
                place = self._root.location
                raise NotFoundError("there is no checkpoint here", operation="check", subject=place, hint=hint)
            self._damaged("metadata", "is not there, and without it the query does not start")
        commits = await self._read_all(COMMITS, committed, query_logs.decode_commit)
        offsets = await self._read_all(OFFSETS, offset_batches, query_logs.decode_offsets)
        self._check_offsets(offsets, {*committed})
        self._check_numbers(committed, offset_batches, has_state=bool(await self._numbered(STATE)))
        self._check_watermarks(commits, offsets)
        newest_batch = max(committed, default=-1)
        sources = [status.path for status in await self._root.walk(SOURCES)]
        if newest_batch in offsets:
            await self._check_sources({n: offsets[n].offsets for n in sorted(offsets) if n <= newest_batch}, sources)
        operators = await self._check_operators()
        queries = await self._queries(sorted(commits.keys() & offsets.keys()))
        self._check_partitions(queries)
        stores = _work(queries, newest_batch=newest_batch)
        if queries and queries[-1].batch == newest_batch:
            # Beside the rows of each store's first partition, where there are any (K2).
            unwritten = query_logs.JOIN_STORES if queries[-1].offsets.conf.get(_JOIN_FORMAT) == "1" else ()
            first = [store for store in queries[-1].stores if store.id.partition == 0]
            needed = [of.id.path for of in first if not of.settings.column_families and of.id.store not in unwritten]
            others = [of.id.path for of in first if of.id.path not in needed]
            await self._read_schemas([f"{path}/_metadata/schema" for path in needed], needed=True)
            await self._read_schemas([f"{path}/_metadata/schema" for path in others])
            await self._check_counted(operators, {work.id for work in stores}, queries[-1])
        if self._root.local_root is not None:
            paths = dict.fromkeys([*self._sound, *sources])
            await run_blocking(self._check_hidden, self._root.local_root, paths)
        return LogsChecked(
            query_id=query_id or "",
            batches=committed,
            stores=stores,
            findings=tuple(self._findings.found),
            files=len(self._sound),
        )

    async def _read_all(self, log: str, batches: Iterable[int], decode: Callable[..., T]) -> dict[int, T]:
        fields: dict[int, EntryFields] = {}

        async def read(batch: int) -> tuple[int, T | None]:
            def look(data: bytes, *, subject: str) -> T:
                entry = decode(data, subject=subject)
                fields[batch] = entry_fields(data)
                return entry

            return batch, await self._read(f"{log}/{batch}", look)

        found = await map_bounded(read, sorted(batches), in_flight_max=_READS_MAX)
        for batch, message, is_certain in find_altered(fields):
            if batch == max(fields) and not is_certain:
                self._warn(f"{log}/{batch}", message, "a newer Spark wrote it, or it was altered")
            else:
                self._damaged(f"{log}/{batch}", message)
        return {batch: entry for batch, entry in found if entry is not None}

    async def _read(self, path: str, decode: Callable[..., T], *, needed: bool = False) -> T | None:
        """Read and decode a file; None if it is damaged, which is noted, or has just been purged.

        One that is `needed` is never purged.
        """
        try:
            entry = decode(await self._root.read(path, size_bytes_max=ENTRY_BYTES_MAX), subject=path)
        except BlobNotFoundError:
            if needed:
                self._damaged(path, _NO_SCHEMA)
        except ClosedCheckpointError as error:
            self._warn(path, bare_message(error), error.hint)
        except FormatError as error:
            self._findings.damage(path, error, "K2")
        except (DamagedError, BlobCorruptError) as error:
            # Of a link or a device the store says where it is, and what to do.
            is_general = error.hint in {DamagedError.default_hint, BlobCorruptError.default_hint}
            self._damaged(path, f"cannot be read: {error}" + ("" if is_general else f"; {error.hint}"))
        else:
            self._sound.append(path)
            return entry
        return None

    def _check_hidden(self, root: Path, paths: Iterable[str]) -> None:
        """Note files that do not fit their hidden checksums; nothing else shows which one was altered. Blocks."""
        for path in paths:
            try:
                check_hidden(root / path)
            except (FileChecksumError, DamagedError) as error:
                if (root / path).exists():
                    self._findings.damage(path, error, "K2")

    async def _check_sources(self, offsets: dict[int, tuple[query_logs.SourceOffset, ...]], paths: list[str]) -> None:
        """Check that the log of each file source has every entry up to that of the newest committed batch (K2)."""
        logs = newest_entries([*offsets.values()], [tuple(path.split("/")) for path in paths])
        newest = max(offsets)
        if repeated := sum(newest_entry(offset) is not None for offset in offsets[newest]) - len(logs):
            message = f"has {count(repeated, 'offset')} of a file source that are as another one, without a log"
            self._warn(f"{OFFSETS}/{newest}", message, _REPEATED_HINT)
        for log, entry in logs.items():
            prefix = f"{SOURCES}/{log}/"
            names = [path.removeprefix(prefix) for path in paths if path.startswith(prefix)]
            for name in missing_entries(names, entry):
                message = f"is not there, and the newest committed batch has read up to entry {entry}"
                self._damaged(f"{prefix}{name}", message)
            entries = [f"{prefix}{name}" for name in names if is_entry(name)]
            await map_bounded(lambda path: self._read(path, check_entry), entries, in_flight_max=_READS_MAX)

    async def _read_schemas(self, paths: Sequence[str], *, needed: bool = False) -> None:
        await map_bounded(
            lambda path: self._read(path, decode_state_schema, needed=needed), paths, in_flight_max=_READS_MAX
        )

    async def _check_operators(self) -> tuple[int, ...]:
        """Read all files of the operators' metadata; return the operators that have some (K2)."""
        found: list[int] = []
        for operator, path in await self._numbered(STATE):
            below = f"{path}/{query_logs.SCHEMAS}"
            there = {entry.path.removeprefix(f"{below}/") for entry in await self._root.walk(below)}
            read = await self._read_metadata(f"{path}/_metadata")
            if not read:
                continue
            found.append(operator)
            # What none of the metadata names, Spark passes over.
            named = {name for metadata in read.values() for name in metadata.schemas}
            await self._read_schemas([f"{below}/{name}" for name in sorted(there & named)])
            for name in read[max(read)].schemas:
                if name not in there:
                    self._damaged(f"{below}/{name}", _NO_SCHEMA)
        return tuple(found)

    async def _read_metadata(self, directory: str) -> dict[int, query_logs.OperatorMetadata]:
        read: dict[int, query_logs.OperatorMetadata] = {}
        for entry in await self._root.walk(directory):
            below = entry.path.removeprefix(f"{directory}/")
            batch = 0 if below == "metadata" else query_logs.parse_batch_name(below.removeprefix("v2/"))
            if batch is None:
                continue  # no file of Spark's, which passes over it
            metadata = await self._read(entry.path, query_logs.decode_operator)
            if metadata is not None:
                counts = sorted({store.partitions_count for store in metadata.stores})
                if len(counts) > 1:
                    message = f"gives stores of one operator {counts[0]} and {counts[-1]} partitions"
                    self._damaged(entry.path, message)
                read[batch] = metadata
        return read

    def _check_partitions(self, queries: list[QueryAt]) -> None:
        """Check that the offsets of a batch pin as many partitions as its commit has ids of (K2).

        The operators' metadata keeps the number that it was made with, whatever repartitioned the state since.
        """
        for query in queries:
            pinned = query.offsets.conf.get(PARTITIONS_KEY)
            for operator in query.operators if query.commit.unique_ids is not None and pinned is not None else ():
                if not operator.is_single and pinned != str(operator.partitions_count):
                    message = f"pins {pinned} partitions, and {COMMITS}/{query.batch} has {operator.partitions_count}"
                    self._damaged(f"{OFFSETS}/{query.batch}", f"{message} of operator {operator.id}")

    def _check_numbers(self, commits: tuple[int, ...], offsets: tuple[int, ...], *, has_state: bool) -> None:
        if not commits:
            if len(offsets) > 1:
                message = f"has no batch, and offsets/ has {len(offsets)}"
                self._damaged(COMMITS, message, "restore the checkpoint: which state counts is not known")
            return
        known, oldest, newest = set(commits), min(commits), max(commits)
        logged = sorted(batch for batch in {*commits, *offsets} if oldest <= batch <= newest)
        # Of names that are not Spark's the gaps may have any length.
        gaps = [range(before + 1, after) for before, after in pairwise(logged) if after > before + 1]
        lacking = sum(map(len, gaps))
        if lacking and (lacking > _LACKING_MAX or not has_state):
            first, batches = gaps[0].start, count(lacking, "batch has", "batches have")
            message = f"is not there, nor is {OFFSETS}/{first}; {batches} neither file"
            if has_state:
                self._damaged(f"{COMMITS}/{first}", message)
            else:
                self._warn(f"{COMMITS}/{first}", message, _SKIPPED_HINT)
            gaps = []
        for batch in sorted([*logged, *chain.from_iterable(gaps)]):
            if batch not in known:
                self._damaged(f"{COMMITS}/{batch}", "is not there, and later batches are committed")
            if batch not in offsets:
                self._damaged(f"{OFFSETS}/{batch}", "is not there, and its batch is committed")
        # Spark reads the offsets of the newest batch that has some, and of the one before it in the log.
        beside = {newest - 1, newest + 1} if has_state else {*offsets} - {newest}
        if newest == oldest > 0 and not beside.intersection(offsets):
            self._damaged(f"{OFFSETS}/{newest - 1}", "is not there, and without it the query does not go on")
        ahead = [batch for batch in offsets if batch > newest]
        if ahead and (len(ahead) > 1 or has_state) and max(ahead) > newest + 1:
            message = f"is {max(offsets) - newest} batches after the newest committed one; there is at most one"
            hint = "commit files are missing, or a copy of the checkpoint is of two instants"
            self._warn(f"{OFFSETS}/{max(offsets)}", message, hint)

    def _check_offsets(self, offsets: Mapping[int, query_logs.BatchOffsets], committed: set[int]) -> None:
        """Check that no committed batch has the offsets of another, nor any one cut short (K2)."""
        planned: dict[tuple[object, ...], int] = {}
        for batch, entry in offsets.items():
            is_dated = entry.timestamp_ms and batch in committed
            first = planned.setdefault((entry.timestamp_ms, *entry.offsets), batch) if is_dated else batch
            if first != batch:
                message = f"is as {OFFSETS}/{first}: one of the two is a copy of the other"
                self._warn(f"{OFFSETS}/{batch}", message, "take the file from a backup: the query may read input again")
            for source in entry.offsets:
                if is_cut_json(source.offset):
                    self._damaged(f"{OFFSETS}/{batch}", f"has an offset of source {source.source} that is not JSON")

    def _check_watermarks(
        self, commits: Mapping[int, query_logs.BatchCommit], offsets: Mapping[int, query_logs.BatchOffsets]
    ) -> None:
        begun = {batch: entry.watermark_ms for batch, entry in offsets.items() if entry.has_metadata}
        for batch, commit in commits.items():
            after = begun.get(batch + 1)
            if after is None or after == commit.next_watermark_ms:
                continue
            altered = judge_watermarks(batch, commit.next_watermark_ms, begun)
            if altered == "commits":
                message = f"announces the watermark {commit.next_watermark_ms}, and the batches beside it have {after}"
                self._damaged(f"{COMMITS}/{batch}", message)
                continue
            message = f"begins with the watermark {after}, and {COMMITS}/{batch} announces {commit.next_watermark_ms}"
            if altered:
                self._damaged(f"{OFFSETS}/{batch + 1}", message)
            else:
                self._warn(f"{OFFSETS}/{batch + 1}", message, "one of the two is of another history; compare a backup")

    async def _queries(self, batches: list[int]) -> list[QueryAt]:
        """Read the whole query at each committed batch whose logs can be read. ProviderError: none of them can (K8)."""

        async def look(batch: int) -> QueryAt | ProviderError | None:
            try:
                return await self._checkpoint.at(batch)
            except NotFoundError:
                return None  # purged meanwhile
            except ProviderError as error:
                return error
            except (FormatError, UsageError, DamagedError) as error:
                path = error.subject if "/" in error.subject else f"{COMMITS}/{batch}"
                self._findings.damage(path, error, "K2")
                return None

        found = await map_bounded(look, batches, in_flight_max=_READS_MAX)
        queries = [query for query in found if isinstance(query, QueryAt)]
        for batch, refused in zip(batches, found, strict=True):
            if isinstance(refused, ProviderError):
                if not queries:
                    raise refused
                # One batch of them all: it is the file that is wrong.
                self._findings.damage(f"{OFFSETS}/{batch}", refused, "K2")
        return queries

    async def _check_counted(self, operators: tuple[int, ...], stores: set[StoreId], newest: QueryAt) -> None:
        """Check that the newest batch counts all state that it wrote (K2): without ids, only its offsets say how much.

        What is said of an operator whose metadata was not read would be a guess.
        """
        if newest.commit.unique_ids is not None:
            return
        known = {store.path for store in stores}
        above = {path.rpartition("/")[0] for path in known} - known
        unknown: list[str] = []
        for operator, directory in await self._numbered(STATE):
            if operator not in operators:
                continue
            if operator not in {store.operator for store in stores}:
                unknown.append(directory)
                continue
            unknown += [path for _, path in await self._numbered(directory) if path not in known | above]
            for path in sorted(above):
                if path.startswith(f"{directory}/"):
                    unknown += [store.path for store in await self._root.list(path) if store.path not in known]
        # Offsets are written before state: what was seen above without them belongs to no batch.
        if not unknown or max(await self._checkpoint.offsets.batches(), default=-1) > newest.batch:
            return
        for path in unknown:
            names = [parse_state_name(status.name) for status in await self._root.walk(path)]
            if any(name is not None and name.of.version == newest.batch + 1 for name in names):
                self._damaged(f"{OFFSETS}/{newest.batch}", f"does not count {path}, which was written by its batch")

    async def _numbered(self, path: str) -> list[tuple[int, str]]:
        """List the directories in one that have a number as their name, with their paths."""
        found = [(query_logs.parse_batch_name(of.name), of) for of in await self._root.list(path)]
        return [(number, of.path) for number, of in found if number is not None and of.is_directory]

    def _damaged(self, path: str, message: str, hint: str = MEND_HINT) -> None:
        self._findings.damage(path, BatchLogError(message, hint=hint), "K2")

    def _warn(self, path: str, message: str, hint: str) -> None:
        self._findings.warn(path, message, hint, "K2")


def _work(queries: list[QueryAt], *, newest_batch: int) -> tuple[StoreWork, ...]:
    states: dict[StoreId, list[StoreAt]] = {}
    for query in queries:
        for store in query.stores:
            states.setdefault(store.id, []).append(store)
    return tuple(
        StoreWork(
            id=id_,
            versions=tuple(store.at for store in states[id_]),
            codecs=tuple(store.settings.codec for store in states[id_]),
            settings=states[id_][-1].settings,
            newest_batch=newest_batch,
        )
        for id_ in sorted(states)
    )


# Names in a file of `offsets/` or `commits/`, known or not; those of the settings that the query is pinned to, of which
# a commit has none; and these with their values.
EntryFields = tuple[frozenset[str], frozenset[str], frozenset[str]]


def entry_fields(data: bytes) -> EntryFields:
    """Read the names of the fields of an entry, and the settings; none where there is no JSON."""
    fields: dict[str, Any] = {}
    with suppress(*UNDECODABLE, IndexError):
        fields = msgspec.json.decode(data.split(b"\n", 2)[1], type=dict[str, Any])
    conf = fields.get("conf")
    conf = conf if isinstance(conf, dict) else {}
    # The number of partitions changes when a state is repartitioned.
    pinned = frozenset(f"{name}={value}" for name, value in conf.items() if name != PARTITIONS_KEY)
    return frozenset(fields), frozenset(conf), pinned


def find_altered(entries: Mapping[int, EntryFields]) -> Iterator[tuple[int, str, bool]]:
    """Find batches whose entry has a name or a setting that no other has in the place of one that all others have (K2).

    An altered name still parses: JSON has no checksum, and Spark passes over fields that it does not know. But the
    entries of a log are written by one query, which keeps its settings. Yields the batch, what is wrong, and whether it
    is certain also of the newest, which a newer Spark may have written: a name that is all but a letter or two of the
    one in whose place it is.
    """
    if len(entries) < _ENTRIES_MIN:
        return
    for batch, entry in entries.items():
        others = [other for number, other in entries.items() if number != batch]
        for own, *theirs in zip(entry, *others, strict=True):
            lacking = frozenset.intersection(*theirs) - own
            alone = own - frozenset.union(*theirs)
            if lacking and alone:
                message = f"has {', '.join(sorted(alone))!r} where all others have {', '.join(sorted(lacking))!r}"
                yield batch, message, any(_is_slip(new, old) for new in alone for old in lacking)
                break


def _is_slip(new: str, old: str) -> bool:
    """Return whether a name, without a value, is another one with a letter or two altered."""
    return "=" not in new and len(new) == len(old) and sum(a != b for a, b in zip(new, old, strict=True)) <= _SLIP_MAX


def is_cut_json(text: str | None) -> bool:
    """Return whether the offset of a source begins as JSON and is not: not every source writes JSON, but none half."""
    if text is None or not text.startswith(("{", "[")):
        return False
    try:
        msgspec.json.decode(text)
    except UNDECODABLE:
        return True
    return False


def judge_watermarks(batch: int, announced: int, begun: Mapping[int, int]) -> str:
    """Decide which file is altered, where `commits/<batch>` announces another watermark than the next batch has.

    Watermarks never go back: one that is below that of the batch itself, or above that of the batch after the next, was
    not written by a query. `begun` has what each batch in `offsets/` begins with. Returns "commits" or "offsets", or ""
    if that is not certain.
    """
    if batch not in begun or batch + 2 not in begun:
        return ""
    least, most = begun[batch], begun[batch + 2]
    fits = [least <= watermark <= most for watermark in (announced, begun[batch + 1])]
    if least > most or fits[0] == fits[1]:
        return ""
    return "offsets" if fits[0] else "commits"

"""The backup of a streaming checkpoint: what it says, and what of it a batch is restored from (design 0005).

First what the commit of a backup says and how its stores are named (P8); then which backup and which files of the
query a batch takes (R1 and R2).

The log of a file source, `sources/<n>/`, is cut back to the offsets that are restored with it (R2). A file source notes
in an entry of its log which files it has seen, before the offsets of a batch name the entry, and reads whatever its log
is ahead of the offsets as *one* batch. A checkpoint whose log leads further than its offsets so goes on with other rows
under the numbers of batches that a sink has seen already.

Spark keeps one file per entry, and now and then an `<entry>.compact` that has the lines of all before it, which then
go. It takes the number of entries between two of those from their names, and fails where it then misses one
(`CompactibleFileStreamLog.getAllValidBatches` and `compactInterval`, `FileStreamSourceLog`). Files with other names are
passed over.

Paths in the files of a checkpoint that is at another place now are rewritten (R5). Spark writes two kinds of absolute
paths into a checkpoint: those of schema files, in the metadata of operators, and those of the files that a file source
has seen.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import msgspec

from index.errors import UNDECODABLE, BatchLogError, UnknownFormatError
from index.java_text import decode_json, encode_jackson
from index.plan.commits import Commit
from index.snapshot.keys import check_file_name
from index.snapshot.model import FilePath, StoreReference
from index.spark.names import check_store_dir
from index.spark.query_logs import DEFAULT_STORE, SourceOffset, decode_operator, parse_batch_name

# The store that has the files of the query: its logs, its metadata and its sources, laid out as in the checkpoint.
QUERY_TASK: Final = "query"
QUERY_STORE: Final = "checkpoint"

KIND: Final = "spark-checkpoint"
FORMAT: Final = 1

COMMITS: Final = "commits"
OFFSETS: Final = "offsets"
SOURCES: Final = "sources"
STATE: Final = "state"
QUERY_ID: FilePath = ("metadata",)

_TASK: Final = re.compile(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)")
_NAME: Final = re.compile(r"(?P<entry>0|[1-9][0-9]{0,17})(?P<compact>\.compact)?")
_COMPACT: Final = ".compact"
_MISSING_LISTED_MAX: Final = 16
_DAMAGE_LISTED_MAX: Final = 16
# Ways to read which offsets are of one source that are tried.
_WAYS_MAX: Final = 1024

_SCHEMA_PATH: Final = re.compile(r"(?P<root>.*)/state/(?P<operator>[0-9]+)/_stateSchema/(?P<rest>.+)", re.DOTALL)
_SCHEME: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<slashes>/*)(?P<rest>.*)", re.DOTALL)
_S3_SCHEMES: Final = frozenset({"s3", "s3a", "s3n"})
_FILE: Final = "file"
# What java.net.URI leaves as it is in a path.
_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~!*'(),;:$&+=@/")
_VERSION_LINE: Final = re.compile(rb"v[0-9]+\r?")


class StoreId(msgspec.Struct, frozen=True, order=True):
    """One state store of a query."""

    operator: int
    partition: int
    store: str = DEFAULT_STORE

    @property
    def task(self) -> str:
        return f"{self.operator}-{self.partition}"

    @property
    def path(self) -> str:
        """Its directory in a checkpoint; an `UnsafeNameError` if the name of the store is not one safe component."""
        path = f"{STATE}/{self.operator}/{self.partition}"
        return path if self.store == DEFAULT_STORE else f"{path}/{check_store_dir(self.store)}"

    def __str__(self) -> str:  # type: ignore[explicit-override]  # as in `DisplayMixin`
        return self.path.removeprefix(f"{STATE}/")

    @classmethod
    def parse(cls, task: str, store: str) -> Self | None:
        """Return the state store that a task and a store of a commit mean; None if they mean something else."""
        found = _TASK.fullmatch(task)
        return None if found is None else cls(int(found[1]), int(found[2]), store)


def single_operators(stores: Iterable[StoreReference], version: int) -> frozenset[int]:
    """Return the operators of which a backup has one partition, the first, at a version."""
    partitions: dict[int, set[int]] = {}
    for store in stores:
        found = StoreId.parse(store.task, store.store)
        if found is not None and store.version == version:
            partitions.setdefault(found.operator, set()).add(found.partition)
    return frozenset(operator for operator, found in partitions.items() if found == {0})


class CheckpointBackup(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag=KIND, tag_field="kind"):
    """What the offsets of a backup's commit say. The order of the fields is the order in which they are written."""

    format: int = FORMAT
    query_id: str
    # The newest batch that it has, and the oldest one that can be restored from it.
    batch: int
    oldest_batch: int
    # Where the checkpoint was; for people.
    location: str = ""
    # What was damaged and was taken over all the same (P5): how many files, and the first of them.
    # Both are written only if there are any.
    damaged: int = 0
    damage: tuple[str, ...] = ()

    def with_damage(self, paths: Sequence[str]) -> Self:
        """Return the same, taken despite damage to these files, if there are any."""
        return msgspec.structs.replace(self, damaged=len(paths), damage=tuple(paths[:_DAMAGE_LISTED_MAX]))

    def describe_damage(self) -> str:
        """Say for people what was damaged; empty if nothing was."""
        more = self.damaged - len(self.damage)
        return ", ".join(self.damage) + (f" and {more} more" if more > 0 else "")

    def encode(self) -> str:
        fields: dict[str, Any] = msgspec.to_builtins(self)
        if not self.damaged:
            del fields["damaged"], fields["damage"]
        return msgspec.json.encode(fields).decode()


def decode_checkpoint_backup(offsets: str) -> CheckpointBackup | None:
    """Decode a commit's offsets; None if the commit is not a checkpoint backup.

    Raises:
        UnknownFormatError: A newer tidemark made it.
        BatchLogError: It cannot be read, or its numbers make no sense.
    """
    try:
        kind = msgspec.json.decode(offsets, type=_Kind)
    except UNDECODABLE:
        return None
    if kind.kind != KIND:
        return None
    subject = "checkpoint backup"
    if kind.format != FORMAT:
        raise UnknownFormatError(f"is of format {kind.format}", subject=subject, hint="read it with a newer tidemark")
    backup = decode_json(offsets, CheckpointBackup, BatchLogError, "cannot be read", subject=subject)
    if not 0 <= backup.oldest_batch <= backup.batch:
        raise BatchLogError(f"says batches {backup.oldest_batch} to {backup.batch}", subject=subject)
    return backup


class _Kind(msgspec.Struct):
    kind: str
    format: int = 0


# A backup with the commit that keeps it.
StoredBackup = tuple[Commit, CheckpointBackup]


def choose_checkpoint_backup(
    backups: Sequence[StoredBackup], *, batch: int | None = None, at_ms: int | None = None
) -> StoredBackup | None:
    """Choose the backup, of some that are sorted newest first, to restore from (R1); None if there is none that fits.

    That is one that has the batch, or else the one that was the newest at a time by the store's clock. Where a query
    was taken back and went on, there are two of some batches: those that led to the newest backup come first, as far as
    the numbers show. Of these, one that was taken despite damage comes last (P5a).
    """
    if batch is None:
        return next((p for p in backups if at_ms is None or p[0].committed_at_ms <= at_ms), None)
    current = _current(backups)
    for some in ([p for p in current if not p[1].damaged], current, backups):
        own = next((p for p in some if p[1].batch == batch), None)
        later = [p for p in some if p[1].oldest_batch <= batch <= p[1].batch]
        if found := own or min(reversed(later), key=lambda taken: taken[1].batch, default=None):
            return found
    return None


def _current(backups: Sequence[StoredBackup]) -> list[StoredBackup]:
    """Leave out backups of batches that were given up later: going back in time, batches never rise."""
    kept: list[StoredBackup] = []
    for taken in backups:
        if not kept or taken[1].batch <= kept[-1][1].batch:
            kept.append(taken)
    return kept


def select_query_files(paths: Iterable[FilePath], *, oldest_batch: int, batch: int) -> tuple[FilePath, ...]:
    """Select the files of the query, of those that the backup has, that belong to a batch and nothing newer (R2).

    The commits from `oldest_batch` on have to be there.

    Raises:
        BatchLogError: A file without which the query does not go on is not there; the error names it.
    """
    there = sorted(set(paths))
    needed = (QUERY_ID, (OFFSETS, str(batch)), *((COMMITS, str(b)) for b in range(oldest_batch, batch + 1)))
    for path in needed:
        if path not in there:
            hint = "the backup is not whole; restore from another one"
            raise BatchLogError("is not in the backup", subject="/".join(path), hint=hint)
    return take_query_files(there, oldest_batch, batch)


def take_query_files(paths: Collection[FilePath], oldest_batch: int, batch: int) -> tuple[FilePath, ...]:
    """Take the files of a query that are of these batches, or of all (P7, R2).

    Where the offsets right before them are not there, those that are before that: of a query without state that logs
    only some batches.
    """
    numbers = [parse_batch_name(path[1]) for path in paths if path[0] == OFFSETS and len(path) > 1]
    before = max((number for number in numbers if number is not None and number < oldest_batch), default=oldest_batch)
    return tuple(path for path in paths if path == (OFFSETS, str(before)) or belongs(path, oldest_batch, batch))


def belongs(path: FilePath, oldest_batch: int, batch: int) -> bool:
    """Return whether a file of a query is of these batches, or of all (P7, R2)."""
    match path:
        case ("commits", name):
            return _is_within(name, oldest_batch, batch)
        case ("offsets", name):
            return _is_within(name, oldest_batch - 1, batch + 1)
        case ("state", operator, "_metadata", "v2", name):
            return parse_batch_name(operator) is not None and _is_within(name, 0, batch)
        case ("state", operator, "_metadata", "metadata") | ("state", operator, "_stateSchema", _, _):
            return parse_batch_name(operator) is not None
        case _:
            return path == QUERY_ID or path[0] == SOURCES


def _is_within(name: str, oldest: int, newest: int) -> bool:
    found = parse_batch_name(name)
    return found is not None and oldest <= found <= newest


class LogCut(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a log so that it ends where it should."""

    # Names of entries that go.
    dropped: tuple[str, ...] = ()
    # Names of those whose lines, as far as they are of entries that stay, make up the file `written`.
    joined: tuple[str, ...] = ()
    # Empty if nothing is to be written.
    written: str = ""


class _FileOffset(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    log_offset: int


class _Line(msgspec.Struct, rename="camel"):
    path: str
    batch_id: int


def newest_entry(offset: SourceOffset) -> int | None:
    """Return the newest log entry that an offset of a file source names, -1 for none; None for any other offset."""
    try:
        return msgspec.json.decode(offset.offset or "", type=_FileOffset).log_offset
    except UNDECODABLE:
        return None


def newest_entries(history: Sequence[Sequence[SourceOffset]], paths: Iterable[FilePath]) -> dict[str, int]:
    """Return, by its directory below `sources/`, up to which entry the log of each file source has been read.

    `history` has the offsets of batches, the one that is meant last. Without names there is an offset for each use of a
    source, but one log: a stream that is used twice has two equal offsets, and logs are numbered by source. Of the ways
    to read that, the first one with the fewest repetitions counts by which no log lacks an entry.
    """
    logs: dict[str, list[str]] = {}
    for path in paths:
        if path[0] == SOURCES and len(path) > 2:  # noqa: PLR2004  (its directory and an entry)
            logs.setdefault(path[1], []).append(path[2])
    newest = history[-1]
    texts = [tuple(each[at].offset for each in history if len(each) == len(newest)) for at in range(len(newest))]
    is_named = any(item.source != str(at) for at, item in enumerate(newest))
    again = [] if is_named else [at for at, text in enumerate(texts) if text in texts[:at]]
    entries = [newest_entry(item) for item in newest]
    needed = max((at + 1 for at, entry in enumerate(entries) if entry is not None and entry >= 0), default=0)
    least = max(0, needed - max((int(log) + 1 for log in logs if log.isdecimal()), default=0))

    def read_as(repeated: Collection[int]) -> dict[str, int]:
        own = [(item.source, entries[at]) for at, item in enumerate(newest) if at not in repeated]
        return {s if is_named else str(at): entry for at, (s, entry) in enumerate(own) if entry is not None}

    ways = (read_as(way) for size in range(least, len(again) + 1) for way in itertools.combinations(again, size))
    for way in itertools.islice(ways, _WAYS_MAX):
        if not any(missing_entries(logs.get(log, ()), entry) for log, entry in way.items()):
            return way
    return read_as(again[:least])


def plan_cut(names: Collection[str], newest: int) -> LogCut:
    """Plan how a log with files of these names is made to end with an entry; -1 or less: no entry stays.

    There is nothing to do if nothing is beyond the entry, or if not all before it is there: then the log is not what it
    seems.
    """
    plain, compacts = _sort(names)
    if not any(entry > newest for entry in plain | compacts):
        return LogCut()
    older = sorted(entry for entry in compacts if entry <= newest)
    first = older[-1] if older else -1
    is_whole = plain.issuperset(range(first + 1, newest + 1))
    # Spark takes the distance of compact entries from the last two, so two have to be left, or all. If none is, every
    # entry was alone: the distance, which only the query's settings say, is greater than their number.
    if is_whole and (not older or len(older) > 1 or compacts == set(older)):
        return LogCut(dropped=_names(plain, compacts, above=newest))
    later = min((entry for entry in compacts if entry > newest), default=None)
    if later is not None:
        joined: tuple[str, ...] = (f"{later}{_COMPACT}",)
    elif is_whole:
        joined = (f"{first}{_COMPACT}", *map(str, range(first + 1, newest + 1)))
    else:
        return LogCut()
    # One compact entry alone fits every distance that Spark can find for it.
    written = f"{newest}{_COMPACT}"
    dropped = tuple(name for name in _names(plain, compacts, above=-1) if name != written)
    return LogCut(dropped=dropped, joined=joined, written=written)


def join_entries(files: Iterable[tuple[str, bytes]], newest: int) -> bytes:
    """Make the compact entry that has the lines of some files up to the entry `newest`, from their names and contents.

    Raises:
        BatchLogError: A file is not what Spark writes.
    """
    version = b""
    kept: list[bytes] = []
    for name, data in files:
        version, lines = _lines(name, data)
        kept += [line for line in lines if _entry_of(line, name) <= newest]
    return b"\n".join([version, *kept])


def missing_entries(names: Collection[str], newest: int) -> tuple[str, ...]:
    """List the first entries that a log lacks to be whole up to `newest`, which offsets name."""
    plain, compacts = _sort(names)
    if any(entry >= newest for entry in compacts):
        return ()
    first = max(compacts, default=-1) + 1
    lacking = (str(entry) for entry in range(first, newest + 1) if entry not in plain)
    return tuple(itertools.islice(lacking, _MISSING_LISTED_MAX))


def is_entry(name: str) -> bool:
    """Return whether a file in the directory of a log is an entry, compacted or not."""
    return _NAME.fullmatch(name) is not None


def check_entry(data: bytes, *, subject: str) -> None:
    """Refuse an entry with a line that cannot be read, with a `BatchLogError`."""
    for line in _lines(subject, data)[1]:
        _entry_of(line, subject)


def _entry_of(line: bytes, subject: str) -> int:
    return decode_json(line, _Line, BatchLogError, "has a line that cannot be read", subject=subject).batch_id


def _lines(name: str, data: bytes) -> tuple[bytes, list[bytes]]:
    first, *lines = data.split(b"\n")
    if _VERSION_LINE.fullmatch(first) is None:
        raise BatchLogError("does not begin with a version", subject=name)
    return first, [line for line in lines if line]


def _sort(names: Collection[str]) -> tuple[set[int], set[int]]:
    found = [m for m in map(_NAME.fullmatch, names) if m is not None]
    plain, compacts = ({int(m["entry"]) for m in found if bool(m["compact"]) == kind} for kind in (False, True))
    return plain, compacts


def _names(plain: set[int], compacts: set[int], *, above: int) -> tuple[str, ...]:
    kinds = (plain, ""), (compacts, _COMPACT)
    return tuple(f"{entry}{suffix}" for entries, suffix in kinds for entry in sorted(entries) if entry > above)


def relocate_operator(data: bytes, target: str, *, subject: str) -> bytes:
    """Rewrite the metadata of an operator in a checkpoint whose root is `target`; the same bytes if it names no path.

    The data is `_metadata/v2/<batch>`, the target an absolute path or `s3://bucket/prefix`. It gets the scheme that the
    file has, if that is one of the same kind of store, else the one that Spark knows: `file:` or `s3a:`.

    Raises:
        BatchLogError: It is not what Spark writes, or names what is not a schema file of a checkpoint.
        UnsafeNameError: A part of what stays of a path is not a safe name.
    """
    if not any(store.schema_paths for store in decode_operator(data, subject=subject).stores):
        return data
    first, newline, text = data.partition(b"\n")
    parsed: dict[str, Any] = msgspec.json.decode(text)
    for store in parsed["stateStoreInfo"]:
        paths: list[str] = store.get("stateSchemaFilePaths", [])
        store["stateSchemaFilePaths"] = [_relocate_schema(path, target, subject=subject) for path in paths]
    return first + newline + encode_jackson(parsed)


def _relocate_schema(path: str, target: str, *, subject: str) -> str:
    m = _SCHEMA_PATH.fullmatch(path)
    if m is None:
        raise BatchLogError(f"names {path!r}, which is not a schema file of a checkpoint", subject=subject)
    for name in m["rest"].split("/"):
        check_file_name(name)
    return f"{_as_spark_writes(target, m['root'])}/state/{m['operator']}/_stateSchema/{m['rest']}"


def _as_spark_writes(target: str, before: str) -> str:
    """Write the root of a checkpoint in the form of another root, as far as both are of the same kind of store."""
    target = target.rstrip("/")
    old, new = _SCHEME.fullmatch(before), _SCHEME.fullmatch(target)
    if new is None:
        if old is None and before.startswith("/"):
            return target
        # Spark writes one slash; some other writers three.
        is_long = old is not None and old["scheme"] == _FILE and len(old["slashes"]) > 1
        return f"{_FILE}:{'//' if is_long else ''}{target}"
    if new["scheme"] not in _S3_SCHEMES:
        return target
    scheme = old["scheme"] if old is not None and old["scheme"] in _S3_SCHEMES else "s3a"
    return f"{scheme}://{new['rest']}"


class PathMap:
    """Where the inputs of a query are now: from old prefixes of paths to new ones, at whole components.

    Without a scheme each is a path of a local file system, as people write it; with one it is a part of a URL, as Spark
    writes it. Of two that match the longer one counts. `unused` are the old ones that have matched nothing yet.
    """

    def __init__(self, prefixes: Mapping[str, str]) -> None:
        named = {_canonical_url(_written(old)): (old, _written(new)) for old, new in prefixes.items()}
        self._prefixes = sorted(named.items(), key=lambda item: -len(item[0]))
        self.unused = set(prefixes)

    def relocate(self, path: str) -> str:
        found = _canonical_url(path)
        for old, (given, new) in self._prefixes:
            if found == old or found.startswith(f"{old}/"):
                self.unused.discard(given)
                return new + found[len(old) :]
        return path

    def relocate_log(self, data: bytes) -> bytes:
        """Rewrite an entry of a file source's log, `sources/<n>/<k>` or `<k>.compact`; anything else is unchanged."""
        first, *lines = data.split(b"\n")
        if not self._prefixes or not lines or _VERSION_LINE.fullmatch(first) is None:
            return data
        return b"\n".join([first, *map(self._relocate_line, lines)])

    def _relocate_line(self, line: bytes) -> bytes:
        try:
            entry = msgspec.json.decode(line)
        except UNDECODABLE:
            return line
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            return line
        moved = self.relocate(entry["path"])
        return line if moved == entry["path"] else encode_jackson({**entry, "path": moved})


def _written(path: str) -> str:
    """Write a prefix as Spark does: a URL, percent-encoded if it was a local path."""
    path = path.rstrip("/")
    if _SCHEME.fullmatch(path):
        return path
    quoted = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in path.encode())
    return f"{_FILE}://{quoted}"


def _canonical_url(url: str) -> str:
    """Return the same URL for `file:/a` and `file:///a`."""
    m = _SCHEME.fullmatch(url)
    if m is None or m["scheme"] != _FILE:
        return url
    return f"{_FILE}:///{m['rest']}"

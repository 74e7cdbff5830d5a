"""Find the commit that a reader wants and protect it while it reads; find what is missing, and the newest whole one."""

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypedDict, Unpack

import msgspec

from blobstore.base import BlobStore, RequestMetadata
from blobstore.concurrency import map_bounded
from blobstore.errors import BlobNotFoundError
from blobstore.local.files import write_whole
from engine.errors import CollectedError, DamagedError, IncompleteError, NotFoundError, UsageError, bare_message
from engine.local.digests import read_own_file
from engine.records.indexes import read_index
from engine.records.leases import PinLease, hold_pin, list_names, read_name
from engine.records.log import Noted, ScopeLog, load_log, load_scope
from engine.runtime import Runtime
from index.display import iso_time
from index.errors import UNDECODABLE, FormatError
from index.plan.commits import Commit, commit_of_name, fits
from index.snapshot.contents import blobs_needed
from index.snapshot.keys import BLOBS, INDEXES, parse_log_key
from index.snapshot.model import BlobKey, Scope, StoreReference
from tidemark.errors import TidemarkError

COMMITS_MAX: Final = 1_000
# Attempts of a reader whose commit is collected before its pin is there.
CHOICES_MAX: Final = 3
# More missing blobs than this are found again, by the next backup or by one that is asked to look.
MISSING_BLOBS_MAX: Final = 10_000
DAMAGED_FILE: Final = "damaged.json"
NO_COMMITS: Final = "none was made yet, or all were closed, as by `tidemark forget`"

ReadCommits = Callable[[], Awaitable[Sequence[Commit]]]


class Choice(TypedDict, total=False):
    """What a commit has to fit; the newest that fits everything given is chosen.

    Attributes:
        number: Its number in the scope.
        version: The caller's version; with `unique_id` the version of the store that has it.
        unique_id: The id of any of its stores, as in `version_uniqueId`, or the record's write id.
        at_ms: A time by the store's clock: the commit that was the newest then.
        name: A name given to it, and nothing else; it is found even after retention has closed its record.
    """

    number: int | None
    version: int | None
    unique_id: str | None
    at_ms: int | None
    name: str | None


async def find_commit(store: BlobStore, scope: Scope, **choice: Unpack[Choice]) -> Commit:
    """Find the newest commit that fits everything given, the newest of all if nothing is.

    Raises:
        NotFoundError: None fits.
        FormatError: A record that may be the one that fits cannot be read.
        UsageError: A name and something else is given.
        TypeError: Something is given that `Choice` does not have.
    """
    if unknown := choice.keys() - Choice.__annotations__.keys():
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")
    given = {key: value for key, value in choice.items() if value is not None}
    name = choice.get("name")
    if name is not None:
        if len(given) > 1:
            hint = "give a name, or a number, version, unique id or time"
            raise UsageError("a name already chooses one commit", operation="find", subject=name, hint=hint)
        return commit_of_name(await read_name(store, scope, name))
    if not given:
        newest = (await load_log(store, scope)).newest
        if newest is None:
            raise NotFoundError("has no commits", operation="find", subject=str(scope), hint=NO_COMMITS)
        return newest
    number, at_ms = choice.get("number"), choice.get("at_ms")
    fitting = partial(
        fits, number=number, version=choice.get("version"), unique_id=choice.get("unique_id"), at_ms=at_ms
    )
    log = await load_scope(store, scope)
    commits = log.commits[::-1]
    found = next(filter(fitting, commits), None)
    _check_choice(log, found, number)
    if found is not None:
        return found
    labels = {"number": "number", "version": "version", "unique_id": "unique id", "at_ms": "time"}
    shown = given if at_ms is None else given | {"at_ms": iso_time(at_ms)}
    text = ", ".join(f"{label} {shown[key]}" for key, label in labels.items() if key in shown)
    hint = ""
    if commits and at_ms is not None and commits[-1].committed_at_ms > at_ms:
        hint = f"the oldest is commit {commits[-1].record.number}, of {iso_time(commits[-1].committed_at_ms)}"
    for record in await list_names(store, scope) if commits and at_ms is None else ():
        if fitting(commit_of_name(record)):
            hint = f"only the name {record.name!r} still holds it: ask for that name"
    raise NotFoundError(f"nothing fits {text}", operation="find", subject=str(scope), hint=hint)


def _check_choice(log: ScopeLog, found: Commit | None, number: int | None) -> None:
    """Refuse a choice where a record that cannot be read may be the one that fits."""
    if found is not None and number is not None:
        return
    for one in log.unreadable:
        place = parse_log_key(one.key)
        is_newer = found is None or place.number > found.record.number
        if place.kind == "commit" and (is_newer if number is None else place.number == number):
            raise one.error


@contextlib.asynccontextmanager
async def find_pinned(
    store: BlobStore,
    runtime: Runtime,
    scope: Scope,
    *,
    purpose: str,
    on_found: Callable[[Commit], None] = lambda _: None,
    **choice: Unpack[Choice],
) -> AsyncIterator[tuple[Commit, PinLease]]:
    """Find a commit and pin it; choose again if it is collected before its pin is there (design 0002, D5).

    `on_found` is called with each choice before it is pinned; only the last one counts.

    Raises:
        NotFoundError: None fits.
        CollectedError: Every choice was collected before its pin was there.
    """
    async with contextlib.AsyncExitStack() as stack:
        for attempt in range(CHOICES_MAX):
            commit = await find_commit(store, scope, **choice)
            on_found(commit)
            pin = hold_pin(store, runtime, commit, purpose=purpose)
            try:
                lease = await stack.enter_async_context(pin)
            except CollectedError:
                if attempt == CHOICES_MAX - 1:
                    raise
                continue
            yield commit, lease
            return


async def read_commits(store: BlobStore, scope: Scope) -> tuple[Commit, ...]:
    """Read every commit of a scope, newest first."""
    return (await load_scope(store, scope)).commits[::-1]


async def choose_complete(store: BlobStore, scope: Scope, choice: Choice) -> Choice:
    """Choose the same commit, or where something of it is missing the newest one that is whole (design 0006, M2).

    Costs what `find_complete` says, and where the commit is not whole the reading of all others of the scope.

    Raises:
        IncompleteError: No commit is whole.
    """
    chosen = await find_commit(store, scope, **choice)
    if await find_complete(store, [chosen]) is not None:
        return choice
    complete = await find_complete(store, await read_commits(store, scope))
    if complete is None:
        message = f"something of commit {chosen.pointer.number} is missing, and of every other one"
        raise IncompleteError(message, operation="restore", subject=str(scope))
    return Choice(number=complete.pointer.number)


async def commits_with_named(store: BlobStore, log: ScopeLog, noted: Noted | None = None) -> tuple[Commit, ...]:
    """Return the commits of a log, newest first, and then those that only names still hold."""
    commits, scope = log.commits[::-1], log.listing.scope
    there = {commit.pointer for commit in commits}
    return commits + tuple(commit_of_name(n) for n in await list_names(store, scope, noted) if n.source not in there)


def require_store(commit: Commit, task: str, store: str) -> StoreReference:
    """Return the reference of one store of a commit; raise `NotFoundError` if it has no such store."""
    reference = commit.store(task, store)
    if reference is None:
        have = ", ".join(sorted({f"{s.task}/{s.store}" for s in commit.record.stores})[:8]) or "none"
        message = f"commit {commit.pointer.number} has no store {task}/{store}"
        raise NotFoundError(message, operation="find", subject=str(commit.scope), hint=f"it has {have}")
    return reference


class MissingBlobs:
    """Blobs and indexes that were found missing or altered, by their keys; what was noted longest ago goes first.

    With `cache_dir` they are kept there for the next process on this machine. A note that is lost or wrong costs an
    upload and nothing else, so a file that cannot be read or written is passed over.
    """

    def __init__(self, cache_dir: Path | None = None) -> None:
        self._file = cache_dir / DAMAGED_FILE if cache_dir is not None else None

    @functools.cached_property
    def _keys(self) -> dict[str, None]:
        # Read when it is asked for: most verbs need no note.
        if self._file is not None:
            with contextlib.suppress(OSError, *UNDECODABLE):
                keys = msgspec.json.decode(read_own_file(self._file), type=tuple[str, ...])
                return dict.fromkeys(keys[:MISSING_BLOBS_MAX])
        return {}

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._keys)

    def note(self, keys: Iterable[str]) -> None:
        """Remember those of the keys that are of uploads."""
        new = [key for key in keys if key.startswith((BLOBS, INDEXES)) and key not in self._keys]
        self._keys.update(dict.fromkeys(new))
        while len(self._keys) > MISSING_BLOBS_MAX:
            del self._keys[next(iter(self._keys))]
        if new and self._file is not None:
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_whole(self._file, msgspec.json.encode(tuple(self._keys)))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Remember what a block fails on, if it fails because something is missing or altered."""
        try:
            yield
        except DamagedError as error:
            self.note([key_of(error)])
            raise


def key_of(error: DamagedError) -> str:
    """Return the key of what is missing or altered; an error about a file may name that in its place."""
    cause = error.__cause__
    return cause.key if isinstance(cause, BlobNotFoundError) and cause.key else error.subject


async def find_missing(store: BlobStore, needed: Mapping[BlobKey, int]) -> frozenset[str]:
    """Find blobs that are not there, or are shorter than they have to be: one `stat` for each, at most 16 at once."""
    checked = store.tagged(RequestMetadata(payload_path="check"))

    async def is_missing(item: tuple[BlobKey, int]) -> bool:
        key, size_bytes = item
        info = await checked.stat(key)
        return info is None or info.size_bytes < size_bytes

    gone = await map_bounded(is_missing, needed.items())
    return frozenset(key for key, is_gone in zip(needed, gone, strict=True) if is_gone)


async def find_complete(store: BlobStore, commits: Iterable[Commit], damaged: Iterable[str] = ()) -> Commit | None:
    """Find the first of some commits of which everything is there, by name and size; contents are not read.

    None that needs one of the `damaged` keys is taken.

    Requests: a GET for each index of each commit looked at (more for deltas), and a `stat` for each blob that none of
    those before it had; of a commit that is not whole, as few as decide it. At most `COMMITS_MAX` are looked at.
    """
    there: set[str] = set()
    gone = set(damaged)
    for commit, _ in zip(commits, range(COMMITS_MAX), strict=False):
        if await _is_complete(store, commit, there, gone):
            return commit
    return None


async def _is_complete(store: BlobStore, commit: Commit, there: set[str], gone: set[str]) -> bool:
    """Return whether everything of a commit is there; add what is found out to the sets."""
    for reference in commit.record.stores:
        if reference.index.key in gone:
            return False
        try:
            needed = blobs_needed(await read_index(store, reference.index))
        except (DamagedError, FormatError):
            gone.add(reference.index.key)
            return False
        if gone.isdisjoint(needed):
            unknown = {key: size_bytes for key, size_bytes in needed.items() if key not in there}
            missing = await find_missing(store, unknown)
            gone |= missing
            there |= unknown.keys() - missing
        if not gone.isdisjoint(needed):
            return False
    return True


def name_commit(commit: Commit) -> str:
    """Name the commit that is the one to restore."""
    return f"commit {commit.pointer.number} (version {commit.record.version})"


@contextlib.asynccontextmanager
async def naming_complete(
    store: BlobStore,
    read_commits: ReadCommits,
    name: Callable[[Commit], str] = name_commit,
    damaged: Iterable[str] = (),
) -> AsyncIterator[None]:
    """Let an error of a block that something is missing say which commit is whole; as `name_complete`."""
    try:
        yield
    except DamagedError as error:
        named = await name_complete(error, store, read_commits, name, damaged)
        if named is error:
            raise
        raise named from error.__cause__


async def name_complete(
    error: DamagedError,
    store: BlobStore,
    read_commits: ReadCommits,
    name: Callable[[Commit], str] = name_commit,
    damaged: Iterable[str] = (),
) -> DamagedError:
    """Make an error that a blob or an index is missing or altered an `IncompleteError` that says which commit is whole.

    Any other error is returned as it is. `read_commits` reads the commits that there are, newest first, and `name` is
    what one is called. One that needs any of the `damaged` keys is not whole either.
    """
    key = key_of(error)
    if isinstance(error, IncompleteError) or not key.startswith((BLOBS, INDEXES)):
        return error
    complete, notes = None, list(getattr(error, "__notes__", ()))
    hint = "no commit of the job is whole: `tidemark repair` says what can be done"
    try:
        complete = await find_complete(store, await read_commits(), [*damaged, key])
    except TidemarkError as other:
        hint = error.hint
        notes.append(f"which commit is whole could not be found out: {other}")
    if complete is not None:
        whole = f"{name(complete)} is the newest of which everything is there; `--or-newest-complete` takes it"
        hint = f"{whole}, and `tidemark repair`, on any machine, says what else can be done"
    named = IncompleteError(bare_message(error), operation=error.operation, subject=error.subject, hint=hint)
    named.complete = complete
    named.__cause__ = error.__cause__
    for note in notes:
        named.add_note(note)
    return named.with_traceback(error.__traceback__)

"""What a commit needs and the store does not have, and which commit has everything (design 0006, M1 and M2).

What was found missing is remembered for the next backup, or looked for.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from blobstore.base import BlobStore, RequestMetadata
from blobstore.concurrency import map_bounded
from blobstore.errors import BlobNotFoundError, StoreError
from engine.errors import DamagedError, EngineError, IncompleteError, bare_message
from engine.records.indexes import is_missing, read_index
from index.errors import FormatError
from index.plan.commits import Commit
from index.snapshot.contents import blobs_needed
from index.snapshot.keys import BLOBS, INDEXES
from index.snapshot.model import BlobKey

# More gaps than this are found again, by the next backup or by one that is asked to look.
MISSING_BLOBS_MAX: Final = 10_000
STATS_IN_FLIGHT_MAX: Final = 16
COMMITS_MAX: Final = 1_000

ReadCommits = Callable[[], Awaitable[Sequence[Commit]]]


class MissingBlobs:
    """Blobs and indexes that were found missing or altered, by their keys; what was noted longest ago goes first."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._keys)

    def note(self, keys: Iterable[str]) -> None:
        """Remember those of the keys that are of uploads."""
        for key in keys:
            if key.startswith((BLOBS, INDEXES)):
                self._keys[key] = None
        while len(self._keys) > MISSING_BLOBS_MAX:
            del self._keys[next(iter(self._keys))]

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

    gone = await map_bounded(is_missing, needed.items(), in_flight_max=STATS_IN_FLIGHT_MAX)
    return frozenset(key for key, is_gone in zip(needed, gone, strict=True) if is_gone)


async def find_complete(store: BlobStore, commits: Iterable[Commit]) -> Commit | None:
    """Find the first of some commits of which everything is there, by name and size; contents are not read.

    Requests: a GET for each index of each commit looked at (more for deltas), and a `stat` for each blob that none of
    those before it had; of a commit that is not whole, as few as decide it. At most `COMMITS_MAX` are looked at.
    """
    there: set[str] = set()
    gone: set[str] = set()
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
        if not gone.isdisjoint(needed):
            return False
        unknown = {key: size_bytes for key, size_bytes in needed.items() if key not in there}
        missing = await find_missing(store, unknown)
        gone |= missing
        there |= unknown.keys() - missing
        if missing:
            return False
    return True


def name_commit(commit: Commit) -> str:
    """Name the commit that is the one to restore."""
    return f"commit {commit.pointer.number} (version {commit.record.version})"


@contextlib.asynccontextmanager
async def naming_complete(
    store: BlobStore, read_commits: ReadCommits, name: Callable[[Commit], str] = name_commit
) -> AsyncIterator[None]:
    """Let an error of a block that something is missing say which commit is whole; as `name_complete`."""
    try:
        yield
    except DamagedError as error:
        named = await name_complete(error, store, read_commits, name)
        if named is error:
            raise
        raise named from error.__cause__


async def name_complete(
    error: DamagedError, store: BlobStore, read_commits: ReadCommits, name: Callable[[Commit], str] = name_commit
) -> DamagedError:
    """Make an error that something is missing an `IncompleteError` that says which commit is whole.

    Any other error is returned as it is. `read_commits` reads the commits that there are, newest first, and `name` is
    what one is called.
    """
    if isinstance(error, IncompleteError) or not is_missing(error):
        return error
    complete, why = None, ""
    try:
        complete = await find_complete(store, await read_commits())
    except (StoreError, EngineError, FormatError) as other:
        why = f"which commit is whole could not be found out: {other}"
    hint = "run `tidemark verify`: no commit of the job is whole"
    if complete is not None:
        hint = f"{name(complete)} is the newest of which everything is there; `--or-newest-complete` takes it"
    elif why:
        hint = error.hint
    named = IncompleteError(bare_message(error), operation=error.operation, subject=error.subject, hint=hint)
    named.complete = complete
    named.__cause__ = error.__cause__
    for note in (*getattr(error, "__notes__", ()), *filter(None, [why])):
        named.add_note(note)
    return named.with_traceback(error.__traceback__)

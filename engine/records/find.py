"""Find the commit that a reader wants, and protect it while it reads."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Final, TypedDict, Unpack

from blobstore.base import BlobStore
from engine.errors import CollectedError, IncompleteError, NotFoundError, UsageError
from engine.records.leases import PinLease, hold_pin, list_names, read_name
from engine.records.log import Noted, ScopeLog, load_log, load_scope
from engine.records.missing import find_complete
from engine.records.repository import OpenRepository
from index.display import iso_time
from index.plan.commits import Commit, commit_of_name, fits
from index.snapshot.keys import parse_log_key
from index.snapshot.model import Scope, StoreReference

# Attempts of a reader whose commit is collected before its pin is there.
CHOICES_MAX: Final = 3


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
    """Find the newest commit that fits everything given; the newest of all if nothing is.

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
    commits: Sequence[Commit] = ()
    number, at_ms = choice.get("number"), choice.get("at_ms")
    version, unique_id = choice.get("version"), choice.get("unique_id")
    if not given:
        found = (await load_log(store, scope)).newest
    else:
        log = await load_scope(store, scope)
        commits = log.commits[::-1]
        found = next(
            (c for c in commits if fits(c, number=number, version=version, unique_id=unique_id, at_ms=at_ms)), None
        )
        _check_choice(log, found, number)
    if found is not None:
        return found
    labels = {"number": "number", "version": "version", "unique_id": "unique id", "at_ms": "time"}
    shown = given if at_ms is None else given | {"at_ms": iso_time(at_ms)}
    text = ", ".join(f"{label} {shown[key]}" for key, label in labels.items() if key in shown) or "any commit"
    hint = ""
    if commits and at_ms is not None and commits[-1].committed_at_ms > at_ms:
        hint = f"the oldest is commit {commits[-1].record.number}, of {iso_time(commits[-1].committed_at_ms)}"
    for record in await list_names(store, scope) if commits and at_ms is None else ():
        if fits(commit_of_name(record), number=number, version=version, unique_id=unique_id, at_ms=None):
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
    repository: OpenRepository, scope: Scope, *, purpose: str, **choice: Unpack[Choice]
) -> AsyncIterator[tuple[Commit, PinLease]]:
    """Find a commit and pin it; choose again if it is collected before its pin is there (design 0002, D5).

    Raises:
        NotFoundError: None fits.
        CollectedError: Every choice was collected before its pin was there.
    """
    async with contextlib.AsyncExitStack() as stack:
        for attempt in range(CHOICES_MAX):
            commit = await find_commit(repository.store, scope, **choice)
            try:
                lease = await stack.enter_async_context(
                    hold_pin(repository.store, repository.runtime, commit, purpose=purpose)
                )
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
        NotFoundError: None fits.
        IncompleteError: No commit is whole.
    """
    chosen = await find_commit(store, scope, **choice)
    if await find_complete(store, [chosen]) is not None:
        return choice
    complete = await find_complete(store, await read_commits(store, scope))
    if complete is None:
        raise IncompleteError(
            f"something of commit {chosen.pointer.number} is missing, and of every other one",
            operation="restore",
            subject=str(scope),
        )
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
        have = ", ".join(sorted({f"{s.task}/{s.store}" for s in commit.record.stores})[:8])
        raise NotFoundError(
            f"commit {commit.pointer.number} has no store {task}/{store}",
            operation="find",
            subject=str(commit.scope),
            hint=f"it has {have or 'none'}",
        )
    return reference

"""Forget a scope: close everything in its log, so that collections take what only that needed (design 0002, D8)."""

import contextlib
from typing import ClassVar, Final

import msgspec

from blobstore.base import BlobStore, Created, Lost
from blobstore.errors import AccessDeniedError, StoreUnavailableError
from engine.errors import NotFoundError
from engine.records.leases import list_names, release_name
from engine.records.log import check_commits, find_boundary, load_log, put_boundary
from index.display import DisplayMixin
from index.plan.commits import Commit, plan_forget
from index.snapshot.model import Boundary, Scope

OPERATION: Final = "forget"
# An answer is lost, or a collector takes the boundary away that has just been met: each time one attempt more.
FORGET_ATTEMPTS_MAX: Final = 5
_MAY_ARRIVE: Final = (
    "forget again before going on: the boundary may still arrive, and closes what is committed till then"
)


class ForgetReport(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What was forgotten, or with `dry_run` would be."""

    json_properties: ClassVar = {"closed": "closed"}
    json_omitted: ClassVar = ("dry_run", "boundary")

    scope: Scope
    dry_run: bool
    # The newest commit until then; None if there was nothing to forget any more.
    newest: Commit | None
    # Records of commits that are in the log until they are collected, closed ones and void ones counted.
    records_count: int
    # What closes them; None if the scope had been forgotten before.
    boundary: Boundary | None
    # Names that go on keeping what they refer to.
    names: tuple[str, ...] = ()
    # Names that were given up, or with `dry_run` would be.
    released: tuple[str, ...] = ()
    # Why names were not given up though they should have been: rights to write boundaries may not include names.
    denied: str = ""

    @property
    def closed(self) -> bool:
        """Whether this closes it; False: it had been forgotten before."""
        return self.boundary is not None


async def forget(store: BlobStore, scope: Scope, *, with_names: bool = False, dry_run: bool = False) -> ForgetReport:
    """Close every record of a scope; nothing is deleted by this (design 0006, F1).

    With `with_names` the names are released, too; where the store denies that, the scope is forgotten all the same.
    Doing it again is harmless: names that were left, or given meanwhile, are listed or released.

    Requests: one LIST per 1,000 records, one GET per boundary and for the newest record, one PUT; one LIST of the names
    and a GET for each; a LIST, a GET and a PUT for each name released.

    Raises:
        NotFoundError: The scope never had a commit.
        UnsafeStoreError: What is written to this store would not be safe there; nothing was written.
        StoreUnavailableError: The outcome is unknown: everything committed until the boundary arrives may be forgotten.
        FormatError: A record, a boundary or a name is damaged.
    """
    if not dry_run:
        check_commits(store, OPERATION)
    report = await _close(store, scope, dry_run=dry_run)
    # After the boundary, so that a name is found that was given while the scope was not forgotten.
    names = tuple(record.name for record in await list_names(store, scope))
    if not with_names:
        return msgspec.structs.replace(report, names=names)
    for place, name in enumerate(() if dry_run else names):
        try:
            # Somebody else may have released it meanwhile.
            with contextlib.suppress(NotFoundError):
                await release_name(store, scope, name)
        except AccessDeniedError as error:
            return msgspec.structs.replace(report, released=names[:place], names=names[place:], denied=str(error))
    return msgspec.structs.replace(report, released=names)


async def _close(store: BlobStore, scope: Scope, *, dry_run: bool) -> ForgetReport:
    """Write the boundary that closes everything, unless there is one already."""
    first: ForgetReport | None = None
    for _ in range(FORGET_ATTEMPTS_MAX):
        # What cannot be read is closed all the same: by its number.
        log = await load_log(store, scope, past_damage=True)
        if not log.listing.newest_number:
            raise NotFoundError("never had a commit", operation=OPERATION, subject=str(scope))
        boundary = plan_forget(log.listing, log.boundaries)
        if boundary is None and first is not None and first.boundary is not None:
            if first.boundary.number <= log.listing.newest_number:
                return first  # it was written: the answer was lost
            # Another's is below it: while its own number is free it may still arrive, and close what begins again.
            boundary = first.boundary
        first = first or ForgetReport(
            scope=scope, dry_run=dry_run, newest=log.newest, records_count=len(log.listing.records), boundary=None
        )
        first = msgspec.structs.replace(first, boundary=boundary)
        if boundary is None or dry_run:
            return first
        outcome = await put_boundary(store, boundary, operation=OPERATION, may_arrive=_MAY_ARRIVE)
        # Lost: to somebody else who forgets, or to an earlier copy of this one. Unknown: the log says it.
        if isinstance(outcome, Created) or (
            isinstance(outcome, Lost) and await find_boundary(store, scope, boundary.number) == boundary
        ):
            return first
    raise StoreUnavailableError(
        f"no answer in {FORGET_ATTEMPTS_MAX} attempts", operation=OPERATION, key=str(scope), hint=_MAY_ARRIVE
    )

"""Remove one damaged object, for an operator who knows what that means (design 0002, D12)."""

from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec

from blobstore.base import BlobStore, Created, check_key
from blobstore.errors import InvalidRequestError
from engine.errors import ConflictError, DamagedError, NotFoundError, UnsafeStoreError, UsageError
from engine.inspect.verify import verify
from engine.records.log import (
    Noted,
    ScopeLog,
    check_consistent_lists,
    find_boundary,
    list_log,
    load_scope,
    put_boundary,
    read_boundary,
    read_commit,
    read_record,
    read_scope,
)
from index.errors import FormatError, UnknownFormatError, UnsafeNameError
from index.plan.collect import is_upload_key
from index.plan.commits import FORGOTTEN_AHEAD, Commit, LogListing, check_dense, is_number_closed
from index.snapshot.codec import decode_name, decode_pin
from index.snapshot.keys import NAMES, boundary_key, is_pin_key, parse_log_key, parse_name_key
from index.snapshot.model import Boundary
from tidemark.errors import TidemarkError

OPERATION: Final = "discard"
_NOT_LISTED: Final = "a record that is not listed could be closed"
_MAY_ARRIVE: Final = "discard again: the boundary may still arrive, and closes what it does not keep"


class Discarded(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed, or with `dry_run` would be."""

    # The number of the boundary written in its place is null of a name or a pin.
    json_omitted: ClassVar = ("boundary",)
    json_properties: ClassVar = {"boundary_number": "boundary.number"}

    key: str
    dry_run: bool
    # What that means, in a sentence.
    meaning: str
    # Written first, so that numbers stay dense; None of a name or a pin.
    boundary: Boundary | None = None


async def discard(store: BlobStore, key: str, *, dry_run: bool = False) -> Discarded:
    """Remove a commit record, a boundary, a name or a pin that cannot be read, by its key; or say what that means.

    Of a record that somebody has deleted, so that its log has a hole, the number is closed.

    Raises:
        NotFoundError: There is no such object.
        UsageError: It can be read, a newer tidemark can read it, of another kind, or another one has to go first.
        UnsafeStoreError: The boundary that takes its place could not be written, or may close what is not listed;
            nothing was removed.
        ConflictError: It was removed, and a commit that was made meanwhile is lost, too.
    """
    if is_upload_key(key):
        hint = (
            "put an older version of the object back, `tidemark rewind` to a whole commit, or back up again with "
            "`--check-retained`"
        )
        raise UsageError("is a blob or an index: commits need it", operation=OPERATION, subject=key, hint=hint)
    try:
        check_key(key, "stat")
    except InvalidRequestError as error:
        raise UsageError("not a key that a blob store can hold", operation=OPERATION, subject=repr(key)) from error
    if await store.stat(key) is None:
        return await _close_hole(store, key, dry_run=dry_run)
    noted = Noted()
    planned = Discarded(key=key, dry_run=dry_run, meaning="the reader that it was of is protected no longer")
    newest = 0
    try:
        if is_pin_key(key):
            await noted.read(key, read_record(store, key, decode_pin))
        elif key.startswith(NAMES):
            scope, name, _ = parse_name_key(key)
            await noted.read(key, read_record(store, key, decode_name))
            meaning = f"the name {name!r} of {scope} is released; a collection takes what only it keeps"
            planned = msgspec.structs.replace(planned, meaning=meaning)
        else:
            planned, newest = await _plan_log(store, planned, noted)
    except UnsafeNameError as error:
        raise UsageError("not a record, boundary, name or pin", operation=OPERATION, subject=key) from error
    _check_damaged(key, noted)
    if dry_run:
        return planned
    await _remove(store, key, planned.boundary, newest)
    return planned


async def _remove(store: BlobStore, key: str, boundary: Boundary | None, newest: int) -> None:
    """Write the boundary that takes the place of an object, and delete it.

    Raises:
        ConflictError: A record came after the newest one that was there, and the boundary closes it, too.
    """
    lost = ""
    if boundary is not None:
        await _write(store, boundary)
        listing = await list_log(store, boundary.scope, from_number=newest + 1)
        if closed := ", ".join(str(number) for number, _ in listing.records if number <= boundary.number):
            lost = f"what came to {boundary.scope} meanwhile is closed with it: {closed}"
    try:
        for failure in await store.delete([key]):
            raise DamagedError(f"could not be deleted: {failure}", operation=OPERATION, subject=key)
    except TidemarkError as error:
        if lost:
            error.add_note(lost)
        raise
    if lost:
        hint = "back up again: the job goes on from the newest commit that `tidemark list` shows"
        raise ConflictError(f"was removed; {lost}", operation=OPERATION, subject=key, hint=hint)


def _check_damaged(key: str, noted: Noted) -> None:
    reason = hint = ""
    if not noted.unreadable:
        reason = "can be read"
        hint = "only what is damaged is discarded; see `tidemark forget`, `unname` and `collect`"
    elif isinstance(noted.unreadable[0].error, UnknownFormatError):
        reason, hint = "was written by a newer tidemark", "use that one to read it"
    if reason:
        raise UsageError(reason, operation=OPERATION, subject=key, hint=hint)


async def _plan_log(store: BlobStore, planned: Discarded, noted: Noted) -> tuple[Discarded, int]:
    """Plan for a commit record or a boundary: what the boundary keeps that is written in its place.

    And return the number of the newest record, as it was then.
    """
    place = parse_log_key(planned.key)
    scope, number = place.scope, place.number
    check_consistent_lists(store, OPERATION, _NOT_LISTED)
    reading = read_commit if place.kind == "commit" else read_boundary
    await noted.read(planned.key, reading(store, scope, number))
    log = await load_scope(store, scope)
    newest = _newest_record(log.listing)
    others = [one.key for one in log.unreadable if one.key != planned.key]
    if place.kind == "commit":
        if is_number_closed(number, log.boundaries):
            meaning = f"record {number} of {scope} is closed: it held nothing"
            return msgspec.structs.replace(planned, meaning=meaning), newest
        _check_first(planned.key, [key for key in others if _is_record_up_to(key, number)])
        boundary = _keeping(log, number, log.commits)
        meaning = f"commit {number} of {scope} is lost; a collection takes what only it needs"
        return msgspec.structs.replace(planned, meaning=meaning, boundary=boundary), newest
    _check_first(planned.key, [key for key in others if _is_record_up_to(key, log.listing.newest_number)])
    whole = [commit for commit in log.commits if not (await verify(store, [commit])).damaged]
    boundary = _keeping(log, max(number + 1, log.listing.newest_number), whole)
    kept = ", ".join(str(commit.record.number) for commit in whole) or "none"
    meaning = f"what it closed of {scope} is not known: of its commits, those that are whole count: {kept}"
    return msgspec.structs.replace(planned, meaning=meaning, boundary=boundary), newest


async def _close_hole(store: BlobStore, key: str, *, dry_run: bool) -> Discarded:
    """Close the number of a record that is gone; `NotFoundError` if the log does not need it."""
    missing = NotFoundError("is not there", operation=OPERATION, subject=key)
    try:
        place = parse_log_key(key)
    except UnsafeNameError:
        raise missing from None
    check_consistent_lists(store, OPERATION, _NOT_LISTED)
    listing = await list_log(store, place.scope)
    log = await read_scope(store, listing, past_holes=True)
    newest = _newest_record(listing)
    # Of those above all others only the newest boundary says that they were there.
    closing = log.boundaries[-1:] if log.boundaries and log.boundaries[-1].number == listing.boundaries[-1] else ()
    gone = sorted(p.number for b in closing for p in b.kept if p.number > newest)
    is_known = place.kind == "commit" and (place.number in gone or place.number <= newest)
    if not is_known or is_number_closed(place.number, log.boundaries):
        raise missing
    _check_first(key, [one.key for one in log.unreadable if _is_record_up_to(one.key, place.number)])
    # With this record the log is whole up to it: another hole below is an error, and closed first.
    below = tuple((number, ms) for number, ms in listing.records if number < place.number)
    again = tuple((number, 0) for number in gone) if place.number in gone else ((place.number, 0),)
    check_dense(
        msgspec.structs.replace(listing, records=(*below, *again)),
        [boundary for boundary in log.boundaries if boundary.number <= again[-1][0]],
    )
    boundary = _keeping(log, place.number, log.commits)
    meaning = f"record {place.number} of {place.scope} is gone: its number is closed, and all that is there stays"
    if place.number in gone:
        lost = ", ".join(map(str, gone))
        meaning = f"the newest of {place.scope} is lost, and given up: {lost}; the job goes on from what is there"
        boundary = msgspec.structs.replace(boundary, number=listing.newest_number + FORGOTTEN_AHEAD)
    if log.void or (boundary.number > newest and place.number not in gone):
        # What is late needs its successors to vouch for it (C5), and a record above the newest may land meanwhile.
        message = "its number cannot be closed without closing others"
        hint = "put the record back from a copy or an older version of it"
        raise UsageError(message, operation=OPERATION, subject=key, hint=hint)
    if not dry_run:
        await _remove(store, key, boundary, newest)
    return Discarded(key=key, dry_run=dry_run, meaning=meaning, boundary=boundary)


def _newest_record(listing: LogListing) -> int:
    return listing.records[-1][0] if listing.records else 0


def _keeping(log: ScopeLog, number: int, commits: Sequence[Commit]) -> Boundary:
    """Return a boundary that keeps these commits, as far as they are not above it; nobody has used its number.

    A writer that remembers the newest record builds on it. Where that is not kept the boundary is far above it, as
    that of forgetting: a collection takes what only that record needed, and nothing may build on it.
    """
    while number in log.listing.boundaries:
        number += 1
    kept = sorted(commit.pointer for commit in commits if commit.record.number <= number)
    newest = _newest_record(log.listing)
    if newest <= number and newest not in {pointer.number for pointer in kept}:
        number = log.listing.newest_number + FORGOTTEN_AHEAD
    return Boundary(scope=log.listing.scope, number=number, kept=tuple(kept))


def _is_record_up_to(key: str, number: int) -> bool:
    place = parse_log_key(key)
    return place.kind == "commit" and place.number <= number


def _check_first(key: str, others: list[str]) -> None:
    """Refuse while another damaged record is there that the new boundary would close, because it cannot name it."""
    if others:
        hint = "discard that one first, or put an older version of it back"
        raise UsageError(f"{others[0]} cannot be read either", operation=OPERATION, subject=key, hint=hint)


async def _write(store: BlobStore, boundary: Boundary) -> None:
    if isinstance(await put_boundary(store, boundary, operation=OPERATION, may_arrive=_MAY_ARRIVE), Created):
        return
    try:
        written = await find_boundary(store, boundary.scope, boundary.number)
    except FormatError:
        written = None
    if written != boundary:
        key = boundary_key(boundary.scope, boundary.number)
        raise UnsafeStoreError("the boundary may be missing", operation=OPERATION, subject=key, hint=_MAY_ARRIVE)

"""Check that each error has a cause: one that is visible to anyone who has seen every request.

An error without its cause is a violation, and so is one that took back what is there: who learned that a commit was
lost, stale or too late has no valid record (C3).
"""

from typing import Final

import msgspec

from blobstore.errors import BlobNotFoundError, InvalidRequestError, StoreError
from engine.errors import (
    CommitLostError,
    CommitUnknownError,
    ConflictError,
    DamagedError,
    EngineError,
    FencedError,
    LeaseExpiredError,
    NotFoundError,
    StaleResultError,
    UnsafeStoreError,
    UsageError,
)
from engine.records.leases import RENEWALS_PER_DURATION
from index.errors import FormatError
from index.snapshot.keys import parse_log_key
from index.snapshot.model import PIN_DURATION_MS, CommitPointer, CommitRecord, IndexReference, Scope
from tests.simulation.checks.history import StoreName, Written
from tests.simulation.checks.judge import CallLog, index_keys
from tests.simulation.model.participants import Member, Results
from tests.simulation.model.world import WatchedServer
from tests.simulation.scenarios.builder import USUAL
from tests.simulation.scenarios.schedule import Times, Verb

# What an action takes at most where nothing goes wrong, and how much longer for each request that does: a deadline
# and a wait.
_QUIET_S: Final = 180.0
_FAULT_S: Final = 100.0
# A pin is renewed so long before its end, at least.
_PIN_LEFT_MS: Final = PIN_DURATION_MS * (RENEWALS_PER_DURATION - 1) // RENEWALS_PER_DURATION
# What reads a commit, and writes nothing but a pin.
_READING: Final = frozenset({"restore", "follow", "promote"})
_REFUSED: Final = (CommitLostError, StaleResultError, LeaseExpiredError)


class Asked(msgspec.Struct, kw_only=True):
    """An action under way, and what had happened when it began."""

    verb: Verb | None
    scope: Scope
    began_s: float
    process: str = ""
    # Requests of its process that had gone wrong, and boundaries that its scope had seen.
    troubles: int = 0
    boundaries: int = 0
    stood_s: float = 0.0
    # Of a fork: which scope it begins.
    written_scope: Scope | None = None
    # Of a commit: what it asks for. Of what copies a commit: which.
    offsets: str | None = None
    results: Results = {}
    dropped: frozenset[StoreName] = frozenset()
    # Of a change of the layout: the only commit that it may follow.
    parent: CommitPointer | None = None
    source: CommitPointer | None = None
    # By which name it was found, whether that was there, and how often it had been released.
    name: str | None = None
    is_named: bool = False
    releases: int = 0


class Causes:
    """Looks for the cause of each error.

    Args:
        server: Has seen every request.
        call_log: Whether somebody has taken something away.
        times: Of the repository.
    """

    def __init__(self, server: WatchedServer, call_log: CallLog, *, times: Times = USUAL) -> None:
        self._server = server
        self._call_log = call_log
        self._times = times
        self._lease_ms = times.ttl_ms - times.margin_ms
        # Requests for commits that were refused for good.
        self._refused: list[tuple[Asked, str]] = []

    def begin(self, member: Member, verb: Verb | None, scope: Scope, now_s: float) -> Asked:
        """An action begins."""
        process = member.process.name if member.process is not None else ""
        server = self._server
        server.begin_action(process)
        return Asked(
            verb=verb,
            scope=scope,
            began_s=now_s,
            process=process,
            troubles=server.troubles[process],
            boundaries=server.boundaries[scope],
            stood_s=member.stood_s,
        )

    def aim(self, asked: Asked, scope: Scope, source: CommitPointer | None = None) -> None:
        """It turns out which scope and commit the action is about."""
        if scope != asked.scope:
            asked.scope, asked.boundaries = scope, self._server.boundaries[scope]
        asked.source = source

    def aim_by_name(self, asked: Asked, scope: Scope, name: str) -> None:
        """The action is about what a name stands for."""
        self.aim(asked, scope)
        asked.name, asked.is_named = name, (scope, name) in self._call_log.names
        asked.releases = self._releases(asked)

    def is_released(self, asked: Asked) -> bool:
        """Whether somebody has asked to release the name that an action goes by."""
        return asked.name is not None and self._releases(asked) > asked.releases

    def _releases(self, asked: Asked) -> int:
        releases = self._call_log.releases.get((asked.scope, asked.name or ""))
        return releases.begun if releases is not None else 0

    def takes_too_long(self, asked: Asked, member: Member, now_s: float) -> bool:
        """Whether an action took longer than what went wrong in it explains; pauses do not count."""
        stood_s = member.stood_s - asked.stood_s
        troubles = self._server.troubles[asked.process] - asked.troubles + int(stood_s > 0)
        return now_s - asked.began_s - stood_s > _QUIET_S + _FAULT_S * troubles

    def explains(self, asked: Asked, member: Member, error: Exception) -> bool:  # noqa: C901, PLR0911, PLR0912 - each a case
        """Whether there is a cause for this error."""
        if isinstance(error, _REFUSED) and asked.offsets is not None:
            self._refused.append((asked, type(error).__name__))
        stood_s = member.stood_s - asked.stood_s
        is_troubled = self._server.troubles[asked.process] > asked.troubles or stood_s > 0
        # A full store is read from as any other.
        is_troubled |= asked.verb not in _READING and self._server.refused_full[asked.process] > 0
        match error:
            case DamagedError() | FormatError():
                return member.is_stale or self._is_damaged(asked, error, stood_s)
            case FencedError():
                return any(self._is_closed(w) for w in self._own_records(asked))
            case StaleResultError():
                return any(self._is_stale_result(asked, name) for name in asked.results)
            case CommitLostError():
                return self._is_taken(asked)
            case LeaseExpiredError():
                return self._is_late(asked, stood_s)
            case NotFoundError():
                # In an old list nothing may be but what is closed.
                return self._is_gone(asked) or (member.is_stale and asked.verb in _READING)
            case UsageError():
                return self._is_taken_name(asked) or self._is_of_other_kind(asked.scope)
            case UnsafeStoreError():
                return member.is_stale or (is_troubled and asked.verb in {"collect", "forget"})
            case ConflictError() | BlobNotFoundError() | InvalidRequestError():
                return False
            case CommitUnknownError():
                # It may be a record that rotted.
                return is_troubled or self._is_unknowable(asked) or self._call_log.tampered
            case StoreError():
                return is_troubled
            case _:
                return False

    def check_refused(self) -> list[str]:
        """What was refused for good has no record that was ever valid (C3).

        Who brings no results and learned that nothing is left of a closed record may ask for a new one.
        """
        return [
            f"3: {asked.offsets} of {asked.scope} got {what}, and its record {written.record.number} was valid"
            for asked, what in self._refused
            for written in self._server.record_history.records.get(asked.scope, {}).values()
            if written.was_valid and not written.revived and _is_for(written.record, asked)
            if asked.results or not written.closed
        ]

    # ------------------------------------------------------------------ inside

    def _own_records(self, asked: Asked) -> list[Written]:
        """The records that this request has left."""
        records = self._server.record_history.records.get(asked.written_scope or asked.scope, {}).values()
        own = [written for written in records if written.writer == asked.process]
        if asked.offsets is not None:
            return [w for w in own if _is_for(w.record, asked)]
        return [w for w in own if w.record.kind == asked.verb and w.record.source == asked.source]

    def _is_closed(self, written: Written) -> bool:
        pointer = written.record.pointer
        boundaries = self._server.record_history.boundaries.get(written.record.scope, {})
        return any(n >= pointer.number and pointer not in b.kept for n, b in boundaries.items())

    def _is_unknowable(self, asked: Asked) -> bool:
        """A boundary may have closed the record, or another of its number; what is open would be found."""
        is_closed = bool(self._server.record_history.boundaries.get(asked.scope))
        return is_closed and not any(written.is_open for written in self._own_records(asked))

    def _is_damaged(self, asked: Asked, error: EngineError | FormatError, stood_s: float) -> bool:
        # A reader whose pin has lapsed while it was paused may have been overtaken (D5).
        has_lapsed = asked.verb in _READING and stood_s * 1000 >= _PIN_LEFT_MS
        twice = (asked.process, error.subject) in self._server.damaged_twice
        return twice or has_lapsed or self._call_log.tampered

    def _is_stale_result(self, asked: Asked, name: StoreName) -> bool:
        """C2: the scope has had something else for this store than what the result was made against, and later."""
        base = asked.results[name].base
        held: list[tuple[int, IndexReference | None]] = [
            (w.record.number, next((s.index for s in w.record.stores if (s.task, s.store) == name), None))
            for w in self._server.record_history.records.get(asked.scope, {}).values()
            if w.was_valid
        ]
        if asked.scope in self._server.record_history.forgotten_until:
            return True
        if base is None:
            return any(index is not None for _, index in held)
        begun = min((number for number, index in held if index == base), default=0)
        return any(number > begun and index != base for number, index in held)

    def _is_taken(self, asked: Asked) -> bool:
        """C4: the number was taken when this process asked for it, by a record that was not its own.

        Or its parent is not the newest any more, for what takes no other.
        """
        scope, server = asked.written_scope or asked.scope, self._server
        known = server.record_history.records.get(scope, {}).values()
        if asked.parent is not None and (
            scope in server.record_history.forgotten_until
            or any(w.was_valid and w.record.number > asked.parent.number for w in known if not _is_for(w.record, asked))
        ):
            return True
        keys = (key for key in server.sent[asked.process] if parse_log_key(key).scope == scope)
        return any(server.writer_of.get(key, asked.process) != asked.process for key in keys)

    def _is_late(self, asked: Asked, stood_s: float) -> bool:
        """C5: by the server's clock, as far ahead as it ever was: a collection may have gone by it (D11)."""
        now_ms = self._server.now_ms()
        if asked.offsets is not None:
            creations = [result.oldest_birth_ms for result in asked.results.values()]
            set_back_ms = self._server.ahead_ms_max - self._server.ahead_ms
            return bool(creations) and min(creations) + self._lease_ms < now_ms + set_back_ms
        took_ms = now_ms - asked.began_s * 1000
        is_released = asked.verb == "name" and self._call_log.releases != {}
        return took_ms > PIN_DURATION_MS - self._times.margin_ms or stood_s > 0 or is_released

    def _is_gone(self, asked: Asked) -> bool:
        record_history = self._server.record_history
        if asked.name is not None:
            return not asked.is_named or self.is_released(asked)
        if self._server.boundaries[asked.scope] > asked.boundaries:
            return True
        if asked.verb == "forget":
            return not record_history.records.get(asked.scope)
        if asked.dropped:
            held = [w.record.stores for w in record_history.records.get(asked.scope, {}).values() if w.was_valid]
            return any(not asked.dropped <= {(s.task, s.store) for s in stores} for stores in held)
        if asked.verb == "rescale" and not record_history.open_records(asked.scope):
            return True
        return asked.verb in _READING and self._had_no_store(asked)

    def _had_no_store(self, asked: Asked) -> bool:
        """Whether the newest commit at some time since then had not the store that is restored; or there was none."""
        records = self._server.record_history.records.get(asked.scope, {})
        valid = [records[pointer] for pointer in sorted(records, key=_number) if records[pointer].was_valid]
        # A second more: some servers report whole ones.
        began_ms = (asked.began_s - 1) * 1000
        before = [written for written in valid if written.created_at_ms < began_ms]
        since = valid[len(before) :]
        # Anyone who forgets a scope closes the newest too.
        if not before or not self._server.record_history.open_records(asked.scope):
            return True
        return any(all(store.store != "s0" for store in w.record.stores) for w in (*before[-1:], *since))

    def _is_taken_name(self, asked: Asked) -> bool:
        """K2: another naming is or was there beside this one."""
        names = self._server.record_history.names.values()
        return asked.verb == "name" and any(n.scope == asked.scope and n.source != asked.source for n, _ in names)

    def _is_of_other_kind(self, scope: Scope) -> bool:
        """K3: the job commits as a whole, or task by task."""
        records = self._server.record_history.records
        return any(known.job == scope.job and (known.task is None) != (scope.task is None) for known in records)


def _is_for(record: CommitRecord, asked: Asked) -> bool:
    """Whether a record is what a commit asks for: offsets and indexes."""
    wanted = index_keys([result.reference for result in asked.results.values()])
    is_it = record.kind == "commit" and record.offsets == asked.offsets
    return is_it and wanted.items() <= index_keys(record.stores).items()


def _number(pointer: CommitPointer) -> int:
    return pointer.number

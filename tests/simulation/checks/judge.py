"""Judge the eight invariants of design 0007 against plain dicts of what was asked for and what was acknowledged.

The walker of `tests.walker` says which keys have a reason to exist. Invariants 2, 6 and "nothing referenced is deleted"
are judged with every single change (`history.py`); the others here, once everything has come to rest.
"""

from collections.abc import Sequence
from pathlib import Path

from index.snapshot.model import CommitPointer, CommitRecord, Scope, StoreReference
from tests.simulation.checks.answers import Acknowledged, CallLog, Releases, index_keys, read_tree
from tests.simulation.checks.final_state import AtRest
from tests.simulation.checks.history import JUDGE, RecordHistory
from tests.simulation.model.s3 import SimServer

__all__ = ["JUDGE", "Acknowledged", "CallLog", "Judge", "Releases", "index_keys", "read_tree"]


class Judge:
    """Judges one repository.

    Args:
        server: Where it is.
        record_history: Has seen every change to it.
        call_log: What callers were shown.
        scratch: For restores of its own.
    """

    def __init__(self, server: SimServer, record_history: RecordHistory, call_log: CallLog, scratch: Path) -> None:
        self._server = server
        self._record_history = record_history
        self._call_log = call_log
        self._scratch = scratch
        self.violations: list[str] = []

    def check_now(self) -> None:
        """What holds at any time, while others are at work."""
        self.violations += [*self._record_history.violations, *self._call_log.errors]
        self._record_history.uploads.look(self._record_history.tampered)
        self._check_state()

    def _check_state(self) -> None:
        for scope in sorted(self._record_history.records, key=str):
            self._check_chain(scope)
            self._check_contents(scope)
        self._check_names()
        self._check_targets()
        self._check_followed()

    async def check_at_rest(self) -> bool:
        """What holds once everybody is gone and has been for a while: see `tests.simulation.checks.final_state`.

        Returns:
            Whether somebody is to commit to it after that.
        """
        rest = AtRest(self._server, self._record_history, self._call_log, self._scratch)
        await rest.check()
        self.violations += rest.violations
        self._check_state()
        return rest.is_written_to

    # ------------------------------------------------------------------ inside

    def _check_chain(self, scope: Scope) -> None:
        """1, 3, 6: what was acknowledged is in the chain; what is there was asked for, whole."""
        known = self._record_history.records[scope]
        valid = self._record_history.open_records(scope)
        acknowledged = self._call_log.commits.get(scope, [])
        chain: set[CommitPointer] = set()
        step = valid[-1].record.pointer if valid else None
        while step is not None and step in known:
            chain.add(step)
            step = known[step].record.predecessor
        forgotten_until = self._record_history.forgotten_until.get(scope, 0)
        for commit in acknowledged:
            pointer = commit.record.pointer
            if pointer not in known:
                self.violations.append(f"1 lost: {pointer} of {scope} was acknowledged and never created")
            elif pointer not in chain and pointer.number > forgotten_until:
                self.violations.append(f"6 chain: {pointer} of {scope} was acknowledged and is not in the chain")
            elif not known[pointer].was_valid:
                self.violations.append(f"6 valid: {pointer} of {scope} was acknowledged and never valid")
        for written in known.values():
            if written.was_valid:
                self._check_asked_for(scope, written.record)

    def _check_asked_for(self, scope: Scope, record: CommitRecord) -> None:
        known = self._record_history.records
        has = index_keys(record.stores)
        if record.kind == "commit":
            asked = self._call_log.requests.get(record.offsets)
            if asked is None:
                self.violations.append(f"3 asked: record {record.number} of {scope} was never asked for")
                return
            if record.predecessor != self._call_log.parents.get(record.offsets, record.predecessor):
                self.violations.append(f"K3: record {record.number} of {scope} changes the layout of another commit")
            before = known[scope].get(record.predecessor) if record.predecessor else None
            held = index_keys(before.record.stores) if before else {}
            for dropped in self._call_log.drops.get(record.offsets, ()):
                held.pop(dropped, None)
            wanted = [held | brought for brought in asked]
        else:
            source_scope = record.source_scope or scope
            source = known.get(source_scope, {}).get(record.source) if record.source else None
            if source is None:
                self.violations.append(f"3 source: {record.kind} {record.number} of {scope} has no source")
                return
            wanted = [index_keys(source.record.stores)]
        if has not in wanted:
            self.violations.append(f"3 stores: record {record.number} of {scope} has {has} and should have {wanted}")

    def _check_contents(self, scope: Scope) -> None:
        """1, 2: every valid open commit has the bytes that were backed up."""
        for written in self._record_history.open_records(scope):
            self._check_stores(f"commit {written.record.number} of {scope}", written.record.stores)

    def _check_stores(self, what: str, stores: Sequence[StoreReference]) -> None:
        for store in stores:
            try:
                found = self._record_history.content(store.index)
            except KeyError as error:
                if error.args[0].removeprefix(self._record_history.root) not in self._record_history.tampered:
                    self.violations.append(f"2 missing: {what} needs {error}, which is missing")
                continue
            if found != self._call_log.trees.get(store.index.key):
                self.violations.append(f"1 bytes: {what} does not have the bytes of {store.index.key}")

    def _check_names(self) -> None:
        live = self._record_history.live_names()
        for record in live:
            self._check_stores(f"name {record.name}", record.stores)
        stand = {(n.scope, n.name, n.source) for n in live}
        for (scope, name), source in self._call_log.names.items():
            if (scope, name, source) not in stand:
                self.violations.append(
                    f"1 name: name {name} of {scope} was acknowledged for {source} and does not hold it"
                )

    def _check_followed(self) -> None:
        """5: a followed directory is a commit that was valid; once promoted the one that was named, for ever."""
        for directory, (scope, promoted) in self._call_log.followed.items():
            if not directory.exists():
                if promoted is not None:
                    self.violations.append(f"5 followed: {directory.name} was promoted and is gone")
                continue
            written = self._record_history.records.get(scope, {}).values()
            records = [w.record for w in written if w.was_valid and promoted in {None, w.record.pointer}]
            states = [store.index.key for record in records for store in record.stores if store.store == "s0"]
            found = read_tree(directory)
            if all(found != self._call_log.trees[key] for key in states):
                self.violations.append(f"5 followed: {directory.name} is not a commit of {scope}: {sorted(found)}")

    def _check_targets(self) -> None:
        """5: a target is absent or complete."""
        for target, allowed in self._call_log.restored.items():
            if not target.exists():
                continue
            found = read_tree(target)
            if all(found != self._call_log.trees[key] for key in allowed):
                self.violations.append(f"5 target: {target.name} is neither absent nor complete: {sorted(found)}")

"""The eight invariants of design 0007, judged against plain dicts of what was asked for and what was acknowledged.

The walker of `tests.walker` says which keys have a reason to exist. Invariants 2, 6 and "nothing referenced is deleted"
are judged with every single change (`tests.simulation.chronicle`); the others here, once everything has come to rest.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from blobstore.base import BlobInfo
from blobstore.s3_lifecycle import EXPIRING
from engine.errors import EngineError
from engine.repository import Repository
from index.model import CommitPointer, CommitRecord, Scope, StoreReference
from index.retention import Retention
from tests.simulation.chronicle import Chronicle, Collecting, StoreName, Tree
from tests.simulation.processes import PREFIX, plain_store
from tests.simulation.sim_s3 import SimServer
from tests.walker import keys_to_keep

JUDGE: Final = "judge"
# Later than every TTL, pin, lease and late request.
REST_S: Final = 20 * 86_400.0


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True):
    """A commit that its caller was told of."""

    record: CommitRecord
    # How many changes the repository had seen by then.
    after: int


class Releases(msgspec.Struct):
    """How often somebody has begun to release a name, and how often that came to its end."""

    begun: int = 0
    ended: int = 0


class Ledger:
    """What callers asked for, and what they were told.

    Attributes:
        trees: What was backed up, by the unique id that the backup was given.
        requests: What each request for a commit was to bring, by its offsets.
        commits: What was acknowledged.
        names: What was acknowledged to stand for what, unless somebody has asked to release it since.
        releases: How often each name was asked to be released.
        restored: Directories, each with the trees that it may hold.
        newly_restored: Commits that a process has brought back, and found to be what they should be.
        errors: What went wrong in an action that may not go wrong so.
        tampered: A test has taken something away behind everybody's back: then damage is what is expected.
    """

    def __init__(self) -> None:
        self.trees: dict[str, Tree] = {}
        self.requests: dict[str, dict[StoreName, str]] = {}
        self.commits: dict[Scope, list[Acknowledged]] = {}
        self.names: dict[tuple[Scope, str], CommitPointer] = {}
        self.releases: dict[tuple[Scope, str], Releases] = {}
        self.restored: dict[Path, list[str]] = {}
        self.errors: list[str] = []
        self.newly_restored: set[CommitPointer] = set()
        self.tampered = False

    def copy(self) -> "Ledger":
        """The same, to be written on."""
        copied = Ledger()
        copied.trees, copied.requests, copied.names = dict(self.trees), dict(self.requests), dict(self.names)
        copied.commits = {scope: list(commits) for scope, commits in self.commits.items()}
        return copied


class Judge:
    """Judges one repository.

    Args:
        server: Where it is.
        chronicle: Has seen every change to it.
        ledger: What callers were told.
        scratch: For restores of its own.
    """

    def __init__(self, server: SimServer, chronicle: Chronicle, ledger: Ledger, scratch: Path) -> None:
        self._server = server
        self._chronicle = chronicle
        self._ledger = ledger
        self._scratch = scratch
        self.violations: list[str] = []

    def check_now(self) -> None:
        """What holds at any time, while others are at work."""
        self.violations += [*self._chronicle.violations, *self._ledger.errors]
        for scope in sorted(self._chronicle.records, key=str):
            self._check_chain(scope)
            self._check_contents(scope)
        self._check_names()
        self._check_targets()

    async def check_at_rest(self) -> None:
        """What holds once everybody is gone, TTLs are over, and two collections have run."""
        store = plain_store(self._server)
        repository = await Repository.open(store)
        self._chronicle.collecting[JUDGE] = [Collecting(keep_last=1, keep_since_ms=None, began=self._chronicle.events)]
        for _ in range(2):
            try:
                await repository.collect(Retention(keep_last=1), delete_share_max=1)
            except EngineError as error:
                if self._ledger.tampered:
                    return
                self.violations.append(f"4: the last collection fails: {error!r}")
                return
        self._check_keys()
        self._check_ttls()
        await self._check_restores(repository)

    # ------------------------------------------------------------------ inside

    def _check_chain(self, scope: Scope) -> None:
        """1, 3, 6: what was acknowledged is in the chain; what stands was asked for, whole."""
        known = self._chronicle.records[scope]
        valid = self._chronicle.open_records(scope)
        acknowledged = self._ledger.commits.get(scope, [])
        chain: set[CommitPointer] = set()
        step = valid[-1].record.pointer if valid else None
        while step is not None and step in known:
            chain.add(step)
            step = known[step].record.predecessor
        if scope not in self._chronicle.forgotten:
            for commit in acknowledged:
                pointer = commit.record.pointer
                if pointer not in known:
                    self.violations.append(f"1: {pointer} of {scope} was acknowledged and never created")
                elif pointer not in chain:
                    self.violations.append(f"6: {pointer} of {scope} was acknowledged and is not in the chain")
                elif not known[pointer].was_valid:
                    self.violations.append(f"6: {pointer} of {scope} was acknowledged and never valid")
        for written in known.values():
            if written.was_valid:
                self._check_asked_for(scope, written.record)

    def _check_asked_for(self, scope: Scope, record: CommitRecord) -> None:
        known = self._chronicle.records
        has = _stores(record.stores)
        if record.kind == "commit":
            brought = self._ledger.requests.get(record.offsets)
            if brought is None:
                self.violations.append(f"3: record {record.number} of {scope} was never asked for")
                return
            before = known[scope].get(record.predecessor) if record.predecessor else None
            wanted = (_stores(before.record.stores) if before else {}) | brought
        else:
            source_scope = record.source_scope or scope
            source = known.get(source_scope, {}).get(record.source) if record.source else None
            if source is None:
                self.violations.append(f"3: {record.kind} {record.number} of {scope} has no source")
                return
            wanted = _stores(source.record.stores)
        if has != wanted:
            self.violations.append(f"3: record {record.number} of {scope} has {has} and should have {wanted}")

    def _check_contents(self, scope: Scope) -> None:
        """1, 2: every valid open commit has the bytes that were backed up."""
        for written in self._chronicle.open_records(scope):
            self._check_stores(f"commit {written.record.number} of {scope}", written.record.stores)

    def _check_stores(self, what: str, stores: Sequence[StoreReference]) -> None:
        for store in stores:
            try:
                found = self._chronicle.content(store.index)
            except KeyError as error:
                if not self._ledger.tampered:
                    self.violations.append(f"2: {what} needs {error}, which is missing")
                continue
            if found != self._ledger.trees.get(store.unique_id) and not self._ledger.tampered:
                self.violations.append(f"1: {what} does not have the bytes of {store.unique_id}")

    def _check_names(self) -> None:
        live = self._chronicle.live_names()
        for record in live:
            self._check_stores(f"name {record.name}", record.stores)
        stand = {(n.scope, n.name, n.source) for n in live}
        for (scope, name), source in self._ledger.names.items():
            if (scope, name, source) not in stand and scope not in self._chronicle.forgotten:
                self.violations.append(f"1: name {name} of {scope} was acknowledged for {source} and does not hold it")

    def _check_targets(self) -> None:
        """5: a target is absent or complete."""
        for target, allowed in self._ledger.restored.items():
            if not target.exists():
                continue
            found = read_tree(target)
            if all(found != self._ledger.trees[unique_id] for unique_id in allowed):
                self.violations.append(f"5: {target.name} is neither absent nor complete: {sorted(found)}")

    def _check_keys(self) -> None:
        """4: exactly the walker's keys."""
        found: dict[str, BlobInfo] = {}
        data: dict[str, bytes] = {}
        plain = plain_store(self._server)
        for name, stored in self._server.objects.items():
            key = name.removeprefix(f"{PREFIX}/")
            found[key] = plain._info(name)
            if not key.startswith("blobs/"):
                data[key] = stored.data
        try:
            expected = keys_to_keep(found, data, self._server.now_ms())
        except KeyError as error:
            if not self._ledger.tampered:
                self.violations.append(f"2: {error} is missing")
            return
        # Evidence, which nothing refers to (design 0006, A1).
        there = {key for key in found if not key.startswith("audit/")}
        expected = {key for key in expected if not key.startswith("audit/")}
        if there != expected:
            self.violations.append(
                f"4: left over {sorted(there - expected)[:3]}, missing {sorted(expected - there)[:3]} "
                f"({len(there - expected)} and {len(expected - there)})"
            )

    def _check_ttls(self) -> None:
        """2: nothing that is kept carries a TTL any more (T2), or a store that deletes by itself would take it."""
        for key in sorted(self._chronicle.reachable()):
            stored = self._server.objects.get(f"{PREFIX}/{key}")
            if stored is not None and stored.tag == EXPIRING:
                self.violations.append(f"2: {key} is kept, and still carries a TTL")
                return

    async def _check_restores(self, repository: Repository) -> None:
        """1: the newest commit restores byte for byte, through everything that is real; of the scope that has most."""
        scope = max(self._chronicle.records, key=lambda s: (len(self._chronicle.records[s]), str(s)), default=None)
        valid = self._chronicle.open_records(scope) if scope is not None else []
        if scope is None or not valid:
            return
        record = valid[-1].record
        if record.pointer in self._ledger.newly_restored:
            return
        store = record.stores[0]
        target = self._scratch / "judged"
        try:
            restored = await repository.find_and_restore(scope, target, task=store.task, store=store.store)
        except EngineError as error:
            if not self._ledger.tampered:
                self.violations.append(f"1: the newest commit of {scope} does not restore: {error!r}")
            return
        if restored.commit.pointer != record.pointer:
            self.violations.append(f"1: restored {restored.commit.pointer} and not {record.pointer} of {scope}")
        if read_tree(target) != self._ledger.trees[store.unique_id]:
            self.violations.append(f"1: {scope} restores to other bytes")


def read_tree(root: Path) -> Tree:
    """What stands in a directory, by path."""
    found: Tree = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = f"{directory}/{name}"
            with open(path, "rb") as file:  # noqa: PTH123 - pathlib takes longer than the read
                found[path.removeprefix(f"{root}/")] = file.read()
    return found


def _stores(stores: Sequence[StoreReference]) -> dict[StoreName, str]:
    return {(s.task, s.store): s.unique_id for s in stores}

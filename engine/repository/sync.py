"""The repository for callers without an event loop: scripts, notebooks, Spark workers."""

import contextlib
from collections.abc import Iterator
from typing import Unpack

from engine.blocking import Blocking, Facade, Opening
from engine.records.find import Choice
from engine.records.leases import PinLease
from engine.repository.repository import Repository
from index.plan.commits import Commit
from index.snapshot.model import RepositoryRecord, Scope


class SyncRepository(Facade[Repository]):
    """The methods of `Repository`, blocking. Use it as a context manager, or call `close`."""

    open = Opening(Repository.open)
    init = Opening(Repository.init)

    @property
    def record(self) -> RepositoryRecord:
        """What everybody who uses the repository agrees on."""
        return self.asynchronous.record

    @contextlib.contextmanager
    def find_pinned(self, scope: Scope, *, purpose: str, **choice: Unpack[Choice]) -> Iterator[tuple[Commit, PinLease]]:
        """As `Repository.find_pinned`."""
        with self.inside(self.asynchronous.find_pinned(scope, purpose=purpose, **choice)) as found:
            yield found

    @contextlib.contextmanager
    def pinned(self, commit: Commit, purpose: str = "read") -> Iterator[PinLease]:
        """As `Repository.pinned`."""
        with self.inside(self.asynchronous.pinned(commit, purpose)) as lease:
            yield lease

    backup = Blocking(Repository.backup)
    plan_backup = Blocking(Repository.plan_backup)
    commit = Blocking(Repository.commit)
    settle = Blocking(Repository.settle)
    rewind = Blocking(Repository.rewind)
    fork = Blocking(Repository.fork)
    name = Blocking(Repository.name)
    release_name = Blocking(Repository.release_name)
    scopes = Blocking(Repository.scopes)
    latest = Blocking(Repository.latest)
    commits = Blocking(Repository.commits)
    log = Blocking(Repository.log)
    history = Blocking(Repository.history)
    names = Blocking(Repository.names)
    find = Blocking(Repository.find)
    choose_complete = Blocking(Repository.choose_complete)
    name_complete = Blocking(Repository.name_complete)
    find_and_restore = Blocking(Repository.find_and_restore)
    restore = Blocking(Repository.restore)
    restore_reference = Blocking(Repository.restore_reference)
    find_state = Blocking(Repository.find_state)
    restore_state = Blocking(Repository.restore_state)
    plan_restore = Blocking(Repository.plan_restore)
    read_index = Blocking(Repository.read_index)
    diff = Blocking(Repository.diff)
    forget = Blocking(Repository.forget)
    discard = Blocking(Repository.discard)
    collect = Blocking(Repository.collect)
    explain = Blocking(Repository.explain)
    verify_plan = Blocking(Repository.verify_plan)
    verify = Blocking(Repository.verify)

"""Record what callers asked for and how they were answered: plain dicts, which the judge compares with the bucket."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from index.snapshot.model import CommitPointer, CommitRecord, Scope, StoreReference
from tests.simulation.checks.history import StoreName, Tree


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True):
    """A commit that was acknowledged to its caller."""

    record: CommitRecord
    # How many changes the repository had seen by then.
    after: int


class Releases(msgspec.Struct):
    """How often somebody has begun to release a name, and how often that came to its end."""

    begun: int = 0
    ended: int = 0


class CallLog:
    """What callers asked for, and what they were shown.

    Attributes:
        trees: What was backed up, by the key of its index: a unique id is a label, and two backups may have one.
        requests: The indexes that a commit was asked to bring, by its offsets: each time that it was asked for.
        drops: What some were to drop.
        parents: The only commit that some may follow.
        commits: What was acknowledged.
        names: What was acknowledged to stand for what, unless somebody has asked to release it since.
        releases: How often each name was asked to be released.
        restored: Directories, each with the trees that it may hold.
        followed: Directories that follow a scope, and once one is promoted the pointer of its commit.
        newly_restored: Commits that a process has brought back, and found to be what they should be.
        errors: What went wrong in an action that may not go wrong so.
        tampered: A test has taken something away behind everybody's back: then damage is what is expected.
    """

    def __init__(self) -> None:
        self.trees: dict[str, Tree] = {}
        self.requests: dict[str, list[dict[StoreName, str]]] = {}
        self.drops: dict[str, frozenset[StoreName]] = {}
        self.parents: dict[str, CommitPointer] = {}
        self.commits: dict[Scope, list[Acknowledged]] = {}
        self.names: dict[tuple[Scope, str], CommitPointer] = {}
        self.releases: dict[tuple[Scope, str], Releases] = {}
        self.restored: dict[Path, list[str]] = {}
        self.followed: dict[Path, tuple[Scope, CommitPointer | None]] = {}
        self.errors: list[str] = []
        self.newly_restored: set[CommitPointer] = set()
        self.tampered = False

    def copy(self) -> "CallLog":
        """The same, to be written on."""
        copied = CallLog()
        copied.trees, copied.requests, copied.names = dict(self.trees), dict(self.requests), dict(self.names)
        copied.commits = {scope: list(commits) for scope, commits in self.commits.items()}
        return copied


def read_tree(root: Path) -> Tree:
    """What is in a directory, by path."""
    found: Tree = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = f"{directory}/{name}"
            with open(path, "rb") as file:  # noqa: PTH123 - pathlib takes longer than the read
                found[path.removeprefix(f"{root}/")] = file.read()
    return found


def index_keys(stores: Sequence[StoreReference]) -> dict[StoreName, str]:
    """Return which index each store has."""
    return {(s.task, s.store): s.index.key for s in stores}

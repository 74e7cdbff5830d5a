"""Describe the backup of a streaming checkpoint, and choose what of it a batch is restored from (design 0005).

First what the commit of a backup says and how its stores are named (P8); then which backup and which files of the
query a batch takes (R1 and R2).
"""

from collections.abc import Iterable, Sequence
from typing import Final, Self

import msgspec

from index.errors import UNDECODABLE, BatchLogError, UnknownFormatError
from index.plan.commits import Commit
from index.snapshot.model import FilePath
from index.spark.names import check_store_dir
from index.spark.query_logs import DEFAULT_STORE, parse_batch_name

# The store that has the files of the query: its logs, its metadata and its sources, laid out as in the checkpoint.
QUERY_TASK: Final = "query"
QUERY_STORE: Final = "checkpoint"

KIND: Final = "spark-checkpoint"
FORMAT: Final = 1

COMMITS: Final = "commits"
OFFSETS: Final = "offsets"
SOURCES: Final = "sources"
STATE: Final = "state"
QUERY_ID: FilePath = ("metadata",)


class StoreId(msgspec.Struct, frozen=True, order=True):
    """One state store of a query."""

    operator: int
    partition: int
    store: str = DEFAULT_STORE

    @property
    def task(self) -> str:
        return f"{self.operator}-{self.partition}"

    @property
    def path(self) -> str:
        """Its directory in a checkpoint.

        Raises:
            UnsafeNameError: The name of the store is not one safe component.
        """
        path = f"{STATE}/{self.operator}/{self.partition}"
        return path if self.store == DEFAULT_STORE else f"{path}/{check_store_dir(self.store)}"

    # `override` is in no standard library before 3.12, and this package has no other dependency.
    def __str__(self) -> str:  # type: ignore[explicit-override]
        return self.path.removeprefix(f"{STATE}/")

    @classmethod
    def parse(cls, task: str, store: str) -> Self | None:
        """Return the state store that a task and a store of a commit mean; None if they mean something else."""
        operator, dash, partition = task.partition("-")
        if not dash or not _is_number(operator) or not _is_number(partition):
            return None
        return cls(int(operator), int(partition), store)


class CheckpointBackup(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag=KIND, tag_field="kind"):
    """What the offsets of a backup's commit say. The order of the fields is the order in which they are written."""

    format: int = FORMAT
    query_id: str
    # The newest batch that it has, and the oldest one that can be restored from it.
    batch: int
    oldest_batch: int
    # Where the checkpoint was; for people.
    location: str = ""

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def decode_checkpoint_backup(offsets: str) -> CheckpointBackup | None:
    """Decode a commit's offsets; None if the commit is not a checkpoint backup.

    Raises:
        UnknownFormatError: A newer tidemark made it.
        BatchLogError: It cannot be read, or its numbers make no sense.
    """
    try:
        kind = msgspec.json.decode(offsets, type=_Kind)
    except (*UNDECODABLE, UnicodeEncodeError):
        return None
    if kind.kind != KIND:
        return None
    if kind.format != FORMAT:
        raise UnknownFormatError(
            f"is of format {kind.format}", subject="checkpoint backup", hint="read it with a newer tidemark"
        )
    try:
        backup = msgspec.json.decode(offsets, type=CheckpointBackup)
    except UNDECODABLE as error:
        raise BatchLogError(f"cannot be read: {error}", subject="checkpoint backup") from error
    if not 0 <= backup.oldest_batch <= backup.batch:
        raise BatchLogError(f"says batches {backup.oldest_batch} to {backup.batch}", subject="checkpoint backup")
    return backup


class _Kind(msgspec.Struct):
    kind: str
    format: int = 0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and (text == "0" or not text.startswith("0"))


# A backup with the commit that keeps it.
StoredBackup = tuple[Commit, CheckpointBackup]


def choose_checkpoint_backup(
    backups: Sequence[StoredBackup], *, batch: int | None = None, at_ms: int | None = None
) -> StoredBackup | None:
    """Choose the backup, of some that are sorted newest first, to restore from (R1); None if there is none that fits.

    That is one that has the batch, or else the one that was the newest at a time by the store's clock. Where a query
    was taken back and went on, there are two of some batches: those that led to the newest backup come first, as far as
    the numbers show.
    """
    if batch is None:
        return next((p for p in backups if at_ms is None or p[0].committed_at_ms <= at_ms), None)
    return _choose(_current(backups), batch) or _choose(backups, batch)


def _choose(backups: Sequence[StoredBackup], batch: int) -> StoredBackup | None:
    own = next((p for p in backups if p[1].batch == batch), None)
    later = [p for p in backups if p[1].oldest_batch <= batch <= p[1].batch]
    return own or min(reversed(later), key=lambda taken: taken[1].batch, default=None)


def _current(backups: Sequence[StoredBackup]) -> list[StoredBackup]:
    """Leave out backups of batches that were given up later: going back in time, batches never rise."""
    kept: list[StoredBackup] = []
    for taken in backups:
        if not kept or taken[1].batch <= kept[-1][1].batch:
            kept.append(taken)
    return kept


def select_query_files(paths: Iterable[FilePath], *, oldest_batch: int, batch: int) -> tuple[FilePath, ...]:
    """Select the files of the query, of those that the backup has, that belong to a batch and nothing newer (R2).

    The commits from `oldest_batch` on have to be there.

    Raises:
        BatchLogError: A file without which the query does not go on is not there; the error names it.
    """
    there = sorted(set(paths))
    needed = (QUERY_ID, (OFFSETS, str(batch)), *((COMMITS, str(b)) for b in range(oldest_batch, batch + 1)))
    for path in needed:
        if path not in there:
            raise BatchLogError(
                "is not in the backup",
                subject="/".join(path),
                hint="the backup is not whole; restore from another one",
            )
    return tuple(path for path in there if belongs(path, oldest_batch, batch))


def belongs(path: FilePath, oldest_batch: int, batch: int) -> bool:
    """Return whether a file of a query is of these batches, or of all (P7, R2)."""
    match path:
        case ("commits", name):
            return _is_within(name, oldest_batch, batch)
        case ("offsets", name):
            return _is_within(name, oldest_batch - 1, batch + 1)
        case ("state", operator, "_metadata", "v2", name):
            return parse_batch_name(operator) is not None and _is_within(name, 0, batch)
        case ("state", operator, "_metadata", "metadata") | ("state", operator, "_stateSchema", _, _):
            return parse_batch_name(operator) is not None
        case _:
            return path == QUERY_ID or path[0] == SOURCES


def _is_within(name: str, oldest: int, newest: int) -> bool:
    found = parse_batch_name(name)
    return found is not None and oldest <= found <= newest

"""Find what in a checkpoint no query needs any more, by its names and its newest commit alone (design 0005, W1 to W4).

What this finds is waste for certain; there may be more, which only the content of snapshots shows.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from index.spark.checkpoint import COMMITS, STATE
from index.spark.names import StateFileName, is_shared_path, parse_state_name
from index.spark.query_logs import BatchCommit, parse_batch_name
from index.spark.requests import ListedFile, log_times

# A dead operator or partition is of no committed batch. A lost attempt is of a version that another attempt committed.
# A later version was left by a history that the query was taken back from.
WasteReason: TypeAlias = Literal["dead operator", "dead partition", "lost attempt", "later version"]

# Of a file in `state/<operator>/<partition>/<store>`.
_DEPTH: Final = 4
# A batch that runs writes the version after that of the newest committed one.
_AHEAD_MAX: Final = 1


class Waste(msgspec.Struct, frozen=True):
    """One file, and why nobody needs it."""

    path: str
    size_bytes: int
    reason: WasteReason


def find_waste(files: Sequence[ListedFile], batch: int, commit: BatchCommit) -> tuple[Waste, ...]:
    """Find files of state, of all in a checkpoint, that its newest committed batch and all before it have left behind.

    Where the commit has no unique ids nothing separates attempts and operators: only versions are looked at.
    """
    stored = [of for file in files if (of := _StateFile.of(file)) is not None]
    newest, ids = batch + 1, commit.unique_ids
    # Of a batch that is still in the log; or of one that runs, and may be the first with an operator or a partition.
    batches = {*log_times(files, COMMITS), batch + _AHEAD_MAX}
    begun = {of.place for of in stored if of.name is not None and of.name.of.version - 1 in batches}
    operators_begun = {operator for operator, _ in begun}
    waste = []
    for of in stored:
        reason = _reason(of, newest, ids)
        is_begun = of.operator in operators_begun if reason == "dead operator" else of.place in begun
        if reason is not None and not (reason.startswith("dead") and is_begun):
            waste.append(Waste(of.file.path, of.file.size_bytes, reason))
    return tuple(waste)


class _StateFile(NamedTuple):
    file: ListedFile
    operator: int
    partition: int
    # None: an SST, a log, or what Spark does not write.
    name: StateFileName | None

    @property
    def place(self) -> tuple[int, int]:
        return self.operator, self.partition

    @property
    def shared(self) -> str:
        """Its path in the directory of its store, if it is an SST or a log."""
        return "/".join(self.file.path.split("/")[-2:])

    @property
    def directory(self) -> str:
        return self.file.path.rsplit("/", 1 if self.name is not None else 2)[0]

    @property
    def is_of_spark(self) -> bool:
        """Whether Spark names files of state so (design 0014, X1): in the directory of a store."""
        is_named = self.name is not None or is_shared_path(self.shared)
        return is_named and self.directory.count("/") < _DEPTH

    @classmethod
    def of(cls, file: ListedFile) -> "_StateFile | None":
        match file.path.split("/"):
            case [log, operator, partition, *_, name] if log == STATE:
                numbers = parse_batch_name(operator), parse_batch_name(partition)
                if numbers[0] is not None and numbers[1] is not None:
                    return cls(file, numbers[0], numbers[1], parse_state_name(name))
        return None


def _reason(of: _StateFile, newest: int, ids: Mapping[int, Sequence[Sequence[str]]] | None) -> WasteReason | None:
    if of.name is not None and of.name.of.version > newest + _AHEAD_MAX:
        return "later version"
    if ids is None:
        return None
    if of.operator not in ids:
        return "dead operator"
    if of.partition >= len(ids[of.operator]):
        return "dead partition"
    return "lost attempt" if _attempt(of, {newest - 1: ids}) == "lost" else None


# ---------------------------------------------------------------------- collecting (design 0014)

CollectReason: TypeAlias = Literal["lost attempt", "orphan", "dead operator", "dead partition"]


class Collectable(msgspec.Struct, frozen=True, order=True):
    """One file that a look found to be of no use (design 0014, X3 to X5), as it was listed."""

    path: str
    size_bytes: int
    modified_at_ms: int
    reason: CollectReason


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at a checkpoint has found (X2)."""

    # Of every committed batch that is there, the ids of its stores; None: a commit without ids.
    ids: Mapping[int, Mapping[int, Sequence[Sequence[str]]] | None]
    # All files, of the listing before snapshots were read.
    files: Sequence[ListedFile]
    # By the directory of a store: the SSTs and logs that its snapshots name, by their paths from there.
    named: Mapping[str, frozenset[str]]
    # The directories of stores of which a snapshot could not be read.
    unread: frozenset[str] = frozenset()

    @property
    def newest_batch(self) -> int:
        return max(self.ids, default=-1)


def find_collectable(look: Look, *, older_than_ms: int, is_stopped: bool) -> tuple[Collectable, ...]:
    """Find what a look shows to be of no use, by path (X1 to X6); orphans only of a query that does not run (X4)."""
    now_ms = max((file.modified_at_ms for file in look.files), default=0)
    stored = [of for file in look.files if (of := _StateFile.of(file)) is not None]
    # What Spark names otherwise is nobody's to judge (X1).
    stored = [of for of in stored if of.is_of_spark]
    newest, known = look.newest_batch + 1, [ids for ids in look.ids.values() if ids is not None]
    begun = {of.place for of in stored if of.name is not None and of.name.of.version > newest}
    alive = {operator for ids in known for operator in ids} | {operator for operator, _ in begun}
    alive_partitions = {(operator, n) for ids in known for operator, of in ids.items() for n in range(len(of))} | begun
    # When each store had its newest snapshot of an attempt that was committed.
    based_ms: dict[str, int] = {}
    for of in stored:
        is_snapshot = of.name is not None and of.name.kind == "snapshot" and not of.name.checksum
        if is_snapshot and _attempt(of, look.ids) == "won":
            based_ms[of.directory] = max(based_ms.get(of.directory, 0), of.file.modified_at_ms)

    def reason_of(of: _StateFile) -> CollectReason | None:
        if len(known) == len(look.ids) > 0:
            if of.operator not in alive:
                return "dead operator"
            if of.place not in alive_partitions:
                return "dead partition"
        if of.name is not None:
            return "lost attempt" if _attempt(of, look.ids) == "lost" and of.name.of.version < newest else None
        if not is_stopped or of.directory in look.unread or of.shared in look.named.get(of.directory, ()):
            return None
        return "orphan" if of.file.modified_at_ms < based_ms.get(of.directory, 0) else None

    return tuple(
        sorted(
            Collectable(of.file.path, of.file.size_bytes, of.file.modified_at_ms, reason)
            for of in stored
            if of.file.modified_at_ms < now_ms - older_than_ms and (reason := reason_of(of)) is not None
        )
    )


def is_collectable(file: ListedFile) -> bool:
    """Return whether a collection ever takes a file of this path (X1)."""
    of = _StateFile.of(file)
    return of is not None and of.is_of_spark


def _attempt(
    of: _StateFile, ids: Mapping[int, Mapping[int, Sequence[Sequence[str]]] | None]
) -> Literal["won", "lost", "unknown"]:
    """Return what the commit of its batch says of the attempt that wrote a file."""
    if of.name is None or of.name.of.version - 1 not in ids:
        return "unknown"
    committed = ids[of.name.of.version - 1]
    if committed is None or of.name.of.unique_id is None:
        return "won" if committed is None and of.name.of.unique_id is None else "unknown"
    partitions = committed.get(of.operator, ())
    if of.partition >= len(partitions):
        return "unknown"
    return "won" if of.name.of.unique_id in partitions[of.partition] else "lost"


def confirm_collectable(first: Sequence[Collectable], second: Sequence[Collectable]) -> tuple[Collectable, ...]:
    """Return what two looks agree on (X7)."""
    return tuple(sorted(frozenset(first) & frozenset(second)))

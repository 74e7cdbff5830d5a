"""Find what in a checkpoint no query needs any more, by its names and its newest commit alone (design 0005, W1 to W4).

What this finds is waste for certain; there may be more, which only the content of snapshots shows.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from index.spark.checkpoint import STATE
from index.spark.names import StateFileName, parse_state_name
from index.spark.query_logs import BatchCommit, parse_batch_name
from index.spark.requests import ListedFile

# A dead operator or partition is of no committed batch. A lost attempt is of a version that another attempt committed.
# A later version was left by a history that the query was taken back from.
WasteReason: TypeAlias = Literal["dead operator", "dead partition", "lost attempt", "later version"]

# A batch that runs writes the version after that of the newest committed one.
_AHEAD_MAX: Final = 1


class Waste(msgspec.Struct, frozen=True):
    """One file, and why nobody needs it."""

    path: str
    size_bytes: int
    reason: WasteReason


def find_waste(files: Iterable[ListedFile], batch: int, commit: BatchCommit) -> tuple[Waste, ...]:
    """Find files of state that the newest committed batch, and all before it, have left behind.

    Args:
        files: All files of the checkpoint, by their paths in it.
        batch: The newest committed batch of the listing.
        commit: Of that batch. Without unique ids nothing separates attempts and operators: only versions are looked at.
    """
    stored = [of for file in files if (of := _StateFile.of(file)) is not None]
    newest, ids = batch + 1, commit.unique_ids
    # A batch that runs, and is not committed, may be the first one with an operator or a partition.
    begun = {of.place for of in stored if of.name is not None and of.name.of.version == newest + _AHEAD_MAX}
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
    is_attempt = of.name is not None and of.name.of.version == newest and of.name.of.unique_id is not None
    if is_attempt and of.name is not None and of.name.of.unique_id not in ids[of.operator][of.partition]:
        return "lost attempt"
    return None

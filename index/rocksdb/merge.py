"""Plan one store of the SSTs of several, of which none is read or written (design 0010, R1 to R6).

Every SST gets a new number and a place among the levels, and a new MANIFEST says so. Keys of different parents are
different keys: the caller knows that, as hash partitions are, and nothing here could find out.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from index.errors import StoreMergeError
from index.rocksdb import manifest

# RocksDB's default number, which Spark leaves as it is.
_LEVELS: Final = 7
_COMPACT: Final = "open that store, compact it, and take another checkpoint of it; or rewrite the rows instead"


class MergeParent(msgspec.Struct, frozen=True, kw_only=True):
    """A store that goes into a merge."""

    # What errors call it.
    subject: str
    state: manifest.ManifestState
    # Write-ahead logs with rows that no SST has, by name.
    logs: tuple[str, ...] = ()
    # Numbers of SSTs that delete ranges of keys.
    range_deletions: frozenset[int] = frozenset()


class MergeLink(msgspec.Struct, frozen=True, kw_only=True):
    """An SST of a parent, and its number in the merged store."""

    # By its place among the parents.
    parent: int
    before: int
    number: int


class MergePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the merged store consists of."""

    links: tuple[MergeLink, ...]
    state: manifest.ManifestState
    # Of its files `MANIFEST-<number>` and `OPTIONS-<number>`.
    manifest_number: int
    options_number: int


class _Run(msgspec.Struct, kw_only=True):
    """Files of one family and one parent that overlap each other nowhere: a level, or one file of level 0."""

    parent: int
    files: tuple[manifest.ManifestFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def overlaps(self, other: "_Run") -> bool:
        least, most = (min(f.smallest_key for f in self.files), max(f.largest_key for f in self.files))
        return any(file.smallest_key <= most and least <= file.largest_key for file in other.files)


def plan_merge(parents: Sequence[MergeParent]) -> MergePlan:
    """Plan a store of all SSTs of `parents`, at least one, in any order, whose keys are disjoint.

    The plan names each SST of each parent once, numbered in their order. A StoreMergeError says that a parent has what
    would be lost or would mean something else in the merged store (R1).
    """
    families = _common_families(parents)
    for parent in parents:
        _check_parent(parent)
    links: list[MergeLink] = []
    merged: list[manifest.ManifestFamily] = []
    for number, name in enumerate(families):
        # Of each parent from the oldest rows to the newest.
        runs = [
            [_Run(parent=at, files=files) for files in manifest.runs_of(family)][::-1]
            for at, parent in enumerate(parents)
            for family in parent.state.families
            if family.name == name
        ]
        placed: list[tuple[int, manifest.ManifestFile]] = []
        for level, epoch, run in _place(runs):
            for file in run.files:
                link = MergeLink(parent=run.parent, before=file.number, number=len(links) + 1)
                links.append(link)
                placed.append((level, _renumbered(file, link.number, epoch)))
        placed.sort(key=lambda item: (item[0], item[1].number))
        merged.append(manifest.ManifestFamily(id=number, name=name, comparator=manifest.BYTEWISE, files=tuple(placed)))
    last = len(links)
    sequences = [parent.state.last_sequence for parent in parents]
    sequences += [file.largest_sequence for family in merged for _, file in family.files]
    state = manifest.ManifestState(
        families=tuple(merged), last_sequence=max(sequences), next_file_number=last + 3, family_id_max=len(merged) - 1
    )
    return MergePlan(links=tuple(links), state=state, manifest_number=last + 1, options_number=last + 2)


def _common_families(parents: Sequence[MergeParent]) -> tuple[bytes, ...]:
    """Return the names of the families that all parents have, `default` first."""
    first = tuple(family.name for family in parents[0].state.families)
    for parent in parents:
        names = {family.name for family in parent.state.families}
        if names != set(first):
            listed = ", ".join(sorted(name.decode(errors="replace") for name in names))
            raise _refused(f"has the column families {listed}, and another store has others", parent)
    return first


def _check_parent(parent: MergeParent) -> None:
    if parent.logs:
        raise _refused(f"has rows in a write-ahead log, {parent.logs[0]}, that no SST has", parent, "flush it first")
    for family in parent.state.families:
        if family.comparator != manifest.BYTEWISE:
            name = family.comparator.decode(errors="replace")
            raise _refused(f"orders its keys by {name}, and only {manifest.BYTEWISE.decode()} is known", parent)
        for _, file in family.files:
            fields = dict(file.fields)
            if manifest.FIELD_OLDEST_BLOB_FILE in fields:
                raise _refused(f"has values in blob files (file {file.number})", parent)
            if file.number in parent.range_deletions or manifest.FIELD_RANGE_DELETIONS in fields:
                # It would delete the other parents' keys of the range, where they are on a lower level.
                raise _refused(f"has deletions of ranges of keys (file {file.number})", parent)


def _place(parents: Sequence[list[_Run]]) -> Iterator[tuple[int, int, _Run]]:
    """Yield level, epoch number and run, so that rows of one parent are above its older ones (R3, R4).

    A run goes to the lowest level where it overlaps nothing; what is largest chooses first. What finds none above its
    parent's older runs goes to level 0.
    """
    taken: dict[int, list[_Run]] = {}
    waiting = [(run, age) for runs in parents for age, run in enumerate(runs)]
    waiting.sort(key=lambda item: (item[1], -item[0].size_bytes))
    lowest = dict.fromkeys(range(len(parents)), _LEVELS - 1)
    epoch = 1
    for run, _ in waiting:
        level = lowest[run.parent]
        while level > 0 and any(run.overlaps(other) for other in taken.get(level, ())):
            level -= 1
        lowest[run.parent] = max(level - 1, 0)
        if level:
            taken.setdefault(level, []).append(run)
            yield level, 1, run
        else:
            epoch += 1
            yield 0, epoch, run


def _renumbered(file: manifest.ManifestFile, number: int, epoch: int) -> manifest.ManifestFile:
    # Which logs were needed once says nothing in a store without any.
    fields = tuple(field for field in file.fields if field[0] != manifest.FIELD_LOG_NUMBER_MIN)
    return msgspec.structs.replace(file, number=number, fields=fields).with_epoch(epoch)


def _refused(message: str, parent: MergeParent, hint: str = _COMPACT) -> StoreMergeError:
    return StoreMergeError(message, subject=parent.subject, hint=hint)

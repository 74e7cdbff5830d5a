"""From a version and a unique id to the snapshot and the changelogs that make it (design 0004, 5).

What is present comes from a listing or from a SnapshotIndex; lineages come from the headers of changelogs or from that
index. Nothing here guesses: where a header decides, `resolve` answers with the changelog that has it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from index.errors import LineageError, VersionMissingError
from index.java_text import UTF_BYTES_MAX, decode_json, encode_jackson, encode_modified_utf8
from index.snapshot.model import LineageItem, SnapshotIndex, UniqueId
from index.spark.names import (
    STATE_VERSION_MAX,
    StateVersion,
    changelog_name,
    check_unique_id,
    parse_state_name,
    snapshot_name,
)

# What Java's writeUTF takes.
LINEAGE_BYTES_MAX: Final = UTF_BYTES_MAX

# How many gaps an error spells out.
_GAPS_MAX: Final = 5
_COLLECTED_HINT: Final = (
    "the files were deleted or never uploaded; load a version that is still there, or restore the directory from a "
    "backup"
)
_HEADER_HINT: Final = "a header is damaged, or the directory holds files of two queries; restore it from a backup"

Lineage = tuple[LineageItem, ...]


class _SparkItem(msgspec.Struct, frozen=True):
    version: int
    checkpoint_unique_id: str = msgspec.field(name="checkpointUniqueId")


class Present(msgspec.Struct, frozen=True):
    """Which files of one store are there, and the lineages that are known so far."""

    snapshots: frozenset[StateVersion] = frozenset()
    changelogs: frozenset[StateVersion] = frozenset()
    # By the changelog in whose header it is; as for `ChangelogHeader.lineage`.
    headers: dict[StateVersion, Lineage] = {}
    # Whether they are of the HDFS-backed provider (N1a).
    is_hdfs: bool = False

    @classmethod
    def of_names(cls, names: Iterable[str], *, is_hdfs: bool | None = None) -> "Present":
        """Parse what a listing or an index has; foreign names and checksums are passed over (design 0004, N1, N1a).

        `is_hdfs` is whose they are, if the query says it; None: the names do.
        """
        found = [parsed for parsed in map(parse_state_name, names) if parsed is not None and not parsed.checksum]
        if is_hdfs is None:
            is_hdfs = bool(found) and all(f.of.is_hdfs for f in found)
        snapshots, changelogs = (
            frozenset(f.of for f in found if f.kind == kind and f.of.is_hdfs == is_hdfs)
            for kind in ("snapshot", "changelog")
        )
        return cls(snapshots, changelogs, is_hdfs=is_hdfs)

    def with_headers(self, headers: Mapping[StateVersion, Lineage]) -> "Present":
        """Return the same with the headers of these changelogs: one copy for all of them."""
        return msgspec.structs.replace(self, headers={**self.headers, **headers})

    def lacks_by_retention(self, of: StateVersion) -> bool:
        """Return whether a version is older than every file here: retention has taken it (design 0005, K1)."""
        return all(of.version < found.version for found in self.snapshots | self.changelogs)

    def without_snapshot(self, of: StateVersion) -> "Present":
        """Return the same without a snapshot that does not open (design 0004, R7)."""
        return msgspec.structs.replace(self, snapshots=self.snapshots - {of})


class Resolution(msgspec.Struct, frozen=True):
    """What a version is made of: a snapshot, and the changelogs that come after it, in order."""

    target: StateVersion
    # None: start from nothing, which is version 0.
    base: StateVersion | None
    # From the version after the base to the target; empty when the base is the target.
    changelogs: tuple[StateVersion, ...] = ()
    # The versions with ids from the base, if it has one, to the target, ascending: the header of the next changelog.
    lineage: Lineage = ()

    @property
    def row_snapshot(self) -> StateVersion | None:
        """The base, where it is a file of rows, read like a changelog on top of nothing (N1a); else None."""
        return self.base if self.base is not None and self.base.is_hdfs else None

    @property
    def rocksdb_snapshot(self) -> StateVersion | None:
        """The base, where it is one of RocksDB's; else None."""
        return None if self.row_snapshot is not None else self.base


class HeaderNeeded(msgspec.Struct, frozen=True):
    """The changelog whose header has to be read and given to `Present.with_headers` before there is an answer."""

    changelog: StateVersion


def encode_lineage(items: Sequence[LineageItem]) -> str:
    """Encode a lineage as Spark writes it into a header: `[{"version":3,"checkpointUniqueId":"…"}]`.

    Raises:
        UnsafeNameError: An id cannot be part of a file name.
    """
    return encode_jackson([_SparkItem(item.version, check_unique_id(item.unique_id)) for item in items]).decode()


def decode_lineage(text: str) -> Lineage:
    """Decode what `encode_lineage` encodes; items in the order of the text, unknown fields ignored.

    Raises:
        LineageError: It is not such a list, or a version is not a positive number of 63 bits.
        UnsafeNameError: An id cannot be part of a file name.
    """
    what = "is not a list of versions and ids"
    wire = decode_json(text, tuple[_SparkItem, ...], LineageError, what, subject="lineage", hint=_HEADER_HINT)
    for item in wire:
        if not 0 < item.version <= STATE_VERSION_MAX:
            raise _bad_header(f"names version {item.version}", "lineage")
    return tuple(LineageItem(item.version, check_unique_id(item.checkpoint_unique_id)) for item in wire)


def _bad_header(message: str, subject: str) -> LineageError:
    return LineageError(message, subject=subject, hint=_HEADER_HINT)


def lineage_fits(items: Sequence[LineageItem]) -> bool:
    """Return whether a header can hold this lineage; if not, a snapshot is due first (design 0004, C6)."""
    return len(encode_modified_utf8(encode_lineage(items))) <= LINEAGE_BYTES_MAX


def resolve(version: int, unique_id: UniqueId | None, present: Present) -> Resolution | HeaderNeeded:
    """Find the base snapshot and the changelogs that make a version, or the header that has to be read first.

    With an id only files of that id and of its lineage count, and the base is the newest snapshot among them. Where the
    lineage begins above version 1 with nothing before it, the query ran without ids before, and its base is found by
    numbers, as it is when `unique_id` is None: with checkpoint format V1, and for version 0, which is empty and takes
    no file.

    Returns:
        A `Resolution` of files that all are present, or a `HeaderNeeded` of a changelog that is present, whose header
        is not known, and which every possible answer replays.

    Raises:
        VersionMissingError: A snapshot or changelog that it takes is not there; the error names it.
        LineageError: A header has a gap, or does not lead back; or version 0 is asked for with an id.
        UnsafeNameError: The id cannot be part of a file name.

    Source:
        Design 0004, R1 to R5; Spark's `RocksDB.load` and `getFullLineage`.
    """
    if not 0 <= version <= STATE_VERSION_MAX:
        message, hint = "does not exist: versions are 0 and above", "state versions are batch + 1"
        raise VersionMissingError(message, subject=f"version {version}", hint=hint)
    if unique_id is None:
        target = StateVersion(version, is_hdfs=present.is_hdfs)
        base, changelogs = _resolve_by_number(target, target, present)
        return Resolution(target, base, changelogs)
    target = StateVersion(version, check_unique_id(unique_id))
    if version == 0:
        message, hint = "has a unique id, but the empty version has none", "load version 0 without an id"
        raise LineageError(message, subject=f"version {target}", hint=hint)
    return _resolve_by_lineage(target, present)


def _resolve_by_lineage(target: StateVersion, present: Present) -> Resolution | HeaderNeeded:
    # Newest first; every step adds versions below the last one, so it ends.
    chain = [target]
    at = 0
    while True:
        while at < len(chain):
            if chain[at] in present.snapshots:
                changelogs = tuple(reversed(chain[:at]))
                return Resolution(target, chain[at], changelogs, _lineage_of(chain[: at + 1]))
            if chain[at] not in present.changelogs:
                raise _missing(target, chain[at], present)
            at += 1
        oldest = chain[-1]
        header = present.headers.get(oldest)
        if oldest.version == 1:
            return Resolution(target, None, tuple(reversed(chain)), _lineage_of(chain))
        if header is None:
            return HeaderNeeded(oldest)
        below = _check_header(oldest, header)
        if not below:
            base, changelogs = _resolve_by_number(StateVersion(oldest.version - 1), target, present)
            return Resolution(target, base, (*changelogs, *reversed(chain)), _lineage_of(chain))
        chain.extend(below)


def _check_header(of: StateVersion, header: Lineage) -> tuple[StateVersion, ...]:
    """Return the versions in a header, newest first, once they lead from `of` down by ones (design 0004, R5)."""
    items = sorted((StateVersion(item.version, item.unique_id) for item in header), reverse=True)
    expected = of.version - 1
    for item in items:
        if not 0 < item.version <= expected:
            message = f"names version {item}, which is not a version below {expected + 1}"
            raise _bad_header(message, changelog_name(of))
        if item.version < expected:
            gaps = _gaps((item.version for item in items), items[-1].version, of.version - 1)
            message = f"Lineage versions are not increasing by one: it lacks {_spell(gaps)}"
            raise _bad_header(message, changelog_name(of))
        expected = item.version - 1
    return tuple(items)


def _resolve_by_number(
    upper: StateVersion, target: StateVersion, present: Present
) -> tuple[StateVersion | None, tuple[StateVersion, ...]]:
    """Find the newest snapshot without an id at or below `upper`, and every changelog after it (0004, R3 i.b, ii.b)."""
    snapshots = (s for s in present.snapshots if s.unique_id is None and 0 < s.version <= upper.version)
    base = max(snapshots, default=None)
    first = 1 if base is None else base.version + 1
    found = sorted(c for c in present.changelogs if c.unique_id is None and first <= c.version <= upper.version)
    if len(found) != upper.version - first + 1:
        gaps = _gaps((c.version for c in found), first, upper.version)
        raise _missing_by_number(upper, target, gaps, present)
    return base, tuple(found)


def _missing(target: StateVersion, of: StateVersion, present: Present) -> VersionMissingError:
    others = sorted(o for o in present.changelogs | present.snapshots if o.version == of.version)
    other = "" if not others else f"; of that version there are only {', '.join(map(str, others[:_GAPS_MAX]))}"
    message = f"cannot be put together: neither {snapshot_name(of)} nor {changelog_name(of)} is there{other}"
    return VersionMissingError(message, subject=f"version {target}", hint=_COLLECTED_HINT)


def _missing_by_number(
    upper: StateVersion, target: StateVersion, gaps: Sequence[tuple[int, int]], present: Present
) -> VersionMissingError:
    hint = _COLLECTED_HINT
    first = StateVersion(gaps[0][0], is_hdfs=present.is_hdfs)
    there = present.changelogs | present.snapshots
    if upper == target and any(o.version == target.version and o.unique_id is not None for o in there):
        hint = "the directory has this version with unique ids only: pass the one in the commit log"
    message = (
        f"cannot be put together: {changelog_name(first)} is not there, nor a later snapshot to start from; "
        f"missing are the changelogs of {_spell(gaps)}"
    )
    return VersionMissingError(message, subject=f"version {target}", hint=hint)


def _gaps(found: Iterable[int], first: int, last: int) -> list[tuple[int, int]]:
    """List the runs of versions from `first` to `last`, inclusive, that are not in `found`; never enumerated."""
    gaps: list[tuple[int, int]] = []
    for version in sorted(set(found)):
        if version > first:
            gaps.append((first, version - 1))
        first = max(first, version + 1)
    if first <= last:
        gaps.append((first, last))
    return gaps


def _spell(gaps: Sequence[tuple[int, int]]) -> str:
    parts = [str(low) if low == high else f"{low} to {high}" for low, high in gaps[:_GAPS_MAX]]
    if len(gaps) > _GAPS_MAX:
        parts.append("more")
    return "versions " + ", ".join(parts)


def _lineage_of(chain: Sequence[StateVersion]) -> Lineage:
    return tuple(LineageItem(of.version, of.unique_id) for of in reversed(chain) if of.unique_id is not None)


def full_lineage(
    start_version: int, end: LineageItem, headers: Mapping[StateVersion, Lineage]
) -> Lineage | HeaderNeeded:
    """Return the lineage from `start_version` to `end`, inclusive, by following headers back from `end`.

    It ascends by one; or there is a changelog whose header has to be known next (Spark's `RocksDB.getFullLineage`).

    Raises:
        LineageError: The headers leave a gap ("not increasing by one") or do not lead back ("Cannot find version
            smaller than"); Spark's INVALID_CHECKPOINT_LINEAGE. Or `start_version` is not within 1 and the version of
            `end`.
    """
    if not 0 < start_version <= end.version:
        subject, hint = f"lineage of {end.version}_{end.unique_id}", "start between version 1 and the end"
        raise LineageError(f"cannot start at version {start_version}", subject=subject, hint=hint)
    chain = [StateVersion(end.version, end.unique_id)]
    while chain[-1].version > start_version:
        oldest = chain[-1]
        header = headers.get(oldest)
        if header is None:
            return HeaderNeeded(oldest)
        below = _check_header(oldest, tuple(item for item in header if item.version >= start_version))
        if not below:
            message = f"Cannot find version smaller than {oldest.version} in lineage"
            raise _bad_header(message, changelog_name(oldest))
        chain.extend(below)
    return _lineage_of(chain)


def present_in_index(index: SnapshotIndex) -> Present:
    """Return what a snapshot index has of a state directory: its files, and its lineage for headers (0004, R6).

    Only what ascends by one without a gap is taken for a header. A version with nothing known right below it gets none,
    because an empty header has a meaning of its own (R4).

    Raises:
        VersionMissingError: The index is of a directory that holds no state file at all.
    """
    present = Present.of_names(file.name for file in index.dir.files_present)
    metadata = index.metadata
    if not present.snapshots and not present.changelogs:
        subject = f"snapshot index of {metadata.store} at version {metadata.version}"
        hint = "it is a backup of a plain directory; restore it as one"
        raise VersionMissingError("holds no snapshot or changelog of Spark's", subject=subject, hint=hint)
    headers: dict[StateVersion, Lineage] = {}
    run: list[LineageItem] = []
    for item in (*metadata.lineage, LineageItem(metadata.version, metadata.unique_id)):
        if run and run[-1].version != item.version - 1:
            run = []
        if run or item.version == 1:
            headers[StateVersion(item.version, item.unique_id)] = tuple(run)
        run.append(item)
    return msgspec.structs.replace(present, headers=headers)


def target_in_index(version: int, unique_id: UniqueId | None, index: SnapshotIndex) -> UniqueId | None:
    """Return the id to resolve by: the one asked for, or None where it is only the backup's own (design 0004, R6).

    A backup always has one, which is for its own version, also in a directory without ids.
    """
    metadata = index.metadata
    if unique_id is None or (version, unique_id) != (metadata.version, metadata.unique_id):
        return unique_id
    present = present_in_index(index)
    files = present.snapshots | present.changelogs
    named = StateVersion(version, unique_id) in files
    return None if not named and StateVersion(version, is_hdfs=present.is_hdfs) in files else unique_id

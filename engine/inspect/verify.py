"""Check that what is committed is there, whole, and safe from expiry (design 0002, T2 and D7)."""

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import chain
from operator import attrgetter
from typing import ClassVar

import msgspec
from typing_extensions import override

from blobstore.base import BlobInfo, BlobStore
from blobstore.concurrency import map_bounded, run_all
from blobstore.errors import BlobCorruptError, BlobNotFoundError, InvalidRequestError
from blobstore.tracing import traced
from engine.errors import DamagedError
from engine.local.digests import FileHasher, HashingSink
from engine.records.indexes import StoredSnapshot, has_ttl, read_index, read_stored_snapshot, settle_keys
from engine.records.log import ScopeLog, Unreadable
from engine.records.roots import list_prefix
from engine.runtime import NO_PROGRESS, Progress
from index.display import DisplayMixin, format_files, format_texts
from index.errors import FormatError, UnsafeNameError
from index.plan.commits import NOTHING_VOUCHES, Commit
from index.snapshot.contents import blobs_needed, files_of, new_blob_keys, paths_in
from index.snapshot.keys import BLOBS, INDEXES, LOG, commit_key, parse_log_key, parse_name_key
from index.snapshot.model import BlobKey, FileBlob, FileIndex, IndexReference, SnapshotIndex


class Level(StrEnum):
    """How closely to check."""

    EXISTENCE = "existence"
    CONTENT = "content"


class ProblemKind(StrEnum):
    """What is wrong; everything but a TTL is damage."""

    INDEX_DAMAGED = "index missing or damaged"
    BLOB_MISSING = "blob missing"
    BLOB_SHORT = "blob shorter than its files need"
    CONTENT_WRONG = "content does not match its hash"
    AT_RISK = "referenced, but its TTL is still set"
    UNREADABLE = "cannot be read: damaged, or of a newer tidemark"
    ADRIFT = "the job has records, and none of them counts: nothing vouches for them"

    @property
    def is_damage(self) -> bool:
        """Whether something is lost or altered; a TTL that can be removed is not damage."""
        return self is not ProblemKind.AT_RISK


class Problem(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One thing found, with the newest commit that it hurts."""

    kind: ProblemKind
    scope: str
    number: int
    task: str
    store: str
    key: str
    path: str = ""
    healed: bool = False


class VerifyReport(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What was checked and what was found."""

    json_properties: ClassVar = {"damaged": "damaged"}

    level: Level
    sample: float
    commits_count: int
    indexes_count: int
    blobs_count: int
    files_read: int
    bytes_read: int
    problems: tuple[Problem, ...]
    # Keys of open records that came after their lease and for which nothing vouches: no commits.
    late: tuple[str, ...] = ()

    @override
    def _figures(self) -> dict[str, str]:
        found = Counter(problem.kind.value for problem in self.problems)
        read = format_files(self.files_read, self.bytes_read) if self.level is Level.CONTENT else ""
        return {
            "verdict": self.verdict,
            **{kind: f"{number:,}" for kind, number in found.items()},
            "keys": format_texts(problem.key for problem in self.problems),
            NOTHING_VOUCHES: format_texts(self.late),
            "level": self.level.value,
            "commits": f"{self.commits_count:,}",
            "indexes": f"{self.indexes_count:,}",
            "blobs": f"{self.blobs_count:,}",
            "files read": read,
        }

    @property
    def verdict(self) -> str:
        """Whether all is well, as far as it was looked at."""
        if self.damaged:
            return "damaged"
        if self.level is Level.EXISTENCE:
            return "nothing is missing; contents were not read"
        return "no damage" if self.sample == 1 else "no damage in what was read"

    @property
    def damaged(self) -> bool:
        """Whether anything is lost or altered; a TTL that can be removed is not damage."""
        return any(p.kind.is_damage for p in self.problems)


def with_logs(report: VerifyReport, logs: Iterable[ScopeLog], unreadable: Iterable[Unreadable]) -> VerifyReport:
    """Add what is wrong with the logs themselves (C5), and with names and pins."""
    problems = list(report.problems)
    late: list[str] = []
    for log in logs:
        late += [commit_key(record.scope, record.number) for record in log.void]
        if log.is_adrift:
            problems.append(_place_of(late[-1]).problem(ProblemKind.ADRIFT, late[-1]))
        unreadable = [*unreadable, *log.unreadable]
    problems += [_place_of(one.key).problem(ProblemKind.UNREADABLE, one.key) for one in unreadable]
    return msgspec.structs.replace(report, problems=tuple(sorted(problems)), late=tuple(late))


def _place_of(key: str) -> "_Place":
    """Return what the key of a record says; that of a pin says nothing."""
    with suppress(UnsafeNameError):
        if key.startswith(LOG):
            place = parse_log_key(key)
            return _Place(str(place.scope), place.number, "", "")
        return _Place(str(parse_name_key(key)[0]), 0, "", "")
    return _Place("", 0, "", "")


class _Place(msgspec.Struct, frozen=True):
    scope: str
    number: int
    task: str
    store: str

    def problem(self, kind: ProblemKind, key: str, path: str = "", *, healed: bool = False) -> Problem:
        return Problem(kind=kind, key=key, path=path, healed=healed, **msgspec.structs.asdict(self))


# A file, and where it is: of each store, by its path, in the newest commit that has it.
_File = tuple[FileIndex, dict[tuple[str, str, str, str], _Place]]


@traced("verify")
async def verify(
    store: BlobStore,
    commits: Sequence[Commit],
    *,
    level: Level = Level.EXISTENCE,
    sample: float = 1.0,
    seed: int = 0,
    heal: bool = False,
    progress: Progress = NO_PROGRESS,
) -> VerifyReport:
    """Check commits against the store.

    Existence and sizes come from one listing of all blobs and indexes; with `Level.CONTENT` every file, or a sample,
    is read and hashed.

    TTLs come from the listing too, where it shows them. Where it does not, each index is asked for its own, and it
    vouches for the blobs that are new in it (T1), as does its commit for what it retains (T2); only if an index has a
    TTL are its new blobs asked. `Level.CONTENT` trusts no index, and asks every blob. Where TTLs cannot be removed
    they put nothing at risk, and nothing is asked.

    Requests: the lists of `list_prefix`; one GET per distinct index (more for deltas); where the lists do not show TTLs
    one `stat` per distinct index, and one for each new blob of an index that has a TTL; with `Level.CONTENT` one for
    each blob instead, and a GET for each blob of a file read. At most 16 at once.

    Args:
        sample: Share of the files to read, above 0 to 1, and at least one of each index; which ones follows from their
            names and `seed`.
        heal: Remove TTLs that are still set on what is referenced (T2).

    Raises:
        StoreError: As the store says; what is missing or damaged is reported, not raised.
    """
    listed = {blob.key: blob for prefix in (BLOBS, INDEXES) for blob in await list_prefix(store, prefix, lambda b: b)}
    places: dict[IndexReference, dict[tuple[str, str, str], _Place]] = {}
    for commit in sorted(commits, key=lambda c: (str(c.scope), -c.pointer.number)):
        scope, number = str(commit.scope), commit.pointer.number
        for s in commit.record.stores:
            of_index = places.setdefault(s.index, {})
            of_index.setdefault((scope, s.task, s.store), _Place(scope, number, s.task, s.store))
    verification = _Verification(store, listed, level)
    problems = await verification.read_indexes(places, sample, seed)
    problems += await verification.find_risks(heal=heal)
    problems += await verification.read_contents(progress)
    files = verification.files.values()
    return VerifyReport(
        level=level,
        sample=sample,
        commits_count=len(commits),
        indexes_count=len(places),
        blobs_count=len(verification.blobs),
        files_read=len(files),
        bytes_read=sum(file.metadata.size_bytes for file, _ in files),
        problems=tuple(sorted(problems)),
    )


class _Verification:
    """Three steps in this order; each returns its problems, and leaves to the next one what that has to look at."""

    def __init__(self, store: BlobStore, listed: Mapping[str, BlobInfo], level: Level) -> None:
        self._store = store
        self._listed = listed
        self._level = level
        # Blobs that are needed.
        self.blobs: set[str] = set()
        # Files to read; one that several commits share once.
        self.files: dict[tuple[bytes, tuple[FileBlob, ...]], _File] = {}
        # Indexes that carry a TTL, and blobs that may.
        self._indexes_at_risk: dict[str, _Place] = {}
        self._doubtful_blobs: dict[str, _Place] = {}
        self._indexes_asked: set[str] = set()

    async def read_indexes(
        self, places: Mapping[IndexReference, Mapping[tuple[str, str, str], _Place]], sample: float, seed: int
    ) -> list[Problem]:
        """Read each index, of the newest commit of each store that has it, and look for its blobs in the listing."""
        problems: list[Problem] = []

        async def read(item: tuple[IndexReference, Mapping[tuple[str, str, str], _Place]]) -> None:
            reference, of_index = item
            place = next(iter(of_index.values()))
            try:
                snapshot = await read_stored_snapshot(self._store, reference)
                await self._ask_indexes(snapshot, place)
            except (DamagedError, FormatError) as error:
                # It may be one that this is a delta on.
                damaged = error.subject if error.subject.startswith(INDEXES) else reference.key
                problems.append(place.problem(ProblemKind.INDEX_DAMAGED, damaged))
                return
            index = snapshot.index
            needs = blobs_needed(index)
            self.blobs.update(needs)
            for blob in filter(None, map(self._listed.get, needs)):
                # One whose TTL the listing does not show may be left to what vouches for it.
                if blob.expires_at_ms is not None if blob.ttl_known else self._level is Level.CONTENT:
                    self._doubtful_blobs.setdefault(blob.key, place)
            problems.extend(self._find_missing(index, needs, place))
            if self._level is Level.CONTENT:
                paths = {"/".join(parts): file for parts, file in files_of(index.dir)}
                for path in _choose(paths, sample, seed):
                    file = paths[path]
                    _, held = self.files.setdefault((file.blake3, file.blobs), (file, {}))
                    for store, one in of_index.items():
                        held[*store, path] = max(one, held.get((*store, path), one), key=attrgetter("number"))

        await run_all(read, places.items())
        return problems

    async def find_risks(self, *, heal: bool) -> list[Problem]:
        """Find what carries a TTL of all that is needed, and remove it if that is wanted."""
        blobs = self._doubtful_blobs
        have = await map_bounded(self._has_ttl, blobs)
        at_risk = {key: blobs[key] for key, has in zip(blobs, have, strict=True) if has} | self._indexes_at_risk
        gone = await _heal(self._store, at_risk) if heal else frozenset()
        problems: list[Problem] = []
        for key, place in at_risk.items():
            kind = ProblemKind.AT_RISK
            if key in gone:
                kind = ProblemKind.INDEX_DAMAGED if key.startswith(INDEXES) else ProblemKind.BLOB_MISSING
            problems.append(place.problem(kind, key, healed=heal and key not in gone))
        return problems

    async def read_contents(self, progress: Progress) -> list[Problem]:
        files = self.files.values()
        progress.total(files=len(files), bytes_=sum(file.metadata.size_bytes for file, _ in files))

        async def read(item: _File) -> list[Problem]:
            file, held = item
            right = await _reads_right(self._store, file, fresh=False)
            # Once more, over another connection, before it is called damage: a fault on the way is not one of the blob.
            right = right or await _reads_right(self._store, file, fresh=True)
            progress.add(files=1, bytes_=file.metadata.size_bytes)
            key = file.blobs[0].key if file.blobs else ""
            wrong = {} if right else held
            return [place.problem(ProblemKind.CONTENT_WRONG, key, path) for (*_, path), place in wrong.items()]

        return [*chain.from_iterable(await map_bounded(read, files))]

    async def _ask_indexes(self, snapshot: StoredSnapshot, place: _Place) -> None:
        """Ask an index and those that it is a delta on for a TTL; one with a TTL does not vouch for its new blobs.

        Raises:
            DamagedError: One of them has gone meanwhile.
        """
        for reference in snapshot.chain:
            if reference.key in self._indexes_asked:
                continue
            self._indexes_asked.add(reference.key)
            if await self._has_ttl(reference.key):
                self._indexes_at_risk[reference.key] = place
                own = snapshot.index if reference is snapshot.chain[0] else await read_index(self._store, reference)
                for key in sorted(new_blob_keys(own)):
                    self._doubtful_blobs.setdefault(key, place)

    async def _has_ttl(self, key: str) -> bool:
        blob = self._listed.get(key)
        if blob is None or not self._store.capabilities.removes_ttl:
            return False
        return blob.expires_at_ms is not None if blob.ttl_known else bool(await has_ttl(self._store, key))

    def _find_missing(self, index: SnapshotIndex, needs: Mapping[BlobKey, int], place: _Place) -> Iterable[Problem]:
        for key, size_bytes in needs.items():
            if key not in self._listed:
                yield place.problem(ProblemKind.BLOB_MISSING, key, next(paths_in(index, key), ""))
            elif self._listed[key].size_bytes < size_bytes:
                yield place.problem(ProblemKind.BLOB_SHORT, key, next(paths_in(index, key), ""))


async def _heal(store: BlobStore, keys: Iterable[str]) -> frozenset[str]:
    """Remove TTLs, of indexes last: one without a TTL vouches for its blobs (T1). Return keys that have gone since."""
    gone: set[str] = set()

    async def heal(key: str) -> None:
        try:
            await settle_keys(store, [BlobKey(key)])
        except DamagedError:
            gone.add(key)

    ordered = sorted(keys)
    for prefix in (BLOBS, INDEXES):
        await run_all(heal, [k for k in ordered if k.startswith(prefix)])
    return frozenset(gone)


def _choose(paths: Iterable[str], sample: float, seed: int) -> Iterable[str]:
    """Choose a share of the paths, and at least one: "no damage" is not to be said where nothing was read."""
    drawn = {path: zlib.crc32(path.encode(), seed & 0xFFFFFFFF) for path in paths}
    chosen = [path for path, number in drawn.items() if number < sample * 2**32]
    return chosen or ([min(drawn, key=lambda path: drawn[path])] if drawn else [])


async def _reads_right(store: BlobStore, file: FileIndex, *, fresh: bool) -> bool:
    whole = FileHasher()
    hashed = HashingSink(whole)
    if file.inline is not None:
        whole.update(file.inline)
    try:
        for blob in file.blobs:
            start, size_bytes = blob.blob_offset_bytes, blob.size_bytes
            await store.read_into(blob.key, hashed, start=start, size_bytes=size_bytes, fresh=fresh)
    except (BlobNotFoundError, BlobCorruptError, InvalidRequestError):
        return False
    return whole.digest == (file.blake3, file.crc32) and whole.size_bytes == file.metadata.size_bytes

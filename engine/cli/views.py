"""What the command line shows, as values: the stable form behind `--json`, and the words for people.

Every struct here is output of schema 1: fields are only ever added, sizes are in bytes, and a time stands there twice,
in milliseconds since the epoch (`…_ms`) and in ISO 8601, UTC.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from engine.text import table
from index.plan.commits import Commit
from index.snapshot.contents import files_of
from index.snapshot.delta import ComparedFile, IndexDifference
from index.snapshot.model import FileIndex, Pack, Scope, SnapshotIndex
from index.snapshot.records import NameRecord, StoreReference
from index.text import count, human_bytes, iso_time, printable, shortened

SCHEMA: Final = 1
OFFSETS_SHOWN_MAX: Final = 32
LINEAGE_SHOWN_MAX: Final = 3

# ---------------------------------------------------------------------- commits


class CommitView(msgspec.Struct, frozen=True, kw_only=True):
    """A commit in one line."""

    job: str
    # None: the job commits as a whole.
    commit_task: str | None
    number: int
    kind: str
    version: int
    committed_at_ms: int
    committed_at: str
    stores_count: int
    files_count: int
    size_bytes: int
    offsets: str
    names: tuple[str, ...] = ()
    write_id: str = ""


def view_commit(commit: Commit, names: Mapping[tuple[int, str], Sequence[str]] | None = None) -> CommitView:
    """A commit with the sums over its stores and the names that it has."""
    record = commit.record
    given = (names or {}).get((record.number, record.write_id), ())
    return CommitView(
        job=commit.scope.job,
        commit_task=commit.scope.task,
        number=record.number,
        # A name keeps the stores of a commit, not how it came about.
        kind=record.kind if commit.name is None else "named",
        version=record.version,
        committed_at_ms=commit.committed_at_ms,
        committed_at=iso_time(commit.committed_at_ms),
        stores_count=len(record.stores),
        files_count=sum(s.files_count for s in record.stores),
        size_bytes=sum(s.size_bytes for s in record.stores),
        offsets=record.offsets,
        names=tuple(sorted({*given, *([commit.name] if commit.name is not None else ())})),
        write_id=record.write_id,
    )


def names_by_commit(names: Iterable[NameRecord]) -> dict[tuple[int, str], list[str]]:
    """The names of each commit by its number and write id."""
    found: dict[tuple[int, str], list[str]] = {}
    for name in names:
        found.setdefault((name.source.number, name.source.write_id), []).append(name.name)
    return found


def committed_line(commit: Commit) -> str:
    """A commit just made, in one line."""
    view = view_commit(commit)
    held = f"{count(view.stores_count, 'store')}, {count(view.files_count, 'file')}, {human_bytes(view.size_bytes)}"
    left = "" if commit.settled else "; some TTLs are left to remove, the next commit or collection does it"
    return f"commit {view.number} of {printable(str(commit.scope))}, version {view.version}: {held}{left}"


def commits_table(commits: Sequence[CommitView]) -> list[str]:
    """Commits in the order given."""
    return table(
        ("number", "version", "time (UTC)", "kind", "stores", "files", "size", "offsets", "names"),
        [
            (
                str(c.number),
                str(c.version),
                c.committed_at,
                c.kind,
                str(c.stores_count),
                f"{c.files_count:,}",
                human_bytes(c.size_bytes),
                printable(shortened(c.offsets, OFFSETS_SHOWN_MAX)) or "-",
                printable(", ".join(c.names)) or "-",
            )
            for c in commits
        ],
        right=("number", "version", "stores", "files", "size"),
    )


class ScopeView(msgspec.Struct, frozen=True, kw_only=True):
    """What commits as one, with its newest commit."""

    job: str
    commit_task: str | None
    newest: CommitView | None
    # All its commits were closed for ever (`forget`), and nothing was committed since.
    forgotten: bool = False


def scopes_table(scopes: Sequence[ScopeView]) -> list[str]:
    """Scopes in the order given."""
    rows = []
    for scope in scopes:
        name = printable(str(Scope(scope.job, scope.commit_task)))
        if scope.newest is None:
            rows.append((name, "-", "-", "forgotten" if scope.forgotten else "-", "-", "-", "-"))
            continue
        c = scope.newest
        rows.append(
            (
                name,
                str(c.number),
                str(c.version),
                c.committed_at,
                str(c.stores_count),
                f"{c.files_count:,}",
                human_bytes(c.size_bytes),
            )
        )
    return table(
        ("job", "newest", "version", "time (UTC)", "stores", "files", "size"),
        rows,
        right=("newest", "version", "stores", "files", "size"),
    )


# ---------------------------------------------------------------------- one snapshot


class PackView(msgspec.Struct, frozen=True, kw_only=True):
    """A pack; what no present file of the index uses is dead."""

    key: str
    size_bytes: int
    live_bytes: int
    dead_bytes: int


class BlobRangeView(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run of a file's bytes stands."""

    key: str
    file_offset_bytes: int
    blob_offset_bytes: int
    size_bytes: int


class FileView(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a snapshot."""

    path: str
    size_bytes: int
    mode: str
    # By the clock of the machine that wrote the file.
    modified_at_ms: int
    modified_at: str
    # "empty", "inline" (in the index), "pack" or "blob".
    stored: str
    blake3: str
    blobs: tuple[BlobRangeView, ...] = ()
    sst_session_id: str | None = None
    sst_file_number: int | None = None


class LineageView(msgspec.Struct, frozen=True, kw_only=True):
    """One ancestor."""

    version: int
    unique_id: str


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    """One store as a commit names it, with what its index says."""

    task: str
    store: str
    version: int
    unique_id: str
    files_count: int
    size_bytes: int
    # The commit that brought this snapshot; later ones carry it over.
    since_number: int
    index_key: str
    index_bytes: int
    blobs_count: int
    # Bytes of the files in blobs and packs; `inline_bytes` more stand in the index.
    blobs_bytes: int
    inline_count: int
    inline_bytes: int
    dead_bytes: int
    packs: tuple[PackView, ...]
    # Oldest first; the last is what this snapshot was diffed against.
    lineage: tuple[LineageView, ...]
    files: tuple[FileView, ...] = ()


def view_store(reference: StoreReference, index: SnapshotIndex, *, files: bool = False) -> StoreView:
    """What a snapshot consists of; each file only if asked for."""
    found = [("/".join(path), file) for path, file in files_of(index.dir)]
    ranges: dict[str, set[tuple[int, int]]] = {}
    for _, file in found:
        for blob in file.blobs:
            ranges.setdefault(blob.key, set()).add((blob.blob_offset_bytes, blob.blob_offset_bytes + blob.size_bytes))
    covered = {key: _covered_bytes(spans) for key, spans in ranges.items()}
    packs = tuple(_view_pack(pack, covered.get(pack.key, 0)) for pack in index.packs)
    pack_keys = frozenset(pack.key for pack in index.packs)
    inline = [len(file.inline) for _, file in found if file.inline is not None]
    return StoreView(
        task=reference.task,
        store=reference.store,
        version=reference.version,
        unique_id=reference.unique_id,
        files_count=len(found),
        size_bytes=sum(file.metadata.size_bytes for _, file in found),
        since_number=reference.number,
        index_key=reference.index.key,
        index_bytes=reference.index.size_bytes,
        blobs_count=len(ranges),
        blobs_bytes=sum(covered.values()),
        inline_count=len(inline),
        inline_bytes=sum(inline),
        dead_bytes=sum(pack.dead_bytes for pack in packs),
        packs=packs,
        lineage=tuple(LineageView(version=item.version, unique_id=item.unique_id) for item in index.metadata.lineage),
        files=tuple(_view_file(path, file, pack_keys) for path, file in found) if files else (),
    )


def _covered_bytes(spans: Iterable[tuple[int, int]]) -> int:
    """How many bytes some ranges cover together; equal files of a pack may share theirs."""
    total = end = 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _view_pack(pack: Pack, live_bytes: int) -> PackView:
    return PackView(
        key=pack.key, size_bytes=pack.size_bytes, live_bytes=live_bytes, dead_bytes=max(0, pack.size_bytes - live_bytes)
    )


def _view_file(path: str, file: FileIndex, pack_keys: frozenset[str]) -> FileView:
    if file.inline is not None:
        stored = "inline"
    elif not file.blobs:
        stored = "empty"
    else:
        stored = "pack" if any(blob.key in pack_keys for blob in file.blobs) else "blob"
    return FileView(
        path=path,
        size_bytes=file.metadata.size_bytes,
        mode=f"{file.metadata.mode:04o}",
        modified_at_ms=file.metadata.modified_at_ns // 1_000_000,
        modified_at=iso_time(file.metadata.modified_at_ns // 1_000_000),
        stored=stored,
        blake3=file.blake3.hex(),
        blobs=tuple(
            BlobRangeView(
                key=blob.key,
                file_offset_bytes=blob.file_offset_bytes,
                blob_offset_bytes=blob.blob_offset_bytes,
                size_bytes=blob.size_bytes,
            )
            for blob in file.blobs
        ),
        sst_session_id=file.sst.session_id if file.sst else None,
        sst_file_number=file.sst.file_number if file.sst else None,
    )


def stores_table(stores: Sequence[StoreView]) -> list[str]:
    """Stores in the order given."""
    return table(
        ("task", "store", "version", "unique id", "since", "files", "size", "blobs", "packs", "dead"),
        [
            (
                printable(s.task),
                printable(s.store),
                str(s.version),
                printable(s.unique_id),
                str(s.since_number),
                f"{s.files_count:,}",
                human_bytes(s.size_bytes),
                f"{s.blobs_count:,}",
                f"{len(s.packs):,}",
                human_bytes(s.dead_bytes),
            )
            for s in stores
        ],
        right=("version", "since", "files", "size", "blobs", "packs", "dead"),
    )


def store_lines(store: StoreView) -> list[str]:
    """What the table has no room for: packs, lineage and, where asked for, files."""
    lines = [
        f"index    {store.index_key} ({human_bytes(store.index_bytes)})",
        f"blobs    {count(store.blobs_count, 'blob')} with {human_bytes(store.blobs_bytes)} of files",
        f"inline   {count(store.inline_count, 'file')} with {human_bytes(store.inline_bytes)} in the index itself",
    ]
    if store.lineage:
        chain = " -> ".join(
            f"{item.version}_{printable(item.unique_id)}" for item in store.lineage[-LINEAGE_SHOWN_MAX:]
        )
        lines.append(f"lineage  {'… -> ' if len(store.lineage) > LINEAGE_SHOWN_MAX else ''}{chain}")
    if store.packs:
        lines += [
            "",
            *table(
                ("pack", "size", "live", "dead"),
                [
                    (p.key, human_bytes(p.size_bytes), human_bytes(p.live_bytes), human_bytes(p.dead_bytes))
                    for p in store.packs
                ],
                right=("size", "live", "dead"),
            ),
        ]
    if store.files:
        lines += [
            "",
            *table(
                ("mode", "modified (UTC)", "size", "stored", "file"),
                [(f.mode, f.modified_at, human_bytes(f.size_bytes), f.stored, printable(f.path)) for f in store.files],
                right=("size",),
            ),
        ]
    return lines


# ---------------------------------------------------------------------- two snapshots


class ComparedFileView(msgspec.Struct, frozen=True, kw_only=True):
    """One file of either side; a size is null on the side that has none."""

    path: str
    before_bytes: int | None
    after_bytes: int | None
    mode_changed: bool = False


class StoreDifferenceView(msgspec.Struct, frozen=True, kw_only=True):
    """One store on two sides; a unique id is null on the side that has no such store."""

    task: str
    store: str
    before_unique_id: str | None
    after_unique_id: str | None
    added: tuple[ComparedFileView, ...] = ()
    removed: tuple[ComparedFileView, ...] = ()
    changed: tuple[ComparedFileView, ...] = ()
    unchanged_count: int = 0
    unchanged_bytes: int = 0


def view_difference(
    before: StoreReference | None, after: StoreReference | None, difference: IndexDifference
) -> StoreDifferenceView:
    """A difference with its paths as text; at least one side is there."""
    one = after or before
    return StoreDifferenceView(
        task=one.task if one else "",
        store=one.store if one else "",
        before_unique_id=before.unique_id if before else None,
        after_unique_id=after.unique_id if after else None,
        added=tuple(map(_view_compared, difference.added)),
        removed=tuple(map(_view_compared, difference.removed)),
        changed=tuple(map(_view_compared, difference.changed)),
        unchanged_count=len(difference.unchanged),
        unchanged_bytes=sum(file.after_bytes or 0 for file in difference.unchanged),
    )


def view_same_store(reference: StoreReference) -> StoreDifferenceView:
    """A store that the later commit carries over from the earlier one: nothing differs, and nothing has to be read."""
    return StoreDifferenceView(
        task=reference.task,
        store=reference.store,
        before_unique_id=reference.unique_id,
        after_unique_id=reference.unique_id,
        unchanged_count=reference.files_count,
        unchanged_bytes=reference.size_bytes,
    )


def _view_compared(file: ComparedFile) -> ComparedFileView:
    return ComparedFileView(
        path="/".join(file.path),
        before_bytes=file.before_bytes,
        after_bytes=file.after_bytes,
        mode_changed=file.mode_changed,
    )


def difference_lines(store: StoreDifferenceView) -> list[str]:
    """The files that differ, each with a sign and its sizes, and a line of sums."""
    signs = (("+", store.added), ("-", store.removed), ("~", store.changed))
    rows = [(sign, file, _sizes(file)) for sign, files in signs for file in files]
    width = max((len(sizes) for _, _, sizes in rows), default=0)
    lines = [f"{sign} {sizes.rjust(width)}  {printable(file.path)}" for sign, file, sizes in rows]
    lines.append(
        f"{len(store.added):,} added, {len(store.removed):,} removed, {len(store.changed):,} changed,"
        f" {store.unchanged_count:,} unchanged ({human_bytes(store.unchanged_bytes)})"
    )
    return lines


def _sizes(file: ComparedFileView) -> str:
    if file.before_bytes is None or file.after_bytes is None:
        return human_bytes(file.before_bytes or file.after_bytes or 0)
    mode = "mode, " if file.mode_changed else ""
    if file.before_bytes == file.after_bytes:
        return f"{mode}{human_bytes(file.after_bytes)}"
    return f"{mode}{human_bytes(file.before_bytes)} -> {human_bytes(file.after_bytes)}"

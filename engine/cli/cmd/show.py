"""The verbs that say what commits hold: `show`, `diff`, and `export` in the form of Samza, with the way back."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

import click
import msgspec

from blobstore.concurrency import map_bounded
from engine.cli import options as cli
from engine.cli.config import CommitChoice
from engine.cli.output import Column, CommitView, extend, names_by_commit, tabulate, view_commit
from engine.cli.session import INDEXES_IN_FLIGHT_MAX, Session, verb
from engine.errors import TargetError, UsageError
from engine.repository.repository import Repository
from engine.repository.samza import SamzaChoice, SamzaExport, SamzaImport, export_to_samza
from engine.repository.samza import import_samza as take_over
from engine.state.checkpoint_dir import store_url
from index.display import count, human_bytes, shortened
from index.snapshot import model
from index.snapshot.contents import files_of
from index.snapshot.delta import ComparedFile, diff_indexes

OFFSETS_LINE_MAX: Final = 400
LINEAGE_SHOWN_MAX: Final = 3


class PackView(msgspec.Struct, frozen=True, kw_only=True):
    """A pack; what no present file of the index uses is dead."""

    key: str
    size_bytes: int
    live_bytes: int
    dead_bytes: int


class FileView(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a snapshot."""

    path: str
    size_bytes: int
    mode: str
    # By the clock of the machine that wrote the file.
    modified_at_ms: int
    # "empty", "inline" (in the index), "pack" or "blob".
    stored: str
    blake3: str
    blobs: tuple[model.FileBlob, ...] = ()
    sst_session_id: str | None = None
    sst_file_number: int | None = None


class StoreView(model.StoreReference, frozen=True, kw_only=True):
    """One store as a commit names it, with what its index says."""

    json_omitted: ClassVar = ("index", "number")
    json_properties: ClassVar = {"since_number": "number", "index_key": "index.key", "index_bytes": "index.size_bytes"}

    blobs_count: int
    # Bytes of the files in blobs and packs; `inline_bytes` more are in the index.
    blobs_bytes: int
    inline_count: int
    inline_bytes: int
    dead_bytes: int
    packs: tuple[PackView, ...]
    # Oldest first; the last is what this snapshot was diffed against.
    lineage: tuple[model.LineageItem, ...]
    files: tuple[FileView, ...] = ()


class ShowView(msgspec.Struct, frozen=True, kw_only=True):
    """`show`."""

    json_omitted: ClassVar = ("record",)
    json_properties: ClassVar = {
        "predecessor_number": "record.predecessor.number",
        "source_number": "record.source.number",
        "source_job": "record.source_scope.job",
        "source_commit_task": "record.source_scope.task",
    }

    commit: CommitView
    record: model.CommitRecord
    stores: tuple[StoreView, ...]


@verb("show", "Show what a commit holds.", ShowView)
@click.argument("commit", type=cli.COMMIT, default="latest")
@cli.scope_options()
@cli.store_options(default=False)
@cli.option("--files", "Each file: size, mode, and where its bytes are.")
def show(
    session: Session, *, commit: CommitChoice, scope: model.Scope, task: str | None, store: str | None, files: bool
) -> None:
    """Show what a commit holds: stores, files, blobs, packs with their dead bytes, and lineage.

    COMMIT is latest (as when it is left out), a number, v8, 8_<uid>, @TIME or a name.

    Example: tidemark show -r file:///backups --job flights v8 --files
    """
    with session.open() as repository:
        found = session.find(scope, commit)
        names = names_by_commit(repository.names(scope))
        with repository.pinned(found, purpose="show"):
            references = session.choose_stores(found, task, store)

            async def view(reference: model.StoreReference) -> StoreView:
                return view_store(reference, await repository.asynchronous.read_index(reference.index), files=files)

            # A few indexes are in memory at a time.
            stores = repository.loop.run(map_bounded(view, references, in_flight_max=INDEXES_IN_FLIGHT_MAX))
    shown = ShowView(commit=view_commit(found, names), record=found.record, stores=tuple(stores))
    session.show(shown, _lines(shown))


def _lines(view: ShowView) -> list[str]:
    c, record = view.commit, view.record
    source = str(record.source_scope or record.scope)
    said = {
        "commit": f"{c.number} of {record.scope}, version {c.version}, {c.committed_at}, {c.kind}",
        "from": f"commit {record.source.number} of {source}" if record.source is not None else "",
        "after": f"commit {record.predecessor.number}" if record.predecessor is not None else "",
        "names": ", ".join(c.names),
        "offsets": shortened(c.offsets, OFFSETS_LINE_MAX),
    }
    lines = [*(f"{name:<9}{text}" for name, text in said.items() if text), "", *tabulate(view.stores, _STORES)]
    for store in view.stores:
        if len(view.stores) == 1 or store.files:
            title = [f"store {store.task}/{store.store}"] if len(view.stores) > 1 else []
            lines += ["", *title, *_store_lines(store)]
    return lines


def view_store(reference: model.StoreReference, index: model.SnapshotIndex, *, files: bool = False) -> StoreView:
    """Return what a snapshot consists of; each file only if asked for."""
    found = [("/".join(path), file) for path, file in files_of(index.dir)]
    ranges: dict[str, set[tuple[int, int]]] = {}
    for _, file in found:
        for blob in file.blobs:
            ranges.setdefault(blob.key, set()).add((blob.blob_offset_bytes, blob.blob_offset_bytes + blob.size_bytes))
    covered = {key: _covered_bytes(spans) for key, spans in ranges.items()}
    live = {pack.key: covered.get(pack.key, 0) for pack in index.packs}
    packs = tuple(
        PackView(key=p.key, size_bytes=p.size_bytes, live_bytes=n, dead_bytes=max(0, p.size_bytes - n))
        for p, n in zip(index.packs, live.values(), strict=True)
    )
    inline = [len(file.inline) for _, file in found if file.inline is not None]
    # The record says so, too; what is there is what counts.
    size_bytes = sum(file.metadata.size_bytes for _, file in found)
    reference = msgspec.structs.replace(reference, files_count=len(found), size_bytes=size_bytes)
    return extend(
        StoreView,
        reference,
        blobs_count=len(ranges),
        blobs_bytes=sum(covered.values()),
        inline_count=len(inline),
        inline_bytes=sum(inline),
        dead_bytes=sum(pack.dead_bytes for pack in packs),
        packs=packs,
        lineage=index.metadata.lineage,
        files=tuple(_view_file(path, file, live.keys()) for path, file in found) if files else (),
    )


def _covered_bytes(spans: Iterable[tuple[int, int]]) -> int:
    """Count the bytes that ranges cover together; equal files of a pack may share theirs."""
    total = end = 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _view_file(path: str, file: model.FileIndex, pack_keys: Collection[str]) -> FileView:
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
        stored=stored,
        blake3=file.blake3.hex(),
        blobs=file.blobs,
        sst_session_id=file.sst.session_id if file.sst else None,
        sst_file_number=file.sst.file_number if file.sst else None,
    )


_STORES: Final[Mapping[str, Column]] = {
    "task": "task",
    "store": "store",
    ">version": "version",
    "unique id": "unique_id",
    ">since": "number",
    ">files": "files_count",
    ">size": "size_bytes",
    ">blobs": "blobs_count",
    ">packs": lambda store: len(store.packs),
    ">dead": "dead_bytes",
}
_PACKS: Final = {"pack": "key", ">size": "size_bytes", ">live": "live_bytes", ">dead": "dead_bytes"}
_FILES: Final = {
    "mode": "mode",
    "modified (UTC)": "modified_at_ms",
    ">size": "size_bytes",
    "stored": "stored",
    "file": "path",
}


def _store_lines(store: StoreView) -> list[str]:
    """Format what the table does not show: packs, lineage and, where asked for, files."""
    lines = [
        f"index    {store.index.key} ({human_bytes(store.index.size_bytes)})",
        f"blobs    {count(store.blobs_count, 'blob')} with {human_bytes(store.blobs_bytes)} of files",
        f"inline   {count(store.inline_count, 'file')} with {human_bytes(store.inline_bytes)} in the index itself",
    ]
    if store.lineage:
        newest = [f"{item.version}_{item.unique_id}" for item in store.lineage[-LINEAGE_SHOWN_MAX:]]
        begin = "… -> " if len(store.lineage) > LINEAGE_SHOWN_MAX else ""
        lines.append(f"lineage  {begin}{' -> '.join(newest)}")
    if store.packs:
        lines += ["", *tabulate(store.packs, _PACKS)]
    if store.files:
        lines += ["", *tabulate(store.files, _FILES)]
    return lines


class StoreDifferenceView(msgspec.Struct, frozen=True, kw_only=True):
    """One store on two sides; a unique id is null on the side that has no such store."""

    task: str
    store: str
    before_unique_id: str | None
    after_unique_id: str | None
    added: tuple[ComparedFile, ...] = ()
    removed: tuple[ComparedFile, ...] = ()
    changed: tuple[ComparedFile, ...] = ()
    unchanged_count: int = 0
    unchanged_bytes: int = 0


class DiffView(msgspec.Struct, frozen=True, kw_only=True):
    """`diff`."""

    before: CommitView
    after: CommitView
    stores: tuple[StoreDifferenceView, ...]


@verb("diff", "Show which files differ between two commits.", DiffView)
@click.argument("a", type=cli.COMMIT)
@click.argument("b", type=cli.COMMIT, default="latest")
@cli.scope_options()
@cli.store_options(default=False)
def diff(
    session: Session, *, a: CommitChoice, b: CommitChoice, scope: model.Scope, task: str | None, store: str | None
) -> None:
    """Show which files differ between two commits: + added, - removed, ~ changed.

    A and B are each latest, a number, v8, 8_<uid>, @TIME or a name. Files are compared by size, content hash and
    mode; only indexes are read.

    Example: tidemark diff -r file:///backups --job flights 11 latest
    """
    with session.open() as repository:
        before, after = session.find(scope, a), session.find(scope, b)
        with repository.pinned(before, purpose="diff"), repository.pinned(after, purpose="diff"):
            ours = session.choose_stores(before, task, store, required=False)
            theirs = session.choose_stores(after, task, store, required=not ours)
            differences = repository.loop.run(_compare(repository.asynchronous, ours, theirs))
    view = DiffView(before=view_commit(before), after=view_commit(after), stores=differences)
    lines = [" -> ".join(f"commit {c.number} ({c.committed_at})" for c in (view.before, view.after))]
    for compared in differences:
        title = [f"store {compared.task}/{compared.store}"] if len(differences) > 1 else []
        lines += ["", *title, *_difference_lines(compared)]
    session.show(view, lines)


async def _compare(
    repository: Repository, ours: Sequence[model.StoreReference], theirs: Sequence[model.StoreReference]
) -> tuple[StoreDifferenceView, ...]:
    befores, afters = ({(s.task, s.store): s for s in stores} for stores in (ours, theirs))

    async def directory(reference: model.StoreReference | None) -> model.DirIndex:
        return (await repository.read_index(reference.index)).dir if reference is not None else model.DirIndex("")

    async def compare(place: tuple[str, str]) -> StoreDifferenceView:
        before, after = befores.get(place), afters.get(place)
        ids = (before.unique_id if before else None, after.unique_id if after else None)
        view = StoreDifferenceView(task=place[0], store=place[1], before_unique_id=ids[0], after_unique_id=ids[1])
        if before is not None and after is not None and before.index == after.index:
            # The later commit carries it over: nothing differs, and nothing has to be read.
            return msgspec.structs.replace(view, unchanged_count=after.files_count, unchanged_bytes=after.size_bytes)
        difference = diff_indexes(await directory(before), await directory(after))
        return msgspec.structs.replace(
            view,
            added=difference.added,
            removed=difference.removed,
            changed=difference.changed,
            unchanged_count=len(difference.unchanged),
            unchanged_bytes=sum(file.after_bytes or 0 for file in difference.unchanged),
        )

    places = sorted(befores.keys() | afters.keys())
    return tuple(await map_bounded(compare, places, in_flight_max=INDEXES_IN_FLIGHT_MAX))


def _difference_lines(store: StoreDifferenceView) -> list[str]:
    """Format the files that differ, each with a sign and its sizes, and a line of sums."""
    signs = (("+", store.added), ("-", store.removed), ("~", store.changed))
    rows = [(sign, file, _sizes(file)) for sign, files in signs for file in files]
    width = max((len(sizes) for _, _, sizes in rows), default=0)
    lines = [f"{sign} {sizes.rjust(width)}  {'/'.join(file.path)}" for sign, file, sizes in rows]
    lines.append(
        f"{len(store.added):,} added, {len(store.removed):,} removed, {len(store.changed):,} changed,"
        f" {store.unchanged_count:,} unchanged ({human_bytes(store.unchanged_bytes)})"
    )
    return lines


def _sizes(file: ComparedFile) -> str:
    if file.before_bytes is None or file.after_bytes is None:
        return human_bytes(file.before_bytes or file.after_bytes or 0)
    mode = "mode, " if file.mode_changed else ""
    if file.before_bytes == file.after_bytes:
        return f"{mode}{human_bytes(file.after_bytes)}"
    return f"{mode}{human_bytes(file.before_bytes)} -> {human_bytes(file.after_bytes)}"


class ExportView(SamzaExport, frozen=True, kw_only=True):
    """`export`."""

    json_omitted: ClassVar = ("index_json", "commit")
    json_properties: ClassVar = {"job": "commit.scope.job", "number": "commit.pointer.number"}

    output: Path


class ExportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which store of which commit, and where to."""

    scope: model.Scope
    task: str
    store: str
    commit: CommitChoice
    output: Path
    unpack: bool
    samza_job_id: str


@verb("export", "Write a snapshot's index in Samza's form.", ExportView)
@click.argument("commit", type=cli.COMMIT)
@click.argument("output", type=cli.FILE)
@cli.scope_options()
@cli.store_options(default=True)
@cli.option("--unpack", "Upload packed and inline files singly first, as job JOB.samza.")
@cli.option("--samza-job-id ID", "Samza's job id.", default="1")
def export(session: Session, options: ExportOptions) -> None:
    """Write the index of one store of a commit as Samza's blob-store backend would, to a new file OUTPUT.

    Its blob ids are keys of the repository. A name keeps what it refers to: `tidemark unname` gives it up.

    Example: tidemark export -r file:///backups --job flights latest index.json --unpack
    """
    if options.output.exists():
        raise TargetError("is there already", operation="export", subject=str(options.output), hint="name a new file")
    if not options.output.absolute().parent.is_dir():
        parent = str(options.output.parent)
        raise TargetError("there is no such directory", operation="export", subject=parent, hint="make it")
    with session.open() as repository:
        found = session.find(options.scope, options.commit)
        task, store, job_id = options.task, options.store, options.samza_job_id
        work = export_to_samza(
            repository.asynchronous, found, task=task, store=store, job_id=job_id, unpack=options.unpack
        )
        made = repository.loop.run(work)
    options.output.write_bytes(made.index_json)
    line = (
        f"{made.files_count} files of commit {made.commit.pointer.number} of {made.commit.scope} "
        f"as Samza's checkpoint {made.checkpoint_id}; kept by the name {made.name}"
    )
    session.show(extend(ExportView, made, output=options.output), [line])


@verb("import samza", "Make a commit of a snapshot of Samza's.", SamzaImport)
@click.argument("index", type=cli.FILE)
@click.argument("blobs", metavar="BLOBS")
@cli.option("--job -j JOB", "Job name.  [default: as in INDEX]")
@cli.option("--task TASK", "Task name.  [default: as in INDEX]")
@cli.option("--store STORE", "Store name.  [default: as in INDEX]")
@cli.option("-n --dry-run", "Read INDEX alone; show what would be imported.")
def import_samza(session: Session, index: Path, blobs: str, options: SamzaChoice) -> None:
    """Make a commit of a snapshot that Samza's blob-store backend has written.

    INDEX is its index, a file of JSON. BLOBS is where its blobs are, a directory or s3://bucket/prefix: each blob
    has its id as name. Every file is compared with the size and the CRC32 in INDEX before anything is committed.

    Example: tidemark import samza -r file:///backups index.json s3://samza-blobs/state
    """
    try:
        data = index.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(reason, operation="import", subject=str(index), hint="name a file with the index") from error
    with session.open() as repository:
        opening = session.opened_store(store_url(blobs), session.store_settings())
        with opening as store, session.progress("import") as progress:
            done = repository.loop.run(take_over(repository.asynchronous, data, store, options, progress=progress))
    where = f"{done.job}, task {done.task}, store {done.store}"
    held = f"{count(done.files_count, 'file')}, {human_bytes(done.size_bytes)}"
    checkpoint = f"Samza's checkpoint {done.checkpoint_id}"
    if done.commit is None:
        line = f"{checkpoint} would be imported as {where}: {held}"
    elif not done.is_new:
        line = f"{checkpoint} is commit {done.commit.pointer.number} of {where} already, nothing to do"
    else:
        line = f"{checkpoint} is commit {done.commit.pointer.number} of {where}: {held}, all verified"
    session.show(done, [line])

"""Laws of the two planners: every byte is accounted for, on the way out and on the way back."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from index.plan.backup import BackupLimits, BackupPlan, build_snapshot, plan_backup
from index.plan.restore import GAP_BYTES_FIRST, plan_restore
from index.snapshot.delta import apply_delta, make_delta
from index.snapshot.dir_diff import diff_dir
from index.snapshot.invariants import check_snapshot_index
from index.snapshot.keys import INDEXES
from index.snapshot.model import (
    DirIndex,
    FileBlob,
    FileIndex,
    IndexReference,
    LineageItem,
    Pack,
    SnapshotIndex,
    SnapshotMetadata,
    UniqueId,
)
from tests.property.index_strategies import trees
from tests.unit.index.builders import (
    Path,
    Tree,
    added_files,
    blob_key,
    content_hash,
    content_of,
    local_dir,
    present_files,
    read_back,
)

Blobs = dict[str, bytes]


@st.composite
def limits(draw: st.DrawFn) -> BackupLimits:
    blob = draw(st.integers(1, 30))
    pack = draw(st.integers(0, blob))
    return BackupLimits(
        blob_bytes_max=blob,
        pack_bytes_max=pack,
        pack_file_bytes_max=draw(st.integers(0, pack)),
        inline_file_bytes_max=draw(st.integers(0, 5)),
        inline_bytes_max=draw(st.integers(0, 12)),
    )


def carry_out(
    plan: BackupPlan, tree: Tree, session: str, store: Blobs
) -> tuple[dict[Path, FileIndex], tuple[Pack, ...]]:
    """Do what a plan says, with a dict as the store; each key is written once."""
    entries: dict[Path, FileIndex] = {}
    packs: list[Pack] = []

    def put(counter: int, data: bytes) -> None:
        assert data
        assert store.setdefault(blob_key(counter, session=session), data) is data

    def enter(path: Path, blobs: tuple[FileBlob, ...] = (), inline: bytes | None = None) -> None:
        assert path not in entries
        file = next(item.file for item in plan.files if item.path == path)
        assert file.blake3 is not None
        assert file.crc32 is not None
        entries[path] = FileIndex(file.name, file.metadata, file.blake3, file.crc32, blobs, inline)

    for item in plan.empty:
        enter(item.path)
    for item in plan.inline:
        enter(item.path, inline=content_of(tree, item.path))
    for pack in plan.packs:
        key, data = blob_key(pack.counter, session=session), b""
        for item in pack.files:
            enter(item.path, (FileBlob(key, 0, len(data), item.size_bytes),))
            data += content_of(tree, item.path)
        assert len(data) == pack.size_bytes
        put(pack.counter, data)
        packs.append(Pack(key, len(data)))
    for planned in plan.blobs:
        content = content_of(tree, planned.file.path)
        blobs = []
        for position, (start, size) in enumerate(planned.runs):
            run = content[start : start + size]
            put(planned.counter + position, run)
            hashed = content_hash(run) if len(planned.runs) > 1 else b""
            blobs.append(FileBlob(blob_key(planned.counter + position, session=session), start, 0, size, hashed))
        enter(planned.file.path, tuple(blobs))
    return entries, tuple(packs)


def backed_up(
    tree: Tree, version: int, previous: SnapshotIndex | None, sizes: BackupLimits, store: Blobs
) -> tuple[BackupPlan, SnapshotIndex]:
    local = local_dir(tree)
    plan = plan_backup(local, previous, diff_dir(local, previous.dir if previous else DirIndex("")), sizes)
    session = f"{version:020x}"
    uploaded, packs = carry_out(plan, tree, session, store)
    before = previous.metadata if previous else None
    base = LineageItem(before.version, before.unique_id) if before else None
    metadata = SnapshotMetadata(
        job="page-views", task="0", store="s", version=version, unique_id=UniqueId(f"u{version}"), base=base
    )
    return plan, build_snapshot(plan, metadata=metadata, session=session, uploaded=uploaded, packs=packs)


@given(trees, trees, limits())
@settings(deadline=None)
def test_plan_names_every_added_byte_once_and_nothing_else_but_what_is_packed_again(
    before: Tree, after: Tree, sizes: BackupLimits
) -> None:
    _, previous = backed_up(before, 1, None, sizes, {})
    local = local_dir(after)
    diff = diff_dir(local, previous.dir)
    plan = plan_backup(local, previous, diff, sizes)
    paths = [item.path for item in plan.files]
    assert len(paths) == len(set(paths))
    fresh = {item.path for item in plan.files if item.expected is None}
    assert fresh == {path for path, _ in added_files(diff)}
    again = [item for item in plan.files if item.expected is not None]
    assert (len(again), sum(item.size_bytes for item in again)) == (plan.files_repacked, plan.bytes_repacked)
    added_bytes = sum(file.metadata.size_bytes for _, file in added_files(diff))
    assert plan.upload_bytes + plan.inline_bytes == added_bytes + plan.bytes_repacked
    assert all(item.size_bytes <= sizes.inline_file_bytes_max for item in plan.inline)
    assert plan.inline_bytes <= sizes.inline_bytes_max
    for pack in plan.packs:
        assert len(pack.files) > 1
        assert pack.size_bytes <= sizes.pack_bytes_max
        assert all(item.size_bytes <= sizes.pack_file_bytes_max for item in pack.files)
    for planned in plan.blobs:
        runs = planned.runs
        assert [start for start, _ in runs] == [0, *[start + size for start, size in runs[:-1]]]
        assert sum(size for _, size in runs) == planned.file.size_bytes
        assert all(0 < size <= sizes.blob_bytes_max for _, size in runs)


@given(st.lists(st.tuples(trees, limits()), min_size=1, max_size=5))
@settings(deadline=None)
def test_any_history_of_backups_reads_back_and_keeps_every_rule(history: list[tuple[Tree, BackupLimits]]) -> None:
    store: Blobs = {}
    previous: SnapshotIndex | None = None
    for version, (tree, sizes) in enumerate(history, start=1):
        _, index = backed_up(tree, version, previous, sizes, store)
        check_snapshot_index(index)
        assert read_back(index.dir, store) == tree
        live = dict.fromkeys((pack.key for pack in index.packs), 0)
        for _, file in present_files(index.dir):
            for blob in file.blobs:
                if blob.key in live:
                    live[blob.key] += blob.size_bytes
        assert all(live[pack.key] * 2 >= pack.size_bytes for pack in index.packs)
        if previous is not None:
            reference = IndexReference(key=blob_key(version, prefix=INDEXES), sha256=b"0" * 32, size_bytes=1)
            assert apply_delta(previous, make_delta(previous, reference, 0, index)) == index
        previous = index


@given(trees, limits(), st.integers(1, 60), st.data())
@settings(deadline=None)
def test_restore_plan_names_every_file_once_and_its_ranges_hold_the_right_bytes(
    tree: Tree, sizes: BackupLimits, range_bytes: int, data: st.DataObject
) -> None:
    store: Blobs = {}
    _, index = backed_up(tree, 1, None, sizes, store)
    local = dict(added_files(diff_dir(local_dir(tree), DirIndex(""))))
    present = {path: file for path, file in local.items() if data.draw(st.booleans())}
    plan = plan_restore(index, present, range_bytes=range_bytes, owners_count=True)
    named = [file.path for file in plan.written] + [link.target.path for link in plan.links]
    assert sorted(named) == sorted(local)
    assert plan.files_count == len(local)
    assert plan.size_bytes == sum(file.metadata.size_bytes for file in local.values())
    reused = {reused.target.path for reused in (*plan.links, *plan.copies)}
    assert reused <= set(present)
    assert not reused & {file.path for file in plan.fetched}
    for run in plan.runs:
        assert run.size_bytes <= range_bytes
        fetched = store[run.key][run.start : run.start + run.size_bytes]
        assert len(fetched) == run.size_bytes
        ends = []
        for file in run.files:
            at = file.entry.blobs[0].blob_offset_bytes - run.start
            assert fetched[at : at + file.size_bytes] == content_of(tree, file.path)
            ends.append((at, at + file.size_bytes))
        assert all(start - end <= GAP_BYTES_FIRST for (_, end), (start, _) in pairwise(ends))
    for at, path in enumerate(plan.dirs):
        assert path[:-1] in {(), *plan.dirs[:at]}

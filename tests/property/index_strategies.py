"""Random names, trees and stored values. Every value that a strategy here draws is sound (design 0001, M)."""

from typing import Any

from hypothesis import strategies as st

from index.snapshot.codec import INDEX_BYTES_MAX
from index.snapshot.keys import BLOBS, INDEXES, upload_key
from index.snapshot.model import (
    SIZE_BYTES_MAX,
    Boundary,
    CommitPointer,
    CommitRecord,
    DirDelta,
    FileBlob,
    FileIndex,
    FileMetadata,
    IndexDelta,
    IndexReference,
    LineageItem,
    NameRecord,
    Pack,
    Pin,
    RepositoryRecord,
    Scope,
    ScopeLayout,
    SnapshotMetadata,
    SstIdentity,
    StoreReference,
    UniqueId,
    WriteId,
)
from tests.unit.index.builders import Tree

alphabets = st.characters(exclude_categories=["Cs"], exclude_characters="/\\\0")
file_names = (
    st.sampled_from(["CURRENT", "000012.sst", "MANIFEST-000005", "LOG", "a", "b", "naïve", "...", "~41"])
    | st.text(alphabets, min_size=1, max_size=60)
).filter(lambda name: name not in {".", ".."})
# Nine characters of four bytes make a component of 108, so that a job and a task fit one scope together.
key_names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
contents = st.binary(max_size=24) | st.sampled_from([b"", b"same", b"MANIFEST-000005\n"])

trees: st.SearchStrategy[Tree] = st.recursive(
    st.dictionaries(file_names, contents, max_size=6),
    lambda below: st.dictionaries(file_names, contents | below, max_size=5),
    max_leaves=12,
)

sessions = st.text("0123456789abcdef", min_size=20, max_size=20)
modes = st.integers(0, 0o7777)
hashes = st.binary(min_size=32, max_size=32)
naturals = st.integers(0, 5) | st.integers(0, SIZE_BYTES_MAX)
scopes = st.builds(Scope, key_names, st.none() | key_names)
keys = st.builds(upload_key, st.just(BLOBS), scopes, sessions, st.integers(0, 2**32))
index_keys = st.builds(upload_key, st.just(INDEXES), scopes, sessions, st.integers(0, 2**32))
unique_ids = st.builds(UniqueId, texts)
references = st.builds(IndexReference, key=index_keys, sha256=hashes, size_bytes=st.integers(1, INDEX_BYTES_MAX))
lineage_items = st.builds(LineageItem, naturals, unique_ids)
pointers = st.builds(CommitPointer, st.integers(1, 2**40), st.builds(WriteId, texts))


@st.composite
def files(draw: st.DrawFn) -> FileIndex:
    """A file of any placement; sizes up to 63 bits."""
    runs = draw(st.lists(st.integers(1, 2**40), max_size=3))
    inline = draw(st.binary(min_size=1, max_size=9)) if not runs and draw(st.booleans()) else None
    blobs: list[FileBlob] = []
    for size in runs:
        start = sum(blob.size_bytes for blob in blobs)
        blobs.append(FileBlob(draw(keys), start, 0, size, draw(hashes) if len(runs) > 1 else b""))
    metadata = FileMetadata(
        len(inline) if inline else sum(runs),
        draw(modes),
        draw(st.integers(-(2**63), 2**63 - 1)),
        draw(naturals),
        draw(texts | st.just("")),
        draw(texts | st.just("")),
    )
    sst = draw(st.none() | st.builds(SstIdentity, texts, naturals))
    return FileIndex(
        draw(file_names), metadata, draw(hashes), draw(st.integers(0, 2**32 - 1)), tuple(blobs), inline, sst
    )


def unique(values: st.SearchStrategy[Any], by: str, size_max: int = 4) -> st.SearchStrategy[tuple[Any, ...]]:
    """Tuples of values with ascending and different `by`."""
    return st.lists(values, max_size=size_max, unique_by=lambda value: getattr(value, by)).map(
        lambda drawn: tuple(sorted(drawn, key=lambda value: getattr(value, by)))
    )


@st.composite
def snapshot_metadata(draw: st.DrawFn, *, with_base: bool) -> SnapshotMetadata:
    versions = sorted(draw(st.sets(st.integers(0, 2**40), min_size=1, max_size=5)))
    lineage = tuple(LineageItem(version, draw(unique_ids)) for version in versions[:-1])
    ancestors = st.just(lineage[-1]) | lineage_items if lineage else lineage_items
    base = draw(ancestors if with_base else st.none() | ancestors)
    return SnapshotMetadata(
        job=draw(key_names),
        task=draw(key_names),
        store=draw(texts),
        version=versions[-1],
        unique_id=draw(unique_ids),
        base=base,
        lineage=lineage,
        created_at_ms=draw(naturals),
    )


@st.composite
def dir_deltas(draw: st.DrawFn, name: str = "", depth: int = 0) -> DirDelta:
    names = draw(st.lists(file_names, unique=True, max_size=3)) if depth < 3 else []
    taken = set(names)
    set_files = tuple(file for file in draw(unique(files(), "name", 3)) if file.name not in taken)
    taken |= {file.name for file in set_files}
    free = file_names.filter(lambda value: value not in taken)
    return DirDelta(
        name,
        set_files,
        tuple(sorted(draw(st.sets(free, max_size=3)))),
        tuple(draw(dir_deltas(sub, depth + 1)) for sub in sorted(names)),
        tuple(sorted(draw(st.sets(free, max_size=3)))),
        draw(st.none() | modes),
    )


@st.composite
def index_deltas(draw: st.DrawFn) -> IndexDelta:
    packs = draw(unique(st.builds(Pack, keys, st.integers(1, 2**40)), "key"))
    dropped = draw(st.sets(keys, max_size=3)) - {pack.key for pack in packs}
    return IndexDelta(
        metadata=draw(snapshot_metadata(with_base=True)),
        session=draw(sessions),
        base=draw(references),
        depth=draw(st.integers(1, 16)),
        dir=draw(dir_deltas()),
        packs_set=packs,
        packs_dropped=tuple(sorted(dropped)),
    )


@st.composite
def store_references(draw: st.DrawFn, *, task: str | None, number_max: int) -> StoreReference:
    return StoreReference(
        task=draw(key_names) if task is None else task,
        store=draw(texts),
        version=draw(naturals),
        unique_id=draw(unique_ids),
        index=draw(references),
        number=draw(st.integers(1, number_max)),
        files_count=draw(naturals),
        size_bytes=draw(naturals),
    )


def stores_of(scope: Scope, number_max: int) -> st.SearchStrategy[tuple[StoreReference, ...]]:
    one = store_references(task=scope.task, number_max=number_max)
    return st.lists(one, max_size=3, unique_by=lambda s: (s.task, s.store)).map(
        lambda drawn: tuple(sorted(drawn, key=lambda s: (s.task, s.store)))
    )


@st.composite
def commits(draw: st.DrawFn) -> CommitRecord:
    number = draw(st.integers(1, 2**40))
    earlier = (
        st.none() if number == 1 else st.builds(CommitPointer, st.integers(1, number - 1), st.builds(WriteId, texts))
    )
    predecessor, base, source = draw(earlier), draw(earlier), draw(earlier)
    kind = draw(st.sampled_from(["commit", "fork"] if source is None else ["commit", "rewind", "fork"]))
    scope = draw(scopes)
    return CommitRecord(
        scope=scope,
        number=number,
        write_id=draw(st.builds(WriteId, texts)),
        kind=kind,  # type: ignore[arg-type]
        predecessor=predecessor,
        base=None if base == predecessor else base,
        source={"commit": None, "rewind": source, "fork": draw(pointers)}[kind],
        source_scope=draw(scopes) if kind == "fork" else None,
        version=draw(naturals),
        offsets=draw(texts | st.just("")),
        layout=draw(st.builds(ScopeLayout, tasks_count=naturals, key_hash=texts, key_columns=st.tuples(texts))),
        stores=draw(stores_of(scope, number)),
        valid_until_ms=draw(naturals),
        predecessor_committed_at_ms=draw(naturals),
        settled_through=draw(st.integers(0, number - 1)),
    )


@st.composite
def boundaries(draw: st.DrawFn) -> Boundary:
    number = draw(st.integers(1, 2**40))
    kept = draw(st.sets(st.integers(1, number), max_size=5))
    return Boundary(
        scope=draw(scopes),
        number=number,
        kept=tuple(CommitPointer(n, draw(st.builds(WriteId, texts))) for n in sorted(kept)),
    )


@st.composite
def pins(draw: st.DrawFn) -> Pin:
    scope, source = draw(scopes), draw(pointers)
    return Pin(
        id=draw(sessions),
        scope=scope,
        source=source,
        duration_ms=draw(naturals),
        purpose=draw(texts | st.just("")),
        stores=draw(stores_of(scope, source.number)),
    )


@st.composite
def name_records(draw: st.DrawFn) -> NameRecord:
    scope, source = draw(scopes), draw(pointers)
    return NameRecord(
        scope=scope,
        name=draw(key_names),
        source=source,
        version=draw(naturals),
        committed_at_ms=draw(naturals),
        stores=draw(stores_of(scope, source.number)),
        released=draw(st.booleans()),
    )


repositories = st.integers(1, 2**40).flatmap(
    lambda ttl_ms: st.builds(
        RepositoryRecord,
        id=texts,
        ttl_ms=st.just(ttl_ms),
        margin_ms=st.integers(0, ttl_ms - 1),
        collection_period_ms=st.integers(1, 2**40),
    )
)

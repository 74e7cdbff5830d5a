"""Makes the golden files of the stored form: run once for each format version, never again for an old one.

    python -m tests.golden.make_golden tests/golden/v2

The values are written out in full, so that what the files must decode to can be read here. A file that exists is not
written again: anyone who changes a value below makes the test fail, and must not.
"""

import sys
from pathlib import Path

from index.snapshot.codec import encode_index, encode_record
from index.snapshot.model import (
    BlobKey,
    Boundary,
    CommitPointer,
    CommitRecord,
    DirDelta,
    DirIndex,
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
    SnapshotIndex,
    SnapshotMetadata,
    SstIdentity,
    StoredIndex,
    StoredRecord,
    StoreReference,
    UniqueId,
    WriteId,
)

GIB = 1024**3

SNAPSHOT = SnapshotIndex(
    metadata=SnapshotMetadata(
        job="page-views",
        task="Partition 7",
        store="counts",
        version=42,
        unique_id=UniqueId("5b1f7b4e-93a1-4c6e-8d2f-0a9be1c3d4f5"),
        base=LineageItem(41, UniqueId("u-41")),
        lineage=(LineageItem(40, UniqueId("u-40")), LineageItem(41, UniqueId("u-41"))),
        created_at_ms=1_795_239_633_975,
    ),
    session="00112233445566778899",
    dir=DirIndex(
        "",
        (
            # One blob, an SST with an identity.
            FileIndex(
                "000012.sst",
                FileMetadata(100_000, 0o644, 1_795_239_632_681_000_123, 1_795_239_632_679, "spark", "hadoop"),
                bytes(range(32)),
                22_023_663,
                (FileBlob(BlobKey("blobs/61/page-views@Partition~207/00112233445566778899-000001"), 0, 0, 100_000),),
                None,
                SstIdentity("RCQT39JY6E1U4N923P4Y", 12),
            ),
            # Two blobs, the second beyond 4 GiB.
            FileIndex(
                "000013.sst",
                FileMetadata(6 * GIB, 0o600, -1),
                bytes(range(32, 64)),
                2**32 - 1,
                (
                    FileBlob(
                        BlobKey("blobs/db/page-views@Partition~207/00112233445566778899-000002"),
                        0,
                        0,
                        5 * GIB,
                        b"\x01" * 32,
                    ),
                    FileBlob(
                        BlobKey("blobs/4d/page-views@Partition~207/00112233445566778899-000003"),
                        5 * GIB,
                        0,
                        GIB,
                        b"\x02" * 32,
                    ),
                ),
            ),
            # Inline.
            FileIndex("CURRENT", FileMetadata(16, 0o640, 0), b"\x03" * 32, 4_102_469_562, (), b"MANIFEST-000005\n"),
            # In a pack, from an earlier session.
            FileIndex(
                "OPTIONS-000007",
                FileMetadata(5000, 0o644, 1),
                b"\x04" * 32,
                1_883_482_350,
                (FileBlob(BlobKey("blobs/2d/page-views@Partition~207/aabbccddeeff00112233-00000a"), 0, 700, 5000),),
            ),
            # Empty.
            FileIndex("empty.log", FileMetadata(0, 0o644, 2), b"\x05" * 32, 0),
        ),
        (
            DirIndex(
                "archive",
                (),
                (DirIndex("deep", (FileIndex("naïve 日本.txt", FileMetadata(0, 0o444, 3), b"\x06" * 32, 0),)),),
            ),
            DirIndex("emptydir"),
        ),
        (FileIndex("CURRENT", FileMetadata(16, 0o640, 0), b"\x07" * 32, 1, (), b"MANIFEST-000004\n"),),
        (DirIndex("old", (FileIndex("x", FileMetadata(0, 0o644, 4), b"\x08" * 32, 0),)),),
    ),
    packs=(Pack(BlobKey("blobs/2d/page-views@Partition~207/aabbccddeeff00112233-00000a"), 6000),),
)

REFERENCE = IndexReference(
    key=BlobKey("indexes/ee/page-views@Partition~207/00112233445566778899-000004"), sha256=b"\x09" * 32, size_bytes=1234
)

DELTA = IndexDelta(
    metadata=SnapshotMetadata(
        job="page-views",
        task="Partition 7",
        store="counts",
        version=43,
        unique_id=UniqueId("u-43"),
        base=LineageItem(42, UniqueId("5b1f7b4e-93a1-4c6e-8d2f-0a9be1c3d4f5")),
    ),
    session="99887766554433221100",
    base=REFERENCE,
    depth=2,
    dir=DirDelta(
        "",
        (FileIndex("CURRENT", FileMetadata(16, 0o640, 5), b"\x0a" * 32, 7, (), b"MANIFEST-000006\n"),),
        ("000012.sst", "OPTIONS-000007"),
        (DirDelta("archive", (), (), (), ("deep",)), DirDelta("new")),
        ("emptydir",),
    ),
    packs_set=(Pack(BlobKey("blobs/ad/page-views@Partition~207/99887766554433221100-000001"), 77),),
    packs_dropped=(BlobKey("blobs/2d/page-views@Partition~207/aabbccddeeff00112233-00000a"),),
)

STORES = (
    StoreReference(
        task="Partition 7",
        store="counts",
        version=42,
        unique_id=UniqueId("5b1f7b4e-93a1-4c6e-8d2f-0a9be1c3d4f5"),
        index=REFERENCE,
        number=17,
        files_count=6,
        size_bytes=6 * GIB + 105_016,
    ),
)

RECORDS: dict[str, StoredRecord] = {
    "commit": CommitRecord(
        scope=Scope("page-views"),
        number=17,
        write_id=WriteId("3f2a9d5c7b1e4f60"),
        predecessor=CommitPointer(15, WriteId("aaaa")),
        base=CommitPointer(14, WriteId("bbbb")),
        version=42,
        offsets='{"topic": {"0": 4711}}',
        layout=ScopeLayout(tasks_count=4, key_hash="spark-hash-v1", key_columns=("carrier", "flight")),
        stores=STORES,
        valid_until_ms=1_795_243_233_975,
        predecessor_committed_at_ms=1_795_239_000_000,
        settled_through=15,
    ),
    "rewind": CommitRecord(
        scope=Scope("page-views", "Partition 7"),
        number=18,
        write_id=WriteId("rewind"),
        kind="rewind",
        predecessor=CommitPointer(17, WriteId("3f2a9d5c7b1e4f60")),
        source=CommitPointer(3, WriteId("cccc")),
        stores=STORES,
        valid_until_ms=2**63 - 1,
    ),
    "fork": CommitRecord(
        scope=Scope("page-views-b"),
        number=1,
        write_id=WriteId("fork"),
        kind="fork",
        source=CommitPointer(99, WriteId("dddd")),
        source_scope=Scope("page-views"),
        valid_until_ms=0,
    ),
    "boundary": Boundary(
        scope=Scope("page-views"),
        number=15,
        kept=(CommitPointer(3, WriteId("cccc")), CommitPointer(15, WriteId("aaaa"))),
    ),
    "pin": Pin(
        id="0123456789abcdef0123",
        scope=Scope("page-views"),
        source=CommitPointer(17, WriteId("3f2a9d5c7b1e4f60")),
        duration_ms=600_000,
        purpose="restore",
        stores=STORES,
    ),
    "name": NameRecord(
        scope=Scope("page-views"),
        name="before the migration",
        source=CommitPointer(17, WriteId("3f2a9d5c7b1e4f60")),
        version=42,
        committed_at_ms=1_795_239_634_000,
        stores=STORES,
        valid_until_ms=1_795_243_234_000,
        offsets='{"topic": 4711}',
        layout=ScopeLayout(tasks_count=4, key_hash="spark-hash-v1", key_columns=("user bigint",)),
    ),
    "repository": RepositoryRecord(
        id="0c5a2d3e4f5061728394", ttl_ms=604_800_000, margin_ms=3_600_000, collection_period_ms=86_400_000
    ),
}

# A state store's directory, backed up after a query was taken back: its lineage is Spark's, and its base is not part of
# it. Readers from before design 0004 refuse it.
STATE = SnapshotIndex(
    metadata=SnapshotMetadata(
        job="page-views",
        task="0",
        store="default",
        version=7,
        unique_id=UniqueId("1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed"),
        base=LineageItem(14, UniqueId("9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d")),
        lineage=(
            LineageItem(5, UniqueId("6ec0bd7f-11c0-43da-975e-2a8ad9ebae0b")),
            LineageItem(6, UniqueId("3f333df6-90a4-4fda-8dd3-9485d27cee36")),
        ),
    ),
    session="0f1e2d3c4b5a69788796",
    dir=DirIndex(
        "", (FileIndex("7_1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed.changelog", FileMetadata(0, 0o644, 6), b"\x0b" * 32, 0),)
    ),
)

# Directories with modes, one without, and a delta that changes nothing else. Readers from before that ignore them.
MODES = SnapshotIndex(
    metadata=SnapshotMetadata(job="page-views", task="0", store="default", version=1, unique_id=UniqueId("u-1")),
    session="0f1e2d3c4b5a69788796",
    dir=DirIndex(
        "",
        (FileIndex("empty.log", FileMetadata(0, 0o644, 6), b"\x0c" * 32, 0),),
        (DirIndex("archive", (), (DirIndex("deep", mode=0o500),), mode=0o2750), DirIndex("unknown")),
        (),
        (DirIndex("old", mode=0),),
        0o700,
    ),
)

MODES_DELTA = IndexDelta(
    metadata=SnapshotMetadata(
        job="page-views",
        task="0",
        store="default",
        version=2,
        unique_id=UniqueId("u-2"),
        base=LineageItem(1, UniqueId("u-1")),
    ),
    session="99887766554433221100",
    base=REFERENCE,
    depth=1,
    dir=DirDelta("", (), (), (DirDelta("archive", mode=0o750), DirDelta("new", mode=0o7777)), (), 0o700),
)

INDEXES: dict[str, StoredIndex] = {
    "snapshot": SNAPSHOT,
    "delta": DELTA,
    "state": STATE,
    "modes": MODES,
    "modes-delta": MODES_DELTA,
}


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: encode_index(index) for name, index in INDEXES.items()}
    stored |= {name: encode_record(record) for name, record in RECORDS.items()}
    for name, data in stored.items():
        with (directory / f"{name}.bin").open("xb") as file:
            file.write(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

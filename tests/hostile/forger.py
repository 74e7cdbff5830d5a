"""Repositories written by hand: every object is whole by its own checksum, and what it says is up to the attacker.

Nothing here calls a check of ours: values are encoded as they are, and sealed (architecture, H1).
"""

import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.local.digests import hash_bytes
from index.snapshot.codec import KIND_BOUNDARY, KIND_COMMIT, KIND_INDEX, KIND_NAME, KIND_PIN, seal
from index.snapshot.keys import INDEXES, upload_key
from index.snapshot.model import (
    NEVER_MS,
    BlobKey,
    CommitRecord,
    DirDelta,
    DirIndex,
    FileBlob,
    FileIndex,
    FileMetadata,
    IndexDelta,
    IndexReference,
    LineageItem,
    Scope,
    SnapshotIndex,
    SnapshotMetadata,
    StoreReference,
    UniqueId,
    WriteId,
)
from tests.integration.conftest import Shell

SCOPE: Final = Scope("flights")
SESSION: Final = "f" * 20
_CAP: Final = 1 << 31
_DATA: Final = b"forged"


def sealed(kind: bytes, value: Any) -> bytes:
    """An envelope around any value that MessagePack can encode."""
    return seal(kind, msgspec.msgpack.encode(value), bytes_max=_CAP, raw_bytes_max=_CAP)


def a_file(name: str, **changed: Any) -> FileIndex:
    """A file whose bytes are in the index itself, unless they are changed."""
    digest = hash_bytes(_DATA)
    entry = FileIndex(name, FileMetadata(len(_DATA), 0o644, 1), digest.blake3, digest.crc32, inline=_DATA)
    return msgspec.structs.replace(entry, **changed)


def in_blob(name: str, key: str, *, offset: int = 0, size_bytes: int = len(_DATA)) -> FileIndex:
    """A file that is said to be in a blob."""
    entry = a_file(name, inline=None, blobs=(FileBlob(BlobKey(key), 0, offset, size_bytes),))
    return msgspec.structs.replace(entry, metadata=FileMetadata(size_bytes, 0o644, 1))


def metadata(version: int = 1, **changed: Any) -> SnapshotMetadata:
    """Of the forged store."""
    found = SnapshotMetadata(
        job=SCOPE.job, task="0", store="default", version=version, unique_id=UniqueId(f"u-{version}")
    )
    return msgspec.structs.replace(found, **changed)


def an_index(*files: FileIndex, **changed: Any) -> SnapshotIndex:
    """A snapshot of some files at its root."""
    return msgspec.structs.replace(
        SnapshotIndex(metadata=metadata(), session=SESSION, dir=DirIndex("", files)), **changed
    )


class Forger:
    """A repository in a directory, and an attacker who can write to it.

    Attributes:
        root: The repository's directory.
        target: Where a victim restores to.
    """

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        shell.run("init")
        self.root = shell.directory / "repository"
        self.target = shell.directory / "target"
        self._counter = 0

    def put(self, key: str, data: bytes) -> Path:
        """Write an object under any key that the directory takes."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def put_index(self, index: Any) -> IndexReference:
        """Write an index, or anything in the form of one, past every check that a writer makes."""
        return self.put_bytes(sealed(KIND_INDEX, index))

    def put_bytes(self, data: bytes) -> IndexReference:
        """Write bytes where an index is; the reference is right about them."""
        self._counter += 1
        key = upload_key(INDEXES, SCOPE, SESSION, self._counter)
        self.put(key, data)
        return IndexReference(key=key, sha256=hashlib.sha256(data).digest(), size_bytes=len(data))

    def commit(self, index: Any, *, number: int = 1, **changed: Any) -> CommitRecord:
        """Write a commit record that names an index, given or by its reference; fields of the record may be changed."""
        reference = index if isinstance(index, IndexReference) else self.put_index(index)
        store = StoreReference(
            task="0",
            store="default",
            version=1,
            unique_id=UniqueId("u-1"),
            index=reference,
            number=1,
            files_count=1,
            size_bytes=len(_DATA),
        )
        record = CommitRecord(
            scope=SCOPE,
            number=number,
            write_id=WriteId(f"w-{number}"),
            version=1,
            valid_until_ms=NEVER_MS,
            stores=(store,),
        )
        record = msgspec.structs.replace(record, **changed)
        self.put_record(record)
        return record

    def put_record(self, record: Any, *, key: str = "") -> None:
        """Write a record where the first one is, unless it says where."""
        number = record.number if isinstance(record, CommitRecord) and record.number > 0 else 1
        self.put(key or f"log/flights/{number:020d}.commit", sealed(KIND_COMMIT, record))

    def put_boundary(self, value: Any, *, number: int = 1) -> None:
        """Write a boundary."""
        self.put(f"log/flights/{number:020d}.boundary", sealed(KIND_BOUNDARY, value))

    def put_pin(self, value: Any, *, name: str = "a" * 20) -> None:
        """Write a pin."""
        self.put(f"pins/{name}", sealed(KIND_PIN, value))

    def put_name(self, value: Any, *, name: str = "kept") -> None:
        """Write a naming."""
        self.put(f"names/flights/{name}/{'b' * 20}", sealed(KIND_NAME, value))

    def everything(self) -> dict[str, bytes]:
        """Every file of the shell's directory but of the target, links as what they say."""
        found: dict[str, bytes] = {}
        for path in sorted(self.shell.directory.rglob("*")):
            name = str(path.relative_to(self.shell.directory))
            if path.is_symlink():
                found[name] = str(path.readlink()).encode()
            elif path.is_file():
                found[name] = path.read_bytes()
        return found


def a_delta(base: IndexReference, *, depth: int, version: int = 1) -> IndexDelta:
    """A delta that changes nothing, on any base."""
    return IndexDelta(
        metadata=metadata(version, base=LineageItem(version, UniqueId(f"u-{version}"))),
        session=SESSION,
        base=base,
        depth=depth,
        dir=DirDelta(""),
    )

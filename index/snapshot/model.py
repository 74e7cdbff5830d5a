"""The values that a repository stores: snapshots and deltas of them; commits, boundaries, pins, names, and itself.

Every struct here is frozen and is stored bytes: fields are only ever added at the end and with a default, and a
field through which a blob becomes reachable needs a new format version (design 0001, F6). Sizes and offsets are in
bytes and fit 63 bits; times are milliseconds since the epoch by the store's clock unless the name says otherwise.
"""

from typing import Literal, NewType

import msgspec

BlobKey = NewType("BlobKey", str)
UniqueId = NewType("UniqueId", str)
WriteId = NewType("WriteId", str)
# The names that lead from the root of a directory to a file or a sub-directory, its own name last.
FilePath = tuple[str, ...]

SIZE_BYTES_MAX = 2**63 - 1
# A time that no clock reaches.
NEVER_MS = SIZE_BYTES_MAX
# How long a pin lasts after its last write, without the margin that writers add.
PIN_DURATION_MS = 3_600_000


class FileBlob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of bytes of one file, and where in which blob it is.

    Several files may be in one blob (a pack), and one file may be spread over several blobs.
    """

    key: BlobKey
    file_offset_bytes: int
    blob_offset_bytes: int
    size_bytes: int
    # Hash of exactly these bytes; empty when the file has this one blob only, whose hash is the file's.
    blake3: bytes = b""


class FileMetadata(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the file system said of a file. Only `size_bytes` and `mode` ever take part in a decision."""

    size_bytes: int
    # Permission bits, 0o000 to 0o7777.
    mode: int
    # By the clock of the machine that wrote the file.
    modified_at_ns: int
    created_at_ms: int = 0
    owner: str = ""
    group: str = ""


class SstIdentity(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an SST says of itself in its properties block (design 0001, I1). Size completes the identity."""

    session_id: str
    file_number: int


class FileIndex(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One file of a snapshot: its hashes and where its bytes are.

    Exactly one of these holds: `inline` carries all bytes; `blobs` covers the file without gap or overlap; the file
    is empty and has neither.
    """

    name: str
    metadata: FileMetadata
    # 32 bytes, over the whole file.
    blake3: bytes
    # IEEE CRC32 over the whole file, unsigned; Samza's checksum.
    crc32: int
    blobs: tuple[FileBlob, ...] = ()
    inline: bytes | None = None
    sst: SstIdentity | None = None


class DirIndex(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One directory of a snapshot; the root's name is empty.

    `files_removed` and `sub_dirs_removed` are what the previous snapshot had and this one has not: they keep nothing
    alive and exist for people and for Samza's form.
    """

    name: str
    files_present: tuple[FileIndex, ...] = ()
    sub_dirs_present: tuple["DirIndex", ...] = ()
    files_removed: tuple[FileIndex, ...] = ()
    sub_dirs_removed: tuple["DirIndex", ...] = ()
    # Permission bits, 0o000 to 0o7777; None in indexes of older releases and where only files were looked at.
    mode: int | None = None


class LineageItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step of a state's history: Spark's `{"version": .., "checkpointUniqueId": ..}`."""

    version: int
    unique_id: UniqueId


class SnapshotMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whose state a snapshot is, which version, and from what it grew."""

    job: str
    task: str
    store: str
    # The caller's version of this store's state, and the id that distinguishes two attempts at it.
    version: int
    unique_id: UniqueId
    # The snapshot that this one was diffed against; None for a first one.
    base: LineageItem | None = None
    # The versions that it grew from, oldest first, at most LINEAGE_ITEMS_MAX of them: our own snapshots up to `base`,
    # or Spark's own lineage, which knows nothing of what was backed up (design 0004, R6).
    lineage: tuple[LineageItem, ...] = ()
    # By the clock of the machine that made the snapshot; for people only.
    created_at_ms: int = 0


class Pack(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A blob that holds many small files, with its whole size, so that dead bytes can be counted (design 0002, P1)."""

    key: BlobKey
    size_bytes: int


class IndexReference(msgspec.Struct, frozen=True, kw_only=True):
    """Where an index object is and what its stored bytes must be."""

    key: BlobKey
    # SHA-256 over the stored bytes, 32 bytes.
    sha256: bytes
    size_bytes: int


class SnapshotIndex(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="snapshot", tag_field="kind"):
    """The whole content of one store's directory at one version."""

    metadata: SnapshotMetadata
    # The upload session that made it: blobs of this session are the ones that are new in it (design 0002, K2).
    session: str
    dir: DirIndex
    packs: tuple[Pack, ...] = ()


class DirDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What changed in one directory: entries that replace or join the base's, and names that went."""

    name: str
    files_set: tuple[FileIndex, ...] = ()
    files_dropped: tuple[str, ...] = ()
    sub_dirs_set: tuple["DirDelta", ...] = ()
    sub_dirs_dropped: tuple[str, ...] = ()
    # What the directory has in the result, also None.
    mode: int | None = None


class IndexDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="delta", tag_field="kind"):
    """An index as its difference from another one, which stays a root while this one is (design 0002, P2)."""

    metadata: SnapshotMetadata
    session: str
    base: IndexReference
    # Number of deltas from here to the first whole index, this one counted: 1 to INDEX_DELTAS_MAX.
    depth: int
    dir: DirDelta
    packs_set: tuple[Pack, ...] = ()
    packs_dropped: tuple[BlobKey, ...] = ()


StoredIndex = SnapshotIndex | IndexDelta


class Scope(msgspec.Struct, frozen=True, order=True):
    """What commits as one: a whole job, or one task of it (design 0002, K3)."""

    job: str
    task: str | None = None

    def __str__(self) -> str:  # type: ignore[explicit-override]  # as in `DisplayMixin`
        return self.job if self.task is None else f"{self.job}/{self.task}"


def as_scope(scope: str | Scope) -> Scope:
    """Return the scope that a caller means: a name alone is that of a whole job."""
    return Scope(scope) if isinstance(scope, str) else scope


class ScopeLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How keys are spread over the tasks of a scope; who changes it replaces every store (design 0002, K3)."""

    tasks_count: int = 0
    # The name of the function from key to task, such as "spark-hash-v1"; empty where the caller places keys.
    key_hash: str = ""
    key_columns: tuple[str, ...] = ()


class CommitPointer(msgspec.Struct, frozen=True, order=True):
    """One commit record: its number in its scope, and the write id that distinguishes two records of one number."""

    number: int
    write_id: WriteId


class StoreReference(msgspec.Struct, frozen=True, kw_only=True):
    """One store at one version, as a commit record names it."""

    task: str
    store: str
    version: int
    unique_id: UniqueId
    index: IndexReference
    # The record that first named this index; carried over unchanged by later ones.
    number: int
    files_count: int
    size_bytes: int


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One commit of a scope: the write of this record is the commit point (design 0002, C1 to C7)."""

    scope: Scope
    number: int
    write_id: WriteId
    kind: Literal["commit", "rewind", "fork"] = "commit"
    # The newest valid record that the writer had loaded; None for a scope's first.
    predecessor: CommitPointer | None = None
    # Reserved: older releases read it, and nobody has ever written it.
    base: CommitPointer | None = None
    # Where a rewind or a fork took its stores from.
    source: CommitPointer | None = None
    source_scope: Scope | None = None
    # The caller's own version and offsets, opaque to us.
    version: int = 0
    offsets: str = ""
    layout: ScopeLayout = ScopeLayout()
    stores: tuple[StoreReference, ...] = ()
    # The record is void if the store says that it was created later than this, and nothing vouches (design 0002, C5).
    valid_until_ms: int
    # The commit time of the predecessor: time never goes backwards along a chain (design 0002, C7).
    predecessor_committed_at_ms: int = 0
    # Reserved: older releases wrote it, and nobody has ever read it.
    settled_through: int = 0

    @property
    def pointer(self) -> CommitPointer:
        """This record's number and write id."""
        return CommitPointer(self.number, self.write_id)

    @property
    def state_bytes(self) -> int:
        """The bytes of all its stores."""
        return sum(store.size_bytes for store in self.stores)


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """Which records at or below its number are open; every other one there is closed for ever (design 0002, D3)."""

    scope: Scope
    number: int
    kept: tuple[CommitPointer, ...] = ()


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A lease of a reader on one commit; it ends `duration_ms` after the store's time of its last write (D5).

    A duration of zero is a released pin: the collector removes it.
    """

    id: str
    scope: Scope
    source: CommitPointer
    duration_ms: int
    purpose: str
    stores: tuple[StoreReference, ...] = ()


class NameRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A name that keeps what it refers to until it is released (design 0002, D5)."""

    scope: Scope
    name: str
    source: CommitPointer
    version: int
    committed_at_ms: int
    stores: tuple[StoreReference, ...] = ()
    released: bool = False
    # A name that the store created later than this protects nothing, unless it was copied here (design 0002, D5).
    valid_until_ms: int = NEVER_MS
    # As in the commit record, which may be collected before the name is.
    offsets: str = ""
    layout: ScopeLayout = ScopeLayout()


class RepositoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What every writer, reader and collector of a repository agrees on (design 0002, K1)."""

    id: str
    # How long an upload lives that no commit has taken over: the lease of design 0002, C5.
    ttl_ms: int
    # Safety margin that C5 takes off the lease and T3 wants left at a commit.
    margin_ms: int
    # How often a collector is expected to run; a lifecycle rule of the store waits at least three of these (T3).
    collection_period_ms: int
    key_layout: int = 1


StoredRecord = CommitRecord | Boundary | Pin | NameRecord | RepositoryRecord

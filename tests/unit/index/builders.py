"""Trees of files as plain dicts, and the values that a scan, an upload and a backup would make of them.

A tree maps names to bytes (a file) or to another tree (a directory). Stored bytes go to a dict by blob key, so that a
test can read a snapshot back and compare it with the tree that it describes.
"""

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Union

from index.snapshot.dir_diff import DirDiff, LocalDir, LocalFile, build_dir_index, diff_dir
from index.snapshot.keys import BLOBS, upload_key
from index.snapshot.model import (
    BlobKey,
    DirIndex,
    FileBlob,
    FileIndex,
    FileMetadata,
    LineageItem,
    Pack,
    Scope,
    SnapshotIndex,
    SnapshotMetadata,
    SstIdentity,
    UniqueId,
)
from index.spark.retention import StateListing

Tree = Mapping[str, Union[bytes, "Tree"]]
Path = tuple[str, ...]

SCOPE = Scope("page-views", "Partition 7")
SESSION = "0123456789abcdef0123"
EMPTY = DirIndex("")


def content_hash(content: bytes) -> bytes:
    """Any 32-byte hash will do: `index` never computes one."""
    return hashlib.sha256(content).digest()


def blob_key(counter: int, *, prefix: str = BLOBS, session: str = SESSION) -> BlobKey:
    return upload_key(prefix, SCOPE, session, counter)


def metadata(size_bytes: int = 0, mode: int = 0o644, **more: int | str) -> FileMetadata:
    fields: dict[str, int | str] = {"modified_at_ns": 1_700_000_000_000_000_000, "owner": "spark", "group": "hadoop"}
    fields.update(more)
    return FileMetadata(size_bytes, mode, **fields)  # type: ignore[arg-type]


def local_file(
    name: str,
    content: bytes = b"",
    *,
    mode: int = 0o644,
    sst: SstIdentity | None = None,
    identified: bool = True,
    **more: int | str,
) -> LocalFile:
    return LocalFile(
        name=name,
        metadata=metadata(len(content), mode, **more),
        device=1,
        inode=zlib.crc32(name.encode()),
        changed_at_ns=1_700_000_000_000_000_000,
        sst=sst,
        blake3=content_hash(content) if identified else None,
        crc32=zlib.crc32(content) if identified else None,
    )


def file_index(
    name: str,
    content: bytes = b"",
    *,
    counter: int = 1,
    mode: int = 0o644,
    sst: SstIdentity | None = None,
    **more: int | str,
) -> FileIndex:
    """A file in one blob of its own, or without one if it is empty."""
    blobs = (FileBlob(blob_key(counter), 0, 0, len(content)),) if content else ()
    return FileIndex(
        name, metadata(len(content), mode, **more), content_hash(content), zlib.crc32(content), blobs, None, sst
    )


def local_dir(tree: Tree, name: str = "", *, modes: Mapping[str, int] | None = None) -> LocalDir:
    files = {n: c for n, c in tree.items() if isinstance(c, bytes)}
    subs = {n: c for n, c in tree.items() if not isinstance(c, bytes)}
    return LocalDir(
        name=name,
        files=tuple(local_file(n, files[n], mode=(modes or {}).get(n, 0o644)) for n in sorted(files)),
        sub_dirs=tuple(local_dir(subs[n], n, modes=modes) for n in sorted(subs)),
        mode=(modes or {}).get(name),
    )


def parse_tree(notation: str) -> dict[str, bytes | Tree]:
    """Samza's notation, such as `[a, z/1]`: the content of a file is its own leaf name; `d/` is an empty directory."""
    tree: dict[str, bytes | Tree] = {}
    for path in filter(None, notation.strip("[]").split(", ")):
        *parents, leaf = path.split("/")
        here = tree
        for parent in parents:
            here = here.setdefault(parent, {})  # type: ignore[assignment]
        if leaf:
            here[leaf] = leaf.encode()
    return tree


class Uploads:
    """Gives every uploaded file a place: in a blob of its own, over several, in a pack, or inline."""

    def __init__(self, session: str = SESSION, *, store: dict[str, bytes] | None = None) -> None:
        self.session = session
        self.store: dict[str, bytes] = {} if store is None else store
        self._counter = 0
        self._pack_key: BlobKey | None = None

    def place(self, file: LocalFile, content: bytes) -> FileIndex:
        way = zlib.crc32(file.name.encode()) % 4 if content else 0
        blobs: tuple[FileBlob, ...] = ()
        inline = None
        if way == 1:
            inline = content
        elif way == 2:
            blobs = (self._add_to_pack(content),)
        elif way == 3 and len(content) > 1:
            blobs = tuple(self._split(content))
        elif content:
            blobs = (FileBlob(self._put(content), 0, 0, len(content)),)
        assert file.blake3 is not None
        assert file.crc32 is not None
        return FileIndex(file.name, file.metadata, file.blake3, file.crc32, blobs, inline, file.sst)

    def _put(self, content: bytes) -> BlobKey:
        self._counter += 1
        key = blob_key(self._counter, session=self.session)
        self.store[key] = content
        return key

    def _add_to_pack(self, content: bytes) -> FileBlob:
        if self._pack_key is None:
            self._pack_key = self._put(b"")
        offset = len(self.store[self._pack_key])
        self.store[self._pack_key] += content
        return FileBlob(self._pack_key, 0, offset, len(content))

    def _split(self, content: bytes) -> Iterator[FileBlob]:
        half = len(content) // 2
        for start, part in ((0, content[:half]), (half, content[half:])):
            yield FileBlob(self._put(part), start, 0, len(part), content_hash(part))


def content_of(tree: Tree, path: Path) -> bytes:
    here: bytes | Tree = tree
    for name in path:
        assert not isinstance(here, bytes)
        here = here[name]
    assert isinstance(here, bytes)
    return here


def backup(
    tree: Tree,
    *,
    version: int = 1,
    base: SnapshotIndex | None = None,
    store: dict[str, bytes] | None = None,
    modes: Mapping[str, int] | None = None,
) -> SnapshotIndex:
    """What a backup of a tree on top of `base` commits; blobs go to `store`."""
    diff = diff_dir(local_dir(tree, modes=modes), base.dir if base else EMPTY)
    uploads = Uploads(f"{version:020x}", store=store)
    uploaded = {path: uploads.place(file, content_of(tree, path)) for path, file in added_files(diff)}
    directory = build_dir_index(diff, uploaded)
    lineage = base_of(base)
    used = {blob.key for _, file in present_files(directory) for blob in file.blobs}
    packs = {pack.key: pack for pack in (base.packs if base else ())}
    if uploads._pack_key is not None:
        packs[uploads._pack_key] = Pack(uploads._pack_key, len(uploads.store[uploads._pack_key]))
    return SnapshotIndex(
        metadata=SnapshotMetadata(
            job="page-views",
            task="Partition 7",
            store="counts",
            version=version,
            unique_id=UniqueId(f"unique-{version}"),
            base=lineage[-1] if lineage else None,
            lineage=lineage,
        ),
        session=uploads.session,
        dir=directory,
        packs=tuple(packs[key] for key in sorted(packs) if key in used),
    )


def base_of(base: SnapshotIndex | None) -> tuple[LineageItem, ...]:
    if base is None:
        return ()
    return (*base.metadata.lineage, LineageItem(base.metadata.version, base.metadata.unique_id))


def added_files(diff: DirDiff, path: Path = ()) -> Iterator[tuple[Path, LocalFile]]:
    for file in diff.files_added:
        yield (*path, file.name), file
    for sub in (*diff.sub_dirs_added, *diff.sub_dirs_retained):
        yield from added_files(sub, (*path, sub.name))


def present_files(directory: DirIndex, path: Path = ()) -> Iterator[tuple[Path, FileIndex]]:
    for file in directory.files_present:
        yield (*path, file.name), file
    for sub in directory.sub_dirs_present:
        yield from present_files(sub, (*path, sub.name))


def dir_modes(directory: DirIndex | LocalDir, path: Path = ()) -> dict[Path, int | None]:
    """The mode of every directory, the root's under ()."""
    modes = {path: directory.mode}
    for sub in directory.sub_dirs if isinstance(directory, LocalDir) else directory.sub_dirs_present:
        modes |= dir_modes(sub, (*path, sub.name))
    return modes


def read_back(directory: DirIndex, store: Mapping[str, bytes]) -> dict[str, bytes | Tree]:
    """The tree that a snapshot describes, from stored bytes alone."""
    tree: dict[str, bytes | Tree] = {}
    for file in directory.files_present:
        tree[file.name] = read_file(file, store)
    for sub in directory.sub_dirs_present:
        tree[sub.name] = read_back(sub, store)
    return tree


def read_file(file: FileIndex, store: Mapping[str, bytes]) -> bytes:
    if file.inline is not None:
        return file.inline
    return b"".join(
        store[blob.key][blob.blob_offset_bytes : blob.blob_offset_bytes + blob.size_bytes] for blob in file.blobs
    )


def latest_version(listing: StateListing) -> int:
    """Return the greatest version of a snapshot or a changelog; 0 if there is none."""
    return max((of.version for of in (*listing.snapshots, *listing.changelogs)), default=0)

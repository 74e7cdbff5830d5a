"""What an index and a record must be before anything is done with them: M1 to M22, as design 0001, 6 says them.

The same checks run before a value is written and after it is read, so that neither a fault of ours nor hostile bytes
get any further. What breaks a rule is refused by IndexInvariantError with the number of the rule in its message, a name
or key of a form that none has by UnsafeNameError.

What is checked of a record is what it shows alone; whether it is valid, void or closed is decided from a whole log
(`index.plan.commits`).
"""

import itertools
import re
from collections.abc import Iterable
from typing import Any, Final

from index.errors import FormatError, IndexInvariantError, UnknownFormatError
from index.snapshot import model
from index.snapshot.contents import files_of
from index.snapshot.keys import BLOBS, INDEXES, check_file_name, encode_component, encode_scope, parse_upload_key

# Directories between the root and the deepest one.
DEPTH_MAX: Final = 64
# Files and directories of one index, present and removed.
ENTRIES_MAX: Final = 5_000_000
# Deltas between an index and the whole one that it starts from (design 0002, P2).
INDEX_DELTAS_MAX: Final = 16
LINEAGE_ITEMS_MAX: Final = 4096
STORES_MAX: Final = 200_000
KEY_LAYOUT: Final = 1
HASH_BYTES: Final = 32
TEXT_BYTES_MAX: Final = 1024
TIME_NS_MIN: Final = -(2**63)

_CRC32_MAX: Final = 2**32 - 1
_MODE_MAX: Final = 0o7777
_OWNER_BYTES_MAX: Final = 255
_ID_BYTES_MAX: Final = 200
_OFFSETS_BYTES_MAX: Final = 64 * 1024 * 1024
_SESSION = re.compile(r"[0-9a-f]{20}")


def check_snapshot_index(index: model.SnapshotIndex, base: model.SnapshotIndex | None = None) -> None:
    """Refuse a whole index that breaks one of M1 to M14.

    `base` is an index that was checked: of the files that are its very values (values do not change), what M1 and M4 to
    M8 say of a file by itself is not asked again. Samza's constructors of `DirIndex` and `FileIndex` miss files removed
    from a present sub-directory in their form of M11.
    """
    _check_snapshot_metadata(index.metadata)
    check_session(index.session, "M14", "session")
    checked = {id(file): file for _, file in files_of(base.dir)} if base is not None else {}
    walk = _IndexWalk(_check_packs(index.packs), checked)
    if index.dir.name:
        raise broken("M1", "has a name", f"root {index.dir.name!r}")
    walk.check_present(index.dir, ())
    walk.check_removed(index.dir, ())
    walk.check_packs_used()


def check_index_delta(delta: model.IndexDelta) -> None:
    """Refuse an index delta that breaks M1 to M8, or M13 to M15; M9 to M12 are checked in the index that results."""
    _check_snapshot_metadata(delta.metadata)
    check_session(delta.session, "M14", "session")
    check_number(delta.depth, "M15", "depth", low=1, high=INDEX_DELTAS_MAX)
    check_index_reference(delta.base, "M15", "base index")
    if delta.metadata.base is None:
        raise broken("M15", "is missing from the metadata", "base")
    packs = _check_packs(delta.packs_set)
    _check_ascending(delta.packs_dropped, "M9", "dropped packs")
    for key in delta.packs_dropped:
        _check_blob_key(key)
        if key in packs:
            raise broken("M15", "is both set and dropped", f"pack {key}")
    if delta.dir.name:
        raise broken("M1", "has a name", f"root {delta.dir.name!r}")
    _IndexWalk(packs, {}).check_delta(delta.dir, ())


def check_index_reference(reference: model.IndexReference, rule: str, what: str) -> None:
    """Check M16, or M15 of the base of a delta."""
    if parse_upload_key(reference.key).prefix != INDEXES:
        raise broken(rule, f"{reference.key} is not in {INDEXES}", what)
    if len(reference.sha256) != HASH_BYTES:
        raise broken(rule, f"has {len(reference.sha256)} bytes, not {HASH_BYTES}", f"hash of the {what}")
    check_number(reference.size_bytes, rule, f"size of the {what}", low=1)


def check_commit(record: model.CommitRecord) -> None:
    """Refuse a commit record that breaks M17 or M18."""
    encode_scope(record.scope)
    check_number(record.number, "M18", "number", low=1)
    check_text(record.write_id, "M18", "write id", bytes_max=_ID_BYTES_MAX)
    check_number(record.version, "M18", "version")
    check_text(record.offsets, "M18", "offsets", bytes_max=_OFFSETS_BYTES_MAX, empty=True)
    check_number(record.valid_until_ms, "M18", "valid_until_ms")
    check_number(record.predecessor_committed_at_ms, "M18", "predecessor_committed_at_ms")
    _check_ancestry(record)
    check_number(record.layout.tasks_count, "M18", "tasks_count")
    check_text(record.layout.key_hash, "M18", "key_hash", bytes_max=_ID_BYTES_MAX, empty=True)
    for column in record.layout.key_columns:
        check_text(column, "M18", "key column")
    _check_stores(record.stores, record.scope, named_by_max=record.number)


def check_boundary(boundary: model.Boundary) -> None:
    """Refuse a boundary that breaks M19."""
    encode_scope(boundary.scope)
    check_number(boundary.number, "M19", "number", low=1)
    for pointer in boundary.kept:
        _check_pointer(pointer, "M19", "kept record", number_max=boundary.number)
    _check_ascending((pointer.number for pointer in boundary.kept), "M19", "kept records")


def check_pin(pin: model.Pin) -> None:
    """Refuse a pin that breaks M20, its stores M17."""
    check_session(pin.id, "M20", "pin id")
    encode_scope(pin.scope)
    _check_pointer(pin.source, "M20", "source")
    check_number(pin.duration_ms, "M20", "duration_ms")
    check_text(pin.purpose, "M20", "purpose", empty=True)
    _check_stores(pin.stores, pin.scope, named_by_max=pin.source.number)


def check_name(record: model.NameRecord) -> None:
    """Refuse a name that breaks M21, its stores M17."""
    encode_scope(record.scope)
    encode_component(record.name)
    _check_pointer(record.source, "M21", "source")
    check_number(record.version, "M21", "version")
    check_number(record.committed_at_ms, "M21", "committed_at_ms")
    _check_stores(record.stores, record.scope, named_by_max=record.source.number)


def check_repository(record: model.RepositoryRecord) -> None:
    """Refuse a repository record that breaks M22; with an UnknownFormatError, if it has a newer key layout."""
    if record.key_layout > KEY_LAYOUT:
        reason = f"the repository has key layout {record.key_layout}; this version knows {KEY_LAYOUT}"
        raise UnknownFormatError(reason, subject="repository", hint="use a newer tidemark")
    check_number(record.key_layout, "M22", "key layout", low=KEY_LAYOUT)
    check_text(record.id, "M22", "repository id", bytes_max=_ID_BYTES_MAX)
    check_number(record.ttl_ms, "M22", "ttl_ms", low=1)
    check_number(record.margin_ms, "M22", "margin_ms", high=record.ttl_ms - 1)
    check_number(record.collection_period_ms, "M22", "collection_period_ms", low=1)


def _check_ancestry(record: model.CommitRecord) -> None:
    below = record.number - 1
    if record.predecessor is not None:
        _check_pointer(record.predecessor, "M18", "predecessor", number_max=below)
    if (record.source is not None) != (record.kind != "commit"):
        raise broken("M18", f"a {record.kind} names a source, or names none", "source")
    if (record.source_scope is not None) != (record.kind == "fork"):
        raise broken("M18", f"a {record.kind} names its scope, or does not", "source")
    if record.source is not None:
        _check_pointer(
            record.source, "M18", "source", number_max=below if record.kind == "rewind" else model.SIZE_BYTES_MAX
        )
    if record.source_scope is not None:
        encode_scope(record.source_scope)


def _check_stores(stores: tuple[model.StoreReference, ...], scope: model.Scope, *, named_by_max: int) -> None:
    if len(stores) > STORES_MAX:
        raise broken("M17", f"more than {STORES_MAX} stores", str(scope))
    _check_ascending(((reference.task, reference.store) for reference in stores), "M17", "stores")
    for task in {reference.task for reference in stores}:
        encode_component(task)
    for reference in stores:
        what = f"store {reference.task}/{reference.store}"
        check_text(reference.store, "M17", "store")
        check_text(reference.unique_id, "M17", f"unique id of {what}", bytes_max=_ID_BYTES_MAX)
        if scope.task is not None and reference.task != scope.task:
            raise broken("M17", f"is not a store of {scope}", what)
        check_index_reference(reference.index, "M16", f"index of {what}")
        check_number(reference.version, "M17", f"version of {what}")
        check_number(reference.number, "M17", f"number of {what}", low=1, high=named_by_max)
        check_number(reference.files_count, "M17", f"files_count of {what}")
        check_number(reference.size_bytes, "M17", f"size_bytes of {what}")


def _check_pointer(
    pointer: model.CommitPointer, rule: str, what: str, *, number_max: int = model.SIZE_BYTES_MAX
) -> None:
    check_number(pointer.number, rule, f"number of the {what}", low=1, high=number_max)
    check_text(pointer.write_id, rule, f"write id of the {what}", bytes_max=_ID_BYTES_MAX)


class _IndexWalk:
    """Everything that is summed up or compared across the directories of one index."""

    def __init__(self, packs: dict[str, int], checked: dict[int, model.FileIndex]) -> None:
        self._packs = packs
        # Files that were checked before, by what `id` says of them: they live for as long as they are here.
        self._checked = checked
        self._packs_used: set[str] = set()
        # Key -> size of every blob that is not a pack.
        self._whole_blobs: dict[str, int] = {}
        self._pack_runs: set[tuple[str, int]] = set()
        self._entries_count = 0
        self._size_bytes = 0

    def check_present(self, directory: model.DirIndex, path: model.FilePath) -> None:
        self._enter(directory, len(directory.files_present) + len(directory.sub_dirs_present), path)
        files = directory.files_present
        self._check_files(files, path)
        for file in files:
            for blob in file.blobs:
                self._check_place(blob, path, file.name)
        _check_names((sub.name for sub in directory.sub_dirs_present), path)
        if directory.sub_dirs_present:
            file_names = {file.name for file in files}
            for sub in directory.sub_dirs_present:
                if sub.name in file_names:
                    raise broken("M2", "is both a file and a directory", _join(path, sub.name))
                self.check_present(sub, (*path, sub.name))

    def check_removed(self, directory: model.DirIndex, path: model.FilePath) -> None:
        if directory.files_removed:
            present = {file.name: file for file in directory.files_present}
            for file in directory.files_removed:
                if present.get(file.name) == file:
                    raise broken("M10", "is both present and removed", _join(path, file.name))
            self._check_gone(model.DirIndex("", directory.files_removed), path)
        _check_names((sub.name for sub in directory.sub_dirs_removed), path)
        for sub in directory.sub_dirs_removed:
            self._check_gone(sub, (*path, sub.name))
        for sub in directory.sub_dirs_present:
            self.check_removed(sub, (*path, sub.name))

    def check_delta(self, directory: model.DirDelta, path: model.FilePath) -> None:
        names_count = len(directory.files_dropped) + len(directory.sub_dirs_dropped)
        self._enter(directory, len(directory.files_set) + len(directory.sub_dirs_set) + names_count, path)
        self._check_files(directory.files_set, path)
        files = {file.name for file in directory.files_set}
        sub_dirs = {sub.name for sub in directory.sub_dirs_set}
        _check_names((sub.name for sub in directory.sub_dirs_set), path)
        for dropped, kept in ((directory.files_dropped, files), (directory.sub_dirs_dropped, sub_dirs)):
            _check_names(dropped, path)
            if not kept.isdisjoint(dropped):
                raise broken("M15", "a name is both set and dropped", _join(path))
        if not files.isdisjoint(sub_dirs):
            raise broken("M15", "a name is both a file and a directory", _join(path))
        for sub in directory.sub_dirs_set:
            self.check_delta(sub, (*path, sub.name))

    def check_packs_used(self) -> None:
        unused = self._packs.keys() - self._packs_used
        if unused:
            raise broken("M9", "is listed and holds no file", f"pack {min(unused)}")

    def _check_gone(self, directory: model.DirIndex, path: model.FilePath) -> None:
        if directory.files_removed or directory.sub_dirs_removed:
            raise broken("M12", "was removed and lists removed entries itself", _join(path))
        self._enter(directory, len(directory.files_present) + len(directory.sub_dirs_present), path)
        self._check_files(directory.files_present, path)
        for file in directory.files_present:
            for blob in file.blobs:
                if blob.key in self._whole_blobs or (blob.key, blob.blob_offset_bytes) in self._pack_runs:
                    raise broken("M11", f"its bytes in {blob.key} are present too", _join(path, file.name))
        _check_names((sub.name for sub in directory.sub_dirs_present), path)
        for sub in directory.sub_dirs_present:
            self._check_gone(sub, (*path, sub.name))

    def _enter(self, directory: model.DirIndex | model.DirDelta, entries_count: int, path: model.FilePath) -> None:
        if len(path) > DEPTH_MAX:
            raise broken("M3", f"directories nest deeper than {DEPTH_MAX}", _join(path[:3]))
        self._entries_count += entries_count
        if self._entries_count > ENTRIES_MAX:
            raise broken("M3", f"more than {ENTRIES_MAX} entries", _join(path))
        if directory.mode is not None and not 0 <= directory.mode <= _MODE_MAX:
            raise broken("M4", "mode is out of range", _join(path))

    def _check_files(self, files: tuple[model.FileIndex, ...], path: model.FilePath) -> None:
        checked = self._checked
        unchecked = [file for file in files if id(file) not in checked] if checked else files
        _check_names((file.name for file in unchecked), path)
        for file in unchecked:
            try:
                _check_file(file)
            except FormatError as error:
                error.add_note(f"in file {_join(path, file.name)!r}")
                raise
        if checked:
            _check_ascending((file.name for file in files), "M2", _join(path))
        self._size_bytes += sum([file.metadata.size_bytes for file in files])
        if self._size_bytes > model.SIZE_BYTES_MAX:
            raise broken("M3", "all sizes together do not fit 63 bits", _join(path))

    def _check_place(self, blob: model.FileBlob, path: model.FilePath, name: str) -> None:
        pack_size_bytes = self._packs.get(blob.key)
        if pack_size_bytes is not None:
            if blob.blob_offset_bytes + blob.size_bytes > pack_size_bytes:
                raise broken("M9", f"ends beyond the pack {blob.key}", _join(path, name))
            self._packs_used.add(blob.key)
            self._pack_runs.add((blob.key, blob.blob_offset_bytes))
        elif blob.blob_offset_bytes != 0 or self._whole_blobs.setdefault(blob.key, blob.size_bytes) != blob.size_bytes:
            raise broken("M9", f"is a part of {blob.key}, which is not a pack", _join(path, name))


def _check_names(names: Iterable[str], path: model.FilePath) -> None:
    previous = ""
    for name in names:
        check_file_name(name)
        if name <= previous:
            raise broken("M2", f"comes after {previous!r}", _join(path, name))
        previous = name


def _check_file(file: model.FileIndex) -> None:
    _check_file_metadata(file.metadata)
    if len(file.blake3) != HASH_BYTES:
        raise broken("M5", f"a hash of {len(file.blake3)} bytes", file.name)
    if not 0 <= file.crc32 <= _CRC32_MAX:
        raise broken("M5", f"{file.crc32} is not a CRC32", file.name)
    if file.sst is not None:
        check_text(file.sst.session_id, "M4", "SST session id", bytes_max=_OWNER_BYTES_MAX)
        check_number(file.sst.file_number, "M4", "SST file number")
    size_bytes = file.metadata.size_bytes
    if file.inline is not None:
        if file.blobs or size_bytes == 0 or len(file.inline) != size_bytes:
            raise broken("M6", f"{len(file.inline)} bytes inline of {size_bytes}, or blobs too", file.name)
    elif size_bytes == 0:
        if file.blobs:
            raise broken("M6", "is empty and has blobs", file.name)
    else:
        _check_blobs(file.blobs, size_bytes, file.name)


def _check_file_metadata(metadata: model.FileMetadata) -> None:
    if not (
        0 <= metadata.size_bytes <= model.SIZE_BYTES_MAX
        and 0 <= metadata.mode <= _MODE_MAX
        and TIME_NS_MIN <= metadata.modified_at_ns <= model.SIZE_BYTES_MAX
        and 0 <= metadata.created_at_ms <= model.SIZE_BYTES_MAX
    ):
        raise broken("M4", "size, mode or a time is out of range", "file metadata")
    if metadata.owner:
        check_text(metadata.owner, "M4", "owner", bytes_max=_OWNER_BYTES_MAX)
    if metadata.group:
        check_text(metadata.group, "M4", "group", bytes_max=_OWNER_BYTES_MAX)


def _check_blobs(blobs: tuple[model.FileBlob, ...], size_bytes: int, name: str) -> None:
    hash_bytes = 0 if len(blobs) == 1 else HASH_BYTES
    end = 0
    for blob in blobs:
        if blob.file_offset_bytes != end or blob.size_bytes < 1:
            raise broken("M7", f"a gap, an overlap or an empty run at {end}", name)
        if len(blob.blake3) != hash_bytes:
            raise broken("M7", f"a run with a hash of {len(blob.blake3)} bytes, not {hash_bytes}", name)
        if not 0 <= blob.blob_offset_bytes <= model.SIZE_BYTES_MAX - blob.size_bytes:
            raise broken("M4", f"a blob offset of {blob.blob_offset_bytes}", name)
        _check_blob_key(blob.key)
        end += blob.size_bytes
    if end != size_bytes:
        raise broken("M7", f"blobs hold {end} bytes of {size_bytes}", name)


def _check_blob_key(key: str) -> None:
    if parse_upload_key(key).prefix != BLOBS:
        raise broken("M8", f"is not in {BLOBS}", key)


def _check_packs(packs: tuple[model.Pack, ...]) -> dict[str, int]:
    _check_ascending([pack.key for pack in packs], "M9", "packs")
    for pack in packs:
        _check_blob_key(pack.key)
        check_number(pack.size_bytes, "M9", f"size of pack {pack.key}", low=1)
    return {pack.key: pack.size_bytes for pack in packs}


def _check_ascending(keys: Iterable[Any], rule: str, what: str) -> None:
    for previous, key in itertools.pairwise(keys):
        if key <= previous:
            raise broken(rule, f"{key} comes after {previous}", what)


def _check_snapshot_metadata(metadata: model.SnapshotMetadata) -> None:
    encode_component(metadata.job)
    encode_component(metadata.task)
    check_text(metadata.store, "M13", "store")
    check_text(metadata.unique_id, "M13", "unique id", bytes_max=_ID_BYTES_MAX)
    check_number(metadata.version, "M13", "version")
    check_number(metadata.created_at_ms, "M4", "creation time of the snapshot")
    if len(metadata.lineage) > LINEAGE_ITEMS_MAX:
        raise broken("M13", f"more than {LINEAGE_ITEMS_MAX} items", "lineage")
    base = () if metadata.base is None else (metadata.base,)
    for item in (*base, *metadata.lineage):
        check_number(item.version, "M13", "version in a lineage")
        check_text(item.unique_id, "M13", "unique id in a lineage", bytes_max=_ID_BYTES_MAX)
    _check_ascending((*(item.version for item in metadata.lineage), metadata.version), "M13", "versions of the lineage")


def _join(path: model.FilePath, name: str = "") -> str:
    return "/".join((*path, name)) if name or path else "root"


def broken(rule: str, message: str, subject: str) -> IndexInvariantError:
    """Make the error that names the numbered rule of design 0001 which a value breaks."""
    return IndexInvariantError(f"{message} ({rule})", subject=subject)


def check_number(value: int, rule: str, what: str, *, low: int = 0, high: int = model.SIZE_BYTES_MAX) -> None:
    """Refuse a number outside `[low, high]`; by default one that is negative or does not fit 63 bits."""
    if not low <= value <= high:
        raise broken(rule, f"{value} is not within {low} to {high}", what)


def check_text(value: str, rule: str, what: str, *, bytes_max: int = TEXT_BYTES_MAX, empty: bool = False) -> None:
    """Refuse a text that is empty (unless `empty`), is not valid Unicode, or takes more than `bytes_max` in UTF-8."""
    if value.isascii() and 0 < len(value) <= bytes_max:
        return
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise broken(rule, "is not valid Unicode", what) from None
    if size_bytes > bytes_max or (size_bytes == 0 and not empty):
        raise broken(rule, f"is empty or longer than {bytes_max} bytes", what)


def check_session(value: str, rule: str, what: str) -> None:
    """Refuse an id that is not 20 lower-case hexadecimal digits."""
    if _SESSION.fullmatch(value) is None:
        raise broken(rule, f"{value[:40]!r} is not 20 lower-case hexadecimal digits", what)

"""Compare two snapshots: as a delta that is stored in place of an index, and file by file for people.

A delta does not carry the removed lists of an index: they are what the base has present and the index does not store
alike, which applying the delta finds out (design 0001, X3). So a delta costs what changed and nothing for what
went (design 0002, P2). The comparison for people (`tidemark diff A B`) is at the end.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Final, TypeVar

import msgspec

from index.display import DisplayMixin, format_files
from index.errors import IndexInvariantError
from index.snapshot import model
from index.snapshot.contents import dirs_of, files_of
from index.snapshot.dir_diff import is_stored_alike, strip_removed
from index.snapshot.invariants import DEPTH_MAX, check_index_delta, check_snapshot_index

_Entry = TypeVar("_Entry", model.Pack, model.FileIndex, model.DirIndex)
_name = attrgetter("name")
_key = attrgetter("key")


def make_delta(
    base: model.SnapshotIndex, base_ref: model.IndexReference, base_depth: int, new: model.SnapshotIndex
) -> model.IndexDelta:
    """Make the delta of an index to the one that it was diffed against; `apply_delta(base, delta) == new` was tried.

    The base is stored at `base_ref`, itself whole or as a delta: `base_depth` deltas lead to it. The metadata of `new`
    name it, and `new` was built from a diff against it.

    Raises:
        IndexInvariantError: The metadata of `new` name another base, the chain would be longer than INDEX_DELTAS_MAX,
            or the removed lists of `new` are not what went since the base. Store `new` whole instead.
    """
    packs_before = {pack.key: pack for pack in base.packs}
    packs_after = {pack.key for pack in new.packs}
    delta = model.IndexDelta(
        metadata=new.metadata,
        session=new.session,
        base=base_ref,
        depth=base_depth + 1,
        dir=_dir_delta(base.dir, new.dir),
        packs_set=tuple(pack for pack in new.packs if packs_before.get(pack.key) != pack),
        packs_dropped=tuple(key for key in packs_before if key not in packs_after),
    )
    check_index_delta(delta)
    if apply_delta(base, delta) != new:
        raise IndexInvariantError(
            "does not follow from its base: its removed lists are not what went (X3)",
            subject=f"index of {new.metadata.store}, version {new.metadata.version}",
            hint="store the index whole",
        )
    return delta


def apply_delta(base: model.SnapshotIndex, delta: model.IndexDelta) -> model.SnapshotIndex:
    """Return the index that a delta, which passed `check_index_delta`, describes on the very base that it names.

    The result follows the rules of a delta (M1 to M8, M13 to M15); that it follows those of a whole index is for the
    end of a chain to check, as `resolve_deltas` does.

    Raises:
        IndexInvariantError: The delta names another base, or drops what the base does not have.
    """
    metadata = base.metadata
    if delta.metadata.base != model.LineageItem(metadata.version, metadata.unique_id):
        reason = f"is a delta on another index than version {metadata.version}, {metadata.unique_id} (X2)"
        raise IndexInvariantError(reason, subject=_subject(delta))
    packs = _without(base.packs, _key, delta.packs_dropped, "pack")
    packs.update((pack.key, pack) for pack in delta.packs_set)
    return model.SnapshotIndex(
        metadata=delta.metadata,
        session=delta.session,
        dir=_apply_dir(base.dir, delta.dir, 0),
        packs=tuple(sorted(packs.values(), key=_key)),
    )


def resolve_deltas(whole: model.SnapshotIndex, deltas: Sequence[model.IndexDelta]) -> model.SnapshotIndex:
    """Return the index at the end of a chain of deltas, oldest first, on a whole index.

    An IndexInvariantError says that a delta does not belong where it is, or that the result breaks an invariant.
    """
    index = whole
    for depth, delta in enumerate(deltas, start=1):
        if delta.depth != depth:
            reason = f"says that it is delta {delta.depth} of its chain and is {depth} (X2)"
            raise IndexInvariantError(reason, subject=_subject(delta))
        index = apply_delta(index, delta)
    if deltas:
        check_snapshot_index(index)
    return index


def _dir_delta(base: model.DirIndex, new: model.DirIndex) -> model.DirDelta:
    files_before = {file.name: file for file in base.files_present}
    files_after = {file.name for file in new.files_present}
    dirs_before = {sub.name: sub for sub in base.sub_dirs_present}
    dirs_after = {sub.name for sub in new.sub_dirs_present}
    sub_dirs_set: list[model.DirDelta] = []
    for sub in new.sub_dirs_present:
        before = dirs_before.get(sub.name)
        below = _dir_delta(before or model.DirIndex(sub.name), sub)
        if before is None or below != model.DirDelta(sub.name, mode=before.mode):
            sub_dirs_set.append(below)
    return model.DirDelta(
        new.name,
        tuple(
            [file for file in new.files_present if (known := files_before.get(file.name)) is not file and known != file]
        ),
        tuple(name for name in files_before if name not in files_after),
        tuple(sub_dirs_set),
        tuple(name for name in dirs_before if name not in dirs_after),
        new.mode,
    )


def _apply_dir(base: model.DirIndex, delta: model.DirDelta, depth: int) -> model.DirIndex:
    if depth > DEPTH_MAX:
        raise IndexInvariantError(f"directories nest deeper than {DEPTH_MAX} (M3)", subject=delta.name)
    files = _without(base.files_present, _name, delta.files_dropped, "file")
    files.update((file.name, file) for file in delta.files_set)
    sub_dirs = _without(base.sub_dirs_present, _name, delta.sub_dirs_dropped, "sub-directory")
    changed = {
        sub.name: _apply_dir(sub_dirs.get(sub.name, model.DirIndex(sub.name)), sub, depth + 1)
        for sub in delta.sub_dirs_set
    }
    kept = {name: strip_removed(sub) for name, sub in sub_dirs.items() if name not in changed}
    return model.DirIndex(
        delta.name,
        tuple(sorted(files.values(), key=_name)) if delta.files_set else tuple(files.values()),
        tuple(sorted((*changed.values(), *kept.values()), key=_name)),
        tuple(
            [
                file
                for file in base.files_present
                if (after := files.get(file.name)) is not file and (after is None or not is_stored_alike(file, after))
            ]
        ),
        tuple(strip_removed(sub) for sub in base.sub_dirs_present if sub.name not in sub_dirs),
        delta.mode,
    )


def _without(
    entries: Iterable[_Entry], name_of: Callable[[_Entry], str], dropped: Iterable[str], what: str
) -> dict[str, _Entry]:
    """Return the entries of a base by name, without those that a delta drops."""
    found = {name_of(entry): entry for entry in entries}
    for name in dropped:
        if found.pop(name, None) is None:
            raise IndexInvariantError(f"the delta drops a {what} that its base does not have (X2)", subject=name)
    return found


def _subject(delta: model.IndexDelta) -> str:
    return f"index delta of {delta.metadata.store}, version {delta.metadata.version}"


_GROUPS: Final = ("added", "removed", "changed", "unchanged")


class ComparedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of either snapshot. A size is None on the side that has no such file."""

    path: model.FilePath
    before_bytes: int | None = None
    after_bytes: int | None = None
    mode_changed: bool = False


class IndexDifference(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """Two snapshots compared by content; each list is in the order of a walk, files before sub-directories."""

    added: tuple[ComparedFile, ...] = ()
    removed: tuple[ComparedFile, ...] = ()
    # Other bytes, or the same bytes with another mode.
    changed: tuple[ComparedFile, ...] = ()
    unchanged: tuple[ComparedFile, ...] = ()
    dirs_added: tuple[model.FilePath, ...] = ()
    dirs_removed: tuple[model.FilePath, ...] = ()

    # Each group by its number of files and their sizes afterwards; those removed, before.
    def _figures(self) -> dict[str, str]:  # type: ignore[explicit-override]  # as in `DisplayMixin`
        groups = {name: getattr(self, name) for name in _GROUPS}
        shown = {name: format_files(len(files), sum(map(_size_bytes, files))) for name, files in groups.items()}
        folders = {"directories added": len(self.dirs_added), "directories removed": len(self.dirs_removed)}
        return shown | {name: f"{number:,}" for name, number in folders.items() if number}


def _size_bytes(file: ComparedFile) -> int:
    return file.before_bytes or 0 if file.after_bytes is None else file.after_bytes


def diff_indexes(a: model.DirIndex, b: model.DirIndex) -> IndexDifference:
    """Compare the present files of the snapshot `a` and of a later one, `b`, by size, content hash and mode.

    Every file of either side is in the answer exactly once. Where the bytes are stored, and times, owner and group, do
    not matter.
    """
    before, after = dict(files_of(a)), dict(files_of(b))
    groups: dict[str, list[ComparedFile]] = {name: [] for name in _GROUPS}
    for path in sorted(before.keys() | after.keys(), key=lambda path: (path[:-1], path[-1])):
        old, new = before.get(path), after.get(path)
        file = ComparedFile(
            path=path,
            before_bytes=None if old is None else old.metadata.size_bytes,
            after_bytes=None if new is None else new.metadata.size_bytes,
            mode_changed=old is not None and new is not None and old.metadata.mode != new.metadata.mode,
        )
        if old is None:
            group = "added"
        elif new is None:
            group = "removed"
        else:
            is_same = not file.mode_changed and file.before_bytes == file.after_bytes and old.blake3 == new.blake3
            group = "unchanged" if is_same else "changed"
        groups[group].append(file)
    dirs_before, dirs_after = ({path for path, _ in dirs_of(side)} for side in (a, b))
    return IndexDifference(
        **{name: tuple(files) for name, files in groups.items()},
        dirs_added=tuple(sorted(dirs_after - dirs_before)),
        dirs_removed=tuple(sorted(dirs_before - dirs_after)),
    )

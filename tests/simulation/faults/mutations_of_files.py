"""The rules of packs, deltas, identity and the directory store, broken; see `mutations.py`."""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from blobstore.base import BlobStore
from blobstore.local import dirs as local_dirs
from engine.local import scan
from engine.local.digests import DigestCache, FactReader
from engine.records import roots
from engine.records.indexes import StoredSnapshot, read_stored_snapshot
from engine.spark.claims import Attempt, ReadyStore
from index.plan import backup as backup_plan
from index.snapshot import dir_diff
from index.snapshot.dir_diff import LocalFile
from index.snapshot.model import FileIndex, FilePath, IndexReference
from tests.simulation.faults.mutation import INDEX_GONE, OTHER_BYTES, everywhere, mutation
from tests.simulation.scenarios import interleavings_of_files


@mutation(
    "P1",
    "a pack is never packed again",
    interleavings_of_files.a_pack_that_is_mostly_dead_is_packed_again,
    shows="bytes are kept for",
)
def packs_stay_thin() -> Iterator[None]:
    with everywhere(backup_plan._thin_packs, lambda *_: set()):
        yield


@mutation(
    "P2",
    "the indexes that a delta builds on are not kept for it",
    interleavings_of_files.what_an_index_is_read_from_stays,
    shows=INDEX_GONE,
)
def bases_are_not_kept() -> Iterator[None]:
    async def read(store: BlobStore, reference: IndexReference) -> StoredSnapshot:
        return msgspec.structs.replace(await read_stored_snapshot(store, reference), chain=(reference,))

    with mock.patch.object(roots, "read_stored_snapshot", read):
        yield


@mutation(
    "I1",
    "files of one name and size are the same",
    interleavings_of_files.files_of_one_name_and_size_are_not_taken_for_equal,
    shows=OTHER_BYTES,
)
def size_is_identity() -> Iterator[None]:
    def is_same(local: LocalFile, remote: FileIndex) -> bool:
        return local.metadata.size_bytes == remote.metadata.size_bytes

    with mock.patch.object(dir_diff, "is_same_file", is_same):
        yield


@mutation(
    "I1",
    "the session id of an SST is not part of its identity",
    interleavings_of_files.ssts_of_another_session_are_not_taken_for_equal,
    shows=OTHER_BYTES,
)
def sessions_do_not_count() -> Iterator[None]:
    real = dir_diff.is_same_file

    def is_same(local: LocalFile, remote: FileIndex) -> bool:
        if local.sst is None or remote.sst is None or local.metadata.size_bytes != remote.metadata.size_bytes:
            return real(local, remote)
        return local.sst.file_number == remote.sst.file_number

    with mock.patch.object(dir_diff, "is_same_file", is_same):
        yield


@mutation(
    "I2",
    "a local file of the right size is reused",
    interleavings_of_files.a_local_file_is_reused_for_its_bytes_alone,
    shows=OTHER_BYTES,
)
def size_is_enough_to_reuse() -> Iterator[None]:
    def find(
        self: FactReader, candidates: Iterable[tuple[FilePath, LocalFile, FileIndex]]
    ) -> dict[FilePath, LocalFile]:
        return {path: f for path, f, entry in candidates if f.metadata.size_bytes == entry.metadata.size_bytes}

    with mock.patch.object(FactReader, "find_present", find):
        yield


@mutation(
    "I2",
    "a stat that a restore has recorded counts though nobody said that it does",
    interleavings_of_files.rot_that_moves_no_stat_is_not_restored,
    shows=OTHER_BYTES,
)
def every_recorded_stat_counts() -> Iterator[None]:
    with mock.patch.object(DigestCache, "find_restored", DigestCache._find):
        yield


@mutation(
    "I1",
    "the cache is believed of files that may be written through a mapping",
    interleavings_of_files.bytes_that_come_through_a_mapping_are_backed_up,
    shows=OTHER_BYTES,
)
def every_name_is_written_once() -> Iterator[None]:
    with everywhere(scan.is_written_once, lambda _: True):
        yield


@mutation(
    "I3",
    "nobody looks whether a file has changed since the scan",
    interleavings_of_files.a_directory_that_changes_meanwhile_is_not_backed_up,
    shows="half of it is old and half is new",
)
def changes_are_not_seen() -> Iterator[None]:
    with everywhere(scan.is_unchanged, lambda *_: True), everywhere(scan.find_difference, lambda *_: None):
        yield


@mutation(
    "I4",
    "a claim copies the directory, whose name stays",
    interleavings_of_files.a_local_directory_belongs_to_one_attempt,
    shows="both attempts have the directory",
)
def claims_copy() -> Iterator[None]:
    def take(self: Attempt, ready: ReadyStore, target: Path) -> bool:
        shutil.copytree(self._claims.directory / ready.encode(), target)
        return True

    with mock.patch.object(Attempt, "_take", take):
        yield


@mutation(
    "S1",
    "a new blob is published by rename",
    interleavings_of_files.of_two_creates_in_a_directory_one_wins,
    shows="['Created', 'Created']",
)
def rename_publishes() -> Iterator[None]:
    real = os.link

    def rename(source: str, target: str, *, dst_dir_fd: int, **how: Any) -> None:
        real(source, f"{target}-renamed", dst_dir_fd=dst_dir_fd, **how)
        os.replace(f"{target}-renamed", target, src_dir_fd=dst_dir_fd, dst_dir_fd=dst_dir_fd)

    with mock.patch.object(os, "link", rename):
        yield


@mutation(
    "S2",
    "a directory of the store may be a link",
    interleavings_of_files.what_lies_behind_a_link_stays,
    shows="deleted or wrote behind a link",
)
def links_are_followed() -> Iterator[None]:
    with mock.patch.object(local_dirs, "os", _FollowingOs()):
        yield


class _FollowingOs:
    """The module `os`, where a link is as good as what it leads to."""

    O_NOFOLLOW = 0

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


@mutation(
    "S2",
    "a collection takes whatever lies among the temporary files",
    interleavings_of_files.only_names_that_a_store_makes_are_left_over,
    shows="or a file goes",
)
def every_name_is_ours() -> Iterator[None]:
    with everywhere(local_dirs.is_temp_name, lambda _: True):
        yield

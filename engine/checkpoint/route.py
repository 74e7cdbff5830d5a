"""Give the changes of one batch to the stores of a replica, by their changelogs alone (design 0011, Q2)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from blobstore.concurrency import map_bounded, run_blocking
from blobstore.errors import CheckpointFileExistsError
from engine.checkpoint.file_check import check_hidden
from engine.checkpoint.store import capture
from engine.local.checksums import crc32c
from engine.runtime import Runtime
from engine.settings import MIB, TransferSettings
from engine.state.changelogs import PREFIX_BYTES, ChangelogWriter, Opener, open_changelog
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.files import StateFileManager, delete_old_versions
from engine.state.key_rules import Partitioner, StoreRules, check_keys
from engine.state.load import StateLoader
from engine.state.loaded import advanced, after_prefix, new_changelog, rebased
from engine.state.local_files import WorkingDir, remove_tree
from engine.state.query import StoreAt
from index.errors import LineageError, VersionMissingError
from index.spark.changelog import DELETE, DELETE_RANGE, Record, check_leads_back
from index.spark.checksums import unwrap_deleted_key, wrap_deleted_key
from index.spark.hdfs_rows import RowForm, SplitKey
from index.spark.lineage import Resolution
from index.spark.names import StateVersion

# Of records that are hashed at once.
_HELD_BYTES: Final = 4 * MIB
_HELD_RECORDS: Final = 16_384
# Of a record that is for all targets.
_ALL: Final = -1


class UnroutableError(Exception):
    """The changes of a batch are not in changelogs that can be routed: all state has to be copied (Q4)."""


class ReplicaStore:
    """One store of a replica: what its newest version is made of, and how the next one is added."""

    def __init__(self, store: StoreAt, files: CheckpointDir, working_dir: Path, runtime: Runtime) -> None:
        self.id = store.id
        self.settings = store.settings
        self.manager = StateFileManager(files, store.settings, runtime=runtime)
        # Of the newest version that was published, committed or not; of none before `open`.
        self.made_of = Resolution(StateVersion(0), None)
        # By the prefix of their keys, if they have any: the names of its column families.
        self.families: Mapping[bytes, str] = {}
        self._working_dir = working_dir
        self._place: WorkingDir | None = None
        # The header of a changelog was too short for the whole lineage.
        self._is_cut = False
        self._runtime = runtime

    async def open(self, at: StateVersion) -> None:
        """Find what a committed version is made of."""
        self.made_of = await self.manager.resolve(at.version, at.unique_id)
        base = self.made_of.rocksdb_snapshot
        if self.settings.column_families and base is not None:
            ids = (await self.manager.read_snapshot(base)).metadata.column_family_ids or ()
            self.families = {id_.to_bytes(PREFIX_BYTES, "little", signed=True): name for name, id_ in ids}

    def new_changelog(self, of: StateVersion, path: Path) -> ChangelogWriter:
        """Begin the changelog of the next version, as Spark would."""
        writer, self._is_cut = new_changelog(
            path,
            self.settings.codec,
            self.made_of,
            column_families=self.settings.column_families,
            unique_ids=of.unique_id is not None,
        )
        return writer

    async def publish(self, of: StateVersion, changelog: Path) -> int:
        """Add a version by its changelog; return its size."""
        size_bytes = await self.manager.publish_changelog(of, changelog)
        self.made_of = advanced(self.made_of, of)
        return size_bytes

    @property
    def versions_since_snapshot(self) -> int:
        base = self.made_of.base
        return self.made_of.target.version - (0 if base is None else base.version)

    def is_due(self, every: int) -> bool:
        """Return whether a snapshot is due: Spark before 4.2 wants each header to lead back to one."""
        return self._is_cut or self.versions_since_snapshot >= every

    async def snapshot(self) -> None:
        """Make a snapshot of the newest version, which is committed, and delete versions that are too old (Q6)."""
        place, of = await run_blocking(self._open_place), self.made_of.target
        loaded, _ = await StateLoader(self.manager, place, self._runtime).load(of, {}, read_only=True)
        try:
            captured = await run_blocking(capture, self.manager, place, loaded, of)
        finally:
            await run_blocking(loaded.db.close)
        try:
            await self.manager.upload_snapshot(captured)
        except CheckpointFileExistsError:
            pass  # another follower was faster
        finally:
            await run_blocking(remove_tree, captured.directory)
            await run_blocking(place.clear_fetched)
        self.made_of, self._is_cut = rebased(self.made_of, of), False
        await delete_old_versions(self.manager, needed=self.made_of)
        if self.manager.writable("snapshot").local_root is not None:
            # The next one takes links again.
            await self.close()

    def _open_place(self) -> WorkingDir:
        # Noted in the thread, which opens it even if the caller is cancelled meanwhile.
        if self._place is None:
            self._place = WorkingDir.open(self._working_dir)
        return self._place

    async def close(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            await run_blocking(place.close)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One store of the query: the version that a batch made, and the one that it was made from."""

    store: StoreAt
    before: StateVersion


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Stores of one name whose rows become those of others, and of no others."""

    # Partitions of the sources.
    sources: tuple[int, ...]
    targets: tuple[ReplicaStore, ...]
    # None where each store becomes one: nothing is hashed.
    rules: StoreRules | None
    partitions: int
    partitioner: Partitioner
    # Of rows that were HDFS-backed.
    split_key: SplitKey | None = None

    async def follow(
        self, root: CheckpointDir, sources: Sequence[Source], named: Sequence[StateVersion], scratch: Path
    ) -> tuple[int, int]:
        """Publish the changelogs of a batch at the targets, under these names.

        Returns how many records the sources had, and how many bytes were published.

        Raises:
            UnroutableError: The changes are not in changelogs that can be routed.
            MisplacedKeyError, PartitionKeyError: As `check_keys`.
            DamagedError, FormatError, StoreError: As the files say.
        """
        most = TransferSettings().in_flight_max
        openers = await map_bounded(lambda of: self._fetched(root, of, scratch), sources, in_flight_max=most)
        paths = [scratch / f"{of.id.partition}.new" for of in self.targets]
        records = await run_blocking(self._write, sources, openers, named, paths)
        written = list(zip(self.targets, named, paths, strict=True))
        sizes = await map_bounded(lambda item: item[0].publish(*item[1:]), written, in_flight_max=most)
        return records, sum(sizes)

    async def _fetched(self, root: CheckpointDir, source: Source, scratch: Path) -> Opener:
        """Fetch the changelog of a source, and return what opens it."""
        files, of = root.child(source.store.id.path), source.store.at
        manager = StateFileManager(files, source.store.settings)
        into = scratch / str(source.store.id.partition)
        await run_blocking(into.mkdir)
        try:
            (path,) = await manager.fetch_changelogs((of,), into)
        except VersionMissingError as error:
            raise UnroutableError(f"{error.subject} is not there") from error
        if files.local_root is not None and of.unique_id is None:
            await run_blocking(check_hidden, files.local_root / path.name)
        return lambda: open_changelog(path, source.store.settings.codec, of)

    def _write(
        self, sources: Sequence[Source], openers: Sequence[Opener], named: Sequence[StateVersion], paths: Sequence[Path]
    ) -> int:
        """Write the changelogs of the targets. Blocks."""
        count = 0
        with ExitStack() as stack:
            writers = {
                of.id.partition: stack.enter_context(of.new_changelog(version, path))
                for of, version, path in zip(self.targets, named, paths, strict=True)
            }
            for source, opener in zip(sources, openers, strict=True):
                with opener() as reader:
                    try:
                        check_leads_back(reader.header, source.store.at, source.before)
                    except LineageError as error:
                        raise UnroutableError(f"{source.store.id.path}: {error}") from error
                    for records in _joined(reader):
                        count += len(records)
                        translated = self._translated(source.store, records)
                        for record, to in zip(translated, self._targets_of(source.store, translated), strict=True):
                            for target in writers if to == _ALL else (to,):
                                writers[target].write(record)
            for writer in writers.values():
                writer.finish()
        return count

    def _translated(self, store: StoreAt, records: list[Record]) -> list[Record]:
        """Return records of the HDFS-backed provider as RocksDB's has them."""
        if not store.at.is_hdfs:
            return records
        summed = store.settings.row_checksums
        form = RowForm(summed, crc32c, self.split_key)
        found = [form.to_rocksdb(record) for record in records]
        if summed:
            found = [(kind, wrap_deleted_key(k, crc32c) if kind == DELETE else k, value) for kind, k, value in found]
        return found

    def _targets_of(self, store: StoreAt, records: Sequence[Record]) -> list[int]:
        """Find for each record the partition that it is for, once each key is found in place (H9)."""
        families = self.targets[0].families if store.settings.column_families else {b"": "default"}
        size = PREFIX_BYTES if store.settings.column_families else 0
        only = self.targets[0].id.partition
        found = [only] * len(records)
        by_family: dict[bytes, list[int]] = {}
        keys: list[bytes] = []
        for number, (kind, stored, value) in enumerate(records):
            is_summed = kind == DELETE and store.settings.row_checksums
            key = unwrap_deleted_key(stored, crc32c) if is_summed else stored
            keys.append(key)
            prefix = key[:size]
            if prefix not in families:
                raise UnroutableError(f"{store.id.path}: a column family came with batch {store.at.version - 1}")
            if kind != DELETE_RANGE:
                by_family.setdefault(prefix, []).append(number)
                continue
            if len(self.sources) > 1:
                raise UnroutableError(f"{store.id.path}: batch {store.at.version - 1} deletes a range of keys")
            if size and key == prefix and value.endswith(after_prefix(prefix)):
                raise UnroutableError(f"{store.id.path}: a column family went with batch {store.at.version - 1}")
            found[number] = _ALL
        if self.rules is None:
            return found
        before = self.rules.operator.partitions_count
        common = math.lcm(before, self.partitions)
        for prefix, numbers in by_family.items():
            name = families[prefix]
            rule = self.rules.families.get(name)
            bare = [keys[number][size:] for number in numbers]
            here = store.id.partition
            among = [here] * len(bare) if rule is None else self.partitioner(rule, bare, common)
            check_keys(self.rules, name, bare, [of % before for of in among], here)
            for number, of in zip(numbers, among, strict=True):
                found[number] = of % self.partitions
        return found


def _joined(reader: Iterable[list[Record]]) -> Iterator[list[Record]]:
    """Yield records in longer lists: what a block of a changelog has is too little to hash at once."""
    held: list[Record] = []
    size_bytes = 0
    for records in reader:
        held += records
        size_bytes += sum(len(key) + len(value) for _, key, value in records)
        if size_bytes >= _HELD_BYTES or len(held) >= _HELD_RECORDS:
            yield held
            held, size_bytes = [], 0
    if held:
        yield held

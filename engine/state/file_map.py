"""What a file manager knows in memory: which local file stands under which name, and which snapshot names what.

One lock guards all of it, held for no longer than a look: a load or a commit and a deletion may be at it from two
threads with an event loop each.
"""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from engine.errors import DamagedError
from engine.state.local_files import shared_path
from index.spark.metadata import StoredFile
from index.spark.names import StateVersion, stored_name
from index.spark.sharing import LocalStateFile, SharedFile, as_fetched, choose_kept, choose_reused, find_altered


class CapturedFile(msgspec.Struct, frozen=True):
    """One SST or archived WAL of a snapshot."""

    stored: StoredFile
    local: LocalStateFile
    # Whether the store has it already under that name.
    is_reused: bool


class ZipStamp(msgspec.Struct, frozen=True):
    """What a listing says of a zip: enough to tell that it was overwritten, for a zip that can be."""

    size_bytes: int
    modified_at_ms: int


class _Named(msgspec.Struct, frozen=True):
    """What a snapshot names."""

    paths: frozenset[str]
    # None: it was put there by this process, which has not seen it listed yet.
    stamp: ZipStamp | None


class StateFileMap:
    """The memory of one file manager. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By local name: what is true of the files in the working directory.
        self._shared: dict[str, SharedFile] = {}
        # Uploads that are not complete, and the paths that their snapshots will name: no later snapshot may name what
        # they put there (S1), and nothing of it may be deleted.
        self._pending: dict[str, frozenset[str]] = {}
        self._named: dict[StateVersion, _Named] = {}
        # What uploads have named that ended while somebody watches; one list for each who does.
        self._watches: list[list[str]] = []
        # How few versions anybody here has asked a deletion to retain; None: nobody has.
        self._retained_min: int | None = None
        self._oldest_seen = 1
        self._newest_seen: int | None = None

    # --- the working directory ---

    def forget_all(self) -> None:
        """The working directory is empty, or what stands there is not to be believed."""
        with self._lock:
            self._shared = {}

    def begin_load(self, version: int, local: Sequence[LocalStateFile], wanted: Sequence[StoredFile]) -> frozenset[str]:
        """Choose the local files that stay for a snapshot, and forget everything about all others.

        Returns:
            Local names. If the load then fails, what is known of these is still true.
        """
        with self._lock:
            kept = choose_kept(local, wanted, self._shared, self._pending)
            self._shared = as_fetched(self._shared, kept, version)
            return kept

    def end_load(self, version: int, fetched: Sequence[tuple[StoredFile, LocalStateFile]]) -> None:
        """Remember files that were fetched for a snapshot."""
        with self._lock:
            for stored, local in fetched:
                self._shared[local.name] = SharedFile(
                    stored=stored, identity=local.identity, stamp=local.stamp, version=version
                )

    def capture(self, local: Sequence[LocalStateFile], *, version: int, upload_id: str) -> tuple[CapturedFile, ...]:
        """Decide under which name each file of a new snapshot stands, once and for all (S1 to S3).

        Raises:
            DamagedError: A file was altered; nothing is known of any file then (S5).
        """
        with self._lock:
            altered = find_altered(local, self._shared)
            if altered:
                self._shared = {}
                raise DamagedError(
                    f"was written to since it was fetched or uploaded, as {len(altered)} of {len(local)} files were",
                    operation="snapshot",
                    subject=altered[0],
                    hint="RocksDB never does that; load the version again, which fetches every file",
                )
            reused = choose_reused(local, self._shared, version=version, pending=self._pending)
            files: list[CapturedFile] = []
            shared: dict[str, SharedFile] = {}
            for file in local:
                if file.name in reused:
                    shared[file.name] = self._shared[file.name]
                else:
                    new = StoredFile(file.name, stored_name(file.name, upload_id), file.size_bytes)
                    shared[file.name] = SharedFile(
                        stored=new, identity=file.identity, stamp=file.stamp, version=version, upload_id=upload_id
                    )
                files.append(CapturedFile(shared[file.name].stored, file, file.name in reused))
            # Files that are gone from the working directory go from here: another history may make them anew.
            self._shared = shared
            self._pending[upload_id] = _paths(files)
            return tuple(files)

    def begin_upload(self, upload_id: str, files: Sequence[CapturedFile]) -> None:
        """A captured snapshot is about to be uploaded, and names these files."""
        with self._lock:
            self._pending[upload_id] = self._pending.get(upload_id, frozenset()) | _paths(files)

    def uploaded(self, upload_id: str) -> None:
        """Everything that an upload was to put there is there, its zip included."""
        with self._lock:
            self._end(upload_id)

    def discard(self, upload_id: str) -> None:
        """An upload will never be complete: forget what it was to put there."""
        with self._lock:
            self._shared = {name: file for name, file in self._shared.items() if file.upload_id != upload_id}
            # Its zip may be there all the same, if the store never said.
            self._end(upload_id)

    def _end(self, upload_id: str) -> None:
        paths = self._pending.pop(upload_id, frozenset())
        for watch in self._watches:
            watch.extend(paths)

    def rename(self, files: Sequence[CapturedFile], *, version: int, upload_id: str) -> None:
        """Files that were reused stand under new names now; what was loaded meanwhile is not touched (S4)."""
        with self._lock:
            for file in files:
                known = self._shared.get(file.local.name)
                if known is not None and known.identity == file.local.identity and known.version < version:
                    self._shared[file.local.name] = msgspec.structs.replace(
                        known, stored=file.stored, version=version, upload_id=upload_id
                    )

    # --- what snapshots name ---

    def newest_use(self, path: str) -> int:
        """The newest version known to name a file of `SSTs/` or `logs/`; 0 if none is."""
        with self._lock:
            return max((of.version for of, named in self._named.items() if path in named.paths), default=0)

    def named_by(self, of: StateVersion, stamp: ZipStamp) -> frozenset[str] | None:
        """What a snapshot names, if that is known and still true; a name with a unique id is never overwritten."""
        with self._lock:
            named = self._named.get(of)
            if named is None or (of.unique_id is None and named.stamp != stamp):
                return None
            return named.paths

    def remember_named(self, of: StateVersion, paths: Collection[str], stamp: ZipStamp | None) -> None:
        """What a snapshot names."""
        with self._lock:
            self._named[of] = _Named(frozenset(paths), stamp)

    def forget_named(self, versions: Collection[StateVersion]) -> None:
        """Snapshots that are gone, or may be overwritten from now on."""
        with self._lock:
            for of in versions:
                self._named.pop(of, None)

    def forget_named_from(self, version: int) -> None:
        """Snapshots without ids of this version and later ones: a load of it goes before they are written again."""
        with self._lock:
            self._named = {
                of: named for of, named in self._named.items() if of.unique_id is not None or of.version < version
            }

    # --- what is deleted ---

    @contextmanager
    def watch_uploads(self) -> Iterator[Collection[str]]:
        """While the block runs, the paths that uploads have named which ended since it began."""
        watch: list[str] = []
        with self._lock:
            self._watches.append(watch)
        try:
            yield watch
        finally:
            with self._lock:
                self._watches = [other for other in self._watches if other is not watch]

    def give_up(self, paths: Collection[str], uploaded: Collection[str]) -> tuple[str, ...]:
        """Those files that may be deleted, as no upload names them; from now on none that begins will.

        Args:
            paths: Of files in `SSTs/` and `logs/` that no snapshot which stays names.
            uploaded: What `watch_uploads` has shown since before the snapshots were listed.
        """
        with self._lock:
            in_use = known_names(self._pending) | frozenset(uploaded)
            given_up = tuple(path for path in paths if path not in in_use)
            gone = frozenset(given_up)
            self._shared = {
                name: file for name, file in self._shared.items() if shared_path(file.stored.stored_name) not in gone
            }
            return given_up

    def retains(self, versions: int) -> None:
        """A deletion here is to retain so many versions."""
        with self._lock:
            self._retained_min = versions if self._retained_min is None else min(versions, self._retained_min)

    @property
    def retained_min(self) -> int | None:
        """The fewest versions that a deletion here was to retain; None if there was none."""
        with self._lock:
            return self._retained_min

    @property
    def seen(self) -> tuple[int, int | None]:
        """The oldest version that the last deletion kept, and the newest snapshot that was put there."""
        with self._lock:
            return self._oldest_seen, self._newest_seen

    def saw_snapshot(self, version: int) -> None:
        """A snapshot was put there."""
        with self._lock:
            self._newest_seen = max(version, self._newest_seen or 0)

    def deleted_below(self, version: int) -> None:
        """A deletion kept this version as the oldest."""
        with self._lock:
            self._oldest_seen = version


def known_names(named: Mapping[Any, Collection[str]]) -> frozenset[str]:
    """All paths that some snapshots or uploads name."""
    return frozenset(path for paths in named.values() for path in paths)


def _paths(files: Iterable[CapturedFile]) -> frozenset[str]:
    return frozenset(shared_path(file.stored.stored_name) for file in files)

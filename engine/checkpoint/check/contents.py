"""What the files of one state store hold: each is read once, what is wrong is noted (design 0005, K2 to K4)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from blobstore.concurrency import run_blocking
from blobstore.errors import BlobCorruptError, BlobNotFoundError
from engine.checkpoint.file_check import ChangelogReport, check_changelog_file, check_hidden, check_zip_file
from engine.checkpoint.findings import CheckLevel, Finding, damage
from engine.checkpoint.sst_check import check_sst
from engine.errors import DamagedError, EngineError
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.local_files import shared_path
from engine.state.settings import CodecName, StateStoreSettings
from index.errors import DamagedChangelogError, FileChecksumError, FormatError
from index.spark.changelog import changelog_version
from index.spark.checkpoint import StoreId
from index.spark.checksums import FILE_CHECKSUM_BYTES_MAX, hadoop_checksum_name
from index.spark.metadata import StateMetadata, StoredFile
from index.spark.names import StateVersion, by_version, changelog_name, checksum_name, snapshot_name

T = TypeVar("T")


class StoreWork(msgspec.Struct, frozen=True, kw_only=True):
    """One store to check."""

    id: StoreId
    # What the commit log says of it, ascending, and how the changelog of each is compressed.
    versions: tuple[StateVersion, ...]
    codecs: tuple[CodecName, ...]
    # As the newest of them has it.
    settings: StateStoreSettings
    newest_batch: int


class StoreContents:
    """The files of one store, while it is checked.

    Attributes:
        sizes: Of every file of the store by its path, once they are listed; in bytes.
        findings: What was found so far.
        damaged: The paths that a finding of damage is about.
        changelogs: What was read; None for what is damaged.
        zips: Likewise.
        counts: Of what was read, as in `StoreChecked`.
    """

    def __init__(self, directory: CheckpointDir, work: StoreWork, here: Path, level: CheckLevel) -> None:
        self._directory = directory
        self._work = work
        self._level = level
        self._here = here
        self._is_local = directory.local_root is not None
        self._codecs = dict(zip((of.version for of in work.versions), work.codecs, strict=True))
        # Zips and changelogs that are compared with their `.crc`.
        self._summed: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.findings: list[Finding] = []
        self.damaged: set[str] = set()
        self.changelogs: dict[StateVersion, ChangelogReport | None] = {}
        self.zips: dict[StateVersion, StateMetadata | None] = {}
        self.counts = {"files": 0, "size_bytes": 0, "ssts": 0, "blocks": 0}

    async def changelog(self, of: StateVersion) -> ChangelogReport | None:
        """Read a changelog whole, once (K4); None if it is damaged."""
        if of not in self.changelogs:
            name = changelog_name(of)
            checksum = await self._checksum(name, of)
            codec = self._codec(of)

            def read(path: Path) -> ChangelogReport:
                try:
                    return check_changelog_file(path, codec, of, checksum=checksum)
                except FileChecksumError:
                    # Of a file that proves itself, the checksum is what was altered.
                    if codec == "lz4":
                        check_changelog_file(path, codec, of, checksum=None)
                        raise _ChecksumAlteredError from None
                    raise

            self.changelogs[of] = report = await self._read(name, read, "K4")
            fitting = changelog_version(
                column_families=self._work.settings.column_families, unique_ids=of.unique_id is not None
            )
            if report is not None and report.header.version != fitting:
                message = f"is of version {report.header.version}, and the operator's are of version {fitting}"
                self.note(
                    name, DamagedChangelogError(message, hint="another store's file was copied to this name"), "K4"
                )
        return self.changelogs[of]

    async def zip(self, of: StateVersion) -> StateMetadata | None:
        """Read a snapshot's zip whole, once (K4); None if it is damaged."""
        if of not in self.zips:
            name = snapshot_name(of)
            checksum = await self._checksum(name, of)

            def read(path: Path) -> StateMetadata:
                try:
                    return check_zip_file(path, checksum=checksum).metadata
                except FileChecksumError:
                    check_zip_file(path, checksum=None)
                    raise _ChecksumAlteredError from None

            self.zips[of] = await self._read(name, read, "K4")
        return self.zips[of]

    async def _checksum(self, name: str, of: StateVersion) -> bytes | None:
        """Read the `.crc` beside a file; without an id it may be of a file that was overwritten (0004, N5)."""
        path = checksum_name(name)
        if of.unique_id is None or path not in self.sizes:
            return None
        self._summed.add(name)
        try:
            return await self._directory.read(path, size_bytes_max=FILE_CHECKSUM_BYTES_MAX)
        except BlobNotFoundError:
            return None
        except DamagedError:
            return b""  # larger than any: its reader refuses it

    async def check_shared(self) -> None:
        """Check every SST and log that a needed snapshot names: there, of its size, and sound (K3, K4)."""
        seen: set[str] = set()
        for of, state in sorted(self.zips.items(), key=lambda item: by_version(item[0]), reverse=True):
            if state is None:
                continue
            for file in (*state.sst_files, *state.log_files):
                path = shared_path(file.stored_name)
                seen.add(path)
                self._check_there(path, of, file)
        for path in sorted(seen):
            if path not in self.damaged:
                await self._check_sst(path)

    def _check_there(self, path: str, of: StateVersion, file: StoredFile) -> None:
        size_bytes = self.sizes.get(path)
        if size_bytes is None:
            hint = "it was deleted while it was needed; restore the checkpoint, or an older batch"
            self.note(
                path, DamagedError(f"is not there, and snapshot {of} names it", operation="check", hint=hint), "K1"
            )
        elif size_bytes != file.size_bytes:
            self.note(path, _size_error(of, file, size_bytes), "K4")

    async def _check_sst(self, path: str) -> None:
        if self._level == "quick":
            return
        if not path.endswith(".sst"):
            await self._read(path, lambda _: None, "K4")
            return
        report = await self._read(path, check_sst, "K3")
        if report is None:
            return
        self.counts["ssts"] += 1
        self.counts["blocks"] += report.blocks
        if not report.checked:
            self.findings.append(
                Finding(
                    kind="warning",
                    path=f"{self._work.id.path}/{path}",
                    message=f"{report.reason}: it cannot be decided whether it is whole",
                    hint="only a comparison with a backup can show it",
                    rule="K3",
                )
            )

    async def _read(self, path: str, read: Callable[[Path], T], rule: str) -> T | None:
        """Have a file here, and read it; None if it is damaged, which is noted."""
        place = self._here / path
        try:
            if not self._is_local:
                await self._directory.fetch(path, place)
            found = await run_blocking(read, place)
            self.counts["files"] += 1
            self.counts["size_bytes"] += self.sizes.get(path, 0)
        except _ChecksumAlteredError:
            hint = "delete it, if a backup has the same file beside it: without one, the file is read unverified"
            error = FileChecksumError("is not the checksum of its file, which is sound", hint=hint)
            self.note(checksum_name(path), error, "K4")
            return None
        except (DamagedError, FormatError) as error:
            self.note(path, error, rule)
            return None
        except (BlobNotFoundError, BlobCorruptError) as error:
            self.note(path, DamagedError(f"cannot be had: {error}", operation="check"), rule)
            return None
        if self._is_local:
            await self._check_hidden(path, place)
        return found

    async def _check_hidden(self, path: str, place: Path) -> None:
        """Check that Hadoop would read the file (K2). If its bytes were proved, the hidden file is the wrong one."""
        proved = path.endswith(".sst") or path in self._summed
        for name, file in ((path, place), (checksum_name(path), place.with_name(checksum_name(place.name)))):
            try:
                if name == path or name in self.sizes:
                    await run_blocking(check_hidden, file)
            except (FileChecksumError, DamagedError) as error:
                if not proved:
                    self.note(name, error, "K2")
                    continue
                parent, _, last = name.rpartition("/")
                hidden = f"{parent}/{hadoop_checksum_name(last)}" if parent else hadoop_checksum_name(last)
                self.note(hidden, error, "K2", note=f"{last} itself is sound: delete the hidden file")

    def _codec(self, of: StateVersion) -> CodecName:
        """Return how a changelog is compressed; before every commit record, as the oldest of these."""
        codecs: Mapping[int, CodecName] = self._codecs
        return codecs.get(of.version) or codecs[min(codecs)]

    def note(self, path: str, error: EngineError | FormatError, rule: str, *, note: str = "") -> None:
        """Note an error about a file of the store; of one file the first counts."""
        if path in self.damaged:
            return
        self.damaged.add(path)
        store = self._work.id.path
        self.findings.append(damage(f"{store}/{path}" if path else store, error, rule, note=note))


class _ChecksumAlteredError(Exception):
    """A file that proves itself does not fit its `.crc`."""


def _size_error(of: StateVersion, file: StoredFile, size_bytes: int) -> DamagedError:
    return DamagedError(
        f"has {size_bytes} bytes, and snapshot {of} says {file.size_bytes}",
        operation="check",
        hint="it was cut short or replaced; take it from a backup, or restore the checkpoint",
    )

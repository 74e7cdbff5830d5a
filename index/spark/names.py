"""The names of files in the directory of a Spark state store: one grammar, both directions (design 0004, N1 to N4).

Every `check_` function raises UnsafeNameError for a name from outside that is not what it should be.
"""

import re
from typing import Final, Literal

import msgspec

from index.errors import UnsafeNameError
from index.snapshot.keys import check_file_name
from index.snapshot.model import SIZE_BYTES_MAX, UniqueId

SSTS: Final = "SSTs"
LOGS: Final = "logs"
CHECKSUM_SUFFIX: Final = ".crc"
# The entry of a snapshot that says which SSTs belong to it.
METADATA: Final = "metadata"

# What exists is never newer: 2^63 - 1, as in the grammar.
STATE_VERSION_MAX: Final = SIZE_BYTES_MAX

# A component of a key, as every store takes it (`blobstore.base`); a name outside this grammar is in no store.
_COMPONENT = re.compile(r"[A-Za-z0-9_@~%+=,-][A-Za-z0-9_@~%+=,.-]{0,254}")
_ID: Final = r"[A-Za-z0-9@~%+=,.-]+"
_UNIQUE_ID = re.compile(_ID)
_DIGITS = re.compile("[0-9]+")
_STATE_NAME = re.compile(
    rf"(?P<version>0|[1-9][0-9]{{0,18}})(?:(?:_(?P<unique_id>{_ID}))?\.(?P<kind>zip|changelog)"
    r"|\.(?P<hdfs_kind>snapshot|delta))(?P<checksum>\.crc)?"
)

_UUID: Final = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_SHARED = re.compile(rf"SSTs/[0-9]+-{_UUID}\.sst|logs/[0-9]+-{_UUID}\.log")
_NO_ENTRY = re.compile(r"LOG(\.old\..*)?|LOCK|IDENTITY|rocksdict-config\.json|archive|\..*", re.DOTALL)

_HINT: Final = "the snapshot is damaged or hostile; nothing was written"

StateFileKind = Literal["snapshot", "changelog"]


class StateVersion(msgspec.Struct, frozen=True):
    """One version of a state store, and with checkpoint format V2 the id of the attempt that wrote it (0004, R1).

    Sorts by version, then by id; a version without an id sorts before those with one.
    """

    # The state after batch `version - 1`; 0 is empty and has no file.
    version: int
    unique_id: UniqueId | None = None
    # Whether its files are named as the HDFS-backed provider names them, which knows no ids (N1a).
    is_hdfs: bool = False

    def __str__(self) -> str:  # type: ignore[explicit-override]  # as in `DisplayMixin`
        return str(self.version) if self.unique_id is None else f"{self.version}_{self.unique_id}"

    def __lt__(self, other: "StateVersion") -> bool:
        return (self.version, self.unique_id or "") < (other.version, other.unique_id or "")


class StateFileName(msgspec.Struct, frozen=True):
    """A parsed name of a snapshot, a changelog, or the checksum file of one."""

    kind: StateFileKind
    of: StateVersion
    # Whether this is `<name>.crc`, the checksum of the file that the rest of the name is about.
    checksum: bool = False


def parse_state_name(name: str) -> StateFileName | None:
    """Parse the name of a file in the directory of a state store; None if it is foreign (design 0004, N1).

    Hadoop's hidden `.1.zip.crc`, left-overs of Spark's (`.<name>.<uuid>.tmp`) and directories are foreign. Spark itself
    fails on what it cannot parse; we pass it over.
    """
    m = _STATE_NAME.fullmatch(name)
    if m is None:
        return None
    version = int(m["version"])
    unique_id = m["unique_id"]
    if version > STATE_VERSION_MAX:
        return None
    kind: StateFileKind = "snapshot" if m["kind"] == "zip" or m["hdfs_kind"] == "snapshot" else "changelog"
    of = StateVersion(version, None if unique_id is None else UniqueId(unique_id), is_hdfs=m["hdfs_kind"] is not None)
    return StateFileName(kind, of, checksum=m["checksum"] is not None)


def snapshot_name(of: StateVersion) -> str:
    """`3.zip` or `3_<uid>.zip`; `3.snapshot` of the HDFS-backed provider."""
    return f"{of}.{'snapshot' if of.is_hdfs else 'zip'}"


def changelog_name(of: StateVersion) -> str:
    """`3.changelog` or `3_<uid>.changelog`; `3.delta` of the HDFS-backed provider."""
    return f"{of}.{'delta' if of.is_hdfs else 'changelog'}"


def state_name(kind: StateFileKind, of: StateVersion) -> str:
    """Return the name of a snapshot or a changelog; the inverse of `parse_state_name` without a checksum."""
    return snapshot_name(of) if kind == "snapshot" else changelog_name(of)


def checksum_name(name: str) -> str:
    """Return the name of the file that holds the checksum of the file `name`."""
    return name + CHECKSUM_SUFFIX


def stored_name(local_name: str, upload_id: str) -> str:
    """Return the name that a local name is stored under: `000008.sst` becomes `000008-<upload id>.sst` (0004, N3).

    The local name is checked, and the upload id is a UUID, the same for all new files of one snapshot.
    """
    stem, dot, extension = local_name.rpartition(".")
    return f"{stem}-{upload_id}{dot}{extension}"


def is_shared_path(path: str) -> bool:
    """Return whether Spark or tidemark gives a file in `SSTs/` or `logs/` this path (design 0004, N3)."""
    return _SHARED.fullmatch(path) is not None


def check_unique_id(unique_id: str) -> UniqueId:
    """Check that an id from outside makes a safe file name that parses back to it (design 0004, N1).

    It is refused if it is empty, has a character that no key of a store has, or `_`, or makes a name of over 255 bytes.
    """
    hint = "unique ids are UUIDs; take the one in the commit log"
    if _UNIQUE_ID.fullmatch(unique_id) is None:
        raise UnsafeNameError("cannot be in the name of a state file", subject=f"unique id {unique_id!r}", hint=hint)
    check_file_name(checksum_name(changelog_name(StateVersion(STATE_VERSION_MAX, UniqueId(unique_id)))))
    return UniqueId(unique_id)


def check_local_name(name: str, extension: str) -> str:
    """Check that the local name of an SST (`.sst`) or archived WAL (`.log`) is `<digits><extension>` (0004, N4)."""
    check_file_name(name)
    if not name.endswith(extension) or _DIGITS.fullmatch(name.removesuffix(extension)) is None:
        raise UnsafeNameError(f"is not <digits>{extension}", subject=repr(name), hint=_HINT)
    return name


def check_stored_name(name: str, extension: str) -> str:
    """Check that a name in `SSTs/` or `logs/` from outside is one component with this extension (0004, N4).

    What is before the extension is up to its writer, such as `000008-<uuid>.sst`.
    """
    if not name.endswith(extension):
        raise UnsafeNameError(f"does not end in {extension}", subject=repr(name), hint=_HINT)
    return _check_component(name, repr(name))


def is_zip_entry(name: str) -> bool:
    """Return whether a file at the top of a RocksDB directory is part of a snapshot's zip (design 0004, Z3).

    Not so: SSTs, what RocksDB and rocksdict leave beside the files that matter, leftovers of ours, and what would take
    the place of the directory of archived WALs.
    """
    return not name.endswith(".sst") and _NO_ENTRY.fullmatch(name) is None


def check_zip_entry(name: str) -> str:
    """Check that the name of an entry of a snapshot is one safe component that belongs there (design 0004, N4)."""
    check_file_name(name)
    if not is_zip_entry(name):
        raise UnsafeNameError("is never in a snapshot", subject=repr(name), hint=_HINT)
    return name


def check_store_dir(name: str) -> str:
    """Check that the name of a state store from outside is one component of a key (design 0004, N4)."""
    return _check_component(name, f"store {name!r}")


def _check_component(name: str, subject: str) -> str:
    check_file_name(name)
    if _COMPONENT.fullmatch(name) is None:
        raise UnsafeNameError("has a character that no name in a store has", subject=subject, hint=_HINT)
    return name

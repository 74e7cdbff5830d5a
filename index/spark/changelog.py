"""Read and write what a changelog holds once it is decompressed: records of changes, in four versions (design 0004, 3).

The decoder takes a file in chunks as they come and never holds more of it than one chunk and one record (L5).
"""

import re
import struct
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from index.errors import DamagedChangelogError, LineageError, UnknownFormatError, UnsupportedRecordError
from index.java_text import decode_utf, encode_utf
from index.snapshot.model import LineageItem
from index.spark.lineage import decode_lineage, encode_lineage
from index.spark.names import StateVersion, changelog_name

PUT: Final = 0x01
DELETE: Final = 0x10
MERGE: Final = 0x11
DELETE_RANGE: Final = 0x20

# A length is a Java int, so 2 GiB are legal; no row comes near it, and a hostile length must not fill the memory.
FIELD_BYTES_MAX: Final = 512 * 1024 * 1024

ChangelogVersion = Literal[1, 2, 3, 4]
# Kind, key and value. The value of a DELETE is empty; a DELETE_RANGE is its begin and its end, which is exclusive.
Record = tuple[int, bytes, bytes]

_END: Final = 0x00
_END_V1: Final = -1
_NO_VALUE: Final = -1
_TYPED: Final[frozenset[int]] = frozenset({2, 4})
_WITH_LINEAGE: Final[frozenset[int]] = frozenset({3, 4})
_KINDS: Final = frozenset({PUT, DELETE, MERGE, DELETE_RANGE})
# Spark reads the second from 4.2 on.
_ONLY_TYPED: Final = {MERGE: "MERGE", DELETE_RANGE: "DELETE_RANGE"}
# A file that says `v1` says it with the length and the beginning of its first key.
_WRITTEN_VERSIONS: Final[dict[bytes, ChangelogVersion]] = {b"v2": 2, b"v3": 3, b"v4": 4}
# Spark reads the version as a Java short.
_VERSION_MAX: Final = 0x7FFF
_VERSION_UTF = re.compile(rb"v([0-9]{1,5})")
_VERSION_UTF_BYTES_MAX: Final = 6

_INT = struct.Struct(">i")
_UTF_LENGTH = struct.Struct(">H")
_TYPE_AND_LENGTH = struct.Struct(">Bi")

_HINT: Final = (
    "the file is damaged; take it from a backup, or load an older version and let the query run its batches again"
)
_UPGRADE: Final = "a newer Spark has written it; upgrade tidemark"


class ChangelogHeader(msgspec.Struct, frozen=True):
    """The part of a changelog before its records."""

    version: ChangelogVersion
    # As the file has it; empty in versions 1 and 2, which have no unique ids.
    lineage: tuple[LineageItem, ...] = ()
    # Where the first record begins, in bytes of the decompressed file.
    size_bytes: int = 0


def changelog_version(*, column_families: bool, unique_ids: bool) -> ChangelogVersion:
    """Return the version in which Spark writes the changelogs of a store (design 0004, 3)."""
    if unique_ids:
        return 4 if column_families else 3
    return 2 if column_families else 1


def check_header(header: ChangelogHeader, of: StateVersion, *, subject: str = "changelog") -> None:
    """Refuse a changelog that is of another kind than its name says (design 0004, L6).

    Raises:
        DamagedChangelogError: The name has an id and the content no lineage, not even an empty one, or the reverse; or
            the name is of the HDFS-backed provider, and the content is not of version 1 (N1a).
    """
    if of.is_hdfs and header.version != 1:
        message = f"is a changelog of version {header.version}, and the HDFS-backed provider writes version 1"
    elif (of.unique_id is not None) == (header.version in _WITH_LINEAGE):
        return
    else:
        found = f"has {'no' if of.unique_id is None else 'an'} id in its name, and its content is of version"
        message = f"{found} {header.version}, which goes with another kind of name"
    hint = "another file was copied to this name; take the file from a backup"
    raise DamagedChangelogError(message, subject=subject, hint=hint)


def check_leads_back(header: ChangelogHeader, of: StateVersion, before: StateVersion) -> None:
    """Refuse the changelog of `of` if it was not written on top of the version `before` (design 0004, R8).

    That was replayed before it, or is the base; version 0 if it is to be replayed on nothing.

    Raises:
        LineageError: Its lineage ends with another version, or there is one where it is to follow a version without an
            id, or none where it is to follow one with an id.
    """
    if of.unique_id is None:
        return
    newest = max((StateVersion(item.version, item.unique_id) for item in header.lineage), default=None)
    if newest != (None if before.unique_id is None else before):
        written_on = newest or "no version with an id"
        message = f"does not lead back: it was written on top of {written_on}, not of {before}"
        raise LineageError(message, subject=changelog_name(of), hint=_HINT)


def decode_header(start: bytes, *, complete: bool, subject: str = "changelog") -> ChangelogHeader | None:
    """Decode the header of a changelog from its first bytes; None if more are needed: never when `complete`.

    Version 1 has none, and its first bytes are the length of a key. Whatever does not read as a version is of version
    1, however it fails to.

    `start` is of the decompressed file, of which 65,543 bytes are enough; `complete`: it has no more bytes than these.

    Raises:
        UnknownFormatError: The file is of a version above 4.
        DamagedChangelogError: The lineage is cut short or is not a lineage.
        UnsafeNameError: An id in the lineage cannot be part of a file name.

    Source:
        Design 0004, L1; Spark's `StateStoreChangelogReaderFactory`, SPARK-51922 and SPARK-52553.
    """
    version, size_bytes = _decode_version(start, complete=complete, subject=subject)
    if version is None:
        return None
    if version not in _WITH_LINEAGE:
        return ChangelogHeader(version, (), size_bytes)
    try:
        decoded = decode_utf(start, size_bytes)
        if decoded is None:
            if not complete:
                return None
            raise DamagedChangelogError("ends within its lineage", subject=subject, hint=_HINT)
        text, size_bytes = decoded
        return ChangelogHeader(version, decode_lineage(text), size_bytes)
    except (ValueError, LineageError) as error:
        raise DamagedChangelogError(f"has no lineage that can be read: {error}", subject=subject, hint=_HINT) from error


def _decode_version(start: bytes, *, complete: bool, subject: str) -> tuple[ChangelogVersion | None, int]:
    if len(start) < _UTF_LENGTH.size:
        return (1 if complete else None), 0
    (length,) = _UTF_LENGTH.unpack_from(start)
    if length > _VERSION_UTF_BYTES_MAX:
        return 1, 0
    size_bytes = _UTF_LENGTH.size + length
    if len(start) < size_bytes:
        return (1 if complete else None), 0
    m = _VERSION_UTF.fullmatch(start, _UTF_LENGTH.size, size_bytes)
    number = 1 if m is None else int(m[1])
    if number == 1 or number > _VERSION_MAX:
        return 1, 0
    version = _WRITTEN_VERSIONS.get(start[_UTF_LENGTH.size : size_bytes])
    if version is None:
        message, hint = f"is a changelog of version {number}; this tidemark reads 1 to 4", _UPGRADE
        raise UnknownFormatError(message, subject=subject, hint=hint)
    return version, size_bytes


class ChangelogDecoder:
    """Reads the records of one changelog from chunks of its decompressed bytes.

    Feed the chunks in order and call `finish` after the last one: only then is the file known to be whole.
    """

    def __init__(self, subject: str = "changelog", *, field_bytes_max: int = FIELD_BYTES_MAX) -> None:
        self.header: ChangelogHeader | None = None
        self._subject = subject
        self._field_bytes_max = field_bytes_max
        # What was fed and is not a whole record yet; joined only when it can be one, so that a long record that comes
        # in many chunks is copied once and not once per chunk.
        self._pending: list[bytes] = []
        self.buffered_bytes = 0
        self._needed_bytes = 1
        # Where `_pending` begins in the file.
        self._offset_bytes = 0
        self._ended = False
        self._is_typed = False

    def feed(self, chunk: bytes) -> list[Record]:
        """Return the records that are whole with this chunk, in order; it may be of any size, empty too.

        Raises:
            DamagedChangelogError: The bytes break design 0004, L2. The decoder is of no use after that.
            UnknownFormatError, UnsafeNameError: As for `decode_header`.
        """
        records: list[Record] = []
        if not chunk:
            return records
        if self._ended:
            raise self._damaged("has bytes after its end mark", 0)
        self._pending.append(chunk)
        self.buffered_bytes += len(chunk)
        if self.buffered_bytes < self._needed_bytes:
            return records
        buffer = chunk if len(self._pending) == 1 else b"".join(self._pending)
        start = 0
        if self.header is None:
            header = decode_header(buffer, complete=False, subject=self._subject)
            if header is None:
                self._hold(buffer, 0, len(buffer) + 1)
                return records
            self.header = header
            start = header.size_bytes
            self._is_typed = header.version in _TYPED
        self._needed_bytes = 1
        used = self._decode(buffer, start, records)
        self._hold(buffer, used, self._needed_bytes)
        return records

    def finish(self) -> None:
        """Say that all bytes were fed.

        Raises:
            DamagedChangelogError: The file ends without its end mark (design 0004, L2).
            UnknownFormatError: As for `decode_header`.
        """
        if self._ended:
            return
        if self.header is None:
            # To distinguish a cut header from a cut record: whatever it is, it has no end mark.
            self.header = decode_header(b"".join(self._pending), complete=True, subject=self._subject)
        raise self._damaged("ends without its end mark", self.buffered_bytes)

    def _hold(self, buffer: bytes, used: int, needed_bytes: int) -> None:
        rest = buffer[used:]
        if rest and self._ended:
            raise self._damaged("has bytes after its end mark", used)
        self._pending = [rest] if rest else []
        self.buffered_bytes = len(rest)
        self._needed_bytes = needed_bytes
        self._offset_bytes += used

    def _damaged(self, message: str, at: int) -> DamagedChangelogError:
        return DamagedChangelogError(
            f"{message} (at byte {self._offset_bytes + at} of the decompressed file)", subject=self._subject, hint=_HINT
        )

    def _bad_length(self, length: int, at: int) -> DamagedChangelogError:
        return self._damaged(f"has a length of {length} in a record", at)

    def _decode(self, buffer: bytes, at: int, records: list[Record]) -> int:
        """Decode what is whole, and return where it ends; `_needed_bytes` is how many from there are worth another try.

        It is long because a call per record would cost half the speed.
        """
        unpack_int, unpack_start, append = _INT.unpack_from, _TYPE_AND_LENGTH.unpack_from, records.append
        most, end, is_typed = self._field_bytes_max, len(buffer), self._is_typed
        head = _TYPE_AND_LENGTH.size if is_typed else _INT.size
        kind = PUT
        while at + head <= end:
            if is_typed:
                kind, key_length = unpack_start(buffer, at)
                if kind not in _KINDS:
                    break
            else:
                (key_length,) = unpack_int(buffer, at)
            if not 0 <= key_length <= most:
                break
            key_at = at + head
            key_end = key_at + key_length
            value_at = key_end + 4
            if value_at > end:
                self._needed_bytes = value_at - at
                return at
            (value_length,) = unpack_int(buffer, key_end)
            if 0 <= value_length <= most and kind != DELETE:
                value_end = value_at + value_length
                if value_end > end:
                    self._needed_bytes = value_end - at
                    return at
                append((kind, buffer[key_at:key_end], buffer[value_at:value_end]))
                at = value_end
            elif value_length == _NO_VALUE and (kind == DELETE or not is_typed):
                append((DELETE, buffer[key_at:key_end], b""))
                at = value_at
            elif kind == DELETE:
                raise self._damaged(f"has a value of length {value_length} in a DELETE", key_end)
            else:
                raise self._bad_length(value_length, key_end)
        return self._decode_what_is_no_record(buffer, at)

    def _decode_what_is_no_record(self, buffer: bytes, at: int) -> int:
        """Decode the end mark, or the beginning of a record that is not whole; anything else is damage."""
        rest_bytes = len(buffer) - at
        if not self._is_typed and rest_bytes >= _INT.size:
            (length,) = _INT.unpack_from(buffer, at)
            if length != _END_V1:
                raise self._bad_length(length, at)
            self._ended = True
            return at + _INT.size
        if self._is_typed and rest_bytes:
            if buffer[at] == _END:
                self._ended = True
                return at + 1
            if buffer[at] not in _KINDS:
                raise self._damaged(f"has a record of the unknown type 0x{buffer[at]:02x}", at)
            if rest_bytes >= _TYPE_AND_LENGTH.size:
                raise self._bad_length(_TYPE_AND_LENGTH.unpack_from(buffer, at)[1], at)
        return at


def encode_header(version: ChangelogVersion, lineage: Iterable[LineageItem] = ()) -> bytes:
    """Encode what comes before the records.

    The lineage is from the newest snapshot known at load to the version before this one, ascending; versions 1 and 2
    have none.

    Raises:
        UnsupportedRecordError: The version is 1 or 2 and there is a lineage.
        LineageError: The lineage takes more than 65,535 bytes (design 0004, C6).
    """
    items = tuple(lineage)
    if version not in _WITH_LINEAGE:
        if items:
            subject, hint = f"changelog version {version}", "only stores with unique ids (versions 3 and 4) have one"
            raise UnsupportedRecordError("cannot hold a lineage", subject=subject, hint=hint)
        return b"" if version == 1 else encode_utf(f"v{version}")
    try:
        return encode_utf(f"v{version}") + encode_utf(encode_lineage(items))
    except ValueError as error:
        hint = "commit a snapshot: a lineage begins at the newest one"
        raise LineageError(f"of {len(items)} versions is too long: {error}", subject="lineage", hint=hint) from error


def encode_end(version: ChangelogVersion) -> bytes:
    """Encode the end mark, without which a changelog is damaged (design 0004, L2)."""
    return bytes([_END]) if version in _TYPED else _INT.pack(_END_V1)


def encode_record(version: ChangelogVersion, record: Record) -> bytes:
    """Encode a record, as the decoder gives it.

    Raises:
        UnsupportedRecordError: Key or value is above FIELD_BYTES_MAX, the kind is unknown, or the version is 1 or 3 and
            knows neither MERGE nor DELETE_RANGE (design 0004, L3).
    """
    kind, key, value = record
    if kind not in _KINDS:
        raise UnsupportedRecordError("is unknown", subject=f"record type {kind}", hint="pass a kind of this module")
    is_typed = version in _TYPED
    if not is_typed and kind in _ONLY_TYPED:
        subject, hint = f"changelog version {version}", "only stores with column families (versions 2 and 4) have them"
        raise UnsupportedRecordError(f"cannot hold a {_ONLY_TYPED[kind]}", subject=subject, hint=hint)
    if max(len(key), len(value)) > FIELD_BYTES_MAX:
        message = f"has a field of over {FIELD_BYTES_MAX} bytes"
        raise UnsupportedRecordError(message, subject="changelog record", hint="split the row")
    start = _TYPE_AND_LENGTH.pack(kind, len(key)) if is_typed else _INT.pack(len(key))
    return start + key + (_INT.pack(_NO_VALUE) if kind == DELETE else _INT.pack(len(value)) + value)

"""Read and write what a changelog holds once it is decompressed: records of changes, in four versions (design 0004, 3).

The decoder takes a file in chunks as they come and never holds more of it than one chunk and one record (L5).
"""

import re
import struct
from collections.abc import Callable, Iterable
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
        hint = "another file was copied to this name; take the file from a backup"
        raise DamagedChangelogError(message, subject=subject, hint=hint)
    if (of.unique_id is not None) == (header.version in _WITH_LINEAGE):
        return
    kind = "an id" if of.unique_id is not None else "no id"
    raise DamagedChangelogError(
        f"has {kind} in its name, and its content is of version {header.version}, which goes with another kind of name",
        subject=subject,
        hint="another file was copied to this name; take the file from a backup",
    )


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
    if newest == (None if before.unique_id is None else before):
        return
    raise LineageError(
        f"does not lead back: it was written on top of {newest or 'no version with an id'}, not of {before}",
        subject=changelog_name(of),
        hint=_HINT,
    )


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
        raise UnknownFormatError(
            f"is a changelog of version {number}; this tidemark reads 1 to 4",
            subject=subject,
            hint="a newer Spark has written it; upgrade tidemark",
        )
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
        self._decode: Callable[[bytes, int, list[Record]], int] = self._decode_plain

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
            if header.version in _TYPED:
                self._decode = self._decode_typed
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

    def _check_length(self, length: int, at: int) -> None:
        if not 0 <= length <= self._field_bytes_max:
            raise self._damaged(f"has a length of {length} in a record", at)

    # Both loops decode what is whole and answer where they stopped; `_needed_bytes` then says how many bytes from there
    # are wanted before it is worth another try. They are long because a call per record would cost half the speed.

    def _decode_plain(self, buffer: bytes, at: int, records: list[Record]) -> int:
        unpack_int = _INT.unpack_from
        append = records.append
        most = self._field_bytes_max
        end = len(buffer)
        while at + 4 <= end:
            (key_length,) = unpack_int(buffer, at)
            if not 0 <= key_length <= most:
                if key_length == _END_V1:
                    self._ended = True
                    return at + 4
                self._check_length(key_length, at)
            key_at = at + 4
            key_end = key_at + key_length
            value_at = key_end + 4
            if value_at > end:
                self._needed_bytes = value_at - at
                return at
            (value_length,) = unpack_int(buffer, key_end)
            if 0 <= value_length <= most:
                value_end = value_at + value_length
                if value_end > end:
                    self._needed_bytes = value_end - at
                    return at
                append((PUT, buffer[key_at:key_end], buffer[value_at:value_end]))
                at = value_end
            elif value_length == _NO_VALUE:
                append((DELETE, buffer[key_at:key_end], b""))
                at = value_at
            else:
                self._check_length(value_length, key_end)
        return at

    def _decode_typed(self, buffer: bytes, at: int, records: list[Record]) -> int:
        unpack_int = _INT.unpack_from
        unpack_start = _TYPE_AND_LENGTH.unpack_from
        append = records.append
        most = self._field_bytes_max
        end = len(buffer)
        while at + 5 <= end:
            kind, key_length = unpack_start(buffer, at)
            if kind not in _KINDS or not 0 <= key_length <= most:
                break
            key_at = at + 5
            key_end = key_at + key_length
            value_at = key_end + 4
            if value_at > end:
                self._needed_bytes = value_at - at
                return at
            (value_length,) = unpack_int(buffer, key_end)
            if kind == DELETE:
                if value_length != _NO_VALUE:
                    raise self._damaged(f"has a value of length {value_length} in a DELETE", key_end)
                append((DELETE, buffer[key_at:key_end], b""))
                at = value_at
                continue
            if not 0 <= value_length <= most:
                self._check_length(value_length, key_end)
            value_end = value_at + value_length
            if value_end > end:
                self._needed_bytes = value_end - at
                return at
            append((kind, buffer[key_at:key_end], buffer[value_at:value_end]))
            at = value_end
        return self._decode_what_is_no_record(buffer, at)

    def _decode_what_is_no_record(self, buffer: bytes, at: int) -> int:
        """Decode the end mark, or the beginning of a record that is not whole; anything else is damage."""
        if at == len(buffer):
            return at
        if buffer[at] == _END:
            self._ended = True
            return at + 1
        if buffer[at] not in _KINDS:
            raise self._damaged(f"has a record of the unknown type 0x{buffer[at]:02x}", at)
        if at + _TYPE_AND_LENGTH.size <= len(buffer):
            self._check_length(_TYPE_AND_LENGTH.unpack_from(buffer, at)[1], at)
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
            raise UnsupportedRecordError(
                "cannot hold a lineage",
                subject=f"changelog version {version}",
                hint="only stores with unique ids (versions 3 and 4) have one",
            )
        return b"" if version == 1 else encode_utf(f"v{version}")
    try:
        return encode_utf(f"v{version}") + encode_utf(encode_lineage(items))
    except ValueError as error:
        raise LineageError(
            f"of {len(items)} versions is too long: {error}",
            subject="lineage",
            hint="commit a snapshot: a lineage begins at the newest one",
        ) from error


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
        raise UnsupportedRecordError(
            f"cannot hold a {_ONLY_TYPED[kind]}",
            subject=f"changelog version {version}",
            hint="only stores with column families (versions 2 and 4) have them",
        )
    if len(key) > FIELD_BYTES_MAX or len(value) > FIELD_BYTES_MAX:
        raise UnsupportedRecordError(
            f"has a field of over {FIELD_BYTES_MAX} bytes", subject="changelog record", hint="split the row"
        )
    start = _TYPE_AND_LENGTH.pack(kind, len(key)) if is_typed else _INT.pack(len(key))
    return start + key + (_INT.pack(_NO_VALUE) if kind == DELETE else _INT.pack(len(value)) + value)

"""Read and write a MANIFEST of RocksDB: which SSTs a store consists of, and on which levels (design 0010, M1 to M5).

```
MANIFEST = blocks of 32 KiB, of which the last may be shorter
block    = records | zeros, where no head of a record fits
record   = masked CRC32C (4) | length (2) | type (1) | [log number (4): types 5 to 8] | payload
type     = 1 or 5 a whole edit; 2 or 6 its first piece, 3 or 7 one between, 4 or 8 its last piece
edit     = (tag | value) …
tag      = a varint; what follows depends on it: `_PARTS`
```

Integers are little-endian or varints. The checksum is over the type, the log number and the payload. An edit changes
one column family. What a store has is what all edits together make of nothing (`apply_edits`). Tags from 8192 on may be
passed over by readers that do not know them, so they have a length; any other unknown tag is refused by its number.

Nothing here reads a file or computes a CRC32C: the caller has the function. No length is believed beyond the bytes
given, so that what is decoded is never much larger than they are.

Source:
    RocksDB 9.8 `db/version_edit.h`, `db/version_edit.cc`, `db/log_format.h`, `db/log_reader.cc`, `db/log_writer.cc`,
    `db/version_edit_handler.cc`, `util/crc32c.h`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec
from typing_extensions import Buffer

from index.errors import ManifestError, UnknownFormatError
from index.rocksdb.sst import decode_varint

# CRC-32C of bytes, unsigned and not masked.
Crc32c = Callable[[bytes], int]

BLOCK_BYTES: Final = 32 * 1024
# Before a user key ends: its sequence number (7 bytes) and the kind of the entry.
INTERNAL_BYTES: Final = 8
SEQUENCE_MAX: Final = (1 << 56) - 1
# The two bits above it say which directory a file is in.
FILE_NUMBER_MAX: Final = (1 << 62) - 1
DEFAULT_FAMILY: Final = b"default"
BYTEWISE: Final = b"leveldb.BytewiseComparator"
# RocksDB has 7 levels unless it was opened with another number; more than this nobody has.
LEVELS_MAX: Final = 64

_HEAD_BYTES: Final = 7
_RECYCLABLE_HEAD_BYTES: Final = 11
_MASK_DELTA: Final = 0xA282EAD8
_UINT32: Final = 0xFFFFFFFF
_UINT64: Final = 0xFFFFFFFFFFFFFFFF
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# What a recyclable type is above the other.
_RECYCLABLE: Final = 4
# The types that a log which is not a MANIFEST may begin with where it takes the place of an older one.
_RECYCLED: Final = frozenset({5, 6, 7, 8, 11, 131})
# Of a first record that says how the others are compressed. It has no number, whatever file it is in.
_COMPRESSED: Final = 9

_IGNORABLE: Final = 8192
# Tags that are known by name, and not read.
_REFUSED: Final = {
    7: "a file of LevelDB's form",
    100: "a file of an old form",
    102: "a file of an old form",
    400: "a blob file",
    401: "garbage of a blob file",
    # Ignorable by their numbers, but without a length.
    8194: "a blob file",
    8195: "garbage of a blob file",
    8196: "a write-ahead log of an old form",
    8197: "the end of a write-ahead log of an old form",
}

# Fields of a file behind its keys.
_FIELD_END: Final = 1
FIELD_LOG_NUMBER_MIN: Final = 3
FIELD_OLDEST_BLOB_FILE: Final = 4
FIELD_EPOCH: Final = 13
FIELD_RANGE_DELETIONS: Final = 14
FIELD_TAIL_SIZE: Final = 15
# A reader that does not know a field with this bit must not open the store.
_FIELD_NEEDED: Final = 64

_NEWER: Final = "a newer RocksDB wrote it, or one with other options; use a newer tidemark"
_DAMAGED: Final = "the store is damaged: bring it back from a backup"


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True):
    """An SST of a store."""

    number: int
    size_bytes: int
    # Internal keys: the user key, and 8 bytes.
    smallest: bytes
    largest: bytes
    smallest_sequence: int
    largest_sequence: int
    # Whatever else is known of it, by number and as it is stored.
    fields: tuple[tuple[int, bytes], ...] = ()

    @property
    def smallest_key(self) -> bytes:
        return self.smallest[:-INTERNAL_BYTES]

    @property
    def largest_key(self) -> bytes:
        return self.largest[:-INTERNAL_BYTES]

    @property
    def epoch(self) -> int | None:
        """The greater, the newer are its rows; None in files of RocksDB before 7.10."""
        return _decode_number(dict(self.fields).get(FIELD_EPOCH, b""))

    @property
    def tail_bytes(self) -> int | None:
        """How much of its end is behind its data; None in files of RocksDB before 8.2."""
        return _decode_number(dict(self.fields).get(FIELD_TAIL_SIZE, b""))

    def with_epoch(self, epoch: int) -> "ManifestFile":
        fields = {**dict(self.fields), FIELD_EPOCH: _varint(epoch)}
        return msgspec.structs.replace(self, fields=tuple(fields.items()))


class VersionEdit(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a store; what is None or empty stays as it was. Which tag each has: `_PARTS`."""

    db_id: bytes | None = None
    comparator: bytes | None = None
    # The write-ahead logs before it are not needed by the family.
    log_number: int | None = None
    previous_log_number: int | None = None
    next_file_number: int | None = None
    family_id_max: int | None = None
    log_number_min: int | None = None
    last_sequence: int | None = None
    # Level and internal key at which the next compaction begins.
    compact_cursors: tuple[tuple[int, bytes], ...] = ()
    # Level and number.
    deleted: tuple[tuple[int, int], ...] = ()
    # Level and file.
    added: tuple[tuple[int, ManifestFile], ...] = ()
    family: int = 0
    # The name of the family, which begins here.
    family_added: bytes | None = None
    is_family_dropped: bool = False
    # Number of edits that follow in the same atomic group.
    group_left: int | None = None
    # Other tags from 8192 on, with their values.
    ignored: tuple[tuple[int, bytes], ...] = ()

    @property
    def is_compaction(self) -> bool:
        """Whether no row comes or goes, and no write-ahead log stops being needed: also of an edit with numbers only.

        A flush has a log number; files that are ingested replace none; those that go without others in their place may
        have had rows (design 0012, L7).
        """
        logs_stay = self.log_number is None and self.log_number_min is None
        return logs_stay and self._families_stay and bool(self.added) == bool(self.deleted)

    @property
    def is_flush(self) -> bool:
        """Whether rows only go from memory to files of level 0, and write-ahead logs stop being needed."""
        logs_go = self.log_number is not None or self.log_number_min is not None
        return logs_go and self._families_stay and not self.deleted and not any(level for level, _ in self.added)

    @property
    def _families_stay(self) -> bool:
        return self.family_added is None and not self.is_family_dropped


class ManifestFamily(msgspec.Struct, frozen=True, kw_only=True):
    """A column family as all edits together leave it."""

    id: int
    name: bytes
    comparator: bytes
    log_number: int = 0
    # Level and file, sorted by level and number.
    files: tuple[tuple[int, ManifestFile], ...] = ()


def runs_of(family: ManifestFamily) -> Iterator[tuple[ManifestFile, ...]]:
    """Iterate over runs of files that overlap nowhere, by their keys, the newest first: each file of level 0 is one."""
    by_level: dict[int, list[ManifestFile]] = {}
    for level, file in family.files:
        by_level.setdefault(level, []).append(file)
    first = by_level.pop(0, [])
    has_epochs = all(file.epoch for file in first)

    def age(file: ManifestFile) -> tuple[int, ...]:
        epoch = (file.epoch or 0) if has_epochs else 0
        return epoch, file.largest_sequence, file.smallest_sequence, file.number

    for file in sorted(first, key=age, reverse=True):
        yield (file,)
    for _, files in sorted(by_level.items()):
        # Of one key what is newer comes first.
        files.sort(key=lambda of: (of.smallest_key, -int.from_bytes(of.smallest[-INTERNAL_BYTES:], "little")))
        yield tuple(files)


class ManifestState(msgspec.Struct, frozen=True, kw_only=True):
    """What a store consists of."""

    # Sorted by id; the first is `default`, with id 0.
    families: tuple[ManifestFamily, ...]
    last_sequence: int
    next_file_number: int
    family_id_max: int = 0
    db_id: bytes | None = None


# --- the log


def decode_log(
    data: bytes, *, crc32c: Crc32c, is_live: bool = False, start: int = 0, number: int | None = None, subject: str
) -> tuple[list[bytes], int]:
    """Take the records out of a log, whole, each as its writer had it.

    Args:
        data: All of it, or with `is_live` what there is so far.
        crc32c: Of bytes.
        is_live: Somebody may be writing to it: what is not there whole is left (M2).
        start: Where in `data`, which begins with a block, the first record that is wanted begins.
        number: That of a write-ahead log. Records of another number are left from the log that was in this file before.
        subject: What errors call it.

    Returns:
        The records, and where in `data` the last one ends: a later call may start there, with more behind it.

    Raises:
        ManifestError: A record does not fit its checksum, is of a type that nobody knows, or is cut short.
    """
    records: list[bytes] = []
    pieces: list[bytes] = []
    whole_bytes = start
    own = None if number is None else (number & _UINT32).to_bytes(4, "little")
    for kind, payload, end in _pieces(data, crc32c, start, own, subject, is_live=is_live):
        if (kind in {_FULL, _FIRST}) == bool(pieces):
            raise _broken("has pieces of a record without its other pieces", subject)
        pieces.append(payload)
        if kind in {_FULL, _LAST}:
            records.append(b"".join(pieces))
            pieces, whole_bytes = [], end
    if pieces and not is_live:
        raise _broken("is cut short", subject)
    return records, whole_bytes


def _pieces(
    data: bytes, crc32c: Crc32c, at: int, log_number: bytes | None, subject: str, *, is_live: bool
) -> Iterator[tuple[int, bytes, int]]:
    """Yield type, payload and end of each piece; the type is that of a log which is not recycled."""
    while at < len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < _HEAD_BYTES:
            if any(data[at : at + left]):
                raise _broken("has other bytes than zeros at the end of a block", subject)
            at += left
            continue
        kind = data[at + 6] if at + _HEAD_BYTES <= len(data) else 0
        payload_at = at + (_HEAD_BYTES if kind <= _LAST else _RECYCLABLE_HEAD_BYTES)
        end = payload_at + int.from_bytes(data[at + 4 : at + 6], "little")
        if end > len(data) or not kind:
            # It is not there yet, or the file was made longer before it is written.
            if is_live and (end > len(data) or not any(data[at:])):
                return
            raise _broken("is cut short", subject)
        if kind > _LAST + _RECYCLABLE or end - at > left:
            raise _broken(f"has a record of type {kind} and {end - at} bytes in a block with {left} left", subject)
        if int.from_bytes(data[at : at + 4], "little") != mask_crc(crc32c(data[at + 6 : end])):
            raise _broken(f"has a record at byte {at} that does not fit its checksum", subject)
        if kind > _LAST:
            kind -= _RECYCLABLE
            log_number = log_number or data[at + _HEAD_BYTES : payload_at]
            if not data.startswith(log_number, at + _HEAD_BYTES):
                return  # left from the log that was in this file before
        yield kind, data[payload_at:end], end
        at = end


def measure_log(data: Buffer) -> int:
    """Measure the whole records of a write-ahead log that somebody writes to, in bytes from its beginning.

    Nothing is decoded, and no more is looked at than the last blocks. In a log that takes the place of an older one
    everything counts: after its own records come what is left of those, and what opens the store knows them apart.
    """
    with memoryview(data) as log:
        first = 0
        if len(log) >= _HEAD_BYTES and log[6] == _COMPRESSED:
            first = _HEAD_BYTES + int.from_bytes(log[4:6], "little")
        if len(log) >= first + _HEAD_BYTES and log[first + 6] in _RECYCLED:
            return len(log)
        for block in range((len(log) - 1) // BLOCK_BYTES * BLOCK_BYTES, -1, -BLOCK_BYTES):
            at, whole_bytes = block, 0
            while at + _HEAD_BYTES <= min(len(log), block + BLOCK_BYTES) and (kind := log[at + 6]):
                at += _HEAD_BYTES + int.from_bytes(log[at + 4 : at + 6], "little")
                if at <= len(log) and kind not in {_FIRST, _MIDDLE}:
                    whole_bytes = at
            if whole_bytes:
                return whole_bytes
    return 0


def encode_log(records: Iterable[bytes], *, crc32c: Crc32c) -> bytes:
    """Encode a log, as RocksDB writes one that takes the place of no older log."""
    log = bytearray()
    for record in records:
        at, is_first, is_last = 0, True, False
        while not is_last:
            left = BLOCK_BYTES - len(log) % BLOCK_BYTES
            if left < _HEAD_BYTES:
                log += bytes(left)
                left = BLOCK_BYTES
            piece = record[at : at + left - _HEAD_BYTES]
            at += len(piece)
            is_last = at == len(record)
            kind = (_FULL if is_last else _FIRST) if is_first else (_LAST if is_last else _MIDDLE)
            is_first = False
            typed = bytes((kind,)) + piece
            log += mask_crc(crc32c(typed)).to_bytes(4, "little") + len(piece).to_bytes(2, "little") + typed
    return bytes(log)


def mask_crc(crc: int) -> int:
    """Return a CRC-32C as RocksDB stores it: never as it is, of bytes that may hold CRCs."""
    return ((crc >> 15 | crc << 17 & _UINT32) + _MASK_DELTA) & _UINT32


# --- edits


class _Reader:
    """Takes an edit apart from front to end; no length is believed beyond its bytes."""

    def __init__(self, data: bytes, subject: str) -> None:
        self._data = data
        self.subject = subject
        self.at = 0

    def number(self, most: int = _UINT64) -> int:
        try:
            value, self.at = decode_varint(self._data, self.at)
        except ValueError as error:
            raise _broken(f"has an edit that {error}", self.subject) from error
        if value > most:
            raise _broken(f"has the number {value} where at most {most} can be", self.subject)
        return value

    def slice(self, least: int = 0) -> bytes:
        size = self.number()
        end = self.at + size
        if end > len(self._data) or size < least:
            raise _broken("has an edit with a length that cannot be", self.subject)
        found = self._data[self.at : end]
        self.at = end
        return found


def decode_edit(data: bytes, *, subject: str) -> VersionEdit:
    """Decode one record of a MANIFEST.

    Raises:
        ManifestError: It is not an edit.
        UnknownFormatError: It has a tag that must not be passed over, which the error names (M1).
    """
    reader = _Reader(data, subject)
    found: dict[str, Any] = {}
    ignored: list[tuple[int, bytes]] = []
    while reader.at < len(data):
        tag = reader.number(_UINT32)
        part = _PARTS.get(tag)
        if part is not None:
            value = part.decode(reader)
            found[part.name] = (*found.get(part.name, ()), value) if part.is_many else value
        elif tag & _IGNORABLE and tag not in _REFUSED:
            ignored.append((tag, reader.slice()))
        else:
            what = f", {_REFUSED[tag]}" if tag in _REFUSED else ""
            raise UnknownFormatError(f"has an edit with the tag {tag}{what}", subject=subject, hint=_NEWER)
    return VersionEdit(**found, ignored=tuple(ignored))


def encode_edit(edit: VersionEdit) -> bytes:
    """Encode an edit, with its parts in RocksDB's order."""
    parts: list[bytes] = []
    for tag, part in _PARTS.items():
        value = getattr(edit, part.name)
        if value != getattr(_NOTHING, part.name):
            values = value if part.is_many else (value,)
            parts += [_varint(tag) + part.encode(value) for value in values]
    parts += [_varint(tag) + _slice(value) for tag, value in edit.ignored]
    return b"".join(parts)


def _decode_file(reader: _Reader) -> tuple[int, ManifestFile]:
    level = reader.number(LEVELS_MAX)
    number, size_bytes = reader.number(FILE_NUMBER_MAX), reader.number()
    smallest, largest = reader.slice(INTERNAL_BYTES), reader.slice(INTERNAL_BYTES)
    sequences = reader.number(SEQUENCE_MAX), reader.number(SEQUENCE_MAX)
    fields: list[tuple[int, bytes]] = []
    while (field := reader.number(_UINT32)) != _FIELD_END:
        if field & _FIELD_NEEDED:
            raise UnknownFormatError(f"has a file with the field {field}", subject=reader.subject, hint=_NEWER)
        value = reader.slice()
        if field == FIELD_EPOCH and _decode_number(value) is None:
            raise _broken(f"has a file with the epoch number {value.hex()}", reader.subject)
        fields.append((field, value))
    return level, ManifestFile(
        number=number,
        size_bytes=size_bytes,
        smallest=smallest,
        largest=largest,
        smallest_sequence=sequences[0],
        largest_sequence=sequences[1],
        fields=tuple(fields),
    )


def _encode_file(placed: tuple[int, ManifestFile]) -> bytes:
    level, file = placed
    head = _varint(level) + _varint(file.number) + _varint(file.size_bytes) + _slice(file.smallest)
    sequences = _varint(file.smallest_sequence) + _varint(file.largest_sequence)
    fields = b"".join(_varint(field) + _slice(value) for field, value in file.fields)
    return head + _slice(file.largest) + sequences + fields + _varint(_FIELD_END)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:  # noqa: PLR2004 — seven bits a byte
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _slice(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _decode_number(value: bytes) -> int | None:
    try:
        number, end = decode_varint(value, 0)
    except ValueError:
        return None
    return number if end == len(value) and number <= _UINT64 else None


class _Part(NamedTuple):
    """How one tag of an edit is read and written."""

    name: str
    decode: Callable[[_Reader], object]
    encode: Callable[[Any], bytes]
    # Whether an edit may have it several times.
    is_many: bool = False


def _number_part(name: str, most: int = _UINT64) -> _Part:
    return _Part(name, lambda reader: reader.number(most), _varint)


# In the order in which RocksDB writes them.
_PARTS: Final = {
    8193: _Part("db_id", _Reader.slice, _slice),
    1: _Part("comparator", _Reader.slice, _slice),
    2: _number_part("log_number"),
    9: _number_part("previous_log_number"),
    3: _number_part("next_file_number", FILE_NUMBER_MAX),
    203: _number_part("family_id_max", _UINT32),
    10: _number_part("log_number_min"),
    4: _number_part("last_sequence", SEQUENCE_MAX),
    5: _Part(
        "compact_cursors",
        lambda reader: (reader.number(LEVELS_MAX), reader.slice(INTERNAL_BYTES)),
        lambda cursor: _varint(cursor[0]) + _slice(cursor[1]),
        is_many=True,
    ),
    6: _Part(
        "deleted",
        lambda reader: (reader.number(LEVELS_MAX), reader.number()),
        lambda file: _varint(file[0]) + _varint(file[1]),
        is_many=True,
    ),
    103: _Part("added", _decode_file, _encode_file, is_many=True),
    200: _number_part("family", _UINT32),
    201: _Part("family_added", _Reader.slice, _slice),
    202: _Part("is_family_dropped", lambda _: True, lambda _: b""),
    300: _number_part("group_left", _UINT32),
}
_NOTHING: Final = VersionEdit()


# --- what they amount to


class _Family:
    """A column family while edits are applied."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.comparator: bytes | None = None
        self.log_number = 0
        self.files: dict[int, tuple[int, ManifestFile]] = {}

    def apply(self, edit: VersionEdit, subject: str) -> None:
        if edit.comparator is not None:
            if self.comparator not in {None, edit.comparator}:
                raise _broken(f"changes the comparator of column family {self.name!r}", subject)
            self.comparator = edit.comparator
        if edit.log_number is not None:
            self.log_number = edit.log_number
        for level, number in edit.deleted:
            if self.files.get(number, (None,))[0] != level:
                raise _broken(f"deletes file {number} from level {level}, where it is not", subject)
            del self.files[number]
        for level, file in edit.added:
            if file.number in self.files:
                raise _broken(f"adds file {file.number} twice", subject)
            self.files[file.number] = (level, file)


def apply_edits(edits: Iterable[VersionEdit], *, onto: ManifestState | None = None, subject: str) -> ManifestState:
    """Apply edits, in their order, to a store that has nothing (M3), or to what earlier ones made of it.

    An atomic group that is not complete at the end counts for nothing, as for RocksDB.

    Raises:
        ManifestError: They contradict each other, or do not say what a store must have.
    """
    families = {0: _Family(DEFAULT_FAMILY)}
    last_sequence = next_file = None
    family_id_max = 0
    db_id: bytes | None = None
    before = _edits_of(onto) if onto is not None else ()
    for edit in _whole_groups(itertools.chain(before, edits), subject):
        _apply_to_family(edit, families, subject)
        if edit.last_sequence is not None:
            last_sequence = edit.last_sequence
        if edit.next_file_number is not None:
            next_file = edit.next_file_number
        family_id_max = max(family_id_max, edit.family_id_max or 0, *families)
        db_id = db_id if edit.db_id is None else edit.db_id
    if last_sequence is None or next_file is None:
        raise _broken("does not say the last sequence number and the next file number", subject)
    found = []
    for id_, family in sorted(families.items()):
        if family.comparator is None:
            raise _broken(f"does not say the comparator of column family {family.name!r}", subject)
        for _, file in family.files.values():
            if file.number >= next_file:
                raise _broken(f"has file {file.number}, and says that the next one is {next_file}", subject)
        files = tuple(sorted(family.files.values(), key=lambda placed: (placed[0], placed[1].number)))
        found.append(
            ManifestFamily(
                id=id_, name=family.name, comparator=family.comparator, log_number=family.log_number, files=files
            )
        )
    return ManifestState(
        families=tuple(found),
        last_sequence=last_sequence,
        next_file_number=next_file,
        family_id_max=family_id_max,
        db_id=db_id,
    )


def _whole_groups(edits: Iterable[VersionEdit], subject: str) -> Iterator[VersionEdit]:
    group: list[VersionEdit] = []
    for edit in edits:
        if group and edit.group_left != (group[-1].group_left or 0) - 1:
            raise _broken("has an atomic group that is not complete", subject)
        if edit.group_left:
            group.append(edit)
            continue
        yield from group
        yield edit
        group = []


def _apply_to_family(edit: VersionEdit, families: dict[int, _Family], subject: str) -> None:
    if edit.family_added is not None:
        if edit.family in families or any(edit.family_added == family.name for family in families.values()):
            raise _broken(f"adds the column family {edit.family_added!r} twice", subject)
        families[edit.family] = _Family(edit.family_added)
    family = families.get(edit.family)
    if family is None:
        raise _broken(f"changes the column family {edit.family}, which is not there", subject)
    if edit.is_family_dropped:
        if not edit.family:
            raise _broken("drops the default column family", subject)
        del families[edit.family]
        return
    family.apply(edit, subject)


def decode_manifest(data: bytes, *, crc32c: Crc32c, is_live: bool = False, subject: str) -> ManifestState:
    """Decode a MANIFEST into what its store has; with `is_live` as `decode_log`.

    Raises:
        ManifestError: It is damaged.
        UnknownFormatError: It has what must not be passed over.
    """
    records, _ = decode_log(data, crc32c=crc32c, is_live=is_live, subject=subject)
    return apply_edits((decode_edit(record, subject=subject) for record in records), subject=subject)


def encode_manifest(state: ManifestState, *, crc32c: Crc32c) -> bytes:
    """Encode a MANIFEST for a store that has no write-ahead log (M4)."""
    return encode_log(map(encode_edit, _edits_of(state)), crc32c=crc32c)


def _edits_of(state: ManifestState) -> Iterator[VersionEdit]:
    for family in state.families:
        name = family.name if family.id else None
        yield VersionEdit(comparator=family.comparator, family=family.id, family_added=name)
        yield VersionEdit(log_number=family.log_number, added=family.files, family=family.id)
    yield VersionEdit(
        db_id=state.db_id,
        previous_log_number=0,
        next_file_number=state.next_file_number,
        family_id_max=state.family_id_max,
        log_number_min=0,
        last_sequence=state.last_sequence,
    )


def _broken(message: str, subject: str) -> ManifestError:
    return ManifestError(message, subject=subject, hint=_DAMAGED)

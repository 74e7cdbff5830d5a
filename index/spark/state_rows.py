"""What all rows of a column family of state have: bytes, the heaviest of their leading columns, and times of events.

Rows are read where a figure is in them, without decoding them: an UnsafeRow has a word for each field. Nothing is
believed: what lies outside of its row is a ValueError.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from index.spark.schema import AtomType, DataType, KeyForm, StateSchema, StructType
from index.spark.unsafe_row import WORD, is_in_word, null_bytes

Pair = tuple[bytes, bytes]

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
# Groups that are counted at once, and those that are kept when there are more.
_GROUPS_MAX: Final = 40_000
_GROUPS_KEPT: Final = 20_000
GROUPS_SHOWN: Final = 10
_LABEL_CHARACTERS_MAX: Final = 60
_MARK_CHARACTERS: Final = 8
# Of a longer value a group keeps more than is shown of it, and a hash of all of it.
_VALUE_BYTES_MAX: Final = 256
_VALUE_BYTES_KEPT: Final = 240

_LENGTH_BYTES: Final = 4
_WORDS: Final = frozenset({"boolean", "byte", "short", "integer", "long", "date", "timestamp", "timestamp_ntz"})
# Types that are read, beside decimals, structs, arrays and maps.
_READ: Final = _WORDS | {"float", "double", "string", "binary"}
_TIMES: Final = frozenset({"timestamp", "timestamp_ntz"})
# When a row goes, as `dropDuplicatesWithinWatermark` notes it, in microseconds.
_EXPIRES: Final = "expiresAtMicros"
# Operators that drop a row once the watermark has reached the time in its key, or in its value; in complete mode an
# aggregation drops none.
_DROPPING_BY_KEY: Final = frozenset({"stateStoreSave", "dedupe"})
_DROPPING_BY_VALUE: Final = frozenset({"dedupeWithinWatermark", "sessionWindowStateStoreSaveExec"})


class KeyGroup(msgspec.Struct, frozen=True, kw_only=True):
    """All rows with one value in the leading column of their keys."""

    key: str
    rows: int
    # Of keys and values.
    size_bytes: int


class RowAges(msgspec.Struct, frozen=True, kw_only=True):
    """Times of rows against the watermark: how many it has reached, and how many it will have reached."""

    # The column that has the time.
    column: str
    # Whether the operator drops what the watermark has reached; of a join its condition decides.
    expires: bool
    # None: no row has a time.
    oldest_ms: int | None = None
    newest_ms: int | None = None
    # Rows by how far the watermark has to go on, each counted once.
    due: int = 0
    within_1h: int = 0
    within_1d: int = 0
    later: int = 0
    # Their time is null.
    without: int = 0

    def plus(self, other: "RowAges") -> "RowAges":
        times = [at for of in (self, other) for at in (of.oldest_ms, of.newest_ms) if at is not None]
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        column = self.column if self.column == other.column else f"{self.column}, {other.column}"
        ends = {"oldest_ms": min(times, default=None), "newest_ms": max(times, default=None)}
        return msgspec.structs.replace(self, column=column, **ends, **counts)


_COUNTS: Final = ("due", "within_1h", "within_1d", "later", "without")


class FamilyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one column family, counted."""

    name: str
    is_internal: bool = False
    rows: int = 0
    # Of keys and values, as Spark encodes them.
    size_bytes: int = 0
    heaviest: tuple[KeyGroup, ...] = ()
    # By how much a group may be heavier than it is said to be, or one that is not among them.
    heaviest_error_bytes: int = 0
    # None: no column has a time of events.
    ages: RowAges | None = None
    # Why rows were only counted; empty if they were read.
    unread: str = ""


class FamilyScan:
    """Counts the rows of a column family, given in lists."""

    def __init__(
        self,
        name: str,
        schema: StateSchema | None,
        form: KeyForm | None,
        *,
        operator: str,
        watermark_ms: int,
        is_internal: bool = False,
        is_list: bool = False,
    ) -> None:
        """Begin, with the schema of the rows and how keys are encoded, as far as they are known.

        Without a schema, or if they are not UnsafeRows, rows are only counted. The operator is that of Spark's name
        whose state it is, and whose bookkeeping if it is internal; of a list, a value is several rows.
        """
        self._name, self._is_internal, self._operator = name, is_internal, operator
        self._watermark_ms = watermark_ms
        self._rows = self._size_bytes = self._error_bytes = 0
        self._groups: dict[bytes | None, list[int]] = {}
        # As `_COUNTS`.
        self._counts = [0] * len(_COUNTS)
        self._oldest_ms: int | None = None
        self._newest_ms: int | None = None
        self._unread = "" if schema is not None else "their schema is not known"
        self._lead, self._label = (None, None) if schema is None or form is None else _leading(schema, form)
        self._time, self._column = (None, "") if schema is None else _time(schema, form, operator, is_list=is_list)

    def add(self, pairs: Sequence[Pair]) -> None:
        """Count rows, without the prefix of the family; once one does not fit its schema, they are only counted."""
        sizes = [len(key) + len(value) for key, value in pairs]
        self._rows += len(pairs)
        self._size_bytes += sum(sizes)
        try:
            self._read(pairs, sizes)
        except ValueError as error:
            self._unread = f"a row does not fit its schema: it {error}"
            self._lead = self._time = None
            self._groups.clear()

    def _read(self, pairs: Sequence[Pair], sizes: Sequence[int]) -> None:
        if (lead := self._lead) is not None:
            groups = self._groups
            for (key, _), size in zip(pairs, sizes, strict=True):
                counted = groups.setdefault(lead(key), [0, 0])
                counted[0] += 1
                counted[1] += size
            if len(groups) > _GROUPS_MAX:
                kept = sorted(groups.items(), key=lambda of: -of[1][1])
                self._error_bytes += kept[_GROUPS_KEPT][1][1]
                self._groups = dict(kept[:_GROUPS_KEPT])
        if (time := self._time) is not None:
            self._note_times([time(key, value) for key, value in pairs])

    def _note_times(self, times: Sequence[int | None]) -> None:
        known = [at_ms for at_ms in times if at_ms is not None]
        self._counts[-1] += len(times) - len(known)
        for at_ms in known:
            left_ms = at_ms - self._watermark_ms
            self._counts[(left_ms > 0) + (left_ms > HOUR_MS) + (left_ms > DAY_MS)] += 1
        ends_ms = [at_ms for at_ms in (self._oldest_ms, self._newest_ms) if at_ms is not None]
        self._oldest_ms, self._newest_ms = min(known + ends_ms, default=None), max(known + ends_ms, default=None)

    def figures(self) -> FamilyFigures:
        label = self._label or (lambda _: "")
        ages = RowAges(
            column=self._column,
            expires=self._operator in _DROPPING_BY_KEY | _DROPPING_BY_VALUE,
            oldest_ms=self._oldest_ms,
            newest_ms=self._newest_ms,
            **dict(zip(_COUNTS, self._counts, strict=True)),
        )
        heaviest = sorted(self._groups.items(), key=lambda of: -of[1][1])[:GROUPS_SHOWN]
        return FamilyFigures(
            name=self._name,
            is_internal=self._is_internal,
            rows=self._rows,
            size_bytes=self._size_bytes,
            heaviest=tuple(KeyGroup(key=label(of), rows=rows, size_bytes=size) for of, (rows, size) in heaviest),
            heaviest_error_bytes=self._error_bytes,
            ages=None if self._time is None else ages,
            unread=self._unread,
        )


def _leading(
    schema: StateSchema, form: KeyForm
) -> tuple[Callable[[bytes], bytes | None] | None, Callable[[bytes | None], str] | None]:
    """Return what reads the leading column of a key that is not a time, and what shows it; None: it is not read."""
    fields = schema.key.fields
    if form.form == "range":
        return None, None
    is_prefix = form.form == "prefix"
    places = form.first if is_prefix else tuple(n for n in range(len(fields)) if n not in form.first)
    of = StructType(tuple(fields[place] for place in places))
    start = next((n for n, field in enumerate(of.fields) if not field.has_watermark), None)
    if start is None:
        return None, None
    # Of a struct, such as the key that a user of a map state has: its first field.
    path, shown = [start], of.fields[start].type
    while isinstance(shown, StructType) and shown.fields:
        path.append(0)
        shown = shown.fields[0].type
    read = _field_reader(of, path)
    if read is None:
        return None, None
    # Before each row is a byte that says how it is encoded, and before a prefix its length.
    at = {"prefix": _LENGTH_BYTES + 1, "time_first": WORD + 1}.get(form.form, 1)
    is_text, is_number = shown == AtomType("string"), isinstance(shown, AtomType) and shown.name in _WORDS

    def lead(key: bytes) -> bytes | None:
        value = read(key, at)
        return value if value is None or len(value) <= _VALUE_BYTES_MAX else value[:_VALUE_BYTES_KEPT] + _digest(value)

    def label(value: bytes | None) -> str:
        name = of.fields[start].name
        if value is None:
            return f"{name} is null"
        if is_text:
            text = value.decode("utf-8", "backslashreplace")
        else:
            text = str(int.from_bytes(value, "little", signed=True)) if is_number else f"0x{value.hex()}"
        full = f"{name}={text}"
        if len(full) <= _LABEL_CHARACTERS_MAX:
            return full
        # What begins alike is another group, also where partitions are summed up.
        mark = f"~{_digest(value).hex()[:_MARK_CHARACTERS]}"
        return full[: _LABEL_CHARACTERS_MAX - len(mark)] + mark

    return lead, label


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=_VALUE_BYTES_MAX - _VALUE_BYTES_KEPT).digest()


def _time(
    schema: StateSchema, form: KeyForm | None, operator: str, *, is_list: bool
) -> tuple[Callable[[bytes, bytes], int | None] | None, str]:
    """Return what reads the time of a row in milliseconds, and the name of its column; of a window it is its end."""
    for of, is_key in ((schema.key, True), (schema.value, False)):
        if is_key and (form is None or form.form != "row" or operator in _DROPPING_BY_VALUE):
            continue
        if not is_key and (is_list or operator in _DROPPING_BY_KEY):
            continue
        for place, field in enumerate(of.fields):
            is_time = isinstance(field.type, AtomType) and field.type.name in _TIMES
            is_window = isinstance(field.type, StructType) and [f.name for f in field.type.fields] == ["start", "end"]
            if not (field.has_watermark and (is_time or is_window)) and (is_key or field.name != _EXPIRES):
                continue
            read = _field_reader(of, [place, 1] if is_window else [place])
            if read is not None:
                return _millis(read, is_key=is_key), f"{field.name}.end" if is_window else field.name
    return None, ""


def _millis(read: Callable[[bytes, int], bytes | None], *, is_key: bool) -> Callable[[bytes, bytes], int | None]:
    def time(key: bytes, value: bytes) -> int | None:
        word = read(key if is_key else value, 1)
        return None if word is None else int.from_bytes(word, "little", signed=True) // 1000

    return time


def _field_reader(of: StructType, path: Sequence[int]) -> Callable[[bytes, int], bytes | None] | None:
    """Return what reads a field, and below it those of structs, of a row that begins at a place; None: of another type.

    It returns the word of a number, or the bytes of a text, and None for null.
    """
    steps: list[tuple[int, int, bool]] = []
    level: DataType = of
    for place in path:
        if not isinstance(level, StructType):
            return None
        fixed = null_bytes(len(level.fields))
        level = level.fields[place].type
        if isinstance(level, AtomType) and level.name not in _READ:
            return None
        steps.append((place, fixed, not is_in_word(level)))

    def read(row: bytes, at: int) -> bytes | None:
        word, end = b"", len(row)
        for place, fixed, is_wide in steps:
            start = at + fixed + WORD * place
            if start + WORD > end:
                raise ValueError("is shorter than its fields")
            if row[at + place // 8] >> place % 8 & 1:
                return None
            word = row[start : start + WORD]
            if is_wide:
                size, at = int.from_bytes(word[:4], "little"), at + int.from_bytes(word[4:], "little")
                if at + size > end:
                    raise ValueError("points beyond its end")
                word = row[at : at + size]
        return word

    return read

"""What the command line prints: results as JSON objects, the lines of a structured log, and progress.

The schema of `--json` is the structs of the results themselves, with these rules:

- a `Commit` is a `CommitView`, and a `Scope` is `job` and `commit_task`;
- an enum is its name in lower case, bytes are hexadecimal, a path of names is joined by slashes;
- a time `..._at_ms`, in milliseconds since the epoch, has a sibling `..._at` in ISO 8601, UTC, and so has `now_ms`;
- what a struct names in `json_properties`, its properties and fields of its fields by the names that they have in JSON,
  follows its own fields, and what it names in `json_omitted` is left out; what is in a field that is null is null.

Everything is output of schema 1: fields are only ever added, and sizes are in bytes.
"""

import contextlib
import functools
import itertools
import os
import re
import shutil
import textwrap
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum, IntEnum
from pathlib import PurePath
from typing import Any, Final, Literal, Self, TypeVar, get_origin

import click
import msgspec

from engine.runtime import CountedProgress, Runtime
from engine.text import Prose, TableLine, table
from index.display import count, human_bytes, human_duration, iso_time, printable
from index.plan.commits import Commit
from index.snapshot.model import NameRecord, Scope

SCHEMA: Final = 1

ViewT = TypeVar("ViewT", bound=msgspec.Struct)


class CommitView(msgspec.Struct, frozen=True, kw_only=True):
    """A commit in one line."""

    job: str
    # None: the job commits as a whole.
    commit_task: str | None
    number: int
    kind: str
    version: int
    committed_at_ms: int
    stores_count: int
    files_count: int
    size_bytes: int
    offsets: str
    names: tuple[str, ...] = ()
    write_id: str = ""

    @property
    def committed_at(self) -> str:
        return iso_time(self.committed_at_ms)

    @property
    def line(self) -> str:
        return f"commit {self.number}, version {self.version}, {self.committed_at}"


def view_commit(commit: Commit, names: Mapping[tuple[int, str], Sequence[str]] | None = None) -> CommitView:
    """Return a commit with the sums over its stores and the names that it has."""
    record = commit.record
    given = (names or {}).get((record.number, record.write_id), ())
    return CommitView(
        job=commit.scope.job,
        commit_task=commit.scope.task,
        number=record.number,
        # A name keeps the stores of a commit, not how it came about.
        kind=record.kind if commit.name is None else "named",
        version=record.version,
        committed_at_ms=commit.committed_at_ms,
        stores_count=len(record.stores),
        files_count=sum(s.files_count for s in record.stores),
        size_bytes=record.state_bytes,
        offsets=record.offsets,
        names=tuple(sorted({*given, *([commit.name] if commit.name is not None else ())})),
        write_id=record.write_id,
    )


def names_by_commit(names: Iterable[NameRecord]) -> dict[tuple[int, str], list[str]]:
    """Sort names by the number and the write id of their commits."""
    found: dict[tuple[int, str], list[str]] = {}
    for name in names:
        found.setdefault((name.source.number, name.source.write_id), []).append(name.name)
    return found


def lines_if(*parts: tuple[object, str]) -> list[str]:
    """Return the lines of a result that there is something to say in."""
    return [line for is_so, line in parts if is_so]


def format_state(stores: int, files: int, size_bytes: int) -> str:
    """Format what a commit or a checkpoint holds."""
    return f"{count(stores, 'store')}, {count(files, 'file')}, {human_bytes(size_bytes)}"


def format_took(seconds: float) -> str:
    """Format how long work took."""
    return human_duration(int(seconds * 1000))


def committed_line(commit: Commit) -> str:
    """Format a commit just made."""
    view = view_commit(commit)
    held = format_state(view.stores_count, view.files_count, view.size_bytes)
    left = "" if commit.settled else "; some TTLs are left to remove, the next commit or collection does it"
    return f"commit {view.number} of {printable(str(commit.scope))}, version {view.version}: {held}{left}"


def extend(kind: type[ViewT], result: msgspec.Struct, **more: Any) -> ViewT:  # noqa: ANN401  (the fields of any struct)
    """Return a result as a struct that is derived from its own, with some fields more."""
    return kind(**{name: getattr(result, name) for name in result.__struct_fields__}, **more)


class JsonField(msgspec.Struct, frozen=True):
    """A field of an object, and the attribute that it shows."""

    name: str
    attribute: str
    # How the value is shown, if not as it is.
    form: Literal["", "time", "path"] = ""


@functools.cache
def json_fields(kind: type[msgspec.Struct]) -> tuple[JsonField, ...]:
    """Return the fields that a struct has in JSON."""
    tag = kind.__struct_config__.tag_field
    found = [JsonField(tag, "__struct_config__.tag")] if tag is not None else []
    omitted: Collection[str] = getattr(kind, "json_omitted", ())
    for field in msgspec.structs.fields(kind):
        if field.name in omitted:
            continue
        if field.type is Scope:
            found += [JsonField("job", f"{field.name}.job"), JsonField("commit_task", f"{field.name}.task")]
        elif field.name == "path" and get_origin(field.type) is tuple:
            found.append(JsonField("path", "path", "path"))
        else:
            found += _with_time(field.encode_name, field.name)
    properties: Mapping[str, str] = getattr(kind, "json_properties", {})
    return (*found, *(field for name, path in properties.items() for field in _with_time(name, path)))


def _with_time(name: str, path: str) -> list[JsonField]:
    time = name.removesuffix("_ms")
    is_time = time != name and (time == "now" or time.endswith("_at"))
    return [JsonField(name, path), *([JsonField(time, path, "time")] if is_time else [])]


def to_json(value: Any) -> Any:  # noqa: ANN401, PLR0911  (a result, or what is in it: one answer for each kind)
    """Return a value as JSON has it."""
    match value:
        case Commit():
            return to_json(view_commit(value))
        case msgspec.Struct():
            return {field.name: _read(value, field) for field in json_fields(type(value))}
        case IntEnum():
            return int(value)
        case Enum():
            return value.name.lower()
        case bytes():
            return value.hex()
        case PurePath():
            return str(value)
        case Mapping():
            return {key: to_json(one) for key, one in value.items()}
        case tuple() | list() | frozenset():
            return [to_json(one) for one in value]
        case _:
            return value


def _attribute(value: Any, path: str) -> Any:  # noqa: ANN401  (as above)
    for name in path.split("."):
        value = getattr(value, name) if value is not None else None
    return value


def _read(value: Any, field: JsonField) -> Any:  # noqa: ANN401  (as above)
    value = _attribute(value, field.attribute)
    if field.form == "time":
        return iso_time(value) if value is not None else None
    if field.form == "path":
        return "/".join(value)
    return to_json(value)


# Numbers that are names, and of stores there are few: they have no commas.
_NAMES: Final = frozenset({"number", "version", "batch", "stores_count"})


# An attribute of a result, by its path, or what a function says of one.
Column = str | Callable[[Any], object]


def tabulate(items: Iterable[Any], columns: Mapping[str, Column]) -> list[str]:
    """Make a table of results: in each column an attribute of theirs, or what a function says of one.

    A header with a `>` before it is of numbers. They are shown as the name of the attribute says: sizes and times with
    their units, and what is null or empty as `-`.
    """
    cells = [
        [_cell(at, _attribute(item, at)) if isinstance(at, str) else _cell("", at(item)) for at in columns.values()]
        for item in items
    ]
    headers = [header.removeprefix(">") for header in columns]
    return table(headers, cells, right=[header[1:] for header in columns if header.startswith(">")])


def _cell(path: str, value: Any) -> str:  # noqa: ANN401  (an attribute has any type)
    name = path.rpartition(".")[2]
    if isinstance(value, int) and name not in _NAMES:
        if name.endswith("_at_ms"):
            return iso_time(value)
        return human_bytes(value) if name.endswith("_bytes") or name.startswith("bytes_") else f"{value:,}"
    if isinstance(value, tuple | list):
        value = ", ".join(value)
    shown = value.value if isinstance(value, Enum) else value
    return "-" if shown is None else printable(str(shown)) or "-"


Level = Literal["info", "warning", "error"]
LogFormat = Literal["text", "json"]

TEXT: Final = "text"
JSON: Final = "json"


class LogLineView(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a structured log, of schema 1."""

    schema: int = SCHEMA
    # By this machine's clock; ISO 8601, UTC.
    time: str
    level: Level
    verb: str
    message: str
    # The numbers in the message, or an error as `--json` shows it.
    fields: Mapping[str, Any] = {}


def log(level: Level, verb: str, message: str, fields: Mapping[str, Any] | None = None) -> None:
    """Write one line of a structured log."""
    time = iso_time(Runtime().local_now_ms())
    line = LogLineView(time=time, level=level, verb=verb, message=printable(message), fields=fields or {})
    click.echo(msgspec.json.encode(line), err=True)


# Where a bar is on the screen, what writes a line above it.
above_bar: Final[list[Callable[[str], None]]] = []


def say(level: Level, verb: str, text: str, fields: Mapping[str, Any] | None = None, *, log_format: LogFormat) -> None:
    """Write on stderr what changes nothing of the result, also where nobody reads this any more: the work goes on."""
    with contextlib.suppress(OSError, ValueError):
        if log_format == JSON:
            log(level, verb, text, fields)
        else:
            line = f"{'' if level == 'info' else f'{styled(level, level)}: '}{printable(text)}"
            if above_bar:
                above_bar[-1](line)
            else:
                click.echo(line, err=True)


_STYLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow", "bold": True},
    "hint": {"fg": "cyan"},
}
# What a reader of a result must not overlook.
_BAD: Final = re.compile(
    r"\b(CANNOT BE READ|DAMAGED|FAILED|MISSED|NOT committed|NOT deleted|UNSAFE|WOULD BE REFUSED|WRONG)\b"
)


def styled(text: str, style: str) -> str:
    """Colour a word, unless NO_COLOR is set; `click.echo` takes the colour away where there is no terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **_STYLES[style])


def for_terminal(lines: Sequence[str]) -> Iterator[str]:
    """Yield a result as a terminal shows it: what is bad in colour, prose and tables as wide as it is."""
    width = shutil.get_terminal_size().columns
    for table_id, group in itertools.groupby(lines, key=lambda line: getattr(line, "table_id", None)):
        rows = [*group]
        # A character that is not ASCII may be two columns wide.
        if table_id is not None and any(len(row) > width or not row.isascii() for row in rows):
            # Its library takes a while to import.
            from engine.cli.terminal import fit_table  # noqa: PLC0415

            rows = [*fit_table([row for row in rows if isinstance(row, TableLine)], width)]
        for line in rows:
            shown = line
            # Anything else may be data, or a command to be copied.
            if isinstance(line, Prose):
                shown = textwrap.fill(
                    line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
                )
            yield _BAD.sub(lambda found: styled(found[0], "error"), shown)


Log = Callable[[str, Mapping[str, int]], None]

LOG_PERIOD_S: Final = 10.0
# How often it is looked whether a line is due.
TICK_PERIOD_S: Final = 1.0


class ProgressLog:
    """Writes files, bytes, rate and time left to a log; a terminal has `terminal.TerminalBar`.

    It gets a line each ten seconds, also while nothing moves: within a `with`, a thread sees to that.
    """

    def __init__(self, monotonic_s: Callable[[], float], *, what: str, log: Log) -> None:
        """Begin to count; `what` begins each line, and `log` is given it with its numbers."""
        self._monotonic_s = monotonic_s
        self._what = what
        self._log = log
        self._done = CountedProgress()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ticking = threading.Thread(target=self._tick_on, name="tidemark progress", daemon=True)
        self._written_s, self._written_bytes = monotonic_s(), 0

    def __enter__(self) -> Self:
        self._ticking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._ticking.join()

    def total(self, *, files: int, bytes_: int) -> None:
        with self._lock:
            self._done.total(files=files, bytes_=bytes_)
            self._tick()

    def add(self, *, files: int = 0, bytes_: int = 0) -> None:
        with self._lock:
            self._done.add(files=files, bytes_=bytes_)
            self._tick()

    def _tick_on(self) -> None:
        while not self._ended.wait(TICK_PERIOD_S):
            with self._lock:
                self._tick()

    def _tick(self) -> None:
        done, now_s = self._done, self._monotonic_s()
        passed_s = now_s - self._written_s
        if passed_s < LOG_PERIOD_S:
            return
        # Of what happened since the last line.
        bytes_per_s = (done.bytes - self._written_bytes) / passed_s if passed_s else 0.0
        self._written_s, self._written_bytes = now_s, done.bytes
        line = self._line(bytes_per_s)
        # The work goes on also where nobody reads this any more.
        with contextlib.suppress(OSError, ValueError):
            numbers = {name: getattr(done, name) for name in ("files", "files_total", "bytes", "bytes_total")}
            self._log(line, {**numbers, "bytes_per_s": int(bytes_per_s)})

    def _line(self, bytes_per_s: float) -> str:
        done = self._done
        files = f" of {done.files_total:,}" if done.files_total else ""
        parts = [f"{self._what}: {done.files:,}{files} files", human_bytes(done.bytes)]
        if done.bytes_total:
            parts[-1] += f" of {human_bytes(done.bytes_total)}"
            parts.append(f"{min(100, 100 * done.bytes // done.bytes_total)}%")
        if bytes_per_s >= 1:
            parts.append(f"{human_bytes(int(bytes_per_s))}/s")
            left = done.bytes_total - done.bytes
            if left > 0:
                parts.append(f"{human_duration(int(1000 * left / bytes_per_s))} left")
        return ", ".join(parts)

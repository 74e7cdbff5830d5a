"""What the command line prints for programs: results as JSON objects, and the lines of a structured log.

The schema of `--json` is the structs of the results themselves, with these rules:

- a `Commit` is a `CommitView`, and a `Scope` is `job` and `commit_task`;
- an enum is its name in lower case, bytes are hexadecimal, a path of names is joined by slashes;
- a time `..._at_ms`, in milliseconds since the epoch, has a sibling `..._at` in ISO 8601, UTC, and so has `now_ms`;
- what a struct names in `json_properties`, its properties and fields of its fields by the names that they have in JSON,
  follows its own fields, and what it names in `json_omitted` is left out; what is in a field that is null is null.

Everything is output of schema 1: fields are only ever added, and sizes are in bytes.
"""

import functools
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum, IntEnum
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import click
import msgspec

from engine.clock import Runtime
from index.display import count, human_bytes, iso_time, printable
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
        """Which commit it is."""
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
        size_bytes=sum(s.size_bytes for s in record.stores),
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


def committed_line(commit: Commit) -> str:
    """Format a commit just made."""
    view = view_commit(commit)
    held = f"{count(view.stores_count, 'store')}, {count(view.files_count, 'file')}, {human_bytes(view.size_bytes)}"
    left = "" if commit.settled else "; some TTLs are left to remove, the next commit or collection does it"
    return f"commit {view.number} of {printable(str(commit.scope))}, version {view.version}: {held}{left}"


# ---------------------------------------------------------------------- JSON


def extend(kind: type[ViewT], result: msgspec.Struct, **more: Any) -> ViewT:  # noqa: ANN401  (the fields of any struct)
    """Return a result as a struct that is derived from its own and has some fields more."""
    return kind(**{name: getattr(result, name) for name in result.__struct_fields__}, **more)


class JsonField(msgspec.Struct, frozen=True):
    """A field of an object: its type in JSON, and the attribute that it shows."""

    name: str
    type: Any
    attribute: str
    # How the value is shown, if not as it is.
    form: Literal["", "time", "path"] = ""


@functools.cache
def json_fields(kind: type[msgspec.Struct]) -> tuple[JsonField, ...]:
    """Return the fields that a struct has in JSON."""
    return tuple(_json_fields(kind))


def _json_fields(kind: type[msgspec.Struct]) -> Iterator[JsonField]:
    config = kind.__struct_config__
    if config.tag_field is not None:
        yield JsonField(config.tag_field, Literal[config.tag], "__struct_config__.tag")
    fields = msgspec.structs.fields(kind)
    omitted: Collection[str] = getattr(kind, "json_omitted", ())
    for field in fields:
        if field.name in omitted:
            continue
        if field.type is Scope:
            yield JsonField("job", str, f"{field.name}.job")
            yield JsonField("commit_task", str | None, f"{field.name}.task")
            continue
        if field.name == "path" and get_origin(field.type) is tuple:
            yield JsonField(field.name, str, field.name, "path")
            continue
        yield from _with_time(field.encode_name, field.type, field.name)
    properties: Mapping[str, str] = getattr(kind, "json_properties", {})
    for name, path in properties.items():
        yield from _with_time(name, _type_at(kind, path), path)


def _with_time(name: str, kind: Any, path: str) -> Iterator[JsonField]:  # noqa: ANN401  (a type)
    yield JsonField(name, json_type_of(kind), path)
    time = name.removesuffix("_ms")
    if time != name and (time == "now" or time.endswith("_at")):
        yield JsonField(time, str | None if type(None) in get_args(kind) else str, path, "time")


def _type_at(kind: Any, path: str) -> Any:  # noqa: ANN401  (a type)
    """Return the declared type of a field, or of a property, of a struct or of what is in it."""
    is_optional = False
    for name in path.split("."):
        if type(None) in get_args(kind):
            is_optional, [kind] = True, [one for one in get_args(kind) if one is not type(None)]
        attribute = getattr(kind, name, None)
        holder = attribute.fget if isinstance(attribute, property) else kind
        kind = typing.get_type_hints(holder)["return" if isinstance(attribute, property) else name]
    return kind | None if is_optional else kind


def json_type_of(kind: Any) -> Any:  # noqa: ANN401, PLR0911  (a type: one answer for each kind)
    """Return what a type is in JSON."""
    kind = getattr(kind, "__supertype__", kind)
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Commit:
        return CommitView
    if kind is bytes or (isinstance(kind, type) and issubclass(kind, PurePath)):
        return str
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return int
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Literal[tuple(member.name.lower() for member in kind)]
    if origin is Annotated:
        return json_type_of(inner[0])
    if origin in {None, Literal}:
        return kind
    shown = tuple(one if one is Ellipsis else json_type_of(one) for one in inner)
    generic: Any = Union if origin is UnionType else origin
    return generic[shown]


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


def _read(value: Any, field: JsonField) -> Any:  # noqa: ANN401  (as above)
    for name in field.attribute.split("."):
        value = getattr(value, name) if value is not None else None
    if field.form == "time":
        return iso_time(value) if value is not None else None
    if field.form == "path":
        return "/".join(value)
    return to_json(value)


# ---------------------------------------------------------------------- a structured log

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
    line = LogLineView(
        time=iso_time(Runtime().local_now_ms()),
        level=level,
        verb=verb,
        message=printable(message),
        fields=fields or {},
    )
    click.echo(msgspec.json.encode(line), err=True)

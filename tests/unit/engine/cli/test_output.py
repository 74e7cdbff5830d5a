"""Results as JSON has them: by their own fields, and by the rules of `engine.cli.output`."""

from enum import IntEnum, StrEnum
from pathlib import Path
from typing import ClassVar

import msgspec

from engine.cli.cmd.keys import safe_json
from engine.cli.output import extend, json_fields, to_json
from index.snapshot.model import Scope
from tests.docs.reference import field_type


class Colour(StrEnum):
    DEEP_RED = "deep red"


class Code(IntEnum):
    UNSAFE = 9


class Inner(msgspec.Struct, frozen=True):
    path: tuple[str, ...]
    blake3: bytes = b"\x0f"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    json_properties: ClassVar = {"size": "size_twice", "first": "inner.blake3"}
    json_omitted: ClassVar = ("hidden",)

    scope: Scope
    made_at_ms: int
    seen_at_ms: int | None = None
    colour: Colour = Colour.DEEP_RED
    code: Code = Code.UNSAFE
    place: Path | None = Path("/there")
    inner: Inner = Inner(("a", "b"))
    kept: int = msgspec.field(default=1, name="stays")
    hidden: int = 0

    @property
    def size_twice(self) -> int:
        return 2


class Extended(Result, frozen=True, kw_only=True):
    more: frozenset[str]


def test_a_result_is_its_own_schema() -> None:
    result = extend(Extended, Result(scope=Scope("job", "7"), made_at_ms=1_777_638_600_250), more=frozenset({"x"}))
    fields = to_json(result)
    assert fields == {
        "job": "job",
        "commit_task": "7",
        "made_at_ms": 1_777_638_600_250,
        "made_at": "2026-05-01T12:30:00.250Z",
        "seen_at_ms": None,
        "seen_at": None,
        "colour": "deep_red",
        "code": 9,
        "place": "/there",
        "inner": {"path": "a/b", "blake3": "0f"},
        "stays": 1,
        "more": ["x"],
        "size": 2,
        "first": "0f",
    }
    types = {field.name: field_type(Extended, field) for field in json_fields(Extended)}
    assert list(types) == list(fields)
    assert (types["made_at"], types["seen_at"], types["size"], types["code"]) == (str, str | None, int, int)
    assert (types["place"], types["more"], types["first"]) == (str | None, frozenset[str], str)


def test_a_line_of_json_stays_json_where_it_is_not_safe_for_a_terminal() -> None:
    stored = {"family": "\x1b[31mé\x9b\u202e\U000e0001"}
    line = safe_json(msgspec.json.encode(stored).decode())
    assert line.isprintable()
    assert "é" in line
    assert msgspec.json.decode(line) == stored

"""`docs/neighbours.md`: every cell has a mark, and every mark its evidence; what it says of us exists."""

import re
from pathlib import Path
from typing import Final, NamedTuple

import click
import pytest

from engine.cli.app import tidemark

PAGE: Final = Path(__file__).parents[2] / "docs" / "neighbours.md"
MARKS: Final = ("yes", "in part", "no")
PROGRAMS: Final = ("tidemark", "restic", "rclone", "kopia", "litestream", "medusa", "pyiceberg")

ROW: Final = re.compile(r"^\| \*\*(?P<what>[^*]+)\*\*[^|]*\|(?P<cells>.+)\|$", re.MULTILINE)
ITEM: Final = re.compile(r"^- \*\*(?P<what>[^*]+)\*\*, (?P<mark>[a-z ]+): (?P<text>.+)$", re.MULTILINE)
# Something to run or to set, or a file of the program's own repository.
PLACE: Final = re.compile(r"`[^`]+`|\b[\w.-]+/[\w./ -]+|[\w.-]+\.(?:go|ini|md|py|rst|yml)\b")
COMMAND: Final = re.compile(r"`tidemark (?P<words>[^`]+)`")


class Item(NamedTuple):
    what: str
    mark: str
    text: str


def read_table() -> dict[str, dict[str, str]]:
    """Rows by their name, and in each the marks by program."""
    rows = {
        row["what"]: [cell.strip() for cell in row["cells"].split("|")] for row in ROW.finditer(PAGE.read_text("utf-8"))
    }
    return {what: dict(zip(PROGRAMS, cells, strict=True)) for what, cells in rows.items()}


def read_evidence(program: str) -> list[Item]:
    """What is below a program's heading."""
    _, _, rest = PAGE.read_text("utf-8").partition(f"\n### {program}\n")
    section, _, _ = rest.partition("\n### ")
    return [Item(item["what"], item["mark"], item["text"]) for item in ITEM.finditer(section)]


def find_verb(words: list[str]) -> tuple[click.Command, list[str]]:
    """The verb that the first words name, and what is left of them."""
    verb: click.Command = tidemark
    while words and isinstance(verb, click.Group) and words[0] in verb.commands:
        verb, words = verb.commands[words[0]], words[1:]
    return verb, words


def test_the_columns_are_this_project_and_its_six_neighbours() -> None:
    heading = next(line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| what |"))
    assert tuple(cell.strip() for cell in heading.strip("|").split("|")[1:]) == PROGRAMS


def test_every_cell_has_a_mark() -> None:
    table = read_table()
    assert len(table) >= 20
    assert {mark for row in table.values() for mark in row.values()} == set(MARKS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_mark_has_its_evidence(program: str) -> None:
    marks = [(what, row[program]) for what, row in read_table().items()]
    items = read_evidence(program)
    assert [(item.what, item.mark) for item in items] == marks
    assert [item for item in items if item.mark != "no" and not PLACE.search(item.text)] == []


def test_what_is_said_of_this_project_exists() -> None:
    commands = [
        command["words"].split() for item in read_evidence("tidemark") for command in COMMAND.finditer(item.text)
    ]
    assert len(commands) >= 20
    for words in commands:
        verb, rest = find_verb(words)
        assert verb is not tidemark, words
        options = {option for param in verb.params for option in (*param.opts, *param.secondary_opts)}
        assert set(rest) <= options, words

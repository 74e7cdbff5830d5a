"""Every command of the documents is run, and the reference says what the code says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from engine.cli.run import ExitCode
from tests.docs import reference
from tests.docs.console import PROJECT, Block, agrees, blocks_of, run
from tests.docs.surroundings import surroundings_of

DOCUMENTS: Final = sorted(
    [
        *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
        *(PROJECT / "docs").rglob("*.md"),
    ],
    key=lambda path: path.relative_to(PROJECT).parts,
)
WRITTEN: Final = [path for path in DOCUMENTS if path.parent != reference.REFERENCE]
KEPT: Final = [*WRITTEN, reference.REFERENCE / reference.FIRST_PAGE]
IDS: Final = [str(path.relative_to(PROJECT)) for path in WRITTEN]
_LINK: Final = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def _blocks(path: Path) -> list[Block]:
    return list(blocks_of(path.read_text(encoding="utf-8")))


def _with_commands(documents: list[Path]) -> Iterator[Path]:
    for path in documents:
        if any(block.commands() for block in _blocks(path)):
            yield path


RUN: Final = list(_with_commands(WRITTEN))


@pytest.mark.parametrize("path", RUN, ids=[str(path.relative_to(PROJECT)) for path in RUN])
@pytest.mark.timeout(900)
def test_each_command_does_what_the_document_says(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    wrong = []
    with surroundings_of(text) as variables:
        for command, code, printed in run(text, tmp_path, variables):
            if code != command.code:
                wrong.append(f"line {command.line}: `{command.text}` ended with {code}: {printed}")
            elif command.printed is not None and not agrees(command.printed, printed):
                shown = "\n    ".join(printed)
                wrong.append(f"line {command.line}: `{command.text}` printed\n    {shown}")
    assert not wrong, "run `make docs`, and look at what changed:\n" + "\n".join(wrong)


@pytest.mark.parametrize("path", WRITTEN, ids=IDS)
def test_no_command_escapes(path: Path) -> None:
    """What looks like a command is in a block that is run, or says why it is not."""
    commands = re.compile(r"^(\$ )?(tidemark|python|make) ")
    escaped = [
        line
        for block in _blocks(path)
        if not block.commands() and not block.not_run
        for line in block.text
        if commands.match(line)
    ]
    assert not escaped


@pytest.mark.parametrize("path", WRITTEN, ids=IDS)
def test_what_python_a_document_shows_can_be_read_and_imports_what_there_is(path: Path) -> None:
    for block in _blocks(path):
        if block.language != "python":
            continue
        tree = ast.parse("\n".join(block.text))
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        exec(compile(ast.Module(body=[*imports], type_ignores=[]), str(path), "exec"), {})


@pytest.mark.parametrize("path", KEPT, ids=[str(path.relative_to(PROJECT)) for path in KEPT])
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = [m["target"].partition("#")[0] for m in _LINK.finditer(text) if "://" not in m["target"]]
    assert [t for t in targets if t and not (path.parent / t).exists()] == []


def test_the_reference_says_what_the_code_says() -> None:
    """Its first page, which git keeps; `tests/unit/test_surface.py` holds the code to what the others say."""
    stands = (reference.REFERENCE / reference.FIRST_PAGE).read_text(encoding="utf-8")
    assert stands == reference.pages()[reference.FIRST_PAGE], "run `make docs`"


def test_troubleshooting_has_a_section_for_each_exit_code() -> None:
    text = (PROJECT / "docs" / "how-to" / "troubleshoot.md").read_text(encoding="utf-8")
    headings = [line.partition(":")[0] for line in text.splitlines() if line.startswith("## ")]
    codes = {int(number) for heading in headings for number in re.findall(r"\d+", heading)}
    assert codes == {int(code) for code in ExitCode}


class TestShapes:
    @pytest.mark.parametrize(
        "one, other",
        [
            ("commit 1: 3.2 MiB in 12 files", "commit 7: 999 B in 1 files"),
            ("at 2026-11-22T10:00:00.000Z", "at 2027-01-02T23:59:59.999Z"),
            ("blobs/0c/flights/1a2b3c4d5e6f708192a3-00000f", "blobs/ff/flights/aaaa3c4d5e6f708192a3-000000"),
            ("12 ms  done", "1m 3s done"),
        ],
    )
    def test_what_differs_from_run_to_run_does_not_count(self, one: str, other: str) -> None:
        assert agrees([one], [other])

    @pytest.mark.parametrize(
        "expected, printed",
        [
            (["commit 1: done"], ["commit 1: failed"]),
            (["0 at risk"], ["27 at risk"]),
            (["restored 10 MiB"], ["restored 0 B"]),
            (["up 1.0"], ["up 0.0"]),
            (["one", "two"], ["one"]),
            (["one"], ["one", "two"]),
            ([], ["one"]),
            (["one", "...", "three"], ["one", "two"]),
        ],
    )
    def test_everything_else_does(self, expected: list[str], printed: list[str]) -> None:
        assert not agrees(expected, printed)

    def test_three_dots_stand_for_any_lines(self) -> None:
        assert agrees(["one", "...", "four"], ["one", "two", "three", "four"])
        assert agrees(["..."], [])


class TestBlocks:
    def test_a_transcript_has_commands_and_what_they_print(self) -> None:
        text = "text\n```console\n$ one \\\n  more\nprinted\n$ two # ends with 4\n```\n"
        [block] = blocks_of(text)
        one, two = block.commands()
        assert (one.line, one.text, one.printed, one.code) == (3, "one \\\n  more", ("printed",), 0)
        assert (two.line, two.printed, two.code) == (6, (), 4)

    def test_a_script_has_commands_alone(self) -> None:
        [block] = blocks_of("```sh\n# a comment\none \\\n  more\n\ntwo\n```\n")
        assert [(c.text, c.printed) for c in block.commands()] == [("one \\\n  more", None), ("two", None)]

    def test_what_is_not_run_says_why(self) -> None:
        [block] = blocks_of("<!-- not run: it takes an hour -->\n```sh\none\n```\n")
        assert block.not_run == "it takes an hour"
        assert block.commands() == []

    def test_a_command_that_fails_inside_a_pipeline_of_a_script_is_reported(self, tmp_path: Path) -> None:
        [(_, code, _)] = run("```sh\nfalse | true\n```\n", tmp_path)
        assert code == 1

    def test_a_command_that_fails_is_reported(self, tmp_path: Path) -> None:
        [(command, code, printed)] = run(
            "```console\n$ echo said; exit_with() { return 3; }; exit_with\n```\n", tmp_path
        )
        assert (command.code, code, printed) == (0, 3, ["said"])

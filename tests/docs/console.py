"""The commands of a document, run as anyone who reads it would: in order, in one shell, in a new directory.

A fenced block of the language `console` is a transcript: a line that begins with `$ ` is a command (one that ends with
a backslash goes on in the next line), what follows is what it prints, both streams together. `...` stands for any
lines. A block of `sh` has commands only, whose output is not looked at. A command is to end with 0, or as the comment
behind it says: `# ends with 10`. A comment before a block, `<!-- not run: why -->`, leaves it out.

What is printed is compared by its shape: sizes, counts, times and ids differ from run to run.

    python -m tests.docs.console FILE...    # run documents, and write what their commands print into them
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from engine.cli.run import ExitCode

PROJECT: Final = Path(__file__).resolve().parent.parent.parent
# What documents have for the directory that they ran in.
HOME_SHOWN: Final = "/home/ada"
ANY_LINES: Final = "..."
TRIES: Final = 3
_FENCE: Final = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\s*$")
_NOT_RUN: Final = re.compile(r"^<!-- not run: (?P<why>.+) -->$")
_ENDS_WITH: Final = re.compile(r"#.*\bends with (?P<code>\d+)\s*$")
_MARK: Final = "=== the command ended with"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One command of a document."""

    line: int
    text: str
    # None: nobody said what it prints.
    printed: tuple[str, ...] | None
    code: int = 0


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One fenced block; `first` and `last` are the numbers of the lines inside, from 0, `last` excluded."""

    language: str
    first: int
    last: int
    text: tuple[str, ...]
    not_run: str = ""

    def commands(self) -> list[Command]:
        """Its commands, in order; none in other languages."""
        if self.not_run:
            return []
        if self.language == "console":
            return list(_commands_of_transcript(self))
        return list(_commands_of_script(self)) if self.language == "sh" else []


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a document."""
    lines = text.splitlines()
    opened: tuple[int, str, str] | None = None
    for number, line in enumerate(lines):
        if (fence := _FENCE.match(line)) is None:
            continue
        if opened is None:
            above = next((lines[n] for n in range(number - 1, -1, -1) if lines[n].strip()), "")
            reason = _NOT_RUN.match(above.strip())
            opened = number + 1, fence["language"], reason["why"] if reason else ""
            continue
        first, language, not_run = opened
        yield Block(language=language, first=first, last=number, text=tuple(lines[first:number]), not_run=not_run)
        opened = None


def _commands_of_transcript(block: Block) -> Iterator[Command]:
    at = 0
    while at < len(block.text):
        if not block.text[at].startswith("$ "):
            raise ValueError(f"line {block.first + at + 1}: a transcript begins with a command")
        words, begin = [block.text[at][2:]], at
        while words[-1].endswith("\\"):
            at += 1
            words.append(block.text[at])
        at += 1
        end = next((n for n in range(at, len(block.text)) if block.text[n].startswith("$ ")), len(block.text))
        text = "\n".join(words)
        yield Command(line=block.first + begin + 1, text=text, printed=block.text[at:end], code=_code(text))
        at = end


def _commands_of_script(block: Block) -> Iterator[Command]:
    words: list[str] = []
    for at, line in enumerate(block.text):
        words.append(line)
        if line.endswith("\\") or not line.strip() or line.startswith("#"):
            words = words if line.endswith("\\") else []
            continue
        text = "\n".join(words)
        yield Command(line=block.first + at + 1, text=text, printed=None, code=_code(text))
        words = []


def _code(text: str) -> int:
    found = _ENDS_WITH.search(text)
    return int(found["code"]) if found else 0


# ---------------------------------------------------------------------- running


class Shell:
    """A shell in a new home, in which `tidemark`, `python` and the examples are at hand."""

    def __init__(self, home: Path, environment: Mapping[str, str] | None = None) -> None:
        self._home = home
        for name in ("examples", "benchmarks"):
            (home / name).symlink_to(PROJECT / name)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TIDEMARK_", "AWS_", "XDG_", "PYTEST_"))}
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=home,
            env={
                **kept,
                "HOME": str(home),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(PROJECT),
                "TZ": "UTC",
                "LC_ALL": "C.UTF-8",
                **(environment or {}),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str, *, strict: bool) -> tuple[int, list[str]]:
        """The exit code of a command, and the lines that it printed.

        Args:
            command: What is in the document.
            strict: It ends with the code of whatever in a pipeline fails. A transcript may look at the first lines of
                what is long, and see that it was cut off.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # In braces, so that `cd` and `export` last; without standard input, which is the shell's own script.
        self._process.stdin.write(
            f"set {'-' if strict else '+'}o pipefail\n{{ {command}\n}} </dev/null\nprintf '\\n%s %s\\n' '{_MARK}' $?\n"
        )
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if line.startswith(_MARK):
                printed = "".join(lines).replace(str(self._home), HOME_SHOWN).splitlines()
                # The line that the mark begins, if the command ended its own.
                return int(line.rsplit(" ", 1)[1]), printed[:-1] if printed and not printed[-1] else printed
            lines.append(line)
        raise ValueError(f"the shell ended in {command!r}: {''.join(lines)}")

    def close(self) -> None:
        """End it."""
        self._process.communicate()


_SHAPES: Final = (
    (re.compile(r"\d{4}-\d\d-\d\d(T[\d:.]+Z?)?"), "<time>"),
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "<id>"),
    (re.compile(r"\b[0-9a-f]{2}/(?=[\w.~@-]+/[0-9a-f]{20}-)"), ""),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b(-[0-9a-f]+)?"), "<id>"),
    (re.compile(r"\b[0-9A-Z]{20}\b"), "<id>"),
    (re.compile(r"(?<=\s)[+-](?=\d)"), ""),
    # Nothing is not something: `0 at risk` does not match `27 at risk`.
    (re.compile(r"\b0 B\b|(?<![\w.:/,-])0(\.0+)?(?![\w.:/,]|[-%]\d)"), "<nothing>"),
    (re.compile(r"\b\d[\d,]*(\.\d+)? ?(ms|s|m|h|d|B|KiB|MiB|GiB)\b( \d+(s|m|h)\b)?(/s\b)?"), "<quantity>"),
    (re.compile(r"\d[\d,]*(\.\d+)?(e[+-]\d+)?"), "<number>"),
    (re.compile(r"(?:(?<=<number> )|(?<=<nothing> ))(\w+?)((?<=x)es|s)?\b"), r"\1"),
    (re.compile(r"-{3,}|─+"), "<rule>"),
    (re.compile(r"\s+"), " "),
)


def shape_of(line: str) -> str:
    """A line without what differs from run to run."""
    for pattern, replacement in _SHAPES:
        line = pattern.sub(replacement, line)
    return line.strip()


def agrees(expected: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether the shapes of some lines are those expected, where `...` are any lines.

    How many lines of one shape follow each other does not count: how many files a RocksDB has differs from run to run.
    """
    return _agree(_shapes(expected), _shapes(printed))


def _shapes(lines: Sequence[str]) -> list[str]:
    return [shape for shape, _ in itertools.groupby(map(shape_of, lines))]


def _agree(expected: Sequence[str], printed: Sequence[str]) -> bool:
    if not expected:
        return not printed
    if expected[0] == ANY_LINES:
        return any(_agree(expected[1:], printed[n:]) for n in range(len(printed) + 1))
    return bool(printed) and expected[0] == printed[0] and _agree(expected[1:], printed[1:])


def run(
    text: str, home: Path, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Command, int, list[str]]]:
    """Each command of a document with its exit code and what it printed."""
    shell = Shell(home, environment)
    try:
        for block in blocks_of(text):
            for command in block.commands():
                strict = command.printed is None
                code, printed = shell.run(command.text, strict=strict)
                for _ in range(TRIES - 1):
                    # What 5 says: the store was too busy, try again. A loaded machine makes it so.
                    if code != ExitCode.UNAVAILABLE or command.code == code:
                        break
                    code, printed = shell.run(command.text, strict=strict)
                yield command, code, printed
    finally:
        shell.close()


# ---------------------------------------------------------------------- writing


def rewrite(path: Path, environment: Mapping[str, str] | None = None) -> None:
    """Write what the commands of a document print into it, all of one run, unless all agrees already.

    What has `...` stays as it is while it agrees: somebody chose what to show of it.
    """
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as home:
        outcomes = {command.line: (code, printed) for command, code, printed in run(text, Path(home), environment)}
    commands = [command for block in blocks_of(text) for command in block.commands()]
    if all(c.printed is None or agrees(c.printed, outcomes[c.line][1]) for c in commands):
        return
    lines, done = text.splitlines(), 0
    written: list[str] = []
    for block in blocks_of(text):
        written += lines[done : block.first]
        done = block.first
        for command in block.commands():
            code, printed = outcomes[command.line]
            if code != command.code:
                sys.stderr.write(f"{path}:{command.line}: ended with {code}: {command.text}\n")
                sys.stderr.writelines(f"    {line}\n" for line in printed)
            if code != command.code or command.printed is None:
                continue
            if ANY_LINES in command.printed and agrees(command.printed, printed):
                continue
            height = command.text.count("\n") + 1
            written += lines[done : command.line - 1 + height]
            written += [line.rstrip() for line in printed]
            done = command.line - 1 + height + len(command.printed)
    written += lines[done:]
    path.write_text("\n".join(written) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from tests.docs.surroundings import surroundings_of

    if shutil.which("bash") is None:
        sys.exit("bash is missing")
    for argument in sys.argv[1:]:
        document = Path(argument)
        with surroundings_of(document.read_text(encoding="utf-8")) as needed:
            rewrite(document, needed)

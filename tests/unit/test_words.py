"""Refuse retired words in the repository and its documents, so that one thing keeps one name, the field's own.

`python -m tests.unit.test_words [FILE...]` prints what is found, a line each.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parents[2]
FILES: Final = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "Makefile", "pyproject.toml", ".ci/run")
DIRECTORIES: Final = ("tidemark", "engine", "index", "blobstore", "tests", "benchmarks", "demo", "examples", "scripts")

# In identifiers and in text: each word with what is written instead.
WORDS: Final = {
    **dict.fromkeys(("tell", "tells", "told", "telling"), "show, report, format, say"),
    **dict.fromkeys(("picture", "pictures"), "checkpoint backup"),
    "hands": "backend; the verb: passes",
    **dict.fromkeys(("patient", "patients"), "probe"),
    **dict.fromkeys(("pour", "pours", "poured", "pouring"), "read into"),
    **dict.fromkeys(("rehearse", "rehearses", "rehearsed", "rehearsal", "rehearsals"), "restore drill"),
    "ambient": "runtime",
    **dict.fromkeys(("chance", "chances"), "rng, random numbers"),
    **dict.fromkeys(("spare", "spares", "spared"), "exclude, keep"),
    **dict.fromkeys(("foresee", "foresees", "foreseen", "foresaw"), "plan"),
    **dict.fromkeys(("room", "rooms"), "prefix, directory, space"),
    **dict.fromkeys(("door", "doors"), "sole importer"),
    **dict.fromkeys(("house", "houses"), "package map, project"),
    "anew": "again",
    "whoever": "the caller, anyone who",
    **dict.fromkeys(("births", "born"), "creation times, created"),
    **dict.fromkeys(("caring", "recounting", "metering", "browsing"), "the verb"),
    "swept": "sweep result, removed",
    **dict.fromkeys(("story", "stories"), "scenario, history"),
}
# In text alone: a pattern, and what is written instead.
PHRASES: Final = {
    r"so many": "the number of, at most N",
    r"(?:take|takes|taking|taken|took)[ _]up": "resume",
    r"condition of (?:a|the) repository": "status",
    # Where "there is no ..." and comparisons are plain English.
    r"(?<!there )(?:is|are) no (?!such|longer|more|less|other|better|worse|newer|older|lower|higher)": "is not a",
    r"(?:stand|stands|stood)\b(?! (?:in )?for\b)": "is, exists, lies",
}
# What may stay: by file ("*": every one), the exact text that has the word, and why.
EXCEPTIONS: Final[dict[str, dict[str, str]]] = {
    "*": {
        ".tell()": "Python's method of a file",
        "taken_up": "a key of stored audit records",
        "spared_": "keys of stored audit records and plans",
        "rehearsals.jsonl": "the name of a history by earlier releases",
    },
    "blobstore/local/dirs.py": {".born-": "a part of stored names"},
    "tests/integration/test_cli_directory.py": {".born-": "a part of stored names"},
    "tests/simulation/model/processes.py": {"ambient {seed}": "a seed: another text is another history"},
    "tests/unit/engine/commit/test_forget.py": {'"anew': "the content of a file"},
}

# An underscore parts words, also in a name that is quoted.
_WORD: Final = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(WORDS)})(?![A-Za-z])", re.IGNORECASE)
_PHRASES: Final = [(re.compile(rf"\b{pattern}", re.IGNORECASE), instead) for pattern, instead in PHRASES.items()]
_PART: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_FENCE: Final = re.compile(r"^\s*```")
_TEXT_TOKENS: Final = {"COMMENT", "STRING", "FSTRING_MIDDLE"}


class Finding(NamedTuple):
    line: int
    word: str
    instead: str
    text: str


def checked_files() -> list[str]:
    """Return every file that is checked, by its path from the root; not this one, which lists the words."""
    modules = (path for directory in DIRECTORIES for path in (ROOT / directory).rglob("*.py") if path != Path(__file__))
    # What `make docs` writes has the words of the product.
    pages = (path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reference" or path.stem == "README")
    others = (ROOT / name for name in FILES)
    return sorted(
        path.relative_to(ROOT).as_posix() for path in (*modules, *others, *(ROOT / "design").glob("*.md"), *pages)
    )


def find(name: str, source: str) -> list[Finding]:
    """Return the retired words of a file, each with its line."""
    allowed = [*EXCEPTIONS["*"], *EXCEPTIONS.get(name, {})]
    lines = source.splitlines()
    found = []
    for number, text, is_name in _names_and_texts(name, source):
        line = lines[number - 1].strip()
        if any(exact in line for exact in allowed):
            continue
        if is_name:
            words = {part.lower() for part in _PART.findall(text)}
            found += [Finding(number, word, WORDS[word], line) for word in sorted(words & WORDS.keys())]
            continue
        found += [Finding(number, m[0], WORDS[m[0].lower()], line) for m in _WORD.finditer(text)]
        found += [Finding(number, m[0], instead, line) for of, instead in _PHRASES for m in of.finditer(text)]
    return sorted(set(found))


def _names_and_texts(name: str, source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield each line of text and each identifier with its line number; of a page, what is in no code block."""
    if not name.endswith(".py"):
        is_code = False
        for number, line in enumerate(source.splitlines(), start=1):
            is_code ^= _FENCE.match(line) is not None
            if not is_code:
                yield number, line, False
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "NAME":
            yield token.start[0], token.string, True
        elif kind in _TEXT_TOKENS:
            for number, line in enumerate(token.string.splitlines(), start=token.start[0]):
                yield number, line, False


@pytest.mark.parametrize("name", checked_files())
def test_no_retired_word_is_used(name: str) -> None:
    found = find(name, (ROOT / name).read_text())
    assert not found, "\n".join(f"{name}:{f.line}: {f.word!r}, write: {f.instead}" for f in found)


@pytest.mark.parametrize(
    "source, word",
    [
        ("told = 1", "told"),
        ("class OwnHands: ...", "hands"),
        ('"""Takes up a run."""', "Takes up"),
        ("x = f'{1} is no size'", "is no "),
        ("# where it stands", "stands"),
        ("x = 1  # anew", "anew"),
    ],
)
def test_a_retired_word_is_found_wherever_it_is(source: str, word: str) -> None:
    assert [found.word for found in find("x.py", source)] == [word]


@pytest.mark.parametrize(
    "source", ["file.tell()", "# there is no repository", "# stands in for it", "bathroom = headroom", "# is no longer"]
)
def test_plain_english_is_left_alone(source: str) -> None:
    assert find("x.py", source) == []


if __name__ == "__main__":
    for name in sys.argv[1:] or checked_files():
        for finding in find(name, (ROOT / name).read_text()):
            sys.stdout.write(f"{name}:{finding.line}: {finding.word!r} -> {finding.instead}: {finding.text[:100]}\n")

"""Nothing is parsed that is not fuzzed, or of which the table does not say why not (architecture, H9)."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fuzz.seeds import seeds_of
from tests.fuzz.table import TARGETS, UNFUZZED

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("index", "blobstore", "engine", "tidemark")
# How functions are called that turn bytes or texts of somebody else's into values.
_NAMES: Final = (
    "decode_",
    "parse_",
    "read_",
    "load_",
    "from_",
    "unpack_",
    "unseal",
    "decompress_",
    "unwrap_",
    "split_",
)
# What a module needs to take bytes apart.
_TOOLS: Final = frozenset(
    {
        "Decoder",
        "ElementTree",
        "ZipFile",
        "decode_json",
        "fromisoformat",
        "iter_unpack",
        "literal_eval",
        "loads",
        "open_stream",
        "parsedate_to_datetime",
        "unpack",
        "unpack_from",
    }
)


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [(name, ast.parse(path.read_text())) for name, path in zip(names, paths, strict=True)]


def parsers() -> Iterator[str]:
    """Public functions and methods that read something, by module and name."""
    for module, tree in modules():
        for node in tree.body:
            found = [node] if not isinstance(node, ast.ClassDef) else node.body
            for function in found:
                # `read_into` passes bytes to a sink, whatever they are.
                if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.name == "read_into":
                    continue
                if function.name.startswith(_NAMES):
                    owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                    if not owner.startswith("_"):
                        yield f"{module}.{owner}{function.name}"


def covered() -> set[str]:
    # The decoder of one kind of record is a partial of the one of all.
    functions = {getattr(function, "func", function) for t in TARGETS.values() for function in t.covers}
    return {f"{function.__module__}.{function.__qualname__}" for function in functions}


def test_every_parser_is_fuzzed_or_has_a_reason() -> None:
    found = set(parsers())
    missing = found - covered() - set(UNFUZZED)
    assert not missing, "give each a target in tests/fuzz, or a reason in tests/fuzz/table.py"


def test_no_reason_is_of_a_parser_that_is_gone_or_fuzzed() -> None:
    there = {*parsers(), *(module for module, _ in modules())}
    assert not set(UNFUZZED) - there, "is gone"
    assert not set(UNFUZZED) & covered(), "is fuzzed"
    assert all(UNFUZZED.values())


def test_every_module_that_takes_bytes_apart_is_known() -> None:
    """By what it calls, whatever its functions are called."""
    known = {name.rpartition(".")[0] for name in (*covered(), *UNFUZZED)}
    known |= {name.rpartition(".")[0] for name in known} | set(UNFUZZED)
    unknown = set()
    for module, tree in modules():
        called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        decodes = any(
            isinstance(node, ast.Attribute) and node.attr == "decode" and ast.unparse(node).startswith("msgspec.")
            for node in ast.walk(tree)
        )
        if (called & _TOOLS or decodes) and module not in known:
            unknown.add(module)
    assert not unknown, "give each a target in tests/fuzz, or a reason in tests/fuzz/table.py"


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_somewhere_to_begin(name: str) -> None:
    assert seeds_of(name)
    assert TARGETS[name].covers

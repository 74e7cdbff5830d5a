"""What other people's programs may import: there, documented, and the same as before unless that was meant."""

import enum
import importlib
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from tests.unit.public_names import MODULES, describe, function_of, members_of, names_of, public
from tidemark import SyncRepository

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "public_names.txt"
HOW: Final = "if it was meant: python -m tests.unit.public_names > tests/golden/public_names.txt, and the changelog"


def test_names_arguments_and_fields_are_those_that_were_promised() -> None:
    assert list(describe()) == GOLDEN.read_text().splitlines(), HOW


@pytest.mark.parametrize("module", MODULES)
def test_every_name_can_be_imported_and_is_named_once(module: str) -> None:
    found = importlib.import_module(module)
    names = names_of(found)
    assert names
    assert len(names) == len(set(names))
    for name in names:
        assert hasattr(found, name)


def test_every_name_is_documented() -> None:
    bare = [name for name, value in public() if callable(value) and not inspect.getdoc(value)]
    for name, value in public():
        if inspect.isclass(value):
            # An exception's or an enum's own words may be those of the class above; a method's are its own.
            members = members_of(value).items()
            bare += [f"{name}.{m}" for m, member in members if not inspect.getdoc(function_of(member))]
    assert bare == []


def test_what_is_returned_cannot_be_changed() -> None:
    changeable = [name for name, kind in structs().items() if not kind.__struct_config__.frozen]
    assert changeable == []
    assert {
        "engine.backup.backup.BackupResult",
        "engine.restore.restore.RestoreResult",
        "index.plan.commits.Commit",
    } <= structs().keys()


def test_blocking_methods_show_the_arguments_of_those_that_wait() -> None:
    assert "options" in inspect.signature(SyncRepository.backup).parameters
    assert SyncRepository.backup.__name__ == "backup"
    with pytest.raises(TypeError, match=r"SyncRepository\.backup needs an object"):
        SyncRepository.backup(*[None] * 2)  # type: ignore[arg-type]


def structs() -> dict[str, type[msgspec.Struct]]:
    """Every struct that is public, or that a public function returns, or that is in one of these."""
    found: dict[str, type[msgspec.Struct]] = {}
    waiting = [hint for _, value in public() for hint in returned(value)]
    while waiting:
        hint = waiting.pop()
        waiting += typing.get_args(hint)
        if inspect.isclass(hint) and issubclass(hint, msgspec.Struct):
            name = f"{hint.__module__}.{hint.__qualname__}"
            if name not in found and hint is not msgspec.Struct:
                found[name] = hint
                waiting += typing.get_type_hints(hint).values()
    return found


def returned(value: object) -> Iterator[Any]:
    """A class itself and what its methods return; or what a function returns."""
    if inspect.isclass(value) and not issubclass(value, enum.Enum):
        yield value
        functions = [function_of(member) for member in members_of(value).values()]
    else:
        functions = [value] if inspect.isfunction(value) else []
    for function in functions:
        if function is not None:
            try:
                yield typing.get_type_hints(function).get("return")
            except NameError:
                # An argument is of a type that is imported for the type checker alone.
                yield function.__annotations__.get("return")

"""What other people's programs may import, as text: names, arguments, fields. What changes there breaks somebody.

`python -m tests.unit.public_names` prints it; where it has changed on purpose, that goes to
`tests/golden/public_names.txt`, and the change to the changelog. Types are not in it: they are the type checker's.
"""

import enum
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Final

import msgspec
from typing_extensions import override

from engine.blocking import Blocking, Direct, Opening

OURS: Final = ("index", "blobstore", "engine", "tidemark")
# Those with `__all__` export it; of the others all that is defined in them and has no underscore is public.
MODULES: Final = (
    "tidemark",
    "tidemark.errors",
    "engine.collect.backend",
    "engine.collect.report",
    "engine.errors",
    "engine.drill",
    "engine.rocksdb.store",
    "tidemark.spark",
    "engine.spark.errors",
    "engine.settings",
    "blobstore.base",
    "blobstore.errors",
    "blobstore.opening",
    "blobstore.s3.settings",
    "blobstore.wrappers.by_id",
    "index.errors",
    "index.plan.commits",
    "index.snapshot.model",
)


def names_of(module: ModuleType) -> list[str]:
    """The public names of a module, sorted."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    found = inspect.getmembers(module, lambda value: inspect.isclass(value) or inspect.isfunction(value))
    return sorted(n for n, value in found if not n.startswith("_") and value.__module__ == module.__name__)


def public() -> Iterator[tuple[str, object]]:
    """Every public name with what it is."""
    for name in MODULES:
        module = importlib.import_module(name)
        for attribute in names_of(module):
            yield f"{name}.{attribute}", getattr(module, attribute)


def members_of(kind: type) -> dict[str, object]:
    """The public methods and properties of a class, those of our classes above it too."""
    members: dict[str, object] = {}
    for above in reversed(kind.__mro__):
        if above.__module__.partition(".")[0] in OURS:
            members |= {n: v for n, v in vars(above).items() if not n.startswith("_") and _is_member(v)}
    return dict(sorted(members.items()))


def describe() -> Iterator[str]:
    """The lines of the golden file."""
    for name, value in public():
        if inspect.isclass(value):
            yield f"{name}{_bases(value)}"
            yield from (f"    {line}" for line in _fields(value))
            yield from (f"    {_member(member, found)}" for member, found in members_of(value).items())
        elif inspect.isfunction(value):
            yield f"{name}{_arguments(value)}"
        else:
            yield f"{name} = {_text_of(value)}"


def function_of(member: object) -> Callable[..., object] | None:
    """The function behind a method, a property or a blocking one."""
    match member:
        case property():
            return member.fget
        case classmethod() | staticmethod():
            return member.__func__
        case Blocking() | Direct():
            method: Callable[..., object] = member._method
            return method
        case Opening():
            opening: Callable[..., object] = member._function
            return opening
        case _ if inspect.isfunction(member):
            return member
        case _:
            return None


def _is_member(value: object) -> bool:
    return function_of(value) is not None


def _member(name: str, member: object) -> str:
    function = function_of(member)
    assert function is not None
    return f"property {name}" if isinstance(member, property) else f"{name}{_arguments(function)}"


def _bases(kind: type) -> str:
    bases = [base.__name__ for base in kind.__bases__ if base not in {object, msgspec.Struct}]
    return f"({', '.join(bases)})" if bases else ""


def _fields(kind: type) -> Iterator[str]:
    if issubclass(kind, enum.Enum):
        yield from (f"{member.name} = {member.value!r}" for member in kind)
    elif issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            default = "" if field.required else f" = {_text_of(field.default)}"
            yield f"field {field.name}{default}"


def _arguments(function: Callable[..., object]) -> str:
    signature = inspect.signature(function)
    plain = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.empty if parameter.default is parameter.empty else _Text(parameter.default),
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


class _Text:
    """A default, in words that are the same in every run."""

    def __init__(self, value: object) -> None:
        self._value = value

    @override
    def __repr__(self) -> str:
        return _text_of(self._value)


def _text_of(value: object) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__name__
    text = repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text or value is msgspec.NODEFAULT else text


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in describe())

"""Make `docs/reference/` of the code: the help of each verb, the structs behind `--json`, the public names.

Git keeps its first page alone; `tests/golden/surface.txt` and `public_names.txt` hold the code to the others.

python -m tests.docs.reference    # write all of it
"""

import ast
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, IntEnum
from pathlib import PurePath
from typing import Annotated, Any, Final, get_args, get_origin

import click
import msgspec

import blobstore.errors
import engine.drill
import engine.errors
import index.errors
import tidemark
import tidemark.errors
import tidemark.spark
from engine.cli.app import tidemark as main_command
from engine.cli.errors import Failure
from engine.cli.options import Setting, Verb, walk_verbs
from engine.cli.output import SCHEMA, CommitView, JsonField, LogLineView, json_fields
from engine.cli.run import CODES, MEANINGS, ExitCode
from index.plan.commits import Commit
from tests.docs.console import PROJECT

REFERENCE: Final = PROJECT / "docs" / "reference"
# What git keeps of it.
FIRST_PAGE: Final = "README.md"
WIDTH: Final = 80
MADE: Final = "<!-- Made of the code by `make docs`: change that. -->"


def write() -> None:
    """Write every page."""
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, page in pages().items():
        (REFERENCE / name).write_text(page, encoding="utf-8")


def pages() -> dict[str, str]:
    """Each page by its name."""
    return {FIRST_PAGE: _first(), "commands.md": _commands(), "json.md": _json(), "python.md": _python()}


def _page(lines: Iterable[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


# ---------------------------------------------------------------------- the first page

_PAGES: Final = """\
`make docs` writes three more pages into this directory, which git does not keep: `commands.md` has each verb as
`tidemark VERB --help` shows it, `json.md` every field that `--json` prints, `python.md` the public names with their
documentation. The names alone are in [surface.txt](../../tests/golden/surface.txt) and
[public_names.txt](../../tests/golden/public_names.txt), to which a test holds the code.\
"""


def _first() -> str:
    """The verbs, the contract of `--json` and the exit codes."""
    lines = ["# Reference", "", MADE, "", _PAGES, "", "## Commands", ""]
    lines += [f"- `tidemark {verb.words}`: {verb.get_short_help_str(limit=200)}" for verb in walk_verbs(main_command)]
    # Here there is nothing to link to, nor below.
    contract = _CONTRACT.replace("[Failure](#failure)", "`Failure`").replace("that is below", "in `json.md`")
    lines += ["", "## JSON", "", contract, "", "## Exit codes and error classes", ""]
    lines += ["| code | meaning | errors |", "|---|---|---|"]
    for code, meaning in MEANINGS.items():
        errors = ", ".join(f"`{error.__name__}`" for error, of_error in codes_of_errors().items() if of_error == code)
        lines.append(f"| {int(code)} | {meaning} | {errors} |")
    return _page(lines)


# ---------------------------------------------------------------------- commands


def _commands() -> str:
    """Every verb with its help, its variables and its keys."""
    verbs = list(walk_verbs(main_command))
    settings = {**main_command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    root = click.Context(main_command, info_name="tidemark", **settings)
    lines = ["# Commands", "", MADE, "", "Each verb as `tidemark VERB --help` has it.", ""]
    lines += [
        f"- [{verb.words}](#{verb.words.replace(' ', '-')}): {verb.get_short_help_str(limit=200)}" for verb in verbs
    ]
    lines += ["", "## tidemark", "", "```text", *_help(root), "```"]
    for verb in verbs:
        lines += ["", f"## {verb.words}", "", "```text", *_help(_context_of(verb, root)), "```", ""]
        lines += [f"Variables `TIDEMARK_{verb.words.replace(' ', '_').upper()}_<OPTION>`, table `[{verb.table}]`.", ""]
        shared = [p.name for p in verb.params if isinstance(p, Setting) and p.name and not p.hidden]
        if shared:
            names = ", ".join(f"`{name}`" for name in sorted(shared))
            lines += [f"At the top of `tidemark.toml`, and as `TIDEMARK_<OPTION>`, also: {names}.", ""]
        lines += [f"With `--json`: {_views(verb.prints)}."]
    return _page(lines)


def _context_of(verb: Verb, root: click.Context) -> click.Context:
    *groups, name = verb.words.split()
    parent = root
    group: click.Group = main_command
    for word in groups:
        command = group.commands[word]
        assert isinstance(command, click.Group)
        group = command
        parent = click.Context(group, info_name=word, parent=parent)
    return click.Context(verb, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH)


def _help(context: click.Context) -> list[str]:
    return [line.rstrip() for line in context.command.get_help(context).splitlines()]


def _views(prints: Iterable[type[msgspec.Struct]]) -> str:
    return " or ".join(f"[{view.__name__}](json.md#{view.__name__.lower()})" for view in prints)


# ---------------------------------------------------------------------- JSON

_CONTRACT: Final = f"""\
With `--json` a verb prints one object on its standard output, once it has ended, and nothing else there. It has two
fields of its own, `schema`, which is {SCHEMA}, and `verb`, and those of the struct that is below. An error is one
object on standard error, [Failure](#failure); the exit code of the process is its `code`.

What stays within schema {SCHEMA}: a field keeps its name, its type and its meaning, and is never taken away; an object
may get further fields, so ignore what you do not know; a verb's exit codes keep their meaning. What would break this
gets a new number. Sizes are bytes. Each time is given twice: `..._ms` is milliseconds since the epoch by the blob
store's clock, and the field beside it is the same in ISO 8601, UTC. `null` is what is not known or not there.\
"""


_LOG: Final = """\
With `--log-format json`, with or without `--json`, each line on standard error is one object: progress (at most one in
ten seconds, with its numbers in `fields`), warnings, and errors, whose `fields` are those of [Failure](#failure).\
"""


def _json() -> str:
    """The contract, and the structs behind it."""
    by_view: dict[type[msgspec.Struct], list[str]] = {}
    for verb in walk_verbs(main_command):
        for view in verb.prints:
            by_view.setdefault(view, []).append(verb.words)
    lines = ["# What `--json` prints", "", MADE, "", _CONTRACT, "", "## Verbs", "", "| verb | prints |", "|---|---|"]
    lines += [f"| `{verb.words}` | {_views(verb.prints).replace('json.md', '')} |" for verb in walk_verbs(main_command)]
    lines += ["", "## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items()]
    lines += [
        "",
        "## Failure",
        "",
        *_fields(Failure),
        "",
        "Which error has which code:",
        "",
        "| error | code | hint |",
        "|---|---|---|",
    ]
    for error, code in codes_of_errors().items():
        hint = str(getattr(error, "default_hint", "") or "").replace("|", "\\|")
        lines.append(f"| `{error.__name__}` | {int(code)} | {hint} |")
    lines += ["", "## LogLineView", "", _LOG, "", *_fields(LogLineView)]
    for struct in structs_behind(by_view):
        used = f"`{'`, `'.join(by_view[struct])}`. " if struct in by_view else ""
        text = " ".join(inspect.cleandoc(struct.__doc__ or "").split("\n\n", maxsplit=1)[0].split())
        lines += ["", f"## {struct.__name__}", "", f"{used}{text}", "", *_fields(struct)]
    return _page(lines)


def codes_of_errors() -> dict[type[Exception], ExitCode]:
    """Return the exit code of each error, sorted by the name of the error."""
    modules = (tidemark.errors, engine.errors, blobstore.errors, index.errors)
    found = {
        error.__name__: error
        for module in modules
        for error in vars(module).values()
        if isinstance(error, type) and issubclass(error, Exception) and not error.__name__.startswith("_")
    }
    named = {error: [kind.__name__ for kind in error.__mro__ if kind.__name__ in CODES] for error in found.values()}
    return {error: CODES[named[error][0]] for _, error in sorted(found.items())}


def structs_behind(views: Iterable[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    """Return the structs of verbs and those inside of them, each once, where it is first met."""
    found: dict[type[msgspec.Struct], None] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind not in found:
                found[kind] = None
                for field in json_fields(kind):
                    visit(field_type(kind, field))
            return
        for inner in get_args(kind):
            visit(inner)

    for view in views:
        visit(view)
    return list(found)


def _fields(struct: type[msgspec.Struct]) -> list[str]:
    comments = _comments(struct)
    lines = ["| field | type | |", "|---|---|---|"]
    for field in json_fields(struct):
        text = comments.get(field.attribute, "").replace("|", "\\|")
        lines.append(f"| `{field.name}` | {json_type(field_type(struct, field))} | {text} |")
    return lines


def field_type(struct: type[msgspec.Struct], field: JsonField) -> Any:
    """Return what a field of an object is in JSON, as a type."""
    if field.name == struct.__struct_config__.tag_field:
        return typing.Literal[struct.__struct_config__.tag]
    declared = _type_at(struct, field.attribute)
    if field.form:
        return str | None if type(None) in get_args(declared) else str
    return _shown_type(declared)


def _type_at(kind: Any, path: str) -> Any:
    """The declared type of a field, or of a property, of a struct or of what is in it."""
    is_optional = False
    for name in path.split("."):
        if type(None) in get_args(kind):
            is_optional, [kind] = True, [one for one in get_args(kind) if one is not type(None)]
        attribute = getattr(kind, name, None)
        holder = attribute.fget if isinstance(attribute, property) else kind
        kind = typing.get_type_hints(holder)["return" if isinstance(attribute, property) else name]
    return kind | None if is_optional else kind


def _shown_type(kind: Any) -> Any:  # noqa: PLR0911  (one answer for each kind)
    """What a type is in JSON, by the rules of `engine.cli.output`."""
    kind = getattr(kind, "__supertype__", kind)
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Commit:
        return CommitView
    if kind is bytes or (isinstance(kind, type) and issubclass(kind, PurePath)):
        return str
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return int
    if isinstance(kind, type) and issubclass(kind, Enum):
        return typing.Literal[tuple(member.name.lower() for member in kind)]
    if origin is Annotated:
        return _shown_type(inner[0])
    if origin in {None, typing.Literal}:
        return kind
    shown = tuple(one if one is Ellipsis else _shown_type(one) for one in inner)
    generic: Any = typing.Union if origin is types.UnionType else origin
    return generic[shown]


def json_type(kind: Any) -> str:
    """Return a type in JSON's words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        text = json_type(inner[0])
    elif origin in {typing.Union, types.UnionType}:
        text = " or ".join(map(json_type, inner))
    elif origin is typing.Literal:
        text = " or ".join(f'"{value}"' for value in inner)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        text = f"object of {json_type(inner[1])} by name"
    elif isinstance(origin, type):
        text = f"[{', '.join(json_type(a) for a in inner if a is not Ellipsis)}]"
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        text = f"[{kind.__name__}](#{kind.__name__.lower()})"
    else:
        text = _PLAIN.get(kind) or f"`{getattr(kind, '__name__', kind)}`"
    return text


_PLAIN: Final = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "any"}


def _comments(struct: type[msgspec.Struct]) -> dict[str, str]:
    """What is in comments above the fields of a struct, and of those that it grew from."""
    text: dict[str, str] = {}
    for kind in reversed(struct.__mro__):
        if kind in {object, msgspec.Struct} or not issubclass(kind, msgspec.Struct):
            continue
        lines, first = inspect.getsourcelines(kind)
        tree = ast.parse(inspect.cleandoc("".join(lines)) if lines[0].startswith(" ") else "".join(lines))
        body = tree.body[0]
        assert isinstance(body, ast.ClassDef)
        for statement in body.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            above: list[str] = []
            at = statement.lineno - 2
            while at >= 0 and lines[at].strip().startswith("#"):
                above.insert(0, lines[at].strip().lstrip("# "))
                at -= 1
            if above:
                text[statement.target.id] = " ".join(above)
        del first
    return text


# ---------------------------------------------------------------------- Python


def _python() -> str:
    """The public names with their signatures and docstrings."""
    lines = ["# Python", "", MADE, "", "What is not listed here may change with any release."]
    for module in (tidemark, tidemark.spark, engine.drill):
        lines += ["", f"## `{module.__name__}`", "", *_docstring(module)]
        for name in sorted(module.__all__):
            lines += list(_name(module, name))
    return _page(lines)


def _name(module: types.ModuleType, name: str) -> Iterator[str]:
    value = getattr(module, name)
    yield from ("", f"### `{module.__name__}.{name}`", "")
    if inspect.isclass(value):
        if not issubclass(value, BaseException):
            yield from (*_signature(name, value), "")
        yield from _docstring(value)
        for member, method in sorted(vars(value).items()):
            plain = inspect.unwrap(method.__func__) if isinstance(method, (classmethod, staticmethod)) else method
            if not member.startswith("_") and inspect.isfunction(plain):
                yield from ("", f"#### `{name}.{member}`", "", *_signature(member, plain), "", *_docstring(plain))
    elif callable(value):
        yield from (*_signature(name, value), "", *_docstring(value))
    else:
        yield f"`{value!r}`"


def _signature(name: str, value: Callable[..., Any]) -> list[str]:
    try:
        signature = str(inspect.signature(value))
    except ValueError:
        return []
    # A default that only says where it is in memory differs from run to run.
    parts = re.sub(r"<[\w.]+ object at 0x[0-9a-f]+>", "...", signature).replace("'", "")
    return ["```python", f"{name}{parts}", "```"]


def _docstring(value: object) -> list[str]:
    """A docstring in Markdown: its sections as lists."""
    lines: list[str] = []
    for line in (inspect.getdoc(value) or "").splitlines():
        if line.strip() in {"Args:", "Returns:", "Raises:", "Yields:", "Attributes:"}:
            lines.append(f"*{line.strip().removesuffix(':')}*")
            lines.append("")
        elif line.startswith("    ") and not line.startswith("     "):
            name, colon, rest = line.strip().partition(": ")
            lines.append(f"- `{name}`: {rest}" if colon and " " not in name else f"- {line.strip()}")
        elif line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return lines


if __name__ == "__main__":
    os.environ["COLUMNS"] = str(WIDTH)
    write()

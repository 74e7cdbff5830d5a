"""`docs/reference/`, made of what the code says: the help of each verb, the structs behind `--json`, the public names.

python -m tests.docs.reference    # write it anew
"""

import ast
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, get_args, get_origin

import click
import msgspec

import blobstore.errors
import engine
import engine.drill
import engine.errors
import engine.spark
import index.errors
from engine.cli.app import tidemark
from engine.cli.errors import Failure
from engine.cli.exit_codes import CODES, MEANINGS
from engine.cli.log_lines import LogLineView
from engine.cli.options import Setting, Verb, table_name, walk_verbs
from engine.cli.views import SCHEMA
from tests.docs.console import PROJECT

REFERENCE: Final = PROJECT / "docs" / "reference"
WIDTH: Final = 80
MADE: Final = "<!-- Made of the code by `make docs`: change that. -->"


def write() -> None:
    """Write every page."""
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, page in pages().items():
        (REFERENCE / name).write_text(page, encoding="utf-8")


def pages() -> dict[str, str]:
    """Each page by its name."""
    return {"commands.md": _commands(), "json.md": _json(), "python.md": _python()}


def _page(lines: Iterable[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


# ---------------------------------------------------------------------- commands


def _commands() -> str:
    """Every verb with its help, its variables and its keys."""
    verbs = list(walk_verbs(tidemark))
    settings = {**tidemark.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    root = click.Context(tidemark, info_name="tidemark", **settings)
    lines = ["# Commands", "", MADE, "", "Each verb as `tidemark VERB --help` has it.", ""]
    lines += [
        f"- [{verb.words}](#{verb.words.replace(' ', '-')}): {verb.get_short_help_str(limit=200)}" for verb in verbs
    ]
    lines += ["", "## tidemark", "", "```text", *_help(root), "```"]
    for verb in verbs:
        lines += ["", f"## {verb.words}", "", "```text", *_help(_context_of(verb, root)), "```", ""]
        lines += [
            f"Variables `TIDEMARK_{verb.words.replace(' ', '_').upper()}_<OPTION>`, table `[{table_name(verb)}]`.",
            "",
        ]
        shared = [p.name for p in verb.params if isinstance(p, Setting) and p.name and not p.hidden]
        if shared:
            names = ", ".join(f"`{name}`" for name in sorted(shared))
            lines += [f"At the top of `tidemark.toml`, and as `TIDEMARK_<OPTION>`, also: {names}.", ""]
        lines += [f"With `--json`: {_views(verb.prints)}."]
    return _page(lines)


def _context_of(verb: Verb, root: click.Context) -> click.Context:
    *groups, name = verb.words.split()
    parent = root
    group: click.Group = tidemark
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
fields of its own, `schema`, which is {SCHEMA}, and `verb`, and those of the struct that stands below. An error is one
object on standard error, [Failure](#failure); the exit code of the process is its `code`.

What stays within schema {SCHEMA}: a field keeps its name, its type and its meaning, and is never taken away; an object
may get further fields, so ignore what you do not know; a verb's exit codes keep their meaning. What would break this
gets a new number. Sizes are bytes. A time stands there twice: `..._ms` is milliseconds since the epoch by the store's
clock, and the field beside it is the same in ISO 8601, UTC. `null` is what is not known or not there.\
"""


_LOG: Final = """\
With `--log-format json`, with or without `--json`, each line on standard error is one object: progress (at most one in
ten seconds, with its numbers in `fields`), warnings, and errors, whose `fields` are those of [Failure](#failure).\
"""


def _json() -> str:
    """The contract, and the structs behind it."""
    by_view: dict[type[msgspec.Struct], list[str]] = {}
    for verb in walk_verbs(tidemark):
        for view in verb.prints:
            by_view.setdefault(view, []).append(verb.words)
    lines = ["# What `--json` prints", "", MADE, "", _CONTRACT, "", "## Verbs", "", "| verb | prints |", "|---|---|"]
    lines += [f"| `{verb.words}` | {_views(verb.prints).replace('json.md', '')} |" for verb in walk_verbs(tidemark)]
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
    lines += list(_errors())
    lines += ["", "## LogLineView", "", _LOG, "", *_fields(LogLineView)]
    for struct in _reachable(by_view):
        used = f"`{'`, `'.join(by_view[struct])}`. " if struct in by_view else ""
        told = " ".join(inspect.cleandoc(struct.__doc__ or "").split("\n\n", maxsplit=1)[0].split())
        lines += ["", f"## {struct.__name__}", "", f"{used}{told}", "", *_fields(struct)]
    return _page(lines)


def _errors() -> Iterator[str]:
    modules = (engine.errors, blobstore.errors, index.errors)
    found = {
        error.__name__: error
        for module in modules
        for error in vars(module).values()
        if isinstance(error, type) and issubclass(error, Exception) and not error.__name__.startswith("_")
    }
    for name, error in sorted(found.items()):
        code = next(CODES[kind] for kind in error.__mro__ if kind in CODES)
        hint = str(getattr(error, "default_hint", "") or "").replace("|", "\\|")
        yield f"| `{name}` | {int(code)} | {hint} |"


def _reachable(views: Iterable[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    """The structs of verbs and those inside of them, each once, where it is first met."""
    found: dict[type[msgspec.Struct], None] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind not in found:
                found[kind] = None
                for field in msgspec.structs.fields(kind):
                    visit(field.type)
            return
        for inner in get_args(kind):
            visit(inner)

    for view in views:
        visit(view)
    return list(found)


def _fields(struct: type[msgspec.Struct]) -> list[str]:
    comments = _comments(struct)
    lines = ["| field | type | |", "|---|---|---|"]
    for field in msgspec.structs.fields(struct):
        told = comments.get(field.name, "").replace("|", "\\|")
        lines.append(f"| `{field.encode_name}` | {_type(field.type)} | {told} |")
    return lines


def _type(kind: Any) -> str:
    """A type in JSON's words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in {typing.Union, types.UnionType}:
        told = " or ".join(map(_type, inner))
    elif origin is typing.Literal:
        told = " or ".join(f'"{value}"' for value in inner)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        told = f"object of {_type(inner[1])} by name"
    elif isinstance(origin, type):
        told = f"[{', '.join(_type(a) for a in inner if a is not Ellipsis)}]"
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        told = f"[{kind.__name__}](#{kind.__name__.lower()})"
    else:
        told = _PLAIN.get(kind) or f"`{getattr(kind, '__name__', kind)}`"
    return told


_PLAIN: Final = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Any: "any",
}


def _comments(struct: type[msgspec.Struct]) -> dict[str, str]:
    """What stands in comments above the fields of a struct, and of those that it grew from."""
    told: dict[str, str] = {}
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
                told[statement.target.id] = " ".join(above)
        del first
    return told


# ---------------------------------------------------------------------- Python


def _python() -> str:
    """The public names with their signatures and docstrings."""
    lines = ["# Python", "", MADE, "", "What is not listed here may change with any release."]
    for module in (engine, engine.spark, engine.drill):
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
    # A default that only says where it stands in memory differs from run to run.
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

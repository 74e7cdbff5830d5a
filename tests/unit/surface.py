"""Write down what users of the command line see: verbs, options, exit codes, JSON fields and metrics, as text.

`python -m tests.unit.surface` prints it; where it has changed on purpose, that goes to `tests/golden/surface.txt`, and
the change to the changelog. Help texts are not in it. The names of Python are in `public_names.txt`.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Final

import click

from engine.cli.app import tidemark
from engine.cli.errors import Failure
from engine.cli.options import walk_verbs
from engine.cli.output import SCHEMA, LogLineView, json_fields
from engine.cli.run import MEANINGS
from engine.metrics.names import METRICS
from tests.docs.reference import codes_of_errors, field_type, json_type, structs_behind

_WIDTH: Final = 120
_LINK: Final = re.compile(r"\[(\w+)\]\(#\w+\)")


def describe() -> Iterator[str]:
    """Yield a line for each verb, option, code, struct and metric; long ones go on below."""
    verbs = sorted(walk_verbs(tidemark), key=lambda verb: verb.words)
    for verb in verbs:
        arguments = [p.make_metavar(click.Context(verb)) for p in verb.params if isinstance(p, click.Argument)]
        yield " ".join(["verb", verb.words, *arguments, "->", *(view.__name__ for view in verb.prints)])
    yield from _options()
    by_code: dict[int, list[str]] = {int(code): [] for code in MEANINGS}
    for error, code in codes_of_errors().items():
        by_code[int(code)].append(error.__name__)
    for number, errors in by_code.items():
        yield from _wrapped(f"exit {number}:", " ".join(errors))
    yield f"schema {SCHEMA}"
    views = [view for verb in verbs for view in verb.prints]
    for struct in sorted(structs_behind([Failure, LogLineView, *views]), key=lambda struct: struct.__name__):
        fields = "; ".join(f"{field.name}: {json_type(field_type(struct, field))}" for field in json_fields(struct))
        yield from _wrapped(f"json {struct.__name__}:", _LINK.sub(r"\1", fields))
    for _, metric in sorted(METRICS.items()):
        yield f"metric {metric.name} {metric.kind} ({', '.join(metric.labels)})"


def _options() -> Iterator[str]:
    """Each option once, with the verbs that have it."""
    having: dict[str, list[str]] = {}
    verbs = list(walk_verbs(tidemark))
    for verb in verbs:
        for option in verb.params:
            if isinstance(option, click.Option):
                having.setdefault(_option(option), []).append(verb.words)
    for shown, words in sorted(having.items()):
        yield from _wrapped(f"option {shown}:", "every verb" if len(words) == len(verbs) else ", ".join(sorted(words)))


def _option(option: click.Option) -> str:
    shown = "/".join([*option.opts, *option.secondary_opts])
    if not option.is_flag:
        choices = "|".join(map(str, option.type.choices)) if isinstance(option.type, click.Choice) else ""
        shown += f" {choices or option.type.name}"
    if isinstance(option.default, (str, int, float)) and not isinstance(option.default, bool):
        shown += f" = {option.default}"
    marks = {"repeatable": option.multiple, "required": option.required}
    return shown + "".join(f" ({mark})" for mark, is_set in marks.items() if is_set)


def _wrapped(head: str, rest: str) -> list[str]:
    return textwrap.wrap(f"{head} {rest}", _WIDTH, subsequent_indent="    ", break_on_hyphens=False)


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in describe())

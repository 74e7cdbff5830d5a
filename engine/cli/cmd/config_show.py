"""The verb `config show`: what is set, and where each value comes from."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import click
import msgspec

from blobstore.errors import InvalidRequestError
from blobstore.opening import check_url
from blobstore.s3.settings import S3Settings
from engine.cli.config import S3, TRANSFER, Config, Value, config_paths, shared_place
from engine.cli.options import CONFIG_META, Setting, setting_keys, table_name, walk_verbs
from engine.cli.run import ExitCode
from engine.cli.session import Session, verb
from engine.errors import UsageError, bare_message
from engine.settings import TransferSettings
from engine.text import table, without_credentials

DEFAULT: Final = "default"
# Their settings are taken together, and can contradict each other.
_TOGETHER: Final[Mapping[str, type[TransferSettings | S3Settings]]] = {TRANSFER: TransferSettings, S3: S3Settings}


class SettingView(msgspec.Struct, kw_only=True):
    """One setting, or option of a verb."""

    # As in the settings file: `job`, `[transfer] in_flight_max`, `[backup] job`.
    key: str
    flag: str
    # The variables that are looked at, the first that is set winning.
    variables: tuple[str, ...]
    # None: nothing is set, and there is no default.
    value: Value | None
    # default, environment or file.
    origin: str = DEFAULT
    # The variable, or the table of the file; empty for a default.
    place: str = ""
    # Why the value would be refused.
    problem: str = ""


class ConfigView(msgspec.Struct, frozen=True, kw_only=True):
    """`config show`."""

    # Whose options; empty for the settings of all verbs.
    of: str
    # The settings file that is read; empty if there is none.
    file: str
    # Where one is looked for, the first that is there winning.
    looked_at: tuple[str, ...]
    settings: tuple[SettingView, ...]


@verb(
    "show",
    "Every setting, its value and where that comes from.",
    group="config",
    needs_repository=False,
    shows_settings=True,
    prints=(ConfigView,),
)
@click.argument("of", nargs=-1, metavar="[VERB]...")
@click.option("--origin", is_flag=True, help="Where each value comes from, and where else it could be.")
@click.option("--set", "only_set", is_flag=True, help="Leave out what has its default.")
def config_show(session: Session, of: tuple[str, ...], *, origin: bool, only_set: bool) -> ExitCode:
    """Show the settings that verbs share or, with VERB, all options of that verb.

    What is on this command line is for this run alone, and is not shown. No request is made. A value that its verb
    would refuse is shown, and makes the exit code 2.

    Example: tidemark config show --origin backup
    """
    ctx = click.get_current_context()
    file = ctx.obj.get(CONFIG_META) or Config()
    rows = _rows(ctx, " ".join(of), file)
    view = ConfigView(
        of=" ".join(of),
        file=str(file.path or ""),
        looked_at=tuple(map(str, config_paths(os.environ, Path.cwd()))),
        settings=tuple(row for row in rows if row.origin != DEFAULT or row.problem or not only_set),
    )
    session.show(view, list(_lines(view, origin=origin)))
    return ExitCode.USAGE if any(row.problem for row in rows) else ExitCode.OK


def _rows(ctx: click.Context, words: str, file: Config) -> list[SettingView]:
    """Return the options of a verb, or the settings of all verbs: first the shared ones, then transfers, then S3."""
    root = cast("click.Group", ctx.find_root().command)
    verbs = {command.words: command for command in walk_verbs(root)}
    if words and words not in verbs:
        raise UsageError("no such verb", operation="config show", subject=words, hint=f"there are {', '.join(verbs)}")
    options: dict[str, click.Option] = {}
    for param in (param for v in ([verbs[words]] if words else verbs.values()) for param in v.params):
        if isinstance(param, click.Option) and param.name != "config" and (words or isinstance(param, Setting)):
            options.setdefault(str(param.name), param)
    own = table_name(verbs[words]) if words else ""
    keys = setting_keys(root)
    rows: dict[tuple[str, str], SettingView] = {}
    taken: dict[str, dict[str, Any]] = {"": {}, TRANSFER: {}, S3: {}}
    for name in sorted(options, key=lambda name: (list(taken).index(shared_place(name)[0]), name)):
        shared, key = shared_place(name)
        variables = tuple(options[name].envvar or ())[0 if own else -1 :]
        row = rows[shared, key] = SettingView(
            key=_named(shared, key) if key in keys[shared] else _named(own, name),
            flag=max(options[name].opts, key=len),
            variables=variables,
            value=_default(options[name]),
        )
        if (variable := next((v for v in variables if os.environ.get(v)), None)) is not None:
            row.value, row.origin, row.place = os.environ[variable], "environment", variable
        elif (at := file.place(own, name)) is not None:
            row.value, row.origin, row.place = file.tables[at[0]][at[1]], "file", _named(*at)
        if row.origin != DEFAULT and (value := _take(ctx, options[name], row)) is not None:
            taken[shared][key] = value
    for group, values in taken.items():
        _find_misfits(group, values, rows)
    return list(rows.values())


def _default(option: click.Option) -> Value | None:
    """Return the default; some are in the structs that the options end up in."""
    group, key = shared_place(str(option.name))
    if group:
        return cast("Value | None", getattr(_TOGETHER[group](), key))
    value = option.default is True if option.is_flag else option.default
    return value if isinstance(value, str | int | float | bool) else None


def _take(ctx: click.Context, option: click.Option, row: SettingView) -> object:
    """Return what a verb takes a value for, None if it would refuse it; note why, and hide credentials in the row.

    A URL with credentials is refused everywhere, and not printed on the way.
    """
    value, taken = row.value, None
    try:
        # An option that may be repeated is, in the environment, several words.
        several = option.multiple and isinstance(value, str)
        taken = option.type_cast_value(ctx, option.type.split_envvar_value(str(value)) if several else value)
        if option.name == "repository" and value:
            check_url(str(value))
    except (click.BadParameter, InvalidRequestError) as error:
        problem = error.message if isinstance(error, click.BadParameter) else f"{error}; {error.hint}"
        row.problem = without_credentials(problem)
    if isinstance(value, tuple):
        row.value = tuple(without_credentials(one) if isinstance(one, str) else one for one in value)
    elif isinstance(value, str):
        row.value = without_credentials(value)
    return taken


def _find_misfits(group: str, values: Mapping[str, Any], rows: Mapping[tuple[str, str], SettingView]) -> None:
    """Note what is wrong with settings that a verb takes together."""
    rest = dict(values)
    while group and rest:
        try:
            _TOGETHER[group](**rest)
        except (UsageError, ValueError) as error:
            reason = f"{error.subject} {bare_message(error)}" if isinstance(error, UsageError) else str(error)
            # Each refusal names one thing: look for more without what is known already.
            for key in [key for key in rest if re.search(rf"\b{key}\b", reason)] or list(rest):
                rows[group, key].problem = rows[group, key].problem or reason.removeprefix(f"{key} ")
                del rest[key]
        else:
            return


def _named(group: str, key: str) -> str:
    return f"[{group}] {key}" if group else key


def _lines(view: ConfigView, *, origin: bool) -> Iterator[str]:
    missing = f"no settings file: {' and '.join(view.looked_at)} are not there"
    yield f"settings file: {view.file}" if view.file else missing
    yield ""
    columns = 4 if origin else 2
    rows = [
        (s.key, _text(s.value), f"{s.origin} {s.place}".strip(), ", ".join((s.flag, *s.variables)))[:columns]
        for s in view.settings
    ]
    yield from table(("setting", "value", "from", "can also be set by")[:columns], rows)
    for s in view.settings:
        if s.problem:
            yield f"WRONG: {s.key}: {s.problem} (from {f'{s.origin} {s.place}'.strip()})"


def _text(value: Value | None) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return (", ".join(map(str, value)) if isinstance(value, tuple) else str("" if value is None else value)) or "-"

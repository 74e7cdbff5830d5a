"""The verb `config show`: what is set, and where each value comes from."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import click
import msgspec

from blobstore.errors import InvalidRequestError
from blobstore.opening import check_url
from blobstore.s3.settings import S3Settings
from engine.cli import options as cli
from engine.cli.config import S3, TRANSFER, Config, Value, config_paths, shared_place
from engine.cli.output import Column, tabulate
from engine.cli.run import ExitCode
from engine.cli.session import Session, verb
from engine.errors import UsageError, bare_message
from engine.settings import TransferSettings
from engine.text import without_credentials

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
    "config show",
    "Every setting, its value and where that comes from.",
    ConfigView,
    needs_repository=False,
    shows_settings=True,
)
@click.argument("of", nargs=-1, metavar="[VERB]...")
@cli.option("--origin", "Where each value comes from, and where else it could be.")
@cli.option("--set", "Leave out what has its default.", to="only_set")
def config_show(session: Session, of: tuple[str, ...], *, origin: bool, only_set: bool) -> ExitCode:
    """Show the settings that verbs share or, with VERB, all options of that verb.

    What is on this command line is for this run alone, and is not shown. No request is made. A value that its verb
    would refuse is shown, and makes the exit code 2.

    Example: tidemark config show --origin backup
    """
    ctx, words = click.get_current_context(), " ".join(of)
    file = ctx.obj.get(cli.CONFIG_META) or Config()
    rows = _rows(ctx, words, file)
    shown = tuple(row for row in rows if row.origin != DEFAULT or row.problem or not only_set)
    looked_at = tuple(map(str, config_paths(os.environ, Path.cwd())))
    where = str(file.path or "")
    lines = [f"settings file: {where}" if where else f"no settings file: {' and '.join(looked_at)} are not there", ""]
    columns: dict[str, Column] = {"setting": "key", "value": lambda row: _text(row.value)}
    if origin:
        columns |= {"from": _whence, "can also be set by": lambda row: ", ".join((row.flag, *row.variables))}
    lines += tabulate(shown, columns)
    lines += [f"WRONG: {row.key}: {row.problem} (from {_whence(row)})" for row in shown if row.problem]
    session.show(ConfigView(of=words, file=where, looked_at=looked_at, settings=shown), lines)
    return ExitCode.USAGE if any(row.problem for row in rows) else ExitCode.OK


def _whence(row: SettingView) -> str:
    return f"{row.origin} {row.place}".strip()


def _text(value: Value | None) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return (", ".join(map(str, value)) if isinstance(value, tuple) else str("" if value is None else value)) or "-"


def _rows(ctx: click.Context, words: str, file: Config) -> list[SettingView]:
    """Return the options of a verb, or the settings of all verbs: first the shared ones, then transfers, then S3."""
    root = cast("click.Group", ctx.find_root().command)
    verbs = {command.words: command for command in cli.walk_verbs(root)}
    if words and words not in verbs:
        raise UsageError("no such verb", operation="config show", subject=words, hint=f"there are {', '.join(verbs)}")
    options: dict[str, click.Option] = {}
    for param in (param for v in ([verbs[words]] if words else verbs.values()) for param in v.params):
        if isinstance(param, click.Option) and param.name != "config" and (words or isinstance(param, cli.Setting)):
            options.setdefault(str(param.name), param)
    own, keys = verbs[words].table if words else "", cli.setting_keys(root)
    rows: dict[tuple[str, str], SettingView] = {}
    taken: dict[str, dict[str, Any]] = {"": {}, TRANSFER: {}, S3: {}}
    for name in sorted(options, key=lambda name: (list(taken).index(shared_place(name)[0]), name)):
        option, (shared, key) = options[name], shared_place(name)
        variables = tuple(option.envvar or ())[0 if own else -1 :]
        # Some defaults are in the structs that the options end up in.
        own_default = option.default is True if option.is_flag else option.default
        default = getattr(_TOGETHER[shared](), key) if shared else own_default
        row = rows[shared, key] = SettingView(
            key=_named(shared, key) if key in keys[shared] else _named(own, name),
            flag=max(option.opts, key=len),
            variables=variables,
            value=default if isinstance(default, str | int | float | bool) else None,
        )
        if (variable := next((v for v in variables if os.environ.get(v)), None)) is not None:
            row.value, row.origin, row.place = os.environ[variable], "environment", variable
        elif (at := file.place(own, name)) is not None:
            row.value, row.origin, row.place = file.tables[at[0]][at[1]], "file", _named(*at)
        if row.origin != DEFAULT and (value := _take(ctx, option, row)) is not None:
            taken[shared][key] = value
    for group, settings in _TOGETHER.items():
        _find_misfits(settings, taken[group], {key: row for (table_, key), row in rows.items() if table_ == group})
    return list(rows.values())


def _named(group: str, key: str) -> str:
    return f"[{group}] {key}" if group else key


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
    elif option.type is cli.HOOK:
        row.value = str(taken or "***")
    elif isinstance(value, str):
        row.value = without_credentials(value)
    return taken


def _find_misfits(
    settings: type[TransferSettings | S3Settings], values: dict[str, Any], rows: Mapping[str, SettingView]
) -> None:
    """Note what is wrong with settings that a verb takes together. Each refusal names one: go on without it."""
    while values:
        try:
            settings(**values)
        except (UsageError, ValueError) as error:
            reason = f"{error.subject} {bare_message(error)}" if isinstance(error, UsageError) else str(error)
            for key in [key for key in values if re.search(rf"\b{key}\b", reason)] or list(values):
                rows[key].problem = rows[key].problem or reason.removeprefix(f"{key} ")
                del values[key]
        else:
            return

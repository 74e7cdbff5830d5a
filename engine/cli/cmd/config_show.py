"""The group `config`, with the verb `config show`: what is set, and where each value comes from."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, cast

import click
import msgspec

from blobstore.errors import InvalidRequestError
from blobstore.opening import check_url
from blobstore.s3.settings import S3Settings
from engine.cli.config import S3, TRANSFER, Config, Value, config_paths, shared_place
from engine.cli.exit_codes import ExitCode
from engine.cli.options import CONFIG_META, Setting, Verb, common_options, setting_keys, table_name, walk_verbs
from engine.cli.session import Session, with_session
from engine.errors import UsageError, bare_message
from engine.settings import TransferSettings
from engine.text import table, without_credentials

DEFAULT: Final = "default"
# Their settings are taken together, and can contradict each other.
_TOGETHER: Final[Mapping[str, type[TransferSettings | S3Settings]]] = {TRANSFER: TransferSettings, S3: S3Settings}


class SettingView(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, or option of a verb."""

    # As in the settings file: `job`, `[transfer] in_flight_max`, `[backup] job`.
    key: str
    flag: str
    # The variables that are looked at, the first that is set winning.
    variables: tuple[str, ...]
    # None: nothing is set, and there is no default.
    value: Value | None
    # default, environment or file.
    origin: str
    # The variable, or the table of the file; empty for a default.
    place: str
    # Why the value would be refused.
    problem: str


class ConfigView(msgspec.Struct, frozen=True, kw_only=True):
    """`config show`."""

    # Whose options; empty for the settings of all verbs.
    of: str
    # The settings file that is read; empty if there is none.
    file: str
    # Where one is looked for, the first that is there winning.
    looked_at: tuple[str, ...]
    settings: tuple[SettingView, ...]


@click.group(
    "config",
    invoke_without_command=True,
    subcommand_metavar="VERB [ARGS]...",
    short_help="Show what is set: show, with where each value comes from.",
)
@click.pass_context
def config(ctx: click.Context) -> None:
    """Show what is set for all runs: in the environment and in the settings file.

    Run `tidemark config VERB --help` for the options of a verb.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command(
    "show",
    cls=Verb,
    group="config",
    needs_repository=False,
    shows_settings=True,
    short_help="Every setting, its value and where that comes from.",
    prints=(ConfigView,),
    example="tidemark config show --origin backup",
)
@click.argument("of", nargs=-1, metavar="[VERB]...")
@click.option("--origin", is_flag=True, help="Where each value comes from, and where else it could be.")
@click.option("--set", "only_set", is_flag=True, help="Leave out what has its default.")
@common_options
@with_session
def config_show(session: Session, of: tuple[str, ...], *, origin: bool, only_set: bool) -> ExitCode:
    """Show the settings that verbs share or, with VERB, all options of that verb.

    What is on this command line is for this run alone, and is not shown. No request is made. A value that its verb
    would refuse is shown, and makes the exit code 2.
    """
    ctx = click.get_current_context()
    settings_file = ctx.obj.get(CONFIG_META) or Config()
    words = " ".join(of)
    rows = _rows(ctx, words, settings_file)
    view = ConfigView(
        of=words,
        file=str(settings_file.path or ""),
        looked_at=tuple(map(str, config_paths(os.environ, Path.cwd()))),
        settings=tuple(row for row in rows if row.origin != DEFAULT or row.problem or not only_set),
    )
    session.show(view, list(_lines(view, origin=origin)))
    return ExitCode.USAGE if any(row.problem for row in rows) else ExitCode.OK


def _rows(ctx: click.Context, words: str, settings_file: Config) -> list[SettingView]:
    """Return the options of a verb, or the settings of all verbs: first the shared ones, then transfers, then S3."""
    root = cast("click.Group", ctx.find_root().command)
    verbs = {verb.words: verb for verb in walk_verbs(root)}
    if words and words not in verbs:
        raise UsageError("no such verb", operation="config show", subject=words, hint=f"there are {', '.join(verbs)}")
    options: dict[str, click.Option] = {}
    for param in (param for verb in ([verbs[words]] if words else verbs.values()) for param in verb.params):
        if isinstance(param, click.Option) and param.name != "config" and (words or isinstance(param, Setting)):
            options.setdefault(str(param.name), param)
    own = table_name(verbs[words]) if words else ""
    keys = setting_keys(root)
    rows: dict[tuple[str, str], SettingView] = {}
    taken: dict[str, dict[str, object]] = {"": {}, TRANSFER: {}, S3: {}}
    for name in sorted(options, key=lambda name: (list(taken).index(shared_place(name)[0]), name)):
        shared, key = shared_place(name)
        row, value = _row(ctx, options[name], own, settings_file)
        shown = _named(shared, key) if key in keys[shared] else _named(own, name)
        rows[shared, key] = msgspec.structs.replace(row, key=shown)
        if value is not None:
            taken[shared][key] = value
    for group, take in _TOGETHER.items():
        for key, problem in _misfits(take, taken[group]).items():
            row = rows[group, key]
            rows[group, key] = msgspec.structs.replace(row, problem=row.problem or problem)
    return list(rows.values())


def _row(ctx: click.Context, option: click.Option, own: str, settings_file: Config) -> tuple[SettingView, object]:
    """Return an option, and what a verb takes it for: None if it is not set, or wrong by itself."""
    variables = tuple(option.envvar or ()) if own else tuple(option.envvar or ())[-1:]
    variable = next((name for name in variables if os.environ.get(name)), None)
    at = settings_file.place(own, str(option.name))
    value, origin, place = _default(option), DEFAULT, ""
    if variable is not None:
        value, origin, place = os.environ[variable], "environment", variable
    elif at is not None:
        value, origin, place = settings_file.tables[at[0]][at[1]], "file", _named(*at)
    taken, problem = None, ""
    try:
        if origin != DEFAULT:
            # An option that may be repeated is, in the environment, several words.
            several = option.multiple and isinstance(value, str)
            taken = option.type_cast_value(ctx, option.type.split_envvar_value(str(value)) if several else value)
            if option.name == "repository" and value:
                check_url(str(value))
    except (click.BadParameter, InvalidRequestError) as error:
        problem = error.message if isinstance(error, click.BadParameter) else f"{error}; {error.hint}"
    row = SettingView(
        key="",
        flag=max(option.opts, key=len),
        variables=variables,
        value=_safe(value),
        origin=origin,
        place=place,
        problem=without_credentials(problem),
    )
    return row, taken


def _default(option: click.Option) -> Value | None:
    """Return the default; some are in the structs that the options end up in."""
    table_, key = shared_place(str(option.name))
    if table_:
        value = getattr(_TOGETHER[table_](), key)
    else:
        value = option.default is True if option.is_flag else option.default
    return value if isinstance(value, str | int | float | bool) else None


def _misfits(take: Callable[..., object], values: Mapping[str, object]) -> dict[str, str]:
    """Return what is wrong with settings that a verb takes together, by their keys."""
    problems: dict[str, str] = {}
    # Each refusal names one thing: look for more without what is known already.
    while rest := {key: value for key, value in values.items() if key not in problems}:
        try:
            take(**rest)
        except (UsageError, ValueError) as error:
            reason = f"{error.subject} {bare_message(error)}" if isinstance(error, UsageError) else str(error)
            named = [key for key in rest if re.search(rf"\b{key}\b", reason)] or list(rest)
            problems |= {key: reason.removeprefix(f"{key} ") for key in named}
        else:
            break
    return problems


def _safe(value: Value | None) -> Value | None:
    """Return a value without credentials: a URL with some is refused everywhere, and not printed on the way."""
    if isinstance(value, tuple):
        return tuple(without_credentials(one) if isinstance(one, str) else one for one in value)
    return without_credentials(value) if isinstance(value, str) else value


def _named(table_: str, key: str) -> str:
    return f"[{table_}] {key}" if table_ else key


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


config.add_command(cast("click.Command", config_show))

"""The group `config`, with the verb `config show`: what is set, and where each value comes from."""

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import click
import msgspec
from click.core import ParameterSource
from typing_extensions import override

from blobstore.errors import InvalidRequestError
from blobstore.opening import check_url
from blobstore.s3.settings import S3Settings
from engine.cli.config import S3, S3_KEYS, TRANSFER, TRANSFER_KEYS, Config, Value, config_paths
from engine.cli.exit_codes import ExitCode
from engine.cli.options import CONFIG_META, Setting, Verb, common_options, setting_keys, table_name, walk_verbs
from engine.cli.session import Session, with_session
from engine.errors import UsageError, bare_message
from engine.settings import TransferSettings
from engine.text import table, without_credentials

DEFAULT: Final = "default"
ENVIRONMENT: Final = "environment"
FILE: Final = "file"


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


class _Unread(click.ParamType[Any, Any]):
    """Of a setting that is shown, wrong or not, and so not taken from the environment or from the file."""

    def __init__(self, option: click.Option) -> None:
        self.name = option.type.name
        self._type = option.type
        # Eager ones say how the verb itself tells what it has to tell.
        self._is_taken = option.is_eager
        self._default = option.default if option.is_flag else None

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if ctx is None or param is None or ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            return self._type.convert(value, param, ctx)
        with suppress(click.BadParameter):
            return self._type.convert(value, param, ctx) if self._is_taken else self._default
        return self._default


class _ShowingVerb(Verb):
    """A verb that runs whatever is set, for it is asked what is wrong."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (click passes them on)
        super().__init__(*args, **kwargs)
        self._unread = {option: copy.copy(option) for option in self.params if isinstance(option, Setting)}
        for option in self._unread.values():
            option.type = _Unread(option)

    @override
    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [
            self._unread.get(param, param) if isinstance(param, Setting) else param for param in super().get_params(ctx)
        ]


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
    cls=_ShowingVerb,
    group="config",
    needs_repository=False,
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
    root = cast("click.Group", ctx.find_root().command)
    settings_file = ctx.obj.get(CONFIG_META) or Config()
    words = " ".join(of)
    rows = tuple(_with_misfits(_settings(root, words, settings_file, ctx)))
    view = ConfigView(
        of=words,
        file=str(settings_file.path or ""),
        looked_at=tuple(map(str, config_paths(os.environ, Path.cwd()))),
        settings=tuple(row for row in rows if row.origin != DEFAULT or row.problem or not only_set),
    )
    session.show(view, list(_lines(view, origin=origin)))
    return ExitCode.USAGE if any(row.problem for row in rows) else ExitCode.OK


class _Found(msgspec.Struct, frozen=True):
    """A setting by its option's name."""

    name: str
    view: SettingView
    # As a verb takes it; None: it is not set, or wrong by itself.
    taken: object


# What a verb makes of settings, and by the names of their options its fields.
_TAKEN_TOGETHER: Final[tuple[tuple[Callable[..., object], Mapping[str, str]], ...]] = (
    (TransferSettings, {key: key for key in TRANSFER_KEYS}),
    (S3Settings, {f"{S3}_{key}": key for key in S3_KEYS}),
)


def _with_misfits(found: Iterable[_Found]) -> Iterator[SettingView]:
    """Add what is wrong with settings that a verb takes together: then numbers contradict each other."""
    by_name = {setting.name: setting for setting in found}
    problems: dict[str, str] = {}
    for take, fields in _TAKEN_TOGETHER:
        taken = {name: by_name[name].taken for name in fields if name in by_name and by_name[name].taken is not None}
        while taken and (reason := _refusal(take, {fields[name]: value for name, value in taken.items()})):
            named = [name for name in taken if re.search(rf"\b{fields[name]}\b", reason)] or list(taken)
            problems |= {name: reason.removeprefix(f"{fields[name]} ") for name in named}
            # Each refusal names one thing: look for more without what is known already.
            taken = {name: value for name, value in taken.items() if name not in named}
    for name, setting in by_name.items():
        yield msgspec.structs.replace(setting.view, problem=setting.view.problem or problems.get(name, ""))


def _refusal(take: Callable[..., object], values: Mapping[str, object]) -> str:
    """Return why settings are refused together, beginning with the name of the field; empty if they are not."""
    try:
        take(**values)
    except UsageError as error:
        return f"{error.subject} {bare_message(error)}"
    except ValueError as error:
        return str(error)
    return ""


def _settings(root: click.Group, words: str, settings_file: Config, ctx: click.Context) -> Iterator[_Found]:
    """Find the options of a verb, or the settings of all verbs."""
    verbs = {verb.words: verb for verb in walk_verbs(root)}
    if words and words not in verbs:
        raise UsageError("no such verb", operation="config show", subject=words, hint=f"there are {', '.join(verbs)}")
    chosen = [verbs[words]] if words else list(verbs.values())
    found: dict[str, click.Option] = {}
    for verb in chosen:
        for param in verb.params:
            wanted = (
                isinstance(param, click.Option) and param.name != "config" and (words or isinstance(param, Setting))
            )
            if wanted and param.name not in found:
                found[str(param.name)] = cast("click.Option", param)
    shared, _ = setting_keys(root)
    table = table_name(chosen[0]) if words else ""
    for name, param in sorted(found.items(), key=lambda item: _order(item[0])):
        variables = tuple(param.envvar if isinstance(param.envvar, list) else ())
        yield _found(
            param,
            variables=variables if words else variables[-1:],
            places=_places(name, table, is_shared=name in shared),
            settings_file=settings_file,
            ctx=ctx,
        )


def _order(name: str) -> tuple[int, str]:
    """Shared settings first, then transfers, then S3."""
    return (1 if name in TRANSFER_KEYS else 2 if name.startswith(f"{S3}_") else 0), name


def _places(name: str, table: str, *, is_shared: bool) -> list[tuple[str, str]]:
    """Return where an option may be in a settings file, as table and key; the first that is there wins."""
    places = [(table, name)] if table else []
    if name in TRANSFER_KEYS:
        return [*places, (TRANSFER, name)]
    if name.startswith(f"{S3}_") and name.removeprefix(f"{S3}_") in S3_KEYS:
        return [*places, (S3, name.removeprefix(f"{S3}_"))]
    return [*places, ("", name)] if is_shared else places


def _found(
    param: click.Option,
    *,
    variables: tuple[str, ...],
    places: list[tuple[str, str]],
    settings_file: Config,
    ctx: click.Context,
) -> _Found:
    value, origin, place = _default(param), DEFAULT, ""
    problem, taken = "", None
    variable = next((name for name in variables if os.environ.get(name)), None)
    at = next(((t, key) for t, key in places if key in _table(settings_file, t)), None)
    if variable is not None:
        value, origin, place = os.environ[variable], ENVIRONMENT, variable
    elif at is not None:
        value, origin, place = _table(settings_file, at[0])[at[1]], FILE, _named(*at)
    if origin != DEFAULT:
        # An option that may be repeated is, in the environment, several words.
        words = param.type.split_envvar_value(value) if param.multiple and isinstance(value, str) else value
        try:
            taken = param.type_cast_value(ctx, words)
            if param.name == "repository" and value:
                check_url(str(value))
        except click.BadParameter as error:
            problem = error.message
        except InvalidRequestError as error:
            problem = f"{error}; {error.hint}"
    view = SettingView(
        key=_named(*places[-1]),
        flag=max(param.opts, key=len),
        variables=variables,
        # A URL with credentials in it is refused everywhere, and not printed on the way.
        value=_without_credentials(value),
        origin=origin,
        place=place,
        problem=without_credentials(problem),
    )
    return _Found(str(param.name), view, taken)


def _without_credentials(value: Value | None) -> Value | None:
    match value:
        case str():
            return without_credentials(value)
        case tuple():
            return tuple(without_credentials(one) if isinstance(one, str) else one for one in value)
        case _:
            return value


def _table(settings_file: Config, name: str) -> Mapping[str, Value]:
    return settings_file.by_table.get(name, {}) if name else settings_file.shared


def _named(table: str, key: str) -> str:
    return f"[{table}] {key}" if table else key


def _default(param: click.Option) -> Value | None:
    """Return the default; some are in the structs that the options end up in."""
    name = str(param.name)
    if name in TRANSFER_KEYS:
        value: Any = getattr(TransferSettings(), name)
    elif name.startswith(f"{S3}_"):
        value = getattr(S3Settings(), name.removeprefix(f"{S3}_"))
    else:
        value = bool(param.default is True) if param.is_flag else param.default
    return value if isinstance(value, str | int | float | bool) else None


def _lines(view: ConfigView, *, origin: bool) -> Iterator[str]:
    missing = f"no settings file: {' and '.join(view.looked_at)} are not there"
    yield f"settings file: {view.file}" if view.file else missing
    yield ""
    rows = [
        (s.key, _text(s.value), f"{s.origin} {s.place}".strip(), ", ".join((s.flag, *s.variables)))
        for s in view.settings
    ]
    headers = ("setting", "value", "from", "could stand in")
    yield from table(headers if origin else headers[:2], [row if origin else row[:2] for row in rows])
    for setting in view.settings:
        if setting.problem:
            yield f"WRONG: {setting.key}: {setting.problem} (from {f'{setting.origin} {setting.place}'.strip()})"


def _text(value: Value | None) -> str:
    match value:
        case None | "":
            return "-"
        case bool():
            return "true" if value else "false"
        case tuple():
            return ", ".join(map(str, value)) or "-"
        case _:
            return str(value)


config.add_command(cast("click.Command", config_show))

"""Options, where their values come from, and the words that they take.

A value comes from the command line, else from the environment, else from the settings file, else it is the default.
An option that makes sense for more than one run (a *setting*) is `TIDEMARK_JOB` in the environment and is at the
top of the file; every option, settings included, is also `TIDEMARK_BACKUP_JOB` and a key of the table `[backup]`; of a
verb of the group `spark` `TIDEMARK_SPARK_BACKUP_JOB`, and a key of the table `[spark-backup]`.

How an S3 server is reached is a table of its own: `endpoint_url` in `[s3]` is `TIDEMARK_S3_ENDPOINT_URL`. Credentials
are not options: the standard chain of the SDK finds them.
"""

import contextlib
import difflib
import functools
import importlib
import inspect
import os
import re
import textwrap
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast, get_args, get_origin, get_type_hints

import click
import msgspec
from click.core import ParameterSource
from typing_extensions import override

from blobstore.opening import BYTES_PER_S_MIN
from blobstore.s3.settings import S3Settings
from engine.cli.config import (
    S3,
    S3_KEYS,
    TRANSFER,
    TRANSFER_KEYS,
    config_paths,
    parse_commit,
    parse_store,
    parse_target,
    parse_version,
    read_config,
    shared_place,
)
from engine.cli.notify import Hook, parse_hook
from engine.cli.output import JSON, TEXT, LogFormat
from engine.cli.run import readable_values, write_refused
from engine.errors import UsageError
from engine.settings import TransferSettings
from engine.text import parse_duration_ms, parse_moment, parse_share, parse_size_bytes
from index.plan.commits import SHRINK_MAX

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

# Of the variables of the environment.
PREFIX: Final = "TIDEMARK_"
# How a URL begins, and what only shells read.
_NO_NAME: Final = re.compile(r"~|(file|dbfs):/|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_EVERY_VERB: Final = "Every verb: -r --repository URL, --config, --json, -q --quiet, --debug; see `tidemark --help`"


class Parsed(click.ParamType[Any, str]):
    """A word that a function of `engine.cli.config` reads."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return self.fail(f"{value!r} is not a {self.name}", param, ctx)
        try:
            return self._parse(str(value))
        except UsageError as error:
            return self.fail(f"{str(error).removeprefix('read ')}; {error.hint}", param, ctx)


class _Switch(click.types.BoolParamType):
    """True or false; click's own expects text or nothing else."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool:
        return bool(super().convert(str(value), param, ctx))


class LocalPath(click.Path):
    """A path of this machine; click's own would make a directory `s3:`, or one that is called `~`."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # A strange name is none the less a name, as one with a time in it.
        if isinstance(value, str) and _NO_NAME.match(value):
            value = str(TARGET.convert(value, param, ctx))
        return super().convert(value, param, ctx)


def _parse_rate(text: str) -> int:
    rate = parse_size_bytes(text)
    if 0 < rate < BYTES_PER_S_MIN:
        hint = "give at least 64KiB, or 0 for no limit"
        raise UsageError("is too few bytes per second", operation="read", subject=repr(text), hint=hint)
    return rate


POSITIVE: Final = click.IntRange(min=1)
NATURAL: Final = click.IntRange(min=0)
# The last one that can be stored would leave no later one.
NEW_VERSION: Final = click.IntRange(min=0, max=2**62)
DIRECTORY: Final = LocalPath(file_okay=False, path_type=Path)
DIRECTORY_THERE: Final = LocalPath(exists=True, file_okay=False, path_type=Path)
FILE_THERE: Final = LocalPath(exists=True, dir_okay=False, path_type=Path)
FILE: Final = LocalPath(dir_okay=False, path_type=Path)
PATH: Final = LocalPath(path_type=Path)
TARGET: Final = Parsed("directory", parse_target)
DURATION: Final = Parsed("duration", parse_duration_ms)
MOMENT: Final = Parsed("time", parse_moment)
SHARE: Final = Parsed("share", parse_share)
SIZE: Final = Parsed("size", parse_size_bytes)
RATE: Final = Parsed("size", _parse_rate)
VERSION: Final = Parsed("version", parse_version)
COMMIT: Final = Parsed("commit", parse_commit)
STORE: Final = Parsed("store", parse_store)
HOOK: Final = Parsed("URL", parse_hook)

TRUST_STAT: Final = "trust_stat"


class Setting(click.Option):
    """An option that makes sense for more than one run."""

    @override
    def process_value(self, ctx: click.Context, value: Any) -> Any:
        is_given = ctx.get_parameter_source(self.name or "") is ParameterSource.COMMANDLINE
        if is_given or not getattr(ctx.command, "shows_settings", False):
            return super().process_value(ctx, value)
        # Eager ones say how the verb itself prints what it has to print.
        with contextlib.suppress(click.BadParameter):
            if self.is_eager:
                return super().process_value(ctx, value)
        return self.default if self.is_flag else None


class Verbs(UserDict[str, click.Command]):
    """The commands of a `click.Group`, each imported when it is asked for: a run of one verb does not load the others.

    Each is a command, or `module:attribute` of one in `engine.cli.cmd`, in the order of their use.
    """

    def __init__(self, places: Mapping[str, str | click.Command]) -> None:
        super().__init__()
        self.data.update(cast("Mapping[str, click.Command]", places))

    @override
    def __getitem__(self, name: str) -> click.Command:
        verb: object = self.data[name]
        if isinstance(verb, str):
            module, _, attribute = verb.partition(":")
            self.data[name] = getattr(importlib.import_module(f"engine.cli.cmd.{module}"), attribute)
        return self.data[name]


class OrderedGroup(click.Group):
    """A group that lists its verbs in the order of their use."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class Verb(click.Command):
    """A verb: has the options that every verb has, and knows its example and the variables of its options.

    Attributes:
        words: As people say it: "backup", or "spark backup" of the group `spark`.
        table: What its table in a settings file is called.
        prints: What it shows, one of these each time.
        shows_settings: It runs whatever the environment and the settings file say, for it is asked what is wrong.
    """

    def __init__(
        self,
        name: str,
        *,
        prints: tuple[type[msgspec.Struct], ...] = (),
        needs_repository: bool = True,
        shows_settings: bool = False,
        **kwargs: Any,  # noqa: ANN401  (click passes them on)
    ) -> None:
        super().__init__(name.rpartition(" ")[2], **kwargs)
        self.words, self.table = name, name.replace(" ", "-")
        self.prints = prints
        self.needs_repository = needs_repository
        self.shows_settings = shows_settings
        # The last paragraph of its help.
        self.help, _, self.example = inspect.cleandoc(self.help or "").partition("\n\nExample: ")
        self.params += common_options()
        for param in self.params:
            if isinstance(param, click.Option):
                param.show_default = True
                # The first that is set wins.
                names = [f"{self.words}_{param.name}", *([str(param.name)] if isinstance(param, Setting) else [])]
                param.envvar = param.envvar or [f"{PREFIX}{name}".replace(" ", "_").upper() for name in names]

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except (click.UsageError, UsageError) as error:
            if not ctx.resilient_parsing:
                write_refused(self.words, readable_values(self, ctx.parent, given), error)
            raise

    @override
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.example:
            with formatter.section("Example"):
                formatter.write_text(self.example)
        names = {param.name for param in self.params}
        shown = {"in_flight_max", TRUST_STAT}
        hidden = [f"--{name.replace('_', '-')}" for name in TRANSFER_KEYS if name in names and name not in shown]
        formatter.write_paragraph()
        for text in (*([f"Transfer settings: {' '.join(hidden)}"] if hidden else []), _EVERY_VERB):
            formatter.write(textwrap.fill(text, formatter.width, break_on_hyphens=False) + "\n")


class VerbGroup(Verb, OrderedGroup):
    """A verb that runs by itself and has others below it, which share nothing with it but its name."""

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # What this verb made of a command line that is for another says nothing of how to print an error of it.
        for key in NOTED:
            ctx.obj.pop(key, None)
        found = super().resolve_command(ctx, args)
        # They would be the group's own, and go unheard.
        early = [p for p in self.params if p.name and ctx.get_parameter_source(p.name) is ParameterSource.COMMANDLINE]
        if early:
            ctx.fail(f"{max(early[0].opts, key=len)} is before {found[0]}: options come after the verb")
        return found


def walk_verbs(group: click.Group) -> Iterator[Verb]:
    """Yield every verb, those of the groups inside too."""
    for command in group.commands.values():
        if isinstance(command, Verb):
            yield command
        if isinstance(command, click.Group):
            yield from walk_verbs(command)


def misspelt_variables(ctx: click.Context) -> dict[str, str]:
    """Return the variables of the environment that nobody reads, each with the one of this verb that it looks like.

    One that looks like none may be another verb's, or another program's.
    """
    group, command = ctx.find_root().command, ctx.command
    set_here = {name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX)}
    own = _variables([command])
    if not isinstance(group, click.Group) or set_here <= own:
        return {}
    if getattr(command, "shows_settings", False):
        # It speaks for all verbs.
        own = _variables(walk_verbs(group))
    nearest = {name: difflib.get_close_matches(name, sorted(own), n=1, cutoff=0.8) for name in sorted(set_here - own)}
    if not any(nearest.values()):
        return {}
    # Only now: it loads all verbs.
    known = _variables(walk_verbs(group))
    return {f"{PREFIX}{name}": f"{PREFIX}{found[0]}" for name, found in nearest.items() if found and name not in known}


def _variables(commands: Iterable[click.Command]) -> set[str]:
    params = [param for command in commands for param in command.params]
    return {name.removeprefix(PREFIX) for param in params for name in param.envvar or ()}


def setting_keys(group: click.Group) -> dict[str, dict[str, bool]]:
    """Return the keys of a settings file, as `read_config` takes them."""
    by_verb: dict[str, dict[str, bool]] = {}
    shared: dict[str, dict[str, bool]] = {TRANSFER: {}, S3: {}, "": {}}
    for verb in walk_verbs(group):
        options = {p.name: p for p in verb.params if isinstance(p, click.Option) and p.name and p.name != "config"}
        by_verb[verb.table] = {name: option.multiple for name, option in options.items()}
        for table, key in (shared_place(name) for name, option in options.items() if isinstance(option, Setting)):
            shared[table][key] = False
    return {**by_verb, **shared}


# ---------------------------------------------------------------------- the settings file

CONFIG_META: Final = "tidemark.config"
# The options that say how an error of the same command line is printed: they are in `ctx.obj` by these names.
NOTED: Final = ("json", "debug", "log_format")


def _load_config(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    """Eager: runs before any other option is looked at, so that the file can speak for them."""
    group = ctx.find_root().command
    found = (path for path in config_paths(os.environ, Path.cwd()) if path.is_file())
    path = Path(value) if value is not None else next(found, None)
    if path is None or not isinstance(group, click.Group):
        return
    config = ctx.obj[CONFIG_META] = read_config(path, setting_keys(group), is_named=value is not None)
    table = cast("Verb", ctx.command).table
    options = [str(param.name) for param in ctx.command.params if isinstance(param, click.Option)]
    places = {option: config.place(table, option) for option in options}
    ctx.default_map = {option: config.tables[at[0]][at[1]] for option, at in places.items() if at is not None}
    for param in ctx.command.params:
        value = ctx.default_map.get(param.name or "", "")
        if isinstance(param.type, click.types.IntParamType) and isinstance(value, bool | float):
            message, hint = f"{param.name} is {value!r}", "write a whole number"
            raise UsageError(message, operation="settings", subject=str(path), hint=hint)
        # People write names as numbers.
        is_name = param.name in {"job", "name", "store", "task"}
        is_text = isinstance(param.type, click.types.StringParamType | click.Path) and not is_name
        if is_text and not isinstance(value, str | tuple):
            message, hint = f"{param.name} is {value!r}, which is not text", f'write it in quotes: {param.name} = "..."'
            raise UsageError(message, operation="settings", subject=str(path), hint=hint)


def _note(ctx: click.Context, param: click.Parameter, value: object) -> object:
    ctx.obj[param.name] = value
    return value


def origin_hint(ctx: click.Context | None, param: click.Parameter | None) -> str:
    """Say where a refused or missing value comes from, or could come from."""
    if ctx is not None and param is None and isinstance(ctx.command, click.Group) and not isinstance(ctx.command, Verb):
        return f"options come after the verb, as in `tidemark list --json`; see `{ctx.command_path} --help`"
    if ctx is None or param is None or not isinstance(param, click.Option) or param.name is None:
        return f"see `{ctx.command_path} --help`" if ctx is not None else "see `tidemark --help`"
    names = list(param.envvar or ())
    match ctx.get_parameter_source(param.name):
        case ParameterSource.DEFAULT_MAP:
            return f"the value is in {ctx.obj[CONFIG_META].path}"
        case ParameterSource.ENVIRONMENT:
            return f"the value is in {next(name for name in names if os.environ.get(name))}"
        case ParameterSource.COMMANDLINE:
            return f"see `{ctx.command_path} --help`"
        case _:
            place = f", or the key `{param.name}` in tidemark.toml" if isinstance(param, Setting) else ""
            wrong = [f"nobody reads {name}; " for name, right in misspelt_variables(ctx).items() if right in names]
            return f"{''.join(wrong)}give {max(param.opts, key=len)}, {names[-1] if names else ''}{place}"


# ---------------------------------------------------------------------- options that several verbs share


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """The options that every verb has."""

    repository: str
    json: bool = False
    quiet: bool = False
    cache: bool = True
    cache_dir: str | None = None
    transfer: TransferSettings
    s3: S3Settings
    # Bytes per second; 0: as many as there may be.
    bwlimit: int = 0
    log_format: LogFormat = TEXT
    # Where the figures of the run go, of a verb that has any.
    metrics_file: Path | None = None
    # Who is to know of a run that ended well, and of one that did not.
    on_success: Hook | None = None
    on_failure: Hook | None = None


COMMON_HELP: Final = (
    ("-r, --repository URL", "The repository: s3://bucket/prefix, file:///absolute/path, or a path."),
    ("--endpoint-url URL", "With s3://, the server.  [default: as the standard chain says, else AWS]"),
    ("--region NAME", "With s3://, the region.  [default: as the standard chain says]"),
    ("--config FILE", "The settings file. [default: ./tidemark.toml, then $XDG_CONFIG_HOME/tidemark/config.toml]"),
    ("--json", "One JSON object on stdout at the end; errors as one on stderr."),
    ("-q, --quiet", "No progress and no result; errors and warnings only."),
    ("--debug", "Tracebacks of errors."),
    ("--log-format FORMAT", "text or json: progress, warnings and errors on stderr.  [default: text]"),
    ("--metrics-file FILE", "Of verbs that do work: add the figures of the run to FILE, for node_exporter."),
    ("--on-success URL", "Of verbs that do work: POST to URL, as JSON, that the run ended with 0."),
    ("--on-failure URL", "POST to URL that it ended with another code, or was refused."),
    ("--bwlimit SIZE", "Bytes per second, sent and fetched, such as 10MiB.  [default: no limit]"),
    ("--cache-dir DIR", "Where hashes of local files are remembered. [default: $XDG_CACHE_HOME/tidemark]"),
    ("--no-cache", "Remember no hash of a local file: read every file whose hash is needed."),
)


def common_options() -> list[click.Option]:
    """Return the options that every verb has; `tidemark --help` explains them once."""
    eager: dict[str, Any] = {"is_eager": True, "hidden": True}
    config: dict[str, Any] = {"envvar": ["TIDEMARK_CONFIG"], "expose_value": False, "callback": _load_config}
    formats = click.Choice([TEXT, JSON])
    return [
        click.Option(["--config"], **config, **eager),
        Setting(["--json"], is_flag=True, callback=_note, **eager),
        Setting(["--debug"], is_flag=True, callback=_note, **eager),
        Setting(["-q", "--quiet"], is_flag=True, **eager),
        Setting(["--repository", "-r"], hidden=True),
        Setting(["--cache-dir"], hidden=True),
        Setting(["--cache/--no-cache"], default=True, hidden=True),
        Setting(["--log-format"], type=formats, default=TEXT, callback=_note, **eager),
        Setting(["--bwlimit"], type=RATE, hidden=True),
        *(Setting([_s3_flag(key), f"{S3}_{key}"], type=_s3_type(key), hidden=True) for key in S3_KEYS),
    ]


def _s3_flag(key: str) -> str:
    return f"--{'' if key in {'endpoint_url', 'region'} else 's3-'}{key.replace('_', '-')}"


def _s3_type(key: str) -> "click.ParamType[Any, Any]":
    kind = get_type_hints(S3Settings)[key]
    # `bool | None` is a bool that need not be said, as every option is.
    kind = next((k for k in get_args(kind) if k is bool), kind)
    if get_origin(kind) is not None:
        return click.Choice(get_args(kind))
    if kind is int and "bytes" in key:
        return SIZE
    return {bool: _Switch(), int: click.INT, float: click.FLOAT}.get(kind, click.STRING)


def take_common(values: dict[str, Any]) -> Common:
    """Take the common options from the values of a verb; `UsageError` if settings contradict each other."""
    # An argument that some verbs have says the same as the option, and is nearer.
    values["repository"] = values.get("url") or values["repository"] or ""
    ctx = click.get_current_context()
    if not values["repository"] and getattr(ctx.command, "needs_repository", True):
        raise click.MissingParameter(ctx=ctx, param=next(p for p in ctx.command.params if p.name == "repository"))
    given = {name: value for name, value in values.items() if value is not None}
    try:
        s3 = S3Settings(**{key: given[f"{S3}_{key}"] for key in S3_KEYS if f"{S3}_{key}" in given})
    except ValueError as error:
        hint = "look at [s3] in tidemark.toml and at the variables TIDEMARK_S3_..."
        raise UsageError(str(error), operation="settings", subject=f"[{S3}]", hint=hint) from None
    transfer = TransferSettings(**{key: given[key] for key in TRANSFER_KEYS if key in given})
    own = {name: given[name] for name in Common.__struct_fields__ if name in given}
    return Common(transfer=transfer, s3=s3, **own)


def option(
    spec: str,
    text: str | None = None,
    kind: "click.ParamType[Any, Any] | type[int] | None" = None,
    *,
    to: str = "",
    **more: Any,  # noqa: ANN401  (as click takes them)
) -> Callable[[Decorated], Decorated]:
    """Add an option as help shows it: `-n --dry-run` is a flag, `--batch N` takes a value; `to` names its parameter."""
    flags = [word for word in spec.split() if word.startswith("-")]
    metavar = spec.removeprefix(" ".join(flags)).strip() or None
    is_flag = metavar is None and kind is None
    names = [*flags, *([to] if to else [])]
    return click.option(*names, type=kind, metavar=metavar, is_flag=is_flag or None, help=text, **more)


# One that makes sense for more than one run.
setting: Final = functools.partial(option, cls=Setting)


def together(*options: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds several options, in this order."""

    def decorate(function: Decorated) -> Decorated:
        for add in reversed(options):
            function = add(function)
        return function

    return decorate


# For verbs that do work (`engine.cli.run`).
figures_option: Final = together(
    setting("--metrics-file", None, FILE, hidden=True),
    setting("--on-success", None, HOOK, hidden=True),
    setting("--on-failure", None, HOOK, hidden=True),
)
# The field of `TransferSettings` that matters only to verbs which compare local files.
trust_stat_option: Final = setting("--trust-stat", "Hash no file whose stat is as recorded.", default=None)
_IN_FLIGHT: Final = f"Requests under way at once.  [default: {TransferSettings().in_flight_max}]"
# The other fields of `TransferSettings`.
transfer_options: Final = together(
    setting("--in-flight-max N", _IN_FLIGHT, int),
    *(
        setting(f"--{key.replace('_', '-')}", None, SIZE, hidden=True)
        for key in TRANSFER_KEYS
        if key not in {"in_flight_max", TRUST_STAT}
    ),
)
check_retained_option: Final = option(
    "--check-retained", "Look whether what was uploaded before is still there, and upload again what is not."
)
shrink_max_option: Final = setting(
    "--shrink-max",
    "The largest share of its bytes that the state may lose; more ends with 10.",
    SHARE,
    default=f"{SHRINK_MAX:.0%}",
)
or_newest_complete_option: Final = option(
    "--or-newest-complete", "Where something is missing, take the newest of which everything is there."
)
on_spark_option: Final = setting("--on-spark", "Spread the work over the executors of a Spark session.")


def scope_options(*, job_required: bool = True, task: bool = False) -> Callable[[Decorated], Decorated]:
    """Add the options for a job, whether it commits task by task, and with `task` for the task that does.

    A verb takes them as its parameter or field `scope`.
    """
    by_task, which = "Each task commits by itself; --task says which.", "With --commit-per-task: whose commits."
    return together(
        setting("--job -j JOB", "The job.", required=job_required),
        setting("--commit-per-task", by_task),
        *([setting("--task TASK", f"{which}  [default: 0]")] if task else []),
    )


def store_options(*, default: bool) -> Callable[[Decorated], Decorated]:
    """Add the options for a store of a job; without `default` none given means all."""
    task, store, rest = ("0", "default", "") if default else (None, None, " [default: all]")
    return together(
        setting("--task TASK", f"The task.{rest}", default=task),
        setting("--store STORE", f"The store.{rest}", default=store),
    )


_AT: Final = "The newest then: 2026-05-01T12:30:00Z, 36h for 36 hours ago, or 'yesterday 18:00' (UTC)."
_VERSION: Final = "The newest of this version, or of V and unique id."
# Which commit: a verb takes them as its parameter or field `choice`.
commit_options: Final = together(
    option("--number N", "The commit of this number.", POSITIVE),
    option("--version V[_UID]", _VERSION, VERSION),
    option("--at TIME", _AT, MOMENT),
    option("--name NAME", "The commit of this name."),
)
_SINCE: Final = "Keep what was current then or later: 7d, 2026-05-01, 'yesterday 18:00' (UTC)."
_POLICY: Final = "Rules for many jobs, in place of the others; docs/how-to/choose-retention.md shows one."
_DAILY: Final = (
    "Keep the newest of each of the last N days with commits; likewise --keep-hourly, --keep-weekly, --keep-monthly."
)
# What is to be kept, of all jobs or by a file of rules: a verb takes them as its parameter or field `rules`.
retention_options: Final = together(
    option("--keep-last N", "Keep the newest N of each job.", POSITIVE),
    option("--keep-since TIME", _SINCE, MOMENT),
    option("--keep-hourly N", None, POSITIVE, hidden=True),
    option("--keep-daily N", _DAILY, POSITIVE),
    option("--keep-weekly N", None, POSITIVE, hidden=True),
    option("--keep-monthly N", None, POSITIVE, hidden=True),
    option("--keep-named/--no-keep-named", "Keep records that have names.", default=True),
    option("--policy FILE", _POLICY, PATH),
)


def _split_places(ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> None:
    """Split the words here: click would take the first one for an argument that may be missing."""
    match value:
        case ():
            raise click.UsageError("Missing argument 'CHECKPOINT'.", ctx)
        case (*repository, checkpoint) if len(repository) <= 1:
            ctx.params |= {"url": "".join(repository) or None, "checkpoint": checkpoint}
        case _:
            raise click.UsageError(f"Got unexpected extra argument ({value[-1]})", ctx)


# `[REPO] CHECKPOINT`, in this order; REPO wins over `--repository`.
repository_and_checkpoint: Final = click.argument(
    "places", nargs=-1, metavar="[REPO] CHECKPOINT", expose_value=False, callback=_split_places
)
# And the other way round.
checkpoint_and_repository: Final = together(
    click.argument("checkpoint", metavar="CHECKPOINT"), click.argument("url", required=False, metavar="[REPO]")
)


def help_sections(rows: Mapping[str, Sequence[tuple[str, str]]], formatter: click.HelpFormatter) -> None:
    """Write sections of two columns."""
    for title, entries in rows.items():
        with formatter.section(title):
            formatter.write_dl(list(entries))

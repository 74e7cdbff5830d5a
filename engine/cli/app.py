"""The command `tidemark`: its verbs, its help, and how it ends."""

import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Final

import click
from typing_extensions import override

from blobstore import installed_release
from engine.cli.errors import close_quietly, report
from engine.cli.options import COMMON_HELP, OrderedGroup, Verb, Verbs, help_sections
from engine.cli.run import MEANINGS, SIGNALS, ExitCode, readable_values


@click.pass_context
def _show_help(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _group(
    words: str,
    verbs: Mapping[str, str | click.Command],
    help_: str,
    cls: type[click.Group] = OrderedGroup,
    **more: Any,  # noqa: ANN401  (as click takes them)
) -> click.Group:
    """Make a group, which prints its help if no verb of it is asked for."""
    return cls(
        words.rpartition(" ")[2],
        commands=Verbs(verbs),
        callback=_show_help,
        invoke_without_command=True,
        subcommand_metavar="VERB [ARGS]...",
        help=f"{help_}\n\nRun `{words} VERB --help` for the options of a verb.",
        **more,
    )


VERBS: Final[Mapping[str, str | click.Command]] = {
    "init": "rewind:init",
    "backup": "backup:backup",
    "commit": "commit:commit",
    "restore": "restore:restore",
    "follow": "follow:follow",
    "list": "history:list_",
    "history": "history:history",
    "show": "show:show",
    "diff": "show:diff",
    "get": "keys:get",
    "keys": "keys:keys",
    "verify": "verify:verify",
    "collect": "collect:collect",
    "rewind": "rewind:rewind",
    "rescale": "rewind:rescale",
    "fork": "rewind:fork",
    "name": "rewind:name",
    "unname": "rewind:unname",
    "forget": "rewind:forget",
    "discard": "verify:discard",
    "repair": "verify:repair",
    "import": _group(
        "tidemark import",
        {"samza": "show:import_samza"},
        "Make a commit of a snapshot in another program's form.",
        short_help="Make a commit of what another program has stored.",
    ),
    "export": "show:export",
    "report": "bench:report",
    "doctor": "doctor:doctor",
    "metrics": "metrics:metrics",
    "lifecycle": "doctor:lifecycle",
    "bench": _group(
        "tidemark bench",
        {"restore": "bench:bench_restore"},
        "Measure with a job's own state and this machine.",
        short_help="Time a restore drill of a job.",
    ),
    "spark": _group(
        "tidemark spark",
        {
            "backup": "spark:spark_backup",
            "restore": "spark:spark_restore",
            "convert": "spark:spark_convert",
            "rescale": "spark:spark_rescale",
            "follow": "spark_follow:spark_follow",
            "cutover": "spark_follow:spark_cutover",
            "check": "spark:spark_check",
            "survey": "spark_collect:spark_survey",
            "collect": "spark_collect:spark_collect",
            "explain": "spark_explain:spark_explain",
        },
        "Back up, restore and check the checkpoints of Spark's streaming queries.\n\nBack one up while its query "
        "runs, bring it back at a batch, and find out whether all that is committed is there.",
        short_help="Back up, restore and check the checkpoints of Spark.",
    ),
    "config": _group(
        "tidemark config",
        {"show": "config:config_show"},
        "Show what is set for all runs: in the environment and in the settings file.",
        short_help="Show what is set: show, with where each value comes from.",
    ),
}
GROUPS_HELP: Final = {
    "A commit is": [
        ("latest", "the newest"),
        ("12", "the one with this number"),
        ("v8, 8_<uid>", "the newest of this version, or of this version and unique id"),
        ("@TIME", "the newest then: @2026-05-01T12:30:00Z, @36h for 36 hours ago, '@yesterday 18:00' (UTC)"),
        ("before-upgrade", "the one with this name"),
    ],
    "Settings": [
        ("1. --job flights", "the command line"),
        ("2. TIDEMARK_JOB", "the environment, or TIDEMARK_BACKUP_JOB for one verb alone"),
        ('3. job = "flights"', "the settings file: at its top, or in [backup] for one verb alone"),
        ("   in_flight_max = 32", "transfer settings in [transfer], or TIDEMARK_IN_FLIGHT_MAX"),
        ("   path_style = true", "S3 settings in [s3], or TIDEMARK_S3_PATH_STYLE; docs/how-to/s3.md has all"),
    ],
    "Credentials are not settings": [
        ("AWS_PROFILE, ~/.aws, ...", "the standard chain of AWS's tools finds them on the machine that runs")
    ],
}


class Tidemark(OrderedGroup):
    """The group of all verbs, which turns every error into an exit code."""

    @override
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        help_sections({"Options of every verb": COMMON_HELP, **GROUPS_HELP}, formatter)
        help_sections({"Exit codes": [(str(int(code)), meaning) for code, meaning in MEANINGS.items()]}, formatter)

    @override
    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; ends the process with its exit code unless `standalone_mode` is off."""
        code = self._run(list(sys.argv[1:] if args is None else args), prog_name or "tidemark", complete_var, extra)
        if standalone_mode:
            sys.exit(code)
        return code

    def _run(self, words: list[str], prog_name: str, complete_var: str | None, extra: dict[str, Any]) -> int:
        meta: dict[str, Any] = {}
        match words:
            case ["help", *verbs]:
                words = [*verbs, "--help"]
            case ["version"]:
                words = ["--version"]
        verb = prog_name
        try:
            # Loads the verb, which takes half of the start: an interrupt then is to end it as any other does.
            verb = _verb_of(words, self) or prog_name
            try:
                result = super().main(words, prog_name, complete_var, standalone_mode=False, obj=meta, **extra)
                sys.stdout.flush()
                return int(result) if isinstance(result, int) else ExitCode.OK
            except click.exceptions.Abort as error:
                # click's word for an interrupt; what it was made from says more.
                raise error.__cause__ or KeyboardInterrupt from None
        except BrokenPipeError:
            # The reader, `head` perhaps, has seen enough.
            close_quietly()
            return ExitCode.UNEXPECTED
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (the edge of the program: shown, never swallowed)
            # What no verb has noted is read of the words, which may name none.
            return report(error, verb, {**readable_values(Verb("tidemark"), None, words), **meta})


def _verb_of(words: Sequence[str], group: click.Group) -> str:
    """Find the verb of a command line that could not be read: its first word that is one, and that group's."""
    at = next((n for n, word in enumerate(words) if word in group.commands), None)
    if at is None:
        return ""
    found = group.commands[words[at]]
    below = _verb_of(words[at + 1 :], found) if isinstance(found, click.Group) else ""
    return f"{words[at]} {below}".strip()


_HELP: Final = "Back up RocksDB state to a blob store and bring it back at the version that was committed."
_SETTINGS: Final[dict[str, Any]] = {"max_content_width": 110, "help_option_names": ["-h", "--help"]}
tidemark: Final = click.version_option(installed_release(), "-V", "--version", prog_name="tidemark")(
    _group("tidemark", VERBS, _HELP, Tidemark, context_settings=_SETTINGS)
)


def main() -> int:
    """Run the command line of this process; SIGTERM and SIGHUP end it as Ctrl-C does, so that it cleans up."""
    SIGNALS.clear()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has it
                signal.signal(number, _end)
    return int(tidemark.main(standalone_mode=False))


def _end(number: int, _frame: FrameType | None) -> None:
    # An interrupt whose exit code says which signal it was, as a shell's does.
    SIGNALS.append(number)
    raise KeyboardInterrupt(number)

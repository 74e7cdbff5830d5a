"""One run of one verb: the repository that it works on, and how it shows what it did."""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast
from urllib.parse import urlsplit

import click
import msgspec
from click.core import ParameterSource

from blobstore.base import BlobStore
from blobstore.errors import InvalidRequestError
from blobstore.opening import StoreSettings, open_s3, open_store
from blobstore.tracing import incoming, span
from engine.backup.backup import BackupResult
from engine.blocking import LoopThread
from engine.cli.config import CommitChoice, check_new_name, parse_target, user_dir
from engine.cli.errors import REPOSITORY_META, describe, describe_run, place_of
from engine.cli.notify import send
from engine.cli.options import Common, Verb, misspelt_variables, take_common
from engine.cli.output import JSON, SCHEMA, ProgressLog, for_terminal, say, to_json
from engine.cli.run import SIGNALS, ExitCode, RunRecord, run_of, write_refused
from engine.collect.policy import PolicyEntry, PolicyFile, check_since, read_policy
from engine.commit.writer import until_known
from engine.errors import NotFoundError, TargetBusyError, UsageError
from engine.records.find import NO_COMMITS, Choice
from engine.records.leases import PinLease
from engine.repository.repository import Repository, SyncRepository
from engine.runtime import NO_PROGRESS, Progress, Runtime, read_now_ms
from engine.text import Moment
from index.display import iso_time, printable
from index.errors import UnsafeNameError
from index.plan.commits import Commit, RetentionPolicy
from index.snapshot.keys import encode_scope
from index.snapshot.model import Scope, StoreReference
from tidemark.errors import TidemarkError

if TYPE_CHECKING:
    from blobstore.s3.store import S3Store
    from engine.spark.access import SparkOptions
    from engine.spark.session import SparkSession

T = TypeVar("T")
Named = TypeVar("Named", str, Scope)

# Names in a hint.
SHOWN_MAX: Final = 8
# A step of a verb that repeats them asks the store for the log.
EVERY_S_MIN: Final = 0.1
# Indexes of a commit that are in memory at a time.
INDEXES_IN_FLIGHT_MAX: Final = 8


class Session:
    """What every verb works with.

    Attributes:
        repository: The one that `open` opened.
        record: What the run did, for `--metrics-file`. A dry run has no figures.
    """

    repository: SyncRepository

    def __init__(self, verb: Verb, common: Common, values: Mapping[str, Any]) -> None:
        self.verb = verb.words
        self.common = common
        self._prints = verb.prints
        self.runtime = Runtime()
        self.record = RunRecord(self.runtime)
        self._run = run_of(self.verb, values)
        self._metrics_file = None if values.get("dry_run") else common.metrics_file
        self._hooks = (None, None) if values.get("dry_run") else (common.on_success, common.on_failure)

    @contextlib.contextmanager
    def open(self) -> Iterator[SyncRepository]:
        """Open the repository; warn at the end if the digest caches could not be kept."""
        with self.record.timed("open"):
            opening = self.begin(Repository.open, settings=self.common.transfer, cache_dir=self.cache_dir())
        with opening as self.repository:
            try:
                yield self.repository
            finally:
                if (error := self.repository.asynchronous.opened.digests.error) is not None:
                    self.warn(f"file hashes are not remembered, the next run reads again: {error}")

    def begin(
        self,
        open_repository: Callable[..., Coroutine[Any, Any, Repository]],
        **settings: Any,  # noqa: ANN401  (as either function takes them)
    ) -> SyncRepository:
        """Open a repository, and close its store if that fails: it was opened here. `UsageError` if the URL is none."""
        url, meter = self.common.repository, self.record.meter if self._metrics_file is not None else None
        with self.checked_url():
            store = open_store(url, self.store_settings(), meter=meter, on_silence=self._warn_of_silence)
        self._name_repository()
        with contextlib.ExitStack() as undo:
            loop = LoopThread()
            undo.callback(loop.stop)
            undo.callback(lambda: loop.run(store.close()))
            repository = SyncRepository(loop, loop.run(open_repository(store, runtime=self.runtime, **settings)))
            undo.pop_all()
        return repository

    def _name_repository(self) -> None:
        """Let errors say from now on which store they are about: its URL is known to hold no secret."""
        click.get_current_context().obj[REPOSITORY_META] = place_of(self.common.repository, self.common.s3.endpoint_url)

    @contextlib.contextmanager
    def checked_url(self) -> Iterator[None]:
        """Say of a URL that cannot be opened that it is the caller's."""
        try:
            yield
        except InvalidRequestError as error:
            raise UsageError(str(error), operation=self.verb, subject="--repository", hint=error.hint) from None

    def bucket(self) -> "S3Store":
        """Open the bucket that a verb is about; raises `UsageError` if the URL is not the one of a bucket."""
        with self.checked_url():
            bucket = open_s3(self.common.repository, self.store_settings())
        self._name_repository()
        return bucket

    @contextlib.contextmanager
    def opened_store(self, url: str, settings: StoreSettings | None = None) -> Iterator[BlobStore]:
        """Open a store that the repository reads or writes beside its own, for a block."""
        store = open_store(url, settings)
        try:
            yield store
        finally:
            self.repository.loop.run(store.close())

    def _warn_of_silence(self, seconds: float) -> None:
        host = urlsplit(self.common.s3.endpoint_url).netloc
        server = host or f"the server of s3://{urlsplit(self.common.repository).netloc}"
        self.warn(f"no answer from {server} for {seconds:.0f} s")

    def store_settings(self) -> StoreSettings:
        common = self.common
        in_flight_max = common.transfer.in_flight_max
        return StoreSettings(in_flight_max=in_flight_max, bytes_per_s_max=common.bwlimit, s3=common.s3)

    def spark_options(self) -> "SparkOptions":
        """Return how executors are to move bytes; loads PySpark, for those who asked for it."""
        from engine.spark.access import SparkOptions  # noqa: PLC0415

        return SparkOptions(transfer=self.common.transfer, store=self.store_settings())

    def cache_dir(self) -> Path | None:
        """Return the directory of digest caches; None where they are not wanted; `UsageError` if it is elsewhere."""
        if not self.common.cache:
            return None
        given = self.common.cache_dir
        return parse_target(given) if given else user_dir(os.environ, "XDG_CACHE_HOME", ".cache")

    @contextlib.contextmanager
    def progress(self, what: str, *, wanted: bool = True) -> Iterator[Progress]:
        """Show progress on stderr, unless for `--quiet`, or for `--json` without a structured log."""
        if self.common.quiet or not wanted or (self.common.json and not self.logs_json):
            yield self.record.counted(NO_PROGRESS)
            return
        if sys.stderr.isatty() and not self.logs_json and os.environ.get("TERM") != "dumb":
            # Where it is seen: its library takes a while to import.
            from engine.cli.terminal import TerminalBar  # noqa: PLC0415

            with TerminalBar(sys.stderr, what) as bar:
                yield self.record.counted(bar)
            return
        write = functools.partial(say, "info", self.verb, log_format=self.common.log_format)
        with ProgressLog(self.runtime.monotonic_s, what=what, log=write) as progress:
            yield self.record.counted(progress)

    @property
    def logs_json(self) -> bool:
        return self.common.log_format == JSON

    def write_figures(self, code: int, error: BaseException | None = None) -> None:
        """Write down what the run did and send how it ended, where that is wanted, and begin to note the next run."""
        if self._metrics_file is None:
            self.record.begin()
        else:
            self.record.write(self._metrics_file, self._run, code, error, self.warn)
        hook = self._hooks[code != ExitCode.OK]
        if hook is not None:
            place = place_of(self.common.repository, self.common.s3.endpoint_url)
            send(hook, describe_run(self._run, code, error, place), self.warn)

    def repeat(
        self,
        step: Callable[[], T | None],
        every_ms: int,
        *,
        staying: Callable[[T], str],
        last: T | None = None,
        passing: type[Exception] | tuple[type[Exception], ...] = TidemarkError,
        final: tuple[type[Exception], ...] = (),
    ) -> T | None:
        """Take steps until interrupted, which is how it is meant to end, or until an error that does not pass.

        Return what the last step has made that made something. Of `passing` errors but the `final` ones, which the next
        step may not meet, a warning is given once: `staying` says what there is meanwhile. As long as that is nothing,
        what is wrong is not waited for. An interrupt that was lost, as one that comes while Python runs a finaliser is,
        ends it after the step.
        """
        warned = ""
        try:
            while not SIGNALS:
                try:
                    made = step()
                except passing as error:
                    is_final = isinstance(error, final) and not isinstance(error, TargetBusyError)
                    if is_final or last is None:
                        raise
                    failure, stays = describe(error, self.verb), staying(last)
                    if failure.message != warned:
                        self.warn(f"{stays}: {failure.message}")
                    warned = failure.message
                    self.write_figures(failure.code, error)
                else:
                    warned, last = "", made if made is not None else last
                    self.write_figures(ExitCode.OK)
                if not SIGNALS:
                    threading.Event().wait(min(threading.TIMEOUT_MAX, max(EVERY_S_MIN, every_ms / 1000)))
        except KeyboardInterrupt as error:
            for note in getattr(error, "__notes__", ()):
                self.warn(note)
        # Each step has written how it ended; the last one may have failed.
        self._metrics_file, self._hooks = None, (None, None)
        self.say("stopped")
        return last

    def show(self, view: msgspec.Struct, lines: Sequence[str] = ()) -> None:
        """Print the result, which the verb says that it prints: one JSON object, or lines for people.

        Names in them come from storage. Here they are made safe for a terminal, and in tables before, for their widths.
        """
        if not isinstance(view, self._prints):
            raise TypeError(f"{self.verb} prints a {type(view).__name__} that it does not declare")
        if self.common.json:
            click.echo(msgspec.json.encode({"schema": SCHEMA, "verb": self.verb, **to_json(view)}))
        elif not self.common.quiet:
            safe = [line if line.isprintable() else printable(line) for line in lines]
            for line in for_terminal(safe) if sys.stdout.isatty() else safe:
                click.echo(line)

    def warn(self, text: str) -> None:
        """Warn of what changes nothing of the result."""
        say("warning", self.verb, text, log_format=self.common.log_format)

    def warn_of_restore(self, *, pinned: bool, leftovers: Sequence[str] = ()) -> None:
        if not pinned:
            self.warn("no pin could be written: a collection at the same time could have taken the commit")
        if leftovers:
            self.warn(f"could not be removed: {', '.join(leftovers)}")

    def say(self, text: str) -> None:
        """Print a line on stderr, unless for `--quiet`."""
        if not self.common.quiet:
            say("info", self.verb, text, log_format=self.common.log_format)

    def refusal(self, message: str, hint: str = "", subject: str = "") -> UsageError:
        """Make the error of words that the verb does not take, to be raised."""
        return UsageError(message, operation=self.verb, subject=subject, hint=hint)

    def can_ask(self) -> bool:
        return sys.stdin.isatty() and not (self.common.json or self.common.quiet)

    def confirm(self, question: str, *, lines: Sequence[str] = (), refused: UsageError | None = None) -> bool:
        """Ask at the terminal, after `lines`. Without one raise `refused`; without that too, the answer is yes."""
        if not self.can_ask():
            if refused is not None:
                raise refused
            return True
        for line in lines:
            click.echo(printable(line), err=True)
        if click.confirm(printable(question), err=True):
            return True
        self.say("nothing was changed")
        return False

    def commit(
        self,
        scope: Scope,
        results: Sequence[BackupResult],
        **how: Any,  # noqa: ANN401  (as `Repository.commit` takes them)
    ) -> Commit:
        """Commit; while the outcome is unknown ask again."""
        commit = functools.partial(self.repository.asynchronous.commit, scope, results, **how)
        try:
            with self.record.timed("commit"):
                return self.repository.loop.run(until_known(commit))
        except KeyboardInterrupt as error:
            error.add_note("the commit was under way and may exist: `tidemark list` shows it")
            raise

    # ------------------------------------------------------------------ choosing

    def choose(self, choice: CommitChoice) -> Choice:
        """Return the arguments of `Repository.find`; an age becomes a time by the store's clock."""
        at_ms = self.choose_ms(choice.at) if choice.at is not None else None
        return Choice(
            number=choice.number, version=choice.version, unique_id=choice.unique_id, at_ms=at_ms, name=choice.name
        )

    def choose_ms(self, moment: Moment) -> int:
        """Return the time that chooses a commit, and warn of one that is yet to come."""
        at_ms = self.resolve_ms(moment)
        if at_ms > self.runtime.local_now_ms():
            self.warn(f"{iso_time(at_ms)} is yet to come: the newest is taken")
        return at_ms

    def resolve_ms(self, moment: Moment) -> int:
        """Return a time in milliseconds since the epoch; only an age asks for the store's clock."""
        store = self.repository.asynchronous.store
        now_ms = 0 if moment.at_ms is not None else self.repository.loop.run(read_now_ms(store))
        return max(0, moment.resolve_ms(now_ms))

    def find(self, scope: Scope, choice: CommitChoice) -> Commit:
        """Return the commit that was chosen; `NotFoundError` says what there is."""
        with self.explaining(scope):
            return self.repository.find(scope, **self.choose(choice))

    @contextlib.contextmanager
    def pinned(self, scope: Scope, choice: Choice, *, purpose: str) -> Iterator[tuple[Commit, PinLease]]:
        """Yield the commit that was chosen, protected from collections; raises as `find`."""
        with contextlib.ExitStack() as stack:
            with self.explaining(scope):
                found = stack.enter_context(self.repository.find_pinned(scope, purpose=purpose, **choice))
            yield found

    @contextlib.contextmanager
    def explaining(self, scope: Scope) -> Iterator[None]:
        """Turn "nothing fits" for a scope that does not exist at all into what exists."""
        try:
            yield
        except NotFoundError:
            there = self.repository.scopes()
            if scope in there:
                raise
            message = "no such job" if scope.task is None else "no such job and task"
            hint = _hint_for_missing(scope, there)
            raise NotFoundError(message, operation=self.verb, subject=str(scope), hint=hint) from None

    def refuse_empty(self, scope: Scope, message: str = "has no commits", hint: str = NO_COMMITS) -> NoReturn:
        """Say of a scope in which nothing was found that it has nothing, or that it does not exist."""
        with self.explaining(scope):
            raise NotFoundError(message, operation=self.verb, subject=str(scope), hint=hint)

    def choose_stores(
        self, commit: Commit, task: str | None, store: str | None, *, required: bool = True
    ) -> tuple[StoreReference, ...]:
        """Return the stores of a commit that were asked for, None being any; `NotFoundError` if one is `required`."""
        stores = commit.record.stores
        if (found := tuple(s for s in stores if task in {None, s.task} and store in {None, s.store})) or not required:
            return found
        have = ", ".join(sorted({f"{s.task}/{s.store}" for s in stores})[:SHOWN_MAX]) or "none at all"
        message = f"commit {commit.pointer.number} has no store {task or '*'}/{store or '*'}"
        raise NotFoundError(message, operation=self.verb, subject=str(commit.scope), hint=f"it has {have}")


def _hint_for_missing(scope: Scope, there: Sequence[Scope]) -> str:
    tasks = [s.task for s in there if s.job == scope.job and s.task is not None]
    if tasks:
        return f"the job commits task by task: use --commit-per-task with --task {some(tasks)}"
    if any(s.job == scope.job for s in there):
        return "the job commits as a whole: leave --commit-per-task out"
    if not there:
        return "the repository has no commits yet: begin with `tidemark backup`"
    return f"the repository has {some(str(s) for s in there)}"


def some(names: Iterable[str]) -> str:
    """List the first few of many names."""
    all_ = list(names)
    more = f" and {len(all_) - SHOWN_MAX} more" if len(all_) > SHOWN_MAX else ""
    return ", ".join(all_[:SHOWN_MAX]) + more


def choose_scope(job: str, *, commit_per_task: bool, task: str | None) -> Scope:
    """Return the scope that a job's commits belong to; `UsageError` if the job or the task fits no key."""
    return check_fits("--job", encode_scope, Scope(job, (task or "0") if commit_per_task else None))


def _take_scope(*, job: str | None, commit_per_task: bool, task: str | None) -> Scope | None:
    """Return the scope that a command line names; `UsageError` if it names a task and would be about all of them."""
    if not commit_per_task and "store" not in click.get_current_context().params:
        refuse_given("task", "goes with --commit-per-task", "leave it out: the commits are of all tasks together")
    return None if job is None else choose_scope(job, commit_per_task=commit_per_task, task=task)


def was_given(name: str) -> bool:
    """Return whether an option has a value from the command line, the environment or the settings file."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def refuse_given(names: str, message: str, hint: str) -> None:
    """Refuse options on the command line that this run would not look at; elsewhere they may be for other verbs."""
    ctx = click.get_current_context()
    for name in names.split():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} {message}", operation=ctx.command.name or "", hint=hint)


def check_fits(option: str, encode: Callable[[Named], str], value: Named) -> Named:
    """Return what becomes a part of keys; `UsageError` if it fits none."""
    try:
        encode(value)
    except UnsafeNameError as error:
        raise UsageError(str(error), operation="read", subject=option, hint=error.hint) from None
    return value


def choose_commit(
    *, number: int | None, version: CommitChoice | None, at: Moment | None, name: str | None
) -> CommitChoice:
    """Return the commit that `commit_options` choose; `UsageError` if they are several, or no name is one."""
    if sum(given is not None for given in (number, version, at, name)) > 1:
        message, hint = "more than one of --number, --version, --at and --name", "each chooses a commit alone"
        raise UsageError(message, operation="restore", hint=hint)
    if name is not None:
        check_new_name(name)
    return version or CommitChoice(number=number, at=at, name=name)


def choose_rules(
    *, keep_since: Moment | None, keep_named: bool, policy: Path | None, **counts: int | None
) -> PolicyFile | None:
    """Return the rules that `retention_options` make; None if nothing is said; `UsageError` if they are wrong."""
    given = {name: count for name, count in counts.items() if count is not None}
    if policy is not None:
        if given or keep_since is not None or not keep_named:
            hint = "put --keep-... and --no-keep-named into the file, or leave --policy out"
            raise UsageError("--policy has the rules for all jobs", operation="collect", hint=hint)
        return read_policy(policy)
    if not given and keep_since is None:
        return None
    if keep_since is not None:
        check_since(keep_since, subject="--keep-since")
    return PolicyFile(entries=(PolicyEntry(pattern="*", keep_since=keep_since, keep_named=keep_named, counts=given),))


def resolve_rules(repository: SyncRepository, rules: PolicyFile, *, dry_run: bool = True) -> RetentionPolicy:
    """Return the rules with times by the store's clock, which is asked only if a rule has a time.

    Of a `dry_run` nothing is closed by them: this machine's clock does where the store does not say its own.
    `UsageError` if a time is yet to come, `StoreError` if the store does not say its clock.
    """
    if all(entry.keep_since is None for entry in rules.entries):
        return rules.resolve(0)
    store = repository.asynchronous.store
    return rules.resolve_past(repository.loop.run(read_now_ms(store) if dry_run else store.now_ms()))


_PERIODS: Final = ("keep_hourly", "keep_daily", "keep_weekly", "keep_monthly")
# Options that are one value together, by its name.
_TOGETHER: Final[Mapping[str, tuple[tuple[str, ...], Callable[..., object]]]] = {
    "scope": (("job", "commit_per_task", "task"), _take_scope),
    "choice": (("number", "version", "at", "name"), choose_commit),
    "rules": (("keep_last", "keep_since", *_PERIODS, "keep_named", "policy"), choose_rules),
}


def verb(
    words: str,
    short_help: str | None = None,
    *prints: type[msgspec.Struct],
    cls: type[Verb] = Verb,
    **described: Any,  # noqa: ANN401  (as `Verb` and click take them)
) -> Callable[[Callable[..., ExitCode | None]], Verb]:
    """Make a verb of a function, which is given a session, and its own options as its parameters (see `_take`).

    It `prints` one of these each time.
    """

    def decorate(function: Callable[..., ExitCode | None]) -> Verb:
        parameters = {n: kind for n, kind in function.__annotations__.items() if n not in {"session", "return"}}

        @functools.wraps(function)
        def run(**values: Any) -> ExitCode | None:  # noqa: ANN401  (each verb has its own options)
            ctx = click.get_current_context()
            if ctx.invoked_subcommand is not None:
                return None  # a verb below this one was asked for
            command = cast("Verb", ctx.command)
            try:
                common = take_common(values)
            except (click.UsageError, UsageError) as error:
                write_refused(command.words, values, error)
                raise
            session = Session(command, common, values)
            for wrong, right in misspelt_variables(ctx).items():
                session.warn(f"nobody reads the variable {wrong}: {right} is one that is read")
            # As the environment carries the context of who has started this process.
            headers = {"traceparent": os.environ.get("TRACEPARENT", "")}
            try:
                with incoming(headers), span(f"cli.{session.verb}"):
                    code = function(session, **{n: _take(n, kind, values) for n, kind in parameters.items()})
            except (Exception, KeyboardInterrupt) as error:
                session.write_figures(describe(error, session.verb).code, error)
                raise
            session.write_figures(code or ExitCode.OK)
            return code

        return click.command(words, cls=cls, short_help=short_help, prints=prints, **described)(run)

    return decorate


def _take(name: str, kind: Any, values: Mapping[str, Any]) -> object:  # noqa: ANN401  (a type, of any option)
    """Return a parameter of a verb, or a field of one: an option, several together, or a struct of such fields."""
    if name in _TOGETHER:
        parts, choose = _TOGETHER[name]
        return choose(**{part: values[part] for part in parts})
    if name in values:
        return values[name]
    # What is not said, or not an option, has its default.
    fields = [f for f in msgspec.structs.fields(kind) if f.required or values.get(f.name) is not None]
    return kind(**{field.name: _take(field.name, field.type, values) for field in fields})


def spark_session() -> contextlib.AbstractContextManager["SparkSession"]:
    """Return the Spark session that runs here, or a new one that ends with the block.

    Only for who asked for it: PySpark takes a second to import, for which verbs that do without it need not wait.
    How it is set is Spark's own business: `spark-defaults.conf`, `spark-submit`, and the variables of the environment.
    `UsageError` if there is no Java that it could start with, or what is set is wrong.
    """
    from engine.spark.session import open_session  # noqa: PLC0415

    return open_session()

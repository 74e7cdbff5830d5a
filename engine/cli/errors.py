"""Errors as the caller sees them: a few lines for people, one JSON object for programs, an exit code for both."""

import contextlib
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Final

import click
import msgspec

from blobstore.errors import InvalidRequestError
from blobstore.opening import check_url, local_path_of
from blobstore.s3.settings import may_hold_credentials
from engine.cli.notify import Notice
from engine.cli.options import origin_hint
from engine.cli.output import JSON, SCHEMA, log, styled
from engine.cli.run import MEANINGS, ExitCode, choose_exit_code, innermost, is_wrong_setting, public_class
from engine.errors import CommitUnknownError, TargetError, UsageError
from engine.runtime import Runtime
from engine.text import without_credentials
from index.display import printable
from tidemark.errors import TidemarkError

CAUSES_SHOWN_MAX: Final = 8
# Where a run notes in click's context which repository it works on.
REPOSITORY_META: Final = "tidemark.repository"

# What a caller of the command can do, where the error itself speaks to a caller of the library or not at all.
_HINTS: Final[dict[type[BaseException], str]] = {
    CommitUnknownError: "run the same command again: it finds out what happened; delete nothing",
    KeyboardInterrupt: "nothing is half done: a commit was made or not, a target is as before or complete; repeat it",
    PermissionError: "grant the permission, or run as the user who has it",
    OSError: "the file system of this machine refused; see the error",
}
_NEWLINE: Final = "\n"
# Hints that speak of arguments of the library, in the words of the command line.
_HINTS_SAID: Final = {
    TargetError.default_hint: "choose a target that is absent, or say --replace",
    InvalidRequestError.default_hint: "this is a fault of tidemark: run it with --debug, and report it",
}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error of schema 1; `code` is the exit code of the process."""

    schema: int = SCHEMA
    error: str
    code: int
    operation: str
    subject: str
    message: str
    hint: str
    causes: tuple[str, ...] = ()
    # Of an error about a blob store or what is in it: which, with endpoint and profile as far as they are set.
    repository: str = ""


def describe(error: BaseException, verb: str, repository: str = "") -> Failure:
    """Describe an error for people and programs; `verb` is for those that do not say what they were doing."""
    error = innermost(error)
    return Failure(
        error="UsageError" if isinstance(error, click.UsageError) else public_class(error),
        code=ExitCode.USAGE if isinstance(error, click.UsageError) else choose_exit_code(error),
        operation=str(getattr(error, "operation", "") or verb),
        # A word of the command line in a wrong place, or a path that is none, may be a URL with a secret in it.
        subject=without_credentials(_subject(error)),
        message=without_credentials(_message(error)),
        hint=_hint(error, verb),
        causes=tuple(map(without_credentials, _causes(error))),
        repository=repository if isinstance(error, TidemarkError) else "",
    )


def describe_run(run: Mapping[str, str], code: int, error: BaseException | None, repository: str) -> Notice:
    """Describe how a run of a verb ended, as `run_of` names it."""
    verb, job = run["verb"], run["job_name"]
    failure = describe(error, verb, repository) if error is not None else None
    what = failure.message if failure else MEANINGS.get(ExitCode(code), "interrupted")
    ended = "ended well" if code == ExitCode.OK else f"ended with {int(code)}: {what}"
    text = printable(f"tidemark {verb} {f'of {job} ' if job else ''}{ended}")
    said = {name: getattr(failure, name) for name in ("error", "message", "hint")} if failure else {}
    ended_at_ms = Runtime().local_now_ms()
    return Notice(verb=verb, job=job, code=code, repository=repository, ended_at_ms=ended_at_ms, text=text, **said)


def place_of(url: str, endpoint_url: str) -> str:
    """Say where a repository is: a URL or an absolute path, and of a bucket what endpoint and profile are set.

    Nothing of a URL that is refused, in which a secret may be anywhere.
    """
    try:
        check_url(url)
        path = None if "://" in url else local_path_of(url)
    except InvalidRequestError:
        return ""
    if path is not None:
        return without_credentials(str(path.absolute()))
    said = [without_credentials(url)]
    if url.startswith("s3:"):
        server = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
        if server:
            # What is not of this form may be a secret in the wrong place.
            is_plain = server.startswith(("http://", "https://")) and not may_hold_credentials(server)
            said.append(f"endpoint {server if is_plain else '***'}")
        said += [f"profile {profile}"] if profile else []
    return ", ".join(said)


def report(error: BaseException, verb: str, asked: Mapping[str, Any]) -> int:
    """Report an error on stderr as `asked` by the options in `options.NOTED`; return the exit code."""
    failure = describe(error, verb, asked.get(REPOSITORY_META, ""))
    trace = trace_of(error) if asked["debug"] else ""
    if asked["log_format"] == JSON:
        shown = msgspec.to_builtins(failure)
        log("error", verb, failure.message, {**shown, "traceback": trace} if trace else shown)
        return failure.code
    if trace:
        click.echo(trace, err=True, nl=False)
    if asked["json"]:
        click.echo(msgspec.json.encode(failure), err=True)
        return failure.code
    click.echo(f"{styled('error', 'error')}: {printable(failure.message)}", err=True)
    if failure.repository:
        click.echo(f"repository: {printable(failure.repository)}", err=True)
    for cause in failure.causes:
        click.echo(f"cause: {printable(cause)}", err=True)
    click.echo(f"{styled('hint', 'hint')}: {printable(failure.hint)}", err=True)
    return failure.code


def trace_of(error: BaseException) -> str:
    """Format the traceback, for `--debug`."""
    return without_credentials("".join(traceback.format_exception(error)))


def _subject(error: BaseException) -> str:
    match error:
        case TidemarkError():
            return error.subject
        case click.BadParameter() if error.param is not None:
            return max(error.param.opts, key=len) if error.param.opts else error.param.human_readable_name
        case OSError():
            return str(error.filename or "")
        case _:
            return ""


def _message(error: BaseException) -> str:
    match error:
        case click.ClickException():
            return error.format_message()
        case TidemarkError():
            return str(error)
        case KeyboardInterrupt():
            return "interrupted"
        case OSError() if error.strerror:
            return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        case _:
            return f"unexpected {type(error).__name__}: {error}"


def _hint(error: BaseException, verb: str) -> str:
    if isinstance(error, click.UsageError):
        return origin_hint(error.ctx, error.param if isinstance(error, click.BadParameter) else None)
    has_notes = bool(getattr(error, "__notes__", ()))
    if isinstance(error, KeyboardInterrupt) and (has_notes or verb == "spark check"):
        what = "what is said above is all that is half done; repeat it"
        return what if has_notes else "a check writes nothing but private copies, which are gone"
    for kind, hint in _HINTS.items():
        if isinstance(error, kind):
            return hint
    hint = str(getattr(error, "hint", ""))
    if hint == UsageError.default_hint:
        return f"see `tidemark {verb} --help`"
    if hint == InvalidRequestError.default_hint and is_wrong_setting(error):
        return "check the URL, [s3] in tidemark.toml, and the variables AWS_... and TIDEMARK_S3_..."
    return _HINTS_SAID.get(hint, hint) or "run it with --debug to see where it happened, and report it"


def _causes(error: BaseException) -> tuple[str, ...]:
    """Return notes, then the causes, nearest first; a cause that only repeats the error is left out."""
    shown = [*getattr(error, "__notes__", ())]
    message = _message(error)
    below = error.__cause__
    while below is not None and len(shown) < CAUSES_SHOWN_MAX:
        below = innermost(below)
        # Of Spark's errors the traceback of a worker, and of its JVM, is a part: `--debug` shows it.
        text = f"{type(below).__name__}: {str(below).strip().partition(_NEWLINE)[0]}"
        if str(below) not in message and not isinstance(error, click.ClickException):
            shown.append(text)
        below = below.__cause__
    return tuple(shown)


def close_quietly() -> None:
    """Nobody reads the output any more: keep the interpreter from complaining about it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                stream.close()

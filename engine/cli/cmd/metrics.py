"""The verb `metrics`: the status of a repository, as Prometheus reads it."""

import ipaddress
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import click
import msgspec

from engine.cli.errors import describe
from engine.cli.exit_codes import ExitCode
from engine.cli.options import DURATION, Verb, common_options
from engine.cli.session import Session, with_session
from engine.clock import SystemRuntime
from engine.errors import UsageError
from engine.metrics.names import METRICS, Metric, Sample, Samples, labels_of
from engine.metrics.status import gather_status
from engine.text import table
from index.text import count, human_duration, printable

_LOOPBACK: Final = "127.0.0.1"
_PORT_MAX: Final = 65_535
# A reading lists the whole repository.
EVERY_S_MIN: Final = 1.0


class SampleView(msgspec.Struct, frozen=True, kw_only=True):
    """One value."""

    name: str
    labels: Mapping[str, str]
    value: float


class MetricsView(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics`."""

    samples: tuple[SampleView, ...]
    # The file that was written; empty if none was.
    textfile: str
    # Where it was served; empty if it was not.
    url: str


class MetricNamesView(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics --names`."""

    metrics: tuple[Metric, ...]


@click.command(
    "metrics",
    cls=Verb,
    needs_repository=False,
    prints=(MetricsView, MetricNamesView),
    short_help="Print the status of a repository for Prometheus.",
    example="tidemark metrics -r file:///backups --textfile tidemark.prom",
)
@click.option(
    "--job", "-j", "jobs", multiple=True, metavar="JOB", help="Commits of this job; may be repeated.  [default: all]"
)
@click.option("--commits-only", is_flag=True, help="Read commits alone: no orphans, no blobs at risk, no collections.")
@click.option(
    "--textfile",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to FILE, whole or not at all.",
)
@click.option("--listen", metavar="[HOST:]PORT", help="Serve /metrics until interrupted.  [default of HOST: 127.0.0.1]")
@click.option(
    "--every",
    type=DURATION,
    default="60s",
    show_default=True,
    metavar="TIME",
    help="With --listen: so long after a reading the next one begins.",
)
@click.option("--names", is_flag=True, help="List all metrics, with what Samza and Spark call them.")
@common_options
@with_session
def metrics(
    session: Session,
    *,
    jobs: tuple[str, ...],
    commits_only: bool,
    textfile: Path | None,
    listen: str | None,
    every: int,
    names: bool,
) -> ExitCode:
    """Show what can be restored, what is at risk and what nobody needs, in the form that Prometheus reads.

    Nothing is written to the repository. A reading costs what `verify` and `collect -n` cost: choose --every by that.
    Figures of runs come from the option --metrics-file of the verbs that do work, not from here.
    """
    if names:
        _show_names(session)
        return ExitCode.OK
    if not session.common.repository:
        raise UsageError("there is no repository", operation="metrics", subject="--repository", hint=_NO_REPOSITORY)
    if textfile is not None and listen is not None:
        raise UsageError("--textfile and --listen", operation="metrics", hint="give one of them")
    address = _split_address(listen) if listen is not None else None
    with session.open() as repository:
        monotonic_s = SystemRuntime().monotonic_s

        def read() -> Samples:
            gathering = gather_status(
                repository.asynchronous, monotonic_s=monotonic_s, jobs=jobs, commits_only=commits_only
            )
            return repository.loop.run(gathering)

        if address is not None:
            _serve(session, read, address, every)
            return ExitCode.OK
        samples = read()
    _print(session, samples, textfile)
    return ExitCode.OK


_NO_REPOSITORY: Final = "give --repository, TIDEMARK_REPOSITORY, or the key `repository` in tidemark.toml"


def _print(session: Session, samples: Samples, textfile: Path | None) -> None:
    # With prometheus_client, for those who asked for it.
    from engine.metrics.exposition import expose, write_textfile  # noqa: PLC0415

    if textfile is not None:
        write_textfile(textfile, samples)
        lines = [f"{count(len(tuple(samples)), 'value')} in {printable(str(textfile))}"]
    else:
        # Somebody else may have named the job, and this may be a terminal.
        shown = [Sample(s.name, tuple(map(printable, s.labels)), s.value) for s in samples]
        lines = expose(shown).decode().rstrip("\n").split("\n")
    session.show(_view(samples, textfile=str(textfile or "")), lines)


def _view(samples: Samples, *, textfile: str = "", url: str = "") -> MetricsView:
    return MetricsView(
        samples=tuple(SampleView(name=s.name, labels=labels_of(s), value=s.value) for s in samples),
        textfile=textfile,
        url=url,
    )


def _serve(session: Session, read: Callable[[], Samples], address: tuple[str, int], every_ms: int) -> None:
    from engine.metrics.exposition import LastReading, close, serve  # noqa: PLC0415

    host, port = address
    last = LastReading()
    try:
        server = serve(lambda: last, host=host, port=port)
    except OSError as error:
        raise UsageError(
            f"cannot listen there: {error.strerror or error}",
            operation="metrics",
            subject="--listen",
            hint=_LISTEN_HINT,
        ) from error
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    if not ipaddress.ip_address(host).is_loopback:
        session.warn("the port asks for no password: every caller reads the names of jobs and their sizes")
    session.say(f"serving {url}, read again every {human_duration(every_ms)}; end it with Ctrl-C or SIGTERM")
    warned = ""
    try:
        while True:
            try:
                last.refresh(read)
            except Exception as error:  # noqa: BLE001  (the next reading may go well)
                message = describe(error, session.verb).message
                if message != warned:
                    session.warn(f"the repository could not be read: {message}")
                warned = message
            threading.Event().wait(max(EVERY_S_MIN, every_ms / 1000))
    except KeyboardInterrupt:
        # It has done what it was started for: it served until it was stopped.
        session.say("stopped")
    finally:
        close(server)
    session.show(MetricsView(samples=(), textfile="", url=url))


_LISTEN_HINT: Final = "write PORT or HOST:PORT, such as 9188 or 0.0.0.0:9188"


def _split_address(text: str) -> tuple[str, int]:
    """Split host and port; a host is an address or `localhost`, in brackets if it has colons.

    Raises:
        UsageError: It is not an address.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or _LOOPBACK
    try:
        number = int(port)
        host = _LOOPBACK if host == "localhost" else str(ipaddress.ip_address(host))
    except ValueError:
        number = -1
    if not 0 <= number <= _PORT_MAX:
        raise UsageError("not an address", operation="metrics", subject=repr(text), hint=_LISTEN_HINT)
    return host, number


def _show_names(session: Session) -> None:
    metrics = tuple(METRICS.values())
    rows = [
        (v.name, v.kind, ", ".join(v.labels) or "-", ", ".join(v.samza) or "-", ", ".join(v.spark) or "-")
        for v in metrics
    ]
    session.show(MetricNamesView(metrics=metrics), table(("metric", "kind", "labels", "Samza", "Spark"), rows))

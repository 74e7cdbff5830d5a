"""The verb `metrics`: the status of a repository, as Prometheus reads it."""

import ipaddress
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from engine.cli import options as cli
from engine.cli.output import tabulate
from engine.cli.session import Session, verb
from engine.errors import UsageError
from engine.metrics.names import METRICS, Metric, Sample, Samples, labels_of
from engine.metrics.results import gather_status
from index.display import count, human_duration, printable

_LISTEN_HINT: Final = "write PORT or HOST:PORT, such as 9188 or 0.0.0.0:9188"
_LOOPBACK: Final = "127.0.0.1"
_PORT_MAX: Final = 65_535
# A reading lists the whole repository.
EVERY_MS_MIN: Final = 1000


class SampleView(msgspec.Struct, frozen=True, kw_only=True):
    """One value."""

    name: str
    labels: Mapping[str, str]
    value: float


class MetricsView(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics`."""

    samples: tuple[SampleView, ...] = ()
    # The file that was written; empty if none was.
    textfile: str = ""
    # Where it was served; empty if it was not.
    url: str = ""


class MetricNamesView(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics --names`."""

    metrics: tuple[Metric, ...]


@verb(
    "metrics", "Print the status of a repository for Prometheus.", MetricsView, MetricNamesView, needs_repository=False
)
@cli.option("--job -j JOB", "Commits of this job; may be repeated.  [default: all]", to="jobs", multiple=True)
@cli.option("--commits-only", "Read commits alone: no orphans, no blobs at risk, no collections.")
@cli.option("--textfile FILE", "Write to FILE, whole or not at all.", cli.FILE)
@cli.option("--listen [HOST:]PORT", "Serve /metrics until interrupted.  [default of HOST: 127.0.0.1]")
@cli.option("--every TIME", "With --listen: time between two readings.", cli.DURATION, default="60s")
@cli.option("--names", "List all metrics, with what Samza and Spark call them.")
def metrics(
    session: Session,
    *,
    jobs: tuple[str, ...],
    commits_only: bool,
    textfile: Path | None,
    listen: str | None,
    every: int,
    names: bool,
) -> None:
    """Show what can be restored, what is at risk and what nobody needs, in the form that Prometheus reads.

    Nothing is written to the repository. A reading costs what `verify` and `collect -n` cost: choose --every by that.
    Figures of runs come from the option --metrics-file of the verbs that do work, not from here.

    Example: tidemark metrics -r file:///backups --textfile tidemark.prom
    """
    if names:
        known = tuple(METRICS.values())
        columns = {"metric": "name", "kind": "kind", "labels": "labels", "Samza": "samza", "Spark": "spark"}
        session.show(MetricNamesView(metrics=known), tabulate(known, columns))
        return
    if not session.common.repository:
        hint = "give --repository, TIDEMARK_REPOSITORY, or the key `repository` in tidemark.toml"
        raise session.refusal("there is no repository", hint, "--repository")
    if textfile is not None and listen is not None:
        raise session.refusal("--textfile and --listen", "give one of them")
    address = _split_address(listen) if listen is not None else None
    with session.open() as repository:

        def read() -> Samples:
            clock_s = session.runtime.monotonic_s
            work = gather_status(repository.asynchronous, monotonic_s=clock_s, jobs=jobs, commits_only=commits_only)
            return repository.loop.run(work)

        if address is not None:
            _serve(session, read, address, every)
            return
        samples = read()
    # With prometheus_client, for those who asked for it.
    from engine.metrics.exposition import expose, write_textfile  # noqa: PLC0415

    if textfile is not None:
        write_textfile(textfile, samples)
        lines = [f"{count(len(tuple(samples)), 'value')} in {textfile}"]
    else:
        # Somebody else may have named the job, and this may be a terminal.
        shown = [Sample(s.name, tuple(map(printable, s.labels)), s.value) for s in samples]
        lines = expose(shown).decode().rstrip("\n").split("\n")
    views = tuple(SampleView(name=s.name, labels=labels_of(s), value=s.value) for s in samples)
    session.show(MetricsView(samples=views, textfile=str(textfile or "")), lines)


def _serve(session: Session, read: Callable[[], Samples], address: tuple[str, int], every_ms: int) -> None:
    from engine.metrics.exposition import LastReading, serve  # noqa: PLC0415

    host, port = address
    last = LastReading()
    try:
        server = serve(last, host=host, port=port)
    except OSError as error:
        raise session.refusal(f"cannot listen there: {error.strerror or error}", _LISTEN_HINT, "--listen") from error
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"
    if not ipaddress.ip_address(host).is_loopback:
        session.warn("the port asks for no password: every caller reads the names of jobs and their sizes")
    session.say(f"serving {url}, read again every {human_duration(every_ms)}; end it with Ctrl-C or SIGTERM")
    every_ms = max(EVERY_MS_MIN, every_ms)
    failed = "the repository could not be read"
    try:
        session.repeat(
            lambda: last.refresh(read), every_ms, staying=lambda failure: failure, last=failed, passing=Exception
        )
    finally:
        server.shutdown()
        server.server_close()
    session.show(MetricsView(url=url))


def _split_address(text: str) -> tuple[str, int]:
    """Split host and port; a host is an address or `localhost`, in brackets if it has colons."""
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

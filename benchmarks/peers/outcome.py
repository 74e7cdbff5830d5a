"""What one work came to: samples, requests, and what the reader must know to read them."""

import datetime as dt
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers import packages
from benchmarks.peers.clients.tidemark_client import transfer_settings_of
from benchmarks.peers.figures import Sample

OWN_PACKAGES = ("tidemark", "aiobotocore", "aiohttp", "obstore", "opendal", "blake3", "rocksdict")


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """What one step asked of the server, counted on the wire in a round of its own."""

    step: str
    contestant: str
    # By S3's names.
    counts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.counts.values())


class Outcome(msgspec.Struct, kw_only=True):
    """All of one work."""

    work: str
    title: str
    server: str
    # Where trees are restored to: `tmpfs` or `disk`.
    target: str
    began_at: str
    rounds: int
    scale: float
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    # What each contestant does.
    contestants: dict[str, str]
    # What `--set` said of ours; nothing, where figures are to be quoted.
    settings: Mapping[str, Any] = {}
    # What `--only` said: not everybody took part.
    only: str = ""
    # Who could not take part, and why.
    missing: dict[str, str] = {}
    samples: list[Sample] = []
    requests: list[Requests] = []
    # Wall time of a process that does nothing, in each round.
    starts_s: dict[str, list[float]] = {}
    notes: list[str] = []

    def of(self, step: str, contestant: str) -> list[Sample]:
        """All rounds of one step of one contestant."""
        return [s for s in self.samples if s.step == step and s.contestant == contestant]

    def requests_of(self, step: str, contestant: str) -> Requests | None:
        """What was counted of one step of one contestant."""
        return next((r for r in self.requests if (r.step, r.contestant) == (step, contestant)), None)

    @property
    def in_flight_bytes(self) -> int:
        """What ours may hold of bodies on their way."""
        return transfer_settings_of(self.settings).memory_bytes_max

    def steps(self) -> list[str]:
        """In the order in which they came."""
        return list(dict.fromkeys(sample.step for sample in self.samples))


def begin(
    work: str,
    title: str,
    *,
    server: str,
    target: str,
    rounds: int,
    scale: float,
    contestants: Mapping[str, str],
    settings: Mapping[str, Any] | None = None,
    only: str = "",
) -> Outcome:
    """An outcome with nothing measured yet."""
    return Outcome(
        work=work,
        title=title,
        server=server,
        target=target,
        began_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        rounds=rounds,
        scale=scale,
        machine=machine(),
        versions=own_versions() | packages.versions(),
        contestants=dict(contestants),
        settings=dict(settings or {}),
        only=only,
    )


def machine() -> dict[str, str]:
    """This one."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        models = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    return {
        "cores": str(os.cpu_count()),
        "cpu": cpu,
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f} before the run",
    }


def own_versions() -> dict[str, str]:
    """What tidemark ran with."""
    found = {}
    for package in OWN_PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found

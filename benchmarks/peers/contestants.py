"""Who takes part, and by which commands: what all have in common, and the clients in Python.

Each runs with its own defaults and with the parallelism that suits it: 16 connections where that can be said and is not
the default anyway. Anyone who lists lists, anyone who asks for more asks: what a peer's user gets is what is measured.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from benchmarks.peers import packages
from benchmarks.peers.clients.job import Job
from benchmarks.peers.processes import ROOT, Command, run
from benchmarks.peers.servers import BUCKET, BenchServer

CONNECTIONS = 16
OURS = "tidemark"
AIOBOTOCORE = f"{OURS}-aiobotocore"
REFERENCE = "reference copier"
HASHING_REFERENCE = f"{REFERENCE}, BLAKE3"
S5CMD_HASHED = "s5cmd and b3sum"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The server as one contestant finds it."""

    endpoint_url: str
    region: str
    access_key: str
    secret_key: str
    is_safe: bool
    has_ranges: bool

    @classmethod
    def of(cls, server: BenchServer, endpoint_url: str = "") -> "Place":
        """A server, or a proxy in front of it."""
        return cls(
            endpoint_url=endpoint_url or server.server.endpoint_url,
            region=server.server.region,
            access_key=server.server.access_key,
            secret_key=server.server.secret_key,
            is_safe=server.is_safe,
            has_ranges=server.has_ranges,
        )

    def at(self, endpoint_url: str) -> "Place":
        """The same server, through a proxy."""
        return msgspec.structs.replace(self, endpoint_url=endpoint_url)

    @property
    def environment(self) -> dict[str, str]:
        """What AWS's tools go by."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
        }


class Contestant:
    """One way to bring a directory to a bucket and back. All steps are commands, so that each is a process."""

    name = ""
    # What it does, for the results.
    about = ""

    def why_missing(self) -> str:
        """Why it cannot take part; empty if it can."""
        return ""

    def prepare(self, place: Place) -> None:
        """Before the clock runs: what is done once for a bucket."""

    def start(self, place: Place) -> Command:
        """The process alone."""
        raise NotImplementedError

    def open(self, place: Place) -> Command:
        """The process, with what it works on opened, and nothing to do."""
        raise NotImplementedError

    def upload(self, place: Place, source: Path) -> Command:
        """A whole tree, to an empty bucket."""
        raise NotImplementedError

    def restore(self, place: Place, target: Path) -> Command:
        """The same tree, to a directory that is there and empty."""
        raise NotImplementedError

    def update(self, place: Place, source: Path) -> Command:
        """What changed in a tree that was uploaded before."""
        raise NotImplementedError

    def cleanup(self) -> None:
        """Forget what it keeps on this machine."""


class PythonContestant(Contestant):
    """A client of `benchmarks.peers.clients`."""

    module = ""
    prefix = "tree"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})

    def command(self, verb: str, place: Place, directory: Path | None = None) -> Command:
        """One step of the client."""
        job = Job(
            verb=verb,
            endpoint_url=place.endpoint_url,
            bucket=BUCKET,
            region=place.region,
            access_key=place.access_key,
            secret_key=place.secret_key,
            directory=str(directory or ""),
            prefix=self.prefix,
            workers=CONNECTIONS,
            options=self.options | {"safe": place.is_safe, "ranges": place.has_ranges},
        )
        return Command(
            arguments=(self.python(), "-m", f"benchmarks.peers.clients.{self.module}", job.encode()),
            environment=place.environment | self.environment(),
        )

    def python(self) -> str:
        """Whose interpreter."""
        return sys.executable

    def environment(self) -> dict[str, str]:
        """What it needs beside the usual."""
        return {"PYTHONPATH": str(ROOT)}

    @override
    def start(self, place: Place) -> Command:
        return self.command("start", place)

    @override
    def open(self, place: Place) -> Command:
        return self.command("open", place)

    @override
    def upload(self, place: Place, source: Path) -> Command:
        return self.command("upload", place, source)

    @override
    def restore(self, place: Place, target: Path) -> Command:
        return self.command("restore", place, target)


class Tidemark(PythonContestant):
    """Ours."""

    name = OURS
    about = "backup and commit; find and restore, every byte hashed, every file and the directory fsynced"
    module = "tidemark_client"

    @override
    def prepare(self, place: Place) -> None:
        run(self.command("init", place))

    @override
    def update(self, place: Place, source: Path) -> Command:
        return self.command("upload", place, source)


class TidemarkAiobotocore(Tidemark):
    """Ours, with every byte through the event loop and aiobotocore."""

    name = AIOBOTOCORE
    about = "the same with `threaded_reads = false`: aiobotocore moves every byte"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__({**(options or {}), "s3.threaded_reads": False})


class Raw(PythonContestant):
    """The limit, of a client that hashes nothing or of one that hashes what it restores."""

    module = "raw_client"

    def __init__(self, *, hashing: bool = False) -> None:
        super().__init__({"hash": hashing})
        self.name = HASHING_REFERENCE if hashing else REFERENCE
        hashes = "BLAKE3 of each range" if hashing else "no hashing"
        self.about = f"16 sockets, signed ranged GETs of 8 MiB, pwrite, fsync; {hashes}, no library; PUTs by sendfile"


class Obstore(PythonContestant):
    """obstore, in one of two ways."""

    module = "obstore_client"

    def __init__(self, *, threads: bool) -> None:
        super().__init__({"threads": threads})
        self.name = "obstore (threads)" if threads else "obstore (async)"
        self.about = (
            "16 requests at once; whole GETs up to 16 MiB, above that ranges of 8 MiB, or one stream where the server "
            "answers no 206; no hashing, no fsync"
        )

    @override
    def why_missing(self) -> str:
        return packages.install_tools()

    @override
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": f"{ROOT}:{packages.TOOLS}"}


class Boto3(PythonContestant):
    """boto3, in an environment of its own."""

    name = "boto3"
    about = "s3transfer's manager, 16 threads, parts of 8 MiB; no fsync"
    module = "boto3_client"

    @override
    def why_missing(self) -> str:
        return packages.install_boto3()

    @override
    def python(self) -> str:
        return str(packages.BOTO3_PYTHON)

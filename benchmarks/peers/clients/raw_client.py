"""The reference copier: signed requests on bare sockets, ranged GETs, pwrite, fsync; no library.

It is the limit of what a client in Python can do with these cores and this server: everything that any contestant must
do, and nothing else. Uploads are single PUTs whose bytes the kernel takes from the file (sendfile), unhashed. With the
option `hash` the bytes of each range go through BLAKE3: the limit of a client that verifies what it restores.
"""

import datetime as dt
import hashlib
import hmac
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree as ET

from blake3 import blake3

from benchmarks.peers.clients.job import Job, main, opened

RANGE_BYTES = 8 * 1024 * 1024
READ_BYTES = 1024 * 1024
UNSIGNED = "UNSIGNED-PAYLOAD"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Connection:
    """One connection that is kept, and one request at a time on it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        address = urlsplit(job.endpoint_url)
        self._host = address.netloc
        self._socket = socket.create_connection((address.hostname or "", address.port or 80))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._day, self._key = "", b""

    def put(self, key: str, path: Path, size_bytes: int) -> None:
        """One object from one file."""
        self._socket.sendall(self._head("PUT", key, f"Content-Length: {size_bytes}\r\n"))
        with path.open("rb") as file:
            if size_bytes:
                self._socket.sendfile(file)
        self._answer(200)
        self._read_rest(None, 0)

    def get_range(self, key: str, begin: int, end: int, file: int) -> None:
        """A range of an object, to the same place of a file."""
        self._socket.sendall(self._head("GET", key, f"Range: bytes={begin}-{end - 1}\r\n"))
        # rclone's server says 200 where the range is all there is.
        self._answer(206, 200)
        if self._left != end - begin:
            raise OSError(f"{key}: {self._left} bytes came for {begin} to {end}")
        self._read_rest(file, begin)

    def list_all(self, prefix: str) -> list[tuple[str, int]]:
        """Keys and sizes below a prefix."""
        found: list[tuple[str, int]] = []
        after = ""
        while True:
            query = f"list-type=2&prefix={quote(prefix, safe='')}"
            query += f"&start-after={quote(after, safe='')}" if after else ""
            self._socket.sendall(self._head("GET", "", "", "&".join(sorted(query.split("&")))))
            self._answer(200)
            root = ET.fromstring(self._read_body())
            space = root.tag.partition("}")[0] + "}"
            page = [(e.findtext(f"{space}Key") or "", int(e.findtext(f"{space}Size") or 0)) for e in root]
            found += (listed for listed in page if listed[0])
            if root.findtext(f"{space}IsTruncated") != "true":
                return found
            after = found[-1][0]

    def _head(self, method: str, key: str, more: str, query: str = "") -> bytes:
        job, now = self._job, dt.datetime.now(dt.UTC)
        stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        if day != self._day:
            self._day, signed = day, f"AWS4{job.secret_key}".encode()
            for part in (day, job.region, "s3", "aws4_request"):
                signed = hmac.digest(signed, part.encode(), "sha256")
            self._key = signed
        path = quote(f"/{job.bucket}/{key}" if key else f"/{job.bucket}", safe="/-_.~")
        names = "host;x-amz-content-sha256;x-amz-date"
        canonical = (
            f"{method}\n{path}\n{query}\nhost:{self._host}\nx-amz-content-sha256:{UNSIGNED}\n"
            f"x-amz-date:{stamp}\n\n{names}\n{UNSIGNED}"
        )
        scope = f"{day}/{job.region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(self._key, text.encode(), "sha256").hex()
        return (
            f"{method} {path}{'?' + query if query else ''} HTTP/1.1\r\nHost: {self._host}\r\n"
            f"x-amz-content-sha256: {UNSIGNED}\r\nx-amz-date: {stamp}\r\n"
            f"Authorization: AWS4-HMAC-SHA256 Credential={job.access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}\r\n{more}\r\n"
        ).encode()

    def _answer(self, *wanted: int) -> None:
        """Read a head; what of the body came with it stays at the front of the buffer."""
        seen = 0
        while (end := bytes(self._buffer[:seen]).find(b"\r\n\r\n")) < 0:
            # A piece and no more, so that the body is read into its own place.
            count = self._socket.recv_into(self._buffer[seen : seen + 4096])
            if not count:
                raise ConnectionError("the server closed the connection")
            seen += count
        head = bytes(self._buffer[:end])
        if int(head[9:12]) not in wanted:
            raise OSError(f"{head!r}")
        length = _LENGTH.search(head)
        self._chunked = length is None
        self._left = int(length[1]) if length else 0
        self._first = bytes(self._buffer[end + 4 : seen])

    def _read_rest(self, file: int | None, at: int) -> None:
        first, left, buffer = self._first, self._left, self._buffer
        hasher = blake3() if file is not None and self._job.options.get("hash") else None
        if hasher is not None:
            hasher.update(first)
        if file is not None and first:
            os.pwrite(file, first, at)
        at, left = at + len(first), left - len(first)
        while left > 0:
            count = self._socket.recv_into(buffer[: min(left, READ_BYTES)])
            if not count:
                raise ConnectionError("the server closed the connection")
            if hasher is not None:
                hasher.update(buffer[:count])
            if file is not None:
                os.pwrite(file, buffer[:count], at)
            at, left = at + count, left - count

    def _read_body(self) -> bytes:
        """A body in memory, chunked or not."""
        if not self._chunked:
            body = bytearray(self._first)
            while len(body) < self._left:
                body += self._socket.recv(READ_BYTES)
            return bytes(body)
        raw, body = bytearray(self._first), bytearray()
        while True:
            while (end := raw.find(b"\r\n")) < 0:
                raw += self._socket.recv(READ_BYTES)
            size = int(bytes(raw[:end]), 16)
            while len(raw) < end + size + 4:
                raw += self._socket.recv(READ_BYTES)
            body += raw[end + 2 : end + 2 + size]
            del raw[: end + size + 4]
            if not size:
                return bytes(body)


def copy(job: Job) -> None:
    """The step."""
    if job.verb == "start":
        return
    connections = local()

    def connection() -> Connection:
        if not hasattr(connections, "own"):
            connections.own = Connection(job)
        own: Connection = connections.own
        return own

    if job.verb == "open":
        connection().list_all(job.key(""))
        return
    opened()
    with ThreadPoolExecutor(job.workers) as threads:
        if job.verb == "upload":
            list(threads.map(lambda file: connection().put(*file), job.files()))
            return
        listed = connection().list_all(job.key(""))
        files = {key: os.open(job.target(key), os.O_CREAT | os.O_WRONLY) for key, _ in listed}
        ranges = [
            (key, begin, min(begin + RANGE_BYTES, size), files[key])
            for key, size in listed
            for begin in range(0, size, RANGE_BYTES)
        ]
        list(threads.map(lambda part: connection().get_range(*part), ranges))
        list(threads.map(os.fsync, files.values()))
        for file in files.values():
            os.close(file)


if __name__ == "__main__":
    main(copy)

"""What every S3 server that the tests start has in common."""

import http.client
import random
import socket
import time
from functools import cached_property
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config

START_TIMEOUT_S = 240.0
# Below what Linux and macOS hand out to outgoing connections: none of those takes a port before its server does.
_PORTS = range(20_000, 32_000)


class ServerStartError(Exception):
    """A server did not come up; the message has the ends of its logs."""


class S3Server:
    """A server on this machine, for as long as its context lasts.

    Start it in the main thread: on Linux its processes are made to die together with the thread that started them.
    """

    kind: ClassVar[str]
    region: ClassVar[str] = "us-east-1"
    access_key = "tidemark-tests"
    secret_key = "no-secret-outside-of-this-machine"
    endpoint_url = ""

    def environment(self) -> dict[str, str]:
        """What the standard chain of credentials and settings finds this server by."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
        }

    @cached_property
    def client(self) -> Any:
        """The SDK's client, which blocks: to make buckets, and to do what the project's store does not."""
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=self.region,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(s3={"addressing_style": "path"}, proxies={}),
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Return once it answers.

        Raises:
            ServerStartError: It does not within `START_TIMEOUT_S`; nothing of it is left.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """End all of its processes; stopping twice is fine."""
        client = self.__dict__.pop("client", None)
        if client is not None:
            client.close()


def choose_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on just now; anyone who finds one taken all the same chooses again."""
    free: list[int] = []
    for port in random.sample(_PORTS, 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        free.append(port)
        if len(free) == count:
            return free
    raise ServerStartError(f"this machine has no {count} free ports")


def answers_http(url: str, *, timeout_s: float) -> bool:
    """Whether a server gives any answer at all."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=max(timeout_s, 0.1))
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


class Deadline:
    """How much of a time is left."""

    def __init__(self, timeout_s: float) -> None:
        self._ends_at_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_at_s - time.monotonic())

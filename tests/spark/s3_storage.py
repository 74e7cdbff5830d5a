"""An S3 server between a test, Spark's workers, and faults."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from pyspark.sql import SparkSession

from blobstore.opening import StoreSettings
from blobstore.s3.settings import S3Settings
from engine.blocking import LoopThread
from tests.fault_proxy import FaultProxy
from tests.servers.s3_server import S3Server


class Storage(msgspec.Struct, kw_only=True):
    """A new repository to be, asked through a proxy."""

    server: S3Server
    bucket: str
    url: str
    proxy: FaultProxy
    settings: StoreSettings

    def gets(self, prefix: str) -> list[str]:
        """The keys below a part of the repository that were asked for since the proxy was cleared, in order."""
        root = f"/{self.bucket}/{self.url.removeprefix(f's3://{self.bucket}/')}/"
        targets = (exchange.target.split("?")[0] for exchange in self.proxy.of("GetObject"))
        keys = (target.removeprefix(root) for target in targets)
        return [key for key in keys if key.startswith(prefix)]


@contextmanager
def proxied(server: S3Server, bucket: str) -> Iterator[Storage]:
    """A proxy in front of a server, in a thread of its own."""
    loop = LoopThread()
    proxy = FaultProxy(server.endpoint_url)
    loop.run(proxy.__aenter__())
    try:
        # Tests count requests: on a slow machine some would be sent a second time.
        s3 = S3Settings(endpoint_url=proxy.endpoint_url, path_style=True, hedged_reads=False)
        settings = StoreSettings(s3=s3)
        yield Storage(server=server, bucket=bucket, url=f"s3://{bucket}/state", proxy=proxy, settings=settings)
    finally:
        loop.run(proxy.__aexit__(None, None, None))
        loop.stop()


@contextmanager
def workers_sign_as(spark: SparkSession, server: S3Server, directory: Path) -> Iterator[None]:
    """Let Spark's workers find a server's credentials by the standard chain: what Spark sends them is a path.

    The workers have the environment of a driver that was started when no server was known.
    """
    credentials = directory / f"credentials of {server.kind}"
    if not credentials.exists():
        lines = [f"aws_access_key_id={server.access_key}", f"aws_secret_access_key={server.secret_key}"]
        credentials.write_text("\n".join(["[default]", *lines, f"region={server.region}", ""]))
    environment = spark.sparkContext.environment
    environment["AWS_SHARED_CREDENTIALS_FILE"] = str(credentials)
    try:
        yield
    finally:
        del environment["AWS_SHARED_CREDENTIALS_FILE"]

"""A Spark Connect server on this machine, in a process of its own, as its clients have it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pyspark.find_spark_home import _find_spark_home

from tests.spark.short_lived import SHORT_LIVED

ROOT: Final = Path(__file__).resolve().parents[2]
_CLASS: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
_START_S_MAX: Final = 300
_STOP_S_MAX: Final = 30


class SparkConnectServer:
    """Two tasks at a time; a context manager that starts it, waits until it listens, and ends it.

    Args:
        directory: What it logs, and works with.
        confs: Settings of Spark beside its own.
    """

    def __init__(self, directory: Path, confs: Mapping[str, str] | None = None) -> None:
        self._log = directory / "connect-server.log"
        self._directory = directory
        self._confs = dict(confs or {})
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"sc://127.0.0.1:{self._port}"

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def __enter__(self) -> Self:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        home = _find_spark_home()
        confs = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self._port),
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "3",
            "spark.sql.session.timeZone": "UTC",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": SHORT_LIVED,
            "spark.python.daemon.module": "tests.spark.warm_daemon",
            "spark.sql.warehouse.dir": str(self._directory / "warehouse"),
            **self._confs,
        }
        words = [word for name, value in confs.items() for word in ("--conf", f"{name}={value}")]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_HOME": home,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self._directory / "local"),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", f"{home}/bin/spark-submit", "--master", "local[2]", "--class", _CLASS, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self._directory,
            )
        self._wait(self._process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        until_s = time.monotonic() + _START_S_MAX
        while time.monotonic() < until_s:
            if process.poll() is not None:
                break
            with socket.socket() as knocking:
                if knocking.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.1)
        self.__exit__(None, None, None)
        raise AssertionError(f"the Spark Connect server did not start:\n{self.log[-4000:]}")

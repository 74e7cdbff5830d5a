"""What a document needs around it, as a comment in it says: `<!-- needs: s3 -->`, `<!-- needs: java -->`."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.docs.console import PROJECT
from tests.servers.moto_server import MotoServer
from tests.spark.short_lived import SHORT_LIVED

_NEEDS: Final = re.compile(r"^<!-- needs: (?P<what>[\w, ]+) -->$", re.MULTILINE)


@contextlib.contextmanager
def surroundings_of(text: str) -> Iterator[dict[str, str]]:
    """The variables under which a document's commands run, while what they speak to is there."""
    needed = {what.strip() for found in _NEEDS.finditer(text) for what in found["what"].split(",")}
    with contextlib.ExitStack() as stack:
        variables: dict[str, str] = {}
        for what in sorted(needed):
            match what:
                case "s3":
                    variables |= stack.enter_context(_bucket())
                case "java":
                    variables |= stack.enter_context(_java())
                case _:
                    raise ValueError(f"a document needs {what}")
        yield variables


@contextlib.contextmanager
def _bucket() -> Iterator[dict[str, str]]:
    """An S3 server with the bucket `bucket`."""
    with MotoServer() as server:
        server.client.create_bucket(Bucket="bucket")
        yield server.environment()


@contextlib.contextmanager
def _java() -> Iterator[dict[str, str]]:
    """Yield the variables of a Java whose JVMs are cheap to start and to end."""
    command = [sys.executable, str(PROJECT / "scripts" / "java_home.py")]
    found = os.environ.get("JAVA_HOME") or subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as settings:
        Path(settings, "spark-defaults.conf").write_text(f"spark.driver.extraJavaOptions {SHORT_LIVED}\n")
        yield {
            "JAVA_HOME": found.strip(),
            "SPARK_CONF_DIR": settings,
            # The JVM that puts the command line of the driver's JVM together.
            "SPARK_LAUNCHER_OPTS": SHORT_LIVED,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }

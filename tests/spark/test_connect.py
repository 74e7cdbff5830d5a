"""Over Spark Connect: a server that has a JVM, and a client of another process that has none (`connect_scenario`)."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.repository.repository import SyncRepository
from index.snapshot.model import Scope
from tests.servers.spark_connect import ROOT, SparkConnectServer

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

PARTS = ("a_checkpoint", "a_job", "a_listener_and_the_sources")
LONG = (
    "the_example",
    "cores",
    "stores",
    "a_collection",
    "a_job_that_a_batch_function_holds",
    "a_job_that_a_batch_function_opens",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkConnectServer]:
    with SparkConnectServer(tmp_path_factory.mktemp("connect")) as server:
        yield server


def run_client(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process without a JVM: there is no Java to be found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_", "JAVA_"))}
    environment = kept | {"PYTHONPATH": str(ROOT), "PATH": "/nowhere", **variables}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False, timeout=840
    )


def run_parts(server: SparkConnectServer, root: Path, *parts: str) -> dict[str, str]:
    """What each part of the scenario failed with."""
    done = run_client("-m", "tests.spark.connect_scenario", server.url, str(root), str(root / "outcomes"), *parts)
    assert done.returncode == 0, done.stderr[-4000:]
    return msgspec.json.decode((root / "outcomes").read_bytes(), type=dict[str, str])


@pytest.fixture(scope="module")
def outcomes(server: SparkConnectServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_parts(server, tmp_path_factory.mktemp("scenario"), *PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_what_runs_on_a_classic_session_runs_over_connect(outcomes: dict[str, str], part: str) -> None:
    assert outcomes[part] == ""


@pytest.mark.soak
@pytest.mark.parametrize("part", LONG)
def test_what_takes_longer_runs_over_connect_too(server: SparkConnectServer, tmp_path: Path, part: str) -> None:
    assert run_parts(server, tmp_path, part) == {part: ""}


def test_every_part_of_the_scenario_is_run() -> None:
    source = (ROOT / "tests" / "spark" / "connect_scenario.py").read_text()
    assert {*PARTS, *LONG} == set(re.findall(r"^def check_(\w+)\(", source, re.MULTILINE))


def test_a_verb_takes_the_server_that_the_environment_names(server: SparkConnectServer, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'repository'}"
    with SyncRepository.init(url) as repository:
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "one").write_bytes(b"one" * 1000)
        repository.commit(Scope("job"), [repository.backup(Scope("job"), tmp_path / "files", task="0", store="state")])
    words = ("-m", "engine.cli", "collect", "-r", url, "--keep-last", "1", "--on-spark", "--one-line")
    done = run_client(*words, SPARK_REMOTE=server.url, HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "deleted 0 keys" in done.stdout

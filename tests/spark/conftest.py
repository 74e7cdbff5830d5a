import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from engine.repository.repository import SyncRepository
from tests.spark.short_lived import SHORT_LIVED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two tasks at a time, each tried up to three times; workers find the tests' own modules."""
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ |= {"PYTHONPATH": python_path, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    os.environ.pop("SPARK_HOME", None)
    session = (
        SparkSession.builder.master("local[2,3]")
        .appName("tidemark tests")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "3")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", SHORT_LIVED)
        .config("spark.python.daemon.module", "tests.spark.warm_daemon")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A new repository in a directory."""
    url = f"file://{tmp_path / 'repository'}"
    SyncRepository.init(url).close()
    return url

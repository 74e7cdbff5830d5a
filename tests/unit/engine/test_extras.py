"""Without the extra `spark`: everything works that does not ask for Spark, and what asks for it names the extra."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

# As Python itself does for a package that is not there.
WITHOUT: Final = "import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(',')))"
SPARK: Final = "numpy,pandas,pyarrow,pyspark"


def run(missing: str, code: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    program = f"{WITHOUT}; {code}"
    return subprocess.run(
        (sys.executable, "-c", program, missing, *words), capture_output=True, text=True, check=False, timeout=60
    )


def tidemark(*words: str | Path) -> subprocess.CompletedProcess[str]:
    code = "from engine.cli import main; sys.argv[1:2] = []; sys.exit(main())"
    return run(SPARK, code, *words)


def test_commands_work_without_spark(tmp_path: Path) -> None:
    state, repository = tmp_path / "state", tmp_path / "repository"
    state.mkdir()
    (state / "a").write_bytes(b"a" * 1000)
    for words in (
        ("init", "-r", repository),
        ("backup", "-r", repository, "--job", "j", state),
        ("collect", "-r", repository, "--keep-last", "1"),
        ("restore", "-r", repository, "--job", "j", tmp_path / "restored"),
    ):
        done = tidemark(*words)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "restored" / "a").read_bytes() == b"a" * 1000


def test_a_verb_on_spark_names_the_extra(tmp_path: Path) -> None:
    assert tidemark("init", "-r", tmp_path / "r").returncode == 0
    done = tidemark("collect", "-r", tmp_path / "r", "--keep-last", "1", "--on-spark")
    assert done.returncode == 2
    assert "pyspark" in done.stderr or "pyarrow" in done.stderr
    assert "pip install '.[spark]'" in done.stderr


@pytest.mark.parametrize("missing", ["numpy", "pandas", "pyarrow", "pyspark"])
def test_an_import_names_what_is_missing(missing: str) -> None:
    done = run(missing, "import engine.spark")
    error = done.stderr[done.stderr.index("engine.spark.MissingExtraError: import engine.spark: ") :]
    assert missing in error


def test_the_error_is_an_import_error() -> None:
    done = run("pyspark", "\ntry:\n    import tidemark.spark\nexcept ImportError as error:\n    print(error.hint)")
    assert "pip install '.[spark]'" in done.stdout

"""`import tidemark`: what it has, what it loads, and what may keep it from loading."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import tidemark
import tidemark.spark
from blobstore.errors import BlobNotFoundError, StoreError
from engine.errors import EngineError, NotFoundError
from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter
from engine.spark import MissingExtraError, StatefulJob
from engine.spark.errors import TaskFailedError
from index.errors import CorruptIndexError, FormatError

ROOT: Final = Path(tidemark.__file__).parents[1]


def run(*words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = (sys.executable, *words)
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_the_type_checker_sees_every_name_that_there_is() -> None:
    block = next(node for node in ast.parse(Path(tidemark.__file__).read_text()).body if isinstance(node, ast.If))
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen - {"installed_release"} == set(tidemark.__all__) - {"ShadowedError", "TidemarkError"}
    assert len(tidemark.__all__) == len(set(tidemark.__all__))
    for name in tidemark.__all__:
        assert getattr(tidemark, name).__name__ == name
    assert dir(tidemark) == sorted(tidemark.__all__)
    assert tidemark.spark.StatefulJob is StatefulJob


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tidemark' has no attribute 'Repo'"):
        tidemark.Repo  # type: ignore[attr-defined]  # noqa: B018


def test_an_import_loads_nothing_until_a_name_is_asked_for() -> None:
    ours = "[m for m in sys.modules if m.split('.')[0] in {'engine', 'index', 'blobstore', 'tidemark'}]"
    others = "[m for m in ('pyspark', 'pandas', 'aiobotocore') if m in sys.modules]"
    code = f"import sys, tidemark; print({ours}); tidemark.SyncRepository, tidemark.LiveRocksDb; print({others})"
    assert run("-c", code).stdout.splitlines() == ["['tidemark.errors', 'tidemark']", "[]"]


def test_it_is_the_command_too(tmp_path: Path) -> None:
    assert run("-m", "tidemark", "--version", cwd=tmp_path).stdout == f"tidemark, version {tidemark.__version__}\n"


@pytest.mark.parametrize(
    "error",
    [
        NotFoundError("none", operation="find", subject="s"),
        BlobNotFoundError("none", operation="get", key="s"),
        CorruptIndexError("cut short", subject="s"),
        TaskFailedError("failed", operation="run", subject="s"),
        MissingExtraError("no pyspark", operation="import", subject="s"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_says_the_same_things_of_itself(error: tidemark.TidemarkError) -> None:
    assert isinstance(error, EngineError | StoreError | FormatError)
    with pytest.raises(tidemark.TidemarkError, match=r"\bs: ") as caught:
        raise error
    assert (caught.value.subject, bool(caught.value.hint)) == ("s", True)
    assert str(error) == " ".join(filter(None, (error.operation, "s: "))) + str(error).rpartition(": ")[2]


HIDING = ["index.py", "engine/__init__.py", "blobstore.py"]


@pytest.mark.parametrize("name", HIDING)
def test_a_script_beside_a_file_of_the_same_name_runs(tmp_path: Path, name: str) -> None:
    """With every module that a backup, a restore and a collection load, also those that load late."""
    hide(tmp_path, name)
    with StoreWriter.open(tmp_path / "state", RocksDbSettings()) as store:
        store.write_batch({b"a": b"1"})
        store.flush()
    (tmp_path / "job.py").write_text(f"""from tidemark import Retention, SyncRepository
with SyncRepository.init("{tmp_path}/repository") as repository:
    repository.commit("flights", [repository.backup("flights", "{tmp_path}/state", task="0", store="facts")])
    repository.restore_all("flights", "{tmp_path}/restored")
    repository.collect(Retention(keep_last=1))
""")
    done = run(tmp_path / "job.py")
    assert done.stderr == ""
    with StoreReader.open(tmp_path / "restored" / "0" / "facts") as restored:
        assert dict(restored.items()) == {b"a": b"1"}


def test_a_path_that_comes_later_hides_nothing(tmp_path: Path) -> None:
    hide(tmp_path, "index.py")
    code = f"import sys, tidemark; sys.path.insert(0, '{tmp_path}'); print(tidemark.Scope('flights'))"
    assert run("-c", code).stdout == "flights\n"


@pytest.mark.parametrize("name", HIDING)
def test_a_script_that_has_imported_its_own_module_reads_which_file_it_is(tmp_path: Path, name: str) -> None:
    shadow = hide(tmp_path, name)
    module = name.partition("/")[0].removesuffix(".py")
    (tmp_path / "job.py").write_text(
        f"import {module}\n"
        "try:\n    import tidemark\nexcept ImportError as error:\n    print(type(error).__name__, error)\n"
    )
    expected = f"ShadowedError import {module}: {shadow} was imported, and hides {ROOT / module}: rename that file"
    assert run(tmp_path / "job.py").stdout.startswith(expected)


def hide(directory: Path, name: str) -> Path:
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text("")
    return directory / name


def test_a_directory_of_data_beside_a_script_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "job.py").write_text("from tidemark import Scope\nprint(Scope('flights'))\n")
    assert run(tmp_path / "job.py").stdout == "flights\n"

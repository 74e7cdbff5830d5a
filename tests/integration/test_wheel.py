"""The wheel: what is in it, and that it runs where there is no checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from engine.rocksdb.store import RocksDbSettings, StoreReader, StoreWriter

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("blobstore", "engine", "index", "tidemark")
# What a build reads of the checkout.
SOURCES: Final = ("pyproject.toml", "README.md", "LICENSE", *PACKAGES)


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    """What a program prints that goes well."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "LANG": "C.UTF-8", **variables}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the checkout; by the build backend of this environment."""
    directory = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, directory / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", "dist", ".", cwd=directory)
    (made,) = (directory / "dist").iterdir()
    return made


class Elsewhere:
    """An environment with the wheel, and the dependencies of this one but not its checkout; and a place to work in."""

    def __init__(self, wheel: Path, directory: Path) -> None:
        self.work = directory / "work"
        self.work.mkdir()
        self.bin = directory / "venv" / "bin"
        run(sys.executable, "-m", "venv", "--without-pip", self.bin.parent, cwd=directory)
        packages = run(
            self.bin / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=directory
        )
        # An editable installation of this environment is in .pth files, which are read of a site directory alone.
        Path(packages.strip(), "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.bin / "python")
        run(*pip, "install", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=directory)

    def tidemark(self, *words: str | Path) -> str:
        """What the command prints."""
        return run(self.bin / "tidemark", *words, cwd=self.work)

    def python(self, code: str) -> list[str]:
        """The lines that a program prints."""
        return run(self.bin / "python", "-c", code, cwd=self.work).splitlines()


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    return Elsewhere(wheel, tmp_path_factory.mktemp("elsewhere"))


def test_it_has_every_module_and_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert "engine/spark/log4j2.properties" in names


def test_its_packages_are_imported_from_there(elsewhere: Elsewhere) -> None:
    imports = "; ".join(f"import {name}; print({name}.__file__)" for name in PACKAGES)
    for file in elsewhere.python(imports):
        path = Path(file)
        assert path.is_relative_to(elsewhere.bin.parent)
        assert not path.is_relative_to(ROOT)
    asked = "import tidemark; print(tidemark.__version__, tidemark.SyncRepository.__name__)"
    assert elsewhere.python(asked) == [f"{elsewhere.tidemark('--version').split()[-1]} SyncRepository"]


def test_a_script_beside_a_file_that_hides_a_package_runs(elsewhere: Elsewhere) -> None:
    shadow = elsewhere.work / "index.py"
    shadow.touch()
    code = "from tidemark import SyncRepository; SyncRepository.init('memory://x').close(); import index; print(index)"
    assert f"{elsewhere.bin.parent}/" in elsewhere.python(code)[0]
    shadow.unlink()


def content(directory: Path) -> Mapping[bytes, bytes]:
    with StoreReader.open(directory) as store:
        return dict(store.items())


def test_the_command_does_its_work_there(elsewhere: Elsewhere) -> None:
    assert "Usage: tidemark" in elsewhere.tidemark("--help")
    with StoreWriter.open(elsewhere.work / "state", RocksDbSettings()) as store:
        store.write_batch({b"%d" % number: b"value" * 20 for number in range(1000)})
        store.flush()
    repository = ("-r", "repository")
    elsewhere.tidemark("init", *repository)
    elsewhere.tidemark("backup", *repository, "--job", "flights", "state")
    assert "flights" in elsewhere.tidemark("list", *repository)
    elsewhere.tidemark("restore", *repository, "--job", "flights", "restored")
    assert content(elsewhere.work / "restored") == content(elsewhere.work / "state")
    assert "no damage" in elsewhere.tidemark("verify", *repository, "--level", "content")

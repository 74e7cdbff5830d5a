"""One flipped byte, wherever it is: `check` and `restore` name the file, and nothing wrong is returned as right."""

import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from engine.cli import tidemark
from engine.cli.run import ExitCode
from engine.repository.repository import SyncRepository
from engine.state.changelogs import open_changelog
from engine.state.zips import read_state_zip
from tests.spark.checkpoint.shows import Show, flip_byte
from tests.spark.state.queries import AGGREGATION, FORMAT, SESSION, STORE, stop_maintenance

pytestmark = pytest.mark.spark

# Shares of a file. (What nearly is its beginning has bytes of a changelog's compression that say nothing.)
MIDDLE: Final = 0.5
PLACES: Final = [MIDDLE, *(pytest.param(place, marks=pytest.mark.soak) for place in (0.0, 0.95))]


class Bench:
    """A checkpoint that Spark has written and writes no more, a repository with its backup, and a command line."""

    def __init__(self, spark: SparkSession, root: Path, checkpoint: Path) -> None:
        # Else there may be files that no copy has.
        stop_maintenance(spark)
        self.root = root
        self.checkpoint = checkpoint
        self.repository = root / "repository"
        SyncRepository.init(f"file://{self.repository}").close()
        assert self.run("backup", str(checkpoint)).exit_code == ExitCode.OK

    def run(self, verb: str, *words: str, repository: Path | None = None) -> Result:
        environment = {
            "TIDEMARK_REPOSITORY": f"file://{repository or self.repository}",
            "TIDEMARK_JSON": "1",
            "TIDEMARK_CACHE": "0",
            "TIDEMARK_CONFIG": "/dev/null",
        }
        return CliRunner().invoke(tidemark, ["spark", verb, *words], env=environment)

    def files(self, kind: str) -> list[Path]:
        """The files of the checkpoint of a kind, as paths in it."""
        found = sorted(path.relative_to(self.checkpoint) for path in self.checkpoint.glob(KINDS[kind]))
        return [path for path in found if not path.name.startswith(".")]

    def blobs(self, prefix: str) -> list[Path]:
        found = (path for path in (self.repository / prefix).rglob("*") if path.is_file())
        return sorted(path.relative_to(self.repository) for path in found if not path.name.startswith("."))


KINDS: Final = {
    "SST": "state/0/0/SSTs/*.sst",
    "zip": "state/0/0/*.zip",
    "changelog": "state/0/0/*.changelog",
    "commit": "commits/*",
    "offsets": "offsets/*",
    "source": "sources/0/*",
    "schema": "state/0/0/_metadata/schema",
    "operator metadata": "state/0/_metadata/metadata",
}


@pytest.fixture(scope="module", params=["1", "2"], ids=["V1", "V2"])
def bench(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("flips")
    # Two snapshots, and a changelog above the newer one.
    conf = {FORMAT: request.param, f"{STORE}minDeltasForSnapshot": "2"}
    show = Show(spark, AGGREGATION, root / "show", conf, batches=5)
    running = show.start("sink")
    show.wait_for(3, running)
    running.processAllAvailable()
    running.stop()
    versions = [
        {int(re.split(r"[._]", path.name)[0]) for path in show.checkpoint.glob(KINDS[kind])}
        for kind in ("zip", "changelog")
    ]
    assert 0 < max(versions[0]) < max(versions[1]), versions
    yield Bench(spark, root, show.checkpoint)
    shutil.rmtree(root)


@pytest.fixture
def copy(bench: Bench, tmp_path: Path) -> Path:
    """A copy of the checkpoint, with the times of its files."""
    return Path(shutil.copytree(bench.checkpoint, tmp_path / "copy"))


def test_a_sound_checkpoint_is_found_sound(bench: Bench, tmp_path: Path) -> None:
    checked = bench.run("check", str(bench.checkpoint))
    assert checked.exit_code == ExitCode.OK, checked.output
    restored = bench.run("restore", str(tmp_path / "restored"))
    assert restored.exit_code == ExitCode.OK, restored.output
    assert bench.run("check", str(tmp_path / "restored")).exit_code == ExitCode.OK


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_check_names_a_file_with_a_flipped_byte(bench: Bench, copy: Path, kind: str, place: float) -> None:
    for name in bench.files(kind)[-1:]:
        flip_byte(copy / name, int((copy / name).stat().st_size * place))
        checked = bench.run("check", str(copy))
        assert checked.exit_code == ExitCode.DAMAGED, checked.output
        # Of two files that do not fit nobody can say which one it is: Hadoop's, of the same name, may be reported.
        assert name.name in checked.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_check_names_a_file_with_a_flipped_byte_without_hadoops_checksum(bench: Bench, copy: Path, kind: str) -> None:
    """No JSON has a checksum of its own: of what is written in it, only its beginning is sure to be seen."""
    for hidden in copy.rglob(".*.crc"):
        hidden.unlink()
    (name,) = bench.files(kind)[-1:]
    place = 0.5 if kind in {"SST", "zip", "changelog"} else 0.0
    flip_byte(copy / name, int((copy / name).stat().st_size * place))
    checked = bench.run("check", str(copy))
    assert checked.exit_code == ExitCode.DAMAGED, checked.output
    assert name.as_posix() in checked.stdout


# A log that is altered may name a version that nobody has written, or ask for what nobody knows.
REFUSED: Final = {"commit": {4, 7, 9}, "offsets": {2, 4, 7, 9}}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["SST", "zip", "changelog", "commit", "offsets"])
def test_a_flipped_byte_is_not_backed_up(bench: Bench, copy: Path, tmp_path: Path, kind: str, place: float) -> None:
    repository = tmp_path / "new"
    SyncRepository.init(f"file://{repository}").close()
    (name,) = bench.files(kind)[-1:]
    flip_byte(copy / name, int((copy / name).stat().st_size * place))
    refused = bench.run("backup", str(copy), repository=repository)
    if kind == "changelog" and refused.exit_code == ExitCode.OK:
        # Without ids there is no checksum, and some records can be compressed in two ways: nothing is lost.
        assert records(copy / name) == records(bench.checkpoint / name)
        return
    assert refused.exit_code in REFUSED.get(kind, {ExitCode.DAMAGED}), refused.output
    assert kind in REFUSED or name.name in refused.stderr
    with SyncRepository.open(f"file://{repository}") as opened:
        assert opened.scopes() == ()


def records(changelog: Path) -> list[Any]:
    with open_changelog(changelog, "lz4") as reader:
        return list(itertools.chain.from_iterable(reader))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("prefix", ["blobs", "indexes", "log"])
def test_a_flipped_byte_in_the_repository_is_not_restored(
    bench: Bench, tmp_path: Path, prefix: str, place: float
) -> None:
    target = tmp_path / "target"
    names = bench.blobs(prefix)
    assert names
    for name in names:
        repository = tmp_path / "copy of the repository"
        shutil.copytree(bench.repository, repository, symlinks=True)
        flip_byte(repository / name, int((repository / name).stat().st_size * place))
        refused = bench.run("restore", str(target), repository=repository)
        assert refused.exit_code == ExitCode.DAMAGED, (name, refused.output)
        # What the store calls a blob is at the end of its path.
        assert name.name.split(".")[0][:16] in refused.stderr
        assert not target.exists()
        # This way not every log is needed.
        replayed = bench.run("restore", str(target), "--replayed", repository=repository)
        if replayed.exit_code == ExitCode.OK:
            assert prefix == "blobs"
            assert bench.run("check", str(target)).exit_code == ExitCode.OK
            shutil.rmtree(target)
        assert not target.exists()
        shutil.rmtree(repository)


def _holds_the_same(name: Path, sound: bytes, flipped: bytes) -> bool:
    if name.suffix != ".zip" or "_" in name.name:
        return False
    return read_state_zip(sound, subject=name.name) == read_state_zip(flipped, subject=name.name)


@pytest.mark.soak
@pytest.mark.parametrize("state_format", ["1", "2"])
def test_wherever_a_byte_is_flipped_check_names_the_file(
    spark: SparkSession, tmp_path: Path, state_format: str
) -> None:
    show = Show(spark, SESSION, tmp_path / "show", {FORMAT: state_format}, batches=3)
    show.run("sink")
    bench = Bench(spark, tmp_path, show.checkpoint)
    copy = Path(shutil.copytree(bench.checkpoint, tmp_path / "copy"))
    unnoticed = []
    for kind in KINDS:
        for name in bench.files(kind):
            sound = (copy / name).read_bytes()
            size = len(sound)
            for at in range(0, size, max(1, size // 40)):
                flip_byte(copy / name, at)
                checked = bench.run("check", str(copy))
                noticed = checked.exit_code == ExitCode.DAMAGED and name.name in checked.stdout
                # Nothing reads some bytes in the headers of a zip (times, attributes); V1 has no checksum of them.
                if not noticed and not _holds_the_same(name, sound, (copy / name).read_bytes()):
                    unnoticed.append((str(name), at, size))
                flip_byte(copy / name, at)
    assert bench.run("check", str(copy)).exit_code == ExitCode.OK
    assert unnoticed == []

"""The shell of a user for tests of the command line, and a bench of S3 behind a proxy that strikes."""

import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner, Result

from engine.cli import tidemark
from tests.fault_proxy import FaultProxy
from tests.integration.s3_fault_bench import Bench
from tests.servers.s3_server import S3Server


class Shell:
    """A user's shell: a directory to work in, a repository, and nothing left over from other users."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Of a repository with two commits a collection takes most.
        self.environment = {
            "TIDEMARK_REPOSITORY": f"file://{directory}/repository",
            "TIDEMARK_JOB": "flights",
            "TIDEMARK_COLLECT_DELETE_AT_MOST": "100%",
        }

    def run(self, *words: str, code: int = 0, **environment: str) -> Result:
        """Run a command line that ends with `code`."""
        result = CliRunner().invoke(tidemark, list(words), env={**self.environment, **environment})
        assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.output
        return result

    def result(self, *words: str, code: int = 0) -> dict[str, Any]:
        """The JSON object of a run that ends with `code`; progress and other noise would break it."""
        result = self.run(*words, "--json", code=code)
        assert result.stderr == ""
        report: dict[str, Any] = json.loads(result.stdout)
        assert (report["schema"], report["verb"]) == (1, words[0])
        return report

    def refused(self, *words: str, code: int) -> dict[str, Any]:
        """The JSON object of an error."""
        result = self.run(*words, "--json", code=code)
        assert result.stdout == ""
        failure: dict[str, Any] = json.loads(result.stderr)
        assert failure.keys() == {
            "schema",
            "error",
            "code",
            "operation",
            "subject",
            "message",
            "hint",
            "causes",
            "repository",
        }
        assert (failure["schema"], failure["code"]) == (1, code)
        assert failure["hint"]
        return failure

    def grow_old(self) -> None:
        """Let every blob and index of the repository be two days old, so that a collection may delete it."""
        then_s = time.time() - 2 * 86_400
        for prefix in ("blobs", "indexes"):
            for path in (self.directory / "repository" / prefix).rglob("*"):
                if path.is_file():
                    os.utime(path, (then_s, then_s))

    def tree(self, name: str, files: dict[str, bytes]) -> Path:
        """A directory with exactly these files."""
        root = self.directory / name
        for path in sorted(root.rglob("*"), reverse=True) if root.exists() else []:
            path.rmdir() if path.is_dir() else path.unlink()
        for path_, data in files.items():
            path = root / path_
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return root


def content(root: Path) -> dict[str, bytes]:
    """The files below a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


FIRST = {"000001.sst": b"1" * 400_000, "CURRENT": b"MANIFEST-1\n", "small/a": b"a" * 5000, "small/b": b"b" * 6000}
SECOND = {**FIRST, "000002.sst": b"2" * 300_000, "CURRENT": b"MANIFEST-2\n", "small/b": b"B" * 7000}
del SECOND["small/a"]


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command line runs that reads no settings, and fills no cache, of the one who runs the tests."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    return tmp_path


@pytest.fixture
def shell(own_directory: Path) -> Shell:
    """A shell in an empty directory."""
    return Shell(own_directory)


@pytest.fixture
def two_commits(shell: Shell) -> Shell:
    """A repository with two commits of one directory, versions 8 and 9."""
    shell.run("init", "--margin", "30m")
    shell.run("backup", str(shell.tree("source", FIRST)), "--version", "8", "--offsets", "2013-07")
    shell.run("backup", str(shell.tree("source", SECOND)), "--offsets", "2013-08")
    return shell


@pytest.fixture
async def bench(s3_server: S3Server, s3_bucket: str, tmp_path: Path) -> AsyncIterator[Bench]:
    """A bucket behind a proxy that strikes."""
    async with FaultProxy(s3_server.endpoint_url, rng=Random(1)) as proxy, AsyncExitStack() as stack:
        yield Bench(s3_server, s3_bucket, proxy, tmp_path, stack)

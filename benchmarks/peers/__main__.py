"""tidemark against everything that a user could pick instead, on one server in one run.

```
make bench PART=peers                                              # all of it: hours
python -m benchmarks.peers --work small --rounds 5
python -m benchmarks.peers --work big --to disk --scale 0.1 --only tidemark,rclone
python -m benchmarks.peers --work mid --set in_flight_max=32       # a setting of ours
```

Results: `benchmarks/results/<work>-<server>-<target>-<date>.md`, `.json` and `.svg`; `python -m benchmarks.summary`
makes one table of the newest. Git keeps of each work the newest JSON, and that table. A run with `--scale`, `--only` or
`--set` says so in the names of its files, and is not in that table.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.peers import report
from benchmarks.peers.contestants import Contestant
from benchmarks.peers.processes import ROOT, ContestantError, end_in_order
from benchmarks.peers.programs import all_contestants
from benchmarks.peers.run import Run
from benchmarks.peers.works import WORKS
from tests.servers.s3_server import ServerStartError

RESULTS = ROOT / "benchmarks" / "results"
DISK = ROOT / "build" / "peers" / "restored"


def main() -> None:
    """Measure what the command line asks for, and write it down."""
    end_in_order()
    options = _options()
    settings = dict(_setting(text) for text in options.set)
    failed: list[str] = []
    for work in options.work.split(","):
        with tempfile.TemporaryDirectory(prefix="tidemark-bench-", dir=options.memory) as memory:
            run = Run(
                work=work,
                memory=Path(memory),
                restore_root=DISK if options.to == "disk" else Path(memory) / "restored",
                to=options.to,
                server=options.server,
                rounds=options.rounds,
                scale=options.scale,
                settings=settings,
                only=options.only,
                contestants=_chosen(all_contestants(settings), options.only),
                report=_print,
            )
            run.restore_root.mkdir(parents=True, exist_ok=True)
            try:
                outcome = WORKS[work](run)
            except (ContestantError, ServerStartError) as error:
                # Hours of other works are not to be lost with it.
                failed.append(work)
                _print(f"{work} FAILED, and has no result: {error}")
                continue
        _print(report.markdown(outcome))
        _print(f"written: {report.write(outcome, options.results)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", default=",".join(WORKS), help=f"which, with commas: {', '.join(WORKS)}")
    parser.add_argument("--rounds", type=int, default=5, help="of each contestant; `hanging` has 200 of its own")
    parser.add_argument("--scale", type=float, default=1.0, help="0.1 is a tenth of all files or bytes")
    parser.add_argument("--to", choices=("tmpfs", "disk"), default="tmpfs", help="where trees are restored to")
    parser.add_argument("--server", choices=("rclone", "ceph"), default="rclone")
    parser.add_argument("--only", default="", help="contestants, with commas; a part of a name is enough")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a TransferSettings of ours; s3.NAME an S3Settings",
    )
    parser.add_argument("--memory", default="/dev/shm", help="a directory in memory, for server and sources")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if unknown := set(options.work.split(",")) - WORKS.keys():
        parser.error(f"no such work: {', '.join(sorted(unknown))}")
    return options


def _setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def _chosen(contestants: Sequence[Contestant], only: str) -> tuple[Contestant, ...]:
    wanted = [name for name in only.split(",") if name]
    return tuple(c for c in contestants if not wanted or any(name in c.name for name in wanted))


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

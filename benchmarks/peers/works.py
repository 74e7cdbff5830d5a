"""The works, by name."""

from collections.abc import Callable, Mapping

from benchmarks.peers.copying import Copying
from benchmarks.peers.hanging import restore_with_hangs
from benchmarks.peers.incremental import update_trees
from benchmarks.peers.many_stores import commit_stores
from benchmarks.peers.outcome import Outcome
from benchmarks.peers.own_state import load_versions, read_state, start_programs
from benchmarks.peers.present import restore_onto
from benchmarks.peers.run import Run
from benchmarks.peers.servers import open_server
from benchmarks.peers.spark import restore_on_spark
from benchmarks.peers.trees import SHAPES, make_tree

TITLES = {
    "small": "First backup and full restore of 2,000 files of 64 KiB",
    "mid": "First backup and full restore of 40 files of 32 MiB",
    "big": "First backup and full restore of one file of 1 GiB",
    "state": "First backup and full restore of a RocksDB state of 4 GiB",
}


def copy_tree(run: Run) -> Outcome:
    """Work (a), of the tree that the run names."""
    with open_server(run.server, run.memory) as server:
        outcome = run.begin(TITLES[run.work], server.kind)
        contestants = run.present(outcome, run.contestants)
        source = run.memory / "source"
        make_tree(SHAPES[run.work].scaled(run.scale), source)
        copying = Copying(
            server=server,
            contestants=contestants,
            source=source,
            restore_root=run.restore_root,
            outcome=outcome,
            report=run.report,
        )
        copying.run(run.rounds)
    return outcome


WORKS: Mapping[str, Callable[[Run], Outcome]] = {
    **dict.fromkeys(SHAPES, copy_tree),
    "incremental": update_trees,
    "present": restore_onto,
    "stores": commit_stores,
    "spark": restore_on_spark,
    "hanging": restore_with_hangs,
    "load": load_versions,
    "read": read_state,
    "start": start_programs,
}

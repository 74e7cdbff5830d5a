"""Work (d): one commit of 256 stores, and what it asks of the server.

The backups before it are counted apart: they are one PUT for each index, and one for each pack. The commit then is one
conditional PUT and one LIST; the removal of TTLs after it, one request for each new object, is told in the same row by
its own name (`PutObjectTagging`; `HeadObject` on a server without tags).
"""

from benchmarks.peers.contestants import OURS, Place
from benchmarks.peers.counting import open_proxy
from benchmarks.peers.outcome import Outcome, Requests
from benchmarks.peers.run import Run
from benchmarks.peers.servers import open_server
from benchmarks.peers.trees import KIB, Shape, change_files, make_tree, tree_bytes
from benchmarks.peers.warm import WarmTidemark, init_repository, sample_of

STORES = 256
FILES = 4
FILE_BYTES = 4 * KIB


def commit_stores(work: Run) -> Outcome:
    """All rounds, and one that is counted."""
    stores = max(2, round(STORES * work.scale))
    with open_server(work.server, work.memory) as server:
        outcome = work.begin(f"Backup and commit of {stores} stores", server.kind)
        outcome.contestants = {OURS: "backups one after the other, then one commit of all, warm process"}
        source = work.memory / "source"
        for number in range(stores):
            make_tree(Shape(name="store", count=FILES, size_bytes=FILE_BYTES), source / f"{number:04d}")
        place, settings = Place.of(server), dict(work.settings)
        init_repository(place, settings)
        with open_proxy(place.endpoint_url) as proxy:
            counted_at = Place.of(server, proxy.endpoint_url)
            with WarmTidemark(place, settings) as ours:
                for number in range(1, work.rounds + 1):
                    change_files(source, number)
                    for verb, step in (("backup_stores", "backups"), ("commit", "commit")):
                        answer = ours.ask(verb, source)
                        outcome.samples.append(
                            sample_of(answer, step=step, contestant=OURS, number=number, size_bytes=tree_bytes(source))
                        )
                        work.told(f"{step} {number} {answer.wall_s:.3f} s")
            with WarmTidemark(counted_at, settings) as ours:
                ours.ask("backup_stores", source)
                ours.ask("commit")
                for path in source.iterdir():
                    change_files(path, 0)
                for verb, step in (("backup_stores", "backups"), ("commit", "commit")):
                    proxy.counted()
                    ours.ask(verb, source)
                    outcome.requests.append(Requests(step=step, contestant=OURS, counts=dict(proxy.counted())))
    return outcome

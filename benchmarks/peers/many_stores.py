"""Work (d): one commit of 256 stores, and what it asks of the server.

The backups before it are counted apart: they are one PUT for each index, and one for each pack. The commit then is one
conditional PUT and one LIST, and a run that counts anything else says so; the removal of TTLs after it, one request for
each new object, is in the same row by its own names (`GetObjectTagging` and `PutObjectTagging`; `HeadObject` on a
server without tags).
"""

from collections.abc import Mapping

from benchmarks.peers.contestants import OURS, Place
from benchmarks.peers.counting import CREATE, open_proxy
from benchmarks.peers.outcome import Outcome, Requests
from benchmarks.peers.run import Run
from benchmarks.peers.servers import open_server
from benchmarks.peers.trees import KIB, Shape, change_files, make_tree, tree_bytes
from benchmarks.peers.warm import WarmTidemark, init_repository, sample_of

STORES = 256
FILES = 4
FILE_BYTES = 4 * KIB
COMMIT = "commit"
# What a commit asks before it is acknowledged, and what the removal of TTLs may ask after that.
ASKED = {CREATE: 1, "ListObjectsV2": 1}
AFTERWARDS = frozenset({"GetObjectTagging", "PutObjectTagging", "HeadObject"})


def is_as_wanted(counts: Mapping[str, int]) -> bool:
    """Whether a commit was one conditional PUT and one LIST, and nothing beside the removal of TTLs."""
    return {name: count for name, count in counts.items() if name not in AFTERWARDS} == ASKED


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
                    for verb, step in (("backup_stores", "backups"), ("commit", COMMIT)):
                        answer = ours.ask(verb, source)
                        sample = sample_of(
                            answer,
                            step=step,
                            contestant=OURS,
                            number=number,
                            size_bytes=tree_bytes(source),
                            files_count=stores * FILES,
                        )
                        outcome.samples.append(sample)
                        work.report(f"{step} {number} {answer.wall_s:.3f} s")
            with WarmTidemark(counted_at, settings) as ours:
                ours.ask("backup_stores", source)
                ours.ask("commit")
                for path in source.iterdir():
                    change_files(path, 0)
                for verb, step in (("backup_stores", "backups"), ("commit", COMMIT)):
                    proxy.counted()
                    ours.ask(verb, source)
                    outcome.requests.append(Requests(step=step, contestant=OURS, counts=dict(proxy.counted())))
        counts = outcome.requests[-1].counts
        shown = "as wanted" if is_as_wanted(counts) else "NOT as wanted"
        outcome.notes.append(
            f"one commit of {stores} stores, {shown}: {counts.get(CREATE, 0)} conditional PUT and "
            f"{counts.get('ListObjectsV2', 0)} LIST, besides the removal of TTLs"
        )
        work.report(outcome.notes[-1])
    return outcome

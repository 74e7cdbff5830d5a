"""Work (f): restores of 200 requests and more while 1 % of all requests hang for two seconds, against none that do.

Both through a proxy, so that only the rule is another; in turn, one restore each. The tree's files are just too large
for a pack: each is a request of its own. Their number is counted at each restore.
"""

import shutil
from collections.abc import Sequence

from benchmarks.peers.contestants import OURS, Place
from benchmarks.peers.counting import Proxy, open_proxy
from benchmarks.peers.figures import good, percentile
from benchmarks.peers.outcome import Outcome, Requests
from benchmarks.peers.processes import ContestantError
from benchmarks.peers.run import Run
from benchmarks.peers.servers import BenchServer, open_server
from benchmarks.peers.trees import KIB, Shape, difference, make_tree, tree_bytes, tree_digests
from benchmarks.peers.warm import WarmTidemark, init_repository, sample_of
from tests.fault_rules import Hang, Rule, Stage

RESTORES = 200
FILES = 210
FILE_BYTES = 260 * KIB
HANG_S = 2.0
SHARE = 0.01
HANGING = f"{OURS}, 1 % hang 2 s"
STEP = "restore"
REQUESTS_MIN = 200


def restore_with_hangs(work: Run) -> Outcome:
    """All restores; `--rounds` means nothing here, `--scale` changes how many there are."""
    with open_server(work.server, work.memory) as server:
        outcome = work.begin("Restores of 210 requests, 1 % of which hang for 2 s", server.kind)
        outcome.rounds = max(2, round(RESTORES * work.scale))
        outcome.contestants = {OURS: "no request hangs, warm process", HANGING: "the same, 1 % of requests hang"}
        upstream = server.server.endpoint_url
        hangs = Rule(fault=Hang(at=Stage.REQUEST, seconds=HANG_S), times=None, probability=SHARE)
        with open_proxy(upstream) as calm, open_proxy(upstream, [hangs]) as hanging:
            _restores(work, outcome, server, [(OURS, calm), (HANGING, hanging)])
            outcome.notes.append(f"{hanging.struck} requests hung")
    times = {name: [s.work_s for s in good(outcome.of(STEP, name))] for name in (OURS, HANGING)}
    if all(times.values()):
        p99, p99_calm = percentile(times[HANGING], 99), percentile(times[OURS], 99)
        outcome.notes.append(f"p99 with hangs is {p99 / p99_calm:.2f} times the p99 without")
    return outcome


def _restores(work: Run, outcome: Outcome, server: BenchServer, proxies: Sequence[tuple[str, Proxy]]) -> None:
    source, target = work.memory / "source", work.restore_root / "target"
    make_tree(Shape(name="alone", count=FILES, size_bytes=FILE_BYTES), source)
    expected, size_bytes, settings = tree_digests(source), tree_bytes(source), dict(work.settings)
    init_repository(Place.of(server), settings)
    places = [Place.of(server, p.endpoint_url) for _, p in proxies]
    clients = [WarmTidemark(place, settings) for place in places]
    try:
        clients[0].ask("backup", source)
        for number in range(1, outcome.rounds + 1):
            for (name, proxy), ours in zip(proxies, clients, strict=True):
                shutil.rmtree(target, ignore_errors=True)
                proxy.counted()
                try:
                    answer = ours.ask("restore", target)
                except ContestantError as error:
                    outcome.notes.append(f"{name}, restore {number} failed: {error}")
                    continue
                requests = Requests(step=STEP, contestant=name, counts=dict(proxy.counted()))
                if number == 1:
                    outcome.requests.append(requests)
                error_shown = difference(expected, target)
                if not error_shown and requests.total < REQUESTS_MIN:
                    error_shown = f"only {requests.total} requests"
                sample = sample_of(
                    answer,
                    step=STEP,
                    contestant=name,
                    number=number,
                    size_bytes=size_bytes,
                    files_count=FILES,
                    error=error_shown,
                )
                outcome.samples.append(sample)
                work.report(f"{number} {name:24} {answer.wall_s:.3f} s {error_shown}")
    finally:
        for client in clients:
            client.stop()
        shutil.rmtree(target, ignore_errors=True)

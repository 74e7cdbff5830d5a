"""What the harness makes of its samples: quartiles, ratios of pairs, and when two are called equal."""

import msgspec
import pytest

from benchmarks.peers.figures import MIB, Memory, Quartiles, Sample, memory, percentile, quartiles, ratio


def sample(contestant: str, number: int, wall_s: float, *, open_s: float = 0.0, error: str = "") -> Sample:
    return Sample(
        step="down",
        contestant=contestant,
        round=number,
        wall_s=wall_s,
        user_s=0.5,
        system_s=0.25,
        peak_bytes=1,
        size_bytes=10**9,
        sync_s=2.0,
        open_s=open_s,
        open_cpu_s=0.25,
        error=error,
    )


def work_s(of: Sample) -> float:
    return of.work_s


def test_quartiles_of_five_are_the_second_third_and_fourth() -> None:
    assert quartiles([5.0, 1.0, 4.0, 2.0, 3.0]) == Quartiles(2.0, 3.0, 4.0)
    assert quartiles([7.0]) == Quartiles(7.0, 7.0, 7.0)


@pytest.mark.parametrize(
    "other, overlaps",
    [(Quartiles(4.0, 5.0, 6.0), True), (Quartiles(4.1, 5.0, 6.0), False), (Quartiles(0.0, 0.5, 1.9), False)],
)
def test_equal_is_where_the_middle_halves_meet(other: Quartiles, overlaps: bool) -> None:
    assert Quartiles(2.0, 3.0, 4.0).overlaps(other) is overlaps
    assert other.overlaps(Quartiles(2.0, 3.0, 4.0)) is overlaps


def test_a_ratio_is_taken_in_each_round_and_not_of_the_medians() -> None:
    ours = [sample("tidemark", n, wall_s) for n, wall_s in enumerate((1.0, 2.0, 10.0), 1)]
    theirs = [sample("peer", n, wall_s) for n, wall_s in enumerate((2.0, 8.0, 10.0), 1)]
    found = ratio(ours, theirs, work_s)
    assert found is not None
    # 2, 4 and 1; the medians alone would say 4.
    assert found.quartiles.median == 2.0
    assert found.equal


def test_a_round_that_failed_on_either_side_is_no_pair() -> None:
    ours = [sample("tidemark", 1, 1.0), sample("tidemark", 2, 1.0, error="wrong content")]
    theirs = [sample("peer", 1, 3.0), sample("peer", 2, 9.0), sample("peer", 3, 9.0)]
    found = ratio(ours, theirs, work_s)
    assert found is not None
    assert found.quartiles == (3.0, 3.0, 3.0)
    assert ratio(ours[1:], theirs, work_s) is None


def test_start_and_opening_are_not_part_of_the_work_and_the_sync_is_separate() -> None:
    one = sample("peer", 1, 5.0, open_s=1.5)
    assert (one.work_s, one.durable_s, one.cpu_s, one.cpu_s_per_gb) == (3.5, 5.5, 0.5, 0.5)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 201)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (100.0, 198.0, 200.0)
    assert percentile([3.0], 99) == 3.0


def test_memory_is_the_highest_peak_over_the_lowest_idle_beside_the_rule() -> None:
    samples = [
        msgspec.structs.replace(sample("tidemark", n, 1.0), peak_bytes=peak, open_peak_bytes=idle, files_count=1024)
        for n, (peak, idle) in enumerate([(300 * MIB, 120 * MIB), (200 * MIB, 100 * MIB)], 1)
    ]
    assert memory(samples, 64 * MIB) == Memory(200 * MIB, (128 + 64 + 3) * MIB)
    assert memory([sample("tidemark", 1, 1.0)], 64 * MIB) is None

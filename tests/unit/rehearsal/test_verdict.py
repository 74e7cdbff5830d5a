from typing import Any

import pytest

from engine.rehearsal.model import Bound
from engine.rehearsal.telling import EXPLAINS_SHARE_MIN, verdict_line
from engine.rehearsal.verdict import judge
from tests.unit.rehearsal.builders import MIB, rehearsal


@pytest.mark.parametrize(
    "changes, bound",
    [
        ({}, Bound.NETWORK),
        ({"disk_bytes_per_s": 90 * MIB}, Bound.DISK),
        ({"disk_file_s": 0.11}, Bound.DISK),
        ({"requests_count": 9000}, Bound.REQUESTS),
        ({"cpu_s": 22}, Bound.CPU),
        # One thread that is busy is a limit, whatever the other processors do.
        ({"loop_cpu_s": 11}, Bound.CPU),
        ({"open_s": 12.1}, Bound.ROCKSDB_OPEN),
    ],
)
def test_what_would_have_taken_longest_alone_is_named(changes: dict[str, Any], bound: Bound) -> None:
    verdict = judge(rehearsal(**changes))
    assert verdict.bound is bound
    assert verdict.hint
    assert verdict.explained > 0.8


def test_a_probe_that_the_processor_held_up_accuses_no_network() -> None:
    verdict = judge(rehearsal(network_busy=0.9))
    assert verdict.alone_s[Bound.NETWORK] == 0
    assert verdict.bound is not Bound.NETWORK


def test_a_network_that_nobody_waited_for_is_not_accused_by_a_slow_probe() -> None:
    verdict = judge(rehearsal(network_bytes_per_s=10 * MIB, answers_s=0.5, bytes_s=0.5, taker_s=79))
    assert verdict.alone_s[Bound.NETWORK] == pytest.approx(12 / 80)
    assert verdict.bound is Bound.DISK


@pytest.mark.parametrize("changes", [{"disk_bytes_per_s": MIB}, {"requests_count": 10**6}, {"cpu_s": 10**6}])
def test_nothing_alone_takes_longer_than_all_together(changes: dict[str, Any]) -> None:
    verdict = judge(rehearsal(**changes))
    assert max(verdict.alone_s.values()) == 12.0
    assert verdict.explained == 1.0


def test_what_was_not_looked_at_is_no_bound() -> None:
    verdict = judge(rehearsal(disk_bytes_per_s=0, disk_file_s=0, opened_count=0, open_s=0))
    assert set(verdict.alone_s) == {Bound.NETWORK, Bound.REQUESTS, Bound.CPU}
    assert Bound.REQUESTS not in judge(rehearsal(round_trip_s=0)).alone_s


def test_two_that_are_as_good_as_equal_are_both_told() -> None:
    verdict = judge(rehearsal(cpu_s=19))
    assert (verdict.bound, verdict.near) == (Bound.NETWORK, (Bound.CPU,))
    assert "cpu as good as equal" in verdict_line(verdict)


def test_a_verdict_that_explains_little_says_so() -> None:
    verdict = judge(rehearsal(restore_s=100, answers_s=1, bytes_s=1, taker_s=98))
    assert verdict.explained < EXPLAINS_SHARE_MIN
    assert "weakly" in verdict_line(verdict)


def test_an_empty_commit_is_judged_too() -> None:
    nothing = rehearsal(restore_s=0, bytes_fetched=0, bytes_written=0, requests_count=0, files_written=0, open_s=0)
    assert judge(nothing).explained == 0

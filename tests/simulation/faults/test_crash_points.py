"""Every use case, stopped before and after each of its effects in a real process (design 0002, interruptions)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.faults.crash_points import choose_points

ROOT = Path(__file__).resolve().parents[3]


# What a killed process leaves in a store is shown for every effect by test_store_effects.py; here it is what it
# leaves in a file system. `make test` takes the use cases that write most to it, and of the points that follow a change
# within a file a tenth, the same in every run; `make soak` stops before every effect of every use case.
_SCENARIOS = ("backup", "commit", "rewind", "restore", "replace", "collect", "name", "fork", "release")
_FOLLOWING = ("follow", "follow-aside", "promote")
_IN_SHORT = ("restore", "replace", "follow", "follow-aside")
CASES = [
    *(pytest.param(scenario, 10, id=f"{scenario}-share") for scenario in _IN_SHORT),
    *(pytest.param(scenario, 1, id=f"{scenario}-all", marks=pytest.mark.soak) for scenario in _SCENARIOS + _FOLLOWING),
]


@pytest.mark.parametrize("scenario, share", CASES)
@pytest.mark.timeout(900)
def test_stopped_before_any_effect_nothing_is_lost_and_nothing_leaks(
    scenario: str, share: int, fast_directory: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.faults.crash_points", scenario, str(fast_directory), str(share)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )
    assert done.stdout.strip(), done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failures"] == []
    assert summary["ended"]
    assert summary["points"] > 5
    assert summary["points"] == summary["effects"] + 1 or share > 1


def test_every_change_of_a_name_is_a_point_whatever_the_share() -> None:
    effects = ["open", "pwrite", "fsync", "os.link", "os.utime", "fsync", "os.rename", "os.mkdir", "os.remove", "fsync"]
    assert choose_points("any", effects, 1) == list(range(1, 12))
    # Before all of it, and after each of link, utime, rename, mkdir and remove.
    assert choose_points("any", effects, 10**9) == [1, 5, 6, 8, 9, 10]
    assert choose_points("backup", effects * 30, 3) == choose_points("backup", effects * 30, 3)
    within = [point for point in choose_points("backup", effects * 30, 3) if point % 10 in {2, 3}]
    assert 10 <= len(within) <= 30

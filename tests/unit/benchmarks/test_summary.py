"""The table of the newest results: what counts, what is missing, and when a goal is reached."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.peers.contestants import OURS, REFERENCE, S5CMD_HASHED
from benchmarks.peers.copying import DOWN
from benchmarks.peers.counting import CREATE
from benchmarks.peers.figures import Sample
from benchmarks.peers.hanging import HANGING
from benchmarks.peers.hanging import STEP as HANGING_STEP
from benchmarks.peers.incremental import COUNTS, changed
from benchmarks.peers.many_stores import COMMIT, is_as_wanted
from benchmarks.peers.outcome import Outcome, Requests
from benchmarks.peers.present import READING, TRUSTED, VERIFIED, step_of
from benchmarks.peers.report import result_name
from benchmarks.peers.trees import SHAPES
from benchmarks.summary import BEGIN, END, load_newest, machines_text, markdown, programs_table, put_between_marks
from benchmarks.summary_rows import MISSED, NOT_MEASURED, REACHED, Row, all_rows, charted

CHECKED = "at least 1.2 times s5cmd and b3sum, wall time"


def sample(step: str, contestant: str, number: int, wall_s: float) -> Sample:
    return Sample(
        step=step,
        contestant=contestant,
        round=number,
        wall_s=wall_s,
        user_s=wall_s,
        system_s=0.0,
        peak_bytes=200 << 20,
        open_peak_bytes=100 << 20,
        files_count=1,
        size_bytes=10**9,
    )


def outcome(work: str, step: str, times: dict[str, list[float]], **more: Any) -> Outcome:
    fields: dict[str, Any] = {
        "work": work,
        "title": "A title",
        "server": "rclone serve s3",
        "target": "tmpfs",
        "began_at": "2026-01-02T00:00:00+00:00",
        "rounds": 3,
        "scale": 1.0,
        "machine": {"cores": "2"},
        "versions": {"tidemark": "1"},
        "contestants": dict.fromkeys(times, "does it"),
        "samples": [sample(step, n, number, s) for n, all_s in times.items() for number, s in enumerate(all_s, 1)],
    }
    return Outcome(**(fields | more))


def rows_of(*outcomes: Outcome) -> list[Row]:
    return all_rows({(one.work, one.target): one for one in outcomes})


def test_without_results_every_line_says_so(tmp_path: Path) -> None:
    newest = load_newest(tmp_path)
    rows = all_rows(newest)
    assert {row.verdict for row in rows} == {NOT_MEASURED}
    assert len({(row.work, row.goal) for row in rows}) == len(rows)
    assert "Nothing was measured yet" in markdown(newest)


@pytest.mark.parametrize("theirs_s, verdict", [([1.3, 1.3, 1.4], REACHED), ([1.1, 1.1, 1.1], MISSED)])
def test_a_rival_has_to_take_that_many_times_as_long(theirs_s: list[float], verdict: str) -> None:
    times = {OURS: [1.0, 1.0, 1.0], S5CMD_HASHED: theirs_s, "s5cmd": [1.0, 1.0, 1.0], REFERENCE: [1.0, 1.0, 1.0]}
    (row,) = [row for row in rows_of(outcome("big", DOWN, times)) if row.goal == CHECKED and row.source]
    assert row.verdict == verdict


def test_a_run_without_a_rival_says_nothing_of_it() -> None:
    times = {OURS: [1.0], REFERENCE: [1.0]}
    rows = [row for row in rows_of(outcome("big", DOWN, times)) if row.goal == CHECKED]
    assert {row.verdict for row in rows} == {NOT_MEASURED}


@pytest.mark.parametrize(
    "restic_s, verdict", [([10.0, 10.5], REACHED), ([9.0, 9.0], MISSED)], ids=["ten times", "nine times"]
)
def test_each_rival_of_an_incremental_backup_has_a_goal_of_its_own(restic_s: list[float], verdict: str) -> None:
    times = {OURS: [1.0, 1.0], "rclone": [4.0, 4.5], "restic": restic_s}
    rows = [row for row in rows_of(outcome("incremental", changed(COUNTS[0]), times)) if row.source]
    assert [(row.rival, row.verdict) for row in rows] == [("rclone", REACHED), ("restic", verdict)]


def test_a_share_of_the_reference_is_a_share_of_its_speed() -> None:
    times = {OURS: [1.0, 1.0, 1.0], REFERENCE: [0.8, 0.8, 0.8]}
    rows = [row for row in rows_of(outcome("mid", DOWN, times)) if row.source and "reference" in row.goal]
    assert [(row.rival, row.ratio, row.bound, row.verdict) for row in rows] == [
        (REFERENCE, "0.80", f"0.8 s, {REFERENCE}", MISSED)
    ]


def test_only_the_newest_whole_run_counts(tmp_path: Path) -> None:
    times = {OURS: [1.0], REFERENCE: [1.0]}
    kept = outcome("big", DOWN, times, began_at="2026-01-03T00:00:00+00:00")
    later = "2026-02-01T00:00:00+00:00"
    for one in (
        outcome("big", DOWN, times),
        kept,
        outcome("big", DOWN, times, began_at=later, scale=0.1),
        outcome("big", DOWN, times, began_at=later, settings={"in_flight_max": 4}),
        outcome("big", DOWN, times, began_at=later, only="rclone"),
    ):
        (tmp_path / f"{result_name(one)}.json").write_bytes(msgspec.json.encode(one))
    assert len(list(tmp_path.glob("*.json"))) == 5
    assert load_newest(tmp_path) == {("big", "tmpfs"): msgspec.json.decode(msgspec.json.encode(kept), type=Outcome)}
    assert "| big | down | tidemark | 100 | 192 |" in markdown(load_newest(tmp_path))


def test_who_was_fastest_is_the_rival_of_small_files() -> None:
    times = {OURS: [1.0, 1.0], "rclone": [4.0, 4.5], "s5cmd": [1.6, 1.6], REFERENCE: [1.1, 1.1]}
    (row, _) = [row for row in rows_of(outcome("small", DOWN, times)) if row.source]
    assert (row.rival, row.ratio, row.bound, row.verdict) == ("s5cmd", "1.60", "", REACHED)


def test_p99_is_held_against_the_run_without_faults() -> None:
    def verdict(hanging_s: float) -> str:
        times = {OURS: [1.0] * 100, HANGING: [1.0] * 98 + [hanging_s] * 2}
        (row,) = [row for row in rows_of(outcome("hanging", HANGING_STEP, times)) if row.source]
        return row.verdict

    assert (verdict(1.2), verdict(1.4)) == (REACHED, MISSED)


@pytest.mark.parametrize("verified_s, verdict", [(0.8, REACHED), (0.9, MISSED)])
def test_verifying_is_held_against_a_full_restore(verified_s: float, verdict: str) -> None:
    step = step_of(SHAPES["small"])
    # Trusting is slow itself: that excuses nothing.
    times = {OURS: [1.0], TRUSTED: [0.7], VERIFIED: [verified_s], READING: [0.5]}
    (row,) = [row for row in rows_of(outcome("present", step, times)) if row.source and "verified" in row.work]
    assert (row.rival, row.ratio[:2], row.bound) == ("ours, a full one", "1.", f"0.5 s, {READING}")
    assert row.verdict == verdict


@pytest.mark.parametrize(
    "counts, wanted",
    [
        ({CREATE: 1, "ListObjectsV2": 1, "HeadObject": 256}, True),
        ({CREATE: 1, "ListObjectsV2": 1, "GetObjectTagging": 256, "PutObjectTagging": 256}, True),
        ({CREATE: 1, "ListObjectsV2": 2}, False),
        ({"PutObject": 1, "ListObjectsV2": 1}, False),
        ({CREATE: 1, "ListObjectsV2": 1, "GetObject": 1}, False),
    ],
)
def test_a_commit_is_one_conditional_put_and_one_list(counts: dict[str, int], wanted: bool) -> None:
    assert is_as_wanted(counts) is wanted
    requests = [Requests(step=COMMIT, contestant=OURS, counts=counts)]
    (row,) = [row for row in rows_of(outcome("stores", COMMIT, {OURS: [1.0]}, requests=requests)) if row.source]
    assert row.verdict == (REACHED if wanted else MISSED)


def test_the_table_goes_between_its_marks_and_nowhere_else() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put_between_marks(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert put_between_marks("no marks\n", "new") == "no marks\n"


def test_the_chart_has_whole_programs_and_what_was_measured() -> None:
    times = {OURS: [2.0, 2.0, 2.0], "s5cmd": [1.0, 1.1, 1.0], "restic": [9.0, 8.0, 8.0], "boto3": [1.0, 1.0, 1.0]}
    newest = {("big", "tmpfs"): outcome("big", DOWN, times)}
    (panel,) = charted(newest)
    assert panel.took_s == {OURS: 2.0, "s5cmd": 1.0, "restic": 8.0}
    assert programs_table(newest).splitlines()[2:] == ["| restore one file of 1 GiB | 2.00 s | s5cmd 0.5x; restic 4x |"]


def test_an_increment_is_a_whole_process() -> None:
    step = changed(COUNTS[1])
    runs = [msgspec.structs.replace(sample(step, name, 1, 4.0), open_s=3.0) for name in (OURS, "rclone")]
    (panel,) = charted({("incremental", "tmpfs"): outcome("incremental", step, {OURS: []}, samples=runs)})
    assert panel.took_s == {OURS: 4.0, "rclone": 4.0}


def test_it_is_reported_which_runs_were_on_another_machine() -> None:
    one = {"cpu": "One", "cores": "2", "memory": "24 GiB", "load": "0.1 before the run"}
    runs = [
        outcome("big", DOWN, {}, title="First", machine=one),
        outcome("mid", DOWN, {}, title="Second", machine=one | {"load": "3.0 before the run"}),
    ]
    shown = machines_text({(run.work, "tmpfs"): run for run in runs})
    assert shown == "All runs were on one machine: One, 2 cores, 24 GiB."
    runs.append(outcome("small", DOWN, {}, title="Third", target="disk", machine=one | {"cpu": "Two"}))
    assert machines_text({(run.work, "tmpfs"): run for run in runs}) == (
        "The runs were on 2 machines, so that only figures of one run compare: on Two, 2 cores, 24 GiB, third (disk); "
        "all others on One, 2 cores, 24 GiB."
    )

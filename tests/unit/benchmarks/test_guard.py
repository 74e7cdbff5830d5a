"""The comparison with an earlier tree: when a work counts as slower, and that both trees are really run."""

import sys
from pathlib import Path

import pytest

from benchmarks.guard import EARLIER, NOW, Program, Work, back_up_changes, measure, restore_onto, row_of
from benchmarks.peers.figures import Sample
from benchmarks.peers.processes import ROOT, ContestantError
from benchmarks.peers.trees import Shape


def samples(contestant: str, all_s: list[float]) -> list[Sample]:
    return [
        Sample(
            step="a work",
            contestant=contestant,
            round=number,
            wall_s=wall_s,
            user_s=1.0,
            system_s=0.0,
            peak_bytes=0,
            size_bytes=0,
        )
        for number, wall_s in enumerate(all_s)
    ]


@pytest.mark.parametrize(
    "now_s, slower",
    [
        ([1.2, 1.25, 1.3], True),
        ([1.05, 1.06, 1.07], False),
        ([0.5, 0.5, 0.5], False),
        ([0.8, 1.2, 1.9], False),  # slower in the middle, and as fast as before at times
    ],
)
def test_a_work_is_slower_if_it_is_beyond_noise(now_s: list[float], slower: bool) -> None:
    cells, is_slower = row_of("a work", {EARLIER: samples(EARLIER, [1.0, 1.0, 1.0]), NOW: samples(NOW, now_s)})
    assert is_slower is slower
    assert cells[0] == "a work"
    assert (cells[-1] == "**slower**") is slower


def program(tree: Path, place: Path) -> Program:
    place.mkdir()
    return Program(tree, place, f"file://{place}/repositories", {})


@pytest.mark.parametrize("act", [back_up_changes, restore_onto])
def test_both_trees_do_the_work(tmp_path: Path, act: object) -> None:
    work = Work("few files", Shape(name="few", count=10, size_bytes=1000), act)  # type: ignore[arg-type]
    programs = {name: program(ROOT, tmp_path / name) for name in (EARLIER, NOW)}
    found = measure(work, programs, rounds=1)
    assert {name: [sample.round for sample in all_s] for name, all_s in found.items()} == {EARLIER: [1], NOW: [1]}
    assert all(sample.wall_s > 0 for all_s in found.values() for sample in all_s)


def test_it_is_the_tree_that_runs_and_not_what_is_installed(tmp_path: Path) -> None:
    broken = tmp_path / "tree"
    (broken / "engine" / "cli").mkdir(parents=True)
    (broken / "engine" / "__init__.py").touch()
    (broken / "engine" / "cli" / "__init__.py").touch()
    (broken / "engine" / "cli" / "__main__.py").write_text("raise SystemExit('another tree')")
    with pytest.raises(ContestantError, match="another tree"):
        program(broken, tmp_path / sys.platform).run("--version")

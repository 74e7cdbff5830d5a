"""Every use case, stopped at each of its effects in the store, with answers that are lost or late (design 0007)."""

from pathlib import Path

import pytest

from index.snapshot.codec import decode_index
from index.snapshot.model import IndexDelta
from tests.simulation.faults.store_effects import Stage, Variant, run_pairs, run_singles
from tests.simulation.model.processes import PREFIX, Kind
from tests.simulation.scenarios.use_cases import CASES

# A restore makes two requests that change anything; what it does to files is the bulk.
PAIRED = [case for case, shown in CASES.items() if not shown.changes_files]
# `make test` takes a few, the same in every run, with one kind of store each; `make soak` takes all there are.
SHARES = [
    pytest.param(case, kind, share, id=f"{case}-{kind}-{name}", marks=marks)
    for number, case in enumerate(CASES)
    for at, kind in enumerate(("s3", "direct"))
    for share, name, marks in ((24, "share", ()), (1, "all", pytest.mark.soak))
    if share == 1 or number % 2 == at
]
PAIR_SHARES = [
    *(pytest.param(case, "s3", 100, id=f"{case}-share") for case in ("commit", "settle", "collect")),
    *(
        pytest.param(case, kind, 1, id=f"{case}-{kind}-all", marks=pytest.mark.soak)
        for case in PAIRED
        for kind in ("s3", "direct")
    ),
]


@pytest.mark.parametrize("case, kind, share", SHARES)
def test_stopped_at_any_effect_nothing_is_lost_and_nothing_leaks(
    case: str, kind: Kind, share: int, fast_directory: Path
) -> None:
    outcome = run_singles(case, fast_directory, kind, share=share)
    assert outcome.failures == []
    assert outcome.effects > 0


@pytest.mark.parametrize("share", [pytest.param(80, id="share"), pytest.param(1, id="all", marks=pytest.mark.soak)])
def test_a_backup_in_parts_is_stopped_and_nothing_leaks(share: int, fast_directory: Path) -> None:
    outcome = run_singles("backup", fast_directory, "parts", share=share)
    assert outcome.failures == []
    assert outcome.effects > 20


@pytest.mark.parametrize("case, kind, share", PAIR_SHARES)
def test_stopped_twice_nothing_is_lost_and_nothing_leaks(
    case: str, kind: Kind, share: int, fast_directory: Path
) -> None:
    outcome = run_pairs(case, fast_directory, kind, share=share)
    assert outcome.failures == []


def test_the_backup_that_is_stopped_packs_again_and_writes_a_delta(fast_directory: Path) -> None:
    snapshot = Stage("commit", fast_directory, "direct").snapshot
    (result,) = snapshot.results
    assert result.stats.files_repacked > 0
    key = result.reference.index.key
    assert isinstance(decode_index(snapshot.objects[f"{PREFIX}/{key}"].data, subject=key), IndexDelta)


def test_an_effect_has_its_number_in_every_run(fast_directory: Path) -> None:
    stage = Stage("settle", fast_directory, "s3")
    first, again = (stage.strike((0, Variant.BEFORE))[0].effects for _ in range(2))
    assert first == again
    assert stage.strike((5, Variant.BEFORE))[0].effects == first[:5]

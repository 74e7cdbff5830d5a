"""Every use case, stopped at each of its effects in the store, with answers that are lost or late (design 0007)."""

from pathlib import Path

import pytest

from index.codec import decode_index
from index.model import IndexDelta
from tests.simulation.effects import Stage, Variant, run_pairs, run_singles
from tests.simulation.processes import PREFIX, Kind
from tests.simulation.use_cases import CASES

# A restore makes two requests that change anything; what it does to files is the bulk.
PAIRED = [case for case, told in CASES.items() if not told.changes_files]
# `make test` takes a few, the same in every run; `make soak` takes all there are.
SHARES = [pytest.param(16, id="share"), pytest.param(1, id="all", marks=pytest.mark.soak)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", ["s3", "direct"])
@pytest.mark.parametrize("case", CASES)
def test_stopped_at_any_effect_nothing_is_lost_and_nothing_leaks(
    case: str, kind: Kind, share: int, fast_directory: Path
) -> None:
    outcome = run_singles(case, fast_directory, kind, share=share)
    assert outcome.failures == []
    assert outcome.effects > 0


@pytest.mark.parametrize("share", [pytest.param(60, id="share"), pytest.param(1, id="all", marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", PAIRED)
def test_stopped_twice_nothing_is_lost_and_nothing_leaks(case: str, share: int, fast_directory: Path) -> None:
    outcome = run_pairs(case, fast_directory, "s3", share=share)
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

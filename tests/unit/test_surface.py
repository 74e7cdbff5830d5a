"""What users of the command line rely on is the same as before, unless a change was meant."""

from pathlib import Path
from typing import Final

from tests.unit.surface import describe

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "surface.txt"
HOW: Final = "if it was meant: python -m tests.unit.surface > tests/golden/surface.txt, and the changelog"


def test_verbs_codes_fields_and_metrics_are_those_that_were_promised() -> None:
    assert list(describe()) == GOLDEN.read_text().splitlines(), HOW

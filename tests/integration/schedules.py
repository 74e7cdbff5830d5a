"""The five fields of a schedule, as cron and Kubernetes read them."""

import re
from typing import Final

_RANGES: Final = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_PART: Final = re.compile(r"(?:\*|(\d+)(?:-(\d+))?)(?:/(\d+))?")


def check_schedule(text: str) -> None:
    """Raises AssertionError if a field is none, or out of its range."""
    fields = text.split()
    assert len(fields) == len(_RANGES), text
    for field, (least, most) in zip(fields, _RANGES, strict=True):
        for part in field.split(","):
            match = _PART.fullmatch(part)
            assert match is not None, f"{part} in {text}"
            assert all(least <= int(number) <= most for number in match.groups()[:2] if number is not None), text
            assert match[3] is None or int(match[3]) > 0, text

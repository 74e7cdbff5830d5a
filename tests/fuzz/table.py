"""Every target, by name; and the parsers that have none, each with its reason (design 0010, H9)."""

from typing import Final

from tests.fuzz import answers, stored, streams
from tests.fuzz.target import Target

TARGETS: Final[dict[str, Target]] = {
    target.name: target for target in (*stored.TARGETS, *streams.TARGETS, *answers.TARGETS)
}

_FETCHES: Final = "fetches bytes and gives them to a decoder that is fuzzed"
_OURS: Final = "reads what another part of the same run has sent or written a moment ago, never a store"

# Functions whose names say that they read something, by module and name.
UNFUZZED: Final[dict[str, str]] = {}

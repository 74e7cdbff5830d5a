"""Every target, by name; and the parsers that have none, each with its reason (design 0010, H9)."""

from typing import Final

from tests.fuzz import answers, stored, streams, tables
from tests.fuzz.target import Target

_MODULES: Final = (stored, streams, tables, answers)
TARGETS: Final[dict[str, Target]] = {target.name: target for module in _MODULES for target in module.TARGETS}
# The module that each stands in.
MODULES: Final = {
    target.name: module.__name__.rpartition(".")[2] for module in _MODULES for target in module.TARGETS
}

# Functions whose names say that they read something, by module and name.
UNFUZZED: Final[dict[str, str]] = {}

"""What a check of a checkpoint finds (design 0005, section 4), in a form that can be printed and sent."""

from collections.abc import Iterable
from typing import ClassVar, Final, Literal

import msgspec

from engine.errors import DamagedError, EngineError, UsageError, bare_message
from index.display import DisplayMixin
from index.errors import FormatError

# Damage: something committed is missing, or not what was written. A warning: it will become that, or it cannot be
# decided.
FindingKind = Literal["damage", "warning"]
CheckLevel = Literal["quick", "full"]

MEND_HINT: Final = "take the file from a backup, or restore the checkpoint"
# About a `.crc` beside a name without an id.
MISFIT_HINT: Final = "compare both with a backup, and delete the .crc if its file is right: Spark 4.1 reads neither"
# Hints that fit a repository, or an error with a cause.
_OF_A_REPOSITORY: Final = frozenset(
    {EngineError.default_hint, DamagedError.default_hint, UsageError.default_hint, FormatError("").hint}
)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with one file, or with what a directory should hold."""

    kind: FindingKind
    # In the checkpoint: `state/0/3/SSTs/000008-….sst`.
    path: str
    message: str
    # What to do.
    hint: str
    # The rule of design 0005 that it breaks, such as "K3".
    rule: str


class Findings:
    """What was found so far in a checkpoint, or in one directory of it, `root`, from which paths are noted."""

    def __init__(self, root: str = "") -> None:
        self._root = root
        # In the order in which it was noted.
        self.found: list[Finding] = []
        # The paths that a finding of damage is about; of one file the first counts.
        self.damaged: set[str] = set()

    def damage(self, path: str, error: EngineError | FormatError, rule: str, *, note: str = "") -> None:
        """Note the error that a file has raised by its path: what the error names may be a copy on this machine."""
        if path in self.damaged:
            return
        self.damaged.add(path)
        message = bare_message(error)
        hint = MEND_HINT if error.hint in _OF_A_REPOSITORY else error.hint
        self._add("damage", path, f"{message}; {note}" if note else message, hint, rule)

    def warn(self, path: str, message: str, hint: str, rule: str) -> None:
        self._add("warning", path, message, hint, rule)

    def _add(self, kind: FindingKind, path: str, message: str, hint: str, rule: str) -> None:
        path = "/".join(filter(None, (self._root, path)))
        self.found.append(Finding(kind=kind, path=path, message=message, hint=hint, rule=rule))


def damaged_paths(findings: Iterable[Finding]) -> tuple[str, ...]:
    """List the files that have damage, each once."""
    return tuple(sorted({finding.path for finding in findings if finding.kind == "damage"}))


class StoreChecked(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one state store."""

    findings: tuple[Finding, ...] = ()
    # Committed versions that can be put together, and those that retention has taken.
    versions: int = 0
    versions_gone: int = 0
    # Files that were read, each once.
    files: int = 0
    size_bytes: int = 0
    ssts: int = 0
    blocks: int = 0
    # Of the newest version's base, counted; -1 if not counted.
    keys: int = -1


class CheckReport(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """What came of a checkpoint."""

    json_properties: ClassVar = {"sound": "is_sound", "damaged": "damaged", "warnings": "warnings"}

    location: str
    level: CheckLevel
    # Empty if `metadata` does not say.
    query_id: str
    # The oldest and the newest committed batch, and how many there are; -1 where there is none.
    oldest_batch: int
    newest_batch: int
    batches: int
    stores: int
    findings: tuple[Finding, ...]
    versions: int
    versions_gone: int
    files: int
    size_bytes: int
    ssts: int
    blocks: int
    keys: int
    seconds: float

    def of_kind(self, kind: FindingKind) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.kind == kind)

    @property
    def is_sound(self) -> bool:
        return not self.of_kind("damage")

    @property
    def damaged(self) -> int:
        return len(self.of_kind("damage"))

    @property
    def warnings(self) -> int:
        return len(self.of_kind("warning"))

"""What a restore drill measures, as the history stores it (design 0009, H1 and H2)."""

from typing import Annotated, Final

import msgspec
from typing_extensions import override

from index.display import DisplayMixin, format_files, format_seconds
from index.snapshot.model import Scope
from index.text import iso_time, printable

SCHEMA: Final = 1
# Of an error, so that a line of the history keeps within its cap.
MESSAGE_LENGTH_MAX: Final = 1000

# A finite number of seconds: JSON has no other infinities than those that overflow.
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Count what a restore moved."""

    # GETs of indexes and blobs, and their bytes as asked for.
    requests_count: Count
    bytes_fetched: Count
    # RocksDB databases that were opened.
    opened_count: Count


class Rehearsal(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="done"):
    """One restore drill that came to its end. Seconds of phases are wall time; removing the files is not in them."""

    schema: int = SCHEMA
    # By this machine's clock: for people.
    began_at_ms: Count
    release: str
    repository_id: str
    job: str
    # None: the job commits as a whole.
    task: str | None
    commit_number: Count
    version: Count
    # False: no pin could be written.
    pinned: bool
    # False: everything was read and hashed, and nothing written.
    to_disk: bool
    # The directory, if it is still there: it was kept, or could not be removed.
    kept_at: str = ""
    stores_at_once: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    stores_count: Count
    files_count: Count
    size_bytes: Count
    largest_store_bytes: Count
    # Finding and pinning the commit; bringing back all its stores; opening what of it is RocksDB.
    find_s: Amount
    restore_s: Amount
    open_s: Amount
    measured: Measured
    slo_ms: Count | None = None

    @override
    def figures(self) -> dict[str, str]:
        """How long it took, and of what."""
        told = {
            "of": printable(str(Scope(self.job, self.task))),
            "commit": f"{self.commit_number:,}",
            "time": format_seconds(self.total_s),
            "files": format_files(self.files_count, self.size_bytes),
            "stores": f"{self.stores_count:,}",
            "to": "disk" if self.to_disk else "nowhere",
            "SLO": "" if self.slo_ms is None else "missed" if self.is_slow else "met",
            "finding": format_seconds(self.find_s),
            "restoring": format_seconds(self.restore_s),
            "opening": format_seconds(self.open_s) if self.measured.opened_count else "",
            "began": iso_time(self.began_at_ms),
        }
        return {name: text for name, text in told.items() if text}

    @property
    def total_s(self) -> float:
        """What somebody who waits for the state would have waited."""
        return self.find_s + self.restore_s + self.open_s

    @property
    def is_slow(self) -> bool:
        """Whether it took longer than it may."""
        return self.slo_ms is not None and self.total_s * 1000 > self.slo_ms


class FailedRehearsal(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="failed"):
    """One rehearsal that an error ended: the state could not have been restored then."""

    schema: int = SCHEMA
    began_at_ms: Count
    release: str
    repository_id: str
    job: str
    task: str | None
    # The class of the error, and what it says.
    error: str
    message: str


Entry = Rehearsal | FailedRehearsal

"""What a report is made of."""

from collections.abc import Mapping

import msgspec
from typing_extensions import override

from engine.collect.report import CollectReport
from engine.drill.record import Entry
from engine.inspect.history import History
from engine.inspect.verify import VerifyReport
from index.display import DisplayMixin
from index.errors import FormatError
from index.plan.plan_format import AuditRecord
from index.snapshot.model import Scope


class Suspects(msgspec.Struct, frozen=True, kw_only=True):
    """Blobs of a job that no record which can be read leads to: a damaged one may be all that names them."""

    scope: Scope
    # The records that cannot be read, and why.
    records: tuple[tuple[str, str], ...]
    count: int
    size_bytes: int
    # The first few.
    keys: tuple[str, ...]
    # Why they could not be looked for; empty if they were.
    hidden: str = ""


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One job, or one task that commits by itself."""

    scope: Scope
    history: History
    # Its rehearsals in this repository, the oldest first.
    rehearsals: tuple[Entry, ...] = ()


class ReportFacts(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """Everything that stands on the page."""

    repository_id: str
    location: str
    release: str
    # By the store's clock.
    made_at_ms: int
    jobs: tuple[JobFacts, ...]
    # Jobs that there are beside these.
    jobs_left_out: int = 0
    # Where the history of rehearsals was looked for; empty: nowhere. Lines of it that cannot be read.
    rehearsals_from: str = ""
    rehearsals_broken: tuple[FormatError, ...] = ()
    # The newest, the oldest of them first, and how many there are.
    audits: tuple[AuditRecord, ...] = ()
    audits_count: int = 0
    audits_broken: tuple[str, ...] = ()
    # What a collection would do now; None: `plan_missing` says why nobody has asked.
    plan: CollectReport | None = None
    plan_missing: str = ""
    # None: `verify_missing` says why.
    verified: VerifyReport | None = None
    verify_missing: str = ""
    suspects: tuple[Suspects, ...] = ()
    # Requests that the report took, by operation.
    requests: Mapping[str, int] = {}

    @property
    def risks_count(self) -> int:
        """Blobs, indexes and records that are missing, damaged or still have a TTL."""
        problems = len(self.verified.problems) if self.verified is not None else 0
        return problems + sum(len(suspects.records) for suspects in self.suspects)

    @override
    def figures(self) -> dict[str, str]:
        """How many jobs and commits, and whether anything is at risk."""
        told = {
            "jobs": f"{len(self.jobs):,}",
            "commits": f"{sum(len(job.history.entries) for job in self.jobs):,}",
            "at risk": f"{self.risks_count:,}",
            "collections": f"{self.audits_count:,}",
            "requests": f"{sum(self.requests.values()):,}",
        }
        return {name: text for name, text in told.items() if text}

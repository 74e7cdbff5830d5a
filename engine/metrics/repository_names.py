"""The metrics of a repository's condition, as `tidemark metrics` reads it. All are gauges."""

from typing import Final

from engine.metrics.model import PREFIX, Metric

_SCOPE: Final = ("job_name", "task")


def _gauge(name: str, text: str, labels: tuple[str, ...] = (), *, samza: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"{PREFIX}{name}", kind="gauge", help=text, labels=labels, samza=samza)


REPOSITORY_METRICS: Final = (
    _gauge(
        "repository_up", "1: the repository could be read; 0: all else is what the last reading that went well found."
    ),
    _gauge("repository_read_timestamp_seconds", "When the last reading that went well began, by the store's clock."),
    _gauge("repository_read_seconds", "How long it took."),
    _gauge("repository_ttl_seconds", "How long an upload lives that no commit takes over."),
    _gauge("repository_collection_period_seconds", "How often collect is meant to run."),
    _gauge("last_commit_number", "Number of the newest commit.", _SCOPE),
    _gauge("last_commit_version", "Its version.", _SCOPE),
    _gauge(
        "last_commit_timestamp_seconds",
        "When it was made, by the store's clock.",
        _SCOPE,
        samza=("last-async-commit-timestamp",),
    ),
    _gauge("last_commit_age_seconds", "Seconds from the last good commit to the reading.", _SCOPE),
    _gauge("last_commit_bytes", "Bytes of the files of all its stores.", _SCOPE),
    _gauge("last_commit_files", "Their files.", _SCOPE),
    _gauge("last_commit_stores", "Its stores.", _SCOPE),
    _gauge("commits", "Commits that can be restored, those that only names hold included.", _SCOPE),
    _gauge("repository_bytes", "Bytes of all blobs and indexes."),
    _gauge("repository_live_bytes", "Bytes retained: those that a commit, a name or a reader needs."),
    _gauge("repository_live_objects", "Blobs and indexes retained."),
    _gauge(
        "orphan_bytes",
        "Bytes that nothing needs: state=waiting until they are a TTL old, expired until a collection comes; "
        "unfinished: of files that are being written, or that a killed writer has left (S3 does not tell).",
        ("state",),
    ),
    _gauge("orphan_objects", "Blobs and indexes that nothing needs, and unfinished ones.", ("state",)),
    _gauge(
        "blobs_at_risk",
        "Blobs and indexes that commits need: with a TTL still set (reason=ttl), or missing or too short (damaged).",
        ("reason",),
    ),
    _gauge("verification_failures", "Problems that the reading found, as `verify` does, by kind.", ("kind",)),
    _gauge(
        "last_collection_timestamp_seconds", "When the last collection that deleted what it meant to began; 0: none."
    ),
    _gauge("last_collection_seconds", "How long it took."),
    _gauge("last_collection_deleted_bytes", "Bytes that it freed."),
    _gauge("collections_failed", "Collections since then that failed or were refused."),
)

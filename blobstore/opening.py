"""From a URL and settings to a store in its wrappers.

```
file:///absolute/path    a directory; the path may be percent-encoded
/absolute/path  ./path   the same, as a shell completes it; anything without a scheme
memory://name            in this process: every opening of one name sees the same blobs
s3://bucket/prefix       a bucket of an S3-compatible store, or what is below a prefix of it
```

A URL has no user, password, query or fragment: credentials come from the environment, settings from `StoreSettings`.
An error names the scheme of a URL and never the rest, which may hold a secret that was put there by mistake.
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from blobstore.base import BlobStore
from blobstore.errors import InvalidRequestError
from blobstore.local.store import LocalStore
from blobstore.memory import MemoryStore
from blobstore.s3.settings import S3Settings
from blobstore.wrappers.forwarding import (
    InFlightLimit,
    LimitedStore,
    Meter,
    MeteredStore,
    PacedStore,
    one_line,
    shared_bandwidth,
)
from blobstore.wrappers.retry import HedgedStore, HedgeSettings, RetryingStore, RetrySettings

if TYPE_CHECKING:
    from blobstore.s3.store import S3Store

_LOG: Final = logging.getLogger(__name__)
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_MEMORY_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_HINT: Final = "use s3://bucket/prefix, file:///absolute/path, a path, or memory://name"
_DBFS: Final = Path("/dbfs")
# What comes before or after a secret in a URL.
_DOUBTFUL: Final = frozenset("@?#")
# What Spark opens and nothing here does.
_FOREIGN: Final = {
    "gs": "Google's storage speaks S3 too: s3://BUCKET/PREFIX with --endpoint-url https://storage.googleapis.com",
    "hdfs": "mount it (an HDFS NFS gateway or FUSE) and give the path, or copy it with `hdfs dfs -get`",
    "abfss": "mount it (blobfuse2) and give the path, or copy it with azcopy",
}
_FOREIGN_LIKE: Final = {
    **dict.fromkeys(("abfs", "adl", "wasb", "wasbs"), "abfss"),
    **dict.fromkeys(("viewfs", "webhdfs"), "hdfs"),
}

# The floor under a single transfer (`RetrySettings.bytes_per_s_min`): with less, not even one would be above it.
BYTES_PER_S_MIN: Final = 64 * 1024

# A server that says nothing at all has failed within a minute; a directory may be a disk that is busy for longer.
_SERVER_ANSWERS_WITHIN_S: Final = (10.0, 18.0, 30.0)

# The stores of `memory://`, for as long as the process lives.
_memory_stores: dict[str, MemoryStore] = {}


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of any blob store."""

    # Requests under way at once, while the store does not ask for less.
    in_flight_max: int = 16
    # Bytes per second, sent and fetched, of all stores of the process with the same limit; 0: no limit.
    bytes_per_s_max: int = 0
    retry: RetrySettings = RetrySettings()
    # How long a directory store keeps deleted blobs readable.
    deleted_retention_ms: int = 0
    # When a read of a server, or the put of a pin, is sent a second time, unless `s3.hedged_reads` is switched off.
    hedge: HedgeSettings = HedgeSettings()
    s3: S3Settings = S3Settings()

    def __post_init__(self) -> None:
        if self.bytes_per_s_max and self.bytes_per_s_max < BYTES_PER_S_MIN:
            message = f"a limit of {self.bytes_per_s_max} bytes per second is less than {BYTES_PER_S_MIN}"
            raise InvalidRequestError(message, operation="open")


def open_store(
    url: str,
    settings: StoreSettings | None = None,
    *,
    meter: Meter | None = None,
    rng: Callable[[], float] | None = None,
    on_silence: Callable[[float], None] | None = None,
) -> BlobStore:
    """Open a store in all its wrappers, as `wrap_store`.

    Raises:
        InvalidRequestError: The URL does not follow the grammar or holds credentials.
    """
    settings = settings or StoreSettings()
    bare = open_bare(url, settings)
    # Only now: a URL that follows the grammar holds no credentials. A path has none, and may be a URL misspelt.
    is_doubtful = local_path_of(url) is not None and not _DOUBTFUL.isdisjoint(url)
    place = "a directory" if is_doubtful else one_line(url)
    _LOG.debug("open %s: %d requests at once, %s", place, settings.in_flight_max, settings.retry)
    return wrap_store(bare, settings, meter=meter, rng=rng, on_silence=on_silence)


def wrap_store(
    bare: BlobStore,
    settings: StoreSettings | None = None,
    *,
    meter: Meter | None = None,
    rng: Callable[[], float] | None = None,
    on_silence: Callable[[float], None] | None = None,
) -> BlobStore:
    """Put a store that does not try again by itself into all wrappers.

    From the outside in: `PacedStore`, where there is a limit on bytes per second, so that to all others a reader that
    is held up is not a slow store; `LimitedStore`, so that a request that waits to be repeated keeps its place and a
    store that asks for less gets less, and so that a wait in the queue is not part of a deadline; `RetryingStore`,
    which passes what the store asks for to the limit; for a server, `HedgedStore`, so that both of two requests are one
    attempt; `MeteredStore`, which so counts every request; the store.

    `rng` and `on_silence` are those of `RetryingStore`.
    """
    settings = settings or StoreSettings()
    meter = meter or Meter()
    store: BlobStore = MeteredStore(bare, meter)
    is_server = not isinstance(bare, LocalStore | MemoryStore)
    if settings.s3.hedged_reads and is_server:
        store = HedgedStore(store, settings.hedge)
    rate = settings.bytes_per_s_max
    in_flight_max, retry = slowed(settings) if rate else (settings.in_flight_max, settings.retry)
    limit = InFlightLimit(in_flight_max)
    if is_server and not retry.answers_within_s:
        retry = msgspec.structs.replace(retry, answers_within_s=_SERVER_ANSWERS_WITHIN_S)
    store = RetryingStore(store, retry, limit=limit, rng=rng, on_retry=meter.count_retry, on_silence=on_silence)
    store = LimitedStore(store, limit)
    return PacedStore(store, shared_bandwidth(rate), paces_bodies=not is_server) if rate else store


def slowed(settings: StoreSettings) -> tuple[int, RetrySettings]:
    """Return the requests in flight and the retry settings under a limit on the bytes per second.

    Each of the requests needs a share of the limit that is above the floor, which separates a slow store from one
    that does not answer, and the floor is half of that at most.
    """
    floor = settings.retry.bytes_per_s_min
    in_flight_max = max(1, min(settings.in_flight_max, settings.bytes_per_s_max // floor))
    share = max(1, settings.bytes_per_s_max // (2 * in_flight_max))
    return in_flight_max, msgspec.structs.replace(settings.retry, bytes_per_s_min=min(floor, share))


def open_s3(url: str, settings: StoreSettings | None = None, *, bound_by_profile: bool = True) -> "S3Store":
    """Open an S3 store without any wrapper, to see what it does by itself; errors as `open_store`."""
    if local_path_of(url) is not None or (parts := _split(url)).scheme != "s3":
        raise _refused("", "is not an S3 store", hint="only s3://bucket/prefix has this")
    # Here: a program without S3 does not wait for its libraries.
    from blobstore.s3.store import S3Store  # noqa: PLC0415

    prefix = parts.path.removeprefix("/").removesuffix("/")
    settings = settings or StoreSettings()
    hedge = settings.hedge if settings.s3.hedged_reads else None
    bandwidth = shared_bandwidth(settings.bytes_per_s_max) if settings.bytes_per_s_max else None
    return S3Store(
        parts.netloc, prefix, settings.s3, bound_by_profile=bound_by_profile, hedge=hedge, bandwidth=bandwidth
    )


def check_url(url: str) -> None:
    """Refuse a URL that `open_store` would refuse, as far as its text shows; a bucket's name is for S3 to check."""
    if local_path_of(url) is None:
        _split_remote(url)


def local_path_of(location: str | Path) -> Path | None:
    """Return the directory of this machine that a path or a `file:` URL names; None for a URL of another scheme.

    `file:/path` is the form in which Hadoop and Spark print a path, without escapes. `dbfs:/path` is the path below the
    mount that Databricks makes. A text that begins with `~` is refused: a shell would have read it.
    """
    if isinstance(location, Path):
        return location
    if location.startswith("~"):
        hint = "write the path, or ./ before it if that is its name"
        raise _refused("", "the path begins with ~, as only shells read", hint=hint)
    scheme = _SCHEME.match(location)
    if scheme is None:
        if not location:
            raise _refused("", "the URL is empty")
        return Path(location)
    name, rest = scheme[1].lower(), location[scheme.end() :]
    if name == "dbfs" and rest.startswith("/"):
        if not _DBFS.is_dir():
            raise _refused(name, f"{_DBFS} is not mounted on this machine", hint="run it on the cluster's driver")
        return _DBFS / rest.lstrip("/")
    if name != "file":
        return None
    if rest.startswith("/") and not rest.startswith("//") and "\0" not in rest:
        return Path(rest)
    parts = _split(location)
    path = unquote(parts.path)
    if parts.netloc not in {"", "localhost"} or not path.startswith("/") or "\0" in path:
        raise _refused("file", "the URL does not name an absolute path of this machine")
    return Path(path)


def open_bare(url: str, settings: StoreSettings | None = None) -> BlobStore:
    """Open a store without any wrapper; errors as `open_store`."""
    settings = settings or StoreSettings()
    path = local_path_of(url)
    if path is not None:
        return LocalStore(path, deleted_retention_ms=settings.deleted_retention_ms)
    parts = _split_remote(url)
    if parts.scheme == "s3":
        return open_s3(url, settings)
    return _memory_stores.setdefault(parts.netloc, MemoryStore())


def _split_remote(url: str) -> SplitResult:
    parts = _split(url)
    if parts.scheme not in {"memory", "s3"}:
        raise _refused(parts.scheme, "there is no blob store of this scheme")
    if parts.scheme == "memory" and (parts.path or not _MEMORY_NAME.fullmatch(parts.netloc)):
        raise _refused("memory", "the URL is not memory:// and a name of letters, digits, `_`, `.` and `-`")
    return parts


def _split(url: str) -> SplitResult:
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    if hint := _FOREIGN.get(_FOREIGN_LIKE.get(scheme, scheme)):
        raise _refused(scheme, "there is no blob store of this scheme", hint=hint)
    if not url[len(scheme) :].startswith("://"):
        raise _refused(scheme, "the scheme is not followed by `://`")
    try:
        parts = urlsplit(url)
    except ValueError:
        # Its message repeats a part of the URL.
        raise _refused(scheme, "the URL cannot be read") from None
    # A secret with a slash in it ends the host too early: the `:` stays before the slash, the `@` behind it.
    if "@" in parts.netloc or (":" in parts.netloc and "@" in parts.path):
        hint = "take them out, and change them if they are real: URLs get logged"
        raise _refused(scheme, "the URL holds credentials", hint=hint)
    if parts.query or parts.fragment:
        raise _refused(scheme, "the URL has a query or a fragment")
    return parts


def _refused(scheme: str, message: str, *, hint: str = _HINT) -> InvalidRequestError:
    return InvalidRequestError(message, operation="open", key=f"{scheme}://" if scheme else "", hint=hint)

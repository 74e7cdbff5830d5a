"""The key layout of a repository: one grammar, both directions (design 0001, K1 to K6; 0006).

```
repository                                        the repository record
blobs/<shard>/<scope>/<session>-<counter>         file bytes, packs
indexes/<shard>/<scope>/<session>-<counter>       snapshot indexes
log/<scope>/<number>.commit                       commit records
log/<scope>/<number>.boundary                     boundaries
names/<scope>/<name>/<id>                         namings
pins/<id>                                         pins
runs/<run>/<name>                                 what a collection at work has written down (design 0006, R2)
audit/<run>                                       what a collection did (design 0006, A1)
```

Records and boundaries of a scope share one prefix and sort by number, so that one LIST from a number on answers every
question that a writer has before it acknowledges (design 0002, C4).

The `parse_` functions take a key apart. They, and those that make or decode a key, raise UnsafeNameError for what is
not of its form. Ids of namings and pins are 20 lower-case hexadecimal digits.
"""

import contextlib
import functools
import re
import zlib
from typing import Final, NewType

import msgspec

from index.errors import UnsafeNameError
from index.snapshot.model import BlobKey, Scope

REPOSITORY: Final = "repository"
BLOBS: Final = "blobs/"
INDEXES: Final = "indexes/"
LOG: Final = "log/"
NAMES: Final = "names/"
PINS: Final = "pins/"
RUNS: Final = "runs/"
AUDIT: Final = "audit/"
# Everything else of a repository is below one of these.
PREFIXES: Final = (BLOBS, INDEXES, LOG, NAMES, PINS, RUNS, AUDIT)

SHARDS_COUNT: Final = 256
COMPONENT_BYTES_MAX: Final = 200
# A directory store makes a directory of it, and file systems stop at 255.
SCOPE_BYTES_MAX: Final = 240
FILE_NAME_BYTES_MAX: Final = 255
NUMBER_DIGITS: Final = 20
COUNTER_DIGITS_MIN: Final = 6

_SAFE = re.compile(r"[A-Za-z0-9_.-]")
_ESCAPED = re.compile(r"(?:~[0-9A-F]{2})+")
# File names of which nothing else is asked.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")
_SESSION = r"[0-9a-f]{20}"
# Coarse on purpose, because it is tried on every key of an index: `decode_component` knows what is well formed.
_COMPONENT = r"[A-Za-z0-9_.@~-]+"
_UPLOAD = re.compile(
    rf"(?P<prefix>blobs|indexes)/(?P<shard>[0-9a-f]{{2}})/(?P<scope>{_COMPONENT})"
    rf"/(?P<tail>(?P<session>{_SESSION})-(?P<counter>0[0-9a-f]{{5}}|[1-9a-f][0-9a-f]{{5,11}}))"
)
_LOG = re.compile(rf"log/(?P<scope>{_COMPONENT})/(?P<number>[0-9]{{{NUMBER_DIGITS}}})\.(?P<kind>commit|boundary)")
_NAME = re.compile(rf"names/(?P<scope>{_COMPONENT})/(?P<name>{_COMPONENT})/(?P<id>{_SESSION})")
_PIN = re.compile(rf"pins/(?P<id>{_SESSION})")
_RUN_ID = rf"[0-9]{{{NUMBER_DIGITS}}}-{_SESSION}"
_RUN = re.compile(rf"runs/(?P<run>{_RUN_ID})/(?P<name>[a-z0-9][a-z0-9.-]{{0,99}})")
_AUDIT = re.compile(rf"audit/(?P<run>{_RUN_ID})")

# One collection: 20 digits of the store's milliseconds, a hyphen, 20 random hexadecimal digits. Runs sort by time.
RunId = NewType("RunId", str)

# Each part costs at most one request more than its share of the whole list: a quarter at this size.
PAGES_PER_RANGE: Final = 4


class UploadKey(msgspec.Struct, frozen=True):
    """A parsed key of a blob or an index."""

    prefix: str
    scope: Scope
    session: str
    counter: int


class LogKey(msgspec.Struct, frozen=True, order=True):
    """A parsed key of a commit record or a boundary."""

    number: int
    kind: str
    scope: Scope


@functools.lru_cache(maxsize=4096)
def encode_component(name: str) -> str:
    """Encode a name of any alphabet as one key component; `~XX` is a byte outside `A-Za-z0-9_.-`; cached.

    A leading dot is encoded too, so that no component is hidden, `.` or `..`. A name is refused if it is empty, is not
    valid Unicode, or is longer than 200 bytes when encoded.
    """
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        raise UnsafeNameError("is not valid Unicode", subject=repr(name), hint="rename it") from None
    encoded = "".join(chr(b) if _SAFE.match(chr(b)) else f"~{b:02X}" for b in raw)
    if encoded.startswith("."):
        encoded = f"~2E{encoded[1:]}"
    if not 0 < len(encoded) <= COMPONENT_BYTES_MAX:
        reason = f"is empty or longer than {COMPONENT_BYTES_MAX} bytes once encoded"
        raise UnsafeNameError(reason, subject=repr(name), hint="choose a shorter name")
    return encoded


def decode_component(component: str) -> str:
    """Invert `encode_component`."""
    with contextlib.suppress(UnicodeDecodeError, UnsafeNameError):
        name = _ESCAPED.sub(lambda m: bytes.fromhex(m[0].replace("~", "")).decode(), component)
        if encode_component(name) == component:
            return name
    raise UnsafeNameError("is not a component that tidemark writes", subject=repr(component))


def encode_scope(scope: Scope) -> str:
    """Encode a scope as one key component, of at most 240 bytes: the job, and `@` and the task where there is one."""
    job = encode_component(scope.job)
    encoded = job if scope.task is None else f"{job}@{encode_component(scope.task)}"
    if len(encoded) > SCOPE_BYTES_MAX:
        reason = f"is longer than {SCOPE_BYTES_MAX} bytes once encoded"
        raise UnsafeNameError(reason, subject=repr(str(scope)), hint="choose a shorter job or task name")
    return encoded


@functools.lru_cache(maxsize=4096)
def decode_scope(component: str) -> Scope:
    """Invert `encode_scope`; cached, because every key of an index repeats it."""
    job, at, task = component.partition("@")
    scope = Scope(decode_component(job), decode_component(task) if at else None)
    if len(component) > SCOPE_BYTES_MAX:
        raise UnsafeNameError("is not a scope that tidemark writes", subject=repr(component))
    return scope


def upload_key(prefix: str, scope: Scope, session: str, counter: int) -> BlobKey:
    """Return the key of the `counter`-th upload of a session; `prefix` is `BLOBS` or `INDEXES`.

    The shard spreads uploads over 256 prefixes and follows from session and counter alone (design 0002, K2).
    """
    tail = f"{session}-{counter:0{COUNTER_DIGITS_MIN}x}"
    shard = zlib.crc32(tail.encode()) & 0xFF
    return BlobKey(f"{prefix}{shard:02x}/{encode_scope(scope)}/{tail}")


def parse_upload_key(key: str) -> UploadKey:
    """Take a blob or index key apart; one whose shard does not follow from it is refused."""
    m = _take_apart(_UPLOAD, key, "the key of a blob or an index")
    prefix, shard, scope, tail, session, counter = m.groups()
    if zlib.crc32(tail.encode()) & 0xFF != int(shard, 16):
        raise UnsafeNameError("has a shard that no upload has", subject=repr(key))
    return UploadKey(f"{prefix}/", decode_scope(scope), session, int(counter, 16))


def _take_apart(grammar: re.Pattern[str], key: str, what: str) -> re.Match[str]:
    m = grammar.fullmatch(key)
    if m is None:
        raise UnsafeNameError(f"is not {what}", subject=repr(key))
    return m


def shard_prefixes(prefix: str) -> tuple[str, ...]:
    """Return the 256 prefixes that together hold every key of a prefix."""
    return tuple(f"{prefix}{shard:02x}/" for shard in range(SHARDS_COUNT))


def log_prefix(scope: Scope) -> str:
    """Return the prefix of a scope's records and boundaries."""
    return f"{LOG}{encode_scope(scope)}/"


def commit_key(scope: Scope, number: int) -> str:
    """Return the key of the record with this number."""
    return f"{log_prefix(scope)}{number:0{NUMBER_DIGITS}d}.commit"


def boundary_key(scope: Scope, number: int) -> str:
    """Return the key of the boundary with this number."""
    return f"{log_prefix(scope)}{number:0{NUMBER_DIGITS}d}.boundary"


def log_start_after(scope: Scope, number: int) -> str:
    """Return a `start_after` for a LIST of exactly the records and boundaries from `number` on."""
    return f"{log_prefix(scope)}{number:0{NUMBER_DIGITS}d}"


def parse_log_key(key: str) -> LogKey:
    """Take the key of a commit record or boundary apart."""
    m = _take_apart(_LOG, key, "the key of a commit record or boundary")
    return LogKey(int(m["number"]), m["kind"], decode_scope(m["scope"]))


def names_prefix(scope: Scope) -> str:
    """Return the prefix of every naming of a scope."""
    return f"{NAMES}{encode_scope(scope)}/"


def name_prefix(scope: Scope, name: str) -> str:
    """Return the prefix of every naming of one name in a scope."""
    return f"{names_prefix(scope)}{encode_component(name)}/"


def name_key(scope: Scope, name: str, naming_id: str) -> str:
    """Return the key of one naming, never used again (design 0002, K2)."""
    return _take_apart(_NAME, f"{name_prefix(scope, name)}{naming_id}", "the key of a name")[0]


def parse_name_key(key: str) -> tuple[Scope, str, str]:
    """Take the key of a naming apart: scope, name and id."""
    m = _take_apart(_NAME, key, "the key of a name")
    return decode_scope(m["scope"]), decode_component(m["name"]), m["id"]


def pin_key(pin_id: str) -> str:
    """Return the key of a pin."""
    return _take_apart(_PIN, f"{PINS}{pin_id}", "the key of a pin")[0]


def parse_pin_key(key: str) -> str:
    """Return the id of the pin that a key is of."""
    return _take_apart(_PIN, key, "the key of a pin")["id"]


def is_pin_key(key: str) -> bool:
    """Return whether a key is one of a pin."""
    return _PIN.fullmatch(key) is not None


def make_run_id(now_ms: int, random_id: str) -> RunId:
    """Make the id of a collection that begins now, by the store's clock; `random_id` is 20 hexadecimal digits."""
    return check_run_id(f"{now_ms:0{NUMBER_DIGITS}d}-{random_id}")


def check_run_id(run: str) -> RunId:
    """Return a run's id, once it is known to be one."""
    if re.fullmatch(_RUN_ID, run) is None:
        raise UnsafeNameError("is not the id of a run", subject=repr(run))
    return RunId(run)


def run_began_at_ms(run: RunId) -> int:
    """When a run began, by the store's clock."""
    return int(run[:NUMBER_DIGITS])


def run_prefix(run: RunId) -> str:
    """Return the prefix of all objects of a run."""
    return f"{RUNS}{run}/"


def run_key(run: RunId, name: str) -> str:
    """Return the key of one object of a run; the name is at most 100 of `a-z0-9.-`, such as `inventory-blobs-0a`."""
    return _take_apart(_RUN, f"{run_prefix(run)}{name}", "the key of an object of a run")[0]


def parse_run_key(key: str) -> tuple[RunId, str]:
    """Take the key of an object of a run apart: the run and the name."""
    m = _take_apart(_RUN, key, "the key of an object of a run")
    return RunId(m["run"]), m["name"]


def audit_key(run: RunId) -> str:
    """Return the key of the audit record of a run."""
    return f"{AUDIT}{check_run_id(run)}"


def parse_audit_key(key: str) -> RunId:
    """Return the run that an audit record is of."""
    return RunId(_take_apart(_AUDIT, key, "the key of an audit record")["run"])


def check_file_name(name: str) -> str:
    """Return a name from an index, once it is known to be one safe path component (design 0001, N1)."""
    if _PLAIN_NAME.fullmatch(name) is not None:
        return name
    hint = "the index is damaged or hostile; nothing was written"
    if name in {"", ".", ".."} or any(c in name for c in "/\\\0"):
        raise UnsafeNameError("is not a single path component", subject=repr(name), hint=hint)
    try:
        if len(name.encode()) > FILE_NAME_BYTES_MAX:
            raise UnsafeNameError(f"is longer than {FILE_NAME_BYTES_MAX} bytes", subject=repr(name), hint=hint)
    except UnicodeEncodeError:
        raise UnsafeNameError("is not valid Unicode", subject=repr(name), hint=hint) from None
    return name


class KeyRange(msgspec.Struct, frozen=True):
    """The keys of a prefix that sort after one key, up to and including another."""

    after: str
    # None: to the end.
    through: str | None = None

    def reaches(self, key: str) -> bool:
        return self.through is None or key <= self.through


def choose_list_ranges(prefix: str, reached: str) -> tuple[KeyRange, ...]:
    """Split the keys of a prefix that sort after one into ranges of a few pages, in order; one, if more do not pay.

    Uploads are spread evenly over the shards (design 0002, K2), so a first page shows about how many are left. The
    estimate decides how many ranges there are, and nothing else: whatever is where, shards or not, every key after
    `reached`, the last key of the first page, is in exactly one of them. A prefix without shards is not split.
    """
    inside = [cut for kind in (BLOBS, INDEXES) for cut in shard_prefixes(kind) if cut.startswith(prefix)]
    cuts = [cut for cut in inside if cut > reached]
    pages_left = len(cuts) / max(1, len(inside) - len(cuts))
    count = max(1, min(len(cuts), int(pages_left) // PAGES_PER_RANGE))
    ends = [cuts[position * len(cuts) // count] for position in range(1, count)]
    return tuple(KeyRange(after, through) for after, through in zip((reached, *ends), (*ends, None), strict=True))

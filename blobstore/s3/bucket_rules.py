"""What is set on a bucket beside its objects: lifecycle rules, and the least rights that each role needs. Pure.

The lifecycle rules of a repository are the backstop of design 0002, T3 and design 0003, L4. A rule is what the SDK
gives: a dict with `ID`, `Status`, `Filter` and what is to happen. Of a bucket's rules two are ours, known by their ids;
all others are passed on exactly as they were read.

Rights are an IAM policy. What each role calls follows from the use cases (design 0002, steps and cost): only a
collector deletes, a restorer writes nothing but pins, and a TTL is a tag, so who uploads or commits sets tags.
"""

import enum
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

DAY_MS: Final = 24 * 3_600_000
DAYS_MIN: Final = 7
COLLECTION_PERIODS_MIN: Final = 3

# The one place for the words of the tag: it needs none of the libraries of S3.
TTL_TAG: Final = "tidemark"
EXPIRING: Final = "expiring"
KEPT: Final = "kept"

Rule = dict[str, Any]

# S3 allows ids of 255 characters.
_PREFIX_LENGTH_MAX: Final = 200
# Where something of a repository is kept for longer than a command runs (design 0001, K1).
PLACES: Final = ("blobs/", "indexes/", "log/", "names/", "pins/", "profile", "repository")
# From there an object comes back in hours, and only if somebody asks for it.
_ARCHIVES: Final = frozenset({"GLACIER", "DEEP_ARCHIVE"})
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")


class LifecyclePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a bucket's rules."""

    # Rules of others: they stay as they are.
    others: tuple[Rule, ...]
    # Ours that stay, go and come.
    kept: tuple[Rule, ...] = ()
    removed: tuple[Rule, ...] = ()
    added: tuple[Rule, ...] = ()


def rule_ids(prefix: str) -> tuple[str, str]:
    """Return the ids of the two rules of a repository: the one that deletes, and the one that aborts."""
    name = _UNSAFE.sub(lambda m: "".join(f"~{byte:02X}" for byte in m[0].encode()), prefix)
    if len(name) > _PREFIX_LENGTH_MAX:
        name = f"{name[:_PREFIX_LENGTH_MAX]}-{hashlib.sha256(prefix.encode()).hexdigest()[:16]}"
    return f"tidemark-expire-{name}", f"tidemark-abort-{name}"


def backstop_days(*, ttl_ms: int, margin_ms: int, collection_period_ms: int) -> int:
    """Return after how many days the store itself may delete an upload: no collection that heals it may come later.

    That is three collection periods after the end of the longest lease, and a day for what rounds times to days
    (design 0002, T3).
    """
    lease_end_ms = ttl_ms - margin_ms
    return max(DAYS_MIN, -(-(lease_end_ms + COLLECTION_PERIODS_MIN * collection_period_ms) // DAY_MS) + 1)


def backstop_rules(prefix: str, *, days: int) -> tuple[Rule, Rule]:
    """Return the two rules of a repository; an empty prefix is the whole bucket."""
    expire, abort = rule_ids(prefix)
    tag = {"Key": TTL_TAG, "Value": EXPIRING}
    root = f"{prefix}/" if prefix else ""
    tagged = {"And": {"Prefix": root, "Tags": [tag]}} if root else {"Tag": tag}
    aborted = {"DaysAfterInitiation": days}
    return (
        {"ID": expire, "Status": "Enabled", "Filter": tagged, "Expiration": {"Days": days}},
        {"ID": abort, "Status": "Enabled", "Filter": {"Prefix": root}, "AbortIncompleteMultipartUpload": aborted},
    )


def plan_lifecycle(existing: Iterable[Rule], wanted: Sequence[Rule] | None, *, prefix: str) -> LifecyclePlan:
    """Plan a bucket's rules: `wanted` in place of those that are ours by their ids; None keeps these."""
    rules, ids = tuple(existing), rule_ids(prefix)
    others = tuple(rule for rule in rules if rule.get("ID") not in ids)
    ours = tuple(rule for rule in rules if rule.get("ID") in ids)
    if wanted is None or same_rules(ours, wanted):
        return LifecyclePlan(others=others, kept=ours)
    return LifecyclePlan(others=others, removed=ours, added=tuple(wanted))


def threats(rules: Iterable[Rule], prefix: str, *, days_min: int, ttls_stay: bool = False) -> tuple[str, ...]:
    """Describe the rules of a bucket, anybody's, that delete or archive what a repository needs.

    These are enabled, reach a place of the repository, and delete current versions or move them to an archive. Harmless
    are those that go by a tag that no object of ours has, or take only what is tagged `expiring`, late enough. A filter
    by size excuses nothing.

    Args:
        days_min: After how many days at the earliest an upload may go that nobody has committed: `backstop_days`.
        ttls_stay: Commits cannot replace the tag that an upload is created with.
    """
    found = []
    for rule in rules:
        below, tags, _ = _parts(rule)
        # All tags of a filter have to be there, and ours are one of two.
        is_excluded = any(tag not in {(TTL_TAG, EXPIRING), (TTL_TAG, KEPT)} for tag in tags) or len(set(tags)) > 1
        ends = _takes(rule, prefix)
        if is_excluded or not ends:
            continue
        if not _is_tagged_expiring(rule):
            why = "whether it is committed or not"
        elif ttls_stay:
            why = "and commits cannot take the tag away on this blob store"
        elif any(days is None for _, days in ends):
            why = "by a date, however young it is"
        elif any(days is not None and days < days_min for _, days in ends):
            why = f"and it needs {days_min} days"
        else:
            continue
        done = " and ".join(f"{verb} at a date" if days is None else f"{verb} after {days} days" for verb, days in ends)
        tagged = "".join(f" tagged {key}={value}" for key, value in tags)
        where = f"what is below {below}" if below else "the whole bucket"
        found.append(f"rule {rule.get('ID') or '(no id)'}: {where}{tagged} is {done}, {why}")
    return tuple(found)


def is_backstop(rule: Rule, prefix: str) -> bool:
    """Return whether a rule, of any author, deletes uploads of a repository by their tag."""
    return _is_tagged_expiring(rule) and bool(_takes(rule, prefix))


def cut_short(rules: Iterable[Rule], prefix: str, *, days: int) -> tuple[Rule, ...]:
    """Return the backstops of repositories below a prefix that keep uploads longer than one of the prefix itself."""
    root = f"{prefix}/" if prefix else ""
    return tuple(
        rule
        for rule in rules
        if _is_tagged_expiring(rule)
        and (below := _parts(rule)[0]) != root
        and below.startswith(root)
        and any(kept is not None and kept > days for _, kept in _ends(rule))
    )


def same_rules(one: Iterable[Rule], other: Iterable[Rule]) -> bool:
    """Return whether two sets of rules do the same, in whatever order and form a store lists them."""
    forms = [sorted(msgspec.json.encode(_parts(rule), order="sorted") for rule in rules) for rules in (one, other)]
    return forms[0] == forms[1]


def _is_tagged_expiring(rule: Rule) -> bool:
    """Return whether a rule goes by the tag of uploads that have a TTL, and by no other."""
    return set(_parts(rule)[1]) == {(TTL_TAG, EXPIRING)}


def _takes(rule: Rule, prefix: str) -> list[tuple[str, int | None]]:
    """Return how a rule takes objects of a repository away, as `_ends`; empty if it is off, or reaches none."""
    below, root = _parts(rule)[0], f"{prefix}/" if prefix else ""
    reaches = any((root + place).startswith(below) or below.startswith(root + place) for place in PLACES)
    return _ends(rule) if reaches and rule.get("Status") == "Enabled" else []


def _ends(rule: Rule) -> list[tuple[str, int | None]]:
    """Return how a rule takes objects away: what it does, and after how many days (None: at a date)."""
    moves = [*(rule.get("Transitions") or ()), *([rule["Transition"]] if rule.get("Transition") else ())]
    done = [("deleted", rule.get("Expiration") or {})]
    done += [(f"moved to {move['StorageClass']}", move) for move in moves if move.get("StorageClass") in _ARCHIVES]
    return [(verb, when.get("Days")) for verb, when in done if when.get("Days") is not None or when.get("Date")]


def _parts(rule: Rule) -> tuple[str, list[tuple[str, str]], Rule]:
    """Return prefix, tags, and the rest of a rule, however its filter is spelled."""
    found = rule.get("Filter") or {}
    both = found.get("And") or {}
    prefix = found.get("Prefix") or both.get("Prefix") or rule.get("Prefix") or ""
    tags = [*([found["Tag"]] if found.get("Tag") else []), *(both.get("Tags") or [])]
    known = {"And", "Prefix", "Tag", "Tags"}
    more = {name: value for name, value in {**found, **both}.items() if name not in known and value}
    rest = {name: value for name, value in rule.items() if name not in {"Filter", "Prefix"}}
    return prefix, sorted((tag["Key"], tag["Value"]) for tag in tags), {**rest, **({"Filter": more} if more else {})}


Policy = dict[str, Any]

VERSION: Final = "2012-10-17"
# Where uploads, which have TTLs and may go in parts, are (design 0001, K1).
_UPLOADS: Final = ("blobs/*", "indexes/*")
# Where the names of things do not begin with `arn:aws:`.
_PARTITIONS: Final = {
    "cn-": "aws-cn",
    "us-gov-": "aws-us-gov",
    "us-iso-": "aws-iso",
    "us-isob-": "aws-iso-b",
    "us-isof-": "aws-iso-f",
    "eu-isoe-": "aws-iso-e",
    "eusc-": "aws-eusc",
}


def partition_of(region: str) -> str:
    """Return the partition of AWS that a region belongs to, as ARNs spell it."""
    return next((partition for begin, partition in _PARTITIONS.items() if region.startswith(begin)), "aws")


class Role(enum.Enum):
    """Who uses a repository."""

    WRITER = "writer"
    RESTORER = "restorer"
    COLLECTOR = "collector"
    OWNER = "owner"


ROLES: Final = {
    Role.WRITER: "backup, commit, rewind, fork, name, unname, verify --heal, and what a restorer does; deletes nothing",
    Role.RESTORER: "restore, list, show, diff, verify; writes below pins/ only",
    Role.COLLECTOR: "collect, and verify; deletes, and writes boundaries, audit records and its own notes only",
    Role.OWNER: "init, doctor and lifecycle: sets a repository up; nobody needs it from day to day",
}


# Sid, actions, and on what below the prefix; on the bucket itself where nothing is named.
_Right = tuple[str, tuple[str, ...], tuple[str, ...]]
_WRITE_TTLS: Final[_Right] = ("WriteTtls", ("GetObjectTagging", "PutObjectTagging"), _UPLOADS)
_FIND_UNFINISHED: Final[_Right] = ("FindUnfinishedUploads", ("ListBucketMultipartUploads",), ())
# What a role may do beside listing and reading.
_RIGHTS: Final[dict[Role, tuple[_Right, ...]]] = {
    Role.WRITER: (
        ("Upload", ("PutObject", "AbortMultipartUpload"), _UPLOADS),
        _WRITE_TTLS,
        ("CommitNameAndPin", ("PutObject",), ("log/*.commit", "names/*", "pins/*")),
    ),
    Role.RESTORER: (("ReadTtls", ("GetObjectTagging",), _UPLOADS), ("Pin", ("PutObject",), ("pins/*",))),
    Role.COLLECTOR: (
        _WRITE_TTLS,
        ("CloseCommits", ("PutObject",), ("log/*.boundary",)),
        ("KeepRecords", ("PutObject",), ("audit/*", "runs/*")),
        ("Delete", ("DeleteObject",), (*_UPLOADS, "log/*", "names/*", "pins/*", "audit/*", "runs/*")),
        _FIND_UNFINISHED,
        ("AbortUnfinishedUploads", ("AbortMultipartUpload",), _UPLOADS),
    ),
    Role.OWNER: (
        ("SetUp", ("PutObject",), ("repository", "profile")),
        (
            "Probe",
            ("PutObject", "GetObjectTagging", "PutObjectTagging", "DeleteObject", "AbortMultipartUpload"),
            ("doctor/*",),
        ),
        _FIND_UNFINISHED,
        ("Lifecycle", ("GetLifecycleConfiguration", "PutLifecycleConfiguration"), ()),
    ),
}


def role_policy(role: Role, *, bucket: str, prefix: str = "", kms_key_id: str = "", partition: str = "aws") -> Policy:
    """Return the policy of a role, a document for IAM. Each statement says by its `Sid` what it is for.

    Below a prefix, `TellMissingFromDenied` also lets the names of all keys of the bucket be listed: S3 has no finer
    right for it. The prefix has no slashes at its ends; the KMS key is an ARN, an id or an alias.
    """
    arn = f"arn:{partition}:s3:::{bucket}"
    root = f"{prefix}/" if prefix else ""

    def allow(sid: str, actions: Sequence[str], below: Sequence[str]) -> Policy:
        resources = [f"{arn}/{root}{name}" for name in below] or [arn]
        return {"Sid": sid, "Effect": "Allow", "Action": [f"s3:{action}" for action in actions], "Resource": resources}

    listing = allow("List", ("ListBucket",), ())
    statements = [listing]
    if root:
        # A GET names no prefix. Who may not list gets "denied" for what is missing, and "missing" is what a reader
        # that was overtaken by a collection has to hear.
        statements = [
            {**listing, "Condition": {"StringLike": {"s3:prefix": [f"{root}*"]}}},
            {**listing, "Sid": "TellMissingFromDenied", "Condition": {"Null": {"s3:prefix": "true"}}},
        ]
    statements += [allow(*right) for right in (("Read", ("GetObject",), ("*",)), *_RIGHTS[role])]
    if kms_key_id:
        statements.append(_kms(kms_key_id, partition))
    return {"Version": VERSION, "Statement": statements}


def _kms(key_id: str, partition: str) -> Policy:
    """Allow the use of a key: reading decrypts, and writing (all roles write something) makes data keys."""
    statement: Policy = {
        "Sid": "UseTheKey",
        "Effect": "Allow",
        "Action": ["kms:Decrypt", "kms:GenerateDataKey"],
        "Resource": [key_id],
    }
    if ":alias/" in key_id or key_id.startswith("alias/"):
        # An alias is not a resource of these actions; it goes into a condition on the keys that have it.
        statement["Resource"] = [f"arn:{partition}:kms:*:*:key/*"]
        statement["Condition"] = {
            "ForAnyValue:StringEquals": {"kms:ResourceAliases": [f"alias/{key_id.partition('alias/')[2]}"]}
        }
    elif not key_id.startswith("arn:"):
        statement["Resource"] = [f"arn:{partition}:kms:*:*:key/{key_id}"]
    return statement

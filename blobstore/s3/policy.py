"""The least rights that each role needs on a bucket, as an IAM policy. Pure.

What each role calls follows from the use cases (design 0002, steps and cost): only a collector deletes, a restorer
writes nothing but pins, and a TTL is a tag, so who uploads or commits sets tags.
"""

import enum
from collections.abc import Sequence
from typing import Any, Final

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


def role_policy(role: Role, *, bucket: str, prefix: str = "", kms_key_id: str = "", partition: str = "aws") -> Policy:
    """Return the policy of a role.

    Args:
        role: Who it is for.
        bucket: Name of the bucket.
        prefix: Of the repository in it, without slashes at its ends; empty for the whole bucket.
        kms_key_id: The key that the settings name: an ARN, an id, or an alias. Empty: none has to be allowed.
        partition: `aws`, or that of another part of AWS, as `aws-cn`.

    Returns:
        A document for an IAM user or role. Each statement says by its `Sid` what it is for. Below a prefix,
        `TellMissingFromDenied` also lets the names of all keys of the bucket be listed: S3 has no finer right for it.
    """
    arn = f"arn:{partition}:s3:::{bucket}"
    root = f"{prefix}/" if prefix else ""

    def objects(sid: str, actions: Sequence[str], *below: str) -> Policy:
        return {
            "Sid": sid,
            "Effect": "Allow",
            "Action": [f"s3:{action}" for action in actions],
            "Resource": [f"{arn}/{root}{name}" for name in below],
        }

    lists: list[Policy] = [{"Sid": "List", "Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": [arn]}]
    if root:
        # A GET names no prefix. Who may not list gets "denied" for what is missing, and "missing" is what a reader
        # that was overtaken by a collection has to hear.
        lists = [
            {**lists[0], "Condition": {"StringLike": {"s3:prefix": [f"{root}*"]}}},
            {**lists[0], "Sid": "TellMissingFromDenied", "Condition": {"Null": {"s3:prefix": "true"}}},
        ]

    def on_bucket(sid: str, *actions: str) -> Policy:
        return {"Sid": sid, "Effect": "Allow", "Action": [f"s3:{action}" for action in actions], "Resource": [arn]}

    read_ttls = objects("ReadTtls", ["GetObjectTagging"], *_UPLOADS)
    write_ttls = objects("WriteTtls", ["GetObjectTagging", "PutObjectTagging"], *_UPLOADS)
    read = objects("Read", ["GetObject"], "*")
    statements: list[Policy]
    match role:
        case Role.WRITER:
            statements = [
                *lists,
                read,
                objects("Upload", ["PutObject", "AbortMultipartUpload"], *_UPLOADS),
                write_ttls,
                objects("CommitNameAndPin", ["PutObject"], "log/*.commit", "names/*", "pins/*"),
            ]
        case Role.RESTORER:
            statements = [*lists, read, read_ttls, objects("Pin", ["PutObject"], "pins/*")]
        case Role.COLLECTOR:
            statements = [
                *lists,
                read,
                write_ttls,
                objects("CloseCommits", ["PutObject"], "log/*.boundary"),
                objects("KeepRecords", ["PutObject"], "audit/*", "runs/*"),
                objects("Delete", ["DeleteObject"], *_UPLOADS, "log/*", "names/*", "pins/*", "audit/*", "runs/*"),
                on_bucket("FindUnfinishedUploads", "ListBucketMultipartUploads"),
                objects("AbortUnfinishedUploads", ["AbortMultipartUpload"], *_UPLOADS),
            ]
        case Role.OWNER:
            statements = [
                *lists,
                read,
                objects("SetUp", ["PutObject"], "repository", "profile"),
                objects(
                    "Probe",
                    ["PutObject", "GetObjectTagging", "PutObjectTagging", "DeleteObject", "AbortMultipartUpload"],
                    "doctor/*",
                ),
                on_bucket("FindUnfinishedUploads", "ListBucketMultipartUploads"),
                on_bucket("Lifecycle", "GetLifecycleConfiguration", "PutLifecycleConfiguration"),
            ]
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

import json

import pytest

from blobstore.s3.bucket_rules import ROLES, Policy, Role, partition_of, role_policy

BUCKET = "arn:aws:s3:::b"
PREFIX = f"{BUCKET}/team/state"


def _allowed(policy: Policy) -> dict[str, set[str]]:
    """Resources by action."""
    found: dict[str, set[str]] = {}
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow"
        for action in statement["Action"]:
            found.setdefault(action, set()).update(statement["Resource"])
    return found


def _of(role: Role, **more: str) -> dict[str, set[str]]:
    return _allowed(role_policy(role, bucket="b", prefix="team/state", **more))


UPLOADS = {f"{PREFIX}/blobs/*", f"{PREFIX}/indexes/*"}


def test_nobody_but_a_collector_deletes_what_is_stored() -> None:
    for role in (Role.WRITER, Role.RESTORER):
        assert not any("Delete" in action for action in _of(role))
    assert _of(Role.COLLECTOR)["s3:DeleteObject"] == UPLOADS | {
        f"{PREFIX}/{below}/*" for below in ("log", "names", "pins", "audit", "runs")
    }
    assert _of(Role.OWNER)["s3:DeleteObject"] == {f"{PREFIX}/doctor/*"}


@pytest.mark.parametrize(
    "role, below",
    [
        (Role.WRITER, {"blobs/*", "indexes/*", "log/*.commit", "names/*", "pins/*"}),
        (Role.RESTORER, {"pins/*"}),
        (Role.COLLECTOR, {"log/*.boundary", "audit/*", "runs/*"}),
        (Role.OWNER, {"repository", "profile", "doctor/*"}),
    ],
)
def test_each_role_writes_what_is_its_own(role: Role, below: set[str]) -> None:
    assert _of(role)["s3:PutObject"] == {f"{PREFIX}/{name}" for name in below}


def test_ttls_are_set_by_who_uploads_and_removed_by_who_settles() -> None:
    assert _of(Role.WRITER)["s3:PutObjectTagging"] == UPLOADS
    assert _of(Role.COLLECTOR)["s3:PutObjectTagging"] == UPLOADS
    assert "s3:PutObjectTagging" not in _of(Role.RESTORER)
    assert _of(Role.RESTORER)["s3:GetObjectTagging"] == UPLOADS


def test_rules_of_the_bucket_are_the_owners_alone() -> None:
    for role in Role:
        has = {action for action in _of(role) if "Lifecycle" in action}
        owns = {"s3:GetLifecycleConfiguration", "s3:PutLifecycleConfiguration"}
        assert has == (owns if role is Role.OWNER else set())


def test_lists_are_of_the_prefix_and_what_is_missing_is_reported() -> None:
    for role in Role:
        by_name = {s["Sid"]: s for s in role_policy(role, bucket="b", prefix="team/state")["Statement"]}
        assert by_name["List"]["Condition"] == {"StringLike": {"s3:prefix": ["team/state/*"]}}
        assert by_name["TellMissingFromDenied"]["Condition"] == {"Null": {"s3:prefix": "true"}}
        assert by_name["List"]["Resource"] == [BUCKET]


def test_a_bucket_of_its_own_needs_no_condition() -> None:
    for role in Role:
        policy = role_policy(role, bucket="b")
        assert all("Condition" not in statement for statement in policy["Statement"])
        assert _allowed(policy)["s3:ListBucket"] == {BUCKET}
        assert _allowed(policy)["s3:GetObject"] == {f"{BUCKET}/*"}


@pytest.mark.parametrize(
    "key_id, resource, condition",
    [
        ("arn:aws:kms:eu-west-1:1:key/ab", "arn:aws:kms:eu-west-1:1:key/ab", None),
        ("ab-cd", "arn:aws:kms:*:*:key/ab-cd", None),
        ("alias/backups", "arn:aws:kms:*:*:key/*", "alias/backups"),
        ("arn:aws:kms:eu-west-1:1:alias/backups", "arn:aws:kms:*:*:key/*", "alias/backups"),
    ],
)
def test_a_key_of_kms_may_be_used(key_id: str, resource: str, condition: str | None) -> None:
    statement = role_policy(Role.RESTORER, bucket="b", kms_key_id=key_id)["Statement"][-1]
    assert statement["Action"] == ["kms:Decrypt", "kms:GenerateDataKey"]
    assert statement["Resource"] == [resource]
    shown = statement.get("Condition", {}).get("ForAnyValue:StringEquals", {}).get("kms:ResourceAliases")
    assert shown == ([condition] if condition else None)


@pytest.mark.parametrize("role", Role)
def test_a_policy_is_a_document_that_iam_takes(role: Role) -> None:
    policy = role_policy(role, bucket="b", prefix="p", partition="aws-cn")
    assert policy["Version"] == "2012-10-17"
    names = [statement["Sid"] for statement in policy["Statement"]]
    assert len(set(names)) == len(names)
    assert all(name.isalnum() for name in names)
    assert "arn:aws:" not in json.dumps(policy)
    # What a managed policy may have.
    assert len(json.dumps(policy, separators=(",", ":"))) <= 6144
    assert ROLES[role]


@pytest.mark.parametrize(
    "region, partition",
    [
        ("", "aws"),
        ("eu-central-1", "aws"),
        ("us-east-1", "aws"),
        ("cn-north-1", "aws-cn"),
        ("us-gov-west-1", "aws-us-gov"),
        ("us-iso-east-1", "aws-iso"),
        ("us-isob-east-1", "aws-iso-b"),
        ("us-isof-south-1", "aws-iso-f"),
        ("eu-isoe-west-1", "aws-iso-e"),
        ("eusc-de-east-1", "aws-eusc"),
    ],
)
def test_a_region_reports_its_part_of_aws(region: str, partition: str) -> None:
    assert partition_of(region) == partition


def test_the_writer_sees_that_it_unnames() -> None:
    assert " unname," in ROLES[Role.WRITER]

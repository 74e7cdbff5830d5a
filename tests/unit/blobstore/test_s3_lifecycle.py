import copy
from typing import Any

import pytest

from blobstore import s3
from blobstore.s3_lifecycle import (
    DAY_MS,
    EXPIRING,
    ID_LENGTH_MAX,
    TTL_TAG,
    Rule,
    backstop_days,
    backstop_rules,
    describe_rule,
    plan_lifecycle,
    rule_ids,
    same_rules,
)

HOUR_MS = DAY_MS // 24
FOREIGN: Rule = {"ID": "logs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 30}}
UNNAMED: Rule = {"Status": "Disabled", "Prefix": "old/", "Transitions": [{"Days": 30, "StorageClass": "GLACIER"}]}
OURS = backstop_rules("team/state", days=7)
OLDER = backstop_rules("team/state", days=9)
NEIGHBOURS = backstop_rules("team-state", days=7)


def test_the_tag_is_the_one_that_the_store_sets() -> None:
    assert (TTL_TAG, EXPIRING) == (s3.TAG, s3.EXPIRING)


@pytest.mark.parametrize(
    "ttl_ms, period_ms, days, why",
    [
        (DAY_MS, DAY_MS, 7, "never less than a week"),
        (6 * DAY_MS, DAY_MS, 7, "the TTL and a day"),
        (7 * DAY_MS, DAY_MS, 8, "the TTL and a day"),
        (7 * DAY_MS + 1, DAY_MS, 9, "rounded up"),
        (DAY_MS, 3 * DAY_MS, 9, "three collection periods"),
        (DAY_MS, 3 * DAY_MS + HOUR_MS, 10, "rounded up too"),
        (HOUR_MS, HOUR_MS, 7, "however short both are"),
    ],
)
def test_days(ttl_ms: int, period_ms: int, days: int, why: str) -> None:
    assert backstop_days(ttl_ms=ttl_ms, collection_period_ms=period_ms) == days, why


def test_the_rules_take_only_what_is_below_the_prefix() -> None:
    expire, abort = OURS
    assert expire["Filter"] == {
        "And": {"Prefix": "team/state/", "Tags": [{"Key": "tidemark", "Value": "expiring"}]},
    }
    assert expire["Expiration"] == {"Days": 7}
    assert abort["Filter"] == {"Prefix": "team/state/"}
    assert abort["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert backstop_rules("", days=7)[0]["Filter"] == {"Tag": {"Key": "tidemark", "Value": "expiring"}}


def test_ids_tell_prefixes_apart_and_have_a_length_that_s3_takes() -> None:
    prefixes = ["", "a/b", "a-b", "a_b", "a~2Fb", "é", "x" * 900, "x" * 899 + "y", "a"]
    ids = [id_ for prefix in prefixes for id_ in rule_ids(prefix)]
    assert len(set(ids)) == len(ids)
    assert all(id_.isascii() and len(id_) <= ID_LENGTH_MAX for id_ in ids)
    assert rule_ids("state") == ("tidemark-expire-state", "tidemark-abort-state")


@pytest.mark.parametrize(
    "existing, wanted, others, kept, removed, added, why",
    [
        ([], OURS, [], [], [], OURS, "a bucket without rules gets both"),
        ([FOREIGN, UNNAMED], OURS, [FOREIGN, UNNAMED], [], [], OURS, "what others have stays in its order"),
        ([FOREIGN, *OURS], OURS, [FOREIGN], OURS, [], [], "nothing to do the second time"),
        ([*OLDER, FOREIGN], OURS, [FOREIGN], [], OLDER, OURS, "another number of days is a change"),
        ([OURS[1], FOREIGN], OURS, [FOREIGN], [OURS[1]], [], [OURS[0]], "what is missing is added"),
        ([FOREIGN, *OURS], (), [FOREIGN], [], OURS, [], "removing leaves others alone"),
        ([FOREIGN], (), [FOREIGN], [], [], [], "there is nothing to remove"),
        ([*NEIGHBOURS], OURS, NEIGHBOURS, [], [], OURS, "another repository's rules are others'"),
        ([OURS[0], OURS[0]], OURS, [], [OURS[0]], [OURS[0]], [OURS[1]], "one of two of a name is enough"),
    ],
)
def test_plans(
    *, existing: list[Rule], wanted: Any, others: Any, kept: Any, removed: Any, added: Any, why: str
) -> None:
    before = copy.deepcopy(existing)
    plan = plan_lifecycle(existing, wanted, prefix="team/state")
    assert (list(plan.others), list(plan.kept)) == (list(others), list(kept)), why
    assert (list(plan.removed), list(plan.added)) == (list(removed), list(added)), why
    assert plan.changes is bool(removed or added)
    assert existing == before
    assert same_rules([*plan.others, *plan.kept, *plan.removed], existing)
    assert same_rules([*plan.kept, *plan.added], wanted)


@pytest.mark.parametrize(
    "told",
    [
        {**OURS[1], "Filter": {"Prefix": "team/state/"}},
        {name: value for name, value in OURS[1].items() if name != "Filter"} | {"Prefix": "team/state/"},
        {**OURS[1], "Filter": {"And": {"Prefix": "team/state/", "Tags": []}}},
        {**OURS[1], "Filter": {"Prefix": "team/state/", "And": {}}},
    ],
)
def test_a_rule_is_ours_however_the_store_spells_its_filter(told: Rule) -> None:
    assert not plan_lifecycle([OURS[0], told], OURS, prefix="team/state").changes


@pytest.mark.parametrize(
    "told",
    [
        {**OURS[0], "Status": "Disabled"},
        {**OURS[0], "Filter": {"Prefix": "team/state/"}},
        {**OURS[0], "Filter": {"And": {**OURS[0]["Filter"]["And"], "ObjectSizeGreaterThan": 5}}},
        {**OURS[0], "Filter": {"And": {"Prefix": "team/", "Tags": [{"Key": "tidemark", "Value": "expiring"}]}}},
        {**OURS[0], "NoncurrentVersionExpiration": {"NoncurrentDays": 3}},
    ],
)
def test_a_rule_of_our_name_that_does_something_else_is_replaced(told: Rule) -> None:
    plan = plan_lifecycle([told, OURS[1]], OURS, prefix="team/state")
    assert (plan.removed, plan.added) == ((told,), (OURS[0],))


@pytest.mark.parametrize(
    "rule, text",
    [
        (OURS[0], "below team/state/ tagged tidemark=expiring: delete 7 days after creation"),
        (OURS[1], "below team/state/: abort multipart uploads 7 days after their begin"),
        (FOREIGN, "below logs/: delete 30 days after creation"),
        (UNNAMED, "below old/: Transitions: Days 30, StorageClass GLACIER (Disabled)"),
        (
            {"ID": "x", "Status": "Enabled", "Filter": {}, "Expiration": {"ExpiredObjectDeleteMarker": True}},
            "whole bucket: Expiration: ExpiredObjectDeleteMarker True",
        ),
    ],
)
def test_a_rule_is_told_in_one_line(rule: Rule, text: str) -> None:
    assert describe_rule(rule) == text

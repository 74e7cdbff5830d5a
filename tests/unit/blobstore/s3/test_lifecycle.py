import copy
from typing import Any

import pytest

from blobstore.s3.bucket_rules import (
    DAY_MS,
    PLACES,
    Rule,
    backstop_days,
    backstop_rules,
    cut_short,
    is_backstop,
    plan_lifecycle,
    rule_ids,
    same_rules,
    threats,
)
from blobstore.s3.settings import PROFILE_KEY
from index.snapshot import keys

HOUR_MS = DAY_MS // 24
FOREIGN: Rule = {"ID": "logs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 30}}
UNNAMED: Rule = {"Status": "Disabled", "Prefix": "old/", "Transitions": [{"Days": 30, "StorageClass": "GLACIER"}]}
OURS = backstop_rules("team/state", days=7)
OLDER = backstop_rules("team/state", days=9)
NEIGHBOURS = backstop_rules("team-state", days=7)


@pytest.mark.parametrize(
    "ttl_ms, margin_ms, period_ms, days, why",
    [
        (DAY_MS, HOUR_MS, DAY_MS, 7, "never less than a week"),
        (HOUR_MS, HOUR_MS // 4, HOUR_MS, 7, "however short both are"),
        (7 * DAY_MS, HOUR_MS, 2 * DAY_MS, 14, "three collection periods after the end of the longest lease, and a day"),
        (7 * DAY_MS, DAY_MS, 2 * DAY_MS, 13, "the margin is not part of the lease"),
        (7 * DAY_MS + 2, 1, 2 * DAY_MS, 15, "rounded up"),
    ],
)
def test_days(ttl_ms: int, margin_ms: int, period_ms: int, days: int, why: str) -> None:
    assert backstop_days(ttl_ms=ttl_ms, margin_ms=margin_ms, collection_period_ms=period_ms) == days, why


def test_the_rules_take_only_what_is_below_the_prefix() -> None:
    expire, abort = OURS
    assert expire["Filter"] == {"And": {"Prefix": "team/state/", "Tags": [{"Key": "tidemark", "Value": "expiring"}]}}
    assert expire["Expiration"] == {"Days": 7}
    assert abort["Filter"] == {"Prefix": "team/state/"}
    assert abort["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert backstop_rules("", days=7)[0]["Filter"] == {"Tag": {"Key": "tidemark", "Value": "expiring"}}


def test_ids_distinguish_prefixes_and_have_a_length_that_s3_takes() -> None:
    prefixes = ["", "a/b", "a-b", "a_b", "a~2Fb", "é", "x" * 900, "x" * 899 + "y", "a"]
    ids = [id_ for prefix in prefixes for id_ in rule_ids(prefix)]
    assert len(set(ids)) == len(ids)
    assert all(id_.isascii() and len(id_) <= 255 for id_ in ids)
    assert rule_ids("state") == ("tidemark-expire-state", "tidemark-abort-state")


@pytest.mark.parametrize(
    "existing, wanted, others, kept, removed, added, why",
    [
        ([], OURS, [], [], [], OURS, "a bucket without rules gets both"),
        ([FOREIGN, UNNAMED], OURS, [FOREIGN, UNNAMED], [], [], OURS, "what others have stays in its order"),
        ([FOREIGN, *OURS], OURS, [FOREIGN], OURS, [], [], "nothing to do the second time"),
        ([*OLDER, FOREIGN], OURS, [FOREIGN], [], OLDER, OURS, "another number of days is a change"),
        ([OURS[1], FOREIGN], OURS, [FOREIGN], [], [OURS[1]], OURS, "both are written again where one is missing"),
        ([FOREIGN, *OLDER], None, [FOREIGN], OLDER, [], [], "nothing changes where nothing is wanted"),
        ([*NEIGHBOURS], OURS, NEIGHBOURS, [], [], OURS, "another repository's rules are others'"),
        ([OURS[0], OURS[0]], OURS, [], [], [OURS[0], OURS[0]], OURS, "one of two of a name is enough"),
    ],
)
def test_plans(
    *, existing: list[Rule], wanted: Any, others: Any, kept: Any, removed: Any, added: Any, why: str
) -> None:
    before = copy.deepcopy(existing)
    plan = plan_lifecycle(existing, wanted, prefix="team/state")
    assert (list(plan.others), list(plan.kept)) == (list(others), list(kept)), why
    assert (list(plan.removed), list(plan.added)) == (list(removed), list(added)), why
    assert existing == before
    assert same_rules([*plan.others, *plan.kept, *plan.removed], existing)
    assert same_rules([*plan.kept, *plan.added], plan.kept if wanted is None else wanted)


@pytest.mark.parametrize(
    "shown",
    [
        {**OURS[1], "Filter": {"Prefix": "team/state/"}},
        {name: value for name, value in OURS[1].items() if name != "Filter"} | {"Prefix": "team/state/"},
        {**OURS[1], "Filter": {"And": {"Prefix": "team/state/", "Tags": []}}},
        {**OURS[1], "Filter": {"Prefix": "team/state/", "And": {}}},
    ],
)
def test_a_rule_is_ours_however_the_store_spells_its_filter(shown: Rule) -> None:
    assert plan_lifecycle([OURS[0], shown], OURS, prefix="team/state").kept == (OURS[0], shown)


@pytest.mark.parametrize(
    "shown",
    [
        {**OURS[0], "Status": "Disabled"},
        {**OURS[0], "Filter": {"Prefix": "team/state/"}},
        {**OURS[0], "Filter": {"And": {**OURS[0]["Filter"]["And"], "ObjectSizeGreaterThan": 5}}},
        {**OURS[0], "Filter": {"And": {"Prefix": "team/", "Tags": [{"Key": "tidemark", "Value": "expiring"}]}}},
        {**OURS[0], "NoncurrentVersionExpiration": {"NoncurrentDays": 3}},
    ],
)
def test_a_rule_of_our_name_that_does_something_else_is_replaced(shown: Rule) -> None:
    plan = plan_lifecycle([shown, OURS[1]], OURS, prefix="team/state")
    assert (plan.removed, plan.added) == ((shown, OURS[1]), OURS)


# ---------------------------------------------------------------------- rules that delete what is needed


def _rule(prefix: str, *tags: tuple[str, str], status: str = "Enabled", **does: Any) -> Rule:
    both = {"Prefix": prefix, "Tags": [{"Key": key, "Value": value} for key, value in tags]}
    return {"ID": "x", "Status": status, "Filter": {"And": both}, **(does or {"Expiration": {"Days": 30}})}


CREATED = ("tidemark", "expiring")
TO_GLACIER = [{"Days": 90, "StorageClass": "GLACIER"}]


@pytest.mark.parametrize(
    "rule, why",
    [
        ({"ID": "x", "Status": "Enabled", "Filter": {}, "Expiration": {"Days": 400}}, "the whole bucket"),
        ({"ID": "x", "Status": "Enabled", "Prefix": "", "Expiration": {"Days": 400}}, "spelled as of old"),
        ({"ID": "x", "Status": "Enabled", "Expiration": {"Days": 400}}, "no filter at all"),
        (_rule("team/"), "a directory above"),
        (_rule("te"), "prefixes know no slashes"),
        (_rule("team/state/"), "the repository"),
        (_rule("team/state/blobs/ab"), "a part of it"),
        (_rule("team/state/log/"), "its records"),
        (_rule("team/state/r"), "its repository record"),
        ({**OURS[0], "Filter": {"Prefix": "team/state/"}}, "of our name, without the tag"),
        (_rule("", Expiration={"Date": "2030-01-01"}), "at a date"),
        (_rule("", ("tidemark", "kept")), "all that is committed"),
        (_rule("", CREATED, Expiration={"Days": 6}), "too early"),
        (_rule("", CREATED, Expiration={"Date": "2030-01-01"}), "however young it is"),
        (_rule("", Transitions=TO_GLACIER), "archived is not readable"),
        (_rule("", Transition={"Days": 1, "StorageClass": "DEEP_ARCHIVE"}), "spelled as of old"),
        ({**_rule(""), "Filter": {"And": {"Prefix": "", "ObjectSizeGreaterThan": 10**9}}}, "a filter by size"),
        (_rule("", Expiration={"Days": 30}, NoncurrentVersionExpiration={"NoncurrentDays": 1}), "one of two"),
    ],
)
def test_a_rule_that_takes_what_is_committed_is_a_threat(rule: Rule, why: str) -> None:
    found = threats([FOREIGN, rule], "team/state", days_min=7)
    assert [text.startswith(f"rule {rule['ID']}: ") for text in found] == [True], why


@pytest.mark.parametrize(
    "rule, why",
    [
        (OURS[0], "ours"),
        (OURS[1], "aborts only"),
        (OLDER[0], "later than it has to be"),
        (NEIGHBOURS[0], "another repository's"),
        (backstop_rules("", days=7)[0], "that of the whole bucket, late enough"),
        (backstop_rules("team/state/deep", days=1)[0], "a repository below it has other places"),
        (FOREIGN, "beside it"),
        (_rule("team/state-of-others/"), "a neighbour whose name begins as ours does"),
        (_rule("team/state/doctor/"), "nothing lasts there"),
        (_rule("", status="Disabled"), "switched off"),
        (_rule("", ("keep", "no")), "by a tag that we never set"),
        (_rule("", ("tidemark", "other")), "by a value that we never set"),
        (_rule("", CREATED, ("keep", "no")), "all tags have to be there"),
        (_rule("", CREATED, ("tidemark", "kept")), "no object has both"),
        (_rule("", Expiration={"ExpiredObjectDeleteMarker": True}), "takes only marks of what is deleted"),
        (_rule("", NoncurrentVersionExpiration={"NoncurrentDays": 1}), "takes only older versions"),
        (_rule("", Transitions=[{"Days": 0, "StorageClass": "STANDARD_IA"}]), "readable at once"),
        (_rule("", Transitions=[{"Days": 0, "StorageClass": "GLACIER_IR"}]), "readable at once"),
    ],
)
def test_other_rules_are_none(rule: Rule, why: str) -> None:
    assert threats([rule], "team/state", days_min=7) == (), why


def test_the_backstop_of_an_outer_repository_is_a_threat_to_one_with_a_longer_ttl() -> None:
    outer = backstop_rules("n", days=7)
    assert threats(outer, "n/deep", days_min=7) == ()
    (found,) = threats(outer, "n/deep", days_min=31)
    assert found.startswith("rule tidemark-expire-n: ")
    assert "needs 31 days" in found
    inner = backstop_rules("n/deep", days=31)
    assert cut_short([*outer, *inner], "n", days=7) == (inner[0],)
    assert cut_short([*outer, *inner], "n", days=31) == ()
    assert cut_short([*outer, *inner], "n/deep", days=7) == ()
    assert cut_short([*inner], "n/de", days=7) == ()


def test_where_ttls_stay_the_backstop_is_a_threat() -> None:
    (found,) = threats(OURS, "team/state", days_min=7, ttls_stay=True)
    assert found.startswith(f"rule {OURS[0]['ID']}: ")
    assert is_backstop(OURS[0], "team/state")
    assert not is_backstop(OURS[1], "team/state")
    assert not is_backstop({**OURS[0], "Status": "Disabled"}, "team/state")
    assert not is_backstop(NEIGHBOURS[0], "team/state")


def test_the_places_are_those_of_a_repository() -> None:
    layout = {keys.BLOBS, keys.INDEXES, keys.LOG, keys.NAMES, keys.PINS, keys.REPOSITORY, PROFILE_KEY}
    assert set(PLACES) == layout


def test_in_a_bucket_of_its_own_other_places_are_no_part_of_a_repository() -> None:
    assert threats([FOREIGN], "", days_min=7) == ()
    assert len(threats([_rule("l")], "", days_min=7)) == 1

"""Stores that lie, each in one way, and what `doctor` says of them."""

import asyncio
from random import Random

import msgspec
import pytest
from typing_extensions import override

from blobstore.base import Body, BytesBody, CreateOutcome, Lost
from blobstore.errors import (
    AccessDeniedError,
    CapabilityMissingError,
    StoreError,
    StoreMissingError,
    StoreUnavailableError,
)
from blobstore.memory import MemoryStore
from blobstore.s3.bucket_rules import DAY_MS, Rule, backstop_rules
from blobstore.s3.settings import PROFILE_KEY, StoreProfile, decode_profile
from engine.doctor import checks
from engine.doctor.checks import Evidence, NotApplicableError, NoTimeError, choose_list_rounds, judge_clock
from engine.doctor.doctor import (
    CLIENTS_COUNT,
    ROOT,
    TOTAL_S_MAX,
    Check,
    CheckResult,
    DoctorReport,
    Verdict,
    choose_profile,
    describe_profile,
    examine_store,
    judge,
)
from engine.runtime import Runtime
from index.snapshot.codec import encode_record
from index.snapshot.keys import REPOSITORY
from index.snapshot.model import RepositoryRecord
from tests.simulation.model.virtual_loop import run_jumping
from tests.unit.engine.doctor.lying_stores import (
    CompletesTwice,
    CutsRanges,
    DatesWrongly,
    DeletedStaysListed,
    DeletesNeighbours,
    EverybodyLoses,
    FailsAtAborts,
    FailsAtTags,
    Faulty,
    Hangs,
    HasNoLifecycle,
    HasNoMultipart,
    HasNoTags,
    HidesUploads,
    HonestS3,
    IgnoresConditions,
    IgnoresRanges,
    IsAhead,
    KeepsTtls,
    Lists,
    LosersOverwrite,
    LosesParts,
    LosesTtls,
    MayNotAbort,
    MayNotDelete,
    MixesVersions,
    NobodyCompletes,
    NobodyKnows,
    OneListBehind,
    OneReadBehind,
    PagesSkip,
    ReportsTheWrongWinner,
    ServesBehindTheEnd,
    ShiftsRanges,
    UnorderedLists,
    busy,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between attempts."""
    monkeypatch.setattr(checks, "PAUSE_S", 0.0)


async def examine(store: MemoryStore, *, save: bool = True) -> DoctorReport:
    """What is found when all clients are one store."""
    return await examine_store(lambda: store, runtime=Runtime(), release="1.2.3", save=save)


def verdicts(report: DoctorReport) -> dict[Check, Verdict]:
    """By check."""
    return {row.check: row.verdict for row in report.checks}


async def test_a_store_that_has_everything_is_safe_and_gets_a_profile() -> None:
    store = HonestS3()
    report = await examine(store)
    assert verdicts(report) == dict.fromkeys(Check, Verdict.OK)
    assert (report.verdict, report.profile_written, report.hiccups_count) == (Verdict.OK, True, 0)
    assert store.stored == [PROFILE_KEY]
    assert (report.left, report.left_reason) == ((), "")
    profile = decode_profile(bytes(store._blobs[PROFILE_KEY].data))
    assert profile == report.profile
    assert (profile.atomic_create, profile.consistent_lists, profile.tags, profile.conditional_multipart) == (True,) * 4
    assert (profile.schema, profile.tidemark) == (1, "1.2.3")
    assert store.closed == CLIENTS_COUNT


async def test_without_saving_nothing_stays() -> None:
    store = HonestS3()
    report = await examine(store, save=False)
    assert report.profile is not None
    assert not report.profile_written
    assert store.stored == []


async def test_a_store_in_memory_has_no_profile_and_no_multipart() -> None:
    store = MemoryStore()
    report = await examine(store)
    found = verdicts(report)
    assert report.profile is None
    not_applicable = {check for check, verdict in found.items() if verdict is Verdict.NOT_APPLICABLE}
    assert not_applicable == {Check.MULTIPART, Check.CONDITIONAL_MULTIPART, Check.ABORT, Check.LIFECYCLE, Check.CLOCK}
    assert {found[check] for check in set(Check) - not_applicable} == {Verdict.OK}
    assert store._sorted_keys == []


# What is judged other than ok; and the profile: create, lists, tags, conditional multipart.
LIES: list[tuple[type[MemoryStore], dict[Check, Verdict], str]] = [
    (IgnoresConditions, {Check.CREATE: Verdict.UNSAFE}, "-LTM"),
    (LosersOverwrite, {Check.CREATE: Verdict.UNSAFE}, "-LTM"),
    (EverybodyLoses, {Check.CREATE: Verdict.UNSAFE}, "-LTM"),
    (OneListBehind, {Check.LISTS: Verdict.UNSAFE}, "C-TM"),
    (DeletedStaysListed, {Check.LISTS: Verdict.UNSAFE, Check.DELETE: Verdict.UNSAFE}, "C-TM"),
    (UnorderedLists, {Check.LISTS: Verdict.UNSAFE}, "C-TM"),
    (PagesSkip, {Check.LISTS: Verdict.UNSAFE}, "C-TM"),
    (Lists, {Check.LISTS: Verdict.MISSING}, "C-TM"),
    (OneReadBehind, {Check.READ: Verdict.UNSAFE}, "C-TM"),
    (MixesVersions, {Check.REPLACE: Verdict.UNSAFE}, "CLTM"),
    (ShiftsRanges, {Check.RANGES: Verdict.UNSAFE}, "CLTM"),
    (CutsRanges, {Check.RANGES: Verdict.UNSAFE}, "CLTM"),
    (IgnoresRanges, {Check.RANGES: Verdict.UNSAFE}, "CLTM"),
    (ServesBehindTheEnd, {Check.RANGES: Verdict.UNSAFE}, "CLTM"),
    (LosesTtls, {Check.TTL: Verdict.UNSAFE}, "-L-M"),
    (KeepsTtls, {Check.TTL: Verdict.MISSING}, "CL-M"),
    (HasNoTags, {Check.TTL: Verdict.MISSING}, "CL-M"),
    (FailsAtTags, {Check.TTL: Verdict.MISSING}, "CL-M"),
    (DeletesNeighbours, {Check.DELETE: Verdict.UNSAFE}, "C-TM"),
    (MayNotDelete, {Check.DELETE: Verdict.WARNING}, "CLTM"),
    (CompletesTwice, {Check.CONDITIONAL_MULTIPART: Verdict.MISSING}, "CLT-"),
    (LosesParts, {Check.MULTIPART: Verdict.UNSAFE}, "CLT-"),
    (
        HasNoMultipart,
        {Check.MULTIPART: Verdict.MISSING, Check.CONDITIONAL_MULTIPART: Verdict.MISSING, Check.ABORT: Verdict.MISSING},
        "CLT-",
    ),
    (NobodyCompletes, {Check.CONDITIONAL_MULTIPART: Verdict.MISSING}, "CLT-"),
    (NobodyKnows, {Check.CONDITIONAL_MULTIPART: Verdict.MISSING}, "CLT-"),
    (ReportsTheWrongWinner, {Check.CONDITIONAL_MULTIPART: Verdict.MISSING}, "CLT-"),
    (FailsAtAborts, {Check.ABORT: Verdict.MISSING}, "CLTM"),
    (MayNotAbort, {Check.ABORT: Verdict.WARNING}, "CLTM"),
    (HidesUploads, {Check.ABORT: Verdict.MISSING}, "CLTM"),
    (IsAhead, {Check.CLOCK: Verdict.WARNING}, "CLTM"),
    (DatesWrongly, {Check.CLOCK: Verdict.UNSAFE}, "CLTM"),
    (HasNoLifecycle, {Check.LIFECYCLE: Verdict.MISSING}, "CLTM"),
]


def letters(profile: StoreProfile | None) -> str:
    """A profile in the form of the table above."""
    if profile is None:
        return ""
    fields = (profile.atomic_create, profile.consistent_lists, profile.tags, profile.conditional_multipart)
    return "".join(letter if has else "-" for letter, has in zip("CLTM", fields, strict=True))


@pytest.mark.parametrize("lie, expected, profile", LIES, ids=lambda value: getattr(value, "__name__", ""))
async def test_a_lie_is_found_and_nothing_else(
    lie: type[MemoryStore], expected: dict[Check, Verdict], profile: str
) -> None:
    store = lie()
    report = await examine(store)
    found = {check: verdict for check, verdict in verdicts(report).items() if verdict is not Verdict.OK}
    assert found == expected, [row for row in report.checks if row.verdict is not Verdict.OK]
    assert letters(report.profile) == profile
    assert report.verdict is (Verdict.UNSAFE if Verdict.UNSAFE in expected.values() else Verdict.OK)
    assert report.profile_written
    if not isinstance(store, MayNotDelete):
        assert store._sorted_keys == [PROFILE_KEY]


async def test_two_winners_of_sixteen_are_enough() -> None:
    class LetsTwoWin(HonestS3):
        let = 0

        @override
        async def put_if_absent(self, key: str, body: Body, *, ttl_ms: int | None = None) -> CreateOutcome:
            outcome = await super().put_if_absent(key, body, ttl_ms=ttl_ms)
            if isinstance(outcome, Lost) and key.endswith("create/5") and not self.let:
                self.let += 1
                return await self.put(key, body)
            return outcome

    rows = {row.check: row for row in (await examine(LetsTwoWin())).checks}
    assert rows[Check.CREATE].verdict is Verdict.UNSAFE
    assert rows[Check.CREATE].meaning.startswith("2 of 16 clients had the answer that they had won")


async def test_a_rule_that_deletes_what_nobody_can_protect_is_unsafe_and_no_profile_is_written() -> None:
    store = HasNoTags()
    store.rules = [*backstop_rules("state", days=7)]
    report = await examine(store)
    assert verdicts(report)[Check.LIFECYCLE] is Verdict.UNSAFE
    assert (report.verdict, report.profile, report.profile_written) == (Verdict.UNSAFE, None, False)
    store.rules = [*backstop_rules("of-a-neighbour", days=7)]
    assert (await examine(store)).verdict is Verdict.OK


@pytest.mark.parametrize(
    "rule, ttl_days, is_safe",
    [
        ({"ID": "clean", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 365}}, 0, False),
        ({"ID": "clean", "Status": "Disabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 365}}, 0, True),
        ({"ID": "logs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 1}}, 0, True),
        ({**backstop_rules("state", days=7)[0], "Filter": {"Prefix": "state/"}}, 0, False),
        (backstop_rules("state", days=7)[0], 0, True),
        (backstop_rules("", days=6)[0], 0, False),
        (backstop_rules("", days=7)[0], 3, True),
        (backstop_rules("", days=33)[0], 30, False),
        (backstop_rules("", days=34)[0], 30, True),
    ],
)
async def test_a_rule_of_anybody_that_takes_what_is_needed_is_unsafe(rule: Rule, ttl_days: int, is_safe: bool) -> None:
    store = HonestS3()
    store.rules = [rule]
    if ttl_days:
        record = RepositoryRecord(id="x", ttl_ms=ttl_days * DAY_MS, margin_ms=1000, collection_period_ms=DAY_MS)
        await store.put(REPOSITORY, BytesBody(encode_record(record)))
    report = await examine(store)
    assert report.verdict is (Verdict.OK if is_safe else Verdict.UNSAFE)
    assert (PROFILE_KEY in store.stored) is is_safe
    meaning = {row.check: row.meaning for row in report.checks}[Check.LIFECYCLE]
    assert (f"rule {rule['ID']}: " in meaning) is not is_safe


@pytest.mark.parametrize(
    "error, verdict",
    [
        (AccessDeniedError("no", operation="read_lifecycle"), Verdict.DENIED),
        (StoreUnavailableError("500", operation="read_lifecycle"), Verdict.UNKNOWN),
        (CapabilityMissingError("501", operation="read_lifecycle"), Verdict.OK),
    ],
)
async def test_tags_are_given_up_only_if_no_rule_goes_by_them(error: Exception, verdict: Verdict) -> None:
    def fails(operation: str, key: str) -> Exception | None:
        if operation == "remove_ttl":
            return StoreUnavailableError("500", operation=operation, key=key)
        return error if operation == "read_lifecycle" else None

    store = Faulty(fails)
    report = await examine(store)
    assert verdicts(report)[Check.TTL] is Verdict.MISSING
    assert report.verdict is verdict
    assert letters(report.profile) == ("CL-M" if verdict is Verdict.OK else "")
    assert (PROFILE_KEY in store.stored) is (verdict is Verdict.OK)


# ---------------------------------------------------------------------- what is not a lie


class LoopRuntime(Runtime):
    """Its seconds are those of the loop, which jumps over waiting."""

    @override
    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


def examine_jumping(store: HonestS3) -> tuple[DoctorReport, float]:
    return run_jumping(examine_store(lambda: store, runtime=LoopRuntime(), release="x", save=True))


@pytest.mark.parametrize("with_rule", [False, True])
@pytest.mark.parametrize(
    "operation, word, check",
    [
        ("remove_ttl", "", Check.TTL),
        ("put_parts_if_absent", "/multipart", Check.MULTIPART),
        ("put_parts_if_absent", "conditional", Check.CONDITIONAL_MULTIPART),
        ("begin_upload", "", Check.ABORT),
    ],
)
def test_one_request_that_hangs_takes_nothing_away_for_good(
    operation: str, word: str, check: Check, with_rule: bool
) -> None:
    hung: list[str] = []

    def hangs(asked: str, key: str) -> bool:
        if asked != operation or word not in key or hung:
            return False
        hung.append(key)
        return True

    store = Hangs(hangs)
    store.rules = [*backstop_rules("state", days=7)] if with_rule else []
    report, took_s = examine_jumping(store)
    assert hung
    expected = Verdict.WARNING if check is Check.ABORT else Verdict.UNKNOWN
    assert {c: v for c, v in verdicts(report).items() if v is not Verdict.OK} == {check: expected}
    assert report.profile is None or report.profile.tags
    assert report.profile_written is (check is not Check.TTL)
    assert took_s < TOTAL_S_MAX


def test_an_error_of_one_time_takes_nothing_away_either() -> None:
    asked: list[str] = []

    def fails(operation: str, key: str) -> Exception | None:
        if operation != "remove_ttl":
            return None
        asked.append(key)
        return StoreUnavailableError("500", operation=operation, key=key) if len(asked) <= 4 else None

    report = asyncio.run(examine(Faulty(fails)))
    assert (report.verdict, letters(report.profile)) == (Verdict.OK, "CLTM")
    assert asked[4] != asked[0]


@pytest.mark.parametrize("takes_s", [0.01, 0.1, 0.2, 0.3, 0.6, 2.0, 10.0])
def test_a_slow_store_is_looked_at_within_a_minute_and_never_said_to_lack_anything(takes_s: float) -> None:
    store = Hangs(lambda operation, key: False, takes_s)
    report, took_s = examine_jumping(store)
    assert took_s < 60
    assert report.took_s <= TOTAL_S_MAX
    assert not {Verdict.MISSING, Verdict.UNSAFE} & set(verdicts(report).values())
    assert not any("-" in row.meaning.partition("within")[2] for row in report.checks)
    if takes_s <= 0.2:
        assert set(verdicts(report).values()) == {Verdict.OK}
        assert report.profile_written
    else:
        assert report.verdict in {Verdict.OK, Verdict.UNKNOWN}


def test_what_there_was_no_time_for_is_not_known_and_is_not_asked() -> None:
    store = Hangs(lambda operation, key: "/read/" in key or key.endswith(("/replace", "/ranges")))
    report, took_s = examine_jumping(store)
    assert took_s <= TOTAL_S_MAX
    meanings = {row.check: (row.verdict, row.meaning) for row in report.checks}
    assert meanings[Check.DELETE] == (Verdict.UNKNOWN, "run again: there was no time for it")
    assert meanings[Check.LIFECYCLE] == (Verdict.UNKNOWN, "run again: there was no time for it")
    assert not any(operation == "read_lifecycle" for operation, _ in store.asked)
    assert report.verdict is Verdict.UNKNOWN


def test_a_store_that_hangs_at_the_end_is_left_in_time() -> None:
    store = Hangs(lambda operation, key: key == PROFILE_KEY)
    report, took_s = examine_jumping(store)
    assert took_s <= TOTAL_S_MAX
    assert not report.profile_written
    assert isinstance(report.error, StoreUnavailableError)


@pytest.mark.parametrize(
    "round_s, rounds", [(0.0, 24), (0.02, 24), (0.2, 24), (0.4, 13), (1.0, 5), (3.0, 4), (99.0, 4)]
)
def test_lists_are_looked_at_as_often_as_there_is_time(round_s: float, rounds: int) -> None:
    assert choose_list_rounds(round_s) == rounds


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
async def test_a_store_that_is_unavailable_now_and_then_is_never_unsafe(seed: int, share: float) -> None:
    random = Random(seed)
    store = Faulty(lambda operation, key: busy(operation, key) if random.random() < share else None)
    try:
        report = await examine(store)
    except StoreUnavailableError:
        return  # not even the first request came through
    assert report.verdict in {Verdict.OK, Verdict.UNKNOWN}
    assert report.hiccups_count > 0
    if share < 0.1:
        assert report.verdict is Verdict.OK


@pytest.mark.parametrize(
    "operation, word, check",
    [
        ("put_if_absent", "create/", Check.CREATE),
        ("stat", "read/", Check.READ),
        ("get", "replace", Check.REPLACE),
        ("get", "from 1", Check.RANGES),
        ("list_page", "lists/", Check.LISTS),
        ("remove_ttl", "", Check.TTL),
        ("put", "clock", Check.CLOCK),
    ],
)
async def test_what_stays_busy_is_not_known_and_no_profile_takes_it_away(
    operation: str, word: str, check: Check
) -> None:
    store = Faulty(lambda o, key: busy(o, key) if o == operation and word in key else None)
    report = await examine(store)
    assert {c for c, v in verdicts(report).items() if v is not Verdict.OK} == {check}
    assert verdicts(report)[check] is Verdict.UNKNOWN
    assert report.verdict is Verdict.UNKNOWN
    deciding = check in {Check.CREATE, Check.READ, Check.LISTS, Check.TTL}
    assert letters(report.profile) == ("" if deciding else "CLTM")
    assert (PROFILE_KEY in store.stored) is not deciding


def denied(operation: str, key: str) -> Exception:
    return AccessDeniedError("AccessDenied (403)", operation=operation, key=key)


@pytest.mark.parametrize(
    "operation, verdict",
    [
        ("list_page", Verdict.DENIED),
        ("remove_ttl", Verdict.DENIED),
        ("stat", Verdict.DENIED),
        ("delete", Verdict.OK),
        ("read_lifecycle", Verdict.OK),
    ],
)
async def test_rights_that_lack_are_reported_and_are_not_a_fault_of_the_store(operation: str, verdict: Verdict) -> None:
    store = Faulty(lambda o, key: denied(o, key) if o == operation else None)
    report = await examine(store)
    assert report.verdict is verdict
    assert Verdict.UNSAFE not in verdicts(report).values()
    assert report.profile_written is (verdict is Verdict.OK)
    if operation == "delete":
        assert set(report.left) == {key for key in store.stored if key.startswith(report.root)}
        assert report.left
        assert "AccessDenied" in report.left_reason


async def test_what_stands_in_the_store_is_left_alone() -> None:
    seen: list[str] = []
    store = Faulty(lambda _, key: seen.append(key))
    for key in ("repository", "blobs/x", "doctor", "doctors/x", "doctor/of-another-run/x"):
        await MemoryStore.put(store, key, BytesBody(key.encode()))
    report = await examine(store)
    assert {key for key in seen if not key.startswith(report.root)} == {"", PROFILE_KEY}
    assert store.stored == ["blobs/x", "doctor", "doctor/of-another-run/x", "doctors/x", PROFILE_KEY, "repository"]


async def test_a_profile_that_may_not_be_written_is_reported() -> None:
    store = Faulty(lambda o, key: denied(o, key) if key == PROFILE_KEY else None)
    report = await examine(store)
    assert (report.verdict, report.profile_written) == (Verdict.OK, False)
    assert "AccessDenied" in report.profile_error


@pytest.mark.parametrize(
    "error",
    [
        StoreMissingError("NoSuchBucket", operation="put"),
        AccessDeniedError("no", operation="put"),
        StoreUnavailableError("nobody there", operation="put"),
    ],
)
async def test_a_store_that_answers_nothing_is_the_callers_error(error: Exception) -> None:
    store = Faulty(lambda o, key: error)
    with pytest.raises(type(error)):
        await examine(store)
    assert store.closed == CLIENTS_COUNT


async def test_an_error_on_the_way_cleans_up_too() -> None:
    store = Faulty(lambda o, key: ZeroDivisionError("a fault of ours") if o == "remove_ttl" else None)
    with pytest.raises(ZeroDivisionError):
        await examine(store)
    assert store.stored == []
    assert store.closed == CLIENTS_COUNT


async def test_it_reports_how_far_it_is() -> None:
    seen: list[tuple[Check, int, int]] = []
    store = HonestS3()
    await examine_store(
        lambda: store,
        runtime=Runtime(),
        release="x",
        save=False,
        on_check=lambda check, number, total: seen.append((check, number, total)),
    )
    assert {check for check, _, _ in seen} == set(Check)
    assert [(number, total) for _, number, total in seen] == [(i + 1, len(Check)) for i in range(len(Check))]


def test_its_prefix_is_none_of_a_repositorys() -> None:
    from index.snapshot import keys  # noqa: PLC0415

    assert ROOT not in {keys.BLOBS, keys.INDEXES, keys.LOG, keys.NAMES, keys.PINS}


# ---------------------------------------------------------------------- judging


UNAVAILABLE = StoreUnavailableError("no answer", operation="get")
DENIED = AccessDeniedError("not allowed", operation="get")
UNSUPPORTED = StoreError("no such request", operation="get")


@pytest.mark.parametrize(
    "check, found, verdict",
    [
        (Check.CREATE, Evidence(), Verdict.OK),
        (Check.CREATE, Evidence(broken="x"), Verdict.UNSAFE),
        (Check.CREATE, Evidence(broken="x", lacking="y"), Verdict.UNSAFE),
        (Check.CREATE, UNAVAILABLE, Verdict.UNKNOWN),
        (Check.CREATE, DENIED, Verdict.DENIED),
        (Check.CREATE, UNSUPPORTED, Verdict.UNSAFE),
        (Check.TTL, Evidence(lacking="x"), Verdict.MISSING),
        (Check.TTL, UNSUPPORTED, Verdict.MISSING),
        (Check.TTL, UNAVAILABLE, Verdict.UNKNOWN),
        (Check.DELETE, DENIED, Verdict.WARNING),
        (Check.ABORT, UNAVAILABLE, Verdict.WARNING),
        (Check.ABORT, NotApplicableError("only S3 has this"), Verdict.NOT_APPLICABLE),
    ],
)
def test_verdicts(check: Check, found: Evidence | Exception, verdict: Verdict) -> None:
    assert judge(check, found).verdict is verdict


@pytest.mark.parametrize("check", Check)
@pytest.mark.parametrize("error", [DENIED, UNAVAILABLE, TimeoutError("late"), NoTimeError("no time")], ids=repr)
def test_what_could_not_be_found_out_is_never_unsafe(check: Check, error: Exception) -> None:
    row = judge(check, error)
    assert row.verdict not in {Verdict.UNSAFE, Verdict.OK, Verdict.MISSING}
    assert row.meaning


@pytest.mark.parametrize(
    "ahead_ms, skew_ms, verdict",
    [
        (0, 0, Verdict.OK),
        (-299_000, 2000, Verdict.OK),
        (301_000, 0, Verdict.WARNING),
        (-301_000, 0, Verdict.WARNING),
        (0, 301_000, Verdict.UNSAFE),
    ],
)
def test_clocks(ahead_ms: int, skew_ms: int, verdict: Verdict) -> None:
    assert judge(Check.CLOCK, judge_clock(ahead_ms=ahead_ms, skew_ms=skew_ms)).verdict is verdict


def _rows(**others: Verdict) -> list[CheckResult]:
    return [CheckResult(check=check, verdict=others.get(check.name.lower(), Verdict.OK)) for check in Check]


@pytest.mark.parametrize(
    "others, profile",
    [
        ({}, "CLTM"),
        ({"create": Verdict.UNSAFE}, "-LTM"),
        ({"create": Verdict.UNSAFE, "ttl": Verdict.UNKNOWN}, "-L-M"),
        ({"create": Verdict.UNKNOWN}, ""),
        ({"lists": Verdict.DENIED}, ""),
        ({"read": Verdict.UNSAFE}, "C-TM"),
        ({"ttl": Verdict.UNKNOWN}, ""),
        ({"conditional_multipart": Verdict.UNKNOWN}, "CLT-"),
        ({"multipart": Verdict.NOT_APPLICABLE}, "CLT-"),
        ({"lifecycle": Verdict.UNSAFE, "ttl": Verdict.MISSING}, ""),
        ({"lifecycle": Verdict.DENIED, "ttl": Verdict.MISSING}, ""),
        ({"lifecycle": Verdict.WARNING, "ttl": Verdict.MISSING}, ""),
        ({"lifecycle": Verdict.UNKNOWN, "ttl": Verdict.UNSAFE}, ""),
        ({"lifecycle": Verdict.MISSING, "ttl": Verdict.MISSING}, "CL-M"),
        ({"lifecycle": Verdict.NOT_APPLICABLE, "ttl": Verdict.MISSING}, "CL-M"),
        ({"lifecycle": Verdict.WARNING}, "CLTM"),
        ({"delete": Verdict.WARNING}, "CLTM"),
    ],
)
def test_profiles(others: dict[str, Verdict], profile: str) -> None:
    made = choose_profile(_rows(**others), probed_at_ms=5, release="x")
    assert letters(made) == profile


def test_with_a_backstop_a_profile_never_denies_tags() -> None:
    rows = [
        msgspec.structs.replace(row, has_backstop=True) if row.check is Check.LIFECYCLE else row
        for row in _rows(create=Verdict.UNSAFE, ttl=Verdict.UNKNOWN)
    ]
    assert choose_profile(rows, probed_at_ms=5, release="x") is None


def test_a_profile_is_reported_in_words() -> None:
    shown = describe_profile(
        StoreProfile(
            atomic_create=False,
            consistent_lists=False,
            tags=False,
            conditional_multipart=False,
            probed_at_ms=0,
            tidemark="x",
        ),
        blob_bytes_max=5,
    )
    assert sum("refused from now on" in line for line in shown) == 2

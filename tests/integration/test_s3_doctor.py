"""`doctor` and `lifecycle` on real S3 servers, and on one that takes every create."""

import asyncio
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner, Result

from blobstore.errors import AccessDeniedError, StoreError, StoreFullError, StoreUnavailableError
from blobstore.s3.bucket_rules import backstop_rules, plan_lifecycle
from blobstore.s3.client import S3Client
from blobstore.s3.settings import PROFILE_KEY, StoreProfile, decode_profile, encode_profile
from blobstore.s3.store import S3Store
from engine.cli import tidemark
from engine.cli.session import Session
from engine.doctor import doctor
from tests.fault_proxy import FaultProxy
from tests.fault_rules import Rule, every, on, shifted_range, slow_down
from tests.servers.ceph_rgw import CephRgw
from tests.servers.moto_server import MotoServer
from tests.servers.s3_server import S3Server

pytestmark = pytest.mark.s3

PREFIX = "team/state"
FOREIGN = {"ID": "logs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 30}}


class Shell:
    """A user's shell with a bucket."""

    def __init__(self, server: S3Server, bucket: str) -> None:
        self.server = server
        self.bucket = bucket
        self.url = f"s3://{bucket}/{PREFIX}"

    def run(self, *words: str, code: int = 0, answer: str | None = None, **environment: str) -> Result:
        """A command line that ends with `code`."""
        environment = {"TIDEMARK_REPOSITORY": self.url, **environment}
        result = CliRunner().invoke(tidemark, list(words), env=environment, input=answer)
        assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.stdout}\n{result.stderr}"
        return result

    def result(self, *words: str, code: int = 0, **environment: str) -> Any:
        """The JSON object of it."""
        result = self.run(*words, "--json", code=code, **environment)
        return json.loads(result.stdout or result.stderr)

    def stored(self) -> list[str]:
        """Every key of the bucket."""
        return [c["Key"] for c in self.server.client.list_objects_v2(Bucket=self.bucket).get("Contents", ())]

    def rules(self) -> list[Any]:
        """Every lifecycle rule of the bucket."""
        try:
            rules: list[Any] = self.server.client.get_bucket_lifecycle_configuration(Bucket=self.bucket)["Rules"]
        except self.server.client.exceptions.ClientError:
            return []
        return rules

    def examined(self, *, tags: bool = True, prefix: str = PREFIX) -> None:
        """As `doctor` leaves the store behind, in no time."""
        profile = StoreProfile(
            atomic_create=True,
            consistent_lists=True,
            tags=tags,
            conditional_multipart=False,
            probed_at_ms=0,
            tidemark="0",
        )
        key = f"{prefix}/{PROFILE_KEY}"
        self.server.client.put_object(Bucket=self.bucket, Key=key, Body=encode_profile(profile))

    def set_rules(self, *rules: Any) -> None:
        """Write them as somebody else would."""
        configuration = {"Rules": list(rules)}
        self.server.client.put_bucket_lifecycle_configuration(Bucket=self.bucket, LifecycleConfiguration=configuration)


@pytest.fixture
def shell(
    s3_server: S3Server, new_bucket: Callable[[S3Server], str], own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Shell:
    """With Ceph, where it is installed. `doctor` looks briefly here, and for as long as ever in the first two tests."""
    monkeypatch.setattr(doctor, "CLIENTS_COUNT", 6)
    return Shell(s3_server, new_bucket(s3_server))


def _verdicts(report: Any) -> dict[str, str]:
    return {check["check"]: check["verdict"] for check in report["checks"]}


def test_ceph_is_safe_and_cannot_complete_uploads_conditionally(
    ceph_server: CephRgw, new_bucket: Callable[[S3Server], str]
) -> None:
    shell = Shell(ceph_server, new_bucket(ceph_server))
    report = shell.result("doctor")
    assert {c: v for c, v in _verdicts(report).items() if v != "ok"} == {"conditional_multipart": "missing"}
    assert (report["safe"], report["left"], report["profile_written"]) == (True, [], True)
    assert report["took_s"] < 60
    assert shell.stored() == [f"{PREFIX}/profile"]
    assert "Uploads" not in ceph_server.client.list_multipart_uploads(Bucket=shell.bucket)
    profile = decode_profile(ceph_server.client.get_object(Bucket=shell.bucket, Key=shell.stored()[0])["Body"].read())
    assert (profile.atomic_create, profile.consistent_lists, profile.tags) == (True, True, True)
    assert not profile.conditional_multipart


@pytest.mark.soak  # what moto has is what a user without Ceph tries things with; Ceph stands for the real ones
def test_moto_has_everything(moto_server: MotoServer, new_bucket: Callable[[S3Server], str]) -> None:
    shell = Shell(moto_server, new_bucket(moto_server))
    report = shell.result("doctor", "--no-save")
    assert set(_verdicts(report).values()) == {"ok"}
    assert (report["profile"]["conditional_multipart"], report["profile_written"]) == (True, False)
    assert shell.stored() == []


def test_an_older_profile_does_not_hide_what_the_store_can_do_now(shell: Shell) -> None:
    poor = b'{"schema":1,"atomic_create":false,"consistent_lists":false,"tags":false,"conditional_multipart":false,'
    poor += b'"probed_at_ms":1,"tidemark":"x"}'
    shell.server.client.put_object(Bucket=shell.bucket, Key=f"{PREFIX}/profile", Body=poor)
    assert shell.result("init", code=9)["error"] == "UnsafeStoreError"
    assert shell.result("doctor")["profile"]["tags"] is True
    shell.run("init")


def test_a_server_that_takes_every_create_is_unsafe_and_refused_from_then_on(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = S3Client.call

    async def call_without_condition(self: S3Client, method: str, **arguments: Any) -> Any:
        arguments.pop("IfNoneMatch", None)
        return await call(self, method, **arguments)

    # As a server that has never heard of conditions.
    monkeypatch.setattr(S3Client, "call", call_without_condition)
    report = shell.result("doctor", code=9)
    found = _verdicts(report)
    assert (found["create"], found["conditional_multipart"]) == ("unsafe", "missing")
    assert report["profile"]["atomic_create"] is False
    assert "NOT SAFE" in shell.run("doctor", "--no-save", code=9).stdout
    # Everybody who opens the store is bound by what was found.
    monkeypatch.undo()
    for name, value in shell.server.environment().items():
        monkeypatch.setenv(name, value)
    refused = shell.result("init", code=9)
    assert refused["error"] == "UnsafeStoreError"
    assert shell.stored() == [f"{PREFIX}/profile"]


@pytest.mark.parametrize("share, codes", [(0.02, {0}), pytest.param(0.2, {0, 5}, marks=pytest.mark.soak), (1.0, {5})])
async def test_a_busy_server_is_never_called_unsafe(shell: Shell, share: float, codes: set[int]) -> None:
    async with FaultProxy(shell.server.endpoint_url, rng=Random(7)) as proxy:
        proxy.rules.append(Rule(fault=slow_down(), when=every, times=None, probability=share))
        words = ["doctor", shell.url, "--endpoint-url", proxy.endpoint_url, "--json"]
        result = await asyncio.to_thread(lambda: CliRunner().invoke(tidemark, words))
    assert result.exit_code in codes, result.output
    if result.stdout:
        report = json.loads(result.stdout)
        assert "unsafe" not in _verdicts(report).values()
        assert report["hiccups_count"] > 0
        assert report["took_s"] < 60


async def test_a_server_that_sends_other_ranges_is_unsafe(shell: Shell) -> None:
    async with FaultProxy(shell.server.endpoint_url) as proxy:
        proxy.rules.append(Rule(fault=shifted_range(), when=on("GetObject", key="/ranges"), times=None))
        words = ["doctor", shell.url, "--endpoint-url", proxy.endpoint_url, "--json"]
        result = await asyncio.to_thread(lambda: CliRunner().invoke(tidemark, words))
    assert result.exit_code == 9, result.output
    assert {c for c, v in _verdicts(json.loads(result.stdout)).items() if v == "unsafe"} == {"ranges"}


@pytest.mark.parametrize(
    "words, code",
    [
        (["doctor", "s3://no-such-bucket-here/x"], 7),
        (["lifecycle", "s3://no-such-bucket-here/x"], 7),
        (["doctor", "--endpoint-url", "http://127.0.0.1:9"], 2),
        (["doctor", "--endpoint-url", "http://192.0.2.1"], 2),
        (["doctor", "--endpoint-url", "https://key:secret@192.0.2.1"], 2),
        (["list", "-r", "s3://bucket/a*b"], 2),
    ],
)
def test_what_is_not_there_is_reported_in_the_words_of_every_verb(shell: Shell, words: list[str], code: int) -> None:
    failure = shell.result(*words, code=code)
    assert (failure["code"], bool(failure["hint"])) == (code, True)
    assert "fault of tidemark" not in failure["hint"]


@pytest.mark.parametrize(
    "environment",
    [
        {"AWS_ENDPOINT_URL_S3": "nonsense"},
        {"AWS_ENDPOINT_URL_S3": "http://192.0.2.1"},
        {"AWS_ENDPOINT_URL_S3": "https://key:secret@192.0.2.1"},
        {"AWS_ENDPOINT_URL_S3": "key:secret@192.0.2.1:9000"},
        {"AWS_PROFILE": "nope"},
        {"AWS_CA_BUNDLE": "/no/such/file.pem"},
        {"TIDEMARK_S3_CA_BUNDLE": "/no/such/file.pem"},
    ],
    ids=" ".join,
)
def test_wrong_settings_are_usage(shell: Shell, environment: dict[str, str]) -> None:
    for words in (["list"], ["doctor"]):
        failure = shell.result(*words, code=2, **environment)
        assert "fault of tidemark" not in failure["hint"]
        assert "secret" not in str(failure)


def test_wrong_credentials_are_denied(ceph_server: CephRgw, new_bucket: Callable[[S3Server], str]) -> None:
    shell = Shell(ceph_server, new_bucket(ceph_server))
    assert shell.result("doctor", code=8, AWS_SECRET_ACCESS_KEY="wrong")["error"] == "AccessDeniedError"
    nothing = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    assert "standard chain" in shell.result("doctor", code=8, **nothing)["hint"]


# ---------------------------------------------------------------------- lifecycle


def test_rules_are_shown_and_installed_and_others_stay(shell: Shell) -> None:
    shell.set_rules(FOREIGN)
    others = shell.rules()
    shell.run("init", "--ttl", "8d")
    shell.examined()
    shown = shell.result("lifecycle")
    assert (shown["done"], shown["days"], len(shown["others"]), len(shown["added"])) == (False, 12, 1, 2)
    assert shell.rules() == others
    text = shell.run("lifecycle").stdout
    assert '"Value": "expiring"}]}}, "Expiration": {"Days": 12}}' in text
    assert "nothing was changed" in text

    assert shell.result("lifecycle", "--install", "--yes")["done"] is True
    plan = plan_lifecycle(shell.rules(), backstop_rules(PREFIX, days=12), prefix=PREFIX)
    assert (list(plan.others), len(plan.kept), plan.added) == (others, 2, ())
    again = shell.result("lifecycle", "--install", "--yes")
    assert (again["done"], len(again["kept"])) == (False, 2)
    assert {c["check"]: c["figure"] for c in shell.result("doctor")["checks"]}["lifecycle"].endswith(
        "backstop installed"
    )

    text = shell.run("lifecycle").stdout
    assert text.endswith("nothing to change\n")
    (command,) = (line for line in text.splitlines() if line.startswith("to remove ours: "))
    words = shlex.split(command)[3:]
    assert words[:4] == ["aws", "s3api", "put-bucket-lifecycle-configuration", "--lifecycle-configuration"]
    shell.set_rules(*json.loads(words[4])["Rules"])
    assert shell.rules() == others


def test_where_all_rules_are_ours_the_command_that_removes_them_deletes_all(shell: Shell) -> None:
    shell.run("init")
    shell.examined()
    shell.run("lifecycle", "--install", "--yes")
    assert len(shell.rules()) == 2
    assert (
        f"to remove ours: aws s3api delete-bucket-lifecycle --bucket {shell.bucket}\n" in shell.run("lifecycle").stdout
    )


def test_two_repositories_of_a_bucket_have_rules_of_their_own(shell: Shell) -> None:
    for url in (shell.url, f"s3://{shell.bucket}/team-state"):
        shell.run("init", "-r", url)
        shell.examined(prefix=url.split("/", 3)[3])
        shell.run("lifecycle", url, "--install", "--yes")
    assert len(shell.rules()) == 4
    shown = shell.result("lifecycle")
    assert {rule["ID"] for rule in shown["others"]} == {"tidemark-expire-team-state", "tidemark-abort-team-state"}


@pytest.mark.parametrize("answer, changed", [("y\n", True), ("n\n", False)])
def test_it_asks_before_it_changes_anything(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, answer: str, changed: bool
) -> None:
    shell.run("init")
    shell.examined()
    refused = shell.run("lifecycle", "--install", code=2)
    assert "say --yes" in refused.stderr
    monkeypatch.setattr(Session, "can_ask", lambda session: True)
    done = shell.run("lifecycle", "--install", answer=answer)
    assert "tidemark-expire-team~2Fstate" in done.output
    assert len(shell.rules()) == (2 if changed else 0)
    assert ("nothing was changed" in done.output) is not changed


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_change_of_somebody_else_is_a_conflict(shell: Shell, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    shell.run("init")
    shell.examined()
    read, reads = S3Store.read_lifecycle, 0

    async def read_after_a_change(self: S3Store) -> Any:
        nonlocal reads
        reads += 1
        if reads == (2 if moment == "before" else 3):
            shell.set_rules(FOREIGN)
        return await read(self)

    monkeypatch.setattr(S3Store, "read_lifecycle", read_after_a_change)
    failure = shell.result("lifecycle", "--install", "--yes", code=6)
    assert failure["error"] == "ConflictError"
    assert [rule["ID"] for rule in shell.rules()] == ["logs"]


def test_a_store_without_tags_gets_no_rule_that_deletes(shell: Shell) -> None:
    shell.run("init")
    shell.examined(tags=False)
    refused = shell.result("lifecycle", "--install", "--yes", code=2)
    assert "delete what is committed" in refused["message"]
    assert shell.rules() == []
    assert shell.result("lifecycle")["added"] == []
    assert "--install is refused" in shell.run("lifecycle").stdout


def test_nothing_is_installed_before_somebody_has_seen_that_tags_work(shell: Shell) -> None:
    shell.run("init")
    refused = shell.result("lifecycle", "--install", "--yes", code=2)
    assert refused["hint"] == "run `tidemark doctor` first"
    assert shell.rules() == []


def test_without_a_repository_there_is_no_ttl_to_go_by(shell: Shell) -> None:
    shell.set_rules(FOREIGN)
    assert shell.result("lifecycle", "--install", "--yes", code=7)["error"] == "NotFoundError"
    shown = shell.result("lifecycle")
    assert (shown["days"], shown["added"], [rule["ID"] for rule in shown["others"]]) == (None, [], ["logs"])
    assert "once there is a repository" in shell.run("lifecycle").stdout


def test_a_rule_of_somebody_else_that_deletes_what_is_committed_is_reported(shell: Shell) -> None:
    shell.set_rules({"ID": "clean", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 365}})
    shell.run("init")
    shell.examined()
    done = shell.run("lifecycle")
    assert "warning: rule clean: the whole bucket is deleted after 365 days" in done.stderr
    installed = shell.result("lifecycle", "--install", "--yes")
    assert (installed["done"], len(installed["threats"])) == (True, 1)
    assert len(shell.rules()) == 3
    report = shell.result("doctor", "--no-save", code=9)
    assert _verdicts(report)["lifecycle"] == "unsafe"
    assert (report["profile"], report["safe"]) == (None, False)


def test_a_repository_below_another_with_a_longer_ttl_is_not_cut_short(shell: Shell) -> None:
    outer, inner = shell.url, f"{shell.url}/deep"
    for url, ttl in ((outer, "1d"), (inner, "30d")):
        shell.run("init", "-r", url, "--ttl", ttl)
        shell.examined(prefix=url.split("/", 3)[3])
    shell.run("lifecycle", inner, "--install", "--yes")
    refused = shell.result("lifecycle", outer, "--install", "--yes", code=9)
    assert "tidemark-expire-team~2Fstate~2Fdeep" in refused["message"]
    assert len(shell.rules()) == 2
    # The other way round the outer rule is there already.
    shell.set_rules(*backstop_rules(PREFIX, days=7))
    (threat,) = shell.result("lifecycle", inner, "--install", "--yes")["threats"]
    assert threat.startswith("rule tidemark-expire-team~2Fstate: ")
    assert "needs 34 days" in threat
    assert _verdicts(shell.result("doctor", inner, "--no-save", code=9))["lifecycle"] == "unsafe"
    assert _verdicts(shell.result("doctor", outer, "--no-save"))["lifecycle"] == "ok"


# Each is a whole examination of a store; which error has which code, tests of the codes say of all.
@pytest.mark.parametrize(
    "fails, code",
    [
        (AccessDeniedError, 8),
        pytest.param(StoreUnavailableError, 5, marks=pytest.mark.soak),
        pytest.param(StoreFullError, 5, marks=pytest.mark.soak),
    ],
)
def test_a_profile_that_cannot_be_written_has_the_code_of_its_reason(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, fails: type[StoreError], code: int
) -> None:
    put = S3Store.put

    async def put_but_no_profile(self: S3Store, key: str, body: Any, **more: Any) -> Any:
        if key == PROFILE_KEY:
            raise fails("no", operation="put", key=key)
        return await put(self, key, body, **more)

    monkeypatch.setattr(S3Store, "put", put_but_no_profile)
    report = shell.result("doctor", code=code)
    assert (report["safe"], report["profile_written"], bool(report["profile_error"])) == (True, False, True)

"""The policies that `doctor --policy` prints, on Ceph: each role may do its work, and all else is denied."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from blobstore.base import BytesBody
from blobstore.errors import AccessDeniedError
from blobstore.opening import open_s3
from blobstore.s3.bucket_rules import Role, role_policy
from engine.cli import tidemark
from tests.integration.s3_fault_bench import AgedBackend
from tests.servers.ceph_rgw import CephRgw, Keys

pytestmark = pytest.mark.s3

PREFIX = "team/state"


class Site:
    """A bucket with a repository below a prefix, a neighbour beside it, and a user for each role."""

    def __init__(
        self,
        *,
        server: CephRgw,
        users: dict[Role, Keys],
        bucket: str,
        prefix: str,
        directory: Path,
        patch: pytest.MonkeyPatch,
    ) -> None:
        self.server = server
        self.bucket = bucket
        self.prefix = prefix
        self.url = f"s3://{bucket}/{prefix}"
        self.directory = directory
        self._users = users
        self._patch = patch
        self.allow(Role)

    def allow(self, roles: Any, *, without: str = "", denied: str = "") -> None:
        """Let users do what the policies of their roles say, but for one statement or one action."""
        statements = [
            {
                **statement,
                "Action": [action for action in statement["Action"] if action != denied],
                "Sid": f"{role.value}{statement['Sid']}",
                "Principal": {"AWS": [f"arn:aws:iam:::user/{role.value}"]},
            }
            for role in roles
            for statement in role_policy(role, bucket=self.bucket, prefix=self.prefix)["Statement"]
            if statement["Sid"] != without
        ]
        policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
        self.server.client.put_bucket_policy(Bucket=self.bucket, Policy=policy)

    def become(self, role: Role) -> None:
        """From now on requests are signed by a user with this role."""
        self._patch.setenv("AWS_ACCESS_KEY_ID", self._users[role].access_key)
        self._patch.setenv("AWS_SECRET_ACCESS_KEY", self._users[role].secret_key)

    def run(self, role: Role, *words: str, code: int = 0) -> Result:
        """A command line of a user with a role."""
        self.become(role)
        environment = {
            "TIDEMARK_REPOSITORY": self.url,
            "TIDEMARK_JOB": "flights",
            "TIDEMARK_COLLECT_DELETE_AT_MOST": "100%",
        }
        result = CliRunner().invoke(tidemark, list(words), env=environment)
        assert result.exit_code == code, f"{role}, {words}: {result.exit_code}\n{result.stdout}\n{result.stderr}"
        return result

    def result(self, role: Role, *words: str, code: int = 0) -> Any:
        """The JSON object of it."""
        result = self.run(role, *words, "--json", code=code)
        return json.loads(result.stdout or result.stderr)

    def source(self, text: str) -> str:
        """A directory to back up."""
        directory = self.directory / "source"
        directory.mkdir(exist_ok=True)
        for name, size in (("000001.sst", 300_000), ("small", 5000), ("CURRENT", 10)):
            (directory / name).write_bytes((text * size).encode()[:size])
        return str(directory)

    def stored(self, prefix: str = "") -> set[str]:
        """What is in the repository, seen by the owner of the bucket."""
        root = f"{self.prefix}/" if self.prefix else ""
        listed = self.server.client.list_objects_v2(Bucket=self.bucket, Prefix=root + prefix).get("Contents", ())
        return {entry["Key"].removeprefix(root) for entry in listed}


@pytest.fixture(scope="module")
def users(ceph_server: CephRgw) -> dict[Role, Keys]:
    """A user for each role; none of them owns anything."""
    return {role: ceph_server.add_user(role.value) for role in Role}


@pytest.fixture
def site(
    request: pytest.FixtureRequest,
    users: dict[Role, Keys],
    new_bucket: Callable[[Any], str],
    own_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Site:
    """A repository that its owner has made, below a prefix unless the test asks for another place."""
    ceph_server: CephRgw = request.getfixturevalue("ceph_server")
    site = Site(
        server=ceph_server,
        users=users,
        bucket=new_bucket(ceph_server),
        prefix=getattr(request, "param", PREFIX),
        directory=own_directory,
        patch=monkeypatch,
    )
    site.run(Role.OWNER, "init")
    return site


in_a_bucket_of_its_own = pytest.mark.parametrize("site", [""], ids=["own bucket"], indirect=True)
anywhere = pytest.mark.parametrize("site", ["", PREFIX], ids=["own bucket", "prefix"], indirect=True)


@anywhere
def test_each_role_can_do_its_work(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("a", "b", "c"):
        site.run(Role.WRITER, "backup", site.source(text))
    site.run(Role.WRITER, "name", "1", "first")
    site.run(Role.WRITER, "unname", "first")
    site.run(Role.WRITER, "name", "1", "again")
    site.run(Role.WRITER, "rewind", "2")
    site.run(Role.WRITER, "fork", "3", "replay")
    site.run(Role.WRITER, "verify", "--heal")
    assert site.result(Role.RESTORER, "restore", "restored")["pinned"] is True
    assert (site.directory / "restored" / "small").read_bytes() == b"b" * 5000
    site.run(Role.RESTORER, "list")
    site.run(Role.RESTORER, "show", "--files")
    site.run(Role.RESTORER, "diff", "1", "3")
    site.run(Role.RESTORER, "verify", "--level", "content")
    assert site.stored("pins/")
    site.run(Role.WRITER, "unname", "again")
    # Ceph judges a batch delete by the bucket, to which none of these policies gives a right: it goes one by one.
    monkeypatch.setattr("engine.collect.collect.InProcessBackend", AgedBackend)
    collected = site.result(Role.COLLECTOR, "collect", "--keep-last", "1")
    assert collected["failed"] == []
    assert {d["reason"] for d in collected["deleted"]} >= {"closed_commit", "unreachable_upload", "expired_pin"}
    site.run(Role.COLLECTOR, "verify")
    site.run(Role.RESTORER, "restore", "after-all")


@pytest.mark.parametrize(
    "role, words",
    [
        (Role.WRITER, ["init", "-r", "{url}/below"]),
        (Role.WRITER, ["doctor"]),
        (Role.RESTORER, ["backup", "{source}"]),
        (Role.RESTORER, ["rewind", "1"]),
        (Role.RESTORER, ["name", "1", "x"]),
        (Role.RESTORER, ["collect", "--keep-last", "1"]),
        (Role.COLLECTOR, ["backup", "{source}"]),
        (Role.COLLECTOR, ["rewind", "1"]),
        (Role.RESTORER, ["doctor"]),
        (Role.COLLECTOR, ["lifecycle"]),
        (Role.OWNER, ["backup", "{source}"]),
        (Role.OWNER, ["rewind", "1"]),
    ],
    ids=lambda value: value.value if isinstance(value, Role) else value[0],
)
def test_what_another_role_does_is_denied(site: Site, role: Role, words: list[str]) -> None:
    for text in ("a", "b", "c"):
        site.run(Role.WRITER, "backup", site.source(text))
    before = site.stored()
    words = [word.format(url=site.url, source=site.source("d")) for word in words]
    failure = site.result(role, *words, code=8)
    assert failure["error"] == "AccessDeniedError"
    assert "--policy" in failure["hint"]
    assert {key for key in site.stored() - before if not key.startswith("pins/")} == set()
    assert before - site.stored() == set()


def test_a_writer_deletes_nothing(site: Site) -> None:
    for text in ("a", "b", "c"):
        site.run(Role.WRITER, "backup", site.source(text))
    blobs = site.stored("blobs/")
    # A boundary may not be written either, so that nothing is closed by somebody who cannot finish it.
    assert site.result(Role.WRITER, "collect", "--keep-last", "1", code=8)["error"] == "AccessDeniedError"
    assert site.stored("blobs/") == blobs
    assert {key for key in site.stored("log/") if key.endswith(".boundary")} == set()


async def test_nobody_reaches_beside_the_prefix(site: Site) -> None:
    site.server.client.put_object(Bucket=site.bucket, Key="team/other", Body=b"a neighbour's")
    for role in Role:
        site.become(role)
        store = open_s3(f"s3://{site.bucket}/team")
        try:
            with pytest.raises(AccessDeniedError):
                await store.stat("other")
            with pytest.raises(AccessDeniedError):
                await store.put("other", BytesBody(b"mine"))
            with pytest.raises(AccessDeniedError):
                await store.list_page("")
            failures = await _delete(store, "other")
            assert failures
        finally:
            await store.close()
    assert site.server.client.get_object(Bucket=site.bucket, Key="team/other")["Body"].read() == b"a neighbour's"


async def _delete(store: Any, key: str) -> Any:
    """What was not deleted; some servers deny the whole request."""
    try:
        return await store.delete([key])
    except AccessDeniedError as error:
        return (error,)


def test_a_restorer_without_the_right_to_pin_restores_and_says_so(site: Site) -> None:
    site.run(Role.WRITER, "backup", site.source("a"))
    site.allow(Role, without="Pin")
    restored = site.result(Role.RESTORER, "restore", "target")
    assert restored["pinned"] is False
    assert (site.directory / "target" / "small").read_bytes() == b"a" * 5000
    assert site.stored("pins/") == set()


@in_a_bucket_of_its_own
def test_the_owner_finds_out_about_the_store_and_installs_the_backstop(site: Site) -> None:
    report = site.result(Role.OWNER, "doctor")
    assert (report["safe"], report["profile_written"], report["left"]) == (True, True, [])
    assert {c["check"]: c["verdict"] for c in report["checks"]}["lifecycle"] == "ok"
    assert site.result(Role.OWNER, "lifecycle", "--install", "--yes")["done"] is True
    # Everybody else works with the profile that is there now.
    site.run(Role.WRITER, "backup", site.source("a"))
    site.run(Role.RESTORER, "restore", "target")
    site.run(Role.COLLECTOR, "collect", "--keep-last", "1")


def test_doctor_says_what_it_could_not_delete(site: Site) -> None:
    site.allow([Role.OWNER], denied="s3:DeleteObject")
    report = site.result(Role.OWNER, "doctor", "--no-save")
    verdicts = {c["check"]: c["verdict"] for c in report["checks"]}
    assert (report["safe"], verdicts["delete"], report["profile_written"]) == (True, "warning", False)
    assert report["left"]
    assert set(report["left"]) == {key for key in site.stored() if key.startswith("doctor/")}
    assert "AccessDenied" in report["left_reason"]


@pytest.mark.parametrize("role", [Role.RESTORER, Role.COLLECTOR])
def test_doctor_fails_for_a_role_that_may_not_look(site: Site, role: Role) -> None:
    assert site.result(role, "doctor", code=8)["error"] == "AccessDeniedError"
    assert "profile" not in site.stored()
    assert not any(key.startswith("doctor/") for key in site.stored())

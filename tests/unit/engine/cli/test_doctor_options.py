"""The command lines of `doctor` and `lifecycle`."""

import json
from pathlib import Path

import pytest

from engine.cli.options import Common
from tests.unit.engine.cli.conftest import Run


def test_a_url_may_stand_after_the_verb(run: Run, seen: list[Common]) -> None:
    run("doctor", "memory://argument", TIDEMARK_REPOSITORY="memory://environment")
    run("lifecycle", "memory://argument", "-r", "memory://option")
    run("doctor", TIDEMARK_REPOSITORY="memory://environment")
    assert [c.repository for c in seen] == ["memory://argument", "memory://argument", "memory://environment"]
    result = run("doctor")
    assert result.exit_code == 2
    assert "--repository, TIDEMARK_REPOSITORY, or the key `repository` in tidemark.toml" in result.stderr


@pytest.mark.parametrize("url", ["memory://doctored", "file:doctored"], ids=["memory", "file"])
def test_doctor_reports_a_table_and_ends_with_0(run: Run, tmp_path: Path, url: str) -> None:
    url = f"file://{tmp_path}/doctored" if url.startswith("file") else url
    (tmp_path / "doctored").mkdir()
    shown = run("doctor", url)
    assert (shown.exit_code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert all(len(line) <= 120 for line in lines)
    assert lines[0].split() == ["verdict", "check", "what", "it", "means", "(what", "was", "seen)"]
    assert "ok       conditional create     of any number of writers one wins (6 races" in shown.stdout
    assert "n/a      multipart abort        only S3 has this" in shown.stdout
    assert "this blob store is SAFE for tidemark" in shown.stdout
    report = json.loads(run("doctor", url, "--json").stdout)
    assert (report["schema"], report["verb"], report["safe"], report["verdict"]) == (1, "doctor", True, "ok")
    assert {"check", "verdict", "figure", "meaning", "has_backstop"} == report["checks"][0].keys()
    assert (report["profile"], report["profile_written"], report["left"]) == (None, False, [])
    assert run("doctor", url, "-q").output == ""
    assert not [p for p in tmp_path.rglob("doctor/**/*") if p.is_file()]


def test_doctor_takes_a_path_as_spark_prints_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "50%25").mkdir()
    assert run("doctor", f"file:{tmp_path}/50%25").exit_code == 0


@pytest.mark.parametrize("begin", ["", "file:", "file://"])
def test_doctor_makes_no_directory_where_somebody_mistyped(run: Run, tmp_path: Path, begin: str) -> None:
    result = run("doctor", f"{begin}{tmp_path}/mistyped")
    assert result.exit_code == 7
    assert "there is nothing at this path" in result.stderr
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize("name", ["TIDEMARK_S3_REGION", "AWS_REGION", "AWS_DEFAULT_REGION"])
def test_a_policy_is_of_the_part_of_aws_where_the_region_is(run: Run, name: str) -> None:
    shown = run("doctor", "s3://bucket", "--policy", "owner", **{name: "cn-north-1"})
    assert "arn:aws-cn:s3:::bucket" in shown.stdout
    assert "arn:aws:" not in shown.stdout


@pytest.mark.parametrize("role", ["writer", "restorer", "collector", "owner"])
def test_a_policy_is_printed_without_asking_anybody(run: Run, role: str) -> None:
    shown = run("doctor", "s3://bucket/team/state", "--policy", role, TIDEMARK_S3_ENDPOINT_URL="https://127.0.0.1:1")
    assert shown.exit_code == 0
    policy = json.loads(shown.stdout)
    assert "arn:aws:s3:::bucket/team/state/*" in [r for s in policy["Statement"] for r in s["Resource"]]
    assert shown.stderr.startswith(f"{role}: ")
    document = json.loads(run("doctor", "s3://bucket/team/state", "--policy", role, "--json").stdout)
    assert (document["role"], document["policy"]) == (role, policy)
    with_key = {"TIDEMARK_S3_ENCRYPTION": "aws:kms", "TIDEMARK_S3_KMS_KEY_ID": "ab"}
    region = {"TIDEMARK_S3_REGION": "cn-north-1"}
    assert "arn:aws-cn:s3:::bucket" in run("doctor", "s3://bucket", "--policy", role, **region).stdout
    assert "UseTheKey" in run("doctor", "s3://bucket", "--policy", role, **with_key).stdout


@pytest.mark.parametrize(
    "words, message",
    [
        (("doctor", "memory://a", "--policy", "writer"), "is not an S3 store"),
        (("doctor", "s3://UPPER/x", "--policy", "writer"), "is not the name of a bucket"),
        (("doctor", "s3://b:c@bucket/x", "--policy", "writer"), "holds credentials"),
        (("doctor", "memory://a", "--policy", "reader"), "is not one of"),
        (("lifecycle", "file:///tmp/nothing"), "is not an S3 store"),
        (("lifecycle", "/tmp/nothing"), "is not an S3 store"),
    ],
)
def test_what_only_s3_has_is_refused_elsewhere(run: Run, words: tuple[str, ...], message: str) -> None:
    shown = run(*words)
    assert shown.exit_code == 2
    assert message in shown.stderr
    assert "\nhint: " in shown.stderr

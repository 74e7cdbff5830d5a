"""Where the value of an option comes from: command line, environment, settings file, default."""

import json
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from blobstore.s3_settings import S3Settings
from engine.cli import session, tidemark
from engine.cli.options import (
    Common,
    Verb,
    checkpoint_and_repository,
    common_options,
    on_spark_option,
    repository_and_checkpoint,
    setting_keys,
    table_name,
    walk_verbs,
)
from engine.cli.session import Session, with_session
from engine.transfer_settings import TransferSettings

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in an empty directory, with nothing in the environment that could speak for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def invoke(*words: str, **environment: str) -> Result:
        return CliRunner().invoke(tidemark, list(words), env=environment)

    return invoke


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Common]:
    """The common options of each run; the runs end there."""
    seen: list[Common] = []

    def stop(self: session.Session, verb: str, common: Common) -> None:
        seen.append(common)
        raise click.exceptions.Exit(0)

    monkeypatch.setattr(session.Session, "__init__", stop)
    return seen


# The source of a value by its rank; what has a higher rank wins whatever the lower ones say.
SOURCES = ("file", "file table", "environment", "environment of the verb", "command line")


@pytest.mark.parametrize("highest", range(len(SOURCES)), ids=SOURCES)
def test_the_command_line_wins_over_the_environment_over_the_file(
    highest: int, run: Run, seen: list[Common], tmp_path: Path
) -> None:
    values = [f"memory://{rank}" for rank in range(len(SOURCES))]
    file = f'repository = "{values[0]}"\n'
    environment = {}
    words = ["list"]
    if highest >= 1:
        file += f'[list]\nrepository = "{values[1]}"\n'
    if highest >= 2:
        environment["TIDEMARK_REPOSITORY"] = values[2]
    if highest >= 3:
        environment["TIDEMARK_LIST_REPOSITORY"] = values[3]
    if highest >= 4:
        words += ["--repository", values[4]]
    (tmp_path / "tidemark.toml").write_text(file)
    result = run(*words, **environment)
    assert result.exit_code == 0, result.stderr
    assert seen[0].repository == values[highest]


def test_a_table_of_another_verb_does_not_matter(run: Run, seen: list[Common], tmp_path: Path) -> None:
    (tmp_path / "tidemark.toml").write_text(
        'repository = "memory://a"\n[verify]\nrepository = "memory://b"\nquiet = true'
    )
    run("list")
    assert (seen[0].repository, seen[0].quiet) == ("memory://a", False)


def test_the_users_file_is_read_if_there_is_none_here(run: Run, seen: list[Common], tmp_path: Path) -> None:
    users = tmp_path / "config" / "tidemark" / "config.toml"
    users.parent.mkdir(parents=True)
    users.write_text('repository = "memory://user"')
    run("list")
    (tmp_path / "tidemark.toml").write_text('repository = "memory://here"')
    run("list")
    (tmp_path / "other.toml").write_text('repository = "memory://other"')
    run("list", "--config", "other.toml")
    run("list", TIDEMARK_CONFIG="other.toml")
    assert [common.repository for common in seen] == [
        "memory://user",
        "memory://here",
        "memory://other",
        "memory://other",
    ]


def test_transfer_settings_have_a_table_a_variable_and_a_flag(run: Run, seen: list[Common], tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "tidemark.toml").write_text(
        'repository = "memory://a"\njob = "j"\n'
        '[transfer]\nin_flight_max = 3\npack_bytes_max = "2MiB"\nrange_bytes = 4194304\n'
        "[backup]\nin_flight_max = 4\n"
    )
    environment = {"TIDEMARK_RANGE_BYTES": "5MiB", "TIDEMARK_BACKUP_INLINE_FILE_BYTES_MAX": "512"}
    run("backup", "source", "--pack-bytes-max", "3MiB", **environment)
    run("list")
    assert seen[0].transfer == TransferSettings(
        in_flight_max=4, pack_bytes_max=3 * 2**20, range_bytes=5 * 2**20, inline_file_bytes_max=512
    )
    assert seen[1].transfer == TransferSettings()


def test_transfer_settings_that_contradict_each_other_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    result = run("backup", "source", "-r", "memory://a", "-j", "j", "--chunk-bytes", "1k")
    assert result.exit_code == 2
    assert "chunk_bytes" in result.stderr


def test_s3_settings_have_a_table_a_variable_and_few_flags(run: Run, seen: list[Common], tmp_path: Path) -> None:
    (tmp_path / "tidemark.toml").write_text(
        'repository = "memory://a"\n'
        '[s3]\nendpoint_url = "https://file"\npath_style = true\nallow_http = true\nencryption = "aws:kms"\n'
        'kms_key_id = "ab"\npart_bytes = "16MiB"\nsingle_put_bytes_max = 1000\nread_timeout_s = 5\n'
        "[verify]\ns3_connections_max = 3\n"
    )
    environment = {"TIDEMARK_S3_ENDPOINT_URL": "https://environment", "TIDEMARK_LIST_S3_READ_TIMEOUT_S": "2.5"}
    run("list", "--region", "eu-central-1", **environment)
    run("verify", "--endpoint-url", "https://flag", **environment, TIDEMARK_S3_PATH_STYLE="no")
    expected = S3Settings(
        endpoint_url="https://environment",
        region="eu-central-1",
        path_style=True,
        allow_http=True,
        encryption="aws:kms",
        kms_key_id="ab",
        part_bytes=16 * 2**20,
        single_put_bytes_max=1000,
        read_timeout_s=2.5,
    )
    assert seen[0].s3 == expected
    of_verify = {"endpoint_url": "https://flag", "region": "", "path_style": False}
    assert seen[1].s3 == msgspec.structs.replace(expected, **of_verify, read_timeout_s=5.0, connections_max=3)


def test_without_s3_settings_the_standard_chain_decides(run: Run, seen: list[Common]) -> None:
    run("list", "-r", "memory://a", TIDEMARK_S3_REGION="", AWS_REGION="eu-west-1")
    assert seen[0].s3 == S3Settings()


def test_every_s3_setting_has_an_option_on_every_verb() -> None:
    for command in walk_verbs(tidemark):
        options = {p.name: p for p in command.params if isinstance(p, click.Option)}
        for key in S3Settings.__struct_fields__:
            assert options[f"s3_{key}"].hidden
            assert f"TIDEMARK_S3_{key.upper()}" in (options[f"s3_{key}"].envvar or [])


@pytest.mark.parametrize(
    "text, message",
    [
        ("[s3]\npart_bytes = 5", "part_bytes is not within"),
        ('[s3]\nkms_key_id = "x"', "kms_key_id needs"),
        ('[s3]\nencryption = "rot13"', "'rot13' is not one of"),
        ("[s3]\npath_style = 5", "is not a valid boolean"),
        ('[s3]\nendpoint = "x"', "unknown key 'endpoint' in [s3]"),
        ('endpoint_url = "x"', "unknown key 'endpoint_url'"),
        ('s3_endpoint_url = "x"', "unknown key 's3_endpoint_url'"),
    ],
)
def test_wrong_s3_settings_are_refused(run: Run, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tidemark.toml").write_text(text)
    result = run("list", "-r", "memory://a")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "\nhint: " in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        '[s3]\naccess_key = "hunter2"',
        '[s3]\naws_access_key_id = "hunter2"',
        '[s3]\nsecret_access_key = "hunter2"',
        '[s3]\nsession_token = "hunter2"',
        'aws_secret_access_key = "hunter2"',
        'password = "hunter2"',
        '[transfer]\ntoken = "hunter2"',
        '[credentials]\nkey = "hunter2"',
    ],
)
def test_a_credential_is_no_setting_and_is_not_repeated(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "tidemark.toml").write_text(text)
    result = run("list", "-r", "memory://a")
    assert result.exit_code == 2
    assert "looks like a credential" in result.stderr
    assert "AWS_PROFILE" in result.stderr
    assert "hunter2" not in result.output


@pytest.mark.parametrize("value, seen_value", [("1", True), ("true", True), ("0", False), ("no", False), ("", False)])
def test_a_flag_can_stand_in_the_environment(run: Run, seen: list[Common], value: str, seen_value: bool) -> None:
    run("list", "-r", "memory://a", TIDEMARK_QUIET=value)
    assert seen[0].quiet is seen_value


def test_the_file_may_ask_for_json_even_for_errors(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tidemark.toml").write_text('repository = "memory://nothing"\njson = true')
    assert json.loads(run("list").stderr)["code"] == 7
    assert json.loads(run("list", "--quiet", "--debug", TIDEMARK_DEBUG="0").stderr.splitlines()[-1])["code"] == 7
    assert run("list", TIDEMARK_JSON="0").stderr.startswith("error: ")


def test_what_tells_one_run_from_the_next_is_read_from_the_verbs_variable_only() -> None:
    backup, restore = tidemark.commands["backup"], tidemark.commands["restore"]
    names = {p.name: p.envvar for command in (backup, restore) for p in command.params if isinstance(p, click.Option)}
    # A TIDEMARK_VERSION that somebody sets for another reason must not choose what is restored.
    assert names["version"] == ["TIDEMARK_RESTORE_VERSION"]
    assert names["offsets"] == ["TIDEMARK_BACKUP_OFFSETS"]
    assert names["job"] == ["TIDEMARK_RESTORE_JOB", "TIDEMARK_JOB"]


def test_a_refused_value_is_told_with_where_it_stands(run: Run, tmp_path: Path) -> None:
    words = ("collect", "-r", "memory://a")
    (tmp_path / "tidemark.toml").write_text('[collect]\nkeep_last = "many"')
    assert f"hint: the value stands in {tmp_path / 'tidemark.toml'}" in run(*words).stderr
    environment = {"TIDEMARK_COLLECT_KEEP_LAST": "many"}
    assert "hint: the value stands in TIDEMARK_COLLECT_KEEP_LAST" in run(*words, **environment).stderr
    assert "hint: see `tidemark collect --help`" in run(*words, "--keep-last", "many").stderr


def test_a_missing_value_is_told_with_where_it_could_stand(run: Run) -> None:
    result = run("list")
    assert result.exit_code == 2
    assert "--repository, TIDEMARK_REPOSITORY, or the key `repository` in tidemark.toml" in result.stderr


def test_an_unknown_key_is_refused_before_anything_is_done(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tidemark.toml").write_text('repositori = "memory://a"')
    result = run("init", "-r", "memory://unknown-key", "--json")
    assert result.exit_code == 2
    failure = json.loads(result.stderr)
    assert "'repositori'" in failure["message"]
    assert failure["hint"] == "did you mean `repository`?"
    assert run("list", "-r", "memory://unknown-key", TIDEMARK_CONFIG="/dev/null").exit_code == 7


@pytest.mark.parametrize(
    "text, word",
    [
        ("keep_last = 3", "keep_last"),
        ("[list]\nkeep_last = 3", "keep_last"),
        ("config = 'x'", "config"),
        ("[lst]", "list"),
    ],
)
def test_a_key_belongs_where_it_has_a_meaning(run: Run, tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "tidemark.toml").write_text(text)
    result = run("list", "-r", "memory://a")
    assert result.exit_code == 2
    assert word in result.stderr


def test_every_option_of_every_verb_can_stand_in_the_file() -> None:
    shared, by_verb = setting_keys(tidemark)
    assert {"repository", "job", "task", "store", "json", "quiet", "debug", "owners", "commit_per_task"} <= shared
    for command in walk_verbs(tidemark):
        options = {p.name for p in command.params if isinstance(p, click.Option) and p.name != "config"}
        assert by_verb[table_name(command)] == options


@pytest.mark.parametrize("command", tuple(walk_verbs(tidemark)), ids=table_name)
def test_the_help_of_a_verb_fits_one_screen_and_has_an_example(run: Run, command: Verb) -> None:
    result = run(*command.words.split(), "--help", COLUMNS="80")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 45
    assert all(len(line) <= 80 for line in lines)
    assert f"  {command.example}" in lines
    assert command.example.startswith(f"tidemark {command.words} ")


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_without_a_verb_it_prints_its_help(run: Run, words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 0
    for verb in tidemark.commands:
        assert f"\n  {verb} " in result.stdout
    for code in ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "130"):
        assert f"\n  {code} " in result.stdout


@pytest.mark.parametrize(
    "words, message",
    [
        (("lst",), "No such command 'lst'"),
        (("--quiet", "list"), "No such option"),
        (("list", "--jobb", "x"), "No such option"),
        (("list", "extra"), "unexpected extra argument"),
        (("list", "-r"), "requires an argument"),
        (("backup", "/absent", "-j", "j"), "does not exist"),
        (("restore", "x", "-j", "j", "--number", "0"), "not in the range"),
        (("restore", "x", "-j", "j", "--at", "soon"), "neither a time nor a duration"),
        (("restore", "x", "-j", "j", "--version", "v8"), "is no version"),
        (("restore", "x", "-j", "j", "--owners", "mine"), "is not one of"),
        (("verify", "--sample", "0%"), "is no share"),
        (("collect", "--keep-since", "7x"), "neither a time nor a duration"),
        (("restore", "x", "-j", "j", "--number", "1", "--name", "y"), "more than one of"),
        (("restore", "x", "-j", "j", "--name", "v8"), "reads like"),
        (("name", "latest", "12", "-j", "j"), "reads like"),
        (("name", "latest", "x" * 300, "-j", "j"), "longer than"),
        (("collect",), "would keep nothing"),
        (("verify", "3"), "numbered by job"),
        (("list", "-j", ""), "is empty"),
        (("show", "-j", "j", "@never"), "neither a time nor a duration"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_a_hint(run: Run, words: tuple[str, ...], message: str) -> None:
    environment = {"TIDEMARK_REPOSITORY": "memory://nothing-here"}
    told = run(*words, **environment)
    assert told.exit_code == 2
    assert message in told.stderr
    assert "\nhint: " in told.stderr
    assert told.stdout == ""
    failure = json.loads(run(*words, **environment, TIDEMARK_JSON="1").stderr)
    assert (failure["schema"], failure["error"], failure["code"]) == (1, "UsageError", 2)
    assert message in failure["message"]
    assert failure["hint"]


@pytest.mark.parametrize(
    "url, code", [("gopher://x", 2), ("file://host/x", 2), ("s3://bucket/x", 8), ("memory://fresh", 7), ("http:x", 2)]
)
def test_a_url_that_is_no_repository_is_told_apart(run: Run, url: str, code: int) -> None:
    result = run("list", "-r", url)
    assert result.exit_code == code
    assert "\nhint: " in result.stderr


def test_a_secret_in_a_url_is_not_repeated(run: Run) -> None:
    result = run("list", "-r", "s3://key:hunter2@bucket/x")
    assert result.exit_code == 2
    assert "hunter2" not in result.output


# ---------------------------------------------------------------------- doctor and lifecycle


def test_a_url_may_stand_after_the_verb(run: Run, seen: list[Common]) -> None:
    run("doctor", "memory://argument", TIDEMARK_REPOSITORY="memory://environment")
    run("lifecycle", "memory://argument", "-r", "memory://option")
    run("doctor", TIDEMARK_REPOSITORY="memory://environment")
    assert [c.repository for c in seen] == ["memory://argument", "memory://argument", "memory://environment"]
    result = run("doctor")
    assert result.exit_code == 2
    assert "--repository, TIDEMARK_REPOSITORY, or the key `repository` in tidemark.toml" in result.stderr


@pytest.mark.parametrize("url", ["memory://doctored", "file:doctored"], ids=["memory", "file"])
def test_doctor_tells_a_table_and_ends_with_0(run: Run, tmp_path: Path, url: str) -> None:
    url = f"file://{tmp_path}/doctored" if url.startswith("file") else url
    (tmp_path / "doctored").mkdir()
    told = run("doctor", url)
    assert (told.exit_code, told.stderr) == (0, "")
    lines = told.stdout.splitlines()
    assert all(len(line) <= 120 for line in lines)
    assert lines[0].split() == ["verdict", "check", "what", "it", "means", "(what", "was", "seen)"]
    assert "ok       conditional create     of any number of writers one wins (6 races" in told.stdout
    assert "n/a      multipart abort        only S3 has this" in told.stdout
    assert "this store is SAFE for tidemark" in told.stdout
    report = json.loads(run("doctor", url, "--json").stdout)
    assert (report["schema"], report["verb"], report["safe"], report["verdict"]) == (1, "doctor", True, "ok")
    assert {"check", "verdict", "figure", "figures", "meaning"} == report["checks"][0].keys()
    latency = next(c for c in report["checks"] if c["check"] == "latency")
    assert {"put_p50_ms", "put_p99_ms", "get_p50_ms", "list_p99_ms"} <= latency["figures"].keys()
    assert (report["profile"], report["profile_written"], report["left"]) == (None, False, [])
    assert run("doctor", url, "-q").output == ""
    assert not [p for p in tmp_path.rglob("doctor/**/*") if p.is_file()]


@pytest.mark.parametrize("begin", ["", "file://"])
def test_doctor_makes_no_directory_where_somebody_mistyped(run: Run, tmp_path: Path, begin: str) -> None:
    result = run("doctor", f"{begin}{tmp_path}/mistyped")
    assert result.exit_code == 7
    assert "there is nothing at this path" in result.stderr
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize("name", ["TIDEMARK_S3_REGION", "AWS_REGION", "AWS_DEFAULT_REGION"])
def test_a_policy_is_of_the_part_of_aws_where_the_region_is(run: Run, name: str) -> None:
    told = run("doctor", "s3://bucket", "--policy", "owner", **{name: "cn-north-1"})
    assert "arn:aws-cn:s3:::bucket" in told.stdout
    assert "arn:aws:" not in told.stdout


@pytest.mark.parametrize("role", ["writer", "restorer", "collector", "owner"])
def test_a_policy_is_printed_without_asking_anybody(run: Run, role: str) -> None:
    told = run("doctor", "s3://bucket/team/state", "--policy", role, TIDEMARK_S3_ENDPOINT_URL="https://127.0.0.1:1")
    assert told.exit_code == 0
    policy = json.loads(told.stdout)
    assert "arn:aws:s3:::bucket/team/state/*" in [r for s in policy["Statement"] for r in s["Resource"]]
    assert told.stderr.startswith(f"{role}: ")
    document = json.loads(run("doctor", "s3://bucket/team/state", "--policy", role, "--json").stdout)
    assert (document["role"], document["policy"]) == (role, policy)
    with_key = {"TIDEMARK_S3_ENCRYPTION": "aws:kms", "TIDEMARK_S3_KMS_KEY_ID": "ab"}
    region = {"TIDEMARK_S3_REGION": "cn-north-1"}
    assert "arn:aws-cn:s3:::bucket" in run("doctor", "s3://bucket", "--policy", role, **region).stdout
    assert "UseTheKey" in run("doctor", "s3://bucket", "--policy", role, **with_key).stdout


@pytest.mark.parametrize(
    "words, message",
    [
        (("doctor", "memory://a", "--policy", "writer"), "is no S3 store"),
        (("doctor", "s3://UPPER/x", "--policy", "writer"), "is not the name of a bucket"),
        (("doctor", "s3://b:c@bucket/x", "--policy", "writer"), "holds credentials"),
        (("doctor", "memory://a", "--policy", "reader"), "is not one of"),
        (("lifecycle", "file:///tmp/nothing"), "is no S3 store"),
        (("lifecycle", "s3://bucket", "--install", "--remove"), "exclude each other"),
    ],
)
def test_what_only_s3_has_is_refused_elsewhere(run: Run, words: tuple[str, ...], message: str) -> None:
    told = run(*words)
    assert told.exit_code == 2
    assert message in told.stderr
    assert "\nhint: " in told.stderr


# ---------------------------------------------------------------------- a group of verbs


Told = dict[str, object]


@pytest.fixture
def group_told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What the verbs of a group `tide` were given."""
    told: Told = {}

    @click.command("backup", cls=Verb, group="tide", example="tidemark tide backup x")
    @checkpoint_and_repository
    @click.option("--depth")
    @on_spark_option
    @common_options
    @with_session
    def backup(session: Session, **values: object) -> None:
        told.update(values, verb=session.verb, repository=session.common.repository)

    @click.command("restore", cls=Verb, group="tide", example="tidemark tide restore x")
    @repository_and_checkpoint
    @common_options
    @with_session
    def restore(session: Session, **values: object) -> None:
        told.update(values, verb=session.verb, repository=session.common.repository)

    @click.command("check", cls=Verb, group="tide", needs_repository=False, example="tidemark tide check x")
    @click.argument("checkpoint")
    @common_options
    @with_session
    def check(session: Session, **values: object) -> None:
        told.update(values, verb=session.verb, repository=session.common.repository)

    tide = click.Group("tide", commands=[backup, restore, check])
    monkeypatch.setitem(tidemark.commands, "tide", tide)
    return told


def test_a_verb_of_a_group_has_variables_and_a_table_of_its_own(run: Run, group_told: Told, tmp_path: Path) -> None:
    (tmp_path / "tidemark.toml").write_text(
        'repository = "memory://a"\non_spark = true\n[backup]\nno_commit = true\n[tide-backup]\ndepth = "file"\n'
    )
    assert run("tide", "backup", "/c").exit_code == 0
    assert group_told == {
        "verb": "tide backup",
        "repository": "memory://a",
        "checkpoint": "/c",
        "depth": "file",
        "on_spark": True,
    }
    environment = {"TIDEMARK_TIDE_BACKUP_DEPTH": "environment", "TIDEMARK_DEPTH": "nobody's"}
    run("tide", "backup", "/c", "memory://nearer", **environment)
    assert (group_told["depth"], group_told["repository"]) == ("environment", "memory://nearer")
    (tmp_path / "tidemark.toml").write_text("[tide-backup]\nno_commit = true\n")
    assert "unknown key 'no_commit' in [tide-backup]" in run("tide", "backup", "/c").stderr


def test_a_repository_may_stand_before_the_checkpoint(run: Run, group_told: Told) -> None:
    run("tide", "restore", "/c", TIDEMARK_REPOSITORY="memory://environment")
    assert (group_told["checkpoint"], group_told["repository"]) == ("/c", "memory://environment")
    run("tide", "restore", "memory://nearer", "/c", TIDEMARK_REPOSITORY="memory://environment")
    assert (group_told["checkpoint"], group_told["repository"]) == ("/c", "memory://nearer")
    assert "Missing argument 'CHECKPOINT'" in run("tide", "restore").stderr
    extra = run("tide", "restore", "memory://a", "/c", "/d")
    assert (extra.exit_code, "unexpected extra argument (/d)" in extra.stderr) == (2, True)
    missing = run("tide", "restore", "/c", "--json")
    assert missing.exit_code == 2
    assert "TIDEMARK_REPOSITORY" in json.loads(missing.stderr)["hint"]


def test_a_verb_may_do_without_a_repository(run: Run, group_told: Told) -> None:
    assert run("tide", "check", "/c").exit_code == 0
    assert group_told == {"verb": "tide check", "repository": "", "checkpoint": "/c"}


@pytest.mark.parametrize("words", [("spark", "lst"), ("spark", "--quiet"), ("tide", "backup", "--nothing")])
def test_a_wrong_command_line_of_a_group_names_the_help_of_the_group(
    run: Run, group_told: Told, words: tuple[str, ...]
) -> None:
    told = run(*words)
    assert told.exit_code == 2
    assert f"see `tidemark {' '.join(words[:-1])} --help`" in told.stderr

"""Where the value of an option comes from: command line, environment, settings file, default."""

import inspect
import json
from collections.abc import Collection
from pathlib import Path

import click
import msgspec
import pytest

from blobstore.s3.settings import S3Settings
from engine.cli import tidemark
from engine.cli.options import Common, Verb, common_options, setting_keys, walk_verbs
from engine.cli.session import _TOGETHER
from engine.settings import TransferSettings
from tests.unit.engine.cli.conftest import Run

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


def test_what_distinguishes_one_run_from_the_next_is_read_from_the_verbs_variable_only() -> None:
    backup, restore = tidemark.commands["backup"], tidemark.commands["restore"]
    names = {p.name: p.envvar for command in (backup, restore) for p in command.params if isinstance(p, click.Option)}
    # A TIDEMARK_VERSION that somebody sets for another reason must not choose what is restored.
    assert names["version"] == ["TIDEMARK_RESTORE_VERSION"]
    assert names["offsets"] == ["TIDEMARK_BACKUP_OFFSETS"]
    assert names["job"] == ["TIDEMARK_RESTORE_JOB", "TIDEMARK_JOB"]


def test_a_refused_value_is_reported_with_where_it_is_set(run: Run, tmp_path: Path) -> None:
    words = ("collect", "-r", "memory://a")
    (tmp_path / "tidemark.toml").write_text('[collect]\nkeep_last = "many"')
    assert f"hint: the value is in {tmp_path / 'tidemark.toml'}" in run(*words).stderr
    environment = {"TIDEMARK_COLLECT_KEEP_LAST": "many"}
    assert "hint: the value is in TIDEMARK_COLLECT_KEEP_LAST" in run(*words, **environment).stderr
    assert "hint: see `tidemark collect --help`" in run(*words, "--keep-last", "many").stderr


def test_a_missing_value_is_reported_with_where_it_could_be_set(run: Run) -> None:
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
    keys = setting_keys(tidemark)
    assert {"repository", "job", "task", "store", "json", "quiet", "debug", "owners", "commit_per_task"} <= set(
        keys[""]
    )
    for command in walk_verbs(tidemark):
        options = {p.name for p in command.params if isinstance(p, click.Option) and p.name != "config"}
        assert keys[command.table].keys() == options


def _taken(name: str, kind: object, options: Collection[str]) -> set[str]:
    """The options that a parameter of a verb, or a field of one, is made of, as `session._take` looks them up."""
    if name in _TOGETHER:
        return set(_TOGETHER[name][0])
    if name in options:
        return {name}
    assert isinstance(kind, type), f"{name} is not an option"
    assert issubclass(kind, msgspec.Struct), f"{name} is not an option"
    return {one for f in msgspec.structs.fields(kind) if f.required or f.name in options
            for one in _taken(f.name, f.type, options)}  # fmt: skip


@pytest.mark.parametrize("command", tuple(walk_verbs(tidemark)), ids=lambda verb: verb.table)
def test_every_option_of_a_verb_reaches_it_by_its_name(command: Verb) -> None:
    assert command.callback is not None
    # `places` is split into `checkpoint` and `url`.
    options = {"checkpoint" if p.name == "places" else str(p.name) for p in command.params}
    after_it = {"metrics_file", "on_failure", "on_success"}
    shared = {str(p.name) for p in common_options()} | {*TransferSettings.__struct_fields__, *after_it, "url"}
    parameters = inspect.unwrap(command.callback).__annotations__
    taken = {
        one
        for name, kind in parameters.items()
        if name not in {"session", "return"}
        for one in _taken(name, kind, options)
    }
    own = options - shared
    assert taken == own

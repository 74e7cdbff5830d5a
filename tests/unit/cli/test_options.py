"""Where the value of an option comes from: command line, environment, settings file, default."""

import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from engine.cli import session, tidemark
from engine.cli.options import Common, Verb, setting_keys
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
    for verb, command in tidemark.commands.items():
        options = {p.name for p in command.params if isinstance(p, click.Option) and p.name != "config"}
        assert by_verb[verb] == options


@pytest.mark.parametrize("verb", tidemark.commands)
def test_the_help_of_a_verb_fits_one_screen_and_has_an_example(run: Run, verb: str) -> None:
    result = run(verb, "--help", COLUMNS="80")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 45
    assert all(len(line) <= 80 for line in lines)
    command = tidemark.commands[verb]
    assert isinstance(command, Verb)
    assert f"  {command.example}" in lines
    assert command.example.startswith(f"tidemark {verb} ")


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
    "url, code", [("gopher://x", 2), ("file://host/x", 2), ("s3://bucket/x", 9), ("memory://fresh", 7), ("http:x", 2)]
)
def test_a_url_that_is_no_repository_is_told_apart(run: Run, url: str, code: int) -> None:
    result = run("list", "-r", url)
    assert result.exit_code == code
    assert "\nhint: " in result.stderr


def test_a_secret_in_a_url_is_not_repeated(run: Run) -> None:
    result = run("list", "-r", "s3://key:hunter2@bucket/x")
    assert result.exit_code == 2
    assert "hunter2" not in result.output

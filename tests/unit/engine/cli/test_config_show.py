"""`config show`: what is set, and whence; and what a shell is shown."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cli import tidemark
from tests.unit.engine.cli.conftest import Run


def shown(run: Run, *words: str, **environment: str) -> dict[str, Any]:
    result = run("config", "show", "--json", *words, **environment)
    printed: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (2 if any(setting["problem"] for setting in printed["settings"]) else 0), result.stderr
    return printed | {"by_key": {setting["key"]: setting for setting in printed["settings"]}}


def test_what_is_not_set_has_its_default_and_shows_where_it_could_be_set(run: Run) -> None:
    printed = shown(run)
    assert printed["file"] == ""
    assert printed["by_key"]["[transfer] in_flight_max"] == {
        "key": "[transfer] in_flight_max",
        "flag": "--in-flight-max",
        "variables": ["TIDEMARK_IN_FLIGHT_MAX"],
        "value": 16,
        "origin": "default",
        "place": "",
        "problem": "",
    }
    assert printed["by_key"]["quiet"]["value"] is False
    assert printed["by_key"]["job"]["value"] is None
    assert shown(run, "--set")["settings"] == []


def test_each_value_says_where_it_comes_from(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tidemark.toml"
    file.write_text('job = "flights"\ntask = "3"\n[s3]\nregion = "eu"\n[backup]\njob = "own"\n')
    printed = shown(run, TIDEMARK_TASK="4", TIDEMARK_S3_REGION="us")["by_key"]
    assert (printed["job"]["value"], printed["job"]["origin"], printed["job"]["place"]) == ("flights", "file", "job")
    assert (printed["task"]["value"], printed["task"]["origin"], printed["task"]["place"]) == (
        "4",
        "environment",
        "TIDEMARK_TASK",
    )
    assert printed["[s3] region"]["value"] == "us"
    of_backup = shown(run, "backup", TIDEMARK_BACKUP_TASK="5", TIDEMARK_TASK="4")
    by_key = of_backup["by_key"]
    assert (by_key["job"]["value"], by_key["job"]["place"]) == ("own", "[backup] job")
    assert (by_key["task"]["value"], by_key["task"]["place"]) == ("5", "TIDEMARK_BACKUP_TASK")
    assert of_backup["file"] == str(file)


def test_what_it_says_is_what_a_verb_takes(run: Run, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "tidemark.toml").write_text(
        'repository = "memory://a"\n[s3]\nconnections_max = 9\n[list]\nquiet = true\n'
    )
    environment = {"TIDEMARK_REPOSITORY": "memory://b", "TIDEMARK_LIST_REPOSITORY": "memory://c"}
    printed = shown(run, "list", "--set", **environment)["by_key"]
    assert {key: setting["value"] for key, setting in printed.items()} == {
        "repository": "memory://c",
        "quiet": True,
        "[s3] connections_max": 9,
    }
    seen = request.getfixturevalue("seen")
    run("list", **environment)
    assert (seen[0].repository, seen[0].quiet, seen[0].s3.connections_max) == ("memory://c", True, 9)


def test_a_value_that_would_be_refused_is_reported_and_ends_with_2(run: Run) -> None:
    printed = shown(run, TIDEMARK_IN_FLIGHT_MAX="many")
    assert "not a valid integer" in printed["by_key"]["[transfer] in_flight_max"]["problem"]
    result = run("config", "show", TIDEMARK_IN_FLIGHT_MAX="many")
    assert "WRONG: [transfer] in_flight_max" in result.stdout
    assert "TIDEMARK_IN_FLIGHT_MAX" in result.stdout


def test_what_only_together_is_wrong_is_reported_of_each_setting(run: Run, tmp_path: Path) -> None:
    environment = {
        "TIDEMARK_IN_FLIGHT_MAX": "0",
        "TIDEMARK_BLOB_BYTES_MAX": "2MiB",
        "TIDEMARK_S3_READ_TIMEOUT_S": "abc",
        "TIDEMARK_S3_KMS_KEY_ID": "k",
        "TIDEMARK_S3_ENDPOINT_URL": "https://canary:abc/secret@host",
        "TIDEMARK_S3_REGION": "eu",
        "TIDEMARK_BWLIMIT": "63KiB",
    }
    printed = shown(run, "--set", **environment)["settings"]
    assert {setting["key"]: setting["problem"] for setting in printed} == {
        "[transfer] in_flight_max": "is not within 1 and 1,024: 0",
        "[transfer] blob_bytes_max": "pack_bytes_max exceeds blob_bytes_max: 8388608",
        "[s3] read_timeout_s": "'abc' is not a valid float.",
        "[s3] kms_key_id": "needs encryption = aws:kms",
        "[s3] endpoint_url": "holds credentials: take them out, URLs get logged",
        "[s3] region": "",
        "bwlimit": "'63KiB': is too few bytes per second; give at least 64KiB, or 0 for no limit",
    }
    assert "secret" not in json.dumps(printed)
    # Each of them alone ends a verb; without it, that finds no repository.
    (tmp_path / "here").mkdir()
    for name, value in environment.items():
        ended = run("backup", "here", "-r", "memory://nobody", "-j", "j", **{name: value})
        assert ended.exit_code == (7 if name == "TIDEMARK_S3_REGION" else 2), name


def test_a_wrong_flag_does_not_keep_the_settings_from_being_reported(run: Run) -> None:
    result = run("config", "show", TIDEMARK_JSON="abc", TIDEMARK_CACHE="abc")
    assert result.exit_code == 2
    assert "WRONG: json: 'abc' is not a valid boolean" in result.stdout
    assert "WRONG: cache: 'abc' is not a valid boolean" in result.stdout


def test_what_stands_on_its_own_command_line_is_not_shown_and_yet_checked(run: Run) -> None:
    assert shown(run, "--set", "-r", "memory://zz")["settings"] == []
    assert "is not shown" in " ".join(run("config", "show", "--help").stdout.split())
    assert run("config", "show", "--s3-part-bytes", "many").exit_code == 2


@pytest.mark.parametrize(
    "text, value", [('"*.sst"', ["*.sst"]), ('["*.sst", "a b"]', ["*.sst", "a b"]), ("[]", []), ("5", [5])]
)
def test_an_option_that_may_be_repeated_takes_a_text_or_a_list(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, value: list[str]
) -> None:
    (tmp_path / "tidemark.toml").write_text(f"[restore]\nfiles = {text}\n")
    printed = shown(run, "restore")["by_key"]["[restore] files"]
    assert (printed["value"], printed["origin"], printed["problem"]) == (value, "file", "")
    taken: list[object] = []

    def restore(**values: object) -> None:
        taken.append(values["files"])

    monkeypatch.setattr(tidemark.commands["restore"], "callback", restore)
    assert run("restore", "target", "-r", "memory://a", "-j", "j").exit_code == 0
    assert taken == [tuple(map(str, value))]


@pytest.mark.parametrize("text", ['[restore]\nowners = ["ignore"]', "[restore]\nfiles = [[1]]", 'job = ["a"]'])
def test_a_list_is_refused_where_one_value_is_wanted(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "tidemark.toml").write_text(text)
    for words in (("config", "show"), ("restore", "target", "-r", "memory://a")):
        result = run(*words)
        assert result.exit_code == 2
        assert "is a list" in result.stderr


@pytest.mark.parametrize("words", [(), ("--json",), ("--origin",)])
@pytest.mark.parametrize(
    "url, printed",
    [
        ("s3://canary:secret@bucket/p", "s3://***@bucket/p"),
        ("s3://canary:abc/def+secret@bucket/p", "s3://***@bucket/p"),
        ("s3://bucket/p?X-Amz-Signature=secret", "s3://bucket/p?***"),
        ("s3://bucket/p#secret", "s3://bucket/p#***"),
        ("/plain/path/what?@home", "/plain/path/what?@home"),
    ],
)
def test_credentials_in_a_url_are_not_printed(run: Run, words: tuple[str, ...], url: str, printed: str) -> None:
    result = run("config", "show", *words, TIDEMARK_REPOSITORY=url)
    assert printed in result.stdout
    assert "secret" not in result.stdout + result.stderr
    # No verb takes it.
    assert result.exit_code == (0 if url.startswith("/") else 2)


@pytest.mark.parametrize(
    "words",
    [
        ("list", "s3://canary:abc/def+secret@bucket/p"),
        ("doctor", "https:/canary:abc/def+secret@bucket/p"),
        ("list", "-r", "s3://canary:abc/def+secret@bucket/p"),
        ("list", "-r", "s3://canary:secret"),
        ("s3://bucket/p?X-Amz-Signature=secret",),
        ("--debug", "list", "-r", "s3://bucket/p?X-Amz-Signature=secret"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"TIDEMARK_JSON": "1"}, {"TIDEMARK_DEBUG": "1"}])
def test_no_error_repeats_the_secret_of_a_url(run: Run, words: tuple[str, ...], more: dict[str, str]) -> None:
    result = run(*words, TIDEMARK_JOB="j", **more)
    assert result.exit_code in {2, 7}
    assert "secret" not in result.stdout + result.stderr


def test_a_verb_of_a_group_is_named_by_its_words_and_an_unknown_one_is_refused(run: Run) -> None:
    printed = shown(run, "spark", "backup")
    assert printed["of"] == "spark backup"
    assert any(key.startswith("[spark-backup] ") for key in printed["by_key"])
    result = run("config", "show", "bakcup")
    assert result.exit_code == 2
    assert "no such verb" in result.stderr


def test_a_shell_is_given_a_script_that_asks_tidemark() -> None:
    """As click has it: `_TIDEMARK_COMPLETE=bash_source tidemark`."""
    words = [sys.executable, "-m", "engine.cli"]
    for shell in ("bash", "zsh", "fish"):
        environment = {"_TIDEMARK_COMPLETE": f"{shell}_source"}
        script = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
        assert "_TIDEMARK_COMPLETE" in script
        if program := shutil.which(shell):
            subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_a_shell_completes_verbs_and_options() -> None:
    def completed(*words: str) -> list[str]:
        printed = subprocess.run(
            [sys.executable, "-m", "engine.cli"],
            env={
                "_TIDEMARK_COMPLETE": "bash_complete",
                "COMP_WORDS": " ".join(words),
                "COMP_CWORD": f"{len(words) - 1}",
            },
            capture_output=True,
            text=True,
            check=True,
        )
        return [line.partition(",")[2] for line in printed.stdout.split()]

    assert completed("tidemark", "re") == ["restore", "rewind", "rescale", "repair", "report"]
    assert "--owners" in completed("tidemark", "restore", "--ow")

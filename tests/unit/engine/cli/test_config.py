import os
from pathlib import Path

import pytest

from engine.cli.config import (
    TRANSFER,
    TRANSFER_KEYS,
    CommitChoice,
    Config,
    check_new_name,
    config_paths,
    parse_commit,
    parse_version,
    read_config,
    user_dir,
)
from engine.errors import UsageError
from engine.text import Moment, parse_duration_ms, parse_moment, parse_share, parse_size_bytes
from index.snapshot.model import UniqueId

KEYS = {
    "backup": dict.fromkeys(("job", "offsets"), False),
    "collect": dict.fromkeys(("keep_last", "dry_run"), False),
    TRANSFER: dict.fromkeys(TRANSFER_KEYS, False),
    "": dict.fromkeys(("repository", "job", "json"), False),
}


def _file(directory: Path, text: str) -> Path:
    path = directory / "tidemark.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text, milliseconds",
    [("250ms", 250), ("1s", 1000), ("30m", 1_800_000), ("36h", 129_600_000), ("7d", 604_800_000), ("2w", 1_209_600_000),
     ("1d12h", 129_600_000), ("0s", 0)],
)  # fmt: skip
def test_durations(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize("text", ["", "7", "7 d", "-7d", "d", "7y", "1.5h", "9999999999d", "7d ", "7D"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_duration_ms(text)
    assert "36h" in refused.value.hint


@pytest.mark.parametrize(
    "text, size_bytes",
    [("0", 0), ("4096", 4096), ("4k", 4096), ("256KiB", 262_144), ("64 MiB", 67_108_864), ("1GB", 2**30), ("2t", 2**41),
     ("512b", 512)],
)  # fmt: skip
def test_sizes_are_powers_of_1024(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5M", "1e6", "64 Mib/s", "0x10", "9" * 13])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size_bytes(text)


@pytest.mark.parametrize("text, share", [("10%", 0.1), ("0.1", 0.1), ("100%", 1.0), ("1", 1.0), ("0.5%", 0.005)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "1.1", "10", "-5%", "ten", "nan", "1e-3"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_share(text)


@pytest.mark.parametrize(
    "text, at_ms",
    [
        ("1970-01-01T00:00:01Z", 1000),
        ("1970-01-01T00:00:01", 1000),
        ("1970-01-01T01:00:01+01:00", 1000),
        ("1970-01-02", 86_400_000),
        ("2026-05-01T12:30:00.250Z", 1_777_638_600_250),
        ("2026-05-01 12:30:00.2509", 1_777_638_600_250),
        ("1969-12-31T23:59:59Z", -1000),
    ],
)
def test_a_time_is_utc_unless_it_names_a_zone(text: str, at_ms: int) -> None:
    assert parse_moment(text) == Moment(at_ms=at_ms)


def test_a_duration_is_a_time_so_long_ago_and_never_before_the_epoch() -> None:
    assert parse_moment("36h").resolve_ms(200_000_000) == 200_000_000 - 129_600_000
    assert parse_moment("2w").resolve_ms(1000) == 0
    assert parse_moment("1970-01-01T00:00:01Z").resolve_ms(999_999) == 1000


def test_a_time_of_a_day_is_that_of_today_or_yesterday_by_the_store_and_in_utc() -> None:
    now_ms = parse_moment("2026-05-02T00:00:01Z").resolve_ms(0)
    for text, expected in {
        "yesterday 18:00": "2026-05-01T18:00:00Z",
        "yesterday 0:05": "2026-05-01T00:05:00Z",
        "today 06:30": "2026-05-02T06:30:00Z",
    }.items():
        assert parse_moment(text).resolve_ms(now_ms) == parse_moment(expected).resolve_ms(0)
    assert parse_moment("yesterday 18:00").resolve_ms(1000) == 0


@pytest.mark.parametrize("text", ["yesterday 24:00", "yesterday 18", "tomorrow 18:00", "today", "yesterday 18:60"])
def test_what_is_no_time_of_a_day_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a time") as caught:
        parse_moment(text)
    assert "'yesterday 18:00'; a time without a zone is UTC" in caught.value.hint


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "12:30", "2026-05-01T25:00", "1777638600250123456789"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_moment(text)
    assert "2026" in refused.value.hint


@pytest.mark.parametrize(
    "text, choice",
    [
        ("latest", CommitChoice()),
        ("12", CommitChoice(number=12)),
        ("v8", CommitChoice(version=8)),
        ("8_0f-a_b", CommitChoice(version=8, unique_id=UniqueId("0f-a_b"))),
        ("@36h", CommitChoice(at=Moment(ago_ms=129_600_000))),
        ("@yesterday 18:00", CommitChoice(at=Moment(ago_ms=86_400_000, of_day_ms=64_800_000))),
        ("@1970-01-02", CommitChoice(at=Moment(at_ms=86_400_000))),
        ("before-upgrade", CommitChoice(name="before-upgrade")),
        ("version8", CommitChoice(name="version8")),
        ("8_", CommitChoice(name="8_")),
        ("-1", CommitChoice(name="-1")),
        ("Latest", CommitChoice(name="Latest")),
    ],
)
def test_words_for_a_commit(text: str, choice: CommitChoice) -> None:
    assert parse_commit(text) == choice


@pytest.mark.parametrize("text", ["", "@", "@soon"])
def test_what_chooses_no_commit_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_commit(text)


def test_a_version_may_have_a_unique_id() -> None:
    assert parse_version("8") == CommitChoice(version=8)
    assert parse_version("8_abc") == CommitChoice(version=8, unique_id=UniqueId("abc"))
    with pytest.raises(UsageError):
        parse_version("v8")


@pytest.mark.parametrize("name", ["", "latest", "12", "v8", "8_abc", "@home"])
def test_a_name_that_would_be_read_as_something_else_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_new_name(name)


def test_the_first_settings_file_there_is_is_the_one_read() -> None:
    assert config_paths({"HOME": "/home/ann"}, Path("/somewhere")) == (
        Path("/somewhere/tidemark.toml"),
        Path("/home/ann/.config/tidemark/config.toml"),
    )
    assert config_paths({"HOME": "/home/ann", "XDG_CONFIG_HOME": "/etc/ann"}, Path("/somewhere"))[1] == Path(
        "/etc/ann/tidemark/config.toml"
    )
    assert config_paths({}, Path("/somewhere")) == (Path("/somewhere/tidemark.toml"),)


def test_without_a_home_nothing_is_remembered() -> None:
    assert user_dir({"HOME": "/home/ann"}, "XDG_CACHE_HOME", ".cache") == Path("/home/ann/.cache/tidemark")
    assert user_dir({"HOME": "/home/ann", "XDG_CACHE_HOME": "/fast"}, "XDG_CACHE_HOME", ".cache") == Path(
        "/fast/tidemark"
    )
    assert user_dir({}, "XDG_CACHE_HOME", ".cache") is None


def test_a_settings_file_is_split_into_its_top_and_its_tables(tmp_path: Path) -> None:
    path = _file(
        tmp_path, 'job = "flights"\njson = true\n[collect]\nkeep_last = 3\n[transfer]\npack_bytes_max = "1MiB"'
    )
    config = read_config(path, KEYS)
    assert config.path == path
    assert config.tables == {
        "": {"job": "flights", "json": True},
        "collect": {"keep_last": 3},
        "transfer": {"pack_bytes_max": "1MiB"},
    }


@pytest.mark.parametrize(
    "text, key, nearest",
    [
        ('repositry = "x"', "'repositry'", "`repository`"),
        ('[backup]\noffset = "x"', "'offset' in [backup]", "`offsets`"),
        ("[transfer]\nin_flight = 3", "'in_flight' in [transfer]", "`in_flight_max`"),
        ("[colect]\nkeep_last = 3", "table 'colect'", "`[collect]`"),
        ("keep_last = 3", "'keep_last'", "`keep_last in [collect]`"),
        ("keep_lsat = 3", "'keep_lsat'", "`keep_last in [collect]`"),
        ("pack_bytes = 3", "'pack_bytes'", "`pack_bytes_max in [transfer]`"),
        ("jobb = 3", "'jobb'", "`job`"),
        ("xyzzy = 3", "'xyzzy'", "`"),
        ('[job]\nname = "x"', "table 'job'", "`["),
        ('[""]\njob = "x"', "table ''", "`["),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path: Path, text: str, key: str, nearest: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_config(_file(tmp_path, text), KEYS)
    assert key in str(refused.value)
    assert f"did you mean {nearest}" in refused.value.hint


@pytest.mark.parametrize(
    "text, reason",
    [
        ("job = ", "not TOML"),
        ("job = 2026-05-01", "job is a date"),
        ('job = ["a", "b"]', "job is a list"),
        ("[backup.job]\na = 1", "backup.job is a dict"),
        ("job = '''" + "x" * 1024 * 1024 + "'''", "exceeds 1 MiB"),
    ],
)
def test_a_file_that_says_nothing_usable_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        read_config(_file(tmp_path, text), KEYS)


def test_a_file_that_is_no_text_or_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tidemark.toml").write_bytes(b"job = '\xff'")
    for path in (tmp_path / "tidemark.toml", tmp_path / "absent.toml", tmp_path):
        with pytest.raises(UsageError):
            read_config(path, KEYS)


def _read(path: Path, *, is_named: bool) -> Config:
    return read_config(path, KEYS, is_named=is_named)


@pytest.mark.parametrize(
    "mode, is_named, is_refused",
    [
        (0o600, False, False),
        (0o644, False, False),
        (0o664, False, True),
        (0o646, False, True),
        (0o664, True, False),
        (0o646, True, True),
    ],
)
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int, is_named: bool, is_refused: bool) -> None:
    """Its group may write one that the user names."""
    path = _file(tmp_path, 'job = "x"')
    path.chmod(mode)
    if is_refused:
        with pytest.raises(UsageError, match="can be written by others") as refused:
            _read(path, is_named=is_named)
        assert "chmod go-w" in refused.value.hint
    else:
        assert _read(path, is_named=is_named).tables == {"": {"job": "x"}}


def test_another_users_file_is_obeyed_only_if_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, 'job = "x"')
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    owner = path.stat().st_uid
    if owner == 0:  # root's is anybody's
        assert _read(path, is_named=False).tables == {"": {"job": "x"}}
        os.chown(path, 65_534, -1)
        owner = 65_534
    with pytest.raises(UsageError, match=f"another user .uid {owner}.") as refused:
        _read(path, is_named=False)
    assert "--config" in refused.value.hint
    assert _read(path, is_named=True).tables == {"": {"job": "x"}}


def test_another_users_pipe_is_obeyed_only_if_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take the place of a file that was found, before that is opened."""
    path = tmp_path / "tidemark.toml"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)
    try:
        os.write(held, b'job = "x"')
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
        if path.stat().st_uid == 0:
            os.chown(path, 65_534, -1)
        with pytest.raises(UsageError, match="another user"):
            _read(path, is_named=False)
    finally:
        os.close(held)


def test_a_pipe_can_be_named(tmp_path: Path) -> None:
    """As the shell's `--config <(...)` does."""
    reading, writing = os.pipe()
    os.write(writing, b'job = "x"')
    os.close(writing)
    try:
        assert _read(Path(f"/dev/fd/{reading}"), is_named=True).tables == {"": {"job": "x"}}
    finally:
        os.close(reading)

from collections.abc import Callable

import pytest

from index.errors import UnsafeNameError
from index.snapshot.keys import (
    BLOBS,
    INDEXES,
    LogKey,
    RunId,
    UploadKey,
    audit_key,
    boundary_key,
    check_file_name,
    commit_key,
    decode_component,
    decode_scope,
    encode_component,
    encode_scope,
    log_prefix,
    log_start_after,
    make_run_id,
    name_key,
    name_prefix,
    names_prefix,
    parse_audit_key,
    parse_log_key,
    parse_name_key,
    parse_run_key,
    parse_upload_key,
    pin_key,
    run_began_at_ms,
    run_key,
    shard_prefixes,
    upload_key,
)
from index.snapshot.model import Scope

SESSION = "0123456789abcdef0123"

COMPONENTS = [
    ("plain", "plain"),
    ("a.b-c_D9", "a.b-c_D9"),
    (".hidden", "~2Ehidden"),
    (".", "~2E"),
    ("..", "~2E."),
    ("a/b", "a~2Fb"),
    ("job@task", "job~40task"),
    ("~41", "~7E41"),
    ("Partition 7", "Partition~207"),
    ("é", "~C3~A9"),
    ("日", "~E6~97~A5"),
    ("\0", "~00"),
]


@pytest.mark.parametrize("name,component", COMPONENTS)
def test_name_and_component_are_each_others_inverse(name: str, component: str) -> None:
    assert encode_component(name) == component
    assert decode_component(component) == name


@pytest.mark.parametrize("name", ["", "x" * 201, "é" * 34, "\ud800"])
def test_name_that_makes_no_component_is_refused(name: str) -> None:
    with pytest.raises(UnsafeNameError):
        encode_component(name)


@pytest.mark.parametrize(
    "component", ["", "~", "~4", "~41", "~c3~a9", "~C3", "~FF", "a b", "a/b", ".a", "é", "~2F~", "~ED~A0~80", "a" * 201]
)
def test_component_that_no_name_makes_is_refused(component: str) -> None:
    with pytest.raises(UnsafeNameError):
        decode_component(component)


@pytest.mark.parametrize(
    "scope", [Scope("j"), Scope("j", "t"), Scope("a@b", "c@d"), Scope("page views", "Partition 7")]
)
def test_scope_and_component_are_each_others_inverse(scope: Scope) -> None:
    assert decode_scope(encode_scope(scope)) == scope


@pytest.mark.parametrize("component", ["", "@", "@t", "j@", "a@b@c", "j@.", f"{'a' * 120}@{'b' * 120}"])
def test_scope_that_nobody_writes_is_refused(component: str) -> None:
    with pytest.raises(UnsafeNameError):
        decode_scope(component)


def test_scope_fits_a_directory_name() -> None:
    assert len(encode_scope(Scope("a" * 120, "b" * 119))) == 240
    with pytest.raises(UnsafeNameError, match="longer than 240"):
        encode_scope(Scope("a" * 120, "b" * 120))


@pytest.mark.parametrize("prefix", [BLOBS, INDEXES])
@pytest.mark.parametrize("counter", [0, 1, 0xFFFFFF, 0x1000000, 16**12 - 1])
def test_upload_key_comes_apart_as_it_was_made(prefix: str, counter: int) -> None:
    scope = Scope("page views", "7")
    key = upload_key(prefix, scope, SESSION, counter)
    assert parse_upload_key(key) == UploadKey(prefix, scope, SESSION, counter)
    assert key.startswith(shard_prefixes(prefix))


def test_uploads_of_a_session_are_spread_over_the_shards() -> None:
    keys = {upload_key(BLOBS, Scope("j"), SESSION, n)[:9] for n in range(2000)}
    assert len(keys) == 256
    assert keys <= set(shard_prefixes(BLOBS))


GOOD = upload_key(BLOBS, Scope("j", "t"), SESSION, 7)


@pytest.mark.parametrize(
    "key",
    [
        "",
        GOOD + "\n",
        " " + GOOD,
        GOOD[1:],
        GOOD.upper(),
        GOOD.replace("blobs", "log"),
        GOOD.replace("blobs/", "blobs//"),
        GOOD.replace("j@t", ".."),
        GOOD.replace("j@t", "j@"),
        GOOD.replace("j@t", "@t"),
        GOOD.replace("j@t", "j~2e"),
        GOOD.replace("j@t", "j@t/.."),
        GOOD.replace("000007", "00007"),
        GOOD.replace("000007", "0000007"),
        GOOD.replace("000007", "000008"),
        GOOD.replace("000007", "-00007"),
        GOOD.replace("000007", "\u0660" * 5 + "\u0667"),
        "blobs/zz" + GOOD[8:],
        "blobs/../../etc/passwd",
        GOOD + "/x",
    ],
)
def test_hostile_upload_key_is_refused(key: str) -> None:
    with pytest.raises(UnsafeNameError):
        parse_upload_key(key)


def test_log_keys_sort_by_number_and_share_a_prefix() -> None:
    scope = Scope("j")
    keys = [commit_key(scope, 9), boundary_key(scope, 10), commit_key(scope, 10), commit_key(scope, 100)]
    assert keys == sorted(keys)
    assert all(key.startswith(log_prefix(scope)) for key in keys)
    assert keys[0] < log_start_after(scope, 10) < keys[1]


def test_log_key_comes_apart_as_it_was_made() -> None:
    scope = Scope("j", "Partition 7")
    assert parse_log_key(commit_key(scope, 17)) == LogKey(17, "commit", scope)
    assert parse_log_key(boundary_key(scope, 2**63 - 1)) == LogKey(2**63 - 1, "boundary", scope)


@pytest.mark.parametrize(
    "key", ["", "log/j/1.commit", "log/j/00000000000000000001.lock", "log//00000000000000000001.commit"]
)
def test_hostile_log_key_is_refused(key: str) -> None:
    with pytest.raises(UnsafeNameError):
        parse_log_key(key)


def test_name_key_comes_apart_as_it_was_made() -> None:
    key = name_key(Scope("j"), "before the migration", SESSION)
    assert parse_name_key(key) == (Scope("j"), "before the migration", SESSION)
    assert key.startswith(name_prefix(Scope("j"), "before the migration"))
    assert key.startswith(names_prefix(Scope("j")))


@pytest.mark.parametrize("naming_id", ["", "..", SESSION[1:], SESSION.upper(), SESSION + "/x", SESSION + "\n"])
def test_name_key_takes_an_id_of_a_naming_only(naming_id: str) -> None:
    with pytest.raises(UnsafeNameError):
        name_key(Scope("j"), "n", naming_id)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "names/j",
        "names/j/a",
        f"names/j/{SESSION}",
        f"names/j/a@b/{SESSION}",
        f"names/j/../{SESSION}",
        f"names/j@/a/{SESSION}",
        f"names/j/a/b/{SESSION}",
        f"names/j/a/{SESSION[1:]}",
        f"names/j/a/{SESSION.upper()}",
        f"names/j/a/{SESSION}/",
    ],
)
def test_hostile_name_key_is_refused(key: str) -> None:
    with pytest.raises(UnsafeNameError):
        parse_name_key(key)


def test_pin_key_takes_a_pin_id_only() -> None:
    assert pin_key(SESSION) == f"pins/{SESSION}"
    for pin_id in ("", "..", SESSION[1:], SESSION.upper(), SESSION + "/x"):
        with pytest.raises(UnsafeNameError):
            pin_key(pin_id)


@pytest.mark.parametrize("name", ["a", "...", "..a", " ", "é" * 127, "日本", "a\nb", "-", "~", "CON"])
def test_single_path_component_is_a_file_name(name: str) -> None:
    assert check_file_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "../x", "a\\b", "a\0b", "\ud800", "x" * 256, "é" * 128])
def test_anything_else_is_no_file_name(name: str) -> None:
    with pytest.raises(UnsafeNameError) as caught:
        check_file_name(name)
    assert caught.value.hint


def test_keys_of_runs_and_audit_records_there_and_back() -> None:
    run = make_run_id(1_700_000_000_123, "0a" * 10)
    assert run == "00000001700000000123-0a0a0a0a0a0a0a0a0a0a"
    assert run_began_at_ms(run) == 1_700_000_000_123
    assert parse_run_key(run_key(run, "inventory-blobs-0a")) == (run, "inventory-blobs-0a")
    assert parse_audit_key(audit_key(run)) == run
    assert make_run_id(9, "f" * 20) < make_run_id(10, "0" * 20)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_run_id(-1, "0" * 20),
        lambda: make_run_id(10**20, "0" * 20),
        lambda: make_run_id(1, "0" * 19),
        lambda: make_run_id(1, "A" * 20),
        lambda: run_key(make_run_id(1, "0" * 20), ""),
        lambda: run_key(make_run_id(1, "0" * 20), "../x"),
        lambda: run_key(make_run_id(1, "0" * 20), "a" * 101),
        lambda: parse_run_key("runs/1/x"),
        lambda: parse_run_key(f"runs/{make_run_id(1, '0' * 20)}/a/b"),
        lambda: parse_audit_key(f"audit/{make_run_id(1, '0' * 20)}.json"),
        lambda: audit_key(RunId("x")),
    ],
)
def test_what_is_no_key_of_a_run_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UnsafeNameError):
        make()

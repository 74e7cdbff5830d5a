from pathlib import Path

import pytest

from blobstore.base import BytesBody, read_blob
from blobstore.errors import InvalidRequestError, StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.opening import StoreSettings, check_url, local_path_of, open_s3, open_store, slowed
from blobstore.s3.settings import S3Settings
from blobstore.wrappers.forwarding import Meter
from blobstore.wrappers.retry import HedgeSettings, RetrySettings

SECRET = "hunter2hunter2"


async def test_a_file_url_and_a_bare_path_open_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "a dir"
    await open_store(f"file://{tmp_path}/a%20dir").put("k", BytesBody(b"content"))
    monkeypatch.chdir(tmp_path)
    for url in (str(root), "a dir", "./a dir", f"file://localhost{tmp_path}/a%20dir", f"FILE://{tmp_path}/a%20dir"):
        assert await read_blob(open_store(url), "k", size_bytes_max=10) == b"content"


def test_a_path_as_spark_prints_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_path_of("file:/a b/50%") == Path("/a b/50%")
    with pytest.raises(InvalidRequestError, match="not mounted"):
        local_path_of("dbfs:/checkpoints/a")
    monkeypatch.setattr("blobstore.opening._DBFS", tmp_path)
    assert local_path_of("dbfs:/checkpoints/a") == tmp_path / "checkpoints" / "a"
    assert local_path_of("dbfs:///checkpoints/a") == tmp_path / "checkpoints" / "a"


def test_what_only_a_shell_reads_is_refused_unless_it_is_a_path() -> None:
    for text in ("~", "~/backups", "~user/backups"):
        with pytest.raises(InvalidRequestError, match="begins with ~") as caught:
            open_store(text)
        assert "./" in caught.value.hint
    assert local_path_of("./~/backups") == local_path_of(Path("~/backups")) == Path("~/backups")


@pytest.mark.parametrize(
    "url, hint",
    [
        ("abfss://container@account.dfs.core.windows.net/x", "blobfuse2"),
        ("wasbs://container@account/x", "azcopy"),
        ("gs://bucket/x", "--endpoint-url"),
        ("hdfs://name:8020/x", "mount"),
        ("viewfs:///x", "mount"),
    ],
)
def test_a_store_of_spark_s_that_is_none_here_is_refused_with_a_way_out(url: str, hint: str) -> None:
    with pytest.raises(InvalidRequestError, match="no blob store of this scheme") as caught:
        open_store(url)
    assert hint in caught.value.hint
    assert "credentials" not in str(caught.value)


async def test_a_relative_path_stays_what_it_was_when_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("root")
    monkeypatch.chdir("/")
    await store.put("k", BytesBody(b"x"))
    assert (tmp_path / "root" / "k").read_bytes() == b"x"


async def test_a_memory_url_opens_the_same_store_by_its_name(tmp_path: Path) -> None:
    name = tmp_path.name
    await open_store(f"memory://{name}").put("k", BytesBody(b"content"))
    assert await read_blob(open_store(f"memory://{name}"), "k", size_bytes_max=10) == b"content"
    assert await open_store(f"memory://{name}-other").stat("k") is None


def test_an_s3_url_is_a_bucket_and_a_prefix() -> None:
    settings = StoreSettings(s3=S3Settings(region="eu-north-1"))
    for url, prefix in (("s3://bucket", ""), ("s3://bucket/", ""), ("S3://bucket/a/b", "a/b"), ("s3://bucket/a/", "a")):
        store = open_s3(url, settings)
        assert (store.bucket, store.prefix, store.settings) == ("bucket", prefix, settings.s3)


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///prefix", "s3://Bucket", "s3://b", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/ä"]
)
def test_an_s3_url_that_names_no_bucket_or_no_prefix_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        open_store(url)
    assert caught.value.hint


def test_a_url_of_another_store_is_no_s3_store(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}", str(tmp_path), "memory://name"):
        with pytest.raises(InvalidRequestError):
            open_s3(url)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://user:{SECRET}@bucket",
        f"s3://{SECRET}@bucket/prefix",
        f"s3://user:{SECRET}/with+a/slash@bucket/prefix",
        f"s3://user:a/{SECRET}@bucket/prefix",
        f"s3://user:{SECRET}",
        f"s3://bucket/{SECRET}//x",
        f"file://user:{SECRET}@host/path",
        f"memory://u:{SECRET}@name",
        f"ftp://user:{SECRET}@host/",
        f"s3://bucket?secret={SECRET}",
        f"file:///path#{SECRET}",
        f"memory://{SECRET}/path",
        f"https://[{SECRET}@x",
        f"s3://user:{SECRET}\u2100@bucket",
        f"s3:{SECRET}",
        f"{SECRET}://x",
    ],
)
def test_what_a_url_must_not_hold_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        open_store(url)
    if not url.startswith(SECRET):  # as a scheme it is none
        assert SECRET not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "url",
    [
        *("", "file:", "file:relative", "file://host/path", "file://", "file://%00", "file:///a%00b", "file:///p?x=1"),
        *("memory:", "memory://", "memory:///x", "memory://a b", "http://host/path", "s3:/bucket", "gs://bucket"),
    ],
)
def test_a_url_that_does_not_follow_the_grammar_is_refused(url: str) -> None:
    for refuse in (open_store, check_url):
        with pytest.raises(InvalidRequestError) as caught:
            refuse(url)
        assert caught.value.operation == "open"
        assert caught.value.hint


@pytest.mark.parametrize("url", ["s3://bucket/a", "file:///a", "a", "/a@b?c#d", "memory://a"])
def test_a_url_that_follows_the_grammar_is_not_refused_by_its_text(url: str) -> None:
    check_url(url)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="not a directory"):
        open_store(f"file://{tmp_path}/file")


async def test_a_directory_and_a_store_in_memory_are_not_asked_twice(tmp_path: Path) -> None:
    """However late they are (design 0008, H5)."""
    hedge = HedgeSettings(first_patience_s=1e-5, patience_min_s=1e-5)
    for url in (f"file://{tmp_path}", f"memory://{tmp_path.name}"):
        meter = Meter()
        store = open_store(url, StoreSettings(hedge=hedge), meter=meter)
        await store.put("k", BytesBody(b"content"), repeatable=True)
        await read_blob(store, "k", size_bytes_max=10)
        assert meter.requests == {"put": 1, "get": 1}


async def test_settings_and_meter_reach_their_wrappers(tmp_path: Path) -> None:
    meter = Meter()
    store = open_store(f"file://{tmp_path}", StoreSettings(deleted_retention_ms=1000), meter=meter)
    assert store.capabilities.keeps_deleted
    await store.put("k", BytesBody(b"12345"))
    assert meter.requests == {"put": 1}
    with pytest.raises(InvalidRequestError):
        open_store(f"file://{tmp_path}", StoreSettings(in_flight_max=0))


@pytest.mark.parametrize(
    "limit, in_flight_max, floor",
    # As it is; so few that each is above the floor; one, with half of what there is.
    [(100 * 2**20, 16, 64 * 1024), (2**20, 16, 32 * 1024), (256 * 1024, 4, 32 * 1024), (64 * 1024, 1, 32 * 1024)],
)
def test_a_limit_on_bytes_leaves_each_request_more_than_the_floor(limit: int, in_flight_max: int, floor: int) -> None:
    settings = StoreSettings(bytes_per_s_max=limit)
    requests, retry = slowed(settings)
    assert (requests, retry.bytes_per_s_min) == (in_flight_max, floor)
    assert limit // requests > retry.bytes_per_s_min


def test_a_limit_below_the_floor_of_a_single_request_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="is less than"):
        StoreSettings(bytes_per_s_max=65_535)


async def test_what_is_tried_again_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    store = open_store(f"memory://{tmp_path.name}", StoreSettings(retry=RetrySettings(first_wait_s=0)), meter=meter)
    fails = [StoreUnavailableError("no", operation="now_ms")]

    async def now_ms(_: MemoryStore) -> int:
        if fails:
            raise fails.pop()
        return 7

    monkeypatch.setattr(MemoryStore, "now_ms", now_ms)
    assert await store.now_ms() == 7
    assert (meter.retries, meter.requests["now_ms"], meter.errors["now_ms"]) == (1, 2, 1)

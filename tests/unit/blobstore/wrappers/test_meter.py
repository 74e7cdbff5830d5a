import pytest

from blobstore.base import BytesBody, MemorySink, read_blob
from blobstore.errors import BlobNotFoundError, StoreUnavailableError
from blobstore.wrappers.forwarding import Meter, MeteredStore
from blobstore.wrappers.retry import RetryingStore, RetrySettings
from tests.contract.sink_contract import Collecting
from tests.unit.blobstore.scripted_store import ScriptedStore


async def test_every_request_and_every_byte_is_counted() -> None:
    store = MeteredStore(ScriptedStore())
    await store.put("a", BytesBody(b"12345"))
    await store.put_if_absent("b", BytesBody(b"123"), ttl_ms=5)
    await store.put_if_absent("b", BytesBody(b"123"), ttl_ms=5)
    await read_blob(store, "a", size_bytes_max=10)
    await store.read_into("a", MemorySink(), start=1, size_bytes=2)
    await store.read_into("a", Collecting(), start=1, size_bytes=3)
    await store.stat("a")
    await store.list_page("")
    await store.remove_ttl("b")
    await store.delete(["a", "b"])
    await store.now_ms()
    assert store.meter.requests == {
        "put": 1,
        "put_if_absent": 2,
        "get": 3,
        "stat": 1,
        "list_page": 1,
        "remove_ttl": 1,
        "delete": 1,
        "now_ms": 1,
    }
    assert store.meter.bytes_out == 5 + 3  # what is lost at once sends no body
    assert store.meter.bytes_in == 5 + 2 + 3


async def test_errors_are_counted_by_operation() -> None:
    store = MeteredStore(ScriptedStore())
    with pytest.raises(BlobNotFoundError):
        await read_blob(store, "absent", size_bytes_max=1)
    assert store.meter.requests == store.meter.errors == {"get": 1}


async def test_below_retries_every_attempt_counts() -> None:
    error = StoreUnavailableError("no", operation="put")
    metered = MeteredStore(ScriptedStore(error, error))
    await RetryingStore(metered, RetrySettings(first_wait_s=0)).put("k", BytesBody(b"12345"))
    assert metered.meter.requests["put"] == 3
    assert metered.meter.errors["put"] == 2
    assert metered.meter.bytes_out == 5


async def test_retries_and_the_time_of_requests_are_counted() -> None:
    error = StoreUnavailableError("no", operation="put")
    meter = Meter()
    inner = MeteredStore(ScriptedStore(error, error), meter)
    await RetryingStore(inner, RetrySettings(first_wait_s=0), on_retry=meter.count_retry).put("k", BytesBody(b"12345"))
    assert meter.retries == 2
    assert meter.seconds["put"] > 0
    meter.reset()
    assert (meter.retries, dict(meter.seconds)) == (0, {})

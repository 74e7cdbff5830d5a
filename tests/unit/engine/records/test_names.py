"""Design 0002, D5: names. Each naming has a key of its own, which nothing that comes late can hit."""

import asyncio

import pytest

from blobstore.base import Body, Unknown, list_blobs, read_blob
from blobstore.errors import AccessDeniedError, BlobNotFoundError, StoreError, StoreUnavailableError
from engine.errors import LeaseExpiredError, NotFoundError, UsageError
from engine.records.find import Choice
from index.plan.collect import DeleteReason
from index.plan.commits import Retention
from index.snapshot.codec import RECORD_BYTES_MAX, decode_name
from index.snapshot.keys import parse_name_key
from index.snapshot.model import PIN_DURATION_MS
from tests.unit.engine.conftest import JOB, TTL_MS, World
from tests.walker import expected_keys

KEEP_ALL = Retention(keep_last=5)
LAST = Retention(keep_last=1, keep_named=False)


async def name_keys(world: World) -> list[str]:
    return [blob.key async for blob in list_blobs(world.store.inner, "names/")]


async def test_a_stale_collector_cannot_delete_a_live_name(world: World) -> None:
    repository, slow, other = await world.process(), await world.process(), await world.process()
    one, *_ = await world.history(repository, "one")
    await repository.name(one, "golden")
    await world.history(repository, "two")
    await repository.release_name(JOB, "golden")
    world.clock.advance(2 * PIN_DURATION_MS)

    async def other_collects_and_the_name_is_given_again() -> None:
        await other.collect(KEEP_ALL, delete_share_max=1)
        assert await name_keys(world) == []
        await repository.name(one, "golden")

    world.store.before("delete", "names/", other_collects_and_the_name_is_given_again)
    await slow.collect(KEEP_ALL, delete_share_max=1)
    await world.history(repository, "three")
    await other.collect(LAST, delete_share_max=1)
    assert await world.restored_text(repository, name="golden") == "one"


async def test_a_commit_that_only_a_name_holds_is_not_found_without_it_and_the_hint_says_so(world: World) -> None:
    """`list` shows it with its number and version, so these are asked for (F13)."""
    repository = await world.process()
    one, *_ = await world.history(repository, "one", "two")
    await repository.name(one, "golden")
    await world.history(repository, "three")
    await repository.collect(LAST, delete_share_max=1)
    choices: tuple[Choice, ...] = ({"number": one.pointer.number}, {"version": one.record.version})
    for choice in choices:
        with pytest.raises(NotFoundError) as refused:
            await repository.find(JOB, **choice)
        assert "only the name 'golden' still holds it" in refused.value.hint
    with pytest.raises(NotFoundError) as refused:
        await repository.find(JOB, number=99)
    assert refused.value.hint == NotFoundError.default_hint


async def test_a_late_release_does_not_touch_a_newer_name(world: World) -> None:
    late, collector, user = await world.process(), await world.process(), await world.process()
    one, *_ = await world.history(late, "one")
    await late.name(one, "golden")
    await world.history(late, "two")

    async def meanwhile() -> None:
        await user.release_name(JOB, "golden")
        world.clock.advance(2 * PIN_DURATION_MS)
        await collector.collect(KEEP_ALL, delete_share_max=1)
        await user.name(one, "golden")

    world.store.before("put", "names/", meanwhile)
    await late.release_name(JOB, "golden")
    assert await world.restored_text(late, name="golden") == "one"
    await world.history(late, "three")
    await collector.collect(LAST, delete_share_max=1)
    assert await world.restored_text(late, name="golden") == "one"


async def test_a_released_name_is_free_at_once_even_for_another_commit(world: World) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one", "two")
    await repository.name(one, "golden")
    await repository.release_name(JOB, "golden")
    with pytest.raises(NotFoundError, match="was released"):
        await repository.find(JOB, name="golden")
    with pytest.raises(NotFoundError, match="was released"):
        await repository.release_name(JOB, "golden")
    with pytest.raises(NotFoundError, match="is not there"):
        await repository.find(JOB, name="silver")
    await repository.name(await repository.find(JOB), "golden")
    assert await world.restored_text(repository, name="golden") == "two"
    assert [n.version for n in await repository.names(JOB)] == [2]
    keys = await name_keys(world)
    assert [parse_name_key(k)[:2] for k in keys] == [(JOB, "golden")] * 2


async def test_naming_is_repeated_after_a_lost_answer(world: World) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one", "two")
    world.store.lose_answer("put_if_absent", "names/")
    with pytest.raises(StoreUnavailableError):
        await repository.name(one, "golden")
    world.clock.advance(10)
    assert (await repository.name(one, "golden")).source == one.pointer
    assert len(await name_keys(world)) == 1
    with pytest.raises(UsageError, match="the name is taken"):
        await repository.name(await repository.find(JOB), "golden")


async def test_naming_that_lands_late_finds_its_blobs_and_takes_no_name_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, collector = await world.process(), await world.process()
    one, *_ = await world.history(repository, "one", "two")
    inner, sent = world.store.inner, list[tuple[str, Body]]()

    async def hang(key: str, body: Body, **_: object) -> Unknown:
        sent.append((key, body))
        return Unknown(reason="hung")

    with monkeypatch.context() as patch:
        patch.setattr(inner, "put_if_absent", hang)
        with pytest.raises(StoreUnavailableError):
            await repository.name(one, "golden")
    two = await repository.find(JOB)
    await repository.name(two, "silver")
    await collector.collect(LAST, delete_share_max=1)
    world.clock.advance(1)
    await inner.put_if_absent(*sent[0])
    await collector.collect(LAST, delete_share_max=1)
    assert await world.restored_text(await world.process(), name="golden") == "one"
    # Had it come later than a naming that was acknowledged, that one would be there.
    await repository.release_name(JOB, "golden")
    await repository.name(two, "golden")
    assert await world.restored_text(await world.process(), name="golden") == "two"


async def test_releasing_gives_up_whatever_stands_under_the_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one", "two")
    inner, sent = world.store.inner, list[tuple[str, Body]]()

    async def hang(key: str, body: Body, **_: object) -> Unknown:
        sent.append((key, body))
        return Unknown(reason="hung")

    with monkeypatch.context() as patch:
        patch.setattr(inner, "put_if_absent", hang)
        with pytest.raises(StoreUnavailableError):
            await repository.name(one, "golden")
    await repository.name(await repository.find(JOB), "golden")
    world.clock.advance(1)
    await inner.put_if_absent(*sent[0])
    assert [n.version for n in await repository.names(JOB)] == [2]
    await repository.release_name(JOB, "golden")
    assert await repository.names(JOB) == ()


@pytest.mark.parametrize("same_ms", [True, False])
async def test_of_two_who_name_at_once_the_later_gives_way(world: World, same_ms: bool) -> None:
    slow, fast = await world.process(), await world.process()
    one, *_ = await world.history(slow, "one", "two")
    two = await slow.find(JOB)

    async def name_meanwhile() -> None:
        await fast.name(two, "golden")
        world.clock.advance(0 if same_ms else 1)

    world.store.before("put_if_absent", "names/", name_meanwhile)
    with pytest.raises(UsageError, match="the name is taken"):
        await slow.name(one, "golden")
    assert await world.restored_text(slow, name="golden") == "two"
    await slow.collect(LAST, delete_share_max=1)
    assert await world.restored_text(slow, name="golden") == "two"
    await fast.release_name(JOB, "golden")
    assert await slow.names(JOB) == ()


async def test_two_who_name_at_once_never_both_succeed(world: World) -> None:
    a, b = await world.process(), await world.process()
    one, *_ = await world.history(a, "one", "two")
    two = await a.find(JOB)
    outcomes = await asyncio.gather(a.name(one, "golden"), b.name(two, "golden"), return_exceptions=True)
    shown = [o for o in outcomes if not isinstance(o, UsageError)]
    assert len(shown) <= 1
    assert list(await a.names(JOB)) == shown


async def test_two_who_name_one_commit_at_once_both_succeed(world: World) -> None:
    a, b = await world.process(), await world.process()
    one, *_ = await world.history(a, "one")
    await asyncio.gather(a.name(one, "golden"), b.name(one, "golden"))
    assert await world.restored_text(a, name="golden") == "one"
    await a.release_name(JOB, "golden")
    assert await b.names(JOB) == ()


async def test_a_copy_of_the_request_that_lands_after_release_and_collection_is_no_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PUT that was sent twice: the second copy arrives when the name was released and collected."""
    repository = await world.process()
    one, *_ = await world.history(repository, "one", "two")
    inner, sent = world.store.inner, list[tuple[str, Body]]()
    put_if_absent = inner.put_if_absent

    async def note(key: str, body: Body, *, ttl_ms: int | None = None, **_: object) -> object:
        sent.append((key, body))
        return await put_if_absent(key, body, ttl_ms=ttl_ms)

    with monkeypatch.context() as patch:
        patch.setattr(inner, "put_if_absent", note)
        await repository.name(one, "golden")
    await repository.release_name(JOB, "golden")
    await repository.collect(LAST, delete_share_max=1)
    await put_if_absent(*sent[0])
    assert await repository.names(JOB) == ()
    await repository.collect(LAST, delete_share_max=1)
    world.clock.advance(2 * PIN_DURATION_MS)
    report = await repository.collect(LAST, delete_share_max=1)
    assert DeleteReason.RELEASED_NAME in {d.reason for d in report.deletes}
    await put_if_absent(*sent[0])
    assert await repository.names(JOB) == ()
    await repository.collect(LAST, delete_share_max=1)
    assert await name_keys(world) == []
    found = {blob.key async for blob in list_blobs(world.store.inner, "")}
    assert found == await expected_keys(world.store.inner, world.clock.now_ms)


async def test_a_name_that_comes_after_its_pin_is_void(world: World) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one", "two")

    async def sleep() -> None:
        world.clock.advance(PIN_DURATION_MS + TTL_MS)
        await (await world.process()).collect(LAST, delete_share_max=1)

    world.store.before("put_if_absent", "names/", sleep)
    with pytest.raises(LeaseExpiredError):
        await repository.name(one, "golden")
    with pytest.raises(NotFoundError, match="is not there"):
        await repository.find(JOB, name="golden")
    await repository.collect(LAST, delete_share_max=1)
    assert await name_keys(world) == []


@pytest.mark.parametrize(
    "error, released",
    [
        (AccessDeniedError("no", operation="put_if_absent", key="names/"), True),
        (StoreUnavailableError("no answer", operation="put_if_absent", key="names/"), False),
    ],
)
async def test_the_pin_goes_with_a_definite_outcome_only(world: World, error: StoreError, released: bool) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one")
    world.store.fail("put_if_absent", "names/", error)
    with pytest.raises(type(error)):
        await repository.name(one, "golden")
    assert len([k for o, k in world.store.requests if o == "put" and k.startswith("pins/")]) == (2 if released else 1)


async def test_a_naming_that_is_collected_while_it_is_looked_for_is_skipped(world: World) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one")
    await repository.name(one, "golden")
    world.store.fail("get", "names/", BlobNotFoundError("gone", operation="get", key="names/"))
    with pytest.raises(NotFoundError, match="is not there"):
        await repository.find(JOB, name="golden")


async def test_finding_a_name_is_one_listing_and_one_get(world: World) -> None:
    repository = await world.process()
    one, *_ = await world.history(repository, "one")
    await repository.name(one, "golden")
    world.store.requests.clear()
    await repository.find(JOB, name="golden")
    assert [o for o, _ in world.store.requests] == ["list_page", "get"]
    (key,) = await name_keys(world)
    stored = await read_blob(world.store.inner, key, size_bytes_max=RECORD_BYTES_MAX)
    assert decode_name(stored, subject=key).name == "golden"

"""What `doctor` does to a store to see whether data is safe there, and which optional capabilities the store has.

All goes through the contract of `blobstore.base`, on stores without wrappers, one per client, so that nothing hides a
fault: only "unavailable" is tried again, and it never counts as a fault. What each check saw is judged elsewhere.
"""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, ParamSpec, Protocol, TypeVar, runtime_checkable

import msgspec

from blobstore import base
from blobstore.concurrency import both, map_bounded
from blobstore.errors import (
    AccessDeniedError,
    BlobNotFoundError,
    InvalidRequestError,
    StoreError,
    StoreUnavailableError,
)
from blobstore.s3.bucket_rules import DAYS_MIN, Rule, backstop_days, is_backstop, threats
from blobstore.s3.settings import KIB, MIB, PART_BYTES_MIN
from index.errors import FormatError
from index.snapshot.codec import decode_repository
from index.snapshot.keys import REPOSITORY

P = ParamSpec("P")
T = TypeVar("T")

ATTEMPTS_MAX: Final = 4
PAUSE_S: Final = 0.2
_READ_BYTES_MAX: Final = 8 * MIB
# Default size of what is written, and the TTL of what is created with one.
SMALL_BYTES: Final = 4 * KIB
TTL_MS: Final = 7 * 24 * 3_600_000


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What one check has seen. Without `broken` and `lacking`: all that it should."""

    # What was done and seen, for people.
    figure: str = ""
    # A lifecycle rule deletes by the tag of a TTL.
    has_backstop: bool = False
    # How the store broke a promise that data depends on.
    broken: str = ""
    # What it cannot do, which tidemark can do without.
    lacking: str = ""


@runtime_checkable
class S3Capabilities(Protocol):
    """What an S3 store can do beside the contract of stores."""

    @property
    def prefix(self) -> str: ...

    async def put_parts_if_absent(
        self, key: str, body: base.BytesBody, *, ttl_ms: int | None = None, part_bytes: int | None = None
    ) -> base.CreateOutcome: ...

    async def begin_upload(self, key: str) -> base.UnfinishedPut: ...

    async def read_lifecycle(self) -> tuple[Rule, ...]: ...


class NotApplicableError(Exception):
    """There is nothing to look at in a store of this kind."""


class NoTimeError(Exception):
    """The time of the whole examination was over."""


class StoreProbe(msgspec.Struct):
    """Looks at a store with several clients at once, which have no wrappers, and connections of their own."""

    clients: Sequence[base.BlobStore]
    # The prefix that everything is written below, with a slash.
    root: str
    monotonic_s: Callable[[], float]
    # All that may have been written.
    keys: list[str] = []
    unfinished: list[base.UnfinishedPut] = []
    # Requests that were not answered, or with "try again".
    hiccups: int = 0

    def client(self, number: int) -> base.BlobStore:
        return self.clients[number % len(self.clients)]

    @property
    def s3(self) -> tuple[S3Capabilities, ...]:
        """The clients as S3 stores; NotApplicableError if they are none."""
        found = tuple(client for client in self.clients if isinstance(client, S3Capabilities))
        if not found:
            raise NotApplicableError("only S3 has this")
        return found

    def key(self, name: str) -> str:
        """Return a key below the root, which is deleted at the end."""
        key = f"{self.root}{name}"
        self.keys.append(key)
        return key

    def fresh_key(self, name: str) -> str:
        """Return a key that is another one each time: for a check that may be run a second time."""
        times = sum(key.partition("+")[0] == self.root + name for key in self.keys)
        return self.key(f"{name}+{times}" if times else name)

    async def tried(self, request: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a request, again where the store is unavailable at first."""
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                return await request(*args, **kwargs)
            except StoreUnavailableError as error:
                self.hiccups += 1
                if attempt == ATTEMPTS_MAX:
                    raise
                await asyncio.sleep(min(2.0, error.retry_after_s or PAUSE_S * attempt))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def put(self, number: int, key: str, data: bytes) -> base.Created:
        return await self.tried(self.client(number).put, key, base.BytesBody(data))

    async def create(self, number: int, key: str, data: bytes, *, ttl_ms: int | None = None) -> None:
        """Create an object that no client has seen yet."""

        async def create() -> None:
            outcome = await self.client(number).put_if_absent(key, base.BytesBody(data), ttl_ms=ttl_ms)
            if not isinstance(outcome, base.Created | base.Lost):
                raise StoreUnavailableError(outcome.reason, operation="put_if_absent", key=key)

        await self.tried(create)

    async def read(self, number: int, key: str) -> bytes | None:
        try:
            return await self.tried(base.read_blob, self.client(number), key, size_bytes_max=_READ_BYTES_MAX)
        except BlobNotFoundError:
            return None

    async def range(self, number: int, key: str, start: int, size_bytes: int | None) -> bytes:

        async def fetch() -> bytes:
            sink = base.MemorySink()
            await self.client(number).read_into(key, sink, start=start, size_bytes=size_bytes)
            return sink.data

        return await self.tried(fetch)

    async def stat(self, number: int, key: str) -> base.BlobInfo | None:
        return await self.tried(self.client(number).stat, key)

    async def names(self, number: int, prefix: str, *, limit: int = 1000) -> AsyncIterator[tuple[str, ...]]:
        """Yield the keys of a prefix, page by page, without the root."""
        start_after = ""
        while True:
            list_page = self.client(number).list_page
            page = await self.tried(list_page, self.root + prefix, start_after=start_after, limit=limit)
            yield tuple(blob.key.removeprefix(self.root) for blob in page.blobs)
            if not page.truncated or not page.blobs:
                return
            start_after = page.blobs[-1].key

    async def listed(self, number: int, prefix: str) -> list[str]:
        return [name async for page in self.names(number, prefix) for name in page]

    async def is_alive(self, within_s: float | None = None) -> bool:
        """Return whether the store answers plain requests just now."""
        key = self.key("alive")
        try:
            async with asyncio.timeout(within_s):
                for number in range(4):
                    await self.client(number).put(key, base.BytesBody(b"alive"))
                    if await self.client(number).stat(key) is None:
                        return False
        except (StoreError, TimeoutError):
            return False
        return True


def pattern(size_bytes: int, seed: str) -> bytes:
    """Return bytes in which no two places look alike, the same for a seed."""
    return hashlib.shake_256(seed.encode()).digest(size_bytes)


RACES_COUNT: Final = 6
# A race that fewer answers than this say anything about is none.
RACE_ANSWERS_MIN: Final = 2
LIST_ROUNDS_MAX: Final = 24
LIST_ROUNDS_MIN: Final = 4
# Maximum time for checking lists, where requests take as long as the first.
LISTS_S: Final = 8.0
# S3 has times in whole seconds.
SECOND_MS: Final = 1000
SKEW_MS_MAX: Final = 300_000


async def check_create(probe: StoreProbe) -> Evidence:
    """Have many clients create one key at once: one of them wins, its bytes stay, and a later create loses."""
    clients_count = len(probe.clients)
    # Connections are made before, so that the requests of a race meet.
    await asyncio.gather(*(probe.stat(number, probe.root + "nothing") for number in range(clients_count)))
    seen: Counter[str] = Counter()
    decided = 0
    broken = ""
    for number in range(RACES_COUNT):
        key = probe.key(f"create/{number}")
        bodies = [pattern(SMALL_BYTES << (4 * (number % 2)), f"{number} {client}") for client in range(clients_count)]

        async def enter(client: int, key: str = key, bodies: list[bytes] = bodies) -> base.CreateOutcome | str:
            try:
                return await probe.client(client).put_if_absent(key, base.BytesBody(bodies[client]))
            except StoreUnavailableError as error:
                probe.hiccups += 1
                return str(error)

        outcomes = await asyncio.gather(*map(enter, range(clients_count)))
        winners = [client for client, outcome in enumerate(outcomes) if isinstance(outcome, base.Created)]
        losers = sum(isinstance(outcome, base.Lost) for outcome in outcomes)
        seen.update(won=len(winners), lost=losers, unclear=clients_count - len(winners) - losers)
        if len(winners) > 1:
            broken = broken or f"{len(winners)} of {clients_count} clients had the answer that they had won"
        if not winners and losers == clients_count:
            broken = broken or "every client had the answer that another one had won"
        if len(winners) != 1:
            continue
        late = await probe.tried(probe.client(1).put_if_absent, key, base.BytesBody(b"late"))
        if isinstance(late, base.Created):
            broken = broken or "a create of what was there long since succeeded"
        if await probe.read(2, key) != bodies[winners[0]]:
            broken = broken or "the bytes of the winner were replaced"
        decided += losers + 1 >= RACE_ANSWERS_MIN
    if not broken and decided * 2 < RACES_COUNT:
        raise StoreUnavailableError(f"only {decided} of {RACES_COUNT} races were answered", operation="put_if_absent")
    unclear = f", {seen['unclear']} unclear" if seen["unclear"] else ""
    figure = f"{RACES_COUNT} races of {clients_count}: {seen['won']} won, {seen['lost']} lost{unclear}"
    return Evidence(figure=figure, broken=broken)


async def check_read(probe: StoreProbe) -> Evidence:
    """Check that what one client wrote, replaced or deleted, the others see at once."""

    async def look(number: int) -> str:  # noqa: PLR0911  (each is another fault)
        key = probe.key(f"read/{number}")
        if await probe.stat(number + 1, key) is not None:
            return "something is there that nobody wrote"
        await probe.create(number, key, b"first")
        if await probe.read(number + 1, key) != b"first":
            return "a read after the create did not see it"
        for version in range(3):
            data = f"version {version}".encode() * (version + 1)
            await probe.put(number, key, data)
            if await probe.read(number + 2, key) != data:
                return "a read after a put saw something else"
            info = await probe.stat(number + 3, key)
            if info is None or info.size_bytes != len(data):
                return "a stat after a put saw something else"
        try:
            if await probe.tried(probe.client(number).delete, [key]):
                return ""
        except (StoreError, NotImplementedError):
            return ""  # another check is about deleting
        if await probe.stat(number + 1, key) is not None or await probe.read(number + 2, key) is not None:
            return "something deleted was still seen"
        return ""

    found = await map_bounded(look, range(8), in_flight_max=8)
    return Evidence(figure="8 keys, each written 4 times", broken=next(filter(None, found), ""))


async def check_replace(probe: StoreProbe) -> Evidence:
    """Replace an object again and again: every reader sees one of the versions, whole."""
    key = probe.key("replace")
    versions = [pattern(48 * KIB + 1000 * version, f"version {version}") for version in range(8)]
    await probe.put(0, key, versions[0])
    is_over = False
    reads = 0

    async def write() -> None:
        nonlocal is_over
        try:
            for number in range(16):
                await probe.put(0, key, versions[number % len(versions)])
                # Also where requests wait for nothing, everybody has a turn.
                await asyncio.sleep(0)
        finally:
            is_over = True

    async def read(number: int) -> str:
        nonlocal reads
        while not is_over:
            await asyncio.sleep(0)
            data = await probe.read(number, key)
            reads += 1
            if data is None:
                return "an object was gone while it was replaced"
            if data not in versions:
                return "a read saw a mixture of two versions"
        return ""

    _, found = await both(write(), map_bounded(read, range(1, 5)))
    return Evidence(figure=f"16 puts, {reads} reads beside them", broken=next(filter(None, found), ""))


async def check_ranges(probe: StoreProbe) -> Evidence:
    """Check that ranges are the bytes that were asked for, and that those beyond the object are refused."""
    size = 1 * MIB + 13
    data = pattern(size, "ranges")
    key = probe.key("ranges")
    await probe.put(0, key, data)
    wanted: list[tuple[int, int | None]] = [
        (0, None), (0, 1), (0, size), (1, 1), (4095, 2), (65_535, 65_537), (size // 2, 100_000), (size - 1, 1),
        (size - 13, None), (1, None), (size, None), (size, 0), (7, 0),
    ]  # fmt: skip
    for number, (start, size_bytes) in enumerate(wanted):
        end = size if size_bytes is None else start + size_bytes
        try:
            got = await probe.range(number, key, start, size_bytes)
        except (StoreUnavailableError, InvalidRequestError) as error:
            if getattr(error, "asks_for_less", False) or not await probe.is_alive():
                raise
            return Evidence(broken=f"bytes {start} to {end} could not be read ({error})")
        if got != data[start:end]:
            return Evidence(broken=f"bytes {start} to {end} were others than those written")
    for start, size_bytes in ((size + 1, None), (size - 1, 2), (size, 1)):
        try:
            got = await probe.range(1, key, start, size_bytes)
        except InvalidRequestError:
            continue
        return Evidence(broken=f"{len(got)} bytes came from behind the end")
    return Evidence(figure=f"{len(wanted) + 3} ranges of 1 MiB")


async def check_lists(probe: StoreProbe) -> Evidence:
    """Check that what one client created or deleted, the next list of another shows, in order and page by page."""
    if not probe.client(0).capabilities.consistent_lists:
        return Evidence(lacking="lists may be stale in a place like this")
    rounds = LIST_ROUNDS_MAX
    there: list[str] = []
    number = 0
    began_s = probe.monotonic_s()
    while number < rounds:
        name = f"lists/{_ORDERED[number % len(_ORDERED)]}{number:02d}"
        await probe.create(number, probe.key(name), b"x")
        there = sorted([*there, name])
        if (listed := await probe.listed(number + 1, "lists/")) != there:
            return Evidence(broken=_listing_fault(listed, there, "a create"))
        if number == 0:
            rounds = choose_list_rounds(probe.monotonic_s() - began_s)
        number += 1
    page_max = max(1, rounds // 5)
    pages = [page async for page in probe.names(3, "lists/", limit=page_max)]
    if [name for page in pages for name in page] != there or any(len(page) > page_max for page in pages):
        return Evidence(broken="pages of a list are not what the whole list is")
    deletes = 0
    try:
        for number, name in enumerate(there[::3]):
            if await probe.tried(probe.client(number).delete, [probe.root + name]):
                break
            deletes += 1
            there.remove(name)
            if (listed := await probe.listed(number + 1, "lists/")) != there:
                return Evidence(broken=_listing_fault(listed, there, "a delete"))
    except AccessDeniedError:
        pass  # another check is about deleting
    return Evidence(figure=f"{rounds} creates, {deletes} deletes, a list after each")


def choose_list_rounds(round_s: float) -> int:
    """Return the number of creates with a list after each that there is time for, if one takes `round_s`."""
    # For every three of them there are a delete and a list, and at the end a few pages: half as much again.
    return max(LIST_ROUNDS_MIN, min(LIST_ROUNDS_MAX, int(LISTS_S / (1.5 * max(round_s, 1e-9)))))


# What sorts differently by bytes than by words or places.
_ORDERED: Final = ("a-", "A", "a/", "a.", "_", "~", "Z", "z/b/", "+", "=", "0", "%")


def _listing_fault(listed: Sequence[str], there: Sequence[str], after: str) -> str:
    if sorted(listed) == sorted(there):
        return "a list was not in the order of its keys"
    fault = "lacked what was there" if set(there) - set(listed) else "had what was not there"
    return f"a list after {after} {fault}"


async def check_ttl(probe: StoreProbe) -> Evidence:  # noqa: PLR0911  (each is another fault)
    """Check that an object is created with its TTL, and has none for anybody once it was removed."""
    key = probe.fresh_key("ttl")
    await probe.create(0, key, b"with a TTL", ttl_ms=TTL_MS)
    created = await probe.stat(1, key)
    if created is None or created.expires_at_ms is None:
        return Evidence(broken="a TTL was lost when the object was written")
    if abs(created.expires_at_ms - created.created_at_ms - TTL_MS) > SECOND_MS:
        return Evidence(broken="a TTL is another than the one that was set")
    if not probe.client(0).capabilities.removes_ttl:
        return Evidence(lacking="TTLs cannot be removed with these settings")
    for number in (2, 3):
        try:
            await probe.tried(probe.client(number).remove_ttl, key)
        except (AccessDeniedError, StoreUnavailableError):
            raise
        except StoreError as error:
            return Evidence(lacking=f"a TTL could not be removed ({error})")
    kept = await probe.stat(4, key)
    if kept is None or await probe.read(5, key) != b"with a TTL":
        return Evidence(broken="removing a TTL changed the object")
    if kept.expires_at_ms is not None:
        return Evidence(lacking="a TTL was still there after it was removed")
    return Evidence(figure="set at creation, removed, gone")


async def check_clock(probe: StoreProbe, local_now_ms: Callable[[], int]) -> Evidence:
    """Compare the store's clock, its times of creation, and the clock of this machine."""
    key = probe.key("clock")
    store = probe.client(0)
    if not store.capabilities.shared:
        raise NotApplicableError("a blob store in this process has a clock of its own")
    aheads: list[float] = []
    for _ in range(3):
        before_ms = local_now_ms()
        now_ms = await probe.tried(store.now_ms)
        after_ms = local_now_ms()
        # A clock of whole seconds is somewhere in this second.
        known_ms = now_ms + SECOND_MS / 2 if now_ms % SECOND_MS == 0 else now_ms
        aheads.append(known_ms - (before_ms + after_ms) / 2)
    before_ms = await probe.tried(store.now_ms)
    await probe.put(0, key, b"now")
    info = await probe.stat(1, key)
    after_ms = await probe.tried(store.now_ms)
    created_at_ms = info.created_at_ms if info else before_ms
    skew_ms = max(before_ms - SECOND_MS - created_at_ms, created_at_ms - after_ms - SECOND_MS, 0)
    return judge_clock(ahead_ms=round(sorted(aheads)[1]), skew_ms=skew_ms)


def judge_clock(*, ahead_ms: int, skew_ms: int) -> Evidence:
    """Judge a store's clock by how far it is ahead of this machine's, and how far a creation time was off it."""
    seconds = f"{ahead_ms / 1000:+.1f} s"
    off, ahead = f"{skew_ms / 1000:+.0f} s off the blob store's clock", f"{seconds} of this machine"
    return Evidence(
        figure=f"blob store {ahead}",
        broken=f"an object was made {off}" if skew_ms > SKEW_MS_MAX else "",
        lacking=f"the blob store's clock is {ahead}'s" if abs(ahead_ms) > SKEW_MS_MAX else "",
    )


async def check_multipart(probe: StoreProbe, *, with_ttl: bool) -> Evidence:
    """Check that an upload in parts becomes one object, whole, with the TTL that it was begun with."""
    s3 = probe.s3
    data = pattern(PART_BYTES_MIN + 1 * KIB, "parts")
    key, ttl_ms = probe.fresh_key("multipart"), TTL_MS if with_ttl else None
    body = base.BytesBody(data)
    await probe.tried(s3[0].put_parts_if_absent, key, body, ttl_ms=ttl_ms, part_bytes=PART_BYTES_MIN)
    if await probe.read(1, key) != data:
        return Evidence(broken="an upload in parts became something else")
    if not with_ttl:
        return Evidence(figure="2 parts")
    info = await probe.stat(2, key)
    if info is None or info.expires_at_ms is None:
        return Evidence(broken="an upload in parts lost its TTL")
    return Evidence(figure="2 parts, TTL kept")


async def check_conditional_multipart(probe: StoreProbe) -> Evidence:
    """Check that one of several multipart uploads of a key can be completed, and none where the object exists."""
    s3 = probe.s3
    key, taken = probe.fresh_key("conditional/race"), probe.fresh_key("conditional/taken")
    await probe.create(0, taken, b"first")
    late = await probe.tried(s3[0].put_parts_if_absent, taken, base.BytesBody(b"second"))
    if isinstance(late, base.Unknown):
        raise StoreUnavailableError(late.reason, operation="put_if_absent", key=taken)
    if isinstance(late, base.Created) or await probe.read(1, taken) != b"first":
        return Evidence(lacking="completing an upload replaced an object that was there")

    bodies = [f"upload {number}".encode() for number in range(4)]

    async def enter(number: int) -> base.CreateOutcome:
        return await probe.tried(s3[number % len(s3)].put_parts_if_absent, key, base.BytesBody(bodies[number]))

    outcomes = await asyncio.gather(*map(enter, range(len(bodies))))
    winners = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, base.Created)]
    unclear = [outcome.reason for outcome in outcomes if isinstance(outcome, base.Unknown)]
    won = len(winners)
    if not won and unclear:
        raise StoreUnavailableError(f"it is unknown who won: {unclear[0]}", operation="put_if_absent", key=key)
    lacking = "" if won == 1 else f"{won} of {len(bodies)} uploads of one key were completed"
    if won == 1 and await probe.read(1, key) != bodies[winners[0]]:
        lacking = "what was there after a race is not what its winner wrote"
    return Evidence(figure=f"a race of {len(bodies)}: {won} won", lacking=lacking)


async def check_abort(probe: StoreProbe) -> Evidence:
    """Check that an upload that nobody finishes is found and aborted."""
    s3 = probe.s3
    key = probe.fresh_key("abort/unfinished")
    begun = await probe.tried(s3[0].begin_upload, key)
    probe.unfinished.append(begun)
    store = probe.client(1)

    async def becomes(there: bool) -> bool:  # noqa: FBT001  (it says what it waits for)
        # No store promises that this list is up to date.
        for _ in range(ATTEMPTS_MAX):
            puts = await probe.tried(store.list_unfinished, probe.root + "abort/")
            if any(put.upload_id == begun.upload_id for put in puts) is there:
                return True
            await asyncio.sleep(PAUSE_S)
        return False

    if not await becomes(there=True):
        return Evidence(lacking="an unfinished upload is not listed")
    if failures := await probe.tried(store.abort_unfinished, [begun]):
        reason = failures[0].reason
        kind = AccessDeniedError if _is_denial(reason) else StoreUnavailableError
        raise kind(reason, operation="abort_unfinished", key=key)
    if not await becomes(there=False):
        return Evidence(lacking="an unfinished upload cannot be aborted")
    if await probe.stat(2, key) is not None:
        return Evidence(lacking="an upload that was aborted is there all the same")
    return Evidence(figure="begun, found, aborted")


async def check_delete(probe: StoreProbe) -> Evidence:
    """Check that a batch deletes the keys that it names, absent ones too, and no others."""
    doomed = [probe.key(f"delete/{number:03d}") for number in range(100)]
    others = [probe.key(f"delete/{number:03d}-other") for number in range(0, 100, 10)]
    absent = [f"{probe.root}delete/absent-{number}" for number in range(20)]

    async def put(numbered: tuple[int, str]) -> None:
        await probe.put(*numbered, b"x")

    await map_bounded(put, enumerate([*doomed, *others]), in_flight_max=len(probe.clients))
    failures = await probe.tried(probe.client(0).delete, [*doomed, *absent])
    failed = {failure.key: failure.reason for failure in failures}
    if failed.keys() & set(doomed):
        reason = failed[min(failed)]
        if _is_denial(reason):
            raise AccessDeniedError(reason, operation="delete")
        return Evidence(lacking=f"{len(failed)} of 120 keys were not deleted ({reason})")
    left = {probe.root + name for name in await probe.listed(1, "delete/")}
    if set(others) - left:
        return Evidence(broken="keys were deleted that nobody had named")
    if set(doomed) & left:
        return Evidence(broken="keys were still there that it said were deleted")
    lacking = "deleting what is not there is an error" if failed else ""
    return Evidence(figure="100 keys and 20 absent ones", lacking=lacking)


def _is_denial(reason: str) -> bool:
    return "denied" in reason.lower()


async def check_lifecycle(probe: StoreProbe, *, ttls_stay: bool) -> Evidence:
    """Check that no lifecycle rule of the bucket takes away what is committed, or what soon may be."""
    s3 = probe.s3[0]
    rules = await probe.tried(s3.read_lifecycle)
    backstops = sum(is_backstop(rule, s3.prefix) for rule in rules)
    # How long a backstop has to wait for the repository; the least where there is none yet.
    days_min = DAYS_MIN
    if backstops:
        data = await probe.read(0, REPOSITORY)
        with contextlib.suppress(FormatError):
            record = decode_repository(data or b"", subject=REPOSITORY)
            days_min = backstop_days(
                ttl_ms=record.ttl_ms, margin_ms=record.margin_ms, collection_period_ms=record.collection_period_ms
            )
    found = threats(rules, s3.prefix, days_min=days_min, ttls_stay=ttls_stay)
    figure = f"{len(rules)} in the bucket, backstop {'installed' if backstops else 'not installed'}"
    return Evidence(figure=figure, has_backstop=backstops > 0, broken="; ".join(found))

"""Any order of loads, writes, commits, aborts, maintenance and restarts gives what a dict would (Spark's case 24).

With format 1, where names are not identities, a version's content follows from its number, as in Spark's own test: else
a snapshot of an attempt that was left would stand for its successor. With format 2 every attempt writes what it likes.
"""

import asyncio
import copy
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from index.spark.names import StateVersion
from tests.unit.engine.state.state_store_kit import settings_of
from tidemark import StateStore, StateStoreSettings

Rows = dict[str, dict[bytes, bytes]]

KEYS = [b"", b"a", b"b", b"b\x00", b"\xff"]
FAMILIES = ["default", "lists", "$internal"]
STEPS = ["load", "write", "write", "commit", "commit", "abort", "maintain", "restart", "look", "family"]


class World:
    """One directory, the store that works on it, and what every version ought to hold."""

    def __init__(self, root: Path, conf: StateStoreSettings) -> None:
        self.root = root
        self.conf = conf
        self.versions: dict[StateVersion, Rows] = {StateVersion(0): {"default": {}}}
        self.now: Rows | None = None
        self.works = 0
        self.store: StateStore

    async def open(self) -> StateStore:
        self.works += 1
        return await StateStore.open(self.root / "state", self.root / f"work-{self.works}", self.conf)

    def pick(self, number: int) -> StateVersion:
        """Mostly one of the newest."""
        chosen = list(self.versions)
        return chosen[-1 - number % min(len(chosen), 4)] if number % 3 else chosen[number % len(chosen)]

    async def load(self, of: StateVersion) -> None:
        await self.store.load(of.version, of.unique_id)
        self.now = copy.deepcopy(self.versions[of])
        check(self.store, self.now)

    async def step(self, kind: str, number: int) -> None:
        store, now = self.store, self.now
        if kind == "load" or (now is None and kind in {"write", "commit", "abort", "family"}):
            await self.load(self.pick(number))
        elif kind == "write":
            if self.conf.format_version == 2:
                self.write(random.Random(number))
        elif kind == "family" and self.conf.column_families and self.conf.format_version == 2:
            assert now is not None
            self.change_family(now, FAMILIES[1 + number % 2], drops=number % 5 == 0)
        elif kind == "commit":
            await self.commit(is_forced=number % 11 == 0)
        elif kind == "abort":
            await store.abort()
            self.now = None
        elif kind == "maintain":
            await store.maintain()
        elif kind == "restart":
            await self.restart(number)
        elif kind == "look":
            async with await self.open() as other:
                of = self.pick(number)
                await other.load(of.version, of.unique_id, read_only=True)
                check(other, self.versions[of])

    def write(self, rng: random.Random) -> None:
        """Some changes, to both."""
        assert self.now is not None
        for _ in range(rng.randrange(1, 6)):
            family = rng.choice(list(self.now))
            key, value = rng.choice(KEYS), b"%d" % rng.randrange(1000)
            rows = self.now[family]
            match rng.choice(["put", "put", "delete", "merge"]):
                case "put":
                    self.store.put(key, value, family)
                    rows[key] = value
                case "delete":
                    self.store.delete(key, family)
                    rows.pop(key, None)
                case "merge" if self.conf.column_families:
                    self.store.merge(key, value, family)
                    rows[key] = self.conf.merge_delimiter.join([rows[key], value]) if key in rows else value

    def change_family(self, now: Rows, name: str, *, drops: bool) -> None:
        if drops:
            assert self.store.drop_family(name) == (name in now)
            now.pop(name, None)
        else:
            assert self.store.add_family(name, internal=name.startswith("$")) == (name not in now)
            now.setdefault(name, {})

    async def commit(self, *, is_forced: bool) -> None:
        assert self.now is not None
        assert self.store.version is not None
        if self.conf.format_version == 1:
            # What was written to the version before counts: nothing else has been.
            if self.conf.column_families:
                self.change_family(self.now, FAMILIES[1 + self.store.version % 2], drops=self.store.version % 5 == 4)
            self.write(random.Random(self.store.version))
        committed = await self.store.commit(snapshot=is_forced)
        of = StateVersion(committed.version, committed.unique_id)
        self.versions[of] = copy.deepcopy(self.now)
        check(self.store, self.now)
        counted = sum(len(rows) for family, rows in self.now.items() if not family.startswith("$"))
        assert committed.num_keys == (counted if self.conf.count_keys else -1)

    async def restart(self, number: int) -> None:
        """Another process goes on, with other settings; format 1 may become format 2, never the other way."""
        await self.store.close()
        self.now = None
        changes: dict[str, object] = {
            "changelogs": number % 2 == 0,
            "background_uploads": number % 3 == 0,
            "deltas_per_snapshot": 1 + number % 4,
            "count_keys": number % 5 > 0,
        }
        if number % 4 == 0:
            changes["format_version"] = 2
        self.conf = msgspec.structs.replace(self.conf, **changes)
        self.store = await self.open()


def check(store: StateStore, expected: Rows) -> None:
    families = store.families
    assert set(families) == set(expected)
    for family in families:
        assert list(store.items(family=family)) == sorted(expected[family].items())
        for key in KEYS:
            assert store.get(key, family) == expected[family].get(key)
    if store.settings.count_keys:
        internal = sum(len(rows) for family, rows in expected.items() if family.startswith("$"))
        assert (store.num_keys, store.num_internal_keys) == (sum(map(len, expected.values())) - internal, internal)


def live(conf: StateStoreSettings, steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as root:
            world = World(Path(root), conf)
            world.store = await world.open()
            try:
                for kind, number in steps:
                    await world.step(kind, number)
                for of in list(world.versions):
                    if of.version % 2:
                        await world.load(of)
            finally:
                await world.store.close()

    asyncio.run(run())


confs = st.builds(
    settings_of,
    format_version=st.sampled_from([1, 2]),
    column_families=st.booleans(),
    changelogs=st.booleans(),
    deltas_per_snapshot=st.integers(0, 3),
    row_checksums=st.booleans(),
    row_check_ratio=st.just(1),
    background_uploads=st.booleans(),
    merge_operator_version=st.sampled_from([1, 2]),
    codec=st.sampled_from(["lz4", "zstd", "snappy", "lzf"]),
    compact_on_commit=st.booleans(),
)
histories = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 1000)), min_size=5, max_size=40)


@pytest.mark.spark_case(24)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conf=confs, steps=histories)
def test_any_history_gives_what_a_dict_would(conf: StateStoreSettings, steps: list[tuple[str, int]]) -> None:
    live(conf, steps)


@pytest.mark.soak
@pytest.mark.spark_case(24)
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conf=confs, steps=histories)
def test_any_of_many_histories_gives_what_a_dict_would(conf: StateStoreSettings, steps: list[tuple[str, int]]) -> None:
    live(conf, steps)


@pytest.mark.spark_case(24)
@pytest.mark.parametrize("seed, families", [(1, False), (2, True)], ids=["plain", "families"])
def test_a_long_history_of_a_seed_gives_what_a_dict_would(seed: int, families: bool) -> None:
    rng = random.Random(seed)
    steps = [(rng.choice(STEPS), rng.randrange(1000)) for _ in range(60)]
    # Format 1 becomes format 2 on the way.
    live(settings_of(format_version=1, column_families=families, deltas_per_snapshot=2), steps)


def test_the_model_notices_when_the_store_errs(monkeypatch: pytest.MonkeyPatch) -> None:
    deleting: Callable[..., None] = StateStore.delete

    def forgetful(self: StateStore, key: bytes, family: str = "default") -> None:
        if key != b"b":
            deleting(self, key, family)

    monkeypatch.setattr(StateStore, "delete", forgetful)
    steps = [("load", 0), *(("write", seed) for seed in range(60)), ("commit", 1)]
    with pytest.raises(AssertionError):
        live(settings_of(), steps)

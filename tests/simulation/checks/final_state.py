"""Check what holds once everybody is gone: after the last TTL, and again when everything else is over too."""

import asyncio
from pathlib import Path
from typing import Final

from blobstore.base import BlobInfo
from blobstore.s3.bucket_rules import EXPIRING
from engine.errors import DamagedError, EngineError
from engine.repository.repository import Repository
from engine.settings import TransferSettings
from index.plan.commits import Retention
from index.snapshot.model import PIN_DURATION_MS, CommitRecord, Scope, StoreReference
from tests.simulation.checks.answers import CallLog, read_tree
from tests.simulation.checks.damage import Damage
from tests.simulation.checks.history import JUDGE, Collecting, RecordHistory
from tests.simulation.model.processes import PREFIX, plain_store
from tests.simulation.model.s3 import SimServer
from tests.simulation.scenarios.builder import DAY_MS
from tests.simulation.scenarios.schedule import Times
from tests.walker import keys_to_keep

# Later than every request that is late.
LONG_REST_S: Final = 20 * 86_400.0
_EVERYTHING: Final = 1_000_000
# Where TTLs are longer, what is kept is settled once before they end.
REST_TTL_MS: Final = DAY_MS
# One schedule in N restores everything at the end, and collects again whatever is there.
_THOROUGH_EVERY: Final = 16
# One in N collects twice, whatever the first has left, and then somebody commits to it; one in N restores the newest
# commit. The thorough ones are among both.
_WRITTEN_TO_EVERY: Final = 4
_RESTORED_EVERY: Final = 2


def rest_s(times: Times) -> float:
    """Return the time until the last upload, pin and lease are over: what is left then should have gone (D7)."""
    return (min(times.ttl_ms, REST_TTL_MS) + PIN_DURATION_MS + 3 * times.margin_ms) / 1000


class AtRest:
    """Judges one repository that nobody uses any more.

    Args:
        server: Where it is.
        record_history: Has seen every change to it.
        call_log: What callers were shown.
        scratch: For restores of its own.

    Attributes:
        violations: What does not hold.
        is_written_to: It is to be committed to after all else; and it is always collected twice.
    """

    def __init__(self, server: SimServer, record_history: RecordHistory, call_log: CallLog, scratch: Path) -> None:
        self._server = server
        self._record_history = record_history
        self._call_log = call_log
        self._scratch = scratch
        # As good as a seed: the same schedule has the same.
        self._rng = record_history.events + server.effects
        self._is_thorough = self._rng % _THOROUGH_EVERY == 0
        self.is_written_to = self._rng % _WRITTEN_TO_EVERY == 0
        self.violations: list[str] = []

    async def check(self) -> None:
        """Collect as the last one, and judge; the world has rested for `rest_s`."""
        damage = Damage(self._server, self._record_history, self._call_log, self._scratch)
        if self._record_history.rotten:
            self._record_history.collecting[JUDGE] = [
                Collecting(keep_last=1, keep_since_ms=None, began=self._record_history.events)
            ]
            self.violations += await damage.check_rotten()
        store = plain_store(self._server)
        # One thing after the other: nobody else is there, and tasks cost.
        repository = await Repository.open(store, settings=TransferSettings(in_flight_max=1))
        began = self._record_history.events
        self._record_history.collecting[JUDGE] = [Collecting(keep_last=1, keep_since_ms=None, began=began)]
        if self._record_history.tampered:
            self.violations += await damage.check_is_reported(repository)
            self.violations += await damage.check_is_made_good(repository)
        await self._forget_adrift(repository)
        await self._outlive(repository, damage)
        if not await self._collect_and_check(repository, damage):
            return
        await self._rest_long(repository, damage)
        # Last, as restores leave pins.
        if self._rng % _RESTORED_EVERY == 0 or self._record_history.tampered:
            await self._check_restores(repository)

    # ------------------------------------------------------------------ collections

    async def _forget_adrift(self, repository: Repository) -> None:
        """Forget a scope of which no record counts: it is damage to who cannot know that it came too late (C5)."""
        self._server.actor = JUDGE  # type: ignore[attr-defined]  # of the server that is watched
        for scope in sorted(self._record_history.records, key=str):
            if not self._record_history.open_records(scope) and (await repository.log(scope)).is_adrift:
                self._record_history.forgetting.setdefault(scope, set()).add(JUDGE)
                await repository.forget(scope)

    async def _outlive(self, repository: Repository, damage: Damage) -> None:
        """Where TTLs are longer, wait for their end; what is kept is settled before, as T3 demands."""
        longer_ms = repository.record.ttl_ms - REST_TTL_MS
        if longer_ms <= 0 or not await self._collect(repository, damage, keep_last=_EVERYTHING):
            return
        await asyncio.sleep((longer_ms + DAY_MS) / 1000)
        self._server._expire()

    async def _collect_and_check(self, repository: Repository, damage: Damage) -> bool:
        """Collect until what is left is what should be, at most twice, and judge that; False if that fails."""
        if not await self._collect(repository, damage):
            return False
        known = len(self.violations)
        self._check_all()
        if len(self.violations) == known and not self.is_written_to:
            return True
        del self.violations[known:]
        if not await self._collect(repository, damage):
            return False
        self._check_all()
        return True

    async def _collect(self, repository: Repository, damage: Damage, *, keep_last: int = 1) -> bool:
        self._server.actor = JUDGE  # type: ignore[attr-defined]  # of the server that is watched
        try:
            await repository.collect(Retention(keep_last=keep_last), delete_share_max=1)
        except EngineError as error:
            if not (isinstance(error, DamagedError) and damage.is_of_roots(error.subject or "")):
                self.violations.append(f"4 fails: the last collection fails: {error!r}")
            return False
        return True

    async def _rest_long(self, repository: Repository, damage: Damage) -> None:
        """D7, later: what is left stays for ever, and nothing more is left than before."""
        before = set(self._server.objects)
        await asyncio.sleep(LONG_REST_S)
        self._server._expire()
        objects = self._server.objects
        is_over = all(stored.tag != EXPIRING for stored in objects.values())
        is_over = is_over and not any(name.startswith((f"{PREFIX}/pins/", f"{PREFIX}/runs/")) for name in objects)
        if is_over and set(objects) == before and not self._is_thorough:
            return
        await self._collect_and_check(repository, damage)

    # ------------------------------------------------------------------ what is there

    def _check_all(self) -> None:
        self._check_log()
        self._check_keys()
        self._check_ttls()

    def _check_log(self) -> None:
        """D3: of each scope the newest commit is open, and what live names stand for; nothing else is."""
        named = {(name.scope, name.source) for name in self._record_history.live_names()}
        for scope in sorted(self._record_history.records, key=str):
            opened = [written.record.pointer for written in self._record_history.open_records(scope)]
            left = [pointer.number for pointer in opened[:-1] if (scope, pointer) not in named]
            if left:
                self.violations.append(f"D3 open: records {left} of {scope} are open after two collections")

    def _check_keys(self) -> None:
        """4: exactly the walker's keys."""
        found: dict[str, BlobInfo] = {}
        data: dict[str, bytes] = {}
        plain = plain_store(self._server)
        for name, stored in self._server.objects.items():
            key = name.removeprefix(f"{PREFIX}/")
            found[key] = plain._info(name)
            if not key.startswith("blobs/"):
                data[key] = stored.data
        tampered = self._record_history.tampered
        try:
            expected = keys_to_keep(found, data, self._server.now_ms(), late_pins=self._record_history.pins.over)
        except KeyError as error:
            if error.args[0] not in tampered:
                self.violations.append(f"2 missing: {error} is missing")
            return
        # Evidence, which nothing refers to (design 0006, A1).
        there = {key for key in found if not key.startswith("audit/")}
        expected = {key for key in expected if not key.startswith("audit/")}
        left, missing = sorted(there - expected), sorted(expected - there - tampered)
        if left:
            self.violations.append(f"4 left: {len(left)} keys are left over: {left[:3]}")
        if missing:
            self.violations.append(f"4 missing: {len(missing)} keys are missing: {missing[:3]}")

    def _check_ttls(self) -> None:
        """2: nothing that is kept carries a TTL any more (T2), or a store that deletes by itself would take it.

        But for what was tampered with: what was deleted behind everybody's back, a put that lands late creates again.
        """
        for key in sorted(self._record_history.reachable() - self._record_history.tampered):
            stored = self._server.objects.get(f"{PREFIX}/{key}")
            if stored is not None and stored.tag == EXPIRING:
                self.violations.append(f"2 ttl: {key} is kept, and still carries a TTL")
                return

    # ------------------------------------------------------------------ what can be had

    async def _check_restores(self, repository: Repository) -> None:
        """1: the newest commits restore byte for byte through everything real; one store, or now and then all."""
        newest: list[tuple[Scope, CommitRecord, StoreReference]] = []
        for scope in sorted(self._record_history.records, key=str):
            valid = self._record_history.open_records(scope)
            if valid:
                newest += [(scope, valid[-1].record, store) for store in valid[-1].record.stores]
        for at, (scope, record, store) in enumerate(newest):
            if self._is_thorough or at == self._rng % len(newest):
                await self._check_restore(repository, scope, record, store)

    async def _check_restore(
        self, repository: Repository, scope: Scope, record: CommitRecord, store: StoreReference
    ) -> None:
        target = self._scratch / f"judged-{scope.job}-{scope.task or ''}-{store.store}"
        try:
            restored = await repository.find_and_restore(scope, target, task=store.task, store=store.store)
        except EngineError as error:
            if not self._record_history.is_tampered((store,)):
                self.violations.append(f"1 restore: the newest commit of {scope} does not restore: {error!r}")
            return
        if restored.commit.pointer != record.pointer:
            self.violations.append(f"1 newest: restored {restored.commit.pointer} and not {record.pointer} of {scope}")
        if read_tree(target) != self._call_log.trees[store.index.key]:
            self.violations.append(f"1 bytes: {scope} restores to other bytes")

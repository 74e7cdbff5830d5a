"""Take objects away by hand: `verify` reports them, and the next commit brings them back (M1)."""

import contextlib
from pathlib import Path

from blobstore.s3.bucket_rules import EXPIRING
from engine.backup.backup import BackupOptions
from engine.errors import EngineError
from engine.inspect.verify import Level
from engine.repository.repository import Repository
from index.errors import FormatError
from index.plan.commits import Retention
from index.snapshot.keys import commit_key, log_prefix
from index.snapshot.model import CommitRecord, Scope, StoreReference, UniqueId
from tests.simulation.checks.answers import CallLog
from tests.simulation.checks.history import JUDGE, RecordHistory, StoreName
from tests.simulation.model.processes import PREFIX, plain_store
from tests.simulation.model.s3 import SimServer


class Damage:
    """Judges what is said and done about keys that a test has taken away.

    Args:
        server: Where the repository is.
        record_history: Knows which keys these are.
        call_log: What callers were shown.
        scratch: For files.
    """

    def __init__(self, server: SimServer, record_history: RecordHistory, call_log: CallLog, scratch: Path) -> None:
        self._server = server
        self._record_history = record_history
        self._call_log = call_log
        self._scratch = scratch

    async def check_is_reported(self, repository: Repository) -> list[str]:
        """`verify` shows what is missing of every open commit and live name, and nothing else."""
        known = self._record_history
        stores = self._verified()
        lost = self._lost(stores)
        report = await repository.verify()
        shown = {problem.key for problem in report.problems}
        violations: list[str] = []
        for store in stores:
            way = known.way(store)
            # Behind an index that is gone nobody can see.
            if way & lost and not way & shown:
                violations.append(f"7 unreported: {min(way & lost)} is missing, and verify does not show it")
        if report.damaged and not lost:
            violations.append(f"7 untrue: nothing is missing, and verify reports {report.problems[:2]}")
        at_risk = {key for way in map(known.way, stores) for key in way & known.tampered if self._carries_ttl(key)}
        if at_risk and not lost:
            report = await repository.verify(level=Level.CONTENT)
            unreported = at_risk - {problem.key for problem in report.problems}
            violations += [
                f"7 unreported: {key} carries a TTL, and verify does not show it" for key in sorted(unreported)
            ]
        return violations

    def _verified(self) -> list[StoreReference]:
        """Return what `verify` looks at: the stores of open commits and of live names."""
        known = self._record_history
        stores = [s for scope in known.records for written in known.open_records(scope) for s in written.record.stores]
        return stores + [store for name in known.live_names() for store in name.stores]

    async def check_is_made_good(self, repository: Repository) -> list[str]:
        """The next commit of the one who still has the files is whole again."""
        violations: list[str] = []
        for scope in sorted(self._record_history.records, key=str):
            valid = self._record_history.open_records(scope)
            if not valid:
                continue
            record = valid[-1].record
            hurt = [store for store in record.stores if self._lost((store,))]
            if hurt:
                violations += await self._make_good(repository, scope, record, hurt)
        return violations

    async def check_rotten(self) -> list[str]:
        """What rotted is named, and stops nothing but its own scope; then its bytes are put back (D9)."""
        known = self._record_history
        self.mend("repository")
        repository = await Repository.open(plain_store(self._server))
        rotten = set(known.rotten)
        shown = {problem.key for problem in (await repository.verify()).problems}
        # What only a pin leads to is not asked for: it ends with its reader.
        needed = {key for store in self._verified() for key in known.way(store)} | {
            commit_key(scope, written.record.number) for scope in known.records for written in known.open_records(scope)
        }
        violations = [
            f"7 unreported: {key} rotted, and verify does not show it" for key in sorted(rotten & needed - shown)
        ]
        self._server.actor = JUDGE  # type: ignore[attr-defined]  # of the server that is watched
        for _ in range(2):
            with contextlib.suppress(EngineError, FormatError):
                await repository.collect(Retention(keep_last=1), delete_share_max=1)
        concerned = {key.split("/")[2 if key.startswith("indexes/") else 1] for key in rotten if "/" in key}
        # A fork refers to its source: what concerns the one concerns the other.
        is_forked = any(w.record.source_scope for scope in known.records for w in known.open_records(scope))
        for scope in known.records:
            name = log_prefix(scope).split("/")[1]
            opened = [written.record.number for written in known.open_records(scope)[:-1]]
            if name not in concerned and opened and not is_forked and not known.live_names():
                violations.append(f"D9: records {opened} of {scope} stay open because of {sorted(rotten)}")
        for key in list(known.rotten):
            self.mend(key)
        self._call_log.tampered = bool(known.tampered)
        return violations

    def mend(self, key: str) -> None:
        """Put the bytes back that an object had."""
        data = self._record_history.rotten.pop(key, None)
        if data is not None:
            self._server.objects[f"{PREFIX}/{key}"].data = data

    def is_of_roots(self, key: str) -> bool:
        """Whether what a collection stumbled over is gone for a reason, and still asked for."""
        return key in self._record_history.tampered and key in self._record_history.reachable()

    def _carries_ttl(self, key: str) -> bool:
        stored = self._server.objects.get(f"{PREFIX}/{key}")
        return stored is not None and stored.tag == EXPIRING

    def _lost(self, stores: list[StoreReference] | tuple[StoreReference, ...]) -> set[str]:
        known = self._record_history
        keys = {key for store in stores for key in known.way(store)}
        return {key for key in keys & known.tampered if f"{PREFIX}/{key}" not in self._server.objects}

    async def _make_good(
        self, repository: Repository, scope: Scope, record: CommitRecord, hurt: list[StoreReference]
    ) -> list[str]:
        call_log = self._call_log
        offsets = f"made good {scope}"
        brought: dict[StoreName, str] = {}
        call_log.requests[offsets] = [brought]
        results = []
        try:
            for at, store in enumerate(hurt):
                tree = call_log.trees[store.index.key]
                directory = self._scratch / f"again-{scope.job}-{scope.task or ''}-{at}"
                for path, data in tree.items():
                    (directory / path).parent.mkdir(parents=True, exist_ok=True)
                    (directory / path).write_bytes(data)
                unique_id = UniqueId(f"{len(call_log.trees):08x}-0000-4000-8000-ffffffffffff")
                result = await repository.backup(
                    scope,
                    directory,
                    task=store.task,
                    store=store.store,
                    options=BackupOptions(unique_id=unique_id, check_retained=True),
                )
                call_log.trees[result.reference.index.key] = tree
                brought[store.task, store.store] = result.reference.index.key
                results.append(result)
            commit = await repository.commit(scope, results, offsets=offsets)
        except EngineError as error:
            return [f"7 healed: after {record.number} of {scope}, which is damaged, nobody can commit: {error!r}"]
        lost = self._lost(commit.record.stores)
        return [f"7 healed: {min(lost)} is still missing from {scope}"] if lost else []

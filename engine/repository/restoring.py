"""The side of a repository that restores: finds a commit, protects it, and brings back what it holds."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Unpack

import msgspec

from engine.errors import DamagedError, IncompleteError, bare_message
from engine.progress import NO_PROGRESS, Progress
from engine.records.missing import find_complete, name_complete, naming_complete
from engine.repository.reading import CHOICES_MAX, Choice, ReadingRepository, require_store
from engine.restore.restore import OwnerPolicy, RestoreResult, plan_restore_store, restore_store
from engine.state.compression import Codec
from engine.state.restore import RestoredState, restore_state
from index.display import DisplayMixin
from index.plan.commits import Commit
from index.plan.restore import RestorePlan
from index.snapshot.model import Scope, UniqueId
from index.snapshot.records import CommitPointer, StoreReference


class Restored(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """Which commit was restored and how it went."""

    commit: Commit
    result: RestoreResult
    # False: no pin could be written, so that nothing protected the restore from a collection.
    pinned: bool
    # Why it is not the commit that was chosen, but the newest of which everything is there; empty if it is.
    instead_because: str = ""


class RestoringRepository(ReadingRepository):
    """What of a `Repository` brings stores back."""

    async def restore(
        self,
        commit: Commit,
        target: Path,
        *,
        task: str = "0",
        store: str = "default",
        owners: OwnerPolicy = OwnerPolicy.IGNORE,
        replace: bool = False,
        files: Sequence[str] = (),
        pin: bool = True,
        progress: Progress = NO_PROGRESS,
    ) -> RestoreResult:
        """Bring one store of a commit back into a directory, whole or not at all.

        Args:
            target: Absent, or empty, or with `replace` any directory: files with the right hash are reused (I2).
            owners: What to do about the recorded owners.
            files: Patterns such as `*.sst`, matched from the right: only what one of them matches. None: all files.
            pin: Protect the commit meanwhile; False if the caller holds a pin already.

        Raises:
            UsageError: A pattern is empty.
            NotFoundError: The commit has no such store or was collected meanwhile, or a pattern matches nothing.
            IncompleteError: A blob or an index is missing; the target is as it was.
            DamagedError: A blob is altered; the target is as it was.
            TargetError: The target cannot be used.
            StoreError: As the store says; the target is as it was.
        """
        reference = require_store(commit, task, store)
        async with self._naming_complete(commit.scope), contextlib.AsyncExitStack() as stack:
            if pin:
                await stack.enter_async_context(self.pinned(commit, purpose=f"restore {task}/{store}"))
            return await self.restore_reference(
                reference, target, owners=owners, replace=replace, files=files, progress=progress
            )

    async def find_and_restore(
        self,
        scope: Scope,
        target: Path,
        *,
        task: str = "0",
        store: str = "default",
        owners: OwnerPolicy = OwnerPolicy.IGNORE,
        replace: bool = False,
        files: Sequence[str] = (),
        or_newest_complete: bool = False,
        progress: Progress = NO_PROGRESS,
        **choice: Unpack[Choice],
    ) -> Restored:
        """`find` and `restore` in one: should the commit be collected in between, choose again, within a bound (D5).

        Args:
            or_newest_complete: Where something of the commit is missing, restore the newest one of the scope of which
                everything is there, if there is one (design 0006, M2). Other arguments as `find` and `restore`.

        Raises:
            As `find` and `restore`.
        """

        async def restore(commit: Commit) -> RestoreResult:
            reference = require_store(commit, task, store)
            return await self.restore_reference(
                reference, target, owners=owners, replace=replace, files=files, progress=progress
            )

        purpose = f"restore {task}/{store}"
        try:
            async with self._naming_complete(scope):
                return await self._restore_chosen(scope, restore, purpose, choice)
        except IncompleteError as error:
            if not or_newest_complete or error.complete is None:
                raise
            complete = Choice(number=error.complete.pointer.number)
            restored = await self._restore_chosen(scope, restore, purpose, complete)
            return msgspec.structs.replace(restored, instead_because=bare_message(error))

    async def _restore_chosen(
        self, scope: Scope, restore: Callable[[Commit], Awaitable[RestoreResult]], purpose: str, choice: Choice
    ) -> Restored:
        """Find, protect and restore a commit; unprotected, and taken by a collection meanwhile, another (D5)."""
        overtaken: tuple[CommitPointer, DamagedError] | None = None
        for attempt in range(CHOICES_MAX):
            async with self.find_pinned(scope, purpose=purpose, **choice) as (commit, lease):
                if overtaken is not None and overtaken[0] == commit.pointer:
                    raise overtaken[1]
                try:
                    return Restored(commit=commit, result=await restore(commit), pinned=lease.pinned)
                except DamagedError as error:
                    # Only an unprotected reader may have been overtaken by a collection; otherwise damage is damage.
                    if lease.pinned or attempt == CHOICES_MAX - 1:
                        raise
                    overtaken = commit.pointer, error
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def restore_reference(
        self,
        reference: StoreReference,
        target: Path,
        *,
        owners: OwnerPolicy = OwnerPolicy.IGNORE,
        replace: bool = False,
        files: Sequence[str] = (),
        progress: Progress = NO_PROGRESS,
    ) -> RestoreResult:
        """As `restore`, for a caller that holds the pin and the reference: no log is read."""
        async with self._digests.of(target) as cache:
            with self.missing_blobs.recording():
                return await restore_store(
                    self.store,
                    reference=reference,
                    target=target,
                    settings=self.settings,
                    runtime=self._runtime,
                    cache=cache,
                    owners=owners,
                    replace=replace,
                    files=files,
                    progress=progress,
                )

    async def name_complete(self, scope: Scope, error: DamagedError) -> DamagedError:
        """An error of `restore_reference` that also says which commit is whole, if something is missing (M2)."""
        return await name_complete(error, self.store, lambda: self.commits(scope))

    def _naming_complete(self, scope: Scope) -> contextlib.AbstractAsyncContextManager[None]:
        """Let an error of a block that something is missing say which commit of a scope is whole."""
        return naming_complete(self.store, lambda: self.commits(scope))

    async def choose_complete(self, scope: Scope, **choice: Unpack[Choice]) -> Choice:
        """What chooses the same commit, or where something of it is missing the newest one that is whole (M2).

        For whoever restores several stores of one commit; costs what `engine.records.missing.find_complete` says, and
        where the commit is not whole the reading of all others of the scope.

        Raises:
            NotFoundError: None fits.
            IncompleteError: No commit is whole.
            StoreError: As the store says.
        """
        chosen = await self.find(scope, **choice)
        if await find_complete(self.store, [chosen]) is not None:
            return choice
        complete = await find_complete(self.store, await self.commits(scope))
        if complete is None:
            raise IncompleteError(
                f"something of commit {chosen.pointer.number} is missing, and of every other one",
                operation="restore",
                subject=str(scope),
            )
        return Choice(number=complete.pointer.number)

    async def restore_state(
        self,
        commit: Commit,
        target: Path,
        *,
        version: int | None = None,
        unique_id: UniqueId | None = None,
        task: str = "0",
        store: str = "default",
        codec: Codec = "lz4",
        owners: OwnerPolicy = OwnerPolicy.IGNORE,
        replace: bool = False,
        pin: bool = True,
        progress: Progress = NO_PROGRESS,
    ) -> RestoredState:
        """Bring back of a Spark state store the files that one version is made of: a directory that Spark can load.

        Args:
            target: As for `restore`.
            version: The one that the commit is of, or an older one that its directory still has; the former if not
                given. `find_state` finds a commit for a version.
            unique_id: The version's; if not given, the one that the commit knows for it.
            codec: Of changelogs, should a lineage have to be read from one: `stateStore.compression.codec`.
            owners: As for `restore`.
            pin: Protect the commit meanwhile; False if the caller holds a pin already.

        Raises:
            VersionMissingError: The directory does not hold the version, or not all that it takes; the error names it.
            LineageError: Its lineage has a gap or does not lead back.
            FormatError: Its snapshot is not what Spark writes, or names a file that is not a name.
            NotFoundError, DamagedError, TargetError, StoreError: As `restore`; the target is as it was.
        """
        reference = require_store(commit, task, store)
        async with contextlib.AsyncExitStack() as stack:
            if pin:
                await stack.enter_async_context(self.pinned(commit, purpose=f"restore {task}/{store}"))
            cache = await stack.enter_async_context(self._digests.of(target))
            stack.enter_context(self.missing_blobs.recording())
            return await restore_state(
                self.store,
                reference=reference,
                target=target,
                version=version,
                unique_id=unique_id,
                codec=codec,
                settings=self.settings,
                runtime=self._runtime,
                cache=cache,
                owners=owners,
                replace=replace,
                progress=progress,
            )

    async def plan_restore(
        self,
        reference: StoreReference,
        target: Path,
        *,
        owners: OwnerPolicy = OwnerPolicy.IGNORE,
        replace: bool = False,
        files: Sequence[str] = (),
    ) -> RestorePlan:
        """What `restore_reference` would do; nothing is written. Arguments and errors as there."""
        async with self._digests.of(target) as cache:
            return await plan_restore_store(
                self.store,
                reference=reference,
                target=target,
                settings=self.settings,
                cache=cache,
                owners=owners,
                replace=replace,
                files=files,
            )

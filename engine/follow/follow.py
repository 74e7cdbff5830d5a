"""Keep a directory at the newest commit of a job, for a writer that may have to go on from it (design 0011).

```
<parent>/<name>                        the directory, always of one commit; else as in `engine.restore.staging`
<parent>/.<name>.tidemark-follow       which commit it is of, with what its files looked like then (F5)
<parent>/.<name>.tidemark-follow-lock  held (flock) during an exchange, and by a promotion (F7); stays
```
"""

import asyncio
import contextlib
import fcntl
import os
import re
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

import msgspec
from typing_extensions import override

from blobstore.concurrency import acquired, map_bounded, run_blocking
from blobstore.local.files import flush, make_durable, sync_dir, write_all_at
from engine.errors import DamagedError, NotFoundError, PromotedError, TargetBusyError, TargetError, UnsafeSourceError
from engine.local.digests import hash_content, read_own_file
from engine.local.scan import opened, scan_dir
from engine.records.find import CHOICES_MAX, find_commit, find_pinned
from engine.records.leases import PinLease
from engine.records.log import list_log
from engine.records.repository import OpenRepository
from engine.restore.restore import (
    RestoreResult,
    TargetOptions,
    check_not_in_use,
    check_not_repository,
    read_index_of,
    staged_restore,
    use_found,
)
from engine.restore.staging import look_at_target, target_errors
from engine.runtime import Progress, read_now_ms
from index.display import DisplayMixin, count, format_seconds, human_bytes
from index.errors import UNDECODABLE
from index.plan.commits import Commit
from index.plan.restore import plan_restore
from index.snapshot.dir_diff import LocalDir, LocalFile, pairs_to_identify
from index.snapshot.keys import encode_component
from index.snapshot.model import DirIndex, FilePath, Scope, SnapshotIndex, StoreReference
from tidemark.errors import TidemarkError

INDEXES_IN_FLIGHT_MAX: Final = 8
# An exchange takes milliseconds, and the removal of the old directory of many files seconds.
LOCK_LOOKS_MAX: Final = 3_000
LOCK_LOOK_S: Final = 0.01
# How often a promotion that catches up looks whether a step of another process has ended: an hour.
STEP_LOOKS_MAX: Final = 36_000
STEP_LOOK_S: Final = 0.1

_OPERATION: Final = "follow"
_OPTIONS: Final = TargetOptions(replace=True, exchange=True)
# What a RocksDB that only reads, and rocksdict at every opening, leave in a directory (F5).
_OF_READERS: Final = re.compile(r"LOCK|LOG(?:\.old\.[0-9]+)?|rocksdict-config\.json")


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """What is followed: all stores of a scope, or those of one task, or of one name; with both one store alone."""

    repository_id: str
    scope: Scope
    task: str | None = None
    store: str | None = None

    def choose(self, commit: Commit) -> tuple[StoreReference, ...]:
        """Return the stores of a commit that are followed; NotFoundError: it has none of them."""
        stores = commit.record.stores
        if found := tuple(s for s in stores if self.task in {None, s.task} and self.store in {None, s.store}):
            return found
        message = f"commit {commit.pointer.number} has no store {self.task or '*'}/{self.store or '*'}"
        hint = "`tidemark show` lists the stores of a commit"
        raise NotFoundError(message, operation=_OPERATION, subject=str(self.scope), hint=hint)


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A directory as it was built: of which commit, a hash of what its files looked like, and its own inode."""

    commit: Commit
    files: bytes
    inode: int

    @classmethod
    def look(cls, commit: Commit, directory: Path) -> Self:
        """Look at a directory that was built of a commit. Blocks."""
        return cls(commit=commit, files=_hash_stats(directory), inode=directory.stat().st_ino)


class FollowFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file beside a directory (F5)."""

    # A reader refuses what it does not know.
    schema: Literal[1] = 1
    followed: Followed
    # The directory is of one of these: two only while they are exchanged.
    built: Annotated[tuple[Built, ...], msgspec.Meta(min_length=1, max_length=2)]
    # A writer has claimed the directory (F6).
    promoted: bool = False


class FollowStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did."""

    # The directory is of this commit now.
    commit: Commit
    # None: nothing of what is followed had changed.
    result: RestoreResult | None = None
    # False: no pin could be written, so that nothing protected the step from a collection.
    pinned: bool = True


class FollowStatus(DisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """Which commit a directory is of, and how far that is behind the newest one (F11)."""

    json_properties: ClassVar = {"newest_number": "newest_number"}
    json_omitted: ClassVar = ("newest",)

    # None: nothing is there.
    commit: Commit | None
    # None: the store did not say, so that the lag is not known; of a promotion without catching up alone.
    newest: Commit | None
    # A writer has claimed it: then `commit` is what it was of, and there is no lag.
    promoted: bool = False
    lag_commits: int = 0
    # What would be fetched.
    lag_bytes: int = 0
    lag_seconds: float = 0.0

    @property
    def commit_number(self) -> int:
        """Return the number of the commit, 0 without one."""
        return self.commit.pointer.number if self.commit is not None else 0

    @property
    def newest_number(self) -> int | None:
        """Return the number of the newest commit, None if it is not known."""
        return self.newest.pointer.number if self.newest is not None else None

    @property
    def lag(self) -> str:
        """Return the lag for people."""
        if self.newest is None:
            return "not known"
        return f"{count(self.lag_commits, 'commit')}, {human_bytes(self.lag_bytes)}, {format_seconds(self.lag_seconds)}"

    @override
    def _figures(self) -> dict[str, str]:
        newest = "not known" if self.newest_number is None else f"{self.newest_number:,}"
        return {"commit": f"{self.commit_number:,}", "newest": newest, "lag": self.lag}


class Standby:
    """A directory that follows: all stores of a scope, or those of one task or one name; with both one store alone.

    The public methods are documented at `Repository.follow`, `follow_status` and `promote`.
    """

    def __init__(
        self, repository: OpenRepository, scope: Scope, target: Path, task: str | None, store: str | None
    ) -> None:
        self._repository = repository
        self._followed = Followed(repository_id=repository.record.id, scope=scope, task=task, store=store)
        self._target = target.absolute()
        self._file = self._target.parent / f".{self._target.name}.tidemark-follow"

    async def follow(self, progress: Progress) -> FollowStep:
        held = await self._look()
        if held is not None and not self._is_due(held, await self._newest()):
            return FollowStep(commit=held.commit)

        async def use(commit: Commit, lease: PinLease) -> FollowStep:
            if held is not None and not self._is_due(held, commit):
                return FollowStep(commit=held.commit)
            with self._repository.missing_blobs.recording():
                step = await self._bring_to(held, commit, progress)
            return msgspec.structs.replace(step, pinned=lease.pinned)

        store, runtime = self._repository.store, self._repository.runtime
        find = partial(find_pinned, store, runtime, self._followed.scope, purpose=_OPERATION)
        return await use_found(store, find, use)

    async def status(self) -> FollowStatus:
        newest = await self._newest()
        known = await run_blocking(self._read)
        if known is not None and known.promoted:
            return FollowStatus(commit=known.built[-1].commit, newest=newest, promoted=True)
        return await self._lag_of(await self._look(changes_nothing=True) if known is not None else None, newest)

    async def _lag_of(self, held: Built | None, newest: Commit) -> FollowStatus:
        if held is not None and not self._is_due(held, newest):
            return FollowStatus(commit=held.commit, newest=held.commit)
        number, store = held.commit.pointer.number if held is not None else 0, self._repository.store
        listing = await list_log(store, self._followed.scope, from_number=number + 1)
        waited_ms = await read_now_ms(store) - listing.records[0][1] if listing.records else 0
        try:
            lag_bytes = await run_blocking(self._count_missing_bytes, (await self._read_index(newest))[0])
        except DamagedError:
            # It cannot be read, or a collection has taken it since: nothing is pinned for a look.
            lag_bytes = sum(reference.size_bytes for reference in self._followed.choose(newest))
        except NotFoundError:
            lag_bytes = 0  # it has nothing of what is followed
        return FollowStatus(
            commit=held.commit if held is not None else None,
            newest=newest,
            lag_commits=max(0, newest.pointer.number - number),
            lag_bytes=lag_bytes,
            lag_seconds=max(0, waited_ms) / 1000,
        )

    async def promote(self, progress: Progress, *, catch_up: bool) -> FollowStatus:
        await self._look()
        for look in range(STEP_LOOKS_MAX):
            try:
                # A look at this disk alone: while a step is under way nothing is asked of the store. What a killed step
                # has left is removed.
                async with staged_restore(self._repository, self._target, _OPTIONS) as staged:
                    await run_blocking(staged.staging.remove_kept)
                if catch_up:
                    await self.follow(progress)
                break
            except TargetBusyError:
                if not catch_up:
                    break
                if look == STEP_LOOKS_MAX - 1:
                    raise
                await asyncio.sleep(STEP_LOOK_S)
        for _ in range(CHOICES_MAX):
            # Without catching up nothing is asked before the claim: the store may be what is lost.
            status = await self.status() if catch_up else None
            async with self._locked():
                held = await run_blocking(self._check)
                if held is None:
                    hint = "let it catch up: without --no-catch-up the newest commit is brought there first"
                    raise NotFoundError("there is nothing", operation="promote", subject=str(self._target), hint=hint)
                if status is None or held.commit.pointer.number == status.commit_number:
                    await run_blocking(partial(self._write, held, promoted=True))
                    break
        else:
            message = "a follower moves it on all the time"
            raise TargetBusyError(message, operation="promote", subject=str(self._target))
        if status is None:
            status = FollowStatus(commit=held.commit, newest=None)
            with contextlib.suppress(TidemarkError):
                status = await self._lag_of(held, await self._newest())
        return msgspec.structs.replace(status, promoted=True)

    async def _newest(self) -> Commit:
        return await find_commit(self._repository.store, self._followed.scope)

    def _is_due(self, held: Built, found: Commit) -> bool:
        """Return whether a commit is to take the place of the one that is there; a stale list does not go back (F1)."""
        here = held.commit.pointer
        is_older = found.pointer.number < here.number
        return found.pointer != here and (self._repository.store.capabilities.consistent_lists or not is_older)

    async def _read_index(self, commit: Commit) -> tuple[SnapshotIndex, int]:
        """Read the indexes of what is followed as that of one directory (F3), and count the GETs."""
        store, pace = self._repository.store, self._repository.pace
        chosen = self._followed.choose(commit)
        read = await map_bounded(
            lambda reference: read_index_of(store, reference, pace), chosen, in_flight_max=INDEXES_IN_FLIGHT_MAX
        )
        if self._followed.task is not None and self._followed.store is not None:
            return read[0]
        tasks: dict[str, list[DirIndex]] = {}
        for reference, (index, _) in zip(chosen, read, strict=True):
            # Names of tasks and stores are made safe as in keys: they come from the store.
            named = msgspec.structs.replace(index.dir, name=encode_component(reference.store))
            tasks.setdefault(encode_component(reference.task), []).append(named)
        root = DirIndex(
            name="", sub_dirs_present=tuple(DirIndex(name=n, sub_dirs_present=tuple(dirs)) for n, dirs in tasks.items())
        )
        packs = {pack.key: pack for index, _ in read for pack in index.packs}
        joined = msgspec.structs.replace(read[0][0], dir=root, packs=tuple(packs.values()))
        return joined, sum(requests for _, requests in read)

    async def _bring_to(self, held: Built | None, commit: Commit, progress: Progress) -> FollowStep:
        """Make the directory that of a pinned commit, unless another follower has brought a newer one there since."""
        async with self._locked():
            now = await run_blocking(self._check)
            if now is not None and now == held and self._contents(now.commit) == self._contents(commit):
                await run_blocking(self._write, msgspec.structs.replace(now, commit=commit))
                return FollowStep(commit=commit)
        async with staged_restore(self._repository, self._target, _OPTIONS, progress) as staged:
            index, requests = await self._read_index(commit)
            await staged.download(index, requests=requests)
            async with self._locked():
                now = await run_blocking(self._check)
                if now is not None and now != held and now.commit.pointer.number > commit.pointer.number:
                    return FollowStep(commit=now.commit)
                built = await run_blocking(Built.look, commit, staged.staging.directory)
                await run_blocking(self._write, *filter(None, (now, built)))
                result = await staged.publish()
                await run_blocking(self._write, built)
        return FollowStep(commit=commit, result=result)

    def _contents(self, commit: Commit) -> frozenset[tuple[str, str, bytes]]:
        return frozenset((s.task, s.store, s.index.sha256) for s in self._followed.choose(commit))

    async def _look(self, *, changes_nothing: bool = False) -> Built | None:
        """Return what the directory is, None if nothing is there; raises as `check`."""
        is_there = await run_blocking(os.path.lexists, self._target)
        if not is_there or (changes_nothing and not await run_blocking(os.path.lexists, f"{self._file}-lock")):
            # Nothing is made before there is something to write.
            found = await run_blocking(self._check)
            return found if is_there else None
        async with self._locked():
            return await run_blocking(self._check)

    def _check(self) -> Built | None:
        """Return what the directory is, None if nothing is there. Blocks; under the lock, or else it may be moving.

        Raises:
            PromotedError: A writer has claimed it (F6).
            TargetError: It holds something that no follower of the same has put there, or is in use (F8).
        """
        known = self._read()
        if known is not None and known.promoted:
            number = known.built[-1].commit.pointer.number
            message = f"a writer has claimed it, at commit {number}"
            hint = f"follow into another directory; to use this one again, remove {self._file} and the directory"
            raise PromotedError(message, operation=_OPERATION, subject=str(self._target), hint=hint)
        if known is not None and known.followed != self._followed:
            raise self._refusal(f"something else of {known.followed.scope} is followed there")
        _, has_content = look_at_target(self._target, replace=True)
        if not has_content:
            return None
        check_not_in_use(self._target)
        try:
            files = _hash_stats(self._target)
        except UnsafeSourceError as error:
            raise self._refusal("has content that no follower has put there") from error
        found = [built for built in (known.built if known is not None else ()) if built.files == files]
        if not found:
            raise self._refusal("has content that no follower has put there")
        # Two commits whose files look the same: the inode decides, which a copy of the directory would not have.
        inode = self._target.stat().st_ino
        return next((built for built in found if built.inode == inode), found[-1])

    def _refusal(self, message: str) -> TargetError:
        hint = "choose a directory that is absent or empty; to replace this one, remove it first"
        return TargetError(message, operation=_OPERATION, subject=str(self._target), hint=hint)

    def _read(self) -> FollowFile | None:
        """Read the file beside the directory, None if there is none. Blocks."""
        with target_errors(self._file):
            data = read_own_file(self._file) if os.path.lexists(self._file) else None
        try:
            return msgspec.json.decode(data, type=FollowFile) if data is not None else None
        except UNDECODABLE as error:
            hint = "see that it is this user's, of no newer release; or remove it and the directory, and follow again"
            raise TargetError("cannot be read", operation=_OPERATION, subject=str(self._file), hint=hint) from error

    def _write(self, *built: Built, promoted: bool = False) -> None:
        """Write the file beside the directory, durably and at once. Blocks; under the lock."""
        found = FollowFile(followed=self._followed, built=built, promoted=promoted)
        # Always the same name: what a killed process has left of it does not pile up.
        new = Path(f"{self._file}-new")
        with target_errors(self._file):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with opened(new, flags, 0o600) as descriptor:
                write_all_at(descriptor, 0, msgspec.json.encode(found))
                flush(descriptor)
            new.replace(self._file)
            sync_dir(self._file.parent)

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the lock (F7). TargetBusyError: somebody else has it for longer than an exchange takes."""
        async with acquired(self._open_lock, os.close) as descriptor:
            for look in range(LOCK_LOOKS_MAX):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if look == LOCK_LOOKS_MAX - 1:
                        message = "another follower or a promotion holds its lock"
                        raise TargetBusyError(message, operation=_OPERATION, subject=str(self._target)) from error
                await asyncio.sleep(LOCK_LOOK_S)
            yield

    def _open_lock(self) -> int:
        check_not_repository(self._repository.store, self._target)
        with target_errors(self._target):
            make_durable(self._target.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(f"{self._file}-lock", flags, 0o600)

    def _count_missing_bytes(self, index: SnapshotIndex) -> int:
        """Return what a restore over the directory would fetch, by size and time of what is there. Blocks."""
        present: dict[FilePath, LocalFile] = {}
        if look_at_target(self._target, replace=True)[1]:
            for path, pairs in pairs_to_identify(scan_dir(self._target), index.dir):
                same = [f for f, entry in pairs if f.metadata.modified_at_ns == entry.metadata.modified_at_ns]
                present.update(((*path, file.name), file) for file in same)
        range_bytes = self._repository.settings.range_bytes
        return plan_restore(index, present, range_bytes=range_bytes, owners_count=False).fetch_bytes


def _hash_stats(directory: Path) -> bytes:
    """Return a hash of path, size and time of all files of a directory but what readers leave (F5)."""
    return hash_content(msgspec.msgpack.encode(sorted(_stats(scan_dir(directory)))))


def _stats(local: LocalDir, parents: FilePath = ()) -> Iterator[tuple[str, int, int]]:
    for file in local.files:
        if not _OF_READERS.fullmatch(file.name):
            path, metadata = "/".join((*parents, file.name)), file.metadata
            yield path, metadata.size_bytes, metadata.modified_at_ns
    for sub in local.sub_dirs:
        yield from _stats(sub, (*parents, sub.name))

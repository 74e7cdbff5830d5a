"""Checking the plan of a collection by a way of its own (design 0006, P6). Nothing is written to the repository.

What may go is derived once more: uploads are listed, then roots are read and followed (`engine.plan_roots`), and the
difference is compared with the plan's lines, shard by shard. The repository may have moved on since the plan was made:
what is reachable only by newer roots, what came later and what is gone are told, and make no plan wrong.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Final

import msgspec

from blobstore.base import BlobInfo, BlobStore, list_blobs, read_blob
from blobstore.errors import BlobNotFoundError
from blobstore.local_files import run_blocking
from engine.clock import read_now_ms
from engine.errors import DamagedError, UnsafeStoreError, UsageError
from engine.plan_findings import Findings, PlanCheck, WrongKind, compare_totals
from engine.plan_roots import (
    OPERATION,
    Reach,
    compare_clock,
    compare_retention,
    compare_roots,
    follow,
    read_now_roots,
)
from engine.plan_shards import (
    LINE_BYTES,
    REACHED_LATER,
    REACHED_THEN,
    Listed,
    pack_line,
    read_shards,
    unpack_line,
    write_uploads,
)
from engine.sorted_digests import (
    IN_MEMORY_MAX,
    ROOMS,
    SortedDigests,
    digest_of,
    shard_of,
)
from index.collect_plan import DeleteReason, ReasonTotal
from index.errors import PlanFileError, UnsafeNameError
from index.keys import parse_upload_key
from index.model import RepositoryRecord
from index.plan_file import (
    HEADER_BYTES_MAX,
    HEADER_NAME,
    LINES_SUFFIX,
    SUMMARY_NAME,
    PlanHeader,
    PlanSummary,
    decode_header,
    decode_lines,
    decode_summary,
)
from index.retention import RetentionPolicy

# A collection beside us may take what the roots have led to; then they have changed.
READINGS_MAX: Final = 5
LINES_FILE_BYTES_MAX: Final = 1 << 30


class _Plan(msgspec.Struct, frozen=True):
    """A plan that is not read but for its ends."""

    place: BlobStore
    header: PlanHeader
    summary: PlanSummary


async def verify_plan(
    store: BlobStore,
    repository: RepositoryRecord,
    plan: BlobStore,
    *,
    meant: Callable[[int], RetentionPolicy] | None = None,
    in_memory_max: int = IN_MEMORY_MAX,
    scratch: Path | None = None,
) -> PlanCheck:
    """Derive again what a collection may delete, and compare it with a plan.

    Requests: a LIST per 1,000 uploads; the lists of logs, names and pins and a GET for each record, name
    and pin; a GET for each index that is alive, more for deltas.

    Args:
        store: The repository's.
        repository: Its record.
        plan: Where the plan's files are.
        meant: What is meant to be kept, at a time by the store's clock; compared with what the plan says that it keeps.
            If not given, the plan is believed.
        in_memory_max: Above so many keys of one kind, sorted digests are kept on disk.
        scratch: A directory for them; that of the system if not given.

    Returns:
        What is wrong, what is missed, and what cannot be told because the repository has moved on.

    Raises:
        PlanFileError: A file of the plan is missing, or is none.
        UnknownFormatError: A newer tidemark wrote the plan, or something in the repository.
        UsageError: The plan is another repository's.
        DamagedError: An index that a root needs is missing or altered.
        UnsafeStoreError: The roots kept changing.
        StoreError: As the store says.
    """
    header = decode_header(await _read_part(plan, HEADER_NAME), subject=HEADER_NAME)
    summary = decode_summary(await _read_part(plan, SUMMARY_NAME), subject=SUMMARY_NAME)
    if header.repository_id != repository.id:
        raise UsageError(
            f"is of repository {header.repository_id}, and this is {repository.id}",
            operation=OPERATION,
            subject="the plan",
        )
    with TemporaryDirectory(dir=scratch) as directory:
        check = _Check(
            store,
            _Plan(place=plan, header=header, summary=summary),
            ttl_ms=repository.ttl_ms,
            meant=meant,
            scratch=Path(directory),
            in_memory_max=in_memory_max,
        )
        return await check.run()


class _Check:
    """One check: its steps, in their order, and what they find."""

    def __init__(
        self,
        store: BlobStore,
        plan: _Plan,
        *,
        ttl_ms: int,
        meant: Callable[[int], RetentionPolicy] | None,
        scratch: Path,
        in_memory_max: int,
    ) -> None:
        self._store = store
        self._plan = plan.place
        self._header = plan.header
        self._summary = plan.summary
        self._ttl_ms = ttl_ms
        self._meant = meant
        # When the plan's uploads were listed; never later than it is now, whatever the plan says.
        self._then_ms = plan.header.listed_at_ms
        self._scratch = scratch
        self._in_memory_max = in_memory_max
        self._found = Findings()

    async def run(self) -> PlanCheck:
        """List first, as a collection does (D2); then the roots, then compare with the plan."""
        found = self._found
        now_ms = await read_now_ms(self._store)
        self._then_ms = min(self._then_ms, now_ms)
        with (
            TemporaryFile(dir=self._scratch) as listed,
            self._digests(note_bytes=len(REACHED_THEN)) as reached,
            self._digests(note_bytes=LINE_BYTES) as planned,
        ):
            await self._list_uploads(listed)
            reach = await self._read_reach(reached)
            totals = await self._read_lines(planned)
            await self._compare(listed, planned, reached)
            return PlanCheck(
                run=self._header.run,
                planned_count=planned.added_count,
                planned_bytes=sum(total.size_bytes for total in totals),
                listed_count=found.counts["listed"],
                indexes_count=len(reach.then | reach.later),
                wrong_count=found.counts["wrong"],
                wrong=tuple(found.wrong),
                missed_count=found.counts["missed"],
                missed_bytes=found.missed_bytes,
                missed=tuple(found.missed),
                contradictions=(
                    *compare_clock(self._header, now_ms, late_ms=self._store.capabilities.created_late_ms),
                    *(compare_retention(self._header, self._meant) if self._meant is not None else ()),
                    *self._check_totals(totals),
                    *reach.contradictions,
                ),
                changed=reach.changed,
                later_count=found.counts["later"],
                gone_count=found.counts["gone"],
                rescued_count=found.counts["rescued"],
                waiting_count=found.counts["waiting"],
                retention_compared=self._meant is not None,
                on_disk=planned.is_on_disk or reached.is_on_disk,
            )

    def _digests(self, *, note_bytes: int) -> SortedDigests:
        return SortedDigests(self._scratch, note_bytes=note_bytes, in_memory_max=self._in_memory_max)

    # ------------------------------------------------------------------ gather

    async def _list_uploads(self, listed: IO[bytes]) -> None:
        """Every blob and index, in frames, one for each shard that has some; a room sorts by shard."""
        uploads: list[Listed] = []
        for room in ROOMS:
            async for blob in list_blobs(self._store, room):
                if not _is_upload(blob):
                    continue
                if uploads and shard_of(uploads[-1].key) != shard_of(blob.key):
                    await run_blocking(write_uploads, listed, uploads)
                    uploads = []
                uploads.append(Listed(blob.key, blob.size_bytes, blob.created_at_ms))
                self._found.counts["listed"] += 1
        if uploads:
            await run_blocking(write_uploads, listed, uploads)
        listed.seek(0)

    async def _read_reach(self, reached: SortedDigests) -> Reach:
        """Read the roots, and follow what they lead to.

        Raises:
            DamagedError: Something is missing though the roots still need it.
        """
        header, before = self._header, None
        for _ in range(READINGS_MAX):
            try:
                roots = await read_now_roots(self._store, await read_now_ms(self._store))
            except BlobNotFoundError:
                continue  # collected since it was listed
            reach = compare_roots(header, roots)
            try:
                # What the plan's roots reach comes first, so that its record sorts first.
                for references, note in ((reach.then, REACHED_THEN), (reach.later, REACHED_LATER)):
                    await follow(self._store, references, reach.optional, _adder(reached, note))
            except DamagedError as error:
                if not isinstance(error.__cause__, BlobNotFoundError) or reach == before:
                    raise
                before = reach
                continue
            return reach
        raise UnsafeStoreError(f"the roots changed in each of {READINGS_MAX} readings", operation=OPERATION)

    async def _read_lines(self, planned: SortedDigests) -> tuple[ReasonTotal, ...]:
        """Read every line of the plan; return what they add up to."""
        count = size_bytes = 0
        names = [blob.key async for blob in list_blobs(self._plan, "") if blob.key.endswith(LINES_SUFFIX)]
        for name in names:
            data = await _read_part(self._plan, name)
            for line in decode_lines(data, subject=name):
                count += 1
                size_bytes += line.size_bytes
                planned.add(digest_of(line.key) + pack_line(line))
        reason = DeleteReason.UNREACHABLE_UPLOAD
        return (ReasonTotal(reason=reason, count=count, size_bytes=size_bytes),) if count else ()

    def _check_totals(self, totals: tuple[ReasonTotal, ...]) -> list[str]:
        found = compare_totals(self._summary, totals)
        if self._summary.run != self._header.run:
            found.append("the summary is of another run")
        if self._header.ttl_ms != self._ttl_ms:
            found.append(f"the plan has a TTL of {self._header.ttl_ms} ms, and the repository one of {self._ttl_ms} ms")
        if repeated := sum(total.count for total in totals) - self._found.counts["planned"]:
            found.append(f"{repeated} lines repeat another one")
        return found

    # ------------------------------------------------------------------ compare

    async def _compare(self, listed: IO[bytes], planned: SortedDigests, reached: SortedDigests) -> None:
        """Shard by shard: memory for one of them at a time."""
        shards = read_shards(listed, planned, reached)
        while (shard := await run_blocking(next, shards, None)) is not None:
            self._found.counts["planned"] += sum(map(len, shard.lines.values()))
            for upload in shard.uploads:
                digest = digest_of(upload.key)
                self._judge(upload, shard.lines.pop(digest, []), shard.reach.get(digest))
            self._found.counts["gone"] += len(shard.lines)

    def _judge(self, upload: Listed, lines: list[bytes], reached: bytes | None) -> None:
        found = self._found
        if len(lines) > 1:
            found.add_wrong(upload.key, WrongKind.REPEATED)
        if reached == REACHED_THEN and lines:
            found.add_wrong(upload.key, WrongKind.REACHABLE)
        elif reached is not None:
            found.counts["rescued"] += bool(lines)
        elif not lines and upload.created_at_ms >= self._header.listed_at_ms:
            found.counts["later"] += 1
        else:
            is_due = upload.created_at_ms + self._ttl_ms <= self._then_ms
            if lines:
                self._judge_line(upload, lines[0], is_due=is_due)
            elif is_due:
                found.add_missed(upload.key, upload.size_bytes)
            else:
                found.counts["waiting"] += 1

    def _judge_line(self, upload: Listed, note: bytes, *, is_due: bool) -> None:
        """Judge a planned key that nothing leads to: whether it may go, and what the line says of it."""
        line = unpack_line(note)
        capabilities = self._store.capabilities
        moved = not capabilities.keeps_created_at and line.created_at_ms < upload.created_at_ms
        came_later = line.created_at_ms > self._then_ms + capabilities.created_late_ms
        if not is_due:
            self._found.add_wrong(upload.key, WrongKind.UNEXPIRED)
        elif upload.size_bytes != line.size_bytes:
            self._found.add_wrong(upload.key, WrongKind.SIZE)
        elif came_later or (upload.created_at_ms != line.created_at_ms and not moved):
            self._found.add_wrong(upload.key, WrongKind.TIMES)


def _adder(reached: SortedDigests, note: bytes) -> Callable[[str], None]:
    def add(key: str) -> None:
        reached.add(digest_of(key) + note)

    return add


async def _read_part(plan: BlobStore, name: str) -> bytes:
    cap = LINES_FILE_BYTES_MAX if name.endswith(LINES_SUFFIX) else HEADER_BYTES_MAX
    try:
        return await read_blob(plan, name, size_bytes_max=cap)
    except BlobNotFoundError as error:
        raise PlanFileError(
            "is missing: this is no plan, or one that was not finished", subject=name, hint="make it by a dry run"
        ) from error


def _is_upload(blob: BlobInfo) -> bool:
    try:
        parse_upload_key(blob.key)
    except UnsafeNameError:
        return False
    return True

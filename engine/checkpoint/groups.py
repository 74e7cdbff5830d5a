"""What a rescale has to do: groups of stores, and the logs that name them (design 0010, P1, P4 and P5)."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from engine.checkpoint.store import StoreRestored, read_row_schema
from engine.errors import UsageError
from engine.runtime import Runtime
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.key_rules import StoreRules, read_key_rules
from engine.state.query import PARTITIONS_KEY, PARTITIONS_MAX, QueryAt, StateOperator, StoreAt, name_stores
from engine.state.settings import StateStoreSettings
from index.snapshot.model import StoreReference, UniqueId
from index.spark.checkpoint import COMMITS, OFFSETS, STATE, StoreId
from index.spark.names import StateVersion
from index.spark.query_logs import decode_commit, decode_offsets, encode_commit, encode_offsets
from index.spark.rescale import PartitionGroup, group_partitions, repartition_operator


class GroupToRescale(msgspec.Struct, frozen=True, kw_only=True):
    """Stores of one name whose rows become those of others, and of no others."""

    # At least one; all of one operator and one name.
    sources: tuple[StoreAt, ...]
    # Where a backup has each of them; none of a checkpoint.
    references: tuple[StoreReference, ...] = ()
    # Of the sources: how many partitions the operator had, too.
    rules: StoreRules
    targets: tuple[tuple[StoreId, StateVersion], ...]
    partitions: int
    # Whether new zips get checksums, where the settings have them. Those of sources are compared in any case.
    sums_files: bool = True
    # Of the rows, where there is one and the first partition, with which Spark keeps it, is among the targets.
    schema: bytes | None = None

    @property
    def id(self) -> StoreId:
        """The first of its targets, which no other group has."""
        return self.targets[0][0]

    @property
    def size_bytes(self) -> int:
        """Of the sources, as a backup has them."""
        return sum(reference.size_bytes for reference in self.references)

    @property
    def settings(self) -> StateStoreSettings:
        return self.sources[0].settings

    @property
    def is_merge(self) -> bool:
        """Whether rows stay in their files."""
        return len(self.targets) == 1

    @property
    def subject(self) -> str:
        """Name it for an error."""
        return f"operator {self.sources[0].id.operator}, store {self.sources[0].id.store}"


class GroupRescaled(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a group, or would."""

    # None in a dry run.
    stores: tuple[StoreRestored, ...] = ()
    # Keys that were hashed and are in place: of each row, and in a merge of each entry of an SST, such as a deletion.
    keys_checked: int
    # SSTs that the targets have by reference.
    files_linked: int = 0
    bytes_linked: int = 0
    # SSTs of sources whose rows are written again.
    bytes_rewritten: int = 0


class RescaleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a rescale is of all groups together. All keys were hashed, and are in place."""

    # Of the operators that Spark does not plan with one.
    partitions_before: int
    partitions: int
    # Numbers of partitions for which no row would be written again.
    partitions_by_reference: tuple[int, ...]
    stores_before: int
    stores: int
    # As of each group.
    keys_checked: int
    files_linked: int
    bytes_linked: int
    bytes_rewritten: int


def add_up(
    at: QueryAt, partitions: int, groups: Sequence[GroupRescaled], work: Sequence[GroupToRescale]
) -> RescaleFigures:
    """Add up what became of all groups."""
    before = max((operator.partitions_count for operator in at.operators if not operator.is_single), default=1)
    return RescaleFigures(
        partitions_before=before,
        partitions=partitions,
        partitions_by_reference=tuple(number for number in range(1, before) if before % number == 0),
        stores_before=len(at.stores),
        stores=sum(len(item.targets) for item in work),
        keys_checked=sum(group.keys_checked for group in groups),
        files_linked=sum(group.files_linked for group in groups),
        bytes_linked=sum(group.bytes_linked for group in groups),
        bytes_rewritten=sum(group.bytes_rewritten for group in groups),
    )


def check_partitions(partitions: int) -> None:
    """UsageError: it is not a number of partitions."""
    if not 1 <= partitions <= PARTITIONS_MAX:
        hint = f"give one from 1 to {PARTITIONS_MAX:,}"
        raise UsageError(f"{partitions} is not a number of partitions", operation="rescale", hint=hint)


async def plan_groups(
    root: CheckpointDir,
    at: QueryAt,
    partitions: int,
    runtime: Runtime,
    *,
    references: Mapping[StoreId, StoreReference] | None = None,
) -> tuple[GroupToRescale, ...]:
    """Find which stores become which; `references` say where a backup has them.

    Raises as `rescale_checkpoint`; BatchLogError, UnknownFormatError: a schema cannot be read.
    """
    if any(store.at.is_hdfs for store in at.stores):
        hint = "convert it first: `tidemark spark convert --to rocksdb`"
        raise UsageError("its state is HDFS-backed", operation="rescale", subject=root.location, hint=hint)
    rules = await read_key_rules(root, at)
    stores = {store.id: store for store in at.stores}

    def named(of: StoreId) -> tuple[StoreId, StateVersion]:
        unique_id = None if at.commit.unique_ids is None else runtime.unique_id()
        return of, StateVersion(at.batch + 1, unique_id)

    async def group(old: StateOperator, new: StateOperator, store: str, of: PartitionGroup) -> GroupToRescale:
        sources = tuple(stores[StoreId(old.id, partition, store)] for partition in of.sources)
        first = StoreId(old.id, 0, store)
        return GroupToRescale(
            sources=sources,
            references=() if references is None else tuple(references[source.id] for source in sources),
            rules=rules[old.id, store],
            targets=tuple(named(StoreId(old.id, partition, store)) for partition in of.targets),
            partitions=new.partitions_count,
            schema=await read_row_schema(root.child(first.path)) if 0 in of.targets else None,
        )

    return tuple(
        [
            await group(old, new, store, of)
            for old, new in zip(at.operators, operators_after(at, partitions), strict=True)
            for store in old.stores
            for of in group_partitions(old.partitions_count, new.partitions_count)
        ]
    )


def operators_after(at: QueryAt, partitions: int) -> tuple[StateOperator, ...]:
    """Return the operators with their new number of partitions; those that Spark plans with one keep it."""
    return tuple(
        operator if operator.is_single else msgspec.structs.replace(operator, partitions_count=partitions)
        for operator in at.operators
    )


def ids_of(work: Sequence[GroupToRescale]) -> dict[StoreId, UniqueId | None]:
    """Return the ids of all stores that are made."""
    return {of: named.unique_id for item in work for of, named in item.targets}


def rewritten(
    at: QueryAt, ids: Mapping[StoreId, UniqueId | None], changed: Mapping[str, str], *, partitions: int | None = None
) -> Callable[[str, bytes], bytes]:
    """Return what makes of the content of a file of the query that of a new checkpoint (P4, P5; 0005, V2 and V3).

    Its stores have these ids, it pins the settings that are `changed`, and has as many partitions if any are given.
    """
    counts: dict[str, int] = {}
    if partitions is not None:
        at = msgspec.structs.replace(at, operators=operators_after(at, partitions))
        changed = {**changed, PARTITIONS_KEY: str(partitions)}
        counts = {f"{STATE}/{operator.id}": operator.partitions_count for operator in at.operators}

    def rewrite(path: str, before: bytes) -> bytes:
        if path.startswith(f"{COMMITS}/"):
            return encode_commit(name_stores(decode_commit(before, subject=path), at, ids))
        if path.startswith(f"{OFFSETS}/") and changed:
            offsets = decode_offsets(before, subject=path)
            conf = {**offsets.conf, **changed}
            return encode_offsets(msgspec.structs.replace(offsets, conf=conf, has_metadata=True))
        operator, metadata, _ = path.partition("/_metadata/")
        if metadata and operator in counts:
            return repartition_operator(before, counts[operator], subject=path)
        return before

    return rewrite

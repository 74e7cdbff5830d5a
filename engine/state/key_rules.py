"""Check that each key of state is in the partition in which its operator's rule has it (design 0010).

Whatever changes partitions does this first, so that a rule which is wrong for an operator, a type or a release of Spark
can lose nothing: it is refused at the first key.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias, runtime_checkable

import msgspec

from blobstore.errors import BlobNotFoundError
from engine.errors import MisplacedKeyError
from engine.state.blocks import Blocks
from engine.state.checkpoint_dir import CheckpointDir
from engine.state.query import QueryAt, StateOperator
from engine.state.settings import ENCODING_KEY
from index.errors import PartitionKeyError
from index.spark import retention
from index.spark.checkpoint import STATE, StoreId
from index.spark.partition_keys import KeyRule, choose_key_rule
from index.spark.query_logs import SCHEMAS, decode_state_variables
from index.spark.schema import SCHEMA_BYTES_MAX, KeyForm, StateSchema, decode_key_form, decode_state_schema

SCHEMA_PATH: Final = "/".join(retention.SCHEMA_PATH)
AVRO: Final = "avro"
_SHOWN_CHARACTERS_MAX: Final = 400

# Takes a rule, keys of its column family, and the number of partitions; returns the partition of each key.
Partitioner: TypeAlias = Callable[[KeyRule, Sequence[bytes], int], Sequence[int]]


@runtime_checkable
class BlockPartitioner(Protocol):
    """A `Partitioner` that takes keys out of data blocks itself, in a form in which it hashes them faster."""

    def __call__(self, rule: KeyRule, keys: Sequence[bytes], partitions: int, /) -> Sequence[int]:
        """Return the partition of each key."""

    def keys_in(self, blocks: Blocks, prefix_bytes: int) -> Iterator[tuple[bytes, Sequence[bytes]]]:
        """Yield keys as `split_entries`, in any order."""


class StoreRules(msgspec.Struct, frozen=True, kw_only=True):
    """How one store of an operator is partitioned: in each of its partitions alike."""

    operator: StateOperator
    store: str
    # By column family; none for an operator of one partition, whose keys are not shuffled.
    families: dict[str, KeyRule]

    @property
    def subject(self) -> str:
        return f"operator {self.operator.id} ({self.operator.name}), store {self.store}"


def partitions_of(rule: KeyRule, keys: Sequence[bytes], partitions: int) -> list[int]:
    """Return the partition of each key, in plain Python; `engine.arrow.key_hashes` is faster. Raises as `hash_of`."""
    return [rule.partition_of(key, partitions) for key in keys]


async def read_key_rules(directory: CheckpointDir, query: QueryAt) -> dict[tuple[int, str], StoreRules]:
    """Find the rules of every store of a query, by operator and name of the store. Costs a GET for each schema.

    Raises:
        PartitionKeyError: The rule of an operator is not known, or its schema is not there (0010, H8).
        BatchLogError, UnknownFormatError: A schema cannot be read.
        StoreError: The store did not answer.
    """
    avro = query.offsets.conf.get(ENCODING_KEY, "").lower() == AVRO
    is_hdfs = any(store.at.is_hdfs for store in query.stores)
    found = {}
    for operator in query.operators:
        variables = decode_state_variables(operator.properties, subject=f"properties of operator {operator.id}")
        choose = partial(choose_key_rule, variables=variables, is_avro=avro and operator.column_families)
        for store in operator.stores:
            forms = [] if operator.is_single else await read_forms(directory, operator, store, is_hdfs=is_hdfs)
            families = {of.family: choose(operator.id, operator.name, store, of, form) for of, form in forms}
            found[operator.id, store] = StoreRules(operator=operator, store=store, families=families)
    return found


async def read_families(directory: CheckpointDir, operator: StateOperator) -> dict[str, list[StateSchema]]:
    """Read the schemas that the column families of an operator had, by name, the newest of each last."""
    found: dict[str, list[StateSchema]] = {}
    for name in operator.schemas:
        path = f"{STATE}/{operator.id}/{SCHEMAS}/{name}"
        data = await directory.read(path, size_bytes_max=SCHEMA_BYTES_MAX)
        for schema in decode_state_schema(data, subject=path):
            found.setdefault(schema.family, []).append(schema)
    return found


def check_keys(
    rules: StoreRules, family: str, keys: Sequence[bytes], found: Sequence[int], partition: int, *, checked: int = 0
) -> None:
    """Refuse keys that are in this partition of which not all belong there: each in the one that was `found` for it.

    Of the store, `checked` keys were found in place before these.

    Raises:
        MisplacedKeyError: One is not: the error names operator, store, family, key and rule (0010, H9).
        PartitionKeyError: There is a key of a family without a rule (0010, H8).
    """
    operator, rule = rules.operator, rules.families.get(family)
    if keys and rule is None and not operator.is_single:
        reason = f"has keys of the column family {family}, which no schema names"
        raise PartitionKeyError(reason, subject=rules.subject, hint="restore the checkpoint from a backup")
    if found.count(partition) == len(found):
        return
    wrong = next(number for number, of in enumerate(found) if of != partition)
    shown, by, subject = keys[wrong][:64].hex(), "there is one partition", rules.subject
    if rule is not None:
        shown, by, subject = show_key(rule, keys[wrong]), f"the hash of {rule.rule}", rule.subject
    reason = (
        f"the key {shown} is in partition {partition} of {operator.partitions_count}, and belongs in partition "
        f"{found[wrong]} by {by}; {checked + wrong} keys before it are in place"
    )
    error = MisplacedKeyError(reason, operation="check partitions", subject=subject)
    error.checked = checked + wrong
    raise error


def show_key(rule: KeyRule, key: bytes) -> str:
    """Return the columns of a key that are hashed, as text; times and dates as numbers, as they are stored.

    A key that does not fit its schema is shown as its bytes.
    """
    try:
        (part,) = rule.cut([key])
        values = rule.decode(part)
    except (ValueError, struct.error):
        return key[:64].hex()
    shown = ", ".join(f"{of.name}={_show(value)}" for of, value in zip(rule.fields, values, strict=True))
    return shown if len(shown) <= _SHOWN_CHARACTERS_MAX else f"{shown[:_SHOWN_CHARACTERS_MAX]}…"


def _show(value: object) -> str:
    match value:
        case bytes():
            return repr(value.decode("utf-8", "backslashreplace"))
        case tuple() | list():
            return f"({', '.join(map(_show, value))})"
        case Mapping():
            return f"({', '.join(map(_show, value.values()))})"
        case _:
            return "null" if value is None else str(value)


async def read_forms(
    directory: CheckpointDir, operator: StateOperator, store: str, *, is_hdfs: bool
) -> list[tuple[StateSchema, KeyForm | None]]:
    """Read the newest schema of each column family of a store, and how its keys are encoded."""
    subject = f"operator {operator.id} ({operator.name}), store {store}"
    try:
        if operator.column_families:
            newest = [schemas[-1] for schemas in (await read_families(directory, operator)).values()]
            return [(schema, decode_key_form(schema, subject=f"schema of {subject}")) for schema in newest]
        path = f"{StoreId(operator.id, 0, store).path}/{SCHEMA_PATH}"
        data = await directory.read(path, size_bytes_max=SCHEMA_BYTES_MAX)
    except BlobNotFoundError as error:
        hint = "take it from a backup, or run the query once with a Spark that writes it"
        raise PartitionKeyError("has no schema of its keys", subject=subject, hint=hint) from error
    schemas = decode_state_schema(data, subject=path)
    # The HDFS-backed provider splits no keys.
    leading = 0 if is_hdfs else operator.prefix_columns.get(store, 0)
    if len(schemas) != 1 or not 0 <= leading <= len(schemas[0].key.fields):
        reason = f"has {len(schemas)} schemas, or fewer fields in a key than the {leading} that lead"
        raise PartitionKeyError(reason, subject=subject, hint="the metadata of the operator is of another query")
    return [(schemas[0], KeyForm("prefix", tuple(range(leading))) if leading else KeyForm())]

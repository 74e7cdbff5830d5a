"""Partitions of many keys of state at once: the rule of `index.spark.partition_keys` over Arrow arrays.

A key's columns are decoded as all columns are, and each is hashed for all keys, with the hashes so far as its seeds.
Texts of any length are hashed word by word, for those that have as many words.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from engine.arrow.block_keys import KeyColumn, split_columns
from engine.arrow.unsafe_rows import Ints, RowBuffer, damaged_row, element_bytes
from index.spark.partition_keys import DOUBLE_NAN, FLOAT_NAN, LENGTH_BYTES, SEED, KeyRule, hash_bytes, hash_values
from index.spark.schema import ArrayType, AtomType, DataType, DecimalType, MapType, StructType
from index.spark.unsafe_row import WIDE_BYTES, WORD, WORD_DIGITS_MAX

Hashes: TypeAlias = npt.NDArray[np.uint32]

_WORD: Final = 4
# With fewer texts than this that have another word, or lists that have another element, numpy's calls cost more.
_FEW: Final = 16


class _ArrayPartitioner:
    """Partitions by arrays, also of keys that are taken out of blocks as a column."""

    def __call__(self, rule: KeyRule, keys: Sequence[bytes], partitions: int) -> list[int]:
        """Return the partition of each key, as `KeyRule.partition_of` does. Raises as `hashes_of`."""
        found: list[int] = (hashes_of(rule, keys).astype(np.int64) % partitions).tolist()
        return found

    keys_in = staticmethod(split_columns)


partitions_of: Final = _ArrayPartitioner()


def hashes_of(rule: KeyRule, keys: Sequence[bytes]) -> npt.NDArray[np.int32]:
    """Return the hash of the columns of each key: modulo any number of partitions it is the partition among them.

    Raises:
        DamagedError: A key does not fit its schema.
        PartitionKeyError: Likewise, of keys that are encoded as Avro.
    """
    if rule.is_avro:
        return np.array([rule.hash_of(key) for key in keys], np.int64).astype(np.uint32).view(np.int32)
    if isinstance(keys, KeyColumn):
        buffer = RowBuffer.of_matrix(keys.octets, *_cut(rule, keys), rule.subject)
    else:
        try:
            parts = rule.cut(keys)
        except ValueError as error:
            raise damaged_row(str(error), rule.subject) from error
        buffer = RowBuffer(parts, rule.subject)
    columns = buffer.columns(rule.row, buffer.all)
    if rule.is_within:
        if columns[0].null_count:
            raise damaged_row("has no columns to hash", rule.subject)
        columns = columns[0].flatten()
    hashes = np.full(len(keys), SEED, np.uint32)
    for field, column in zip(rule.fields, columns, strict=False):
        hashes = hash_column(field.type, column, hashes)
    return hashes.view(np.int32)


def _cut(rule: KeyRule, keys: KeyColumn) -> tuple[Ints, Ints]:
    """Return where the part of each key that `KeyRule.cut` returns begins, and its size."""
    begins, sizes = np.zeros(len(keys), np.int64), keys.sizes
    match rule.form.form:
        case "row":
            return begins, sizes
        case "time_first":
            return begins + np.minimum(sizes, WORD), np.maximum(sizes - WORD, 0)
        case "time_last":
            return begins, np.maximum(sizes - WORD, 0)
    if (sizes < LENGTH_BYTES).any():
        raise damaged_row("has a key whose first part does not fit into it", rule.subject)
    lengths = np.ascontiguousarray(keys.octets[:, :LENGTH_BYTES]).view("<i4")[:, 0].astype(np.int64)
    cuts = lengths + LENGTH_BYTES
    if ((lengths < 0) | (cuts > sizes)).any():
        raise damaged_row("has a key whose first part does not fit into it", rule.subject)
    return (begins + LENGTH_BYTES, lengths) if rule.is_first else (cuts, sizes - cuts)


def hash_column(of: DataType, column: pa.Array, seeds: Hashes) -> Hashes:
    """Hash each value of a column of a stored type with the seed beside it; a null leaves its seed as it is.

    Source:
        `index.spark.partition_keys.hash_values`, which it has to equal.
    """
    match of:
        case StructType(fields=fields):
            for field, child in zip(fields, column.flatten(), strict=True):
                seeds = hash_column(field.type, child, seeds)
            return seeds
        case ArrayType(element=element):
            return _hash_elements([element], [column.values], column, seeds)
        case MapType(key=key, value=value):
            return _hash_elements([key, value], [column.keys, column.items], column, seeds)
        case AtomType("void"):
            return seeds
        case AtomType("binary"):
            _, offsets, data = column.buffers()
            ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
            octets = np.frombuffer(data or b"", np.uint8)
            found = _hash_octets(octets, ends[:-1], ends[1:] - ends[:-1], seeds)
        case DecimalType(precision=precision):
            halves = _stored(column, "<i8", 2)
            found = _hash_wide(halves, seeds) if precision > WORD_DIGITS_MAX else _hash_long(halves[::2], seeds)
        case _:
            found = _hash_number(of, column, seeds)
    return found if not column.null_count else np.where(column.is_valid().to_numpy(zero_copy_only=False), found, seeds)


def _hash_number(of: DataType, column: pa.Array, seeds: Hashes) -> Hashes:
    match of:
        case AtomType("boolean"):
            bits = np.unpackbits(np.frombuffer(column.buffers()[1], np.uint8), bitorder="little")
            return _finish(_mix(seeds, bits[column.offset : column.offset + len(column)].astype(np.uint32)), 4)
        case AtomType("float" | "double" as name):
            size, nan = (4, FLOAT_NAN) if name == "float" else (8, DOUBLE_NAN)
            numbers = _stored(column, f"<f{size}")
            bits = np.where(np.isnan(numbers), nan, np.where(numbers == 0, 0, numbers.view(f"<u{size}")))
            return _finish(_mix(seeds, bits.astype(np.uint32)), 4) if name == "float" else _hash_long(bits, seeds)
        case AtomType("long"):
            return _hash_long(_stored(column, "<i8"), seeds)
        case AtomType("byte" | "short" | "integer"):
            return _finish(_mix(seeds, _stored(column, f"<i{element_bytes(of)}").astype(np.int32).view(np.uint32)), 4)
    raise KeyError(of)


def _stored(column: pa.Array, kind: str, each: int = 1) -> npt.NDArray[Any]:
    """Return the numbers of a column, some of them for each value; of what is null they mean nothing."""
    of = np.dtype(kind)
    return np.frombuffer(column.buffers()[1], of)[each * column.offset : each * (column.offset + len(column))]


def _hash_elements(types: list[DataType], children: list[pa.Array], column: pa.Array, seeds: Hashes) -> Hashes:
    """Hash lists: the first element of each, then the second of those that have one."""
    starts = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    counts, seeds, number = np.diff(starts), seeds.copy(), 0
    while len(active := np.flatnonzero(counts > number)) >= _FEW:
        places = pa.array(starts[active] + number)
        hashes = seeds[active]
        for of, child in zip(types, children, strict=True):
            hashes = hash_column(of, child.take(places), hashes)
        seeds[active] = hashes
        number += 1
    for row in active.tolist():
        parts = [child.slice(starts[row] + number, counts[row] - number).to_pylist() for child in children]
        values = [each for entry in zip(*parts, strict=True) for each in entry]
        seeds[row] = hash_values(types * len(parts[0]), values, int(seeds[row]))
    return seeds


def _hash_octets(octets: npt.NDArray[np.uint8], starts: Ints, sizes: Ints, seeds: Hashes) -> Hashes:
    """Hash bytes of each value: words of four, then the bytes after them."""
    seeds, number = seeds.copy(), 0
    # A word may begin at any byte.
    words: npt.NDArray[np.uint32] = np.ndarray(
        (max(0, len(octets) - _WORD + 1),), "<u4", np.ascontiguousarray(octets), strides=(1,)
    )
    active = np.flatnonzero(sizes >= _WORD)
    while len(active) >= _FEW:
        seeds[active] = _mix(seeds[active], words[starts[active] + number])
        number += _WORD
        active = active[sizes[active] >= number + _WORD]
    done = np.ones(len(sizes), np.bool_)
    done[active] = False
    for row in active.tolist():
        start, end = int(starts[row]) + number, int(starts[row] + sizes[row])
        seeds[row] = hash_bytes(octets[start:end].tobytes(), int(seeds[row]), int(sizes[row]))
    whole = sizes & ~(_WORD - 1)
    for tail in range(_WORD - 1):
        rows = np.flatnonzero(done & (sizes > whole + tail))
        seeds[rows] = _mix(
            seeds[rows], octets[starts[rows] + whole[rows] + tail].view(np.int8).astype(np.int32).view(np.uint32)
        )
    return np.where(done, _finish(seeds, sizes.astype(np.uint32)), seeds)


def _hash_wide(halves: Ints, seeds: Hashes) -> Hashes:
    """Hash decimals as the fewest bytes that hold each and its sign, the greatest first."""
    octets = np.ascontiguousarray(halves.view(np.uint8).reshape(-1, WIDE_BYTES)[:, ::-1])
    signs = octets[:, :1] & 0x80
    is_sign = (octets[:, :-1] == np.where(signs, 0xFF, 0)) & (octets[:, 1:] & 0x80 == signs)
    skipped = np.logical_and.accumulate(is_sign, axis=1).sum(axis=1)
    return _hash_octets(octets.ravel(), np.arange(len(octets)) * WIDE_BYTES + skipped, WIDE_BYTES - skipped, seeds)


def _hash_long(numbers: npt.NDArray[Any], seeds: Hashes) -> Hashes:
    bits = numbers.astype(np.uint64)
    return _finish(_mix(_mix(seeds, bits.astype(np.uint32)), (bits >> np.uint64(32)).astype(np.uint32)), 8)


def _mix(seeds: Hashes, words: Hashes) -> Hashes:
    words = words * np.uint32(0xCC9E2D51)
    words = (words << np.uint32(15) | words >> np.uint32(17)) * np.uint32(0x1B873593)
    seeds = seeds ^ words
    return (seeds << np.uint32(13) | seeds >> np.uint32(19)) * np.uint32(5) + np.uint32(0xE6546B64)


def _finish(seeds: Hashes, sizes: Hashes | int) -> Hashes:
    seeds = seeds ^ np.asarray(sizes, np.uint32)
    seeds = (seeds ^ seeds >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    seeds = (seeds ^ seeds >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return seeds ^ seeds >> np.uint32(16)

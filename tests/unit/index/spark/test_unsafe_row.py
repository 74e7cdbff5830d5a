"""Rows that are encoded are decoded to what they are of; Spark's own rows are in the tests of the data sources."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.spark.schema import AtomType, Field, StructType
from index.spark.unsafe_row import decode_row, encode_row

_WIDTHS = {"byte": 8, "short": 16, "integer": 32, "long": 64}
fields = st.one_of(
    st.tuples(st.just("binary"), st.binary(max_size=20)),
    st.tuples(st.just("boolean"), st.booleans()),
    *(st.tuples(st.just(name), st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)) for name, bits in _WIDTHS.items()),
)


def row_type(*names: str) -> StructType:
    return StructType(tuple(Field(str(n), AtomType(name), nullable=True) for n, name in enumerate(names)))


@given(st.lists(fields, max_size=70))
def test_what_is_encoded_is_decoded(columns: list[tuple[str, int | bytes]]) -> None:
    of, values = row_type(*(name for name, _ in columns)), [value for _, value in columns]
    row = encode_row(of, values)
    assert len(row) % 8 == 0
    assert decode_row(of, row) == tuple(values)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="300 is not a byte"):
        encode_row(row_type("byte"), [300])
    with pytest.raises(KeyError):
        encode_row(row_type("double"), [1])

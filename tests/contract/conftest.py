import pytest

pytest.register_assert_rewrite(
    *(f"tests.contract.{name}" for name in ("store_calls", "writing_contract", "reading_contract", "store_contract")),
    "tests.contract.s3_contract",
)

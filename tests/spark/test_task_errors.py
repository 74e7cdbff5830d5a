"""How an error of a task comes to the driver."""

from typing import Any

import pytest

from blobstore.errors import BlobNotFoundError, StoreError
from engine.errors import DamagedError, TargetError
from engine.spark.errors import _tree, decode_error, encode_error
from tidemark.errors import TidemarkError

OURS = {kind for kind in _tree(TidemarkError) if not kind.__module__.startswith("tests")}
KINDS = sorted((kind for kind in OURS if not kind.__name__.startswith("_")), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_each_class_comes_as_it_was(kind: type[Any]) -> None:
    about = {"key" if issubclass(kind, StoreError) else "subject": "blobs/ab"}
    error = kind("is wrong", operation="read", **about, hint="look at it")
    error.add_note("and more")
    decoded = decode_error(encode_error(error))
    assert type(decoded) is kind
    assert (str(decoded), vars(decoded)) == ("read blobs/ab: is wrong", vars(error))


def test_the_key_of_a_missing_blob_comes_with_an_error_about_a_file() -> None:
    error = DamagedError("is not there", operation="read", subject="state/0/1/7.zip")
    error.__cause__ = BlobNotFoundError("is not there", operation="get", key="blobs/ab/cd")
    cause = decode_error(encode_error(error)).__cause__
    assert isinstance(cause, BlobNotFoundError)
    assert cause.key == "blobs/ab/cd"


def test_an_error_about_a_name_that_is_not_utf8_comes_whole() -> None:
    error = TargetError("cannot be written", operation="restore", subject="caf\udce9/state")
    error.add_note("see caf\udce9")
    decoded = decode_error(encode_error(error))
    assert isinstance(decoded, TargetError)
    assert str(decoded) == "restore caf\\udce9/state: cannot be written"
    assert (decoded.subject, decoded.__notes__) == ("caf\\udce9/state", ["see caf\\udce9"])

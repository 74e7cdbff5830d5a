"""What a commit says that is the picture of a streaming checkpoint, and how its stores are named (design 0005, P8)."""

from typing import Final, Self

import msgspec

from index.decoding import UNDECODABLE
from index.errors import BatchLogError, UnknownFormatError
from index.spark.names import check_store_dir
from index.spark.query_logs import DEFAULT_STORE

# The store that has the files of the query: its logs, its metadata and its sources, laid out as in the checkpoint.
QUERY_TASK: Final = "query"
QUERY_STORE: Final = "checkpoint"

KIND: Final = "spark-checkpoint"
FORMAT: Final = 1

_STATE: Final = "state"


class StoreId(msgspec.Struct, frozen=True, order=True):
    """One state store of a query."""

    operator: int
    partition: int
    store: str = DEFAULT_STORE

    @property
    def task(self) -> str:
        """The task that it is committed under."""
        return f"{self.operator}-{self.partition}"

    @property
    def path(self) -> str:
        """Its directory in a checkpoint.

        Raises:
            UnsafeNameError: The name of the store is not one safe component.
        """
        path = f"{_STATE}/{self.operator}/{self.partition}"
        return path if self.store == DEFAULT_STORE else f"{path}/{check_store_dir(self.store)}"

    # `override` is in no standard library before 3.12, and this package has no other dependency.
    def __str__(self) -> str:  # type: ignore[explicit-override]
        """As people read it: `0/3` or `0/3/left-keyToNumValues`."""
        return self.path.removeprefix(f"{_STATE}/")

    @classmethod
    def parse(cls, task: str, store: str) -> Self | None:
        """The state store that a task and a store of a commit stand for; None if they stand for something else."""
        operator, dash, partition = task.partition("-")
        if not dash or not _is_number(operator) or not _is_number(partition):
            return None
        return cls(int(operator), int(partition), store)


class Picture(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag=KIND, tag_field="kind"):
    """What the offsets of a picture's commit say. The order of the fields is the order in which they are written."""

    format: int = FORMAT
    query_id: str
    # The newest batch that it has, and the oldest one that can be restored from it.
    batch: int
    oldest_batch: int
    # Where the checkpoint was; for people.
    location: str = ""

    def encode(self) -> str:
        """As it stands in a commit record."""
        return msgspec.json.encode(self).decode()


def decode_picture(offsets: str) -> Picture | None:
    """What a commit's offsets say; None if the commit is no picture.

    Raises:
        UnknownFormatError: A newer tidemark made it.
        BatchLogError: It cannot be read, or its numbers make no sense.
    """
    try:
        kind = msgspec.json.decode(offsets, type=_Kind)
    except (*UNDECODABLE, UnicodeEncodeError):
        return None
    if kind.kind != KIND:
        return None
    if kind.format != FORMAT:
        raise UnknownFormatError(
            f"is of format {kind.format}", subject="picture of a checkpoint", hint="read it with a newer tidemark"
        )
    try:
        picture = msgspec.json.decode(offsets, type=Picture)
    except UNDECODABLE as error:
        raise BatchLogError(f"cannot be read: {error}", subject="picture of a checkpoint") from error
    if not 0 <= picture.oldest_batch <= picture.batch:
        raise BatchLogError(
            f"says batches {picture.oldest_batch} to {picture.batch}", subject="picture of a checkpoint"
        )
    return picture


class _Kind(msgspec.Struct):
    kind: str
    format: int = 0


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and (text == "0" or not text.startswith("0"))

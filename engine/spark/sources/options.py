"""The options of Spark's `read`, checked before anything is asked of a store."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal, get_args

import msgspec

from blobstore.s3.settings import S3Settings
from engine.errors import UsageError
from index.spark.checkpoint import StoreId

RowForm = Literal["typed", "bytes"]

_WHERE: Final = frozenset({"path", "checkpoint", "repository", "job"})
_WHICH: Final = frozenset({"operator", "partition", "store"})
_NUMBERS: Final = frozenset({"batch", "operator", "from_batch", "to_batch"})
# Of `blobstore.s3.settings.S3Settings`: `s3.endpoint_url`, `s3.path_style` and so on.
_S3: Final = "s3."
# What Spark's other file systems for S3 are called.
_HADOOP_S3: Final = re.compile(r"s3[an]://", re.IGNORECASE)


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one read."""

    # Exactly one of these two.
    checkpoint: str | None = None
    repository: str | None = None
    # Of the repository; None: the only one that has checkpoint backups.
    job: str | None = None
    # A committed one; None: the newest.
    batch: int | None = None
    from_batch: int | None = None
    to_batch: int | None = None
    # None: all of them.
    operator: int | None = None
    partitions: tuple[int, ...] = ()
    store: str | None = None
    # None: typed where one table fits all that is read, else bytes.
    rows: RowForm | None = None
    # How the store is reached; its credentials each process finds by itself.
    s3: S3Settings = S3Settings()

    @classmethod
    def parse(cls, options: Mapping[str, str], *, source: str, also: frozenset[str]) -> "SourceOptions":
        """Check options as Spark gives them, of any case.

        Args:
            options: All of them.
            source: What errors call the reader.
            also: What this reader takes beside where to read.

        Raises:
            UsageError: One is unknown, cannot be read, or they contradict each other.
        """
        said = {name.lower(): value for name, value in options.items()}
        s3 = {name: said.pop(f"{_S3}{name}") for name in S3Settings.__struct_fields__ if f"{_S3}{name}" in said}
        known = _WHERE | also
        for name in said:
            if name not in known:
                raise _refused(source, name, f"is not an option; there are {', '.join(sorted(known - {'path'}))}")
        values: dict[str, object] = {name: _value(source, name, text) for name, text in said.items()}
        path = values.pop("path", None)
        if path is not None:
            if "checkpoint" in values:
                raise _refused(source, "checkpoint", "is given, and a path too")
            values["checkpoint"] = path
        if ("checkpoint" in values) == ("repository" in values):
            raise _refused(source, "checkpoint", "or repository has to be given, and not both")
        if "job" in values and "repository" not in values:
            raise _refused(source, "job", "goes with a repository")
        try:
            values["s3"] = msgspec.convert(s3, S3Settings, strict=False)
        except msgspec.ValidationError as error:
            raise _refused(source, f"{_S3}*", f"cannot be: {error}") from None
        partitions = str(values.pop("partition", ""))
        if partitions:
            values["partitions"] = tuple(int(_number(source, "partition", each)) for each in partitions.split(","))
        return msgspec.convert(values, cls)

    def chooses(self, of: StoreId) -> bool:
        is_of = self.operator in {None, of.operator} and self.store in {None, of.store}
        return is_of and (not self.partitions or of.partition in self.partitions)

    @property
    def chooses_stores(self) -> bool:
        return self.operator is not None or self.store is not None or bool(self.partitions)


STATE_OPTIONS: Final = _WHICH | {"batch", "rows"}
FILES_OPTIONS: Final = _WHICH | {"batch"}
DIFF_OPTIONS: Final = _WHICH | {"from_batch", "to_batch", "rows"}


@contextlib.contextmanager
def noting_hints() -> Iterator[None]:
    """Add the hint of an error to its notes: of what a worker raises Spark shows the traceback alone."""
    try:
        yield
    except Exception as error:
        hint = getattr(error, "hint", "")
        if hint:
            error.add_note(f"hint: {hint}")
        raise


def _value(source: str, name: str, text: str) -> str | int:
    if name in _NUMBERS:
        return _number(source, name, text)
    if name == "rows" and text not in get_args(RowForm):
        raise _refused(source, name, f"is {text!r}, and has to be one of {', '.join(get_args(RowForm))}")
    return _HADOOP_S3.sub("s3://", text) if name in {"path", "checkpoint"} else text


def _number(source: str, name: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal()):
        raise _refused(source, name, f"is {text!r}, and has to be a number")
    return int(text)


def _refused(source: str, name: str, reason: str) -> UsageError:
    return UsageError(reason, operation=source, subject=name, hint="see docs/how-to/spark.md on reading state")

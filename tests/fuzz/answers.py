"""Targets for what a server answers, and for words that people and files say."""

import functools
from collections.abc import Callable
from typing import Any, Final

import botocore.parsers
import botocore.session

from blobstore.errors import StoreError
from blobstore.s3.bucket_rules import backstop_rules, plan_lifecycle, threats
from blobstore.s3.client import _failure, read_time
from blobstore.s3.errors import BrokenError, answers, read_promised_bytes, read_ttl_ms
from blobstore.s3.store import S3Store
from engine.cli import config, notify
from engine.errors import UsageError
from engine.inspect.browse import KeyPlace, escape_bytes, parse_bytes, parse_place, write_place
from engine.metrics import exposition
from engine.metrics.names import Samples
from engine.text import Moment, parse_duration_ms, parse_moment, parse_share, parse_size_bytes
from index.display import printable
from tests.fuzz.target import Target, check_refusal

_NOW_MS: Final = 1_800_000_000_000
_RANGE_BYTES: Final = 100
_WORDS: Final[tuple[Callable[[str], Any], ...]] = (
    parse_duration_ms,
    parse_moment,
    parse_size_bytes,
    parse_share,
    config.parse_store,
    config.parse_target,
    config.parse_version,
    config.parse_commit,
    notify.parse_hook,
    parse_bytes,
    parse_place,
)
# Answers that are XML, by the name that the SDK has for what is asked.
_ASKED: Final = ("ListObjectsV2", "ListMultipartUploads", "GetBucketLifecycleConfiguration", "DeleteObjects")


def run_words(data: bytes) -> None:
    """What is on a command line or in a settings file."""
    text = data.decode("utf-8", "surrogateescape")
    for parse in _WORDS:
        try:
            found = parse(text)
        except UsageError as error:
            check_refusal(error)
            continue
        if isinstance(found, Moment):
            found.resolve_ms(_NOW_MS)
        elif isinstance(found, bytes):
            assert parse_bytes(escape_bytes(found)) == found
        elif isinstance(found, KeyPlace):
            assert parse_place(write_place(found)) == found
    assert printable(text).isprintable()


def run_headers(data: bytes) -> None:
    """A line each for the range, the TTL and a time."""
    range_, _, rest = data.decode("utf-8", "surrogateescape").partition("\n")
    ttl, _, time = rest.partition("\n")
    answer = {"ContentRange": range_, "ContentLength": _RANGE_BYTES, "Metadata": {"tidemark-ttl-ms": ttl}}
    ttl_ms = read_ttl_ms(answer)
    assert ttl_ms is None or ttl_ms >= 0
    try:
        assert read_promised_bytes(answer, 7, _RANGE_BYTES, key="k") == _RANGE_BYTES
    except StoreError as error:
        check_refusal(error)
    read_time(time)


@functools.cache
def _sdk() -> tuple[Any, Any]:
    factory = botocore.parsers.ResponseParserFactory()
    factory.set_parser_defaults(timestamp_parser=read_time)
    model = botocore.session.get_session().get_service_model("s3")
    return factory.create_parser("rest-xml"), model


def run_xml(data: bytes) -> None:
    """The first byte has what was asked, the rest is the body: the SDK parses it, and we read what it made of it."""
    asked = _ASKED[data[0] % len(_ASKED)] if data else _ASKED[0]
    parser, model = _sdk()
    shape = model.operation_model(asked).output_shape
    try:
        answer = parser.parse({"status_code": 200, "headers": {}, "body": data[1:]}, shape)
    except Exception as error:
        if isinstance(_failure(error), BrokenError):
            return
        raise
    store = S3Store("bucket", "prefix")
    with answers("list_page", "blobs/"):
        if asked == "ListObjectsV2":
            for blob in store._page(answer, "blobs/", "", 1000).blobs:
                assert blob.key.startswith("blobs/")
        elif asked == "ListMultipartUploads":
            store._unfinished(answer)
        elif asked == "GetBucketLifecycleConfiguration":
            _look_at_rules(tuple(answer.get("Rules", ())))


def _look_at_rules(rules: tuple[Any, ...]) -> None:
    threats(rules, "prefix", days_min=7)
    plan_lifecycle(rules, backstop_rules("prefix", days=7), prefix="prefix")


def run_prometheus(data: bytes) -> None:
    """A file of figures, which the next run goes on from: what is written of it is what was read."""
    samples = Samples()
    samples.update(exposition.parse(data.decode()))
    shown = tuple(samples)
    # By their texts: NaN is equal to nothing.
    assert str(exposition.parse(exposition.expose(shown).decode())) == str(shown)


TARGETS: Final = (
    Target(name="words", run=run_words, covers=_WORDS, bytes_max=256),
    Target(
        name="headers",
        run=run_headers,
        covers=(read_promised_bytes, read_ttl_ms, read_time),
        refuses=(ValueError,),
        bytes_max=256,
    ),
    Target(name="prometheus", run=run_prometheus, covers=(exposition.parse,), refuses=(ValueError,), bytes_max=1024),
    Target(name="xml", run=run_xml, covers=(S3Store._page, S3Store._unfinished)),
)

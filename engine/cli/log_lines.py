"""What a run says while it works: a line for people, or with `--log-format json` one JSON object on stderr."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import click
import msgspec

from engine.cli.views import SCHEMA
from engine.clock import SystemRuntime
from index.text import iso_time, printable

Level = Literal["info", "warning", "error"]
LogFormat = Literal["text", "json"]

TEXT: Final = "text"
JSON: Final = "json"


class LogLineView(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a structured log, of schema 1."""

    schema: int = SCHEMA
    # By this machine's clock; ISO 8601, UTC.
    time: str
    level: Level
    verb: str
    message: str
    # The numbers in the message, or an error as `--json` tells it.
    fields: Mapping[str, Any] = {}


def log(level: Level, verb: str, message: str, fields: Mapping[str, Any] | None = None) -> None:
    """Write one line of a structured log."""
    line = LogLineView(
        time=iso_time(SystemRuntime().local_now_ms()),
        level=level,
        verb=verb,
        message=printable(message),
        fields=fields or {},
    )
    click.echo(msgspec.json.encode(line), err=True)

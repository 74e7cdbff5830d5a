"""The session that a verb starts by itself."""

import os
import sys
from types import SimpleNamespace
from typing import Any, Self

import pytest
from pyspark.errors import PySparkException

from engine.cli.errors import describe, trace_of
from engine.errors import UsageError
from engine.spark import session as sessions
from engine.spark.session import open_session

LOG_SETTINGS = "LOG4J_CONFIGURATION_FILE"


class Builder:
    """Starts nothing."""

    def __init__(self, master: str) -> None:
        self.conf = {"spark.master": master}
        self.context = SimpleNamespace(master=master, pythonExec="python3")
        self.log_settings: str | None = None

    def appName(self, _: str) -> Self:  # noqa: N802
        return self

    def config(self, name: str, value: str) -> Self:
        self.conf[name] = value
        return self

    def getOrCreate(self) -> Any:  # noqa: N802
        self.log_settings = os.environ.get(LOG_SETTINGS)
        return SimpleNamespace(sparkContext=self.context, conf=self.conf, stop=lambda: None)


@pytest.fixture(autouse=True)
def nobody_has_said_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYSPARK_PYTHON", "SPARK_CONF_DIR", "SPARK_HOME", "SPARK_REMOTE", LOG_SETTINGS):
        monkeypatch.delenv(name, raising=False)


def started(monkeypatch: pytest.MonkeyPatch, master: str) -> Builder:
    builder = Builder(master)
    fake = SimpleNamespace(builder=builder, getActiveSession=lambda: None)
    monkeypatch.setattr(sessions, "SparkSession", fake)
    with open_session():
        return builder


def test_workers_of_this_machine_are_this_python_unless_another_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, "local[2]").context.pythonExec == sys.executable
    assert started(monkeypatch, "spark://elsewhere:7077").context.pythonExec == "python3"
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/another/python")
    assert started(monkeypatch, "local[*]").context.pythonExec == "python3"


def test_the_terminal_is_left_to_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = started(monkeypatch, "local[2]")
    assert builder.conf["spark.ui.showConsoleProgress"] == "false"
    assert builder.log_settings is not None
    assert builder.log_settings.endswith("log4j2.properties")
    assert LOG_SETTINGS not in os.environ
    monkeypatch.setenv(LOG_SETTINGS, "mine.properties")
    assert started(monkeypatch, "local[2]").log_settings == "mine.properties"


def refusal(monkeypatch: pytest.MonkeyPatch, url: str) -> UsageError:
    monkeypatch.setenv("SPARK_REMOTE", url)
    monkeypatch.setattr(sessions, "CONNECT_S_MAX", 0.2)
    # Other tests of this process may have one.
    monkeypatch.setattr(sessions.SparkSession, "getActiveSession", lambda: None)
    with pytest.raises(UsageError, match="there is no session of Spark Connect") as shown, open_session():
        pass
    return shown.value


def everything_said(error: UsageError) -> str:
    """What the command line says of it, in text and as JSON, and what `--debug` adds."""
    return f"{error!r}\n{describe(error, 'collect')}\n{trace_of(error)}"


def test_a_server_that_does_not_answer_is_reported_soon_and_without_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(monkeypatch, "sc://127.0.0.1:1/;token=song-of-a-canary")
    assert "no answer in 0.2 s" in str(error)
    assert "sc://127.0.0.1:1" in str(error)
    assert error.hint == "see whether the server runs, or unset SPARK_REMOTE"
    assert "canary" not in everything_said(error)


@pytest.mark.parametrize(
    "url",
    [
        "sc://127.0.0.1/;token=Y2FuYXJ5canary==",
        "sc://127.0.0.1/;token=a=canary",
        "sc://127.0.0.1/;canary",
        "sc://127.0.0.1/;user_id=me;token=canary=",
        "sc://127.0.0.1/canary",
        "sc://127.0.0.1:1;token=canary",
        "sc://127.0.0.1:1:2/;token=canary",
        "sc://canary@127.0.0.1/;token=canary=",
        "sc:///;token=canary",
        "sc:127.0.0.1;token=canary",
        "sc://127.0.0.1\N{ACCOUNT OF};token=canary",
    ],
)
def test_a_url_that_is_none_is_refused_without_its_token(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    error = refusal(monkeypatch, url)
    assert "INVALID_CONNECT_URL" in str(error)
    assert "%3D" in error.hint
    assert "canary" not in everything_said(error)
    assert (error.__cause__, error.__context__) == (None, None)


def test_what_a_server_says_is_reported_where_no_token_can_be_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise PySparkException("UNAUTHENTICATED: Bearer canary")

    monkeypatch.setattr(sessions, "_wait_for_server", refuse)
    assert "UNAUTHENTICATED" in str(refusal(monkeypatch, "sc://127.0.0.1"))
    assert "canary" not in everything_said(refusal(monkeypatch, "sc://127.0.0.1/;token=canary"))

import importlib
import pkgutil
import signal
from collections.abc import Iterator

import click
import pytest

import blobstore
import engine
import index
from blobstore.errors import InvalidRequestError, StoreError, StoreUnavailableError
from engine.cli.app import tidemark
from engine.cli.errors import describe
from engine.cli.options import Verbs
from engine.cli.run import CODES, MEANINGS, ExitCode, choose_exit_code
from engine.errors import CommitUnknownError, DamagedError, EngineError, TargetError, UsageError
from tidemark import TidemarkError


def _load_everything() -> None:
    """An error class that nobody has imported yet has no place in the tree."""
    for package in (index, blobstore, engine):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith("engine.spark"):
                importlib.import_module(module.name)


def _tree(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)


_load_everything()
ALL_KINDS = {
    kind
    for kind in _tree(TidemarkError)
    # Verbs load it only when they are asked to.
    if not kind.__module__.startswith(("engine.spark", "tests"))
}
KINDS = sorted((kind for kind in ALL_KINDS if not kind.__name__.startswith("_")), key=lambda kind: kind.__name__)
PRIVATE_KINDS = sorted(ALL_KINDS - set(KINDS), key=lambda kind: kind.__name__)


def _made(kind: type[Exception]) -> Exception:
    if issubclass(kind, StoreError | EngineError):
        return kind("went wrong", operation="test")
    return kind("went wrong")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_has_an_exit_code_of_its_own_choice(kind: type[Exception]) -> None:
    assert kind.__name__ in CODES, f"decide what a caller does about {kind.__name__}, and add it to CODES"
    assert choose_exit_code(_made(kind)) is CODES[kind.__name__]
    assert CODES[kind.__name__] not in {ExitCode.OK, ExitCode.PARTIAL, ExitCode.INTERRUPTED}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_reported_with_a_hint(kind: type[Exception]) -> None:
    failure = describe(_made(kind), "backup")
    assert failure.error == kind.__name__
    assert failure.hint
    assert "went wrong" in failure.message


@pytest.mark.parametrize("kind", PRIVATE_KINDS, ids=lambda kind: kind.__name__)
def test_a_private_error_is_reported_as_the_public_one_above_it(kind: type[Exception]) -> None:
    failure = describe(_made(kind), "backup")
    assert failure.error in {public.__name__ for public in KINDS}
    assert failure.code == CODES[kind.__mro__[1].__name__]


def test_codes_name_no_class_that_is_gone() -> None:
    assert set(CODES) == {kind.__name__ for kind in KINDS}


def test_every_exit_code_is_explained() -> None:
    assert set(MEANINGS) == set(ExitCode) - {ExitCode.TERMINATED, ExitCode.HUNG_UP}


@pytest.mark.parametrize(
    "error, code",
    [
        (KeyboardInterrupt(), 130),
        (PermissionError(13, "Permission denied", "/x"), 8),
        (OSError(5, "Input/output error", "/x"), 1),
        (ZeroDivisionError("by zero"), 1),
    ],
)
def test_other_errors_have_a_code_and_a_hint_too(error: BaseException, code: int) -> None:
    failure = describe(error, "backup")
    assert (failure.code, failure.operation) == (code, "backup")
    assert failure.hint


@pytest.mark.parametrize("verb", ["backup", "spark check", "spark cutover"])
def test_an_interrupt_that_left_something_does_not_say_that_it_left_nothing(verb: str) -> None:
    interrupt = KeyboardInterrupt()
    assert "all that is half done" not in describe(interrupt, verb).hint
    interrupt.add_note("the source is closed")
    failure = describe(interrupt, verb)
    assert failure.causes == ("the source is closed",)
    assert failure.hint == "what is said above is all that is half done; repeat it"


def test_a_run_that_is_interrupted_while_its_verb_loads_ends_as_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(_self: Verbs, _name: str) -> click.Command:
        raise KeyboardInterrupt(signal.SIGTERM)

    monkeypatch.setattr(Verbs, "__getitem__", load)
    assert tidemark.main(["backup", "state"], standalone_mode=False) == ExitCode.TERMINATED
    assert "error: interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("operation, code", [("open", 2), ("connect", 2), ("sign", 2), ("put", 1), ("get", 1)])
def test_what_does_not_lead_to_a_store_is_the_callers_setting(operation: str, code: int) -> None:
    failure = describe(InvalidRequestError("no", operation=operation), "backup")
    assert failure.code == code
    assert ("fault of tidemark" in failure.hint) is (code == 1)
    hinted = describe(InvalidRequestError("no", operation=operation, hint="do this"), "backup")
    assert hinted.hint == "do this"


def test_the_first_error_of_nested_groups_decides() -> None:
    error = ExceptionGroup(
        "outer", [ExceptionGroup("inner", [StoreUnavailableError("gone", operation="get", key="k")])]
    )
    failure = describe(error, "restore")
    assert (failure.error, failure.code, failure.subject, failure.operation) == ("StoreUnavailableError", 5, "k", "get")


def test_a_subclass_that_nobody_listed_has_the_code_of_its_parent() -> None:
    class ForeignError(DamagedError):
        pass

    kind = ForeignError
    try:
        assert choose_exit_code(kind("x", operation="test")) is ExitCode.DAMAGED
    finally:
        # Other tests walk the subclasses.
        del ForeignError, kind


def test_of_a_cause_with_a_traceback_in_it_one_line_is_reported() -> None:
    error = EngineError("a task failed", operation="collect")
    error.__cause__ = RuntimeError('the Python worker failed:\nTraceback (most recent call last):\n  File "a.py"\n')
    assert describe(error, "collect").causes == ("RuntimeError: the Python worker failed:",)


def test_causes_and_notes_are_reported_nearest_first() -> None:
    error = DamagedError("cannot read it", operation="restore", subject="a")
    error.__cause__ = StoreUnavailableError("timed out", operation="get", key="b")
    error.__cause__.__cause__ = OSError("broken pipe")
    error.add_note("while reading index c")
    assert describe(error, "restore").causes == (
        "while reading index c",
        "StoreUnavailableError: get b: timed out",
        "OSError: broken pipe",
    )


@pytest.mark.parametrize(
    "error, hint",
    [
        (UsageError("no", operation="x"), "see `tidemark backup --help`"),
        (TargetError("no", operation="x"), "choose a target that is absent, or say --replace"),
        (
            CommitUnknownError("no", operation="x"),
            "run the same command again: it finds out what happened; delete nothing",
        ),
        (UsageError("no", operation="x", hint="do this"), "do this"),
    ],
)
def test_hints_speak_of_the_command_line(error: Exception, hint: str) -> None:
    assert describe(error, "backup").hint == hint

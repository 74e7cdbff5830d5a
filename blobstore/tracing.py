"""Give spans to OpenTelemetry where its API is installed, and do nothing elsewhere. The only importer of the API.

A program that wants spans configures the SDK by itself (docs/how-to/monitoring.md); without an SDK the API drops them.
"""

import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

try:
    from opentelemetry import context as contexts
    from opentelemetry import propagate, trace
except ImportError:  # `opentelemetry` is a namespace: other distributions bring it without the API.
    _imported = False
else:
    _imported = True
IS_INSTALLED: Final = _imported

P = ParamSpec("P")
R = TypeVar("R")
Attribute: TypeAlias = str | int | float | bool
_Traced: TypeAlias = Callable[P, Coroutine[Any, Any, R]]


@contextlib.contextmanager
def span(name: str, *, is_request: bool = False, **attributes: Attribute) -> Iterator[None]:
    """Run a block within a span, which an exception marks as failed by its class and message.

    Args:
        name: What is done, such as `backup`; the span is called `tidemark.backup`.
        is_request: It is one request to a store.
        attributes: Each gets the prefix `tidemark.`; an empty text is left out.
    """
    if not IS_INSTALLED:
        yield
        return
    kind = trace.SpanKind.CLIENT if is_request else trace.SpanKind.INTERNAL
    named = {f"tidemark.{key}": value for key, value in attributes.items() if value != ""}
    # No events: they would carry stack traces.
    with trace.get_tracer("tidemark").start_as_current_span(
        f"tidemark.{name}", kind=kind, attributes=named, record_exception=False, set_status_on_exception=False
    ) as opened:
        try:
            yield
        except Exception as error:
            opened.set_attribute("error.type", type(error).__name__)
            opened.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
            raise


def annotate(**attributes: Attribute) -> None:
    """Add attributes, as of `span`, to the span that this is within."""
    if IS_INSTALLED:
        trace.get_current_span().set_attributes({f"tidemark.{key}": value for key, value in attributes.items()})


def traced(name: str) -> Callable[[_Traced[P, R]], _Traced[P, R]]:
    """Run each call of an asynchronous function within a span of this name."""

    def wrap(function: _Traced[P, R]) -> _Traced[P, R]:
        if not IS_INSTALLED:
            return function

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                return await function(*args, **kwargs)

        return call

    return wrap


def outgoing() -> dict[str, str]:
    """Return the context of this moment as headers (W3C Trace Context), for work in other processes; else nothing."""
    headers: dict[str, str] = {}
    if IS_INSTALLED:
        propagate.inject(headers)
    return headers


@contextlib.contextmanager
def incoming(headers: Mapping[str, str]) -> Iterator[None]:
    """Run a block within the context that another process has sent; within that of now if it says none."""
    if not IS_INSTALLED or not headers:
        yield
        return
    token = contexts.attach(propagate.extract(dict(headers), contexts.get_current()))
    try:
        yield
    finally:
        contexts.detach(token)

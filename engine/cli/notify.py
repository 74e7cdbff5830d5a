"""Send how a run ended to a URL: `--on-success` and `--on-failure`, for healthchecks and webhooks.

Such a URL is a credential: anyone who has it can send. It is shown without its path.
"""

import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import msgspec
from typing_extensions import override

from engine.cli.output import SCHEMA
from engine.errors import UsageError

# The run is over, and its caller waits.
TIMEOUT_S: Final = 10


class Hook(msgspec.Struct, frozen=True):
    """A URL that takes a POST."""

    url: str

    @override
    def __repr__(self) -> str:
        place = urlsplit(self.url)
        return f"{place.scheme}://{place.netloc}/***"

    __str__ = __repr__


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent of a run: an error as `--json` shows it, and one line of it all, which chat servers show."""

    schema: int = SCHEMA
    verb: str
    job: str
    code: int
    error: str = ""
    message: str = ""
    hint: str = ""
    repository: str = ""
    ended_at_ms: int
    text: str


def parse_hook(text: str) -> Hook:
    """Parse a URL; `UsageError`, which does not repeat it, if nothing can be sent there."""
    try:
        place = urlsplit(text)
        is_right = (
            place.scheme in {"http", "https"} and bool(place.hostname) and place.port != 0 and "@" not in place.netloc
        )
    except ValueError:
        is_right = False
    if not is_right or not text.isprintable() or " " in text:
        raise UsageError("is not a URL of a web server", operation="read", hint="write https://host/path")
    return Hook(text)


def send(hook: Hook, notice: Notice, warn: Callable[[str], None]) -> None:
    """Send a notice; if that fails it is a warning, and changes nothing of the run."""
    answers: list[str] = []
    # A server that answers drop by drop would hold the caller past each timeout of its own.
    sending = threading.Thread(target=lambda: answers.append(_post(hook, notice)), name="tidemark hook", daemon=True)
    sending.start()
    sending.join(TIMEOUT_S)
    if reason := answers[0] if answers else f"no answer within {TIMEOUT_S} s":
        warn(f"{hook} was not informed of how the run ended: {reason}")


def _post(hook: Hook, notice: Notice) -> str:
    """Return what went wrong; empty if nothing did."""
    headers = {"Content-Type": "application/json", "User-Agent": "tidemark"}
    request = urllib.request.Request(hook.url, msgspec.json.encode(notice), headers)  # noqa: S310  (parse_hook)
    try:
        # Longer than the caller waits, who says so: two ends at the same moment would have two messages.
        with _OPENER.open(request, timeout=2 * TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"it answered {error.code}"
    # An address that no host can have is a ValueError.
    except (OSError, http.client.HTTPException, ValueError) as error:
        return type(getattr(error, "reason", None) or error).__name__


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a POST would become a GET, of another place."""

    @override
    def redirect_request(self, *_: object) -> None:
        return None


_OPENER: Final = urllib.request.build_opener(_Stay)

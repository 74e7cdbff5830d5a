"""A request on its way, and what its client hears where it goes wrong (design 0007, S3)."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import msgspec

from tests.simulation.faults.request_faults import Fault, Request
from tests.simulation.model.virtual_loop import VirtualLoop

# Silence for so long ends a request, as `S3Settings.read_timeout_s` says.
_SILENCE_S: Final = 30.0
FOR_EVER_S: Final = float("inf")
# What a server says that does not carry out a request.
REFUSALS: Final = {
    Fault.ERROR_500: (500, "InternalError"),
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.CONFLICT: (HTTPStatus.CONFLICT, "ConditionalRequestConflict"),
    Fault.CUT: (400, "IncompleteBody"),
    Fault.FLIPPED: (400, "XAmzContentSHA256Mismatch"),
}

# Not carried out at first, and answered after so long, if ever.
UNHEARD: Final = {Fault.HANG: _SILENCE_S, Fault.LATE: _SILENCE_S, Fault.ADRIFT: _SILENCE_S, Fault.NEVER: FOR_EVER_S}
# Carried out, and not answered with what came of it.
UNTOLD: Final = {Fault.HANG_DONE: _SILENCE_S, Fault.NEVER_DONE: FOR_EVER_S}


class Pending(msgspec.Struct, eq=False):
    """A request on its way."""

    request: Request
    carry_out: Callable[[int], object]
    damage: Callable[[object, Fault], object] | None
    answer: asyncio.Future[object]
    loop: VirtualLoop

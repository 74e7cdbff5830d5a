"""Rehearsing a restore: how long it takes, what bound it, and what it would take elsewhere (design 0009)."""

from engine.rehearsal.forecast import Forecast, forecast
from engine.rehearsal.history import History, append, read_history
from engine.rehearsal.model import Bound, FailedRehearsal, Rehearsal
from engine.rehearsal.run import rehearse
from engine.rehearsal.verdict import Verdict, judge

__all__ = [
    "Bound",
    "FailedRehearsal",
    "Forecast",
    "History",
    "Rehearsal",
    "Verdict",
    "append",
    "forecast",
    "judge",
    "read_history",
    "rehearse",
]

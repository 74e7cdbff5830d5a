"""The restore drill: how long a restore takes, and how long it would take elsewhere (design 0009)."""

from engine.rehearsal.forecast import Forecast, forecast
from engine.rehearsal.history import History, append, read_history
from engine.rehearsal.model import FailedRehearsal, Rehearsal
from engine.rehearsal.run import rehearse

__all__ = ["FailedRehearsal", "Forecast", "History", "Rehearsal", "append", "forecast", "read_history", "rehearse"]

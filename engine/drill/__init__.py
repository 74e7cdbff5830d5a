"""The restore drill: how long a restore takes, and how long it would take elsewhere (design 0009)."""

from engine.drill.drill import rehearse
from engine.drill.forecast import Forecast, forecast
from engine.drill.history import History, append, read_history
from engine.drill.model import FailedRehearsal, Rehearsal

__all__ = ["FailedRehearsal", "Forecast", "History", "Rehearsal", "append", "forecast", "read_history", "rehearse"]

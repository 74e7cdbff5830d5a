"""The restore drill: how long a restore takes, and how long it would take elsewhere (design 0009)."""

from engine.drill.drill import DrillOptions, run_restore_drill
from engine.drill.record import DrillHistory, FailedDrill, Forecast, RestoreDrill, append, forecast, read_history

__all__ = [
    "DrillHistory",
    "DrillOptions",
    "FailedDrill",
    "Forecast",
    "RestoreDrill",
    "append",
    "forecast",
    "read_history",
    "run_restore_drill",
]

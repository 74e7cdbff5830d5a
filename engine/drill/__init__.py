"""The restore drill: how long a restore takes, and how long it would take elsewhere (design 0009)."""

from engine.drill.drill import (
    DrillHistory,
    DrillOptions,
    FailedDrill,
    Forecast,
    RestoreDrill,
    append,
    forecast,
    read_history,
    run_restore_drill,
)

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

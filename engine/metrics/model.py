"""A metric, and one value of it."""

from typing import Final, Literal

import msgspec

PREFIX: Final = "tidemark_"

Kind = Literal["counter", "gauge"]


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One fact that is told, under one name (Prometheus' rules: base units, `_total` at the end of a counter)."""

    name: str
    kind: Kind
    # One sentence; the names that others have for the fact follow it in what is exposed.
    help: str
    labels: tuple[str, ...] = ()
    # What Samza and Spark call it.
    samza: tuple[str, ...] = ()
    spark: tuple[str, ...] = ()

    @property
    def documentation(self) -> str:
        """The help with the names of others, so that who searches for those finds the metric."""
        others = [
            f"{whose}: {', '.join(names)}" for whose, names in (("Samza", self.samza), ("Spark", self.spark)) if names
        ]
        return f"{self.help} [{'; '.join(others)}]" if others else self.help


class Sample(msgspec.Struct, frozen=True, order=True):
    """One value. The values of the labels are in the order of the metric's."""

    name: str
    labels: tuple[str, ...]
    value: float

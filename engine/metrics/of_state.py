"""What a process that has state stores open tells of them."""

from engine.metrics.model import PREFIX, Sample
from engine.metrics.samples import Samples
from engine.metrics.state_names import LOAD_METRICS, SAVE_METRICS, UPLOADED
from engine.state.metrics import LoadMetrics, SaveMetrics


def state_samples(
    load: LoadMetrics | None,
    save: SaveMetrics | None,
    *,
    query: str = "",
    operator: int = 0,
    partition: int = 0,
    store: str = "default",
) -> tuple[Sample, ...]:
    """The last load and the last save of one state store, for `write_textfile` or an endpoint.

    Args:
        load: `StateStore.last_load`.
        save: `StateStore.last_save`.
        query: Whatever tells queries apart, such as a name.
        operator: Of the query, and so on.
        partition: See `operator`.
        store: See `operator`.
    """
    samples = Samples(query=query, operator=str(operator), partition=str(partition), store=store)
    for metrics, names in ((load, LOAD_METRICS), (save, SAVE_METRICS)):
        if metrics is not None:
            for field, metric in names.items():
                samples.add(metric.name.removeprefix(PREFIX), getattr(metrics, field))
    if save is not None and save.uploaded is not None:
        samples.add(UPLOADED.name.removeprefix(PREFIX), save.uploaded.version)
    return tuple(samples)

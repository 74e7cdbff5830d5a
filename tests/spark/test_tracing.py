"""The trace of the driver goes on in a real task."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pyarrow as pa
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pyspark.sql import SparkSession

from engine.spark.access import in_context


def trace_of_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from opentelemetry import trace  # noqa: PLC0415 - in the worker

    for _ in batches:
        found = trace.get_current_span().get_span_context().trace_id
        yield pa.RecordBatch.from_pydict({"trace": [f"{found:032x}"]})


def test_a_task_has_the_trace_of_its_driver(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.range(0, 2, 1, 2)
    with mock.patch.object(trace, "get_tracer", TracerProvider().get_tracer):
        with trace.get_tracer("test").start_as_current_span("job") as job:
            made = frame.mapInArrow(in_context(trace_of_task), "trace string")
        # The task is what carries it, wherever and whenever it runs.
        assert {row.trace for row in made.collect()} == {f"{job.get_span_context().trace_id:032x}"}
    assert in_context(trace_of_task) is trace_of_task

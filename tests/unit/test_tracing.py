"""Spans of use cases and of requests, with and without OpenTelemetry (blobstore/tracing.py)."""

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from blobstore import tracing
from blobstore.errors import StoreUnavailableError
from blobstore.memory import MemoryStore
from blobstore.wrappers.forwarding import MeteredStore
from engine.repository.repository import Repository, SyncRepository
from index.plan.commits import Retention
from index.snapshot.model import Scope
from tests.doubles import InterposedStore

ROOT = Path(__file__).resolve().parents[2]
SCOPE = Scope("job")


class Spans:
    """The spans that have ended."""

    def __init__(self, exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
        self.exporter, self.provider = exporter, provider

    def tree(self) -> dict[str, set[str]]:
        """Return the names of each span's direct children, by its name; those without a parent by an empty one."""
        ended = self.exporter.get_finished_spans()
        names = {span.context.span_id: span.name for span in ended if span.context is not None}
        tree: dict[str, set[str]] = {}
        for span in ended:
            parent = names[span.parent.span_id] if span.parent is not None else ""
            tree.setdefault(parent, set()).add(span.name)
        return tree

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def spans() -> Iterator[Spans]:
    """Spans are kept, by a provider that nobody else has: the one of a process can be set once."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with mock.patch.object(trace, "get_tracer", provider.get_tracer):
        yield Spans(exporter, provider)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    directory.mkdir()
    (directory / "000012.sst").write_bytes(b"sst" * 100_000)
    (directory / "CURRENT").write_text("MANIFEST-000005\n")
    return directory


def store_span(operation: str) -> str:
    return f"tidemark.store.{operation}"


async def test_each_use_case_is_a_span_and_each_request_one_within(spans: Spans, source: Path, tmp_path: Path) -> None:
    repository = await Repository.init(MeteredStore(MemoryStore()))
    spans.exporter.clear()
    result = await repository.backup(SCOPE, source)
    commit = await repository.commit(SCOPE, [result])
    await repository.restore(commit, tmp_path / "target")
    await repository.collect(Retention(keep_last=1))
    tree = spans.tree()
    assert tree[""] == {f"tidemark.{name}" for name in ("backup", "commit", "restore", "collect")}
    assert tree["tidemark.backup_store"] == {store_span("put_if_absent")}
    assert {store_span("put_if_absent"), store_span("list_page"), store_span("remove_ttl")} <= tree["tidemark.commit"]
    assert store_span("get") in tree["tidemark.restore_store"]
    assert "tidemark.restore_store" in tree["tidemark.restore"]
    assert store_span("list_page") in tree["tidemark.collect"]
    assert set(tree) == {"", *(f"tidemark.{n}" for n in ("backup", "backup_store", "commit", "collect", "restore"))} | {
        "tidemark.restore_store"
    }
    [stored] = spans.named("tidemark.backup_store")
    assert dict(stored.attributes or {}) == {
        "tidemark.job": "job",
        "tidemark.task": "0",
        "tidemark.store": "default",
        "tidemark.blobs": 1,
        "tidemark.bytes_planned": 300_000,
    }


async def test_a_request_says_what_it_is_about(spans: Spans) -> None:
    await MeteredStore(MemoryStore()).stat("blobs/key")
    [request] = spans.named(store_span("stat"))
    assert request.kind is SpanKind.CLIENT
    assert dict(request.attributes or {}) == {"tidemark.key": "blobs/key", "tidemark.keys_count": 1}
    assert request.status.status_code is StatusCode.UNSET


async def test_what_fails_says_how(spans: Spans) -> None:
    store = InterposedStore(MemoryStore())
    store.fail("stat", "key", StoreUnavailableError("slow down", operation="stat", key="key"))
    with pytest.raises(StoreUnavailableError):
        await MeteredStore(store).stat("key")
    [request] = spans.named(store_span("stat"))
    assert request.status.status_code is StatusCode.ERROR
    assert "slow down" in (request.status.description or "")
    assert (request.attributes or {})["error.type"] == "StoreUnavailableError"
    # Stack traces would show more than anybody has asked for.
    assert request.events == ()


def test_a_callers_span_is_the_parent_also_of_the_blocking_api(spans: Spans, source: Path, tmp_path: Path) -> None:
    with SyncRepository.init(f"file://{tmp_path}/repository") as repository:
        spans.exporter.clear()
        with trace.get_tracer("caller").start_as_current_span("nightly"):
            repository.backup(SCOPE, source)
    assert spans.tree()["nightly"] == {"tidemark.backup"}


def test_the_context_goes_to_another_process_and_comes_from_one(spans: Spans) -> None:
    assert tracing.outgoing() == {}
    with tracing.span("here"):
        headers = tracing.outgoing()
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", headers["traceparent"])
    with tracing.incoming(headers), tracing.span("there"):
        pass
    with tracing.incoming({"traceparent": "what somebody has typed"}), tracing.span("alone"):
        pass
    with tracing.span("caller"), tracing.incoming({"traceparent": ""}), tracing.span("within"):
        pass
    [caller], [within] = map(spans.named, ("tidemark.caller", "tidemark.within"))
    assert within.parent == caller.context
    [here], [there], [alone] = map(spans.named, ("tidemark.here", "tidemark.there", "tidemark.alone"))
    assert there.parent is not None
    assert here.context is not None
    assert (there.parent.span_id, there.parent.is_remote) == (here.context.span_id, True)
    assert alone.parent is None


def test_every_task_on_spark_goes_on_with_the_trace_of_its_driver() -> None:
    """`tests/spark/test_tracing.py` has a real one."""
    calls = [
        call
        for path in (ROOT / "engine" / "spark").rglob("*.py")
        for call in re.findall(r"\.mapInArrow\(\w+", path.read_text(encoding="utf-8"))
    ]
    assert len(calls) > 5
    assert set(calls) == {".mapInArrow(in_context"}


@pytest.mark.parametrize("is_namespace", [False, True], ids=["nothing of it", "only another part of its namespace"])
def test_without_the_library_all_goes_on(tmp_path: Path, source: Path, *, is_namespace: bool) -> None:
    script = f"""
        import sys
        from pathlib import Path
        from importlib.machinery import ModuleSpec
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name == "opentelemetry" and {is_namespace}:
                    return ModuleSpec(name, None, is_package=True)
                if name.split(".")[0] == "opentelemetry":
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Blocked())
        from tidemark import SyncRepository
        from blobstore import tracing
        from index.snapshot.model import Scope
        with SyncRepository.init("file://{tmp_path}/repository") as repository:
            result = repository.backup(Scope("job"), Path({str(source)!r}))
            commit = repository.commit(Scope("job"), [result])
            assert tracing.outgoing() == {{}}
            print(commit.pointer.number, "opentelemetry.trace" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("1 False\n", 0), done.stderr

"""Spans reach a collector that decodes the real protobuf; a dead one costs nothing."""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from asyncrl_runs import until
from prometheus_client import generate_latest
from pydantic import ValidationError
from trace_collector import Collector, collecting

from asyncrl.monitoring.config import TracingConfig
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics, new_registry
from asyncrl.monitoring.tracing import export, open_tracer
from asyncrl.monitoring.tracing.tracer import TraceIds, Tracer
from asyncrl.rollout.trajectory import SampleId

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "BATCH_SECONDS", 0.05)


class Traced:
    """A tracer of one process, and its metrics."""

    def __init__(self, collector: Collector, process: str = "generator-0", **settings: Any) -> None:
        registry = new_registry()
        metrics = GeneratorMetrics.register(registry, process)
        self.text = lambda: generate_latest(registry).decode()
        self.closing = ExitStack()
        values = {"enabled": True, "sample_rate": 1.0, "endpoint": collector.endpoint} | settings
        self.tracer: Tracer = open_tracer(
            TracingConfig(**values),
            self.closing,
            key="k",
            run="r",
            process=process,
            metrics=metrics,
            unix=lambda moment: 1000.0 + moment,
        )

    def counted(self, outcome: str) -> float:
        found = re.search(rf'asyncrl_trace_spans_total{{outcome="{outcome}".*}} (.+)', self.text())
        assert found is not None
        return float(found[1])


def test_a_trace_is_one_tree_although_its_processes_do_not_talk():
    with collecting() as collector:
        one, other = Traced(collector, "controller"), Traced(collector)
        sample = SampleId(7, 2)
        one.tracer.whole_group(7, 1.0, 9.0, {"asyncrl.step": 3}, failure="gave up")
        draw = ("draw", 1.5, {"asyncrl.generator": "generator-0"})
        one.tracer.whole_sample(sample, 1.0, 8.0, {}, (draw,))
        other.tracer.of_sample("generate", sample, 2.0, 4.0, {"asyncrl.tokens": 5})
        other.tracer.of_group("train", 7, 5.0, 6.25, {})
        one.closing.close()
        other.closing.close()
        spans = {span.name: span for span in collector.spans}
        assert set(spans) == {"group", "sample", "generate", "train"}
        assert {span.trace for span in spans.values()} == {TraceIds("k", 1).trace(7).to_bytes(16)}
        assert spans["group"].parent == b""
        assert spans["sample"].parent == spans["train"].parent == spans["group"].id
        assert spans["generate"].parent == spans["sample"].id
        assert len({span.id for span in spans.values()}) == 4
        assert spans["group"].failure == "gave up"
        assert (spans["train"].start, spans["train"].end) == (1005.0, 1006.25)
        assert spans["sample"].events == [("draw", 1001.5, {"asyncrl.generator": "generator-0"})]
        assert spans["generate"].attributes == {
            "asyncrl.group": 7,
            "asyncrl.sample": 2,
            "asyncrl.tokens": 5,
        }
        assert (spans["group"].process, spans["generate"].process) == ("controller", "generator-0")
        assert (one.counted("sent"), other.counted("sent")) == (2, 2)


def test_groups_are_chosen_by_rate_and_all_processes_choose_the_same():
    here, there = TraceIds("k", 0.1), TraceIds("k", 0.1)
    chosen = [group for group in range(5000) if here.is_traced(group)]
    assert chosen == [group for group in range(5000) if there.is_traced(group)]
    assert 400 < len(chosen) < 600, "a hash that is no hash"
    assert chosen != [group for group in range(5000) if TraceIds("other", 0.1).is_traced(group)]
    more = TraceIds("k", 0.5)
    assert all(more.is_traced(group) for group in chosen), "a higher rate adds groups"
    assert all(TraceIds("k", 1.0).is_traced(group) for group in range(100))


def test_a_dead_collector_costs_spans_which_are_counted(caplog, monkeypatch):
    monkeypatch.setattr(export, "EXPORT_SECONDS", 1.5)
    with collecting() as collector:
        traced = Traced(collector)
        collector.kill()
        caplog.set_level(logging.INFO, "asyncrl.tracing")
        for _ in range(2):
            traced.tracer.of_group("train", 1, 1.0, 2.0, {})
            wanted = traced.counted("dropped") + 1
            until(lambda w=wanted: traced.counted("dropped") == w, seconds=60, what="a drop")
        traced.closing.close()
    assert traced.counted("sent") == 0
    (said,) = [one.getMessage() for one in caplog.records if one.name == "asyncrl.tracing"]
    assert "does not accept traces" in said
    assert "refused" in said


def test_a_collector_that_hangs_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(export, "CLOSE_SECONDS", 0.2)
    with collecting() as collector:
        collector.hold()
        traced = Traced(collector, queue_spans=10)
        traced.tracer.of_group("first", 1, 1.0, 2.0, {})
        until(lambda: collector.requests, seconds=60, what="a request")
        for _ in range(25):
            traced.tracer.of_group("train", 1, 1.0, 2.0, {})
        assert traced.counted("dropped") == 15, "the queue is bounded"
        traced.closing.close()  # returns although the request is still held
        assert collector.spans == []
        collector.release()


def test_what_a_collector_refuses_is_dropped_and_later_spans_go_out(caplog):
    with collecting() as collector:
        collector.answer = 400
        traced = Traced(collector)
        traced.tracer.of_group("lost", 1, 1.0, 2.0, {})
        until(lambda: traced.counted("dropped"), seconds=60, what="a drop")
        collector.answer = 200
        traced.tracer.of_group("train", 1, 1.0, 2.0, {})
        until(lambda: traced.counted("sent"), seconds=60, what="a span")
        traced.closing.close()
        assert [span.name for span in collector.spans] == ["train"]


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("collector:4318", "not a URL of http"),
        ("http://me:secret@collector:4318", "OTEL_EXPORTER_OTLP_HEADERS"),
    ],
)
def test_endpoints_that_cannot_be_are_refused(endpoint, why):
    with pytest.raises(ValidationError, match=why):
        TracingConfig(endpoint=endpoint)


def test_where_spans_are_posted():
    assert TracingConfig(endpoint="http://c:1/").traces_url == "http://c:1/v1/traces"
    assert TracingConfig(endpoint="https://c/own/path").traces_url == "https://c/own/path"


def test_the_sdk_is_imported_by_one_module_and_that_only_when_tracing_is_on():
    sources = {
        str(path.relative_to(ROOT)): path.read_text()
        for package in ("asyncrl", "engine", "trainer", "monitoring", "wire", "scheduler")
        for path in (ROOT / package).rglob("*.py")
    }

    def importers(module: str, indent: str) -> set[str]:
        form = re.compile(rf"^{indent}(from|import) {re.escape(module)}\b", re.MULTILINE)
        return {name for name, text in sources.items() if form.search(text)}

    assert importers("opentelemetry", " *") == {"monitoring/tracing/export.py"}
    assert importers("asyncrl.monitoring.tracing.export", " *") == {
        "monitoring/tracing/__init__.py"
    }
    assert importers("asyncrl.monitoring.tracing.export", "") == set(), "not at the top of a module"

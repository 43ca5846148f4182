import re

from prometheus_client import generate_latest

from asyncrl.monitoring.metrics.metrics import TrainerMetrics, new_registry
from asyncrl.monitoring.records.spans import ENOUGH, Phases, Span


def test_pieces_of_one_phase_are_joined_and_others_end_it():
    phases = Phases()
    waiting = {"for": "more groups", "step": 3}
    assert phases.add(Span("waiting", 0.0, 1.0, waiting)) is None
    assert phases.add(Span("waiting", 1.0, 2.0, waiting)) is None
    assert phases.present.seconds == 2.0
    ended = phases.add(Span("waiting", 2.0, 2.5, {"for": "last group", "step": 3}))
    assert (ended.kind, ended.seconds) == ("waiting", 2.0)
    assert phases.add(Span("training", 4.0, 5.0)).seconds == 0.5
    assert phases.usual("waiting") is None, "two are not enough"


def test_the_usual_length_is_a_median():
    phases = Phases()
    for number, seconds in enumerate((1.0, 2.0, 3.0, 4.0, 500.0)):
        assert phases.usual("saving") is None
        phases.add(Span("saving", 1000.0 * number, 1000.0 * number + seconds))
    phases.add(Span("training", 9000.0, 9001.0))
    assert phases.usual("saving") == 3.0


def test_a_phase_that_does_not_end_grows_past_its_median():
    registry = new_registry()
    metrics = TrainerMetrics.register(registry, "trainer")
    for step in range(ENOUGH):
        metrics.observe_span(Span("saving", 10.0 * step, 10.0 * step + 2.0, {"version": step}))
        metrics.observe_span(Span("training", 10.0 * step + 2.0, 10.0 * step + 10.0))
    for second in range(30):
        metrics.observe_span(Span("saving", 100.0 + second, 101.0 + second, {"version": 9}))
    text = generate_latest(registry).decode()
    saving = re.compile(r'^(\S+)\{kind="saving",process="trainer"\} (\S+)$', re.MULTILINE)
    values = dict(saving.findall(text))
    assert float(values["asyncrl_phase_seconds"]) == 30.0
    assert float(values["asyncrl_phase_median_seconds"]) == 2.0
    assert 'asyncrl_phase_seconds{kind="training",process="trainer"} 0.0' in text

import json
import threading
from contextlib import closing

import pytest
from fake_clock import FakeClock

from asyncrl.monitoring.records.spans import Span, read_spans, read_timelines
from asyncrl.monitoring.records.timeline import Clock, Timeline


@pytest.fixture
def fake():
    return FakeClock()


def test_spans_are_on_wall_time_and_equal_ones_become_one(tmp_path, fake):
    path = tmp_path / "timeline" / "trainer.jsonl"
    with closing(Timeline(path, "trainer", clock=fake.clock(1000.0), flush_seconds=60)) as line:
        for step in (1, 1, 1, 2):
            with line.span("training", step=step):
                fake.now += 2.0
        with line.waiting("weights"):
            fake.now += 1.0
    assert [json.loads(text) for text in path.read_text().splitlines()] == [
        {"kind": "training", "start": 1000.0, "end": 1006.0, "args": {"step": 1}},
        {"kind": "training", "start": 1006.0, "end": 1008.0, "args": {"step": 2}},
        {"kind": "waiting", "start": 1008.0, "end": 1009.0, "args": {"for": "weights"}},
    ]


def test_a_correction_of_the_wall_clock_changes_nothing(tmp_path):
    wall, mono = [5000.0], [10.0]
    clock = Clock(monotonic=lambda: mono[0], wall=lambda: wall[0])
    with closing(Timeline(tmp_path / "a.jsonl", "a", clock=clock)) as line:
        wall[0] -= 100.0
        line.record("training", 10.0, 12.0)
    assert read_spans(tmp_path / "a.jsonl") == [Span("training", 5000.0, 5002.0)]


def test_it_writes_at_bounded_intervals(tmp_path, fake):
    path = tmp_path / "a.jsonl"
    line = Timeline(path, "a", clock=fake.clock(1000.0), flush_seconds=1.0)
    for step in range(6):
        line.record("training", fake.now, fake.now + 0.3, step=step)
        fake.now += 0.3
    assert len(read_spans(path)) == 5
    line.close()
    assert len(read_spans(path)) == 6


def test_a_killed_process_leaves_its_open_wait_behind(tmp_path, fake):
    path = tmp_path / "a.jsonl"
    line = Timeline(path, "a", clock=fake.clock(1000.0))
    wait = line.waiting("trajectories")
    wait.__enter__()
    for _ in range(3):
        fake.now += 1.0
        line.flush()
    assert len(path.read_text().splitlines()) == 3
    assert read_spans(path) == [Span("waiting", 1000.0, 1003.0, {"for": "trajectories"})]
    fake.now += 1.0
    wait.__exit__(None, None, None)
    line.close()
    assert read_spans(path)[0].seconds == 4.0


def test_a_span_is_recorded_when_its_block_raises(tmp_path, fake):
    line = Timeline(tmp_path / "a.jsonl", "a", clock=fake.clock(1000.0))

    def fail():
        with line.span("generating"):
            fake.now += 1.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    line.close()
    line.close()
    assert len(read_spans(tmp_path / "a.jsonl")) == 1


def test_observers_see_every_second_once_also_without_a_file(fake):
    seen = []
    line = Timeline(None, "a", clock=fake.clock(1000.0), observe=seen.append)
    with line.span("generating"):
        fake.now += 1.0
        line.flush()
        fake.now += 2.0
    line.close()
    assert [span.seconds for span in seen] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda line: line.record("sleeping", 0, 1), "sleeping.*use one of training"),
        (lambda line: line.record("waiting", 0, 1), "needs a cause"),
        (lambda line: line.record("training", 2, 1), "before it starts"),
    ],
)
def test_nonsense_is_refused(act, words, fake):
    with pytest.raises(ValueError, match=words):
        act(Timeline(None, "a", clock=fake.clock(1000.0)))


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".hidden"])
def test_process_names_are_file_names(name):
    with pytest.raises(ValueError, match="process name"):
        Timeline(None, name)


def test_threads_may_share_it(tmp_path):
    path = tmp_path / "a.jsonl"
    with closing(Timeline(path, "a", merge_gap=0.0, flush_seconds=0.0)) as line:

        def work(number):
            for index in range(100):
                line.record("rewarding", index, index + 0.5, worker=number)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(read_spans(path, gap=0.0)) == 400


def test_a_restarted_process_appends_after_an_incomplete_line(tmp_path, fake):
    path = tmp_path / "trainer.jsonl"
    path.write_text('{"kind":"training","start":1.0,"end":2.0}\n{"kind":"trai')
    with closing(Timeline(path, "trainer", clock=fake.clock(1000.0))) as line:
        line.record("training", 0.0, 1.0)
    assert read_timelines(tmp_path) == {
        "trainer": [Span("training", 1.0, 2.0), Span("training", 1000.0, 1001.0)]
    }

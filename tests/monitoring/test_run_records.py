import signal
import subprocess
import sys
from contextlib import closing

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_records import full_step

from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.records.jsonl import JsonlWriter, read_jsonl, read_tail
from asyncrl.monitoring.records.metrics_log import MetricsLog, drop_superseded, read_metrics
from asyncrl.monitoring.records.sample_text import sample_text
from asyncrl.monitoring.records.samples import (
    SampleLog,
    SampleRecord,
    SampleSegment,
    choose_samples,
    read_samples,
)
from asyncrl.wire.records.step import LearningMetrics, MismatchMetrics, StepMetrics, TokenCounts


def a_step(step, time=0.0):
    return StepMetrics(step=step, time=time, learning=LearningMetrics(loss=step / 7))


def write(path, steps):
    log = MetricsLog(path)
    for step in steps:
        log.append(step)
    log.close()


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    assert read_metrics(tmp_path / "m.jsonl") == []
    log.append(a_step(0))
    assert read_metrics(tmp_path / "m.jsonl") == [a_step(0)]
    log.close()


def test_every_number_of_a_step_comes_back(tmp_path):
    write(tmp_path / "m.jsonl", [full_step()])
    assert read_metrics(tmp_path / "m.jsonl") == [full_step()]


def test_keys_of_another_version_are_ignored(tmp_path):
    path = tmp_path / "m.jsonl"
    line = msgspec.json.decode(msgspec.json.encode(a_step(3)))
    line |= {"new": 1.0, "learning": line["learning"] | {"new": {"deep": 2}}}
    path.write_bytes(msgspec.json.encode(line) + b"\n")
    assert read_metrics(path) == [a_step(3)]


def test_numbers_of_numpy_and_numbers_that_json_has_not(tmp_path):
    path = tmp_path / "m.jsonl"
    step = {"step": 3, "time": np.float32(0.5), "tokens": {"generated": np.int64(7)}}
    with closing(JsonlWriter(path)) as writer:
        writer.append(step | {"mismatch": {"kl": float("nan"), "abs_mean": float("inf")}})
    assert read_metrics(path) == [
        StepMetrics(step=3, time=0.5, tokens=TokenCounts(generated=7), mismatch=MismatchMetrics())
    ]


def test_what_is_no_number_is_refused_before_anything_is_written(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    with pytest.raises(TypeError, match="object"):
        writer.append({"step": 0}, {"step": 1, "x": object()})
    writer.close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""


@settings(max_examples=60)
@given(cut=st.integers(0, 2_000))
def test_a_file_cut_anywhere_reads_and_continues(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "m.jsonl"
    write(path, [a_step(i) for i in range(5)])
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    whole = data.count(b"\n")
    assert [one.step for one in read_metrics(path)][:whole] == list(range(whole))
    write(path, [a_step(whole)])
    assert [one.step for one in read_metrics(path)] == list(range(whole + 1))


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step":0,"time":1}\n{"st\n{"step":2,"time":3}\n')
    with pytest.raises(RecordError, match="line 2"):
        read_metrics(path)


def test_a_resumed_run_supersedes_the_steps_it_trains_again():
    steps = [a_step(i, time=1.0) for i in range(6)] + [a_step(i, time=2.0) for i in (3, 4)]
    assert [(one.step, one.time) for one in drop_superseded(steps)] == [
        (0, 1), (1, 1), (2, 1), (3, 2), (4, 2),
    ]  # fmt: skip


def test_sigkill_leaves_whole_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import sys; from pathlib import Path\n"
        "from asyncrl.monitoring.records.metrics_log import MetricsLog\n"
        "from asyncrl.wire.records.step import StepMetrics\n"
        "log = MetricsLog(Path(sys.argv[1]))\n"
        "for step in range(10**9):\n"
        "    log.append(StepMetrics(step=step, time=1 / (step + 1)))\n"
        "    if step == 50: print('go', flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "go\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
    steps = [one.step for one in read_metrics(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > 50


def test_writing_after_close_is_an_error(tmp_path):
    writer = JsonlWriter(tmp_path / "a.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.append({"a": 1})


def test_a_long_cut_line_is_removed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":1}\n' + "x" * 200_000)
    JsonlWriter(path).close()
    assert read_jsonl(path, dict) == [{"a": 1}]


def test_the_tail_of_a_file_has_its_last_whole_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":1}\n{"a":2}\n{"a":')
    assert read_tail(path, dict, 1000) == [{"a": 1}, {"a": 2}]
    assert read_tail(path, dict, 15) == [{"a": 2}]
    assert read_tail(tmp_path / "none.jsonl", dict, 15) == []


def record(step, tokens=("a", "b")):
    return SampleRecord(
        step=step,
        prompt="p",
        tokens=list(tokens),
        provenance=["sampled"] * len(tokens),
        segments=[SampleSegment(step, 0, len(tokens))],
        reward=1.0,
        logprobs=[-0.5] * len(tokens),
    )


def test_samples_come_back_as_they_were(tmp_path):
    log = SampleLog(tmp_path / "s.jsonl")
    log.append(record(1), record(2, tokens=("😀", "</script>")), record(3, tokens=("\ud83d",)))
    log.close()
    read = read_samples(tmp_path / "s.jsonl")
    assert read == [record(1), record(2, tokens=("😀", "</script>")), record(3, tokens=("?",))]
    assert read_samples(tmp_path / "none.jsonl") == []


def test_a_sample_whose_lists_differ_in_length_is_refused():
    with pytest.raises(ValueError, match="2 tokens, 1 provenances"):
        SampleRecord(0, "p", ["a", "b"], ["sampled"], [], 0.0)


def test_unknown_provenance_in_a_file_is_named(tmp_path):
    (tmp_path / "s.jsonl").write_text(
        '{"step":0,"prompt":"","tokens":["a"],"provenance":["stolen"],"segments":[],"reward":0}\n'
    )
    with pytest.raises(RecordError, match="stolen"):
        read_samples(tmp_path / "s.jsonl")


@pytest.mark.parametrize(
    ("most", "steps"), [(0, []), (1, [9]), (3, [0, 4, 9]), (99, list(range(10)))]
)
def test_chosen_samples_span_the_run(most, steps):
    records = [record(step) for step in range(10)]
    assert [one.step for one in choose_samples(records, most)] == steps


def test_a_terminal_shows_what_was_observed_and_where_a_context_begins() -> None:
    record = SampleRecord(
        step=3,
        prompt="?",
        tokens=["a", "b", "c", "d", "e"],
        provenance=["sampled", "observed", "observed", "observed", "verified"],
        segments=[SampleSegment(3, 0, 5)],
        reward=1.5,
        rewards={"format": 1.0, "environment": 0.5},
        finish_reason="length",
        contexts=[2],
    )
    text = sample_text(record, colours=False).plain
    assert "reward 1.50 (format 1.00, environment 0.50), 2 turns, 5 tokens (3 of the env" in text
    assert "environment), cut at the limit of tokens or turns, policy version 3" in text
    assert "?a(b)\n-- another context --\n(cd){e}" in text
    assert "reference" not in text, "the task has no answer"

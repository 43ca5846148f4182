import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.errors import RecordError
from monitoring.jsonl import JsonlWriter, read_jsonl
from monitoring.metrics_log import MetricsLog, keep_last_account, read_metrics
from monitoring.samples import SampleLog, SampleRecord, SampleSegment, choose_samples, read_samples


def write(path, rows):
    log = MetricsLog(path)
    for row in rows:
        log.append(row)
    log.close()


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    assert read_metrics(tmp_path / "m.jsonl") == []
    log.append({"step": 0, "loss": 0.5})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 0, "loss": 0.5}]
    log.close()


def test_numbers_of_numpy_and_numbers_that_json_has_not(tmp_path):
    row = {"step": 3, "a": np.float32(0.5), "b": np.int64(7), "c": float("nan"), "d": float("inf")}
    write(tmp_path / "m.jsonl", [row])
    assert read_metrics(tmp_path / "m.jsonl") == [
        {"step": 3, "a": 0.5, "b": 7, "c": None, "d": None}
    ]


def test_what_is_no_number_is_refused_before_anything_is_written(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    with pytest.raises(TypeError, match="object"):
        log.append({"step": 0, "x": object()})
    with pytest.raises(ValueError, match="step"):
        log.append({"loss": 1.0})
    log.close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 200))
def test_a_file_cut_anywhere_reads_and_continues(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "m.jsonl"
    write(path, [{"step": i, "loss": i / 7} for i in range(5)])
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    whole = data.count(b"\n")
    assert [row["step"] for row in read_metrics(path)][:whole] == list(range(whole))
    write(path, [{"step": whole}])
    assert [row["step"] for row in read_metrics(path)] == list(range(whole + 1))


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step":0}\n{"st\n{"step":2}\n')
    with pytest.raises(RecordError, match="line 2"):
        read_metrics(path)


def test_a_resumed_run_overwrites_its_abandoned_future():
    rows = [{"step": i, "run": 1} for i in range(6)] + [{"step": i, "run": 2} for i in (3, 4)]
    assert [(row["step"], row["run"]) for row in keep_last_account(rows)] == [
        (0, 1), (1, 1), (2, 1), (3, 2), (4, 2),
    ]  # fmt: skip


def test_sigkill_leaves_whole_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import sys; from pathlib import Path; from monitoring.metrics_log import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1]))\n"
        "for step in range(10**9):\n"
        "    log.append({'step': step, 'loss': 1 / (step + 1)})\n"
        "    if step == 50: print('go', flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "go\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
    steps = [row["step"] for row in read_metrics(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > 50


def test_writing_after_close_is_an_error(tmp_path):
    writer = JsonlWriter(tmp_path / "a.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.append([{"a": 1}])


def test_a_long_cut_line_is_removed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":1}\n' + "x" * 200_000)
    JsonlWriter(path).close()
    assert read_jsonl(path, dict) == [{"a": 1}]


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

"""What a sink gets of a run's files, whatever happens to the run and to the sink."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from step_records import full_step

from asyncrl.monitoring.records.samples import SampleRecord
from asyncrl.monitoring.sinks.config import SinkConfig
from asyncrl.monitoring.sinks.follow import read_state
from asyncrl.monitoring.sinks.process import (
    Following,
    follow,
    numbers_of_evaluation,
    numbers_of_step,
)
from asyncrl.monitoring.sinks.sink import SinkRun
from asyncrl.wire.records.evaluations import EvaluationRecord, SetEvaluation
from asyncrl.wire.records.step import StepMetrics

SAMPLE = SampleRecord(step=1, prompt="1+1=", tokens=["2"], provenance=["sampled"], segments=[],
                      reward=1.0)  # fmt: skip
EVALUATION = EvaluationRecord(
    step=4,
    time=50.0,
    when="during",
    sets={
        "held_out": SetEvaluation(
            prompts=2, samples=8, accuracy=0.5, pass_at={1: 0.5, 4: 0.75}, accuracy_error=0.1
        )
    },
)


class Memory:
    """A sink that remembers its calls, and fails while `broken`."""

    run_id = "mine"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.opened: list[SinkRun] = []
        self.broken = False

    def open(self, _config: SinkConfig, run: SinkRun) -> Memory:
        self._check()
        self.opened.append(run)
        return self

    def _check(self) -> None:
        if self.broken:
            raise ConnectionError("no route")

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self._check()
        name = "evaluation" if any(key.startswith("evaluation/") for key in numbers) else "step"
        self.calls.append((name, step, time))

    def went_back(self, step: int) -> None:
        self.calls.append(("back", step))

    def table(self, name: str, samples: list[SampleRecord]) -> None:
        self._check()
        self.calls.append((name, [one.step for one in samples]))

    def flush(self) -> None:
        self._check()

    def close(self) -> None:
        self.calls.append("closed")


def write(run: Path, name: str, *records: msgspec.Struct, mode: str = "ab") -> None:
    with (run / name).open(mode) as file:
        for one in records:
            file.write(msgspec.json.encode(one) + b"\n")


def at(step: int, time: float) -> StepMetrics:
    return msgspec.structs.replace(full_step(), step=step, time=time)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("run: {name: it}\nmonitoring: {sinks: []}\n")
    (tmp_path / "sinks").mkdir()
    return tmp_path


def following(run: Path, memory: Memory) -> Following:
    return Following(run, SinkConfig(kind="tensorboard"), memory.open)


def test_samples_of_evaluations_have_tables_of_their_own_and_are_sent_once(run: Path) -> None:
    def shown(step: int, number: int, of: str = "held_out") -> SampleRecord:
        return msgspec.structs.replace(SAMPLE, step=step, evaluation=of, sample_id=f"7.{number}")

    memory = Memory()
    write(run, "samples.jsonl", SAMPLE, shown(4, 0), shown(4, 0, "hard"))
    assert following(run, memory).pass_on()
    name = "evaluation/held_out/samples"
    assert memory.calls == [("samples", [1]), (name, [4]), ("evaluation/hard/samples", [4])]
    again = Memory()
    one = following(run, again)
    # The rest of the evaluation, a step that was trained before it ended, and the next one.
    write(run, "samples.jsonl", shown(4, 1), msgspec.structs.replace(SAMPLE, step=3), shown(8, 0))
    again.broken = True
    assert not one.pass_on()
    again.broken = False
    assert one.pass_on()
    assert again.calls == [(name, [4, 8]), ("samples", [3])]
    assert following(run, Memory()).pass_on()


def test_samples_that_come_after_those_of_a_later_step_are_sent_once(run: Path) -> None:
    def trained(step: int, number: int) -> SampleRecord:
        return msgspec.structs.replace(SAMPLE, step=step, sample_id=f"8.{number}")

    memory = Memory()
    write(run, "samples.jsonl", trained(6, 0), trained(5, 0), trained(6, 1), trained(7, 0))
    assert following(run, memory).pass_on()
    assert memory.calls == [("samples", [6, 5, 6, 7])]
    again = Memory()
    write(run, "samples.jsonl", trained(6, 2))
    assert following(run, again).pass_on()
    assert again.calls == [("samples", [6])]


def test_the_names_are_those_of_metrics_jsonl() -> None:
    record = full_step()
    line = json.loads(msgspec.json.encode(record))
    numbers = numbers_of_step(record)
    assert numbers["learning/reward_mean"] == line["learning"]["reward_mean"]
    assert numbers["tokens/generated"] == line["tokens"]["generated"]
    for name, value in numbers.items():
        inner: Any = line
        for part in name.split("/"):
            inner = inner[part]
        assert inner == value
    assert not {"step", "time"} & numbers.keys()
    assert numbers_of_evaluation(EVALUATION)["evaluation/held_out/pass_at/4"] == 0.75
    assert "evaluation/held_out/accuracy_error" in numbers_of_evaluation(EVALUATION)


def test_records_are_sent_once_in_order_as_the_files_grow(run: Path) -> None:
    memory = Memory()
    one = following(run, memory)
    assert one.pass_on()
    assert memory.opened == [], "there is nothing to log yet"
    write(run, "metrics.jsonl", at(0, 1.0), at(1, 2.0))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(at(2, 3.0))[:40])  # it is being written
    assert one.pass_on()
    assert memory.calls == [("step", 0, 1.0), ("step", 1, 2.0)]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(at(2, 3.0))[40:] + b"\n")
    write(run, "evaluations.jsonl", EVALUATION)
    write(run, "samples.jsonl", SAMPLE)
    assert one.pass_on()
    assert one.pass_on()
    assert memory.calls[2:] == [("step", 2, 3.0), ("evaluation", 4, 50.0), ("samples", [1])]
    assert memory.opened[0].next_step == 0


def test_a_resumed_run_continues_the_sinks_run_and_repeats_steps(run: Path) -> None:
    first, second = Memory(), Memory()
    write(run, "metrics.jsonl", *(at(step, 1.0 + step) for step in range(4)))
    write(run, "samples.jsonl", SAMPLE, msgspec.structs.replace(SAMPLE, step=3))
    assert following(run, first).pass_on()
    # The run is resumed after step 1 while no sink is there.
    write(run, "metrics.jsonl", at(0, 1.0), at(1, 2.0), at(2, 20.0), mode="wb")
    write(run, "samples.jsonl", SAMPLE, msgspec.structs.replace(SAMPLE, step=2), mode="wb")
    again = following(run, second)
    assert again.pass_on()
    assert second.opened[0].run_id == "mine"
    assert second.calls == [("back", 2), ("step", 2, 20.0), ("samples", [2])]
    # Another trainer brings it back to step 1 while the sink is there.
    write(run, "metrics.jsonl", at(0, 1.0), at(1, 30.0), mode="wb")
    assert again.pass_on()
    assert second.calls[3:] == [("back", 1), ("step", 1, 30.0)]
    assert read_state(again.state_file).step == 1


def test_what_a_sink_failed_to_take_is_sent_later_and_once(run: Path) -> None:
    memory = Memory()
    one = following(run, memory)
    write(run, "metrics.jsonl", at(0, 1.0))
    memory.broken = True
    assert not one.pass_on()
    write(run, "metrics.jsonl", at(1, 2.0))
    assert not one.pass_on()
    memory.broken = False
    while memory.calls != [("step", 0, 1.0), ("step", 1, 2.0)]:
        assert one.pass_on()
    assert read_state(one.state_file).failures == 2


def test_the_loop_ends_with_the_run_and_says_whether_all_was_sent(run: Path) -> None:
    memory, ended = Memory(), threading.Event()
    write(run, "metrics.jsonl", at(0, 1.0))
    ended.set()
    assert follow(following(run, memory), ended)
    assert memory.calls == [("step", 0, 1.0), "closed"]
    memory.broken = True
    write(run, "metrics.jsonl", at(1, 2.0))
    assert not follow(following(run, memory), ended)


def test_settings_of_sinks() -> None:
    assert SinkConfig.model_validate("wandb") == SinkConfig(kind="wandb")
    with pytest.raises(ValueError, match="uri: not a setting of the sink wandb"):
        SinkConfig(kind="wandb", uri="file:x")
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_USERNAME"):
        SinkConfig(kind="mlflow", uri="https://me:secret@host")

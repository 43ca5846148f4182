"""W&B (offline), TensorBoard and MLflow (a local database), for real, read back with their tools.

Each is written twice, as by a run and by its resumption from step 1, by two processes that are
forked from one that has imported its package.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from step_records import full_step

from asyncrl.monitoring.records.samples import SampleRecord
from asyncrl.wire.records.evaluations import EvaluationRecord, SetEvaluation

pytestmark = pytest.mark.slow

SECRET = "0123456789abcdef" * 2 + "01234567"
CONFIG = """
run: {name: it, steps: 4}
environment: {args: {"a@b": 1, "http://x/y": 2}}
monitoring: {sinks: [tensorboard, mlflow, {kind: wandb, project: sums, offline: true}]}
"""


def lines(*records: msgspec.Struct) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in records)


def sample(step: int) -> SampleRecord:
    return SampleRecord(step, "1|1=", ["2", "!"], ["sampled"] * 2, [], 0.5, answer="2")


def shown(step: int) -> SampleRecord:
    return msgspec.structs.replace(sample(step), evaluation="held_out", sample_id=f"0.{step}")


def step(number: int, time: float, reward: float) -> msgspec.Struct:
    one = full_step()
    learning = msgspec.structs.replace(one.learning, reward_mean=reward)
    rewards = {"judge#2": next(iter(one.rewards.values()))}  # a function that is used twice
    return msgspec.structs.replace(one, step=number, time=time, learning=learning, rewards=rewards)


def evaluation(number: int, time: float, accuracy: float) -> EvaluationRecord:
    one = SetEvaluation(prompts=2, samples=2, accuracy=accuracy)
    return EvaluationRecord(step=number, time=time, when="during", sets={"held_out": one})


PACKAGES = {
    "tensorboard": "tensorboard.summary.writer.event_file_writer",
    "mlflow": "mlflow.store.tracking.sqlalchemy_store",
    "wandb": "google.protobuf",  # its folder of temporary files ends with the first fork
}
FORKING = """
import importlib, os, sys
from asyncrl.monitoring.sinks.process import main
importlib.import_module(sys.argv.pop())
for _ in sys.stdin:
    if (sink := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        sys.exit(main(sys.argv[1:]))
    print(os.waitstatus_to_exitcode(os.waitpid(sink, 0)[1]), flush=True)
"""


@contextlib.contextmanager
def sending(run: Path, kind: str) -> Iterator[Callable[[], None]]:
    """What sends all that a sink lacks, as `python -m asyncrl.monitoring.sinks ... --once` does."""
    log = run.parent / f"{run.name}.log"
    own = {"WANDB_API_KEY": SECRET, "WANDB_SILENT": "true", "HOME": str(run)}
    command = [sys.executable, "-c", FORKING, str(run), kind, "--once", PACKAGES[kind]]
    pipe = subprocess.PIPE
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=os.environ | own, stdin=pipe, stdout=pipe, stderr=errors, text=True
        ) as process,
    ):
        asked, ended = process.stdin, process.stdout
        assert asked is not None
        assert ended is not None

        def send() -> None:
            print(file=asked, flush=True)
            assert ended.readline() == "0\n", log.read_text()

        yield send
    assert SECRET not in log.read_text()


@pytest.fixture(params=["tensorboard", "mlflow", "wandb"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    kind: str = request.param
    with sending(tmp_path, kind) as send:
        write_twice(tmp_path, send)
    return kind, tmp_path


def write_twice(tmp_path: Path, send: Callable[[], None]) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "sinks").mkdir()
    first = step(0, 10.0, 0.1)
    (tmp_path / "metrics.jsonl").write_bytes(lines(first, step(1, 11.0, 0.2)))
    # The evaluation of version 1 stands when the run repeats step 1; that of version 2 does not.
    stand = evaluation(0, 9.0, 0.25), evaluation(1, 10.5, 0.5)
    (tmp_path / "evaluations.jsonl").write_bytes(lines(*stand, evaluation(2, 11.5, 0.6)))
    (tmp_path / "samples.jsonl").write_bytes(lines(sample(1), shown(0)))
    send()
    (tmp_path / "evaluations.jsonl").write_bytes(lines(*stand))
    (tmp_path / "metrics.jsonl").write_bytes(lines(first, step(1, 21.0, 0.3), step(2, 22.0, 0.4)))
    with (tmp_path / "evaluations.jsonl").open("ab") as file:
        file.write(lines(evaluation(2, 23.0, 0.75)))
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(lines(sample(2), shown(2)))
    send()


def test_a_sink_has_the_steps_the_evaluations_and_the_samples(written: tuple[str, Path]) -> None:
    kind, run = written
    rewards, accuracies, samples, evaluated = READERS[kind](run / "sinks" / kind)
    assert rewards == pytest.approx({0: 0.1, 1: 0.3, 2: 0.4})
    assert accuracies == pytest.approx({0: 0.25, 1: 0.5, 2: 0.75})
    for texts in (samples, evaluated):
        assert all(all(word in text for word in ("1", "2!", "0.5")) for text in texts)
        assert len(texts) >= 2
    for file in run.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


Found = tuple[dict[int, float], dict[int, float], list[str], list[str]]
SHOWN = "evaluation/held_out/samples"
REWARD, ACCURACY = "learning/reward_mean", "evaluation/held_out/accuracy"


def read_tensorboard(folder: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps, evaluations = EventAccumulator(str(folder)), EventAccumulator(str(folder / "evaluation"))
    for one in (steps, evaluations):
        one.Reload()
    texts, evaluated = (
        [event.tensor_proto.string_val[0].decode() for event in events.Tensors(name)]
        for events, name in ((steps, "samples"), (evaluations, SHOWN))
    )
    rewards, accuracies = (
        {event.step: event.value for event in events.Scalars(name)}
        for events, name in ((steps, REWARD), (evaluations, ACCURACY))
    )
    return rewards, accuracies, texts, evaluated


def read_mlflow(folder: Path) -> Found:
    """The tables of MLflow's database; its client takes ten seconds to read them."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        assert database.execute("SELECT name, status FROM runs").fetchall() == [("it", "FINISHED")]
        steps = "SELECT value FROM params WHERE key = 'run.steps'"
        assert database.execute(steps).fetchall() == [("4",)]
        query = "SELECT step, value FROM metrics WHERE key = ? ORDER BY timestamp"
        rewards, accuracies = (
            dict(database.execute(query, (name,)).fetchall()) for name in (REWARD, ACCURACY)
        )
    texts, evaluated = (
        [file.read_text() for file in (folder / "artifacts").glob(f"**/{name}/step-*.json")]
        for name in ("artifacts/samples", SHOWN)
    )
    return rewards, accuracies, texts, evaluated


def read_wandb(folder: Path) -> Found:
    """Both offline runs have the same id, so that `wandb sync` makes one run of them."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.rglob("*.wandb"), key=lambda file: file.stat().st_mtime)
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    found: dict[str, dict[int, float]] = {REWARD: {}, ACCURACY: {}}
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = Record.FromString(data)
            assert record.run.project in ("", "sums")
            items = {
                one.key or "/".join(one.nested_key): json.loads(one.value_json)
                for one in record.history.item
            }
            for name, values in found.items():
                if name in items:
                    values[int(items["step"])] = items[name]
    texts, evaluated = (
        [file.read_text() for file in folder.glob(f"**/table/{name}_*.table.json")]
        for name in ("samples", SHOWN)
    )
    return found[REWARD], found[ACCURACY], texts, evaluated


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    block, head, place, parts = 32_768, 7, 7, b""
    while place + head <= len(data):
        if block - place % block < head:
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + head : place + head + length]
        place += head + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


READERS = {"tensorboard": read_tensorboard, "mlflow": read_mlflow, "wandb": read_wandb}

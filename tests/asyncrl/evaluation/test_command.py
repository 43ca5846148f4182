from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from generator_harness import FakeEngine
from rich.console import Console
from whole_checkpoints import WEIGHTS, truncate, write_whole

from asyncrl.cli.training import _print_result
from asyncrl.config.run_config import load_config, parse_config
from asyncrl.engine.protocol import GenerateRequest
from asyncrl.errors import AsyncrlError, ModelError, UserError
from asyncrl.evaluation import command
from asyncrl.evaluation.command import evaluate_model, resolve_target
from asyncrl.monitoring.records.metrics_log import EvaluationsLog
from asyncrl.monitoring.terminal.evaluation_text import estimates
from asyncrl.runs.directory import RunDirectory
from asyncrl.tasks.model import builtin_tokenizer
from asyncrl.tasks.prompts import Prompt, Task
from asyncrl.wire.records.evaluations import EvaluationRecord, SetEvaluation
from asyncrl.wire.records.step import RunResult, StalenessMetrics, TokenCounts


def test_a_run_is_evaluated_with_its_own_configuration_and_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "model_of", lambda checkpoint, _: checkpoint / "exported")
    run = {"name": "mine", "directory": str(tmp_path), "seed": 7}
    made = RunDirectory.create(
        parse_config({"run": run}, source="the test"), resume=False, clean=False
    )
    made.close()
    with pytest.raises(UserError, match=r"mine has not written a checkpoint yet"):
        resolve_target("mine", None, [], tmp_path, Console())
    checkpoint, newer = write_whole(made.path / "checkpoints", 3, 4)
    truncate(newer / WEIGHTS)
    console = Console(record=True, width=500)
    config, model = resolve_target("mine", None, ["evaluation.prompts=5"], tmp_path, console)
    assert model == str(checkpoint / "exported")
    assert "not evaluated: " in (said := console.export_text())
    assert f"step-000004/{WEIGHTS} is truncated" in said
    truncate(checkpoint / WEIGHTS)
    with pytest.raises(UserError, match=r"none of the checkpoints in .* is intact"):
        resolve_target("mine", None, [], tmp_path, console)
    assert (config.run.seed, config.evaluation.prompts) == (7, 5)


def test_a_model_is_evaluated_with_the_defaults_and_overrides(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):  # only looked for
        (tmp_path / name).write_text("{}")
    overrides = ["evaluation.prompts=5"]
    config, _ = resolve_target(str(tmp_path), None, overrides, tmp_path / "runs", Console())
    assert config.evaluation.prompts == 5


def test_what_is_neither_a_run_nor_a_model_is_called_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = rf"'fisrt' is not a run in {tmp_path}; as a model: model.path: 'fisrt' is neither"
    with pytest.raises(ModelError, match=said):
        resolve_target("fisrt", None, [], tmp_path, Console())


HALVES = """
class Halves:
    replay = "deterministic"
    def reset(self, row, seed):
        self.answers = row["answers"]
    def step(self, action):
        right = action.text == self.answers.pop(0)
        return ("more", not self.answers, right / 2)
"""


class ScriptedEngine(FakeEngine):
    """Says 1, 2, 3, ... in the turns of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: dict[str, int] = {}
        self.ended = 0

    async def start(self) -> None:
        pass

    async def generate(self, request: GenerateRequest) -> Any:
        turn = self.turns.setdefault(request.session, 0) + 1
        self.turns[request.session] = turn
        tokenizer: Any = builtin_tokenizer()
        said = [*tokenizer.encode(str(turn)), tokenizer.eos_token_id]
        self.feed(request.request_id, said, 0, end="stop")
        async for chunk in super().generate(request):
            yield chunk

    async def close(self) -> None:
        self.ended += 1


def test_a_run_with_an_environment_is_evaluated_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turn by turn, with its rewards; the tokens that it observes do not count."""
    (tmp_path / "mine.py").write_text(HALVES)
    tokenizer: Any = builtin_tokenizer()
    rows = [{"prompt": "1+1=", "answers": list(answers)} for answers in ("12", "92", "1")]
    prompts = [
        Prompt(f"add-{n}", np.array([1, 2], np.int32), "1+1=", row) for n, row in enumerate(rows)
    ]
    task = Task([], prompts, (tokenizer.eos_token_id,), tokenizer)
    engine = ScriptedEngine()
    monkeypatch.setattr(command, "load_task", lambda *_, **__: task)
    monkeypatch.setattr(command, "create_engine", lambda *_, **__: engine)
    named = f"environment.name={tmp_path / 'mine.py'}:Halves"
    lengths = "engine.max_model_len=128", "sampling.max_tokens=32"
    config = load_config(None, [named, *lengths, "evaluation.temperature=0"])
    (found,) = evaluate_model(config, str(tmp_path), Console()).sets.values()
    assert {one.sampling.top_k for one in engine.requests} == {1}, "greedy"
    assert "3 samples, greedy" in estimates(found)
    assert engine.turns == {"eval-0.0": 2, "eval-0.1": 2, "eval-0.2": 1}
    assert found.reward == pytest.approx((1.0 + 0.5 + 0.5) / 3)
    assert found.tokens == pytest.approx((4 + 4 + 2) / 3)
    assert engine.ended == 1
    assert not engine.serving


class SilentEngine(ScriptedEngine):
    async def generate(self, request: GenerateRequest) -> Any:
        await asyncio.Event().wait()
        yield  # pragma: no cover


def test_an_engine_that_says_nothing_more_ends_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = builtin_tokenizer()
    row = {"prompt": "1+1=", "answer": "2"}
    prompts = [Prompt("add-0", np.array([1, 2], np.int32), "1+1=", row)]
    task = Task([], prompts, (tokenizer.eos_token_id,), tokenizer)
    engine = SilentEngine()
    monkeypatch.setattr(command, "load_task", lambda *_, **__: task)
    monkeypatch.setattr(command, "create_engine", lambda *_, **__: engine)
    config = load_config(None, ["evaluation.timeout_seconds=0.05"])
    with pytest.raises(AsyncrlError, match=r"finished within 0.05 s \(0 of 1 did before\)"):
        evaluate_model(config, str(tmp_path), Console())
    assert engine.ended == 1


def test_a_run_says_at_its_end_which_evaluation_is_incomplete(tmp_path: Path) -> None:
    result = RunResult(
        run="mine",
        engine="torch",
        steps=4,
        wall_seconds=7.0,
        total_seconds=9.0,
        tokens=TokenCounts(),
        staleness=StalenessMetrics(),
        exactly_on_policy=True,
        accuracy_before=0.25,
    )

    def said(planned: int = 4, **more: Any) -> str:
        console, again = Console(record=True, width=300), "asyncrl run --resume"
        one = msgspec.structs.replace(result, **more)
        folder = [f"run.directory={tmp_path.parent}", f"run.name={tmp_path.name}"]
        values = [f"run.steps={planned}", f"evaluation.at_start={'false' if more else 'true'}"]
        _print_result(console, load_config(None, [*folder, *values]), one, again)
        return console.export_text().splitlines()[0]

    assert said(accuracy_before=None, accuracy_after=0.5) == (
        "4 steps, 7 s of training; held-out accuracy 0.500; evaluation.at_start is false, so there "
        "is no earlier accuracy to compare it with"
    )

    assert said() == "4 steps, 7 s of training; no held-out prompts, so no accuracy"
    lacking = SetEvaluation(prompts=8, samples=20, unscored=12, accuracy=None)
    log = EvaluationsLog(tmp_path / "evaluations.jsonl")
    log.append(EvaluationRecord(step=4, time=1.0, when="after", sets={"held_out": lacking}))
    found = SetEvaluation(prompts=8, samples=32, accuracy=0.5, reward=0.7)
    log.append(EvaluationRecord(step=2, time=1.0, when="during", sets={"held_out": found}))
    log.close()
    assert said(planned=9) == (
        "stopped after 4 steps; held-out accuracy 0.250 → 0.500 (step 2, mean reward 0.700); "
        "continue with: asyncrl run --resume"
    )
    assert said() == (
        "4 steps, 7 s of training; held-out accuracy 0.250 → –, as the evaluation after training "
        "is incomplete: 12 of 32 samples have no reward. The newest weights are measured again by: "
        "asyncrl run --resume"
    )

"""Supervised fine-tuning: its loss and gradient, ranks, adapters, interruption, and its command."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asyncrl_runs import until
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from asyncrl.cli.entry import app
from asyncrl.config.run_config import RunConfig, load_config, parse_config
from asyncrl.errors import RunFailed, UserError
from asyncrl.monitoring.records.metrics_log import read_evaluations, read_metrics
from asyncrl.runs.directory import find_run
from asyncrl.sft import command
from asyncrl.sft.command import with_settings
from asyncrl.sft.training import SftTraining
from asyncrl.tasks.examples import Examples, load_examples
from asyncrl.tasks.model_tokenizer import load_tokenizer
from asyncrl.tasks.prompts import prompt_order
from asyncrl.trainer.base.errors import CheckpointUnwritable
from asyncrl.trainer.learner import Learner

Typed = Callable[..., str]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of several lengths, in the present folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"say {n}", "response": f"{n} " * (1 + n % 5)} for n in range(40)]
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return file


def settings(rows: Path, model: Path, **more: Any) -> dict[str, Any]:
    """A run of 6 steps of 8 examples."""
    return {
        "run": {"name": "words", "directory": str(rows.parent / "runs")},
        "task": {"kind": "dataset", "path": str(rows), "answer_field": None},
        "model": {"path": str(model)},
        "sft": {"steps": 6, "batch_size": 8, "learning_rate": 0.01},
        "trainer": {"device": "cpu", "dtype": "float32", "threads": 1, **more},
    }


def invoke(*words: str) -> str:
    """Type a command; returns its output, and raises its error."""
    result = CliRunner().invoke(app, words)
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def typed(rows: Path, own_model: Path, tmp_path: Path) -> Typed:
    """Types `asyncrl sft run.yaml` with these options and trainer settings; returns its output."""

    def type_it(*options: str, **more: Any) -> str:
        (tmp_path / "run.yaml").write_text(json.dumps(settings(rows, own_model, **more)))
        return invoke("sft", "run.yaml", *options)

    return type_it


def training_of(rows: Path, model: Path, **more: Any) -> tuple[RunConfig, Examples, SftTraining]:
    """The loop of one rank, in this process."""
    config = parse_config(settings(rows, model, **more), source="here")
    examples = load_examples(config.task, config.sft, load_tokenizer(str(model)), config.run.seed)
    config = with_settings(config, 6)
    return config, examples, SftTraining(config, examples, str(model))


@pytest.mark.parametrize("micro_batch_tokens", [1, 8192], ids=["one by one", "packed"])
def test_loss_and_gradient_are_those_of_transformers_cross_entropy(
    rows: Path, own_model: Path, micro_batch_tokens: int
) -> None:
    """The mean over the learned tokens of the whole step, as TRL's SFTTrainer has it."""
    _, examples, training = training_of(rows, own_model, micro_batch_tokens=micro_batch_tokens)
    batch = [examples.train[prompt_order(len(examples.train), 0, n)] for n in range(8)]
    model = AutoModelForCausalLM.from_pretrained(own_model)
    longest = max(map(len, batch))
    ids, labels = torch.zeros(8, longest, dtype=torch.int64), torch.full((8, longest), -100)
    for row, one in enumerate(batch):
        tokens = torch.tensor(np.concatenate([one.prompt, one.tokens]))
        ids[row, : len(one)] = tokens
        learned = torch.cat(
            [torch.zeros(len(one.prompt), dtype=torch.bool), torch.tensor(one.learned)]
        )
        labels[row, : len(one)] = torch.where(learned, tokens, -100)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    found = training.step().learning
    assert found.loss == pytest.approx(loss.item(), abs=1e-5)
    assert found.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_it_learns_and_says_so(typed: Typed, tmp_path: Path) -> None:
    """Each step has a line and a record; the folder's model is one to train on."""
    said = typed("--set", "evaluation.every=3", "--set", "monitoring.sinks=[{kind: tensorboard}]")
    run = tmp_path / "runs/words-sft"
    steps, losses = read_metrics(run / "metrics.jsonl"), read_evaluations(run / "evaluations.jsonl")
    assert [one.step for one in steps] == list(range(6))
    assert steps[-1].learning.loss < steps[0].learning.loss
    assert [(one.step, one.when) for one in losses] == [(0, "before"), (3, "during"), (6, "after")]
    before, _, after = (one.sets["held_out"].loss for one in losses)
    assert before
    assert after
    assert after < before
    assert list((run / "sinks/tensorboard/evaluation").glob("events.*"))
    result = json.loads((run / "result.json").read_text())
    assert (result["loss_before"], result["loss_after"]) == (before, after)
    for text in ("36 examples to train on, 4 held out", "step 6/6 | loss", f"{after:.4f}"):
        assert text in said
    listed = invoke("list", "--runs", str(run.parent))
    assert "words-sft" in listed
    assert "done" in listed
    status = invoke("status", "words-sft", "--runs", str(run.parent))
    assert f"held-out loss {before:.4f} → {after:.4f}" in status
    with pytest.raises(UserError, match="a run of supervised fine-tuning"):
        find_run("words-sft", run.parent)
    with pytest.raises(UserError, match="is in use"):
        typed()


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}], ids=["whole", "LoRA"])
def test_a_run_that_is_stopped_continues_to_the_same_weights(
    typed: Typed, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any]
) -> None:
    """Ctrl-C ends it after the step, with a checkpoint; the same command continues it."""
    run = tmp_path / "runs/words-sft"
    typed(**lora)
    files = sorted((run / "checkpoints/step-000006").rglob("*.safetensors"))
    whole = {str(one.relative_to(run)): load_file(one) for one in files}
    assert any("weights" in name for name in whole)
    finished = command._Watcher.finished

    def interrupt(self: Any, step: int, metrics: Any, seconds: float) -> None:
        finished(self, step, metrics, seconds)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: self.is_stopped, seconds=60, what="the signal")

    with monkeypatch.context() as patch:
        patch.setattr(command._Watcher, "finished", interrupt)
        said = typed("--clean", **lora)
    assert "stopped after 3 steps; continue with: asyncrl sft run.yaml --resume" in said
    assert "ended" in (run / "run.json").read_text()
    rows.write_text((before := rows.read_text()).replace("say 3", "tell 3"))
    with pytest.raises(UserError, match="the chat template or the tokenizer have changed"):
        typed("--resume", **lora)
    rows.write_text(before)
    with pytest.raises(UserError, match=r"sft.batch_size was 8 and is now 4"):
        typed("--resume", "--set", "sft.batch_size=4", **lora)
    with pytest.raises(UserError, match="which `asyncrl sft` begins and continues"):
        invoke("run", str(run / "config.yaml"), "--resume")
    for_rl = {"algorithm": "dapo", "kl_coefficient": 0.1, "clip_ratio_high": 0.3, **lora}
    more = "sampling.stop=['x']", "task.answer_field=answer", "scheduler.group_size=4"
    said = typed("--resume", *(word for one in more for word in ("--set", one)), **for_rl)
    assert "not read" not in said
    assert [one.step for one in read_metrics(run / "metrics.jsonl")] == list(range(6))
    for name, tensors in whole.items():
        again = load_file(run / name)
        assert all(torch.equal(again[key], value) for key, value in tensors.items()), name


def test_a_disk_that_refuses_a_checkpoint_does_not_end_training(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another is tried after 1, 2, 4 steps; if the last one fails, too, a resume goes on."""
    checkpoints, tried = tmp_path / "runs/words-sft/checkpoints", list[int]()
    save = Learner.save

    def fails(self: Learner, directory: Path) -> None:
        tried.append(self.policy_version)
        if self.policy_version != 1:
            raise CheckpointUnwritable(
                "the checkpoint cannot be written: No space left", "disk_full"
            )
        save(self, directory)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "save", fails)
        more = "--set", "trainer.checkpoint_every=1", "--set", "evaluation.at_start=false"
        with pytest.raises(RunFailed, match="No space left; once it can be written, --resume"):
            typed(*more)
    assert tried == [1, 2, 3, 4, 5, 6, 6]
    assert [one.name for one in checkpoints.glob("step-*")] == ["step-000001"]
    said = typed("--resume", *more)
    assert "held-out loss" in said
    assert (checkpoints / "step-000006").exists()


def test_what_only_rl_reads_is_named_and_explained(typed: Typed) -> None:
    """One file describes both runs, and nothing of it is left out in silence."""
    more = "--set", "engine.kind=vllm", "--set", "sampling.temperature=0.7"
    said = typed("--dry-run", *more, kl_coefficient=0.1)
    assert "task.answer_field, sampling, engine, trainer.kl_coefficient: without effect" in said
    assert "not read" not in typed("--dry-run", "--set", "task.answer_field=answer")
    explained = typed("--explain", kl_coefficient=0.1)
    assert "  kl_coefficient: 0.1\n" in explained
    assert "  learn: response\n" in explained


@pytest.mark.slow
@pytest.mark.usefixtures("_forked_runs")
def test_two_ranks_learn_what_one_does(typed: Typed, tmp_path: Path) -> None:
    """Each has its share of every step; one of them has more micro-batches."""
    typed("--set", "run.name=one")
    typed("--set", "run.name=optimizer", ranks=2, micro_batch_tokens=24)
    typed("--set", "run.name=full", ranks=2, sharding="full", micro_batch_tokens=24)
    alone, *both = (tmp_path / f"runs/{name}-sft" for name in ("one", "optimizer", "full"))
    for run in both:
        steps = zip(*(read_metrics(one / "metrics.jsonl") for one in (alone, run)), strict=True)
        for one, two in steps:
            assert two.learning.loss == pytest.approx(one.learning.loss, abs=1e-5), run.name
            assert two.batch.tokens == one.batch.tokens
        ends = [read_evaluations(one / "evaluations.jsonl")[-1].main for one in (alone, run)]
        losses = [one.loss for one in ends if one is not None]
        assert losses[1] == pytest.approx(losses[0], abs=1e-4), run.name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--set", "sft.epochs=1"), "epochs and steps both say how long to train"),
        (("--set", "sft.response_field=reply"), "no 'reply'; sft.response_field must name one"),
        (("--set", "sft.warmup_steps=6"), "sft.warmup_steps: 6 covers all 6 steps"),
        (("--set", "sft.max_tokens=4"), "more than sft.max_tokens (4)"),
        (
            ("--set", "evaluation={every: 50, keep_best: true}"),
            "evaluation.keep_best: true has an effect only in `asyncrl run`",
        ),
        (
            ("--set", "evaluation.sets={a: {path: a.jsonl}}"),
            'evaluation.sets.a.path: "a.jsonl" has',
        ),
        (("--set", "launcher.kind=ray"), 'launcher.kind: "ray" has an effect only in'),
        (("--set", "task.split=test"), 'task.split: "test" has an effect only where path is'),
        (("--set", "sft={learn: text, response_field: x}"), "only with sft.learn: response"),
        (("--set", "trainer.ranks=9"), "sft.batch_size (8) leaves some of trainer.ranks (9)"),
        (("--resume",), "there is no run to resume"),
        (("--resume", "--clean"), "give only one of them"),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    typed: Typed, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    """And leave no folder."""
    with pytest.raises(UserError, match=re.escape(said)):
        typed(*options)
    assert not (tmp_path / "runs").exists()


def test_a_file_of_another_algorithm_can_be_fine_tuned_with(typed: Typed, tmp_path: Path) -> None:
    """What speaks of rewards, critics and groups means nothing here, and config.yaml is whole."""
    ppo = {"algorithm": "ppo", "critic": {"head_start_steps": 20}, "minibatches": 2}
    typed("--set", "sft.steps=1", **ppo)
    (step,) = read_metrics(tmp_path / "runs/words-sft/metrics.jsonl")
    assert step.learning.grad_norm > 0
    load_config(tmp_path / "runs/words-sft/config.yaml")


def test_a_rank_that_ends_before_it_joins_is_not_waited_for(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its last words are in the error, and the folder says that the run failed."""
    monkeypatch.setattr(command, "child_environment", lambda *_: {"PYTHONHOME": "/nowhere"})
    with pytest.raises(RunFailed, match="rank 1 ended with exit code 1 before it joined"):
        typed(ranks=2)
    assert '"ended":"failed"' in (tmp_path / "runs/words-sft/run.json").read_text()

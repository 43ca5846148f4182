"""Whole runs with the trainer and generators in threads of this process (`run_in_threads`)."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asyncrl_runs import ROOT, worst_mismatch
from lora_learners import LORA, random_adapter
from run_in_threads import ThreadedRun, ThreadLauncher, carry_out
from small_disks import small_disk

from asyncrl.config.run_config import load_config
from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.torch.core import ModuleWeights
from asyncrl.errors import RunFailed, UserError, WrongPolicyError
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.monitoring.records.trained_samples import read_trained_samples
from asyncrl.runs.directory import read_state
from asyncrl.steering.control_socket import ask
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import ensure_builtin_model
from asyncrl.tasks.model_tokenizer import load_tokenizer
from asyncrl.wire.messages import control
from asyncrl.wire.records.step import RunResult
from benchmarks.live_audit.rewards import Auditor
from benchmarks.tiny_models import SMOKE_START

pytestmark = pytest.mark.slow

KEEP: dict[str, object] = {"on_update": "keep", "max_off_policy_steps": 1}
WHOLE: dict[str, object] = KEEP | {"partial_rollout": False}
VERIFY_ONE: dict[str, object] = {"on_update": "verify", "max_off_policy_steps": 1}


@pytest.fixture
def threaded_run(
    tmp_path: Path, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ThreadedRun]:
    """A run in threads. None of them may be alive when the test ends."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("asyncrl.startup.launching.LocalLauncher", ThreadLauncher)
    before = set(threading.enumerate())
    yield ThreadedRun(tmp_path / "runs", own_model)
    roles = ("trainer", "generator")
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in left if name.startswith(roles)]


@pytest.mark.parametrize(
    ("settings", "staleness"),
    [
        ({"on_update": "keep"}, 0),
        (KEEP, 1),
        ({"on_update": "recompute", "max_off_policy_steps": 1}, 1),
        (WHOLE, 1),
        (VERIFY_ONE, 1),
    ],
    ids=["sync", "keep", "recompute", "whole answers, from an adapter", "verify, k = 1"],
)
def test_every_mode_keeps_its_bound_and_uses_it(
    threaded_run: ThreadedRun, settings: dict[str, object], staleness: int, tmp_path: Path
) -> None:
    """Also where training starts from an adapter, and engines begin with the model alone."""
    sets = {f"scheduler__{key}": value for key, value in settings.items()}
    if settings is WHOLE:
        path = random_adapter(str(threaded_run.model), tmp_path / "adapter")
        lora = {"rank": LORA.rank, "alpha": LORA.alpha, "adapter": path}
        sets |= {f"trainer__lora__{key}": value for key, value in lora.items()}
    begins_unmeasured = settings == {"on_update": "keep"}
    if begins_unmeasured:
        sets |= {"evaluation__at_start": "false", "evaluation__temperature": 0}
    result = threaded_run.run(**sets, run__steps=5)
    assert (result.accuracy_before is None, result.accuracy_after is None) == (
        begins_unmeasured,
        False,
    )
    assert result.staleness.max == staleness
    assert result.exactly_on_policy == (staleness == 0)
    if settings in (KEEP, VERIFY_ONE):
        return  # tokens of new weights on KV computed by old ones match no policy
    fresh = [step.mismatch.fresh_abs_mean for step in threaded_run.metrics()]
    assert any(value is not None for value in fresh)
    assert max(value or 0.0 for value in fresh) < 1e-4, "engine and trainer disagree"


def test_verified_work_is_exactly_of_the_policy_that_trains_on_it(
    threaded_run: ThreadedRun,
) -> None:
    """Tokens of the previous version, once verified, have the trainer's own probabilities.

    How much is generated ahead depends on the machine, so the run continues until some of it was
    rejected; at another temperature, as what was generated ahead at the first one is not kept.
    """
    for count in (8, 24, 72):
        threaded_run.run(
            scheduler__on_update="verify", scheduler__max_off_policy_steps=0, run__steps=count,
            trainer__learning_rate=3e-3, resume=count > 8,
            sampling__temperature=1.0 if count == 8 else 0.8,
        )  # fmt: skip
        steps = threaded_run.metrics()
        assert [step.staleness.max for step in steps] == [0] * count
        assert worst_mismatch(steps) < 1e-3
        verified = sum(step.tokens.verified for step in steps)
        rejected = sum(step.tokens.rejected for step in steps)
        if verified and rejected and count > 8:
            return
    pytest.fail(f"{verified} tokens verified and {rejected} rejected in 72 steps")


TALK = """
class Talk:
    replay = "deterministic"

    def reset(self, row, seed):
        self.turns = 0

    def step(self, action):
        self.turns += 1
        return str(self.turns), self.turns == 3, (5 in action.tokens) / 3
"""
SAID = "message['content'] or ''"
FORGETFUL = f"({SAID})" + "".join(f".split('{digit}')[-1]" for digit in range(10))
"""What stands before the last digit of an earlier turn is left out, as reasoning would be."""


def forgetful_agent(directory: Path) -> Path:
    """The built-in agent model, untrained, whose chat template shortens earlier turns."""
    model = ensure_builtin_model(directory, None, replace(SMOKE_START, task="agent"))
    template = model / "chat_template.jinja"
    text = template.read_text()
    assert SAID in text
    template.write_text(text.replace(SAID, FORGETFUL))
    generation = model / "generation_config.json"
    settings = json.loads(generation.read_text())
    ends = [settings["eos_token_id"], *range(20, 80, 6)]  # or turns would hardly end
    generation.write_text(json.dumps(settings | {"eos_token_id": ends}))
    return model


def test_turns_whose_history_the_template_rewrites_are_trained_on_once(
    threaded_run: ThreadedRun, tmp_path: Path
) -> None:
    """Each begins a context, with the earlier turns as the template has them."""
    environment = tmp_path / "talk.py"
    environment.write_text(TALK)
    model = forgetful_agent(tmp_path / "models")
    sets = {
        "model.path": model, "run.directory": threaded_run.runs, "run.name": "your-own",
        "environment.name": f"{environment}:Talk", "environment.history": "template",
        "sampling.max_tokens": 40, "engine.max_model_len": 96, "engine.slots": 32,
        "run.log_samples": "jsonl", "run.log_sample_tokens": True, "run.steps": 4,
        "scheduler.on_update": "verify", "scheduler.max_off_policy_steps": 0,
        "scheduler.groups_per_step": 4, "scheduler.group_size": 4,
        "trainer.learning_rate": 3e-3, "evaluation.prompts": 8,
    }  # fmt: skip
    pairs = [f"{key}={value}" for key, value in sets.items()]
    result = carry_out(ROOT / "examples" / "agent_openai.yaml", pairs, threaded_run.output)
    assert result.exactly_on_policy, threaded_run.said()
    steps = threaded_run.metrics()
    assert worst_mismatch(steps) < 1e-3, "trainer and engine saw other contexts"
    assert sum(step.tokens.verified for step in steps) > 0
    tokenizer = load_tokenizer(model)
    samples = list(read_trained_samples(threaded_run.folder / "samples"))
    assert len({(one.group, one.sample) for one in samples}) == len(samples) == 64
    for one in samples:
        drawn = one.sampled + one.drafted + one.verified
        assert drawn + one.observed == one.response_length
        question = tokenizer.decode(one.prompt_tokens)
        for place in one.contexts:
            context = tokenizer.decode((one.response_tokens or [])[place:])
            assert context.startswith(question)
            earlier = context.removeprefix(question).split("<end>")[0]
            assert not any(sign.isdigit() for sign in earlier), context
    for step in steps:
        own = [one for one in samples if one.step == step.step]
        observed = sum(one.observed for one in own)
        assert step.batch.tokens_observed == observed
        assert step.batch.tokens == sum(one.response_length for one in own) - observed
    assert sum(len(one.contexts) for one in samples) > len(samples) / 2
    config = load_config(threaded_run.folder / "config.yaml")
    task = load_task(config.task, str(model), config.run.seed, whole_rows=True)
    auditor = Auditor(config, task)
    assert asyncio.run(auditor.wrong(samples)) == []
    reward = samples[0].reward
    other = msgspec.structs.replace(samples[0], reward=reward + 1 / 3)
    assert [one for one, _ in asyncio.run(auditor.wrong([other]))] == [other]


def test_a_generator_at_another_temperature_ends_the_run_before_its_step(
    threaded_run: ThreadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Warmer(SampleGenerator):
        def __init__(
            self, engine: Any, rewards: Any, sampling: SamplingParams, **more: Any
        ) -> None:
            super().__init__(engine, rewards, replace(sampling, temperature=1.25), **more)

    monkeypatch.setattr("asyncrl.generator.setup.SampleGenerator", Warmer)
    with pytest.raises(WrongPolicyError, match=r"temperature 1\.25 instead of 1") as ended:
        threaded_run.run()
    assert ended.value.exit_code == 1
    result = msgspec.json.decode((threaded_run.folder / "result.json").read_bytes(), type=RunResult)
    assert (result.steps, result.accuracy_before is not None) == (0, True)
    assert "generator-0" in result.wrong_policy[0]
    assert threaded_run.metrics() == [], "no step was trained"
    for text in (threaded_run.said(), (threaded_run.folder / "report.html").read_text()):
        assert "temperature 1.25 instead of 1" in text
    assert json.loads((threaded_run.folder / "run.json").read_text())["ended"] == "failed"


def test_a_run_that_is_to_warn_continues_with_weights_that_are_not_installed(
    threaded_run: ThreadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModuleWeights, "install", lambda _self, _version: None)
    result = threaded_run.run(run__on_wrong_policy="warn")
    assert result.steps == 3
    assert not result.exactly_on_policy
    assert "generator-0 decodes with other weights" in result.wrong_policy[0]
    steps = threaded_run.metrics()
    assert steps[0].exactly_on_policy
    assert not steps[-1].exactly_on_policy
    assert "They still have the numbers of version 0: they were not" in steps[1].wrong_policy[0]
    assert "so the run is not on-policy" in (threaded_run.folder / "report.html").read_text()


def test_a_run_on_a_disk_that_takes_no_checkpoint_trains_to_its_end_and_says_so(
    threaded_run: ThreadedRun, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "900k") as disk:
        threaded_run.runs = disk.path
        lost = "the last state of the run, after step 3, is not saved"
        with pytest.raises(RunFailed, match=lost) as failed:
            threaded_run.run(trainer__checkpoint_every=1)
        assert failed.value.exit_code == 1
        said = threaded_run.said()
        assert "step-000001 cannot be written: No space left on device (" in said
        assert said.count("Training continues") == 1
        result = (threaded_run.folder / "result.json").read_bytes()
        assert msgspec.json.decode(result, type=RunResult).steps == 3
        assert [step.step for step in threaded_run.metrics()] == [0, 1, 2]
        assert json.loads((threaded_run.folder / "run.json").read_text())["ended"] == "failed"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise KeyError('colour')", "KeyError"),
        ("while True: pass", "rewards.timeout_seconds"),
    ],
)
def test_a_reward_that_fails(
    threaded_run: ThreadedRun, tmp_path: Path, body: str, expected: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def score(prompt, response, example):\n    {body}\n")
    with pytest.raises(UserError) as refused:
        threaded_run.run(
            rewards__functions=f"[{{name: '{file}:score'}}]", rewards__timeout_seconds=2
        )
    assert refused.value.exit_code == 2
    assert "mine.py:score" in str(refused.value)
    assert expected in str(refused.value)
    assert not threaded_run.folder.exists()


def meanwhile(run: ThreadedRun, act: Callable[[], None]) -> threading.Thread:
    """Do something once a step of the run is trained."""

    def wait() -> None:
        metrics = run.folder / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
        act()

    thread = threading.Thread(target=wait, name="meanwhile")
    thread.start()
    return thread


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_whose_folder_is_moved_away_ends_with_an_error(
    threaded_run: ThreadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.runs.runtime_folders.LOOK_SECONDS", 0.05)
    elsewhere = threaded_run.runs / "elsewhere"
    acting = meanwhile(threaded_run, lambda: threaded_run.folder.rename(elsewhere) and None)
    with pytest.raises(RunFailed, match="was removed, moved or replaced while the run was active"):
        threaded_run.run(run__steps=100_000)
    acting.join()
    assert "result" not in {path.stem for path in elsewhere.iterdir()}
    assert threaded_run.said().count("is gone, so the run ends") <= 1, "or something failed for it"


def test_a_run_whose_sockets_are_removed_is_reached_again(
    threaded_run: ThreadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.runs.runtime_folders.LOOK_SECONDS", 0.05)
    replies: list[object] = []

    def remove_sockets() -> None:
        state = read_state(threaded_run.folder)
        assert state is not None
        sockets = Path(state.control_address.removeprefix("ipc://")).parent
        shutil.rmtree(sockets)
        wait_until(lambda: {one.name for one in sockets.glob("*")} >= {"control", "data", "user"})
        replies.append(ask(threaded_run.folder, control.StopRequest()))

    acting = meanwhile(threaded_run, remove_sockets)
    threaded_run.run(run__steps=100_000)
    acting.join()
    assert isinstance(replies[0], control.Accepted)
    assert threaded_run.said().count("it is there again") == 1

"""Which samples of a run are recorded for the report."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.generator.reports import SampleRecorder
from asyncrl.generator.sample_state import HeldSample
from asyncrl.generator.turns.conversation import Episode
from asyncrl.monitoring.records.samples import newest_samples, read_samples, trained_on
from asyncrl.rewards.calls import Reward
from asyncrl.rollout.trajectory import Provenance, SampleId, TrajectoryBuilder
from asyncrl.wire.messages.to_generator import PromptPayload

GROUP_SIZE, GROUPS, STEPS = 4, 3, 48
TOKENIZER: Any = SimpleNamespace(decode=lambda tokens: f"<{tokens[0]}>")


def config() -> RunConfig:
    """Of a run that records every fourth step."""
    sections = {
        "run": {"steps": STEPS},
        "scheduler": {"group_size": GROUP_SIZE, "groups_per_step": GROUPS},
        "monitoring": {"report_samples": STEPS // 8},
    }
    return parse_config(sections, source="test")


def held(sample: SampleId, length: int) -> HeldSample:
    builder = TrajectoryBuilder(sample, "p", np.array([1], np.int32))
    builder.append(
        tokens=np.full(length, 7, np.int32),
        logprobs=np.full(length, -0.5, np.float32),
        topk_ids=np.zeros((length, 0), np.int32),
        topk_logprobs=np.zeros((length, 0), np.float32),
        noise_seeds=np.zeros(length, np.uint64),
        provenance=np.full(length, Provenance.SAMPLED, np.uint8),
        policy_version=0,
    )
    reward: Any = asyncio.Future
    return HeldSample(builder.finish("stop"), PromptPayload("p", b"", {"prompt": "?"}), reward)


def recorded(folder: Path, rng: random.Random, generators: int) -> list[tuple[int, str, int]]:
    """Step, sample and length of what is recorded of a run in which short answers come first."""
    recorders = [
        SampleRecorder(folder, TOKENIZER, config(), f"generator-{one}") for one in range(generators)
    ]
    for step in range(STEPS):
        groups = range(GROUPS * step, GROUPS * step + GROUPS)
        samples = [SampleId(group, sample) for group in groups for sample in range(GROUP_SIZE)]
        lengths = {sample: 1 + (17 * sample.group + 5 * sample.sample) % 9 for sample in samples}
        for sample in sorted(samples, key=lambda one: lengths[one] + 3 * rng.random()):
            rng.choice(recorders).consider(
                held(sample, lengths[sample]), reward=Reward(1.0), step=step
            )
    for recorder in recorders:
        recorder.close()
    newest = newest_samples(folder, GROUPS)
    assert [one.step for one in newest] == [STEPS - 1] * GROUPS, "a few of the last step"
    assert len({one.sample_id for one in newest}) == GROUPS, "of different groups"
    records = read_samples(folder / "samples.jsonl")
    return [(one.step, one.sample_id, len(one.tokens)) for one in records]


def test_samples_are_chosen_by_number_and_not_by_arrival(tmp_path: Path) -> None:
    rng = random.Random(0)
    found = [
        recorded(tmp_path / f"{generators}-{repeat}", rng, generators)
        for generators in (1, 3)
        for repeat in range(4)
    ]
    assert all(one == found[0] for one in found), "it depends on who was first"
    steps = [step for step, _, _ in found[0]]
    assert steps == list(range(0, STEPS, 4)), "one sample of every fourth step"
    chosen = [tuple(map(int, name.split("."))) for _, name, _ in found[0]]
    assert {group % GROUPS for group, _ in chosen} == set(range(GROUPS))
    assert {sample for _, sample in chosen} == set(range(GROUP_SIZE))


def test_recent_samples_forget_the_oldest_and_those_before_a_rewind(tmp_path: Path) -> None:
    recorder = SampleRecorder(tmp_path, TOKENIZER, config(), "generator-0")

    def record(*steps: int) -> list[int]:
        for step in steps:
            sample = SampleId(GROUPS * step, (GROUPS * step + step) % GROUP_SIZE)
            recorder.consider(held(sample, 2_500), reward=Reward(1.0), step=step)
        return [one.step for one in newest_samples(tmp_path, 200) if one.step % 4]

    steps = record(*range(1, 20))
    assert steps[-1] == 19
    assert (tmp_path / "recent" / "generator-0.jsonl").stat().st_size <= 1 << 18
    assert len(steps) < 10, "it grows with the run"
    recorder.rewind()
    assert record(5)[-1] == 5
    recorder.close()


def test_samples_of_evaluations_are_those_that_the_controller_chose(tmp_path: Path) -> None:
    recorder = SampleRecorder(tmp_path, TOKENIZER, config(), "generator-0")
    recorder.evaluated(held(SampleId(3, 1), 2), reward=Reward(0.5, (0.5,)), shown_of="hard")
    recorder.close()
    (one,) = read_samples(tmp_path / "samples.jsonl")
    assert (one.evaluation, one.sample_id, one.step, one.reward) == ("hard", "3.1", 0, 0.5)
    assert one.rewards == {"arithmetic": 0.5}
    assert (one.prompt, one.answer) == ("?", None)
    assert trained_on([one]) == []


def test_the_prompt_of_a_sample_is_that_of_its_environment(tmp_path: Path) -> None:
    recorder = SampleRecorder(tmp_path, TOKENIZER, config(), "generator-0")
    sample = replace(held(SampleId(3, 1), 2), episode=Episode(0, prompt=np.array([5], np.int32)))
    recorder.evaluated(sample, reward=Reward(0.0), shown_of="hard")
    recorder.close()
    (one,) = read_samples(tmp_path / "samples.jsonl")
    assert (one.prompt, one.rewards) == ("<5>", {})

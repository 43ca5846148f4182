"""Sabotage: each way to sample from another policy is named within one step, and health is not.

Real engine, trainer and checks in one process (`policy_loop`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_loop import GENERATOR, PolicyLoop
from tiny_models import make_llama, make_qwen3, save
from torch_cores import request

from asyncrl.config.run_config import RunConfig
from asyncrl.engine.torch.core import ModuleWeights
from asyncrl.trainer.model.packing import PackedBatch
from asyncrl.trainer.objective.logprob_mismatch import FLOAT32_CPU, TENSOR_CORES, Limits
from asyncrl.trainer_process import policy_check
from asyncrl.trainer_process.delivery_check import WholeGroup
from asyncrl.trainer_process.policy_check import PolicyCheck, logprobs_of, rescored
from asyncrl.trainer_process.setup import rounding_limits
from asyncrl.wire.messages.from_trainer import WrongPolicyFound

Make = Callable[..., PolicyLoop]
HEALTHY = 3
"""Steps before something breaks."""


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(make_qwen3(seed=5, scale=3.0), tmp_path_factory.mktemp("tied"))


@pytest.fixture
def make(tied: str, tmp_path: Path) -> Iterator[Make]:
    made: list[PolicyLoop] = []

    def of(model: str = tied, **settings: Any) -> PolicyLoop:
        made.append(PolicyLoop(model, tmp_path, **settings))
        return made[-1]

    yield of
    for loop in made:
        loop.close()


def healthy(loop: PolicyLoop) -> PolicyLoop:
    for _ in range(HEALTHY):
        assert loop.step() == []
    return loop


def named(loop: PolicyLoop, cause: str, *, version: int) -> str:
    """The sentence of the only finding of one step."""
    (found,) = loop.step()
    assert (found.cause, found.generator, found.policy_version) == (cause, GENERATOR, version)
    return found.text


def test_weights_that_are_not_installed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = healthy(make())
    monkeypatch.setattr(ModuleWeights, "install", lambda _self, _version: None)
    text = named(loop, "weights", version=HEALTHY + 1)
    assert f"all 25 tensors differ. They still have the numbers of version {HEALTHY}" in text


@pytest.mark.parametrize("skipped", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_tensor_that_is_skipped(
    make: Make, monkeypatch: pytest.MonkeyPatch, skipped: str
) -> None:
    loop = healthy(make())
    own = loop.core._weights._own
    monkeypatch.setitem(own, skipped, own[skipped].detach().clone())
    text = named(loop, "weights", version=HEALTHY + 1)
    assert f"1 of 25 tensors differ ({skipped})" in text


def test_a_tied_head_that_is_left_behind(make: Make) -> None:
    loop = healthy(make())
    module = loop.core._model.module
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
    text = named(loop, "weights", version=HEALTHY + 1)
    assert "1 of 25 tensors differ (lm_head.weight). They still have the numbers of" in text


def test_one_changed_row_of_an_embedding(make: Make) -> None:
    """Few elements: a sample of elements would miss it."""
    loop = healthy(make())
    install = loop.core._weights.install

    def all_but_a_row(version: int) -> None:
        rows = loop.core._model.module.model.embed_tokens.weight
        kept = rows[7].detach().clone()
        install(version)
        with torch.no_grad():
            rows[7] = kept

    loop.core._weights.install = all_but_a_row  # type: ignore[method-assign]
    text = named(loop, "weights", version=HEALTHY + 1)
    assert "2 of 25 tensors differ (model.embed_tokens.weight, lm_head.weight)" in text


def test_a_temperature_that_is_wrong(make: Make) -> None:
    for temperature in (0.9, 1.02):
        loop = healthy(make())
        loop.temperature = temperature
        text = named(loop, "temperature", version=HEALTHY)
        assert "nats on average (rounding explains 0.001)" in text
        assert f"samples at temperature {temperature:.3g} instead of 1:" in text


def test_a_temperature_that_is_wrong_in_bfloat16(make: Make) -> None:
    loop = healthy(make(dtype=torch.bfloat16))
    loop.temperature = 1.2
    text = named(loop, "temperature", version=HEALTHY)
    assert re.search(r"as at a temperature that is [12]\d% off \(rounding explains 2%\)", text)
    assert "samples at temperature 1.2 instead of 1:" in text


def test_few_tokens_are_judged_with_those_of_the_next_steps(make: Make) -> None:
    """40 tokens a step: the second step is named, by trajectories of its own version."""
    loop = make(tokens=10, groups=1)
    assert loop.step() == []
    assert loop.step() == []
    loop.temperature = 1.25
    assert loop.step() == [], "40 tokens say nothing"
    text = named(loop, "temperature", version=3)
    assert "over 80 tokens" in text
    assert "samples at temperature 1.25 instead of 1:" in text


def test_a_generator_is_wrong_until_its_tokens_agree_again(make: Make) -> None:
    loop = make(tokens=10, groups=1)
    follow = []
    for temperature in (1.0, 1.0, 1.25, 1.25, 1.0, 1.0):
        loop.temperature = temperature
        loop.step()
        follow.append(loop.check.follows)
    assert follow == [True, True, True, False, False, True], "judged every second step"
    loop.check.findings(6)
    assert loop.check.follows, "a step without its tokens"


def several_wrong(loop: PolicyLoop, first: int) -> list[WrongPolicyFound]:
    """Findings about four generators at a wrong temperature, one group of 80 tokens of each."""
    loop.temperature = 1.25
    for index in range(4):
        rewards, samples = np.arange(4, dtype=np.float32), loop._draw(first + index)
        rows = loop.learner.add_group(samples, rewards)
        names = [f"generator-{index}"] * 4
        loop.check.add(WholeGroup(first + index, samples, rewards, names, []), rows)
    return loop.check.findings(0)


def test_two_causes_are_looked_for_in_a_step_and_each_generator_is_found_once(make: Make) -> None:
    """With 1,000 generators, the run would otherwise stand for hours, at every step."""
    loop = make(tokens=20)
    found = several_wrong(loop, 0)
    assert {one.found.generator for one in found} == {f"generator-{index}" for index in range(4)}
    assert [one.found.cause for one in found] == ["temperature"] * 2 + ["unknown"] * 2
    assert all("was not investigated" in one.found.text for one in found[2:])
    assert several_wrong(loop, 4) == []
    assert not loop.check.follows


def test_a_cause_that_cannot_be_looked_for_does_not_hide_the_finding(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for it, the trainer would end, be replaced, and end again."""

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(policy_check, "explain", no_memory)
    found = several_wrong(make(tokens=20), 0)
    assert [one.found.cause for one in found] == ["unknown"] * 4
    assert "could not be investigated: CUDA out of memory" in found[0].found.text


def test_suspects_are_scored_one_at_a_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they may be longer than any micro-batch that fits into memory."""
    loop = make(tokens=20)
    longest: list[int] = []
    score = loop.learner.policy.score
    loop.temperature = 1.25
    samples = loop._draw(0)

    def measured(batch: PackedBatch) -> Any:
        longest.append(batch.tokens.shape[1])
        return score(batch)

    monkeypatch.setattr(loop.learner.policy, "score", measured)
    together = rescored(loop.learner.policy, samples)
    assert longest == [24 + 20 - 1] * 4
    assert together.tokens == 80
    for one, expected in zip(logprobs_of(loop.learner.policy, samples), samples, strict=True):
        assert len(one) == len(expected.tokens)
    assert longest == [24 + 20 - 1] * 8


def test_samples_that_are_too_long_are_not_sent(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message beyond the controller's limit would cut the trainer off."""
    monkeypatch.setattr(policy_check, "_MAX_SUSPECT_TOKENS", 2 * (24 + 20))
    monkeypatch.setattr(policy_check, "explain", lambda *_, **__: None)
    assert len(several_wrong(make(tokens=20), 0)[0].samples) == 2
    monkeypatch.setattr(policy_check, "_MAX_SUSPECT_TOKENS", 24 + 19)
    found = several_wrong(make(tokens=20), 0)[0]
    assert found.samples == ()
    assert "too long to be scored again" in found.found.text


def test_kv_of_older_weights(make: Make) -> None:
    """New requests copy the KV of a sibling that has run through the installation."""
    loop = make()
    core = loop.core

    def leave_siblings_running() -> None:
        for index in range(2):
            core.interrupt(f"sibling {index}")
            prompt = loop.prompt(2 * loop.learner.policy_version + index)
            core.add(request(f"sibling {index}", prompt, max_tokens=100, stop_tokens=()))
        core.step()

    loop.before_installing = leave_siblings_running
    healthy(loop)

    def take_their_kv_for_new() -> None:
        core._rows.kv_installation[: core._rows.n] = core._installations

    loop.before_drawing = take_their_kv_for_new
    text = named(loop, "kv", version=HEALTHY)
    assert "they were drawn on KV that other weights had computed" in text


def test_one_hidden_step_of_lag(make: Make) -> None:
    """The parameters that are looked at are right, and the ones that decode are a step behind."""
    loop = healthy(make())
    right = loop.core._model.module
    behind = copy.deepcopy(right)
    install = loop.core._weights.install

    def one_behind(version: int) -> None:
        behind.load_state_dict(right.state_dict())
        install(version)

    loop.core._weights.install = one_behind  # type: ignore[method-assign]
    loop.core._model.module = behind
    loop.core._model.fuse()  # of the copy
    assert loop.step() == [], "these tokens were drawn before the first late installation"
    text = named(loop, "lag", version=HEALTHY + 1)
    assert f"its tokens follow version {HEALTHY}, one step behind" in text


def test_another_attention_is_named_as_unknown(make: Make) -> None:
    loop = healthy(make())
    for layer in loop.core._model.module.model.layers:
        layer.self_attn.scaling *= 0.9
    loop.core._model.fuse()  # with this scaling
    text = named(loop, "unknown", version=HEALTHY)
    assert "computes another policy from the same weights" in text


def provisional(loop: PolicyLoop, steps: int) -> list[WrongPolicyFound]:
    """What its trainer tells from now on, with so many steps of the run provisional."""
    loop.check = PolicyCheck(
        FLOAT32_CPU, loop.learner.policy, loop.publisher, provisional_steps=steps
    )
    told: list[WrongPolicyFound] = []
    findings = loop.check.findings

    def noted(version: int) -> list[WrongPolicyFound]:
        found = findings(version)
        told.extend(found)
        return found

    loop.check.findings = noted  # type: ignore[method-assign]
    return told


def test_what_rounding_may_explain_is_provisional_in_the_first_steps(make: Make) -> None:
    """And found again when they are over, if it lasts."""
    loop = make()
    told = provisional(loop, HEALTHY + 2)
    healthy(loop)
    for layer in loop.core._model.module.model.layers:
        layer.self_attn.scaling *= 0.9
    loop.core._model.fuse()  # with this scaling
    for _ in range(4):
        loop.step()
    assert [(one.found.policy_version, one.provisional) for one in told] == [
        (HEALTHY, True), (HEALTHY + 2, False),
    ]  # fmt: skip
    assert {one.found.cause for one in told} == {"unknown"}


def test_a_known_cause_is_never_provisional(make: Make) -> None:
    loop = make()
    told = provisional(loop, 9)
    loop.temperature = 0.9
    loop.step()
    assert [(one.found.cause, one.provisional) for one in told] == [("temperature", False)]


def test_a_model_with_a_head_of_its_own_is_healthy(make: Make, tmp_path: Path) -> None:
    healthy(make(save(make_llama(seed=6, scale=3.0), tmp_path / "untied")))


@pytest.mark.parametrize(
    ("dtype", "engine", "on_cpus", "limits"),
    [
        ("float32", torch.float32, True, FLOAT32_CPU),
        ("float64", torch.float32, True, FLOAT32_CPU),
        ("bfloat16", torch.float32, True, TENSOR_CORES),
        ("float32", torch.bfloat16, True, TENSOR_CORES),
        ("float32", torch.float32, False, TENSOR_CORES),
    ],
)
def test_limits_follow_the_less_exact_side_and_the_model(
    dtype: str, engine: torch.dtype, on_cpus: bool, limits: Limits
) -> None:
    config = RunConfig.model_validate({"trainer": {"dtype": dtype}})
    assert rounding_limits(config, engine, on_cpus=on_cpus, routed=False) is limits
    routed = rounding_limits(config, engine, on_cpus=on_cpus, routed=True)
    factor = 1 if limits is FLOAT32_CPU else 3
    assert routed.mean == pytest.approx(factor * limits.mean)
    assert routed.slope == pytest.approx(factor * limits.slope)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_hundred_healthy_steps_are_not_mentioned(
    make: Make, tmp_path: Path, dtype: torch.dtype
) -> None:
    """100 steps with each kind of engine: 64 fresh tokens and one installation in each."""
    model = save(make_qwen3(seed=5, scale=3.0, num_hidden_layers=1), tmp_path / "one layer")
    loop = make(model, dtype=dtype, groups=1, group_size=16, tokens=4)
    assert [found for _ in range(100) for found in loop.step()] == []
    assert max(loop.means) < (1e-5 if dtype == torch.float32 else 0.02), "far from the limit"

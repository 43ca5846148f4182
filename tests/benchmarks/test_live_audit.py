"""The statements of `benchmarks.live_audit` about tokens whose distributions are known.

Right samples pass with fixed seeds, and each kind of wrong ones is found by the statement that is
made for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.config.run_config import load_config
from asyncrl.monitoring.records.samples import SampleSegment
from asyncrl.monitoring.records.trained_samples import TrainedSample
from benchmarks.live_audit.audit import refusal
from benchmarks.live_audit.independence import correlations, repetitions, shared_numbers
from benchmarks.live_audit.main import SCENARIOS, settings_of
from benchmarks.live_audit.statements import Statement, of_table, sum_of, sums, uniformity
from benchmarks.live_audit.tokens import Tokens, contexts_of

VOCABULARY, STOP, LONGEST = 12, 0, 40
STEPS, GROUPS, SIZE, PROMPTS = 8, 8, 4, 16
LIMIT = 1e-7
"""What is wrong gets a smaller p-value. What is right gets more than 1e-4 for all together."""
Draw = Callable[[np.ndarray, float, np.random.Generator], int]


def by_number(p: np.ndarray, u: float, rng: np.random.Generator) -> int:
    """From the most probable token on, as engines do."""
    del rng
    order = np.argsort(-p, kind="stable")
    return int(order[min(np.searchsorted(p[order].cumsum(), u), len(p) - 1)])


def too_sure(p: np.ndarray, u: float, rng: np.random.Generator) -> int:
    """One in eight tokens is the most probable one."""
    return int(p.argmax()) if rng.random() < 0.125 else by_number(p, u, rng)


def again(group: int, index: int) -> tuple[int, ...]:
    """The seeds of a prompt's earlier visit."""
    return group % PROMPTS, index


def far(group: int, index: int) -> tuple[int, ...]:
    """Two groups that have nothing in common but their seeds."""
    return (3 if group == 40 else group), index


def often_if_long(length: int, rng: np.random.Generator) -> bool:
    """Most of the longer half."""
    return length > 12 and rng.random() < 0.8


def run_of(
    draw: Draw = by_number,
    *,
    seed_of: Callable[[int, int], tuple[int, ...]] = lambda group, index: (group, index),
    seed: int = 0,
    drop: Callable[[int, np.random.Generator], bool] = lambda length, rng: False,
) -> Tokens:
    """Samples of a Markov chain for each prompt, whose tables differ from step to step."""
    rng = np.random.default_rng(seed)
    tables = rng.dirichlet(np.full(VOCABULARY, 0.5), (PROMPTS, VOCABULARY)) + 1e-4
    tables[..., STOP] = 0.03
    rows: dict[str, list] = {name: [] for name in Tokens.__dataclass_fields__ if name != "drift"}
    sample = 0
    for group in range(STEPS * GROUPS):
        step, prompt = divmod(group, GROUPS)[0], group % PROMPTS
        drift = np.exp(0.3 * np.random.default_rng(step).normal(size=(VOCABULARY, VOCABULARY)))
        table = tables[prompt] * drift
        table /= table.sum(1, keepdims=True)
        for index in range(SIZE):
            numbers = np.random.default_rng((seed, *seed_of(group, index))).random(LONGEST)
            text, mine = [1], len(rows["token"])
            prefix = hash((prompt,))
            while len(text) <= LONGEST and text[-1] != STOP:
                p = table[text[-1]]
                token, at = draw(p, numbers[len(text) - 1], rng), len(text) - 1
                values = {
                    "probabilities": p, "token": token, "recorded": np.log(p[token]),
                    "provenance": 0, "before": 0 if at else -1, "before_that": 0 if at > 1 else -1,
                    "sample": sample, "step": step, "group": group, "index": index,
                    "visit": group // PROMPTS, "context": 0, "offset": at, "turn": 0,
                    "turn_offset": at, "prompt": prompt, "prefix": prefix,
                }  # fmt: skip
                for name, value in values.items():
                    rows[name].append(value)
                text.append(token)
                prefix = hash((prefix, token))
            sample += 1
            if drop(len(text), rng):
                for column in rows.values():
                    del column[mine:]
    arrays = {name: np.array(column) for name, column in rows.items()}
    return Tokens(drift=(0 * arrays["probabilities"],) * 2, **arrays)


def all_of(tokens: Tokens) -> list[Statement]:
    found = sums(tokens, [STOP]) + uniformity(tokens, 0) + correlations(tokens, 0, GROUPS)
    return [*found, *repetitions(tokens), shared_numbers(tokens)]


def test_right_samples_pass() -> None:
    found = all_of(run_of())
    assert len(found) > 60
    assert min(one.p_value for one in found) * len(found) > 1e-4


@pytest.mark.parametrize(
    ("tokens", "by"),
    [
        (lambda: run_of(too_sure), "most probable token: all"),
        (lambda: run_of(seed_of=lambda group, index: (group, index // 2)), "siblings"),
        (lambda: run_of(seed_of=lambda group, index: (group // 2, index)), "neighbouring groups"),
        (lambda: run_of(seed_of=again), "visits of a prompt"),
        (lambda: run_of(seed_of=again), "an earlier visit"),
        (lambda: run_of(seed_of=far), "any two"),
        (lambda: run_of(drop=often_if_long), "stop token: all"),
    ],
    ids=["sure", "siblings", "neighbours", "visits", "repeats", "far pair", "long ones dropped"],
)  # fmt: skip
def test_wrong_samples_are_found(tokens: Callable[[], Tokens], by: str) -> None:
    found = [one for one in all_of(tokens()) if by in one.name]
    assert min(one.p_value for one in found) < LIMIT


def test_contexts_begin_with_what_was_observed() -> None:
    record = TrainedSample(
        step=0, group=0, sample=0, prompt_id="p", prompt="", response="", reward=0.0,
        finish_reason="stop", generator="g", prompt_length=2, response_length=8,
        segments=[SampleSegment(0, 0, 8)], sampled=5, drafted=0, verified=0, observed=3,
        contexts=[4], prompt_tokens=[1, 2], response_tokens=[3, 4, 5, 6, 7, 8, 9, 10],
        provenance="00303300", behaviour_logprobs=[0.0] * 8,
    )  # fmt: skip
    found = [(one.prompt, one.response, one.start) for one in contexts_of(record)]
    assert found == [([1, 2], [3, 4, 5, 6], 0), ([7, 8], [9, 10], 6)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_run_is_valid_and_can_be_audited(name: str) -> None:
    root = Path(__file__).resolve().parents[2]
    config = load_config(root / SCENARIOS[name].config, settings_of(name, "torch", 0))
    assert refusal(config) is None


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("run.log_sample_tokens=false", "logged no tokens"),
        ("scheduler.max_off_policy_steps=1", "exactly on-policy"),
        ("scheduler.dynamic_sampling.enabled=true", "chosen by their rewards"),
    ],
)
def test_a_run_that_claims_less_is_refused(setting: str, why: str) -> None:
    config = load_config(None, [*settings_of("arithmetic", "torch", 0), setting])
    assert why in str(refusal(config))


def test_a_set_of_all_tokens_states_nothing_whatever_rounding_leaves() -> None:
    """As the rare ones are, all of them, of a policy that knows nothing yet."""
    p = np.random.default_rng(0).dirichlet(np.full(40, 50.0), size=4096)
    assert p.max() < 0.05
    tokens: Any = SimpleNamespace(probabilities=p, token=np.arange(4096) % 40)
    all_of_them = of_table(tokens, (p < 0.05).astype(float))
    assert float(all_of_them.variance.sum()) > 0, "rounding leaves something"
    chosen = np.ones(4096, np.bool_)
    assert sum_of("rare token", all_of_them, chosen) is None
    some_of_them = of_table(tokens, (p < 0.02).astype(float))
    assert sum_of("rarer token", some_of_them, chosen) is not None

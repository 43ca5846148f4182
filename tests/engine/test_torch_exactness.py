"""What the torch engine samples with drafting is what the model says: chi-square over sequences.

Every response of at most four tokens is a cell of the enumerated distribution. A case fails when
its p-value is below 1e-4; with the 7 cases here a correct engine would fail one run in 1,400 if
seeds were random. They are fixed, so a run either always passes or always fails.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_models import STOP, VOCAB, make_qwen3

from cache.config import CacheConfig
from cache.trajectory import IntArray
from cache.tree import RolloutCache
from engine.protocol import GenerateRequest, SamplingParams
from engine.torch.core import CoreSettings, DecodeCore
from engine.torch.drafting import Drafts, DraftSource
from engine.torch.model import SlotModel, load_model

PROMPT = np.array([4, 0, 7], np.int32)
LENGTH = 4
SAMPLES = 12_000
FALSE_ALARM = 1e-4


@dataclass(frozen=True)
class Case:
    temperature: float = 1.0
    top_p: float = 1.0
    drift: float = 0.3
    """How far the sampled policy is from the one whose rollouts are drafted."""


CASES = {
    "cache": Case(),
    "cache, cold": Case(temperature=0.6),
    "cache, hot": Case(temperature=1.5),
    "cache, top-p": Case(top_p=0.7),
    "cache, hot and top-p": Case(temperature=1.3, top_p=0.9),
    "another policy altogether": Case(drift=1.0),
}


def enumerate_law(model: torch.nn.Module, case: Case) -> dict[tuple[int, ...], float]:
    """Probability of every response: ends with STOP, or has LENGTH tokens."""
    law: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        texts = list(frontier)
        ids = torch.tensor([[*PROMPT.tolist(), *text] for text in texts])
        with torch.no_grad():
            logits = model(ids).logits[:, -1].double() / case.temperature
        grown: dict[tuple[int, ...], float] = {}
        for text, row in zip(texts, torch.softmax(logits, -1).numpy(), strict=True):
            order = np.argsort(-row)
            before = np.cumsum(row[order]) - row[order]
            kept = order[before < case.top_p]
            for token in kept:
                mass = frontier[text] * row[token] / row[kept].sum()
                ended = token == STOP or len(text) + 1 == LENGTH
                (law if ended else grown)[(*text, int(token))] = mass
        frontier = grown
    assert abs(sum(law.values()) - 1) < 1e-9
    return law


def sample(
    core: DecodeCore, case: Case, count: int, first_seed: int, old: list[IntArray] | None = None
) -> list[tuple[int, ...]]:
    written: dict[str, list[int]] = {}
    params = {"max_tokens": LENGTH, "temperature": case.temperature, "top_p": case.top_p}
    for i in range(count):
        sampling = SamplingParams(
            **params, stop_tokens=(STOP,), top_k_logprobs=0, seed=first_seed + i
        )
        draft = old[i % len(old)] if old else np.empty(0, np.int32)
        core.add(GenerateRequest(f"{i}", "p", PROMPT, sampling, draft_tokens=draft))
    while core.has_work:
        for chunk in core.step():
            written.setdefault(chunk.request_id, []).extend(chunk.tokens.tolist())
    return [tuple(text) for text in written.values()]


def p_value(written: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square, cells of fewer than 5 expected sequences pooled by their first tokens."""
    counts = Counter(written)
    assert set(counts) <= set(law), "a sequence of probability 0 was written"
    observed: Counter[tuple[int, ...]] = Counter()
    expected: Counter[tuple[int, ...]] = Counter()
    for text, mass in law.items():
        cell = text if mass * len(written) >= 5 else ("rest", len(text), text[0])
        observed[cell] += counts[text]
        expected[cell] += mass * len(written)
    rare = [cell for cell in expected if expected[cell] < 5]
    for cell in rare:
        observed[("rest",)] += observed.pop(cell)
        expected[("rest",)] += expected.pop(cell)
    cells = list(expected)
    return float(stats.chisquare([observed[c] for c in cells], [expected[c] for c in cells]).pvalue)


def slots_with(path: str, weights: torch.nn.Module) -> SlotModel:
    cpu = torch.device("cpu")
    model = load_model(path, slots=64, max_len=16, device=cpu, dtype=torch.float32)
    model.module.load_state_dict(weights.state_dict())
    return model


def core_of(model: SlotModel, source: DraftSource | None) -> DecodeCore:
    settings = CoreSettings(
        max_step_tokens=1000, max_draft_tokens=4, max_prefill_tokens=64, chunk_tokens=9, top_k=0
    )
    return DecodeCore(model, settings, source, seed=0)


def policies(drift: float) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The policy that wrote the drafts, and the one to sample from."""
    old, other = make_qwen3(seed=0), make_qwen3(seed=1)
    new = make_qwen3(seed=0)
    with torch.no_grad():
        for mine, theirs in zip(new.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, drift)
    return old, new


@pytest.mark.parametrize("name", list(CASES))
def test_drafts_of_another_policy_leave_the_law_alone(tiny_qwen3: str, name: str) -> None:
    torch.set_num_threads(1)
    case = CASES[name]
    old, new = policies(case.drift)
    law = enumerate_law(new, case)
    cache = RolloutCache(CacheConfig(max_bytes=1 << 22, min_match=1, min_probability=0.0))
    model = slots_with(tiny_qwen3, old)
    earlier = sample(core_of(model, cache), case, 400, first_seed=10**6)
    model.module.load_state_dict(new.state_dict())
    core = core_of(model, cache)
    written = sample(core, case, SAMPLES, 0, [np.array(t, np.int32) for t in earlier])
    drafted = core.stats()
    assert drafted.tokens_drafted > SAMPLES / 2
    assert 0 < drafted.tokens_accepted < drafted.tokens_drafted
    assert p_value(written, law) > FALSE_ALARM


class _Adversary:
    """Drafts random tokens, of random lengths, for rows that it never learns anything about."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._opened = 0

    def open(self, key: str, context: IntArray) -> int:
        self._opened += 1
        return self._opened

    def close(self, row: int) -> None: ...

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None: ...

    def draft(self, rows: IntArray, budgets: IntArray) -> Drafts:
        lengths = self._rng.integers(0, budgets + 1)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return _Ragged(self._rng.integers(0, VOCAB, offsets[-1]).astype(np.int32), offsets)


@dataclass(frozen=True)
class _Ragged:
    tokens: IntArray
    offsets: IntArray


def test_an_adversarial_draft_source_leaves_the_law_alone(tiny_qwen3: str) -> None:
    torch.set_num_threads(1)
    _, new = policies(0.3)
    core = core_of(slots_with(tiny_qwen3, new), _Adversary())
    written = sample(core, Case(), SAMPLES, 0)
    assert core.stats().tokens_drafted > SAMPLES / 2
    assert p_value(written, enumerate_law(new, Case())) > FALSE_ALARM


def test_the_test_can_fail(tiny_qwen3: str) -> None:
    """Sampling from the old policy must be told from the new one: power, not only size."""
    torch.set_num_threads(1)
    old, new = policies(0.3)
    written = sample(core_of(slots_with(tiny_qwen3, old), None), Case(), 4000, 0)
    assert p_value(written, enumerate_law(new, Case())) < FALSE_ALARM

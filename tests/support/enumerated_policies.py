"""Tiny policies of which every response can be enumerated, and comparisons of samples with them.

Used by the exactness tests of the torch engine. `false_alarms` says which p-value fails; seeds are
fixed, so a comparison always passes or always fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch_cores
from false_alarms import is_caught
from numpy.typing import NDArray
from scipy import stats
from tiny_models import STOP, make_qwen3
from torch_cores import run, tokens_of

from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.engine.sampling.stopping import StopRule
from asyncrl.engine.torch.core import DecodeCore
from asyncrl.engine.torch.model import SlotModel
from asyncrl.rollout.trajectory import IntArray

PROMPT = np.array([4, 0, 7], np.int32)
LENGTH = 4
"""Most tokens in a response."""

Doubles = NDArray[np.float64]
PIECES = [b"a", b"b", b"ab", b"ba", b"", b"b\xc3", b"\xa9a", b"aa", b"\xa9", b""]
"""The text of each token; 5, 6 and 8 have halves of é. STOP has none."""
STRINGS = ("bab", "éa")
"""Stop strings that one token, two or three complete, with text after them or without."""

Distribution = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class Case:
    """How a policy is sampled, and how far it is from the policy that generated the drafts."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Stop strings over PIECES."""
    drift: float = 0.3
    """0: the same policy as the drafts'; 1: an unrelated one."""


@cache
def policies(drift: float) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The policy that generates the drafts, and the one to sample from; nobody changes them."""
    old, other = make_qwen3(seed=0), make_qwen3(seed=1)
    new = make_qwen3(seed=0)
    with torch.no_grad():
        for mine, theirs in zip(new.parameters(), other.parameters(), strict=True):
            mine.lerp_(theirs, drift)
    return old, new


def slots_with(path: str, weights: torch.nn.Module, *, slots: int = 200) -> SlotModel:
    model = torch_cores.load(path, slots=slots, max_len=16)
    model.module.load_state_dict(weights.state_dict())
    return model


def core_of(model: SlotModel, source: RolloutCache | None, **changes: Any) -> DecodeCore:
    """A core with large steps that reports each response in few chunks."""
    settings = {
        "max_step_tokens": 1000,
        "max_draft_tokens": 4,
        "max_prefill_tokens": 256,
        "chunk_tokens": 9,
        "top_k": 0,
    }
    return torch_cores.core_of(model, source, **(settings | changes))


def request(case: Case, name: str, seed: int, *, top_k: int = 0, **fields: Any) -> GenerateRequest:
    """A request for one response to PROMPT, sampled as in `case`."""
    sampling = SamplingParams(
        max_tokens=LENGTH,
        temperature=case.temperature,
        top_p=case.top_p,
        top_k=case.top_k,
        min_p=case.min_p,
        stop_tokens=(STOP,),
        stop_rule=rule_of(case.stop),
        top_k_logprobs=top_k,
        seed=seed,
    )
    return GenerateRequest(name, "p", PROMPT, sampling, **fields)


@cache
def rule_of(stop: tuple[str, ...]) -> StopRule | None:
    """One rule for all requests, as in a run."""
    return StopRule.of(stop, PIECES) if stop else None


def text_of(chunks: Sequence[TokenChunk]) -> tuple[int, ...]:
    return tuple(tokens_of(chunks))


def sample(
    core: DecodeCore, case: Case, count: int, first_seed: int, old: list[IntArray] | None = None
) -> list[tuple[int, ...]]:
    """`count` responses; with `old`, each request brings one of those as its draft."""
    none = np.empty(0, np.int32)
    requests = [
        request(case, f"{i}", first_seed + i, draft_tokens=old[i % len(old)] if old else none)
        for i in range(count)
    ]
    return [text_of(chunks) for chunks in run(core, requests).values()]


def truncated(chances: Doubles, top_k: int, top_p: float, min_p: float) -> Doubles:
    """`[V]` probabilities after top-k, top-p and min-p, each rescaled: a plain second version."""
    out = chances / chances.sum()
    if top_k:
        out = np.where(out >= np.sort(out)[-min(top_k, len(out))], out, 0)
        out /= out.sum()
    if top_p < 1:
        order = np.argsort(-out, kind="stable")
        before = np.cumsum(out[order]) - out[order]
        out[order[before >= top_p]] = 0
    out[out < min_p * out.max()] = 0
    return out / out.sum()


def enumerate_distribution(model: torch.nn.Module, case: Case) -> Distribution:
    """Probability of every response: ends with STOP, or has LENGTH tokens."""
    distribution: Distribution = {}
    frontier: Distribution = {(): 1.0}
    for _ in range(LENGTH):
        texts = list(frontier)
        ids = torch.tensor([[*PROMPT.tolist(), *text] for text in texts])
        with torch.no_grad():
            logits = model(ids).logits[:, -1].double() / case.temperature
        grown: Distribution = {}
        for text, row in zip(texts, torch.softmax(logits, -1).numpy(), strict=True):
            chances = truncated(row, case.top_k, case.top_p, case.min_p)
            for token in np.flatnonzero(chances):
                mass = frontier[text] * chances[token]
                spelled = b"".join(PIECES[t] for t in (*text, token)).decode("utf-8", "replace")
                ended = token == STOP or len(text) + 1 == LENGTH
                ended |= any(string in spelled for string in case.stop)
                (distribution if ended else grown)[(*text, int(token))] = mass
        frontier = grown
    assert abs(sum(distribution.values()) - 1) < 1e-9
    return distribution


def p_value(responses: Sequence[tuple[int, ...]], distribution: Distribution) -> float:
    """Chi-square, cells of fewer than 5 expected sequences pooled by their first tokens."""
    counts = Counter(responses)
    assert set(counts) <= set(distribution), "a sequence of probability 0 was generated"
    observed: Counter[tuple[Any, ...]] = Counter()
    expected: Counter[tuple[Any, ...]] = Counter()
    for text, mass in distribution.items():
        cell = text if mass * len(responses) >= 5 else ("rest", len(text), text[0])
        observed[cell] += counts[text]
        expected[cell] += mass * len(responses)
    rare = [cell for cell in expected if expected[cell] < 5]
    for cell in rare:
        observed[("rest",)] += observed.pop(cell)
        expected[("rest",)] += expected.pop(cell)
    cells = list(expected)
    return float(stats.chisquare([observed[c] for c in cells], [expected[c] for c in cells]).pvalue)


def is_detected(responses: Sequence[tuple[int, ...]], wrong: Distribution) -> bool:
    """Return True if responses are not of a distribution: impossible there, or `is_caught`."""
    return not set(responses) <= set(wrong) or is_caught(p_value(responses, wrong))


def total_variation(responses: Sequence[tuple[int, ...]], distribution: Distribution) -> float:
    """Total variation between the frequencies of responses and their distribution."""
    counts = Counter(responses)
    texts = set(counts) | set(distribution)
    return sum(abs(counts[t] / len(responses) - distribution.get(t, 0.0)) for t in texts) / 2

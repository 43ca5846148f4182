"""What a mode promises about its trajectories, tested against the enumerated distributions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import chi2

from whole_loop.modes import Doubles, Mode, ResponseDistributions, Text
from whole_loop.outcome import Delivered, reward_of

MIN_EXPECTED = 10.0
"""A cell with a smaller expected count is pooled with others."""


@dataclass(frozen=True)
class Verdict:
    """The result of a test, and the distance that it measured."""

    samples: int
    p_value: float
    cells: int
    tv: float
    """Total variation of the pooled cells' frequencies."""
    tv_by_chance: float
    """Its mean for an exact sampler, by the normal approximation."""

    def __str__(self) -> str:
        return (
            f"p = {self.p_value:.3g}, TV {self.tv:.4f} (chance {self.tv_by_chance:.4f}), "
            f"{self.cells} cells, {self.samples} samples"
        )


def compare(
    drawn: Iterable[tuple[Hashable, Hashable]],
    distributions: Mapping[Any, Mapping[Any, float]],
    pool: Any = None,
) -> Verdict:
    """Compare (stratum, outcome) pairs with the distribution of each stratum.

    Pools of a stratum that stay rare are pooled in turn. A stratum with a single cell contributes
    nothing. An outcome of probability 0 gives the p-value 0.
    """
    strata: dict[Hashable, Counter[Any]] = {}
    for stratum, outcome in drawn:
        strata.setdefault(stratum, Counter())[outcome] += 1
    statistic, freedom, distance, chance, total, cells = 0.0, 0, 0.0, 0.0, 0, 0
    for stratum, counts in strata.items():
        n = counts.total()
        total += n
        distribution = distributions[stratum]
        if any(distribution.get(outcome, 0.0) <= 0.0 for outcome in counts):
            return Verdict(n, 0.0, 1, 1.0, 0.0)
        expected, observed = _pooled(counts, distribution, n, pool)
        if len(expected) < 2:
            continue
        statistic += float(((observed - expected) ** 2 / expected).sum())
        freedom += len(expected) - 1
        cells += len(expected)
        distance += float(np.abs(observed - expected).sum()) / 2
        chance += float(np.sqrt(expected * (1 - expected / n)).sum()) * np.sqrt(2 / np.pi) / 2
    p = float(chi2.sf(statistic, freedom)) if freedom else 1.0
    return Verdict(total, p, cells, distance / max(total, 1), chance / max(total, 1))


def _pooled(
    counts: Counter[Any], distribution: Mapping[Any, float], n: int, pool: Any
) -> tuple[Doubles, Doubles]:
    expected: defaultdict[Any, float] = defaultdict(float)
    observed: Counter[Any] = Counter()
    for outcome, mass in distribution.items():
        cell = outcome
        if mass * n < MIN_EXPECTED:
            cell = ("rare", None if pool is None else pool(outcome))
        expected[cell] += mass * n
        observed[cell] += counts[outcome]
    for cell in [c for c in expected if expected[c] < MIN_EXPECTED]:
        expected["rest"] += expected.pop(cell)
        observed["rest"] += observed.pop(cell)
    if 0 < expected["rest"] < MIN_EXPECTED and len(expected) > 1:
        smallest = min((c for c in expected if c != "rest"), key=lambda c: expected[c])
        expected[smallest] += expected.pop("rest")
        observed[smallest] += observed.pop("rest")
    names = [c for c in expected if expected[c] > 0]
    return np.array([expected[c] for c in names]), np.array([observed[c] for c in names], float)


ALARM = 1e-6
"""A statement fails below this p-value: the probability of a false alarm for each statement."""
TOLERANCE = {"torch": 1e-4, "vllm": 1e-3, "sglang": 1e-3}
"""Allowed difference between recorded and enumerated log-probabilities, in nats, by engine."""
_BINS = 10


@dataclass(frozen=True)
class Finding:
    verdicts: dict[str, Verdict]
    """By statement."""
    worst_logprob: float
    """Greatest difference between a recorded and the enumerated log-probability, in nats."""
    staleness: int
    """The greatest staleness of a token."""

    @property
    def p_value(self) -> float:
        return min(verdict.p_value for verdict in self.verdicts.values())


def check(
    mode: Mode, delivered: Sequence[Delivered], distributions: ResponseDistributions
) -> Finding:
    """Test everything that the mode promises of these trajectories."""
    worst, verdicts = check_tokens(delivered, distributions, kv_rebuilt=mode.kv_rebuilt)
    if mode.whole:
        verdicts |= check_responses(delivered, distributions)
    staleness = max(int(one.trajectory.staleness(one.step).max()) for one in delivered)
    return Finding(verdicts, worst, staleness)


def check_responses(
    delivered: Sequence[Delivered], distributions: ResponseDistributions
) -> dict[str, Verdict]:
    """Whole responses and their lengths within each step follow the policy that trains on them."""
    verdicts: dict[str, Verdict] = {}
    prompts = range(len(distributions.prompts))
    for policy in (0, 1):
        mine = [one for one in delivered if one.step % 2 == policy]
        expected = {prompt: distributions.responses(policy, prompt) for prompt in prompts}
        texts = [(one.prompt, one.text) for one in mine]
        name = f"texts of policy {'AB'[policy]}"
        verdicts[name] = compare(texts, expected, pool=lambda text: (len(text), text[:2]))
    lengths = [(one.step, len(one.text)) for one in delivered]
    by_step = _length_distributions(delivered, distributions)
    verdicts["lengths within each step"] = compare(lengths, by_step)
    verdicts["mean length"] = check_mean_length(delivered, distributions)
    worst = min(
        (compare([pair for pair in lengths if pair[0] == step], by_step) for step in by_step),
        key=lambda verdict: verdict.p_value,
    )
    # The smallest of this many p-values (Bonferroni).
    p_value = min(1.0, worst.p_value * len(by_step))
    verdicts["lengths, worst step"] = replace(worst, p_value=p_value)
    return verdicts


def check_mean_length(
    delivered: Sequence[Delivered], distributions: ResponseDistributions
) -> Verdict:
    """A two-sided normal test of the mean length; its `tv` is the signed bias in tokens."""
    moments: dict[tuple[int, int], tuple[float, float]] = {}
    bias = variance = 0.0
    for one in delivered:
        key = (one.step % 2, one.prompt)
        if key not in moments:
            responses = distributions.responses(*key).items()
            mean = sum(len(text) * mass for text, mass in responses)
            square = sum(len(text) ** 2 * mass for text, mass in responses)
            moments[key] = mean, square - mean**2
        bias += len(one.text) - moments[key][0]
        variance += moments[key][1]
    n, sigma = len(delivered), math.sqrt(variance)
    p = math.erfc(abs(bias) / sigma / math.sqrt(2))
    return Verdict(n, p, 1, bias / n, sigma / n * math.sqrt(2 / math.pi))


def _length_distributions(
    delivered: Sequence[Delivered], distributions: ResponseDistributions
) -> dict[int, dict[int, float]]:
    """By step, the distribution of lengths for the mixture of prompts that the step had."""
    prompts: dict[int, Counter[int]] = {}
    for one in delivered:
        prompts.setdefault(one.step, Counter())[one.prompt] += 1
    of_prompt: dict[tuple[int, int], dict[int, float]] = {}
    mixed: dict[int, dict[int, float]] = {}
    for step, counts in prompts.items():
        mixed[step] = dict.fromkeys(range(1, distributions.space.max_tokens + 1), 0.0)
        for prompt, count in counts.items():
            key = (step % 2, prompt)
            if key not in of_prompt:
                of_prompt[key] = dict.fromkeys(mixed[step], 0.0)
                for text, mass in distributions.responses(*key).items():
                    of_prompt[key][len(text)] += mass
            for length, mass in of_prompt[key].items():
                mixed[step][length] += mass * count / counts.total()
    return mixed


def check_tokens(
    delivered: Sequence[Delivered], distributions: ResponseDistributions, *, kv_rebuilt: bool
) -> tuple[float, dict[str, Verdict]]:
    """Each token, given the tokens before it, follows the policy of the version that it carries.

    Two tests: by context, and of all tokens together by randomised probability integral transforms
    (uniform if the conditional distributions are right, whatever the context), by policy, position,
    and whether the weights changed before the token.

    After an update a response continues on the KV that it has or, if it had to give its slot back,
    on new KV. So the policy's distribution given the text is one of two. The reported top K of the
    first position after the update tells which, independently of the token that was drawn there.
    """
    rng = np.random.default_rng(0)
    worst, contexts, expected, ranks = 0.0, [], {}, []
    for one in delivered:
        segments = one.trajectory.segments
        assert len(segments) <= 2, segments
        recorded = one.trajectory.behaviour_logprobs
        for segment in segments:
            policy, swap = segment.policy_version % 2, segment.start
            kv, table = "new KV", distributions.next_token(policy, one.prompt)
            if swap and not kv_rebuilt:
                on_old_kv = distributions.next_token_on_old_kv(1 - policy, one.prompt, swap)
                if _top_k_distance(one, swap, on_old_kv) < _top_k_distance(one, swap, table):
                    kv, table = f"old KV before {swap}", on_old_kv
            for at in range(segment.start, segment.end):
                row, token = table[one.text[:at]], one.text[at]
                worst = max(worst, abs(float(recorded[at]) - float(np.log(row[token]))))
                key = (policy, one.prompt, kv, one.text[:at])
                contexts.append((key, token))
                expected[key] = dict(enumerate(row))
                rank = row[:token].sum() + rng.random() * row[token]
                ranks.append(((policy, at, swap > 0), min(int(rank * _BINS), _BINS - 1)))
    uniform = {key: dict.fromkeys(range(_BINS), 1 / _BINS) for key, _ in ranks}
    return worst, {
        "tokens by context": compare(contexts, expected),
        "all tokens": compare(ranks, uniform),
    }


def _top_k_distance(one: Delivered, at: int, table: dict[Text, Doubles]) -> float:
    """Greatest difference of the top K reported at a position from a table, in nats.

    It does not depend on the token that was drawn there.
    """
    ids, logprobs = one.trajectory.topk_ids[at], one.trajectory.topk_logprobs[at]
    known = ids >= 0
    return float(np.abs(np.log(table[one.text[:at]][ids[known]]) - logprobs[known]).max())


def rewards_match(delivered: Sequence[Delivered]) -> bool:
    """Whether each reward is that of the delivered text, not of one that verification changed."""
    return all(one.reward == reward_of(one.text) for one in delivered)

"""What a mode promises about its trajectories, tested against the enumerated distributions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.exactness_loop.chi_square import Verdict, compare
from benchmarks.exactness_loop.distributions import Doubles, ResponseDistributions, Text
from benchmarks.exactness_loop.modes import Mode
from benchmarks.exactness_loop.outcome import Delivered, reward_of

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

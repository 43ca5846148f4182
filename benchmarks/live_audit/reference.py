"""The same groups, drawn again by plain transformers: lengths, rewards and ends must be alike.

A step's samples are draws of the version that trains on them, whatever was run ahead, verified,
interrupted, lost or drawn again. So for each group of each step as many responses are sampled with
`transformers` alone from the checkpoint, and of each number the mean of the group is compared. The
differences of the groups have mean 0; their sum, divided by the root of the sum of their squares,
is standard normal if there are many.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.config.run_config import RunConfig
from asyncrl.monitoring.records.trained_samples import TrainedSample
from benchmarks.live_audit.statements import Statement, two_sided
from benchmarks.live_audit.tokens import load, policy_of

Score = Callable[[TrainedSample, list[int]], float]
"""The reward of a response (without its stop token's special meaning) to a record's prompt."""


def compare(
    records: Sequence[TrainedSample],
    models: Mapping[int, str],
    config: RunConfig,
    stops: Sequence[int],
    score: Score | None,
    seed: int,
) -> list[Statement]:
    """A statement for each number. Single turns only."""
    torch.manual_seed(seed)
    off: defaultdict[str, list[float]] = defaultdict(list)
    by_step: defaultdict[int, dict[int, list[TrainedSample]]] = defaultdict(dict)
    for one in records:
        by_step[one.step].setdefault(one.group, []).append(one)
    for step, groups in sorted(by_step.items()):
        model = load(models[step])
        prompts = [one.prompt_tokens or [] for group in groups.values() for one in group]
        texts = iter(sample(model, prompts, config, stops))
        for group in groups.values():
            for name, value in _differences(group, [next(texts) for _ in group], score, stops):
                off[name].append(value)
    return [_statement(name, np.array(values)) for name, values in off.items()]


def _differences(
    group: Sequence[TrainedSample],
    texts: Sequence[list[int]],
    score: Score | None,
    stops: Sequence[int],
) -> list[tuple[str, float]]:
    """Trained minus reference: the mean of the group's samples."""
    mine = [one.response_tokens or [] for one in group]

    def mean(of: Callable[[list[int]], float]) -> float:
        return float(np.mean([of(one) for one in mine]) - np.mean([of(one) for one in texts]))

    found = [
        ("length", mean(len)),
        ("length, squared", mean(lambda one: len(one) ** 2)),
        ("ended by a stop token", mean(lambda one: one[-1] in stops)),
        ("first token's id", mean(lambda one: one[0])),
        ("sum of token ids", mean(sum)),
        ("different texts", len(set(map(tuple, mine))) - len(set(map(tuple, texts)))),
    ]
    if score is not None:
        theirs = [score(one, text) for one, text in zip(group, texts, strict=True)]
        own = [one.reward for one in group]
        found.append(("reward", float(np.mean(own) - np.mean(theirs))))
        signal = float(min(own) != max(own)) - float(min(theirs) != max(theirs))
        found.append(("group has rewards that differ", signal))
        longer = float(np.cov(own, [len(one) for one in mine])[0, 1])
        found.append(
            ("reward x length", longer - float(np.cov(theirs, [len(one) for one in texts])[0, 1]))
        )
    return found


def _statement(name: str, off: np.ndarray[Any, np.dtype[np.float64]]) -> Statement:
    scale = math.sqrt(float((off**2).sum())) or 1.0
    z = float(off.sum()) / scale
    return Statement(f"like plain sampling: {name}", len(off), z, two_sided(z), float(off.mean()))


@torch.no_grad()
def sample(
    model: Any, prompts: Sequence[Sequence[int]], config: RunConfig, stops: Sequence[int]
) -> list[list[int]]:
    """A response to each prompt, token by token, with transformers' KV cache; left-padded."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(one)) + list(one) for one in prompts])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    texts: list[list[int]] = [[] for _ in prompts]
    active, cache = list(range(len(prompts))), None
    for _ in range(config.sampling.max_tokens):
        out = model(
            ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        p = torch.from_numpy(policy_of(out.logits[:, -1], config))
        drawn = torch.multinomial(p, 1)
        for row in active:
            texts[row].append(int(drawn[row]))
        active = [row for row in active if texts[row][-1] not in stops]
        if not active:
            break
        ids = drawn
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], 1)
        places = places[:, -1:] + 1
    return texts

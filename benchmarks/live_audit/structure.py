"""What must hold of every record of an exactly on-policy run, without chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from asyncrl.config.run_config import RunConfig
from asyncrl.monitoring.records.trained_samples import TrainedSample
from asyncrl.rollout.trajectory import Provenance
from benchmarks.live_audit.tokens import Tokens

TOLERANCE = {"torch": 1e-4, "vllm": 1e-3, "sglang": 1e-3}
"""Largest difference of a recorded and the recomputed log-probability, in nats, by engine."""
Reward = Callable[[TrainedSample], float]


def faults(
    records: Sequence[TrainedSample],
    tokens: Tokens,
    config: RunConfig,
    stops: Sequence[int],
    reward: Reward | None = None,
) -> list[str]:
    """A sentence for each thing that does not hold."""
    found = [*_missing(records, config), *_versions(records), *_ends(records, config, stops)]
    found += _visits(records)
    off = np.abs(tokens.recorded - recomputed(tokens))
    limit = max(TOLERANCE[engine.kind] for engine in config.engines)
    if (wrong := int((off > limit).sum())) > 0:
        found.append(
            f"{wrong} of {len(tokens)} recorded log-probabilities are more than {limit:g} nats "
            f"from the recomputed ones, by up to {off.max():.3g}"
        )
    if reward is not None:
        wrong = sum(abs(one.reward - reward(one)) > 1e-6 for one in records)
        if wrong:
            found.append(f"{wrong} rewards are not those of the text that was trained on")
    return found


def recomputed(tokens: Tokens) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """`[N]` log-probability of each token; -inf outside of what is sampled."""
    own = np.take_along_axis(tokens.probabilities, tokens.token[:, None], 1)[:, 0]
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(own))


def _missing(records: Sequence[TrainedSample], config: RunConfig) -> list[str]:
    """Step b trains on the groups b n to (b + 1) n - 1, on all samples of each, once."""
    n, size, steps = config.scheduler.groups_per_step, config.scheduler.group_size, config.run.steps
    there = Counter((one.step, one.group, one.sample) for one in records)
    twice = sum(count > 1 for count in there.values())
    found = [f"{twice} samples were trained on twice"] if twice else []
    due = {(g // n, g, s) for g in range(steps * n) for s in range(size)}
    if due - set(there):
        found.append(f"{len(due - set(there))} of {len(due)} samples are missing")
    if set(there) - due:
        found.append(f"{len(set(there) - due)} samples are in a step that is not theirs")
    return found


def _visits(records: Sequence[TrainedSample]) -> list[str]:
    """Each epoch has each prompt once: those of equally many groups, up to one."""
    counts = Counter(prompt for _, prompt in {(one.group, one.prompt_id) for one in records})
    spread = max(counts.values()) - min(counts.values())
    return [f"prompts were visited {sorted(set(counts.values()))} times"] if spread > 1 else []


def _versions(records: Sequence[TrainedSample]) -> list[str]:
    other = sum(any(s.policy_version != one.step for s in one.segments) for one in records)
    return [f"{other} samples have tokens of another version than their step's"] if other else []


def _ends(records: Sequence[TrainedSample], config: RunConfig, stops: Sequence[int]) -> list[str]:
    """A turn ends by its first stop token, a sample by one or at a limit."""
    inside = wrong = 0
    for one in records:
        tokens, marks = one.response_tokens or [], one.provenance or ""
        drawn = [mark != str(int(Provenance.OBSERVED)) for mark in marks]
        stopped = [own and token in stops for own, token in zip(drawn, tokens, strict=True)]
        inside += sum(
            stop and own for stop, (_, own) in zip(stopped, pairwise(drawn), strict=False)
        )
        if one.finish_reason == "stop":
            wrong += not stopped[-1] and not config.sampling.stop
        elif config.environment.name is None:
            wrong += len(tokens) != config.sampling.max_tokens or stopped[-1]
    found = [f"{inside} tokens follow a stop token in their turn"] if inside else []
    return found + ([f"{wrong} samples end otherwise than they say"] if wrong else [])

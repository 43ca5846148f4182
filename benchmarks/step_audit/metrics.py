"""The line of metrics.jsonl that a step should have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.step_audit.folder import Folder
from benchmarks.step_audit.formulas import learning_rate
from benchmarks.step_audit.start import Fixed, Start
from benchmarks.step_audit.step import Sums

Metrics = dict[str, float | None]


def metrics_of(folder: Folder, step: int, start: Start, sums: Sums) -> Metrics:
    """Everything that is said of what was learnt, by its path in the line."""
    everyone = [one for group in start.groups.values() for one in group]
    chosen = start.computed(list(start.groups))
    rewards = np.array([one.sample.record.reward for one in everyone])
    lengths = np.array([len(one.sample) for one in everyone])
    whole = np.array([one.sample.record.response_length for one in everyone])
    ages = np.concatenate([step - one.sample.versions for one in everyone])
    config = folder.config
    found: Metrics = {
        "learning.reward_mean": rewards.mean(),
        "learning.reward_std": rewards.std(),
        "learning.loss": sums.losses / sums.sizes,
        "learning.grad_norm": float(np.mean(sums.norms)),
        "learning.learning_rate": learning_rate(config["trainer"], step, config["run"]["steps"]),
        "learning.optimizer_steps": len(sums.norms),
        "batch.groups": len(start.groups),
        "batch.zero_variance_groups": len(start.silent),
        "batch.samples": len(everyone),
        "batch.tokens": lengths.sum(),
        "batch.tokens_observed": (whole - lengths).sum(),
        "batch.tokens_computed": sum(len(one.sample) for one in chosen),
        "batch.response_length_mean": lengths.mean(),
        "batch.truncated_share": float(np.mean([o.sample.is_cut for o in everyone])),
        "staleness.mean": ages.mean(),
        "staleness.max": ages.max(),
    }
    found |= {f"batch.response_lengths.{n}": int((lengths == n).sum()) for n in np.unique(lengths)}
    found |= _rewards(everyone)
    if chosen:
        found |= _mismatch(chosen, step)
        found |= _signals(folder, chosen, start, sums)
    return {name: None if one is None else float(one) for name, one in found.items()}


def _rewards(everyone: Sequence[Fixed]) -> Metrics:
    """Means of what the rewards are made of, without samples whose reward failed."""
    parts = [one.sample.record.rewards for one in everyone if one.sample.record.rewards]
    names = parts[0] if parts else ()
    return {f"rewards.{name}": float(np.mean([one[name] for one in parts])) for name in names}


def _mismatch(chosen: Sequence[Fixed], step: int) -> Metrics:
    gap = torch.cat([one.proximal - one.behaviour for one in chosen])
    fresh = torch.cat([torch.from_numpy(one.sample.versions == step) for one in chosen])
    k3 = gap.exp() - 1 - gap
    found = {
        "learning.entropy": torch.cat([one.entropy for one in chosen]).mean(),
        "mismatch.abs_mean": gap.abs().mean(),
        "mismatch.abs_max": gap.abs().max(),
        "mismatch.kl": k3.mean(),
        "mismatch.ratio_mean": gap.exp().mean(),
        "mismatch.ratio_max": gap.exp().max(),
        "mismatch.outside_nucleus": torch.cat([one.outside for one in chosen]).double().mean(),
    }
    if fresh.any():
        found["mismatch.fresh_abs_mean"] = gap[fresh].abs().mean()
        found["mismatch.fresh_kl"] = k3[fresh].mean()
    return {name: float(one) for name, one in found.items()}


def _signals(folder: Folder, chosen: Sequence[Fixed], start: Start, sums: Sums) -> Metrics:
    c = folder.config["trainer"]
    found: Metrics = {k: v / sums.computed for k, v in sums.by_token.items()}
    found |= {k: v / sums.sizes for k, v in sums.by_size.items()}
    weights, squares = (sums.by_token[name] for name in ("weights", "squares"))
    if c["proximal_policy"] == "current":
        share = weights**2 / (sums.computed * squares) if squares else None
        found["effective_share"] = share
    del found["weights"], found["squares"]
    one_pass = c["ppo_epochs"] * c["minibatches"] == 1 and c["proximal_policy"] == "current"
    if start.raw is not None and one_pass:  # those of several passes are normalised before
        found["advantage_mean"] = float(start.raw.mean())
        found["advantage_square"] = float(start.raw.square().mean())
    if c["algorithm"] == "ppo":
        returns = torch.cat([one.returns for one in chosen if one.returns is not None])
        errors = returns - torch.cat([one.values for one in chosen if one.values is not None])
        spread = float(returns.var(correction=0))
        explained = 1 - float(errors.var(correction=0)) / spread if spread > 1e-12 else None
        found["explained_variance"] = explained
    return {f"algorithm.{name}": one for name, one in found.items()}

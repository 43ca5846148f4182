"""How far a run is from what its samples and checkpoints say it should be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.step_audit.formulas import AdamW, learning_rate, norm_of
from benchmarks.step_audit.model import Folder, Model, PolicyWeights, part_of
from benchmarks.step_audit.step import Start, Step, StepTargets, Sums

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


def _rewards(everyone: Sequence[StepTargets]) -> Metrics:
    """Means of what the rewards are made of, without samples whose reward failed."""
    parts = [one.sample.record.rewards for one in everyone if one.sample.record.rewards]
    names = parts[0] if parts else ()
    return {f"rewards.{name}": float(np.mean([one[name] for one in parts])) for name in names}


def _mismatch(chosen: Sequence[StepTargets], step: int) -> Metrics:
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


def _signals(folder: Folder, chosen: Sequence[StepTargets], start: Start, sums: Sums) -> Metrics:
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


FLOOR, FLOOR_OF_ROUNDING = 1e-4, 5e-2
"""Of a metric: below it, differences are absolute. The second one is of metrics in which only
rounding is left on-policy: an engine's numbers against a trainer's, and sums that cancel."""
_ROUNDING = ("mismatch.", "algorithm.chi_squared", "learning.loss", "algorithm.policy_loss")
_SECTIONS = ("learning", "batch", "staleness", "rewards", "mismatch", "algorithm")


def differences(folder: Folder, model: Model) -> Iterator[tuple[str, float]]:
    """Quantity and relative difference, for every quantity of every step."""
    first = 0
    for step in sorted(folder.samples):
        again = Step(folder, model, step)
        again.take()
        line, after = folder.metrics[step], folder.state(step + 1)
        groups = sorted(one for kind in line["groups"].values() for one in kind)
        in_order = groups == list(range(first, first + len(groups)))
        trained = line["groups"]["trained"] == list(again.start.groups)
        yield "groups in data order", 0.0 if in_order and trained else math.inf
        first += len(groups)
        yield from _metrics(line, metrics_of(folder, step, again.start, again.sums))
        yield from _tensors("policy", again.policy, after)
        if again.critic is not None:
            yield from _tensors("critic", again.critic, after)
        if moved := part_of(after, "weights/reference/"):
            yield "reference", _apart(_doubles(moved), _reference(folder, step, after))


def _metrics(line: Mapping[str, Any], again: Metrics) -> Iterator[tuple[str, float]]:
    shown = dict(_flat({name: line[name] for name in _SECTIONS}))
    for name in sorted(shown.keys() | again.keys()):
        one, other = shown.get(name), again.get(name)
        if one is None or other is None:
            yield name, 0.0 if one is other else math.inf
        else:
            floor = FLOOR_OF_ROUNDING if name.startswith(_ROUNDING) else FLOOR
            yield name, abs(one - other) / max(abs(other), floor)


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float | None]]:
    for name, one in tree.items():
        if isinstance(one, Mapping):
            yield from _flat(one, f"{before}{name}.")
        else:
            yield before + name, one


def _tensors(name: str, again: AdamW, after: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    weights = part_of(after, f"weights/{name}/")
    moved = {k: one.double() - again.start[k] for k, one in weights.items()}
    expected = {k: again.weights[k] - again.start[k] for k in weights}
    yield f"{name} update", _apart(moved, expected)
    moments = part_of(after, f"optimizer/{name}/{name}/")
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        found = {k: one for k, one in moments.items() if k.endswith(f"/{kind}")}
        expected = {k: _rounded(again.moments[k], one) for k, one in found.items()}
        yield f"{name} {kind}", _apart(_doubles(found), expected)


def _rounded(exact: Tensor, kept: Tensor) -> Tensor:
    """A moment as it is kept: in bfloat16, rounded up or down by chance."""
    if kept.dtype != torch.bfloat16:
        return exact
    may_be = (kept.double() - exact).abs() <= 2**-7 * exact.abs()
    return torch.where(may_be, kept.double(), exact)


def _reference(folder: Folder, step: int, after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """That of the KL penalty after a step, which follows the policy."""
    c, before = folder.config["trainer"], PolicyWeights(folder).reference(step)
    policy = _doubles(part_of(after, "weights/policy/"))
    if (every := c["reference_refresh_steps"]) is not None:
        return before if (step + 1) % every else policy
    share = c["reference_decay"]
    return {name: share * one + (1 - share) * policy[name] for name, one in before.items()}


def _doubles(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.double() for name, one in tensors.items()}


def _apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Norm of the difference over that of the second; all tensors as one vector."""
    gap, size = norm_of({k: one[k] - other[k] for k in other}), norm_of(other)
    return gap / size if size else (math.inf if gap else 0.0)

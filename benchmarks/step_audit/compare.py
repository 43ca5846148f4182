"""How far a run is from what its samples and checkpoints say it should be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_audit.adamw import AdamW, norm_of
from benchmarks.step_audit.folder import Folder
from benchmarks.step_audit.metrics import Metrics, metrics_of
from benchmarks.step_audit.model import Model
from benchmarks.step_audit.step import Step
from benchmarks.step_audit.weights import Weights, part_of

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
    c, before = folder.config["trainer"], Weights(folder).reference(step)
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

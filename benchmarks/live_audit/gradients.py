"""A run's gradients and updates, computed again from its samples and checkpoints.

Everything is in float64, by plain transformers and formulas that share nothing with `trainer`. At
staleness 0 with one pass over a step, the probability ratio of every token is 1, so the gradient of
the loss of a group's algorithm is that of the sum of A log p over the tokens that were drawn, with
the weights of `trainer.loss_normalization`. It is clipped and given to AdamW with the moments of
the checkpoint before; weights and moments must be those of the checkpoint after.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.func import functional_call

from asyncrl.config.run_config import RunConfig
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.monitoring.records.trained_samples import TrainedSample
from asyncrl.rollout.trajectory import Provenance
from asyncrl.trainer.checkpoint.format.files import path_of
from benchmarks.live_audit.tokens import contexts_of, load, policy_of

CLOSE = 2e-3
"""Largest relative difference; float32's own are 1e-5 to 1e-4."""
LEAVE_ONE_OUT = ("reinforce", "rloo")
CENTRED = ("dr_grpo", "gpg")
SCALED = ("grpo", "dapo", "gspo", "cispo")
NORMALISED_OVER_THE_STEP = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
ALGORITHMS = {
    **dict.fromkeys((*LEAVE_ONE_OUT, *CENTRED), "none"),
    **dict.fromkeys((*SCALED, *NORMALISED_OVER_THE_STEP), "std"),
}
"""The algorithms that are computed again, each with its `trainer.advantage_normalization`."""
LOGPROB_LOSSES = (*LEAVE_ONE_OUT, "cispo", "gpg")
"""Their loss is -A log p, that of the others -A p / sg(p)."""
_OBSERVED = str(int(Provenance.OBSERVED))
Array = np.ndarray[Any, Any]
Tensors = dict[str, Tensor]


def why_not(config: RunConfig) -> str | None:
    """Why the steps of such a run are not computed again; None if they are."""
    c = config.trainer
    if c.algorithm not in ALGORITHMS:
        return f"trainer.algorithm is {c.algorithm}"
    others = {
        "several passes": c.ppo_epochs * c.minibatches > 1,
        "KL to a reference": bool(c.kl_coefficient),
        "rewards for length": bool(c.overlong_buffer),
        "an adapter": bool(c.lora.rank),
        "moments that are not in float32": c.optimizer_state != "float32",
    }
    return next((what for what, is_so in others.items() if is_so), None)


def worst_differences(
    run: Path, records: Sequence[TrainedSample], initial: str, config: RunConfig
) -> dict[str, float]:
    """Largest relative difference of any step, by quantity."""
    by_step: defaultdict[int, list[TrainedSample]] = defaultdict(list)
    for one in records:
        by_step[one.step].append(one)
    lines = {one.step: one.learning for one in read_metrics(run / "metrics.jsonl")}
    module, worst = load(initial, attn_implementation="eager"), dict[str, float]()
    for step, samples in sorted(by_step.items()):
        before, after = _state(run, step, module), _state(run, step + 1, module)
        weights = {k: v.double() for k, v in _part_of(before, "weights/policy/").items()}
        loss, gradient = gradient_of(module, weights, samples, config)
        line = lines[step]
        norm = norm_of(gradient)
        found = {
            "reward": _apart(line.reward_mean, float(np.mean([one.reward for one in samples]))),
            "loss": abs((line.loss or 0.0) - loss) / max(abs(loss), 5e-2),  # its terms cancel
            "norm of the gradient": _apart(line.grad_norm, norm),
        }
        factor = min(1.0, config.trainer.max_grad_norm / norm) if norm else 1.0
        clipped = {k: one * factor for k, one in gradient.items()}
        found |= _update(config, weights, clipped, before, after, line.learning_rate)
        worst = {k: max(worst.get(k, 0.0), gap) for k, gap in found.items()}
    return worst


def gradient_of(
    module: Any, weights: Tensors, samples: Sequence[TrainedSample], config: RunConfig
) -> tuple[float, Tensors]:
    """The loss of a step and its gradient."""
    c = config.trainer
    groups: defaultdict[int, list[TrainedSample]] = defaultdict(list)
    for one in samples:
        groups[one.group].append(one)
    leaves = {k: one.clone().requires_grad_() for k, one in weights.items()}
    drawn = {id(one): one.response_length - one.observed for one in samples}
    size = sum(drawn.values()) if c.loss_normalization == "token" else len(samples)
    loss, total = 0.0, {k: torch.zeros_like(one) for k, one in weights.items()}
    every = _advantages(
        config,
        [np.array([one.reward for one in of]) for of in groups.values()],
        [np.array([drawn[id(one)] for one in of]) for of in groups.values()],
    )
    for group, advantages in zip(groups.values(), every, strict=True):
        if not advantages.any():
            continue
        sums = torch.zeros((), dtype=torch.float64)
        for one, advantage, logprobs in zip(
            group, advantages, _logprobs(module, leaves, group, config), strict=True
        ):
            share = 1 / drawn[id(one)] if c.loss_normalization == "sequence" else 1.0
            if c.mask_truncated_completions and one.finish_reason in ("length", "deadline"):
                share = 0.0
            ratio = (logprobs - logprobs.detach()).exp()
            terms = logprobs if c.algorithm in LOGPROB_LOSSES else ratio
            sums = sums - share * advantage * terms.sum() / size
        loss += float(sums.detach())
        found = torch.autograd.grad(sums, list(leaves.values()), materialize_grads=True)
        for name, part in zip(leaves, found, strict=True):
            total[name] += part
    return loss, total


def _advantages(
    config: RunConfig, rewards: Sequence[Array], tokens: Sequence[Array]
) -> Sequence[Array]:
    """Of a step's groups, from the rewards and the numbers of tokens of their samples."""
    c = config.trainer
    if c.algorithm in LEAVE_ONE_OUT:
        return [np.array([r - (of.sum() - r) / (len(of) - 1) for r in of]) for of in rewards]
    centred = [of - of.sum() / len(of) for of in rewards]
    if c.algorithm in NORMALISED_OVER_THE_STEP:
        raw = rewards if c.algorithm == "reinforce_plus_plus" else centred
        each = np.repeat(np.concatenate(raw), np.concatenate(tokens))
        return [(of - each.mean()) / each.std() if each.std() else 0 * of for of in raw]
    if c.algorithm == "gpg":
        with_signal = sum(of.any() for of in centred)
        return [of * len(centred) / max(with_signal, 1) for of in centred]
    if c.advantage_normalization == "none":
        return centred
    return [of / (math.sqrt((of**2).sum() / (len(of) - 1)) + 1e-6) for of in centred]


def _logprobs(
    module: Any, weights: Tensors, samples: Sequence[TrainedSample], config: RunConfig
) -> Iterator[Tensor]:
    """Of each sample's drawn tokens; one outside of what is sampled is added to the set."""
    contexts = [contexts_of(one) for one in samples]
    rows = [one.prompt + one.response for of in contexts for one in of]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    every = iter(functional_call(module, weights, args=(), kwargs=given).logits)
    for sample, of in zip(samples, contexts, strict=True):
        found = []
        for one, logits in zip(of, every, strict=False):
            first = len(one.prompt) - 1
            own = logits[first : first + len(one.response)]
            tokens = torch.tensor(one.response)[:, None]
            out = torch.from_numpy(policy_of(own.detach(), config) == 0).scatter(
                -1, tokens, value=False
            )
            own = (own / config.sampling.temperature).masked_fill(out, -torch.inf)
            marks = (sample.provenance or "")[one.start : one.start + len(one.response)]
            drawn = torch.tensor([mark != _OBSERVED for mark in marks])
            found.append(own.log_softmax(-1).gather(-1, tokens)[:, 0][drawn])
        yield torch.cat(found)


def _update(
    config: RunConfig,
    weights: Tensors,
    gradient: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    rate: float,
) -> dict[str, float]:
    """How far AdamW's weights and moments are from those of the checkpoint after."""
    c, moments = config.trainer, "optimizer/policy/policy/"
    first, second = c.betas
    old, new = _part_of(before, moments), _part_of(after, moments)
    expected: dict[str, Tensors] = {"weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, weight in weights.items():
        zero, g = torch.zeros_like(weight), gradient[name]
        mean = first * old.get(f"{name}/exp_avg", zero).double() + (1 - first) * g
        square = second * old.get(f"{name}/exp_avg_sq", zero).double() + (1 - second) * g**2
        count = float(old.get(f"{name}/step", 0)) + 1
        root = (square / (1 - second**count)).sqrt() + c.adam_epsilon
        decay = c.weight_decay if weight.ndim >= 2 else 0.0
        expected["weights"][name] = -rate * (decay * weight + mean / (1 - first**count) / root)
        expected["exp_avg"][name], expected["exp_avg_sq"][name] = mean, square
    there = _part_of(after, "weights/policy/")
    found = {"weights": {k: there[k].double() - one for k, one in weights.items()}}
    for kind in ("exp_avg", "exp_avg_sq"):
        found[kind] = {k: new[f"{k}/{kind}"].double() for k in weights}
    return {
        kind: _ratio(norm_of({k: mine[k] - one for k, one in expected[kind].items()}),
                     norm_of(expected[kind]))
        for kind, mine in found.items()
    }  # fmt: skip


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(one.square().sum()) for one in tensors.values()))


def _apart(said: float | None, again: float) -> float:
    return math.inf if said is None else _ratio(abs(said - again), max(abs(again), 1e-4))


def _ratio(gap: float, size: float) -> float:
    return gap / size if size else (math.inf if gap else 0.0)


def _part_of(state: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _state(run: Path, version: int, module: Any) -> Tensors:
    """Every tensor of a version's checkpoint by name; of version 0 the initial weights."""
    if not version:
        return {f"weights/policy/{k}": one.detach() for k, one in module.named_parameters()}
    folder = path_of(run / "checkpoints", version) / "state"
    found = {}
    for name, saved in json.loads((folder / "index.json").read_text())["tensors"].items():
        whole = torch.empty(saved["shape"], dtype=getattr(torch, saved["dtype"]))
        for chunk in saved["chunks"]:
            bounds = zip(chunk["offsets"], chunk["sizes"], strict=True)
            with safe_open(folder / chunk["file"], framework="pt") as file:
                whole[tuple(slice(at, at + n) for at, n in bounds)] = file.get_tensor(chunk["key"])
        found[name] = whole
    return found

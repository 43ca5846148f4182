"""The loss of routers: its definition, and that micro-batches do not change it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.trainer.algorithms.base import TokenBatch
from asyncrl.trainer.algorithms.corrections import make
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model.packing import PackedBatch
from asyncrl.trainer.model.policy import Policy, why_no_routes

CPU = torch.device("cpu")
COEFFICIENT = 0.3


def _pairs() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 32, 4).astype(np.int32)
    return [(prompt, rng.integers(0, 32, length).astype(np.int32)) for length in (7, 1, 12)]


def _defined(
    path: str, pairs: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over samples of the tokens times the imbalance, each alone; gradients."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    total = torch.zeros((), dtype=torch.float32)
    for prompt, response in pairs:
        ids = torch.from_numpy(np.concatenate([prompt, response[:-1]])).long()[None]
        layers = model(input_ids=ids, output_router_logits=True).router_logits
        for logits in layers:
            kept = logits.view(-1, logits.shape[-1])[len(prompt) - 1 :]
            picked = torch.zeros_like(kept).scatter_(-1, kept.topk(2).indices, 1.0)
            share = picked.sum(0) / (2 * len(kept))
            mean = torch.softmax(kept, -1).mean(0)
            total = total + len(response) * kept.shape[-1] * (share * mean).sum() / len(layers)
    total.backward()
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return total.detach(), grads


def _batch(policy: Policy, pairs: list[tuple[np.ndarray, np.ndarray]]) -> TokenBatch:
    scores = policy.score(PackedBatch.of(pairs, CPU), with_routes=True)
    lengths = [len(response) for _, response in pairs]
    ones = torch.ones(sum(lengths), dtype=torch.float32)
    return TokenBatch(
        logprobs=scores.logprobs,
        behaviour_logprobs=scores.logprobs.detach(),
        advantages=0 * ones,
        weights=ones,
        owners=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        routes=scores.routes,
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_plus_plus"])
def test_the_loss_and_its_gradient_follow_the_definition_for_any_split(
    name: str, algorithm: str, model_path: Callable[[str], str]
) -> None:
    path, pairs = model_path(name), _pairs()
    loss = make(TrainerConfig(algorithm=algorithm, router_loss_coefficient=COEFFICIENT))
    want, grads = _defined(path, pairs)
    for split in ([pairs], [pairs[:1], pairs[1:]]):
        policy = Policy(path, dtype="float32", device=CPU)
        reported = torch.zeros((), dtype=torch.float32)
        for part in split:
            sums = loss.loss(_batch(policy, part))
            (sums.loss + sums.parts.get("router", 0)).backward()
            reported = reported + sums.sums["router_balance"]
        torch.testing.assert_close(reported, want, atol=1e-4, rtol=0)
        gates = {n: p for n, p in policy.model.named_parameters() if n.endswith("gate.weight")}
        gates |= {n: p for n, p in policy.model.named_parameters() if "router.weight" in n}
        assert gates
        for key, parameter in gates.items():
            torch.testing.assert_close(
                parameter.grad, COEFFICIENT * grads[key], atol=1e-5, rtol=1e-4
            )


def test_models_without_such_routers_are_refused(model_path: Callable[[str], str]) -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no routers"):
        Learner(
            TrainerConfig(router_loss_coefficient=0.01), model_path("llama"), group_size=2, seed=1
        )
    policy = Policy(model_path("mixtral"), dtype="float32", device=CPU)
    assert why_no_routes(policy.model) is None

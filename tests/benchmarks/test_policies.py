"""Policies that benchmarks train and widen: the distance of two versions is exact."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.tasks.config import TaskConfig
from asyncrl.tasks.loading import load_task
from benchmarks.policies import (
    Policies,
    distributions,
    generate,
    total_variation,
)
from benchmarks.tiny_models import widen


def test_widened_models_have_the_same_logits_and_differ_only_in_trained_parameters(
    policies: Policies, tmp_path: Path
) -> None:
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 50, (2, 20)))
    wide = [tmp_path / str(version) for version in (0, 1)]
    gates = []
    for path, target in zip(policies.paths.values(), wide, strict=True):
        parameters = widen(str(path), target, 256)
        logits = []
        for each in (path, target):
            network = AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)
            with torch.no_grad():
                logits.append(network(tokens).logits)
        assert parameters == sum(p.numel() for p in network.parameters())
        torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)
        gates.append(network.state_dict()["model.layers.0.mlp.gate_proj.weight"])
    assert torch.equal(gates[0][32:], gates[1][32:])
    assert not torch.equal(gates[0][:32], gates[1][:32])
    with pytest.raises(ValueError, match="must be above the model's 32"):
        widen(str(policies.paths[0]), tmp_path, 32)


async def _texts(policies: Policies) -> tuple[object, list[np.ndarray]]:
    task = load_task(TaskConfig(train_size=4), str(policies.paths[0]), 0)
    return task, await generate(policies.paths[0], task, task.train, policies.recipe)


def test_the_distance_of_policies_is_exact(policies: Policies) -> None:
    task, texts = asyncio.run(_texts(policies))
    first, later = policies.paths.values()
    prompts = task.train  # type: ignore[attr-defined]
    own, other = (distributions(path, prompts, texts) for path in (first, later))
    assert total_variation(own, own) == 0
    # By hand, one text at a time and without padding.
    distances = []
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt.tokens, text]))[None].long()
        with torch.no_grad():
            p, q = (
                AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens)
                .logits[0, len(prompt.tokens) - 1 : -1]
                .softmax(-1)
                for path in (first, later)
            )
        distances += (0.5 * (p - q).abs().sum(-1)).tolist()
    found = total_variation(own, other)
    assert found == pytest.approx(np.mean(distances), rel=1e-4)
    assert found > 1e-3

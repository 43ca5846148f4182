"""A tiny pair of policy versions, shared by the tests of several benchmarks."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.tasks.model import ensure_builtin_model
from benchmarks.policies import SMOKE, Policies


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """The tiny model and another one close to it, as after an optimizer step."""
    model = ensure_builtin_model(tmp_path_factory.mktemp("cache"), None, SMOKE.warm_start)
    later = tmp_path_factory.mktemp("later")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.02)
    network.save_pretrained(later)
    AutoTokenizer.from_pretrained(model).save_pretrained(later)
    return Policies(
        {0: model, 1: later}, {"0-1": 0.1}, {"0": 0.9}, {"before": 0.5, "after": 0.6}, SMOKE
    )

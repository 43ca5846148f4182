"""On a real vLLM: a published adapter is added to the model that vLLM was started with."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from served_engine import PROMPT, Served, ask, collect, drawn, logprobs_of, tokens_of
from served_vllm import REAL_VLLM

from wire.weights.adapter import Pair, merge, names_of
from wire.weights.fingerprint import fingerprint
from wire.weights.layout import LoraSpec
from wire.weights.writer import WeightPublisher
from wire.wrong_policy import compare_weights

pytestmark = REAL_VLLM

SPEC = LoraSpec(rank=4, scaling=0.5)
LAYERS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
"""Of each block: of stacked layers one part only."""


def test_the_served_adapter_is_the_published_one(served: Served, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    served.install(served.new)  # what an adapter is added to is not what was served last
    version = served.engine.stats().policy_version
    with WeightPublisher(tmp_path, "adapter", lora=SPEC) as publisher:
        for _ in range(2):
            version += 1
            model, tensors = copy.deepcopy(served.old), []
            for name, weight in model.state_dict(keep_vars=True).items():
                layer = name.removesuffix(".weight")
                if layer.endswith(LAYERS):
                    pair = Pair(
                        0.3 * torch.randn(4, weight.shape[1], generator=generator),
                        0.3 * torch.randn(weight.shape[0], 4, generator=generator),
                    )
                    tensors += list(zip(names_of(layer), pair, strict=True))
                    merge(weight.detach().clone(), pair, SPEC.scaling, weight.detach())
            expected = fingerprint(model.state_dict(keep_vars=True).items())
            served.call(served.engine.stage_weights(publisher.publish(tensors, version)))
            served.call(served.engine.install_weights(version))
            found = served.call(served.engine.fingerprint())
            assert compare_weights("g", version, expected=expected, found=found) is None
            chunks = served.call(collect(served.engine, ask(f"lora{version}", seed=2)))
            wanted = drawn(model, PROMPT, tokens_of(chunks))
            np.testing.assert_allclose(logprobs_of(chunks), wanted, atol=1e-4)
            base = drawn(served.old, PROMPT, tokens_of(chunks))
            assert np.abs(base - wanted).max() > 1e-2
    served.install(served.old)

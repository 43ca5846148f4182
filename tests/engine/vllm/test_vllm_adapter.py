"""On a real vLLM: a published adapter is added to the model that vLLM was started with.

An adapter that is kept apart has an engine of its own, which refuses the weights that all other
tests install.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from served_engine import PROMPT, VOCAB, Served, ask, collect, drawn, logprobs_of, tokens_of
from served_vllm import REAL_VLLM, serving

from asyncrl.engine.errors import WeightsError
from asyncrl.wire.records.wrong_policy import compare_weights, not_compared
from asyncrl.wire.weights.adapter import Pair, merge, names_of, served_apart
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import LoraSpec
from asyncrl.wire.weights.writer import WeightPublisher

pytestmark = REAL_VLLM

SPEC = LoraSpec(rank=4, scaling=0.5)
Tensors = list[tuple[str, torch.Tensor]]
LONG = np.random.default_rng(7).integers(0, VOCAB, 300).astype(np.int32)
"""A prompt of more than two blocks, whose KV the prefix cache has when it is asked again."""
LAYERS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
"""Of each block: of stacked layers one part only."""


def adapted(old: torch.nn.Module, generator: torch.Generator) -> tuple[torch.nn.Module, Tensors]:
    """A random adapter, and the model with it merged."""
    model, tensors = copy.deepcopy(old), []
    for name, weight in model.state_dict(keep_vars=True).items():
        layer = name.removesuffix(".weight")
        if layer.endswith(LAYERS):
            pair = Pair(
                0.3 * torch.randn(4, weight.shape[1], generator=generator),
                0.3 * torch.randn(weight.shape[0], 4, generator=generator),
            )
            tensors += list(zip(names_of(layer), pair, strict=True))
            merge(weight.detach().clone(), pair, SPEC.scaling, weight.detach())
    return model, tensors


def test_the_served_adapter_is_the_published_one(served: Served, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    served.install(served.new)  # what an adapter is added to is not what was served last
    version = served.engine.stats().policy_version
    with WeightPublisher(tmp_path, "adapter", lora=SPEC) as publisher:
        for _ in range(2):
            version += 1
            model, tensors = adapted(served.old, generator)
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


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("apart"), lora_rank=4) as served:
        yield served


def test_an_adapter_kept_apart_is_the_published_one(apart: Served, tmp_path: Path) -> None:
    """Its tensors in vLLM's layers by their bits, and its policy next to the merged model's.

    W x + B (A x) and (W + B A) x are the same function; float32 leaves 1e-4 of a log-probability.
    KV of the prompt is found again under the same adapter, and not under the next one.
    """
    generator = torch.Generator().manual_seed(6)
    spec = LoraSpec(SPEC.rank, SPEC.scaling, "adapter")
    base = list(apart.old.state_dict(keep_vars=True).items())
    policies = [apart.old]
    with WeightPublisher(tmp_path, "apart", lora=spec) as publisher:
        for version in (0, 1, 2):
            if version:
                model, tensors = adapted(apart.old, generator)
                policies.append(model)
                served = served_apart(tensors, spec.scaling, torch.float32)
                expected = fingerprint([*base, *served])
                apart.call(apart.engine.stage_weights(publisher.publish(tensors, version)))
                apart.call(apart.engine.install_weights(version))
                found = apart.call(apart.engine.fingerprint())
                assert not_compared(expected, found) == []
                assert compare_weights("g", version, expected=expected, found=found) is None
            for again in (0, 1):
                before = apart.meter.prefix_found
                request = ask(f"apart{version}.{again}", seed=2, prompt_tokens=LONG)
                chunks = apart.call(collect(apart.engine, request))
                reused = again * apart.whole_blocks(len(LONG) - 1)
                assert apart.meter.prefix_found - before == reused
                given = [drawn(one, LONG, tokens_of(chunks)) for one in policies]
                np.testing.assert_allclose(logprobs_of(chunks), given[-1], atol=1e-4)
                assert all(np.abs(one - given[-1]).max() > 1e-2 for one in given[:-1])


def test_other_weights_are_refused_where_an_adapter_is_apart(apart: Served) -> None:
    with pytest.raises(WeightsError, match="expects the weights of an adapter"):
        apart.install(apart.new)

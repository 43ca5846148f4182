"""New weights under the running requests of a core."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from new_weights import swap_weights
from tiny_models import make_qwen3
from torch_cores import PROMPT, core_of, hf_logprobs, load, request, run, tokens_of

from asyncrl.engine.errors import EngineError, WeightsError, WeightsSupersededError
from asyncrl.engine.torch import core as weights_module
from asyncrl.engine.torch.core import ModuleWeights
from asyncrl.wire.weights.writer import WeightPublisher, published


def test_a_swap_in_flight_keeps_kv_and_never_mixes_versions(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3), chunk_tokens=8)
    core.add(request("a", seed=2, stop_tokens=()))
    assert [len(c.tokens) for c in core.step()] == [1], "the first token is reported at once"
    for _ in range(4):
        assert core.step() == []
    other = make_qwen3(seed=1)
    before = swap_weights(core, other.state_dict().items(), 3)
    assert [(len(c.tokens), c.policy_version) for c in before] == [(4, 0)]
    after = run(core)["a"]
    assert {c.policy_version for c in after} == {3}
    # New requests see the new weights only, siblings of a row with old KV included.
    core.add(request("b", seed=2, stop_tokens=()))
    fresh = run(core)["b"]
    generated = tokens_of(fresh)
    expected = hf_logprobs(other, PROMPT, generated)[np.arange(12), generated]
    np.testing.assert_allclose(np.concatenate([c.logprobs for c in fresh]), expected, atol=1e-4)


def test_kv_of_old_weights_is_not_shared_with_new_requests(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3))
    core.add(request("old", seed=2, stop_tokens=()))
    core.step()
    other = make_qwen3(seed=1)
    swap_weights(core, other.state_dict().items(), 1)
    core.add(request("new", seed=3, stop_tokens=()))
    chunks = run(core)["new"]
    generated = tokens_of(chunks)
    expected = hf_logprobs(other, PROMPT, generated)[np.arange(12), generated]
    np.testing.assert_allclose(np.concatenate([c.logprobs for c in chunks]), expected, atol=1e-4)


def test_staged_weights_change_nothing_until_they_are_installed(
    tiny_qwen3: str, tmp_path: Path
) -> None:
    core = core_of(load(tiny_qwen3))
    weight = core._model.module.lm_head.weight
    old, new = weight.clone(), make_qwen3(seed=1)
    with WeightPublisher(tmp_path, "run") as publisher:
        for version in (1, 2):
            core.stage_weights(publisher.publish(new.state_dict().items(), version))
        assert torch.equal(weight, old)
        with pytest.raises(WeightsError, match="version 2 is staged"):
            core.install_weights(1)
        core.install_weights(2)
        assert torch.equal(weight, new.lm_head.weight)
        assert core.policy_version == 2
        manifest = publisher.publish(make_qwen3(seed=3).state_dict().items(), 3)
        core.stage_weights(manifest)
        assert torch.equal(weight, new.lm_head.weight)
        for version in (4, 5):
            publisher.publish(new.state_dict().items(), version)
        with pytest.raises(WeightsSupersededError, match="holds version 5"):
            core.stage_weights(manifest)
    with pytest.raises(WeightsError, match="no version is staged"):
        core.install_weights(3)
    assert (torch.equal(weight, new.lm_head.weight), core.policy_version) == (True, 2)


def test_wrong_weights_change_nothing(tiny_qwen3: str, tiny_llama: str) -> None:
    core = core_of(load(tiny_qwen3))
    model = core._model.module
    before = {n: p.clone() for n, p in model.named_parameters()}
    good = dict(make_qwen3(seed=1).state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    missing = {n: t for n, t in good.items() if n != name}
    cases = {
        "missing": missing,
        "unexpected": good | {"model.extra": torch.zeros(1)},
        "shape": good | {name: torch.zeros(3, 3)},
        "tied": good | {"lm_head.weight": good["lm_head.weight"] + 1},
    }
    for what, weights in cases.items():
        with pytest.raises(WeightsError, match=what):
            swap_weights(core, weights.items(), 1)
    assert core.policy_version == 0
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    # One name of a tied pair is enough.
    swap_weights(core, ((n, t) for n, t in good.items() if n != "lm_head.weight"), 1)
    assert torch.equal(model.lm_head.weight, good["lm_head.weight"])


def test_weights_are_staged_in_the_engines_data_type_and_only_copied_when_installed() -> None:
    """In float32 they would be converted in the pause, and take twice the memory until then."""
    module = make_qwen3(seed=0).to(torch.bfloat16)
    weights, new = ModuleWeights(module), make_qwen3(seed=1).state_dict()
    with published(new.items(), 5) as manifest:
        weights.stage(manifest)
    staged = dict(weights._staged._buffer.tensors())
    assert {tensor.dtype for tensor in staged.values()} == {torch.bfloat16}
    weights.install(5)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, new[name].to(torch.bfloat16)), name


def test_an_installation_does_not_read_the_weights_to_compare_them(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes several times as long as the copy, and runs while tokens are drawn."""
    core = core_of(load(tiny_qwen3))
    asked: list[int] = []
    look = weights_module.fingerprint
    monkeypatch.setattr(
        weights_module,
        "fingerprint",
        lambda tensors: asked.append(core.policy_version) or look(tensors),
    )
    before = core.fingerprint
    swap_weights(core, make_qwen3(seed=1).state_dict().items(), 3)
    assert asked == [0]
    assert core.fingerprint != before
    assert core.fingerprint is core.fingerprint
    assert asked == [0, 3]


def test_a_refused_version_leaves_nothing_staged(tiny_qwen3: str) -> None:
    weights = ModuleWeights(load(tiny_qwen3).module)
    good = dict(make_qwen3(seed=1).state_dict())
    with published(good.items(), 5) as manifest:
        weights.stage(manifest)
    wrong = published((good | {"model.extra": torch.zeros(1)}).items(), 6)
    with wrong as manifest, pytest.raises(WeightsError, match="unexpected"):
        weights.stage(manifest)
    with pytest.raises(WeightsError, match="no version is staged"):
        weights.install(5)


def test_weights_that_are_not_finite_are_reported(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3))
    broken = dict(make_qwen3().state_dict())
    broken["model.norm.weight"] = torch.full_like(broken["model.norm.weight"], torch.nan)
    swap_weights(core, broken.items(), 1)
    core.add(request("a"))
    with pytest.raises(EngineError, match="not finite for requests"):
        run(core)

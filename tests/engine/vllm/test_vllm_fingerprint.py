"""Fingerprints of what a real vLLM decodes with: equal to the trainer's, unless it is wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from new_weights import give_weights
from served_engine import Served
from served_vllm import REAL_VLLM

from asyncrl.wire.records.wrong_policy import compare_weights, not_compared
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Fingerprint

pytestmark = REAL_VLLM

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NORM = "model.layers.1.input_layernorm.weight"


def expected_of(model: Any) -> Fingerprint:
    """As the trainer computes it."""
    return fingerprint(model.state_dict(keep_vars=True).items())


def fault(served: Served, kind: str, name: str = "") -> None:
    llm = served.engine._process.vllm.llm
    served.call(llm.collective_rpc("asyncrl_fault", args=(kind, name)))


@pytest.fixture
def sabotaged(served: Served) -> Iterator[Served]:
    """The engine with the old policy; faults end with the test."""
    served.install(served.old)
    yield served
    fault(served, "none")
    served.install(served.old)


def finding(served: Served, model: Any, before: Any) -> str:
    """What a run would say after the installation of `model` in place of `before`."""
    version = served.engine.stats().policy_version
    wrong = compare_weights(
        "generator-0",
        version,
        expected=expected_of(model),
        found=served.call(served.engine.fingerprint()),
        before=(version - 1, before),
    )
    return "" if wrong is None else wrong.text


def test_every_tensor_that_vllm_holds_is_compared(served: Served) -> None:
    for model in (served.new, served.old):
        served.install(model)
        expected, found = expected_of(model), served.call(served.engine.fingerprint())
        assert not_compared(expected, found) == []
        assert finding(served, model, found) == ""
        # Two uses of one tied tensor: looked up from memory, multiplied by a packed copy.
        assert found.tensors[EMBEDDING].value
        assert expected.tensors[HEAD].agrees_with(found.tensors[HEAD])
        other = served.old if model is served.new else served.new
        assert "16 of 25 tensors differ" in finding(served, other, found), "all but the norms"


def test_weights_that_were_not_installed_are_named(
    sabotaged: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = sabotaged.engine._running().core
    before = sabotaged.call(sabotaged.engine.fingerprint())

    async def only_counts(policy_version: int, _limit: float) -> None:
        core.policy_version = policy_version

    monkeypatch.setattr(core, "install", only_counts)
    version = sabotaged.install(sabotaged.new)
    said = finding(sabotaged, sabotaged.new, before)
    assert f"generator-0 decodes with other weights than the trainer has for version {version}: "
    assert "16 of 25 tensors differ" in said
    assert f"still have the numbers of version {version - 1}: they were not installed" in said


@pytest.mark.parametrize(
    ("kind", "skipped", "named"), [("stale head", "", HEAD), ("skip", NORM, NORM)]
)
def test_a_tensor_that_was_left_behind_is_named(
    sabotaged: Served, kind: str, skipped: str, named: str
) -> None:
    before = sabotaged.call(sabotaged.engine.fingerprint())
    model = copy.deepcopy(sabotaged.new)
    with torch.no_grad():
        model.get_parameter(NORM).mul_(1.5)
    fault(sabotaged, kind, skipped)
    published = [one for one in model.state_dict().items() if one[0] != HEAD]  # as a trainer does
    version = sabotaged.engine.stats().policy_version + 1
    sabotaged.call(give_weights(sabotaged.engine, published, version))
    said = finding(sabotaged, model, before)
    assert f"1 of 25 tensors differ ({named})" in said
    assert f"still have the numbers of version {version - 1}" in said


def test_one_row_of_a_fused_projection_is_seen(sabotaged: Served) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    before = sabotaged.call(sabotaged.engine.fingerprint())
    state = {key: value.clone() for key, value in sabotaged.new.state_dict().items()}
    state[name][-1] *= 1 + 2.0**-20
    version = sabotaged.engine.stats().policy_version + 1
    sabotaged.call(give_weights(sabotaged.engine, state.items(), version))
    assert f"1 of 25 tensors differ ({name})" in finding(sabotaged, sabotaged.new, before)

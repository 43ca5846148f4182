"""Settings that keep decoding and verification from rounding differently."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny_models import make_qwen3, save

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.torch.model import load_model
from asyncrl.engine.vllm.client.process import prepare, process_log


def test_logits_are_float32_on_a_gpu_unless_the_user_says_otherwise() -> None:
    auto, model = EngineConfig(), EngineConfig(logits_dtype="model")
    wide = EngineConfig(logits_dtype="float32")
    assert [one.has_float32_logits(on_cpu=False) for one in (auto, model, wide)] == [1, 0, 1]
    assert [one.has_float32_logits(on_cpu=True) for one in (auto, model, wide)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "no effect with the torch engine"),
        ({"kinds": ["vllm", "torch"]}, "no effect with the torch engine"),
        ({"kind": "vllm", "device": "cpu"}, "needs a GPU, and device is cpu"),
    ],
)
def test_batch_invariance_without_effect_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        EngineConfig(batch_invariant=True, **settings)
    for kind in ("vllm", "sglang"):
        assert EngineConfig(batch_invariant=True, kind=kind).batch_invariant


def test_vllm_is_told_of_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in (False, True):
        monkeypatch.setattr(os, "environ", dict(os.environ))
        monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
        config = EngineConfig(kind="vllm", batch_invariant=wanted)
        prepare(config, process_log(config.vllm.log_level))
        assert os.environ.get("VLLM_BATCH_INVARIANT") == ("1" if wanted else None)


def test_the_torch_engine_gives_logits_that_bfloat16_has_not(tmp_path: Path) -> None:
    path = save(make_qwen3(seed=1), tmp_path / "model")

    def logits(*, wide: bool) -> torch.Tensor:
        model = load_model(
            path,
            slots=2,
            max_len=32,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            wide_logits=wide,
        )
        tokens = torch.arange(7).int().numpy()
        return model.forward_fresh(tokens, torch.tensor([7]).int().numpy(), torch.arange(7).numpy())

    plain, wide = logits(wide=False), logits(wide=True)
    assert torch.equal(plain, plain.bfloat16().float())
    assert not torch.equal(wide, wide.bfloat16().float())
    assert torch.equal(wide.bfloat16().float(), plain)

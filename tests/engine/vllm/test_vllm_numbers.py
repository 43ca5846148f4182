"""What vLLM makes of our settings of logits and batches, by its own configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from served_vllm import REAL_VLLM
from tiny_models import make_qwen3, save

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineStartError

pytestmark = REAL_VLLM


def arguments(path: str, **settings: Any) -> dict[str, Any]:
    from asyncrl.engine.vllm.client.launch import engine_args

    config = EngineConfig(kind="vllm", max_model_len=64, **settings)
    return engine_args(config, path, CacheConfig(enabled=False), 1, CachePlace())


def test_the_output_layer_is_of_the_type_that_is_asked_for(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    path = save(make_qwen3(seed=1), tmp_path / "model")
    for asked, head in (("float32", torch.float32), ("model", torch.bfloat16)):
        given = arguments(path, dtype="bfloat16", logits_dtype=asked)
        found = AsyncEngineArgs(**given).create_model_config()
        assert (found.dtype, found.head_dtype) == (torch.bfloat16, head)


def test_a_gpus_batch_invariant_kernels_decide_about_the_output_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from asyncrl.engine.vllm.client import launch

    class Gpu:
        def __init__(self, family: int) -> None:
            self.family = family

        def is_cpu(self) -> bool:
            return False

        def is_device_capability_family(self, family: int) -> bool:
            return family == self.family

    for family, invariant, wide in ((90, False, True), (90, True, True), (80, False, True)):
        monkeypatch.setattr(launch, "current_platform", Gpu(family))
        assert ("hf_overrides" in arguments("m", batch_invariant=invariant)) == wide
    monkeypatch.setattr(launch, "current_platform", Gpu(80))
    assert "hf_overrides" not in arguments("m", batch_invariant=True)
    with pytest.raises(EngineStartError, match="not batch-invariant in vLLM on GPUs of compute"):
        arguments("m", batch_invariant=True, logits_dtype="float32")


def test_batch_invariance_needs_a_gpu() -> None:
    from asyncrl.engine.vllm.client.launch import _check_device

    with pytest.raises(EngineStartError, match="needs a GPU, and this vLLM runs on the CPU"):
        _check_device(EngineConfig(kind="vllm", batch_invariant=True))

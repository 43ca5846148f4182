"""LoRA: what cannot be trained, served or started from is named. And what it needs in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_learners import LORA, Groups, learner_of, trained
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny_models import make_llama

from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.engine.errors import WeightsError
from asyncrl.engine.torch.core import ModuleWeights
from asyncrl.errors import ModelError, UserError
from asyncrl.startup.lora_check import check_serving, with_adapter
from asyncrl.tasks.model import check_directory
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.base.lora_config import LoraConfig
from asyncrl.trainer.checkpoint.export import export_adapter
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.trainer.model.memory_estimate import ModelShape, Samples, step_memory
from asyncrl.wire.weights import adapter as arithmetic
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import LoraSpec
from asyncrl.wire.weights.writer import WeightPublisher

ModelPath = Callable[[str], str]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4, "dropout": 0.1}, "engines sample from. Set it to 0"),
        ({"rank": 4, "modules_to_save": ["lm_head"]}, "lm_head: only adapters"),
        ({"rank": 4, "targets": "q_proj"}, "must be all-linear or a list"),
        ({"rank": 4, "targets": []}, "names no layer"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(lora=settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference_decay": 0.9, "kl_coefficient": 0.1}, "reference_decay does not work with"),
        ({"sharding": "full", "ranks": 2}, "sharding: full does not work with lora"),
        ({"compile": True}, "compile: true does not work with lora"),
        ({"algorithm": "ppo", "critic": {"shared_trunk": True}}, "shared_trunk: true does not"),
    ],
)
def test_what_does_not_go_with_lora_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(lora=LORA, **settings)


def test_layers_and_adapters_that_do_not_fit_are_named(
    model_path: ModelPath, group_of: Groups, tmp_path: Path
) -> None:
    path = model_path("qwen3")
    for target, message in [
        ("query", "query is not a layer of .* down_proj, gate_proj"),
        ("lm_head", "lm_head is not a linear layer of a block"),
        ("embed_tokens", "embed_tokens is not a linear layer of a block"),
    ]:
        lora = LORA.model_copy(update={"targets": (target, "q_proj")})
        with pytest.raises(UnsupportedModelError, match=message):
            learner_of(path, lora=lora)
    for target, what in [("query", "no layer"), ("embed_tokens", "no layer in a block")]:
        config = RunConfig.model_validate({"trainer": {"lora": {"rank": 3, "targets": [target]}}})
        with pytest.raises(UserError, match=f"{target} is {what} of .*; give some of down_proj, "):
            with_adapter(config, Path(path))
    trained(learner_of(path), group_of).save(path_of(tmp_path / "checkpoints", 1))
    adapter = tmp_path / "adapter"
    export_adapter(path_of(tmp_path / "checkpoints", 1), adapter)
    for changes, message in [
        ({"r": 4}, "has r 4, but the run 3"),
        ({"use_dora": True}, "uses use_dora, which is not trained here"),
        ({"peft_type": "IA3"}, "is not a LoRA adapter"),
    ]:
        text = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps(text | changes))
        config = RunConfig.model_validate(
            {"trainer": {"lora": {"rank": 3, "alpha": 12, "adapter": str(adapter)}}}
        )
        with pytest.raises(UserError, match=message):
            with_adapter(config, Path(path))
        (adapter / "adapter_config.json").write_text(json.dumps(text))
    fewer = LORA.model_copy(update={"targets": ("q_proj",), "adapter": str(adapter)})
    with pytest.raises(UnsupportedModelError, match="does not fit"):
        learner_of(path, lora=fewer)
    with_adapter(config, Path(path))  # the one that was trained here
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(one for one in tensors if "q_proj.lora_A" in one)
    save_file(tensors | {name: torch.zeros(3, 33)}, file)
    message = r"is of another model than .*q_proj.lora_A.weight is for .* side of 33, and .* 32 x"
    with pytest.raises(UserError, match=message):
        with_adapter(config, Path(path))
    file.write_bytes(b"nonsense")
    with pytest.raises(
        UserError, match=r"adapter_model.safetensors is not a safetensors file, or is damaged"
    ):
        with_adapter(config, Path(path))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_of_a_mixture_the_linear_layers_are_adapted(
    model_path: ModelPath, group_of: Groups, name: str
) -> None:
    """Experts are parameters of a module of their own, and stay as they are."""
    learner = trained(learner_of(path := model_path(name)), group_of)
    adapted = {
        one.rpartition(".lora_")[0].rpartition(".")[2]
        for one, _ in learner.policy.model.named_parameters()
        if ".lora_" in one
    }
    assert adapted >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not {one for one in adapted if one in {"experts", "lm_head", "gate_up_proj"}}
    lora = {"rank": 3, "targets": ["up_proj" if name == "qwen3_moe" else "w1"]}
    with pytest.raises(UserError, match="is no layer of"):
        with_adapter(RunConfig.model_validate({"trainer": {"lora": lora}}), Path(path))


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is a PEFT adapter, .* as trainer.lora.adapter"):
        check_directory(tmp_path)


def test_an_adapter_that_does_not_fit_the_engines_model_changes_nothing(tmp_path: Path) -> None:
    module = make_llama(seed=2)
    weights, before = ModuleWeights(module), fingerprint(module.state_dict().items())
    layer = "model.layers.0.mlp.up_proj"
    for pair, message in [
        ((torch.ones(2, 32), torch.ones(48, 3)), r"lora_B.* \(48, 3\) given, \(48, 2\) needed"),
        ((torch.ones(2, 32), None), "None given"),
    ]:
        names = arithmetic.names_of(layer)
        tensors = [(n, one) for n, one in zip(names, pair, strict=True) if one is not None]
        with (
            WeightPublisher(tmp_path, "run", lora=LoraSpec(2, 1.0)) as publisher,
            pytest.raises(WeightsError, match=message),
        ):
            weights.stage(publisher.publish(tensors, 1))
    assert fingerprint(module.state_dict().items()) == before


def test_a_7b_model_with_an_adapter_fits_one_gpu() -> None:
    """24 GiB with bfloat16 and checkpointed activations; all weights need more than 100."""
    shape = ModelShape.of(
        {
            "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
        }
    )  # fmt: skip
    assert shape is not None
    config = TrainerConfig(
        dtype="bfloat16", gradient_checkpointing=True, lora=LoraConfig(rank=16), kl_coefficient=0.1
    )
    samples = Samples(longest=4096, group_size=8)
    needs = step_memory(shape, config, samples, on_gpu=True)
    assert needs.device < 24 * 2**30
    assert needs.reference == 0
    assert needs.published == 2 * 40_370_176 * 4
    whole = step_memory(
        shape, config.model_copy(update={"lora": LoraConfig()}), samples, on_gpu=True
    )
    assert whole.device > 100 * 2**30


@pytest.mark.parametrize(
    ("engine", "lora", "message"),
    [
        ({}, {}, r"for vLLM alone, and engine\.kind is torch; use trainer\.lora\.serve: merged"),
        ({"kinds": ["vllm", "sglang"]}, {}, r"engine\.kind is sglang"),
        ({"kind": "vllm", "vllm": {"tensor_parallel_size": 2}}, {}, "tensor_parallel_size above 1"),
        ({"kind": "vllm"}, {"rank": 600}, "adapters of rank 512 at most"),
    ],
)
def test_an_adapter_that_an_engine_cannot_keep_apart_is_refused(
    engine: dict[str, Any], lora: dict[str, Any], message: str
) -> None:
    sections = {
        "engine": engine,
        "trainer": {"lora": {"rank": 4, "serve": "adapter"} | lora},
        "launcher": {"generators": 2},
    }
    config = parse_config(sections, source="test")
    with pytest.raises(UserError, match=message):
        check_serving(config)


def test_vllm_keeps_an_adapter_apart() -> None:
    sections = {"engine": {"kind": "vllm"}, "trainer": {"lora": {"rank": 4, "serve": "adapter"}}}
    check_serving(parse_config(sections, source="test"))


def test_engines_that_hold_the_model_more_finely_are_refused() -> None:
    trainer = {"lora": {"rank": 4}, "dtype": "bfloat16"}
    for engine in ({"dtype": "float32"}, {"device": "cpu"}):
        config = parse_config({"engine": engine, "trainer": trainer}, source="test")
        with pytest.raises(UserError, match=r"Set engine\.dtype: bfloat16, or trainer\.dtype"):
            check_serving(config)
    low = {"dtype": "bfloat16", "device": "cpu"}
    check_serving(parse_config({"engine": low, "trainer": trainer}, source="test"))

"""The memory estimate against what a learner allocates, and what is said when it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config

from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory, TrajectoryBuilder
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import head
from asyncrl.trainer.model import memory_estimate as memory
from asyncrl.trainer.model.memory_estimate import (
    ACTIVATIONS_FACTOR,
    ModelShape,
    Samples,
    StepMemory,
    remedies,
    step_memory,
    tokens_at_once,
)

GROUP, PROMPT, RESPONSE = 4, 24, 232
SAMPLES = Samples(longest=PROMPT + RESPONSE, group_size=GROUP)
QWEN_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    "tie_word_embeddings": False,
}  # fmt: skip


def _model(folder: Path, vocabulary: int) -> tuple[str, ModelShape]:
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=128, num_hidden_layers=3, intermediate_size=320,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    shape = ModelShape.of(config.to_dict(), sum(p.numel() for p in model.parameters()))
    assert shape is not None
    return str(folder), shape


def _group(version: int, number: int = 0) -> list[Trajectory]:
    out = []
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, 64, PROMPT).astype(np.int32)
    for sample in range(GROUP):
        builder = TrajectoryBuilder(SampleId(number, sample), "p", prompt)
        tokens = rng.integers(0, 64, RESPONSE).astype(np.int32)
        builder.append(
            tokens=tokens,
            logprobs=np.full(RESPONSE, -4, np.float32),
            topk_ids=tokens[:, None],
            topk_logprobs=np.full((RESPONSE, 1), -4, np.float32),
            noise_seeds=np.zeros(RESPONSE, np.uint64),
            provenance=np.full(RESPONSE, Provenance.SAMPLED, np.uint8),
            policy_version=version,
        )
        out.append(builder.finish("stop"))
    return out


def _peak_of(call: Any) -> int:
    """Most bytes of torch's CPU memory that a call held at a time, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    held = peak = 0
    events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    ("vocabulary", "settings"),
    [
        (64, {}),
        (64, {"fused": False}),
        (64, {"dtype": "bfloat16"}),
        (64, {"gradient_checkpointing": True}),
        (64, {"gradient_checkpointing": "selective"}),
        (50_000, {"gradient_checkpointing": True}),
        (64, {"kl_coefficient": 0.1, "micro_batch_tokens": 300}),
    ],
    ids=str,
)
def test_a_learner_allocates_what_was_estimated(
    tmp_path: Path, vocabulary: int, settings: dict[str, Any]
) -> None:
    path, shape = _model(tmp_path, vocabulary)
    config = TrainerConfig(device="cpu", **settings).for_device(None)
    learner = Learner(config, path, group_size=GROUP, seed=0)
    rewards = np.arange(GROUP, dtype=np.float32)
    learner.add_group(_group(0), rewards)  # compiles, and makes the optimizer's state
    learner.step()
    expected = step_memory(shape, config, SAMPLES, on_gpu=False)
    groups = [_group(1, number) for number in (1, 2)]
    measured = _peak_of(lambda: [learner.add_group(one, rewards) for one in groups])
    # Weights, reference and moments are there already.
    unsure = expected.activations + expected.head
    new = expected.gradients + unsure + 2 * shape.parameters * (config.dtype == "bfloat16")
    assert new - unsure + unsure / ACTIVATIONS_FACTOR < measured
    assert measured < new - unsure + unsure * ACTIVATIONS_FACTOR
    state = learner._update.optimizer.state.values()
    moments = sum(one[name].nbytes for one in state for name in ("exp_avg", "exp_avg_sq"))
    assert moments == expected.moments


def test_the_numbers_of_the_head_are_those_of_the_head() -> None:
    assert memory._LOGITS_AT_ONCE == head.LOGIT_BUDGET
    assert {memory._BLOCK[False], memory._BLOCK[True]} == {head.BLOCK["cpu"], head.BLOCK["cuda"]}


def test_shapes_are_read_from_configurations() -> None:
    shape = ModelShape.of(QWEN_7B)
    assert shape is not None
    assert shape.parameters == pytest.approx(7.616e9, rel=1e-3), "Qwen2.5-7B's model card: 7.61 B"
    nested = ModelShape.of({"text_config": {**QWEN_7B, "head_dim": 64}}, 5)
    assert nested is not None
    assert (nested.parameters, nested.head_size) == (5, 64)
    assert ModelShape.of({"model_type": "mamba"}) is None


def test_libraries_are_counted_on_gpus_and_nccl_where_ranks_speak() -> None:
    shape = ModelShape.of(QWEN_7B)
    assert shape is not None

    def needs(*, on_gpu: bool, **settings: Any) -> StepMemory:
        config = TrainerConfig(dtype="bfloat16", **settings)
        return step_memory(shape, config, SAMPLES, on_gpu=on_gpu)

    assert needs(on_gpu=False, ranks=4).libraries == 0
    one, four = needs(on_gpu=True), needs(on_gpu=True, ranks=4)
    assert four.libraries - one.libraries == memory.GIB
    lost = one.libraries - memory._WORKSPACES
    assert lost == pytest.approx(0.05 * (one.activations + one.head), abs=1)
    assert dict(one.kinds())["libraries"] == one.libraries, "it is said, and counted"


def test_micro_batches_are_no_larger_than_a_group_unless_groups_are_mixed() -> None:
    def tokens(**settings: Any) -> int:
        return tokens_at_once(TrainerConfig(**settings), Samples(longest=100, group_size=4))

    assert tokens() == 400
    assert tokens(mix_groups=True) == 8192
    assert tokens(micro_batch_tokens=50) == 100


def test_the_copy_for_checkpoints_is_counted_and_can_be_done_without() -> None:
    shape = ModelShape.of(QWEN_7B)
    assert shape is not None

    def needs(*, on_gpu: bool, **settings: Any) -> StepMemory:
        return step_memory(
            shape, TrainerConfig(dtype="float32", ranks=4, **settings), SAMPLES, on_gpu=on_gpu
        )

    on_cpu, on_gpu = needs(on_gpu=False), needs(on_gpu=True)
    assert on_gpu.host_copy == on_cpu.copy == pytest.approx(12 / 4 * shape.parameters, abs=4)
    assert (on_gpu.copy, on_cpu.host_copy) == (0, 0)
    without = needs(on_gpu=False, async_checkpoints=False)
    assert (without.device, without.least) == (on_cpu.device - on_cpu.copy, on_cpu.least)
    assert needs(on_gpu=False, optimizer_state="int8").copy < 0.51 * on_cpu.copy


@pytest.mark.parametrize(
    ("gib", "on_gpu", "wanted"),
    [
        (400, True, []),
        (170, True, ["trainer.gradient_checkpointing: selective"]),
        (143, True, ["trainer.gradient_checkpointing: true"]),
        (100, True, ["trainer.gradient_checkpointing: true", "trainer.optimizer_state: int8"]),
        (85, True, ["trainer.gradient_checkpointing: true", "trainer.optimizer_offload: true"]),
        (40, True, None),
    ],
)
def test_remedies_are_the_cheapest_that_are_enough(
    gib: int, on_gpu: bool, wanted: list[str] | None
) -> None:
    shape, room = ModelShape.of(QWEN_7B), gib * memory.GIB
    assert shape is not None
    config = TrainerConfig(dtype="bfloat16", micro_batch_tokens=32768)
    samples = Samples(longest=16384, group_size=8)
    settings, needed = remedies(shape, config, samples, room, on_gpu=on_gpu)
    if wanted is None:
        assert needed > room
        return
    if not wanted:
        assert step_memory(shape, config, samples, on_gpu=on_gpu).device <= room
        return
    assert needed <= room
    assert settings == wanted, "and none that changes nothing"


@pytest.mark.parametrize(
    "other",
    [
        {"compile": True, "ranks": 2},
        {"algorithm": "reinforce_plus_plus"},
        {"algorithm": "ppo", "critic": {"passes": 2}, "ranks": 2},
        {"lora": {"rank": 8}, "ranks": 2},
    ],
    ids=str,
)
def test_remedies_go_with_the_other_settings(other: dict[str, Any]) -> None:
    shape = ModelShape.of(QWEN_7B)
    assert shape is not None
    config = TrainerConfig(dtype="bfloat16", **other)
    for gib in (20, 40, 70, 90, 110, 130, 150, 200):
        for on_gpu in (True, False):
            settings, _ = remedies(shape, config, SAMPLES, gib * memory.GIB, on_gpu=on_gpu)
            for one in settings:
                name, _, value = one.removeprefix("trainer.").partition(": ")
                TrainerConfig(**{"dtype": "bfloat16", **other, name: yaml.safe_load(value)})

"""How a GPU is divided between trainer and generator, and whether engines start on their part."""

from __future__ import annotations

import io
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tiny_warm_start import place_untrained

from asyncrl.config.run_config import RunConfig, dump_config, load_config, parse_config
from asyncrl.config.yaml_text import parse_yaml
from asyncrl.errors import UserError
from asyncrl.launch.gpus import Gpu, TorchBuild
from asyncrl.launch.placement import GpuNeeds, GpuPlan, plan_gpus
from asyncrl.startup import devices
from asyncrl.startup.devices import needs_of
from asyncrl.startup.prepare import EngineNeeds, divide, prepare, with_shared_gpu
from asyncrl.tasks.builtin.warm_start_recipe import WarmStart
from asyncrl.trainer.model.memory_estimate import GIB, ModelShape, StepMemory

SMALL = ModelShape(494_032_768, 896, 24, 4864, 14, 2, 64, 151_936, tied=True)
"""Qwen2.5-0.5B."""
MIB_24, MIB_80 = 24_564, 81_559
"""That nvidia-smi gives for 24 and 80 GB."""


def settings(kind: str = "vllm", **engine: Any) -> RunConfig:
    given = {"kind": kind, "max_model_len": 2048, "slots": 128} | engine
    trainer = {"dtype": "bfloat16", "gradient_checkpointing": True}
    return parse_config({"engine": given, "trainer": trainer}, source="test")


def one_gpu(memory: int | None, config: RunConfig) -> GpuPlan:
    gpu = Gpu("0", "GPU-0", "NVIDIA", memory, 0)
    return plan_gpus([gpu], needs_of(config, any_gpu=True), renumbers=True)


def shared(
    config: RunConfig, memory: int | None = MIB_24, shape: ModelShape | None = SMALL
) -> tuple[RunConfig, str]:
    found, line = with_shared_gpu(config, one_gpu(memory, config), shape)
    assert line is not None
    return found, line


@dataclass
class Device:
    """A GPU of which processes hold bytes; what CUDA says is total and free."""

    total: int
    held: int = 0

    @property
    def free(self) -> int:
        return self.total - self.held


def vllm_starts(device: Device, config: RunConfig, needs: EngineNeeds, trainer: int) -> None:
    """vLLM 0.32.0 with `kv_cache_memory_bytes`, while the trainer takes so many bytes more.

    `request_memory` (v1/worker/utils.py:716) at its start; then weights, and KV without asking what
    is free (v1/worker/gpu_worker.py:649).
    """
    told = config.engine.vllm.memory_arguments(on_cpu=False)
    requested = math.ceil(device.total * told.get("gpu_memory_utilization", 0.92))
    if device.free < requested:
        raise ValueError("Free memory on device is less than desired GPU memory utilization")
    device.held += trainer
    device.held += needs.without_kv + int(told["kv_cache_memory_bytes"])
    assert device.free >= 0, "out of memory"


def sglang_starts(device: Device, config: RunConfig, needs: EngineNeeds, trainer: int) -> None:
    """SGLang 0.5.23 with `max_total_tokens`, as above.

    `_profile_available_bytes` (srt/mem_cache/kv_cache_configurator.py:2990), of which it takes the
    tokens that it was given if they are fewer.
    """
    ours = config.engine.sglang
    assert ours.kv_cache_gib is not None
    assert ours.mem_fraction_static is not None
    before = device.free
    device.held += trainer + needs.weights
    kv = int(ours.kv_cache_gib * GIB)
    assert device.free - before * (1 - ours.mem_fraction_static) >= kv, "fewer tokens than were set"
    device.held += needs.process + kv
    assert device.free >= 0, "out of memory"


STARTS = {"vllm": vllm_starts, "sglang": sglang_starts}


@pytest.mark.parametrize("kind", STARTS)
@pytest.mark.parametrize("memory", [MIB_24, MIB_80])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0], ids=["engine first", "both", "trainer first"])
def test_an_engine_starts_in_every_order(kind: str, memory: int, share: float) -> None:
    """`share` of the trainer's part is taken before the engine starts, the rest while it does."""
    config, line = shared(settings(kind), memory)
    needs = EngineNeeds.of(SMALL, config.engine, config.cache.draft_tokens)
    (said,) = re.findall(r"trainer ([\d.]+) GiB", line)
    part = int(float(said) * GIB)
    real = Device(int(0.992 * memory) << 20)  # torch sees less than nvidia-smi says
    real.held = int(share * part)
    STARTS[kind](real, config, needs, part - real.held)


@pytest.mark.parametrize(
    "given", [{"kv_cache_gib": 1.0}, {"gpu_memory_utilization": 0.85}], ids=str
)
def test_vllm_by_itself_wants_most_of_the_gpu_to_be_free(given: dict[str, float]) -> None:
    """What is mended here: 85%, or with KV of a given size 92%, whoever else is there."""
    config = settings(vllm=given)
    needs = EngineNeeds.of(SMALL, config.engine, 16)
    with pytest.raises(ValueError, match="less than desired"):
        vllm_starts(Device(MIB_24 << 20, 8 * GIB), config, needs, 0)


def test_what_vllm_is_told_without_a_shared_gpu() -> None:
    def told(*, on_cpu: bool = False, **vllm: float) -> dict[str, float]:
        return settings(vllm=vllm).engine.vllm.memory_arguments(on_cpu=on_cpu)

    assert told() == {"gpu_memory_utilization": 0.85}
    assert told(gpu_memory_utilization=0.5) == {"gpu_memory_utilization": 0.5}
    assert told(kv_cache_gib=2) == {"kv_cache_memory_bytes": 2 * GIB}
    assert told(on_cpu=True, gpu_memory_utilization=0.5) == {"kv_cache_memory_bytes": GIB // 2}


@given(
    total=st.integers(8, 200), trainer=st.integers(1, 100), slots=st.integers(1, 512),
    longest=st.integers(16, 1 << 16),
)  # fmt: skip
def test_both_sides_fit_or_it_says_that_they_do_not(
    total: int, trainer: int, slots: int, longest: int
) -> None:
    config = settings(max_model_len=longest, slots=slots) if longest > 300 else settings()
    needs = EngineNeeds.of(SMALL, config.engine, 16)
    found = divide(total * GIB, StepMemory(trainer * GIB, 0, 0, 0, 0, 0, 0), needs)
    assert found.trainer >= trainer * GIB / 0.92
    if not found.fits:
        assert found.kv < needs.request
        return
    assert found.trainer + needs.without_kv + found.kv <= total * GIB
    assert found.utilization * total * GIB >= needs.without_kv + found.kv
    assert found.utilization + found.trainer / (total * GIB) < 1
    assert found.kv <= needs.most_kv, "what no slot can use is left"


@pytest.mark.parametrize("kind", ["vllm", "sglang", "torch"])
def test_the_line_has_both_sides_and_a_resumed_run_divides_alike(kind: str) -> None:
    config, line = shared(settings(kind))
    assert config.launcher.colocate is True
    assert line.startswith("shared     GPU 0 (24 GiB): trainer ")
    assert f"{kind} " in line
    assert "requests of 2,048 tokens)" in line
    again = parse_config(parse_yaml(dump_config(config), source="test"), source="config.yaml")
    assert again == config
    assert shared(again)[0] == config


def test_more_gpus_are_not_shared_and_that_is_written_too() -> None:
    gpus = [Gpu(str(n), f"GPU-{n}", "NVIDIA", MIB_24, n) for n in range(2)]
    plan = plan_gpus(gpus, GpuNeeds(1, 1, 1), renumbers=True)
    config, line = with_shared_gpu(settings(), plan, SMALL)
    assert line is None
    assert config.launcher.colocate is False
    assert config.engine == settings().engine
    assert with_shared_gpu(settings(), None, SMALL) == (settings(), None)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("vllm", {"kv_cache_gib": 2.0}),
        ("vllm", {"gpu_memory_utilization": 0.4}),
        ("vllm", {"gpu_memory_utilization": 0.4, "kv_cache_gib": 2.0}),
        ("sglang", {"kv_cache_gib": 2.0}),
        ("sglang", {"mem_fraction_static": 0.3}),
        ("sglang", {"kv_cache_gib": 2.0, "mem_fraction_static": 0.9}),
    ],
)
def test_what_the_user_has_set_holds(kind: str, given: dict[str, float]) -> None:
    config, _ = shared(settings(kind, **{kind: given}))
    found = getattr(config.engine, kind)
    if "kv_cache_gib" in given:
        assert found.model_dump() | given == found.model_dump()
    needs = EngineNeeds.of(SMALL, config.engine, 16)
    share = given.get("gpu_memory_utilization", given.get("mem_fraction_static"))
    if share is not None and "kv_cache_gib" not in given:
        beside = needs.without_kv if kind == "vllm" else needs.weights
        assert found.kv_cache_gib * GIB + beside == pytest.approx(
            share * (MIB_24 << 20), rel=1e-3
        )  # fmt: skip
    real = Device(int(0.992 * MIB_24) << 20, 9 * GIB)
    STARTS[kind](real, config, needs, 0)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("vllm", {"kv_cache_gib": 12.0}, "Leave out engine.vllm.kv_cache_gib and .gpu_memory"),
        ("vllm", {"gpu_memory_utilization": 0.85}, "Leave out engine.vllm.kv_cache_gib"),
        ("vllm", {"gpu_memory_utilization": 0.85, "kv_cache_gib": 2.0}, "and the trainer leaves"),
        ("sglang", {"mem_fraction_static": 0.85}, "Leave out engine.sglang.kv_cache_gib and .mem_"),
        ("sglang", {"mem_fraction_static": 0.3, "kv_cache_gib": 2.0}, "it must be at least 0"),
    ],
)
def test_what_the_user_has_set_is_checked(kind: str, given: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as refused:
        shared(settings(kind, **{kind: given}))
    # Whoever resumes from a run's config.yaml may have set neither.
    assert "(a run writes both to its config.yaml" in str(refused.value)


def test_what_cannot_fit_is_refused_with_sizes_and_with_what_would() -> None:
    config = settings()
    larger = ModelShape(1_543_714_304, 1536, 28, 8960, 12, 2, 128, 151_936, tied=True)
    with pytest.raises(UserError, match="is too small for the trainer and a generator") as no:
        shared(config, MIB_24, larger)
    text = str(no.value)
    for said in ("GPU 0 (24 GiB)", "moments 12 GiB", "weights 2.9 GiB", "for its process"):
        assert said in text
    ((names, needed),) = re.findall(r"Set (trainer\..*): then a step needs about (\d+) GiB", text)
    changes = dict(one.split(": ") for one in names.replace("trainer.", "").split(" and "))
    values = {name: {"true": True}.get(value, value) for name, value in changes.items()}
    trainer = config.trainer.model_copy(update=values)
    fits, line = shared(config.model_copy(update={"trainer": trainer}), MIB_24, larger)
    assert fits.engine.vllm.kv_cache_gib
    assert int(needed) < 24
    assert "requests of 2,048" in line


def test_the_slots_of_the_torch_engine_are_its_kv() -> None:
    config = settings("torch", slots=2048)
    with pytest.raises(UserError, match=r"Set engine\.slots: \d+") as no:
        shared(config)
    (slots,) = re.findall(r"engine\.slots: (\d+)", str(no.value))
    found, _ = shared(settings("torch", slots=int(slots)))
    assert found.engine.vllm == config.engine.vllm, "it needs no settings"
    with pytest.raises(UserError):
        shared(settings("torch", slots=int(slots) + 1))


def test_unknown_sizes_are_said_and_never_guessed() -> None:
    for memory, shape in itertools.product([None, MIB_24], [None, SMALL]):
        if memory and shape:
            continue
        _, line = shared(settings("torch"), memory, shape)
        assert "is not known, so nothing says whether both fit" in line
        with pytest.raises(UserError, match=r"set engine\.vllm\.kv_cache_gib and engine\.vllm\."):
            shared(settings("vllm"), memory, shape)
        given = settings("vllm", vllm={"kv_cache_gib": 1.0, "gpu_memory_utilization": 0.3})
        assert shared(given, memory, shape)[0].engine == given.engine


def test_sglang_with_several_gpus_cannot_share_one() -> None:
    config = parse_config(
        {
            "engine": {"kind": "sglang", "sglang": {"tensor_parallel_size": 2}},
            "launcher": {"colocate": True},
        },
        source="test",
    )
    gpus = [Gpu(str(n), f"GPU-{n}", "NVIDIA", MIB_80, n) for n in range(2)]
    plan = plan_gpus(gpus, needs_of(config, any_gpu=True), renumbers=True)
    with pytest.raises(UserError, match="differ by more than 10% in free memory"):
        with_shared_gpu(config, plan, SMALL)


def test_a_start_on_one_gpu_says_that_it_is_shared_and_writes_it_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(devices, "find_gpus", lambda: [Gpu("0", "GPU-0", "RTX 4090", MIB_24, 0)])
    monkeypatch.setattr(devices, "torch_build", lambda: TorchBuild("2.13.0+cu130", "13.0"))
    place_untrained(tmp_path, WarmStart())
    example = Path(__file__).parents[3] / "examples/arithmetic.yaml"
    config = load_config(example, ["task.train_size=8", "task.evaluation_size=8"])
    output = io.StringIO()
    prepared = prepare(config, Console(file=output, width=400))
    assert prepared.config.launcher.colocate is True
    assert prepared.gpus is not None
    assert prepared.gpus.shares
    assert "trainer: GPU 0, shared with a generator" in output.getvalue()
    assert "shared     GPU 0 (24 GiB): trainer " in output.getvalue()

"""What a run says about memory before it starts, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.config.run_config import RunConfig, load_config, parse_config
from asyncrl.errors import UserError
from asyncrl.launch.gpus import Gpu
from asyncrl.launch.placement import GpuNeeds, GpuPlan, plan_gpus
from asyncrl.startup.memory import (
    Device,
    device_of,
    memory_of,
    memory_text,
    refuse_too_large,
    shape_of,
)
from asyncrl.startup.startup_summary import memory_line
from asyncrl.trainer.model.memory_estimate import StepMemory

EXAMPLE = Path(__file__).parents[3] / "examples" / "7b-8gpus.yaml"
GIB = 2**30
H100 = 81_559
"""MiB that nvidia-smi gives for 80 GB."""
QWEN_7B = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the configuration of a 7B model, and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return folder


def config(**sections: Any) -> RunConfig:
    return parse_config(sections, source="test")


def plan(memory: int | None, **needs: int) -> GpuPlan:
    found = [Gpu(str(n), f"GPU-{n}", memory_mib=memory, number=n) for n in range(8)]
    return plan_gpus(found, GpuNeeds(**needs), renumbers=True)


def test_the_example_for_eight_gpus_fits(model: Path) -> None:
    found = load_config(EXAMPLE, [f"model.path={model}"])
    gpus = plan(H100, generators=4, per_generator=1, trainer=4)
    device, shape = device_of(found, gpus), shape_of(found, model, None)
    assert device == Device("GPU 4", H100 * 2**20, on_gpu=True)
    assert shape is not None
    needs = memory_of(found, shape, on_gpu=True)
    assert device.bytes is not None
    assert 0.4 * device.bytes < needs.device < 0.6 * device.bytes
    refuse_too_large(found, shape, device)
    # Without what makes it fit, it is refused, and told what would.
    whole = load_config(EXAMPLE, ["trainer.sharding=optimizer"])
    with pytest.raises(UserError, match=r"about 82 GiB in each of 4 ranks, and GPU 4 has 80 G"):
        refuse_too_large(whole, shape, device)


def test_a_step_that_leaves_less_than_8_percent_is_refused(model: Path) -> None:
    changes = ["trainer.sharding=optimizer", "trainer.optimizer_state=bfloat16"]
    settings = load_config(EXAMPLE, changes)
    shape = shape_of(settings, model, None)
    assert shape is not None
    needs = memory_of(settings, shape, on_gpu=True)
    assert needs.libraries > GIB, "NCCL"
    refuse_too_large(settings, shape, Device("GPU 4", int(needs.device / 0.919), on_gpu=True))
    with pytest.raises(UserError, match=r"of which 92% can be planned with: .*Set trainer\.") as no:
        refuse_too_large(settings, shape, Device("GPU 4", H100 * 2**20, on_gpu=True))
    ((name, value),) = re.findall(r"Set trainer\.(\w+): (\w+)", str(no.value))
    fits = load_config(EXAMPLE, [*changes, f"trainer.{name}={value}"])
    refuse_too_large(fits, shape, Device("GPU 4", H100 * 2**20, on_gpu=True))


def test_the_explained_settings_end_with_what_a_step_needs(model: Path) -> None:
    asked = ["run", str(EXAMPLE), "--explain"]
    done = CliRunner().invoke(app, [*asked, "--set", f"model.path={model}"])
    assert done.exit_code == 0, done.output
    last = done.output.rstrip().splitlines()[-1]
    assert last.startswith("# memory: trainer: about ")
    assert "weights 7.1 GiB" in last
    assert last.endswith("each of 4 ranks")
    done = CliRunner().invoke(app, asked)
    assert done.output.rstrip().endswith("because Qwen/Qwen2.5-Math-7B is not on this machine")


def test_the_settings_that_would_help_are_named(model: Path) -> None:
    settings = config(trainer={"dtype": "bfloat16"}, engine={"max_model_len": 4096})
    shape = shape_of(settings, model, None)
    assert shape is not None
    device = Device("GPU 1", 145 * GIB, on_gpu=True)
    with pytest.raises(UserError, match="checkpointing: selective: then it is about 130 G"):
        refuse_too_large(settings, shape, device)
    with pytest.raises(UserError, match="It needs a larger device or a smaller model, and "):
        refuse_too_large(settings, shape, device._replace(bytes=24 * GIB))
    refuse_too_large(settings, shape, device._replace(bytes=None))
    refuse_too_large(settings, shape, device._replace(bytes=400 * GIB))


def test_ranks_on_a_cpu_share_its_memory(model: Path) -> None:
    shape = shape_of(config(), model, 10**9)
    assert shape is not None
    device = Device("this machine", 64 * GIB, on_gpu=False)
    refuse_too_large(config(engine={"max_model_len": 512}), shape, device)
    eight = config(engine={"max_model_len": 512}, trainer={"ranks": 8})
    device = device._replace(ranks=8)
    with pytest.raises(UserError, match=r"and trainer\.sharding: full: then it is about 7"):
        refuse_too_large(eight, shape, device)
    with pytest.raises(UserError, match="or fewer trainer"):
        refuse_too_large(eight, shape, device._replace(bytes=40 * GIB))


def test_the_line_has_every_kind_and_the_device(model: Path) -> None:
    memory = {"kl_coefficient": 0.1, "optimizer_offload": True, "dtype": "float32"}
    settings = config(trainer=memory)
    shape = shape_of(settings, model, 10**9)
    assert shape is not None
    needs = memory_of(settings, shape, on_gpu=True)
    gpus = plan(H100, generators=1, per_generator=1, trainer=1)
    line = memory_line(needs, device_of(settings, gpus))
    assert line.startswith("memory     trainer: about ")
    assert " of GPU 1 (80 GiB): " in line
    for kind in ("weights 3.7 GiB", "reference 3.7 GiB", "activations ", "head "):
        assert kind in line
    assert line.endswith("; host: moments 7.5 GiB, copy 11 GiB")
    assert "not known" in memory_line(None, None)
    assert memory_text(needs, None).startswith("trainer: about ")
    elsewhere = config(launcher={"kind": "ray"})
    assert device_of(elsewhere, None) is None


def test_the_type_that_a_device_will_choose_is_counted(model: Path) -> None:
    def needs(*, on_gpu: bool, **trainer: Any) -> StepMemory:
        settings = config(trainer=trainer)
        shape = shape_of(settings, model, 10**9)
        assert shape is not None
        return memory_of(settings, shape, on_gpu=on_gpu)

    assert needs(on_gpu=True) == needs(on_gpu=True, dtype="bfloat16")
    assert needs(on_gpu=False) == needs(on_gpu=False, dtype="float32")


def test_a_critic_is_a_second_model(model: Path) -> None:
    for dtype, bytes_of_a_parameter in (("float32", 16), ("bfloat16", 18)):
        settings = config(trainer={"algorithm": "ppo", "dtype": dtype})
        shape = shape_of(settings, model, 10**9)
        assert shape is not None
        needs = memory_of(settings, shape, on_gpu=True)
        assert needs.critic == bytes_of_a_parameter * 10**9 + needs.activations

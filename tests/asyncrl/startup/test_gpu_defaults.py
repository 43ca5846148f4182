"""What `auto` settings are on GPUs, decided at the start of a run; the GPUs are stand-ins."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from fake_processes import spec
from rich.console import Console
from tiny_warm_start import place_untrained
from whole_checkpoints import write_whole

from asyncrl.cache.config import DRAFT_TOKENS, CacheConfig
from asyncrl.config.run_config import RunConfig, dump_config, load_config, parse_config
from asyncrl.controller.execute import _with_drafts
from asyncrl.errors import UserError
from asyncrl.launch.gpus import Gpu, TorchBuild
from asyncrl.launch.placement import GpuNeeds, GpuPlan, plan_gpus
from asyncrl.runs.directory import RunDirectory
from asyncrl.runs.resuming import checkpoint_settings
from asyncrl.startup import gpu_defaults
from asyncrl.startup import prepare as prepare_module
from asyncrl.startup.gpu_defaults import (
    visits_of,
    with_drafts_that_pay,
    with_recorded_dtype,
    with_steps,
    with_trainer_dtype,
)
from asyncrl.startup.launching import Launching
from asyncrl.startup.prepare import Prepared
from asyncrl.tasks.builtin.warm_start_recipe import WarmStart
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer_process.setup import _for_this_process


def config(**sections: Any) -> RunConfig:
    return parse_config(sections, source="test")


def plan(*capabilities: tuple[int, int] | None, trainer: int = 1, generators: int = 1) -> GpuPlan:
    """The generators have the first GPUs, the trainer the last."""
    found = [
        Gpu(str(number), f"GPU-{number}", number=number, capability=one)
        for number, one in enumerate(capabilities)
    ]
    needs = GpuNeeds(generators=1, per_generator=generators, trainer=trainer)
    return plan_gpus(found, needs, renumbers=True)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((12, 1), "bfloat16"), ((7, 5), "float32")],
)
def test_the_trainers_gpu_decides(capability: tuple[int, int], dtype: str) -> None:
    found, line = with_trainer_dtype(config(), plan((7, 0), capability))
    assert found.trainer.dtype == dtype
    assert f"dtype: {dtype}" in dump_config(found)
    version = ".".join(map(str, capability))
    assert line == (
        f"compute    trainer in {dtype} (trainer.dtype: auto): "
        f"GPU 1 has compute capability {version}"
    )


def test_the_oldest_gpu_of_the_ranks_decides() -> None:
    found, _ = with_trainer_dtype(config(), plan((9, 0), (9, 0), (7, 5), trainer=2))
    assert found.trainer.dtype == "float32"


def test_on_a_cpu_it_is_float32_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_defaults, "torch_build", lambda: TorchBuild("2.9.0", None))
    for gpus in (None, plan((9, 0), trainer=0)):
        found, line = with_trainer_dtype(config(), gpus)
        assert (found.trainer.dtype, line) == ("float32", "")


def test_a_gpu_that_only_torch_may_see_is_left_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither nvidia-smi nor /proc shows the GPU of a Tegra, or those of some containers."""
    monkeypatch.setattr(gpu_defaults, "torch_build", lambda: TorchBuild("2.9.0", "12.8"))
    found, line = with_trainer_dtype(config(), None)
    assert found.trainer.dtype == "auto"
    assert "the trainer's log says which" in line
    on_cpu = config(trainer={"device": "cpu"})
    assert with_trainer_dtype(on_cpu, None)[0].trainer.dtype == "float32"
    assert with_trainer_dtype(config(), plan((9, 0), trainer=0))[0].trainer.dtype == "float32"


def saved(run: RunConfig, *steps: int, dtype: str) -> None:
    settings = checkpoint_settings(run) | {"dtype": dtype}
    write_whole(run.directory / "checkpoints", *steps, settings=settings)


def test_a_run_that_is_resumed_keeps_the_type_of_its_checkpoints(tmp_path: Path) -> None:
    """An older run of float32 on a GPU, where `auto` is bfloat16 now."""
    mine = config(run={"name": "mine", "directory": str(tmp_path)})
    assert with_recorded_dtype(mine) == mine, "nothing was saved"
    RunDirectory.create(mine, resume=False, clean=False).close()
    saved(mine, 2, 4, dtype="float32")
    (mine.directory / "checkpoints" / "step-000004" / "manifest.json").write_text("{")
    resumed, line = with_trainer_dtype(with_recorded_dtype(mine), plan((9, 0), (9, 0)))
    assert (resumed.trainer.dtype, line) == ("float32", "")
    saved(mine, 4, dtype="float32")
    RunDirectory.create(resumed, resume=True, clean=False).close()
    named = mine.model_copy(
        update={"trainer": mine.trainer.model_copy(update={"dtype": "bfloat16"})}
    )
    assert with_recorded_dtype(named) == named
    with pytest.raises(UserError, match="dtype: 'float32' -> 'bfloat16'"):
        RunDirectory.create(named, resume=True, clean=False)


def test_a_trainer_takes_the_type_of_the_checkpoint_that_it_continues_from(tmp_path: Path) -> None:
    mine = config(run={"name": "mine", "directory": str(tmp_path)})
    saved(mine, 2, dtype="bfloat16")
    for step, dtype in ((2, "bfloat16"), (None, "float32")):
        child: Any = SimpleNamespace(
            config=mine,
            spec=msgspec.structs.replace(spec(), resume_from=step),
            directory=mine.directory,
        )
        assert _for_this_process(child, "float32").trainer.dtype == dtype


def test_what_the_user_names_stays() -> None:
    for dtype in ("float32", "float64", "bfloat16"):
        named = config(trainer={"dtype": dtype})
        assert with_trainer_dtype(named, plan((9, 0), (9, 0))) == (named, "")


@pytest.mark.parametrize(
    ("sections", "gpus"), [({"launcher": {"kind": "ray"}}, None), ({}, plan(None, None))]
)
def test_where_only_its_process_sees_the_device_it_decides(
    sections: dict[str, Any], gpus: GpuPlan | None
) -> None:
    found, line = with_trainer_dtype(config(**sections), gpus)
    assert found.trainer.dtype == "auto"
    assert "the trainer's log says which" in line


def test_an_adapter_is_not_trained_on_a_coarser_model_than_engines_serve() -> None:
    """Such a run is refused, so `auto` must not lead there."""
    settings = {"trainer": {"lora": {"rank": 8}}, "engine": {"dtype": "float32"}}
    found, line = with_trainer_dtype(config(**settings), plan((9, 0), (9, 0)))
    assert found.trainer.dtype == "float32"
    assert line.endswith("the engines hold the model of trainer.lora in float32")
    settings["engine"] = {"dtype": "auto"}
    found, _ = with_trainer_dtype(config(**settings), plan((9, 0), (9, 0)))
    assert found.trainer.dtype == "bfloat16"


def test_a_type_that_nobody_resolved_is_an_error_where_it_is_needed() -> None:
    with pytest.raises(ValueError, match=r"trainer\.dtype is still auto"):
        _ = TrainerConfig().compute_dtype
    assert TrainerConfig().for_device(None).compute_dtype == "float32"
    assert TrainerConfig().for_device((9, 0)).compute_dtype == "bfloat16"


def drafts(run: RunConfig, *, on_gpu: bool, visits: float) -> tuple[int | str, str]:
    found, line = with_drafts_that_pay(run, on_gpu=on_gpu, visits=visits)
    assert f"max_draft_tokens: {found.cache.max_draft_tokens}\n" in dump_config(found)
    return found.cache.max_draft_tokens, line


def test_vllm_drafts_on_gpus_where_prompts_come_back() -> None:
    vllm = config(engine={"kind": "vllm"})
    tokens, line = drafts(vllm, on_gpu=True, visits=1.9)
    assert tokens == 0
    assert line == (
        "drafts     none (cache.max_draft_tokens: auto): the run's steps see each prompt 1.9 "
        "times, and vLLM schedules asynchronously without a drafter"
    )
    tokens, line = drafts(vllm, on_gpu=True, visits=2)
    assert tokens == DRAFT_TOKENS
    assert "at most 16 tokens a step" in line
    assert drafts(vllm, on_gpu=False, visits=1) == (16, ""), "as ever on a CPU"


def test_sglang_does_not_draft_on_gpus_and_torch_does() -> None:
    for kinds in (("sglang",), ("vllm", "sglang")):
        mixed = config(engine={"kinds": kinds}, launcher={"generators": 2})
        assert drafts(mixed, on_gpu=True, visits=9)[0] == 0
        assert drafts(mixed, on_gpu=False, visits=9)[0] == 16
    assert drafts(config(), on_gpu=True, visits=1)[0] == 16


def test_a_number_of_the_users_stays_and_an_unused_one_is_not_mentioned() -> None:
    named = config(engine={"kind": "vllm"}, cache={"max_draft_tokens": 5})
    assert with_drafts_that_pay(named, on_gpu=True, visits=1) == (named, "")
    without = config(engine={"kind": "vllm"}, cache={"enabled": False})
    assert drafts(without, on_gpu=True, visits=1) == (0, "")
    assert CacheConfig().draft_tokens == 16
    assert CacheConfig(max_draft_tokens=3).draft_tokens == 3


def test_visits_follow_from_steps_and_rows() -> None:
    run = config(run={"steps": 100}, scheduler={"groups_per_step": 16})
    assert visits_of(run, 800) == 2


@pytest.mark.parametrize(
    ("epochs", "prompts", "steps"),
    [
        (1, 16, 1),
        (1, 17, 2),
        (3, 800, 150),
        (0.5, 800, 25),
        (1e-9, 800, 1),
        (1.1, 160, 11),
        (2, 0, 1),
    ],
)
def test_epochs_are_the_fewest_steps_that_draw_every_prompt_so_often(
    epochs: float, prompts: int, steps: int
) -> None:
    run = config(run={"epochs": epochs}, scheduler={"groups_per_step": 16})
    found = with_steps(run, prompts)
    assert (found.run.steps, found.run.epochs) == (steps, None)
    assert with_steps(found, 9 * prompts) == found, "a run that knows its steps keeps them"


def test_more_epochs_than_a_run_has_steps_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"run\.epochs: 1e\+09 of 2,000 prompts are 125,000,000,000 "
    ):
        with_steps(config(run={"epochs": 1e9}, scheduler={"groups_per_step": 16}), 2000)


def test_a_run_is_prepared_with_what_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place_untrained(tmp_path / "cache", WarmStart())
    monkeypatch.setattr(prepare_module, "check_machine", lambda _config: plan((9, 0), (9, 0)))
    monkeypatch.setattr(prepare_module, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(prepare_module, "check_rewards", lambda _rewards: time.sleep(0.5))
    console = Console(record=True, width=200, force_terminal=False)
    run = {"epochs": 2}
    found = prepare_module.prepare(config(engine={"max_model_len": 512}, run=run), console)
    groups = found.config.scheduler.groups_per_step
    assert found.config.run.steps == -(-2 * len(found.task.train) // groups)
    assert load_config(None, []).run.steps != found.config.run.steps
    assert found.config.trainer.dtype == "bfloat16"
    assert found.config.cache.max_draft_tokens == 16
    said = console.export_text()
    assert said.startswith("checking the rewards and the environment ...\n"), "it takes long"
    assert f"{found.config.run.steps:,} steps of" in said
    assert "(run.epochs: 2)" in said
    assert "compute    trainer in bfloat16" in said
    assert "drafts     at most 16 tokens" in said


@pytest.mark.parametrize(("device", "tokens"), [("cuda", 0), ("cpu", 16)])
def test_drafts_are_decided_when_a_launcher_knows_the_devices(
    tmp_path: Path, device: Any, tokens: int
) -> None:
    run = config(
        engine={"kind": "vllm"}, launcher={"kind": "ray"}, run={"directory": str(tmp_path)}
    )
    task = Mock(train=[None] * 1_000_000)
    directory = RunDirectory.create(run, resume=False, clean=False)
    used: list[RunConfig] = []
    launching = Launching(Mock(), "", "", "", device, Mock(), used.append)
    said: list[str] = []
    found = _with_drafts(Prepared(run, "", task), directory, launching, said.append)
    directory.close()
    assert used == [found.config]
    assert found.config.cache.max_draft_tokens == tokens
    assert load_config(directory.path / "config.yaml") == found.config
    assert len(said) == (device == "cuda")
    assert _with_drafts(found, directory, launching, said.append) is found

"""The six lines with which a run begins."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.launch.gpus import Gpu
from asyncrl.launch.placement import GpuNeeds, GpuPlan, plan_gpus
from asyncrl.startup import startup_summary
from asyncrl.tasks.model_files import parameters


def config(**sections: Any) -> RunConfig:
    return parse_config(sections, source="test")


def test_what_data_and_steps_do_not_reach_is_said() -> None:
    task: Any = SimpleNamespace(evaluation=[0, 1], evaluation_sets={"hard": [2], "own": [3, 4]})
    sets = {"hard": {"path": "x", "prompts": 1}, "own": {"path": "y", "prompts": 3}}
    settings = {"run": {"steps": 2}, "trainer": {"warmup_steps": 5}}
    said = startup_summary.not_reached(
        config(evaluation={"prompts": 500, "sets": sets}, **settings), task
    )
    assert [one.removeprefix("warning: ").partition(",")[0] for one in said] == [
        "trainer.warmup_steps: 5 of 2 step(s)",
        "evaluation.prompts: 500",
        "evaluation.sets.own.prompts: 3",
    ]
    assert "the set own has 2 held-out prompts only" in said[2]
    assert startup_summary.not_reached(config(trainer={"warmup_steps": 9}), task) == []


def plan(count: int, **needs: Any) -> GpuPlan:
    found = [Gpu(str(number), f"GPU-{number}", number=number) for number in range(count)]
    return plan_gpus(found, GpuNeeds(**needs), renumbers=True)


def test_an_environment_has_a_line_of_its_own() -> None:
    line = startup_summary.turns_line(config(environment={"name": "guessing", "workers": 2}), None)
    assert line == (
        "turns      guessing: at most 16 a sample, with 256 tokens in all; not tried; "
        "128 open at once, in 2 processes"
    )
    limited = config(environment={"name": "guessing", "max_turn_tokens": 16})
    line = startup_summary.turns_line(limited, None)
    assert "at most 16 a sample, with at most 16 tokens each and 256 tokens in all;" in line


def test_the_model_is_named_with_its_family_and_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    for shard, rows in enumerate((3_000, 159)):
        tensor = np.zeros((rows, 1_000), np.float16)
        tensors = {f"weight{shard}": tensor, f"bias{shard}": tensor[:, 0].copy()}
        save_file(tensors, tmp_path / f"{shard}.safetensors")
    shards = {f"weight{shard}": f"{shard}.safetensors" for shard in range(2)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    line = startup_summary.model_line(config(model={"path": "mine"}), str(tmp_path))
    assert line == "model      mine: qwen3, 3.2 million parameters"
    assert parameters(tmp_path) == 3_159 * 1_001


@pytest.mark.parametrize("damage", [b"", b"\xff" * 9, b"\x02" + bytes(7) + b"[]"])
def test_a_size_that_cannot_be_read_refuses_nothing(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(damage)
    line = startup_summary.model_line(config(), str(tmp_path))
    assert line == "model      builtin:arithmetic: its size is not known yet"
    assert parameters(tmp_path / "none") is None


USUAL = ", as is usual (cosine 0.987 in docs/algorithms.md's example; dr_grpo: 1)"

STD = "loss_normalization: token, advantage_normalization: std"

SEVERAL = "stale samples beyond importance_cap, samples seen before"

DEADLINE = "scheduler.sample_deadline_seconds"
UNBIASED = "rloo: an unbiased gradient; on-policy, nothing to correct"
IN_LOSS = "correction: the ratio in the loss"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"trainer": {"algorithm": "rloo"}},
            UNBIASED,
        ),
        ({}, f"grpo: gradient biased by {STD}{USUAL}; on-policy, nothing to correct"),
        (
            {
                "trainer": {"algorithm": "dr_grpo", "correction": "none"},
                "scheduler": {"max_off_policy_steps": 1},
            },
            "dr_grpo: gradient biased by stale tokens without a correction; correction: none",
        ),
        (
            {"trainer": {"algorithm": "cispo"}, "scheduler": {"max_off_policy_steps": 1}},
            f"cispo: gradient biased by {STD}, clipped ratios of stale tokens; {IN_LOSS}",
        ),
        (
            {"trainer": {"algorithm": "rloo"}, "cache": {"reuse": "lenient"}},
            "rloo: gradient biased by cache.reuse: lenient; no correction for what is not exact",
        ),
        (
            {"trainer": {"algorithm": "rloo"}, "scheduler": {"sample_deadline_seconds": 60}},
            f"rloo: gradient biased by {DEADLINE}; no correction for what is not exact",
        ),
        (
            {
                "trainer": {"algorithm": "rloo"},
                "scheduler": {"dynamic_sampling": {"enabled": True, "max_batches": 5}},
            },
            f"{UNBIASED}; steps of 16 groups with signal, out of 80 at most",
        ),
        (
            {"trainer": {"algorithm": "rloo", "ppo_epochs": 2, "minibatches": 4}},
            f"rloo: gradient biased by {SEVERAL}; on-policy, nothing to correct in the first of 8",
        ),
    ],
)
def test_a_run_says_what_its_gradient_estimates(settings: Any, expected: str) -> None:
    assert startup_summary.training_line(config(**settings)) == f"training   {expected}"


def test_no_part_of_what_is_estimated_is_cut_off() -> None:
    several = {"algorithm": "ppo", "ppo_epochs": 2, "critic": {"gae_lambda": 0.9}}
    line = startup_summary.training_line(config(trainer=several))
    assert line.endswith("samples seen before; on-policy, nothing to correct in the first of 2")


def test_the_data_are_counted() -> None:
    task: Any = SimpleNamespace(train=range(7200), evaluation=range(273), evaluation_sets={})
    line = startup_summary.data_line(config(task={"kind": "dataset", "path": "my.jsonl"}), task)
    assert line == (
        "data       my.jsonl: 7,200 prompts to train on, 273 held out; 100 steps of 16 prompts x 8 "
        "samples"
    )


def test_sets_are_counted_and_a_prompt_that_is_also_trained_on_is_named() -> None:
    def prompts(*numbers: int) -> list[Any]:
        return [SimpleNamespace(tokens=np.array([number])) for number in numbers]

    task: Any = SimpleNamespace(
        train=prompts(1, 2, 3), evaluation=[], evaluation_sets={"mine": prompts(2, 3, 4, 5)}
    )
    assert "3 prompts to train on, 0 held out, 4 of mine" in startup_summary.data_line(
        config(), task
    )
    [warning] = startup_summary.shared_prompts(task)
    assert "2 of 4 prompts of evaluation.sets.mine are also trained on" in warning


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "verify: generated ahead of time where that is faster, verified by the policy in "),
        (
            {"scheduler": {"max_runahead_groups": 4}},
            "verify: generated ahead of time, verified by the policy in training; exactly on-",
        ),
        ({"scheduler": {"max_off_policy_steps": 1}}, "in training; up to 1 step off-policy"),
        (
            {"scheduler": {"on_update": "keep"}},
            "keep: synchronous: generators wait for each step; e",
        ),
        (
            {"scheduler": {"on_update": "keep", "max_off_policy_steps": 4}},
            "keep: asynchronous: samples continue under new weights, their KV kept; up to 4 steps",
        ),
        (
            {"scheduler": {"on_update": "recompute", "max_off_policy_steps": 2}},
            "under new weights, their KV computed again; up to 2 steps off-policy",
        ),
        ({"cache": {"reuse": "lenient"}}, "; not exact, because of cache.reuse: lenient"),
        (
            {"trainer": {"ppo_epochs": 2, "minibatches": 4}},
            "; exactly on-policy, for the first of 8 updates per step",
        ),
        (
            {"scheduler": {"sample_deadline_seconds": 9}},
            "; not exact, because of scheduler.sample_deadline_seconds",
        ),
        (
            {"run": {"changes": {9: {"scheduler": {"max_off_policy_steps": 1}}}}},
            "; exactly on-policy; from step 9 on as run.changes says",
        ),
    ],
)
def test_the_mode_says_what_it_promises(settings: dict[str, Any], expected: str) -> None:
    assert expected in startup_summary.mode_line(config(**settings))


def test_memory_and_places_on_a_cpu() -> None:
    billion = 2**30
    line = startup_summary.processes_line(config(launcher={"generators": 2}), None, billion)
    assert line == (
        "processes  trainer: CPU, 17 GiB; 2 generators (torch): CPU, 8.6 GiB each; "
        "plus KV, activations and 8.0 GiB of /dev/shm"
    )
    with_kl = startup_summary.processes_line(config(trainer={"kl_coefficient": 0.1}), None, billion)
    assert "trainer: CPU, 21 GiB;" in with_kl, "the initial model is a second one"
    ranks = startup_summary.processes_line(config(trainer={"ranks": 4}), None, billion)
    assert "trainer of 4 ranks: CPU, 11 GiB each;" in ranks, "they share Adam's moments"
    unknown = startup_summary.processes_line(config(), None, None)
    assert unknown.endswith("trainer: CPU; 1 generator (torch): CPU; plus KV and activations")


def test_memory_and_places_on_gpus() -> None:
    gpus = plan(6, generators=2, per_generator=2, trainer=1)
    settings = config(engine={"kind": "vllm"}, launcher={"generators": 2})
    line = startup_summary.processes_line(settings, gpus, 2**30)
    assert "trainer: GPU 4, 16 GiB; 2 generators (vllm): GPU 0, 1, 2, 3; plus" in line
    assert line.endswith("activations and 4.0 GiB of /dev/shm; not used: GPU 5"), "bfloat16"


def test_where_another_launcher_places_processes() -> None:
    line = startup_summary.processes_line(config(launcher={"kind": "ray"}), None, None)
    assert "trainer: placed by launcher.kind ray; 1 generator (torch): placed by" in line


def test_the_results_are_in_the_folder_of_the_run() -> None:
    line = startup_summary.results_line(config(run={"name": "first", "directory": "/data"}))
    assert line.startswith("results    /data/first: report.html, ")

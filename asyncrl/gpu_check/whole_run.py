"""The part that trains: `asyncrl run` of the built-in task, with all of its processes."""

import sys

import yaml

from asyncrl.gpu_check.parts import Context, PartFailed, Said
from asyncrl.gpu_check.runner import run_command
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.tasks.builtin.warm_start_recipe import MINIATURE
from asyncrl.tasks.model import ensure_builtin_model


def run(context: Context) -> Said:
    """Train a few steps; the trainer and the generator share the GPU if there is only one."""
    small = context.small
    model = ensure_builtin_model(context.folder, None, MINIATURE)  # the other takes minutes to make
    steps = 2 if small else 5
    config = {
        "run": {"name": "gpu-check", "steps": steps, "directory": str(context.folder / "runs")},
        "task": {"kind": "arithmetic"},
        "model": {"path": str(model)},
        "sampling": {"max_tokens": 16 if small else 48},
        "engine": {"slots": 16 if small else 64, "max_model_len": 128, "device": context.device},
        "scheduler": {"group_size": 4 if small else 8, "groups_per_step": 2 if small else 16},
        "trainer": {"learning_rate": 2e-4, "device": context.device},
        "evaluation": {"prompts": 4 if small else 128, "samples": 1},
        "monitoring": {"web": {"enabled": False}},
        "launcher": {"colocate": context.gpus == 1},
    }
    file = context.folder / "run.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    code = run_command([sys.executable, "-m", "asyncrl", "run", str(file), "--clean"])
    if code:
        raise PartFailed(f"`asyncrl run` ended with exit code {code}")
    trained = read_metrics(context.folder / "runs" / "gpu-check" / "metrics.jsonl")
    if len(trained) != steps:
        raise PartFailed(f"{len(trained)} steps were trained, not {steps}")
    if wrong := [text for step in trained for text in step.wrong_policy]:
        raise PartFailed(f"a generator did not sample from the trained policy: {wrong[0]}")
    last = trained[-1]
    numbers = {
        "steps": steps,
        "step_seconds": [step.step_seconds for step in trained],
        "tokens_per_second": last.tokens_per_second,
        "noise_floor_share": last.noise_floor.share,
    }
    return f"{steps} steps in {sum(step.step_seconds for step in trained):.1f} s", numbers

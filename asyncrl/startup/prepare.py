"""Find every mistake of the user's that can be found before a run starts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as ProgressBar

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import DataError
from asyncrl.launch.placement import GpuPlan
from asyncrl.runs.template_date import with_date
from asyncrl.startup import startup_summary
from asyncrl.startup.devices import engine_device, place
from asyncrl.startup.gpu_defaults import visits_of, with_drafts_that_pay, with_trainer_dtype
from asyncrl.startup.lora_check import with_adapter
from asyncrl.startup.memory import (
    Device,
    device_of,
    memory_of,
    refuse_too_large,
    shape_of,
)
from asyncrl.startup.model_check import check_files, check_vocabulary, unexpected_line
from asyncrl.startup.model_checks import (
    check_algorithm,
    check_builtin_positions,
    check_positions,
    check_rows,
    with_critic,
)
from asyncrl.startup.preflight import check_environment, check_machine, check_rewards
from asyncrl.startup.shared_gpu import with_shared_gpu
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import resolve_model
from asyncrl.tasks.model_files import parameters
from asyncrl.tasks.prompts import Task, held_out_sets
from asyncrl.tasks.templates.variables import names_the_date
from asyncrl.trainer.model.memory_estimate import ModelShape, StepMemory


@dataclass(frozen=True, slots=True)
class Prepared:
    """The checked inputs of a run."""

    config: RunConfig
    model_path: str
    """A local model directory."""
    task: Task
    gpus: GpuPlan | None = None
    """Of each process; None: there are none to hand out."""


def prepare(config: RunConfig, console: Console) -> Prepared:
    """Check the machine and the rewards, make or find the model, load the data.

    Says in seven lines what the run is about to do; one more with an environment, and up to three
    on GPUs. Creates no run folder.

    Raises:
        UserError: this machine, the model, the data or a reward cannot be used.
    """
    check_machine(config)
    check_builtin_positions(config)
    local = config.launcher.kind == "local"
    gpus = place(config) if local else None
    config, compute = with_trainer_dtype(config, gpus)
    check_rewards(config.rewards)
    check_environment(config)
    check_algorithm(config)
    with ProgressBar(console=console, transient=True, disable=not console.is_terminal) as bar:
        model_path = resolve_model(config.model, bar)
    loaded = check_files(Path(model_path))
    check_positions(config, Path(model_path))
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    say(startup_summary.model_line(config, model_path))
    if (unused := unexpected_line(Path(model_path), loaded)) is not None:
        say(unused)
    dated = with_date(config)
    task = load_task(
        dated.task,
        model_path,
        config.run.seed,
        config.evaluation.sets,
        whole_rows=config.environment.name is not None,
    )
    config = dated if names_the_date(task.tokenizer) else config
    config = with_adapter(with_critic(config, model_path, task.tokenizer), Path(model_path))
    say(startup_summary.data_line(config, task))
    for sentence in startup_summary.shared_prompts(task):
        say(sentence)
    _check_prompts(config, task)
    check_vocabulary(Path(model_path), task)
    for sentence in check_rows(config, task):
        say(sentence)
    if config.sampling.stop:
        from asyncrl.tasks.token_bytes import token_bytes  # imports numba, which takes a second

        token_bytes(task.tokenizer)
    say(startup_summary.mode_line(config))
    say(startup_summary.training_line(config))
    if config.environment.name is not None:
        from asyncrl.startup.environment_trial import try_environment  # imports what generators do

        for sentence in try_environment(config, task):
            say(sentence)
    config, drafts = _with_drafts(config, gpus, len(task.train)) if local else (config, "")
    for line in filter(None, (compute, drafts)):
        say(line)
    count = parameters(Path(model_path))
    say(startup_summary.processes_line(config, gpus, count))
    shape = shape_of(config, Path(model_path), count, loaded.sizes)
    say(startup_summary.memory_line(*_memory(config, gpus, shape)))
    config, shared = with_shared_gpu(config, gpus, shape)
    if shared is not None:
        say(shared)
    say(startup_summary.results_line(config))
    return Prepared(config, model_path, task, gpus)


def _with_drafts(config: RunConfig, gpus: GpuPlan | None, prompts: int) -> tuple[RunConfig, str]:
    on_gpu = engine_device(gpus) == "cuda"
    return with_drafts_that_pay(config, on_gpu=on_gpu, visits=visits_of(config, prompts))


def _memory(
    config: RunConfig, gpus: GpuPlan | None, shape: ModelShape | None
) -> tuple[StepMemory | None, Device | None]:
    """What the trainer needs and where. Raises UserError: its device has less."""
    device = device_of(config, gpus)
    if shape is None:
        return None, device
    if device is not None:
        refuse_too_large(config, shape, device)
    return memory_of(config, shape, on_gpu=device is None or device.on_gpu), device


def _check_prompts(config: RunConfig, task: Task) -> None:
    """Refuse prompts that leave no room for a response."""
    room = config.engine.max_model_len - config.sampling.max_tokens
    sets = held_out_sets(task).values()
    for prompt in itertools.chain(task.train, *sets):
        if len(prompt.tokens) > room:
            raise DataError(
                f"prompt {prompt.prompt_id} has {len(prompt.tokens)} tokens; with "
                f"sampling.max_tokens {config.sampling.max_tokens} that exceeds "
                f"engine.max_model_len {config.engine.max_model_len}. Raise engine.max_model_len, "
                "or leave out long prompts with task.max_prompt_tokens and task.too_long: filter"
            )

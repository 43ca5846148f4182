"""Writes seven lines about a starting run; more with an environment or a shared GPU."""

from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.run_config import RunConfig
from asyncrl.environments.protocol import Traits
from asyncrl.launch.gpus import Gpu
from asyncrl.launch.placement import GpuPlan
from asyncrl.monitoring.terminal.formatting import size
from asyncrl.startup.memory import Device, critic_parameters, memory_text
from asyncrl.suggestions import shortened
from asyncrl.tasks.evaluation_config import EvaluationConfig
from asyncrl.tasks.model_files import parameters
from asyncrl.tasks.model_tokenizer import read_settings
from asyncrl.tasks.prompts import Task, held_out_sets
from asyncrl.trainer.base.algorithm_registry import is_own
from asyncrl.trainer.model.memory_estimate import StepMemory
from asyncrl.trainer.objective.bias_analysis import biases_of
from asyncrl.wire.weights.layout import SHARED_MEMORY

_PROCESS = 0.6 * 2**30
"""Bytes of a process that has loaded torch, measured on a CPU (PSS)."""
_TRAINED, _MOMENTS = 8, 8
"""Bytes per parameter in float32: weights and gradients; and Adam's moments, which ranks share."""


def model_line(config: RunConfig, model: str) -> str:
    """Describe name, family and size of `model`, a directory or a hub id not yet downloaded."""
    family = read_settings(Path(model) / "config.json").get("model_type", "")
    count = parameters(Path(model))
    size = f"{_counted(count)} parameters" if count is not None else "its size is not known yet"
    return _line("model", f"{config.model.path}: {', '.join(filter(None, (family, size)))}")


def data_line(config: RunConfig, task: Task, epochs: float | None = None) -> str:
    """Describe the source and number of the prompts, the run's length and the size of a step."""
    scheduler, steps = config.scheduler, config.run.steps
    source = config.task.path if config.task.kind == "dataset" else f"built-in {config.task.kind}"
    per_step = f"{scheduler.groups_per_step:,} prompts x {scheduler.group_size:,} samples"
    sets = "".join(f", {len(one):,} of {name}" for name, one in task.evaluation_sets.items())
    return _line(
        "data",
        f"{source}: {len(task.train):,} prompts to train on, {len(task.evaluation):,} held "
        f"out{sets}; {steps:,} step{'' if steps == 1 else 's'} of {per_step}"
        + ("" if epochs is None else f" (run.epochs: {epochs:g})"),
    )


def not_reached(config: RunConfig, task: Task) -> list[str]:
    """Return a warning for each number that the data or the steps do not reach."""
    found, warmup, steps = [], config.trainer.warmup_steps, config.run.steps
    if warmup >= steps:
        found.append(
            f"warning: trainer.warmup_steps: {warmup:,} of {steps:,} step(s), so the learning rate "
            f"never reaches trainer.learning_rate ({config.trainer.learning_rate:g})"
        )
    default = EvaluationConfig.model_fields["prompts"].default
    for name, prompts in held_out_sets(task).items():
        entry = config.evaluation.sets.get(name)
        own = None if entry is None else entry.prompts
        key = "evaluation.prompts" if own is None else f"evaluation.sets.{name}.prompts"
        wanted = config.evaluation.prompts if own is None else own
        if len(prompts) < wanted and (own is not None or wanted != default):
            found.append(
                f"warning: {key}: {wanted:,}, and the set {name} has {len(prompts):,} held-out "
                "prompts only; all of them are used"
            )
    return found


def shared_prompts(task: Task) -> list[str]:
    """Return a warning for each set of `evaluation.sets` that shares prompts with training."""
    if not task.evaluation_sets:
        return []
    trained = {prompt.tokens.tobytes() for prompt in task.train}
    return [
        f"warning: {count:,} of {len(prompts):,} prompts of evaluation.sets.{name} are also "
        "trained on, so its accuracy is not one of held-out prompts"
        for name, prompts in task.evaluation_sets.items()
        if (count := sum(prompt.tokens.tobytes() in trained for prompt in prompts))
    ]


_OF_MODE = {
    f"scheduler.{name}" for name in ("on_update", "max_off_policy_steps", "sample_deadline_seconds")
}


def mode_line(config: RunConfig) -> str:
    """Describe the allowed age of a sample's tokens, and the resulting guarantee."""
    mode, steps = config.scheduler.on_update, config.scheduler.max_off_policy_steps
    lag = f"up to {steps:,} step{'' if steps == 1 else 's'} off-policy"
    if mode == "verify":
        promise = "exactly on-policy" if steps == 0 else lag
        where = " where that is faster" if config.scheduler.chooses_run_ahead else ""
        how = f"generated ahead of time{where}, verified by the policy in training"
    elif steps == 0:
        promise, how = "exactly on-policy", "synchronous: generators wait for each step"
    else:
        kept = "their KV kept" if mode == "keep" else "their KV computed again"
        promise, how = lag, f"asynchronous: samples continue under new weights, {kept}"
    if inexact := _inexact(config):
        promise = f"not exact, because of {inexact[0]}"
    updates = config.trainer.updates_per_step
    if updates > 1:
        promise += f", for the first of {updates:,} updates per step"
    of_mode = _OF_MODE.intersection
    if later := [step for step, changed in config.run.changes.items() if of_mode(changed)]:
        promise += f"; from step {min(later):,} on as run.changes says"
    return _line("mode", f"{mode}: {how}; {promise}")


_USUAL = ("loss_normalization: token", "advantage_normalization: std")
_USUAL_COST = ", as is usual (cosine 0.987 in docs/algorithms.md's example; dr_grpo: 1)"


def training_line(config: RunConfig) -> str:
    """Describe the gradient's estimator, the groups, and the treatment of stale tokens."""
    trainer, stale = config.trainer, config.scheduler.max_off_policy_steps > 0
    inexact = _inexact(config)
    biases = [*biases_of(trainer, stale=stale), *inexact]
    what = f"gradient biased by {', '.join(biases)}" if biases else "an unbiased gradient"
    what += _USUAL_COST if tuple(biases) == _USUAL else ""
    if is_own(trainer.algorithm):
        what = "your own algorithm"
    correction = "on-policy, nothing to correct"
    if trainer.updates_per_step > 1:
        correction = f"on-policy, nothing to correct in the first of {trainer.updates_per_step:,}"
    if stale:
        in_loss = trainer.proximal_policy == "behaviour" and trainer.correction == "token_truncated"
        correction = f"correction: {'the ratio in the loss' if in_loss else trainer.correction}"
    elif inexact:
        correction = "no correction for what is not exact"
    groups = ""
    if (looked_at := config.scheduler.max_groups_of_step) is not None:
        needed = config.scheduler.groups_per_step
        groups = f"; steps of {needed:,} groups with signal, out of {looked_at:,} at most"
    return f"{'training':<10} {trainer.algorithm}: {what}; {correction}{groups}"  # words of ours


def _inexact(config: RunConfig) -> list[str]:
    """Return settings that change the trained tokens or samples without a correction."""
    found = ["cache.reuse: lenient"] if config.cache.reuse == "lenient" else []
    if config.scheduler.sample_deadline_seconds is not None:
        found.append("scheduler.sample_deadline_seconds")
    return found


def processes_line(config: RunConfig, gpus: GpuPlan | None, count: int | None) -> str:
    """Describe the processes, their devices, and the memory that they need at least."""
    launcher, ranks = config.launcher, config.trainer.ranks
    on_cpu = launcher.kind == "local" and (gpus is None or not gpus.generators[0])
    trainer_on_cpu = launcher.kind == "local" and (gpus is None or not gpus.trainer)
    trainer = _where(config, None if gpus is None else gpus.trainer)
    if gpus is not None and gpus.shares:
        trainer += ", shared with a generator"
    generator = _where(config, None if gpus is None else sum(gpus.generators, ()))
    more = "plus KV and activations"
    if count is not None:
        dtype = config.engine.dtype
        each = 4 if dtype == "float32" or (dtype == "auto" and on_cpu) else 2
        reference = 4 if config.trainer.kl_coefficient > 0 else 0
        parts = ranks if config.trainer.sharding == "full" else 1
        state = _TRAINED / parts + _MOMENTS / ranks
        learned = count * (state + reference / parts)
        learned += critic_parameters(config, count) * state
        trainer += f", {size(learned + _PROCESS * trainer_on_cpu)}"
        trainer += " each" if ranks > 1 else ""
        if on_cpu:
            generator += f", {size(2 * each * count + _PROCESS)}"
            generator += " each" if launcher.generators > 1 else ""
        more = f"plus KV, activations and {size(2 * each * count)} of {SHARED_MEMORY}"
    name = f"trainer of {ranks} ranks" if ranks > 1 else "trainer"
    name += ", each with a part of the weights" if config.trainer.sharding == "full" else ""
    several = "s" if launcher.generators > 1 else ""
    spare = "" if gpus is None or not gpus.spare else f"; not used: {_names(gpus.spare)}"
    return _line(
        "processes",
        f"{name}: {trainer}; {launcher.generators:,} generator{several} ({config.engine_kinds}): "
        f"{generator}; {more}{spare}",
    )


def memory_line(needs: StepMemory | None, device: Device | None) -> str:
    """Describe the memory of a training step by kind; None if it is unknown."""
    text = "not known before the model is here" if needs is None else memory_text(needs, device)
    return f"{'memory':<10} {text}"  # whole: the end may matter


def turns_line(config: RunConfig, traits: Traits | None) -> str:
    """Describe samples of several turns; `traits` is None if the environment was not tried."""
    environment = config.environment
    back = "not tried"
    if traits is not None:
        back = "cannot go back, so its samples are never verified"
        if traits.restores:
            back = "goes back by its restore"
        elif traits.replay is not None:
            back = f"goes back by replay ({traits.replay})"
    workers = f"{environment.workers:,} process{'' if environment.workers == 1 else 'es'}"
    each = " of each generator" if config.launcher.generators > 1 else ""
    limit = environment.max_turn_tokens
    of_each = "" if limit is None else f"at most {limit:,} tokens each and "
    return _line(
        "turns",
        f"{environment.name}: at most {environment.max_turns:,} a sample, with {of_each}"
        f"{config.sampling.max_tokens:,} tokens in all; {back}; "
        f"{environment.total_sessions:,} open at once, in {workers}{each}",
    )


def results_line(config: RunConfig) -> str:
    """Describe the place of the results."""
    return _line("results", f"{config.directory}: report.html, result.json, checkpoints/")


def _where(config: RunConfig, gpus: tuple[Gpu, ...] | None) -> str:
    if config.launcher.kind != "local":
        return f"placed by launcher.kind {config.launcher.kind}"
    return _names(gpus) if gpus else "CPU"


def _names(gpus: Sequence[Gpu]) -> str:
    return f"GPU {', '.join(gpu.name for gpu in gpus)}"


def _counted(count: int) -> str:
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:,}"


def _line(name: str, text: str) -> str:
    return f"{name:<10} {shortened(text)}"

"""Resolves settings from a run's devices and data at its start, for config.yaml.

run.steps                of `run.epochs`, by the number of prompts
task.chat_template_date  the day of the run's first start
trainer.dtype            by the compute capability of the trainer's GPUs
cache.max_draft_tokens   by whether drafts can pay on the engines' GPUs

The last two return the configuration and a line for the user, which is empty if nothing was
chosen or everything runs on a CPU.
"""

import contextlib
import math
from fractions import Fraction

from asyncrl.cache.config import DRAFT_TOKENS
from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.errors import UserError
from asyncrl.launch.gpus import torch_build
from asyncrl.launch.placement import GpuPlan
from asyncrl.tasks.templates.variables import today
from asyncrl.trainer.base.config import BFLOAT16_CAPABILITY
from asyncrl.trainer.checkpoint.format.files import dtype_of_run
from asyncrl.wire.transport.paths import MAX_STEPS

_VISITS = 2
"""Visits of each prompt from which drafts pay: the last ones are drafted from earlier ones."""


def with_trainer_dtype(config: RunConfig, gpus: GpuPlan | None) -> tuple[RunConfig, str]:
    """Resolve `trainer.dtype: auto` by the trainer's devices.

    It stays `auto` if only the trainer's process sees its device (`trainer.scoring.for_own_device`
    resolves it there): with launchers other than the local one, and if torch may find a GPU that
    neither nvidia-smi nor /proc shows, as on Tegra. `gpus` are those of a local run.
    """
    if config.trainer.dtype != "auto":
        return config, ""
    mine = () if gpus is None else gpus.trainer
    known = [gpu.capability for gpu in mine if gpu.capability is not None]
    unseen = gpus is None and torch_build().cuda is not None and config.trainer.device != "cpu"
    if config.launcher.kind != "local" or unseen or len(known) < len(mine):
        least = "{}.{}".format(*BFLOAT16_CAPABILITY)
        return config, (
            f"compute    trainer.dtype: auto is bfloat16 on a GPU of compute capability {least} or "
            "above, else float32; the trainer's log says which"
        )
    capability = min(known, default=None)
    on_cpu = gpus is None or not gpus.generators[0]
    engines = config.engine.weights_dtype(on_cpu=on_cpu)
    trainer = config.trainer.for_device(capability, engines_dtype=engines)
    config = config.model_copy(update={"trainer": trainer})
    if capability is None:
        return config, ""
    why = "GPU {} has compute capability {}.{}".format(mine[0].name, *capability)
    if capability >= BFLOAT16_CAPABILITY and trainer.dtype == "float32":
        why = "the engines hold the model of trainer.lora in float32"
    return config, f"compute    trainer in {trainer.dtype} (trainer.dtype: auto): {why}"


def with_recorded_dtype(config: RunConfig) -> RunConfig:
    """Replace `trainer.dtype: auto` by the dtype of the resumed run's checkpoints."""
    found = dtype_of_run(config.directory / "checkpoints")
    if config.trainer.dtype != "auto" or found is None:
        return config
    return config.with_values("trainer", dtype=found)


def with_date(config: RunConfig) -> RunConfig:
    """Return the configuration with today as the date for chat templates, if it is not set."""
    if config.task.chat_template_date is not None:
        return config
    return config.with_values("task", chat_template_date=today())


def with_recorded_date(config: RunConfig) -> RunConfig:
    """Return the configuration with the date of the resumed run's start. Raises ConfigError."""
    recorded = None
    with contextlib.suppress(OSError):  # opening the run's folder says what cannot be read
        recorded = load_config(config.directory / "config.yaml").task.chat_template_date
    if config.task.chat_template_date is not None or recorded is None:
        return config
    return config.with_values("task", chat_template_date=recorded)


def with_steps(config: RunConfig, prompts: int) -> RunConfig:
    """Replace `run.epochs` by the steps that draw each of `prompts` prompts so often, rounded up.

    Raises UserError for more steps than a run may have.
    """
    if config.run.epochs is None:
        return config
    groups = Fraction(str(config.run.epochs)) * prompts  # 1.1 epochs of 10 are 11, not 11.000...2
    steps = max(1, math.ceil(groups / config.scheduler.groups_per_step))
    if steps > MAX_STEPS:
        raise UserError(
            f"run.epochs: {config.run.epochs:g} of {prompts:,} prompts are {steps:,} steps of "
            f"{config.scheduler.groups_per_step:,}; a run has at most {MAX_STEPS:,}"
        )
    return config.with_values("run", steps=steps, epochs=None)


def visits_of(config: RunConfig, prompts: int) -> float:
    """Return how often a run's steps see each of `prompts` prompts."""
    return config.run.steps * config.scheduler.groups_per_step / max(1, prompts)


def with_drafts_that_pay(config: RunConfig, on_gpu: bool, visits: float) -> tuple[RunConfig, str]:
    """Resolve `cache.max_draft_tokens: auto`.

    With a drafter vLLM does not schedule asynchronously, which costs a quarter of its speed or
    more. Verification rejects 4% to 10% of the tokens (docs/modes.md), too few to make up for that,
    so prompts must be visited again. A step of SGLang with drafts runs as a prefill. The torch
    engine drafts only where that is faster. `visits` is how often each prompt is sampled.
    """
    if config.cache.max_draft_tokens != "auto":
        return config, ""
    kinds = {engine.kind for engine in config.engines}
    tokens, why = DRAFT_TOKENS, f"the run's steps see each prompt {visits:.1f} times"
    if "sglang" in kinds:
        tokens, why = 0, "with drafts, every step of SGLang's is computed as a prefill"
    elif "vllm" in kinds and visits < _VISITS:
        tokens, why = 0, f"{why}, and vLLM schedules asynchronously without a drafter"
    elif kinds == {"torch"}:
        why = "the torch engine drafts where it is faster"
    if not on_gpu:
        tokens = DRAFT_TOKENS
    config = config.with_values("cache", max_draft_tokens=tokens)
    if not on_gpu or not config.cache.enabled:
        return config, ""
    what = f"at most {tokens} tokens a step" if tokens else "none"
    return config, f"drafts     {what} (cache.max_draft_tokens: auto): {why}"

"""Checks and prepares the inputs of a run, and divides a GPU that is shared.

    |<---------------------------------- 98% of the GPU ---------------------------------->|
    | trainer: its step, as 92% of this part | weights | KV | the engine's process | left  |

The trainer gets the memory of its step (`trainer.model.memory_estimate`), and the engine the rest,
but not more KV than its slots can fill. vLLM and SGLang receive the size of their KV, so they do
not measure free memory and may start before, after or during the trainer's start. They keep
generating while the trainer computes: memory is never handed over.

Both engines also check a share of the memory at their start:

    vLLM    utilization * total <= free               free may lack all of the trainer's part
    SGLang  KV <= free now - (1 - fraction) * free at its start

so vLLM receives the share of its part, and SGLang the share of everything but its process.
"""

import contextlib
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import Progress as ProgressBar

from asyncrl.config.run_config import RunConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.errors import DataError, UserError
from asyncrl.launch.placement import GpuPlan
from asyncrl.monitoring.terminal.formatting import size
from asyncrl.startup import gpu_defaults, memory, model_checks, startup_summary
from asyncrl.startup.devices import engine_device
from asyncrl.startup.lora_check import with_adapter
from asyncrl.startup.memory import Device
from asyncrl.startup.model_check import check_files, check_vocabulary, prompts_of, unexpected_line
from asyncrl.startup.preflight import check_environment, check_machine, check_rewards
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import resolve_model
from asyncrl.tasks.model_files import parameters
from asyncrl.tasks.prompts import Task
from asyncrl.tasks.templates.variables import names_the_date
from asyncrl.trainer.base.config import BFLOAT16_CAPABILITY
from asyncrl.trainer.model.memory_estimate import FULL, GIB, ModelShape, StepMemory, remedies

USABLE = 0.98
"""Usable share of the memory that nvidia-smi reports; the driver keeps the rest."""
_PROCESS = int(1.5 * GIB)
"""Memory of an engine besides weights, KV and `engine.logits_mib`: CUDA context, graphs,
activations."""
_ROOM = 1.1
"""Factor of the KV that all slots can fill, for partial blocks and steps in flight."""
_FINER = 10_000
_SHARES = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
TELL_SECONDS = 0.7
"""Silence before a line says what takes so long."""
_WRITTEN = "(a run writes both to its config.yaml when it starts)"
"""Hint for users who resume from a config.yaml and have set neither the KV nor the share."""


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """Memory of a generator's engine on the GPU that it shares, in bytes."""

    weights: int
    """Weights, twice with `engine.weight_staging: device`."""
    request: int
    slots: int
    process: int

    @classmethod
    def of(cls, shape: ModelShape, engine: EngineConfig, drafts: int) -> Self:
        """Compute the needs of one generator; `drafts` is the number of draft tokens per row."""
        width = 4 if engine.weights_dtype(on_cpu=False) == "float32" else 2
        copies = 2 if engine.weight_staging == "device" else 1
        heads = max(1, shape.kv_heads // engine.gpus)
        token = 2 * shape.layers * heads * shape.head_size * width
        longest = engine.max_model_len + (0 if engine.kind == "torch" else drafts + 18)
        weights = copies * width * shape.parameters // engine.gpus
        return cls(weights, token * longest, engine.slots, _PROCESS + engine.logits_bytes)

    @property
    def without_kv(self) -> int:
        """Bytes of weights and process."""
        return self.weights + self.process

    @property
    def most_kv(self) -> int:
        """Largest useful KV in bytes."""
        return int(_ROOM * self.slots * self.request)


@dataclass(frozen=True, slots=True)
class Division:
    """Bytes of each side of a shared GPU."""

    total: int
    trainer: int
    engine: EngineNeeds
    kv: int

    @property
    def fits(self) -> bool:
        """Return True if both sides fit, with KV for one request at least."""
        used = self.trainer + self.engine.without_kv + self.kv
        return self.kv >= self.engine.request and used <= USABLE * self.total

    @property
    def utilization(self) -> float:
        """Return the engine's share, which vLLM requires to be free (`request_memory`)."""
        return math.ceil(_FINER * (self.engine.without_kv + self.kv) / self.total) / _FINER

    @property
    def fraction(self) -> float:
        """Return SGLang's share (`_profile_available_bytes`): all but its process."""
        return math.floor(_FINER * (1 - self.engine.process / self.total)) / _FINER


def divide(total: int, trainer: StepMemory, engine: EngineNeeds, kv: int | None = None) -> Division:
    """Divide `total` bytes of a GPU; a `kv` of None means all that is left and can be used."""
    mine = math.ceil(trainer.device / FULL)
    left = int(USABLE * total) - mine - engine.without_kv
    return Division(total, mine, engine, min(left, engine.most_kv) if kv is None else kv)


def with_shared_gpu(
    config: RunConfig, gpus: GpuPlan | None, shape: ModelShape | None
) -> tuple[RunConfig, str | None]:
    """Return the configuration with the division of a shared GPU, and a line for the user.

    `launcher.colocate` is decided and the engine's sizes are set; the line is None if no GPU is
    shared. Raises UserError if both sides do not fit, or if vLLM or SGLang would have to guess.
    """
    if gpus is None or not gpus.trainer or not gpus.generators[0]:
        return config, None
    config = config.with_values("launcher", colocate=gpus.shares)
    if not gpus.shares:
        return config, None
    engine = config.engine.of_generator(config.launcher.generators - 1)
    if engine.kind == "sglang" and engine.gpus > 1:
        raise UserError(
            "launcher.colocate: SGLang refuses GPUs of one generator that differ by more than 10% "
            f"in free memory, and the trainer takes memory of one of its {engine.gpus}; set "
            "launcher.colocate: false, engine.sglang.tensor_parallel_size: 1 or engine.kind: vllm"
        )
    device = memory.device_of(config, gpus)
    if device is None or device.bytes is None or shape is None:
        return config, _not_divided(engine, gpus, shape)
    needs = EngineNeeds.of(shape, engine, drafts_of(config))
    trainer = memory.memory_of(config, shape, on_gpu=True)
    found = divide(device.bytes, trainer, needs, _given_kv(engine, needs, device.bytes))
    if not found.fits:
        raise UserError(_too_small(config, engine, shape, device, found, trainer))
    return _told(config, engine, found), _line(engine, device, found)


def drafts_of(config: RunConfig) -> int:
    """Return the number of tokens that a row may draft."""
    return config.cache.draft_tokens if config.cache.enabled else 0


def _given_kv(engine: EngineConfig, needs: EngineNeeds, total: int) -> int | None:
    """Return the KV from the user's setting or share; None if neither is set."""
    if engine.kind == "torch":
        return needs.slots * needs.request
    gib, share = _set(engine)
    if gib is not None:
        return int(gib * GIB)
    if share is None:
        return None
    beside = needs.without_kv if engine.kind == "vllm" else needs.weights
    return int(share * total) - beside


def _told(config: RunConfig, engine: EngineConfig, found: Division) -> RunConfig:
    """Return the configuration with the engine's sizes of a division. Raises UserError."""
    if engine.kind == "torch":  # allocates its slots at its start, and asks nothing
        return config
    gib = _set(engine)[0] or math.floor(1000 * found.kv / GIB) / 1000
    sizes = {"kv_cache_gib": gib, _SHARES[engine.kind]: _share(engine, found)}
    own = getattr(engine, engine.kind).model_copy(update=sizes)
    return config.with_values("engine", **{engine.kind: own})


def _set(engine: EngineConfig) -> tuple[float | None, float | None]:
    """Return the user's KV in GiB, and the share of the GPU, of vLLM or SGLang."""
    own = getattr(engine, engine.kind)
    return own.kv_cache_gib, getattr(own, _SHARES[engine.kind])


def _share(engine: EngineConfig, found: Division) -> float:
    gib, share = _set(engine)
    if gib is None or share is None:
        return found.utilization if engine.kind == "vllm" else found.fraction
    most = USABLE - found.trainer / found.total
    least = (found.trainer + found.engine.weights + found.kv) / found.total
    if engine.kind == "vllm" and share > most + 1 / _FINER:
        raise UserError(
            f"engine.vllm.gpu_memory_utilization: {share:g} of a GPU that the trainer shares must "
            f"be free when vLLM starts, and the trainer leaves {most:.2f}; lower it, or leave it "
            f"out {_WRITTEN}"
        )
    if engine.kind == "sglang" and share < least:
        raise UserError(
            f"engine.sglang.mem_fraction_static: {share:g} of a GPU that the trainer shares leaves "
            f"less than kv_cache_gib: {gib:g}, because SGLang takes what the trainer allocates "
            f"from it; it must be at least {least:.2f}, or leave it out {_WRITTEN}"
        )
    return share


def _not_divided(engine: EngineConfig, gpus: GpuPlan, shape: ModelShape | None) -> str:
    what = f"the memory of {gpus.trainer[0]}" if shape is not None else "the size of the model"
    if engine.kind != "torch" and _set(engine)[0] is None:
        raise UserError(
            f"trainer and generator share GPU {gpus.trainer[0].name} (launcher.colocate), and "
            f"{what} is not known here, so it cannot be divided: set "
            f"engine.{engine.kind}.kv_cache_gib and engine.{engine.kind}.{_SHARES[engine.kind]}"
        )
    return (
        f"shared     GPU {gpus.trainer[0].name}: trainer and generator; {what} is not known, so "
        "nothing says whether both fit"
    )


def _line(engine: EngineConfig, device: Device, found: Division) -> str:
    needs = found.engine
    requests = min(needs.slots, found.kv // needs.request)
    return (
        f"shared     {device.name} ({size(found.total)}): trainer {size(found.trainer)}; "
        f"{engine.kind} {size(needs.without_kv + found.kv)}: weights {size(needs.weights)}, KV "
        f"{size(found.kv)} ({requests:,} of {needs.slots:,} requests of {engine.max_model_len:,} "
        f"tokens), process {size(needs.process)}"
    )


def _too_small(
    config: RunConfig,
    engine: EngineConfig,
    shape: ModelShape,
    device: Device,
    found: Division,
    trainer: StepMemory,
) -> str:
    needs, ways = found.engine, []
    kv = max(found.kv, needs.request)
    room = int(FULL * (USABLE * found.total - needs.without_kv - kv))
    if engine.kind == "torch":
        left = int(USABLE * found.total) - found.trainer - needs.without_kv
        if (slots := left // needs.request) >= 1:
            ways.append(f"Set engine.slots: {slots}")
    elif divide(found.total, trainer, needs).fits:
        both = f"engine.{engine.kind}.kv_cache_gib and .{_SHARES[engine.kind]}"
        ways.append(f"Leave out {both} {_WRITTEN}")
    if room > 0:
        resolved = config.trainer.for_device(BFLOAT16_CAPABILITY)
        settings, then = remedies(shape, resolved, memory.samples_of(config), room, on_gpu=True)
        if settings and then <= room:
            ways.append(f"Set {' and '.join(settings)}: then a step needs about {size(then)}")
    ways.append("Give the trainer a separate GPU, or use a larger GPU or a smaller model")
    return (
        f"{device.name} ({size(found.total)}) is too small for the trainer and a generator "
        f"(launcher.colocate): {size(found.trainer)} are set aside for a training step "
        f"({memory.memory_text(trainer, None)}), and {engine.kind} needs "
        f"{size(needs.without_kv + kv)}: weights {size(needs.weights)}, KV {size(kv)} and "
        f"{size(needs.process)} for its process. " + ". Or: ".join(ways)
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """The checked inputs of a run."""

    config: RunConfig
    model_path: str
    task: Task
    gpus: GpuPlan | None = None
    """The GPUs of each process; None if none are assigned."""


def prepare(config: RunConfig, console: Console) -> Prepared:
    """Check and prepare a run's inputs, and describe the run. Raises UserError."""
    gpus = check_machine(config)
    model_checks.check_builtin_positions(config)
    config, compute = gpu_defaults.with_trainer_dtype(config, gpus)
    with _telling(console, "checking the rewards and the environment"):
        check_rewards(config.rewards)
        check_environment(config)
        model_checks.check_algorithm(config)
    with ProgressBar(console=console, transient=True, disable=not console.is_terminal) as bar:
        model_path = resolve_model(config.model, bar)
    model = Path(model_path)
    loaded = check_files(model)
    model_checks.check_positions(config, model)
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    unused = unexpected_line(model, loaded)
    for line in filter(None, (startup_summary.model_line(config, model_path), unused)):
        say(line)
    dated = gpu_defaults.with_date(config)
    with _telling(console, "reading and tokenising the data"):
        seed, sets = config.run.seed, config.evaluation.sets
        whole = config.environment.name is not None
        task = load_task(dated.task, model_path, seed, sets, whole_rows=whole, room=_room(config))
    config = dated if names_the_date(task.tokenizer) else config
    config = with_adapter(model_checks.with_critic(config, model_path, task.tokenizer), model)
    epochs, config = config.run.epochs, gpu_defaults.with_steps(config, len(task.train))
    say(startup_summary.data_line(config, task, epochs))
    for line in startup_summary.not_reached(config, task) + startup_summary.shared_prompts(task):
        say(line)
    _check_prompts(config, task)
    check_vocabulary(model, task.tokenizer, prompts_of(task))
    for line in model_checks.check_rows(config, task):
        say(line)
    if config.sampling.stop:
        from asyncrl.tasks.token_bytes import token_bytes  # imports numba, which takes a second

        token_bytes(task.tokenizer)
    say(startup_summary.mode_line(config))
    say(startup_summary.training_line(config))
    if config.environment.name is not None:
        from asyncrl.startup.environment_trial import try_environment  # imports what generators do

        with _telling(console, "trying the environment"):
            tried = try_environment(config, task)
        for line in tried:
            say(line)
    drafts = ""
    if config.launcher.kind == "local":
        on_gpu = engine_device(gpus) == "cuda"
        visits = gpu_defaults.visits_of(config, len(task.train))
        config, drafts = gpu_defaults.with_drafts_that_pay(config, on_gpu=on_gpu, visits=visits)
    count = parameters(model)
    processes = startup_summary.processes_line(config, gpus, count)
    for line in filter(None, (compute, drafts, processes)):
        say(line)
    shape = memory.shape_of(config, model, count, loaded.sizes)
    say(startup_summary.memory_line(*_memory(config, gpus, shape)))
    config, shared = with_shared_gpu(config, gpus, shape)
    for line in filter(None, (shared, startup_summary.results_line(config))):
        say(line)
    return Prepared(config, model_path, task, gpus)


def _memory(
    config: RunConfig, gpus: GpuPlan | None, shape: ModelShape | None
) -> tuple[StepMemory | None, Device | None]:
    """Return the trainer's memory and its device. Raises UserError if the device has less."""
    device = memory.device_of(config, gpus)
    if shape is None:
        return None, device
    if device is not None:
        memory.refuse_too_large(config, shape, device)
    return memory.memory_of(config, shape, on_gpu=device is None or device.on_gpu), device


@contextlib.contextmanager
def _telling(console: Console, what: str) -> Iterator[None]:
    """Say what takes so long: at once on a terminal, elsewhere if it does."""
    if console.is_terminal:
        with console.status(what):
            yield
        return
    timer = threading.Timer(TELL_SECONDS, console.print, [f"{what} ..."], {"soft_wrap": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _room(config: RunConfig) -> int:
    return config.engine.max_model_len - config.sampling.max_tokens


def _check_prompts(config: RunConfig, task: Task) -> None:
    for name, tokens in prompts_of(task):
        if len(tokens) > _room(config):
            raise DataError(
                f"{name} has {len(tokens)} tokens; with "
                f"sampling.max_tokens {config.sampling.max_tokens} that exceeds "
                f"engine.max_model_len {config.engine.max_model_len}. Raise engine.max_model_len, "
                "or leave out long prompts with task.max_prompt_tokens and task.too_long: filter"
            )

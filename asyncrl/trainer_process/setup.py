"""Builds a trainer process from the run's configuration and serves the controller."""

from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import torch

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.launch.child_spec import TrainerKeys, TrainerSpec, bind_to, make_place, reached_at
from asyncrl.launch.process_startup import (
    Child,
    bring_up,
    check_given_gpus,
    load_checked_tokenizer,
    without_collecting_the_start,
)
from asyncrl.launch.shared_memory import weights_id
from asyncrl.monitoring.errors import MonitoringError
from asyncrl.monitoring.metrics.metrics import TrainerMetrics
from asyncrl.monitoring.records.spans import SpanKind
from asyncrl.startup.memory import device_here, local_model, refuse_too_large, shape_of
from asyncrl.tasks.model_files import parameters
from asyncrl.trainer.base import errors
from asyncrl.trainer.base.lora_config import FINER_ENGINES
from asyncrl.trainer.checkpoint.format.files import dtype_of, path_of
from asyncrl.trainer.checkpoint.trainer_lease import TrainerLease
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model.memory_estimate import keep_freed_memory
from asyncrl.trainer.model.policy import has_experts
from asyncrl.trainer.objective import logprob_mismatch
from asyncrl.trainer.ranks.world import join
from asyncrl.trainer.scoring import for_own_device, resolve_device
from asyncrl.trainer_process.checkpoints import Checkpoints
from asyncrl.trainer_process.custom_algorithm import load_own_algorithm
from asyncrl.trainer_process.delivery_check import GroupQueue, Intake
from asyncrl.trainer_process.policy_check import PROVISIONAL_STEPS, PolicyCheck
from asyncrl.trainer_process.process import TrainerProcess
from asyncrl.trainer_process.sample_log import ShownSamples, TrainedSampleLog, drop_repeated
from asyncrl.trainer_process.step_trainer import StepTrainer, TrainerRecords
from asyncrl.wire import Hub
from asyncrl.wire.errors import PublishError, WireError
from asyncrl.wire.messages import data, from_trainer, to_trainer
from asyncrl.wire.messages.data import max_delivery_bytes
from asyncrl.wire.transport.outbox import PART_BYTES
from asyncrl.wire.transport.refusals import Limit, Refusals
from asyncrl.wire.weights.broadcast.sending import WeightSender
from asyncrl.wire.weights.writer import WeightPublisher

TrainerChild = Child[TrainerSpec, TrainerMetrics]
_LIMIT = Limit(10, 600.0)
"""A generator resends a sample every few seconds until it is acknowledged. One that keeps sending
refused samples must be replaced, or the run would wait for its sample forever."""


def _longest_delivery(config: RunConfig) -> int:
    """Bytes of a trajectory, each turn of which may be a context as long as the engine has room."""
    environment, longest = config.environment, config.engine.max_model_len
    tokens = longest * (1 if environment.name is None else environment.max_turns)
    return max(max_delivery_bytes(longest), min(max_delivery_bytes(tokens), 1 << 30), PART_BYTES)


async def run_trainer(spec: TrainerSpec, keys: TrainerKeys) -> None:
    """Load or resume the learner, publish its weights, and train until the shutdown command."""
    async with bring_up(spec, keys, to_trainer.ToTrainer, TrainerMetrics, _failure) as child:
        check_given_gpus(spec)
        engines_on_cpu = _generates_on_cpu(spec, child.config)
        name = child.config.engine.weights_dtype(on_cpu=engines_on_cpu)
        child = replace(child, config=_for_this_process(child, name))
        config = child.config
        generators: Hub[data.FromGeneratorData] = Hub(
            bind_to(spec),
            keys.data,
            data.FromGeneratorData,
            Refusals(child.metrics.count_refused, limit=_LIMIT),
            max_bytes=_longest_delivery(config),
        )
        child.closing.callback(generators.close)
        fence = TrainerLease(child.directory, spec.fence)
        with child.timeline.span(SpanKind.STARTING):
            learner = _load_learner(child, fence)
        fence.check()
        if learner.world.leads:
            drop_repeated(child.directory / "samples", learner.policy_version)
        engine_dtype: torch.dtype = getattr(torch, name)
        publisher = _publisher(child, learner, engine_dtype)
        child.closing.callback(publisher.close)
        on_cpus = engines_on_cpu and learner.policy.device.type == "cpu"
        limits = rounding_limits(
            config, engine_dtype, on_cpus=on_cpus, routed=has_experts(learner.policy.model)
        )
        check = PolicyCheck(
            limits, learner.policy, publisher, provisional_steps=0 if on_cpus else PROVISIONAL_STEPS
        )
        logged, shown = await _samples(child, fence)
        if logged is not None:
            child.closing.push_async_callback(logged.close)
        records = TrainerRecords(child.metrics, child.timeline, logged, check, child.tracer, shown)
        queue = GroupQueue(config.scheduler.group_size)
        functions, last = len(config.reward_labels), config.run.steps
        intake = Intake(queue, learner.check_trajectory, functions=functions, steps=last)
        steps = StepTrainer(
            learner,
            publisher,
            records,
            engine_dtype=engine_dtype,
            samples_follow_policy=config.samples_follow_policy,
            sender=_sender(child, learner, generators.address),
        )
        checkpoints = Checkpoints(
            learner,
            child.directory / "checkpoints",
            every=config.trainer.checkpoint_every,
            limit_seconds=config.launcher.checkpoint_seconds,
            records=records,
            asynchronous=config.trainer.async_checkpoints,
        )
        process = TrainerProcess(
            steps,
            queue,
            intake,
            checkpoints,
            child.control,
            generators,
            records,
            groups_per_step=config.scheduler.groups_per_step,
            mixed_tokens=config.trainer.micro_batch_tokens if config.trainer.mix_groups else 0,
            is_dynamic=config.scheduler.dynamic_sampling.enabled,
            in_order=config.run.repeatable,
            lineage=spec.lineage,
            stops_on_wrong_policy=config.run.on_wrong_policy == "stop",
        )
        process.configure(config)
        with without_collecting_the_start():
            reached = reached_at(spec, generators.address)
            await process.run(metrics_port=child.metrics_port, address=reached)


def _for_this_process(child: TrainerChild, engines_dtype: str) -> RunConfig:
    """Resolve `trainer.dtype: auto`, by the checkpoint to continue from, else by the device."""
    config, step = child.config, child.spec.resume_from
    trainer = config.trainer
    if trainer.dtype == "auto" and step is not None:
        found = dtype_of(path_of(child.directory / "checkpoints", step))
        if found is not None:
            trainer = trainer.model_copy(update={"dtype": found})
    trainer = for_own_device(trainer, engines_dtype)
    return config.model_copy(update={"trainer": trainer})


def _publisher(child: TrainerChild, learner: Learner, engine_dtype: torch.dtype) -> WeightPublisher:
    """Create a publisher of weights in the engines' data type, or of an adapter as it is trained.

    Raises UserError if engines hold an adapter's base weights more precisely than the trainer.
    """
    spec, adapter = child.spec, learner.policy.adapter
    low = child.config.trainer.dtype == "bfloat16"
    if adapter is not None and engine_dtype == torch.float32 and low:
        raise UserError(FINER_ENGINES)
    return WeightPublisher(
        Path(spec.weights_directory),
        weights_id(spec.run_id, spec.name),
        dtype=engine_dtype if adapter is None else torch.float32,
        lora=None if adapter is None else adapter.spec,
    )


def _sender(child: TrainerChild, learner: Learner, address: str) -> WeightSender | None:
    """Create the broadcaster of weights, if configured on a trusted network; on rank 0.

    It listens where generators reach this process (`address`), and on loopback if that is not a
    network address. Raises AsyncrlError if it cannot listen there.
    """
    config, broadcasts = child.config, child.metrics.weight_broadcasts
    if config.launcher.weights != "broadcast" or not learner.world.leads:
        return None
    generators = range(config.launcher.generators)
    host = urlsplit(address).hostname if address.startswith("tcp:") else None
    try:
        sender = WeightSender(
            host or "127.0.0.1",
            members=sum(config.engine.of_generator(one).gpus for one in generators),
            device=learner.policy.device,
            note=lambda outcome: broadcasts.of(outcome).inc(),
        )
    except OSError as error:
        raise AsyncrlError(f"weights cannot be broadcast from {host}: {error}") from error
    child.closing.callback(sender.close)
    return sender


def _load_learner(child: TrainerChild, fence: TrainerLease) -> Learner:
    spec, config = child.spec, child.config
    if resolve_device(config.trainer.device).type == "cpu":
        keep_freed_memory()
    if config.run.repeatable and resolve_device(config.trainer.device).type != "cpu":
        raise UserError(
            "run.repeatable: true works on a CPU only, and trainer.device: auto chose a GPU; set "
            "trainer.device: cpu"
        )
    _check_memory(spec, config)
    world = join(
        make_place(spec.meeting),
        spec.rank,
        spec.ranks,
        on_gpu=resolve_device(config.trainer.device).type == "cuda",
        join_seconds=config.launcher.startup_seconds,
        seconds=config.trainer.rank_seconds,
        network=config.trainer.rank_network,
    )
    child.closing.callback(world.close)
    load_own_algorithm(config.trainer.algorithm)
    learner = Learner(
        config.trainer.model_copy(update={"threads": spec.threads}),
        spec.model_path,
        group_size=config.scheduler.group_size,
        seed=config.run.seed,
        temperature=config.sampling.temperature,
        truncation=config.sampling.truncation,
        total_steps=config.run.steps,
        max_tokens=config.sampling.max_tokens,
        fence=fence,
        world=world,
    )
    if spec.resume_from is not None:
        learner.restore(path_of(child.directory / "checkpoints", spec.resume_from))
    return learner


def _check_memory(spec: TrainerSpec, config: RunConfig) -> None:
    """Refuse a step that is too large for this process's device; a local controller has done so.

    Raises UserError with the settings that would help.
    """
    if config.launcher.kind == "local":
        return
    model = local_model(spec.model_path)
    shape = None if model is None else shape_of(config, model, parameters(model))
    if shape is not None:
        refuse_too_large(config, shape, device_here(config))


def _generates_on_cpu(spec: TrainerSpec, config: RunConfig) -> bool:
    """Return True if generators run on the CPU; this process may see other GPUs than they do."""
    if spec.engine_device is not None:
        return spec.engine_device == "cpu"
    return config.engine.device == "cpu" or not torch.cuda.is_available()


def rounding_limits(
    config: RunConfig, engine_dtype: torch.dtype, *, on_cpus: bool, routed: bool
) -> logprob_mismatch.Limits:
    """Bound of the difference between healthy engines' and trainer's log-probabilities.

    The tight limits hold if both compute in float32 or better, on CPUs. `routed`: has experts.
    """
    exact = engine_dtype == torch.float32 and config.trainer.compute_dtype != "bfloat16"
    if on_cpus and exact:
        return logprob_mismatch.FLOAT32_CPU
    return logprob_mismatch.ROUTED_TENSOR_CORES if routed else logprob_mismatch.TENSOR_CORES


async def _samples(
    child: TrainerChild, fence: TrainerLease
) -> tuple[TrainedSampleLog | None, ShownSamples | None]:
    """Return what writes the trained samples, and what shows some of them, if either is wanted."""
    settings, spec = child.config.run, child.spec
    count = 0 if spec.rank else settings.print_samples
    if settings.log_samples == "off" and not count:
        return None, None
    tokenizer = await load_checked_tokenizer(child, from_trainer.WrongPolicyFound)
    shown = ShownSamples(tokenizer, count) if count else None
    if settings.log_samples == "off":
        return None, shown
    folder, place = child.directory / "samples", (spec.rank, spec.ranks)
    labels = child.config.reward_labels
    log = TrainedSampleLog(folder, tokenizer, settings, child.metrics, fence, *place, labels)
    return log, shown


def _failure(_spec: TrainerSpec, error: BaseException) -> from_trainer.Failure | None:
    if not isinstance(error, AsyncrlError | errors.TrainerError | MonitoringError | WireError):
        return None
    by_user = isinstance(error, UserError | errors.TrainerError | MonitoringError)
    internal = (errors.BatchError, errors.NonFiniteError, errors.RankLost, errors.Superseded)
    by_user = by_user and not isinstance(error, (PublishError, *internal))
    return from_trainer.Failure(str(error), user_error=by_user)

"""Builds a generator process from the run's configuration and serves the controller."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.cache.sharing.cache_setup import CachePlace
from asyncrl.config.by_step import ConfigByStep
from asyncrl.config.run_config import RunConfig
from asyncrl.engine.errors import EngineError, EngineStartError, RequestError
from asyncrl.engine.factory import create_engine
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.generator.activity import Activity
from asyncrl.generator.background import ControllerLine
from asyncrl.generator.lenient_reuse import LenientReuse
from asyncrl.generator.noise_floor import EVERY
from asyncrl.generator.process import GeneratorProcess
from asyncrl.generator.reports import EngineLog, GeneratorRecords, SampleRecorder
from asyncrl.generator.sample_rewards import SampleRewards
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_traces import SampleTraces
from asyncrl.generator.turns.environment_setup import episodes_with, start_environments
from asyncrl.launch.child_spec import GeneratorKeys, GeneratorSpec
from asyncrl.launch.process_startup import (
    bring_up,
    check_given_gpus,
    load_checked_tokenizer,
    timeline_file,
    without_collecting_the_start,
)
from asyncrl.launch.shared_memory import exchange_directory
from asyncrl.monitoring.config import set_log_level
from asyncrl.monitoring.errors import MonitoringError
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics
from asyncrl.monitoring.records.spans import SpanKind
from asyncrl.reward_server.keeping import with_servers
from asyncrl.rewards.pool import RewardPool
from asyncrl.tasks.model_files import only_what_counts
from asyncrl.tasks.token_bytes import stop_rule
from asyncrl.wire import Line
from asyncrl.wire.errors import WireError
from asyncrl.wire.messages import data, from_generator, to_generator
from asyncrl.wire.transport.outbox import ONE_PART
from asyncrl.wire.transport.refusals import Refusals


async def run_generator(spec: GeneratorSpec, keys: GeneratorKeys) -> None:
    """Start the configured engine and reward workers, and generate until the shutdown command."""
    async with bring_up(spec, keys, to_generator.ToGenerator, GeneratorMetrics, _failure) as child:
        check_given_gpus(spec)
        config, closing = child.config, child.closing
        set_log_level(config.monitoring.log_level)
        with child.timeline.span(SpanKind.STARTING):
            tokenizer = await load_checked_tokenizer(
                child, partial(from_generator.WrongPolicyFound, spec.name)
            )

            def decode(tokens: list[int]) -> str:
                return str(tokenizer.decode(tokens, skip_special_tokens=True))

            settings, lora = config.engine.of_generator(spec.index), config.trainer.lora
            if lora.serve == "adapter":
                vllm = settings.vllm.with_adapter(lora.rank)
                settings = settings.model_copy(update={"vllm": vllm})
            settings = settings.started_within(config.launcher.startup_seconds)
            model = spec.model_path
            if settings.kind != "torch":  # which loads as transformers does
                model = str(closing.enter_context(only_what_counts(Path(model))))
            engine = create_engine(
                settings.model_copy(update={"threads": spec.threads}),
                model,
                cache_config=config.cache,
                seed=config.run.seed,
                place=_cache_place(spec, config, tokenizer),
                batch_invariant=config.run.repeatable,
            )
            closing.push_async_callback(engine.close)
            rewards = RewardPool(with_servers(config.rewards, child.directory))
            closing.push_async_callback(rewards.close)
            await rewards.start()
            pool = await start_environments(config, closing, spec.stop_tokens, child.metrics)
            await engine.start()
        log = EngineLog(child.directory / "engine" / f"{spec.name}.jsonl")
        closing.callback(log.close)
        recorder = SampleRecorder(child.directory, tokenizer, config, spec.name)
        closing.callback(recorder.close)
        trainer_lines: list[Line[Any]] = []
        for address in map(spec.data_address_of, range(spec.ranks)):
            refusals, kinds = Refusals(child.metrics.count_refused), data.ToGeneratorData
            line: Line[Any] = Line(address, keys.data, kinds, refusals, together_bytes=ONE_PART)
            closing.callback(line.close)
            trainer_lines.append(line)
        rule, top_k = stop_rule(tokenizer, config.sampling.stop), config.engine.top_k_logprobs
        sampling = config.sampling.params(
            stop_tokens=spec.stop_tokens, stop_rule=rule, top_k_logprobs=top_k
        )
        traces = None if child.tracer is None else SampleTraces(child.tracer)
        episodes = None
        if pool is not None:
            episodes = episodes_with(pool, config, tokenizer, decode, spec.stop_tokens)
        process = GeneratorProcess(
            engine,
            SampleGenerator(
                engine,
                SampleRewards(rewards, decode, child.metrics, pool),
                sampling,
                held_out_sampling=config.evaluation.sampling_of(sampling),
                noise_floor_every=EVERY if ConfigByStep(config).verifies else None,
                traces=traces,
                episodes=episodes,
            ),
            ControllerLine(spec.name, child.control),
            trainer_lines[0],
            GeneratorRecords(
                child.metrics,
                Activity(child.timeline, child.metrics, timeline_file(spec, config, "slots")),
                log,
                recorder,
                traces,
            ),
            lenient_reuse=LenientReuse.from_config(config.cache),
            kv_limit=config.scheduler.runahead_kv_limit,
            stops_on_wrong_policy=config.run.on_wrong_policy == "stop",
            starts_with_policy=config.trainer.lora.adapter is None,
            here=spec.here,
            other_ranks=trainer_lines[1:],
        )
        process.samples.tells_rewards = config.scheduler.dynamic_sampling.enabled
        with without_collecting_the_start():
            await process.run(metrics_port=child.metrics_port)


def _cache_place(spec: GeneratorSpec, config: RunConfig, tokenizer: Any) -> CachePlace:
    exchange = None
    if config.launcher.generators > 1:
        exchange = str(exchange_directory(spec.run_id, Path(spec.weights_directory)))
    words = sorted(tokenizer.get_vocab().items())
    digest = hashlib.blake2b(repr(words).encode(), digest_size=16).hexdigest()
    path = str(Path(spec.run_directory) / "cache" / f"{spec.name}.snapshot")
    about = f"tokenizer {digest}"
    return CachePlace(name=spec.name, exchange=exchange, snapshot=path, fingerprint=about)


def _failure(spec: GeneratorSpec, error: BaseException) -> from_generator.Failure | None:
    """Build the controller's message about an error; None for an unexpected error.

    The settings of a replacement are not at fault: the dead process did start with them.
    """
    if not isinstance(error, AsyncrlError | EngineError | MonitoringError | WireError):
        return None
    by_user = isinstance(error, UserError) or (
        spec.first and isinstance(error, EngineStartError | MonitoringError | RequestError)
    )
    return from_generator.Failure(spec.name, str(error), by_user)

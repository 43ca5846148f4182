"""Brings a generator process up: what `GeneratorProcess` is made of, from a run's configuration."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from asyncrl.config import RunConfig
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.processes.activity import Activity
from asyncrl.processes.child import ChildSpec, exchange_directory, leaf_of
from asyncrl.processes.earlier import EarlierRollouts
from asyncrl.processes.engine_log import EngineLog
from asyncrl.processes.generator import GeneratorProcess
from asyncrl.processes.kept_samples import KeptSamples
from asyncrl.rewards.pool import RewardPool
from cache.place import CachePlace
from engine.errors import EngineError, EngineStartError, RequestError
from engine.factory import create_engine
from monitoring.errors import MonitoringError
from monitoring.exporter import exporter_for
from monitoring.metrics import GeneratorMetrics, new_registry
from monitoring.timeline import SpanKind, Timeline
from wire import Line
from wire.messages import data, from_generator, to_generator


async def run_generator(spec: ChildSpec) -> None:
    """Bring up an engine as the run's configuration says, and serve the controller."""
    config = spec.config()
    directory = Path(spec.run_directory)
    control: Line[to_generator.ToGenerator] = Line(
        spec.control_address, spec.name, to_generator.ToGenerator
    )
    registry = new_registry()
    metrics = GeneratorMetrics.register(registry, spec.name)
    async with contextlib.AsyncExitStack() as closing:
        closing.callback(control.close)
        timeline = Timeline(
            directory / "timeline" / f"{spec.name}.jsonl" if config.monitoring.timeline else None,
            spec.name,
            observe=metrics.observe_span,
        )
        closing.callback(timeline.close)
        try:
            with timeline.span(SpanKind.STARTING):
                exporter = exporter_for(config.monitoring, registry, spec.process_index)
                if exporter is not None:
                    closing.callback(exporter.close)
                engine_config = config.engine.model_copy(update={"threads": spec.threads})
                tokenizer = AutoTokenizer.from_pretrained(spec.model_path)
                engine = create_engine(
                    engine_config,
                    spec.model_path,
                    cache_config=config.cache,
                    seed=config.run.seed,
                    place=_place(spec, config, tokenizer),
                )
                closing.push_async_callback(engine.close)
                rewards = RewardPool(config.rewards)
                closing.push_async_callback(rewards.close)
                await rewards.start()
                await engine.start()
            slots = (
                directory / "slots" / f"{spec.name}.jsonl" if config.monitoring.timeline else None
            )
            log = EngineLog(directory / "engine" / f"{spec.name}.jsonl")
            closing.callback(log.close)
            process = GeneratorProcess(
                spec.name,
                engine=engine,
                rewards=rewards,
                decode=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
                sampling=config.sampling.params(
                    stop_tokens=spec.stop_tokens,
                    top_k_logprobs=config.engine.top_k_logprobs,
                    seed=None,
                ),
                control=control,
                data_line=Line(spec.data_address, spec.name, data.ToGeneratorData),
                samples=KeptSamples(directory, tokenizer, config),
                activity=Activity(timeline, metrics, slots),
                metrics=metrics,
                log=log,
                earlier=EarlierRollouts.of(config.cache),
                deadline=config.scheduler.sample_deadline_seconds,
                kv_limit=config.scheduler.runahead_kv_limit,
            )
            try:
                await process.run(metrics_port=None if exporter is None else exporter.port)
            except BaseExceptionGroup as group:
                raise leaf_of(group) from group
        except (AsyncrlError, EngineError, MonitoringError) as error:
            # A replacement fails where the first one did not: that is not the user's mistake.
            at_fault = isinstance(error, UserError) or (
                spec.first and isinstance(error, EngineStartError | MonitoringError | RequestError)
            )
            await control.send(from_generator.Failure(spec.name, str(error), at_fault))
            raise


def _place(spec: ChildSpec, config: RunConfig, tokenizer: Any) -> CachePlace:
    """Generators of a run share what they write; a resumed run drafts from what it had written."""
    exchange = None
    if config.launcher.generators > 1:
        exchange = str(exchange_directory(config.run.name, spec.parent))
    words = sorted(tokenizer.get_vocab().items())
    digest = hashlib.blake2b(repr(words).encode(), digest_size=16).hexdigest()
    return CachePlace(
        name=spec.name,
        exchange=exchange,
        snapshot=str(Path(spec.run_directory) / "cache" / f"{spec.name}.snapshot"),
        fingerprint=f"tokenizer {digest}",
    )

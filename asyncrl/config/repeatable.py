"""What makes two runs with the same settings differ."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.environments.config import EnvironmentConfig
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.trainer.base.config import TrainerConfig


def clock_dependencies(
    scheduler: SchedulerConfig,
    engine: EngineConfig,
    cache: CacheConfig,
    trainer: TrainerConfig,
    environment: EnvironmentConfig,
) -> Iterator[str]:
    """Each setting with which a run depends on the clock: the setting, why, and what works."""
    if scheduler.on_update == "verify":
        yield (
            "scheduler.on_update: verify, because the point at which new weights interrupt a "
            "sample depends on the clock; set scheduler.on_update: keep"
        )
    if scheduler.max_off_policy_steps:
        yield (
            f"scheduler.max_off_policy_steps: {scheduler.max_off_policy_steps}, because the policy "
            "version of each token depends on the clock; set scheduler.max_off_policy_steps: 0"
        )
    if scheduler.sample_deadline_seconds is not None:
        yield (
            f"scheduler.sample_deadline_seconds: {scheduler.sample_deadline_seconds}, because the "
            "clock decides which samples are cut off; set it to null"
        )
    if cache.reuse == "lenient":
        yield (
            "cache.reuse: lenient, because a sample begins with tokens that its generator happens "
            "to have; set cache.reuse: drafts"
        )
    if trainer.mix_groups:
        yield (
            "trainer.mix_groups: true, because the clock decides which groups share a forward "
            "pass; set trainer.mix_groups: false"
        )
    for kind in dict.fromkeys(engine.kinds) or (engine.kind,):
        if kind == "torch":
            continue
        yield (
            f"engine.kind: {kind}, because its log-probabilities depend on what else is in "
            "the batch; set engine.kind: torch"
        )
    yield from _environments(environment)
    if trainer.ranks > 1:
        yield (
            f"trainer.ranks: {trainer.ranks}, because the order in which groups finish decides "
            "which rank gets them, and so the rounding of their sum; set trainer.ranks: 1"
        )
    for key, value, works in (
        ("engine.device", engine.device, "cpu"),
        ("engine.dtype", engine.dtype, "float32"),
        ("trainer.device", trainer.device, "cpu"),
    ):
        if value not in ("auto", works):
            yield f"{key}: {value}, because only a CPU in float32 repeats; set {key}: {works}"


def _environments(environment: EnvironmentConfig) -> Iterator[str]:
    """Those whose time or state is not the run's."""
    name = environment.name or ""
    if name.startswith("agent:"):
        yield (
            f"environment.name: {name}, because a program runs by its own clock, which decides "
            "what it asks and in which order; use an environment with `reset` and `step`"
        )
    if name.startswith("openenv:") and environment.args.get("replay") != "deterministic":
        yield (
            f"environment.name: {name}, because the state of its server is not the run's; if the "
            "server answers the same seed and actions with the same, say so with "
            "environment.args.replay: deterministic"
        )

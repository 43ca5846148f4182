"""Implements `asyncrl eval`: held-out accuracy of one model, with an engine in this process."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.progress import Progress as ProgressBar

from asyncrl.config.run_config import RunConfig, load_config
from asyncrl.engine.errors import EngineError
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import Engine
from asyncrl.errors import AsyncrlError, ModelError, UserError, first_error
from asyncrl.evaluation.round import EvaluationRound, plan_of
from asyncrl.generator.sample_rewards import SampleRewards
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.generator.turns.environment_setup import episodes_with, start_environments
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics, new_registry
from asyncrl.reward_server.keeping import served
from asyncrl.rewards.pool import RewardPool
from asyncrl.rollout.trajectory import SampleId
from asyncrl.runs.directory import find_run
from asyncrl.startup.gpu_defaults import with_date, with_drafts_that_pay
from asyncrl.startup.model_check import check_files, check_numbers
from asyncrl.startup.model_checks import check_positions
from asyncrl.tasks.config import ModelConfig
from asyncrl.tasks.exported_model import model_of
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import resolve_model
from asyncrl.tasks.prompts import Task, held_out_sets
from asyncrl.tasks.sample_requests import payload_of, sample_seed
from asyncrl.tasks.token_bytes import stop_rule
from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format.files import choose
from asyncrl.wire.records.evaluations import EvaluationRecord


def resolve_target(
    target: str, config_file: Path | None, overrides: Sequence[str], runs: Path, console: Console
) -> tuple[RunConfig, str]:
    """Return the configuration and the model directory that RUN|MODEL names.

    A run is evaluated with its own configuration. Raises UserError for anything else than a model
    or a run with a whole checkpoint.
    """
    is_run = (runs / target / "config.yaml").exists() or (Path(target) / "config.yaml").exists()
    if is_run:
        run = find_run(target, runs, may_be_supervised=True)
        newest = _newest_checkpoint(run, console)
        if newest is None:
            raise UserError(f"the run {run} has not written a checkpoint yet; evaluate its model")
        config = load_config(run / "config.yaml", overrides)
        say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
        return config, str(model_of(newest, say))
    config = load_config(config_file, overrides)
    model = ModelConfig(path=target)
    config = config.model_copy(update={"model": model})
    with ProgressBar(console=console, transient=True, disable=not console.is_terminal) as bar:
        try:
            return config, resolve_model(model, bar)
        except ModelError as error:
            if Path(target).exists():
                raise
            raise ModelError(f"{target!r} is not a run in {runs}; as a model: {error}") from error


def _newest_checkpoint(run: Path, console: Console) -> Path | None:
    """Return a run's newest whole checkpoint; name newer damaged ones on the console."""
    try:
        point = choose(run / "checkpoints")
    except CheckpointError as error:
        raise UserError(str(error)) from error
    for fault in point.faults:
        console.print(f"not evaluated: {fault}", highlight=False, soft_wrap=True)
    return point.directory


def evaluate_model(config: RunConfig, model_path: str, console: Console) -> EvaluationRecord:
    """Sample every held-out prompt; return the estimates of each set.

    Raises UserError for the model, the data or the rewards, AsyncrlError for the engine.
    """
    config = with_date(config)
    check_files(Path(model_path))
    check_numbers(Path(model_path))
    check_positions(config, Path(model_path))
    task = load_task(config.task, model_path, config.run.seed, config.evaluation.sets)
    on_gpu = config.engine.device != "cpu" and torch.cuda.is_available()
    config, _ = with_drafts_that_pay(config, on_gpu=on_gpu, visits=1)
    try:
        engine = create_engine(
            config.engine, model_path,
            cache_config=config.cache, seed=config.run.seed, batch_invariant=config.run.repeatable,
        )  # fmt: skip
        return asyncio.run(_evaluate(config, task, engine, console))
    except EngineError as error:
        raise AsyncrlError(str(error)) from error


async def _evaluate(
    config: RunConfig, task: Task, engine: Engine, console: Console
) -> EvaluationRecord:
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    with TemporaryDirectory(prefix="asyncrl-eval-") as logs:
        async with served(config.rewards, Path(logs), say) as rewards:
            config = config.model_copy(update={"rewards": rewards})
            return await _evaluate_served(config, task, engine, console)


async def _evaluate_served(
    config: RunConfig, task: Task, engine: Engine, console: Console
) -> EvaluationRecord:
    sets = held_out_sets(task)
    plan = plan_of(config.evaluation, {name: len(prompts) for name, prompts in sets.items()})
    current = EvaluationRound(0, plan, config.evaluation)
    slots, limit = asyncio.Semaphore(2 * config.engine.slots), config.evaluation.timeout_seconds
    try:
        async with AsyncExitStack() as closing:
            generator = await _generator(config, task, engine, closing)
            bar = closing.enter_context(ProgressBar(console=console, transient=True))
            line = bar.add_task("evaluating", total=plan.total)

            async def evaluate(index: int) -> None:
                name, place = plan.place(index)
                prompt = payload_of(sets[name][place])
                async with slots:
                    seed = sample_seed(config.run.seed, "evaluation", 1, index)
                    sample = SampleGeneration(SampleId(0, index), prompt, seed, purpose="eval")
                    held = await generator.generate(sample)
                    held.close()
                    reward = await held.reward
                    length = held.trajectory.trained_count
                    current.came_back(index, reward.value, length, reward.verdict)
                wait.reschedule(asyncio.get_running_loop().time() + limit)
                bar.advance(line)

            try:
                async with asyncio.timeout(limit) as wait, asyncio.TaskGroup() as group:
                    for index in range(plan.total):
                        group.create_task(evaluate(index))
            except TimeoutError as error:
                raise AsyncrlError(
                    f"evaluation is stuck: none of its samples finished within {limit:g} s "
                    f"({current.finished} of {plan.total} did before); if they take that long, "
                    "raise evaluation.timeout_seconds"
                ) from error
            counts = generator.rewards.counts
        if counts.failures:
            text = f"{counts.failures} rewards failed: {counts.describe_failures()}"
            console.print(text, style="yellow", soft_wrap=True)
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    return current.record(0, "after")


async def _generator(
    config: RunConfig, task: Task, engine: Engine, closing: AsyncExitStack
) -> SampleGenerator:
    def decode(tokens: list[int]) -> str:
        return str(task.tokenizer.decode(tokens, skip_special_tokens=True))

    closing.push_async_callback(engine.close)
    rewards = RewardPool(config.rewards)
    closing.push_async_callback(rewards.close)
    await rewards.start()
    pool = await start_environments(config, closing, task.stop_tokens)
    await engine.start()
    sampling = config.sampling.params(
        stop_tokens=task.stop_tokens,
        stop_rule=stop_rule(task.tokenizer, config.sampling.stop),
        top_k_logprobs=0,
    )
    metrics = GeneratorMetrics.register(new_registry(), "eval")
    scoring = SampleRewards(rewards, decode, metrics, pool)
    closing.callback(scoring.close)
    episodes = None
    if pool is not None:
        episodes = episodes_with(pool, config, task.tokenizer, decode, task.stop_tokens)
    sampling = config.evaluation.sampling_of(sampling)
    return SampleGenerator(engine, scoring, sampling, episodes=episodes)

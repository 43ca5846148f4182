"""`asyncrl eval`: held-out accuracy of one model, with an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as ProgressBar

from asyncrl.config import RunConfig, load_config
from asyncrl.errors import AsyncrlError, UserError, first_error
from asyncrl.evaluation.plan import plan_of
from asyncrl.evaluation.round import EvaluationRound
from asyncrl.rewards.pool import RewardPool
from asyncrl.run.directory import find_run
from asyncrl.run.exporting import model_of
from asyncrl.run.sample_requests import sample_seed
from asyncrl.tasks.config import ModelConfig
from asyncrl.tasks.loading import load_task
from asyncrl.tasks.model import resolve_model
from asyncrl.tasks.prompts import Task, held_out_sets
from asyncrl.tasks.token_bytes import stop_rule
from engine.errors import EngineError
from engine.factory import create_engine
from engine.protocol import Engine, GenerateRequest
from trainer.checkpoint_files import choose
from trainer.errors import CheckpointError
from wire.evaluations import EvaluationRecord


def resolve_target(
    target: str, config_file: Path | None, overrides: Sequence[str], runs: Path, console: Console
) -> tuple[RunConfig, str]:
    """The configuration and the model directory that RUN|MODEL names.

    A run is evaluated with its own configuration, a model with `config_file` or the defaults.

    Raises:
        UserError: it is neither a run nor a model, or a run without a whole checkpoint.
    """
    is_run = (runs / target / "config.yaml").exists() or (Path(target) / "config.yaml").exists()
    if is_run:
        run = find_run(target, runs)
        newest = _newest_checkpoint(run, console)
        if newest is None:
            raise UserError(f"the run {run} has no checkpoint yet; evaluate its model instead")
        config = load_config(run / "config.yaml", overrides)
        say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
        return config, str(model_of(newest, say))
    config = load_config(config_file, overrides)
    with ProgressBar(console=console, transient=True, disable=not console.is_terminal) as bar:
        return config, resolve_model(ModelConfig(path=target), bar)


def _newest_checkpoint(run: Path, console: Console) -> Path | None:
    """The newest whole checkpoint of a run; newer damaged ones are named on the console."""
    try:
        point = choose(run / "checkpoints")
    except CheckpointError as error:
        raise UserError(str(error)) from error
    for fault in point.faults:
        console.print(f"not evaluated: {fault}", highlight=False, soft_wrap=True)
    return point.directory


def evaluate_model(config: RunConfig, model_path: str, console: Console) -> EvaluationRecord:
    """Sample every held-out prompt as in training; the estimates of each set.

    Raises:
        UserError: the model, the data or the rewards cannot be used.
        AsyncrlError: the engine failed.
    """
    task = load_task(config.task, model_path, config.run.seed, config.evaluation.sets)
    try:
        engine = create_engine(
            config.engine,
            model_path,
            cache_config=config.cache,
            seed=config.run.seed,
            batch_invariant=config.run.repeatable,
        )
        return asyncio.run(_evaluate(config, task, engine, console))
    except EngineError as error:
        raise AsyncrlError(str(error)) from error


async def _evaluate(
    config: RunConfig, task: Task, engine: Engine, console: Console
) -> EvaluationRecord:
    rewards = RewardPool(config.rewards)
    sets = held_out_sets(task)
    plan = plan_of(config.evaluation, {name: len(prompts) for name, prompts in sets.items()})
    current = EvaluationRound(0, plan, threshold=config.evaluation.threshold)
    slots = asyncio.Semaphore(2 * config.engine.slots)
    sampling = config.sampling.params(
        stop_tokens=task.stop_tokens,
        stop_rule=stop_rule(task.tokenizer, config.sampling.stop),
        top_k_logprobs=0,
        seed=None,
    )
    try:
        await rewards.start()
        await engine.start()
        with ProgressBar(console=console, transient=True) as bar:
            line = bar.add_task("evaluating", total=plan.total)

            async def evaluate(index: int) -> None:
                name, place = plan.place(index)
                prompt = sets[name][place]
                async with slots:
                    seed = sample_seed(config.run.seed, "evaluation", 1, index)
                    request = GenerateRequest(
                        request_id=f"eval-{index}",
                        cache_key="",
                        prompt_tokens=prompt.tokens,
                        sampling=replace(sampling, seed=seed),
                    )
                    tokens = await _respond(engine, request)
                    text = str(task.tokenizer.decode(tokens, skip_special_tokens=True))
                    question = str(prompt.example.get("prompt", ""))
                    reward = await rewards.score(
                        question, text, prompt.example, example_id=prompt.prompt_id
                    )
                    current.came_back(index, reward.value, len(tokens))
                bar.advance(line)

            async with asyncio.TaskGroup() as group:
                for index in range(plan.total):
                    group.create_task(evaluate(index))
        if rewards.counts.failures:
            console.print(
                f"{rewards.counts.failures} rewards failed and counted as 0: "
                f"{rewards.counts.describe_failures()}",
                style="yellow",
                soft_wrap=True,
            )
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    finally:
        await rewards.close()
        await engine.close()
    return current.record(0, "after")


async def _respond(engine: Engine, request: GenerateRequest) -> list[int]:
    tokens: list[int] = []
    async for chunk in engine.generate(request):
        tokens.extend(chunk.tokens.tolist())
    return tokens

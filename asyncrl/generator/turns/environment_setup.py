"""Builds the environments of a generator's samples from the run's configuration."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from asyncrl.config.run_config import RunConfig
from asyncrl.environments.config import with_policy
from asyncrl.environments.protocol import Message
from asyncrl.environments.rendering import TurnRenderer
from asyncrl.environments.tool_calls import parse_turn
from asyncrl.environments.tool_formats import format_of_template
from asyncrl.environments.translation import Tools, Translation
from asyncrl.environments.workers.pool import EnvironmentPool
from asyncrl.generator.turns.environment_turns import Episodes
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics
from asyncrl.tasks.templates.variables import template_variables

CLOSE_SECONDS = 6.0
"""Environments may `close` for this long (each 5 seconds) before their workers are killed."""


async def start_environments(
    config: RunConfig,
    closing: AsyncExitStack,
    stop_tokens: Sequence[int],
    metrics: GeneratorMetrics | None = None,
) -> EnvironmentPool | None:
    """Start the worker processes, if there is an environment. Raises RewardError."""
    if config.environment.name is None:
        return None
    environment = with_policy(config.environment, config.sampling, config.model.path, stop_tokens)

    def note(method: str, seconds: float) -> None:
        if metrics is not None:
            metrics.environment_time.of(method).observe(seconds)

    pool = EnvironmentPool(environment, config.rewards, note)
    if metrics is not None:
        metrics.environment_queued.set_function(lambda: pool.queued)
    closing.push_async_callback(lambda: pool.close(CLOSE_SECONDS))
    await pool.start()
    return pool


def episodes_with(
    pool: EnvironmentPool,
    config: RunConfig,
    tokenizer: Any,
    decode: Callable[[list[int]], str],
    stop_tokens: Sequence[int],
) -> Episodes:
    """Create the episodes of a generator whose environments run in this pool."""
    translation = translation_of(config, tokenizer, decode, stop_tokens)
    most, context = config.sampling.max_tokens, config.engine.max_model_len
    return Episodes(pool, translation, max_tokens=most, max_model_len=context)


def translation_of(
    config: RunConfig, tokenizer: Any, decode: Callable[[list[int]], str], stop_ids: Sequence[int]
) -> Translation:
    """Create the translation between the tokens of the run's model and its environments."""
    template = getattr(tokenizer, "chat_template", None)
    uses_template = config.task.chat_template != "never"
    renderer = TurnRenderer(
        tokenizer,
        stop_tokens=stop_ids,
        chat_template=uses_template,
        arguments=template_variables(tokenizer, config.task) if uses_template else None,
        history=config.environment.history,
    )
    form = config.environment.tool_format
    if form == "auto":
        form = format_of_template(template if uses_template else None)

    def read(text: str, tools: Tools, turn: int) -> tuple[Message, list[dict[str, Any]]]:
        parsed = parse_turn(text, form, tools, turn=turn)
        return parsed.message, [call.as_dict() for call in parsed.calls]

    return Translation(
        renderer,
        decode,
        len(tokenizer),
        read=read,
        stop=config.sampling.stop,
        max_observation_tokens=config.environment.max_observation_tokens,
        max_prompt_tokens=config.engine.max_model_len,
        system_prompt=config.task.system_prompt,
    )

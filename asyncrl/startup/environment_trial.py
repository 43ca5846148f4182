"""Makes and resets one environment before a run starts, as a generator does.

Most mistakes of an environment show in its first `reset`: a wrong signature, an import, an
unavailable server, messages that the chat template refuses, a prompt that is too long. A slow
`reset` is not awaited, and the environment is closed.
"""

import asyncio
from contextlib import AsyncExitStack

from asyncrl.config.run_config import RunConfig
from asyncrl.environments.protocol import Traits
from asyncrl.environments.workers.pool import EnvironmentFailed
from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.generator.turns.environment_setup import episodes_with, start_environments
from asyncrl.rollout.trajectory import SampleId
from asyncrl.startup.startup_summary import turns_line
from asyncrl.tasks.prompts import Task
from asyncrl.wire.messages.data import encode_tokens
from asyncrl.wire.messages.to_generator import PromptPayload

_TRIAL_SECONDS = 30.0
"""Time limit of the first `reset`; a run is not refused for exceeding it."""


def try_environment(config: RunConfig, task: Task) -> list[str]:
    """Begin one sample of the first row locally; return lines about it. Raises RewardError."""
    traits: Traits | None = None
    said: list[str] = []
    if config.launcher.kind == "local":
        try:
            traits = asyncio.run(_first_sample(config, task))
        except EnvironmentFailed as error:
            if config.rewards.on_error == "stop":
                raise
            said.append(f"warning: {error}")
        else:
            if traits is None:
                said.append(
                    f"the first reset of environment {config.environment.name!r} takes more than "
                    f"{_TRIAL_SECONDS:g} s; the run does not wait for it"
                )
    return [turns_line(config, traits), *said, *_warnings(config, task, traits)]


async def _first_sample(config: RunConfig, task: Task) -> Traits | None:
    """Return an environment's traits, or None if its `reset` is slow. Raises RewardError."""
    tried = config.with_values("environment", workers=1).with_values("rewards", on_error="stop")

    def decode(tokens: list[int]) -> str:
        return str(task.tokenizer.decode(tokens, skip_special_tokens=True))

    async with AsyncExitStack() as closing:
        pool = await start_environments(tried, closing, task.stop_tokens)
        if pool is None:
            raise TypeError("environment.name is not set")
        episodes = episodes_with(pool, tried, task.tokenizer, decode, task.stop_tokens)
        prompt = task.train[0]
        payload = PromptPayload(prompt.prompt_id, encode_tokens(prompt.tokens), prompt.example)
        generation = SampleGeneration(SampleId(0, 0), payload, config.run.seed)
        generation.episode = episode = episodes.new(generation)
        try:
            async with asyncio.timeout(_TRIAL_SECONDS):
                await episodes.begin(generation)
        except TimeoutError:
            return None
        finally:
            episode.close()
        return episode.traits


def _warnings(config: RunConfig, task: Task, traits: Traits | None) -> list[str]:
    found = _unseen_tools(config, task, traits)
    scheduler, environment = config.scheduler, config.environment
    if traits is not None and not traits.goes_back and scheduler.on_update == "verify":
        found.append(
            f"warning: environment.name: {environment.name} cannot go back (it has neither "
            "`replay` nor `snapshot` and `restore`), so with scheduler.on_update: verify each of "
            "its samples starts over when it is due under newer weights than it was begun with. "
            "scheduler.on_update: keep with max_off_policy_steps: 1 trains on them as they are"
        )
    if traits is not None and config.run.repeatable and traits.replay != "deterministic":
        found.append(
            f"warning: run.repeatable: true holds only if environment {environment.name} answers "
            "the same row, seed and actions with the same, which it does not say (`replay` is "
            f"{traits.replay or 'not given'}, not deterministic)"
        )
    samples = scheduler.groups_per_step * scheduler.group_size
    wanted = min(config.engine.slots, -(-samples // config.launcher.generators))
    if environment.total_sessions < wanted:
        found.append(
            "warning: environment.workers x environment.sessions lets "
            f"{environment.total_sessions:,} samples of a generator run at once, and its engine "
            f"has room for {wanted:,} (engine.slots), part of which stays unused"
        )
    return found


def _unseen_tools(config: RunConfig, task: Task, traits: Traits | None) -> list[str]:
    template = getattr(task.tokenizer, "chat_template", None)
    is_used = template and config.task.chat_template != "never"
    if traits is None or not traits.tools or (is_used and "tools" in str(template)):
        return []
    why = "the model's chat template does not mention tools" if is_used else "no template is used"
    warning = (
        f"warning: environment {config.environment.name} has tools, and {why}, so the model does "
        "not see them; describe them in task.system_prompt or in the prompts, and set "
        "environment.tool_format to the format of a call"
    )
    return [warning]

"""Samples of several conversations: what each context begins with, and where it is trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_models import chat_tokenizer, stop_ids
from counting_environments import KEPT, NEW, Counting, run, until
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, verify
from local_environments import LocalPool

from asyncrl.environments.protocol import Action, StepResult, Traits
from asyncrl.environments.rendering import TurnRenderer
from asyncrl.environments.translation import Translation
from asyncrl.environments.workers.pool import EnvironmentFailed
from asyncrl.generator.sample_rewards import exchange_of
from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.generator.turns.environment_turns import Episodes
from asyncrl.rollout.contexts import contexts_of
from asyncrl.rollout.trajectory import Provenance, Trajectory
from asyncrl.wire.messages import to_generator as tg

QUESTION = {"role": "user", "content": "what is 1 + 1?"}
OTHER = {"role": "user", "content": "hello there\n"}
DOUBT = {"role": "user", "content": "I think the answer is 2\n"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "add", "parameters": {}}}]
TURN = "<think>\nhello\n</think>\n\nthe  answer is 42"
"""Its white space and reasoning are not what a template makes of it."""


def policys(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Pool:
    """Of one environment, which says these things one after another."""

    config = SimpleNamespace(max_turns=30, max_turn_tokens=None, name="fake")
    rewards = SimpleNamespace(on_error="stop", max_attempts=1)
    first: Any = (QUESTION,)
    lost, name, traits = False, "fake", Traits(replay="deterministic")
    process_end = None

    def __init__(self, said: Sequence[StepResult]) -> None:
        self.said = list(said)
        self.turns: list[str] = []

    async def open(self, *_: Any, **__: Any) -> Any:
        self.lost = False
        self.turns.clear()
        return self

    async def step(self, action: Action, *, alone: bool) -> StepResult:
        del alone
        self.turns.append(action.message["content"])
        return self.said[len(self.turns) - 1]

    def failure(self, session: Any, reason: Any, method: str, message: str) -> EnvironmentFailed:
        return EnvironmentFailed(message, reason)

    def count(self, error: EnvironmentFailed) -> None:
        pass

    def close(self) -> None:
        pass


def episodes_of(
    family: str, said: Sequence[StepResult], history: Any = "keep"
) -> tuple[Episodes, TurnRenderer, Any]:
    """Episodes of this environment, their renderer, and the pool."""
    tokenizer = chat_tokenizer(family)
    renderer = TurnRenderer(tokenizer, stop_tokens=stop_ids(family), history=history)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    translation = Translation(renderer, decode, len(tokenizer), max_observation_tokens=500)
    pool: Any = Pool(said)
    return Episodes(pool, translation, max_tokens=2000, max_model_len=4000), renderer, pool


async def begun(episodes: Episodes) -> SampleGeneration:
    """A sample of these episodes, before its first turn."""
    generation = SampleGeneration(SAMPLE, PROMPT, 7)
    generation.episode = episodes.new(generation)
    await episodes.begin(generation)
    generation.clear_tokens()
    return generation


async def take(turn: str, family: str, generation: SampleGeneration, episodes: Episodes) -> None:
    """The policy draws this turn with its stop token, and is answered."""
    ids = chat_tokenizer(family)(turn, add_special_tokens=False)["input_ids"]
    ids = [*ids, stop_ids(family)[0]]
    n = len(ids)
    generation.builder.append(
        tokens=np.array(ids, np.int32),
        logprobs=np.full(n, -1.5, np.float32),
        topk_ids=np.zeros((n, 1), np.int32),
        topk_logprobs=np.zeros((n, 1), np.float32),
        noise_seeds=np.zeros(n, np.uint64),
        provenance=np.full(n, Provenance.SAMPLED, np.uint8),
        policy_version=1,
    )
    await episodes.answer(generation)


def play(
    family: str, turns: Sequence[str], said: Sequence[StepResult], history: Any = "keep"
) -> tuple[Trajectory, Any]:
    """A sample whose policy draws these turns, each with its stop token; and the renderer."""
    generation, renderer = played(family, turns, said, history)
    return generation.builder.finish("stop"), renderer


def played(
    family: str, turns: Sequence[str], said: Sequence[StepResult], history: Any = "keep"
) -> tuple[SampleGeneration, Any]:
    """Likewise, not finished."""
    episodes, renderer, _ = episodes_of(family, said, history)

    async def generate() -> SampleGeneration:
        generation = await begun(episodes)
        for turn in turns:
            await take(turn, family, generation, episodes)
        return generation

    return asyncio.run(generate()), renderer


def begins(*messages: dict[str, Any], tools: Any = None) -> StepResult:
    return StepResult(list(messages), new_conversation=True, tools=tools)


DONE = StepResult(done=True, reward=1.0)


@pytest.mark.parametrize("family", ["qwen3", "llama31", "custom", "plain"])
def test_a_sub_agent_and_the_return_from_it_are_contexts_of_their_own(family: str) -> None:
    """On return the first conversation's tokens are as they were, not as the template has them."""
    tokenizer, end = chat_tokenizer(family), stop_ids(family)[0]
    turns = [TURN, "hello  there", "it is 2", "42", "so"]
    first, second, third, fourth, fifth = (
        [*tokenizer(turn, add_special_tokens=False)["input_ids"], end] for turn in turns
    )
    history = [QUESTION, policys(TURN), DOUBT]
    sub = [OTHER, policys("hello  there"), DOUBT]
    said = [begins(OTHER), begins(*history), StepResult([OTHER]), begins(*sub), DONE]
    trajectory, renderer = play(family, turns, said)
    found = contexts_of(trajectory)
    drawn = [c.response[c.trained].tolist() for c in found]
    assert drawn == [first, second, [*third, *fourth], fifth]
    asked, told = (renderer.prompt([one]).tolist() for one in (QUESTION, OTHER))
    doubted = renderer.between([QUESTION], [DOUBT], first).tolist()
    again = renderer.between([OTHER], [DOUBT], second).tolist()
    assert [c.prompt.tolist() for c in found] == [
        asked,
        told,
        [*asked, *first, *doubted],
        [*told, *second, *again],
    ]
    more = renderer.between([*history, policys("it is 2")][:-1], [OTHER], third).tolist()
    assert found[2].response.tolist() == [*third, *more, *fourth]


def test_with_the_templates_history_a_return_is_rendered_anew() -> None:
    said = [begins(OTHER), begins(QUESTION, policys(TURN), DOUBT), DONE]
    trajectory, renderer = play("qwen3", [TURN, "a", "b"], said, history="template")
    prompt = contexts_of(trajectory)[2].prompt
    assert prompt.tolist() == renderer.prompt([QUESTION, policys(TURN), DOUBT]).tolist()
    assert "</think>" not in chat_tokenizer("qwen3").decode(prompt)


def test_an_edited_history_keeps_the_turns_before_the_edit() -> None:
    said = [
        StepResult([DOUBT]),
        begins(QUESTION, policys(TURN), DOUBT, policys("edited"), OTHER),
        DONE,
    ]
    trajectory, renderer = play("qwen3", [TURN, "b", "c"], said)
    first = trajectory.tokens[: contexts_of(trajectory)[0].trained.tolist().index(False)]
    prompt = contexts_of(trajectory)[1].prompt.tolist()
    asked = renderer.prompt([QUESTION]).tolist()
    assert prompt[: len(asked) + len(first)] == [*asked, *first.tolist()]
    text = chat_tokenizer("qwen3").decode(prompt)
    assert text.endswith(
        "I think the answer is 2\n<|im_end|>\n<|im_start|>assistant\nedited<|im_end|>\n"
        "<|im_start|>user\nhello there\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_other_tools_are_another_context_and_the_present_conversation_is_none() -> None:
    history = [QUESTION, policys(TURN), DOUBT]
    said = [begins(*history), begins(*history, policys("b"), OTHER, tools=TOOLS), DONE]
    trajectory, renderer = play("qwen3", [TURN, "b", "c"], said)
    first, second = contexts_of(trajectory)
    turn = first.response[: first.trained.tolist().index(False)]
    between = renderer.between([QUESTION], [DOUBT], turn)
    assert first.response[~first.trained].tolist() == between.tolist()
    whole = renderer.prompt([*history, policys("b"), OTHER], TOOLS)
    assert second.prompt.tolist() == whole.tolist()


def test_token_ids_are_a_whole_prompt() -> None:
    trajectory, _ = play("qwen3", ["a", "b"], [StepResult([5, 6], new_conversation=True), DONE])
    assert contexts_of(trajectory)[1].prompt.tolist() == [5, 6]


def test_a_conversation_that_leaves_no_room_ends_the_sample() -> None:
    long = {"role": "user", "content": "hello there\n" * 2000}
    trajectory, _ = play("qwen3", ["a"], [begins(long)])
    assert trajectory.contexts == ()


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_reward_functions_get_each_conversation_as_it_was(is_cut_off: bool) -> None:
    """Also where the last turn was not answered."""
    history = [QUESTION, policys("a"), DOUBT]
    said = [begins(OTHER), begins(*history), StepResult([OTHER]), DONE]
    drawn = ["a", "hello  there", "it is 2", "42"]
    generation, _ = played("qwen3", drawn, said)
    trajectory, episode = generation.builder.finish("stop"), generation.episode
    assert episode is not None
    if is_cut_off:
        del episode.turns[-1]
    decode = partial(chat_tokenizer("qwen3").decode, skip_special_tokens=True)
    exchange = exchange_of(trajectory, episode, decode)
    assert exchange.conversations == [
        [QUESTION, policys("a")],
        [OTHER, policys("hello  there")],
        [*history, policys("it is 2"), OTHER, policys("42")],
    ]
    assert [turn["context"] for turn in exchange.turns] == [0, 1, 1, 2, 2, 2, 2]
    assert [turn["content"] for turn in exchange.turns[::2]] == drawn
    assert {turn["role"] for turn in exchange.turns[1::2]} == {"environment"}
    assert "hello there" in exchange.turns[1]["content"]
    assert exchange.response == "".join(drawn)


class Branching(Counting):
    """Every answer begins another conversation, of one token."""

    async def step(self, action: Action) -> Any:
        return (*await super().step(action), {}, True)


class Wavering(Branching):
    """Says the same, as another conversation or as more of the same one."""

    turns = 0

    async def step(self, action: Action) -> Any:
        type(self).turns += 1
        return (*(await super().step(action))[:4], self.turns < 3)


async def held_after_two_contexts(harness: GeneratorHarness) -> None:
    await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
    await until(lambda: harness.engine.requests)
    harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
    await until(lambda: len(harness.engine.requests) == 2)
    request = harness.engine.requests[1]
    assert (request.prompt_tokens.tolist(), len(request.prefix_tokens)) == ([51], 0)
    harness.engine.feed("train-5.1+1", [5, 9], 1, end="stop")
    await until(harness.finished)


async def rejected_in_the_second(harness: GeneratorHarness) -> None:
    """Verification accepts the first context, and draws 6 in the place of 5."""
    requests = harness.engine.requests
    await harness.send(verify())
    await until(lambda: len(requests) == 3)
    harness.engine.feed(requests[2].request_id, [3, 4], 2, origins=[KEPT, KEPT], end="stop")
    await until(lambda: len(requests) == 4)
    assert [one.kept and one.kept.tokens.tolist() for one in requests[2:]] == [[3, 4], [5, 9]]
    harness.engine.feed(requests[3].request_id, [6], 2, origins=[NEW], end="stop")


def test_a_rejection_in_a_later_conversation_has_the_environment_go_back_to_it() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_contexts(harness)
        del env.log[:]
        await rejected_in_the_second(harness)
        await until(lambda: len(harness.engine.requests) == 5)
        assert env.log == ["reset ?", "3 4", "6"]
        request = harness.engine.requests[4]
        assert (request.prompt_tokens.tolist(), request.kept) == ([52], None)
        harness.engine.feed(request.request_id, [9], 2, end="stop")
        await until(lambda: len(harness.finished()) == 2)
        (held,) = harness.process.samples.held.values()
        assert held.trajectory.tokens.tolist() == [3, 4, 51, 6, 52, 9]
        assert held.trajectory.contexts == (2, 4)

    run(Branching, scenario)


def test_a_conversation_that_is_begun_once_and_continued_once_is_the_environments_failure() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_contexts(harness)
        await rejected_in_the_second(harness)
        await until(lambda: len(harness.finished()) == 2)
        failed = harness.generator.rewards.counts.failed
        assert failed == {"environment": {"not_deterministic": 1}}

    run(Wavering, scenario, rewards={"on_error": "zero"})


def test_what_is_found_late_about_a_template_is_no_fault_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The template counts messages, from more on than are tried at the start.

    Turn 3 is answered before that is found at turn 4. Then the environment is made again.
    """
    tokenizer, end = chat_tokenizer("custom"), "{%- if add_generation_prompt"
    counted = "{%- if messages | length > 5 %}{{ messages | length }}{% endif -%}"
    monkeypatch.setattr(
        tokenizer, "chat_template", tokenizer.chat_template.replace(end, counted + end)
    )
    episodes, renderer, pool = episodes_of("custom", [StepResult("no")] * 7)

    async def scenario() -> None:
        generation = await begun(episodes)
        for _ in range(5):
            await take("hello", "custom", generation, episodes)
        text = tokenizer.decode(generation.builder.tokens())
        answers = text.split("hello<end>")[1:]
        assert [one.strip() for one in answers] == 3 * ["<user>no<end><assistant>"] + [
            "<user>no<end>9<assistant>", "<user>no<end>11<assistant>"
        ]  # fmt: skip
        assert any("renders the whole conversation" in one for one in renderer.findings)
        pool.lost = True
        await take("hello", "custom", generation, episodes)
        assert len(pool.turns) == 6

        resumed = await begun(episodes)  # the episode knows the tokens only
        resumed.builder = generation.builder
        await take("hello", "custom", resumed, episodes)
        again = tokenizer.decode(resumed.builder.tokens())
        assert again.startswith(text)
        assert len(pool.turns) == 7

    asyncio.run(scenario())
    assert renderer.findings

"""Samples of two turns through the generator: the distribution of all tokens, by chi-square.

The generator's own code, an engine's core and sessions of environments in this process. A policy
changes in the middle of turns, samples are verified where they are, finished ones too, and their
environments go back: by replay, by restoring a state, or by starting over. The history of one kind
is rewritten: its second turn is a context of its own. Whole responses must follow the last policy,
enumerated with the random tool of `two_turns`. `false_alarms` says which p-value fails; seeds are
fixed. Mutants must be detected: by such a p-value, or a response that cannot be.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from enumerated_policies import core_of, is_detected, p_value, policies, slots_with
from enumerated_tools import (
    PROMPT,
    Deterministic,
    Failing,
    Limited,
    Recorded,
    Restoring,
    Rewriting,
    Slow,
    Tool,
    fails,
)
from false_alarms import Claims
from local_environments import episodes_of
from new_weights import swap_weights
from two_turns import (
    FRAME,
    LENGTH,
    STOPS,
    Part,
    Probabilities,
    answer_and_chance,
    enumerate_responses,
    enumerate_rewritten,
    likelier,
    rewritten,
    summed,
)

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.engine.torch.core import DecodeCore
from asyncrl.environments import protocol
from asyncrl.environments.workers.worker import Session
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_state import HeldSample, SampleGeneration
from asyncrl.generator.turns.conversation import Episode
from asyncrl.generator.turns.environment_turns import Episodes, StartOver
from asyncrl.rollout.contexts import Verification
from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory
from asyncrl.wire.messages.data import encode_tokens
from asyncrl.wire.messages.to_generator import PromptPayload

pytestmark = [pytest.mark.slow, pytest.mark.statistics]

SAMPLES = 500
"""Of a kind of environment there are as many as its mutants need."""
CLAIMS = Claims(__file__)
FIRST, MIDDLE, LAST = 0, 1, -1
"""Policies of `changing()`."""
KEPT = ("tokens", "logprobs", "topk_ids", "topk_logprobs", "noise_seeds")
SAMPLING = SamplingParams(LENGTH, top_k_logprobs=3, stop_tokens=STOPS)


class CoreEngine:
    """The torch engine's core, stepped by hand."""

    def __init__(self, core: DecodeCore) -> None:
        self.core, self.end_session = core, core.end_session
        self._chunks: dict[str, asyncio.Queue[TokenChunk]] = {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        queue = self._chunks[request.request_id] = asyncio.Queue()
        self.core.add(request)
        while True:
            yield (chunk := await queue.get())
            if chunk.finish_reason is not None:
                return

    def interrupt(self, name: str) -> None:
        self._give(self.core.interrupt(name))

    def install(self, model: torch.nn.Module) -> None:
        weights, version = model.state_dict().items(), self.core.policy_version + 1
        self._give(swap_weights(self.core, weights, version))

    def step(self) -> None:
        if self.core.has_work:
            self._give(self.core.step())

    def _give(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            self._chunks[chunk.request_id].put_nowait(chunk)


class Rewards:
    def start(self, *_: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()


def of_held(held: HeldSample, payload: PromptPayload, seed: int, version: int) -> SampleGeneration:
    """The verification of a finished sample, as `Samples.verify` begins it."""
    return SampleGeneration(
        held.trajectory.id,
        payload,
        seed,
        tokens_to_verify=held.trajectory.kept(),
        min_version=version,
        previously_held=held,
        episode=held.episode,
    )


def waits(generation: SampleGeneration) -> bool:
    return generation.waits_for_environment


async def all_that_follows(engine: CoreEngine, samples: dict[int, SampleGeneration]) -> None:
    """A step of the engine, what environments answer to it, and the next requests."""
    engine.step()
    Slow.tick()
    for turn in range(10_000):
        await asyncio.sleep(0)
        if turn > 12 and sum(map(waits, samples.values())) == Slow.busy:
            return
    raise AssertionError("environments did not answer")


async def whole_loop(
    path: str, environment: type[Tool], models: list[torch.nn.Module], *, count: int, steps: int
) -> list[Trajectory]:
    """Trajectories after all changes of the policy, each verified to the last one.

    Args:
        path: of a model.
        environment: of all samples.
        models: the policies.
        count: of samples.
        steps: of the engine before each change.
    """
    cache = RolloutCache(CacheConfig(max_bytes=1 << 22, min_match=1, min_probability=0.0))
    wide = {"max_step_tokens": 2000, "max_prefill_tokens": 2000, "chunk_tokens": 2}
    core = core_of(slots_with(path, models[0], slots=300), cache, top_k=3, **wide)
    engine = CoreEngine(core)
    errors = {"on_error": environment.on_error}
    episodes, _ = episodes_of(
        environment,
        max_tokens=environment.room,
        sessions=4096,
        rewards=errors,
        max_turn_tokens=environment.turn_limit,
    )
    sampling = replace(SAMPLING, max_tokens=environment.room)
    generator = SampleGenerator(engine, Rewards(), sampling, episodes=episodes)  # type: ignore[arg-type]
    payload = PromptPayload("p", encode_tokens(PROMPT), {"prompt": "?"})
    tasks: dict[int, asyncio.Task[HeldSample]] = {}
    samples: dict[int, SampleGeneration] = {}

    async def step() -> None:
        await all_that_follows(engine, samples)

    def start(number: int, generation: SampleGeneration) -> None:
        samples[number] = generation
        tasks[number] = asyncio.create_task(generator.generate(generation))

    Tool.made.clear()
    for number in range(count):
        sample = SampleId(number // 8, number % 8)
        start(number, SampleGeneration(sample, payload, number, priority=1))
    for version, model in enumerate(models[1:], 1):
        for _ in range(steps):
            await step()
        engine.install(model)
        await step()  # some samples go on under the new policy before they are verified
        for number, task in list(tasks.items()):
            seed = version * 10**6 + number
            if task.done():
                start(number, of_held(task.result(), payload, seed, version))
            elif samples[number].request_verification(seed, version):
                generator.interrupt(samples[number])
    async with asyncio.timeout(300):
        while not all(task.done() for task in tasks.values()):
            await step()
    assert all(
        task.result().trajectory.oldest_version == len(models) - 1 for task in tasks.values()
    )
    print(environment.__name__, generator.environment, generator.tokens)
    return [task.result().trajectory for task in tasks.values()]


@pytest.fixture(scope="module", autouse=True)
def tables() -> Iterator[None]:
    """Responses are enumerated once for all tests, and are not kept for those of other files."""
    yield
    wanted.cache_clear()
    view.cache_clear()
    leaning.cache_clear()


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions call environments at once, so that a run is the same every time."""

    async def call(_: Session, method: Any, *args: Any) -> Any:
        result = method(*args)
        return await result if inspect.isawaitable(result) else result

    monkeypatch.setattr(Session, "_run", call)
    monkeypatch.setattr(protocol, "check_methods", lambda _: None)  # inspects each environment


def texts(trajectories: list[Trajectory]) -> list[tuple[int, ...]]:
    return [tuple(one.tokens.tolist()) for one in trajectories]


def generated(
    path: str, environment: type[Tool], models: list[torch.nn.Module], **sizes: int
) -> list[Trajectory]:
    torch.set_num_threads(1)
    return asyncio.run(whole_loop(path, environment, models, **sizes))


def changing() -> list[torch.nn.Module]:
    first, last = policies(0.5)
    return [first, policies(0.3)[1], last]


def wrong(
    path: str, environment: type[Tool], count: int, policy: int = LAST
) -> list[tuple[int, ...]]:
    """Finished samples of the first policy that another one has verified."""
    models = [changing()[place] for place in (FIRST, policy)]
    return texts(generated(path, environment, models, count=count, steps=250))


@cache
def wanted(policy: int, environment: type[Tool] = Recorded) -> Probabilities:
    """Of whole responses of the first policy or of the last one.

    Args:
        policy: its place in `changing()`.
        environment: environments that answer alike share a table (`answering`).
    """
    model = changing()[policy]

    def chances(contexts: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            ids = torch.from_numpy(contexts.astype(np.int64))
            rows: np.ndarray = torch.softmax(model(ids).logits[:, -1].double(), -1).numpy()
        return rows

    def after_the_prompt(responses: np.ndarray) -> np.ndarray:
        prompts = np.broadcast_to(PROMPT, (len(responses), len(PROMPT)))
        return chances(np.concatenate([prompts, responses], axis=1))

    if environment is Rewriting:
        return enumerate_rewritten(chances, tuple(PROMPT.tolist()), environment.room)
    if environment is Failing:
        return enumerate_responses(after_the_prompt, answered_at, fails)
    limit = environment.turn_limit
    return enumerate_responses(after_the_prompt, answered_at, turn_limit=limit)


def answering(environment: type[Tool]) -> type[Tool]:
    """An environment whose answers have the same chances."""
    return environment if environment in (Rewriting, Failing, Limited) else Recorded


@cache
def view(policy: int, environment: type[Tool], part: Part) -> Probabilities:
    """Of a part of each response. Takes what `wanted` takes."""
    whole = wanted(policy, environment)
    return whole if part is tuple else summed(whole, part)


def answered_at(length: int) -> bool:
    """An answer must leave room for another token."""
    return length + 2 < LENGTH


def summary(text: tuple[int, ...]) -> tuple[int, ...]:
    """Length and end of the first turn, the answer and the first token of the second turn."""
    ends = [place for place, token in enumerate(text) if token in STOPS]
    if not ends or not answered_at(ends[0] + 1):
        return (len(text),)
    return (ends[0], text[ends[0]], *text[ends[0] + 2 : ends[0] + 4])


def summary_of_rewritten(text: tuple[int, ...]) -> tuple[int, ...]:
    """As `summary`: the second turn's prompt stands between."""
    ends = [place for place, token in enumerate(text) if token in STOPS]
    if not ends or ends[0] == len(text) - 1:
        return (len(text),)
    at = ends[0] + len(rewritten(text[:1], (FRAME, 0), PROMPT.tolist()))
    return (ends[0], text[ends[0]], *text[at : at + 2])


def first_token(text: tuple[int, ...]) -> tuple[int, ...]:
    return text[:1]


@cache
def leaning(environment: type[Tool], policy: int) -> Part:
    """How much likelier a response is under a policy than under the first one. Few cells."""
    return likelier(wanted(policy, environment), wanted(FIRST, environment))


def parts_of(environment: type[Tool], policy: int = LAST) -> list[Part]:
    """Fewer cells show more."""
    whole = summary_of_rewritten if environment is Rewriting else summary
    return [whole, leaning(answering(environment), policy or LAST)]


def is_seen(
    found: list[tuple[int, ...]], environment: type[Tool] = Recorded, policy: int = LAST
) -> bool:
    """As a difference from a policy, by a part of responses."""
    kind = answering(environment)
    parts = [*parts_of(environment, policy), answer_and_chance, first_token]
    views = [(list(map(part, found)), view(policy, kind, part)) for part in parts]
    print(*(f"p = {p_value(*view):.3g}" for view in views))
    return any(is_detected(*view) for view in views)


@pytest.mark.parametrize("environment", [Slow, Deterministic, Failing, Tool, Rewriting, Limited])
def test_turns_through_the_generator_follow_the_last_policy(
    tiny_qwen3: str, environment: type[Tool]
) -> None:
    count = 2 * SAMPLES if environment is Failing else SAMPLES
    trajectories = generated(tiny_qwen3, environment, changing(), count=count, steps=25)
    found = texts(trajectories)
    for part in (*parts_of(environment), tuple):
        p = p_value(list(map(part, found)), view(LAST, answering(environment), part))
        print(f"p = {p:.3g}")
        assert CLAIMS.fit(p)
    assert is_seen(found, environment, FIRST)
    # Otherwise the assertions above show little.
    provenance = np.concatenate([one.provenance for one in trajectories])
    assert ((provenance == Provenance.VERIFIED).sum() > count / 3) == (environment is not Tool)
    assert (provenance == Provenance.OBSERVED).sum() > count / 2
    contexts = sum(len(one.contexts) for one in trajectories)
    assert (contexts > count / 2) == (environment is Rewriting)


def test_asking_again_whoever_has_not_answered_yet_is_detected(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_due = property(lambda self: self.pending_verification is not None)
    monkeypatch.setattr(SampleGeneration, "will_start_over", is_due)
    models = policies(0.5)
    found = generated(tiny_qwen3, Slow, [models[0], *models], count=2 * SAMPLES, steps=6)
    answers = list(map(answer_and_chance, texts(found)))
    assert is_detected(answers, view(LAST, answering(Slow), answer_and_chance))


def test_an_answer_that_is_kept_for_another_turn_is_detected(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_answered = Episode.keep_answered

    def forgetful(self: Episode, actions: Any) -> int:
        pairs = zip(self.turns, actions, strict=False)
        self.turns = [replace(turn, action=action) for turn, action in pairs]
        return keep_answered(self, actions)

    monkeypatch.setattr(Episode, "keep_answered", forgetful)
    assert is_seen(wrong(tiny_qwen3, Recorded, count=2 * SAMPLES))


def test_starting_over_only_after_a_rejection_is_detected(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def starts_over(*_: Any) -> None:
        raise StartOver

    monkeypatch.setattr(Episodes, "_go_back", starts_over)
    found = wrong(tiny_qwen3, Restoring, 6 * SAMPLES, MIDDLE)
    assert is_seen(found, policy=MIDDLE)


def test_starting_over_where_a_failed_tool_must_go_back_is_detected(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "_continues", lambda *_: False)
    assert is_seen(wrong(tiny_qwen3, Failing, count=4 * SAMPLES), Failing)


def test_a_second_context_that_is_not_verified_is_detected(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_next = Verification.begin_next

    def trusting(self: Verification) -> bool:
        if not begin_next(self):
            return False
        rest = self.kept.part(len(self.builder), len(self.kept))
        self.builder.append(
            **{name: getattr(rest, name) for name in KEPT},
            provenance=np.full(len(rest), Provenance.VERIFIED, np.uint8),
            policy_version=self.builder.finish("abort").segments[-1].policy_version,
        )
        return False

    monkeypatch.setattr(Verification, "begin_next", trusting)
    assert is_seen(wrong(tiny_qwen3, Rewriting, count=SAMPLES), Rewriting)

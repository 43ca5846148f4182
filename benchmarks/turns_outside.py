"""What a turn costs outside the engine, when many came before it; a part of `benchmarks.turns`.

A sample plays against a real environment, in its worker process, through a generator's own code:
`SampleGenerator`, `Episodes`, the chat template's tokens. In place of the engine stands one that
has all tokens of a turn at once. So what is measured is what every turn costs besides its tokens:
the request, the chunks, the split into turns, the call of the environment, the tokens around its
answer. Then the finished sample is verified, and every token is accepted.

CPU seconds of the generator's process, since a loaded machine disturbs them least; `wall` is what
passes meanwhile, the worker's work included.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np

from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk, provenance_of
from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.rendering import TurnRenderer
from asyncrl.environments.translation import Translation
from asyncrl.environments.workers.pool import EnvironmentPool
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_state import HeldSample, SampleGeneration
from asyncrl.generator.turns.environment_turns import Episodes
from asyncrl.rewards.config import RewardConfig
from asyncrl.rollout.trajectory import Provenance, SampleId
from asyncrl.tasks.builtin.tokenizer import builtin_tokenizer
from asyncrl.wire.messages.frames import digest_of, encode_tokens, encode_trajectory
from asyncrl.wire.messages.to_generator import PromptPayload

TOKENS = 16
"""Of a turn, its stop token included."""
K = 64
"""Of the lists that come with each token, as by default."""
_MAX_TOKENS = 1 << 16


class ReadyEngine:
    """Has all tokens of a turn at once, and accepts all that it is to verify."""

    def __init__(self, turn: list[int]) -> None:
        self._turn = np.array(turn, np.int32)
        self.clocks: list[tuple[float, float]] = []
        """CPU and wall seconds, when each request came."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The turn in two chunks, as from an engine; kept tokens first."""
        self.clocks.append((time.process_time(), time.perf_counter()))
        if request.kept is not None:
            kept = request.kept
            origins = provenance_of(kept, len(kept))
            yield _chunk(request, kept.tokens, origins, version=1, ended=True)
            return
        drawn = np.full(TOKENS, Provenance.SAMPLED, np.uint8)
        yield _chunk(request, self._turn[:1], drawn[:1])
        yield _chunk(request, self._turn[1:], drawn[1:], ended=True)

    def end_session(self, session: str) -> None:
        """Nothing is kept."""


def _chunk(
    request: GenerateRequest, tokens: Any, provenance: Any, *, version: int = 0, ended: bool = False
) -> TokenChunk:
    n = len(tokens)
    return TokenChunk(
        request.request_id,
        tokens,
        np.full(n, -1.0, np.float32),
        np.zeros((n, K), np.int32),
        np.full((n, K), -5.0, np.float32),
        np.zeros(n, np.uint64),
        provenance,
        version,
        "stop" if ended else None,
    )


class _NoRewards:
    """Rewards are no part of a turn."""

    def start(self, *_: Any) -> Any:
        return asyncio.get_running_loop().create_future()


class Played(NamedTuple):
    turns: list[tuple[float, float]]
    """CPU and wall seconds of each turn but the last."""
    verification: float
    """CPU seconds of its verification, in which every token is accepted."""
    encoding: float
    """CPU seconds of encoding and digesting it, as a finished sample is."""


async def measure_outside(early: int, late: int, samples: int) -> dict[str, float]:
    """Milliseconds of turns around an early and a late one; a turn's share of what follows them."""
    environment = EnvironmentConfig(name="guessing", args={"guesses": 1 << 20})
    pool = EnvironmentPool(environment, RewardConfig(functions=()))
    await pool.start()
    try:
        shorts = [await _play(pool, early, number) for number in range(samples)]
        longs = [await _play(pool, late + 8, number) for number in range(samples)]
    finally:
        await pool.close()
    out = {}
    for turn, length, played in ((early, early, shorts), (late, late + 8, longs)):
        near = [seconds for one in longs for seconds in one.turns[turn - 4 : turn + 4]]
        cpu, wall = (1000 * statistics.median(column) for column in zip(*near, strict=True))
        verification = statistics.median(one.verification for one in played)
        encoding = statistics.median(one.encoding for one in played)
        out |= {
            f"turn_{turn}_cpu_ms": cpu,
            f"turn_{turn}_wall_ms": wall,
            f"verification_of_{turn}_cpu_ms_per_turn": 1000 * verification / length,
            f"encoding_of_{turn}_cpu_ms_per_turn": 1000 * encoding / length,
        }
    return out


async def _play(pool: EnvironmentPool, turns: int, number: int) -> Played:
    """Generate a sample of so many turns, and verify it."""
    tokenizer = builtin_tokenizer()
    stop = tokenizer.eos_token_id
    said = tokenizer("what is to find").input_ids
    engine = ReadyEngine([*(said * TOKENS)[: TOKENS - 1], stop])
    pool.config = pool.config.model_copy(update={"max_turns": turns})
    translation = Translation(
        TurnRenderer(tokenizer, stop_tokens=(stop,)),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        len(tokenizer),
        max_observation_tokens=256,
    )
    episodes = Episodes(pool, translation, max_tokens=_MAX_TOKENS, max_model_len=2 * _MAX_TOKENS)
    rewards: Any = _NoRewards()
    served: Any = engine
    generator = SampleGenerator(served, rewards, SamplingParams(_MAX_TOKENS), episodes=episodes)
    prompt = PromptPayload("p", encode_tokens(np.array([1, 2], np.int32)), {"prompt": "guess"})
    sample = SampleId(number, turns)
    held = await generator.generate(SampleGeneration(sample, prompt, seed=number))
    seconds = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in itertools.pairwise(engine.clocks)
    ]
    began = time.process_time()
    again = await generator.generate(_verification(held, prompt, number))
    verification = time.process_time() - began
    assert np.array_equal(again.trajectory.tokens, held.trajectory.tokens)
    began = time.process_time()
    digest_of(encode_trajectory(held.trajectory, reward=0.0, step=0))
    encoding = time.process_time() - began
    again.close()
    return Played(seconds, verification, encoding)


def _verification(held: HeldSample, prompt: PromptPayload, number: int) -> SampleGeneration:
    return SampleGeneration(
        held.trajectory.id,
        prompt,
        number + 1000,
        tokens_to_verify=held.trajectory.kept(),
        min_version=1,
        previously_held=held,
        episode=held.episode,
    )

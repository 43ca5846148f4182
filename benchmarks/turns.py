"""Does a turn cost more when many came before it?

    python -m benchmarks.turns [--quick] [--part torch] [--part outside] [--json FILE]

A turn is 16 tokens of the policy and 16 observed ones, a request with all tokens so far as its
prefix. Contestants are three responses that take turns on one engine:

    early     at its 8th turn, at about 250 tokens
    late      at its 128th turn, at about 4,000 tokens
    control   at its 8th turn, with a first prompt so long that it has as many tokens as `late`

Ratios of median seconds: `turn_cost_growth` late / control (at most 1.1), `context_growth` control
/ early (`decode_context_growth` of the 15 tokens after the first), `whole_growth` late / early. A
late turn without a session is fed as a whole by the embedded engine; others have prefix caches.

Outside the engine: CPU seconds of a generator's own code (`SampleGenerator`, `Episodes`, the chat
template's tokens) with a real environment and an engine that has all tokens of a turn at once; then
the sample is verified, and every token accepted.
"""

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import (
    Engine,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
    provenance_of,
)
from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.rendering import TurnRenderer
from asyncrl.environments.translation import Translation
from asyncrl.environments.workers.pool import EnvironmentPool
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_state import HeldSample, SampleGeneration
from asyncrl.generator.turns.environment_turns import Episodes
from asyncrl.rewards.config import RewardConfig
from asyncrl.rollout.trajectory import Provenance, SampleId, TrajectoryBuilder
from asyncrl.tasks.builtin.tokenizer import builtin_tokenizer
from asyncrl.wire.messages.data import digest_of, encode_tokens, encode_trajectory
from asyncrl.wire.messages.to_generator import PromptPayload
from benchmarks.harness import parser_of, pick, report, sglang_python, table
from benchmarks.tiny_models import qwen3

TURNS_OUTSIDE_K = 64
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
        np.zeros((n, TURNS_OUTSIDE_K), np.int32),
        np.full((n, TURNS_OUTSIDE_K), -5.0, np.float32),
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


KINDS = ("torch", "vllm", "sglang")
OUTSIDE = "outside"
EARLY, LATE = 8, 128
TOKENS = 16
"""Of a turn, and of what it is answered with."""
PROMPT = 16
VOCABULARY = 64
MAX_LENGTH = PROMPT + 2 * TOKENS * (LATE + 16)
K = 8


def save_model(path: Path, wide: int = 8192) -> None:
    """A random Qwen3 of 13 million parameters, with small heads and wide layers."""
    settings = {"intermediate_size": wide, "num_attention_heads": 2, "num_key_value_heads": 1}
    lengths = {"head_dim": 32, "max_position_embeddings": MAX_LENGTH}
    qwen3(VOCABULARY, 256, 2, **settings, **lengths).save_pretrained(path)


def engine_of(kind: str, path: str) -> Engine:
    """An engine of this kind, not started. Nothing is drafted."""
    common: dict[str, Any] = {
        "kind": kind,
        "slots": 8,
        "max_model_len": MAX_LENGTH,
        "threads": 1,
        "top_k_logprobs": K,
    }
    cache = CacheConfig(enabled=False)
    if kind == "vllm":
        from asyncrl.engine.vllm.client.engine import VllmEngine
        from asyncrl.engine.vllm.config import VllmConfig

        config = EngineConfig(**common, vllm=VllmConfig(kv_cache_gib=0.25))
        return VllmEngine(config, path, cache_config=cache, seed=1)
    if kind == "sglang":
        from asyncrl.engine.sglang.client.engine import SglangEngine
        from asyncrl.engine.sglang.config import SglangConfig

        settings = SglangConfig(python=sglang_python(), kv_cache_gib=0.1)
        config = EngineConfig(**common, sglang=settings)
        return SglangEngine(config, path, cache_config=cache, seed=1)
    from asyncrl.engine.torch.engine import TorchEngine

    return TorchEngine(EngineConfig(**common), path, source=None, max_draft_tokens=0, seed=1)


class Response:
    def __init__(self, engine: Engine, number: int, prompt: int = PROMPT) -> None:
        self._engine = engine
        self._number = number
        self.session = f"response {number}"
        """"": the engine is not told that its turns belong together."""
        self._rng = np.random.default_rng(number)
        tokens = self._rng.integers(0, VOCABULARY, prompt).astype(np.int32)
        self._builder = TrajectoryBuilder(SampleId(number, 0), "", tokens)
        self.turns = 0

    async def play(self) -> tuple[float, float]:
        """A turn and its answer: the seconds to the first token, and to the next answer."""
        said = self._rng.integers(0, VOCABULARY, TOKENS).astype(np.int32)
        began = time.perf_counter()
        builder = self._builder
        request = GenerateRequest(
            f"{self._number}.{self.turns}",
            cache_key="",
            prompt_tokens=builder.prompt_tokens,
            prefix_tokens=builder.tokens(),
            turn_start=builder.turn_start,
            sampling=SamplingParams(
                len(builder) + TOKENS, top_k_logprobs=K, seed=self.turns + 1000 * self._number
            ),
            session=self.session,
        )
        first = 0.0
        async for chunk in self._engine.generate(request):
            first = first or time.perf_counter() - began
            chunk.append_to(builder)
        builder.append_observed(said)
        self.turns += 1
        return first, time.perf_counter() - began


async def alternate(engine: Engine, rounds: int, late_turn: int) -> dict[str, float]:
    """Milliseconds of turns around the early and the late one, and of the control's."""
    names = "8", "128", "control", "128_without_session"
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for round_ in range(rounds):
        more = 2 * TOKENS * (late_turn - EARLY)
        responses = [
            Response(engine, 3 * round_ + number, prompt)
            for number, prompt in enumerate((PROMPT, PROMPT, PROMPT + more))
        ]
        for one, turn in zip(responses, (EARLY, late_turn, EARLY), strict=True):
            while one.turns < turn - 4:
                await one.play()
        for _ in range(8):
            for name, one in zip(names, responses, strict=False):
                seconds[name].append(await one.play())
        late = responses[1]
        late.session = ""
        seconds[names[-1]] += [await late.play() for _ in range(2)]
    out = {}
    for name, turns in seconds.items():
        first, whole = (statistics.median(column) for column in zip(*turns, strict=True))
        out |= {f"turn_{name}_ms": 1000 * whole, f"turn_{name}_first_token_ms": 1000 * first}
    return out


async def measure(kind: str, path: str, rounds: int, late: int) -> dict[str, float]:
    engine = engine_of(kind, path)
    await engine.start()
    try:
        return await alternate(engine, rounds, late)
    finally:
        await engine.close()


def run(kinds: Sequence[str], rounds: int, *, smoke: bool) -> dict[str, dict[str, float]]:
    """All numbers, by engine; engines that cannot be started are left out and named."""
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), *([256] if smoke else []))
        late = 2 * EARLY if smoke else LATE
        for kind in kinds:
            if kind == "vllm" and util.find_spec("vllm") is None:
                print("vllm is left out: it is not installed")
                continue
            try:
                out[kind] = asyncio.run(measure(kind, folder, rounds, late))
            except (EngineError, ImportError, OSError) as error:
                print(f"{kind} is left out: {error}")
    return out


def ratios_of(kind: str, found: dict[str, float]) -> dict[str, float]:
    """The ratios that the module names, of one part."""
    if kind == OUTSIDE:
        late, early = found["turn_128_cpu_ms"], found["turn_8_cpu_ms"]
        return {"outside_turn_cost_growth": late / early}
    early, late, control = (found[f"turn_{turn}_ms"] for turn in (EARLY, LATE, "control"))
    ratios = {
        "turn_cost_growth": late / control,
        "context_growth": control / early,
        "whole_growth": late / early,
        "decode_context_growth": _decoding(found, "control") / _decoding(found, EARLY),
    }
    return {f"{kind}_{name}": ratio for name, ratio in ratios.items()}


def _decoding(found: dict[str, float], turn: str | int) -> float:
    """Milliseconds of the tokens after the first one."""
    return found[f"turn_{turn}_ms"] - found[f"turn_{turn}_first_token_ms"]


def table_of_engines(results: dict[str, dict[str, float]], ratios: dict[str, float]) -> Table:
    measured = ("turn_8", "turn_control", "turn_128", "turn_128_without_session")
    derived = ("turn_cost_growth", "context_growth", "decode_context_growth", "whole_growth")
    return table(
        "A turn of 16 tokens and its answer of 16, milliseconds",
        ("engine", *measured, *derived),
        (
            (
                kind,
                *(found[f"{key}_ms"] for key in measured),
                *(ratios[f"{kind}_{key}"] for key in derived),
            )
            for kind, found in results.items()
        ),
    )


def table_outside(found: dict[str, float]) -> Table:
    rows = {
        "a turn, CPU of the generator": "turn_{}_cpu_ms",
        "a turn, wall, environment included": "turn_{}_wall_ms",
        "verification of all, CPU": "verification_of_{}_cpu_ms_per_turn",
        "encoding of all, CPU": "encoding_of_{}_cpu_ms_per_turn",
    }
    return table(
        "Outside the engine, milliseconds a turn",
        "part,8 turns,128 turns",
        (
            (name, *(found[key.format(turn)] for turn in (EARLY, LATE)))
            for name, key in rows.items()
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "fewer responses")
    parts = (*KINDS, OUTSIDE)
    parser.add_argument("--part", action="append", choices=parts, help="an engine, or outside it")
    options = parser.parse_args(arguments)
    chosen = options.part or ((KINDS[0], OUTSIDE) if options.smoke else parts)
    rounds, samples = pick(options, (6, 48), (2, 16), (1, 1))
    results = run([one for one in chosen if one != OUTSIDE], rounds, smoke=options.smoke)
    raw: dict[str, Any] = {"engines": results}
    ratios: dict[str, float] = {}
    for kind, found in results.items():
        ratios |= ratios_of(kind, found)
    shown = [table_of_engines(results, ratios)] if results else []
    if OUTSIDE in chosen:
        raw[OUTSIDE] = asyncio.run(measure_outside(EARLY, LATE, samples))
        ratios |= ratios_of(OUTSIDE, raw[OUTSIDE])
        shown.append(table_outside(raw[OUTSIDE]))
    report(options, "turns", raw, ratios, *shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())

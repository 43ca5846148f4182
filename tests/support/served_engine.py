"""Real engines in tests: small enumerable models, an engine on a loop, and reference results."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from new_weights import give_weights
from scipy.stats import chi2

from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.engine.remote.client.core import Core, Meter
from asyncrl.engine.remote.client.engine import RemoteEngine
from asyncrl.rollout.trajectory import KeptTokens
from benchmarks.tiny_models import random_qwen3

T = TypeVar("T")

VOCAB = 8
TOP_K = 2
"""Of the lists: some 30% of what is drawn lies outside."""
MAX_LEN = 400
SLOTS = 32
"""The time of a step hardly depends on its rows: statistics have half the steps of 16."""
PROMPT = np.array([1, 2, 3], np.int32)
SAMPLES = 700
"""Kept responses that are verified, of each way of sampling (`verified`).

In 20 simulations a missing residual had p < 1e-10.
"""
DEADLINE, START_DEADLINE = 120.0, 400.0
WAYS: list[dict[str, float]] = [
    {"temperature": 0.7, "top_p": 1.0},
    {"temperature": 1.4, "top_k": 6, "top_p": 0.85, "min_p": 0.25},
]


def make_model(seed: int) -> Any:
    """A random Qwen3 of VOCAB tokens."""
    return random_qwen3(seed, VOCAB, max_length=MAX_LEN, embedding_scale=0.25, weight_scale=0.3)


@dataclass
class Served:
    """The engine, its loop, and the two policies it is given."""

    engine: RemoteEngine
    runner: asyncio.Runner
    old: Any
    new: Any
    block: int
    """Tokens whose KV is shared as a whole."""
    processes: Callable[[], list[int]]
    """Ids of the core's processes."""
    verified: dict[tuple[tuple[str, float], ...], Verified] = field(default_factory=dict)
    """By way of sampling (`verified`)."""

    @property
    def core(self) -> Core:
        assert self.engine._parts is not None
        return self.engine._parts.core

    @property
    def meter(self) -> Meter:
        return self.core.meter

    def whole_blocks(self, tokens: int) -> int:
        """The tokens of so many that lie in whole blocks."""
        return tokens // self.block * self.block

    def call(self, awaitable: Awaitable[T], seconds: float = DEADLINE) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(awaitable, seconds)

        return self.runner.run(bounded())

    def install(self, model: Any) -> int:
        version = self.engine.stats().policy_version + 1
        self.call(give_weights(self.engine, model.state_dict().items(), version))
        return version


def ask(name: str = "r", **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "top_k_logprobs": TOP_K, "seed": None, "stop_tokens": (),
        "stop_rule": None,
    }  # fmt: skip
    sampling = {key: changes.pop(key, value) for key, value in fields.items()}
    request: dict[str, Any] = {"cache_key": "", "prompt_tokens": PROMPT} | changes
    return GenerateRequest(request_id=name, sampling=SamplingParams(**sampling), **request)


async def collect(engine: RemoteEngine, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


async def collect_all(
    engine: RemoteEngine, requests: list[GenerateRequest]
) -> list[list[TokenChunk]]:
    """All are given to the engine in order, few at a time: what waits costs an engine each step."""
    at_once = asyncio.Semaphore(4 * SLOTS)

    async def one(request: GenerateRequest) -> list[TokenChunk]:
        async with at_once:
            return await collect(engine, request)

    return list(await asyncio.gather(*map(one, requests)))


def tokens_of(chunks: list[TokenChunk]) -> np.ndarray:
    return np.concatenate([chunk.tokens for chunk in chunks])


def noise_seeds_of(chunks: Sequence[TokenChunk]) -> np.ndarray:
    return np.concatenate([chunk.noise_seeds for chunk in chunks])


def logprobs_of(chunks: list[TokenChunk]) -> np.ndarray:
    return np.concatenate([chunk.logprobs for chunk in chunks])


def provenance_of(chunks: Sequence[TokenChunk]) -> np.ndarray:
    return np.concatenate([chunk.provenance for chunk in chunks])


def drift(served: Served, n: int, **how: float) -> list[GenerateRequest]:
    """Requests whose kept tokens, 1 to 4 of 4, the old policy drew; the new one is installed."""
    served.install(served.old)
    drawing = [ask(f"old{i}", cache_key="drift", seed=i, **how) for i in range(n)]
    old = served.call(collect_all(served.engine, drawing))
    served.install(served.new)
    return [
        ask(
            f"new{i}",
            cache_key="drift",
            seed=(1 << 40) + i,
            kept=kept_of(c, slice(1 + i % 4)),
            **how,
        )
        for i, c in enumerate(old)
    ]


Verified = tuple[list[GenerateRequest], list[list[TokenChunk]]]
"""Requests of `drift`, and the responses of the new policy."""


def verified(served: Served, **how: float) -> Verified:
    """Return the one sample of `drift` that all statements about a way of sampling judge.

    It is drawn for the first test that asks. Another policy may be installed afterwards.
    """
    way = tuple(sorted(how.items()))
    if way not in served.verified:
        requests = drift(served, SAMPLES, **how)
        served.verified[way] = requests, served.call(collect_all(served.engine, requests))
    return served.verified[way]


def kept_of(chunks: list[TokenChunk], part: slice = slice(None)) -> KeptTokens:
    """Part of a response, to be verified."""
    return KeptTokens(
        tokens_of(chunks)[part],
        logprobs_of(chunks)[part],
        np.concatenate([chunk.topk_ids for chunk in chunks])[part],
        np.concatenate([chunk.topk_logprobs for chunk in chunks])[part],
        noise_seeds_of(chunks)[part],
    )


@torch.no_grad()
def reference(
    model: Any,
    tokens: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: float = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """`[..., T, V]` log-probabilities of the token after each position, by a plain HF forward."""
    logits = model(torch.from_numpy(tokens.astype(np.int64))).logits.double() / temperature
    if top_k:
        edge = logits.topk(int(top_k), -1).values[..., -1:]
        logits = logits.masked_fill(logits < edge, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        out = ordered.cumsum(-1) - ordered >= top_p
        logits = logits.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf)
    best = logits.softmax(-1).amax(-1, keepdim=True)
    return logits.masked_fill(logits.softmax(-1) < min_p * best, -torch.inf).log_softmax(-1)


def drawn(model: Any, prompt: np.ndarray, tokens: np.ndarray, **how: float) -> np.ndarray:
    """`[n]` log-probability of each response token."""
    logprobs = reference(model, np.concatenate([prompt, tokens])[None], **how)[0]
    at = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
    return logprobs[at, torch.from_numpy(tokens.astype(np.int64))].numpy()


def enumerated(model: Any, length: int, **how: float) -> np.ndarray:
    """`[V ** length]` probability of each response, in lexicographic order.

    The model reads each beginning once, and no last token.
    """
    begun = torch.tensor(list(itertools.product(range(VOCAB), repeat=length - 1)))
    prompts = np.broadcast_to(PROMPT, (len(begun), len(PROMPT)))
    texts = np.concatenate([prompts, begun.numpy()], axis=1)
    logprobs = reference(model, texts, **how)[:, len(PROMPT) - 1 :]
    before = logprobs[:, :-1].gather(-1, begun[..., None])[..., 0].sum(-1)
    return (before[:, None] + logprobs[:, -1]).exp().flatten().numpy()


def chi_square(responses: np.ndarray, expected: np.ndarray) -> float:
    """p-value of `[N, length]` responses under probabilities as from `enumerated`."""
    cells = np.ravel_multi_index(tuple(responses.T), (VOCAB,) * responses.shape[1])
    counts = np.bincount(cells, minlength=len(expected)).astype(float)
    if counts[expected == 0].any():
        return 0.0
    want = expected * len(responses)
    # Rare responses share cells, with those that begin alike: each cell expects at least 8.
    rare = want < 8
    last = max(int(want[rare].sum() / 16) - 1, 0)
    group = np.minimum(np.cumsum(want[rare]) / 16, last).astype(np.int64)
    counts = np.concatenate([counts[~rare], np.bincount(group, counts[rare])])
    want = np.concatenate([want[~rare], np.bincount(group, want[rare])])
    if want[-1] < 8:
        counts, want = (np.append(one[:-2], one[-2:].sum()) for one in (counts, want))
    statistic = ((counts - want) ** 2 / want).sum()
    return float(chi2.sf(statistic, len(want) - 1))


@torch.no_grad()
def drawn_across(
    old: Any, new: Any, prompt: np.ndarray, tokens: np.ndarray, swap: int
) -> np.ndarray:
    """`[n]` log-probabilities when `tokens[:swap]` were drawn by `old` and the rest by `new`.

    The KV of a token is made by the step that draws the next one.
    """
    from transformers import DynamicCache

    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    known = len(prompt) + swap - 1
    cache = DynamicCache()
    first = old(ids[:, :known], past_key_values=cache).logits
    second = new(ids[:, known:], past_key_values=cache).logits
    logprobs = torch.cat([first, second], 1).double().log_softmax(-1)[0]
    at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return logprobs[at, ids[0, len(prompt) :]].numpy()

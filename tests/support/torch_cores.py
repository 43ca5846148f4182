"""Small `DecodeCore`s on tiny models, and what tests do with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from tiny_models import STOP

from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.engine.remote.worker.drafting import FixedBudget
from asyncrl.engine.torch.core import CoreSettings, DecodeCore
from asyncrl.engine.torch.model import SlotModel, load_model
from asyncrl.rollout.trajectory import IntArray, KeptTokens, Provenance

PROMPT = np.array([1, 2, 3], np.int32)
_SAMPLING = {field.name for field in fields(SamplingParams)}


def request(name: str, prompt: IntArray = PROMPT, **changes: Any) -> GenerateRequest:
    """At most 12 tokens; `changes` are fields of the request or of its sampling parameters."""
    sampling = {"max_tokens": 12, "stop_tokens": (STOP,), "top_k_logprobs": 4}
    sampling |= {name: changes.pop(name) for name in _SAMPLING & changes.keys()}
    return GenerateRequest(
        request_id=name,
        prompt_tokens=prompt,
        sampling=SamplingParams(**sampling),
        **({"cache_key": "p"} | changes),
    )


def mixed_requests(count: int = 12) -> list[GenerateRequest]:
    """Prompts of several lengths, half of them siblings, at three temperatures."""
    rng = np.random.default_rng(3)
    out = []
    for i in range(count):
        prompt = PROMPT if i % 2 else rng.integers(0, STOP, rng.integers(1, 9)).astype(np.int32)
        temperature = (1.0, 0.7, 1.4)[i % 3]
        out.append(request(f"r{i}", prompt, seed=i, temperature=temperature, cache_key=f"k{i % 2}"))
    return out


def load(
    path: str,
    *,
    slots: int = 4,
    max_len: int = 64,
    batch_invariant: bool = False,
    fused: bool = True,
) -> SlotModel:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    return load_model(
        path,
        slots=slots,
        max_len=max_len,
        device=cpu,
        dtype=torch.float32,
        batch_invariant=batch_invariant,
        fused=fused,
    )


def core_of(model: SlotModel, source: RolloutCache | None = None, **changes: Any) -> DecodeCore:
    """A core whose drafts never depend on how long steps took; `changes` are of its settings."""
    settings = replace(
        CoreSettings(
            max_step_tokens=32, max_draft_tokens=6, max_prefill_tokens=64, chunk_tokens=4, top_k=4
        ),
        **changes,
    )
    planner = FixedBudget(
        max_step_tokens=settings.max_step_tokens or 0, max_draft_tokens=settings.max_draft_tokens
    )
    return DecodeCore(model, settings, source, seed=7, planner=planner)


def run(core: DecodeCore, requests: Sequence[GenerateRequest] = ()) -> dict[str, list[TokenChunk]]:
    """Step until the core is idle; returns the chunks of each request, `requests` included."""
    out: dict[str, list[TokenChunk]] = defaultdict(list)
    for one in requests:
        core.add(one)
        out[one.request_id] = []
    for _ in range(10_000):
        if not core.has_work:
            return out
        for chunk in core.step():
            out[chunk.request_id].append(chunk)
        core.check()
    raise AssertionError("the core never became idle")


def joined(chunks: Sequence[TokenChunk], what: str) -> np.ndarray:
    """One field of all chunks, concatenated."""
    return np.concatenate([getattr(chunk, what) for chunk in chunks])


def tokens_of(chunks: Sequence[TokenChunk]) -> list[int]:
    return [int(token) for chunk in chunks for token in chunk.tokens]


def texts_of(chunks: dict[str, list[TokenChunk]]) -> dict[str, list[int]]:
    return {name: tokens_of(parts) for name, parts in chunks.items()}


def kept_of(chunks: Sequence[TokenChunk], **changes: Any) -> KeptTokens:
    """A response as a request may bring it to be verified."""
    names = ("tokens", "logprobs", "topk_ids", "topk_logprobs", "noise_seeds")
    return replace(KeptTokens(*(joined(chunks, name) for name in names)), **changes)


def first(kept: KeptTokens, size: int) -> KeptTokens:
    """The first `size` of kept tokens."""
    return KeptTokens(
        kept.tokens[:size],
        kept.logprobs[:size],
        kept.topk_ids[:size],
        kept.topk_logprobs[:size],
        kept.noise_seeds[:size],
    )


def hf_logprobs(
    module: torch.nn.Module, context: IntArray, response: Sequence[int], temperature: float = 1.0
) -> np.ndarray:
    """`[L, V]` at each response token, from one ordinary HF forward pass over the whole text."""
    ids = torch.tensor([[*context.tolist(), *response]])
    with torch.no_grad():
        logits = module(ids).logits[0, len(context) - 1 : -1]
    return (logits / temperature).log_softmax(-1).numpy()


def check_against_hf(
    module: torch.nn.Module, asked: GenerateRequest, chunks: Sequence[TokenChunk]
) -> None:
    """Every reported log-probability is that of one ordinary forward pass of `module`."""
    tokens, sampling = joined(chunks, "tokens"), asked.sampling
    context = np.concatenate([asked.prompt_tokens, asked.prefix_tokens])
    expected = hf_logprobs(module, context, tokens.tolist(), sampling.temperature)
    got = joined(chunks, "logprobs")
    np.testing.assert_allclose(got, expected[np.arange(len(tokens)), tokens], atol=1e-4)
    top = joined(chunks, "topk_logprobs")
    ids = joined(chunks, "topk_ids")
    np.testing.assert_allclose(np.take_along_axis(expected, ids, 1), top, atol=1e-4)
    # A verified token keeps its list, and so does the one drawn in the place of a rejected one.
    listed_now = joined(chunks, "provenance") != Provenance.VERIFIED
    if asked.kept is not None:
        listed_now[: len(asked.kept)] = False
    most_probable = -np.sort(-expected, axis=1)[:, : sampling.top_k_logprobs]
    np.testing.assert_allclose(top[listed_now], most_probable[listed_now], atol=1e-4)

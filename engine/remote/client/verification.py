"""Verification of kept tokens: reports what the worker decided, and continues after it.

The worker judges kept tokens in one prefill (`engine.remote.worker.scored`). The rest of the
response becomes an ordinary request with a longer prefix, whose prefill finds most of the KV that
the verification computed in the engine's prefix cache. The rejected tokens are its draft.

Accepted tokens carry the version that judged them, even if the weights change before the response
resumes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.drawing import noise_seeds
from engine.protocol import GenerateRequest, TokenChunk
from engine.remote.client.requests import Table
from engine.remote.extras import Outcome
from rollout.trajectory import FinishReason, IntArray, KeptTokens, Provenance, SeedArray


def after_verification(
    request: GenerateRequest, kept: KeptTokens, table: Table, seed: int, policy_version: int
) -> tuple[TokenChunk | None, GenerateRequest]:
    """What to report of the kept tokens of a request, and how it continues.

    Args:
        request: with its kept tokens, at least one.
        kept: those tokens.
        table: what the worker left of them.
        seed: of the request.
        policy_version: that judged them.

    Returns:
        The tokens to report, with the finish reason if they end the response (None: nothing was
        accepted or drawn), and the request that continues after them.
    """
    tokens = table.tokens
    provenance = np.where(table.outcomes == Outcome.KEPT, Provenance.VERIFIED, Provenance.SAMPLED)
    count, reason = _end(request, tokens)
    chunk = TokenChunk(
        request_id=request.request_id,
        tokens=tokens[:count],
        logprobs=table.logprobs[:count],
        topk_ids=table.topk_ids[:count],
        topk_logprobs=table.topk_logprobs[:count],
        noise_seeds=_noise_seeds(kept, table, seed, policy_version)[:count],
        provenance=provenance[:count].astype(np.uint8),
        policy_version=policy_version,
        finish_reason=reason,
    )
    rest = replace(
        request,
        prefix_tokens=np.concatenate([request.prefix_tokens, tokens]).astype(np.int32),
        draft_tokens=kept.tokens[count:].astype(np.int32),
        kept=None,
    )
    return (chunk if count else None), rest


def _noise_seeds(kept: KeptTokens, table: Table, seed: int, policy_version: int) -> SeedArray:
    """`[n]` accepted and renamed tokens keep their noise, unless the rule is lenient."""
    (fresh,) = noise_seeds(np.array([seed], np.uint64), policy_version)
    if kept.lenience is not None:
        return np.full(len(table.tokens), fresh, np.uint64)
    old = kept.noise_seeds[: len(table.tokens)]
    return np.where(table.outcomes == Outcome.DRAWN, fresh, old)


def _end(request: GenerateRequest, tokens: IntArray) -> tuple[int, FinishReason | None]:
    """Where the response ends within `tokens`, and why; all of them and None if it continues."""
    ends = (np.flatnonzero(np.isin(tokens, request.sampling.stop_tokens)) + 1).tolist()[:1]
    rule = request.sampling.stop_rule
    if rule is not None:
        _, state = rule.follow(rule.start, request.prefix_tokens)
        count, _ = rule.follow(state, tokens)
        ends += [] if count is None else [count]
    if ends:
        return min(ends), "stop"
    generated = len(request.prefix_tokens) + len(tokens)
    return len(tokens), "length" if generated >= request.sampling.max_tokens else None

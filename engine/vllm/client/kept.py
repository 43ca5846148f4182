"""Verify-then-resume: kept tokens scored, judged, reported, and the request that goes on with them.

vLLM scores the kept tokens in one prefill; here a prefix of them is accepted, the token behind it
is placed, and what is left becomes an ordinary request with a longer prefix, whose prefill finds
most of the KV that scoring made (prefix caching, in whole blocks). The rejected rest is its draft.

The worker lists the current policy at just the ids that the old one's top-K holds, and draws from
what lies outside of them, so all of the old top-K can be accepted (see
`rollout.acceptance.verify_kept`: the list was chosen without a look at the token).

Numbers: a function of (seed of the request, policy version, position), from streams beside the one
that draws; drawing goes on in its own stream. What is accepted is labelled with the version that
scored it, also when the weights change before the response goes on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.protocol import GenerateRequest, TokenChunk
from engine.sampling import Purpose, forked, uniforms
from engine.vllm.client.requests import Table
from rollout.acceptance import TopKDistributions, accept_lenient, verify_kept
from rollout.trajectory import FinishReason, IntArray, KeptTokens, Provenance


def warm_up() -> None:
    """Load the compiled rules, or compile them: seconds, for which the event loop would stand."""
    none, two = np.full(2, -1, np.int32), np.array([0, 2], np.int32)
    known = TopKDistributions(np.zeros(2, np.float32), none[:, None], np.zeros((2, 1), np.float32))
    verify_kept(
        np.zeros(2, np.int32),
        known,
        known,
        tail_ids=np.zeros(2, np.int32),
        tail_logprobs=np.zeros(2, np.float32),
        offsets=two,
        uniforms=np.zeros((2, 2)),
    )


def settle(
    request: GenerateRequest, kept: KeptTokens, table: Table, seed: int, policy_version: int
) -> tuple[TokenChunk | None, GenerateRequest]:
    """Judge the kept tokens of a request.

    Args:
        request: with its kept tokens, at least one.
        kept: those.
        table: what the current policy says of them.
        seed: of the request.
        policy_version: under which they were scored.

    Returns:
        What is to be reported, with the end if that is reached (None: nothing was accepted or
        placed), and the request that goes on.
    """
    accepted, token, logprob = _judge(request, kept, table, seed, policy_version)
    placed = token >= 0
    count = accepted + placed
    tokens = kept.tokens[:count].astype(np.int32)
    logprobs = table.own[:count].copy()
    provenance = np.full(count, Provenance.VERIFIED, np.uint8)
    if placed:
        tokens[accepted], logprobs[accepted] = token, logprob
        provenance[accepted] = Provenance.SAMPLED
    count, reason = _end(request, tokens)
    chunk = TokenChunk(
        request_id=request.request_id,
        tokens=tokens[:count],
        logprobs=logprobs[:count],
        topk_ids=table.topk_ids[:count].copy(),
        topk_logprobs=table.topk_logprobs[:count].copy(),
        provenance=provenance[:count],
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


def _judge(
    request: GenerateRequest, kept: KeptTokens, table: Table, seed: int, policy_version: int
) -> tuple[int, int, float]:
    """How many stay, the token behind them (-1: just draw on) and its log-probability."""
    size = len(kept)
    seeds = np.full(size, seed, np.uint64)
    position = len(request.prefix_tokens) + np.arange(size)
    accept = uniforms(forked(seeds, Purpose.ACCEPT, policy_version), position)
    offsets = np.array([0, size], np.int32)
    if kept.lenience is not None:
        counts = accept_lenient(kept.logprobs, table.own, offsets, accept, kept.lenience)
        return int(counts[0]), -1, np.nan
    # Copies: of a finished trajectory they are read-only, for which numba would compile anew.
    tokens, ids = kept.tokens.copy(), kept.topk_ids.copy()
    verdicts = verify_kept(
        tokens,
        TopKDistributions(kept.logprobs, ids, kept.topk_logprobs),
        TopKDistributions(table.own, ids, table.known_logprobs),
        tail_ids=table.tail_ids,
        tail_logprobs=table.tail_logprobs,
        offsets=offsets,
        uniforms=np.stack(
            [accept, uniforms(forked(seeds, Purpose.RESIDUAL, policy_version), position)], axis=1
        ),
    )
    return int(verdicts.accepted[0]), int(verdicts.token[0]), float(verdicts.logprob[0])


def _end(request: GenerateRequest, tokens: IntArray) -> tuple[int, FinishReason | None]:
    """Where the response ends within `tokens`, and why; all of them and None if it goes on."""
    stops = np.flatnonzero(np.isin(tokens, request.sampling.stop_tokens))
    if len(stops):
        return int(stops[0]) + 1, "stop"
    written = len(request.prefix_tokens) + len(tokens)
    return len(tokens), "length" if written >= request.sampling.max_tokens else None

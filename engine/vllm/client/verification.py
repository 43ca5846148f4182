"""Verification of kept tokens: judges what vLLM scored, and makes the request that continues.

vLLM scores the kept tokens in one prefill. Here a prefix of them is accepted and the token after it
is drawn from the residual. The rest of the response becomes an ordinary request with a longer
prefix, whose prefill finds most of the KV that scoring computed (prefix caching, in whole blocks).
The rejected tokens are its draft.

The worker scores the current policy at exactly the ids in the old policy's top K, and draws from
what lies outside them, so every token of the old top K can be accepted (the list was chosen without
looking at the token, see `rollout.acceptance.verify_kept`).

The random numbers are a function of (seed of the request, policy version, position). They come from
streams other than the one that draws tokens. Accepted tokens carry the version that scored them,
even if the weights change before the response resumes.
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
    """Compile the acceptance rules, or load them compiled.

    It takes seconds, during which the event loop would be blocked.
    """
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


def judge(
    request: GenerateRequest, kept: KeptTokens, table: Table, seed: int, policy_version: int
) -> tuple[TokenChunk | None, GenerateRequest]:
    """Judge the kept tokens of a request.

    Args:
        request: with its kept tokens, at least one.
        kept: those tokens.
        table: their scores under the current policy.
        seed: of the request.
        policy_version: that scored them.

    Returns:
        The tokens to report, with the finish reason if they end the response (None: nothing was
        accepted or drawn), and the request that continues after them.
    """
    accepted, token, logprob = _accept(request, kept, table, seed, policy_version)
    drawn = token >= 0
    count = accepted + drawn
    tokens = kept.tokens[:count].astype(np.int32)
    logprobs = table.own[:count].copy()
    provenance = np.full(count, Provenance.VERIFIED, np.uint8)
    if drawn:
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


def _accept(
    request: GenerateRequest, kept: KeptTokens, table: Table, seed: int, policy_version: int
) -> tuple[int, int, float]:
    """How many are accepted, the token drawn after them (-1: none) and its log-probability."""
    size = len(kept)
    seeds = np.full(size, seed, np.uint64)
    position = len(request.prefix_tokens) + np.arange(size)
    accept = uniforms(forked(seeds, Purpose.ACCEPT, policy_version), position)
    offsets = np.array([0, size], np.int32)
    if kept.lenience is not None:
        counts = accept_lenient(kept.logprobs, table.own, offsets, accept, kept.lenience)
        return int(counts[0]), -1, np.nan
    # Copies, because arrays of a finished trajectory are read-only: numba would compile again.
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

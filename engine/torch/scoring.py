"""Log-probabilities of given tokens, under the same processed distribution as sampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.engine.protocol import Score, ScoreRequest
from asyncrl.engine.sampling.logits import distributions_of
from asyncrl.engine.sampling.truncation import SamplingColumns
from asyncrl.engine.sampling.verification import KeptColumns
from asyncrl.engine.torch.model import SlotModel


def score_all(
    model: SlotModel,
    requests: Sequence[ScoreRequest],
    *,
    max_tokens: int,
    max_bytes: int,
    listed: int,
    policy_version: int,
) -> list[Score]:
    """Score requests, in their order; contexts go through the model packed, sorted by length.

    One pass has at most `max_tokens` tokens and `max_bytes` of float32 logits, and as much to
    process them; a single longer request runs alone. The model's slots are not used. `listed` is K
    of the engine, at least that of each request.
    """
    order = sorted(range(len(requests)), key=lambda i: _length(requests[i]))
    scores: dict[int, Score] = {}
    batch: list[int] = []
    tokens = logits = 0
    for i in order:
        wanted = len(requests[i].tokens) * model.vocab_size
        full = tokens + _length(requests[i]) > max_tokens or 4 * (logits + wanted) > max_bytes
        if batch and full:
            scores |= _score_batch(model, requests, batch, max_bytes, listed, policy_version)
            batch, tokens, logits = [], 0, 0
        batch.append(i)
        tokens += _length(requests[i])
        logits += wanted
    if batch:
        scores |= _score_batch(model, requests, batch, max_bytes, listed, policy_version)
    return [scores[i] for i in range(len(requests))]


def _length(request: ScoreRequest) -> int:
    return len(request.prompt_tokens) + len(request.tokens)


def _score_batch(
    model: SlotModel,
    requests: Sequence[ScoreRequest],
    batch: list[int],
    max_bytes: int,
    listed: int,
    policy_version: int,
) -> dict[int, Score]:
    chosen = [requests[i] for i in batch]
    lengths = np.array([_length(r) for r in chosen], np.int32)
    counts = np.array([len(r.tokens) for r in chosen], np.int64)
    ends = np.cumsum(lengths, dtype=np.int64)
    # The logits of a token are those of the position before it.
    wanted = np.concatenate(
        [np.arange(end - n, end) - 1 for end, n in zip(ends, counts, strict=True)]
    )
    parts = [part for r in chosen for part in (r.prompt_tokens, r.tokens)]
    packed = np.concatenate(parts).astype(np.int32)
    k = max(1, *(r.sampling.top_k_logprobs for r in chosen))
    sampling = SamplingColumns.of([r.sampling for r in chosen])
    distributions = distributions_of(
        model.forward_fresh(packed, lengths, wanted),
        sampling.at(np.repeat(np.arange(len(chosen)), counts)),
        listed,
        max_bytes,
    )
    targets = KeptColumns.only_tokens(packed[wanted + 1], 0)
    picked = distributions.read(np.arange(len(wanted)), targets).own
    lists = distributions.top_k(k)
    ids, values = lists.ids.cpu().numpy(), lists.logprobs.cpu().numpy()
    spans = [slice(end - n, end) for end, n in zip(np.cumsum(counts), counts, strict=True)]
    return {
        i: Score(
            request_id=request.request_id,
            logprobs=picked[span].copy(),
            topk_ids=ids[span, : request.sampling.top_k_logprobs].copy(),
            topk_logprobs=values[span, : request.sampling.top_k_logprobs].copy(),
            policy_version=policy_version,
        )
        for i, request, span in zip(batch, chosen, spans, strict=True)
    }

"""Attention whose result for one token does not depend on the rest of the batch.

Libraries choose another order of summation for another number of rows, queries or keys, so a row's
logits differ in the last bits with the shape of the batch, which depends on the clock. That moves a
draw about once in 10^6. A model that is loaded `batch_invariant` gives the same bits for any other
rows, whether a context is fed at once or token by token, and with or without drafts:

- Attention runs in `attend`, one query at a time: scores, exponentials and sums go through the
  visible keys in the order of their places. Keys that are hidden from a token add exactly 0.
- Every other operation works on single tokens. It sees a multiple of `TOKENS` tokens for each
  thread, filled up with tokens that nothing attends to, so that matrix products use the same
  kernel for every row, and no element is computed by the scalar code for remainders.

The latter is a property of the libraries and the processor, so `model.load_model` compares bits at
start and refuses a machine on which it does not hold.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.torch.attention import AttendedKeys, ScoreRule
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray

kernel = kernels_of("engine/torch", "rollout")

TOKENS = 32
"""A forward pass feeds a multiple of this per thread: two vectors of AVX-512."""


def missing(tokens: int) -> int:
    """Return the number of padding tokens that a forward pass of this many tokens needs."""
    return -tokens % (TOKENS * torch.get_num_threads())


def filled_up(packed: torch.Tensor) -> torch.Tensor:
    """Pad `[1, T]` with zeros."""
    return torch.nn.functional.pad(packed, (0, missing(packed.shape[1])))


def attention_within(
    reach: AttendedKeys,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: ScoreRule,
) -> torch.Tensor:
    """Attend, on a CPU in float32; return `[T or more, H, E]`.

    `query` is `[H, T or more, D]`; `keys` `[S, J, L, D]` and `values` `[S, J, L, E]` are slots, or
    the packed tokens as one slot. The rule's window is that of `reach`.
    """
    queries = query.transpose(0, 1).contiguous()
    out = torch.zeros(*queries.shape[:2], values.shape[3])
    scale = queries.shape[2] ** -0.5 if rule.scaling is None else rule.scaling
    sinks = np.empty(0, np.float32) if rule.sinks is None else rule.sinks.detach().numpy()
    attend(
        queries.numpy(), keys.contiguous().numpy(), values.contiguous().numpy(),
        reach.slot, reach.first, reach.last, reach.base, reach.hidden,
        np.float32(scale), np.float32(rule.softcap or 0), sinks, out.numpy(),
    )  # fmt: skip
    return out


@kernel.of_sums
def attend(
    queries: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    slot: NDArray[np.int64],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    base: NDArray[np.int64],
    hidden: NDArray[np.bool_],
    scale: np.float32,
    softcap: np.float32,
    sinks: FloatArray,
    out: FloatArray,
) -> None:
    """Compute softmax attention of the first T queries, one after the other.

    `queries` are `[T or more, H, D]`, the rest padding; `keys` `[S, J, L, D]`; `values` `[S, J, L,
    E]`; `slot` to `hidden` as in `AttendedKeys`; `softcap` 0 for none; `sinks` `[H]` scores of keys
    without values, or `[0]`; `out` `[T or more, H, E]` zeros, which receives the results.
    """
    heads, size, width = queries.shape[1], queries.shape[2], values.shape[3]
    group = heads // keys.shape[1]
    scores = np.empty(keys.shape[2], np.float32)
    for t in range(len(slot)):
        row, begin, length = slot[t], first[t], last[t] + 1 - first[t]
        for head in range(heads):
            j = head // group
            top = np.float32(-np.inf)
            for i in range(length):
                score = np.float32(0)
                for d in range(size):
                    score += queries[t, head, d] * keys[row, j, begin + i, d]
                score *= scale
                if softcap > 0:
                    score = softcap * np.tanh(score / softcap)
                column = begin + i - base[t]
                if column >= 0 and column < hidden.shape[1] and hidden[t, column]:
                    score = np.float32(-np.inf)
                scores[i] = score
                top = max(top, score)
            total = 0.0
            if len(sinks):
                top = max(top, sinks[head])
                total += np.exp(sinks[head] - top)
            for i in range(length):
                mass = np.exp(scores[i] - top)
                total += mass
                for d in range(width):
                    out[t, head, d] += mass * values[row, j, begin + i, d]
            for d in range(width):
                out[t, head, d] /= np.float32(total)
